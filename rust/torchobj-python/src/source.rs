//! Objects of a manifest read ahead, what iterators of loaders announce, and memory on its way to the trainer.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::arena::{Ahead, Worker};
use torchobj_core::error::Error;
use torchobj_core::fork;
use torchobj_core::manifest::Manifest as Packed;
use torchobj_core::prefetch::{Object, Prefetcher, Source, charge};

use crate::buffer::{Buffer, ObjectReader};
use crate::error::exception;
use crate::manifest::Manifest;
use crate::reach::{Reach, buffers, existing, glance, own, unanswered};
use crate::store::NativeStore;
use crate::wait::wait;

/// The objects of a manifest, read ahead by the process that made this, for itself and its workers.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeSource {
    owner: u32,
    number: u64,
    manifest: Arc<Packed>,
    reach: Reach,
}

#[pymethods]
impl NativeSource {
    /// A source of this process. `stores` are those of the manifest's bases, in its order; `budget` is for the arena, if
    /// this process has none yet.
    #[new]
    fn new(py: Python<'_>, manifest: &Manifest, stores: Vec<Bound<'_, NativeStore>>, budget: u64) -> PyResult<Self> {
        let clients = stores.iter().map(|store| store.get().client(py)).collect::<PyResult<Vec<_>>>()?;
        let prefetcher = py.detach(|| own(budget))?;
        let manifest = manifest.packed();
        let number = prefetcher.add_source(Source { manifest: manifest.clone(), clients });
        Ok(Self { owner: fork::generation(), number, manifest, reach: Reach::made(prefetcher) })
    }

    /// A source of another process, by what `descriptors` gave there and the system duplicated.
    #[staticmethod]
    fn attach(manifest: &Manifest, owner: u32, number: u64, file: i32, bell: i32) -> PyResult<Self> {
        Ok(Self { owner, number, manifest: manifest.packed(), reach: Reach::attach(owner, file, bell)? })
    }

    /// Descriptors of the arena and its bell, for a worker that does not inherit them.
    fn descriptors(&self) -> (i32, i32) {
        self.reach.descriptors()
    }

    /// Process id of the owner.
    #[getter]
    fn owner(&self) -> u32 {
        self.owner
    }

    /// The owner's name for it.
    #[getter]
    fn number(&self) -> u64 {
        self.number
    }

    /// Whether anything is announced in this process and not taken; only its owner knows.
    fn announced(&self) -> bool {
        self.reach.prefetcher(self.owner).is_none_or(|prefetcher| prefetcher.announced())
    }

    /// Reads objects as readers, all at once; with `return_errors` there is an exception in place of what could not be
    /// read. In a worker the owner is asked.
    #[pyo3(signature = (indices, return_errors=false))]
    fn read<'py>(&self, py: Python<'py>, indices: Vec<u64>, return_errors: bool) -> PyResult<Bound<'py, PyList>> {
        let results = match self.reach.prefetcher(self.owner) {
            Some(prefetcher) => take(py, prefetcher, self.number, &indices)?,
            None => self.ask(py, &self.reach.worker(self.owner)?, &indices, Ahead::default())?,
        };
        self.readers(py, &indices, results, return_errors)
    }

    /// What objects will take of the budget, in bytes; those whose size is not known count as some.
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

    fn ask(
        &self,
        py: Python<'_>,
        worker: &Arc<Worker>,
        indices: &[u64],
        ahead: Ahead<'_>,
    ) -> PyResult<Vec<Result<Buffer, Error>>> {
        let replies = py.detach(|| worker.ask(self.number, indices, ahead, glance));
        Ok(buffers(replies.map_err(|none| unanswered(none, self.owner))?).collect())
    }
}

fn take(
    py: Python<'_>,
    prefetcher: &Arc<Prefetcher>,
    source: u64,
    indices: &[u64],
) -> PyResult<Vec<Result<Buffer, Error>>> {
    let objects: Vec<Object> = indices.iter().map(|index| Object { source, index: *index }).collect();
    let prefetcher = Arc::clone(prefetcher);
    let landed = wait(py, async move { prefetcher.take(&objects).await })?;
    Ok(landed.into_iter().map(|landed| landed.map(|landed| Buffer::from(landed.buffer))).collect())
}

impl Drop for NativeSource {
    fn drop(&mut self) {
        if let Some(prefetcher) = self.reach.prefetcher(self.owner) {
            prefetcher.remove_source(self.number);
        }
    }
}

/// Objects of one source, read and announced by the process that uses them, be it the owner or a worker; what it
/// announced is forgotten when this is dropped.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeIteration {
    source: Py<NativeSource>,
    process: u32,
    of: Of,
}

/// Whose names iterators have.
enum Of {
    Owner(ManuallyDrop<Arc<Prefetcher>>, u64),
    Worker(Arc<Worker>, u32),
}

