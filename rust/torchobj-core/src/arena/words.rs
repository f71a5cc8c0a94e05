//! The steps by which two processes agree on the words that they share. Knows not where these lie; generic over the
//! word, so that `models` can run every interleaving of them.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// A worker has it, and nobody else.
const CLAIMED: u32 = 0;
/// The worker offered it to the trainer and has dropped it.
const TRANSFERRED: u32 = 1;
/// The worker dropped it without offering it.
const RELEASED: u32 = 2;
/// The worker offered it to the trainer and still has it. Neither process writes to it.
const OFFERED: u32 = 3;

/// A word of shared memory.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    /// Whether it was `from`, and is `to` now.
    fn exchange(&self, from: u32, to: u32) -> bool;
    /// Nothing before it is seen by others after what follows it.
    fn fence();
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }
    fn exchange(&self, from: u32, to: u32) -> bool {
        self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// Where a granted segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// With a worker.
    Claimed,
    /// With a worker, which has offered it to the trainer.
    Offered,
    /// On its way to the trainer.
    Transferred,
    /// Nobody's: the owner may free it.
    Released,
}

/// The word of a granted segment: 30 bits say which of those that had this word, two where it is.
fn state(generation: u32, state: u32) -> u32 {
    generation << 2 | state
}

/// The generation after this one.
pub(super) fn next_generation(generation: u32) -> u32 {
    (generation + 1) & (u32::MAX >> 2)
}

/// The owner: a worker has it from now on, with what was written to it.
pub(super) fn grant(word: &impl Word, generation: u32) {
    word.store(state(generation, CLAIMED), Ordering::Release);
}

/// The worker: offers it to the trainer, with what was written to it, and writes to it no more. False when the worker
/// has offered it already, or has it no longer.
pub(super) fn offer(word: &impl Word, generation: u32) -> bool {
    word.exchange(state(generation, CLAIMED), state(generation, OFFERED))
}

/// The trainer: declines the offer after copying the bytes, so that the segment stays the worker's. False when the worker
/// has dropped it meanwhile: it is the trainer's then.
pub(super) fn decline(word: &impl Word, generation: u32) -> bool {
    word.exchange(state(generation, OFFERED), state(generation, CLAIMED))
}

/// The worker: drops it, which transfers it to the trainer if it was offered. Whether the owner has to be told, who is
/// `starving`.
pub(super) fn release<W: Word>(word: &W, generation: u32, starving: &W) -> bool {
    // Twice: the trainer may decline an offer between the two exchanges of the first round.
    for _ in 0..2 {
        if word.exchange(state(generation, CLAIMED), state(generation, RELEASED)) {
            // The fence pairs with that of `starve`: either the owner sees the release, or this sees that it starves.
            return needed(starving);
        }
        if word.exchange(state(generation, OFFERED), state(generation, TRANSFERRED)) {
            return false;
        }
    }
    false
}

/// Whether memory that came back just now is waited for.
pub(super) fn needed<W: Word>(starving: &W) -> bool {
    W::fence();
    starving.load(Ordering::Relaxed) != 0
}

/// The owner: waits for memory from now on. Whether that is news: what came back before must be looked for then, and
/// whoever gives some back from now on says so.
pub(super) fn starve<W: Word>(starving: &W) -> bool {
    let news = starving.load(Ordering::Relaxed) == 0;
    if news {
        starving.store(1, Ordering::Relaxed);
        W::fence();
    }
    news
}

/// The owner: where a segment is; `None` when the word is another's.
pub(super) fn place(word: &impl Word, generation: u32) -> Option<Place> {
    match word.load(Ordering::Acquire).wrapping_sub(state(generation, 0)) {
        CLAIMED => Some(Place::Claimed),
        TRANSFERRED => Some(Place::Transferred),
        OFFERED => Some(Place::Offered),
        RELEASED => Some(Place::Released),
        _ => None,
    }
}

/// Says that all that was written before belongs to `number`.
pub(super) fn publish(word: &impl Word, number: u32) {
    word.store(number, Ordering::Release);
}

/// The last number that was published; all that belongs to it can be read.
pub(super) fn published(word: &impl Word) -> u32 {
    word.load(Ordering::Acquire)
}
