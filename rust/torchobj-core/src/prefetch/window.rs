//! The announced order of objects and their states. Decides which object is read or evicted next; does no I/O and never
//! waits.
//!
//! An *entry* is one appearance of an object in an announced order, or one unannounced demand for it. An entry is
//! queued, filling, following, ready or failed until it is taken. A caller that takes an entry that is neither ready
//! nor failed leaves a `Waiter` in it: the entry is *demanded*. If an object is already being read, further entries for
//! it *follow* that read and receive copies.
//!
//! Demanded entries are read first, also beyond the budget. Then the most recently used iterator reads ahead within the
//! budget. If other iterators hold the memory that it needs, the least recently used one releases ready entries until
//! both hold equal shares; with unequal shares, two alternating loaders would evict each other's entries for
//! ever. An iterator that lost an entry to another is *paused*: it reads ahead again only after its next use, because
//! it would read the same objects repeatedly.
//!
//! How far an iterator reads ahead is limited further while entries are ready in time, see [`ReadAheadLimit`].
//!
//! Ranges of one object are read with one request, whatever their place in the order. So that there are some, the later
//! half of the announced ranges is read only together with earlier ones. Demanded entries are read without those that
//! are only announced, which would delay them.

mod entry;
mod iterator;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use self::entry::{EntryState, WindowEntry};
use self::iterator::{IteratorState, ReadAheadLimit};
use super::decision::{CoalescedRead, Decision, EntryRead, Needed, ObjectId, Reservation, TakeOutcome};
use crate::error::Result;
use crate::read::RangeGroup;

/// Iterator of entries that were not announced.
const UNANNOUNCED: u64 = 0;

/// Maximum number of entries of a read: their results are handed over one after the other.
const MAX_ENTRIES: usize = 256;

/// Maximum number of ranges on each side of an entry that are considered for its read.
const MAX_CANDIDATES: usize = 512;

/// The state of a prefetcher. `B` is the result of a read, `W` a waiter.
#[derive(Debug)]
pub(super) struct Window<B, W> {
    entries: BTreeMap<u64, WindowEntry<B, W>>,
    /// Entries that were not taken, in announced order.
    untaken: HashMap<ObjectId, VecDeque<u64>>,
    /// Objects that are being read, with the entries that follow the read.
    reading: HashMap<ObjectId, Vec<u64>>,
    demanded: VecDeque<u64>,
    ready: BTreeSet<u64>,
    iterators: HashMap<u64, IteratorState>,
    reserved: Arc<AtomicU64>,
    read_ahead_limit: ReadAheadLimit,
    clock: u64,
    next: u64,
}

impl<B, W> Default for Window<B, W> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            untaken: HashMap::new(),
            reading: HashMap::new(),
            demanded: VecDeque::new(),
            ready: BTreeSet::new(),
            iterators: HashMap::new(),
            reserved: Arc::default(),
            read_ahead_limit: ReadAheadLimit::default(),
            clock: 0,
            next: 0,
        }
    }
}

/// A waiter and its result.
pub(super) type Delivery<B, W> = (W, Result<B>);

impl<B, W> Window<B, W> {
    /// Appends an entry to the order of `iterator`. `charge` is the number of bytes that it takes of the budget; `is_range`
    /// whether it may be read together with others.
    pub(super) fn announce(&mut self, iterator: u64, object: ObjectId, charge: u64, is_range: bool) {
        let (loader, position) =
            self.iterators.get(&iterator).map_or((0, 0), |iterator_state| (iterator_state.loader, iterator_state.end));
        let number = self.add(iterator, loader, object, charge, is_range.then_some(position), None);
        self.untaken.entry(object).or_default().push_back(number);
        let clock = self.clock;
        let iterator_state =
            self.iterators.entry(iterator).or_insert_with(|| IteratorState { last_used: clock, ..Default::default() });
        iterator_state.queued.insert(number);
        iterator_state.announced += charge;
        iterator_state.end += charge;
        iterator_state.limited_by_memory = false;
    }

