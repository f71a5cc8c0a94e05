//! An object that is gathered from memory of Python's, as checkpoints use it.

use std::sync::Arc;

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use torchobj_core::crc32::Crc32;
use torchobj_core::error::Result;
use torchobj_core::fork::Local;
use torchobj_core::types::Version;
use torchobj_core::upload::{Gather, Piece};

use crate::buffer;
use crate::error::OrRaise;
use crate::store::{AttributeFields, NativeStore, put_options};
use crate::wait::wait;

/// Below this a literal is copied at once, which costs less than to keep Python's.
const COPIED_BYTES: usize = 4 << 10;

/// An object that is being gathered. It ends by `close`, after which the object is there, or by `abort`; one that failed,
/// or is dropped before, is aborted.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeGather {
    /// Taken while it writes, so that what was interrupted or failed is gone.
    gather: Local<Arc<Mutex<Option<Gather>>>>,
}

impl NativeGather {
    fn gather(&self) -> PyResult<Arc<Mutex<Option<Gather>>>> {
        let inherited = || PyValueError::new_err("this upload is the parent's: a forked process cannot go on with it");
        self.gather.get().cloned().ok_or_else(inherited)
    }
}

fn ended() -> PyErr {
    PyValueError::new_err("the upload has ended: it was closed, aborted, or failed before")
}

fn piece(object: &Bound<'_, PyAny>) -> PyResult<Piece> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        let small = bytes.len() < COPIED_BYTES;
        return Ok(Piece::Literal(if small { Bytes::copy_from_slice(bytes) } else { buffer::share(object)? }));
    }
    if let Ok(record) = object.extract::<usize>() {
        return Ok(Piece::Crc32(record..record + 1));
    }
    if let Ok((first, end)) = object.extract::<(usize, usize)>() {
        return Ok(Piece::Crc32(first..end));
    }
    Ok(Piece::Record(buffer::share(object)?))
}

/// What an object that was closed is: its version, its size in bytes and its CRC-32.
type Closed = (String, u64, u32);

/// `None` where it has ended.
async fn write(own: &Mutex<Option<Gather>>, pieces: Vec<Piece>) -> Option<Result<()>> {
    let mut slot = own.lock().await;
    let mut gather = slot.take()?;
    let written = gather.write(pieces).await;
    if written.is_ok() {
        *slot = Some(gather);
    }
    Some(written)
}

/// `None` where it has ended.
async fn close(own: &Mutex<Option<Gather>>) -> Option<Result<(Version, u64, u32)>> {
    let mut gather = own.lock().await.take()?;
    Some(gather.close().await)
}

async fn write_and_close(own: Arc<Mutex<Option<Gather>>>, pieces: Vec<Piece>) -> Option<Result<(Version, u64, u32)>> {
    match write(&own, pieces).await? {
        Ok(()) => close(&own).await,
        Err(error) => Some(Err(error)),
    }
}

fn closed(py: Python<'_>, ended_how: Option<Result<(Version, u64, u32)>>) -> PyResult<Closed> {
    let (version, size, crc32) = ended_how.ok_or_else(ended)?.or_raise(py)?;
    Ok((version.as_str().to_owned(), size, crc32))
}

/// Writes what is left of several objects and makes them, at a time. Where some fail this raises the first one's error,
/// once the others are there; Ctrl-C ends all that are not there yet.
#[pyfunction]
pub(crate) fn close_gathers(
    py: Python<'_>,
    gathers: Vec<(PyRef<'_, NativeGather>, Vec<Bound<'_, PyAny>>)>,
) -> PyResult<Vec<Closed>> {
    let mut rest = Vec::new();
    for (gather, pieces) in &gathers {
        rest.push((gather.gather()?, pieces.iter().map(piece).collect::<PyResult<Vec<_>>>()?));
    }
    let all = wait(py, async move {
        let mut tasks: JoinSet<_> = rest
            .into_iter()
            .enumerate()
            .map(|(number, (own, pieces))| async move { (number, write_and_close(own, pieces).await) })
            .collect();
        let mut all = Vec::new();
        while let Some(ended) = tasks.join_next().await {
            match ended {
                Ok(one) => all.push(one),
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            }
        }
        all.sort_unstable_by_key(|(number, _)| *number);
        all
    })?;
    all.into_iter().map(|(_, one)| closed(py, one)).collect()
}

/// The CRC-32 of bytes that were summed apart: of the first, and of the `second_bytes` behind them.
#[pyfunction]
pub(crate) fn crc32_joined(first: u32, second: u32, second_bytes: u64) -> u32 {
    // How many the first are is not asked: the sum of none is 0, and stays 0 however far it is moved.
    Crc32::known(first, 1).then(Crc32::known(second, second_bytes)).value()
}

#[pymethods]
impl NativeGather {
    #[new]
    #[pyo3(signature = (store, key, attributes, if_none_match=false, if_match=None, limit_bytes=None))]
    fn new(
        py: Python<'_>,
        store: &NativeStore,
        key: &str,
        attributes: AttributeFields,
        if_none_match: bool,
        if_match: Option<String>,
        limit_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let options = put_options(attributes, if_none_match, if_match);
        let gather = Gather::new(store.client(py)?, key, options, limit_bytes).or_raise(py)?;
        Ok(Self { gather: Local::new(Arc::new(Mutex::new(Some(gather)))) })
    }

    /// Writes pieces: `bytes` are literals, any other buffer is a record, a number or a pair of them stands for the CRC-32
    /// of that record, or of the records from the one up to the other.
    fn write(&self, py: Python<'_>, pieces: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let own = self.gather()?;
        let pieces: Vec<Piece> = pieces.iter().map(piece).collect::<PyResult<_>>()?;
        let written = wait(py, async move { write(&own, pieces).await })?;
        written.ok_or_else(ended)?.or_raise(py)
    }

    /// Makes the object.
    fn close(&self, py: Python<'_>) -> PyResult<Closed> {
        let own = self.gather()?;
        let ended_how = wait(py, async move { close(&own).await })?;
        closed(py, ended_how)
    }

    /// Forgets everything. The object is what it was before. In a forked process, where the upload is the parent's, does
    /// nothing.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(own) = self.gather() else { return Ok(()) };
        wait(py, async move {
            if let Some(mut gather) = own.lock().await.take() {
                gather.abort().await;
            }
        })
    }
}
