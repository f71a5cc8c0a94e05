//! Objects as files that are read: one that landed whole, or one that is fetched as it is read.

use std::ffi::c_int;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};
use torchobj_core::buffer::{Buffer as Bytes, Landing, Memory};
use torchobj_core::manifest::Object;
use torchobj_core::read::{Landed, Window};

use super::fetched::Fetched;
use super::{Buffer, lend_to_file};
use crate::error::OrRaise;
use crate::store::NativeStore;
use crate::wait::wait;

pub(super) enum Source {
    /// All bytes are here.
    Landed(Py<Buffer>),
    /// Bytes are fetched as they are read.
    Ahead(Fetched),
    /// Keeps memory that a consumer uses through a bare pointer, as `numpy.ndarray(buffer=reader)` does with the reader
    /// as its base.
    Closed { _used: Option<Py<Buffer>> },
}

/// An object, read as a binary file.
///
/// Registered as an `io.BufferedIOBase`. One whose bytes are here, as a dataset's `transform` gets it, shares them
/// without a copy by `getbuffer()` and the buffer protocol; they live until the reader and every view are gone.
#[pyclass(module = "torchobj", weakref)]
pub(crate) struct ObjectReader {
    /// The object's URL.
    #[pyo3(get)]
    url: String,
    /// The bucket; empty for a file.
    #[pyo3(get)]
    bucket: String,
    /// The key, raw.
    #[pyo3(get)]
    key: String,
    pub(super) source: Source,
    pub(super) position: u64,
    /// What `readline` fetched last, and from which position on.
    pub(super) lines: Option<(u64, Bytes)>,
}

impl ObjectReader {
    /// A reader of an object that was read whole.
    pub(crate) fn landed(py: Python<'_>, object: Object<'_>, landed: Landed) -> PyResult<Py<Self>> {
        Self::of(py, object, landed.buffer.into())
    }

    /// A reader of bytes that are here.
    pub(crate) fn of(py: Python<'_>, object: Object<'_>, buffer: Buffer) -> PyResult<Py<Self>> {
        let bucket = object.base.split_once("://").map_or("", |(_, bucket)| bucket).to_owned();
        let source = Source::Landed(Py::new(py, buffer)?);
        Py::new(py, Self { url: object.url(), bucket, key: object.key.to_owned(), source, position: 0, lines: None })
    }

    /// Reads into `memory` from the position on, and moves on; says how many bytes those were.
    pub(super) fn read_memory(&mut self, py: Python<'_>, memory: Memory) -> PyResult<(Landing, usize)> {
        let (landing, mut dest) = Landing::new(memory);
        let position = self.position;
        let count = match &mut self.source {
            Source::Landed(buffer) => {
                let bytes = buffer.get().bytes();
                let rest = &bytes[usize::try_from(position).unwrap_or(usize::MAX).min(bytes.len())..];
                py.detach(|| {
                    let mut dest = dest;
                    dest.fill(rest)
                })
            }
            Source::Ahead(fetched) => {
                let ahead = fetched.ahead(py, &self.key)?;
                wait(py, async move { ahead.lock().await.read_at(position, &mut dest).await })?.or_raise(py)?
            }
            Source::Closed { .. } => return Err(closed()),
        };
        self.position += count as u64;
        Ok((landing, count))
    }

    fn read_bytes<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        let left = self.size(py)?.saturating_sub(self.position);
        let wanted = size.and_then(|size| u64::try_from(size).ok()).unwrap_or(left).min(left);
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        if let Source::Landed(buffer) = &self.source {
            let start = usize::try_from(self.position).unwrap_or(usize::MAX);
            let bytes = buffer.get().bytes().get(start..).unwrap_or_default();
            let bytes = PyBytes::new(py, &bytes[..wanted]);
            self.position += wanted as u64;
            return Ok(bytes);
        }
        let (landing, count) = self.read_memory(py, Memory::allocate(wanted)?)?;
        match landing.finish(count) {
            Ok(bytes) => Ok(PyBytes::new(py, bytes.as_slice())),
            Err(_) => Err(PyValueError::new_err("a writer outlived its read: a bug")),
        }
    }

    fn unsupported(py: Python<'_>, what: &str) -> PyErr {
        match py.import("io").and_then(|io| io.getattr("UnsupportedOperation")) {
            Ok(class) => match class.call1((what,)) {
                Ok(error) => PyErr::from_value(error),
                Err(error) => error,
            },
            Err(error) => error,
        }
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("I/O operation on closed file")
}

