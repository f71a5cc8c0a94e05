//! The limit against models of stores: what they can do, and what they refuse.

use proptest::prelude::*;

use super::*;

const TICK: Duration = Duration::from_millis(50);

/// A store that answers after `latency_s`, at most `most` a second, and refuses what is beyond `refuses_at`, and a
/// share of the rest.
struct Model {
    latency_s: f64,
    most: f64,
    refuses_at: f64,
    refuses_share: f64,
    adapt: Adapt,
    now: Duration,
}

impl Model {
    fn new(latency_s: f64, most: f64, start: usize, cap: usize) -> Self {
        let adapt = Adapt::new(start, cap);
        Self { latency_s, most, refuses_at: f64::INFINITY, refuses_share: 0.0, adapt, now: Duration::ZERO }
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts of a model")]
    fn run(&mut self, seconds: f64, reached: bool) -> Vec<usize> {
        let ticks = (seconds / TICK.as_secs_f64()) as usize;
        let limits = (0..ticks).map(|_| {
            self.now += TICK;
            let rate = (self.adapt.limit as f64 / self.latency_s).min(self.most);
            let answers = (rate * TICK.as_secs_f64()) as u64;
            let beyond = (rate - self.refuses_at).max(0.0);
            let refused = ((beyond + (rate - beyond) * self.refuses_share) * TICK.as_secs_f64()) as u64;
            self.adapt.tell(self.now, Seen { answers, refused, work: answers - refused, reached })
        });
        limits.collect()
    }
}

#[test]
fn it_climbs_to_the_cap_within_two_seconds_where_that_pays() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    assert_eq!(model.run(2.0, true).last(), Some(&256));
}

#[test]
fn it_stays_near_what_the_store_can_do_and_probes_seldom() {
    let mut model = Model::new(0.02, 4000.0, 64, 256);
    model.run(2.0, true);
    let limits = model.run(60.0, true);
    // 80 at a time are enough.
    assert!(limits.iter().all(|limit| (64..=144).contains(limit)), "{limits:?}");
    let probing = limits.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!((2..=6).contains(&probing), "{probing}");
}

#[test]
fn it_climbs_again_when_the_store_can_do_more() {
    let mut model = Model::new(0.02, 3000.0, 64, 256);
    model.run(10.0, true);
    model.most = f64::INFINITY;
    assert_eq!(model.run(35.0, true).last(), Some(&256));
}

#[test]
fn it_comes_down_again_where_fewer_are_as_good_and_stays_where_they_are_not() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.run(2.0, true);
    let limits = model.run(60.0, true);
    let below = limits.iter().filter(|limit| **limit < 256).count();
    assert!(below * 20 < limits.len(), "{below} of {}", limits.len());
    model.most = 4000.0;
    assert!(model.run(120.0, true).last() <= Some(&144));
}

#[test]
fn it_does_not_climb_where_nobody_needs_more() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    assert!(model.run(20.0, false).iter().all(|limit| *limit == 64));
}

#[test]
fn a_tenth_of_refusals_makes_it_fall_once_a_second_and_no_further_than_eight() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.refuses_at = 0.0;
    let limits = model.run(10.0, true);
    let falls: Vec<_> = limits.windows(2).filter(|pair| pair[1] < pair[0]).collect();
    assert!(falls.len() <= 10 && falls.iter().all(|pair| pair[1] * 10 >= pair[0] * 6), "{limits:?}");
    assert_eq!(limits.last(), Some(&LEAST));
    model.refuses_at = f64::INFINITY;
    assert!(model.run(20.0, true).last() > Some(&64));
}

#[test]
fn fewer_refusals_do_not_make_it_fall() {
    let mut adapt = Adapt::new(64, 256);
    for tick in 1..200 {
        let seen = Seen { answers: 100, refused: 10, work: 90, reached: true };
        assert_eq!(adapt.tell(TICK * tick, seen), 64);
    }
}

#[test]
fn a_store_that_refuses_above_a_rate_is_used_near_it() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.refuses_at = 2000.0;
    model.run(20.0, true);
    let limits = model.run(60.0, true);
    // 40 at a time are what it takes.
    assert!(limits.iter().all(|limit| (24..=60).contains(limit)), "{limits:?}");
}

#[test]
fn the_limit_is_restored_within_60_round_trips_after_a_burst_of_refusals() {
    let mut model = Model::new(0.125, 512.0, 64, 256);
    model.refuses_at = 0.0;
    assert_eq!(model.run(15.0, true).last(), Some(&LEAST));
    model.refuses_at = f64::INFINITY;
    // From 8 by steps of an eighth, two or three round trips each.
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
fn refusals_that_do_not_depend_on_the_load_do_not_keep_the_limit_low() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.refuses_share = 0.2;
    model.run(10.0, true);
    let limits = model.run(60.0, true);
    let low = limits.iter().filter(|limit| **limit < 64).count();
    assert_eq!(low, 0, "{limits:?}");
    assert_eq!(limits.iter().max(), Some(&256));
}

#[test]
fn one_request_that_is_refused_again_and_again_does_not_decrease_the_limit() {
    let mut adapt = Adapt::new(64, 256);
    for tick in 1..200 {
        let seen = Seen { answers: 1, refused: 1, work: 0, reached: false };
        assert_eq!(adapt.tell(4 * TICK * tick, seen), 64);
    }
}

#[test]
fn a_pause_is_no_reason_to_judge_a_step() {
    let mut model = Model::new(0.02, f64::INFINITY, 64, 256);
    model.run(0.3, true);
    assert_eq!(model.adapt.limit, 96);
    model.now += Duration::from_secs(100);
    assert_eq!(model.run(0.05, true), [64]);
    assert_eq!(model.run(2.0, true).last(), Some(&256));
}

proptest! {
    #[test]
    fn it_keeps_its_bounds_whatever_it_sees(
        start in 1usize..300,
        cap in 1usize..300,
        told in prop::collection::vec((0u64..5000, 0u64..1000, 0u64..1000, 0u64..1 << 40, any::<bool>()), 1..200),
    ) {
        let (mut adapt, mut now) = (Adapt::new(start, cap), Duration::ZERO);
        let low = start.min(cap).min(LEAST);
        for (ms, answers, refused, work, reached) in told {
            now += Duration::from_millis(ms);
            let limit = adapt.tell(now, Seen { answers, refused: refused.min(answers), work, reached });
            prop_assert!(low <= limit && limit <= cap, "{} <= {} <= {}", low, limit, cap);
        }
    }
}
