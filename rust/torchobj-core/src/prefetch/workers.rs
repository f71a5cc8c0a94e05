//! Answers requests of workers: objects as segments, failures as serialized errors in segments.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use super::decision::ObjectId;
use super::prefetcher::{Prefetcher, Waiter};
use super::sources::Demand;
use crate::arena::{Answers, Handler, RequestedObjects, WorkerRequest};
use crate::engine::pump;
use crate::error::{Error, ErrorKind, Operation};
use crate::memory_pressure::is_memory_short;
use crate::object_ref::ObjectRef;

impl Handler for Arc<Prefetcher> {
    fn on_request(&self, request: WorkerRequest, answers: Arc<Answers>) {
        let WorkerRequest { worker, loader, source, objects, announced, iterator, ended, .. } = request;
        if let Some(iterator) = ended.and_then(|ended| self.worker_iterators().remove(&(worker, ended))) {
            self.cancel(iterator);
        }
        // `answers` is kept until the announcement below is done, because dropping it publishes the answers.
        self.answer(loader, source, objects, &answers);
        if !announced.is_empty() {
            let new_iterator = || self.new_iterator(loader);
            let iterator = *self.worker_iterators().entry((worker, iterator)).or_insert_with(new_iterator);
            let announced: Vec<ObjectId> = match announced {
                RequestedObjects::Numbers(numbers) => {
                    numbers.into_iter().map(|index| ObjectId { source, index }).collect()
                }
                RequestedObjects::Names(names) => {
                    let names: Vec<_> = names.into_iter().flatten().filter_map(|record| name_of(&record)).collect();
                    self.objects(source, &names)
                }
            };
            self.announce(iterator, &announced);
        }
        drop(answers);
    }

    fn on_block_refused(&self, loader: u64) {
        self.stats.add(loader, 1, |counters| &counters.blocks_refused);
    }

    fn on_worker_exit(&self, worker: u64) {
        let ended: Vec<u64> =
            self.worker_iterators().extract_if(|(of, _), _| *of == worker).map(|(_, ended)| ended).collect();
        ended.into_iter().for_each(|iterator| self.cancel(iterator));
    }

    fn on_memory_freed(&self) {
        if !self.has_announced() {
            self.arena.reclaim_orphans();
        }
        self.release_free_memory(Instant::now(), is_memory_short);
        pump(self);
    }
}

/// The name that a worker serialized; `None` if it is malformed.
fn name_of(record: &[u8]) -> Option<Arc<ObjectRef>> {
    ObjectRef::from_bytes(record).map(Arc::new)
}

impl Prefetcher {
    /// Only the service task locks it.
    fn worker_iterators(&self) -> MutexGuard<'_, HashMap<(u64, u32), u64>> {
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
                let demands = numbers.into_iter().map(|index| Demand::Number(ObjectId { source, index }));
                self.demand(loader, demands.enumerate().map(|(position, demand)| (demand, waiter(position))));
            }
            RequestedObjects::Names(names) => {
                self.sweep(source);
                let mut demands = Vec::with_capacity(names.len());
                for (position, record) in names.into_iter().enumerate() {
                    match record.as_deref().and_then(name_of) {
                        Some(name) => demands.push((Demand::Name { source, name }, waiter(position))),
                        None => {
                            let message = "a worker requested an object by an invalid name: a bug";
                            let error = Error::new(ErrorKind::Config, Operation::Get, "", message);
                            self.deliver((waiter(position), Err(error)));
                        }
                    }
                }
                self.demand(loader, demands.into_iter());
            }
        }
    }
}
