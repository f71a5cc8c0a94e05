//! Types that the window exchanges with its users: objects, jobs and decisions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// An object of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Object {
    /// Number of the source.
    pub source: u64,
    /// Number of the object in the source.
    pub index: u64,
}

/// Bytes that a pending read will take of the budget. Dropping it ends the reservation.
#[derive(Debug)]
pub(crate) struct Reservation {
    total: Arc<AtomicU64>,
    bytes: u64,
}

impl Reservation {
    /// Adds `bytes` to `total` while the reservation lives.
    pub(super) fn new(total: &Arc<AtomicU64>, bytes: u64) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Self { total: total.clone(), bytes }
    }

    /// Number of reserved bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A read to run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(super) number: u64,
    pub(super) object: Object,
    pub(super) reservation: Reservation,
    /// The read is demanded and exceeds the budget.
    pub(super) exceeds_budget: bool,
    /// Notified when the result is not needed any more.
    pub(super) cancelled: Arc<Notify>,
}

/// The next action.
#[derive(Debug)]
pub(super) enum Next<B> {
    /// Run this read.
    Start(Job),
    /// Drop this result, then call again.
    Evict(B),
    /// No object is queued.
    Idle,
    /// An object is queued, but there is no memory for it.
    OutOfMemory,
}

/// State of an object when it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakeOutcome {
    /// It was ready.
    Hit,
    /// It was being read, or its read had failed.
    InFlight,
    /// It was announced, but its read had not started.
    Queued,
    /// It was not announced.
    Unannounced,
}
