//! Checks the state of a window after random announcements, takes, reads, evictions and cancellations.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use futures_util::FutureExt;
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::error::{Error, ErrorKind, Operation};

const BUDGET: u64 = 12;
const MAX_READ_BYTES: u64 = 9;
const LIMIT: usize = 3;
const OBJECTS: u64 = 6;
const ITERATORS: u64 = 3;

/// A result; adds its size to `used` while it lives.
#[derive(Debug)]
struct FilledSegment {
    object: ObjectId,
    used: Rc<Cell<u64>>,
}

fn object(index: u64) -> ObjectId {
    ObjectId { source: 1, index }
}

/// The last object is larger than the budget.
fn charge(object: ObjectId) -> u64 {
    [1, 2, 3, 5, 7, 20][usize::try_from(object.index % OBJECTS).unwrap()]
}

impl FilledSegment {
    fn new(object: ObjectId, used: &Rc<Cell<u64>>) -> Self {
        used.set(used.get() + charge(object));
        Self { object, used: used.clone() }
    }
}

impl Drop for FilledSegment {
    fn drop(&mut self) {
        self.used.set(self.used.get() - charge(self.object));
    }
}

/// How a read ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Read,
    Failed,
    /// Each of its entries must be read alone.
    Separate,
}

#[derive(Clone, Debug)]
enum Step {
    Announce { iterator: u64, index: u64 },
    Take { index: u64 },
    Pump,
    Finish { which: Index, end: End },
    Cancel { iterator: u64 },
    Drop { which: Index },
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![8 => Just(End::Read), 1 => Just(End::Failed), 1 => Just(End::Separate)]
}

fn step() -> impl Strategy<Value = Step> {
    let index = 0..OBJECTS;
    prop_oneof![
        6 => (1..=ITERATORS, index.clone()).prop_map(|(iterator, index)| Step::Announce { iterator, index }),
        4 => index.prop_map(|index| Step::Take { index }),
        4 => Just(Step::Pump),
        5 => (any::<Index>(), end()).prop_map(|(which, end)| Step::Finish { which, end }),
        1 => (1..=ITERATORS).prop_map(|iterator| Step::Cancel { iterator }),
        3 => any::<Index>().prop_map(|which| Step::Drop { which }),
    ]
}

/// The place of an object in a file that has all of them, without gaps.
fn range(object: ObjectId) -> Range<u64> {
    let start = (0..object.index).map(|index| charge(self::object(index))).sum();
    start..start + charge(object)
}

/// The objects before and after another, the nearest ones first.
fn neighbours(of: ObjectId) -> [Vec<(ObjectId, Range<u64>)>; 2] {
    let within = |index: u64| (object(index), range(object(index)));
    let is_known = of.source == 1 && of.index < OBJECTS;
    let known = if is_known { of.index + 1..OBJECTS } else { 0..0 };
    let before = if is_known { 0..of.index } else { 0..0 };
    [before.rev().map(within).collect(), known.map(within).collect()]
}

/// A prefetcher without threads.
#[derive(Default)]
struct Simulation {
    window: Window<FilledSegment, u64>,
    used: Rc<Cell<u64>>,
    reading: Vec<CoalescedRead>,
    /// Waiters without a result, and their objects.
    waiting: BTreeMap<u64, ObjectId>,
    taken: Vec<FilledSegment>,
    waiters: u64,
}

