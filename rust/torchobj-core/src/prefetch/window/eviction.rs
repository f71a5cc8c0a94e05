//! What is given up where memory is short, and how much of it is whose. Leaves when to the window.

use super::{State, Window};

impl<B, W> Window<B, W> {
    /// What is one iterator's of the bytes that iterators hold.
    pub(super) fn share(&self) -> u64 {
        let busy = self.iterations.values().filter(|iteration| iteration.held > 0 || iteration.reads_ahead());
        let (count, held) = busy.fold((0, 0), |(count, held), iteration| (count + 1, held + iteration.held));
        held / count.max(1)
    }

    /// The last landed use of iterators other than `iterator`.
    pub(super) fn last_of_others(&self, iterator: u64) -> Option<u64> {
        self.landed.iter().rev().find(|number| self.uses[number].iterator != iterator).copied()
    }

    /// The last landed use of an iterator that was used before `used_at`.
    pub(super) fn last_of_idler(&self, used_at: u64) -> Option<u64> {
        let idle = |number: &&u64| {
            self.iterations.get(&self.uses[number].iterator).is_none_or(|iteration| iteration.used_at < used_at)
        };
        self.landed.iter().rev().find(idle).copied()
    }

    /// Queues a landed use again, for the sake of the iterator `winner`, and returns what it held.
    pub(super) fn evict(&mut self, number: u64, winner: u64) -> B {
        self.landed.remove(&number);
        let used = self.uses.get_mut(&number).expect("what has landed is there");
        let State::Landed(body) = std::mem::replace(&mut used.state, State::Queued) else {
            unreachable!("only what has landed is in `landed`");
        };
        let (iterator, charge) = (used.iterator, used.charge);
        self.release(iterator, charge);
        if let Some(iteration) = self.iterations.get_mut(&iterator) {
            iteration.queued.insert(number);
            iteration.parked |= iterator != winner;
        }
        body
    }

    /// Forgets a use for which `gone` says that nobody waits any more. Its wish then.
    pub(in crate::prefetch) fn give_up(&mut self, number: u64, gone: impl Fn(&W) -> bool) -> Option<W> {
        let wish = self.uses.get_mut(&number)?.wish.take_if(|wish| gone(wish))?;
        self.remove(number);
        Some(wish)
    }
}
