//! The entries of one iterator, and how far it may read ahead.

use std::collections::BTreeSet;

/// Bytes that an iterator reads ahead at first, and number of entries that it reads ahead in any case.
const START_BYTES: u64 = 128 << 20;
const MIN_ENTRIES: usize = 64;
/// Fraction of itself by which the limit grows when an entry is late.
const GROWTH_FRACTION: u64 = 8;
/// Fraction of the taken bytes by which the limit may exceed its start.
const TAKEN_FRACTION: u64 = 4;

/// How far iterators read ahead, as far as the budget allows it. The first touch of memory costs more than a read into
/// memory that was used before, and memory that stays in the CPU's cache costs less than other memory. The limit
/// therefore grows only when an entry was late although much of the limit was in use, and by no more than a
/// part of what was taken.
#[derive(Debug)]
pub(super) struct ReadAheadLimit {
    bytes: u64,
    taken: u64,
}

impl Default for ReadAheadLimit {
    fn default() -> Self {
        Self { bytes: START_BYTES, taken: 0 }
    }
}

impl ReadAheadLimit {
    /// An entry of `charge` bytes is taken.
    pub(super) fn on_take(&mut self, charge: u64) {
        self.taken = self.taken.saturating_add(charge);
    }

    /// How many bytes after the next entry of an iterator others are read with it. Half of the limit stays for the entries
    /// before them.
    pub(super) fn reach(&self) -> u64 {
        self.bytes / 2
    }

    /// An entry was taken before it was ready, while its iterator held `held` bytes.
    pub(super) fn on_late(&mut self, held: u64) {
        if held >= self.bytes / 2 {
            let limit = START_BYTES.saturating_add(self.taken / TAKEN_FRACTION);
            self.bytes = self.bytes.saturating_add(self.bytes / GROWTH_FRACTION).min(limit);
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct IteratorState {
    /// The loader that it belongs to.
    pub(super) loader: u64,
    /// Number of its entries that were taken.
    pub(super) taken: u64,
    pub(super) queued: BTreeSet<u64>,
    /// Bytes that its entries hold, or will hold once they are read.
    pub(super) announced: u64,
    /// Bytes of all entries that were announced, also of those that were taken.
    pub(super) end: u64,
    /// Bytes of its entries that are ready or being read.
    pub(super) held: u64,
    /// Number of its entries that are ready or being read.
    pub(super) held_entries: usize,
    pub(super) last_used: u64,
    /// An entry was evicted for another iterator, and this one was not used since.
    pub(super) paused: bool,
    /// Further entries were not announced for lack of memory, since the last announcement.
    pub(super) limited_by_memory: bool,
}

impl IteratorState {
    /// Returns whether the next entry may be read ahead.
    pub(super) fn reads_ahead(&self) -> bool {
        !self.paused && !self.queued.is_empty()
    }

    /// Returns whether an entry is to be read now, and not only together with an earlier one: it has no neighbours
    /// (`position` is `None`), or is in the first half of the announced bytes.
    pub(super) fn is_due(&self, position: Option<u64>) -> bool {
        let taken = self.end - self.announced;
        let is_near = |position: u64| position.saturating_sub(taken) <= self.announced / 2;
        self.held_entries < MIN_ENTRIES || position.is_none_or(is_near)
    }

    /// Returns whether an entry of `charge` bytes may be read ahead, as far as the budget allows it.
    pub(super) fn may_read(&self, charge: u64, limit: &ReadAheadLimit) -> bool {
        self.held_entries < MIN_ENTRIES || self.held + charge <= limit.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(taken: u64, held_when_late: &[u64]) -> u64 {
        let mut limit = ReadAheadLimit::default();
        limit.on_take(taken);
        for held in held_when_late {
            limit.on_late(*held);
        }
        limit.bytes
    }

    #[test]
    fn the_limit_grows_when_an_entry_is_late_though_half_of_it_is_in_use() {
        assert_eq!(limit(1 << 40, &[]), START_BYTES);
        assert_eq!(limit(1 << 40, &[START_BYTES / 2 - 1]), START_BYTES);
        assert_eq!(limit(1 << 40, &[START_BYTES / 2]), START_BYTES / 8 * 9);
    }

    #[test]
    fn the_limit_grows_by_no_more_than_a_quarter_of_what_was_taken() {
        assert_eq!(limit(0, &[START_BYTES]), START_BYTES);
        assert_eq!(limit(40, &[START_BYTES, START_BYTES]), START_BYTES + 10);
        assert_eq!(limit(u64::MAX, &[u64::MAX; 300]), START_BYTES + u64::MAX / 4);
    }

    #[test]
    fn the_later_half_of_the_ranges_waits_for_earlier_ones() {
        let state = IteratorState { end: 1100, announced: 1000, held_entries: MIN_ENTRIES, ..Default::default() };
        assert!(state.is_due(None) && state.is_due(Some(0)) && state.is_due(Some(600)) && !state.is_due(Some(601)));
        let few = IteratorState { held_entries: MIN_ENTRIES - 1, ..state };
        assert!(few.is_due(Some(1099)));
    }

    #[test]
    fn a_few_entries_are_read_ahead_whatever_their_size() {
        let limit = ReadAheadLimit::default();
        let few = IteratorState { held: START_BYTES, held_entries: MIN_ENTRIES - 1, ..Default::default() };
        assert!(few.may_read(1 << 40, &limit));
        let many = IteratorState { held_entries: MIN_ENTRIES, held: START_BYTES - 1, ..Default::default() };
        assert!(many.may_read(1, &limit) && !many.may_read(2, &limit));
    }
}
