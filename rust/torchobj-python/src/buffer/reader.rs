//! Binary files over objects: over bytes in memory, or fetched on demand.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};
use tokio::sync::Mutex;
use torchobj_core::buffer::{Buffer as CoreBuffer, Memory, PendingBuffer};
use torchobj_core::fork::Local;
use torchobj_core::manifest::ObjectInfo;
use torchobj_core::read::{ReadAhead, ReadAheadConfig};
use torchobj_core::types::Version;

use super::{Buffer, borrow_for_file};
use crate::error::{OrRaise, invalid};
use crate::store::NativeStore;
use crate::wait::wait;

pyo3::import_exception!(io, UnsupportedOperation);

/// Number of bytes that `readline` fetches in advance and keeps for later lines.
const LINE_BYTES: usize = 64 << 10;

/// Reads an object ahead. A forked child makes its own read-ahead at the same position.
struct ReadAheadSource {
    store: Py<NativeStore>,
    window: ReadAheadConfig,
    version: Option<Version>,
    ahead: Local<Arc<Mutex<ReadAhead>>>,
}

impl ReadAheadSource {
    fn new(
        py: Python<'_>,
        store: Py<NativeStore>,
        key: &str,
        window: ReadAheadConfig,
        version: Option<Version>,
    ) -> PyResult<Self> {
        let ahead = ReadAhead::new(store.get().client(py)?, key, window).with_version(version.clone());
        Ok(Self { store, window, version, ahead: Local::new(Arc::new(Mutex::new(ahead))) })
    }

    /// The read-ahead of this process.
    fn ahead(&mut self, py: Python<'_>, key: &str) -> PyResult<Arc<Mutex<ReadAhead>>> {
        if self.ahead.get().is_none() {
            *self = Self::new(py, self.store.clone_ref(py), key, self.window, self.version.clone())?;
        }
        Ok(self.ahead.get().expect("it was made above if it was missing").clone())
    }
}

/// Where the bytes of a reader are.
enum ReaderBytes {
    /// All bytes are in memory.
    Buffer(Py<Buffer>),
    /// Bytes are fetched on demand.
    Ahead(ReadAheadSource),
    /// Keeps memory that a consumer uses through a pointer: `numpy.ndarray(buffer=reader)` keeps only a reference to the
    /// reader.
    Closed { _used: Option<Py<Buffer>> },
}

/// A readable binary file over an object.
///
/// Registered as an `io.BufferedIOBase`, so it can be used like an open file. `torchobj.open` returns readers that fetch on
/// demand: they send no request before the first read. A dataset passes readers of bytes in memory to its `transform`: these
/// share them without a copy through `getbuffer()`, `buffer` and the buffer protocol, and can be pickled. The memory lives
/// until the reader is closed or deleted and all views are deleted.
///
/// Not thread-safe.
///
/// Args:
///     url: URL of the object.
///     bucket: Bucket of the object; empty for a file.
///     key: Key of the object, not percent-encoded.
///     buffer: Bytes of the object, which the reader shares.
///     position: Initial position in bytes.
///
/// Raises:
///     ValueError: The reader is closed; raised by every method but `close`.
///     StoreError: A fetch failed, after the retries.
///     ObjectChangedError: The object was replaced since the first fetch.
#[pyclass(module = "torchobj", weakref)]
pub(crate) struct ObjectReader {
    /// URL of the object.
    #[pyo3(get)]
    url: String,
    /// Bucket of the object; empty for a file.
    #[pyo3(get)]
    bucket: String,
    /// Key of the object, not percent-encoded.
    #[pyo3(get)]
    key: String,
    bytes: ReaderBytes,
    position: u64,
    /// Bytes that `readline` fetched last, and their position.
    lines: Option<(u64, CoreBuffer)>,
}

impl ObjectReader {
    /// A reader over bytes in memory.
    pub(crate) fn of(py: Python<'_>, object: ObjectInfo<'_>, buffer: Buffer) -> PyResult<Py<Self>> {
        let bucket = object.base.split_once("://").map_or("", |(_, bucket)| bucket).to_owned();
        let bytes = ReaderBytes::Buffer(Py::new(py, buffer)?);
        Py::new(py, Self { url: object.url(), bucket, key: object.key, bytes, position: 0, lines: None })
    }

