//! Every interleaving of two processes, and every order in which one may see what the other wrote, of the steps in `words`.
#![expect(unsafe_code, reason = "reads and writes cells that loom watches")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;

use super::words::{self, Place, Word};

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }
    fn exchange(&self, from: u32, to: u32) -> bool {
        self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

fn write(bytes: &UnsafeCell<u32>, value: u32) {
    // SAFETY: loom fails the test when another thread has access.
    bytes.with_mut(|place| unsafe { *place = value });
}

fn read(bytes: &UnsafeCell<u32>) -> u32 {
    // SAFETY: as in `write`.
    bytes.with(|place| unsafe { *place })
}

/// What two processes share of one segment. Who reads or writes its bytes while another may write is found out.
#[derive(Debug)]
struct Shared {
    word: AtomicU32,
    starving: AtomicU32,
    bell: AtomicU32,
    bytes: UnsafeCell<u32>,
}

impl Shared {
    /// Granted to a worker, as the first that had its word.
    fn granted(bytes: u32) -> Arc<Self> {
        let shared = Self {
            word: AtomicU32::new(0),
            starving: AtomicU32::new(0),
            bell: AtomicU32::new(0),
            bytes: UnsafeCell::new(bytes),
        };
        words::grant(&shared.word, 1);
        Arc::new(shared)
    }

    fn write(&self, bytes: u32) {
        write(&self.bytes, bytes);
    }

    fn read(&self) -> u32 {
        read(&self.bytes)
    }

    fn place(&self) -> Option<Place> {
        words::place(&self.word, 1)
    }
}

#[test]
fn no_release_is_missed_by_an_owner_that_starves() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let worker = shared.clone();
        let worker = thread::spawn(move || {
            if words::release(&worker.word, 1, &worker.starving) {
                words::publish(&worker.bell, 1);
            }
        });
        // It looked before, and there was nothing.
        let seen = words::starve(&shared.starving) && shared.place() == Some(Place::Released);
        worker.join().unwrap();
        assert!(seen || words::published(&shared.bell) == 1, "the owner sleeps, and there is memory");
    });
}

#[test]
fn an_owner_that_starves_still_needs_not_look_again() {
    loom::model(|| {
        let shared = Shared::granted(1);
        assert!(words::starve(&shared.starving));
        assert!(!words::starve(&shared.starving));
        let worker = shared.clone();
        let worker = thread::spawn(move || words::release(&worker.word, 1, &worker.starving));
        assert!(worker.join().unwrap(), "nobody rang");
    });
}

#[test]
fn what_was_offered_and_dropped_is_the_trainers_with_what_the_worker_wrote() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let worker = shared.clone();
        let worker = thread::spawn(move || {
            worker.write(2);
            assert!(words::offer(&worker.word, 1));
            // What it still has it may read.
            assert_eq!(worker.read(), 2);
            assert!(!words::release(&worker.word, 1, &worker.starving));
        });
        if shared.place() == Some(Place::Transferred) {
            assert_eq!(shared.read(), 2);
            shared.write(3);
        }
        worker.join().unwrap();
    });
}

#[test]
fn what_is_copied_while_its_worker_has_it_is_one_processs_afterwards() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let worker = shared.clone();
        let worker = thread::spawn(move || {
            worker.write(2);
            assert!(words::offer(&worker.word, 1));
            assert_eq!(worker.read(), 2);
            words::release(&worker.word, 1, &worker.starving);
        });
        let offered = shared.place() == Some(Place::Offered);
        if offered {
            assert_eq!(shared.read(), 2);
            if !words::decline(&shared.word, 1) {
                // The worker dropped it meanwhile.
                assert_eq!(shared.place(), Some(Place::Transferred));
                shared.write(3);
            }
        }
        worker.join().unwrap();
        let places = if offered { &[Place::Transferred, Place::Released][..] } else { &[Place::Transferred] };
        assert!(places.contains(&shared.place().unwrap()), "a segment that nobody has would never be freed");
        shared.write(4);
    });
}

#[test]
fn what_is_released_goes_to_the_next_worker_and_the_last_one_touches_it_no_more() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let first = shared.clone();
        let first = thread::spawn(move || {
            first.write(2);
            words::release(&first.word, 1, &first.starving);
            // Dropped twice, or late.
            assert!(!words::release(&first.word, 1, &first.starving));
            assert!(!words::offer(&first.word, 1));
        });
        if shared.place() == Some(Place::Released) {
            shared.write(3);
            words::grant(&shared.word, 2);
            assert_eq!(words::place(&shared.word, 1), None);
            assert_eq!(shared.read(), 3);
        }
        first.join().unwrap();
    });
}

#[test]
fn a_segment_is_transferred_or_released_and_never_both() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let pickler = shared.clone();
        let pickler = thread::spawn(move || words::offer(&pickler.word, 1));
        words::release(&shared.word, 1, &shared.starving);
        let place = if pickler.join().unwrap() { Place::Transferred } else { Place::Released };
        assert_eq!(shared.place(), Some(place));
    });
}

#[test]
fn a_number_that_is_seen_comes_with_what_belongs_to_it() {
    loom::model(|| {
        let asked = Arc::new((AtomicU32::new(0), UnsafeCell::new(0), AtomicU32::new(0), UnsafeCell::new(0)));
        let worker = asked.clone();
        let worker = thread::spawn(move || {
            write(&worker.1, 7);
            words::publish(&worker.0, 1);
            (words::published(&worker.2) == 1).then(|| read(&worker.3))
        });
        if words::published(&asked.0) == 1 {
            write(&asked.3, read(&asked.1) + 1);
            words::publish(&asked.2, 1);
        }
        assert!(matches!(worker.join().unwrap(), None | Some(8)));
    });
}

#[test]
fn generations_fit_beside_a_place() {
    let last = u32::MAX >> 2;
    assert_eq!(words::next_generation(last), 0);
    let word = std::sync::atomic::AtomicU32::new(0);
    words::grant(&word, last);
    assert_eq!(words::place(&word, last), Some(Place::Claimed));
    assert_eq!(words::place(&word, 0), None);
}
