//! The source of a dataset for the prefetcher: objects by index in a manifest, or by `ObjectRef`.

use std::sync::Arc;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::arena::{Announcement, Worker};
use torchobj_core::error::Error;
use torchobj_core::fork;
use torchobj_core::manifest::Manifest as Packed;
use torchobj_core::object_ref::ObjectRef as Named;
use torchobj_core::prefetch::{ListedSource, ObjectId, Prefetcher, charge};

use crate::announcing::{AnnouncingIterator, Process};
use crate::buffer::Buffer;
use crate::config::StoreConfig;
use crate::manifest::NativeManifest;
use crate::object_ref::{ObjectRef, client_of, readers, referenced};
use crate::prefetcher::{PrefetcherHandle, buffers, check_signals, loader_of_thread, own, unanswered};
use crate::store::NativeStore;
use crate::wait::wait;

/// Reads objects ahead, which are identified by their index in a manifest, or by `ObjectRef`.
///
/// The process that creates a source owns it: its prefetcher reads the objects, for itself and for its workers, which share
/// the memory of its arena. The buffers of the readers stay valid until they are dropped.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct ObjectSource {
    owner: u64,
    number: u64,
    /// `None` if the objects are given by reference.
    manifest: Option<Arc<Packed>>,
    prefetcher: PrefetcherHandle,
}

/// Objects of a source.
enum Objects {
    /// By index in its manifest.
    Listed(Vec<u64>),
    Named(Vec<Arc<Named>>),
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
        Ok(Self { owner, number, manifest: manifest.map(|manifest| manifest.packed()), prefetcher })
    }

    /// Returns the file descriptors of the arena and of its eventfd, to send them to a worker that does not inherit them.
    ///
    /// Raises:
    ///     OSError: The program has closed them.
    fn descriptors(&self) -> PyResult<(i32, i32)> {
        self.prefetcher.descriptors()
    }

    /// `process_number()` of the owner.
    #[getter]
    fn owner(&self) -> u64 {
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
    ///
    /// Args:
    ///     keys: As for `read`.
    fn to_announce(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<(u64, u64)>> {
        let objects = self.objects(keys)?;
        let Some(prefetcher) = self.prefetcher.prefetcher(self.owner) else { return Ok(Vec::new()) };
        let objects = py.detach(|| self.numbered(prefetcher, &objects));
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
        let objects = self.objects(keys)?;
        let results = match self.prefetcher.prefetcher(self.owner) {
            Some(prefetcher) => self.take(py, prefetcher, &objects)?,
            None => self.request(py, &self.prefetcher.worker(self.owner)?, &objects, 0, None)?,
        };
        self.readers(py, &objects, results, return_errors)
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
        Ok(Self { owner: fork::generation(), number, manifest, prefetcher: PrefetcherHandle::started(prefetcher) })
    }

    fn objects(&self, keys: &Bound<'_, PyAny>) -> PyResult<Objects> {
        Ok(match self.manifest {
            Some(_) => Objects::Listed(keys.extract()?),
            None => Objects::Named(referenced(&keys.extract::<Vec<PyRef<'_, ObjectRef>>>()?)),
        })
    }

    /// The objects by number, which must be announced next.
    fn numbered(&self, prefetcher: &Prefetcher, objects: &Objects) -> Vec<ObjectId> {
        let source = self.number;
        match objects {
            Objects::Listed(indices) => indices.iter().map(|index| ObjectId { source, index: *index }).collect(),
            Objects::Named(names) => prefetcher.objects(source, names),
        }
    }

    fn take(
        &self,
        py: Python<'_>,
        prefetcher: &Arc<Prefetcher>,
        objects: &Objects,
    ) -> PyResult<Vec<Result<Buffer, Error>>> {
        let (prefetcher, source, loader) = (prefetcher.clone(), self.number, loader_of_thread());
        let fetched = match objects {
            Objects::Listed(_) => {
                let objects = self.numbered(&prefetcher, objects);
                wait(py, async move { prefetcher.take(loader, &objects).await })?
            }
            Objects::Named(names) => {
                let names = names.clone();
                wait(py, async move { prefetcher.take_by_name(loader, source, &names).await })?
            }
        };
        Ok(fetched.into_iter().map(|fetched| Ok(Buffer::from(fetched?.buffer))).collect())
    }

    /// Requests objects from the owner, in a worker, and announces `ahead` for one of its iterators.
    fn request(
        &self,
        py: Python<'_>,
        worker: &Arc<Worker>,
        objects: &Objects,
        iterator: u32,
        ahead: Option<&Objects>,
    ) -> PyResult<Vec<Result<Buffer, Error>>> {
        let source = self.number;
        let replies = py.detach(|| match objects {
            Objects::Listed(indices) => {
                let objects = if let Some(Objects::Listed(ahead)) = ahead { ahead } else { &Vec::new() };
                worker.request(source, indices, Announcement { iterator, objects }, check_signals)
            }
            Objects::Named(names) => {
                let objects = if let Some(Objects::Named(ahead)) = ahead { &records(ahead) } else { &Vec::new() };
                worker.request_by_name(source, &records(names), Announcement { iterator, objects }, check_signals)
            }
        });
        Ok(buffers(replies.map_err(|error| unanswered(error, self.owner))?).collect())
    }

    fn readers<'py>(
        &self,
        py: Python<'py>,
        objects: &Objects,
        results: Vec<Result<Buffer, Error>>,
        return_errors: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        match objects {
            Objects::Listed(indices) => {
                let object = |index: &u64| {
                    let found = usize::try_from(*index).ok().and_then(|index| self.manifest.as_ref()?.get(index));
                    found.ok_or_else(|| PyIndexError::new_err(format!("index {index}")))
                };
                let objects = indices.iter().map(object).collect::<PyResult<Vec<_>>>()?;
                readers(py, objects.into_iter(), results.into_iter(), return_errors)
            }
            Objects::Named(names) => {
                readers(py, names.iter().map(|name| name.object()), results.into_iter(), return_errors)
            }
        }
    }
}

fn records(names: &[Arc<Named>]) -> Vec<Vec<u8>> {
    names.iter().map(|name| name.to_bytes()).collect()
}

impl Drop for ObjectSource {
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
pub(crate) struct SourceIterator {
    source: Py<ObjectSource>,
    iterator: AnnouncingIterator,
}

#[pymethods]
impl SourceIterator {
    #[new]
    fn new(source: Py<ObjectSource>) -> PyResult<Self> {
        let ObjectSource { owner, prefetcher, .. } = source.get();
        let iterator = AnnouncingIterator::new(prefetcher, *owner)?;
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
        let (objects, ahead) = (source.objects(keys)?, source.objects(ahead)?);
        let results = match self.iterator.process() {
            Process::ForkedChild => return source.read(py, keys, true),
            Process::Owner(prefetcher, iterator) => {
                py.detach(|| prefetcher.announce(iterator, &source.numbered(prefetcher, &ahead)));
                source.take(py, prefetcher, &objects)?
            }
            Process::Worker(worker, iterator) => source.request(py, worker, &objects, iterator, Some(&ahead))?,
        };
        source.readers(py, &objects, results, true)
    }

    /// Returns the memory budget of the owner in bytes.
    fn budget(&self) -> u64 {
        self.iterator.budget()
    }
}
