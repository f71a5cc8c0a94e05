//! The owner's service: hears what workers ask, and sees when they die. Leaves what to answer to its handler.
#![expect(unsafe_code, reason = "registers a descriptor; the use says which invariant it keeps")]

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::layout::Answer;
use super::owner::{Arena, Request};
use super::segment::Segment;

/// How often the owner looks which workers live. A death is seen by torch within five seconds.
const TICK: Duration = Duration::from_secs(1);

/// What an owner does for its workers.
pub trait Handler: Send + Sync + 'static {
    /// A worker asks. Every object that it wants must be answered, at once or later.
    fn ask(&self, request: Request, answers: Arc<Answers>);

    /// The worker of a lane is gone: what it announced is not wanted any more.
    fn gone(&self, lane: u32);

    /// Memory may have come back.
    fn room(&self);
}

/// The answers to one request. Published when the last one is there.
#[derive(Debug)]
pub struct Answers {
    arena: Arc<Arena>,
    lane: u32,
    number: u32,
    missing: AtomicUsize,
    /// The worker died: nobody waits.
    gone: AtomicBool,
}

impl Answers {
    /// Whether nobody waits any more.
    pub fn gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The object at `position` has landed.
    pub fn land(&self, position: usize, segment: Segment) {
        self.answer(position, segment, false);
    }

    /// The object at `position` could not be read: `segment` holds the error.
    pub fn fail(&self, position: usize, segment: Segment) {
        self.answer(position, segment, true);
    }

    fn answer(&self, position: usize, segment: Segment, failed: bool) {
        if !self.gone() {
            match self.arena.grant(self.lane, segment) {
                Ok(answer) => self.arena.write_answer(self.lane, position, Answer { failed, ..answer }),
                Err(segment) => {
                    // A million segments are with workers that never let go of any.
                    log::error!("no more than {} segments can be with workers", super::layout::SEGMENTS);
                    drop(segment);
                }
            }
        }
        if self.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.arena.publish(self.lane, self.number);
        }
    }
}

/// What is known of a lane's worker.
struct Known {
    worker: u32,
    /// Readable when it is gone; `None` when it was gone before this was opened.
    process: Option<OwnedFd>,
    last: u32,
    answers: Weak<Answers>,
}

impl Known {
    fn new(worker: u32) -> Self {
        let process = i32::try_from(worker).ok().and_then(Pid::from_raw);
        let process = process.and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok());
        Self { worker, process, last: 0, answers: Weak::new() }
    }

    fn gone(&self) -> bool {
        let Some(process) = &self.process else { return true };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&now)), Ok(1..))
    }
}

/// Serves the workers of `arena` until it is dropped.
///
/// # Errors
/// The bell cannot be waited for.
pub async fn serve(arena: Arc<Arena>, handler: impl Handler) -> io::Result<()> {
    let bell = arena.bell().try_clone_to_owned()?;
    // SAFETY: the descriptor is its `OwnedFd`'s alone, which names the same one until it is dropped with `bell`.
    let bell = unsafe { AsyncFd::register_with_interest(bell, Interest::READABLE) }?;
    let mut lanes: HashMap<u32, Known> = HashMap::new();
    let mut dying: Vec<u32> = Vec::new();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let ticked = tokio::select! {
            ready = bell.readable() => {
                let mut count = [0; 8];
                // Another wake-up may have emptied it.
                let _ = rustix::io::read(bell.get_ref(), &mut count);
                ready?.clear_ready();
                false
            }
            _ = tick.tick() => true,
        };
        for (lane, worker) in arena.lanes() {
            let known = lanes.entry(lane).or_insert_with(|| Known::new(worker));
            if known.worker != worker {
                *known = Known::new(worker);
            }
            if let Some(request) = arena.request(lane, known.last) {
                known.last = request.number;
                if request.objects.is_empty() {
                    // One that only announces: nobody waits for more than that it was heard.
                    arena.publish(lane, request.number);
                }
                let missing = AtomicUsize::new(request.objects.len());
                let gone = AtomicBool::new(false);
                let answers = Answers { arena: arena.clone(), lane, number: request.number, missing, gone };
                let answers = Arc::new(answers);
                known.answers = Arc::downgrade(&answers);
                handler.ask(request, answers);
            }
        }
        if ticked {
            let died = lanes.iter().filter(|(lane, known)| !dying.contains(lane) && known.gone());
            let died: Vec<u32> = died.map(|(lane, _)| *lane).collect();
            died.iter().for_each(|lane| handler.gone(*lane));
            dying.extend(died);
        }
        if arena.sweep(&dying) > 0 || ticked {
            handler.room();
        }
        dying.retain(|lane| {
            let answers = lanes.get(lane).and_then(|known| known.answers.upgrade());
            if let Some(answers) = answers {
                // Reads that were begun for it end first: their answers must not reach the lane's next worker.
                answers.gone.store(true, Ordering::Release);
                return true;
            }
            arena.sweep(&[*lane]);
            arena.vacate(*lane);
            lanes.remove(lane);
            false
        });
    }
}
