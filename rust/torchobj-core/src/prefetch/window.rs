//! What was announced, in its order, and what became of it. Pure bookkeeping: reads nothing, waits for nothing.
//!
//! A *use* is one appearance of an object in an announced order, or one that somebody asked for unannounced. It is
//! queued, filling, landed or failed, until it is taken; who takes it before it has landed leaves a wish. Two uses of an
//! object that is being read are served by one read: the later ones *follow* it, and get copies.
//!
//! Wishes come first, whatever the budget. Then the iterator that was used last reads ahead as far as the budget goes;
//! where others hold the memory that it needs, the iterator that is idle longer gives up what it has not used yet,
//! until both hold an equal share. Equal, so that two loaders that are used in turn do not take the same memory to and
//! fro. Who lost a use to another is *parked*: it reads ahead no more until it is used, or it would read the same for
//! ever.

mod eviction;
mod figures;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::sync::Notify;

use super::job::{Found, Job, Next, Object, Reservation};
use crate::error::{Error, Result};

/// The iterator of what nobody announced.
const NOBODY: u64 = 0;

#[derive(Debug)]
struct Use<B, W> {
    object: Object,
    iterator: u64,
    charge: u64,
    state: State<B>,
    /// Of a use that follows: for its copy.
    reservation: Option<Reservation>,
    wish: Option<W>,
}

#[derive(Debug)]
enum State<B> {
    Queued,
    Filling(Arc<Notify>),
    Following,
    Landed(B),
    Failed(Error),
}

#[derive(Debug, Default)]
struct Iteration {
    queued: BTreeSet<u64>,
    /// Bytes that its uses hold, or will once they are read.
    announced: u64,
    /// Bytes that those hold which were begun.
    held: u64,
    used_at: u64,
    /// It lost a use to another, and was not used since.
    parked: bool,
}

impl Iteration {
    /// Whether it has anything to read ahead, now.
    fn reads_ahead(&self) -> bool {
        !self.parked && !self.queued.is_empty()
    }
}

/// The books of a prefetcher: `B` is what a read leaves, `W` who waits for it.
#[derive(Debug)]
pub(super) struct Window<B, W> {
    uses: BTreeMap<u64, Use<B, W>>,
    /// Uses that nobody took, in order.
    open: HashMap<Object, VecDeque<u64>>,
    /// Objects that are being read, with the uses that follow.
    flights: HashMap<Object, Vec<u64>>,
    wished: VecDeque<u64>,
    landed: BTreeSet<u64>,
    iterations: HashMap<u64, Iteration>,
    reserved: Arc<AtomicU64>,
    clock: u64,
    next: u64,
}

impl<B, W> Default for Window<B, W> {
    fn default() -> Self {
        Self {
            uses: BTreeMap::new(),
            open: HashMap::new(),
            flights: HashMap::new(),
            wished: VecDeque::new(),
            landed: BTreeSet::new(),
            iterations: HashMap::new(),
            reserved: Arc::default(),
            clock: 0,
            next: 0,
        }
    }
}

/// Somebody who waited, and what for.
pub(super) type Delivery<B, W> = (W, Result<B>);

impl<B, W> Window<B, W> {
    /// Appends a use to the order of `iterator`. `charge` is what it will take of the budget.
    pub(super) fn announce(&mut self, iterator: u64, object: Object, charge: u64) {
        let number = self.add(iterator, object, charge, None);
        self.open.entry(object).or_default().push_back(number);
        let clock = self.clock;
        let iteration =
            self.iterations.entry(iterator).or_insert_with(|| Iteration { used_at: clock, ..Default::default() });
        iteration.queued.insert(number);
        iteration.announced += charge;
    }

    fn add(&mut self, iterator: u64, object: Object, charge: u64, wish: Option<W>) -> u64 {
        self.next += 1;
        self.uses.insert(self.next, Use { object, iterator, charge, state: State::Queued, reservation: None, wish });
        self.next
    }

