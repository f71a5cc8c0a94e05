//! Announces objects, takes them for callers and for workers, and cancels announcements. `reads` reads them.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::decision::ObjectId;
use super::names::{ClientOf, Names};
use super::shortage::Shortage;
use super::sources::{ListedSource, RegisteredSource, Sources, named_range, number};
use super::stats::{AllCounters, Stats, WaitTimer};
use super::window::{Delivery, Window};
use crate::arena::{Answers, Arena, Segment};
use crate::buffer::PendingBuffer;
use crate::engine::{Tasks, pump};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork;
use crate::read::ReadResult;
use crate::runtime::runtime;
use crate::source_key::SourceKey;

/// Interval between decisions about the pages of free segments and unused blocks.
const RELEASE_INTERVAL: Duration = Duration::from_secs(5);

/// The result of a read: bytes in a segment of the arena.
#[derive(Debug)]
pub(super) struct FilledSegment {
    pub(super) result: ReadResult,
    pub(super) segment: Arc<Segment>,
}

/// A caller that waits for an object.
#[derive(Debug)]
pub(super) enum Waiter {
    /// A worker. `timer` measures the wait of its whole request.
    Answer { answers: Arc<Answers>, position: usize, timer: Arc<WaitTimer> },
    /// A caller in this process.
    Local(oneshot::Sender<Result<ReadResult>>),
}

impl Waiter {
    /// Returns whether the caller has stopped waiting.
    pub(super) fn is_closed(&self) -> bool {
        match self {
            Self::Answer { answers, .. } => answers.is_cancelled(),
            Self::Local(sender) => sender.is_closed(),
        }
    }
}

/// Reads ahead for this process and its workers.
#[derive(Debug)]
pub struct Prefetcher {
    pub(super) arena: Arc<Arena>,
    window: Mutex<Window<FilledSegment, Waiter>>,
    pub(super) sources: Sources,
    /// Iterators of workers, by the identity of the worker's process and its number of the iterator.
    pub(super) worker_iterators: Mutex<HashMap<(u64, u32), u64>>,
    next: AtomicU64,
    /// Running reads.
    pub(super) tasks: Tasks,
    pub(super) stats: Arc<AllCounters>,
    pub(super) shortage: Mutex<Shortage>,
    /// When the release of memory was decided last, and the number of objects and blocks that were requested by then.
    release_checked: Mutex<Option<(Instant, u64)>>,
}

impl Prefetcher {
    /// Starts a prefetcher whose segments take `budget` bytes, and the task that serves workers as long as the process
    /// lives. The limit of concurrent reads is the sum of what the clients of its sources allow for read-ahead.
    ///
    /// # Errors
    /// The system refuses the arena or its eventfd.
    pub fn start(budget: u64) -> io::Result<Arc<Self>> {
        let prefetcher = Self::without_service(budget)?;
        let service = {
            let _context = runtime().enter();
            crate::arena::serve(prefetcher.arena.clone(), prefetcher.clone())?
        };
        runtime().spawn(async move {
            if let Err(error) = service.await {
                log::error!("requests of DataLoader workers are not answered any more: {error}");
            }
        });
        Ok(prefetcher)
    }

