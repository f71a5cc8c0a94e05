//! The books against what they are books of, whatever is announced, taken, read, given up and cancelled, in any order.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use futures_util::FutureExt;
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::error::{ErrorKind, Operation};

const BUDGET: u64 = 12;
const LIMIT: usize = 3;
const OBJECTS: u64 = 6;
const ITERATORS: u64 = 3;

/// A body: counts in `used` for as long as it is there.
#[derive(Debug)]
struct Body {
    object: Object,
    used: Rc<Cell<u64>>,
}

fn object(index: u64) -> Object {
    Object { source: 1, index }
}

/// The last one is larger than the budget.
fn charge(object: Object) -> u64 {
    [1, 2, 3, 5, 7, 20][usize::try_from(object.index % OBJECTS).unwrap()]
}

impl Body {
    fn new(object: Object, used: &Rc<Cell<u64>>) -> Self {
        used.set(used.get() + charge(object));
        Self { object, used: used.clone() }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        self.used.set(self.used.get() - charge(self.object));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Announce { iterator: u64, index: u64 },
    Take { index: u64 },
    Pump,
    Finish { which: Index, ok: bool },
    Cancel { iterator: u64 },
    Drop { which: Index },
}

fn step() -> impl Strategy<Value = Step> {
    let index = 0..OBJECTS;
    prop_oneof![
        6 => (1..=ITERATORS, index.clone()).prop_map(|(iterator, index)| Step::Announce { iterator, index }),
        4 => index.prop_map(|index| Step::Take { index }),
        4 => Just(Step::Pump),
        5 => (any::<Index>(), prop::bool::weighted(0.8)).prop_map(|(which, ok)| Step::Finish { which, ok }),
        1 => (1..=ITERATORS).prop_map(|iterator| Step::Cancel { iterator }),
        3 => any::<Index>().prop_map(|which| Step::Drop { which }),
    ]
}

/// A prefetcher without threads.
#[derive(Default)]
struct World {
    window: Window<Body, u64>,
    used: Rc<Cell<u64>>,
    reading: Vec<Job>,
    /// Wishes that were not delivered, and what they are for.
    waiting: BTreeMap<u64, Object>,
    taken: Vec<Body>,
    wishes: u64,
}

impl World {
    fn fits(&self) -> impl Fn(u64, u64) -> bool + use<> {
        let used = self.used.clone();
        move |bytes, reserved| used.get() + reserved + bytes <= BUDGET
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Announce { iterator, index } => self.window.announce(iterator, object(index), charge(object(index))),
            Step::Take { index } => self.take(object(index)),
            Step::Pump => self.pump(),
            Step::Finish { which, ok } if !self.reading.is_empty() => self.finish(which.index(self.reading.len()), ok),
            Step::Cancel { iterator } => drop(self.window.cancel(iterator)),
            Step::Drop { which } if !self.taken.is_empty() => {
                self.taken.swap_remove(which.index(self.taken.len()));
            }
            Step::Finish { .. } | Step::Drop { .. } => {}
        }
        self.check();
    }

    fn take(&mut self, object: Object) {
        self.wishes += 1;
        self.waiting.insert(self.wishes, object);
        let (found, delivery) = self.window.take(object, charge(object), self.wishes);
        assert_eq!(found == Found::Hit, matches!(delivery, Some((_, Ok(_)))));
        self.deliver(delivery);
    }

    fn deliver(&mut self, delivery: Option<Delivery<Body, u64>>) {
        let Some((wish, result)) = delivery else { return };
        let object = self.waiting.remove(&wish).expect("a wish is delivered once");
        if let Ok(body) = result {
            assert_eq!(body.object, object);
            self.taken.push(body);
        }
    }

