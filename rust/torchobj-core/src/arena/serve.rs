//! The owner's service task: receives requests of workers and detects their exit. The handler answers the requests.
#![expect(unsafe_code, reason = "registers a descriptor; the use states its invariant")]

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::layout::{Answer, BLOCKS, REFUSED};
use super::owner::{Arena, Segment};
use super::process::ProcessWatch;
use super::request::WorkerRequest;
use crate::descriptor::Descriptor;

/// Interval at which the owner checks for workers that exited. torch detects an exit within five seconds.
const EXIT_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Answers the requests of workers.
pub trait Handler: Send + Sync + 'static {
    /// A worker sent a request. The handler answers each of its objects, in this call or later; objects without an
    /// answer are refused when the last copy of `answers` is dropped.
    fn on_request(&self, request: WorkerRequest, answers: Arc<Answers>);

    /// The limits allowed none of the blocks that a worker of a loader requested.
    fn on_block_refused(&self, loader: u64);

    /// A worker, given by the identity of its process, has exited: its announced objects are not needed any more. Called for each
    /// of its slots.
    fn on_worker_exit(&self, worker: u64);

    /// Memory may have been freed.
    fn on_memory_freed(&self);
}

/// The answers to one request. Published when the last copy is dropped.
#[derive(Debug)]
pub struct Answers {
    arena: Arc<Arena>,
    slot: u32,
    number: u32,
    /// Set when the worker has exited. Declared last, so that it is dropped after the answers were published, which the
    /// other holder relies on.
    cancelled: Arc<AtomicBool>,
}

impl Answers {
    fn new(arena: &Arc<Arena>, request: &WorkerRequest, cancelled: &Arc<AtomicBool>) -> Arc<Self> {
        let (slot, number) = (request.slot, request.number);
        for position in 0..request.objects.len() {
            arena.header().slot(slot).write_answer(position, REFUSED);
        }
        Arc::new(Self { arena: arena.clone(), slot, number, cancelled: cancelled.clone() })
    }

    /// Returns whether the worker has exited and needs no answer.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Answers the object at `position` with its bytes.
    pub fn complete(&self, position: usize, segment: Segment) {
        self.answer(position, segment, false);
    }

    /// Answers the object at `position` with a serialized error in `segment`.
    pub fn fail(&self, position: usize, segment: Segment) {
        self.answer(position, segment, true);
    }

    /// Answers the request of a worker, given by its number, for a block of one of these lengths. Returns whether one was granted.
    fn grant_block(&self, worker: u32, lengths: &[u64]) -> bool {
        let granted = self.arena.grant_block(self.slot, worker, lengths);
        if let Some((position, answer)) = granted {
            self.arena.header().slot(self.slot).write_answer(position, answer);
        }
        granted.is_some()
    }

    fn answer(&self, position: usize, segment: Segment, failed: bool) {
        if self.is_cancelled() {
            return;
        }
        match self.arena.grant(self.slot, segment) {
            Ok(answer) => self.arena.header().slot(self.slot).write_answer(position, Answer { failed, ..answer }),
            // All segment ids are in use: a million segments were granted and not returned.
            Err(segment) => drop(segment),
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.arena.publish(self.slot, self.number);
    }
}

/// The worker of a slot.
struct WorkerWatch {
    process: ProcessWatch,
    last_request: u32,
    /// Shared with the answers to its last request.
    cancelled: Arc<AtomicBool>,
}

impl WorkerWatch {
    fn new(worker: u64) -> Self {
        Self { process: ProcessWatch::new(worker), last_request: 0, cancelled: Arc::default() }
    }

    /// Cancels the answers to its last request. Returns whether a holder of them remains.
    fn cancel(&mut self) -> bool {
        self.cancelled.store(true, Ordering::Release);
        Arc::get_mut(&mut self.cancelled).is_none()
    }
}

/// Serves the workers of `arena` while the returned future is polled. When the future is dropped, even by a panic, the
/// arena is closed and waiting workers get an error. Call it on a tokio runtime.
///
/// # Errors
/// tokio cannot wait on the eventfd.
pub fn serve(arena: Arc<Arena>, handler: impl Handler) -> io::Result<impl Future<Output = io::Result<()>> + Send> {
    let eventfd = arena.eventfd().try_clone()?;
    // SAFETY: the `Descriptor` alone owns the descriptor, so the number stays valid until `eventfd` is dropped.
    let eventfd = unsafe { AsyncFd::register_with_interest(eventfd, Interest::READABLE) }?;
    let arena = CloseOnDrop(arena);
    Ok(async move { listen(&arena.0, &eventfd, &handler).await })
}

/// Closes the arena when dropped.
struct CloseOnDrop(Arc<Arena>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.header().closed.store(1, Ordering::Release);
    }
}

async fn listen(arena: &Arc<Arena>, eventfd: &AsyncFd<Descriptor>, handler: &impl Handler) -> io::Result<()> {
    let mut slots: HashMap<u32, WorkerWatch> = HashMap::new();
    let mut exiting: Vec<u32> = Vec::new();
    let mut tick = tokio::time::interval(EXIT_CHECK_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let ticked = tokio::select! {
            ready = eventfd.readable() => {
                let mut count = [0; 8];
                // The program may have opened a file of its own under this number.
                if let Ok(eventfd) = eventfd.get_ref().get() {
                    // Fails if an earlier wake-up has read the counter.
                    let _ = rustix::io::read(eventfd, &mut count);
                }
                ready?.clear_ready();
                false
            }
            _ = tick.tick() => true,
        };
        for (slot, worker) in arena.slots() {
            let worker_watch = slots.entry(slot).or_insert_with(|| WorkerWatch::new(worker));
            if worker_watch.process.identity() != worker {
                *worker_watch = WorkerWatch::new(worker);
            }
            if let Some(request) = arena.request(slot, worker_watch.last_request) {
                worker_watch.last_request = request.number;
                worker_watch.cancelled = Arc::default();
                let answers = Answers::new(arena, &request, &worker_watch.cancelled);
                if request.source != BLOCKS {
                    handler.on_request(request, answers);
                } else if !answers.grant_block(request.iterator, &request.lengths()) {
                    handler.on_block_refused(request.loader);
                }
            }
        }
        // Slots are needed before the next tick where many workers start for each of many short epochs.
        if arena.header().slot_needed.swap(0, Ordering::AcqRel) != 0 || ticked {
            for (slot, worker_watch) in &slots {
                if !exiting.contains(slot) && worker_watch.process.has_exited() {
                    handler.on_worker_exit(worker_watch.process.identity());
                    exiting.push(*slot);
                }
            }
        }
        if ticked {
            arena.reclaim_inherited();
        }
        if arena.reclaim(&exiting) > 0 || ticked || arena.header().memory_needed.load(Ordering::Relaxed) != 0 {
            handler.on_memory_freed();
        }
        exiting.retain(|slot| {
            // Pending reads for the exited worker complete first: their answers must not reach the slot's next worker.
            if slots.get_mut(slot).is_some_and(WorkerWatch::cancel) {
                return true;
            }
            arena.reclaim(&[*slot]);
            arena.vacate(*slot);
            slots.remove(slot);
            false
        });
    }
}
