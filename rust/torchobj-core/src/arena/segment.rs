//! A range of the arena in the owner's process. Reports its end to the allocator that it came from.
#![expect(unsafe_code, reason = "creates memory regions over segments; the use states its invariant")]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::layout::DATA;
use super::map::Map;
use super::space::Extent;
use crate::buffer::{Buffer, Memory, PendingBuffer};

/// Where the extent of a segment comes from and returns to.
pub(super) trait Allocator: Send + Sync {
    /// The mapping that contains the extent.
    fn map(&self) -> &Map;

    /// Frees the extent of a dropped segment.
    fn free(&self, extent: Extent);
}

/// A range of the arena that the owner's process may write to. Dropping it frees the range.
pub struct Segment {
    allocator: Arc<dyn Allocator>,
    /// `None` after it was granted to a worker.
    pub(super) extent: Option<Extent>,
    pub(super) len: u64,
    exceeds_budget: bool,
    /// Whether `memory` was called.
    taken: AtomicBool,
}

impl Segment {
    pub(super) fn new(allocator: Arc<dyn Allocator>, extent: Extent, len: u64, exceeds_budget: bool) -> Arc<Self> {
        Arc::new(Self { allocator, extent: Some(extent), len, exceeds_budget, taken: AtomicBool::new(false) })
    }

    /// Returns whether the budget was exceeded when it was allocated.
    pub fn exceeds_budget(&self) -> bool {
        self.exceeds_budget
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, which were written before.
    ///
    /// # Panics
    /// As [`memory`](Self::memory).
    pub fn buffer(self: &Arc<Self>) -> Buffer {
        let (pending, dest) = PendingBuffer::new(self.memory());
        drop(dest);
        pending.finish(usize::MAX).expect("its only writer was just dropped")
    }

    /// The memory of the segment, for one writer. Keeps the segment alive.
    ///
    /// # Panics
    /// A second call.
    pub fn memory(self: &Arc<Self>) -> Memory {
        assert!(!self.taken.swap(true, Ordering::Relaxed), "the memory of a segment is taken once");
        let extent = self.extent.expect("it is present until the segment is granted or dropped");
        let start = self.allocator.map().at(DATA + extent.offset, self.len);
        let len = usize::try_from(self.len).expect("it is mapped");
        // SAFETY: only this segment uses the extent until it is freed, and the `Arc` passed to `taken` keeps it (a
        // segment is granted only after it was moved out of its `Arc`); `memory` returns it once, as was just checked;
        // the mapping lives as long as the arena; pages of a `memfd` read as zeroes before the first write.
        unsafe { Memory::borrowed(start, len, Box::new(self.clone())) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if let Some(extent) = self.extent.take() {
            self.allocator.free(extent);
        }
    }
}

/// Copies `len` bytes of an offered segment into `memory`.
pub(super) fn copy(start: NonNull<u8>, len: u64, memory: Memory) -> Buffer {
    let len = usize::try_from(len).expect("it is mapped");
    let (pending, mut dest) = PendingBuffer::new(memory);
    let unfilled = &mut dest.unfilled_mut()[..len];
    // SAFETY: the only caller (`Arena::adopt`) passes `len` bytes that are mapped, as `at` checked, and that no new memory
    // overlaps: they are neither freed nor granted again while their grant is marked as `copying`. No reference to them is
    // created, because the worker may still write to a block; the copy may then have bytes of before and after.
    unsafe { std::ptr::copy_nonoverlapping(start.as_ptr(), unfilled.as_mut_ptr(), len) };
    dest.advance(len);
    drop(dest);
    pending.finish(len).expect("its only writer was just dropped")
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({} bytes)", self.len)
    }
}
