//! Metrics of the requests of a client: latencies, failures, retries and hedges.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::histogram::{Counts, Histogram};
use crate::error::ErrorKind;

/// The counters of one client. Always enabled: they cost a few additions per request.
#[derive(Debug, Default)]
pub struct Metrics {
    first_byte: Histogram,
    body: Histogram,
    retries: AtomicU64,
    throttled: AtomicU64,
    connect_failures: AtomicU64,
    hedges: AtomicU64,
    hedges_won: AtomicU64,
    /// Counters that include these.
    whole: Option<Arc<Metrics>>,
}

/// Values of the counters of one client at one moment, or the sums over several clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetricsSnapshot {
    /// Time from the request of a read to the head of its response.
    pub first_byte: Counts,
    /// Time from the head to the end of the body.
    pub body: Counts,
    /// Attempts after the first.
    pub retries: u64,
    /// Throttled responses (503 `SlowDown`, 429).
    pub throttled: u64,
    /// Failed connects.
    pub connect_failures: u64,
    /// Reads that were sent a second time, because the first response took longer than the hedge delay.
    pub hedges: u64,
    /// Hedged reads whose second response arrived first.
    pub hedges_won: u64,
}

impl Metrics {
    /// Counters that are also added to those of `whole`.
    pub(crate) fn part_of(whole: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self { whole: Some(whole.clone()), ..Self::default() })
    }

    /// Calls `record` for these counters and for those that include them.
    fn record(&self, record: impl Fn(&Self)) {
        record(self);
        if let Some(whole) = &self.whole {
            record(whole);
        }
    }

    /// Records the time from the request of a read to the head of its response.
    pub(crate) fn first_byte(&self, took: Duration) {
        self.record(|metrics| metrics.first_byte.add(took));
    }

    /// Records the time from the head to the end of the body.
    pub(crate) fn body(&self, took: Duration) {
        self.record(|metrics| metrics.body.add(took));
    }

    /// Records that a request failed with an error of this kind.
    pub(crate) fn failed(&self, kind: ErrorKind) {
        match kind {
            ErrorKind::Throttled => self.count(|metrics| &metrics.throttled),
            ErrorKind::Connect => self.count(|metrics| &metrics.connect_failures),
            _ => {}
        }
    }

    /// Records a retry.
    pub(crate) fn retried(&self) {
        self.count(|metrics| &metrics.retries);
    }

    /// Records a hedge.
    pub(crate) fn hedged(&self) {
        self.count(|metrics| &metrics.hedges);
    }

    /// Records that the second response of a hedged read arrived first.
    pub(crate) fn hedge_won(&self) {
        self.count(|metrics| &metrics.hedges_won);
    }

    fn count(&self, counter: impl Fn(&Self) -> &AtomicU64) {
        self.record(|metrics| {
            counter(metrics).fetch_add(1, Ordering::Relaxed);
        });
    }

    /// The current values.
    pub fn snapshot(&self) -> MetricsSnapshot {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        MetricsSnapshot {
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

impl MetricsSnapshot {
    /// Adds the values of another client.
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
