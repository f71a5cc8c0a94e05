//! A source of the prefetcher for objects given by reference.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::arena::{Announcement, Worker};
use torchobj_core::fork;
use torchobj_core::object_ref::ObjectRef as Named;
use torchobj_core::prefetch::Prefetcher;

use crate::announcing::{AnnouncingIterator, IteratorRole};
use crate::buffer::Buffer;
use crate::config::StoreConfig;
use crate::loader;
use crate::object_ref::{ObjectRef, clients, readers};
use crate::prefetcher::{PrefetcherHandle, buffers, check_signals, own, unanswered};
use crate::wait::wait;

/// Reads objects of any stores ahead, given by `ObjectRef`.
///
/// The process that creates a source owns it: its prefetcher reads the objects, for itself and for its workers, which share
/// the memory of its arena. The buffers of the readers stay valid until they are dropped.
///
/// Args:
///     configs: Pairs of a URL prefix and its configuration, the most specific first; the last prefix is empty.
///     budget: Memory budget of the prefetcher in bytes, if this process has no prefetcher yet.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct RefSource {
    owner: u32,
    number: u64,
    prefetcher: PrefetcherHandle,
}

#[pymethods]
impl RefSource {
    #[new]
    fn new(py: Python<'_>, configs: Vec<(String, StoreConfig)>, budget: u64) -> PyResult<Self> {
        let prefetcher = py.detach(|| own(budget))?;
        let number = prefetcher.add_names(Arc::new(clients(&configs)));
        Ok(Self { owner: fork::generation(), number, prefetcher: PrefetcherHandle::started(prefetcher) })
    }

    /// Makes the source of another process available in this one.
    ///
    /// Args:
    ///     owner: `owner` of the source.
    ///     number: `number` of the source.
    ///     file: Duplicate of the first of its `descriptors()`, valid in this process.
    ///     eventfd: Duplicate of the second.
    #[staticmethod]
    fn attach(owner: u32, number: u64, file: i32, eventfd: i32) -> PyResult<Self> {
        Ok(Self { owner, number, prefetcher: PrefetcherHandle::attach(owner, file, eventfd)? })
    }

    /// Returns the file descriptors of the arena and of its eventfd, to send them to a worker that does not inherit them.
    fn descriptors(&self) -> (i32, i32) {
        self.prefetcher.descriptors()
    }

    /// Process id of the owner.
    #[getter]
    fn owner(&self) -> u32 {
        self.owner
    }

    /// Number of the source in its owner.
    #[getter]
    fn number(&self) -> u64 {
        self.number
    }

    /// Returns whether announced objects were not read yet. In a process other than the owner always True.
    fn announced(&self) -> bool {
        self.prefetcher.prefetcher(self.owner).is_none_or(|prefetcher| prefetcher.has_announced())
    }

    /// Returns objects in the form of `Announcer.announce`, which must be called next. Empty in a process other than the owner.
    fn objects(&self, py: Python<'_>, refs: Vec<PyRef<'_, ObjectRef>>) -> Vec<(u64, u64)> {
        let names = named(&refs);
        let Some(prefetcher) = self.prefetcher.prefetcher(self.owner) else { return Vec::new() };
        let objects = py.detach(|| prefetcher.objects(self.number, names.iter().map(Arc::as_ref)));
        objects.into_iter().map(|object| (object.source, object.index)).collect()
    }

    /// Reads objects concurrently, with the GIL released. In a worker, the owner reads them.
    ///
    /// Returns:
    ///     For each object an `ObjectReader`, or the exception if it could not be read.
    ///
    /// Raises:
    ///     RuntimeError: In a worker: the owner has exited, or has more than 256 workers.
    fn read<'py>(&self, py: Python<'py>, refs: Vec<PyRef<'py, ObjectRef>>) -> PyResult<Bound<'py, PyList>> {
        let names = named(&refs);
        match self.prefetcher.prefetcher(self.owner) {
            Some(prefetcher) => self.take(py, prefetcher, &names),
            None => self.request(py, &self.prefetcher.worker(self.owner)?, &names, Announcement::default()),
        }
    }
}

impl RefSource {
    fn take<'py>(
        &self,
        py: Python<'py>,
        prefetcher: &Arc<Prefetcher>,
        names: &[Arc<Named>],
    ) -> PyResult<Bound<'py, PyList>> {
        let (prefetcher, source, requested) = (prefetcher.clone(), self.number, names.to_vec());
        let loader = loader::of_thread();
        let fetched = wait(py, async move { prefetcher.take_by_name(loader, source, &requested).await })?;
        readers(py, names, fetched.into_iter().map(|fetched| Ok(Buffer::from(fetched?.buffer))))
    }

    /// Requests objects from the owner, in a worker.
    fn request<'py>(
        &self,
        py: Python<'py>,
        worker: &Arc<Worker>,
        names: &[Arc<Named>],
        ahead: Announcement<'_, Vec<u8>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let replies = py.detach(|| worker.request_by_name(self.number, &records(names), ahead, check_signals));
        readers(py, names, buffers(replies.map_err(|error| unanswered(error, self.owner))?))
    }
}

fn named(refs: &[PyRef<'_, ObjectRef>]) -> Vec<Arc<Named>> {
    refs.iter().map(|object| object.named()).collect()
}

fn records(names: &[Arc<Named>]) -> Vec<Vec<u8>> {
    names.iter().map(|name| name.to_bytes()).collect()
}

/// Reads objects given by `ObjectRef` and announces later ones, in the owner or in a worker. Dropping it cancels its
/// announcements.
///
/// Args:
///     source: The source of the objects.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct RefIteration {
    source: Py<RefSource>,
    iterator: AnnouncingIterator,
}

#[pymethods]
impl RefIteration {
    #[new]
    fn new(source: Py<RefSource>) -> PyResult<Self> {
        let RefSource { owner, prefetcher, .. } = source.get();
        let iterator = AnnouncingIterator::new(prefetcher, *owner)?;
        Ok(Self { source, iterator })
    }

    /// Announces objects that will be read later, and reads others.
    ///
    /// Args:
    ///     refs: The objects to read.
    ///     ahead: The objects to announce, after those that were announced before.
    ///
    /// Returns:
    ///     For each object of `refs` an `ObjectReader`, or the exception if it could not be read.
    ///
    /// Raises:
    ///     RuntimeError: As `RefSource.read`.
    fn read<'py>(
        &self,
        py: Python<'py>,
        refs: Vec<PyRef<'py, ObjectRef>>,
        ahead: Vec<PyRef<'py, ObjectRef>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let (source, names, later) = (self.source.get(), named(&refs), named(&ahead));
        match self.iterator.role() {
            IteratorRole::Inherited => source.read(py, refs),
            IteratorRole::Owner(prefetcher, iterator) => {
                py.detach(|| {
                    let announced = prefetcher.objects(source.number, later.iter().map(Arc::as_ref));
                    prefetcher.announce(iterator, &announced);
                });
                source.take(py, prefetcher, &names)
            }
            IteratorRole::Worker(worker, iterator) => {
                let objects = records(&later);
                source.request(py, worker, &names, Announcement { iterator, objects: &objects })
            }
        }
    }

    /// Returns the memory budget of the owner in bytes.
    fn budget(&self) -> u64 {
        self.iterator.budget()
    }
}

impl Drop for RefSource {
    fn drop(&mut self) {
        if let Some(prefetcher) = self.prefetcher.prefetcher(self.owner) {
            prefetcher.remove_source(self.number);
        }
    }
}
