//! When an answer is late, and whether asking again is affordable. Learns from the answers of one client; asks nothing.
//!
//! Source of the rule: Dean and Barroso, "The Tail at Scale" (CACM 2013): to ask again after the 95th percentile costs
//! at most five more requests in a hundred, and cuts most of the tail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::histogram::Histogram;

/// Answers are late against others of like size: up to the first bound, up to the second, beyond.
const SIZES: [u64; 2] = [512 << 10, 4 << 20];
/// So many answers must be known before one is late.
const SAMPLES: u64 = 100;
/// The limit is found anew after so many answers, and half of what was known is forgotten after so many more.
const REFRESH: u64 = 64;
const FORGET: u64 = 1024;
/// Later than this share of the answers, and than twice the usual: what differs by less gains nothing.
const SHARE: f64 = 0.95;
const TIMES_USUAL: u32 = 2;
/// A faster answer is never late: within this, the delay is as likely this machine's own.
const FLOOR: Duration = Duration::from_millis(10);
/// Thousandths of a second request that each request earns, and what is kept of that.
const EARNED: u64 = 50;
const SAVED: u64 = 10_000;
const SPENT: u64 = 1000;

/// What is known of the answers of one client.
#[derive(Debug, Default)]
pub(crate) struct Lateness {
    classes: [Class; 3],
    /// Thousandths of a second request.
    earned: AtomicU64,
}

#[derive(Debug, Default)]
struct Class {
    recent: Histogram,
    samples: AtomicU64,
    /// 0 while too little is known.
    late_us: AtomicU64,
}

impl Lateness {
    fn class(&self, bytes: u64) -> &Class {
        &self.classes[SIZES.partition_point(|bound| bytes > *bound)]
    }

    /// After how long the answer to a request for so many bytes is late; `None` while too little is known.
    pub(crate) fn limit(&self, bytes: u64) -> Option<Duration> {
        match self.class(bytes).late_us.load(Ordering::Relaxed) {
            0 => None,
            us => Some(Duration::from_micros(us)),
        }
    }

    /// An answer to a request for so many bytes came after this long.
    pub(crate) fn answered(&self, bytes: u64, took: Duration) {
        if self.earned.load(Ordering::Relaxed) < SAVED {
            self.earned.fetch_add(EARNED, Ordering::Relaxed);
        }
        let class = self.class(bytes);
        class.recent.add(took);
        let samples = class.samples.fetch_add(1, Ordering::Relaxed) + 1;
        if samples == SAMPLES || (samples > SAMPLES && samples.is_multiple_of(REFRESH)) {
            class.refresh();
        }
        if samples.is_multiple_of(FORGET) {
            class.recent.halve();
        }
    }

    /// Takes what a second request costs, if it was earned.
    pub(crate) fn spend(&self) -> bool {
        self.earned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |earned| earned.checked_sub(SPENT)).is_ok()
    }

    /// Puts back what was taken for a second request that was not made.
    pub(crate) fn put_back(&self) {
        self.earned.fetch_add(SPENT, Ordering::Relaxed);
    }
}

impl Class {
    fn refresh(&self) {
        let counts = self.recent.counts();
        if let Some((usual, most)) = counts.quantile(0.5).zip(counts.quantile(SHARE)) {
            let late = most.max(TIMES_USUAL * usual).max(FLOOR);
            self.late_us.store(u64::try_from(late.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn nothing_is_late_before_enough_is_known_of_its_size() {
        let lateness = Lateness::default();
        for _ in 0..SAMPLES - 1 {
            lateness.answered(1000, 20 * MS);
        }
        assert_eq!(lateness.limit(1000), None);
        lateness.answered(1000, 20 * MS);
        let limit = lateness.limit(SIZES[0]).unwrap();
        assert!(limit >= 40 * MS && limit < 50 * MS, "{limit:?}");
        assert_eq!((lateness.limit(SIZES[0] + 1), lateness.limit(1 << 30)), (None, None));
    }

    #[test]
    fn one_in_a_hundred_does_not_move_the_limit_and_a_slower_store_does() {
        let lateness = Lateness::default();
        for index in 0..2000 {
            lateness.answered(1, if index % 100 == 0 { 300 * MS } else { 20 * MS });
        }
        assert!(lateness.limit(1).unwrap() < 50 * MS);
        for _ in 0..5000 {
            lateness.answered(1, 100 * MS);
        }
        assert!(lateness.limit(1).unwrap() > 199 * MS);
    }

    #[test]
    fn a_fast_store_has_a_floor() {
        let lateness = Lateness::default();
        (0..1000).for_each(|_| lateness.answered(1, MS / 10));
        assert_eq!(lateness.limit(1), Some(FLOOR));
    }

    #[test]
    fn one_in_twenty_can_be_afforded_and_ten_at_once() {
        let lateness = Lateness::default();
        assert!(!lateness.spend());
        let mut spent = 0;
        for _ in 0..1000 {
            lateness.answered(1, MS);
            spent += u32::from(lateness.spend());
        }
        assert_eq!(spent, 50);
        (0..1000).for_each(|_| lateness.answered(1, MS));
        assert_eq!((0..100).filter(|_| lateness.spend()).count(), 10);
        lateness.put_back();
        assert!(lateness.spend());
    }
}
