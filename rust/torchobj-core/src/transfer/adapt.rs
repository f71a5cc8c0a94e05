//! How many requests at a time pay. Pure: what was seen, and when, is told to it; it waits for and counts nothing.
//!
//! It climbs while throughput does: half as many again for a moment, kept if at least two fifths of that were gained,
//! else taken back. Some seconds later it tries in the other direction, each time later than the last: a step down from
//! above where it began stays, if it lost less than that share. It takes no step where demand did not exceed the limit.
//!
//! A second in which more than a tenth of the answers, and at least eight, were refusals decreases the limit by three
//! tenths: one request that is refused again and again does not. As soon as few are refused the limit is restored, in
//! steps that need not gain anything, small ones for the first ten seconds. Where decreases cost throughput and requests
//! are still refused, the refusals do not depend on the load: the limit is restored at once, and kept for some seconds,
//! each time longer. If most requests are refused it stays low.

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
/// A larger share of refusals decreases the limit, at most once in [`FALL_EVERY`].
const REFUSED: f64 = 0.1;
/// Fewer refusals in that time are too few to be a share of anything.
const LEAST_REFUSALS: u64 = 8;
/// With a larger share of refusals the limit is not increased.
const CALM: f64 = REFUSED / 4.0;
/// With a larger share the limit stays low whatever that costs.
const MOST_REFUSED: f64 = 0.5;
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
    /// What those that succeeded moved; any measure that adds up.
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

    /// Work per second.
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    fn rate(&self, took: Duration) -> f64 {
        self.work as f64 / took.as_secs_f64()
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

impl Step {
    /// Whether a rate at a limit is too low for this step to stay.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    fn fails(&self, limit: usize, rate: f64) -> bool {
        let stepped = limit as f64 / self.from as f64 - 1.0;
        rate < self.rate * (1.0 + GAIN * stepped)
    }
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
    /// The decreases since few were refused: from where, and the rate there.
    fallen: Option<Step>,
    /// The limit before, while that is being restored.
    restore_to: Option<usize>,
    /// Until when refusals do not decrease it, since they did not depend on it; and for how long the next time.
    keep_until: Duration,
    keep: Duration,
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
            fallen: None,
            restore_to: None,
            keep_until: Duration::ZERO,
            keep: HOLD,
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
        let second = now.saturating_sub(self.second_since);
        if second >= FALL_EVERY {
            let seen = std::mem::take(&mut self.second);
            self.second_since = now;
            if seen.refusals() > REFUSED && seen.refused >= LEAST_REFUSALS && now >= self.keep_until {
                self.fall(now, seen, second);
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

    fn fall(&mut self, now: Duration, seen: Seen, took: Duration) {
        let from = self.step.take().map_or(self.limit, |step| step.from);
        let rate = seen.rate(took);
        self.seen = Seen::default();
        self.since = now;
        let in_vain = |fallen: &mut Step| seen.refusals() < MOST_REFUSED && fallen.fails(self.limit, rate);
        if let Some(fallen) = self.fallen.take_if(in_vain) {
            self.limit = fallen.from;
            self.restore_to = None;
            self.keep_until = now + self.keep;
            self.keep = (2 * self.keep).min(LONGEST_HOLD);
            return;
        }
        if self.fallen.is_none() {
            self.fallen = Some(Step { from, rate });
            self.restore_to = Some(from);
            if now > self.keep_until + LONGEST_HOLD {
                self.keep = HOLD;
            }
        }
        self.limit = scaled(from, FALL).max(LEAST.min(self.cap)).min(self.limit);
        self.careful = Some((now + CAREFUL, self.limit));
        self.held_until = now + FALL_EVERY;
    }

    fn judge(&mut self, now: Duration, took: Duration) {
        let seen = std::mem::take(&mut self.seen);
        self.since = now;
        let rate = seen.rate(took);
        if let Some(step) = self.step.take() {
            if step.fails(self.limit, rate) {
                self.limit = step.from;
                self.down = !self.down;
                self.held_until = now + self.hold;
                self.hold = (2 * self.hold).min(LONGEST_HOLD);
                return;
            }
            self.hold = HOLD;
        }
        let calm = seen.refusals() <= CALM;
        if !seen.reached || now < self.held_until || !(calm || now < self.keep_until) {
            return;
        }
        let careful = self.careful.is_some_and(|(until, above)| now < until && self.limit >= above);
        let step = if careful { CAREFUL_STEP } else { STEP };
        if let Some(height) = self.restore_to {
            self.fallen = None;
            self.limit = scaled(self.limit, step).max(self.limit + 1).min(height);
            self.restore_to = Some(height).filter(|height| self.limit < *height);
            return;
        }
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
mod tests;
