//! Access to the prefetcher of a source: in the process that owns it, or as a worker through the arena. Also the transfer of
//! buffers from workers to the trainer.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use torchobj_core::arena::{Reply, Unanswered, Worker};
use torchobj_core::error::Error;
use torchobj_core::fork::{self, Local};
use torchobj_core::prefetch::Prefetcher;
use torchobj_core::runtime::start;

use crate::buffer::Buffer;
use crate::error::OrRaise;
use crate::loader;

/// The prefetcher of this process.
static OWN: Mutex<Option<Local<Arc<Prefetcher>>>> = Mutex::new(None);

/// Arenas that this process is attached to as a worker, by the process id of their owner.
static ATTACHED: Mutex<Option<Local<Workers>>> = Mutex::new(None);

type Workers = HashMap<u32, Arc<Worker>>;

/// Returns the prefetcher of this process. Starts one with a budget of `budget` bytes if none is running.
pub(crate) fn own(budget: u64) -> PyResult<Arc<Prefetcher>> {
    // Before the lock below is taken, which must not be held while waiting for the GIL.
    Python::attach(|py| start().or_raise(py))?;
    let _inside = fork::enter();
    let mut own = OWN.lock().expect("no holder of this lock panics");
    if let Some(prefetcher) = own.as_ref().and_then(Local::get) {
        return Ok(prefetcher.clone());
    }
    let prefetcher = Prefetcher::start(budget)?;
    *own = Some(Local::new(prefetcher.clone()));
    Ok(prefetcher)
}

/// The prefetcher of this process, if it has one.
pub(crate) fn existing() -> Option<Arc<Prefetcher>> {
    let _inside = fork::enter();
    OWN.lock().expect("no holder of this lock panics").as_ref().and_then(Local::get).cloned()
}

fn attached(owner: u32, attach: impl FnOnce() -> std::io::Result<Worker>) -> PyResult<Arc<Worker>> {
    let _inside = fork::enter();
    let mut attached = ATTACHED.lock().expect("no holder of this lock panics");
    let workers = Local::in_slot(&mut attached, Workers::new);
    if let Some(worker) = workers.get(&owner) {
        return Ok(worker.clone());
    }
    let worker = Arc::new(attach()?);
    worker.set_loader(loader::of_worker());
    workers.insert(owner, worker.clone());
    Ok(worker)
}

/// Counts the reads of this process, a worker, as those of a loader.
///
/// Args:
///     loader: Number that the process of the loader assigned.
#[pyfunction]
pub(crate) fn work_for_loader(loader: u64) {
    loader::set_of_worker(loader);
    let _inside = fork::enter();
    let mut attached = ATTACHED.lock().expect("no holder of this lock panics");
    Local::in_slot(&mut attached, Workers::new).values().for_each(|worker| worker.set_loader(loader));
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

/// The prefetcher of a source.
pub(crate) enum PrefetcherHandle {
    /// In the process that started it, and in its forked children, which inherit the arena.
    Started(ManuallyDrop<Arc<Prefetcher>>),
    /// In a process that received the descriptors of the arena.
    Attached(Arc<Worker>),
}

impl PrefetcherHandle {
    pub(crate) fn started(prefetcher: Arc<Prefetcher>) -> Self {
        Self::Started(ManuallyDrop::new(prefetcher))
    }

    pub(crate) fn attach(owner: u32, file: i32, eventfd: i32) -> PyResult<Self> {
        // If this process is attached to the arena already, the descriptors are closed.
        let [file, eventfd] = Worker::received(file, eventfd);
        Ok(Self::Attached(attached(owner, move || Worker::attach(file, eventfd))?))
    }

    /// File descriptors of the arena and of its eventfd.
    pub(crate) fn descriptors(&self) -> (i32, i32) {
        match self {
            Self::Started(prefetcher) => {
                let arena = prefetcher.arena();
                (arena.file().as_raw_fd(), arena.eventfd().as_raw_fd())
            }
            Self::Attached(worker) => (worker.file().as_raw_fd(), worker.eventfd().as_raw_fd()),
        }
    }

    /// The prefetcher, in the process `owner` only.
    pub(crate) fn prefetcher(&self, owner: u32) -> Option<&Arc<Prefetcher>> {
        match self {
            Self::Started(prefetcher) if owner == fork::generation() => Some(&**prefetcher),
            _ => None,
        }
    }

    /// The worker that sends requests to `owner`, in any other process.
    pub(crate) fn worker(&self, owner: u32) -> PyResult<Arc<Worker>> {
        match self {
            Self::Started(prefetcher) => attached(owner, || Worker::inherit(prefetcher.arena())),
            Self::Attached(worker) if worker.is_ours() => Ok(worker.clone()),
            // The slot of this worker belongs to the parent of this forked process.
            Self::Attached(worker) => attached(owner, || worker.for_child()),
        }
    }
}

/// Runs pending signal handlers. An exception of one ends the wait of a worker.
pub(crate) fn check_signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

/// The exception for a request that process `owner` did not respond to.
pub(crate) fn unanswered(error: Unanswered<PyErr>, owner: u32) -> PyErr {
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
pub(crate) fn offer(buffer: &Bound<'_, Buffer>) -> Option<(u32, u32, u32)> {
    buffer.get().offer()
}

/// Takes over the memory of a buffer that a worker offered to this process.
///
/// Args:
///     owner: Process id of the owner of the arena, which must be this process.
///     segment: Id of the segment.
///     generation: Generation of the segment.
///
/// Returns:
///     A buffer with that memory if the worker has dropped its own, and with a copy otherwise.
///
/// Raises:
///     RuntimeError: Another process is the owner, or the buffer was taken over already.
#[pyfunction]
pub(crate) fn adopt(py: Python<'_>, owner: u32, segment: u32, generation: u32) -> PyResult<Buffer> {
    let lost = || {
        PyRuntimeError::new_err(format!("a buffer of process {owner} can be adopted once, and only in that process"))
    };
    let prefetcher = existing().filter(|_| owner == fork::generation()).ok_or_else(lost)?;
    let adopted = py.detach(|| prefetcher.arena().adopt(segment, generation))?;
    Ok(adopted.ok_or_else(lost)?.into())
}
