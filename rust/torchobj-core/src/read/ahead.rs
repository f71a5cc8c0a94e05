//! Reads an object as a file: from any position, ahead of a position that moves on, within a bound.
//!
//! What was fetched lies in pieces, within the bound of its [`Window`], the longest unused dropped first. A jump fetches
//! one small piece, for four bytes of a large object must not fetch it. A reader that goes on has as much fetched ahead
//! as it has read in one run, up to the bound. What a large read still misses goes straight into the reader's memory,
//! as parallel ranges, while the pieces behind it are on their way.

use std::ops::Range;
use std::sync::Arc;

use crate::buffer::{Buffer, Dest};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::read::response::Expected;
use crate::read::{Landed, Read};
use crate::runtime::Task;
use crate::types::{ByteRange, Version};

/// What a read misses beyond this goes straight to its memory.
const DIRECT_BYTES: u64 = 1 << 20;

/// What a reader fetches beside what it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first piece after a jump. By default 256 KiB: the head of an archive with its index, or its tail, is found
    /// in one request. With 0 exactly what is read is fetched.
    pub jump_bytes: u64,
    /// How far ahead of its position a reader that goes on fetches at most; 0 for never.
    pub ahead_bytes: u64,
}

impl Default for Window {
    fn default() -> Self {
        Self { jump_bytes: 256 << 10, ahead_bytes: 32 << 20 }
    }
}

impl Window {
    /// All pieces of one reader: those ahead, and as much that was read already.
    fn bound_bytes(self) -> u64 {
        (2 * self.ahead_bytes).max(4 * self.jump_bytes)
    }
}

/// An object, read as a file.
#[derive(Debug)]
pub struct ReadAhead {
    client: Arc<Client>,
    key: String,
    window: Window,
    /// Known from the first answer on.
    size: Option<u64>,
    version: Option<Version>,
    /// In order of their last use.
    pieces: Vec<Piece>,
    /// What was read since the last jump: a read that begins at its end goes on with it.
    run: Range<u64>,
}

#[derive(Debug)]
struct Piece {
    range: Range<u64>,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Coming(Task<Result<Landed>>),
    Here(Buffer),
}

impl ReadAhead {
    /// A reader of `key`; nothing is asked before its first use.
    pub fn new(client: Arc<Client>, key: &str, window: Window) -> Self {
        Self { client, key: key.to_owned(), window, size: None, version: None, pieces: Vec::new(), run: 0..0 }
    }

    /// Size of the object in bytes, from its first piece when nothing was read before.
    ///
    /// # Errors
    /// Those of [`Client::get`].
    pub async fn size(&mut self) -> Result<u64> {
        if let Some(size) = self.size {
            return Ok(size);
        }
        let read = Read { range: Some(ByteRange::Bounded(0..self.window.jump_bytes.max(1))), ..Read::whole(&self.key) };
        let landed = match self.client.get(read).await {
            // Every range of an empty object is refused.
            Err(error) if error.kind() == ErrorKind::Range => {
                let head = self.client.head(&self.key).await?;
                if head.size > 0 {
                    return Err(error);
                }
                (self.size, self.version) = (Some(0), head.version);
                return Ok(0);
            }
            landed => landed?,
        };
        self.size = Some(landed.size);
        self.version = landed.version;
        self.pieces.push(Piece { range: 0..landed.buffer.len() as u64, body: Body::Here(landed.buffer) });
        Ok(landed.size)
    }

    /// Fills `dest` with the bytes from `position` on, as far as the object goes, and says how many those were.
    ///
    /// # Errors
    /// Those of [`Client::get`]; `Changed` when the object was replaced since the first read.
    pub async fn read_at(&mut self, position: u64, dest: &mut Dest) -> Result<usize> {
        let size = self.size().await?;
        let end = position.saturating_add(dest.len() as u64).min(size);
        let mut at = position;
        if at >= end {
            return Ok(0);
        }
        self.run = if position == self.run.end { self.run.start..end } else { position..end };
        while at < end {
            if let Some(index) = self.pieces.iter().position(|piece| piece.range.contains(&at)) {
                at += self.copy_from(index, at, end, dest).await?;
                continue;
            }
            let next = self.pieces.iter().map(|piece| piece.range.start).filter(|start| *start > at).min();
            let missing_end = end.min(next.unwrap_or(u64::MAX));
            if missing_end - at >= DIRECT_BYTES || self.window.jump_bytes == 0 {
                self.fetch_ahead(end, size);
                at += self.read_direct(at..missing_end, dest).await?;
            } else {
                self.fetch(at..(at + self.window.jump_bytes).max(missing_end).min(size).min(next.unwrap_or(u64::MAX)));
            }
        }
        self.fetch_ahead(end, size);
        Ok(usize::try_from(end - position).expect("it fits dest"))
    }

