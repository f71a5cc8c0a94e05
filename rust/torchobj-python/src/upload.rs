//! Writes objects: as a stream, for `torchobj.ObjectWriter`, or gathered from Python buffers, for checkpoints.

use std::sync::Arc;

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::sync::Mutex;
use torchobj_core::engine::{BatchRequest, run_all};
use torchobj_core::error::Result;
use torchobj_core::types::Version;
use torchobj_core::upload::{Gather, Piece, Writer};

use crate::attributes::Attributes;
use crate::buffer;
use crate::error::OrRaise;
use crate::own::{Discard, Own};
use crate::store::{NativeStore, put_options};
use crate::wait::{is_cancelled, wait};

fn closed_file() -> PyErr {
    PyValueError::new_err("I/O operation on closed file")
}

fn ended() -> PyErr {
    PyValueError::new_err("the upload has ended: it was closed or aborted, or it failed")
}

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
    writer: Own<Writer>,
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
        Ok(Self { writer: Own::new(writer) })
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
        let own = self.writer.get()?;
        let shared = buffer::share(data)?;
        let mut at = 0;
        while at < shared.len() {
            let rest = shared.slice(at..);
            let writer = own.clone();
            let filled = py.detach(move || writer.blocking_lock().as_mut().map(|writer| writer.fill(&rest)));
            at += filled.ok_or_else(closed_file)?.or_raise(py)?;
            if at < shared.len() {
                let writer = own.clone();
                let sent = wait(py, async move {
                    match writer.lock().await.as_mut() {
                        Some(writer) => Some(writer.send_part().await),
                        None => None,
                    }
                })?;
                sent.ok_or_else(closed_file)?.or_raise(py)?;
            }
        }
        drop(shared);
        buffer::release_exports(py);
        Ok(at)
    }

    /// Commits the object and returns its version.
    fn close(&self, py: Python<'_>) -> PyResult<String> {
        let writer = self.writer.get()?;
        let closed = wait(py, async move {
            let mut writer = writer.lock().await.take()?;
            Some(writer.close().await)
        })?;
        Ok(closed.ok_or_else(closed_file)?.or_raise(py)?.as_str().to_owned())
    }

    /// Aborts the upload; the object does not change. Does nothing in a forked child, because the writer belongs to its parent.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(own) = self.writer.get() else { return Ok(()) };
        if is_cancelled() {
            py.detach(|| own.discard());
            return Ok(());
        }
        wait(py, async move {
            if let Some(mut writer) = own.lock().await.take() {
                writer.abort().await;
            }
        })
    }
}

/// Literals below this size are copied, which costs less than keeping the Python object.
const COPIED_BYTES: usize = 4 << 10;

/// Uploads an object that consists of pieces of memory, without joining them first.
///
/// `close` commits the object. `abort` cancels the upload, and so does an error, or dropping the gather before `close`. The
/// memory of a piece is shared until it is sent: it must not change before `close` returns.
///
/// Args:
///     store: The store of the object.
///     key: Key of the object.
///     attributes: Headers and metadata of the object.
///     overwrite: Whether an existing object may be replaced.
///     if_version: The version that is replaced.
///     limit_bytes: Maximum number of bytes of pieces in flight. None: the pieces do not count, and the write buffer of
///         the store's configuration limits the copies of small pieces.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeGather {
    gather: Own<Gather>,
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

/// Version, size in bytes and CRC-32 of a committed object.
type Closed = (String, u64, u32);

/// Writes pieces; `None` if the upload has ended. The gather is taken meanwhile, so that a failed or interrupted upload is dropped.
async fn write(own: &Mutex<Option<Gather>>, pieces: Vec<Piece>) -> Option<Result<()>> {
    let mut slot = own.lock().await;
    let mut gather = slot.take()?;
    let written = gather.write(pieces).await;
    if written.is_ok() {
        *slot = Some(gather);
    }
    Some(written)
}

/// Commits the object; `None` if the upload has ended.
async fn close(own: &Mutex<Option<Gather>>) -> Option<Result<(Version, u64, u32)>> {
    let mut gather = own.lock().await.take()?;
    Some(gather.close().await)
}

