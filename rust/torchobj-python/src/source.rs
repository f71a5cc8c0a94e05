//! A source of the prefetcher for objects of a manifest, announcements of iterators, and the transfer of buffers from
//! workers to the trainer.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::arena::{Announcement, Worker};
use torchobj_core::error::Error;
use torchobj_core::fork;
use torchobj_core::manifest::Manifest as Packed;
use torchobj_core::prefetch::{ListedSource, ObjectId, Prefetcher, charge};

use crate::announcing::{AnnouncingIterator, IteratorRole};
use crate::buffer::{Buffer, ObjectReader};
use crate::error::exception;
use crate::loader;
use crate::manifest::NativeManifest;
use crate::prefetcher::{PrefetcherHandle, buffers, check_signals, existing, own, unanswered};
use crate::store::NativeStore;
use crate::wait::wait;

/// Reads the objects of a manifest ahead.
///
/// The process that creates a source owns it: its prefetcher reads the objects, for itself and for its workers, which share
/// the memory of its arena. The buffers of the readers stay valid until they are dropped.
///
/// Args:
///     manifest: The objects.
///     stores: A store for each of `manifest.bases()`, in that order.
///     budget: Memory budget of the prefetcher in bytes, if this process has no prefetcher yet.
///     pinned: Whether an object must have the size and version of the manifest.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeSource {
    owner: u32,
    number: u64,
    manifest: Arc<Packed>,
    prefetcher: PrefetcherHandle,
}

#[pymethods]
impl NativeSource {
    #[new]
    #[pyo3(signature = (manifest, stores, budget, pinned=true))]
    fn new(
        py: Python<'_>,
        manifest: &NativeManifest,
        stores: Vec<Bound<'_, NativeStore>>,
        budget: u64,
        pinned: bool,
    ) -> PyResult<Self> {
        let clients = stores.iter().map(|store| store.get().client(py)).collect::<PyResult<Vec<_>>>()?;
        let prefetcher = py.detach(|| own(budget))?;
        let manifest = manifest.packed();
        let number = prefetcher.add_source(ListedSource { manifest: manifest.clone(), clients, pinned });
        let prefetcher = PrefetcherHandle::started(prefetcher);
        Ok(Self { owner: fork::generation(), number, manifest, prefetcher })
    }

    /// Makes the source of another process available in this one.
    ///
    /// Args:
    ///     manifest: The manifest of the source.
    ///     owner: `owner` of the source.
    ///     number: `number` of the source.
    ///     file: Duplicate of the first of its `descriptors()`, valid in this process.
    ///     eventfd: Duplicate of the second.
    #[staticmethod]
    fn attach(manifest: &NativeManifest, owner: u32, number: u64, file: i32, eventfd: i32) -> PyResult<Self> {
        let prefetcher = PrefetcherHandle::attach(owner, file, eventfd)?;
        Ok(Self { owner, number, manifest: manifest.packed(), prefetcher })
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

    /// Reads objects concurrently, with the GIL released. In a worker, the owner reads them.
    ///
    /// Args:
    ///     indices: Indices of objects in the manifest.
    ///     return_errors: Whether the list contains an exception for each object that could not be read, instead of
    ///         raising the first one.
    ///
    /// Returns:
    ///     An `ObjectReader` for each object.
    ///
    /// Raises:
    ///     IndexError: An index is out of range.
    ///     StoreError: An object could not be read, unless `return_errors`.
    ///     RuntimeError: In a worker: the owner has exited, or has more than 256 workers.
    #[pyo3(signature = (indices, return_errors=false))]
    fn read<'py>(&self, py: Python<'py>, indices: Vec<u64>, return_errors: bool) -> PyResult<Bound<'py, PyList>> {
        let results = match self.prefetcher.prefetcher(self.owner) {
            Some(prefetcher) => take(py, prefetcher, self.number, &indices)?,
            None => self.request(py, &self.prefetcher.worker(self.owner)?, &indices, Announcement::default())?,
        };
        self.readers(py, &indices, results, return_errors)
    }

    /// Returns the memory in bytes that each object takes of the budget; an estimate if its size is unknown.
    fn charges(&self, indices: Vec<u64>) -> Vec<u64> {
        indices.into_iter().map(|index| charge(&self.manifest, index, None)).collect()
    }
}

impl NativeSource {
    fn readers<'py>(
        &self,
        py: Python<'py>,
        indices: &[u64],
        results: Vec<Result<Buffer, Error>>,
        return_errors: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for (index, result) in indices.iter().zip(results) {
            let object = usize::try_from(*index).ok().and_then(|index| self.manifest.get(index));
            let object = object.ok_or_else(|| PyIndexError::new_err(format!("index {index}")))?;
            match result {
                Ok(buffer) => list.append(ObjectReader::of(py, object, buffer)?)?,
                Err(error) if return_errors => list.append(exception(py, &error).into_value(py))?,
                Err(error) => return Err(exception(py, &error)),
            }
        }
        Ok(list)
    }

    /// Requests objects from the owner, in a worker.
    fn request(
        &self,
        py: Python<'_>,
        worker: &Arc<Worker>,
        indices: &[u64],
        ahead: Announcement<'_>,
    ) -> PyResult<Vec<Result<Buffer, Error>>> {
        let replies = py.detach(|| worker.request(self.number, indices, ahead, check_signals));
        Ok(buffers(replies.map_err(|error| unanswered(error, self.owner))?).collect())
    }
}

