//! Segments of objects, read into memory of Python's.

use pyo3::prelude::*;
use torchobj_core::read::{Scatter, Segment, scatter as scatter_all};
use torchobj_core::types::Version;

use crate::buffer;
use crate::error::OrRaise;
use crate::store::{NativeStore, clients};
use crate::wait::wait;

/// Store, key, the version that must answer, and segments: an offset in the object and the buffer for what lies there.
type Job<'py> = (Bound<'py, NativeStore>, String, Option<String>, Vec<(u64, Bound<'py, PyAny>)>);

/// Version and size of an object, and the CRC-32 of each segment.
type Scattered = (Option<String>, u64, Vec<u32>);

/// Reads segments of objects into buffers, all in parallel.
#[pyfunction]
pub(crate) fn scatter(py: Python<'_>, jobs: Vec<Job<'_>>, checksum: bool) -> PyResult<Vec<Scattered>> {
    let clients = clients(py, jobs.iter().map(|(store, ..)| store))?;
    let buffers: Vec<_> = jobs.iter().flat_map(|(.., segments)| segments).map(|(_, buffer)| buffer.clone()).collect();
    let mut memory = buffer::lend_all(&buffers)?.into_iter();
    let jobs = clients.into_iter().zip(jobs).map(|(client, (_, key, version, segments))| {
        let segments = segments.into_iter().zip(&mut memory).map(|((offset, _), memory)| Segment { offset, memory });
        Scatter { client, key, version: version.map(Version::new), segments: segments.collect() }
    });
    let jobs = jobs.collect();
    let results = wait(py, scatter_all(jobs, checksum))?.or_raise(py)?;
    let results = results
        .into_iter()
        .map(|result| (result.version.map(|version| version.as_str().to_owned()), result.size, result.crc32));
    Ok(results.collect())
}
