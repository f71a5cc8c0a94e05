//! Reads segments of objects straight into the memory that they belong to, all in parallel. Which requests that takes,
//! `coalesce` knows; how one is made, and goes on after a failure, `fetch`; here bytes are dealt out.
//!
//! The bytes of one request lie in memory that has nothing in common but their order. A large piece is received where it
//! belongs. A run of small ones, and what lies between two pieces, comes by way of a strip: a call to the kernel for
//! each would cost more than the copy. Where checksums are wanted large pieces come in strips too, so that each byte is
//! summed while it is in the cache.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest, checksum_combine};
use tokio::task::JoinSet;

use super::coalesce::{self, Part};
use super::fetch::Sink;
use super::plan;
use crate::buffer::{Dest, Landing, Memory};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::store::Opened;
use crate::types::{ByteRange, Version};

/// The CRC-32 of zip archives, of gzip and of zlib.
const CRC_32: CrcAlgorithm = CrcAlgorithm::Crc32IsoHdlc;

/// A piece of so many bytes is received where it belongs.
const DIRECT_BYTES: usize = 64 << 10;

/// What is received before it is copied or summed: a part of a core's cache.
const STRIP_BYTES: usize = 256 << 10;

/// From here on memory is asked for in huge pages: two of them have room in it wherever it begins.
const HUGE_BYTES: usize = 4 << 20;

/// Bytes that are wanted of an object.
#[derive(Debug)]
pub struct Segment {
    /// Where they begin in the object.
    pub offset: u64,
    /// Where they are to land, to its end.
    pub memory: Memory,
}

/// One object of a [`scatter`].
#[derive(Debug)]
pub struct Scatter {
    /// Where it is.
    pub client: Arc<Client>,
    /// Its key.
    pub key: String,
    /// The version that must answer; `None` for whichever it is, the same for all segments.
    pub version: Option<Version>,
    /// What of it, in any order.
    pub segments: Vec<Segment>,
}

/// What was read of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scattered {
    /// The version that answered.
    pub version: Option<Version>,
    /// Size of the whole object.
    pub size: u64,
    /// The CRC-32 of each segment, in the order they were given; none where they were not wanted.
    pub crc32: Vec<u32>,
}

/// Reads the segments of all `jobs`, as many requests at a time as their clients permit. Results are in the order of the
/// jobs. Dropping the future ends every read.
///
/// # Errors
/// `Range` when a segment reaches behind its object's end, and those of [`Client::get`]: the first failure ends the other
/// reads, and what the memory then holds is unspecified.
pub async fn scatter(jobs: Vec<Scatter>, checksum: bool) -> Result<Vec<Scattered>> {
    let mut tasks = JoinSet::new();
    for (index, job) in jobs.into_iter().enumerate() {
        tasks.spawn(async move { Ok::<_, Error>((index, job.read(checksum).await?)) });
    }
    let mut results = Vec::with_capacity(tasks.len());
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(result) => results.push(result?),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
    results.sort_unstable_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

impl Scatter {
    async fn read(self, checksum: bool) -> Result<Scattered> {
        let Self { client, key, version, segments } = self;
        client.store().check_key(Operation::Get, &key)?;
        let ranges: Vec<_> = segments.iter().map(|s| s.offset..s.offset + s.memory.len() as u64).collect();
        let part_bytes = plan::part_bytes(client.policy(), ranges.iter().map(|range| range.end - range.start).sum());
        let parts = coalesce::parts(&ranges, part_bytes);
        let mut result = Scattered { version, size: 0, crc32: Vec::new() };
        let mut sums = vec![Sum::default(); if checksum { segments.len() } else { 0 }];
        if let Some(first) = parts.first().map(Part::range) {
            let first = match &result.version {
                // All ask for one version, which the first answer tells.
                None => Some(client.open_first(&key, Some(ByteRange::Bounded(first)), None, None).await?),
                Some(_) => None,
            };
            if let Some(first) = &first {
                result.version = first.opened.version().cloned();
            }
            let sinks = deal(parts, segments, checksum);
            for strips in client.receive_all(key.as_str().into(), result.version.clone(), sinks, first).await? {
                result.size = strips.size;
                strips.sums.into_iter().for_each(|(segment, sum)| sums[segment].append(sum));
            }
        } else {
            let head = client.head(&key).await?;
            if result.version.is_some() && result.version != head.version {
                return Err(client.store().error(ErrorKind::Changed, Operation::Get, &key, "the object changed"));
            }
            (result.version, result.size) = (head.version, head.size);
        }
        if let Some(behind) = ranges.iter().find(|range| range.end > result.size) {
            let message = format!("asked for bytes {behind:?}, the object has {}", result.size);
            return Err(client.store().error(ErrorKind::Range, Operation::Get, &key, &message));
        }
        result.crc32 = sums.into_iter().map(|sum| sum.crc32).collect();
        Ok(result)
    }
}

/// The range of each part, with the memory of its pieces.
fn deal(parts: Vec<Part>, segments: Vec<Segment>, checksum: bool) -> impl Iterator<Item = (Range<u64>, Strips)> {
    let mut dests: Vec<Dest> = segments.into_iter().map(|segment| open(segment.memory)).collect();
    parts.into_iter().map(move |part| {
        let range = part.range();
        let mut at = range.start;
        let pieces = part.pieces.into_iter().map(|piece| {
            let gap_bytes = length(at..piece.range.start);
            at = piece.range.end;
            let dest = cut(&mut dests[piece.segment], length(piece.range));
            Room { gap_bytes, segment: piece.segment, dest }
        });
        let rooms = pieces.collect();
        let strips =
            Strips { rooms, strip: None, taken: 0, length: length(range.clone()), checksum, sums: Vec::new(), size: 0 };
        (range, strips)
    })
}

fn open(memory: Memory) -> Dest {
    if memory.len() >= HUGE_BYTES {
        memory.advise_huge_pages();
    }
    Landing::new(memory).1
}

fn length(range: Range<u64>) -> usize {
    usize::try_from(range.end - range.start).expect("a part fits memory")
}

/// Takes the first `length` bytes of room out of `dest`.
fn cut(dest: &mut Dest, length: usize) -> Dest {
    let rest = dest.split_off(length);
    std::mem::replace(dest, rest)
}

/// The CRC-32 of some bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    crc32: u32,
    bytes: u64,
}

