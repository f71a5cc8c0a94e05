//! Objects read ahead: the prefetcher of this process, and what its workers see of it.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use torchobj_core::arena::{Reply, Unanswered, Worker};
use torchobj_core::buffer::Buffer as Landed;
use torchobj_core::error::Error;
use torchobj_core::fork;
use torchobj_core::manifest::Manifest as Packed;
use torchobj_core::prefetch::{Object, Prefetcher, Source};

use crate::buffer::{Buffer, ObjectReader};
use crate::error::exception;
use crate::local::Local;
use crate::manifest::Manifest;
use crate::store::NativeStore;
use crate::wait::wait;

/// Reads at a time, where the configuration does not say: of all stores together.
const READS: usize = 64;

/// The prefetcher of this process.
static OWN: Mutex<Option<Local<Arc<Prefetcher>>>> = Mutex::new(None);

/// What this process attached to as a worker, by the owner's process.
static ATTACHED: Mutex<Option<Local<Workers>>> = Mutex::new(None);

type Workers = HashMap<u32, Arc<Worker>>;

pub(crate) fn own(budget: u64) -> PyResult<Arc<Prefetcher>> {
    let _inside = fork::enter();
    let mut own = OWN.lock().expect("no holder of this lock panics");
    if let Some(prefetcher) = own.as_ref().and_then(Local::get) {
        return Ok(prefetcher.clone());
    }
    let prefetcher = Prefetcher::start(budget, READS)?;
    *own = Some(Local::new(prefetcher.clone()));
    Ok(prefetcher)
}

/// The prefetcher of this process, if it has one.
fn existing() -> Option<Arc<Prefetcher>> {
    let _inside = fork::enter();
    OWN.lock().expect("no holder of this lock panics").as_ref().and_then(Local::get).cloned()
}

fn attached(owner: u32, attach: impl FnOnce() -> std::io::Result<Worker>) -> PyResult<Arc<Worker>> {
    let _inside = fork::enter();
    let mut attached = ATTACHED.lock().expect("no holder of this lock panics");
    if attached.as_ref().and_then(Local::get).is_none() {
        *attached = Some(Local::new(Workers::new()));
    }
    let workers = attached.as_mut().and_then(Local::get_mut).expect("filled in just above");
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
        Ok(Self::Attached(attached(owner, || Worker::attach_raw(file, bell))?))
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
            Self::Attached(worker) => Ok(worker.clone()),
        }
    }
}

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
    fn read<'py>(&self, py: Python<'py>, indices: Vec<usize>, return_errors: bool) -> PyResult<Bound<'py, PyList>> {
        let results: Vec<Result<Buffer, Error>> = match self.reach.prefetcher(self.owner) {
            Some(prefetcher) => {
                let source = self.number;
                let objects: Vec<Object> =
                    indices.iter().map(|index| Object { source, index: *index as u64 }).collect();
                let prefetcher = Arc::clone(prefetcher);
                let landed = wait(py, async move { prefetcher.take(&objects).await })?;
                landed.into_iter().map(|landed| landed.map(|landed| Buffer::from(landed.buffer))).collect()
            }
            None => self.ask(py, &self.reach.worker(self.owner)?, &indices)?,
        };
        let list = PyList::empty(py);
        for (index, result) in indices.iter().zip(results) {
            let object = self.manifest.get(*index).ok_or_else(|| PyIndexError::new_err(format!("index {index}")))?;
            match result {
                Ok(buffer) => list.append(ObjectReader::of(py, object, buffer)?)?,
                Err(error) if return_errors => list.append(exception(py, &error).into_value(py))?,
                Err(error) => return Err(exception(py, &error)),
            }
        }
        Ok(list)
    }
}

impl NativeSource {
    fn ask(&self, py: Python<'_>, worker: &Arc<Worker>, indices: &[usize]) -> PyResult<Vec<Result<Buffer, Error>>> {
        let objects: Vec<u64> = indices.iter().map(|index| *index as u64).collect();
        let replies = py.detach(|| worker.ask(self.number, &objects, glance));
        Ok(buffers(replies.map_err(|none| unanswered(none, self.owner))?).collect())
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

impl Drop for NativeSource {
    fn drop(&mut self) {
        if let Some(prefetcher) = self.reach.prefetcher(self.owner) {
            prefetcher.remove_source(self.number);
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

    /// Says which objects will be taken next, as pairs of a source's number and an index.
    fn announce(&self, py: Python<'_>, objects: Vec<(u64, u64)>) {
        let objects: Vec<Object> = objects.into_iter().map(|(source, index)| Object { source, index }).collect();
        py.detach(|| self.prefetcher.announce(self.number, &objects));
    }

    /// Bytes that are announced and not taken, and the budget.
    fn pending(&self, py: Python<'_>) -> (u64, u64) {
        py.detach(|| (self.prefetcher.pending(self.number), self.prefetcher.arena().budget()))
    }

    /// Forgets what was announced and not taken.
    fn cancel(&self, py: Python<'_>) {
        if self.owner == fork::generation() {
            py.detach(|| self.prefetcher.cancel(self.number));
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

/// Gives the memory of a buffer to the owner of its arena: owner, id, generation. `None` for memory that is not an
/// arena's. The buffer is empty from then on.
#[pyfunction]
pub(crate) fn hand(buffer: &Bound<'_, Buffer>) -> PyResult<Option<(u32, u32, u32)>> {
    buffer.get().hand()
}

/// The buffer that a worker handed to this process.
#[pyfunction]
pub(crate) fn adopt(py: Python<'_>, owner: u32, segment: u32, generation: u32) -> PyResult<Buffer> {
    let lost =
        || PyRuntimeError::new_err(format!("a buffer of process {owner} can be taken there once, and only there"));
    let prefetcher = existing().filter(|_| owner == fork::generation()).ok_or_else(lost)?;
    let segment = py.detach(|| prefetcher.arena().adopt(segment, generation)).ok_or_else(lost)?;
    let landed: Landed = segment.buffer();
    Ok(landed.into())
}

/// What the prefetcher of this process did and does; empty where there is none.
#[pyfunction]
pub(crate) fn prefetch_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    let Some(prefetcher) = existing() else { return Ok(dict) };
    let stats = py.detach(|| prefetcher.stats());
    dict.set_item("hits", stats.hits)?;
    dict.set_item("late", stats.late)?;
    dict.set_item("queued", stats.queued)?;
    dict.set_item("misses", stats.misses)?;
    dict.set_item("objects", stats.objects)?;
    dict.set_item("bytes", stats.bytes)?;
    dict.set_item("failed", stats.failed)?;
    dict.set_item("evicted", stats.evicted)?;
    dict.set_item("announced", stats.announced)?;
    dict.set_item("in_flight", stats.in_flight)?;
    dict.set_item("in_flight_limit", stats.limit)?;
    dict.set_item("budget_bytes", stats.memory.budget)?;
    dict.set_item("used_bytes", stats.memory.used)?;
    dict.set_item("granted_bytes", stats.memory.granted)?;
    dict.set_item("overdrawn", stats.memory.overdrawn)?;
    dict.set_item("read_p50_s", stats.read_p50.map(|took| took.as_secs_f64()))?;
    dict.set_item("read_p99_s", stats.read_p99.map(|took| took.as_secs_f64()))?;
    Ok(dict)
}
