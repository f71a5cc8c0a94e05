//! Objects by name, read ahead: a source of the prefetcher to which names come one by one.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::fork;
use torchobj_core::object_ref::ObjectRef as Named;

use crate::buffer::Buffer;
use crate::config::StoreConfig;
use crate::object_ref::{ObjectRef, clients, readers};
use crate::reach::{Reach, buffers, glance, own, unanswered};
use crate::wait::wait;

/// Objects of any stores by name, read ahead by the process that made this, for itself and its workers.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct RefSource {
    owner: u32,
    number: u64,
    reach: Reach,
}

#[pymethods]
impl RefSource {
    /// A source of this process; `budget` is for the arena, if this process has none yet.
    #[new]
    fn new(py: Python<'_>, config: StoreConfig, budget: u64) -> PyResult<Self> {
        let prefetcher = py.detach(|| own(budget))?;
        let number = prefetcher.add_names(Arc::new(clients(&config)));
        Ok(Self { owner: fork::generation(), number, reach: Reach::made(prefetcher) })
    }

    /// A source of another process, by what `descriptors` gave there and the system duplicated.
    #[staticmethod]
    fn attach(owner: u32, number: u64, file: i32, bell: i32) -> PyResult<Self> {
        Ok(Self { owner, number, reach: Reach::attach(owner, file, bell)? })
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

    /// The objects as an `Announcer` of this process takes them: to be announced at once. None in any other process.
    fn objects(&self, py: Python<'_>, refs: Vec<PyRef<'_, ObjectRef>>) -> Vec<(u64, u64)> {
        let names: Vec<Arc<Named>> = refs.iter().map(|object| object.named()).collect();
        let Some(prefetcher) = self.reach.prefetcher(self.owner) else { return Vec::new() };
        let objects = py.detach(|| prefetcher.objects(self.number, names.iter().map(Arc::as_ref)));
        objects.into_iter().map(|object| (object.source, object.index)).collect()
    }

    /// Reads objects as readers, all at once; there is an exception in place of what could not be read. In a worker the
    /// owner is asked.
    fn read<'py>(&self, py: Python<'py>, refs: Vec<PyRef<'py, ObjectRef>>) -> PyResult<Bound<'py, PyList>> {
        let names: Vec<Arc<Named>> = refs.iter().map(|object| object.named()).collect();
        if let Some(prefetcher) = self.reach.prefetcher(self.owner) {
            let (prefetcher, source, asked) = (prefetcher.clone(), self.number, names.clone());
            let landed = wait(py, async move { prefetcher.take_by_name(source, &asked).await })?;
            return readers(py, &names, landed.into_iter().map(|landed| Ok(Buffer::from(landed?.buffer))));
        }
        let worker = self.reach.worker(self.owner)?;
        let replies = py.detach(|| {
            let records: Vec<Vec<u8>> = names.iter().map(|name| name.to_bytes()).collect();
            worker.ask_by_name(self.number, &records, glance)
        });
        readers(py, &names, buffers(replies.map_err(|none| unanswered(none, self.owner))?))
    }
}

impl Drop for RefSource {
    fn drop(&mut self) {
        if let Some(prefetcher) = self.reach.prefetcher(self.owner) {
            prefetcher.remove_source(self.number);
        }
    }
}