#[pymethods]
impl NativeIteration {
    #[new]
    fn new(source: Py<NativeSource>) -> PyResult<Self> {
        let NativeSource { owner, reach, .. } = source.get();
        let of = if let Some(prefetcher) = reach.prefetcher(*owner) {
            Of::Owner(ManuallyDrop::new(prefetcher.clone()), prefetcher.new_iterator())
        } else {
            let worker = reach.worker(*owner)?;
            let iterator = worker.new_iterator();
            Of::Worker(worker, iterator)
        };
        Ok(Self { source, process: fork::generation(), of })
    }

    /// Reads objects as `NativeSource.read` does, and announces those of `ahead` behind what was announced before.
    #[pyo3(signature = (indices, ahead, return_errors=false))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        indices: Vec<u64>,
        ahead: Vec<u64>,
        return_errors: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let source = self.source.get();
        // The iterator is that of the process which forked this one: here nothing can be announced for it.
        if self.process != fork::generation() {
            return source.read(py, indices, return_errors);
        }
        let results = match &self.of {
            Of::Owner(prefetcher, iterator) => {
                let announced: Vec<Object> =
                    ahead.iter().map(|index| Object { source: source.number, index: *index }).collect();
                py.detach(|| prefetcher.announce(*iterator, &announced));
                take(py, prefetcher, source.number, &indices)?
            }
            Of::Worker(worker, iterator) => {
                let ahead = Ahead { iterator: *iterator, objects: &ahead };
                source.ask(py, worker, &indices, ahead)?
            }
        };
        source.readers(py, &indices, results, return_errors)
    }

    /// What segments of the owner may take, in bytes.
    fn budget(&self) -> u64 {
        match &self.of {
            Of::Owner(prefetcher, _) => prefetcher.arena().budget(),
            Of::Worker(worker, _) => worker.budget(),
        }
    }
}

impl Drop for NativeIteration {
    fn drop(&mut self) {
        if self.process == fork::generation() {
            match &self.of {
                Of::Owner(prefetcher, iterator) => prefetcher.cancel(*iterator),
                Of::Worker(worker, iterator) => worker.end_iterator(*iterator),
            }
        }
    }
}

/// What an iterator of a loader announces; forgotten when this is dropped.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct Announcer {
    owner: u32,
    number: u64,
    prefetcher: ManuallyDrop<Arc<Prefetcher>>,
}

#[pymethods]
impl Announcer {
    #[new]
    fn new() -> PyResult<Self> {
        let prefetcher = existing().ok_or_else(|| PyRuntimeError::new_err("nothing is read ahead in this process"))?;
        let number = prefetcher.new_iterator();
        Ok(Self { owner: fork::generation(), number, prefetcher: ManuallyDrop::new(prefetcher) })
    }

    /// Says which objects will be taken next, as pairs of a source's number and an index. Nothing in a forked child,
    /// which reads what its parent announced only through that.
    fn announce(&self, py: Python<'_>, objects: Vec<(u64, u64)>) {
        if self.owner != fork::generation() {
            return;
        }
        let objects: Vec<Object> = objects.into_iter().map(|(source, index)| Object { source, index }).collect();
        py.detach(|| self.prefetcher.announce(self.number, &objects));
        // A trainer with workers waits for nothing here.
        crate::log::deliver(py);
    }

    /// Bytes that are announced and not taken, none in a forked child; and the budget.
    fn pending(&self, py: Python<'_>) -> (u64, u64) {
        let ours = self.owner == fork::generation();
        let pending = || if ours { self.prefetcher.pending(self.number) } else { 0 };
        py.detach(|| (pending(), self.prefetcher.arena().budget()))
    }

    /// Forgets what was announced and not taken.
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

/// Makes the prefetcher of this process, if it has none yet; its memory takes `budget` bytes at most.
///
/// Raises `OSError` where the system refuses the memory; `StoreError` where it refuses what any read needs.
#[pyfunction]
pub(crate) fn start_prefetcher(py: Python<'_>, budget: u64) -> PyResult<()> {
    py.detach(|| own(budget)).map(drop)
}

/// Offers the memory of a buffer to the owner of its arena: owner, id, generation. `None` for memory that is to be copied.
#[pyfunction]
pub(crate) fn offer(buffer: &Bound<'_, Buffer>) -> Option<(u32, u32, u32)> {
    buffer.get().offer()
}

/// The buffer that a worker offered to this process, with its memory where the worker has dropped it.
#[pyfunction]
pub(crate) fn adopt(py: Python<'_>, owner: u32, segment: u32, generation: u32) -> PyResult<Buffer> {
    let lost =
        || PyRuntimeError::new_err(format!("a buffer of process {owner} can be taken there once, and only there"));
    let prefetcher = existing().filter(|_| owner == fork::generation()).ok_or_else(lost)?;
    let adopted = py.detach(|| prefetcher.arena().adopt(segment, generation))?;
    Ok(adopted.ok_or_else(lost)?.into())
}
