//! Reads objects and ranges of any stores, into new memory or into Python buffers.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::buffer::ReceivedBytes;
use torchobj_core::crc32::Crc32;
use torchobj_core::error::Result;
use torchobj_core::read::{
    ClientRead, ReadRequest, ReadResult, ScatterRange, ScatterRead, get_many as read_many, scatter as scatter_all,
    try_get_many,
};
use torchobj_core::types::Version;

use crate::buffer::{self, Buffer};
use crate::error::{OrRaise, exception};
use crate::object_ref::ObjectRef;
use crate::store::{NativeStore, clients};
use crate::wait::{wait, wait_reporting};

/// An object to read: a key, or a reference with an optional range.
pub(crate) enum KeyOrRef<'py> {
    Key(String),
    Ref(Bound<'py, ObjectRef>),
}

impl<'py> FromPyObject<'_, 'py> for KeyOrRef<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(object) = object.cast::<ObjectRef>() {
            return Ok(Self::Ref(object.to_owned()));
        }
        let error = || PyTypeError::new_err(format!("must be a key, a URL or an ObjectRef, not {}", object.get_type()));
        object.extract().map(Self::Key).map_err(|_| error())
    }
}

impl KeyOrRef<'_> {
    fn read(&self) -> ReadRequest {
        match self {
            Self::Key(key) => ReadRequest::whole(key.as_str()),
            Self::Ref(object) => object.get().named.read(),
        }
    }
}

/// Reads objects of any stores concurrently, with the GIL released.
///
/// Args:
///     jobs: Pairs of a store and a key or an `ObjectRef`.
///     into: A writable, contiguous buffer for each object; buffers must not overlap. None: returns new buffers.
///     return_errors: Whether the list contains an exception for each object that could not be read, instead of
///         raising the first one.
///
/// Returns:
///     A `Buffer` for each object, or with `into` the number of bytes written.
///
/// Raises:
///     ValueError: A buffer is read-only, or two buffers overlap.
///     StoreError: An object could not be read, unless `return_errors`.
#[pyfunction]
#[pyo3(signature = (jobs, into=None, return_errors=false))]
pub(crate) fn get_many<'py>(
    py: Python<'py>,
    jobs: Vec<(Bound<'py, NativeStore>, KeyOrRef<'py>)>,
    into: Option<Vec<Bound<'py, PyAny>>>,
    return_errors: bool,
) -> PyResult<Bound<'py, PyList>> {
    let read_into = into.is_some();
    let mut memory = match into {
        Some(buffers) => buffer::borrow_all(&buffers)?.into_iter().map(Some).collect(),
        None => Vec::new(),
    };
    memory.resize_with(jobs.len(), || None);
    let clients = clients(py, jobs.iter().map(|(store, _)| store))?;
    let reads = clients.into_iter().zip(&jobs).zip(memory);
    let jobs = reads.map(|((client, (_, target)), into)| ClientRead { client, read: target.read(), into }).collect();
    let list = PyList::empty(py);
    for result in read_each(py, jobs, return_errors)? {
        match result {
            Ok(fetched) if read_into => list.append(fetched.buffer.len())?,
            Ok(fetched) => list.append(Buffer::from(fetched.buffer).into_pyobject(py)?)?,
            Err(error) => list.append(exception(py, &error).into_value(py))?,
        }
    }
    Ok(list)
}

/// Reads objects concurrently. Raises the first error, unless `return_errors`.
pub(crate) fn read_each(
    py: Python<'_>,
    reads: Vec<ClientRead>,
    return_errors: bool,
) -> PyResult<Vec<Result<ReadResult>>> {
    if return_errors {
        return wait(py, read_many(reads));
    }
    Ok(wait(py, try_get_many(reads))?.or_raise(py)?.into_iter().map(Ok).collect())
}

/// Store, key, expected version, and ranges: an offset in the object, and the buffer to fill from there.
type ScatterArguments<'py> = (Bound<'py, NativeStore>, String, Option<String>, Vec<(u64, Bound<'py, PyAny>)>);

/// Version and size of an object, and the CRC-32 of each range.
type ScatterResult = (Option<String>, u64, Vec<u32>);

/// Reads ranges of objects into buffers, concurrently, with the GIL released.
///
/// Args:
///     jobs: For each object its store, its key, the version that it must have (None: any), and its ranges: pairs of
///         an offset in bytes and a writable, contiguous buffer, which is filled from there. Buffers must not overlap.
///     checksum: Whether to compute the CRC-32 of each range.
///     progress: Called about every 0.1 s with the number of bytes that have arrived; its exception ends the reads.
///
/// Returns:
///     For each object its version, its size in bytes, and the CRC-32 of each range; empty without `checksum`.
///
/// Raises:
///     ValueError: A buffer is read-only, or two buffers overlap.
///     ObjectChangedError: An object has another version.
///     StoreError: An object could not be read.
#[pyfunction]
#[pyo3(signature = (jobs, checksum, progress=None))]
pub(crate) fn scatter(
    py: Python<'_>,
    jobs: Vec<ScatterArguments<'_>>,
    checksum: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<ScatterResult>> {
    let arrived = ReceivedBytes::default();
    let clients = clients(py, jobs.iter().map(|(store, ..)| store))?;
    let buffers: Vec<_> = jobs.iter().flat_map(|(.., ranges)| ranges).map(|(_, buffer)| buffer.clone()).collect();
    let mut memory = buffer::borrow_all(&buffers)?.into_iter();
    let jobs = clients.into_iter().zip(jobs).map(|(client, (_, key, version, ranges))| {
        let ranges = ranges.into_iter().zip(&mut memory).map(|((offset, _), memory)| ScatterRange::new(offset, memory));
        let version = version.map(Version::new);
        ScatterRead { client, key, version, ranges: ranges.collect(), arrived: arrived.clone() }
    });
    let jobs = jobs.collect();
    let report = |_: Python<'_>| progress.map_or(Ok(()), |progress| progress.call1((arrived.bytes(),)).map(drop));
    let results = wait_reporting(py, scatter_all(jobs, checksum), report)?.or_raise(py)?;
    let results = results
        .into_iter()
        .map(|result| (result.version.map(|version| version.as_str().to_owned()), result.size, result.crc32));
    Ok(results.collect())
}

/// Returns the CRC-32 of the concatenation of two byte strings with these CRC-32, as zlib's function of this name.
///
/// Args:
///     first: The CRC-32 of the first string.
///     second: The CRC-32 of the second string.
///     second_len: Length of the second string in bytes.
#[pyfunction]
pub(crate) fn crc32_combine(first: u32, second: u32, second_len: u64) -> u32 {
    Crc32::known(first, 0).then(Crc32::known(second, second_len)).value()
}
