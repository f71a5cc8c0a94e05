//! The prefetcher of this process: its start, its statistics, the loader that a read is counted for, and the transfer of
//! buffers from workers to the trainer.

use std::cell::Cell;
use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use torchobj_core::arena::{Reply, Unanswered};
use torchobj_core::error::Error;
use torchobj_core::fork;
use torchobj_core::policy::Counts;
use torchobj_core::prefetch::{self, Prefetcher, existing};
use torchobj_core::runtime::start;

use crate::buffer::Buffer;
use crate::error::OrRaise;
use crate::process::set_counts;

thread_local! {
    static OF_THREAD: Cell<u64> = const { Cell::new(0) };
}

/// The loader that the current thread reads for; 0 for none.
pub(crate) fn loader_of_thread() -> u64 {
    OF_THREAD.get()
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

/// Returns the prefetcher of this process. Starts one with a budget of `budget` bytes if none is running.
pub(crate) fn own(budget: u64) -> PyResult<Arc<Prefetcher>> {
    Python::attach(|py| start().or_raise(py))?;
    Ok(prefetch::own(budget)?)
}

/// Counts the reads of this process, a worker, as those of a loader.
///
/// Args:
///     loader: Number that the process of the loader assigned.
#[pyfunction]
pub(crate) fn work_for_loader(loader: u64) {
    prefetch::work_for_loader(loader);
}

/// Deletes the counters of a loader.
///
/// Args:
///     loader: Number that this process assigned.
#[pyfunction]
pub(crate) fn remove_loader(loader: u64) {
    if let Some(prefetcher) = existing() {
        prefetcher.remove_loader(loader);
    }
}

/// Runs pending signal handlers. An exception of one ends the wait of a worker.
pub(crate) fn check_signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

/// The exception for a request that process `owner` did not respond to.
pub(crate) fn unanswered(error: Unanswered<PyErr>, owner: u64) -> PyErr {
    let owner = fork::pid_of(owner);
    match error {
        Unanswered::Interrupted(signal) => signal,
        Unanswered::OwnerGone => PyRuntimeError::new_err(format!("process {owner}, which reads ahead, has exited")),
        Unanswered::NoFreeSlot => PyRuntimeError::new_err("more than 256 workers read from one process"),
    }
}

/// Converts the replies to a worker.
pub(crate) fn buffers(replies: Vec<Reply>) -> impl Iterator<Item = Result<Buffer, Error>> {
    replies.into_iter().map(|reply| match reply {
        Reply::Claimed(claim) => Ok(Buffer::claimed(claim)),
        Reply::Failed(error) => Err(Error::from_bytes(&error)),
    })
}

/// Starts the prefetcher of this process, if it has none.
///
/// Args:
///     budget: Memory budget in bytes.
///
/// Raises:
///     OSError: The arena could not be allocated.
///     StoreError: The runtime could not be started.
#[pyfunction]
pub(crate) fn start_prefetcher(py: Python<'_>, budget: u64) -> PyResult<()> {
    py.detach(|| own(budget)).map(drop)
}

/// Offers the memory of a buffer to the owner of its arena, without a copy.
///
/// Returns:
///     `(owner, segment, generation)`, the arguments of `adopt` in the owner. None if the buffer must be copied, because it is
///     not in an arena, or this process can still write to it.
#[pyfunction]
pub(crate) fn offer(buffer: &Bound<'_, Buffer>) -> Option<(u64, u32, u32)> {
    buffer.get().offer()
}

/// Takes over the memory of a buffer that a worker offered to this process.
///
/// Args:
///     owner: `process_number()` of the owner of the arena, which must be this process.
///     segment: Id of the segment.
///     generation: Generation of the segment.
///
/// Returns:
///     A buffer with that memory if the worker has dropped its own, and with a copy otherwise.
///
/// Raises:
///     RuntimeError: Another process is the owner, or the buffer was taken over already.
#[pyfunction]
pub(crate) fn adopt(py: Python<'_>, owner: u64, segment: u32, generation: u32) -> PyResult<Buffer> {
    let lost = || {
        PyRuntimeError::new_err(format!(
            "a buffer of process {} can be adopted once, and only in that process",
            fork::pid_of(owner)
        ))
    };
    let prefetcher = existing().filter(|_| owner == fork::generation()).ok_or_else(lost)?;
    let adopted = py.detach(|| prefetcher.arena().adopt(segment, generation))?;
    Ok(adopted.ok_or_else(lost)?.into())
}

/// Releases the memory of the prefetcher of this process that is not in use.
#[pyfunction]
pub(crate) fn release_free_memory(py: Python<'_>) {
    if let Some(prefetcher) = existing() {
        py.detach(|| prefetcher.arena().release_free_pages());
    }
}

/// Returns the counters and the memory of the prefetcher of this process; an empty dict if it has none.
///
/// Args:
///     loader: Number of a loader, which this process assigned: the counters are its own. None: they are those of the process.
#[pyfunction]
#[pyo3(signature = (loader=None))]
pub(crate) fn prefetch_stats(py: Python<'_>, loader: Option<u64>) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    let Some(prefetcher) = existing() else { return Ok(dict) };
    let stats = py.detach(|| prefetcher.stats(loader));
    set_counts(&dict, stats.by_name())?;
    set_counts(&dict, stats.requests.by_name())?;
    let quantile = |counts: &Counts, share| counts.quantile(share).map(|took| took.as_secs_f64());
    let requests = &stats.requests;
    dict.set_item("first_byte_p50_s", quantile(&requests.first_byte, 0.5))?;
    dict.set_item("first_byte_p99_s", quantile(&requests.first_byte, 0.99))?;
    dict.set_item("body_p50_s", quantile(&requests.body, 0.5))?;
    dict.set_item("body_p99_s", quantile(&requests.body, 0.99))?;
    Ok(dict)
}
