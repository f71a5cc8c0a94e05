//! Writing to memory, and reading it once it is written.
#![expect(unsafe_code, reason = "hands out disjoint slices of a region; each use says which invariant it keeps")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Memory;

/// Counts the bytes that writers receive, for a task that watches how fast they come.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Bytes received so far.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A piece of memory with one writer, filled from its start.
///
/// Cannot be cloned: pieces of one region never overlap.
pub struct Dest {
    memory: Arc<Memory>,
    start: usize,
    end: usize,
    filled: usize,
    /// How much of what counts as filled lies before the end of the last piece that was handed on.
    carved: usize,
    /// Where received bytes are counted, if they are watched.
    progress: Option<Progress>,
}

impl Dest {
    /// Room in bytes, filled or not.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether it has no room at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many bytes were written.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// How many bytes can still be written.
    pub fn remaining(&self) -> usize {
        self.len() - self.filled
    }

    /// The room that is left. Write to its front, then say how much by [`advance`](Self::advance).
    pub fn unfilled_mut(&mut self) -> &mut [u8] {
        let at = self.start + self.filled;
        // SAFETY: `start..end` lies within the region (`Landing::new` and `split_off` keep `end <= memory.len()`), no
        // other `Dest` covers it (they are cut disjoint and cannot be cloned), no `Buffer` of this region exists while
        // this holds its `Arc` (`Landing::finish`), and regions are initialised.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start().as_ptr().add(at), self.end - at) }
    }

    /// Says that the first `bytes` of the room that was left are written.
    ///
    /// # Panics
    /// When that is more than there was room for.
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.remaining(), "advanced by {bytes} with {} left", self.remaining());
        self.filled += bytes;
        if let Some(progress) = &self.progress {
            progress.add(bytes);
        }
    }

    /// Counts what is received here from now on.
    pub fn count_in(&mut self, progress: &Progress) {
        self.progress = Some(progress.clone());
    }

    /// Drops what was written behind the first `filled` bytes, to be written again.
    ///
    /// # Panics
    /// When less was written, or part of it was handed on.
    pub fn rewind(&mut self, filled: usize) {
        assert!((self.carved..=self.filled).contains(&filled), "rewound to {filled} of {}", self.filled);
        self.filled = filled;
    }

    /// Copies as much of `bytes` as there is room for, and says how much that was.
    pub fn fill(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.remaining());
        self.unfilled_mut()[..count].copy_from_slice(&bytes[..count]);
        self.advance(count);
        count
    }

    /// What was written here, behind the last piece that was carved out.
    pub fn written(&self) -> &[u8] {
        // SAFETY: the range lies within the region as in `unfilled_mut`. Only this `Dest` writes to it, what others were
        // handed lies before (`carve`) or behind it (`split_off`), and `&self` keeps it from being written meanwhile.
        unsafe {
            std::slice::from_raw_parts(
                self.memory.start().as_ptr().add(self.start + self.carved),
                self.filled - self.carved,
            )
        }
    }

    /// Cuts off everything behind the first `at` bytes. Nothing may be written there yet.
    ///
    /// # Panics
    /// When `at` lies outside, or behind it is written already.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len() && self.filled <= at, "cut at {at} of {} with {} filled", self.len(), self.filled);
        let rest = self.piece(self.start + at, self.end);
        self.end = self.start + at;
        rest
    }

    /// Takes out the first `at` bytes. Nothing may be written here yet.
    ///
    /// # Panics
    /// When `at` lies outside, or something is written.
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        assert_eq!(self.filled, 0, "cut at {at} with {} filled", self.filled);
        let rest = self.split_off(at);
        std::mem::replace(self, rest)
    }

    /// Hands the next `length` bytes of room to another writer. Here they count as filled.
    ///
    /// # Panics
    /// When there is less room.
    #[must_use]
    pub fn carve(&mut self, length: usize) -> Self {
        let start = self.start + self.filled;
        assert!(length <= self.remaining(), "carved {length} with {} left", self.remaining());
        self.filled += length;
        self.carved = self.filled;
        self.piece(start, start + length)
    }

    fn piece(&self, start: usize, end: usize) -> Self {
        let (memory, progress) = (self.memory.clone(), self.progress.clone());
        Self { memory, start, end, filled: 0, carved: 0, progress }
    }
}