    /// Starts what can be started.
    fn pump(&mut self) {
        let mut evicted = 0;
        while self.reading.len() < LIMIT {
            let fits = self.fits();
            let room = BUDGET.saturating_sub(self.used.get() + self.window.reserved());
            match self.window.next(fits) {
                Next::Start(job) => {
                    assert!(job.overdraws || charge(job.object) <= room, "announced work overdraws the budget");
                    assert!(self.reading.iter().all(|other| other.object != job.object), "it is being read");
                    self.reading.push(job);
                }
                Next::Evict(body) => {
                    drop(body);
                    evicted += 1;
                    assert!(evicted < 10_000, "it gives up and reads again for ever");
                }
                Next::Idle => {
                    assert!(self.window.iterations.values().all(|of| of.queued.is_empty() || of.parked));
                    break;
                }
                Next::Starved => break,
            }
        }
        if self.reading.is_empty() {
            assert!(self.waiting.is_empty(), "somebody waits, and nothing is read");
        }
    }

    /// As `drive` does.
    fn finish(&mut self, which: usize, ok: bool) {
        let Job { number, object, reservation, cancelled, .. } = self.reading.swap_remove(which);
        let result = cancelled.notified().now_or_never().is_none().then(|| match ok {
            true => Ok(Body::new(object, &self.used)),
            false => Err(Error::new(ErrorKind::NotFound, Operation::Get, "", "injected")),
        });
        drop(reservation);
        let read = matches!(result, Some(Ok(_)));
        let fits = self.fits();
        let followers = self.window.followers(object, |bytes, reserved| read && fits(bytes, reserved));
        let copies: Vec<_> =
            followers.into_iter().map(|number| (number, read.then(|| Body::new(object, &self.used)))).collect();
        if let Some(result) = result {
            let delivery = self.window.done(number, result);
            self.deliver(delivery);
        }
        for (number, copy) in copies {
            match copy {
                Some(body) => {
                    let delivery = self.window.done(number, Ok(body));
                    self.deliver(delivery);
                }
                None => self.window.again(number),
            }
        }
    }

    /// The books are right.
    fn check(&self) {
        let Window { uses, open, flights, wished, landed, iterations, .. } = &self.window;
        let sum = |chosen: &dyn Fn(&Use<Body, u64>) -> bool| -> u64 {
            uses.values().filter(|used| chosen(used)).map(|used| used.charge).sum()
        };
        let holds =
            |used: &Use<Body, u64>| matches!(used.state, State::Filling(_) | State::Following | State::Landed(_));
        for (iterator, iteration) in iterations {
            assert_eq!(iteration.announced, sum(&|used| used.iterator == *iterator));
            assert_eq!(iteration.held, sum(&|used| used.iterator == *iterator && holds(used)));
            let queued = |used: &Use<Body, u64>| {
                used.iterator == *iterator && used.wish.is_none() && matches!(used.state, State::Queued)
            };
            let expected: BTreeSet<u64> =
                uses.iter().filter(|(_, used)| queued(used)).map(|(number, _)| *number).collect();
            assert_eq!(iteration.queued, expected);
        }
        let expected: BTreeSet<u64> =
            uses.iter().filter(|(_, used)| matches!(used.state, State::Landed(_))).map(|(number, _)| *number).collect();
        assert_eq!(*landed, expected);
        for (object, numbers) in open {
            assert!(!numbers.is_empty() && numbers.iter().is_sorted());
            assert!(numbers.iter().all(|number| uses[number].object == *object && uses[number].wish.is_none()));
        }
        assert_eq!(
            open.values().map(VecDeque::len).sum::<usize>(),
            uses.values().filter(|used| used.wish.is_none()).count()
        );
        let waited: Vec<u64> = uses.values().filter_map(|used| used.wish).collect();
        assert_eq!(waited.len(), self.waiting.len());
        assert!(waited.iter().all(|wish| self.waiting.contains_key(wish)));
        // Somebody sees to each who waits.
        for (number, used) in uses.iter().filter(|(_, used)| used.wish.is_some()) {
            let seen = match used.state {
                State::Queued => wished.contains(number),
                State::Filling(_) => self.reading.iter().any(|job| job.number == *number),
                State::Following => flights[&used.object].contains(number),
                State::Landed(_) | State::Failed(_) => false,
            };
            assert!(seen, "{used:?}");
        }
        assert!(flights.keys().all(|object| self.reading.iter().any(|job| job.object == *object)));
        let following = sum(&|used| matches!(used.state, State::Following));
        let reading: u64 = self.reading.iter().map(|job| job.reservation.bytes()).sum();
        assert_eq!(self.window.reserved(), following + reading);
    }

