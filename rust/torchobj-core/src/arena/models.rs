//! Checks every interleaving of two processes, and every allowed memory order, of the protocols in `sync` with loom.
#![expect(unsafe_code, reason = "reads and writes cells that loom watches")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;

use super::sync::{self, GrantState, Word};

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }
    fn compare_exchange(&self, from: u32, to: u32) -> bool {
        self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

fn write(bytes: &UnsafeCell<u32>, value: u32) {
    // SAFETY: loom fails the test when another thread has access.
    bytes.with_mut(|state| unsafe { *state = value });
}

fn read(bytes: &UnsafeCell<u32>) -> u32 {
    // SAFETY: as in `write`.
    bytes.with(|state| unsafe { *state })
}

/// The words and bytes of one segment that two processes share. loom detects racing access to the bytes.
#[derive(Debug)]
struct Shared {
    word: AtomicU32,
    memory_needed: AtomicU32,
    eventfd: AtomicU32,
    bytes: UnsafeCell<u32>,
}

impl Shared {
    /// A segment that was granted to a worker, as the first of its word.
    fn granted(bytes: u32) -> Arc<Self> {
        let shared = Self {
            word: AtomicU32::new(0),
            memory_needed: AtomicU32::new(0),
            eventfd: AtomicU32::new(0),
            bytes: UnsafeCell::new(bytes),
        };
        sync::grant(&shared.word, 1);
        Arc::new(shared)
    }

    fn write(&self, bytes: u32) {
        write(&self.bytes, bytes);
    }

    fn read(&self) -> u32 {
        read(&self.bytes)
    }

    fn state(&self) -> Option<GrantState> {
        sync::grant_state(&self.word, 1)
    }
}

#[test]
fn a_waiting_owner_misses_no_dropped_segment() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let worker = shared.clone();
        let worker = thread::spawn(move || {
            if sync::drop_claim(&worker.word, 1, &worker.memory_needed) {
                sync::publish(&worker.eventfd, 1);
            }
        });
        // The owner found no free memory before.
        let seen = sync::set_memory_needed(&shared.memory_needed) && shared.state() == Some(GrantState::Returned);
        worker.join().unwrap();
        assert!(seen || sync::published(&shared.eventfd) == 1, "the owner waits although memory is free");
    });
}

#[test]
fn an_owner_that_still_waits_needs_no_second_check() {
    loom::model(|| {
        let shared = Shared::granted(1);
        assert!(sync::set_memory_needed(&shared.memory_needed));
        assert!(!sync::set_memory_needed(&shared.memory_needed));
        let worker = shared.clone();
        let worker = thread::spawn(move || sync::drop_claim(&worker.word, 1, &worker.memory_needed));
        assert!(worker.join().unwrap(), "the owner was not notified");
    });
}

#[test]
fn an_offered_and_dropped_segment_has_the_bytes_that_the_worker_wrote() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let worker = shared.clone();
        let worker = thread::spawn(move || {
            worker.write(2);
            assert!(sync::offer(&worker.word, 1));
            // The worker still maps the segment and may read it.
            assert_eq!(worker.read(), 2);
            assert!(!sync::drop_claim(&worker.word, 1, &worker.memory_needed));
        });
        if shared.state() == Some(GrantState::Transferred) {
            assert_eq!(shared.read(), 2);
            shared.write(3);
        }
        worker.join().unwrap();
    });
}

#[test]
fn a_segment_copied_while_its_worker_maps_it_has_one_holder_afterwards() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let worker = shared.clone();
        let worker = thread::spawn(move || {
            worker.write(2);
            assert!(sync::offer(&worker.word, 1));
            assert_eq!(worker.read(), 2);
            sync::drop_claim(&worker.word, 1, &worker.memory_needed);
        });
        let offered = shared.state() == Some(GrantState::Offered);
        if offered {
            assert_eq!(shared.read(), 2);
            if !sync::decline(&shared.word, 1) {
                // The worker dropped it meanwhile.
                assert_eq!(shared.state(), Some(GrantState::Transferred));
                shared.write(3);
            }
        }
        worker.join().unwrap();
        let states =
            if offered { &[GrantState::Transferred, GrantState::Returned][..] } else { &[GrantState::Transferred] };
        assert!(states.contains(&shared.state().unwrap()), "a segment without a holder would never be freed");
        shared.write(4);
    });
}

#[test]
fn a_returned_segment_is_granted_again_and_its_last_worker_cannot_change_it() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let first = shared.clone();
        let first = thread::spawn(move || {
            first.write(2);
            sync::drop_claim(&first.word, 1, &first.memory_needed);
            // Dropped twice, or after the segment was freed.
            assert!(!sync::drop_claim(&first.word, 1, &first.memory_needed));
            assert!(!sync::offer(&first.word, 1));
        });
        if shared.state() == Some(GrantState::Returned) {
            shared.write(3);
            sync::grant(&shared.word, 2);
            assert_eq!(sync::grant_state(&shared.word, 1), None);
            assert_eq!(shared.read(), 3);
        }
        first.join().unwrap();
    });
}

#[test]
fn a_segment_is_transferred_or_returned_and_never_both() {
    loom::model(|| {
        let shared = Shared::granted(1);
        let pickler = shared.clone();
        let pickler = thread::spawn(move || sync::offer(&pickler.word, 1));
        sync::drop_claim(&shared.word, 1, &shared.memory_needed);
        let state = if pickler.join().unwrap() { GrantState::Transferred } else { GrantState::Returned };
        assert_eq!(shared.state(), Some(state));
    });
}

#[test]
fn a_published_number_makes_its_data_visible() {
    loom::model(|| {
        let request = Arc::new((AtomicU32::new(0), UnsafeCell::new(0), AtomicU32::new(0), UnsafeCell::new(0)));
        let worker = request.clone();
        let worker = thread::spawn(move || {
            write(&worker.1, 7);
            sync::publish(&worker.0, 1);
            (sync::published(&worker.2) == 1).then(|| read(&worker.3))
        });
        if sync::published(&request.0) == 1 {
            write(&request.3, read(&request.1) + 1);
            sync::publish(&request.2, 1);
        }
        assert!(matches!(worker.join().unwrap(), None | Some(8)));
    });
}

#[test]
fn a_generation_and_a_state_fit_into_one_word() {
    let last = u32::MAX >> 2;
    assert_eq!(sync::next_generation(last), 0);
    let word = std::sync::atomic::AtomicU32::new(0);
    sync::grant(&word, last);
    assert_eq!(sync::grant_state(&word, last), Some(GrantState::Claimed));
    assert_eq!(sync::grant_state(&word, 0), None);
}
