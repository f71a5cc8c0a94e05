//! Memory shared with Python: buffers, and in `reader` files over them. The only module of this crate with `unsafe`.
//!
//! `Buffer` exports our memory through the buffer protocol: a view keeps the object alive, and the object the memory.
//! `borrow` exports memory of Python to reads: the export is kept until the last writer is dropped. That may be a cancelled
//! task on a thread without the GIL, so its export is queued, and the next thread with the GIL releases it.
#![expect(unsafe_code, reason = "the buffer protocol uses pointers; each use states the invariant that it keeps")]

mod reader;

use std::ffi::{CString, c_int};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use bytes::Bytes;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyIndexError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView, PyString};
#[cfg(target_os = "linux")]
use torchobj_core::arena::Claim;
use torchobj_core::buffer::{Buffer as CoreBuffer, Memory, PendingBuffer, SharedBuffer};
use torchobj_core::fork;

pub(crate) use reader::ObjectReader;

/// The bytes of an object, in memory that views share.
///
/// Supports the writable buffer protocol: `memoryview`, `numpy.frombuffer` and `torch.frombuffer` share the memory without a
/// copy. The memory lives until the buffer and all of its views are deleted. `bytes(buffer)` and pickles copy it.
///
/// In a DataLoader worker, a returned buffer is transferred to the trainer without a copy if the worker has no other
/// reference to its memory, and is copied otherwise. Buffers and views that the worker keeps remain valid in both cases.
///
/// A forked child keeps the bytes of the buffers and views that it inherits, also after the parent has deleted its own: memory
/// that the parent had during the fork is not reused before the child has exited. What a dataset or loader read ahead is shared:
/// the child sees what the parent writes to it, and the reverse.
///
/// Args:
///     data: A contiguous buffer to copy.
///
/// Raises:
///     BufferError: `data` is not contiguous.
///
/// Example:
///     >>> import torch
///     >>> buffer = Buffer(b"abc")
///     >>> torch.frombuffer(buffer, dtype=torch.uint8)  # shares the memory
///     tensor([97, 98, 99], dtype=torch.uint8)
#[pyclass(module = "torchobj", frozen, sequence, weakref)]
pub(crate) struct Buffer {
    core: CoreBuffer,
    /// In a worker: the claim on the memory, dropped with this object.
    #[cfg(target_os = "linux")]
    claim: Option<Arc<Claim>>,
    /// Number of views, and the flags `UNTRACKED` and `OFFERED`.
    exports: AtomicUsize,
    /// A copy of `core`, exported instead of it after it was offered and must not be written to.
    own: OnceLock<CoreBuffer>,
}

/// The memory was exported as writable. The consumer may use the pointer after it has released its view: `torch.frombuffer`
/// and `numpy.ndarray` keep only a reference to the object.
const UNTRACKED: usize = 1 << (usize::BITS - 2);
/// The memory was offered to the trainer.
const OFFERED: usize = 1 << (usize::BITS - 1);

impl From<CoreBuffer> for Buffer {
    fn from(core: CoreBuffer) -> Self {
        Self {
            core,
            #[cfg(target_os = "linux")]
            claim: None,
            exports: AtomicUsize::new(0),
            own: OnceLock::new(),
        }
    }
}

