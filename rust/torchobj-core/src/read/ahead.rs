//! Reads an object like a file: at any position, with read-ahead for sequential reads, within a memory bound.
//!
//! Fetched chunks are kept within the bound of [`ReadAheadConfig`]; the least recently used is dropped first. A read
//! after a jump fetches one small chunk, because reading four bytes must not fetch a large object. Sequential reads
//! fetch ahead as many bytes as they have read since the last jump, up to the bound. Missing bytes of a large read go
//! directly to the reader's memory as parallel ranges, while the chunks after them are being fetched.

use std::ops::Range;
use std::sync::Arc;

use crate::buffer::{Buffer, Dest};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::read::response::Expected;
use crate::read::{ReadRequest, ReadResult};
use crate::runtime::Task;
use crate::types::{ByteRange, Version};

/// Larger missing ranges are read directly into the reader's memory.
const DIRECT_BYTES: u64 = 1 << 20;

/// Limits of the read-ahead of one reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadAheadConfig {
    /// Size of the first chunk after a jump. The default of 256 KiB covers the head of an archive with its index, or
    /// its tail, in one request. With 0 exactly the requested bytes are fetched.
    pub jump_bytes: u64,
    /// Maximum distance of the read-ahead from the position of a sequential reader; 0 disables it.
    pub ahead_bytes: u64,
}

impl Default for ReadAheadConfig {
    fn default() -> Self {
        Self { jump_bytes: 256 << 10, ahead_bytes: 32 << 20 }
    }
}

impl ReadAheadConfig {
    /// Maximum size of all chunks of a reader: those ahead of its position, and as many bytes behind it.
    fn bound_bytes(self) -> u64 {
        (2 * self.ahead_bytes).max(4 * self.jump_bytes)
    }
}

/// An object that is read like a file.
#[derive(Debug)]
pub struct ReadAhead {
    client: Arc<Client>,
    key: String,
    window: ReadAheadConfig,
    /// Known after the first response.
    size: Option<u64>,
    version: Option<Version>,
    /// In the order of their last use.
    chunks: Vec<Chunk>,
    /// The range read since the last jump. A read that starts at its end is sequential.
    run: Range<u64>,
}

#[derive(Debug)]
struct Chunk {
    range: Range<u64>,
    state: ChunkState,
}

#[derive(Debug)]
enum ChunkState {
    Pending(Task<Result<ReadResult>>),
    Ready(Buffer),
}

impl ReadAhead {
    /// A reader of `key`. Sends no request before its first use.
    pub fn new(client: Arc<Client>, key: &str, window: ReadAheadConfig) -> Self {
        Self { client, key: key.to_owned(), window, size: None, version: None, chunks: Vec::new(), run: 0..0 }
    }

    /// Reads only this version of the object, if one is given, from the first read on.
    #[must_use]
    pub fn with_version(self, version: Option<Version>) -> Self {
        Self { version, ..self }
    }

    /// Size of the object in bytes. If it is unknown, fetches the first chunk.
    ///
    /// # Errors
    /// Errors of [`Client::get`].
    pub async fn size(&mut self) -> Result<u64> {
        if let Some(size) = self.size {
            return Ok(size);
        }
        let range = Some(ByteRange::Bounded(0..self.window.jump_bytes.max(1)));
        let read = ReadRequest { range, version: self.version.clone(), ..ReadRequest::whole(&self.key) };
        let fetched = match self.client.get(read).await {
            // Every range of an empty object is refused.
            Err(error) if error.kind() == ErrorKind::Range => {
                let head = self.client.head(&self.key).await?;
                if head.size > 0 {
                    return Err(error);
                }
                (self.size, self.version) = (Some(0), head.version);
                return Ok(0);
            }
            fetched => fetched?,
        };
        self.size = Some(fetched.size);
        self.version = fetched.version;
        self.chunks.push(Chunk { range: 0..fetched.buffer.len() as u64, state: ChunkState::Ready(fetched.buffer) });
        Ok(fetched.size)
    }

