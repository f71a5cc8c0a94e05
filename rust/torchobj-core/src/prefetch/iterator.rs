//! Iterators that announce objects: of the order of a loader, or of a dataset in a worker.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::handle::PrefetcherHandle;
use super::prefetcher::Prefetcher;
use crate::arena::Worker;
use crate::fork;

/// The number of an iterator, and the process that has assigned it. Dropping it cancels its announcements.
#[derive(Debug)]
pub struct AnnouncingIterator {
    process: u64,
    assigned: Assigned,
}

#[derive(Debug)]
enum Assigned {
    Owner(ManuallyDrop<Arc<Prefetcher>>, u64),
    Worker(Arc<Worker>, u32),
}

/// The process that uses an iterator.
#[derive(Debug)]
pub enum Process<'a> {
    /// The one that owns the prefetcher.
    Owner(&'a Arc<Prefetcher>, u64),
    /// A worker of the owner.
    Worker(&'a Arc<Worker>, u32),
    /// A forked child of the process that the iterator belongs to: it does not announce.
    ForkedChild,
}

impl AnnouncingIterator {
    /// Starts an iterator over objects that a prefetcher reads, for a loader if it is the prefetcher of this process.
    ///
    /// # Errors
    /// As [`PrefetcherHandle::worker`].
    pub fn new(handle: &PrefetcherHandle, loader: u64) -> io::Result<Self> {
        if let Some(prefetcher) = handle.prefetcher() {
            return Ok(Self::in_owner(prefetcher.clone(), loader));
        }
        let worker = handle.worker()?;
        let iterator = worker.new_iterator();
        Ok(Self { process: fork::generation(), assigned: Assigned::Worker(worker, iterator) })
    }

    /// Starts an iterator of a loader in this process, which owns the prefetcher.
    pub fn in_owner(prefetcher: Arc<Prefetcher>, loader: u64) -> Self {
        let iterator = prefetcher.new_iterator(loader);
        let assigned = Assigned::Owner(ManuallyDrop::new(prefetcher), iterator);
        Self { process: fork::generation(), assigned }
    }

    /// The process that calls this, with what it announces to.
    pub fn process(&self) -> Process<'_> {
        match &self.assigned {
            _ if self.process != fork::generation() => Process::ForkedChild,
            Assigned::Owner(prefetcher, iterator) => Process::Owner(prefetcher, *iterator),
            Assigned::Worker(worker, iterator) => Process::Worker(worker, *iterator),
        }
    }

    /// Memory budget of the owner in bytes.
    pub fn budget(&self) -> u64 {
        match &self.assigned {
            Assigned::Owner(prefetcher, _) => prefetcher.arena().budget(),
            Assigned::Worker(worker, _) => worker.budget(),
        }
    }
}

impl Drop for AnnouncingIterator {
    fn drop(&mut self) {
        match self.process() {
            Process::Owner(prefetcher, iterator) => prefetcher.cancel(iterator),
            Process::Worker(worker, iterator) => worker.end_iterator(iterator),
            Process::ForkedChild => {}
        }
    }
}
