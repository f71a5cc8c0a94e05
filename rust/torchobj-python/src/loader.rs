//! The loader that reads, whose counters a read belongs to: that of this thread, or the one that this process works for.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;

thread_local! {
    static OF_THREAD: Cell<u64> = const { Cell::new(0) };
}

static OF_WORKER: AtomicU64 = AtomicU64::new(0);

/// The loader that the current thread reads for; 0 for none.
pub(crate) fn of_thread() -> u64 {
    OF_THREAD.get()
}

/// The loader that this process, a worker, works for; 0 for none.
pub(crate) fn of_worker() -> u64 {
    OF_WORKER.load(Ordering::Relaxed)
}

/// Sets the loader that this process, a worker, works for.
pub(crate) fn set_of_worker(loader: u64) {
    OF_WORKER.store(loader, Ordering::Relaxed);
}

/// Counts the reads of this thread, in the process of a loader, as those of this loader.
///
/// Args:
///     loader: Number that this process assigned; 0 for none.
///
/// Returns:
///     The previous number.
#[pyfunction]
pub(crate) fn enter_loader(loader: u64) -> u64 {
    OF_THREAD.replace(loader)
}
