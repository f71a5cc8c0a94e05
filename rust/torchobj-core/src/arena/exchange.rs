//! Moves segments and blocks between the owner and its workers: grants, adopts and reclaims them. Allocates copies and blocks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use super::block;
use super::grants::{Adoption, Granted};
use super::layout::{Answer, DATA, Header, SEGMENTS};
use super::owner::{Arena, State};
use super::segment::{self, Segment};
use super::sync;
use crate::buffer::{Buffer, Memory};
use crate::fork;

/// Time in which a trainer must adopt what an exited worker had offered.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(30);
/// The same while no loader reads.
const ORPHAN_TIMEOUT_IDLE: Duration = Duration::from_secs(1);

impl Arena {
    /// Grants a segment to the worker of `slot`.
    ///
    /// # Errors
    /// Returns the segment when all ids, a million, are in use.
    pub(super) fn grant(&self, slot: u32, mut segment: Segment) -> Result<Answer, Segment> {
        let _inside = fork::enter();
        let mut state = self.state();
        let len = segment.len;
        let extent = segment.extent.expect("it is present until the segment is granted or dropped");
        let Some((id, generation)) = state.grants.add(self.worker_of(slot), Granted::Extent(extent), len) else {
            return Err(segment);
        };
        segment.extent = None;
        sync::grant(Header(self.map()).state(id), generation);
        Ok(Answer { id, generation, offset: DATA + extent.offset, len, failed: false })
    }

    fn worker_of(&self, slot: u32) -> (u32, u32) {
        (slot, Header(self.map()).slot(slot).worker().load(Acquire))
    }

    /// Grants a block, whose content is undefined, to the worker of `slot`: of the first of these lengths that the limits
    /// allow. Returns the position of this length too; `None` if they allow none.
    pub(super) fn grant_block(&self, slot: u32, lengths: &[u64]) -> Option<(usize, Answer)> {
        let _inside = fork::enter();
        let mut state = self.state();
        let (position, block) = state.blocks.take_first(slot, lengths)?;
        let len = lengths[position];
        let Some((id, generation)) = state.grants.add(self.worker_of(slot), Granted::Block(block.clone()), len) else {
            state.blocks.give(block);
            return None;
        };
        sync::grant(Header(self.map()).state(id), generation);
        let offset = u64::from(block.number) << 32 | u64::from(block.descriptor());
        Some((position, Answer { id, generation, offset, len, failed: false }))
    }

    /// The bytes of a segment that a worker offered to the trainer: the segment itself once the worker has dropped it,
    /// a copy before that. `None` if the segment was not offered, or was adopted before.
    ///
    /// # Errors
    /// The arena is full, and the system has no more memory for a copy.
    pub fn adopt(self: &Arc<Self>, id: u32, generation: u32) -> io::Result<Option<Buffer>> {
        if id >= SEGMENTS {
            return Ok(None);
        }
        let word = Header(self.map()).state(id);
        let adoption = {
            let _inside = fork::enter();
            let grants = &mut self.state().grants;
            grants.adopt(id, generation, sync::grant_state(word, generation))
        };
        match adoption {
            None => Ok(None),
            Some(Adoption::Transfer(memory, len)) => Ok(Some(self.adopted(memory, len))),
            Some(Adoption::Copy(memory, len)) => {
                // Not under the lock: the copy may be large. `copying` keeps the memory from being freed.
                let copy = self.copy_of(&memory, len);
                let transferred = {
                    let _inside = fork::enter();
                    self.state().grants.finish_copy(id, copy.is_ok(), || sync::decline(word, generation))
                };
                match transferred {
                    Some((memory, len)) => Ok(Some(self.adopted(memory, len))),
                    None => copy.map(Some),
                }
            }
        }
    }

    fn adopted(self: &Arc<Self>, memory: Granted, len: u64) -> Buffer {
        match memory {
            Granted::Extent(extent) => Segment::new(self.clone(), extent, len, false).buffer(),
            Granted::Block(block) => block::adopted(self, block, len),
        }
    }

    /// Copies an extent to a new segment, and a block, or any memory if the arena is full, to the heap.
    fn copy_of(self: &Arc<Self>, memory: &Granted, len: u64) -> io::Result<Buffer> {
        let heap = || Memory::allocate(usize::try_from(len).expect("it is mapped"));
        let (start, copy) = match memory {
            Granted::Extent(extent) => {
                (self.map().at(DATA + extent.offset, len), self.segment(len).map(|segment| segment.memory()))
            }
            Granted::Block(block) => (block.at(len), heap()),
        };
        Ok(segment::copy(start, len, copy.or_else(|_| heap())?))
    }

    /// Frees what workers returned, and the segments of the workers of the `exited` slots. What an exited worker had
    /// offered is kept for a while, for the trainer to adopt. Returns the number of bytes freed.
    pub(super) fn reclaim(&self, exited: &[u32]) -> u64 {
        self.reclaim_after(exited, ORPHAN_TIMEOUT)
    }

    /// Frees what exited workers had offered. Called when no loader reads.
    pub fn reclaim_orphans(&self) -> u64 {
        self.reclaim_after(&[], ORPHAN_TIMEOUT_IDLE)
    }

    /// Frees the blocks that workers had offered, given by their process ids. Called when they have exited and the trainer
    /// has adopted all that it will.
    pub fn reclaim_blocks(&self, workers: &[u32]) {
        let inside = fork::enter();
        self.state().grants.abandon_blocks(workers);
        drop(inside);
        self.reclaim(&[]);
    }

    fn reclaim_after(&self, exited: &[u32], orphan_timeout: Duration) -> u64 {
        let _inside = fork::enter();
        let mut state = self.state();
        let State { space, grants, blocks, .. } = &mut *state;
        let header = Header(self.map());
        let grant_state = |id, generation| sync::grant_state(header.state(id), generation);
        let mut freed = 0;
        for memory in grants.reclaim(exited, orphan_timeout, grant_state) {
            match memory {
                Granted::Extent(extent) => {
                    freed += extent.capacity;
                    space.free(extent);
                }
                Granted::Block(block) => blocks.give(block),
            }
        }
        self.release_pages(&mut state);
        freed
    }
}