fn take(
    py: Python<'_>,
    prefetcher: &Arc<Prefetcher>,
    source: u64,
    indices: &[u64],
) -> PyResult<Vec<Result<Buffer, Error>>> {
    let objects: Vec<ObjectId> = indices.iter().map(|index| ObjectId { source, index: *index }).collect();
    let (prefetcher, loader) = (Arc::clone(prefetcher), loader::of_thread());
    let fetched = wait(py, async move { prefetcher.take(loader, &objects).await })?;
    Ok(fetched.into_iter().map(|fetched| fetched.map(|fetched| Buffer::from(fetched.buffer))).collect())
}

impl Drop for NativeSource {
    fn drop(&mut self) {
        if let Some(prefetcher) = self.prefetcher.prefetcher(self.owner) {
            prefetcher.remove_source(self.number);
        }
    }
}

/// Reads objects of a source and announces later ones, in the owner or in a worker. Dropping it cancels its announcements.
///
/// Args:
///     source: The source of the objects.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeIteration {
    source: Py<NativeSource>,
    iterator: AnnouncingIterator,
}

#[pymethods]
impl NativeIteration {
    #[new]
    fn new(source: Py<NativeSource>) -> PyResult<Self> {
        let NativeSource { owner, prefetcher, .. } = source.get();
        let iterator = AnnouncingIterator::new(prefetcher, *owner)?;
        Ok(Self { source, iterator })
    }

    /// Announces objects that will be read later, and reads others.
    ///
    /// Args:
    ///     indices: Indices of the objects to read.
    ///     ahead: Indices of the objects to announce, after those that were announced before.
    ///     return_errors: As in `NativeSource.read`.
    ///
    /// Returns:
    ///     An `ObjectReader` for each object of `indices`.
    ///
    /// Raises:
    ///     StoreError: As `NativeSource.read`.
    #[pyo3(signature = (indices, ahead, return_errors=false))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        indices: Vec<u64>,
        ahead: Vec<u64>,
        return_errors: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let source = self.source.get();
        let results = match self.iterator.role() {
            IteratorRole::Inherited => return source.read(py, indices, return_errors),
            IteratorRole::Owner(prefetcher, iterator) => {
                let announced: Vec<ObjectId> =
                    ahead.iter().map(|index| ObjectId { source: source.number, index: *index }).collect();
                py.detach(|| prefetcher.announce(iterator, &announced));
                take(py, prefetcher, source.number, &indices)?
            }
            IteratorRole::Worker(worker, iterator) => {
                source.request(py, worker, &indices, Announcement { iterator, objects: &ahead })?
            }
        };
        source.readers(py, &indices, results, return_errors)
    }

    /// Returns the memory budget of the owner in bytes.
    fn budget(&self) -> u64 {
        self.iterator.budget()
    }
}

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
    owner: u32,
    number: u64,
    prefetcher: ManuallyDrop<Arc<Prefetcher>>,
}

#[pymethods]
impl Announcer {
    #[new]
    #[pyo3(signature = (loader=0))]
    fn new(loader: u64) -> PyResult<Self> {
        let prefetcher = existing().ok_or_else(|| PyRuntimeError::new_err("this process has no prefetcher"))?;
        let number = prefetcher.new_iterator(loader);
        Ok(Self { owner: fork::generation(), number, prefetcher: ManuallyDrop::new(prefetcher) })
    }

    /// Announces objects in the order in which they will be read. Does nothing in a forked child.
    ///
    /// Args:
    ///     objects: Pairs of the number of a source and the index of an object.
    fn announce(&self, py: Python<'_>, objects: Vec<(u64, u64)>) {
        if self.owner != fork::generation() {
            return;
        }
        let objects: Vec<ObjectId> = objects.into_iter().map(|(source, index)| ObjectId { source, index }).collect();
        py.detach(|| self.prefetcher.announce(self.number, &objects));
        // A trainer with workers may never wait for a read, which would deliver events.
        crate::log::deliver(py);
    }

    /// Returns the bytes of announced objects that were not read yet, and the memory budget. The first is 0 in a forked child.
    fn pending(&self, py: Python<'_>) -> (u64, u64) {
        let ours = self.owner == fork::generation();
        let pending = || if ours { self.prefetcher.pending(self.number) } else { 0 };
        py.detach(|| (pending(), self.prefetcher.arena().budget()))
    }

    /// Returns the number of announced objects that were requested. 0 in a forked child.
    fn requested(&self, py: Python<'_>) -> u64 {
        let ours = self.owner == fork::generation();
        py.detach(|| if ours { self.prefetcher.taken(self.number) } else { 0 })
    }

    /// Cancels the announcements of objects that were not read yet.
    fn cancel(&self, py: Python<'_>) {
        if self.owner == fork::generation() {
            py.detach(|| self.prefetcher.cancel(self.number));
            crate::log::deliver(py);
        }
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        if self.owner == fork::generation() {
            self.prefetcher.cancel(self.number);
        }
    }
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
