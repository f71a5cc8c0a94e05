//! Pieces of an arena in the process that owns it.
#![expect(unsafe_code, reason = "makes memory of segments; the use says which invariant it keeps")]

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::layout::DATA;
use super::owner::Arena;
use super::space::Extent;
use crate::buffer::{Buffer, Landing, Memory};

/// A piece of the arena that this process owns; free again when dropped.
pub struct Segment {
    pub(super) arena: Arc<Arena>,
    /// Gone once it is granted.
    pub(super) extent: Option<Extent>,
    pub(super) len: u64,
    /// Whether its memory was lent: once.
    lent: AtomicBool,
}

impl Segment {
    pub(super) fn new(arena: Arc<Arena>, extent: Extent, len: u64) -> Arc<Self> {
        Arc::new(Self { arena, extent: Some(extent), len, lent: AtomicBool::new(false) })
    }

    /// The bytes of an extent of the arena, in a segment of their own, or on the heap if the arena is full. No other
    /// thread or process may write to the extent meanwhile.
    ///
    /// # Errors
    /// The system has no more memory.
    pub(super) fn copied(arena: &Arc<Arena>, extent: Extent, len: u64) -> io::Result<Buffer> {
        let start = arena.map().at(DATA + extent.offset, len);
        let memory = arena.segment(len).map(|segment| segment.memory());
        let len = usize::try_from(len).expect("it is mapped");
        let (landing, mut dest) = Landing::new(memory.or_else(|_| Memory::allocate(len))?);
        // SAFETY: `len` bytes at `start` are mapped, as `at` checked, and live with the arena. The one caller (`adopt`)
        // has an extent that a worker offered: that worker does not write to it any more, and the extent is not freed,
        // so nobody else gets it, while it is marked as `copying`.
        dest.fill(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) });
        drop(dest);
        Ok(landing.finish(len).expect("its one writer was just dropped"))
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes, which are written already.
    ///
    /// # Panics
    /// As [`memory`](Self::memory).
    pub fn buffer(self: &Arc<Self>) -> Buffer {
        let (landing, dest) = Landing::new(self.memory());
        drop(dest);
        landing.finish(usize::MAX).expect("its one writer was just dropped")
    }

    /// Its bytes, to be written and read. The segment lives as long as these do.
    ///
    /// # Panics
    /// When its memory was lent before.
    pub fn memory(self: &Arc<Self>) -> Memory {
        assert!(!self.lent.swap(true, Ordering::Relaxed), "the memory of a segment is lent once");
        let extent = self.extent.expect("it is there until it is granted or dropped");
        let start = self.arena.map().at(DATA + extent.offset, self.len);
        let len = usize::try_from(self.len).expect("it is mapped");
        // SAFETY: the extent is this segment's alone until it is given back, which the `Arc` in `keep` puts off (to be
        // granted it must be out of its `Arc`); it is lent once, as was just checked; the mapping lives with the arena; a file's pages read as zeroes before
        // they are written.
        unsafe { Memory::lent(start, len, Box::new(self.clone())) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if let Some(extent) = self.extent.take() {
            self.arena.free(extent);
        }
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({} bytes)", self.len)
    }
}
