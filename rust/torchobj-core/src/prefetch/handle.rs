//! Access to a prefetcher: in the process that owns it, or in another one, as a worker through the arena.

use std::collections::HashMap;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::prefetcher::Prefetcher;
use crate::arena::Worker;
use crate::fork::{self, Local};

/// The prefetcher of this process.
static OWN: Mutex<Option<Local<Arc<Prefetcher>>>> = Mutex::new(None);

/// Arenas that this process is attached to as a worker, by the identity of the process of their owner.
static ATTACHED: Mutex<Option<Local<Workers>>> = Mutex::new(None);

type Workers = HashMap<u64, Arc<Worker>>;

/// The loader that this process, a worker, works for; 0 for none.
static OF_WORKER: AtomicU64 = AtomicU64::new(0);

/// Returns the prefetcher of this process. Starts one with a budget of `budget` bytes if none is running.
///
/// # Errors
/// As [`Prefetcher::start`].
pub fn own(budget: u64) -> io::Result<Arc<Prefetcher>> {
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
pub fn existing() -> Option<Arc<Prefetcher>> {
    let _inside = fork::enter();
    OWN.lock().expect("no holder of this lock panics").as_ref().and_then(Local::get).cloned()
}

/// Counts the reads of this process, a worker, as those of a loader of the owner.
pub fn work_for_loader(loader: u64) {
    OF_WORKER.store(loader, Ordering::Relaxed);
    let _inside = fork::enter();
    let mut attached = ATTACHED.lock().expect("no holder of this lock panics");
    Local::in_slot(&mut attached, Workers::new).values().for_each(|worker| worker.set_loader(loader));
}

fn attached(owner: u64, attach: impl FnOnce() -> io::Result<Worker>) -> io::Result<Arc<Worker>> {
    let _inside = fork::enter();
    let mut attached = ATTACHED.lock().expect("no holder of this lock panics");
    let workers = Local::in_slot(&mut attached, Workers::new);
    if let Some(worker) = workers.get(&owner) {
        return Ok(worker.clone());
    }
    let worker = Arc::new(attach()?);
    worker.set_loader(OF_WORKER.load(Ordering::Relaxed));
    workers.insert(owner, worker.clone());
    Ok(worker)
}

/// A prefetcher, of this process or of another.
#[derive(Debug)]
pub struct PrefetcherHandle {
    owner: u64,
    access: Access,
}

#[derive(Debug)]
enum Access {
    /// In the process that started the prefetcher, and in its forked children, which inherit the arena.
    Started(ManuallyDrop<Arc<Prefetcher>>),
    /// In a process that received the descriptors of the arena.
    Attached(Arc<Worker>),
}

impl PrefetcherHandle {
    /// A prefetcher of this process.
    pub fn started(prefetcher: Arc<Prefetcher>) -> Self {
        Self { owner: fork::generation(), access: Access::Started(ManuallyDrop::new(prefetcher)) }
    }

    /// The prefetcher of process `owner`, of which this one has received duplicates of the
    /// [`descriptors`](Self::descriptors).
    ///
    /// # Errors
    /// As [`Worker::attach`].
    pub fn attach(owner: u64, file: RawFd, eventfd: RawFd) -> io::Result<Self> {
        // If this process is attached to the arena already, the descriptors are closed.
        let [file, eventfd] = Worker::received(file, eventfd);
        let worker = attached(owner, move || Worker::attach(file, eventfd))?;
        Ok(Self { owner, access: Access::Attached(worker) })
    }

    /// Identity of the process that owns the prefetcher, as of [`fork::generation`].
    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// File descriptors of the arena and of its eventfd.
    ///
    /// # Errors
    /// The program has closed them.
    pub fn descriptors(&self) -> io::Result<(RawFd, RawFd)> {
        let (file, eventfd) = match &self.access {
            Access::Started(prefetcher) => (prefetcher.arena().file(), prefetcher.arena().eventfd()),
            Access::Attached(worker) => (worker.file(), worker.eventfd()),
        };
        Ok((file.get()?.as_raw_fd(), eventfd.get()?.as_raw_fd()))
    }

    /// The prefetcher, in the process that owns it only.
    pub fn prefetcher(&self) -> Option<&Arc<Prefetcher>> {
        match &self.access {
            Access::Started(prefetcher) if self.owner == fork::generation() => Some(prefetcher),
            _ => None,
        }
    }

    /// The worker that sends requests to the owner, in any other process.
    ///
    /// # Errors
    /// The owner has exited.
    pub fn worker(&self) -> io::Result<Arc<Worker>> {
        match &self.access {
            Access::Started(prefetcher) => attached(self.owner, || Worker::inherit(prefetcher.arena())),
            Access::Attached(worker) if worker.is_ours() => Ok(worker.clone()),
            // The slot of this worker belongs to the parent of this forked process.
            Access::Attached(worker) => attached(self.owner, || worker.for_child()),
        }
    }
}