    /// All that anybody waits for comes, and nothing is left.
    fn end(&mut self) {
        for _ in 0..10_000 {
            self.pump();
            self.check();
            if self.reading.is_empty() {
                break;
            }
            self.finish(0, true);
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
    fn who_waits_gets_it_once_and_the_books_are_right(steps in prop::collection::vec(step(), 1..120)) {
        let mut world = World::default();
        for step in steps {
            world.step(step);
        }
        world.end();
    }
}

/// Reads everything that can be read. How much that was.
fn settle(world: &mut World) -> u64 {
    for read in 0.. {
        world.pump();
        if world.reading.is_empty() {
            return read;
        }
        world.finish(0, true);
    }
    unreachable!()
}

#[test]
fn two_iterators_that_are_used_in_turn_do_not_take_each_others_memory() {
    let mut world = World::default();
    // A third of the budget is somebody else's.
    world.taken = vec![Body::new(object(1), &world.used), Body::new(object(1), &world.used)];
    // Objects of one byte, each used once.
    let nth = |iterator: u64, number: u64| Object { source: iterator, index: OBJECTS * number };
    for iterator in [1, 2] {
        (0..60).for_each(|number| world.window.announce(iterator, nth(iterator, number), 1));
    }
    let mut read = settle(&mut world);
    for number in 0..60 {
        for iterator in [1, 2] {
            world.take(nth(iterator, number));
            read += settle(&mut world);
            world.taken.truncate(2);
            read += settle(&mut world);
        }
    }
    // Each once, and what one of them gave up when the other was first used.
    assert!((120..=126).contains(&read), "{read} reads of 120 objects");
    world.end();
}

#[test]
fn the_objects_of_an_idle_iterator_are_read_at_most_once_more_for_each_use_of_it() {
    let mut world = World::default();
    let nth = |iterator: u64, number: u64| Object { source: iterator, index: OBJECTS * number };
    (0..BUDGET).for_each(|number| world.window.announce(1, nth(1, number), 1));
    assert_eq!(settle(&mut world), BUDGET);
    // What nobody announced takes of the idle one's memory too.
    for number in 0..20 {
        world.take(nth(3, number));
        assert_eq!(settle(&mut world), 1, "object {number}");
        world.taken.clear();
        assert_eq!(settle(&mut world), 0, "object {number}");
    }
    for used in 0..3 {
        (0..40).for_each(|number| world.window.announce(2, nth(2, number), 1));
        let mut read = 0;
        for number in 0..40 {
            world.take(nth(2, number));
            read += settle(&mut world);
            world.taken.clear();
            read += settle(&mut world);
        }
        assert_eq!(read, 40, "those of the other one alone, after {used} uses of the idle one");
        world.take(nth(1, used));
        read = settle(&mut world);
        world.taken.clear();
        read += settle(&mut world);
        assert!((1..=BUDGET).contains(&read), "{read} reads for use {used} of the idle one");
    }
    world.end();
}

#[test]
fn what_follows_a_read_is_counted_before_it_has_its_copy() {
    let mut world = World::default();
    (0..9).for_each(|_| world.window.announce(1, object(2), charge(object(2))));
    world.pump();
    assert_eq!(world.window.reserved(), BUDGET);
    world.finish(0, true);
    assert_eq!((world.used.get(), world.window.reserved()), (BUDGET, 0));
    world.end();
}
