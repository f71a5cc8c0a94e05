//! Writes an object as a stream, for `torchobj.ObjectWriter`.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::Mutex;
use torchobj_core::fork::Local;
use torchobj_core::upload::Writer;

use crate::attributes::Attributes;
use crate::buffer;
use crate::error::OrRaise;
use crate::store::{NativeStore, put_options};
use crate::wait::wait;

/// Writes an object as a stream, in parts if it is large.
///
/// `close` commits the object. `abort` cancels the upload, and so does dropping the writer before `close`.
///
/// Args:
///     store: The store of the object.
///     key: Key of the object.
///     attributes: Headers and metadata of the object.
///     overwrite: Whether an existing object may be replaced.
///     if_version: The version that is replaced.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeWriter {
    /// Taken when the writer ends.
    writer: Local<Arc<Mutex<Option<Writer>>>>,
}

impl NativeWriter {
    fn writer(&self) -> PyResult<Arc<Mutex<Option<Writer>>>> {
        let inherited = || PyValueError::new_err("this writer belongs to the parent of this forked process");
        self.writer.get().cloned().ok_or_else(inherited)
    }
}

fn ended() -> PyErr {
    PyValueError::new_err("I/O operation on closed file")
}

#[pymethods]
impl NativeWriter {
    #[new]
    #[pyo3(signature = (store, key, attributes, overwrite=true, if_version=None))]
    fn new(
        py: Python<'_>,
        store: &NativeStore,
        key: &str,
        attributes: Attributes,
        overwrite: bool,
        if_version: Option<String>,
    ) -> PyResult<Self> {
        let options = put_options(attributes, overwrite, if_version);
        let writer = Writer::new(store.client(py)?, key, options).or_raise(py)?;
        Ok(Self { writer: Local::new(Arc::new(Mutex::new(Some(writer)))) })
    }

    /// Writes all bytes of a buffer. Waits for parts to be sent while the write buffer is full.
    ///
    /// Args:
    ///     data: A contiguous buffer. The writer does not use it after the call.
    ///
    /// Returns:
    ///     Number of bytes of `data`.
    ///
    /// Raises:
    ///     ValueError: The writer is closed.
    ///     StoreError: A part could not be written.
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
        buffer::release_exports(py);
        Ok(at)
    }

    /// Commits the object and returns its version.
    fn close(&self, py: Python<'_>) -> PyResult<String> {
        let writer = self.writer()?;
        let closed = wait(py, async move {
            let mut writer = writer.lock().await.take()?;
            Some(writer.close().await)
        })?;
        Ok(closed.ok_or_else(ended)?.or_raise(py)?.as_str().to_owned())
    }

    /// Aborts the upload; the object does not change. Does nothing in a forked child, because the writer belongs to its parent.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(writer) = self.writer() else { return Ok(()) };
        wait(py, async move {
            if let Some(mut writer) = writer.lock().await.take() {
                writer.abort().await;
            }
        })
    }
}
