//! The hedge delay, measured from the responses of one client, and the budget of second requests. Sends nothing.
//!
//! Source of the rule: Dean and Barroso, "The Tail at Scale" (CACM 2013). A second request after the 95th percentile adds
//! at most 5 % of requests and removes most of the tail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::histogram::Histogram;

/// Upper bounds of the size classes, in bytes: each class of requests has its own delay.
const SIZES: [u64; 2] = [512 << 10, 4 << 20];
/// Minimum number of samples of a class before its requests are hedged.
const MIN_SAMPLES: u64 = 100;
/// Number of samples after which the delay is computed again, and after which old samples are halved in weight.
const REFRESH_SAMPLES: u64 = 64;
const HALVE_SAMPLES: u64 = 1024;
/// The delay is this quantile, and at least twice the median: a second request sent earlier gains nothing.
const QUANTILE: f64 = 0.95;
const TIMES_MEDIAN: u32 = 2;
/// Minimum delay: shorter delays are often caused by this machine.
const MIN_DELAY: Duration = Duration::from_millis(10);
/// The budget, in thousandths of a second request: added per response, its maximum, and the cost of a second request.
const ADDED: u64 = 50;
const MAX_BUDGET: u64 = 10_000;
const COST: u64 = 1000;

/// The hedge delays of one client.
#[derive(Debug, Default)]
pub(crate) struct HedgeDelay {
    classes: [SizeClass; 3],
    /// Thousandths of a second request.
    budget: AtomicU64,
}

#[derive(Debug, Default)]
struct SizeClass {
    recent: Histogram,
    samples: AtomicU64,
    /// 0 until there are enough samples.
    delay_us: AtomicU64,
}

impl HedgeDelay {
    fn class(&self, bytes: u64) -> &SizeClass {
        &self.classes[SIZES.partition_point(|bound| bytes > *bound)]
    }

    /// The hedge delay of a request for `bytes` bytes; `None` until there are enough samples.
    pub(crate) fn delay(&self, bytes: u64) -> Option<Duration> {
        match self.class(bytes).delay_us.load(Ordering::Relaxed) {
            0 => None,
            us => Some(Duration::from_micros(us)),
        }
    }

    /// Records that the response to a request for `bytes` bytes arrived after `took`.
    pub(crate) fn record(&self, bytes: u64, took: Duration) {
        if self.budget.load(Ordering::Relaxed) < MAX_BUDGET {
            self.budget.fetch_add(ADDED, Ordering::Relaxed);
        }
        let class = self.class(bytes);
        class.recent.add(took);
        let samples = class.samples.fetch_add(1, Ordering::Relaxed) + 1;
        if samples == MIN_SAMPLES || (samples > MIN_SAMPLES && samples.is_multiple_of(REFRESH_SAMPLES)) {
            class.refresh();
        }
        if samples.is_multiple_of(HALVE_SAMPLES) {
            class.recent.halve();
        }
    }

    /// Takes the cost of a second request from the budget. Returns `false` if it does not suffice.
    pub(crate) fn spend(&self) -> bool {
        self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |budget| budget.checked_sub(COST)).is_ok()
    }

    /// Returns the cost of a second request that was not sent to the budget.
    pub(crate) fn put_back(&self) {
        self.budget.fetch_add(COST, Ordering::Relaxed);
    }
}

impl SizeClass {
    fn refresh(&self) {
        let counts = self.recent.counts();
        if let Some((median, quantile)) = counts.quantile(0.5).zip(counts.quantile(QUANTILE)) {
            let delay = quantile.max(TIMES_MEDIAN * median).max(MIN_DELAY);
            self.delay_us.store(u64::try_from(delay.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_size_class_has_no_delay_before_it_has_enough_samples() {
        let hedge_delay = HedgeDelay::default();
        for _ in 0..MIN_SAMPLES - 1 {
            hedge_delay.record(1000, 20 * MS);
        }
        assert_eq!(hedge_delay.delay(1000), None);
        hedge_delay.record(1000, 20 * MS);
        let delay = hedge_delay.delay(SIZES[0]).unwrap();
        assert!(delay >= 40 * MS && delay < 50 * MS, "{delay:?}");
        assert_eq!((hedge_delay.delay(SIZES[0] + 1), hedge_delay.delay(1 << 30)), (None, None));
    }

    #[test]
    fn one_slow_response_in_a_hundred_does_not_change_the_delay_and_a_slower_store_does() {
        let hedge_delay = HedgeDelay::default();
        for index in 0..2000 {
            hedge_delay.record(1, if index % 100 == 0 { 300 * MS } else { 20 * MS });
        }
        assert!(hedge_delay.delay(1).unwrap() < 50 * MS);
        for _ in 0..5000 {
            hedge_delay.record(1, 100 * MS);
        }
        assert!(hedge_delay.delay(1).unwrap() > 199 * MS);
    }

    #[test]
    fn the_delay_of_a_fast_store_has_a_minimum() {
        let hedge_delay = HedgeDelay::default();
        (0..1000).for_each(|_| hedge_delay.record(1, MS / 10));
        assert_eq!(hedge_delay.delay(1), Some(MIN_DELAY));
    }

    #[test]
    fn the_budget_allows_one_request_in_twenty_and_ten_at_once() {
        let hedge_delay = HedgeDelay::default();
        assert!(!hedge_delay.spend());
        let mut spent = 0;
        for _ in 0..1000 {
            hedge_delay.record(1, MS);
            spent += u32::from(hedge_delay.spend());
        }
        assert_eq!(spent, 50);
        (0..1000).for_each(|_| hedge_delay.record(1, MS));
        assert_eq!((0..100).filter(|_| hedge_delay.spend()).count(), 10);
        hedge_delay.put_back();
        assert!(hedge_delay.spend());
    }
}