impl Buffer {
    /// The bytes of the object.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.own.get().unwrap_or(&self.core).as_slice()
    }

    /// Returns whether a consumer may use the memory through a pointer, with only a reference to an object to keep it alive.
    fn is_untracked(&self) -> bool {
        self.exports.load(Ordering::Acquire) & UNTRACKED != 0
    }

    /// The buffer of a claim of a worker.
    #[cfg(target_os = "linux")]
    pub(crate) fn claimed(claim: Arc<Claim>) -> Self {
        Self { claim: Some(claim.clone()), ..claim.buffer().into() }
    }

    /// Offers the memory to the owner of the arena. `None` if it is not in an arena, or this process may still write to it.
    #[cfg(target_os = "linux")]
    pub(crate) fn offer(&self) -> Option<(u64, u32, u32)> {
        let claim = self.claim.as_ref()?;
        if claim.is_block() {
            // Tensors of the batch are views; the trainer copies the memory as long as this process has one.
            return claim.offer().map(|offer| (claim.owner(), offer.id, offer.generation));
        }
        self.exports.compare_exchange(0, OFFERED, Ordering::AcqRel, Ordering::Acquire).ok()?;
        claim.offer().map(|offer| (claim.owner(), offer.id, offer.generation))
    }

    /// The bytes, shared by views. Until they are dropped, this object exists and its memory is not offered.
    pub(crate) fn shared(slf: &Bound<'_, Self>) -> PyResult<SharedBuffer> {
        /// Counts as an export.
        struct Keep(Py<Buffer>);
        impl Drop for Keep {
            fn drop(&mut self) {
                self.0.get().exports.fetch_sub(1, Ordering::AcqRel);
            }
        }
        let keep = Arc::new(Keep(slf.clone().unbind()));
        let buffer = slf.get();
        // Incremented first, as in `__getbuffer__`; `keep` decrements it.
        buffer.exports.fetch_add(1, Ordering::AcqRel);
        let exported = buffer.exported()?;
        // SAFETY: `keep` keeps the object, and with it `core` and `own`, at their addresses. Rust writes to neither.
        Ok(unsafe { SharedBuffer::kept(exported.start(), exported.len(), keep) })
    }

    /// The memory to export to a view, which may write to it.
    fn exported(&self) -> PyResult<&CoreBuffer> {
        if self.exports.load(Ordering::Acquire) & OFFERED == 0 {
            return Ok(&self.core);
        }
        if self.own.get().is_none() {
            // If two threads copy concurrently, the second copy is dropped.
            let _ = self.own.set(copied(self.core.as_slice())?);
        }
        Ok(self.own.get().expect("it was set above if it was missing"))
    }
}

/// Copies bytes to new memory.
fn copied(bytes: &[u8]) -> PyResult<CoreBuffer> {
    let (pending, mut dest) = PendingBuffer::new(Memory::allocate(bytes.len())?);
    dest.fill(bytes);
    drop(dest);
    pending.finish(usize::MAX).map_err(|_| PyBufferError::new_err("a writer is left: a bug"))
}

