//! Counts what a prefetcher does. Cheap enough to stay on: a few additions an object.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::job::Found;
use crate::arena::Usage;

/// Buckets of a histogram: powers of two of a microsecond, in halves.
const BUCKETS: usize = 64;

/// How long something took, counted by order of magnitude.
#[derive(Debug)]
struct Histogram([AtomicU64; BUCKETS]);

impl Default for Histogram {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; BUCKETS])
    }
}

impl Histogram {
    fn add(&self, took: Duration) {
        self.0[bucket(took)].fetch_add(1, Ordering::Relaxed);
    }

    fn quantile(&self, share: f64) -> Option<Duration> {
        let counts: Vec<u64> = self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let mut before = 0;
        #[expect(clippy::cast_precision_loss, reason = "a share of a count")]
        counts
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
    let half = power > 0 && us & (1 << (power - 1)) != 0;
    (2 * power + usize::from(half)).min(BUCKETS - 1)
}

/// The largest time of a bucket.
fn upper(bucket: usize) -> Duration {
    let power = 1_u64 << (bucket / 2);
    Duration::from_micros(if bucket.is_multiple_of(2) { power + power / 2 } else { 2 * power })
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    found: [AtomicU64; 4],
    objects: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
    evicted: AtomicU64,
    took: Histogram,
}

/// What a prefetcher did since it began, and does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Objects that were there when they were taken.
    pub hits: u64,
    /// Objects that were on their way.
    pub late: u64,
    /// Objects that were announced and not begun.
    pub queued: u64,
    /// Objects that nobody had announced.
    pub misses: u64,
    /// Objects that were read.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Reads that failed for good.
    pub failed: u64,
    /// Objects that were given up to make room, to be read again.
    pub evicted: u64,
    /// Uses announced or waited for, and not taken.
    pub announced: usize,
    /// Reads at the moment, and at most.
    pub in_flight: usize,
    /// As said.
    pub limit: usize,
    /// The arena.
    pub memory: Usage,
    /// How long half of the reads took at most, and all but one in a hundred.
    pub read_p50: Option<Duration>,
    /// As said.
    pub read_p99: Option<Duration>,
}

impl Counters {
    pub(super) fn found(&self, found: Found) {
        self.found[found.index()].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self, bytes: u64, took: Duration) {
        self.objects.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.took.add(took);
    }

    pub(super) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn evicted(&self) {
        self.evicted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn report(&self, memory: Usage, announced: usize, in_flight: usize, limit: usize) -> Stats {
        let [hits, late, queued, misses] = std::array::from_fn(|index| self.found[index].load(Ordering::Relaxed));
        Stats {
            hits,
            late,
            queued,
            misses,
            objects: self.objects.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            evicted: self.evicted.load(Ordering::Relaxed),
            announced,
            in_flight,
            limit,
            memory,
            read_p50: self.took.quantile(0.5),
            read_p99: self.took.quantile(0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_within_half_a_power_of_two() {
        let histogram = Histogram::default();
        for us in 1..=1000 {
            histogram.add(Duration::from_micros(us));
        }
        let [half, most] = [0.5, 0.99].map(|share| histogram.quantile(share).unwrap().as_micros());
        assert!((500..=768).contains(&half), "{half}");
        assert!((990..=1024).contains(&most), "{most}");
        assert_eq!(Histogram::default().quantile(0.5), None);
    }
}
