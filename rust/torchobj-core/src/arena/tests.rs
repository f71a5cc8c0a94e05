//! An arena with a scripted handler.

use std::sync::Arc;

use super::*;
use crate::buffer::Buffer;
use crate::error::{Error, ErrorKind};
use crate::runtime::runtime;
use crate::source_key::SourceKey;

const MIB: u64 = 1 << 20;

/// Answers every object, or none.
struct Scripted {
    arena: Arc<Arena>,
    answers_all: bool,
}

impl Handler for Scripted {
    fn on_request(&self, request: WorkerRequest, answers: Arc<Answers>) {
        for position in (0..request.objects.len()).filter(|_| self.answers_all) {
            answers.complete(position, Arc::into_inner(self.arena.segment(100).unwrap()).unwrap());
        }
    }

    fn on_block_refused(&self, _loader: u64) {}

    fn on_worker_exit(&self, _worker: u64) {}

    fn on_memory_freed(&self) {}
}

fn served(arena: &Arc<Arena>, answers_all: bool) {
    let (arena, handler) = (arena.clone(), Scripted { arena: arena.clone(), answers_all });
    let _context = runtime().enter();
    let service = serve(arena, handler).unwrap();
    runtime().spawn(async move { service.await.unwrap() });
}

fn indices(indices: impl IntoIterator<Item = u64>) -> Vec<SourceKey> {
    SourceKey::indices(indices)
}

fn no_check() -> Result<(), ()> {
    Ok(())
}

#[test]
fn answers_to_an_interrupted_request_are_returned_at_the_next_request() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let ended = worker.request(1, &indices([1, 2, 3]), Announcement::default(), || Err("a signal"));
    assert!(matches!(ended, Err(Unanswered::Interrupted("a signal"))));
    served(&arena, true);
    let replies = worker.request(1, &indices([4]), Announcement::default(), no_check).unwrap();
    assert!(matches!(&replies[..], [Reply::Claimed(_)]));
    arena.reclaim(&[]);
    assert_eq!(arena.usage().used, Arena::charge(100));
    drop(replies);
    arena.reclaim(&[]);
    assert_eq!(arena.usage().used, 0);
    assert_eq!(arena.slots().count(), 1);
}

#[test]
fn an_interrupted_announcement_is_not_overwritten_before_the_owner_reads_it() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let request = |objects: &[SourceKey]| {
        let announced = Announcement { iterator: 1, objects };
        worker.request(1, &[], announced, || Err("a signal"))
    };
    for objects in [[1, 2], [3, 4]] {
        assert!(matches!(request(&indices(objects)), Err(Unanswered::Interrupted("a signal"))));
        let read = arena.request(0, 0).unwrap();
        assert_eq!((read.number, read.announced), (1, indices([1, 2]).into_iter().map(Some).collect()));
    }
    served(&arena, true);
    let replies = worker.request(1, &indices([5]), Announcement::default(), no_check).unwrap();
    assert!(matches!(&replies[..], [Reply::Claimed(_)]));
}

#[test]
fn a_request_during_the_check_of_another_is_answered() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let mut nested = None;
    // Not served yet, so that the first check comes before the answer.
    let outer = worker.request(1, &indices([1]), Announcement::default(), || {
        if nested.is_none() {
            served(&arena, true);
            nested = Some(worker.request(1, &indices([2, 3]), Announcement::default(), no_check));
        }
        no_check()
    });
    assert!(matches!(outer.as_deref(), Ok([Reply::Claimed(_)])));
    assert!(matches!(nested.unwrap().as_deref(), Ok([Reply::Claimed(_), Reply::Claimed(_)])));
    assert_eq!(arena.slots().count(), 2);
    drop(worker.request(1, &indices([4]), Announcement::default(), no_check));
    assert_eq!(arena.slots().count(), 2, "both are used again");
}

#[test]
fn a_panic_of_a_check_leaves_the_worker_usable() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let request =
        || worker.request(1, &indices([1]), Announcement::default(), || -> Result<(), ()> { panic!("by the test") });
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(request)).is_err());
    served(&arena, true);
    assert!(matches!(
        worker.request(1, &indices([1]), Announcement::default(), no_check).as_deref(),
        Ok([Reply::Claimed(_)])
    ));
}