    /// Takes the next use of `object`. What has landed or failed is delivered at once; else `wish` is kept.
    pub(super) fn take(&mut self, object: Object, charge: u64, wish: W) -> (Found, Option<Delivery<B, W>>) {
        self.clock += 1;
        let Some(number) = self.first_open(object) else {
            let number = self.add(NOBODY, object, charge, Some(wish));
            self.wished.push_back(number);
            return (Found::Missed, None);
        };
        let clock = self.clock;
        let used = self.uses.get_mut(&number).expect("what is open is there");
        let iterator = used.iterator;
        if let Some(iteration) = self.iterations.get_mut(&iterator) {
            iteration.used_at = clock;
            iteration.parked = false;
        }
        match &used.state {
            State::Landed(_) | State::Failed(_) => {
                let hit = matches!(used.state, State::Landed(_));
                let result = self.remove(number).expect("it is there and done");
                (if hit { Found::Hit } else { Found::Late }, Some((wish, result)))
            }
            State::Filling(_) | State::Following => {
                used.wish = Some(wish);
                (Found::Late, None)
            }
            State::Queued => {
                used.wish = Some(wish);
                self.wished.push_back(number);
                if let Some(iteration) = self.iterations.get_mut(&iterator) {
                    iteration.queued.remove(&number);
                }
                (Found::Queued, None)
            }
        }
    }

    fn first_open(&mut self, object: Object) -> Option<u64> {
        let open = self.open.get_mut(&object)?;
        let number = open.pop_front();
        if open.is_empty() {
            self.open.remove(&object);
        }
        number
    }

    /// Removes a use; its result, if it was done.
    fn remove(&mut self, number: u64) -> Option<Result<B>> {
        let used = self.uses.remove(&number)?;
        self.landed.remove(&number);
        if let Some(iteration) = self.iterations.get_mut(&used.iterator) {
            iteration.announced -= used.charge;
            iteration.queued.remove(&number);
        }
        match used.state {
            State::Queued => None,
            State::Filling(_) | State::Following => {
                self.release(used.iterator, used.charge);
                None
            }
            State::Landed(body) => {
                self.release(used.iterator, used.charge);
                Some(Ok(body))
            }
            State::Failed(error) => Some(Err(error)),
        }
    }

    fn hold(&mut self, iterator: u64, charge: u64) {
        if let Some(iteration) = self.iterations.get_mut(&iterator) {
            iteration.held += charge;
        }
    }

    fn release(&mut self, iterator: u64, charge: u64) {
        if let Some(iteration) = self.iterations.get_mut(&iterator) {
            iteration.held -= charge;
        }
    }

    /// What to do next for those who wait, where `fits` tells whether the budget has room for so many bytes beside so
    /// many reserved ones.
    pub(super) fn next_wished(&mut self, fits: impl Fn(u64, u64) -> bool) -> Option<Next<B>> {
        while let Some(&number) = self.wished.front() {
            let Some(used) = self.uses.get(&number) else {
                self.wished.pop_front();
                continue;
            };
            if self.flights.contains_key(&used.object) {
                self.wished.pop_front();
                self.follow(number);
                continue;
            }
            let overdraws = !fits(used.charge, self.reserved());
            // Never what is used earlier than this.
            if overdraws
                && let Some(last) =
                    self.landed.range(number..).next_back().copied().or_else(|| self.last_of_others(used.iterator))
            {
                return Some(Next::Evict(self.evict(last, used.iterator)));
            }
            self.wished.pop_front();
            return Some(Next::Start(self.start(number, overdraws)));
        }
        None
    }

    /// What to do next, for those who wait and then ahead of them; `fits` as for those.
    pub(super) fn next(&mut self, fits: impl Fn(u64, u64) -> bool) -> Next<B> {
        if let Some(next) = self.next_wished(&fits) {
            return next;
        }
        let mut by_use: Vec<(u64, u64)> = self
            .iterations
            .iter()
            .filter(|(_, iteration)| iteration.reads_ahead())
            .map(|(iterator, iteration)| (iteration.used_at, *iterator))
            .collect();
        // Of those used at one time the older first: a next epoch is announced while this one is read.
        by_use.sort_unstable_by_key(|(used_at, iterator)| (Reverse(*used_at), *iterator));
        let mut starved = false;
        for (used_at, iterator) in by_use {
            while let Some(number) = self.iterations[&iterator].queued.first().copied() {
                let (object, charge) = (self.uses[&number].object, self.uses[&number].charge);
                if !fits(charge, self.reserved()) {
                    if self.iterations[&iterator].held + charge <= self.share()
                        && let Some(last) = self.last_of_idler(used_at)
                    {
                        return Next::Evict(self.evict(last, iterator));
                    }
                    starved = true;
                    break;
                }
                if let Some(iteration) = self.iterations.get_mut(&iterator) {
                    iteration.queued.remove(&number);
                }
                if self.flights.contains_key(&object) {
                    self.follow(number);
                    continue;
                }
                return Next::Start(self.start(number, false));
            }
        }
        if starved { Next::Starved } else { Next::Idle }
    }