    /// Fills `dest` with the bytes from `position`, up to the object's end. Returns their number.
    ///
    /// # Errors
    /// Errors of [`Client::get`]; `Changed` if the object was replaced since the first read, or is not of the given
    /// version.
    pub async fn read_at(&mut self, position: u64, dest: &mut Dest) -> Result<usize> {
        let size = self.size().await?;
        let end = position.saturating_add(dest.len() as u64).min(size);
        let mut at = position;
        if at >= end {
            return Ok(0);
        }
        self.run = if position == self.run.end { self.run.start..end } else { position..end };
        while at < end {
            if let Some(index) = self.chunks.iter().position(|chunk| chunk.range.contains(&at)) {
                at += self.copy_from(index, at, end, dest).await?;
                continue;
            }
            let next = self.next_chunk(at);
            let missing_end = end.min(next);
            if missing_end - at >= DIRECT_BYTES || self.window.jump_bytes == 0 {
                self.fetch_ahead(end, size);
                at += self.read_direct(at..missing_end, dest).await?;
            } else {
                self.fetch(at..(at + self.window.jump_bytes).max(missing_end).min(size).min(next));
            }
        }
        self.fetch_ahead(end, size);
        Ok(usize::try_from(end - position).expect("it fits dest"))
    }

    /// Start of the first chunk after `at`; `u64::MAX` if no chunk starts after it.
    fn next_chunk(&self, at: u64) -> u64 {
        let starts = self.chunks.iter().map(|chunk| chunk.range.start);
        starts.filter(|start| *start > at).min().unwrap_or(u64::MAX)
    }

    /// Waits for chunk `index`, copies its part of `at..end`, and marks it as the most recently used.
    async fn copy_from(&mut self, index: usize, at: u64, end: u64, dest: &mut Dest) -> Result<u64> {
        let Chunk { range, state } = self.chunks.remove(index);
        let buffer = match state {
            ChunkState::Ready(buffer) => buffer,
            ChunkState::Pending(task) => {
                task.await.map_err(|panic| self.lost_chunk(&range).with_source(panic))??.buffer
            }
        };
        if buffer.len() as u64 != range.end - range.start {
            return Err(self.lost_chunk(&range));
        }
        let from = usize::try_from(at - range.start).expect("within a chunk");
        let to = usize::try_from(end.min(range.end) - range.start).expect("within a chunk");
        let copied = dest.fill(&buffer.as_slice()[from..to]);
        // A sequential reader does not need a chunk again after its end, and small jumps back are rare.
        if end < range.end || range.end - range.start <= self.window.jump_bytes {
            self.chunks.push(Chunk { range, state: ChunkState::Ready(buffer) });
        }
        Ok(copied as u64)
    }

    fn lost_chunk(&self, range: &Range<u64>) -> Error {
        let message = format!("the read-ahead of bytes {range:?} ended without a result: a bug");
        self.client.store().error(ErrorKind::Cancelled, Operation::Get, &self.key, &message)
    }

    /// Reads `range` into `dest`, as parts in parallel.
    async fn read_direct(&self, range: Range<u64>, dest: &mut Dest) -> Result<u64> {
        let length = range.end - range.start;
        let dest = dest.split_next(usize::try_from(length).expect("it fits dest"));
        let expected = Expected { size: self.size, version: self.version.clone() };
        let parts = self.client.parts(range, dest);
        self.client.receive_all(self.key.as_str().into(), expected, parts, None, usize::MAX).await?;
        Ok(length)
    }

    /// Fetches the bytes after `end`, as many as the sequential run allows.
    fn fetch_ahead(&mut self, end: u64, size: u64) {
        let ahead_bytes = (self.run.end - self.run.start).min(self.window.ahead_bytes);
        let goal = (end + ahead_bytes).min(size);
        let chunk_bytes = (ahead_bytes / 4).min(self.client.policy().part_bytes).max(self.window.jump_bytes);
        let mut at = end;
        while at < goal {
            match self.chunks.iter().find(|chunk| chunk.range.contains(&at)) {
                Some(chunk) => at = chunk.range.end,
                None => {
                    let chunk_end = (at + chunk_bytes).min(size).min(self.next_chunk(at));
                    self.fetch(at..chunk_end);
                    at = chunk_end;
                }
            }
        }
    }

    /// Starts to fetch a chunk, and drops old ones beyond the bound.
    fn fetch(&mut self, range: Range<u64>) {
        let mut held: u64 = self.chunks.iter().map(|chunk| chunk.range.end - chunk.range.start).sum();
        held += range.end - range.start;
        while held > self.window.bound_bytes() && !self.chunks.is_empty() {
            let dropped = self.chunks.remove(0).range;
            held -= dropped.end - dropped.start;
        }
        let client = self.client.clone();
        let read = ReadRequest {
            range: Some(ByteRange::Bounded(range.clone())),
            size: self.size,
            version: self.version.clone(),
            ..ReadRequest::whole(&self.key)
        };
        let task = Task::spawn(async move { client.get(read).await });
        self.chunks.push(Chunk { range, state: ChunkState::Pending(task) });
    }

    /// Drops all chunks.
    pub fn close(&mut self) {
        self.chunks.clear();
    }
}
