//! Counts what a prefetcher does. Cheap enough to stay on: a few additions an object.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::job::{Found, Halt};
use crate::arena::Usage;
use crate::transfer::Measured;

#[derive(Debug, Default)]
pub(super) struct Counters {
    found: [AtomicU64; 4],
    objects: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
    evicted: AtomicU64,
    starved: AtomicU64,
    limited: AtomicU64,
    waited_us: Arc<AtomicU64>,
}

/// Somebody waits, for as long as this lives.
#[derive(Debug)]
pub(super) struct Waiting {
    since: Instant,
    total_us: Arc<AtomicU64>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let waited_us = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.total_us.fetch_add(waited_us, Ordering::Relaxed);
    }
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
    /// After how many of the objects that were read no other was begun for want of memory, though more was announced.
    pub starved: u64,
    /// The same for want of leave to have more reads in flight.
    pub limited: u64,
    /// How long workers and this process waited for objects, from asking to the last answer: the sum of all requests.
    pub waited: Duration,
    /// Uses announced or waited for, and not taken.
    pub announced: usize,
    /// Reads at the moment, and at most, but for those that somebody waits for.
    pub in_flight: usize,
    /// As said.
    pub limit: usize,
    /// The arena.
    pub memory: Usage,
    /// Bytes of the arena that hold what was announced and read, and not taken.
    pub ahead: u64,
    /// What the requests met of all clients that read for it, whoever made them.
    pub requests: Measured,
}

impl Counters {
    pub(super) fn found(&self, found: Found) {
        self.found[found.index()].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self, bytes: u64) {
        self.objects.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
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

    /// An object was read: why no other read was begun then.
    pub(super) fn halted(&self, halt: Halt) {
        match halt {
            Halt::Idle => {}
            Halt::Starved => drop(self.starved.fetch_add(1, Ordering::Relaxed)),
            Halt::Limited => drop(self.limited.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// Somebody begins to wait for objects.
    pub(super) fn waiting(&self) -> Waiting {
        Waiting { since: Instant::now(), total_us: self.waited_us.clone() }
    }

    /// What was counted here; the rest is as in `now`.
    pub(super) fn report(&self, now: Stats) -> Stats {
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
            starved: self.starved.load(Ordering::Relaxed),
            limited: self.limited.load(Ordering::Relaxed),
            waited: Duration::from_micros(self.waited_us.load(Ordering::Relaxed)),
            ..now
        }
    }
}