    /// Copies what piece `index` has of `at..end`, waiting for it to come; it was used last now.
    async fn copy_from(&mut self, index: usize, at: u64, end: u64, dest: &mut Dest) -> Result<u64> {
        let Piece { range, body } = self.pieces.remove(index);
        let buffer = match body {
            Body::Here(buffer) => buffer,
            Body::Coming(task) => task.await.map_err(|panic| self.lost(&range).with_source(panic))??.buffer,
        };
        if buffer.len() as u64 != range.end - range.start {
            return Err(self.lost(&range));
        }
        let from = usize::try_from(at - range.start).expect("within a piece");
        let to = usize::try_from(end.min(range.end) - range.start).expect("within a piece");
        let copied = dest.fill(&buffer.as_slice()[from..to]);
        // A piece that was read to its end is not needed by a reader that goes on, and small jumps back are rare.
        if end < range.end || range.end - range.start <= self.window.jump_bytes {
            self.pieces.push(Piece { range, body: Body::Here(buffer) });
        }
        Ok(copied as u64)
    }

    fn lost(&self, range: &Range<u64>) -> Error {
        let message = format!("bytes {range:?} that were fetched ahead are lost");
        self.client.store().error(ErrorKind::Cancelled, Operation::Get, &self.key, &message)
    }

    /// Reads `range` into `dest`, as parts in parallel.
    async fn read_direct(&self, range: Range<u64>, dest: &mut Dest) -> Result<u64> {
        let length = range.end - range.start;
        let dest = dest.carve(usize::try_from(length).expect("it fits dest"));
        let expected = Expected { size: self.size, version: self.version.clone() };
        self.client.receive_parts(self.key.as_str().into(), range, expected, dest).await?;
        Ok(length)
    }

    /// Starts to fetch what lies behind `end`, as far ahead as the run has earned.
    fn fetch_ahead(&mut self, end: u64, size: u64) {
        let ahead_bytes = (self.run.end - self.run.start).min(self.window.ahead_bytes);
        let goal = (end + ahead_bytes).min(size);
        let piece_bytes = (ahead_bytes / 4).min(self.client.policy().part_bytes).max(self.window.jump_bytes);
        let mut at = end;
        while at < goal {
            match self.pieces.iter().find(|piece| piece.range.contains(&at)) {
                Some(piece) => at = piece.range.end,
                None => {
                    let next = self.pieces.iter().map(|piece| piece.range.start).filter(|start| *start > at).min();
                    let piece_end = (at + piece_bytes).min(size).min(next.unwrap_or(u64::MAX));
                    self.fetch(at..piece_end);
                    at = piece_end;
                }
            }
        }
    }

    /// Starts to fetch a piece; old ones make room.
    fn fetch(&mut self, range: Range<u64>) {
        let mut held: u64 = self.pieces.iter().map(|piece| piece.range.end - piece.range.start).sum();
        held += range.end - range.start;
        while held > self.window.bound_bytes() && !self.pieces.is_empty() {
            let dropped = self.pieces.remove(0).range;
            held -= dropped.end - dropped.start;
        }
        let client = self.client.clone();
        let read = Read {
            range: Some(ByteRange::Bounded(range.clone())),
            size: self.size,
            version: self.version.clone(),
            ..Read::whole(&self.key)
        };
        let task = Task::spawn(async move { client.get(read).await });
        self.pieces.push(Piece { range, body: Body::Coming(task) });
    }

    /// Drops what was fetched.
    pub fn close(&mut self) {
        self.pieces.clear();
    }
}