impl Sum {
    /// Makes this the sum of its own bytes and, behind them, those of `next`.
    fn append(&mut self, next: Self) {
        let crc32 = match self.bytes {
            0 => next.crc32,
            _ => {
                let whole = checksum_combine(CRC_32, self.crc32.into(), next.crc32.into(), next.bytes);
                u32::try_from(whole).expect("a CRC-32")
            }
        };
        *self = Self { crc32, bytes: self.bytes + next.bytes };
    }
}

impl From<Digest> for Sum {
    fn from(digest: Digest) -> Self {
        Self { crc32: u32::try_from(digest.finalize()).expect("a CRC-32"), bytes: digest.get_amount() }
    }
}

/// Where a piece is to land.
#[derive(Debug)]
struct Room {
    /// Bytes before it that nobody wants.
    gap_bytes: usize,
    segment: usize,
    dest: Dest,
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
    /// What lies there: bytes of one segment, where they belong; or pieces that are to be copied, and gaps.
    holds: Holds,
}

#[derive(Debug)]
enum Holds {
    Segment(usize),
    Copies(Vec<(Range<usize>, Room)>),
}

/// Takes the bytes of a part, strip by strip.
struct Strips {
    /// Behind the strip that is being filled.
    rooms: VecDeque<Room>,
    strip: Option<Strip>,
    /// Bytes of the strips before.
    taken: usize,
    length: usize,
    checksum: bool,
    /// By segment, in the order of the bytes.
    sums: Vec<(usize, Sum)>,
    /// Of the whole object, once it answered.
    size: u64,
}

impl Strips {
    /// The next strip; `None` behind the last.
    fn next(&mut self) -> Result<Option<Strip>> {
        match self.rooms.pop_front() {
            None => Ok(None),
            Some(room) if room.is_direct() => Ok(Some(self.direct(room))),
            Some(room) => {
                self.rooms.push_front(room);
                self.bounce().map(Some)
            }
        }
    }

    fn direct(&mut self, mut room: Room) -> Strip {
        let segment = room.segment;
        let dest = if self.checksum && room.dest.len() >= STRIP_BYTES + DIRECT_BYTES {
            let dest = cut(&mut room.dest, STRIP_BYTES);
            self.rooms.push_front(room);
            dest
        } else {
            room.dest
        };
        Strip { dest, holds: Holds::Segment(segment) }
    }

    fn bounce(&mut self) -> Result<Strip> {
        let (mut copies, mut at) = (Vec::new(), 0);
        while at < STRIP_BYTES
            && let Some(mut room) = self.rooms.pop_front_if(|room| !room.is_direct())
        {
            let gap_bytes = room.gap_bytes.min(STRIP_BYTES - at);
            room.gap_bytes -= gap_bytes;
            at += gap_bytes;
            let length = room.dest.len().min(STRIP_BYTES - at);
            if room.is_direct() || length == 0 {
                self.rooms.push_front(room);
                continue;
            }
            let dest = cut(&mut room.dest, length);
            copies.push((at..at + length, Room { gap_bytes: 0, segment: room.segment, dest }));
            at += length;
            if !room.dest.is_empty() {
                self.rooms.push_front(room);
            }
        }
        let memory = Memory::allocate(at).map_err(|source| {
            Error::new(ErrorKind::Io, Operation::Get, "", format!("no memory for {at} bytes")).with_source(source)
        })?;
        Ok(Strip { dest: Landing::new(memory).1, holds: Holds::Copies(copies) })
    }

    /// A strip is full.
    fn land(&mut self, strip: Strip) {
        let Strip { dest, holds } = strip;
        self.taken += dest.len();
        match holds {
            Holds::Segment(segment) => self.sum(segment, dest.written()),
            Holds::Copies(copies) => {
                for (range, mut room) in copies {
                    let bytes = &dest.written()[range];
                    room.dest.fill(bytes);
                    self.sum(room.segment, bytes);
                }
            }
        }
    }

    fn sum(&mut self, segment: usize, bytes: &[u8]) {
        if !self.checksum {
            return;
        }
        let mut digest = Digest::new(CRC_32);
        digest.update(bytes);
        match self.sums.last_mut() {
            Some((last, sum)) if *last == segment => sum.append(digest.into()),
            _ => self.sums.push((segment, digest.into())),
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

    async fn take(&mut self, opened: &mut dyn Opened) -> Result<()> {
        self.size = opened.size();
        loop {
            let strip = match self.strip.take() {
                Some(strip) => strip,
                None => match self.next()? {
                    Some(strip) => strip,
                    None => return Ok(()),
                },
            };
            let strip = self.strip.insert(strip);
            opened.read_into(&mut strip.dest).await?;
            if strip.dest.remaining() > 0 {
                return Ok(());
            }
            let full = self.strip.take().expect("inserted above");
            self.land(full);
        }
    }
}