    /// Records that no further entry of `iterator` is announced for lack of memory.
    pub(super) fn limit_by_memory(&mut self, iterator: u64) {
        if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
            iterator_state.limited_by_memory = true;
        }
    }

    /// Returns whether no entry of a loader is to be read because no further one was announced for lack of memory.
    pub(super) fn is_limited_by_memory(&self, loader: u64) -> bool {
        let mut own = self.iterators.values().filter(|iterator_state| iterator_state.loader == loader);
        let is_due = |number: &u64, of: &IteratorState| of.is_due(self.entries[number].position);
        own.clone()
            .all(|iterator_state| !iterator_state.queued.first().is_some_and(|next| is_due(next, iterator_state)))
            && own.any(|iterator_state| iterator_state.limited_by_memory)
    }

    fn add(
        &mut self,
        iterator: u64,
        loader: u64,
        object: ObjectId,
        charge: u64,
        position: Option<u64>,
        waiter: Option<W>,
    ) -> u64 {
        self.next += 1;
        let state = EntryState::Queued;
        let (alone, reservation) = (false, None);
        let entry = WindowEntry { object, iterator, loader, charge, position, alone, state, reservation, waiter };
        self.entries.insert(self.next, entry);
        self.next
    }

    /// Takes the next entry of `object`, preferably one that was announced for `loader`. Returns its result if it is ready
    /// or failed; otherwise keeps `waiter`.
    pub(super) fn take(
        &mut self,
        object: ObjectId,
        loader: u64,
        charge: u64,
        waiter: W,
    ) -> (TakeOutcome, Option<Delivery<B, W>>) {
        self.clock += 1;
        self.read_ahead_limit.on_take(charge);
        let Some(number) = self.first_untaken(object, loader) else {
            let number = self.add(UNANNOUNCED, loader, object, charge, None, Some(waiter));
            self.demanded.push_back(number);
            return (TakeOutcome::Unannounced, None);
        };
        let clock = self.clock;
        let entry = self.entries.get_mut(&number).expect("each untaken number has an entry");
        let iterator = entry.iterator;
        if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
            iterator_state.last_used = clock;
            iterator_state.taken += 1;
            iterator_state.paused = false;
            if !matches!(entry.state, EntryState::Ready(_) | EntryState::Failed(_)) {
                self.read_ahead_limit.on_late(iterator_state.held);
            }
        }
        match &entry.state {
            EntryState::Ready(_) | EntryState::Failed(_) => {
                let hit = matches!(entry.state, EntryState::Ready(_));
                let result = self.remove(number).expect("it is ready or failed");
                (if hit { TakeOutcome::Hit } else { TakeOutcome::InFlight }, Some((waiter, result)))
            }
            EntryState::Filling(_) | EntryState::Following => {
                entry.waiter = Some(waiter);
                (TakeOutcome::InFlight, None)
            }
            EntryState::Queued => {
                entry.waiter = Some(waiter);
                self.demanded.push_back(number);
                self.unqueue(iterator, number);
                (TakeOutcome::Queued, None)
            }
        }
    }

    /// Removes an entry from those that its iterator will read ahead.
    fn unqueue(&mut self, iterator: u64, number: u64) {
        if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
            iterator_state.queued.remove(&number);
        }
    }

    fn first_untaken(&mut self, object: ObjectId, loader: u64) -> Option<u64> {
        let untaken = self.untaken.get_mut(&object)?;
        let own = untaken.iter().position(|number| self.entries[number].loader == loader);
        let number = untaken.remove(own.unwrap_or(0));
        if untaken.is_empty() {
            self.untaken.remove(&object);
        }
        number
    }

    /// Removes an entry. Returns its result if it is ready or failed.
    fn remove(&mut self, number: u64) -> Option<Result<B>> {
        let entry = self.entries.remove(&number)?;
        self.ready.remove(&number);
        if let Some(iterator_state) = self.iterators.get_mut(&entry.iterator) {
            iterator_state.announced -= entry.charge;
            iterator_state.queued.remove(&number);
        }
        match entry.state {
            EntryState::Queued => None,
            EntryState::Filling(_) | EntryState::Following => {
                self.subtract_held(entry.iterator, entry.charge);
                None
            }
            EntryState::Ready(body) => {
                self.subtract_held(entry.iterator, entry.charge);
                Some(Ok(body))
            }
            EntryState::Failed(error) => Some(Err(error)),
        }
    }

    /// The next action for demanded entries. `fits(bytes, reserved)` returns whether the budget has space for `bytes`
    /// in addition to the `reserved` bytes.
    pub(super) fn next_demanded(&mut self, fits: impl Fn(u64, u64) -> bool) -> Option<Decision<B>> {
        while let Some(&number) = self.demanded.front() {
            let Some(entry) = self.entries.get(&number) else {
                self.demanded.pop_front();
                continue;
            };
            if self.reading.contains_key(&entry.object) {
                self.demanded.pop_front();
                self.follow(number);
                continue;
            }
            let exceeds_budget = !fits(entry.charge, self.reserved());
            // Evicts only entries that are used later than this one, or belong to other iterators.
            if exceeds_budget
                && let Some(last) =
                    self.ready.range(number..).next_back().copied().or_else(|| self.last_of_others(entry.iterator))
            {
                let iterator = entry.iterator;
                return Some(self.evict(last, iterator));
            }
            self.demanded.pop_front();
            return Some(Decision::Read(self.start(number, exceeds_budget)));
        }
        None
    }

    /// The next action: for demanded entries first, then for read-ahead. `fits` as in
    /// [`next_demanded`](Self::next_demanded).
    pub(super) fn next(&mut self, fits: impl Fn(u64, u64) -> bool) -> Decision<B> {
        if let Some(next) = self.next_demanded(&fits) {
            return next;
        }
        let mut by_last_use: Vec<(u64, u64)> = self
            .iterators
            .iter()
            .filter(|(_, iterator_state)| iterator_state.reads_ahead())
            .map(|(iterator, iterator_state)| (iterator_state.last_used, *iterator))
            .collect();
        // With equal times of use the older iterator comes first: the next epoch is announced while the current one is
        // read.
        by_last_use.sort_unstable_by_key(|(last_used, iterator)| (Reverse(*last_used), *iterator));
        let mut out_of_memory = false;
        for (last_used, iterator) in by_last_use {
            while let Some(number) = self.iterators[&iterator].queued.first().copied() {
                let WindowEntry { object, charge, position, .. } = self.entries[&number];
                let iterator_state = &self.iterators[&iterator];
                if !iterator_state.may_read(charge, &self.read_ahead_limit) || !iterator_state.is_due(position) {
                    break;
                }
                if !fits(charge, self.reserved()) {
                    if self.iterators[&iterator].held + charge <= self.share()
                        && let Some(last) = self.last_of_less_recent(last_used)
                    {
                        return self.evict(last, iterator);
                    }
                    out_of_memory = true;
                    break;
                }
                self.unqueue(iterator, number);
                if self.reading.contains_key(&object) {
                    self.follow(number);
                    continue;
                }
                return Decision::Read(self.start(number, false));
            }
        }
        if out_of_memory { Decision::OutOfMemory } else { Decision::Idle }
    }

    fn start(&mut self, number: u64, exceeds_budget: bool) -> CoalescedRead {
        let needed = Needed::new();
        let entries = vec![self.read(number, &needed)];
        CoalescedRead { entries, exceeds_budget, needed }
    }

    fn read(&mut self, number: u64, needed: &Arc<Needed>) -> EntryRead {
        let entry = self.entries.get_mut(&number).expect("the caller checked that it exists");
        entry.state = EntryState::Filling(needed.clone());
        let (object, loader, charge, iterator) = (entry.object, entry.loader, entry.charge, entry.iterator);
        self.add_held(iterator, charge);
        self.reading.insert(object, Vec::new());
        EntryRead { number, object, loader, reservation: Reservation::new(&self.reserved, charge) }
    }

    fn follow(&mut self, number: u64) {
        let entry = self.entries.get_mut(&number).expect("the caller checked that it exists");
        entry.state = EntryState::Following;
        entry.reservation = Some(Reservation::new(&self.reserved, entry.charge));
        let (object, charge, iterator) = (entry.object, entry.charge, entry.iterator);
        self.add_held(iterator, charge);
        self.reading.get_mut(&object).expect("the caller checked that it exists").push(number);
    }

    /// Ends a read: no further entry follows it. Returns the entries that followed, and queued entries of the same
    /// object as far as `fits` returns true: each of them receives a copy.
    pub(super) fn take_followers(&mut self, object: ObjectId, fits: impl Fn(u64, u64) -> bool) -> Vec<u64> {
        let queued: Vec<u64> = self.untaken.get(&object).into_iter().flatten().copied().collect();
        for number in queued {
            let entry = &self.entries[&number];
            if matches!(entry.state, EntryState::Queued) && fits(entry.charge, self.reserved()) {
                self.unqueue(entry.iterator, number);
                self.reading.entry(object).or_default();
                self.follow(number);
            }
        }
        let mut followers = self.reading.remove(&object).unwrap_or_default();
        followers.retain(|number| self.entries.contains_key(number));
        followers
    }

    /// Returns whether an entry exists: it may have been cancelled.
    pub(super) fn contains(&self, number: u64) -> bool {
        self.entries.contains_key(&number)
    }

    /// Sets the result of an entry that was being read, unless it was cancelled. Returns the result if a waiter is
    /// present.
    pub(super) fn complete(&mut self, number: u64, result: Result<B>) -> Option<Delivery<B, W>> {
        let entry = self.entries.get_mut(&number)?;
        // The result itself uses memory from now on.
        drop(entry.reservation.take());
        if let Some(waiter) = entry.waiter.take() {
            self.remove(number);
            return Some((waiter, result));
        }
        match result {
            Ok(body) => {
                entry.state = EntryState::Ready(body);
                self.ready.insert(number);
            }
            Err(error) => {
                let (iterator, charge) = (entry.iterator, entry.charge);
                entry.state = EntryState::Failed(error);
                self.subtract_held(iterator, charge);
            }
        }
        None
    }

    /// Queues an entry again, because the read that it followed failed or memory for its copy is missing.
    pub(super) fn requeue(&mut self, number: u64) {
        let Some(entry) = self.entries.get_mut(&number) else { return };
        entry.state = EntryState::Queued;
        drop(entry.reservation.take());
        let (iterator, charge, demanded) = (entry.iterator, entry.charge, entry.waiter.is_some());
        self.subtract_held(iterator, charge);
        if demanded {
            self.demanded.push_back(number);
        } else if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
            iterator_state.queued.insert(number);
        }
    }

    /// Removes an iterator: its demanded entries stay, its other entries are dropped. Returns their results.
    pub(super) fn cancel(&mut self, iterator: u64) -> Vec<B> {
        let Self { entries, untaken, .. } = self;
        let mut numbers = Vec::new();
        for (number, entry) in entries.iter_mut().filter(|(_, entry)| entry.iterator == iterator) {
            if entry.waiter.is_some() {
                entry.iterator = UNANNOUNCED;
            } else {
                numbers.push(*number);
                if let Some(others) = untaken.get_mut(&entry.object) {
                    others.retain(|other| other != number);
                    if others.is_empty() {
                        untaken.remove(&entry.object);
                    }
                }
            }
        }
        let mut bodies = Vec::new();
        for number in numbers {
            let entry = &self.entries[&number];
            if let EntryState::Filling(needed) = &entry.state
                && self.reading.get(&entry.object).is_none_or(Vec::is_empty)
            {
                needed.subtract();
            }
            if let Some(Ok(body)) = self.remove(number) {
                bodies.push(body);
            }
        }
        self.iterators.remove(&iterator);
        bodies
    }

    /// Starts an iterator of `loader`.
    pub(super) fn begin(&mut self, iterator: u64, loader: u64) {
        let last_used = self.clock;
        self.iterators.insert(iterator, IteratorState { loader, last_used, ..Default::default() });
    }

    pub(super) fn add_held(&mut self, iterator: u64, charge: u64) {
        if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
            iterator_state.held += charge;
            iterator_state.held_entries += 1;
        }
    }

    pub(super) fn subtract_held(&mut self, iterator: u64, charge: u64) {
        if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
            iterator_state.held -= charge;
            iterator_state.held_entries -= 1;
        }
    }

    /// Adds the entries to a demanded read that are demanded next, as long as `joins` returns true for their objects and
    /// the budget has space for them. `fits` as in [`next_demanded`](Self::next_demanded).
    pub(super) fn extend_demanded(
        &mut self,
        read: &mut CoalescedRead,
        mut joins: impl FnMut(ObjectId) -> bool,
        fits: impl Fn(u64, u64) -> bool,
    ) {
        while read.entries.len() < MAX_ENTRIES {
            let next = self.demanded.front().copied();
            let Some((number, entry)) = next.and_then(|number| Some((number, self.entries.get(&number)?))) else {
                return;
            };
            let is_separate = entry.alone || self.reading.contains_key(&entry.object);
            if is_separate || !fits(entry.charge, self.reserved()) || !joins(entry.object) {
                return;
            }
            self.demanded.pop_front();
            self.join(read, number);
        }
    }

    /// Adds announced entries to a read that is not demanded, whatever their place in the order: those whose objects and
    /// ranges are `candidates`, in the order of their distance, until `group` or the budget has no space for one. The limit
    /// of read-ahead is not observed: near it, each read would be of one entry. `fits` as in
    /// [`next_demanded`](Self::next_demanded).
    pub(super) fn extend_announced(
        &mut self,
        read: &mut CoalescedRead,
        group: &mut RangeGroup,
        candidates: impl Iterator<Item = (ObjectId, Range<u64>)>,
        fits: impl Fn(u64, u64) -> bool,
    ) {
        let Some(first) = read.entries.first().and_then(|first| self.entries.get(&first.number)) else { return };
        let Some(position) = first.position else { return };
        let (iterator, last_position) = (first.iterator, position.saturating_add(self.read_ahead_limit.reach()));
        for (object, range) in candidates.take(MAX_CANDIDATES) {
            if read.entries.len() == MAX_ENTRIES {
                return;
            }
            if group.overlaps(&range) {
                continue;
            }
            let Some(joined) = group.joined(&range) else { return };
            let Some(number) = self.joinable(object, iterator, last_position) else { continue };
            if !fits(self.entries[&number].charge, self.reserved()) {
                return;
            }
            *group = joined;
            self.unqueue(iterator, number);
            self.join(read, number);
        }
    }

    /// Returns whether a caller waits for an entry, and whether it may be read together with others.
    pub(super) fn extends(&self, number: u64) -> Option<bool> {
        self.entries.get(&number).filter(|entry| !entry.alone).map(|entry| entry.waiter.is_some())
    }

    /// The first queued entry of an object that may be read with others of its iterator, and is not after `last_position`.
    fn joinable(&self, object: ObjectId, iterator: u64, last_position: u64) -> Option<u64> {
        let joins = |number: &&u64| {
            let entry = &self.entries[number];
            entry.iterator == iterator && entry.joins() && entry.position <= Some(last_position)
        };
        let untaken = self.untaken.get(&object).filter(|_| !self.reading.contains_key(&object))?;
        untaken.iter().find(joins).copied()
    }

    fn join(&mut self, read: &mut CoalescedRead, number: u64) {
        read.needed.add();
        let entry = self.read(number, &read.needed);
        read.entries.push(entry);
    }

    /// Queues an entry again whose read together with others failed. It is read alone then.
    pub(super) fn requeue_alone(&mut self, number: u64) {
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.alone = true;
            self.requeue(number);
        }
    }

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
    pub(super) fn evict(&mut self, number: u64, winner: u64) -> Decision<B> {
        self.ready.remove(&number);
        let entry = self.entries.get_mut(&number).expect("each number in `ready` has an entry");
        let EntryState::Ready(body) = std::mem::replace(&mut entry.state, EntryState::Queued) else {
            unreachable!("each number in `ready` has a ready entry");
        };
        let (iterator, loader, charge) = (entry.iterator, entry.loader, entry.charge);
        self.subtract_held(iterator, charge);
        if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
            iterator_state.queued.insert(number);
            iterator_state.paused |= iterator != winner;
        }
        Decision::Evict(body, loader)
    }

    /// Removes an entry if its waiter has stopped waiting, as `closed` reports. Returns the waiter.
    pub(super) fn remove_abandoned(&mut self, number: u64, closed: impl Fn(&W) -> bool) -> Option<W> {
        let waiter = self.entries.get_mut(&number)?.waiter.take_if(|waiter| closed(waiter))?;
        self.remove(number);
        Some(waiter)
    }

    /// Number of entries that are announced or demanded and not taken.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether an entry is waiting to be read ahead.
    pub(super) fn is_queued(&self) -> bool {
        self.iterators.values().any(IteratorState::reads_ahead)
    }

    /// Numbers of the objects of a source that are announced or demanded and not taken.
    pub(super) fn numbers_of(&self, source: u64) -> HashSet<u64> {
        let objects = self.entries.values().map(|entry| entry.object);
        objects.filter(|object| object.source == source).map(|object| object.index).collect()
    }

    /// Bytes that the entries of an iterator hold, or will hold once they are read.
    pub(super) fn announced_bytes(&self, iterator: u64) -> u64 {
        self.iterators.get(&iterator).map_or(0, |iterator_state| iterator_state.announced)
    }

    /// Number of entries of an iterator that were taken.
    pub(super) fn taken(&self, iterator: u64) -> u64 {
        self.iterators.get(&iterator).map_or(0, |iterator_state| iterator_state.taken)
    }

    /// Bytes of entries that are ready or being read.
    pub(super) fn held(&self) -> u64 {
        let begun = |entry: &&WindowEntry<B, W>| {
            matches!(entry.state, EntryState::Filling(_) | EntryState::Following | EntryState::Ready(_))
        };
        self.entries.values().filter(begun).map(|entry| entry.charge).sum()
    }

    /// Bytes of running reads that have no memory yet.
    pub(super) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Bytes of memory that entries hold and no caller has taken.
    pub(super) fn ahead(&self) -> u64 {
        self.held().saturating_sub(self.reserved())
    }
}

#[cfg(test)]
mod properties;
