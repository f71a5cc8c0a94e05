//! Counts what a prefetcher does. Cheap enough to stay on: a few additions an object.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::job::Found;
use crate::arena::Usage;
use crate::transfer::{Histogram, Measured};

#[derive(Debug, Default)]
pub(super) struct Counters {
    found: [AtomicU64; 4],
    objects: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
    evicted: AtomicU64,
    starved: AtomicU64,
    limited: AtomicU64,
    took: Histogram,
}

/// What a prefetcher did since it began, and does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// How often nothing was begun, for want of memory, though more was announced.
    pub starved: u64,
    /// The same for want of leave to have more reads in flight.
    pub limited: u64,
    /// Uses announced or waited for, and not taken.
    pub announced: usize,
    /// Reads at the moment, and at most, but for those that somebody waits for.
    pub in_flight: usize,
    /// As said.
    pub limit: usize,
    /// The arena.
    pub memory: Usage,
    /// How long half of the reads took at most, and all but one in a hundred.
    pub read_p50: Option<Duration>,
    /// As said.
    pub read_p99: Option<Duration>,
    /// What the requests met of all clients that read for it, whoever made them.
    pub requests: Measured,
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

    /// How many were read.
    pub(super) fn objects(&self) -> u64 {
        self.objects.load(Ordering::Relaxed)
    }

    pub(super) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn evicted(&self) {
        self.evicted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn starved(&self) {
        self.starved.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn limited(&self) {
        self.limited.fetch_add(1, Ordering::Relaxed);
    }

    /// What was counted here; the rest is as in `now`.
    pub(super) fn report(&self, now: Stats) -> Stats {
        let [hits, late, queued, misses] = std::array::from_fn(|index| self.found[index].load(Ordering::Relaxed));
        let took = self.took.counts();
        Stats {
            hits,
            late,
            queued,
            misses,
            objects: self.objects.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            evicted: self.evicted.load(Ordering::Relaxed),
            starved: self.starved.load(Ordering::Relaxed),
            limited: self.limited.load(Ordering::Relaxed),
            read_p50: took.quantile(0.5),
            read_p99: took.quantile(0.99),
            ..now
        }
    }
}
