//! Who a process is to the sources of a prefetcher: the owner, who reads, or a worker, who asks it.

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

/// The prefetcher of this process.
static OWN: Mutex<Option<Local<Arc<Prefetcher>>>> = Mutex::new(None);

/// What this process attached to as a worker, by the owner's process.
static ATTACHED: Mutex<Option<Local<Workers>>> = Mutex::new(None);

type Workers = HashMap<u32, Arc<Worker>>;

/// The prefetcher of this process, made with `budget` if it has none yet.
pub(crate) fn own(budget: u64) -> PyResult<Arc<Prefetcher>> {
    // Not under the lock below.
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
    workers.insert(owner, worker.clone());
    Ok(worker)
}

/// How a source is reached.
pub(crate) enum Reach {
    /// In the process that made it, and in its forked children, who find the arena here.
    Made(ManuallyDrop<Arc<Prefetcher>>),
    /// In a process that was given the descriptors.
    Attached(Arc<Worker>),
}

impl Reach {
    pub(crate) fn made(prefetcher: Arc<Prefetcher>) -> Self {
        Self::Made(ManuallyDrop::new(prefetcher))
    }

    pub(crate) fn attach(owner: u32, file: i32, bell: i32) -> PyResult<Self> {
        // Of another source of that owner there is a worker already: these are closed then.
        let [file, bell] = Worker::received(file, bell);
        Ok(Self::Attached(attached(owner, move || Worker::attach(file, bell))?))
    }

    /// Numbers of the arena's file and its bell.
    pub(crate) fn descriptors(&self) -> (i32, i32) {
        match self {
            Self::Made(prefetcher) => {
                let arena = prefetcher.arena();
                (arena.file().as_raw_fd(), arena.bell().as_raw_fd())
            }
            Self::Attached(worker) => (worker.file().as_raw_fd(), worker.bell().as_raw_fd()),
        }
    }

    /// The prefetcher, in the process `owner`, whose it is.
    pub(crate) fn prefetcher(&self, owner: u32) -> Option<&Arc<Prefetcher>> {
        match self {
            Self::Made(prefetcher) if owner == fork::generation() => Some(&**prefetcher),
            _ => None,
        }
    }

    /// In any other process: whom to ask.
    pub(crate) fn worker(&self, owner: u32) -> PyResult<Arc<Worker>> {
        match self {
            Self::Made(prefetcher) => attached(owner, || Worker::inherit(prefetcher.arena())),
            Self::Attached(worker) if worker.is_ours() => Ok(worker.clone()),
            // Its lane is that of the process which forked this one.
            Self::Attached(worker) => attached(owner, || worker.again()),
        }
    }
}

/// What ends a worker's wait: a signal whose handler raises.
pub(crate) fn glance() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

/// The exception of who got no answers from process `owner`.
pub(crate) fn unanswered(none: Unanswered<PyErr>, owner: u32) -> PyErr {
    match none {
        Unanswered::Interrupted(signal) => signal,
        Unanswered::OwnerGone => PyRuntimeError::new_err(format!("process {owner}, which reads, is gone")),
        Unanswered::NoLane => PyRuntimeError::new_err("too many workers read from one process: at most 256 can"),
    }
}

/// What a worker was answered, as buffers.
pub(crate) fn buffers(replies: Vec<Reply>) -> impl Iterator<Item = Result<Buffer, Error>> {
    replies.into_iter().map(|reply| match reply {
        Reply::Landed(claim) => Ok(Buffer::claimed(claim)),
        Reply::Failed(error) => Err(Error::from_bytes(&error)),
    })
}
