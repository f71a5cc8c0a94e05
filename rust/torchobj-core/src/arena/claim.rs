//! A worker's claim on a segment that the owner granted to it. `worker` requests segments.
#![expect(unsafe_code, reason = "creates memory regions over segments; each use states its invariant")]

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::attachment::Attachment;
use super::block::{Block, ViewedBlock};
use super::layout::Answer;
use super::sync;
use crate::buffer::{Buffer, Memory};
use crate::fork;

/// A segment that was granted to a worker. Dropping the claim transfers an offered segment to the trainer, and returns
/// any other to the owner.
#[derive(Debug)]
pub struct Claim {
    attachment: Arc<Attachment>,
    answer: Answer,
    /// The block; `None` for a segment of the arena.
    block: Option<ViewedBlock>,
    /// Number of forks when the claim began.
    forks: u64,
    /// Whether `buffer` was called.
    taken: AtomicBool,
}

/// Identifies a segment that a worker offered, for the trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Id of the granted segment.
    pub id: u32,
    /// Distinguishes the segments that had this id.
    pub generation: u32,
}

impl Claim {
    /// The claim of the attached worker on the segment that was granted by `answer`.
    pub(super) fn new(attachment: Arc<Attachment>, answer: Answer) -> Arc<Self> {
        Self::with(attachment, answer, None)
    }

    /// The claim of the attached worker on `block`, which was granted by `answer`.
    pub(super) fn of_block(attachment: Arc<Attachment>, answer: Answer, block: Arc<Block>) -> Arc<Self> {
        Self::with(attachment, answer, Some(ViewedBlock::new(block, answer.len)))
    }

    fn with(attachment: Arc<Attachment>, answer: Answer, block: Option<ViewedBlock>) -> Arc<Self> {
        let forks = fork::count(&fork::enter());
        Arc::new(Self { attachment, answer, block, forks, taken: AtomicBool::new(false) })
    }

    /// Returns whether this is the memory of a block. The worker may write to it at any time: a batch may contain tensors
    /// that the worker keeps.
    pub fn is_block(&self) -> bool {
        self.block.is_some()
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.answer.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.answer.len == 0
    }

    /// Identity of the process that owns the arena, as of [`fork::generation`].
    pub fn owner(&self) -> u64 {
        self.attachment.owner()
    }

    /// Offers the segment to the trainer, which adopts its memory once this claim is dropped, and copies the bytes
    /// before that. Until the claim is dropped, this process may read the bytes but not write them. `None` if the
    /// segment was offered before, and in a forked child of the worker.
    pub fn offer(&self) -> Option<Offer> {
        let Answer { id, generation, .. } = self.answer;
        let offered = self.attachment.is_ours() && sync::offer(self.attachment.header().state(id), generation);
        offered.then_some(Offer { id, generation })
    }

    /// The bytes. They keep the claim alive.
    ///
    /// # Panics
    /// A second call.
    pub fn buffer(self: &Arc<Self>) -> Buffer {
        assert!(!self.taken.swap(true, Relaxed), "the memory of a claim is taken once");
        let Answer { offset, len, .. } = self.answer;
        let start = match &self.block {
            Some(block) => block.at(len),
            None => self.attachment.map.at(offset, len),
        };
        let len = usize::try_from(len).expect("it is mapped");
        // SAFETY: the owner granted the segment to this process alone, and frees it only after the claim, which is
        // passed to `borrowed`, is dropped; `buffer` returns it once, as was just checked; the mapping lives as long as the
        // attachment or the block, which the claim keeps; the owner wrote these bytes before it answered, and those of a block
        // are zeroes or an earlier batch. After an offer (`offer`) the owner may read the segment too, and neither process
        // writes to it; only to a block may the worker write, as two processes may that share a tensor.
        Buffer::over(unsafe { Memory::borrowed(start, len, Box::new(self.clone())) }, len)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A forked child has a copy of a claim that belongs to its parent.
        if self.attachment.is_ours() {
            match &self.block {
                Some(block) => {
                    // Discarded if a child may view it. No fork before the claim is dropped.
                    let inside = fork::enter();
                    block.end();
                    self.attachment.drop_claim(self.answer, fork::count(&inside));
                }
                None => self.attachment.drop_claim(self.answer, self.forks),
            }
        }
    }
}