    /// The bytes in memory, of an argument. Raises `ConfigError` for a reader that fetches on demand.
    pub(crate) fn in_memory(&self, py: Python<'_>) -> PyResult<Py<Buffer>> {
        match &self.bytes {
            ReaderBytes::Buffer(buffer) => Ok(buffer.clone_ref(py)),
            ReaderBytes::Ahead(_) => {
                Err(invalid(format!("{}: its bytes are not in memory; read it first", self.name())))
            }
            ReaderBytes::Closed { .. } => Err(closed()),
        }
    }

    /// Reads into `memory` and advances the position. Returns the number of bytes.
    fn read_memory(&mut self, py: Python<'_>, memory: Memory) -> PyResult<(PendingBuffer, usize)> {
        let (pending, mut dest) = PendingBuffer::new(memory);
        let position = self.position;
        let count = match &mut self.bytes {
            ReaderBytes::Buffer(buffer) => {
                let bytes = buffer.get().bytes();
                let rest = &bytes[usize::try_from(position).unwrap_or(usize::MAX).min(bytes.len())..];
                py.detach(|| {
                    let mut dest = dest;
                    dest.fill(rest)
                })
            }
            ReaderBytes::Ahead(fetched) => {
                let ahead = fetched.ahead(py, &self.key)?;
                wait(py, async move { ahead.lock().await.read_at(position, &mut dest).await })?.or_raise(py)?
            }
            ReaderBytes::Closed { .. } => return Err(closed()),
        };
        self.position += count as u64;
        Ok((pending, count))
    }

    /// Buffered bytes from `position`; fetches if there are none. Empty at the end of the object.
    fn buffered_at(&mut self, py: Python<'_>, position: u64) -> PyResult<&[u8]> {
        let buffered = self.lines.take_if(|(start, bytes)| (*start..*start + bytes.len() as u64).contains(&position));
        let (start, bytes) = match buffered {
            Some(buffered) => buffered,
            None => {
                let before = std::mem::replace(&mut self.position, position);
                let read = self.read_memory(py, Memory::allocate(LINE_BYTES)?);
                self.position = before;
                let (pending, count) = read?;
                let bytes = pending.finish(count);
                (position, bytes.map_err(|_| PyValueError::new_err("a writer outlived its read: a bug"))?)
            }
        };
        let (start, bytes) = self.lines.insert((start, bytes));
        Ok(&bytes.as_slice()[usize::try_from(position - *start).expect("the position is within the buffer")..])
    }
}

/// The start of `bytes` including the first newline, at most `max` bytes.
fn line_of(bytes: &[u8], max: usize) -> &[u8] {
    let bytes = &bytes[..bytes.len().min(max)];
    let end = bytes.iter().position(|byte| *byte == b'\n');
    &bytes[..end.map_or(bytes.len(), |newline| newline + 1)]
}

fn closed() -> PyErr {
    PyValueError::new_err("I/O operation on closed file")
}

#[pymethods]
impl ObjectReader {
    #[new]
    #[pyo3(signature = (url, bucket, key, buffer, position=0))]
    fn new(url: String, bucket: String, key: String, buffer: Py<Buffer>, position: u64) -> Self {
        Self { url, bucket, key, bytes: ReaderBytes::Buffer(buffer), position, lines: None }
    }

