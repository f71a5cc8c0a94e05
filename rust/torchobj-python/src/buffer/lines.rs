//! Lines of a reader: searched for where the bytes are here, and else fetched by the buffer.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use torchobj_core::buffer::Memory;

use super::reader::{ObjectReader, Source};

/// Bytes that `readline` fetches at a time, and keeps for the lines that follow.
const LINE_BYTES: usize = 64 << 10;

impl ObjectReader {
    /// The line that begins at the position, at most `size` bytes of it; moves on behind it.
    pub(super) fn line<'py>(&mut self, py: Python<'py>, size: Option<i64>) -> PyResult<Bound<'py, PyBytes>> {
        let most = size.and_then(|size| usize::try_from(size).ok()).unwrap_or(usize::MAX);
        if let Source::Landed(buffer) = &self.source {
            let bytes = buffer.get().bytes();
            let start = usize::try_from(self.position).unwrap_or(usize::MAX).min(bytes.len());
            let line = line_of(&bytes[start..], most);
            self.position += line.len() as u64;
            return Ok(PyBytes::new(py, line));
        }
        let mut line = Vec::new();
        loop {
            let position = self.position + line.len() as u64;
            let piece = line_of(self.lines_at(py, position)?, most - line.len());
            let last = piece.is_empty() || piece.ends_with(b"\n");
            line.extend_from_slice(piece);
            if last || line.len() == most {
                self.position += line.len() as u64;
                return Ok(PyBytes::new(py, &line));
            }
        }
    }

    /// Bytes from `position` on, some of them; none at the end. Fetches where none are kept.
    fn lines_at(&mut self, py: Python<'_>, position: u64) -> PyResult<&[u8]> {
        let kept = self.lines.take_if(|(start, bytes)| (*start..*start + bytes.len() as u64).contains(&position));
        let (start, bytes) = match kept {
            Some(kept) => kept,
            None => {
                let before = std::mem::replace(&mut self.position, position);
                let read = self.read_memory(py, Memory::allocate(LINE_BYTES)?);
                self.position = before;
                let (landing, count) = read?;
                let bytes = landing.finish(count);
                (position, bytes.map_err(|_| PyValueError::new_err("a writer outlived its read: a bug"))?)
            }
        };
        let (start, bytes) = self.lines.insert((start, bytes));
        Ok(&bytes.as_slice()[usize::try_from(position - *start).expect("within what is kept")..])
    }
}

/// The beginning of `bytes` up to and with the first newline, at most `most` bytes.
fn line_of(bytes: &[u8], most: usize) -> &[u8] {
    let bytes = &bytes[..bytes.len().min(most)];
    let end = bytes.iter().position(|byte| *byte == b'\n');
    &bytes[..end.map_or(bytes.len(), |newline| newline + 1)]
}
