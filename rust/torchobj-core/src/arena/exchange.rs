//! Moves segments between the owner and its workers: grants, adopts and reclaims them. Allocates only copies.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::grants::Adoption;
use super::layout::{Answer, DATA, Header, SEGMENTS};
use super::owner::{Arena, State};
use super::segment::{self, Segment};
use super::space::Extent;
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
        let Some((id, generation)) = state.grants.add(slot, extent, len) else { return Err(segment) };
        segment.extent = None;
        sync::grant(Header(self.map()).state(id), generation);
        Ok(Answer { id, generation, offset: DATA + extent.offset, len, failed: false })
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
            Some(Adoption::Transfer(extent, len)) => Ok(Some(Segment::new(self.clone(), extent, len).buffer())),
            Some(Adoption::Copy(extent, len)) => {
                // Not under the lock: the copy may be large. `copying` keeps the extent from being freed.
                let copy = self.copy_of(extent, len);
                let transferred = {
                    let _inside = fork::enter();
                    self.state().grants.finish_copy(id, copy.is_ok(), || sync::decline(word, generation))
                };
                match transferred {
                    Some((extent, len)) => Ok(Some(Segment::new(self.clone(), extent, len).buffer())),
                    None => copy.map(Some),
                }
            }
        }
    }

    /// Copies an extent to a new segment, or to the heap if the arena is full.
    fn copy_of(self: &Arc<Self>, extent: Extent, len: u64) -> io::Result<Buffer> {
        let memory = self.segment(len).map(|segment| segment.memory());
        let heap = |_| Memory::allocate(usize::try_from(len).expect("it is mapped"));
        Ok(segment::copy(self.map(), extent, len, memory.or_else(heap)?))
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

    fn reclaim_after(&self, exited: &[u32], orphan_timeout: Duration) -> u64 {
        let _inside = fork::enter();
        let mut state = self.state();
        let State { space, grants, .. } = &mut *state;
        let header = Header(self.map());
        let grant_state = |id, generation| sync::grant_state(header.state(id), generation);
        let freed = grants.reclaim(exited, orphan_timeout, space, grant_state);
        self.release_pages(&mut state);
        freed
    }
}