#[test]
fn threads_of_a_worker_share_its_slot() {
    let arena = Arena::create(8 * MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            let worker = &worker;
            scope.spawn(move || drop(worker.request(1, &indices([1]), Announcement::default(), no_check).unwrap()));
        }
    });
    assert!(arena.slots().count() <= 4, "{}", arena.slots().count());
}

#[test]
fn a_worker_waits_for_the_slots_of_workers_that_have_exited() {
    let arena = Arena::create(MIB).unwrap();
    served(&arena, true);
    let header = arena.header();
    // Process ids above the maximum of Linux: such processes do not exist.
    for index in 0..super::layout::SLOTS {
        header.slot(index).worker.store(u64::from((1 << 23) + index), std::sync::atomic::Ordering::Release);
    }
    header.used_slots.store(super::layout::SLOTS, std::sync::atomic::Ordering::Release);
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let replies = worker.request(1, &indices([1]), Announcement::default(), no_check);
    assert!(matches!(replies.as_deref(), Ok([Reply::Claimed(_)])));
}

#[test]
fn an_object_without_an_answer_is_refused_without_a_wait() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, false);
    for _ in 0..2 {
        let replies = worker.request(1, &indices([1, 2]), Announcement::default(), no_check).unwrap();
        let [Reply::Failed(first), Reply::Failed(_)] = &replies[..] else { panic!("{replies:?}") };
        assert_eq!(Error::from_bytes(first).kind(), ErrorKind::Io);
    }
}

/// Panics at the first request.
struct Broken;

impl Handler for Broken {
    fn on_request(&self, _request: WorkerRequest, _answers: Arc<Answers>) {
        panic!("by the test");
    }

    fn on_block_refused(&self, _loader: u64) {}

    fn on_worker_exit(&self, _worker: u64) {}

    fn on_memory_freed(&self) {}
}

#[test]
fn a_stopped_service_fails_pending_and_later_requests() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let service = {
        let _context = runtime().enter();
        serve(arena.clone(), Broken).unwrap()
    };
    let service = runtime().spawn(service);
    // The panic drops the answers, which refuses the request: that completes it too.
    drop(worker.request(1, &indices([1]), Announcement::default(), no_check));
    assert!(runtime().block_on(service).unwrap_err().is_panic());
    let ended = worker.request(1, &indices([1]), Announcement::default(), no_check);
    assert!(matches!(ended, Err(Unanswered::OwnerGone)));
}

#[test]
fn a_file_too_short_for_an_arena_is_refused() {
    let short = super::map::Map::create(super::map::Map::file_in_memory().unwrap(), 4096).unwrap();
    let copy = || short.file().get().unwrap().try_clone_to_owned().unwrap();
    let refused = Worker::attach(copy(), copy()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn a_worker_for_a_child_process_has_its_own_slot() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let again = Arc::new(worker.for_child().unwrap());
    served(&arena, true);
    for worker in [&worker, &again] {
        assert!(matches!(
            worker.request(1, &indices([4]), Announcement::default(), no_check).as_deref(),
            Ok([Reply::Claimed(_)])
        ));
    }
    assert_eq!(arena.slots().count(), 2);
}

#[test]
fn segments_are_adopted_in_any_order_along_with_returned_ones() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    let mut random = fastrand::Rng::with_seed(5);
    let mut held = Vec::new();
    for _ in 0..50 {
        let requested = indices(0..random.u64(1..20));
        held.extend(worker.request(1, &requested, Announcement::default(), no_check).unwrap());
        for _ in 0..random.usize(0..held.len()) {
            let Reply::Claimed(claim) = held.swap_remove(random.usize(0..held.len())) else {
                panic!("all are answered")
            };
            if random.bool() {
                let offer = claim.offer().unwrap();
                drop(claim);
                assert_eq!(arena.adopt(offer.id, offer.generation).unwrap().unwrap().len(), 100);
            }
        }
        arena.reclaim(&[]);
        assert_eq!(arena.usage().granted, held.len() as u64 * Arena::charge(100));
    }
    drop(held);
    arena.reclaim(&[]);
    assert_eq!(arena.usage().used, 0);
}

fn read(worker: &Arc<Worker>) -> Arc<Claim> {
    let replies = worker.request(1, &indices([1]), Announcement::default(), no_check).unwrap();
    let Ok([Reply::Claimed(claim)]) = <[Reply; 1]>::try_from(replies) else { panic!("it answers_all") };
    claim
}

