//! The owner's service: hears what workers ask, and sees when they die. Leaves what to answer to its handler.
#![expect(unsafe_code, reason = "registers a descriptor; the use says which invariant it keeps")]

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::layout::{Answer, REFUSED};
use super::owner::Arena;
use super::request::Request;
use super::segment::Segment;

/// How often the owner looks which workers live. A death is seen by torch within five seconds.
const TICK: Duration = Duration::from_secs(1);

/// What an owner does for its workers.
pub trait Handler: Send + Sync + 'static {
    /// A worker asks. Every position of the request is to be answered, at once or later; one that is not is refused when
    /// the last copy of `answers` is dropped.
    fn ask(&self, request: Request, answers: Arc<Answers>);

    /// The worker of a lane is gone: what it announced is not wanted any more.
    fn gone(&self, lane: u32);

    /// Memory may have come back.
    fn room(&self);
}

/// The answers to one request. Published when nobody is left who could give another.
#[derive(Debug)]
pub struct Answers {
    arena: Arc<Arena>,
    lane: u32,
    number: u32,
    /// The worker died: nobody waits. Dropped after the rest: its other holder learns by it that all is published.
    gone: Arc<AtomicBool>,
}

impl Answers {
    fn new(arena: &Arc<Arena>, request: &Request, gone: &Arc<AtomicBool>) -> Arc<Self> {
        let (lane, number) = (request.lane, request.number);
        for position in 0..request.objects.len() {
            arena.write_answer(lane, position, REFUSED);
        }
        Arc::new(Self { arena: arena.clone(), lane, number, gone: gone.clone() })
    }

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
        if self.gone() {
            return;
        }
        match self.arena.grant(self.lane, segment) {
            Ok(answer) => self.arena.write_answer(self.lane, position, Answer { failed, ..answer }),
            // A million segments are with workers that never let go of any.
            Err(segment) => drop(segment),
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.arena.publish(self.lane, self.number);
    }
}

/// What is known of a lane's worker.
struct Known {
    worker: u32,
    process: Option<Pid>,
    /// Readable when it is gone; `None` where the system gives none.
    watch: Option<OwnedFd>,
    last: u32,
    /// Shared with the answers to its last request.
    gone: Arc<AtomicBool>,
}

impl Known {
    fn new(worker: u32) -> Self {
        let process = i32::try_from(worker).ok().and_then(Pid::from_raw);
        let watch = process.and_then(watch);
        Self { worker, process, watch, last: 0, gone: Arc::default() }
    }

    fn gone(&self) -> bool {
        self.process.is_none_or(|process| is_gone(process, self.watch.as_ref()))
    }

    /// Tells those who answer its last request that nobody waits. Whether there are any.
    fn leave(&mut self) -> bool {
        self.gone.store(true, Ordering::Release);
        Arc::get_mut(&mut self.gone).is_none()
    }
}

/// What tells when a process is gone. None where the system gives none: it is gone already, or there are no descriptors.
pub(super) fn watch(process: Pid) -> Option<OwnedFd> {
    pidfd_open(process, PidfdFlags::empty()).ok()
}

/// Whether a process is gone, where `watch` is what the function of that name gave.
pub(super) fn is_gone(process: Pid, watch: Option<&OwnedFd>) -> bool {
    match watch {
        Some(watch) => {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            matches!(poll(&mut [PollFd::new(watch, PollFlags::IN)], Some(&now)), Ok(1..))
        }
        None => test_kill_process(process) == Err(Errno::SRCH),
    }
}

/// Serves the workers of `arena` for as long as what this returns is polled. If it ends, be it by a panic, they are told.
/// To be called on a runtime.
///
/// # Errors
/// The bell cannot be waited for.
pub fn serve(arena: Arc<Arena>, handler: impl Handler) -> io::Result<impl Future<Output = io::Result<()>> + Send> {
    let bell = arena.bell().try_clone_to_owned()?;
    // SAFETY: the descriptor is its `OwnedFd`'s alone, which names the same one until it is dropped with `bell`.
    let bell = unsafe { AsyncFd::register_with_interest(bell, Interest::READABLE) }?;
    let open = Open(arena);
    Ok(async move { listen(&open.0, &bell, &handler).await })
}

/// An arena whose workers get answers.
struct Open(Arc<Arena>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.close();
    }
}

async fn listen(arena: &Arc<Arena>, bell: &AsyncFd<OwnedFd>, handler: &impl Handler) -> io::Result<()> {
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
                known.gone = Arc::default();
                let answers = Answers::new(arena, &request, &known.gone);
                handler.ask(request, answers);
            }
        }
        if ticked {
            let died = lanes.iter().filter(|(lane, known)| !dying.contains(lane) && known.gone());
            let died: Vec<u32> = died.map(|(lane, _)| *lane).collect();
            died.iter().for_each(|lane| handler.gone(*lane));
            dying.extend(died);
        }
        if arena.sweep(&dying) > 0 || ticked || arena.starves() {
            handler.room();
        }
        dying.retain(|lane| {
            // Reads that were begun for it end first: their answers must not reach the lane's next worker.
            if lanes.get_mut(lane).is_some_and(Known::leave) {
                return true;
            }
            arena.sweep(&[*lane]);
            arena.vacate(*lane);
            lanes.remove(lane);
            false
        });
    }
}
