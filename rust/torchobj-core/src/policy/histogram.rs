//! A histogram of durations with logarithmic buckets: two additions per sample.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Four buckets per power of two of a microsecond, up to an hour.
const BUCKETS: usize = 4 * 32;

/// Counts of durations.
#[derive(Debug)]
pub struct Histogram {
    counts: [AtomicU64; BUCKETS],
    total_us: AtomicU64,
}

/// The counts of a histogram at one moment, or the sums over several histograms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    counts: [u64; BUCKETS],
    total_us: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [const { AtomicU64::new(0) }; BUCKETS], total_us: AtomicU64::new(0) }
    }
}

impl Default for Counts {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], total_us: 0 }
    }
}

impl Histogram {
    /// Adds a sample.
    pub fn add(&self, took: Duration) {
        self.counts[bucket(took)].fetch_add(1, Ordering::Relaxed);
        self.total_us.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The current counts.
    pub fn counts(&self) -> Counts {
        Counts {
            counts: std::array::from_fn(|index| self.counts[index].load(Ordering::Relaxed)),
            total_us: self.total_us.load(Ordering::Relaxed),
        }
    }

    /// Halves all counts and the total, so that new samples weigh more than old ones.
    pub(super) fn halve(&self) {
        for count in self.counts.iter().chain([&self.total_us]) {
            // Not `store`: samples that other threads add meanwhile are kept.
            count.fetch_sub(count.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        }
    }
}

impl Counts {
    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.total_us = self.total_us.wrapping_add(other.total_us);
    }

    /// Number of samples.
    pub fn number(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of the samples.
    pub fn total(&self) -> Duration {
        Duration::from_micros(self.total_us)
    }

    /// Returns a duration that `share` of the samples do not exceed, at most a quarter too long. `None` without samples.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let total = self.number();
        let mut before = 0;
        #[expect(clippy::cast_precision_loss, reason = "a share of a count")]
        self.counts
            .iter()
            .position(|count| {
                before += count;
                total > 0 && before as f64 >= share * total as f64
            })
            .map(upper)
    }
}

fn bucket(took: Duration) -> usize {
    let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
    let power = us.ilog2() as usize;
    let quarter = usize::try_from((u128::from(us) << 2 >> power) & 3).expect("masked to 2 bits");
    (4 * power + quarter).min(BUCKETS - 1)
}

/// The upper bound of a bucket.
fn upper(bucket: usize) -> Duration {
    let power = 1_u64 << (bucket / 4);
    Duration::from_nanos(1000 * power + 250 * power * (bucket as u64 % 4 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_at_most_a_quarter_too_long() {
        let histogram = Histogram::default();
        for us in 1..=1000 {
            histogram.add(Duration::from_micros(us));
        }
        let [median, p99] = [0.5, 0.99].map(|share| histogram.counts().quantile(share).unwrap().as_micros());
        assert!((500..=640).contains(&median), "{median}");
        assert!((990..=1024).contains(&p99), "{p99}");
        assert_eq!(Histogram::default().counts().quantile(0.5), None);
        assert_eq!((histogram.counts().number(), histogram.counts().total()), (1000, Duration::from_micros(500_500)));
    }

    #[test]
    fn a_duration_is_below_the_upper_bound_of_its_bucket() {
        for us in (0..10_000).chain([1 << 20, (1 << 33) - 1, u64::MAX]) {
            let took = Duration::from_micros(us);
            let bucket = bucket(took);
            assert!(took < upper(bucket) || bucket == BUCKETS - 1, "{us} µs");
            assert!(bucket == 0 || took >= upper(bucket - 1).min(took), "{us} µs");
        }
    }

    #[test]
    fn halved_counts_weigh_half_and_merged_counts_add_up() {
        let (old, new) = (Histogram::default(), Histogram::default());
        (0..100).for_each(|_| old.add(Duration::from_millis(100)));
        (0..60).for_each(|_| new.add(Duration::from_millis(1)));
        let mut both = old.counts();
        both.merge(&new.counts());
        assert!(both.quantile(0.5).unwrap() > Duration::from_millis(99));
        old.halve();
        let mut both = old.counts();
        both.merge(&new.counts());
        assert!(both.quantile(0.5).unwrap() < Duration::from_millis(2));
    }
}
