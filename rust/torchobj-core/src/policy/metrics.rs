//! Metrics of the requests of a client: numbers by operation and outcome, bytes, latencies, retries and hedges.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::histogram::{Counts, Histogram};
use crate::counters::counters;
use crate::error::{ErrorKind, Operation, Retry};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With a response that has what was requested. A read counts when the head of its response arrives.
    Ok,
    /// The store throttled it (503 `SlowDown`, 429).
    Throttled,
    /// Another attempt would fail again: no such object, no permission (4xx).
    Refused,
    /// The store failed (500, 502, 503, 504).
    ServerError,
    /// No response, or one that is incomplete or has to be requested again: a broken connection, a timeout, a renewal of
    /// credentials.
    Interrupted,
}

impl Outcome {
    /// All outcomes, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Ok, Self::Throttled, Self::Refused, Self::ServerError, Self::Interrupted];

    /// The outcome of a request that failed with an error of this kind.
    fn of(kind: ErrorKind) -> Self {
        match (kind, kind.retry()) {
            (ErrorKind::Server, _) => Self::ServerError,
            (_, Retry::Throttled) => Self::Throttled,
            (_, Retry::Never) => Self::Refused,
            (_, Retry::Now | Retry::Later) => Self::Interrupted,
        }
    }

    /// Its name in the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Throttled => "throttled",
            Self::Refused => "refused",
            Self::ServerError => "server_error",
            Self::Interrupted => "interrupted",
        }
    }
}

/// Number of requests by [`Operation`] and [`Outcome`], each in the order of `ALL`.
type ByOutcome<T> = [[T; Outcome::ALL.len()]; Operation::ALL.len()];

counters! {
    /// Numbers of requests of one client, and what they transferred.
    struct Counters;

    /// Values of the counters of one client at one moment, or the sums over several clients.
    pub struct MetricsSnapshot {
        counters {
            received_bytes,
            cache_hits,
            cache_hit_bytes,
            sent_bytes,
            retries,
            throttled,
            connect_failures,
            hedges,
            hedges_won,
            uploads,
            parts,
            part_bytes,
        }
        current {}
        /// Attempts by operation and outcome. Of a hedged read, one response counts, and each failure.
        pub requests: ByOutcome<u64>,
        /// Time from the request of a read to the head of its response.
        pub first_byte: Counts,
        /// Time from the head to the end of the body.
        pub body: Counts,
        /// Time from the request of a read to the end of the body.
        pub reads: Counts,
        /// Time of the requests that are not reads and succeeded, from the permit to the end of the response.
        pub others: Counts,
    }
}

/// The metrics of one client. Always enabled: they cost a few additions per request.
#[derive(Debug, Default)]
pub struct Metrics {
    requests: ByOutcome<AtomicU64>,
    counters: Counters,
    first_byte: Histogram,
    body: Histogram,
    reads: Histogram,
    others: Histogram,
    /// Metrics that include these.
    whole: Option<Arc<Metrics>>,
}

/// Counts an upload in parts, or a part of one, as in flight until it is dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    metrics: Arc<Metrics>,
    /// Bytes of the part; `None` for an upload.
    part: Option<u64>,
}

impl InFlight {
    /// An upload that has begun.
    pub(crate) fn upload(metrics: &Arc<Metrics>) -> Self {
        metrics.count(|counters| &counters.uploads);
        Self { metrics: metrics.clone(), part: None }
    }

    /// A part of `bytes` bytes.
    pub(crate) fn part(metrics: &Arc<Metrics>, bytes: u64) -> Self {
        metrics.record(|metrics| {
            metrics.counters.parts.fetch_add(1, Ordering::Relaxed);
            metrics.counters.part_bytes.fetch_add(bytes, Ordering::Relaxed);
        });
        Self { metrics: metrics.clone(), part: Some(bytes) }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.metrics.record(|metrics| match self.part {
            None => {
                metrics.counters.uploads.fetch_sub(1, Ordering::Relaxed);
            }
            Some(bytes) => {
                metrics.counters.parts.fetch_sub(1, Ordering::Relaxed);
                metrics.counters.part_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
        });
    }
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
        self.record(|metrics| {
            metrics.requests[Operation::Get as usize][Outcome::Ok as usize].fetch_add(1, Ordering::Relaxed);
            metrics.first_byte.add(took);
        });
    }

    /// Records that a request that is not a read succeeded, and that it sent `bytes` of an object.
    pub(crate) fn succeeded(&self, operation: Operation, bytes: u64, took: Duration) {
        self.record(|metrics| {
            metrics.requests[operation as usize][Outcome::Ok as usize].fetch_add(1, Ordering::Relaxed);
            metrics.counters.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
            metrics.others.add(took);
        });
    }

    /// Records bytes of the body of a read.
    pub(crate) fn received(&self, bytes: u64) {
        self.record(|metrics| {
            metrics.counters.received_bytes.fetch_add(bytes, Ordering::Relaxed);
        });
    }

