//! Reads bytes at the position of a reader: copies them from memory, or fetches them.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use torchobj_core::buffer::{Memory, PendingBuffer};

use super::Buffer;
use super::reader::{ObjectReader, Source, closed};
use crate::error::{OrRaise, invalid};
use crate::wait::wait;

impl ObjectReader {
    /// The bytes in memory, of an argument. Raises `ConfigError` for a reader that fetches on demand.
    pub(crate) fn in_memory(&self, py: Python<'_>) -> PyResult<Py<Buffer>> {
        match &self.source {
            Source::Buffer(buffer) => Ok(buffer.clone_ref(py)),
            Source::Ahead(_) => Err(invalid(format!("{}: its bytes are not in memory; read it first", self.name()))),
            Source::Closed { .. } => Err(closed()),
        }
    }

    /// Reads into `memory` and advances the position. Returns the number of bytes.
    pub(super) fn read_memory(&mut self, py: Python<'_>, memory: Memory) -> PyResult<(PendingBuffer, usize)> {
        let (pending, mut dest) = PendingBuffer::new(memory);
        let position = self.position;
        let count = match &mut self.source {
            Source::Buffer(buffer) => {
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
        Ok((pending, count))
    }

    pub(super) fn read_bytes<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        let left = self.size(py)?.saturating_sub(self.position);
        let wanted = size.and_then(|size| u64::try_from(size).ok()).unwrap_or(left).min(left);
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        if let Source::Buffer(buffer) = &self.source {
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

    /// The exception of files for unsupported operations.
    pub(super) fn unsupported(py: Python<'_>, what: &str) -> PyErr {
        match py.import("io").and_then(|io| io.getattr("UnsupportedOperation")) {
            Ok(class) => match class.call1((what,)) {
                Ok(error) => PyErr::from_value(error),
                Err(error) => error,
            },
            Err(error) => error,
        }
    }
}