    /// Returns a reader that fetches on demand.
    ///
    /// Args:
    ///     store: The store of the object.
    ///     url: URL of the object.
    ///     bucket: Bucket of the object; empty for a file.
    ///     key: Key of the object, not percent-encoded.
    ///     jump_bytes: Number of bytes to fetch after a seek; None: 256 KiB.
    ///     ahead_bytes: Maximum number of bytes to fetch ahead of sequential reads; None: 32 MiB.
    ///     version: The version to read; None: that of the first fetch.
    #[staticmethod]
    #[pyo3(signature = (store, url, bucket, key, jump_bytes=None, ahead_bytes=None, version=None))]
    #[expect(clippy::too_many_arguments, reason = "called by keyword from Python")]
    fn open(
        py: Python<'_>,
        store: Py<NativeStore>,
        url: String,
        bucket: String,
        key: String,
        jump_bytes: Option<u64>,
        ahead_bytes: Option<u64>,
        version: Option<String>,
    ) -> PyResult<Self> {
        let ReadAheadConfig { jump_bytes: jump, ahead_bytes: ahead } = ReadAheadConfig::default();
        let (jump_bytes, ahead_bytes) = (jump_bytes.unwrap_or(jump), ahead_bytes.unwrap_or(ahead));
        let window = ReadAheadConfig { jump_bytes, ahead_bytes };
        let bytes = ReaderBytes::Ahead(ReadAheadSource::new(py, store, &key, window, version.map(Version::new))?);
        Ok(Self { url, bucket, key, bytes, position: 0, lines: None })
    }

    /// Size of the object in bytes. A reader that fetches on demand sends a request, unless it has fetched before.
    #[getter]
    fn size(&mut self, py: Python<'_>) -> PyResult<u64> {
        match &mut self.bytes {
            ReaderBytes::Buffer(buffer) => Ok(buffer.get().bytes().len() as u64),
            ReaderBytes::Ahead(fetched) => {
                let ahead = fetched.ahead(py, &self.key)?;
                wait(py, async move { ahead.lock().await.size().await })?.or_raise(py)
            }
            ReaderBytes::Closed { .. } => Err(closed()),
        }
    }