/// Writes the last pieces of an object and commits it.
struct Close {
    own: Arc<Mutex<Option<Gather>>>,
    pieces: Vec<Piece>,
}

impl BatchRequest for Close {
    type Output = Option<(Version, u64, u32)>;

    async fn run(self) -> Result<Self::Output> {
        match write(&self.own, self.pieces).await {
            None => Ok(None),
            Some(Ok(())) => close(&self.own).await.transpose(),
            Some(Err(error)) => Err(error),
        }
    }
}

fn closed(py: Python<'_>, committed: Option<Result<(Version, u64, u32)>>) -> PyResult<Closed> {
    let (version, size, crc32) = committed.ok_or_else(ended)?.or_raise(py)?;
    Ok((version.as_str().to_owned(), size, crc32))
}

/// Writes the last pieces of several objects and commits them, concurrently.
///
/// Args:
///     gathers: Pairs of a gather and its last pieces, as for `NativeGather.write`.
///
/// Returns:
///     Version, size in bytes and CRC-32 of each object.
///
/// Raises:
///     StoreError: An object could not be committed; the first error is raised after the others are committed.
///         KeyboardInterrupt aborts all that are not committed yet.
#[pyfunction]
pub(crate) fn close_gathers(
    py: Python<'_>,
    gathers: Vec<(PyRef<'_, NativeGather>, Vec<Bound<'_, PyAny>>)>,
) -> PyResult<Vec<Closed>> {
    let mut rest = Vec::new();
    for (gather, pieces) in &gathers {
        let pieces = pieces.iter().map(piece).collect::<PyResult<Vec<_>>>()?;
        rest.push(Close { own: gather.gather.get()?, pieces });
    }
    let all = wait(py, run_all(rest, || usize::MAX))?;
    all.into_iter().map(|one| closed(py, one.transpose())).collect()
}

#[pymethods]
impl NativeGather {
    #[new]
    #[pyo3(signature = (store, key, attributes, overwrite=true, if_version=None, limit_bytes=None))]
    fn new(
        py: Python<'_>,
        store: &NativeStore,
        key: &str,
        attributes: Attributes,
        overwrite: bool,
        if_version: Option<String>,
        limit_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let options = put_options(attributes, overwrite, if_version);
        let gather = Gather::new(store.client(py)?, key, options, limit_bytes).or_raise(py)?;
        Ok(Self { gather: Own::new(gather) })
    }

    /// Writes pieces.
    ///
    /// Args:
    ///     pieces: A `bytes` object is a literal. Any other contiguous buffer is a record, whose CRC-32 is computed. An
    ///         int is replaced by the CRC-32 of the record with that number, in 4 bytes; a pair of ints by the CRC-32 of
    ///         the records `first..end`.
    ///
    /// Raises:
    ///     ValueError: The upload has ended.
    ///     StoreError: A part could not be written; the upload is aborted.
    fn write(&self, py: Python<'_>, pieces: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let own = self.gather.get()?;
        let pieces: Vec<Piece> = pieces.iter().map(piece).collect::<PyResult<_>>()?;
        let written = wait(py, async move { write(&own, pieces).await })?;
        written.ok_or_else(ended)?.or_raise(py)
    }

    /// Commits the object.
    ///
    /// Returns:
    ///     Version, size in bytes and CRC-32 of the object.
    fn close(&self, py: Python<'_>) -> PyResult<Closed> {
        let own = self.gather.get()?;
        let committed = wait(py, async move { close(&own).await })?;
        closed(py, committed)
    }

    /// Aborts the upload; the object does not change. Does nothing in a forked child, because the upload belongs to its parent.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(own) = self.gather.get() else { return Ok(()) };
        if is_cancelled() {
            py.detach(|| own.discard());
            return Ok(());
        }
        wait(py, async move {
            if let Some(mut gather) = own.lock().await.take() {
                gather.abort().await;
            }
        })
    }
}
