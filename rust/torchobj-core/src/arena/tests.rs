//! An arena whose handler does what a test says.

use std::sync::Arc;

use super::*;
use crate::buffer::Buffer;
use crate::error::{Error, ErrorKind};
use crate::runtime::runtime;

const MIB: u64 = 1 << 20;

/// Lands everything, or answers nothing.
struct Scripted {
    arena: Arc<Arena>,
    lands: bool,
}

impl Handler for Scripted {
    fn ask(&self, request: Request, answers: Arc<Answers>) {
        for position in (0..request.objects.len()).filter(|_| self.lands) {
            answers.land(position, Arc::into_inner(self.arena.segment(100).unwrap()).unwrap());
        }
    }

    fn gone(&self, _lane: u32) {}

    fn room(&self) {}
}

fn served(arena: &Arc<Arena>, lands: bool) {
    let (arena, handler) = (arena.clone(), Scripted { arena: arena.clone(), lands });
    let _context = runtime().enter();
    let service = serve(arena, handler).unwrap();
    runtime().spawn(async move { service.await.unwrap() });
}

fn never() -> Result<(), ()> {
    Ok(())
}

#[test]
fn what_comes_for_a_request_that_was_interrupted_is_given_back_at_the_next() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let ended = worker.ask(1, &[1, 2, 3], Ahead::default(), || Err("a signal"));
    assert!(matches!(ended, Err(Unanswered::Interrupted("a signal"))));
    served(&arena, true);
    let replies = worker.ask(1, &[4], Ahead::default(), never).unwrap();
    assert!(matches!(&replies[..], [Reply::Landed(_)]));
    arena.sweep(&[]);
    assert_eq!(arena.usage().used, Arena::charge(100));
    drop(replies);
    arena.sweep(&[]);
    assert_eq!(arena.usage().used, 0);
    assert_eq!(arena.lanes().count(), 1);
}

#[test]
fn a_request_that_only_announces_and_was_interrupted_is_not_overwritten_before_it_is_heard() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let ask = |announced: &[u64]| {
        let ahead = Ahead { iterator: 1, objects: announced };
        worker.ask(1, &[], ahead, || Err("a signal"))
    };
    for announced in [[1, 2], [3, 4]] {
        assert!(matches!(ask(&announced), Err(Unanswered::Interrupted("a signal"))));
        let request = arena.request(0, 0).unwrap();
        assert_eq!((request.number, request.ahead), (1, vec![1, 2]));
    }
    served(&arena, true);
    let replies = worker.ask(1, &[5], Ahead::default(), never).unwrap();
    assert!(matches!(&replies[..], [Reply::Landed(_)]));
}

#[test]
fn an_answer_that_nobody_gives_is_a_refusal_and_no_wait() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, false);
    for _ in 0..2 {
        let replies = worker.ask(1, &[1, 2], Ahead::default(), never).unwrap();
        let [Reply::Failed(first), Reply::Failed(_)] = &replies[..] else { panic!("{replies:?}") };
        assert_eq!(Error::from_bytes(first).kind(), ErrorKind::Io);
    }
}

/// Panics at the first request.
struct Broken;

impl Handler for Broken {
    fn ask(&self, _request: Request, _answers: Arc<Answers>) {
        panic!("by the test");
    }

    fn gone(&self, _lane: u32) {}

    fn room(&self) {}
}

#[test]
fn a_service_that_ended_is_seen_by_who_waits_and_by_who_asks_then() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let service = {
        let _context = runtime().enter();
        serve(arena.clone(), Broken).unwrap()
    };
    let service = runtime().spawn(service);
    // The answers are dropped by the panic, and so refused: that is an end too.
    drop(worker.ask(1, &[1], Ahead::default(), never));
    assert!(runtime().block_on(service).unwrap_err().is_panic());
    let ended = worker.ask(1, &[1], Ahead::default(), never);
    assert!(matches!(ended, Err(Unanswered::OwnerGone)));
}

#[test]
fn a_file_that_is_too_short_for_an_arena_is_refused() {
    let short = super::map::Map::create(super::map::Map::file_in_memory().unwrap(), 4096).unwrap();
    let copy = || short.file().try_clone_to_owned().unwrap();
    let refused = Worker::attach(copy(), copy()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn a_worker_of_its_own_in_a_child_has_another_lane() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    let again = Arc::new(worker.again().unwrap());
    served(&arena, true);
    for worker in [&worker, &again] {
        assert!(matches!(worker.ask(1, &[4], Ahead::default(), never).as_deref(), Ok([Reply::Landed(_)])));
    }
    assert_eq!(arena.lanes().count(), 2);
}

#[test]
fn segments_are_adopted_in_any_order_beside_those_that_are_released() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    let mut random = fastrand::Rng::with_seed(5);
    let mut held = Vec::new();
    for _ in 0..50 {
        let wanted: Vec<u64> = (0..random.u64(1..20)).collect();
        held.extend(worker.ask(1, &wanted, Ahead::default(), never).unwrap());
        for _ in 0..random.usize(0..held.len()) {
            let Reply::Landed(claim) = held.swap_remove(random.usize(0..held.len())) else { panic!("all land") };
            if random.bool() {
                let offer = claim.offer().unwrap();
                drop(claim);
                assert_eq!(arena.adopt(offer.id, offer.generation).unwrap().unwrap().len(), 100);
            }
        }
        arena.sweep(&[]);
        assert_eq!(arena.usage().granted, held.len() as u64 * Arena::charge(100));
    }
    drop(held);
    arena.sweep(&[]);
    assert_eq!(arena.usage().used, 0);
}

