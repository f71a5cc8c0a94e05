//! An object that is being written, as `torchobj.ObjectWriter` uses it.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::Mutex;
use torchobj_core::fork::Local;
use torchobj_core::upload::Writer;

use crate::buffer;
use crate::error::OrRaise;
use crate::store::{AttributeFields, NativeStore, put_options};
use crate::wait::wait;

/// A writer. It ends by `close`, after which the object is there, or by `abort`; dropped before, it is aborted.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeWriter {
    /// Taken when the writer ends.
    writer: Local<Arc<Mutex<Option<Writer>>>>,
}

impl NativeWriter {
    fn writer(&self) -> PyResult<Arc<Mutex<Option<Writer>>>> {
        let inherited = || PyValueError::new_err("this writer is the parent's: a forked process cannot go on with it");
        self.writer.get().cloned().ok_or_else(inherited)
    }
}

fn ended() -> PyErr {
    PyValueError::new_err("I/O operation on closed file")
}

#[pymethods]
impl NativeWriter {
    #[new]
    fn new(
        py: Python<'_>,
        store: &NativeStore,
        key: &str,
        attributes: AttributeFields,
        if_none_match: bool,
    ) -> PyResult<Self> {
        let options = put_options(attributes, if_none_match, None);
        let writer = Writer::new(store.client(py)?, key, options).or_raise(py)?;
        Ok(Self { writer: Local::new(Arc::new(Mutex::new(Some(writer)))) })
    }

    /// Writes all of a buffer, waiting where the parts on the way leave no room.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let own = self.writer()?;
        let shared = buffer::share(data)?;
        let mut at = 0;
        while at < shared.len() {
            let rest = shared.slice(at..);
            let writer = own.clone();
            let filled = py.detach(move || writer.blocking_lock().as_mut().map(|writer| writer.fill(&rest)));
            at += filled.ok_or_else(ended)?.or_raise(py)?;
            if at < shared.len() {
                let writer = own.clone();
                let sent = wait(py, async move {
                    match writer.lock().await.as_mut() {
                        Some(writer) => Some(writer.send_part().await),
                        None => None,
                    }
                })?;
                sent.ok_or_else(ended)?.or_raise(py)?;
            }
        }
        drop(shared);
        buffer::release_lent(py);
        Ok(at)
    }

    /// Makes the object and returns its version.
    fn close(&self, py: Python<'_>) -> PyResult<String> {
        let writer = self.writer()?;
        let closed = wait(py, async move {
            let mut writer = writer.lock().await.take()?;
            Some(writer.close().await)
        })?;
        Ok(closed.ok_or_else(ended)?.or_raise(py)?.as_str().to_owned())
    }

    /// Forgets everything. The object is what it was before. In a forked process, where the writer is the parent's, does
    /// nothing.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(writer) = self.writer() else { return Ok(()) };
        wait(py, async move {
            if let Some(mut writer) = writer.lock().await.take() {
                writer.abort().await;
            }
        })
    }
}
