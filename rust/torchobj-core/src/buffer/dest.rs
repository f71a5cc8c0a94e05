//! Writing to a region, and reading it once it is written.
#![expect(unsafe_code, reason = "hands out disjoint slices of a region; each use states its invariant")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Memory;

/// Counts the bytes that writers receive, so that a task can watch the rate.
#[derive(Clone, Debug, Default)]
pub struct ReceivedBytes(Arc<AtomicU64>);

impl ReceivedBytes {
    /// Number of bytes received.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds bytes that were received.
    pub(crate) fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A disjoint part of a region with one writer, filled from its start. Cannot be cloned.
#[derive(Debug)]
pub struct Dest {
    memory: Arc<Memory>,
    start: usize,
    end: usize,
    filled: usize,
    /// Value of `filled` when the last part was split off.
    own_start: usize,
    /// Counts received bytes, if set.
    progress: Option<ReceivedBytes>,
}

impl Dest {
    /// Capacity in bytes, filled or not.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns whether the capacity is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes that were written.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Number of bytes that can still be written.
    pub fn remaining(&self) -> usize {
        self.len() - self.filled
    }

    /// The unfilled bytes. Write to the start of the slice, then call [`advance`](Self::advance).
    pub fn unfilled_mut(&mut self) -> &mut [u8] {
        let at = self.start + self.filled;
        // SAFETY: `start..end` is within the region (`PendingBuffer::new` and `split_off` keep `end <= memory.len()`),
        // no other `Dest` covers it (they are disjoint and cannot be cloned), no `Buffer` of this region exists while
        // this holds its `Arc` (`PendingBuffer::finish`), and regions are initialised.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start().as_ptr().add(at), self.end - at) }
    }

    /// Marks the first `bytes` of the unfilled bytes as written.
    ///
    /// # Panics
    /// `bytes` exceeds [`remaining`](Self::remaining).
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.remaining(), "advanced by {bytes} with {} remaining", self.remaining());
        self.filled += bytes;
        if let Some(progress) = &self.progress {
            progress.add(bytes);
        }
    }

    /// Counts the bytes received from now on in `progress`.
    pub fn count_in(&mut self, progress: &ReceivedBytes) {
        self.progress = Some(progress.clone());
    }

    /// Discards the bytes after the first `filled`, to write them again.
    ///
    /// # Panics
    /// Fewer bytes were written, or a discarded one was split off.
    pub fn rewind(&mut self, filled: usize) {
        assert!((self.own_start..=self.filled).contains(&filled), "rewound to {filled} of {}", self.filled);
        self.filled = filled;
    }

    /// Copies as many of `bytes` as fit. Returns their number.
    pub fn fill(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.remaining());
        self.unfilled_mut()[..count].copy_from_slice(&bytes[..count]);
        self.advance(count);
        count
    }

    /// The bytes that were written since the last part was split off.
    pub fn written(&self) -> &[u8] {
        // SAFETY: the range is within the region as in `unfilled_mut`. Only this `Dest` writes to it: parts of other
        // writers are before (`split_next`) or after it (`split_off`), and `&self` prevents writes meanwhile.
        unsafe {
            std::slice::from_raw_parts(
                self.memory.start().as_ptr().add(self.start + self.own_start),
                self.filled - self.own_start,
            )
        }
    }

    /// Splits off everything after the first `at` bytes. Nothing may be written there yet.
    ///
    /// # Panics
    /// `at` exceeds the capacity, or more than `at` bytes were written.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len() && self.filled <= at, "cut at {at} of {} with {} filled", self.len(), self.filled);
        let rest = self.part(self.start + at, self.end);
        self.end = self.start + at;
        rest
    }

    /// Splits off the first `at` bytes. Nothing may be written yet.
    ///
    /// # Panics
    /// `at` exceeds the capacity, or bytes were written.
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        assert_eq!(self.filled, 0, "cut at {at} with {} filled", self.filled);
        let rest = self.split_off(at);
        std::mem::replace(self, rest)
    }

    /// Splits off the next `length` unfilled bytes for another writer. They count as filled here.
    ///
    /// # Panics
    /// `length` exceeds [`remaining`](Self::remaining).
    #[must_use]
    pub fn split_next(&mut self, length: usize) -> Self {
        let start = self.start + self.filled;
        assert!(length <= self.remaining(), "split {length} off with {} remaining", self.remaining());
        self.filled += length;
        self.own_start = self.filled;
        self.part(start, start + length)
    }

    fn part(&self, start: usize, end: usize) -> Self {
        let (memory, progress) = (self.memory.clone(), self.progress.clone());
        Self { memory, start, end, filled: 0, own_start: 0, progress }
    }
}