/// Bytes (all 7) that a worker still holds, and its offer to the trainer.
fn held_and_offered(worker: &Arc<Worker>) -> (Buffer, Offer) {
    let claim = read(worker);
    let mut held = claim.buffer();
    held.as_mut_slice().fill(7);
    let offer = claim.offer().unwrap();
    (held, offer)
}

#[test]
fn a_segment_that_its_worker_still_maps_is_copied_and_stays_claimed() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    let (held, offer) = held_and_offered(&worker);
    let mut copy = arena.adopt(offer.id, offer.generation).unwrap().unwrap();
    copy.as_mut_slice().fill(8);
    assert_eq!(held.as_slice(), [7; 100]);
    assert!(arena.adopt(offer.id, offer.generation).unwrap().is_none(), "an offer is adopted once");
    let usage = arena.usage();
    assert_eq!((usage.copied, usage.transferred, usage.used), (1, 0, 2 * Arena::charge(100)));
    drop(held);
    arena.reclaim(&[]);
    drop(copy);
    assert_eq!(arena.usage().used, 0);
}

#[test]
fn a_copy_is_on_the_heap_if_the_arena_is_full() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    let (held, offer) = held_and_offered(&worker);
    let mut filled = Vec::new();
    let mut len = 1 << 47;
    while len >= Arena::charge(1) {
        match arena.segment(len) {
            Ok(segment) => filled.push(segment),
            Err(_) => len /= 2,
        }
    }
    let mut copy = arena.adopt(offer.id, offer.generation).unwrap().unwrap();
    copy.as_mut_slice().fill(8);
    assert_eq!((held.as_slice(), copy.as_slice()), (&[7; 100][..], &[8; 100][..]));
    assert_eq!((arena.usage().copied, arena.usage().transferred), (1, 0));
    drop((held, filled));
    arena.reclaim(&[]);
    assert_eq!(arena.usage().used, 0);
}

#[test]
fn an_offer_of_an_exited_worker_is_adopted_without_a_copy() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    let (taken, left) = (read(&worker), read(&worker));
    let [offer, _] = [&taken, &left].map(|claim| claim.offer().unwrap());
    // As a killed process leaves them.
    std::mem::forget((taken, left));
    arena.reclaim(&[0]);
    assert!(arena.adopt(offer.id, offer.generation).unwrap().is_some());
    assert_eq!((arena.usage().copied, arena.usage().transferred), (0, 1));
    assert_eq!(arena.usage().used, Arena::charge(100), "the trainer may still adopt the other one");
}

#[test]
fn a_nearly_full_arena_reuses_free_extents_for_other_sizes() {
    let limits = super::size::Limits { address_space: None, file: Some(60 * MIB) };
    let arena = Arena::create_within(64 * MIB, limits).unwrap();
    assert_eq!(arena.budget(), 5 * MIB);
    for len in [100, 5000, 70_000, 900_000, 4 * MIB, 100] {
        let segments: Vec<_> = std::iter::from_fn(|| arena.segment(len).ok()).collect();
        assert!(segments.len() as u64 * Arena::charge(len) > 15 * MIB);
        let full = arena.segment(len).unwrap_err().to_string();
        assert!(full.contains("the arena (20 MiB for objects") && full.contains("ulimit -v"), "{full}");
    }
}

#[test]
#[should_panic(expected = "the memory of a segment is taken once")]
fn the_memory_of_a_segment_is_taken_once() {
    let segment = Arena::create(MIB).unwrap().segment(100).unwrap();
    let _first = segment.memory();
    let _second = segment.memory();
}

#[test]
fn freed_memory_notifies_the_owner_while_it_waits() {
    let arena = Arena::create(MIB).unwrap();
    let notified = || rustix::io::read(arena.eventfd().get().unwrap(), &mut [0; 8]).is_ok();
    drop(arena.segment(100).unwrap());
    assert!(!notified());
    assert!(arena.set_memory_needed());
    assert!(!arena.set_memory_needed(), "requested before");
    drop(arena.segment(100).unwrap());
    assert!(notified());
    arena.clear_memory_needed();
    drop(arena.segment(100).unwrap());
    assert!(!notified());
}

#[test]
fn an_exit_is_detected_with_and_without_a_pidfd() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let watch = || super::process::ProcessWatch::new(child.id().into());
    let watches = [watch(), watch().without_pidfd()];
    assert_eq!(watches.each_ref().map(super::process::ProcessWatch::has_exited), [false, false]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(watches.each_ref().map(super::process::ProcessWatch::has_exited), [true, true]);
}
