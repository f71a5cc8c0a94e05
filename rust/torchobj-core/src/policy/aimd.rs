//! Adapts the limit on concurrent requests to the measured throughput (AIMD). Pure: the caller passes in samples and times.
//!
//! **Probing.** While demand exceeds the limit, the limit is increased by half as a trial. If throughput grew by at least
//! two fifths of that share, the step is kept and the next one follows. Otherwise the limit returns to its previous
//! value, and the opposite direction is tried after a hold time, which doubles with each failed step. Steps down are
//! tried above the start value only, and are kept if throughput fell by less than two fifths of their share. The limit
//! does not change while demand stays below it.
//!
//! **Start.** Steps double the limit and are evaluated after 50 ms, until the first step fails, responses are refused or
//! the limit reaches its cap.
//!
//! **Decrease.** If more than a tenth of the responses of a second, and at least eight, were refusals, the limit is
//! decreased to seven tenths. A single request that is refused repeatedly does not decrease it.
//!
//! **Restore.** As soon as few responses are refusals, the limit returns to its value before the decrease, in steps that
//! need not increase throughput. The steps are small for the first ten seconds after a decrease.
//!
//! **Refusals that do not depend on load.** If decreases cost throughput and requests are still refused, the limit
//! returns to its value before the decreases at once, and refusals are ignored for a time that doubles with each
//! occurrence. If most responses are refusals, the limit stays low.

use std::time::Duration;

/// Minimum limit, unless the cap is lower.
const MIN_LIMIT: usize = 8;
/// Samples are evaluated after at least [`MIN_INTERVAL`], once there are two responses for each permit, and after
/// [`MAX_INTERVAL`] in any case.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
const MAX_INTERVAL: Duration = Duration::from_secs(2);
/// [`MIN_INTERVAL`] at the start.
const START_INTERVAL: Duration = Duration::from_millis(50);
/// After a longer time without a sample, the measurement restarts.
const IDLE: Duration = Duration::from_secs(3);
/// Factor of a step up, and of a step up shortly after a decrease.
const STEP: f64 = 1.5;
const SMALL_STEP: f64 = 1.125;
/// Factor of a step up at the start.
const START_STEP: f64 = 2.0;
/// Fraction of a step that throughput must gain for the step to be kept.
const MIN_GAIN: f64 = 0.4;
/// Hold time after a failed step, which doubles up to [`MAX_HOLD`].
const HOLD: Duration = Duration::from_secs(4);
const MAX_HOLD: Duration = Duration::from_secs(32);
/// A larger share of refusals decreases the limit, at most once in [`DECREASE_INTERVAL`].
const DECREASE_SHARE: f64 = 0.1;
/// Fewer refusals within [`DECREASE_INTERVAL`] do not decrease the limit.
const MIN_REFUSALS: u64 = 8;
/// With a larger share of refusals the limit is not increased.
const INCREASE_SHARE: f64 = DECREASE_SHARE / 4.0;
/// With a larger share of refusals the limit stays low even if that costs throughput.
const STAY_LOW_SHARE: f64 = 0.5;
const DECREASE_INTERVAL: Duration = Duration::from_secs(1);
const DECREASE: f64 = 0.7;
/// Steps are small for this long after a decrease.
const SMALL_STEPS: Duration = Duration::from_secs(10);

/// Counts since the previous sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Requests that ended.
    pub responses: u64,
    /// Requests that were throttled or failed to connect.
    pub refused: u64,
    /// Work of the requests that succeeded, in any additive unit.
    pub work: u64,
    /// Whether demand exceeded the limit.
    pub demand_exceeded: bool,
}

impl Sample {
    fn add(&mut self, other: Self) {
        self.responses += other.responses;
        self.refused += other.refused;
        self.work += other.work;
        self.demand_exceeded |= other.demand_exceeded;
    }

    /// Work per second.
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    fn throughput(&self, took: Duration) -> f64 {
        self.work as f64 / took.as_secs_f64()
    }

    /// Share of refusals among the responses.
    #[expect(clippy::cast_precision_loss, reason = "a share of a count")]
    fn refused_share(&self) -> f64 {
        if self.responses == 0 { 0.0 } else { self.refused as f64 / self.responses as f64 }
    }
}

/// A change of the limit whose effect on throughput is not measured yet.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// The limit before.
    from: usize,
    /// Work per second before.
    throughput: f64,
}

impl Step {
    /// Returns whether `throughput` at `limit` is too low for this step to be kept.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    fn failed(&self, limit: usize, throughput: f64) -> bool {
        let stepped = limit as f64 / self.from as f64 - 1.0;
        throughput < self.throughput * (1.0 + MIN_GAIN * stepped)
    }
}

/// A limit on concurrent requests that adapts. All times are durations since its creation.
#[derive(Debug, Default)]
pub struct Aimd {
    limit: usize,
    start: usize,
    cap: usize,
    /// No step has failed, the limit was not decreased, and it has not been at the cap.
    starting: bool,
    /// Counts since the last evaluation.
    total: Sample,
    total_since: Duration,
    /// Counts since the last check for refusals.
    second: Sample,
    second_since: Duration,
    updated_at: Duration,
    step: Option<Step>,
    /// Whether the next step is down, if the limit is above its start.
    down: bool,
    hold: Duration,
    hold_until: Duration,
    /// Until when steps are small, and from which limit on.
    small_steps: Option<(Duration, usize)>,
    /// The limit and the throughput before the first decrease since few responses were refusals.
    decreased: Option<Step>,
    /// The limit before the decrease, while it is being restored.
    restore_to: Option<usize>,
    /// Until when refusals are ignored, because they did not depend on load; and for how long the next time.
    ignore_until: Duration,
    ignore_for: Duration,
}

