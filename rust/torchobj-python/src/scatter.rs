//! Reads ranges of objects into Python buffers.

use pyo3::prelude::*;
use torchobj_core::read::{ScatterRange, ScatterRead, scatter as scatter_all};
use torchobj_core::types::Version;

use crate::buffer;
use crate::error::OrRaise;
use crate::store::{NativeStore, clients};
use crate::wait::wait;

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
///
/// Returns:
///     For each object its version, its size in bytes, and the CRC-32 of each range; empty without `checksum`.
///
/// Raises:
///     ValueError: A buffer is read-only, or two buffers overlap.
///     ObjectChangedError: An object has another version.
///     StoreError: An object could not be read.
#[pyfunction]
pub(crate) fn scatter(py: Python<'_>, jobs: Vec<ScatterArguments<'_>>, checksum: bool) -> PyResult<Vec<ScatterResult>> {
    let clients = clients(py, jobs.iter().map(|(store, ..)| store))?;
    let buffers: Vec<_> = jobs.iter().flat_map(|(.., ranges)| ranges).map(|(_, buffer)| buffer.clone()).collect();
    let mut memory = buffer::borrow_all(&buffers)?.into_iter();
    let jobs = clients.into_iter().zip(jobs).map(|(client, (_, key, version, ranges))| {
        let ranges = ranges.into_iter().zip(&mut memory).map(|((offset, _), memory)| ScatterRange::new(offset, memory));
        ScatterRead { client, key, version: version.map(Version::new), ranges: ranges.collect() }
    });
    let jobs = jobs.collect();
    let results = wait(py, scatter_all(jobs, checksum))?.or_raise(py)?;
    let results = results
        .into_iter()
        .map(|result| (result.version.map(|version| version.as_str().to_owned()), result.size, result.crc32));
    Ok(results.collect())
}