impl Simulation {
    fn fits(&self) -> impl Fn(u64, u64) -> bool + use<> {
        let used = self.used.clone();
        move |bytes, reserved| used.get() + reserved + bytes <= BUDGET
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Announce { iterator, index } => {
                self.window.announce(iterator, object(index), charge(object(index)), true)
            }
            Step::Take { index } => self.take(object(index)),
            Step::Pump => self.pump(),
            Step::Finish { which, end } if !self.reading.is_empty() => {
                self.finish(which.index(self.reading.len()), end)
            }
            Step::Cancel { iterator } => drop(self.window.cancel(iterator)),
            Step::Drop { which } if !self.taken.is_empty() => {
                self.taken.swap_remove(which.index(self.taken.len()));
            }
            Step::Finish { .. } | Step::Drop { .. } => {}
        }
        self.check();
    }

    fn take(&mut self, object: ObjectId) {
        self.waiters += 1;
        self.waiting.insert(self.waiters, object);
        let (found, delivery) = self.window.take(object, 0, charge(object), self.waiters);
        assert_eq!(found == TakeOutcome::Hit, matches!(delivery, Some((_, Ok(_)))));
        self.deliver(delivery);
    }

    fn deliver(&mut self, delivery: Option<Delivery<FilledSegment, u64>>) {
        let Some((waiter, result)) = delivery else { return };
        let object = self.waiting.remove(&waiter).expect("each waiter gets one result");
        if let Ok(body) = result {
            assert_eq!(body.object, object);
            self.taken.push(body);
        }
    }

    /// Starts every read that can be started.
    fn pump(&mut self) {
        let mut evicted = 0;
        while self.reading.len() < LIMIT {
            let fits = self.fits();
            let available = BUDGET.saturating_sub(self.used.get() + self.window.reserved());
            match self.window.next(fits) {
                Decision::Read(mut read) => {
                    self.extend(&mut read);
                    let charged: u64 = read.entries.iter().map(|reading| charge(reading.object)).sum();
                    let exceeds_budget = read.exceeds_budget && read.entries.len() == 1;
                    assert!(exceeds_budget || charged <= available, "announced work exceeds the budget");
                    let is_new = |other: &EntryRead| read.entries.iter().all(|reading| reading.object != other.object);
                    assert!(self.entries_read().all(is_new), "it is being read");
                    self.reading.push(read);
                }
                Decision::Evict(body, _) => {
                    drop(body);
                    evicted += 1;
                    assert!(evicted < 10_000, "evicts and reads for ever");
                }
                Decision::Idle => {
                    assert!(self.window.iterators.values().all(|of| of.queued.is_empty() || of.paused));
                    break;
                }
                Decision::OutOfMemory => break,
            }
        }
        if self.reading.is_empty() {
            assert!(self.waiting.is_empty(), "a waiter without a running read");
        }
    }

    /// Adds entries to a read, and checks that they are neighbours.
    fn extend(&mut self, read: &mut CoalescedRead) {
        let EntryRead { number, object: first, .. } = read.entries[0];
        let mut group = RangeGroup::new(&range(first), MAX_READ_BYTES);
        let fits = self.fits();
        let [before, after] = neighbours(first);
        let is_demanded = self.window.extends(number);
        match is_demanded {
            Some(true) => self.window.extend_demanded(read, |next| group.join(&range(next)), fits),
            Some(false) => {
                self.window.extend_announced(read, &mut group, after.into_iter(), &fits);
                self.window.extend_announced(read, &mut group, before.into_iter(), &fits);
            }
            None => {}
        }
        assert!(is_demanded.is_some() || read.entries.len() == 1, "it is read alone");
        let of_first = self.window.entries[&number].iterator;
        for entry in &read.entries {
            let entry = &self.window.entries[&entry.number];
            assert_eq!(entry.waiter.is_some(), self.window.entries[&number].waiter.is_some());
            assert!(entry.waiter.is_some() || entry.iterator == of_first);
        }
        let ranges = || read.entries.iter().map(|entry| range(entry.object));
        let start = ranges().map(|range| range.start).min().expect("a read has an entry");
        let end = ranges().map(|range| range.end).max().expect("a read has an entry");
        assert!(read.entries.len() == 1 || end - start <= MAX_READ_BYTES, "the read is too large");
        let bytes: u64 = ranges().map(|range| range.end - range.start).sum();
        assert!(bytes <= end - start, "the ranges overlap");
    }

    /// The entries that are being read.
    fn entries_read(&self) -> impl Iterator<Item = &EntryRead> {
        self.reading.iter().flat_map(|read| &read.entries)
    }

    /// Does what `Source::run` of the prefetcher does.
    fn finish(&mut self, which: usize, end: End) {
        let CoalescedRead { entries, needed, .. } = self.reading.swap_remove(which);
        let is_needed = needed.none().now_or_never().is_none();
        let end = if end == End::Separate && entries.len() == 1 { End::Failed } else { end };
        for reading in entries {
            self.finish_entry(reading, end, is_needed);
        }
    }

    fn finish_entry(&mut self, reading: EntryRead, end: End, is_needed: bool) {
        let EntryRead { number, object, reservation, .. } = reading;
        let result = match end {
            End::Read => Some(Ok(FilledSegment::new(object, &self.used))),
            End::Failed => Some(Err(Error::new(ErrorKind::NotFound, Operation::Get, "", "injected"))),
            End::Separate => None,
        };
        let result = result.filter(|_| is_needed);
        drop(reservation);
        let read = matches!(result, Some(Ok(_)));
        let fits = self.fits();
        let followers = self.window.take_followers(object, |bytes, reserved| read && fits(bytes, reserved));
        let copies: Vec<_> = followers
            .into_iter()
            .map(|number| (number, read.then(|| FilledSegment::new(object, &self.used))))
            .collect();
        match result {
            Some(result) => {
                let delivery = self.window.complete(number, result);
                self.deliver(delivery);
            }
            None => {
                assert!(is_needed || !self.window.contains(number), "a cancelled read has no entry");
                self.window.requeue_alone(number);
            }
        }
        for (number, copy) in copies {
            match copy {
                Some(body) => {
                    let delivery = self.window.complete(number, Ok(body));
                    self.deliver(delivery);
                }
                None => self.window.requeue(number),
            }
        }
    }

    /// Asserts that the state is consistent.
    fn check(&self) {
        let Window { entries, untaken, reading, demanded, ready, iterators, .. } = &self.window;
        let sum = |chosen: &dyn Fn(&WindowEntry<FilledSegment, u64>) -> bool| -> u64 {
            entries.values().filter(|used| chosen(used)).map(|used| used.charge).sum()
        };
        let holds = |used: &WindowEntry<FilledSegment, u64>| {
            matches!(used.state, EntryState::Filling(_) | EntryState::Following | EntryState::Ready(_))
        };
        for (iterator, iterator_state) in iterators {
            assert_eq!(iterator_state.announced, sum(&|used| used.iterator == *iterator));
            assert_eq!(iterator_state.held, sum(&|used| used.iterator == *iterator && holds(used)));
            let queued = |used: &WindowEntry<FilledSegment, u64>| {
                used.iterator == *iterator && used.waiter.is_none() && matches!(used.state, EntryState::Queued)
            };
            let expected: BTreeSet<u64> =
                entries.iter().filter(|(_, used)| queued(used)).map(|(number, _)| *number).collect();
            assert_eq!(iterator_state.queued, expected);
        }
        let expected: BTreeSet<u64> = entries
            .iter()
            .filter(|(_, used)| matches!(used.state, EntryState::Ready(_)))
            .map(|(number, _)| *number)
            .collect();
        assert_eq!(*ready, expected);
        for (object, numbers) in untaken {
            assert!(!numbers.is_empty() && numbers.iter().is_sorted());
            assert!(numbers.iter().all(|number| entries[number].object == *object && entries[number].waiter.is_none()));
        }
        assert_eq!(
            untaken.values().map(VecDeque::len).sum::<usize>(),
            entries.values().filter(|used| used.waiter.is_none()).count()
        );
        let waited: Vec<u64> = entries.values().filter_map(|used| used.waiter).collect();
        assert_eq!(waited.len(), self.waiting.len());
        assert!(waited.iter().all(|waiter| self.waiting.contains_key(waiter)));
        // Each waiter has an entry that will be read.
        for (number, used) in entries.iter().filter(|(_, used)| used.waiter.is_some()) {
            let will_be_read = match used.state {
                EntryState::Queued => demanded.contains(number),
                EntryState::Filling(_) => self.entries_read().any(|reading| reading.number == *number),
                EntryState::Following => reading[&used.object].contains(number),
                EntryState::Ready(_) | EntryState::Failed(_) => false,
            };
            assert!(will_be_read, "{used:?}");
        }
        let is_read = |object: &ObjectId| self.entries_read().any(|reading| reading.object == *object);
        assert!(reading.keys().all(is_read));
        let following = sum(&|used| matches!(used.state, EntryState::Following));
        let reading: u64 = self.entries_read().map(|reading| reading.reservation.bytes).sum();
        assert_eq!(self.window.reserved(), following + reading);
    }

    /// Asserts that every waiter gets its result, and that nothing remains.
    fn end(&mut self) {
        for _ in 0..10_000 {
            self.pump();
            self.check();
            if self.reading.is_empty() {
                break;
            }
            self.finish(0, End::Read);
        }
        assert!(self.reading.is_empty() && self.waiting.is_empty());
        for iterator in 1..=ITERATORS {
            drop(self.window.cancel(iterator));
            assert_eq!(self.window.announced_bytes(iterator), 0);
        }
        self.taken.clear();
        assert_eq!((self.window.len(), self.window.held(), self.window.reserved(), self.used.get()), (0, 0, 0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn each_waiter_gets_one_result_and_the_state_stays_consistent(steps in prop::collection::vec(step(), 1..120)) {
        let mut simulation = Simulation::default();
        for step in steps {
            simulation.step(step);
        }
        simulation.end();
    }
}

/// Runs all reads that can be started. Returns their number.
fn settle(simulation: &mut Simulation) -> u64 {
    for read in 0.. {
        simulation.pump();
        if simulation.reading.is_empty() {
            return read;
        }
        simulation.finish(0, End::Read);
    }
    unreachable!()
}

#[test]
fn iterators_used_in_turn_do_not_evict_each_other() {
    let mut simulation = Simulation::default();
    // A third of the budget is held by callers.
    simulation.taken =
        vec![FilledSegment::new(object(1), &simulation.used), FilledSegment::new(object(1), &simulation.used)];
    // Objects of one byte, each announced once.
    let nth = |iterator: u64, number: u64| ObjectId { source: iterator, index: OBJECTS * number };
    for iterator in [1, 2] {
        (0..60).for_each(|number| simulation.window.announce(iterator, nth(iterator, number), 1, true));
    }
    let mut read = settle(&mut simulation);
    for number in 0..60 {
        for iterator in [1, 2] {
            simulation.take(nth(iterator, number));
            read += settle(&mut simulation);
            simulation.taken.truncate(2);
            read += settle(&mut simulation);
        }
    }
    // Each object once, and those that one iterator gave up when the other was first used.
    assert!((120..=126).contains(&read), "{read} reads of 120 objects");
    simulation.end();
}

#[test]
fn entries_of_an_idle_iterator_are_reread_at_most_once_per_use() {
    let mut simulation = Simulation::default();
    let nth = |iterator: u64, number: u64| ObjectId { source: iterator, index: OBJECTS * number };
    (0..BUDGET).for_each(|number| simulation.window.announce(1, nth(1, number), 1, true));
    assert_eq!(settle(&mut simulation), BUDGET);
    // Unannounced objects take memory from the idle iterator too.
    for number in 0..20 {
        simulation.take(nth(3, number));
        assert_eq!(settle(&mut simulation), 1, "object {number}");
        simulation.taken.clear();
        assert_eq!(settle(&mut simulation), 0, "object {number}");
    }
    for used in 0..3 {
        (0..40).for_each(|number| simulation.window.announce(2, nth(2, number), 1, true));
        let mut read = 0;
        for number in 0..40 {
            simulation.take(nth(2, number));
            read += settle(&mut simulation);
            simulation.taken.clear();
            read += settle(&mut simulation);
        }
        assert_eq!(read, 40, "only those of the other iterator, after {used} entries of the idle one");
        simulation.take(nth(1, used));
        read = settle(&mut simulation);
        simulation.taken.clear();
        read += settle(&mut simulation);
        assert!((1..=BUDGET).contains(&read), "{read} reads for use {used} of the idle one");
    }
    simulation.end();
}

#[test]
fn following_entries_are_reserved_before_their_copies_exist() {
    let mut simulation = Simulation::default();
    (0..9).for_each(|_| simulation.window.announce(1, object(2), charge(object(2)), true));
    simulation.pump();
    assert_eq!(simulation.window.reserved(), BUDGET);
    simulation.finish(0, End::Read);
    assert_eq!((simulation.used.get(), simulation.window.reserved()), (BUDGET, 0));
    simulation.end();
}

/// The objects of the read that is started next.
fn started(window: &mut Window<FilledSegment, u64>) -> Option<Vec<u64>> {
    let Decision::Read(mut read) = window.next(|_, _| true) else { return None };
    let EntryRead { number, object: first, .. } = read.entries[0];
    let mut group = RangeGroup::new(&range(first), MAX_READ_BYTES);
    if window.extends(number) == Some(false) {
        for neighbours in neighbours(first) {
            window.extend_announced(&mut read, &mut group, neighbours.into_iter(), |_, _| true);
        }
    }
    Some(read.entries.iter().map(|entry| entry.object.index).collect())
}

#[test]
fn neighbours_are_read_together_in_any_order() {
    let mut window = Window::default();
    for index in [1, 4, 3, 0] {
        window.announce(1, object(index), charge(object(index)), true);
    }
    assert_eq!(started(&mut window), Some(vec![1, 0]));
    assert_eq!(started(&mut window), Some(vec![4]));
    assert_eq!(started(&mut window), Some(vec![3]));
    assert_eq!(started(&mut window), None);
}

#[test]
fn a_demanded_entry_is_not_read_with_others_that_are_only_announced() {
    let mut window = Window::default();
    (0..3).for_each(|index| window.announce(1, object(index), charge(object(index)), true));
    let _ = window.take(object(1), 0, charge(object(1)), 7);
    assert_eq!(started(&mut window), Some(vec![1]));
}

#[test]
fn an_entry_far_behind_in_the_order_is_read_by_itself() {
    let mut window = Window::default();
    let reach = ReadAheadLimit::default().reach();
    window.announce(1, object(0), charge(object(0)), true);
    window.announce(1, object(9), reach, true);
    window.announce(1, object(1), charge(object(1)), true);
    assert_eq!(started(&mut window), Some(vec![0]));
}

#[test]
fn the_later_half_of_many_ranges_is_left_for_reads_of_the_earlier_half() {
    let mut window = Window::<FilledSegment, u64>::default();
    let nth = |source, index| ObjectId { source, index };
    for source in [2, 3] {
        (0..200).for_each(|index| window.announce(source, nth(source, index), 1, source == 2));
    }
    let mut counts = [0, 0];
    while let Decision::Read(read) = window.next(|_, _| true) {
        counts[usize::from(read.entries[0].object.source == 3)] += 1;
    }
    assert_eq!(counts, [101, 200]);
}
