//! Types that the window exchanges with its users: objects, reads and decisions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::Notify;

/// An object of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ObjectId {
    /// Number of the source.
    pub source: u64,
    /// Number of the object in the source.
    pub index: u64,
}

/// Bytes that a pending read will take of the budget. Dropping it ends the reservation.
#[derive(Debug)]
pub(crate) struct Reservation {
    total: Arc<AtomicU64>,
    pub(super) bytes: u64,
}

impl Reservation {
    /// Adds `bytes` to `total` while the reservation lives.
    pub(super) fn new(total: &Arc<AtomicU64>, bytes: u64) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Self { total: total.clone(), bytes }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Counts the entries of a read that are needed, and ends the read when none is.
#[derive(Debug)]
pub(crate) struct Needed {
    entries: AtomicUsize,
    none: Notify,
}

impl Needed {
    /// One entry is needed.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { entries: AtomicUsize::new(1), none: Notify::new() })
    }

    /// One more entry is needed.
    pub(super) fn add(&self) {
        self.entries.fetch_add(1, Ordering::Relaxed);
    }

    /// One entry is not needed any more.
    pub(super) fn subtract(&self) {
        if self.entries.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.none.notify_one();
        }
    }

    /// Returns once no entry is needed.
    pub(super) async fn none(&self) {
        self.none.notified().await;
    }
}

/// An entry of a read.
#[derive(Debug)]
pub(crate) struct EntryRead {
    pub(super) number: u64,
    pub(super) object: ObjectId,
    /// The loader that the object is read for.
    pub(super) loader: u64,
    pub(super) reservation: Reservation,
}

/// A read to run.
#[derive(Debug)]
pub(crate) struct CoalescedRead {
    /// The entry that was chosen, and those that are read with the same request.
    pub(super) entries: Vec<EntryRead>,
    /// The read is demanded and exceeds the budget.
    pub(super) exceeds_budget: bool,
    pub(super) needed: Arc<Needed>,
}

/// The next action.
#[derive(Debug)]
pub(super) enum Decision<B> {
    /// Run this read.
    Read(CoalescedRead),
    /// Drop this result, which was read for a loader, then call again.
    Evict(B, u64),
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
