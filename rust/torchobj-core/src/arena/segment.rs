//! Pieces of an arena in the process that owns it.
#![expect(unsafe_code, reason = "makes memory of segments; the use says which invariant it keeps")]

use std::fmt;
use std::sync::Arc;

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
}

impl Segment {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes, which are written already.
    pub fn buffer(self: &Arc<Self>) -> Buffer {
        let (landing, dest) = Landing::new(self.memory());
        drop(dest);
        landing.finish(usize::MAX).expect("its one writer was just dropped")
    }

    /// Its bytes, to be written and read. To be called once; the segment lives as long as these do.
    pub fn memory(self: &Arc<Self>) -> Memory {
        let extent = self.extent.expect("it is there until it is granted or dropped");
        let start = self.arena.map().at(DATA + extent.offset, self.len);
        let len = usize::try_from(self.len).expect("it is mapped");
        // SAFETY: the extent is this segment's alone until it is given back, which the `Arc` in `keep` puts off (to be
        // granted it must be out of its `Arc`); the mapping lives with the arena; a file's pages read as zeroes before
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
