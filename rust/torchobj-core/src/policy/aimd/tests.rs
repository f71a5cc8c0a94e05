//! The limit against models of stores with a maximum throughput and a rate of refusals.

use proptest::prelude::*;

use super::*;

const TICK: Duration = Duration::from_millis(50);

/// A store that responds after `latency_s`, to at most `max_rate` requests per second. It refuses the requests above
/// `refuses_at` per second, and `refuses_share` of the others.
struct Model {
    latency_s: f64,
    max_rate: f64,
    refuses_at: f64,
    refuses_share: f64,
    aimd: Aimd,
    now: Duration,
}

impl Model {
    fn new(latency_s: f64, max_rate: f64, start: usize, cap: usize) -> Self {
        let aimd = Aimd::new(start, cap);
        Self { latency_s, max_rate, refuses_at: f64::INFINITY, refuses_share: 0.0, aimd, now: Duration::ZERO }
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts of a model")]
    fn run(&mut self, seconds: f64, demand_exceeded: bool) -> Vec<usize> {
        let ticks = (seconds / TICK.as_secs_f64()) as usize;
        let limits = (0..ticks).map(|_| {
            self.now += TICK;
            let rate = (self.aimd.limit as f64 / self.latency_s).min(self.max_rate);
            let responses = (rate * TICK.as_secs_f64()) as u64;
            let beyond = (rate - self.refuses_at).max(0.0);
            let refused = ((beyond + (rate - beyond) * self.refuses_share) * TICK.as_secs_f64()) as u64;
            let work = responses - refused;
            self.aimd.update(self.now, Sample { responses, refused, work, demand_exceeded })
        });
        limits.collect()
    }
}

#[test]
fn the_limit_grows_to_the_cap_within_two_seconds_while_throughput_grows() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    assert_eq!(model.run(2.0, true).last(), Some(&256));
}

#[test]
fn the_limit_doubles_until_a_step_fails() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 1024);
    assert_eq!(model.run(0.25, true), [128, 256, 512, 1024, 1024]);
    // 200 concurrent requests saturate the store.
    let mut model = Model::new(0.02, 10_000.0, 64, 1024);
    let limits = model.run(0.5, true);
    assert_eq!((limits.iter().max(), limits.last()), (Some(&512), Some(&256)), "{limits:?}");
}

#[test]
fn a_lower_limit_is_tested_by_the_usual_step_after_the_start() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 512);
    model.run(0.25, true);
    assert_eq!(model.run(6.0, true).into_iter().min(), Some(341), "two thirds of the cap, once");
}

#[test]
fn the_limit_stays_near_the_saturation_point_of_the_store_and_probes_rarely() {
    let mut model = Model::new(0.02, 4000.0, 64, 256);
    model.run(2.0, true);
    let limits = model.run(60.0, true);
    // 80 concurrent requests saturate the store.
    assert!(limits.iter().all(|limit| (64..=144).contains(limit)), "{limits:?}");
    let probing = limits.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!((2..=6).contains(&probing), "{probing}");
}

#[test]
fn the_limit_grows_again_when_the_store_becomes_faster() {
    let mut model = Model::new(0.02, 3000.0, 64, 256);
    model.run(10.0, true);
    model.max_rate = f64::INFINITY;
    assert_eq!(model.run(35.0, true).last(), Some(&256));
}

#[test]
fn the_limit_comes_down_if_that_costs_no_throughput_and_stays_otherwise() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.run(2.0, true);
    let limits = model.run(60.0, true);
    let below = limits.iter().filter(|limit| **limit < 256).count();
    assert!(below * 20 < limits.len(), "{below} of {}", limits.len());
    model.max_rate = 4000.0;
    assert!(model.run(120.0, true).last() <= Some(&144));
}

#[test]
fn the_limit_does_not_grow_while_demand_is_below_it() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    assert!(model.run(20.0, false).iter().all(|limit| *limit == 64));
}