    /// Records a read of bytes that were on the local disk.
    pub(crate) fn cached(&self, bytes: u64) {
        self.record(|metrics| {
            metrics.counters.cache_hits.fetch_add(1, Ordering::Relaxed);
            metrics.counters.cache_hit_bytes.fetch_add(bytes, Ordering::Relaxed);
        });
    }

    /// Records the time from the head to the end of the body, and that from the request.
    pub(crate) fn body(&self, took: Duration, since_request: Duration) {
        self.record(|metrics| {
            metrics.body.add(took);
            metrics.reads.add(since_request);
        });
    }

    /// Records that a request failed with an error of this kind.
    pub(crate) fn failed(&self, operation: Operation, kind: ErrorKind) {
        self.record(|metrics| {
            metrics.requests[operation as usize][Outcome::of(kind) as usize].fetch_add(1, Ordering::Relaxed);
        });
        match kind {
            ErrorKind::Throttled => self.count(|counters| &counters.throttled),
            ErrorKind::Connect => self.count(|counters| &counters.connect_failures),
            _ => {}
        }
    }

    /// Records a retry.
    pub(crate) fn retried(&self) {
        self.count(|counters| &counters.retries);
    }

    /// Records a hedge.
    pub(crate) fn hedged(&self) {
        self.count(|counters| &counters.hedges);
    }

    /// Records that the second response of a hedged read arrived first.
    pub(crate) fn hedge_won(&self) {
        self.count(|counters| &counters.hedges_won);
    }

    fn count(&self, counter: impl Fn(&Counters) -> &AtomicU64) {
        self.record(|metrics| {
            counter(&metrics.counters).fetch_add(1, Ordering::Relaxed);
        });
    }

    /// The current values.
    #[cfg(test)]
    pub(crate) fn snapshot(&self) -> MetricsSnapshot {
        let mut values = MetricsSnapshot::default();
        self.add_to(&mut values);
        values
    }

    /// Adds the current values to the sums over several clients.
    pub fn add_to(&self, sums: &mut MetricsSnapshot) {
        self.counters.add_to(sums);
        let requests = sums.requests.as_flattened_mut().iter_mut();
        requests.zip(self.requests.as_flattened()).for_each(|(sum, count)| *sum += count.load(Ordering::Relaxed));
        sums.first_byte.merge(&self.first_byte.counts());
        sums.body.merge(&self.body.counts());
        sums.reads.merge(&self.reads.counts());
        sums.others.merge(&self.others.counts());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_operation_and_outcome_also_in_the_whole() {
        let whole = Arc::new(Metrics::default());
        let part = Metrics::part_of(&whole);
        part.first_byte(Duration::from_millis(1));
        part.received(7);
        part.body(Duration::from_millis(2), Duration::from_millis(3));
        part.succeeded(Operation::PutPart, 5, Duration::from_millis(3));
        part.failed(Operation::Get, ErrorKind::Throttled);
        part.failed(Operation::Get, ErrorKind::Reset);
        part.failed(Operation::Head, ErrorKind::NotFound);
        part.failed(Operation::Delete, ErrorKind::Server);
        let mut found = whole.snapshot();
        assert_eq!(found, part.snapshot());
        assert_eq!(found.requests[Operation::Get as usize], [1, 1, 0, 0, 1]);
        assert_eq!(found.requests[Operation::PutPart as usize], [1, 0, 0, 0, 0]);
        assert_eq!(found.requests[Operation::Head as usize], [0, 0, 1, 0, 0]);
        assert_eq!(found.requests[Operation::Delete as usize], [0, 0, 0, 1, 0]);
        assert_eq!((found.received_bytes, found.sent_bytes, found.others.number()), (7, 5, 1));
        assert_eq!([found.body, found.reads].map(|times| times.total().as_millis()), [2, 3]);
        part.add_to(&mut found);
        assert_eq!(found.requests[Operation::Get as usize], [2, 2, 0, 0, 2]);
        assert_eq!(found.received_bytes, 14);
    }

    #[test]
    fn an_upload_and_its_parts_are_in_flight_until_they_are_dropped() {
        let whole = Arc::new(Metrics::default());
        let part = Metrics::part_of(&whole);
        let in_flight = || {
            let found = whole.snapshot();
            assert_eq!(found, part.snapshot());
            (found.uploads, found.parts, found.part_bytes)
        };
        let upload = InFlight::upload(&part);
        let parts = [7, 3].map(|bytes| InFlight::part(&part, bytes));
        assert_eq!(in_flight(), (1, 2, 10));
        drop(parts);
        assert_eq!(in_flight(), (1, 0, 0));
        drop(upload);
        assert_eq!(in_flight(), (0, 0, 0));
    }

    #[test]
    fn operations_and_outcomes_are_listed_by_their_numbers() {
        assert!(Operation::ALL.iter().enumerate().all(|(number, operation)| *operation as usize == number));
        assert!(Outcome::ALL.iter().enumerate().all(|(number, outcome)| *outcome as usize == number));
    }
}