impl Aimd {
    /// A limit that starts at `start` and grows up to `cap`.
    pub fn new(start: usize, cap: usize) -> Self {
        let cap = cap.max(1);
        Self {
            limit: start.clamp(1, cap),
            start: start.clamp(1, cap),
            cap,
            starting: true,
            hold: HOLD,
            ignore_for: HOLD,
            ..Self::default()
        }
    }

    /// Adds the counts between the previous call and `now`. Returns the limit from now on.
    pub fn update(&mut self, now: Duration, sample: Sample) -> usize {
        let idle = now.saturating_sub(self.updated_at) > IDLE;
        self.updated_at = now;
        if idle {
            self.restart(now);
            return self.limit;
        }
        self.total.add(sample);
        self.second.add(sample);
        let second = now.saturating_sub(self.second_since);
        if second >= DECREASE_INTERVAL {
            let sample = std::mem::take(&mut self.second);
            self.second_since = now;
            let refuses = sample.refused_share() > DECREASE_SHARE && sample.refused >= MIN_REFUSALS;
            if refuses && now >= self.ignore_until {
                self.decrease(now, sample, second);
                return self.limit;
            }
        }
        let took = now.saturating_sub(self.total_since);
        let enough = self.total.responses >= 2 * self.limit as u64;
        let min_interval = if self.starting { START_INTERVAL } else { MIN_INTERVAL };
        if (took >= min_interval && enough) || took >= MAX_INTERVAL {
            self.evaluate(now, took);
        }
        self.limit
    }

    fn restart(&mut self, now: Duration) {
        (self.total, self.second) = (Sample::default(), Sample::default());
        (self.total_since, self.second_since) = (now, now);
        if let Some(step) = self.step.take() {
            self.limit = step.from;
        }
    }

    fn decrease(&mut self, now: Duration, sample: Sample, took: Duration) {
        self.starting = false;
        let from = self.step.take().map_or(self.limit, |step| step.from);
        let throughput = sample.throughput(took);
        self.total = Sample::default();
        self.total_since = now;
        let was_futile =
            |first: &mut Step| sample.refused_share() < STAY_LOW_SHARE && first.failed(self.limit, throughput);
        if let Some(first) = self.decreased.take_if(was_futile) {
            self.limit = first.from;
            self.restore_to = None;
            self.ignore_until = now + self.ignore_for;
            self.ignore_for = (2 * self.ignore_for).min(MAX_HOLD);
            return;
        }
        if self.decreased.is_none() {
            self.decreased = Some(Step { from, throughput });
            self.restore_to = Some(from);
            if now > self.ignore_until + MAX_HOLD {
                self.ignore_for = HOLD;
            }
        }
        self.limit = scaled(from, DECREASE).max(MIN_LIMIT.min(self.cap)).min(self.limit);
        self.small_steps = Some((now + SMALL_STEPS, self.limit));
        self.hold_until = now + DECREASE_INTERVAL;
    }

    fn evaluate(&mut self, now: Duration, took: Duration) {
        let total = std::mem::take(&mut self.total);
        self.total_since = now;
        let throughput = total.throughput(took);
        if let Some(step) = self.step.take() {
            if step.failed(self.limit, throughput) {
                self.limit = step.from;
                if std::mem::take(&mut self.starting) {
                    // A smaller step may succeed.
                    return;
                }
                self.down = !self.down;
                self.hold_until = now + self.hold;
                self.hold = (2 * self.hold).min(MAX_HOLD);
                return;
            }
            self.hold = HOLD;
        }
        let few_refused = total.refused_share() <= INCREASE_SHARE;
        if !total.demand_exceeded || now < self.hold_until || !(few_refused || now < self.ignore_until) {
            return;
        }
        let small = self.small_steps.is_some_and(|(until, from)| now < until && self.limit >= from);
        let step = match (small, self.starting) {
            (true, _) => SMALL_STEP,
            (_, true) => START_STEP,
            _ => STEP,
        };
        if let Some(restore_to) = self.restore_to {
            self.decreased = None;
            self.limit = scaled(self.limit, step).max(self.limit + 1).min(restore_to);
            self.restore_to = Some(restore_to).filter(|restore_to| self.limit < *restore_to);
            return;
        }
        let to = if self.down && self.limit > self.start {
            scaled(self.limit, 1.0 / step).max(self.start)
        } else {
            scaled(self.limit, step).max(self.limit + 1).min(self.cap)
        };
        if to != self.limit {
            self.step = Some(Step { from: self.limit, throughput });
            self.limit = to;
        } else {
            // At the cap: the next step tests whether a lower limit has the same throughput.
            self.starting = false;
            self.down = true;
            self.hold_until = now + self.hold;
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
