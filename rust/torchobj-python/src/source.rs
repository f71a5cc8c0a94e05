//! The source of a dataset for the prefetcher: objects by index in a manifest, or by `ObjectRef`.

use std::sync::Arc;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::arena::{Announcement, Worker};
use torchobj_core::error::Error;
use torchobj_core::manifest::{Manifest as Packed, ObjectInfo};
use torchobj_core::prefetch::{AnnouncingIterator, ListedSource, Prefetcher, PrefetcherHandle, Process, charge};
use torchobj_core::source_key::SourceKey;

use crate::buffer::Buffer;
use crate::config::StoreConfig;
use crate::manifest::NativeManifest;
use crate::object_ref::{ObjectRef, client_of, readers};
use crate::prefetcher::{buffers, check_signals, loader_of_thread, own, unanswered};
use crate::store::NativeStore;
use crate::wait::wait;

/// Reads objects ahead, which are identified by their index in a manifest, or by `ObjectRef`.
///
/// The process that creates a source owns it: its prefetcher reads the objects, for itself and for its workers, which share
/// the memory of its arena. The buffers of the readers stay valid until they are dropped.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct ObjectSource {
    number: u64,
    /// `None` if the objects are given by reference.
    manifest: Option<Arc<Packed>>,
    prefetcher: PrefetcherHandle,
}

#[pymethods]
impl ObjectSource {
    /// Creates a source whose objects are identified by their index in a manifest.
    ///
    /// Args:
    ///     manifest: The objects.
    ///     stores: A store for each of `manifest.bases()`, in that order.
    ///     budget: Memory budget of the prefetcher in bytes, if this process has no prefetcher yet.
    ///     pinned: Whether an object must have the size and version of the manifest.
    #[staticmethod]
    #[pyo3(signature = (manifest, stores, budget, pinned=true))]
    fn of_manifest(
        py: Python<'_>,
        manifest: &NativeManifest,
        stores: Vec<Bound<'_, NativeStore>>,
        budget: u64,
        pinned: bool,
    ) -> PyResult<Self> {
        let clients = stores.iter().map(|store| store.get().client(py)).collect::<PyResult<Vec<_>>>()?;
        let manifest = manifest.packed();
        let source = ListedSource { manifest: manifest.clone(), clients, pinned };
        Self::started(py, budget, Some(manifest), |prefetcher| prefetcher.add_source(source))
    }

    /// Creates a source whose objects are identified by `ObjectRef`.
    ///
    /// Args:
    ///     configs: Pairs of a URL prefix and its configuration, the most specific first; the last prefix is empty.
    ///     budget: Memory budget of the prefetcher in bytes, if this process has no prefetcher yet.
    #[staticmethod]
    fn of_refs(py: Python<'_>, configs: Vec<(String, StoreConfig)>, budget: u64) -> PyResult<Self> {
        Self::started(py, budget, None, |prefetcher| prefetcher.add_names(Arc::new(client_of(configs))))
    }

    /// Makes the source of another process available in this one.
    ///
    /// Args:
    ///     owner: `owner` of the source.
    ///     number: `number` of the source.
    ///     file: Duplicate of the first of its `descriptors()`, valid in this process.
    ///     eventfd: Duplicate of the second.
    ///     manifest: The manifest of the source; None if its objects are identified by `ObjectRef`.
    #[staticmethod]
    #[pyo3(signature = (owner, number, file, eventfd, manifest=None))]
    fn attach(
        owner: u64,
        number: u64,
        file: i32,
        eventfd: i32,
        manifest: Option<PyRef<'_, NativeManifest>>,
    ) -> PyResult<Self> {
        let prefetcher = PrefetcherHandle::attach(owner, file, eventfd)?;
        Ok(Self { number, manifest: manifest.map(|manifest| manifest.packed()), prefetcher })
    }

    /// Returns the file descriptors of the arena and of its eventfd, to send them to a worker that does not inherit them.
    ///
    /// Raises:
    ///     OSError: The program has closed them.
    fn descriptors(&self) -> PyResult<(i32, i32)> {
        Ok(self.prefetcher.descriptors()?)
    }

    /// `process_number()` of the owner.
    #[getter]
    fn owner(&self) -> u64 {
        self.prefetcher.owner()
    }

    /// Number of the source in its owner.
    #[getter]
    fn number(&self) -> u64 {
        self.number
    }

    /// Returns whether announced objects were not read yet. In a process other than the owner always True.
    fn announced(&self) -> bool {
        self.prefetcher.prefetcher().is_none_or(|prefetcher| prefetcher.has_announced())
    }

    /// Returns objects in the form of `Announcer.announce`, which must be called next. Empty in a process other than the owner.
    ///
    /// Args:
    ///     keys: As for `read`.
    fn to_announce(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<(u64, u64)>> {
        let keys = self.keys(keys)?;
        let Some(prefetcher) = self.prefetcher.prefetcher() else { return Ok(Vec::new()) };
        let objects = py.detach(|| prefetcher.objects(self.number, &keys));
        Ok(objects.into_iter().map(|object| (object.source, object.index)).collect())
    }

    /// Reads objects concurrently, with the GIL released. In a worker, the owner reads them.
    ///
    /// Args:
    ///     keys: Indices of objects in the manifest, or a list of `ObjectRef` if the source has no manifest.
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
    #[pyo3(signature = (keys, return_errors=false))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        return_errors: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = self.keys(keys)?;
        let results = match self.prefetcher.prefetcher() {
            Some(prefetcher) => self.take(py, prefetcher, &keys)?,
            None => self.request(py, &self.prefetcher.worker()?, &keys, Announcement::default())?,
        };
        self.readers(py, &keys, results, return_errors)
    }