    /// A prefetcher that serves no workers.
    fn without_service(budget: u64) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            arena: Arena::create(budget)?,
            window: Mutex::default(),
            sources: Sources::default(),
            worker_iterators: Mutex::default(),
            next: AtomicU64::new(1),
            tasks: Tasks::new(runtime().handle().clone()),
            stats: Arc::default(),
            shortage: Mutex::default(),
            release_checked: Mutex::default(),
        }))
    }

    /// The arena that holds the objects.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(super) fn window(&self) -> MutexGuard<'_, Window<FilledSegment, Waiter>> {
        self.window.lock().expect("no holder of this lock panics")
    }

    fn next_number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a source. Returns its number.
    pub fn add_source(&self, source: ListedSource) -> u64 {
        self.register(RegisteredSource::Listed(source))
    }

    /// Adds a source whose objects are named one by one. Returns its number.
    pub fn add_names(&self, client_of: Arc<ClientOf>) -> u64 {
        self.register(RegisteredSource::Named(Names::new(client_of)))
    }

    fn register(&self, source: RegisteredSource) -> u64 {
        let _inside = fork::enter();
        let number = self.next_number();
        self.sources.add(number, source);
        number
    }

    /// Numbers of objects of `source`. Announce them immediately: those of references that are neither announced nor
    /// demanded are removed after some time.
    pub fn objects(&self, source: u64, keys: &[SourceKey]) -> Vec<ObjectId> {
        self.sweep(source);
        let number = |key| {
            let _inside = fork::enter();
            number(&mut self.sources.lock(), source, key)
        };
        keys.iter().map(number).collect()
    }

    /// Removes unused names once there are many.
    pub(super) fn sweep(&self, source: u64) {
        let _inside = fork::enter();
        if let Some(RegisteredSource::Named(names)) = self.sources.lock().get_mut(&source)
            && names.is_full()
        {
            names.sweep(&self.window().numbers_of(source));
        }
    }

    /// Removes a source. Its running reads complete.
    pub fn remove_source(&self, number: u64) {
        let _inside = fork::enter();
        self.sources.remove(number);
    }

    /// Starts an iterator of a loader. All objects that are announced for it can be cancelled together.
    pub fn new_iterator(&self, loader: u64) -> u64 {
        let _inside = fork::enter();
        let number = self.next_number();
        self.window().begin(number, loader);
        number
    }

    /// Announces that these objects will be taken, in this order, after the objects announced for the iterator before.
    pub fn announce(self: &Arc<Self>, iterator: u64, objects: &[ObjectId]) {
        {
            let _inside = fork::enter();
            let measured = |object: &ObjectId| {
                let sources = self.sources.lock();
                (self.sources.charge(&sources, *object), named_range(&sources, *object).is_some())
            };
            let measured: Vec<(u64, bool)> = objects.iter().map(measured).collect();
            let mut window = self.window();
            for (object, (charge, is_range)) in objects.iter().zip(measured) {
                window.announce(iterator, *object, charge, is_range);
            }
        }
        pump(self);
    }

    /// Records that no more is announced for an iterator, until the next announcement, for lack of memory.
    pub fn limit_by_memory(&self, iterator: u64) {
        let _inside = fork::enter();
        self.window().limit_by_memory(iterator);
    }

    /// Bytes that are announced for an iterator and not taken.
    pub fn pending(&self, iterator: u64) -> u64 {
        let _inside = fork::enter();
        self.window().announced_bytes(iterator)
    }

    /// Number of objects that were announced for an iterator and taken.
    pub fn taken(&self, iterator: u64) -> u64 {
        let _inside = fork::enter();
        self.window().taken(iterator)
    }

    /// Drops the objects that are announced for an iterator and not taken.
    pub fn cancel(self: &Arc<Self>, iterator: u64) {
        let bodies = {
            let _inside = fork::enter();
            self.window().cancel(iterator)
        };
        drop(bodies);
        pump(self);
    }

    /// Returns whether any object is announced or demanded, and not taken.
    pub fn has_announced(&self) -> bool {
        let _inside = fork::enter();
        self.window().len() > 0
    }

    /// Forgets the counters of a loader that no longer exists.
    pub fn remove_loader(&self, loader: u64) {
        self.stats.remove(loader);
    }

    /// Current counters of a loader, or of all; and the state of the prefetcher.
    pub fn stats(&self, loader: Option<u64>) -> Stats {
        let _inside = fork::enter();
        let (announced, ahead) = {
            let window = self.window();
            (window.len(), window.ahead())
        };
        let memory = self.arena.usage();
        self.stats.report(
            loader,
            Stats {
                announced: announced as u64,
                in_flight: self.tasks.running() as u64,
                in_flight_limit: self.sources.limit() as u64,
                budget_bytes: memory.budget,
                used_bytes: memory.used,
                resident_bytes: memory.resident,
                granted_bytes: memory.granted,
                ahead_bytes: ahead,
                transferred: memory.transferred,
                copied: memory.copied,
                block_bytes: memory.blocks,
                used_block_bytes: memory.used_blocks,
                requests: self.sources.measured(),
                ..Stats::default()
            },
        )
    }

    /// Takes objects of `source` for a loader, concurrently. The results have the order of `keys`. Dropping the future
    /// discards the results.
    pub async fn take(self: &Arc<Self>, loader: u64, source: u64, keys: &[SourceKey]) -> Vec<Result<ReadResult>> {
        self.sweep(source);
        let _timer = self.stats.wait_timer(loader);
        let (senders, receivers): (Vec<_>, Vec<_>) = keys.iter().map(|_| oneshot::channel()).unzip();
        self.demand(loader, source, keys.iter().zip(senders.into_iter().map(Waiter::Local)));
        let mut taken = Vec::with_capacity(receivers.len());
        for receiver in receivers {
            let lost =
                || Error::new(ErrorKind::Cancelled, Operation::Get, "", "the read ended without a result: a bug");
            taken.push(receiver.await.unwrap_or_else(|_| Err(lost())));
        }
        taken
    }

    /// Takes each object of `source` for its waiter, which belongs to `loader`.
    pub(super) fn demand<'a>(
        self: &Arc<Self>,
        loader: u64,
        source: u64,
        waiters: impl Iterator<Item = (&'a SourceKey, Waiter)>,
    ) {
        let mut deliveries = Vec::new();
        {
            let _inside = fork::enter();
            for (key, waiter) in waiters {
                // Locked until the number is in use, so that a concurrent sweep cannot remove it.
                let mut sources = self.sources.lock();
                let object = number(&mut sources, source, key);
                let charge = self.sources.charge(&sources, object);
                let (found, delivery) = self.window().take(object, loader, charge, waiter);
                self.stats.found(loader, found);
                deliveries.extend(delivery);
            }
        }
        deliveries.into_iter().for_each(|delivery| self.deliver(delivery));
        pump(self);
    }

    /// Releases the pages of free segments, and unused blocks, if memory is short. If that is unknown, or no worker is
    /// attached, releases them after an interval without a read and without a request for a block.
    pub(super) fn release_free_memory(&self, now: Instant, is_memory_short: impl FnOnce() -> Option<bool>) {
        let requests = || self.stats.objects() + self.arena.usage().granted_blocks;
        let is_idle = {
            let mut checked = self.release_checked.lock().expect("no holder of this lock panics");
            let (at, before) = checked.get_or_insert_with(|| (now, requests()));
            if now.duration_since(*at) < RELEASE_INTERVAL {
                return;
            }
            *at = now;
            let requests = requests();
            std::mem::replace(before, requests) == requests && !self.has_announced() && self.tasks.running() == 0
        };
        let release = match is_memory_short() {
            Some(true) => true,
            // Attached workers will need the memory again.
            Some(false) => is_idle && !self.arena.has_workers(),
            None => is_idle,
        };
        if release {
            self.arena.release_free_pages();
        }
    }

    /// Sends a result to its waiter.
    pub(super) fn deliver(&self, (waiter, result): Delivered) {
        match (waiter, result) {
            // Sending fails if the caller was interrupted.
            (Waiter::Local(sender), Ok(FilledSegment { result, segment })) => {
                drop(segment);
                drop(sender.send(Ok(result)));
            }
            (Waiter::Local(sender), Err(error)) => drop(sender.send(Err(error))),
            (Waiter::Answer { answers, position, timer }, Ok(body)) => {
                drop(body.result);
                let segment = Arc::into_inner(body.segment).expect("a body has the only view of its segment");
                answers.complete(position, segment);
                drop(timer);
            }
            (Waiter::Answer { answers, position, timer }, Err(error)) => {
                // If there is no memory for the error, the object is refused.
                if let Some(segment) = self.serialize_error(&error) {
                    answers.fail(position, segment);
                }
                drop(timer);
            }
        }
    }

    fn serialize_error(&self, error: &Error) -> Option<Segment> {
        let text = error.to_bytes();
        let segment = self.arena.segment(text.len() as u64).ok()?;
        let (pending, mut dest) = PendingBuffer::new(segment.memory());
        dest.fill(&text);
        drop(pending.close(dest));
        Arc::into_inner(segment)
    }
}

type Delivered = Delivery<FilledSegment, Waiter>;

#[cfg(test)]
mod tests;