fn read(worker: &Arc<Worker>) -> Arc<Claim> {
    let replies = worker.ask(1, &[1], Ahead::default(), never).unwrap();
    let Ok([Reply::Landed(claim)]) = <[Reply; 1]>::try_from(replies) else { panic!("it lands") };
    claim
}

/// A sample of sevens that a worker keeps, and its offer to the trainer.
fn kept_and_offered(worker: &Arc<Worker>) -> (Buffer, Offer) {
    let claim = read(worker);
    let mut kept = claim.buffer();
    kept.as_mut_slice().fill(7);
    let offer = claim.offer().unwrap();
    (kept, offer)
}

#[test]
fn what_its_worker_still_has_is_copied_and_stays_the_workers() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    let (kept, offer) = kept_and_offered(&worker);
    let mut copy = arena.adopt(offer.id, offer.generation).unwrap().unwrap();
    copy.as_mut_slice().fill(8);
    assert_eq!(kept.as_slice(), [7; 100]);
    assert!(arena.adopt(offer.id, offer.generation).unwrap().is_none(), "an offer is taken once");
    let usage = arena.usage();
    assert_eq!((usage.copied, usage.transferred, usage.used), (1, 0, 2 * Arena::charge(100)));
    drop(kept);
    arena.sweep(&[]);
    drop(copy);
    assert_eq!(arena.usage().used, 0);
}

#[test]
fn a_copy_is_made_on_the_heap_where_the_arena_is_full() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    let (kept, offer) = kept_and_offered(&worker);
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
    assert_eq!((kept.as_slice(), copy.as_slice()), (&[7; 100][..], &[8; 100][..]));
    assert_eq!((arena.usage().copied, arena.usage().transferred), (1, 0));
    drop((kept, filled));
    arena.sweep(&[]);
    assert_eq!(arena.usage().used, 0);
}

#[test]
fn what_a_worker_offered_before_it_died_is_the_trainers_without_a_copy() {
    let arena = Arena::create(MIB).unwrap();
    let worker = Arc::new(Worker::inherit(&arena).unwrap());
    served(&arena, true);
    let (taken, left) = (read(&worker), read(&worker));
    let [offer, _] = [&taken, &left].map(|claim| claim.offer().unwrap());
    // As a process that was killed leaves them.
    std::mem::forget((taken, left));
    arena.sweep(&[0]);
    assert!(arena.adopt(offer.id, offer.generation).unwrap().is_some());
    assert_eq!((arena.usage().copied, arena.usage().transferred), (0, 1));
    assert_eq!(arena.usage().used, Arena::charge(100), "the other one may be taken yet");
}

#[test]
fn an_arena_that_is_nearly_full_uses_what_is_free_again_for_other_sizes() {
    let limits = super::size::Limits { address_space: None, file: Some(60 * MIB) };
    let arena = Arena::create_within(64 * MIB, limits).unwrap();
    assert_eq!(arena.budget(), 5 * MIB);
    for len in [100, 5000, 70_000, 900_000, 4 * MIB, 100] {
        let segments: Vec<_> = std::iter::from_fn(|| arena.segment(len).ok()).collect();
        assert!(segments.len() as u64 * Arena::charge(len) > 15 * MIB);
        let full = arena.segment(len).unwrap_err().to_string();
        assert!(full.contains("the arena, which has 20 MiB") && full.contains("ulimit -v"), "{full}");
    }
}

#[test]
#[should_panic(expected = "the memory of a segment is lent once")]
fn the_memory_of_a_segment_is_lent_once() {
    let segment = Arena::create(MIB).unwrap().segment(100).unwrap();
    let _first = segment.memory();
    let _second = segment.memory();
}

#[test]
fn memory_that_this_process_gives_back_rings_while_it_starves() {
    let arena = Arena::create(MIB).unwrap();
    let rang = || rustix::io::read(arena.bell(), &mut [0; 8]).is_ok();
    drop(arena.segment(100).unwrap());
    assert!(!rang());
    assert!(arena.starve());
    assert!(!arena.starve(), "it is no news");
    drop(arena.segment(100).unwrap());
    assert!(rang());
    arena.sate();
    drop(arena.segment(100).unwrap());
    assert!(!rang());
}

#[test]
fn a_process_is_gone_also_where_nothing_watches_it() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let process = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    let watch = super::serve::watch(process);
    assert!(watch.is_some());
    for watch in [None, watch.as_ref()] {
        assert!(!super::serve::is_gone(process, watch));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    for watch in [None, watch.as_ref()] {
        assert!(super::serve::is_gone(process, watch));
    }
}