impl fmt::Debug for Dest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dest({} of {} bytes)", self.filled, self.len())
    }
}

/// A region that is being written.
#[derive(Debug)]
pub struct Landing(Arc<Memory>);

impl Landing {
    /// Opens a region for writing: the landing to wait with, and the one piece that covers it all.
    pub fn new(memory: Memory) -> (Self, Dest) {
        let memory = Arc::new(memory);
        let dest = Dest { memory: memory.clone(), start: 0, end: memory.len(), filled: 0, carved: 0, progress: None };
        (Self(memory), dest)
    }

    /// The region, to be read, its first `len` bytes; or the landing again while a writer exists.
    ///
    /// # Errors
    /// A `Dest` of the region is still there.
    pub fn finish(self, len: usize) -> Result<Buffer, Self> {
        let memory = Arc::try_unwrap(self.0).map_err(Self)?;
        let len = len.min(memory.len());
        Ok(Buffer { memory, len })
    }
}

/// Bytes that have landed. One owner: no writer, no other reader.
pub struct Buffer {
    memory: Memory,
    len: usize,
}

impl Buffer {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the region has at least `len` initialised bytes, and a `Buffer` is made only when no `Dest` is left.
        unsafe { std::slice::from_raw_parts(self.memory.start().as_ptr(), self.len) }
    }

    /// Where the bytes begin, for who exports them to another language and keeps this buffer meanwhile.
    pub fn start(&self) -> std::ptr::NonNull<u8> {
        self.memory.start()
    }

    /// The bytes, to be changed.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start().as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_cannot_be_read_while_a_writer_exists() {
        let (landing, mut dest) = Landing::new(Memory::allocate(8).unwrap());
        let mut tail = dest.split_off(5);
        assert_eq!(dest.fill(b"hello, all"), 5);
        let landing = landing.finish(8).unwrap_err();
        drop(dest);
        tail.fill(b"you");
        drop(tail);
        assert_eq!(landing.finish(8).unwrap().as_slice(), b"helloyou");
    }

    #[test]
    fn pieces_cover_the_region_once() {
        let (landing, mut dest) = Landing::new(Memory::allocate(100_000).unwrap());
        let mut pieces = Vec::new();
        while dest.len() > 7_000 {
            let rest = dest.split_off(7_000);
            pieces.push(std::mem::replace(&mut dest, rest));
        }
        pieces.push(dest);
        for (index, piece) in pieces.iter_mut().enumerate() {
            piece.unfilled_mut().fill(u8::try_from(index).unwrap());
        }
        drop(pieces);
        let buffer = landing.finish(usize::MAX).unwrap();
        assert!(buffer.as_slice().iter().enumerate().all(|(at, byte)| usize::from(*byte) == at / 7_000));
    }

    #[test]
    fn received_bytes_are_counted_once_in_every_piece() {
        let (_landing, mut dest) = Landing::new(Memory::allocate(10).unwrap());
        let progress = Progress::default();
        dest.count_in(&progress);
        let mut tail = dest.split_off(6);
        dest.fill(b"ab");
        let mut carved = dest.carve(3);
        assert_eq!(progress.bytes(), 2);
        carved.fill(b"cde");
        tail.fill(b"gh");
        assert_eq!(progress.bytes(), 7);
    }

    #[test]
    fn bytes_that_were_dropped_are_written_again() {
        let (landing, mut dest) = Landing::new(Memory::allocate(6).unwrap());
        dest.fill(b"wrong");
        dest.rewind(1);
        assert_eq!((dest.filled(), dest.remaining()), (1, 5));
        dest.fill(b"right");
        drop(dest);
        assert_eq!(landing.finish(6).unwrap().as_slice(), b"wright");
    }

    #[test]
    #[should_panic(expected = "advanced by 9 with 8 left")]
    fn a_writer_cannot_claim_more_than_its_room() {
        let (_landing, mut dest) = Landing::new(Memory::allocate(8).unwrap());
        dest.advance(9);
    }
}
