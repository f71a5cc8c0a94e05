//! Counts what the requests of a client met: how long they took, how they failed, what was asked a second time.

use std::sync::atomic::{AtomicU64, Ordering};

use super::histogram::{Counts, Histogram};
use crate::error::ErrorKind;

/// The counters of one client. Cheap enough to stay on: a few additions a request.
#[derive(Debug, Default)]
pub struct Metrics {
    /// From a read's request to the head of its answer.
    pub(crate) first_byte: Histogram,
    /// From there to the end of its body.
    pub(crate) body: Histogram,
    retries: AtomicU64,
    throttled: AtomicU64,
    connect_failures: AtomicU64,
    hedges: AtomicU64,
    hedges_won: AtomicU64,
}

/// What was counted, by one client or by several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// From a read's request to the head of its answer.
    pub first_byte: Counts,
    /// From there to the end of its body.
    pub body: Counts,
    /// Attempts after the first.
    pub retries: u64,
    /// Answers that asked for fewer requests (503 `SlowDown`, 429).
    pub throttled: u64,
    /// Connections that could not be made.
    pub connect_failures: u64,
    /// Reads that were asked for a second time, for their answer was late.
    pub hedges: u64,
    /// Those whose second answer came first.
    pub hedges_won: u64,
}

impl Metrics {
    /// A request failed so.
    pub(crate) fn failed(&self, kind: ErrorKind) {
        match kind {
            ErrorKind::Throttled => self.throttled.fetch_add(1, Ordering::Relaxed),
            ErrorKind::Connect => self.connect_failures.fetch_add(1, Ordering::Relaxed),
            _ => return,
        };
    }

    /// A request is tried again.
    pub(crate) fn retried(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// A late read is asked for a second time.
    pub(crate) fn hedged(&self) {
        self.hedges.fetch_add(1, Ordering::Relaxed);
    }

    /// The second answer came first.
    pub(crate) fn hedge_won(&self) {
        self.hedges_won.fetch_add(1, Ordering::Relaxed);
    }

    /// What was counted until now.
    pub fn measured(&self) -> Measured {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Measured {
            first_byte: self.first_byte.counts(),
            body: self.body.counts(),
            retries: count(&self.retries),
            throttled: count(&self.throttled),
            connect_failures: count(&self.connect_failures),
            hedges: count(&self.hedges),
            hedges_won: count(&self.hedges_won),
        }
    }
}

impl Measured {
    /// Adds what another client counted.
    pub fn merge(&mut self, other: &Self) {
        self.first_byte.merge(&other.first_byte);
        self.body.merge(&other.body);
        self.retries += other.retries;
        self.throttled += other.throttled;
        self.connect_failures += other.connect_failures;
        self.hedges += other.hedges;
        self.hedges_won += other.hedges_won;
    }
}
