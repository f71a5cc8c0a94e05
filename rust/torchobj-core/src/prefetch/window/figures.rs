//! What a window holds, in figures. Changes nothing.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use super::{Iteration, State, Use, Window};

impl<B, W> Window<B, W> {
    /// Uses that are announced or waited for and not taken.
    pub(in crate::prefetch) fn len(&self) -> usize {
        self.uses.len()
    }

    /// Whether anything is to be read ahead and not begun.
    pub(in crate::prefetch) fn is_queued(&self) -> bool {
        self.iterations.values().any(Iteration::reads_ahead)
    }

    /// Numbers of the objects of a source that are announced or waited for and not taken.
    pub(in crate::prefetch) fn used_of(&self, source: u64) -> HashSet<u64> {
        let objects = self.uses.values().map(|used| used.object);
        objects.filter(|object| object.source == source).map(|object| object.index).collect()
    }

    /// Bytes that the uses of an iterator hold, or will once they are read.
    pub(in crate::prefetch) fn announced_bytes(&self, iterator: u64) -> u64 {
        self.iterations.get(&iterator).map_or(0, |iteration| iteration.announced)
    }

    /// Bytes that uses hold which nobody took, or will in a moment.
    pub(super) fn held(&self) -> u64 {
        let begun = |used: &&Use<B, W>| matches!(used.state, State::Filling(_) | State::Following | State::Landed(_));
        self.uses.values().filter(begun).map(|used| used.charge).sum()
    }

    /// Bytes that reads will take which have no memory yet.
    pub(in crate::prefetch) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Bytes that uses hold in memory which nobody took.
    pub(in crate::prefetch) fn ahead(&self) -> u64 {
        self.held().saturating_sub(self.reserved())
    }
}