    fn start(&mut self, number: u64, overdraws: bool) -> Job {
        let cancelled = Arc::new(Notify::new());
        let used = self.uses.get_mut(&number).expect("the caller looked");
        used.state = State::Filling(cancelled.clone());
        let (object, charge, iterator) = (used.object, used.charge, used.iterator);
        self.hold(iterator, charge);
        self.flights.insert(object, Vec::new());
        let reservation = Reservation::new(&self.reserved, charge);
        Job { number, object, reservation, overdraws, cancelled }
    }

    fn follow(&mut self, number: u64) {
        let used = self.uses.get_mut(&number).expect("the caller looked");
        used.state = State::Following;
        used.reservation = Some(Reservation::new(&self.reserved, used.charge));
        let (object, charge, iterator) = (used.object, used.charge, used.iterator);
        self.hold(iterator, charge);
        self.flights.get_mut(&object).expect("the caller looked").push(number);
    }

    /// Ends the flight of a job: from now on nobody follows it. The uses that did, with those that were announced and not
    /// begun, as far as `fits` says that there is memory, as in `next`: each is to get a copy.
    pub(super) fn followers(&mut self, object: Object, fits: impl Fn(u64, u64) -> bool) -> Vec<u64> {
        let queued: Vec<u64> = self.open.get(&object).into_iter().flatten().copied().collect();
        for number in queued {
            let used = &self.uses[&number];
            if matches!(used.state, State::Queued) && fits(used.charge, self.reserved()) {
                let iterator = used.iterator;
                if let Some(iteration) = self.iterations.get_mut(&iterator) {
                    iteration.queued.remove(&number);
                }
                self.flights.entry(object).or_default();
                self.follow(number);
            }
        }
        let mut followers = self.flights.remove(&object).unwrap_or_default();
        followers.retain(|number| self.uses.contains_key(number));
        followers
    }

    /// Whether there is such a use yet: nobody may want it any more.
    pub(super) fn wants(&self, number: u64) -> bool {
        self.uses.contains_key(&number)
    }

    /// Says what became of a use that was being read. Somebody may have waited for it; nobody may want it any more.
    pub(super) fn done(&mut self, number: u64, result: Result<B>) -> Option<Delivery<B, W>> {
        let used = self.uses.get_mut(&number)?;
        // Its memory counts itself now.
        drop(used.reservation.take());
        if let Some(wish) = used.wish.take() {
            self.remove(number);
            return Some((wish, result));
        }
        match result {
            Ok(body) => {
                used.state = State::Landed(body);
                self.landed.insert(number);
            }
            Err(error) => {
                let (iterator, charge) = (used.iterator, used.charge);
                used.state = State::Failed(error);
                self.release(iterator, charge);
            }
        }
        None
    }

    /// Queues a use again whose leader failed, or for which there was no memory.
    pub(super) fn again(&mut self, number: u64) {
        let Some(used) = self.uses.get_mut(&number) else { return };
        used.state = State::Queued;
        drop(used.reservation.take());
        let (iterator, charge, wished) = (used.iterator, used.charge, used.wish.is_some());
        self.release(iterator, charge);
        if wished {
            self.wished.push_back(number);
        } else if let Some(iteration) = self.iterations.get_mut(&iterator) {
            iteration.queued.insert(number);
        }
    }

    /// Forgets an iterator: what nobody took of it is dropped, what somebody waits for stays.
    pub(super) fn cancel(&mut self, iterator: u64) -> Vec<B> {
        let Self { uses, open, .. } = self;
        let mut numbers = Vec::new();
        for (number, used) in uses.iter_mut().filter(|(_, used)| used.iterator == iterator) {
            if used.wish.is_some() {
                used.iterator = NOBODY;
            } else {
                numbers.push(*number);
                if let Some(others) = open.get_mut(&used.object) {
                    others.retain(|other| other != number);
                    if others.is_empty() {
                        open.remove(&used.object);
                    }
                }
            }
        }
        let mut bodies = Vec::new();
        for number in numbers {
            let used = &self.uses[&number];
            if let State::Filling(cancelled) = &used.state
                && self.flights.get(&used.object).is_none_or(Vec::is_empty)
            {
                cancelled.notify_one();
            }
            if let Some(Ok(body)) = self.remove(number) {
                bodies.push(body);
            }
        }
        self.iterations.remove(&iterator);
        bodies
    }
}

#[cfg(test)]
mod properties;
