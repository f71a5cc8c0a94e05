//! Answers requests of workers: objects as segments, failures as serialized errors in segments.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use super::prefetcher::{Prefetcher, Waiter};
use crate::arena::{Answers, Handler, WorkerRequest};
use crate::engine::pump;
use crate::error::{Error, ErrorKind, Operation};
use crate::memory_pressure::is_memory_short;
use crate::source_key::SourceKey;

impl Handler for Arc<Prefetcher> {
    fn on_request(&self, request: WorkerRequest, answers: Arc<Answers>) {
        let WorkerRequest { worker, loader, source, objects, announced, iterator, ended, .. } = request;
        if let Some(iterator) = ended.and_then(|ended| self.worker_iterators().remove(&(worker, ended))) {
            self.cancel(iterator);
        }
        // `answers` is kept until the announcement below is done, because dropping it publishes the answers.
        self.answer(loader, source, &objects, &answers);
        if !announced.is_empty() {
            let new_iterator = || self.new_iterator(loader);
            let iterator = *self.worker_iterators().entry((worker, iterator)).or_insert_with(new_iterator);
            let announced: Vec<_> = announced.into_iter().flatten().collect();
            self.announce(iterator, &self.objects(source, &announced));
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

impl Prefetcher {
    /// Only the service task locks it.
    fn worker_iterators(&self) -> MutexGuard<'_, HashMap<(u64, u32), u64>> {
        self.worker_iterators.lock().expect("no holder of this lock panics")
    }

    /// Takes the demanded objects of a request of a worker of `loader`.
    fn answer(self: &Arc<Self>, loader: u64, source: u64, objects: &[Option<SourceKey>], answers: &Arc<Answers>) {
        // A request that only announces has no answers.
        if objects.is_empty() {
            return;
        }
        self.sweep(source);
        let timer = Arc::new(self.stats.wait_timer(loader));
        let waiter = |position| Waiter::Answer { answers: answers.clone(), position, timer: timer.clone() };
        for position in objects.iter().enumerate().filter(|(_, key)| key.is_none()).map(|(position, _)| position) {
            let message = "a worker requested an object by an invalid name: a bug";
            self.deliver((waiter(position), Err(Error::new(ErrorKind::Config, Operation::Get, "", message))));
        }
        let valid = objects.iter().enumerate().filter_map(|(position, key)| Some((key.as_ref()?, waiter(position))));
        self.demand(loader, source, valid);
    }
}