#[test]
fn many_refusals_decrease_the_limit_once_a_second_down_to_eight() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.refuses_at = 0.0;
    let limits = model.run(10.0, true);
    let decreases: Vec<_> = limits.windows(2).filter(|pair| pair[1] < pair[0]).collect();
    assert!(decreases.len() <= 10 && decreases.iter().all(|pair| pair[1] * 10 >= pair[0] * 6), "{limits:?}");
    assert_eq!(limits.last(), Some(&MIN_LIMIT));
    model.refuses_at = f64::INFINITY;
    assert!(model.run(20.0, true).last() > Some(&64));
}

#[test]
fn a_tenth_of_refusals_does_not_decrease_the_limit() {
    let mut aimd = Aimd::new(64, 256);
    for tick in 1..200 {
        let sample = Sample { responses: 100, refused: 10, work: 90, demand_exceeded: true };
        assert_eq!(aimd.update(TICK * tick, sample), 64);
    }
}

#[test]
fn the_limit_stays_near_the_rate_above_which_the_store_refuses() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.refuses_at = 2000.0;
    model.run(20.0, true);
    let limits = model.run(60.0, true);
    // The store accepts 40 concurrent requests.
    assert!(limits.iter().all(|limit| (24..=60).contains(limit)), "{limits:?}");
}

#[test]
fn the_limit_is_restored_within_60_round_trips_after_a_burst_of_refusals() {
    let mut model = Model::new(0.125, 512.0, 64, 256);
    model.refuses_at = 0.0;
    assert_eq!(model.run(15.0, true).last(), Some(&MIN_LIMIT));
    model.refuses_at = f64::INFINITY;
    // From 8, in steps of an eighth that take two or three round trips each.
    assert!(model.run(60.0 * 0.125, true).last() >= Some(&64));
}

#[test]
fn the_limit_is_restored_while_one_request_in_fifty_is_still_refused() {
    let mut model = Model::new(0.02, 3200.0, 64, 256);
    model.refuses_at = 0.0;
    model.run(15.0, true);
    (model.refuses_at, model.refuses_share) = (f64::INFINITY, 0.02);
    assert!(model.run(8.0, true).last() >= Some(&64));
}

#[test]
fn refusals_that_do_not_depend_on_load_do_not_keep_the_limit_low() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.refuses_share = 0.2;
    model.run(10.0, true);
    let limits = model.run(60.0, true);
    let low = limits.iter().filter(|limit| **limit < 64).count();
    assert_eq!(low, 0, "{limits:?}");
    assert_eq!(limits.iter().max(), Some(&256));
}

#[test]
fn one_request_that_is_refused_repeatedly_does_not_decrease_the_limit() {
    let mut aimd = Aimd::new(64, 256);
    for tick in 1..200 {
        let sample = Sample { responses: 1, refused: 1, work: 0, demand_exceeded: false };
        assert_eq!(aimd.update(4 * TICK * tick, sample), 64);
    }
}

#[test]
fn a_step_is_not_evaluated_after_a_pause() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.run(0.05, true);
    assert_eq!(model.aimd.limit, 128);
    model.now += Duration::from_secs(100);
    assert_eq!(model.run(0.05, true), [64]);
    assert_eq!(model.run(2.0, true).last(), Some(&256));
}

proptest! {
    #[test]
    fn the_limit_stays_within_its_bounds_for_any_samples(
        start in 1usize..300,
        cap in 1usize..300,
        samples in prop::collection::vec((0u64..5000, 0u64..1000, 0u64..1000, 0u64..1 << 40, any::<bool>()), 1..200),
    ) {
        let (mut aimd, mut now) = (Aimd::new(start, cap), Duration::ZERO);
        let low = start.min(cap).min(MIN_LIMIT);
        for (ms, responses, refused, work, demand_exceeded) in samples {
            now += Duration::from_millis(ms);
            let sample = Sample { responses, refused: refused.min(responses), work, demand_exceeded };
            let limit = aimd.update(now, sample);
            prop_assert!(low <= limit && limit <= cap, "{} <= {} <= {}", low, limit, cap);
        }
    }
}
