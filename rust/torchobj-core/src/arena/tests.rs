//! An arena whose handler does what a test says.

use std::sync::Arc;

use super::*;
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
    runtime().spawn(async move { serve(arena, handler).await.unwrap() });
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
