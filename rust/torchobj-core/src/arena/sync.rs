//! Protocols on the atomic words that the owner and its workers share. Generic over the word, so that `models` can
//! check every interleaving with loom.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// One worker holds the segment.
const CLAIMED: u32 = 0;
/// The worker offered it to the trainer and dropped it.
const TRANSFERRED: u32 = 1;
/// The worker dropped it without an offer. The owner may free it.
const RETURNED: u32 = 2;
/// The worker offered it to the trainer and still maps it. Neither process writes to it, except the worker to a block.
const OFFERED: u32 = 3;

/// An atomic word of shared memory.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    /// Compares and exchanges; returns whether it succeeded.
    fn compare_exchange(&self, from: u32, to: u32) -> bool;
    /// Sequentially consistent fence.
    fn fence();
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }
    fn compare_exchange(&self, from: u32, to: u32) -> bool {
        self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// State of a granted segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrantState {
    /// A worker holds it.
    Claimed,
    /// A worker holds it and has offered it to the trainer.
    Offered,
    /// On its way to the trainer; the worker has dropped it.
    Transferred,
    /// The worker has dropped it. The owner may free it.
    Returned,
}

/// The state word of a granted segment: 30 bits of generation, 2 bits of state.
fn encode(generation: u32, state: u32) -> u32 {
    generation << 2 | state
}

/// The generation after `generation`.
pub(super) fn next_generation(generation: u32) -> u32 {
    (generation + 1) & (u32::MAX >> 2)
}

/// Owner: grants the segment, with all bytes written to it so far, to a worker.
pub(super) fn grant(word: &impl Word, generation: u32) {
    word.store(encode(generation, CLAIMED), Ordering::Release);
}

/// Worker: offers the segment, with all bytes written to it so far, to the trainer; the worker writes to it no more
/// unless it is a block.
/// Returns false if the worker has offered or dropped it before.
pub(super) fn offer(word: &impl Word, generation: u32) -> bool {
    word.compare_exchange(encode(generation, CLAIMED), encode(generation, OFFERED))
}

/// Trainer: declines the offer after copying the bytes; the worker keeps the segment. Returns false if the worker has
/// dropped it meanwhile: the segment is transferred then.
pub(super) fn decline(word: &impl Word, generation: u32) -> bool {
    word.compare_exchange(encode(generation, OFFERED), encode(generation, CLAIMED))
}

/// Worker: drops its claim, which transfers the segment to the trainer if it was offered. Returns whether the worker
/// must notify the owner, which waits for memory (`memory_needed`).
pub(super) fn drop_claim<W: Word>(word: &W, generation: u32, flag: &W) -> bool {
    // Twice: the trainer may decline an offer between the two exchanges of the first round.
    for _ in 0..2 {
        if word.compare_exchange(encode(generation, CLAIMED), encode(generation, RETURNED)) {
            // The fence pairs with that of `set_memory_needed`: either the owner sees the dropped segment, or this
            // process sees that the owner waits.
            return memory_needed(flag);
        }
        if word.compare_exchange(encode(generation, OFFERED), encode(generation, TRANSFERRED)) {
            return false;
        }
    }
    false
}

/// Returns whether the owner waits for memory. Called after memory was freed.
pub(super) fn memory_needed<W: Word>(flag: &W) -> bool {
    W::fence();
    flag.load(Ordering::Relaxed) != 0
}

/// Owner: requests a notification when memory is freed. Returns false if this was requested already. Otherwise the
/// owner must look for memory that was freed before the call.
pub(super) fn set_memory_needed<W: Word>(flag: &W) -> bool {
    let newly_set = flag.load(Ordering::Relaxed) == 0;
    if newly_set {
        flag.store(1, Ordering::Relaxed);
        W::fence();
    }
    newly_set
}

/// Owner: the state of a segment; `None` if the word belongs to another generation.
pub(super) fn grant_state(word: &impl Word, generation: u32) -> Option<GrantState> {
    match word.load(Ordering::Acquire).wrapping_sub(encode(generation, 0)) {
        CLAIMED => Some(GrantState::Claimed),
        TRANSFERRED => Some(GrantState::Transferred),
        OFFERED => Some(GrantState::Offered),
        RETURNED => Some(GrantState::Returned),
        _ => None,
    }
}

/// Publishes everything that was written before as part of `number`.
pub(super) fn publish(word: &impl Word, number: u32) {
    word.store(number, Ordering::Release);
}

/// The last published number. Everything that is part of it can be read.
pub(super) fn published(word: &impl Word) -> u32 {
    word.load(Ordering::Acquire)
}
