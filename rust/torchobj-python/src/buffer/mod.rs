//! Memory that Python and Rust both see: buffers, and in `reader` files over them. The only module of this crate with
//! `unsafe`.
//!
//! `Buffer` exports memory of ours through the buffer protocol: a view holds the object, the object holds the memory.
//! `lend` takes memory of Python's for as long as a read writes to it: the export is kept until the last writer is
//! gone. That may be a task which was cancelled a moment ago, on a thread without the GIL; so what is no longer needed
//! is laid aside there, and released by the next thread that comes by with the GIL.
#![expect(unsafe_code, reason = "the buffer protocol is pointers; each use says which invariant it keeps")]

mod fetched;
mod lines;
mod reader;

use std::ffi::c_int;
use std::ops::Range;
use std::ptr::NonNull;
#[cfg(target_os = "linux")]
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use bytes::Bytes;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};
#[cfg(target_os = "linux")]
use torchobj_core::arena::Claim;
use torchobj_core::buffer::{Buffer as Landed, Landing, Memory};
use torchobj_core::fork;

pub(crate) use reader::ObjectReader;

/// Bytes that were read.
///
/// Supports the buffer protocol, writable: `memoryview`, `numpy.frombuffer` and `torch.frombuffer` share its memory,
/// which lives until the buffer and every view are gone.
///
/// A worker that returns a buffer and keeps it, or anything that shares its memory, keeps its own bytes: the trainer gets
/// the memory where nothing in the worker can reach it any more, and else a copy.
///
/// What a dataset or a loader read ahead lies in memory that a forked child shares with its parent, and does not get a
/// copy of: once the parent dropped the buffer the child sees other bytes there. A child that goes on with it takes
/// `bytes(buffer)` first.
#[pyclass(module = "torchobj", frozen, sequence, weakref)]
pub(crate) struct Buffer {
    landed: Landed,
    /// In a worker: the claim that keeps the memory. Dropped with the last reference to this object.
    #[cfg(target_os = "linux")]
    claim: Option<Arc<Claim>>,
    /// How many views of it there are, with `UNTRACKED` and `OFFERED`.
    exports: AtomicUsize,
    /// What is exported instead of `landed` once that is offered, when it may not be written to.
    own: OnceLock<Landed>,
}

/// Memory was exported as writable. The consumer may use the bare pointer afterwards: `torch.frombuffer` and
/// `numpy.ndarray` release their view at once, and keep a reference to the object instead.
const UNTRACKED: usize = 1 << (usize::BITS - 2);
/// The memory was offered to the trainer.
const OFFERED: usize = 1 << (usize::BITS - 1);

impl From<Landed> for Buffer {
    fn from(landed: Landed) -> Self {
        Self {
            landed,
            #[cfg(target_os = "linux")]
            claim: None,
            exports: AtomicUsize::new(0),
            own: OnceLock::new(),
        }
    }
}

impl Buffer {
    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.own.get().unwrap_or(&self.landed).as_slice()
    }

    /// Whether a consumer may use its memory through a bare pointer, relying on a reference to an object for its lifetime.
    fn is_untracked(&self) -> bool {
        self.exports.load(Ordering::Acquire) & UNTRACKED != 0
    }

    /// The buffer of a worker's claim.
    #[cfg(target_os = "linux")]
    pub(crate) fn claimed(claim: Arc<Claim>) -> Self {
        Self { claim: Some(claim.clone()), ..claim.buffer().into() }
    }

    /// Offers its memory to the owner of the arena, if it is the arena's and nothing here can write to it. `None` where it
    /// is to be copied.
    #[cfg(target_os = "linux")]
    pub(crate) fn offer(&self) -> Option<(u32, u32, u32)> {
        let claim = self.claim.as_ref()?;
        self.exports.compare_exchange(0, OFFERED, Ordering::AcqRel, Ordering::Acquire).ok()?;
        claim.offer().map(|offer| (claim.owner(), offer.id, offer.generation))
    }

    /// The memory to export, which its view may write to.
    fn exported(&self) -> PyResult<&Landed> {
        if self.exports.load(Ordering::Acquire) & OFFERED == 0 {
            return Ok(&self.landed);
        }
        if self.own.get().is_none() {
            // Of two threads that get here, the second one's is dropped.
            let _ = self.own.set(copied(self.landed.as_slice())?);
        }
        Ok(self.own.get().expect("it was set just now, or before"))
    }
}

/// The same bytes in memory of their own.
fn copied(bytes: &[u8]) -> PyResult<Landed> {
    let (landing, mut dest) = Landing::new(Memory::allocate(bytes.len())?);
    dest.fill(bytes);
    drop(dest);
    landing.finish(usize::MAX).map_err(|_| PyBufferError::new_err("a writer is left: a bug"))
}

#[pymethods]
impl Buffer {
    #[new]
    fn new(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<Self> {
        let source = contiguous(data)?;
        let landed = with_bytes(py, &source, copied);
        source.release(py);
        Ok(landed?.into())
    }

    pub(crate) fn __len__(&self) -> usize {
        self.landed.len()
    }

    /// A byte as a number, or a slice as a view that shares the memory.
    fn __getitem__<'py>(slf: &Bound<'py, Self>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        PyMemoryView::from(slf)?.get_item(index)
    }

