//! Eviction of entries when memory is short: shares of the iterators, and the entry to evict. `Window` decides when.

use super::{Next, State, Window};

impl<B, W> Window<B, W> {
    /// The equal share of an active iterator in the bytes that iterators hold.
    pub(super) fn share(&self) -> u64 {
        let busy =
            self.iterators.values().filter(|iterator_state| iterator_state.held > 0 || iterator_state.reads_ahead());
        let (count, held) = busy.fold((0, 0), |(count, held), iterator_state| (count + 1, held + iterator_state.held));
        held / count.max(1)
    }

    /// The last ready entry of the iterators other than `iterator`.
    pub(super) fn last_of_others(&self, iterator: u64) -> Option<u64> {
        self.ready.iter().rev().find(|number| self.entries[number].iterator != iterator).copied()
    }

    /// The last ready entry of an iterator that was last used before `last_used`.
    pub(super) fn last_of_less_recent(&self, last_used: u64) -> Option<u64> {
        let idle = |number: &&u64| {
            self.iterators
                .get(&self.entries[number].iterator)
                .is_none_or(|iterator_state| iterator_state.last_used < last_used)
        };
        self.ready.iter().rev().find(idle).copied()
    }

    /// Evicts a ready entry in favour of the iterator `winner`: queues it again. Its result is to be dropped.
    pub(super) fn evict(&mut self, number: u64, winner: u64) -> Next<B> {
        self.ready.remove(&number);
        let entry = self.entries.get_mut(&number).expect("each number in `ready` has an entry");
        let State::Ready(body) = std::mem::replace(&mut entry.state, State::Queued) else {
            unreachable!("each number in `ready` has a ready entry");
        };
        let (iterator, loader, charge) = (entry.iterator, entry.loader, entry.charge);
        self.subtract_held(iterator, charge);
        if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
            iterator_state.queued.insert(number);
            iterator_state.paused |= iterator != winner;
        }
        Next::Evict(body, loader)
    }

    /// Removes an entry if its waiter has stopped waiting, as `closed` reports. Returns the waiter.
    pub(in crate::prefetch) fn remove_abandoned(&mut self, number: u64, closed: impl Fn(&W) -> bool) -> Option<W> {
        let waiter = self.entries.get_mut(&number)?.waiter.take_if(|waiter| closed(waiter))?;
        self.remove(number);
        Some(waiter)
    }
}