    /// The mode of the file: `rb`.
    #[getter]
    fn mode(&self) -> &'static str {
        "rb"
    }

    /// URL of the object, as the name of the file.
    #[getter]
    fn name(&self) -> &str {
        &self.url
    }

    /// Whether the reader is closed.
    #[getter]
    fn closed(&self) -> bool {
        matches!(self.bytes, ReaderBytes::Closed { .. })
    }

    /// Reads bytes and advances the position.
    ///
    /// Args:
    ///     size: Number of bytes; None or negative: all remaining bytes.
    ///
    /// Returns:
    ///     A copy of the bytes; fewer than `size` only at the end of the object.
    #[pyo3(signature = (size=None, /))]
    fn read<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        let left = self.size(py)?.saturating_sub(self.position);
        let wanted = size.and_then(|size| u64::try_from(size).ok()).unwrap_or(left).min(left);
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        if let ReaderBytes::Buffer(buffer) = &self.bytes {
            let start = usize::try_from(self.position).unwrap_or(usize::MAX);
            let bytes = buffer.get().bytes().get(start..).unwrap_or_default();
            let bytes = PyBytes::new(py, &bytes[..wanted]);
            self.position += wanted as u64;
            return Ok(bytes);
        }
        let (pending, count) = self.read_memory(py, Memory::allocate(wanted)?)?;
        match pending.finish(count) {
            Ok(bytes) => Ok(PyBytes::new(py, bytes.as_slice())),
            Err(_) => Err(PyValueError::new_err("a writer outlived its read: a bug")),
        }
    }

    /// Same as `read`.
    #[pyo3(signature = (size=None, /))]
    fn read1<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        self.read(py, size)
    }

    /// Reads bytes into a buffer and advances the position.
    ///
    /// Args:
    ///     buffer: A writable, contiguous buffer. The reader does not use it after the call.
    ///
    /// Returns:
    ///     Number of bytes; fewer than the size of the buffer only at the end of the object.
    ///
    /// Raises:
    ///     TypeError: `buffer` is read-only.
    #[pyo3(signature = (buffer, /))]
    fn readinto(&mut self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (pending, count) = self.read_memory(py, borrow_for_file(buffer)?)?;
        drop(pending);
        super::release_exports(py);
        Ok(count)
    }

    /// Same as `readinto`.
    #[pyo3(signature = (buffer, /))]
    fn readinto1(&mut self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.readinto(py, buffer)
    }

    /// Reads a line, including its newline, and advances the position.
    ///
    /// Args:
    ///     size: Maximum number of bytes; None or negative: no limit.
    ///
    /// Returns:
    ///     A copy of the line; empty at the end of the object.
    #[pyo3(signature = (size=None, /))]
    fn readline<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        let max = size.and_then(|size| usize::try_from(size).ok()).unwrap_or(usize::MAX);
        if let ReaderBytes::Buffer(buffer) = &self.bytes {
            let bytes = buffer.get().bytes();
            let start = usize::try_from(self.position).unwrap_or(usize::MAX).min(bytes.len());
            let line = line_of(&bytes[start..], max);
            self.position += line.len() as u64;
            return Ok(PyBytes::new(py, line));
        }
        let mut line = Vec::new();
        loop {
            let position = self.position + line.len() as u64;
            let piece = line_of(self.buffered_at(py, position)?, max - line.len());
            let last = piece.is_empty() || piece.ends_with(b"\n");
            line.extend_from_slice(piece);
            if last || line.len() == max {
                self.position += line.len() as u64;
                return Ok(PyBytes::new(py, &line));
            }
        }
    }

    /// Reads the remaining lines.
    ///
    /// Args:
    ///     hint: Stops after the line at which this number of bytes is reached; None, 0 or negative: no limit.
    #[pyo3(signature = (hint=None, /))]
    fn readlines<'py>(&mut self, py: Python<'py>, hint: Option<i64>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let max = hint.and_then(|hint| usize::try_from(hint).ok()).filter(|hint| *hint > 0).unwrap_or(usize::MAX);
        let mut lines = Vec::new();
        let mut total = 0;
        while total < max {
            let line = self.readline(py, None)?;
            if line.as_bytes().is_empty() {
                break;
            }
            total += line.as_bytes().len();
            lines.push(line);
        }
        Ok(lines)
    }

    /// Sets the position. Sends no request, except for the size if `whence` is 2 and it is unknown.
    ///
    /// Args:
    ///     offset: Offset in bytes.
    ///     whence: Origin of the offset: the start (0), the position (1) or the end (2).
    ///
    /// Returns:
    ///     The new position. It may be after the end of the object, where reads return no bytes.
    ///
    /// Raises:
    ///     ValueError: The new position would be negative.
    #[pyo3(signature = (offset, whence=0, /))]
    fn seek(&mut self, py: Python<'_>, offset: i64, whence: i32) -> PyResult<u64> {
        let base = match whence {
            0 if self.closed() => return Err(closed()),
            0 => 0,
            1 => self.position,
            2 => self.size(py)?,
            _ => return Err(PyValueError::new_err(format!("whence={whence}: must be 0, 1 or 2"))),
        };
        let position = base.checked_add_signed(offset);
        self.position =
            position.ok_or_else(|| PyValueError::new_err(format!("negative position: {offset} from {base}")))?;
        Ok(self.position)
    }

    /// The bytes of the object, shared; None if the reader fetches on demand or is closed.
    #[getter]
    fn buffer(&self, py: Python<'_>) -> Option<Py<Buffer>> {
        match &self.bytes {
            ReaderBytes::Buffer(buffer) => Some(buffer.clone_ref(py)),
            _ => None,
        }
    }

    /// Returns the position in bytes.
    fn tell(&self) -> PyResult<u64> {
        if self.closed() { Err(closed()) } else { Ok(self.position) }
    }

    /// Returns True: the reader supports `seek`.
    fn seekable(&self) -> bool {
        true
    }

    /// Returns True.
    fn readable(&self) -> bool {
        true
    }

    /// Returns False.
    fn writable(&self) -> bool {
        false
    }

    /// Returns False.
    fn isatty(&self) -> bool {
        false
    }

    /// Does nothing.
    fn flush(&self) {}

    /// Raises `io.UnsupportedOperation`: an object has no file descriptor.
    fn fileno(&self) -> PyResult<i32> {
        Err(UnsupportedOperation::new_err("fileno: an object has no file descriptor"))
    }

    /// Raises `io.UnsupportedOperation`: a reader cannot write.
    #[pyo3(signature = (data, /))]
    fn write(&self, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let _ = data;
        Err(UnsupportedOperation::new_err("not writable"))
    }

    /// Raises `io.UnsupportedOperation`: a reader cannot write.
    #[pyo3(signature = (lines, /))]
    fn writelines(&self, lines: &Bound<'_, PyAny>) -> PyResult<()> {
        let _ = lines;
        Err(UnsupportedOperation::new_err("not writable"))
    }

    /// Raises `io.UnsupportedOperation`: a reader cannot write.
    #[pyo3(signature = (size=None, /))]
    fn truncate(&self, size: Option<i64>) -> PyResult<u64> {
        let _ = size;
        Err(UnsupportedOperation::new_err("not writable"))
    }

    /// Raises `io.UnsupportedOperation`: the reader has no raw stream.
    fn detach(&self) -> PyResult<Py<PyAny>> {
        Err(UnsupportedOperation::new_err("detach: the reader has no raw stream"))
    }

    /// Returns all bytes of the object, regardless of the position.
    ///
    /// Returns:
    ///     A writable memoryview that shares the memory of the reader. It remains valid after the reader is closed.
    ///
    /// Raises:
    ///     io.UnsupportedOperation: The reader fetches on demand.
    fn getbuffer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        match &self.bytes {
            ReaderBytes::Buffer(buffer) => PyMemoryView::from(buffer.bind(py)),
            ReaderBytes::Ahead(_) => Err(UnsupportedOperation::new_err("getbuffer: this reader fetches on demand")),
            ReaderBytes::Closed { .. } => Err(closed()),
        }
    }

    /// Closes the reader and drops its bytes. Views remain valid. Does nothing if the reader is closed.
    fn close(&mut self, py: Python<'_>) {
        let used = match &self.bytes {
            ReaderBytes::Buffer(buffer) if buffer.get().is_untracked() => Some(buffer.clone_ref(py)),
            ReaderBytes::Closed { _used: used } => used.as_ref().map(|used| used.clone_ref(py)),
            _ => None,
        };
        (self.bytes, self.lines) = (ReaderBytes::Closed { _used: used }, None);
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        if slf.borrow().closed() { Err(closed()) } else { Ok(slf) }
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&mut self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    fn __iter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        Self::__enter__(slf)
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let line = self.readline(py, None)?;
        Ok(Some(line).filter(|line| !line.as_bytes().is_empty()))
    }

    fn __repr__(&self) -> String {
        let state = match &self.bytes {
            ReaderBytes::Buffer(buffer) => format!("{} bytes", buffer.get().__len__()),
            ReaderBytes::Ahead(_) => "fetched on demand".to_owned(),
            ReaderBytes::Closed { .. } => "closed".to_owned(),
        };
        format!("<torchobj.ObjectReader {} ({state})>", self.url)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ReaderFields)> {
        let this = slf.borrow();
        match &this.bytes {
            ReaderBytes::Buffer(buffer) => {
                let fields = (
                    this.url.clone(),
                    this.bucket.clone(),
                    this.key.clone(),
                    buffer.clone_ref(slf.py()),
                    this.position,
                );
                Ok((slf.get_type().into_any(), fields))
            }
            _ => Err(PyTypeError::new_err("cannot pickle a reader that fetches on demand")),
        }
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = match &slf.borrow().bytes {
            ReaderBytes::Buffer(buffer) => buffer.clone_ref(slf.py()),
            // The type of the error by which pyarrow and others recognise an object that has no buffer, and read it as a file.
            ReaderBytes::Ahead(_) => {
                return Err(PyTypeError::new_err(
                    "a bytes-like object is required, not a reader that fetches on demand",
                ));
            }
            ReaderBytes::Closed { .. } => return Err(closed()),
        };
        // SAFETY: the caller passes a valid `view`. It takes a reference to the buffer, so it remains valid after the reader is
        // closed.
        match unsafe { ffi::PyObject_GetBuffer(buffer.as_ptr(), view, flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }

    /// Never called, because views belong to the buffer. Without it, `numpy.frombuffer` would keep only a reference to the
    /// reader instead of a view.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {}
}

/// The arguments of the constructor, for pickle.
type ReaderFields = (String, String, String, Py<Buffer>, u64);