    /// Returns the memory in bytes that each object takes of the budget; an estimate if its size is unknown.
    ///
    /// Args:
    ///     indices: Indices of objects in the manifest.
    ///
    /// Raises:
    ///     IndexError: The source has no manifest.
    fn charges(&self, indices: Vec<u64>) -> PyResult<Vec<u64>> {
        let manifest = self.manifest.as_ref().ok_or_else(|| PyIndexError::new_err("the source has no manifest"))?;
        Ok(indices.into_iter().map(|index| charge(manifest, index, None)).collect())
    }
}

impl ObjectSource {
    fn started(
        py: Python<'_>,
        budget: u64,
        manifest: Option<Arc<Packed>>,
        add: impl FnOnce(&Prefetcher) -> u64,
    ) -> PyResult<Self> {
        let prefetcher = py.detach(|| own(budget))?;
        let number = add(&prefetcher);
        Ok(Self { number, manifest, prefetcher: PrefetcherHandle::started(prefetcher) })
    }

    fn keys(&self, keys: &Bound<'_, PyAny>) -> PyResult<Vec<SourceKey>> {
        Ok(match self.manifest {
            Some(_) => SourceKey::indices(keys.extract::<Vec<u64>>()?),
            None => {
                keys.extract::<Vec<PyRef<'_, ObjectRef>>>()?.iter().map(|object| object.named.clone().into()).collect()
            }
        })
    }

    fn take(
        &self,
        py: Python<'_>,
        prefetcher: &Arc<Prefetcher>,
        keys: &[SourceKey],
    ) -> PyResult<Vec<Result<Buffer, Error>>> {
        let (prefetcher, source, loader, keys) = (prefetcher.clone(), self.number, loader_of_thread(), keys.to_vec());
        let fetched = wait(py, async move { prefetcher.take(loader, source, &keys).await })?;
        Ok(fetched.into_iter().map(|fetched| Ok(Buffer::from(fetched?.buffer))).collect())
    }

    /// Requests objects from the owner, in a worker.
    fn request(
        &self,
        py: Python<'_>,
        worker: &Arc<Worker>,
        keys: &[SourceKey],
        announced: Announcement<'_>,
    ) -> PyResult<Vec<Result<Buffer, Error>>> {
        let replies = py.detach(|| worker.request(self.number, keys, announced, check_signals));
        Ok(buffers(replies.map_err(|error| unanswered(error, self.prefetcher.owner()))?).collect())
    }

    fn readers<'py>(
        &self,
        py: Python<'py>,
        keys: &[SourceKey],
        results: Vec<Result<Buffer, Error>>,
        return_errors: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let objects = keys.iter().map(|key| self.object(key)).collect::<PyResult<Vec<_>>>()?;
        readers(py, objects.into_iter(), results.into_iter(), return_errors)
    }

    fn object<'a>(&'a self, key: &'a SourceKey) -> PyResult<ObjectInfo<'a>> {
        match key {
            SourceKey::Ref(object) => Ok(object.object()),
            SourceKey::Index(index) => {
                let found = usize::try_from(*index).ok().and_then(|index| self.manifest.as_ref()?.get(index));
                found.ok_or_else(|| PyIndexError::new_err(format!("index {index}")))
            }
        }
    }
}

impl Drop for ObjectSource {
    fn drop(&mut self) {
        if let Some(prefetcher) = self.prefetcher.prefetcher() {
            prefetcher.remove_source(self.number);
        }
    }
}

/// Reads objects of a source and announces later ones, in the owner or in a worker. Dropping it cancels its announcements.
///
/// Args:
///     source: The source of the objects.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct SourceIterator {
    source: Py<ObjectSource>,
    iterator: AnnouncingIterator,
}

#[pymethods]
impl SourceIterator {
    #[new]
    fn new(source: Py<ObjectSource>) -> PyResult<Self> {
        let iterator = AnnouncingIterator::new(&source.get().prefetcher, loader_of_thread())?;
        Ok(Self { source, iterator })
    }

    /// Announces objects that will be read later, and reads others.
    ///
    /// Args:
    ///     keys: The objects to read, as for `ObjectSource.read`.
    ///     ahead: The objects to announce, after those that were announced before.
    ///
    /// Returns:
    ///     For each object of `keys` an `ObjectReader`, or the exception if it could not be read.
    ///
    /// Raises:
    ///     IndexError, RuntimeError: As `ObjectSource.read`.
    fn read<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        ahead: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let source = self.source.get();
        let (wanted, ahead) = (source.keys(keys)?, source.keys(ahead)?);
        let results = match self.iterator.process() {
            Process::ForkedChild => return source.read(py, keys, true),
            Process::Owner(prefetcher, iterator) => {
                py.detach(|| prefetcher.announce(iterator, &prefetcher.objects(source.number, &ahead)));
                source.take(py, prefetcher, &wanted)?
            }
            Process::Worker(worker, iterator) => {
                source.request(py, worker, &wanted, Announcement { iterator, objects: &ahead })?
            }
        };
        source.readers(py, &wanted, results, true)
    }

    /// Returns the memory budget of the owner in bytes.
    fn budget(&self) -> u64 {
        self.iterator.budget()
    }
}
