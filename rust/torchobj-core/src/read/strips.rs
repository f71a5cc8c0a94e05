//! Deals the bytes of one request out to the memory that they belong to.
//!
//! They lie there in pieces that have nothing in common but their order in the object. A large piece is received where
//! it belongs. A run of small ones, and what lies between two pieces, comes by way of memory of ours: a call to the
//! kernel for each would cost more than the copy. Where checksums are wanted large pieces come in strips too, so that
//! each byte is looked at while it is in the cache.

use std::collections::VecDeque;
use std::sync::Arc;

use super::fetch::Sink;
use crate::buffer::{Dest, Landing, Memory, Progress};
use crate::crc32::Crc32;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::store::Opened;

/// A piece of so many bytes is received where it belongs.
const DIRECT_BYTES: usize = 64 << 10;

/// What is received before it is copied or looked at: a part of a core's cache.
const STRIP_BYTES: usize = 256 << 10;

/// Where a piece is to land.
#[derive(Debug)]
pub(super) struct Room {
    /// Bytes before it that nobody wants.
    pub(super) gap_bytes: usize,
    /// Which segment it is of.
    pub(super) segment: usize,
    pub(super) dest: Dest,
}

impl Room {
    fn is_direct(&self) -> bool {
        self.gap_bytes == 0 && self.dest.len() >= DIRECT_BYTES
    }
}

/// What is received in one go.
#[derive(Debug)]
struct Strip {
    dest: Dest,
    holds: Holds,
}

#[derive(Debug)]
enum Holds {
    /// Bytes of this segment, where they belong.
    Segment(usize),
    /// Pieces that are to be copied.
    Copies(Vec<Copied>),
}

/// A piece that lies in a strip.
#[derive(Debug)]
struct Copied {
    at: usize,
    segment: usize,
    dest: Dest,
}

/// Takes the bytes of a part, strip by strip.
#[derive(Debug)]
pub(super) struct Strips {
    /// Behind the strip that is being filled.
    rooms: VecDeque<Room>,
    strip: Option<Strip>,
    /// Bytes of the strips before.
    taken: usize,
    length: usize,
    /// Of the bytes of each segment, in their order; `None` where they are not wanted.
    sums: Option<Vec<(usize, Crc32)>>,
    /// Of the whole object, once it answered.
    size: u64,
    progress: Progress,
    url: Arc<str>,
}

impl Strips {
    /// For the bytes of `rooms`, with the gaps before them, of the object at `url`.
    pub(super) fn new(rooms: VecDeque<Room>, checksum: bool, url: Arc<str>) -> Self {
        let length = rooms.iter().map(|room| room.gap_bytes + room.dest.len()).sum();
        Self {
            rooms,
            strip: None,
            taken: 0,
            length,
            sums: checksum.then(Vec::new),
            size: 0,
            progress: Progress::default(),
            url,
        }
    }

    /// Size of the whole object, by its last answer.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// The checksums of what landed: which segment, and of its bytes in this part.
    pub(super) fn into_sums(self) -> Vec<(usize, Crc32)> {
        self.sums.unwrap_or_default()
    }

    /// The next strip; `None` behind the last.
    fn next(&mut self) -> Result<Option<Strip>> {
        let Some(room) = self.rooms.front_mut() else { return Ok(None) };
        if !room.is_direct() {
            return self.bounce().map(Some);
        }
        let whole = self.sums.is_none() || room.dest.len() < STRIP_BYTES + DIRECT_BYTES;
        let dest = room.dest.split_to(if whole { room.dest.len() } else { STRIP_BYTES });
        let holds = Holds::Segment(room.segment);
        if whole {
            self.rooms.pop_front();
        }
        Ok(Some(Strip { dest, holds }))
    }

    /// A strip of ours for gaps and small pieces, up to the next one that is received where it belongs.
    fn bounce(&mut self) -> Result<Strip> {
        let (mut copies, mut at) = (Vec::new(), 0);
        while at < STRIP_BYTES
            && let Some(room) = self.rooms.front_mut().filter(|room| !room.is_direct())
        {
            let gap_bytes = room.gap_bytes.min(STRIP_BYTES - at);
            room.gap_bytes -= gap_bytes;
            at += gap_bytes;
            if room.gap_bytes > 0 || room.is_direct() {
                continue;
            }
            let dest = room.dest.split_to(room.dest.len().min(STRIP_BYTES - at));
            let length = dest.len();
            copies.push(Copied { at, segment: room.segment, dest });
            at += length;
            if room.dest.is_empty() {
                self.rooms.pop_front();
            }
        }
        let memory = Memory::allocate(at).map_err(|source| {
            let message = format!("no memory for {at} bytes");
            Error::new(ErrorKind::Io, Operation::Get, &*self.url, message).with_source(source)
        })?;
        Ok(Strip { dest: Landing::new(memory).1, holds: Holds::Copies(copies) })
    }

    /// Brings what a full strip holds where it belongs.
    fn land(&mut self, strip: Strip) {
        let Strip { dest, holds } = strip;
        self.taken += dest.len();
        match holds {
            Holds::Segment(segment) => self.sum(segment, dest.written()),
            Holds::Copies(copies) => {
                for Copied { at, segment, dest: mut room } in copies {
                    let bytes = &dest.written()[at..at + room.len()];
                    room.fill(bytes);
                    self.sum(segment, bytes);
                }
            }
        }
    }

    fn sum(&mut self, segment: usize, bytes: &[u8]) {
        let Some(sums) = &mut self.sums else { return };
        match sums.last_mut() {
            Some((last, sum)) if *last == segment => Crc32::add(bytes, [sum]),
            _ => sums.push((segment, Crc32::of(bytes))),
        }
    }
}

impl Sink for Strips {
    fn filled(&self) -> usize {
        self.taken + self.strip.as_ref().map_or(0, |strip| strip.dest.filled())
    }

    fn remaining(&self) -> usize {
        self.length - self.filled()
    }

    fn progress(&mut self) -> Progress {
        self.progress = Progress::default();
        if let Some(strip) = &mut self.strip {
            strip.dest.count_in(&self.progress);
        }
        self.progress.clone()
    }

    /// What was copied to its place stays there.
    const REWINDS: bool = false;

    fn rewind(&mut self, _filled: usize) {}

    async fn take(&mut self, opened: &mut dyn Opened) -> Result<()> {
        self.size = opened.size();
        loop {
            if self.strip.is_none() {
                self.strip = self.next()?;
                self.strip.iter_mut().for_each(|strip| strip.dest.count_in(&self.progress));
            }
            let Some(strip) = &mut self.strip else { return Ok(()) };
            opened.read_into(&mut strip.dest).await?;
            if strip.dest.remaining() > 0 {
                // The body ended here.
                return Ok(());
            }
            if let Some(full) = self.strip.take() {
                self.land(full);
            }
        }
    }
}
