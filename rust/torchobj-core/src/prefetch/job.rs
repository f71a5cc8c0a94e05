//! What a window hands out: objects by number, reads to be made, and what they will take of the budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// An object of a source, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Object {
    /// The source.
    pub source: u64,
    /// Its number there.
    pub index: u64,
}

/// Bytes that will be taken of the budget; no longer when it is dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    total: Arc<AtomicU64>,
    bytes: u64,
}

impl Reservation {
    /// Adds `bytes` to `total` for as long as this lives.
    pub(super) fn new(total: &Arc<AtomicU64>, bytes: u64) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Self { total: total.clone(), bytes }
    }

    /// How many.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A read that is to be made.
#[derive(Debug)]
pub(super) struct Job {
    pub number: u64,
    pub object: Object,
    pub reservation: Reservation,
    /// The budget has no room for it; somebody waits.
    pub overdraws: bool,
    /// Told when nobody wants it any more.
    pub cancelled: Arc<Notify>,
}

/// What to do next.
#[derive(Debug)]
pub(super) enum Next<B> {
    /// Read this.
    Start(Job),
    /// Drop this, and ask again.
    Evict(B),
    /// There is nothing to read.
    Idle,
    /// There is, and no memory for it.
    Starved,
}

/// Why no further read was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Halt {
    /// There is nothing to read.
    Idle,
    /// There is, and no memory for it.
    Starved,
    /// There is, and as many reads are in flight as may be.
    Limited,
}

/// How a use that was taken had fared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It was there.
    Hit,
    /// It was on its way.
    Late,
    /// It was announced, and had to be read at once.
    Queued,
    /// Nobody had announced it.
    Missed,
}
