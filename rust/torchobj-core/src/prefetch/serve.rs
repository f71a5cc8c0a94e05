//! Answers requests of workers: objects as segments, failures as serialized errors in segments.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use super::{Body, Delivered, Demand, Object, Prefetcher, Waiter};
use crate::arena::{Answers, Handler, Request, RequestedObjects, Segment};
use crate::buffer::PendingBuffer;
use crate::error::{Error, ErrorKind, Operation};
use crate::memory_pressure::is_memory_short;
use crate::object_ref::ObjectRef;

impl Handler for Arc<Prefetcher> {
    fn on_request(&self, request: Request, answers: Arc<Answers>) {
        let Request { worker, loader, source, objects, announced, iterator, ended, .. } = request;
        if let Some(iterator) = ended.and_then(|ended| self.worker_iterators().remove(&(worker, ended))) {
            self.cancel(iterator);
        }
        // `answers` is kept until the announcement below is done, because dropping it publishes the answers.
        self.answer(loader, source, objects, &answers);
        if !announced.is_empty() {
            let new_iterator = || self.new_iterator(loader);
            let iterator = *self.worker_iterators().entry((worker, iterator)).or_insert_with(new_iterator);
            let announced: Vec<Object> = match announced {
                RequestedObjects::Numbers(numbers) => {
                    numbers.into_iter().map(|index| Object { source, index }).collect()
                }
                RequestedObjects::Names(names) => {
                    let names: Vec<ObjectRef> =
                        names.into_iter().flatten().filter_map(|record| ObjectRef::from_bytes(&record)).collect();
                    self.objects(source, names.iter())
                }
            };
            self.announce(iterator, &announced);
        }
        drop(answers);
    }

    fn on_block_refused(&self, loader: u64) {
        self.stats.block_refused(loader);
    }

    fn on_worker_exit(&self, worker: u32) {
        let ended: Vec<u64> =
            self.worker_iterators().extract_if(|(of, _), _| *of == worker).map(|(_, ended)| ended).collect();
        ended.into_iter().for_each(|iterator| self.cancel(iterator));
    }

    fn on_memory_freed(&self) {
        if !self.has_announced() {
            self.arena.reclaim_orphans();
        }
        self.release_free_memory(Instant::now(), is_memory_short);
        self.pump();
    }
}

fn invalid_name() -> Error {
    Error::new(ErrorKind::Config, Operation::Get, "", "a worker requested an object by an invalid name: a bug")
}

/// Interval between decisions about the pages of free segments and unused blocks.
const RELEASE_INTERVAL: Duration = Duration::from_secs(5);

impl Prefetcher {
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

    /// Only the service task locks it.
    fn worker_iterators(&self) -> MutexGuard<'_, HashMap<(u32, u32), u64>> {
        self.worker_iterators.lock().expect("no holder of this lock panics")
    }

    /// Takes the demanded objects of a request of a worker of `loader`.
    fn answer(self: &Arc<Self>, loader: u64, source: u64, objects: RequestedObjects, answers: &Arc<Answers>) {
        // A request that only announces has no answers.
        if objects.is_empty() {
            return;
        }
        let timer = Arc::new(self.stats.wait_timer(loader));
        let waiter = |position| Waiter::Answer { answers: answers.clone(), position, timer: timer.clone() };
        match objects {
            RequestedObjects::Numbers(numbers) => {
                let demands = numbers.into_iter().map(|index| Demand::Number(Object { source, index }));
                self.demand(loader, demands.enumerate().map(|(position, demand)| (demand, waiter(position))));
            }
            RequestedObjects::Names(names) => {
                self.sweep(source);
                let mut demands = Vec::with_capacity(names.len());
                for (position, name) in names.into_iter().enumerate() {
                    match name.filter(|record| ObjectRef::from_bytes(record).is_some()) {
                        Some(record) => demands.push((Demand::Name { source, record }, waiter(position))),
                        None => self.deliver((waiter(position), Err(invalid_name()))),
                    }
                }
                self.demand(loader, demands.into_iter());
            }
        }
    }

    /// Sends a result to its waiter.
    pub(super) fn deliver(&self, (waiter, result): Delivered) {
        match (waiter, result) {
            // Sending fails if the caller was interrupted.
            (Waiter::Local(sender), Ok(Body { result, segment })) => {
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
        drop(dest);
        drop(pending);
        Arc::into_inner(segment)
    }
}