#[pymethods]
impl Buffer {
    #[new]
    fn new(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<Self> {
        let source = contiguous(data)?;
        let fetched = with_bytes(py, &source, copied);
        source.release(py);
        Ok(fetched?.into())
    }

    pub(crate) fn __len__(&self) -> usize {
        self.core.len()
    }

    /// Returns a buffer of bytes `start..end`, which shares the memory of this one.
    ///
    /// The memory lives until this buffer and all buffers and views that share it are deleted.
    ///
    /// Args:
    ///     start: Index of the first byte.
    ///     end: Index after the last byte.
    ///
    /// Raises:
    ///     IndexError: The bytes are not within the buffer. Indices are not clamped.
    ///
    /// Example:
    ///     >>> bytes(Buffer(b"abc").view(1, 3))
    ///     b'bc'
    fn view(slf: &Bound<'_, Self>, start: i64, end: i64) -> PyResult<Self> {
        let length = slf.get().__len__();
        let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
        match range.filter(|(start, end)| start <= end && *end <= length) {
            Some((start, end)) => Ok(Self::shared(slf)?.view(start..end).into()),
            None => Err(PyIndexError::new_err(format!("bytes {start}..{end} of a buffer of {length} bytes"))),
        }
    }

    /// Returns the bytes as text.
    ///
    /// Args:
    ///     encoding: As for `bytes.decode`.
    ///     errors: As for `bytes.decode`.
    ///
    /// Raises:
    ///     UnicodeDecodeError: The bytes are not text in this encoding.
    ///
    /// Example:
    ///     >>> Buffer(b"abc").decode()
    ///     'abc'
    #[pyo3(signature = (encoding="utf-8", errors="strict"))]
    fn decode<'py>(slf: &Bound<'py, Self>, encoding: &str, errors: &str) -> PyResult<Bound<'py, PyString>> {
        PyString::from_encoded_object(slf, Some(&CString::new(encoding)?), Some(&CString::new(errors)?))
    }

    /// Returns a byte as an int, or a slice as a memoryview that shares the memory.
    fn __getitem__<'py>(slf: &Bound<'py, Self>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        PyMemoryView::from(slf)?.get_item(index)
    }

    fn __repr__(&self) -> String {
        format!("<torchobj.Buffer of {} bytes>", self.core.len())
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
        // Incremented first: from now on the memory cannot be offered, so the view may write to it.
        buffer.exports.fetch_add(1, Ordering::AcqRel);
        let filled = buffer.exported().and_then(|fetched| {
            let length = fetched.len() as ffi::Py_ssize_t;
            let start = fetched.start().as_ptr().cast();
            // SAFETY: the caller passes a valid `view`; it takes a reference to `slf`, which keeps the region at its
            // address; the region has `length` initialised bytes, and no writer of ours is left.
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

/// An export of a Python object that Rust reads or writes. Dropping it queues its release.
struct Export(Option<PyUntypedBuffer>);

static TO_RELEASE: Mutex<Vec<PyUntypedBuffer>> = Mutex::new(Vec::new());

impl Drop for Export {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            let _inside = fork::enter();
            TO_RELEASE.lock().expect("no holder of this lock panics").push(buffer);
        }
    }
}

/// Releases the queued exports.
pub(crate) fn release_exports(py: Python<'_>) {
    let buffers = {
        let _inside = fork::enter();
        std::mem::take(&mut *TO_RELEASE.lock().expect("no holder of this lock panics"))
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

/// Calls `read` with the bytes of an export, with the GIL released.
fn with_bytes<T: Send>(py: Python<'_>, buffer: &PyUntypedBuffer, read: impl FnOnce(&[u8]) -> T + Send) -> T {
    // SAFETY: the export keeps these bytes at their address until it is released, after `read`. Another thread of Python
    // may change them meanwhile, as with `write` of a file: each byte is then the old or the new one.
    let bytes = unsafe { std::slice::from_raw_parts(start_of(buffer).as_ptr(), buffer.len_bytes()) };
    py.detach(|| read(bytes))
}

/// The bytes of a contiguous buffer, shared until the last clone of the result is dropped.
pub(crate) fn share(data: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    struct Shared {
        start: NonNull<u8>,
        length: usize,
        /// Keeps the bytes at their address.
        _export: Export,
    }
    // SAFETY: the pointer is to bytes that the export keeps alive; they are only read.
    unsafe impl Send for Shared {}
    // SAFETY: as above.
    unsafe impl Sync for Shared {}
    impl AsRef<[u8]> for Shared {
        fn as_ref(&self) -> &[u8] {
            // SAFETY: the export keeps `length` bytes at their address.
            unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
        }
    }
    let buffer = contiguous(data)?;
    let (start, length) = (start_of(&buffer), buffer.len_bytes());
    Ok(Bytes::from_owner(Shared { start, length, _export: Export(Some(buffer)) }))
}

/// Memory of Python objects to read into. Regions must not overlap, because each has its own writer.
pub(crate) fn borrow_all(objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<Memory>> {
    let memory = objects.iter().map(borrow).collect::<PyResult<Vec<_>>>()?;
    let mut regions: Vec<Range<usize>> =
        memory.iter().map(Memory::addresses).filter(|region| !region.is_empty()).collect();
    regions.sort_unstable_by_key(|region| region.start);
    if regions.array_windows().any(|[one, next]| next.start < one.end) {
        return Err(PyValueError::new_err("two of the buffers to read into share memory"));
    }
    Ok(memory)
}

/// Memory for `readinto` of a file. Raises `TypeError` for a read-only buffer, as files of `io` do.
fn borrow_for_file(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    borrow(object).map_err(|error| match error.is_instance_of::<PyValueError>(object.py()) {
        true => PyTypeError::new_err(format!("readinto() takes a writable buffer, not {}", object.get_type())),
        false => error,
    })
}

/// Memory of a Python object to read into.
pub(crate) fn borrow(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let buffer = contiguous(object)?;
    if buffer.readonly() {
        buffer.release(object.py());
        return Err(PyValueError::new_err("cannot read into a read-only buffer"));
    }
    let (start, length) = (start_of(&buffer), buffer.len_bytes());
    // SAFETY: the export is writable and keeps these bytes at their address until `Export` is dropped; Rust writes them
    // through this pointer only.
    Ok(unsafe { Memory::borrowed(start, length, Box::new(Export(Some(buffer)))) })
}
