//! Reads lines from memory, or through a buffer of fetched bytes.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use torchobj_core::buffer::Memory;

use super::reader::{ObjectReader, Source};

/// Number of bytes that `readline` fetches in advance and keeps for later lines.
const LINE_BYTES: usize = 64 << 10;

impl ObjectReader {
    /// Reads a line of at most `size` bytes, and advances the position.
    pub(super) fn line<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        let max = size.and_then(|size| usize::try_from(size).ok()).unwrap_or(usize::MAX);
        if let Source::Buffer(buffer) = &self.source {
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

    /// Reads lines until `hint` bytes are read, or all of them.
    pub(super) fn all_lines<'py>(&mut self, py: Python<'py>, hint: Option<i64>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let max = hint.and_then(|hint| usize::try_from(hint).ok()).filter(|hint| *hint > 0).unwrap_or(usize::MAX);
        let mut lines = Vec::new();
        let mut total = 0;
        while total < max {
            let line = self.line(py, None)?;
            if line.as_bytes().is_empty() {
                break;
            }
            total += line.as_bytes().len();
            lines.push(line);
        }
        Ok(lines)
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
