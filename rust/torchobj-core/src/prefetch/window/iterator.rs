//! The entries of one iterator, and how far it may read ahead.

use std::collections::BTreeSet;

/// Bytes that an iterator reads ahead before anything was taken, and number of entries that it reads ahead in any case.
const START_BYTES: u64 = 128 << 20;
const MIN_ENTRIES: usize = 64;
/// Fraction of the taken bytes that it reads ahead in addition.
const TAKEN_FRACTION: u64 = 4;

#[derive(Debug, Default)]
pub(super) struct IteratorState {
    pub(super) queued: BTreeSet<u64>,
    /// Bytes that its entries hold, or will hold once they are read.
    pub(super) announced: u64,
    /// Bytes of its entries that are ready or being read.
    pub(super) held: u64,
    /// Number of its entries that are ready or being read.
    pub(super) held_entries: usize,
    pub(super) last_used: u64,
    /// An entry was evicted for another iterator, and this one was not used since.
    pub(super) paused: bool,
}

impl IteratorState {
    /// Returns whether the next entry may be read ahead.
    pub(super) fn reads_ahead(&self) -> bool {
        !self.paused && !self.queued.is_empty()
    }

    /// Returns whether another entry may be read ahead, as far as the budget allows it, after `taken` bytes were taken
    /// from the prefetcher. The first touch of memory costs more than a read into memory that was used before, so the
    /// first epoch must not use new memory for each object.
    pub(super) fn may_read(&self, charge: u64, taken: u64) -> bool {
        self.held_entries < MIN_ENTRIES || self.held + charge <= START_BYTES + taken / TAKEN_FRACTION
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_ahead_grows_by_a_quarter_of_what_was_taken() {
        let few = IteratorState { held: START_BYTES, held_entries: MIN_ENTRIES - 1, ..Default::default() };
        assert!(few.may_read(1 << 40, 0));
        let many = IteratorState { held_entries: MIN_ENTRIES, ..few };
        assert!(!many.may_read(1, 0) && !many.may_read(2, 4));
        assert!(many.may_read(1, 4));
    }
}
