//! How many requests at a time pay. Pure: what was seen, and when, is told to it; it waits for and counts nothing.
//!
//! It climbs while throughput does: half as many again for a moment, kept if at least two fifths of that were gained,
//! else taken back. Some seconds later it tries in the other direction, each time later than the last: a step down from
//! above where it began stays, if it lost less than that share. It takes no step where nobody needed more. A second in
//! which more than a tenth of the answers were refusals makes it fall by three tenths; for ten seconds from there it
//! climbs carefully above the height to which it fell.

use std::time::Duration;

/// Never fewer, unless the cap is lower.
const LEAST: usize = 8;
/// What was seen is judged this often, if there were two answers for each permit, or after [`LONGEST`].
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(2);
/// A longer pause between two answers says nothing of either.
const IDLE: Duration = Duration::from_secs(3);
/// A step up, and a careful one.
const STEP: f64 = 1.5;
const CAREFUL_STEP: f64 = 1.125;
/// The share of a step that must be gained for it to stay.
const GAIN: f64 = 0.4;
/// How long a height is kept after a step that did not pay: first, and at most; it doubles between.
const HOLD: Duration = Duration::from_secs(4);
const LONGEST_HOLD: Duration = Duration::from_secs(32);
/// More refusals than this share make it fall, at most once in [`FALL_EVERY`].
const REFUSED: f64 = 0.1;
const FALL_EVERY: Duration = Duration::from_secs(1);
const FALL: f64 = 0.7;
const CAREFUL: Duration = Duration::from_secs(10);

/// What was seen since the last time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// Requests that ended.
    pub answers: u64,
    /// Those that were throttled, or found no connection.
    pub refused: u64,
    /// What they moved; any measure that adds up.
    pub work: u64,
    /// Whether somebody needed more than there were.
    pub reached: bool,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.answers += other.answers;
        self.refused += other.refused;
        self.work += other.work;
        self.reached |= other.reached;
    }

    #[expect(clippy::cast_precision_loss, reason = "a share of a count")]
    fn refusals(&self) -> f64 {
        if self.answers == 0 { 0.0 } else { self.refused as f64 / self.answers as f64 }
    }
}

/// A step whose gain is not known yet.
#[derive(Clone, Copy, Debug)]
struct Step {
    from: usize,
    /// Work per second before.
    rate: f64,
}

/// How many requests at a time.
#[derive(Debug)]
pub struct Adapt {
    limit: usize,
    start: usize,
    cap: usize,
    /// Since the last judgement, and since the last second ended.
    seen: Seen,
    since: Duration,
    second: Seen,
    second_since: Duration,
    told: Duration,
    step: Option<Step>,
    /// Whether the next step is down, where it may be.
    down: bool,
    hold: Duration,
    held_until: Duration,
    /// Until when, and above which height, it climbs carefully.
    careful: Option<(Duration, usize)>,
}

impl Adapt {
    /// `start` at a time to begin with, up to `cap`. Times are counted from here.
    pub fn new(start: usize, cap: usize) -> Self {
        let cap = cap.max(1);
        Self {
            limit: start.clamp(1, cap),
            start: start.clamp(1, cap),
            cap,
            seen: Seen::default(),
            since: Duration::ZERO,
            second: Seen::default(),
            second_since: Duration::ZERO,
            told: Duration::ZERO,
            step: None,
            down: false,
            hold: HOLD,
            held_until: Duration::ZERO,
            careful: None,
        }
    }

    /// Tells what was seen until `now`. Returns how many it should be from here.
    pub fn tell(&mut self, now: Duration, seen: Seen) -> usize {
        let idle = now.saturating_sub(self.told) > IDLE;
        self.told = now;
        if idle {
            self.begin_anew(now);
            return self.limit;
        }
        self.seen.add(seen);
        self.second.add(seen);
        if now.saturating_sub(self.second_since) >= FALL_EVERY {
            let refusals = self.second.refusals();
            self.second = Seen::default();
            self.second_since = now;
            if refusals > REFUSED {
                self.fall(now);
                return self.limit;
            }
        }
        let took = now.saturating_sub(self.since);
        let enough = self.seen.answers >= 2 * self.limit as u64;
        if (took >= SHORTEST && enough) || took >= LONGEST {
            self.judge(now, took);
        }
        self.limit
    }

    fn begin_anew(&mut self, now: Duration) {
        (self.seen, self.second) = (Seen::default(), Seen::default());
        (self.since, self.second_since) = (now, now);
        if let Some(step) = self.step.take() {
            self.limit = step.from;
        }
    }

    fn fall(&mut self, now: Duration) {
        let from = self.step.take().map_or(self.limit, |step| step.from);
        self.limit = scaled(from, FALL).max(LEAST.min(self.cap)).min(self.limit);
        self.careful = Some((now + CAREFUL, self.limit));
        self.held_until = now + FALL_EVERY;
        self.seen = Seen::default();
        self.since = now;
    }

    fn judge(&mut self, now: Duration, took: Duration) {
        let seen = std::mem::take(&mut self.seen);
        self.since = now;
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = seen.work as f64 / took.as_secs_f64();
        if let Some(Step { from, rate: before }) = self.step.take() {
            #[expect(clippy::cast_precision_loss, reason = "a ratio")]
            let stepped = self.limit as f64 / from as f64 - 1.0;
            if rate < before * (1.0 + GAIN * stepped) {
                self.limit = from;
                self.down = !self.down;
                self.held_until = now + self.hold;
                self.hold = (2 * self.hold).min(LONGEST_HOLD);
                return;
            }
            self.hold = HOLD;
        }
        if !seen.reached || seen.refused > 0 || now < self.held_until {
            return;
        }
        let careful = self.careful.is_some_and(|(until, above)| now < until && self.limit >= above);
        let step = if careful { CAREFUL_STEP } else { STEP };
        let to = if self.down && self.limit > self.start {
            scaled(self.limit, 1.0 / step).max(self.start)
        } else {
            scaled(self.limit, step).max(self.limit + 1).min(self.cap)
        };
        if to != self.limit {
            self.step = Some(Step { from: self.limit, rate });
            self.limit = to;
        } else {
            // At the cap: perhaps fewer are as good.
            self.down = true;
            self.held_until = now + self.hold;
        }
    }
}

fn scaled(limit: usize, by: f64) -> usize {
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small")]
    let scaled = (limit as f64 * by) as usize;
    scaled
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICK: Duration = Duration::from_millis(50);

    /// A store that answers after `latency_s`, at most `most` a second, and refuses what is beyond `refuses_at`.
    struct Model {
        latency_s: f64,
        most: f64,
        refuses_at: f64,
        adapt: Adapt,
        now: Duration,
    }

    impl Model {
        fn new(latency_s: f64, most: f64, start: usize, cap: usize) -> Self {
            Self { latency_s, most, refuses_at: f64::INFINITY, adapt: Adapt::new(start, cap), now: Duration::ZERO }
        }

        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts of a model")]
        fn run(&mut self, seconds: f64, reached: bool) -> Vec<usize> {
            let ticks = (seconds / TICK.as_secs_f64()) as usize;
            let limits = (0..ticks).map(|_| {
                self.now += TICK;
                let rate = (self.adapt.limit as f64 / self.latency_s).min(self.most);
                let answers = (rate * TICK.as_secs_f64()) as u64;
                let refused = ((rate - self.refuses_at).max(0.0) * TICK.as_secs_f64()) as u64;
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
}
