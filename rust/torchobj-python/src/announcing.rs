//! Iterators that announce objects, in the process that owns the prefetcher or in a worker.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use pyo3::prelude::*;
use torchobj_core::arena::Worker;
use torchobj_core::fork;
use torchobj_core::prefetch::Prefetcher;

use crate::loader;
use crate::prefetcher::PrefetcherHandle;

/// The number of an iterator, and the process that has assigned it. Dropping it cancels its announcements.
pub(crate) struct AnnouncingIterator {
    process: u32,
    assigned: Assigned,
}

enum Assigned {
    Owner(ManuallyDrop<Arc<Prefetcher>>, u64),
    Worker(Arc<Worker>, u32),
}

/// Where an iterator announces.
pub(crate) enum IteratorRole<'a> {
    /// In the process that owns the prefetcher.
    Owner(&'a Arc<Prefetcher>, u64),
    /// In a worker.
    Worker(&'a Arc<Worker>, u32),
    /// The iterator belongs to the parent of this forked process: do not announce.
    Inherited,
}

impl AnnouncingIterator {
    /// Starts an iterator over objects that process `owner` reads.
    pub(crate) fn new(handle: &PrefetcherHandle, owner: u32) -> PyResult<Self> {
        let assigned = if let Some(prefetcher) = handle.prefetcher(owner) {
            let iterator = prefetcher.new_iterator(loader::of_thread());
            Assigned::Owner(ManuallyDrop::new(prefetcher.clone()), iterator)
        } else {
            let worker = handle.worker(owner)?;
            let iterator = worker.new_iterator();
            Assigned::Worker(worker, iterator)
        };
        Ok(Self { process: fork::generation(), assigned })
    }

    pub(crate) fn role(&self) -> IteratorRole<'_> {
        match &self.assigned {
            _ if self.process != fork::generation() => IteratorRole::Inherited,
            Assigned::Owner(prefetcher, iterator) => IteratorRole::Owner(prefetcher, *iterator),
            Assigned::Worker(worker, iterator) => IteratorRole::Worker(worker, *iterator),
        }
    }

    /// Memory budget of the owner in bytes.
    pub(crate) fn budget(&self) -> u64 {
        match &self.assigned {
            Assigned::Owner(prefetcher, _) => prefetcher.arena().budget(),
            Assigned::Worker(worker, _) => worker.budget(),
        }
    }
}

impl Drop for AnnouncingIterator {
    fn drop(&mut self) {
        match self.role() {
            IteratorRole::Owner(prefetcher, iterator) => prefetcher.cancel(iterator),
            IteratorRole::Worker(worker, iterator) => worker.end_iterator(iterator),
            IteratorRole::Inherited => {}
        }
    }
}