#[pymethods]
impl ObjectReader {
    /// A reader of bytes that are here.
    #[new]
    #[pyo3(signature = (url, bucket, key, buffer, position=0))]
    fn new(url: String, bucket: String, key: String, buffer: Py<Buffer>, position: u64) -> Self {
        Self { url, bucket, key, source: Source::Landed(buffer), position, lines: None }
    }

    /// A reader that fetches as it is read: after a jump `jump_bytes`, and up to `ahead_bytes` ahead of a position that
    /// moves on.
    #[staticmethod]
    #[pyo3(signature = (store, url, bucket, key, jump_bytes=None, ahead_bytes=None))]
    fn open(
        py: Python<'_>,
        store: Py<NativeStore>,
        url: String,
        bucket: String,
        key: String,
        jump_bytes: Option<u64>,
        ahead_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let usual = Window::default();
        let window = Window {
            jump_bytes: jump_bytes.unwrap_or(usual.jump_bytes),
            ahead_bytes: ahead_bytes.unwrap_or(usual.ahead_bytes),
        };
        let source = Source::Ahead(Fetched::new(py, store, &key, window)?);
        Ok(Self { url, bucket, key, source, position: 0, lines: None })
    }

    /// Bytes of the object. A reader that fetches as it is read asks the store, unless it has read already.
    #[getter]
    fn size(&mut self, py: Python<'_>) -> PyResult<u64> {
        match &mut self.source {
            Source::Landed(buffer) => Ok(buffer.get().bytes().len() as u64),
            Source::Ahead(fetched) => {
                let ahead = fetched.ahead(py, &self.key)?;
                wait(py, async move { ahead.lock().await.size().await })?.or_raise(py)
            }
            Source::Closed { .. } => Err(closed()),
        }
    }

