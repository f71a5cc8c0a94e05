//! Announces the objects of an iterator of a loader.

use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use torchobj_core::prefetch::{AnnouncingIterator, ObjectId, Prefetcher, Process, existing};

use crate::log;

/// Announces objects that an iterator of a loader will read, to the prefetcher of this process. Dropping it cancels its
/// announcements.
///
/// Args:
///     loader: Number of the loader, which this process assigned; 0 for none.
///
/// Raises:
///     RuntimeError: This process has no prefetcher.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct Announcer {
    iterator: AnnouncingIterator,
}

#[pymethods]
impl Announcer {
    #[new]
    #[pyo3(signature = (loader=0))]
    fn new(loader: u64) -> PyResult<Self> {
        let prefetcher = existing().ok_or_else(|| PyRuntimeError::new_err("this process has no prefetcher"))?;
        Ok(Self { iterator: AnnouncingIterator::in_owner(prefetcher, loader) })
    }

    /// Announces objects in the order in which they will be read. Does nothing in a forked child.
    ///
    /// Args:
    ///     objects: Pairs of the number of a source and the index of an object.
    fn announce(&self, py: Python<'_>, objects: Vec<(u64, u64)>) -> PyResult<()> {
        let objects: Vec<ObjectId> = objects.into_iter().map(|(source, index)| ObjectId { source, index }).collect();
        if self.in_owner(py, |prefetcher, iterator| prefetcher.announce(iterator, &objects)).is_some() {
            // A trainer with workers may never wait for a read, which would deliver events.
            log::deliver(py)?;
        }
        Ok(())
    }

    /// Returns the bytes of announced objects that were not read yet, and the memory budget. The first is 0 in a forked child.
    fn pending(&self, py: Python<'_>) -> (u64, u64) {
        let pending = self.in_owner(py, |prefetcher, iterator| prefetcher.pending(iterator));
        (pending.unwrap_or(0), self.iterator.budget())
    }

    /// Records that no more is announced, until the next call of `announce`, because `pending` reached its part of the budget.
    fn limit_by_memory(&self, py: Python<'_>) {
        self.in_owner(py, |prefetcher, iterator| prefetcher.limit_by_memory(iterator));
    }

    /// Returns the number of announced objects that were requested. 0 in a forked child.
    fn requested(&self, py: Python<'_>) -> u64 {
        self.in_owner(py, |prefetcher, iterator| prefetcher.taken(iterator)).unwrap_or(0)
    }

    /// Cancels the announcements of objects that were not read yet.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        if self.in_owner(py, |prefetcher, iterator| prefetcher.cancel(iterator)).is_some() {
            log::deliver(py)?;
        }
        Ok(())
    }
}

impl Announcer {
    /// Calls a function of the prefetcher with the number of the iterator. `None` in a forked child.
    fn in_owner<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&Arc<Prefetcher>, u64) -> T + Send) -> Option<T> {
        match self.iterator.process() {
            Process::Owner(prefetcher, iterator) => Some(py.detach(|| call(prefetcher, iterator))),
            _ => None,
        }
    }
}