/// A region that is being written.
#[derive(Debug)]
pub struct PendingBuffer(Arc<Memory>);

impl PendingBuffer {
    /// Opens a region for writing. Returns the handle that finishes it, and one `Dest` that covers all of it.
    pub fn new(memory: Memory) -> (Self, Dest) {
        let memory = Arc::new(memory);
        let dest =
            Dest { memory: memory.clone(), start: 0, end: memory.len(), filled: 0, own_start: 0, progress: None };
        (Self(memory), dest)
    }

    /// Returns the first `len` bytes of the region for reading.
    ///
    /// # Errors
    /// Returns the `PendingBuffer` if a `Dest` of the region still exists.
    pub fn finish(self, len: usize) -> Result<Buffer, Self> {
        let memory = Arc::try_unwrap(self.0).map_err(Self)?;
        let len = len.min(memory.len());
        Ok(Buffer::over(memory, len))
    }

    /// Ends the write of `dest`. Returns the bytes that were written to it.
    ///
    /// # Panics
    /// `dest` is not the only writer of the region.
    pub fn close(self, dest: Dest) -> Buffer {
        let filled = dest.filled();
        drop(dest);
        self.finish(filled).expect("its only writer was just dropped")
    }
}

/// The bytes of a finished read. Has one owner and no writer; only views of a [`SharedBuffer`](super::SharedBuffer) have
/// other readers.
#[derive(Debug)]
pub struct Buffer {
    memory: Memory,
    len: usize,
}

impl Buffer {
    /// The first `len` bytes of a region without a `Dest`.
    pub(crate) fn over(memory: Memory, len: usize) -> Self {
        debug_assert!(len <= memory.len(), "{len} of {} bytes", memory.len());
        Self { memory, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the region has at least `len` initialised bytes, and a `Buffer` exists only after the last `Dest` was
        // dropped.
        unsafe { std::slice::from_raw_parts(self.memory.start().as_ptr(), self.len) }
    }

    /// Address of the first byte, for bindings that export it and keep this buffer meanwhile.
    pub fn start(&self) -> std::ptr::NonNull<u8> {
        self.memory.start()
    }

    /// The bytes, writable.
    ///
    /// # Panics
    /// It is a view of a `SharedBuffer`.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(!self.memory.is_shared(), "other buffers share this memory");
        // SAFETY: as in `as_slice`; `&mut self` is the only access, because the region is not shared.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start().as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_cannot_be_read_while_a_writer_exists() {
        let (pending, mut dest) = PendingBuffer::new(Memory::allocate(8).unwrap());
        let mut tail = dest.split_off(5);
        assert_eq!(dest.fill(b"hello, all"), 5);
        let pending = pending.finish(8).unwrap_err();
        drop(dest);
        tail.fill(b"you");
        drop(tail);
        assert_eq!(pending.finish(8).unwrap().as_slice(), b"helloyou");
    }

    #[test]
    fn parts_cover_the_region_once() {
        let (pending, mut dest) = PendingBuffer::new(Memory::allocate(100_000).unwrap());
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
        let buffer = pending.finish(usize::MAX).unwrap();
        assert!(buffer.as_slice().iter().enumerate().all(|(at, byte)| usize::from(*byte) == at / 7_000));
    }

    #[test]
    fn received_bytes_are_counted_once_in_every_part() {
        let (_pending, mut dest) = PendingBuffer::new(Memory::allocate(10).unwrap());
        let progress = ReceivedBytes::default();
        dest.count_in(&progress);
        let mut tail = dest.split_off(6);
        dest.fill(b"ab");
        let mut carved = dest.split_next(3);
        assert_eq!(progress.bytes(), 2);
        carved.fill(b"cde");
        tail.fill(b"gh");
        assert_eq!(progress.bytes(), 7);
    }

    #[test]
    fn discarded_bytes_are_written_again() {
        let (pending, mut dest) = PendingBuffer::new(Memory::allocate(6).unwrap());
        dest.fill(b"wrong");
        dest.rewind(1);
        assert_eq!((dest.filled(), dest.remaining()), (1, 5));
        dest.fill(b"right");
        drop(dest);
        assert_eq!(pending.finish(6).unwrap().as_slice(), b"wright");
    }

    #[test]
    #[should_panic(expected = "advanced by 9 with 8 remaining")]
    fn a_writer_cannot_advance_beyond_its_end() {
        let (_pending, mut dest) = PendingBuffer::new(Memory::allocate(8).unwrap());
        dest.advance(9);
    }
}