    fn __repr__(&self) -> String {
        format!("<torchobj.Buffer of {} bytes>", self.landed.len())
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let own = self.bytes();
        match contiguous(other) {
            Ok(other) => {
                let equal = with_bytes(py, &other, |bytes| bytes == own);
                other.release(py);
                Ok(equal.into_pyobject(py)?.to_owned().into_any().unbind())
            }
            Err(_) => Ok(py.NotImplemented()),
        }
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, (Bound<'py, PyBytes>,)) {
        (slf.get_type().into_any(), (PyBytes::new(slf.py(), slf.get().bytes()),))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = slf.get();
        // Counted first: from now on the memory is not offered, so what is exported may be written to.
        buffer.exports.fetch_add(1, Ordering::AcqRel);
        let filled = buffer.exported().and_then(|landed| {
            let length = landed.len() as ffi::Py_ssize_t;
            let start = landed.start().as_ptr().cast();
            // SAFETY: `view` is the caller's to be filled; it takes a reference to `slf`, which keeps the region where it
            // is; the region has `length` initialised bytes, and no writer of ours is left.
            match unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, length, 0, flags) } {
                0 => Ok(()),
                _ => Err(PyErr::fetch(slf.py())),
            }
        });
        if filled.is_err() {
            buffer.exports.fetch_sub(1, Ordering::AcqRel);
        } else if flags & ffi::PyBUF_WRITABLE != 0 {
            buffer.exports.fetch_or(UNTRACKED, Ordering::AcqRel);
        }
        filled
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An export of Python's that Rust writes to or reads from; laid aside when it is dropped.
struct Lent(Option<PyUntypedBuffer>);

static LAID_ASIDE: Mutex<Vec<PyUntypedBuffer>> = Mutex::new(Vec::new());

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            let _inside = fork::enter();
            LAID_ASIDE.lock().expect("no holder of this lock panics").push(buffer);
        }
    }
}

/// Releases the exports that nobody needs any more.
pub(crate) fn release_lent(py: Python<'_>) {
    let buffers = {
        let _inside = fork::enter();
        std::mem::take(&mut *LAID_ASIDE.lock().expect("no holder of this lock panics"))
    };
    buffers.into_iter().for_each(|buffer| buffer.release(py));
}

fn contiguous(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(object)?;
    if buffer.is_c_contiguous() {
        return Ok(buffer);
    }
    buffer.release(object.py());
    Err(PyBufferError::new_err("the buffer is not C-contiguous"))
}

fn start_of(buffer: &PyUntypedBuffer) -> NonNull<u8> {
    NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling())
}

/// Calls `read` with the bytes of an export, the GIL released.
fn with_bytes<T: Send>(py: Python<'_>, buffer: &PyUntypedBuffer, read: impl FnOnce(&[u8]) -> T + Send) -> T {
    // SAFETY: the export keeps these bytes where they are until it is released, after `read`. That another thread of
    // Python's changes them meanwhile is as with any `write` of a file: its bytes are then either.
    let bytes = unsafe { std::slice::from_raw_parts(start_of(buffer).as_ptr(), buffer.len_bytes()) };
    py.detach(|| read(bytes))
}

/// The bytes of any contiguous buffer, shared until the last copy of the result is gone.
pub(crate) fn share(data: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    struct Shared {
        start: NonNull<u8>,
        length: usize,
        /// Keeps the bytes where they are.
        _export: Lent,
    }
    // SAFETY: the pointer is to bytes that the export keeps; they are only read.
    unsafe impl Send for Shared {}
    // SAFETY: as above.
    unsafe impl Sync for Shared {}
    impl AsRef<[u8]> for Shared {
        fn as_ref(&self) -> &[u8] {
            // SAFETY: the export keeps `length` bytes where they are.
            unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
        }
    }
    let buffer = contiguous(data)?;
    let (start, length) = (start_of(&buffer), buffer.len_bytes());
    Ok(Bytes::from_owner(Shared { start, length, _export: Lent(Some(buffer)) }))
}

/// Memory of Python's to read into, piece by piece: none may overlap another, for each has a writer of its own.
pub(crate) fn lend_all(objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<Memory>> {
    let memory = objects.iter().map(lend).collect::<PyResult<Vec<_>>>()?;
    let mut regions: Vec<Range<usize>> =
        memory.iter().map(Memory::addresses).filter(|region| !region.is_empty()).collect();
    regions.sort_unstable_by_key(|region| region.start);
    if regions.array_windows().any(|[one, next]| next.start < one.end) {
        return Err(PyValueError::new_err("two of the buffers to read into share memory"));
    }
    Ok(memory)
}

/// Memory that the `readinto` of a file was given; what cannot be written is a `TypeError`, as for the files of `io`.
fn lend_to_file(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    lend(object).map_err(|error| match error.is_instance_of::<PyValueError>(object.py()) {
        true => PyTypeError::new_err(format!("readinto() takes a writable buffer, not {}", object.get_type())),
        false => error,
    })
}

/// Memory of Python's to read into.
pub(crate) fn lend(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let buffer = contiguous(object)?;
    if buffer.readonly() {
        buffer.release(object.py());
        return Err(PyValueError::new_err("cannot read into a read-only buffer"));
    }
    let (start, length) = (start_of(&buffer), buffer.len_bytes());
    // SAFETY: the export is writable and keeps these bytes where they are until `Lent` is dropped; Python objects that
    // see them are not written through Rust references.
    Ok(unsafe { Memory::lent(start, length, Box::new(Lent(Some(buffer)))) })
}