    /// `rb`
    #[getter]
    fn mode(&self) -> &'static str {
        "rb"
    }

    /// The object's URL, as files have the path here.
    #[getter]
    fn name(&self) -> &str {
        &self.url
    }

    #[getter]
    fn closed(&self) -> bool {
        matches!(self.source, Source::Closed { .. })
    }

    /// Reads `size` bytes, or everything that is left. Fewer are returned at the end only.
    #[pyo3(signature = (size=None, /))]
    fn read<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        self.read_bytes(py, size)
    }

    /// As `read`.
    #[pyo3(signature = (size=None, /))]
    fn read1<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        self.read_bytes(py, size)
    }

    /// Fills a writable buffer and returns the number of bytes, which is less than its length at the end only.
    #[pyo3(signature = (buffer, /))]
    fn readinto(&mut self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (landing, count) = self.read_memory(py, lend_to_file(buffer)?)?;
        drop(landing);
        super::release_lent(py);
        Ok(count)
    }

    /// As `readinto`.
    #[pyo3(signature = (buffer, /))]
    fn readinto1(&mut self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.readinto(py, buffer)
    }

    /// Reads up to and with the next newline, at most `size` bytes.
    #[pyo3(signature = (size=None, /))]
    fn readline<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        self.line(py, size)
    }

    /// All lines that are left, or as many as hold `hint` bytes.
    #[pyo3(signature = (hint=None, /))]
    fn readlines<'py>(&mut self, py: Python<'py>, hint: Option<i64>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let most = hint.and_then(|hint| usize::try_from(hint).ok()).filter(|hint| *hint > 0).unwrap_or(usize::MAX);
        let mut lines = Vec::new();
        let mut total = 0;
        while total < most {
            let line = self.readline(py, None)?;
            if line.as_bytes().is_empty() {
                break;
            }
            total += line.as_bytes().len();
            lines.push(line);
        }
        Ok(lines)
    }

    /// Moves the position: from the start (0), from where it is (1) or from the end (2).
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

    /// The bytes, of an object that was read whole and is not closed.
    #[getter]
    fn buffer(&self, py: Python<'_>) -> Option<Py<Buffer>> {
        match &self.source {
            Source::Landed(buffer) => Some(buffer.clone_ref(py)),
            _ => None,
        }
    }

    /// The position.
    fn tell(&self) -> PyResult<u64> {
        if self.closed() { Err(closed()) } else { Ok(self.position) }
    }

    fn seekable(&self) -> bool {
        true
    }

    fn readable(&self) -> bool {
        true
    }

    fn writable(&self) -> bool {
        false
    }

    fn isatty(&self) -> bool {
        false
    }

    fn flush(&self) {}

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Err(Self::unsupported(py, "fileno: an object has no file descriptor"))
    }

    #[pyo3(signature = (data, /))]
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let _ = data;
        Err(Self::unsupported(py, "not writable"))
    }

    #[pyo3(signature = (lines, /))]
    fn writelines(&self, py: Python<'_>, lines: &Bound<'_, PyAny>) -> PyResult<()> {
        let _ = lines;
        Err(Self::unsupported(py, "not writable"))
    }

    #[pyo3(signature = (size=None, /))]
    fn truncate(&self, py: Python<'_>, size: Option<i64>) -> PyResult<u64> {
        let _ = size;
        Err(Self::unsupported(py, "not writable"))
    }

    fn detach(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Err(Self::unsupported(py, "detach: there is no raw stream"))
    }

    /// The bytes as a writable view that shares their memory. Only where they are here already.
    fn getbuffer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        match &self.source {
            Source::Landed(buffer) => PyMemoryView::from(buffer.bind(py)),
            Source::Ahead(_) => Err(Self::unsupported(py, "getbuffer: this reader fetches as it is read")),
            Source::Closed { .. } => Err(closed()),
        }
    }

    /// Lets go of the bytes; views of them stay good.
    fn close(&mut self, py: Python<'_>) {
        let used = match &self.source {
            Source::Landed(buffer) if buffer.get().is_untracked() => Some(buffer.clone_ref(py)),
            Source::Closed { _used: used } => used.as_ref().map(|used| used.clone_ref(py)),
            _ => None,
        };
        (self.source, self.lines) = (Source::Closed { _used: used }, None);
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
        let state = match &self.source {
            Source::Landed(buffer) => format!("{} bytes", buffer.get().__len__()),
            Source::Ahead(_) => "fetched as it is read".to_owned(),
            Source::Closed { .. } => "closed".to_owned(),
        };
        format!("<torchobj.ObjectReader {} ({state})>", self.url)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ReaderFields)> {
        let this = slf.borrow();
        match &this.source {
            Source::Landed(buffer) => {
                let fields = (
                    this.url.clone(),
                    this.bucket.clone(),
                    this.key.clone(),
                    buffer.clone_ref(slf.py()),
                    this.position,
                );
                Ok((slf.get_type().into_any(), fields))
            }
            _ => Err(PyTypeError::new_err("cannot pickle a reader that fetches as it is read")),
        }
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = match &slf.borrow().source {
            Source::Landed(buffer) => buffer.clone_ref(slf.py()),
            Source::Ahead(_) => return Err(Self::unsupported(slf.py(), "this reader fetches as it is read")),
            Source::Closed { .. } => return Err(closed()),
        };
        // SAFETY: `view` is the caller's to be filled. It takes a reference to the buffer, not to the reader: closing
        // the reader leaves the view good.
        match unsafe { ffi::PyObject_GetBuffer(buffer.as_ptr(), view, flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }

    /// Never called: a view is of the buffer. `numpy.frombuffer` keeps its view of an object that has this, and only a
    /// reference to one that has not.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {}
}

/// What a reader is made of anew on the other side of a pickle.
type ReaderFields = (String, String, String, Py<Buffer>, u64);
