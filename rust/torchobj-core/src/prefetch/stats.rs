//! Counters of a prefetcher. Cheap enough to be always enabled: a few atomic additions per object.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::job::TakeOutcome;
use crate::arena::Usage;
use crate::engine::Halt;
use crate::transfer::MetricsSnapshot;

#[derive(Debug, Default)]
pub(super) struct Counters {
    found: [AtomicU64; 4],
    objects: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
    evicted: AtomicU64,
    memory_limited: AtomicU64,
    request_limited: AtomicU64,
    waited_us: Arc<AtomicU64>,
}

/// Adds the time from its creation to its drop to the total wait.
#[derive(Debug)]
pub(super) struct WaitTimer {
    since: Instant,
    total_us: Arc<AtomicU64>,
}

impl Drop for WaitTimer {
    fn drop(&mut self) {
        let waited_us = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.total_us.fetch_add(waited_us, Ordering::Relaxed);
    }
}

/// Counters of a prefetcher since it was started, and its current state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Objects that were ready when they were taken.
    pub hits: u64,
    /// Objects that were being read when they were taken.
    pub late: u64,
    /// Objects that were announced, and not being read yet, when they were taken.
    pub queued: u64,
    /// Objects that were not announced.
    pub misses: u64,
    /// Objects that were read.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Reads that failed after all retries.
    pub failed: u64,
    /// Results that were dropped for lack of memory, to be read again.
    pub evicted: u64,
    /// Number of completed reads after which no other read started for lack of memory, although objects were announced.
    pub memory_limited: u64,
    /// Number of completed reads after which no other read started because the limit of concurrent reads was reached.
    pub request_limited: u64,
    /// Time that workers and callers waited for objects, from the request to its last answer, summed over all requests.
    pub waited: Duration,
    /// Entries that are announced or demanded, and not taken.
    pub announced: usize,
    /// Running reads.
    pub in_flight: usize,
    /// Maximum number of running reads; demanded reads may exceed it.
    pub limit: usize,
    /// Memory use of the arena.
    pub memory: Usage,
    /// Bytes of the arena that hold objects that were read ahead and not taken.
    pub ahead: u64,
    /// Metrics of the requests of all clients that it uses, including requests of other users of these clients.
    pub requests: MetricsSnapshot,
}

impl Counters {
    pub(super) fn found(&self, found: TakeOutcome) {
        self.found[found.index()].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self, bytes: u64) {
        self.objects.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Number of objects read.
    pub(super) fn objects(&self) -> u64 {
        self.objects.load(Ordering::Relaxed)
    }

    pub(super) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn evicted(&self) {
        self.evicted.fetch_add(1, Ordering::Relaxed);
    }

    /// Records, after a read that succeeded, why no other read was started.
    pub(super) fn halted(&self, halt: Halt) {
        match halt {
            Halt::Idle => {}
            Halt::OutOfMemory => drop(self.memory_limited.fetch_add(1, Ordering::Relaxed)),
            Halt::Limited => drop(self.request_limited.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// Starts to measure the wait of a request.
    pub(super) fn wait_timer(&self) -> WaitTimer {
        WaitTimer { since: Instant::now(), total_us: self.waited_us.clone() }
    }

    /// The counters, with the current state taken from `now`.
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
            memory_limited: self.memory_limited.load(Ordering::Relaxed),
            request_limited: self.request_limited.load(Ordering::Relaxed),
            waited: Duration::from_micros(self.waited_us.load(Ordering::Relaxed)),
            ..now
        }
    }
}
