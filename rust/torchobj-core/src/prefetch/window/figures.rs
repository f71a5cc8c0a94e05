//! Counts and sums over a window. Changes nothing.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use super::{Entry, IteratorState, State, Window};

impl<B, W> Window<B, W> {
    /// Number of entries that are announced or demanded and not taken.
    pub(in crate::prefetch) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether an entry is waiting to be read ahead.
    pub(in crate::prefetch) fn is_queued(&self) -> bool {
        self.iterators.values().any(IteratorState::reads_ahead)
    }

    /// Numbers of the objects of a source that are announced or demanded and not taken.
    pub(in crate::prefetch) fn numbers_of(&self, source: u64) -> HashSet<u64> {
        let objects = self.entries.values().map(|entry| entry.object);
        objects.filter(|object| object.source == source).map(|object| object.index).collect()
    }

    /// Bytes that the entries of an iterator hold, or will hold once they are read.
    pub(in crate::prefetch) fn announced_bytes(&self, iterator: u64) -> u64 {
        self.iterators.get(&iterator).map_or(0, |iterator_state| iterator_state.announced)
    }

    /// Number of entries of an iterator that were taken.
    pub(in crate::prefetch) fn taken(&self, iterator: u64) -> u64 {
        self.iterators.get(&iterator).map_or(0, |iterator_state| iterator_state.taken)
    }

    /// Bytes of entries that are ready or being read.
    pub(super) fn held(&self) -> u64 {
        let begun =
            |entry: &&Entry<B, W>| matches!(entry.state, State::Filling(_) | State::Following | State::Ready(_));
        self.entries.values().filter(begun).map(|entry| entry.charge).sum()
    }

    /// Bytes of running reads that have no memory yet.
    pub(in crate::prefetch) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Bytes of memory that entries hold and no caller has taken.
    pub(in crate::prefetch) fn ahead(&self) -> u64 {
        self.held().saturating_sub(self.reserved())
    }
}
