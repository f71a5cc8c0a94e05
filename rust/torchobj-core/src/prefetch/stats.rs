//! Counters of a prefetcher and of each loader that uses it. Cheap enough to be always enabled: a few atomic additions per
//! object.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::decision::TakeOutcome;
use crate::arena::Usage;
use crate::client::Client;
use crate::engine::Halt;
use crate::fork;
use crate::policy::MetricsSnapshot;

#[derive(Debug, Default)]
pub(super) struct Counters {
    /// By [`TakeOutcome`].
    found: [AtomicU64; 4],
    objects: AtomicU64,
    bytes: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) over_budget: AtomicU64,
    pub(super) blocks_refused: AtomicU64,
    memory_limited: AtomicU64,
    request_limited: AtomicU64,
    waited_us: AtomicU64,
}

/// The counters of one loader.
#[derive(Debug, Default)]
struct OfLoader {
    counters: Counters,
    /// Clients of the sources, and the same clients with the metrics of this loader.
    clients: Mutex<Vec<[Arc<Client>; 2]>>,
}

/// The counters of a prefetcher, and those of each loader that uses it.
///
/// A loader is a number that its process assigned; 0 stands for everything that belongs to no loader.
#[derive(Debug, Default)]
pub(super) struct AllCounters {
    whole: Counters,
    loaders: Mutex<HashMap<u64, Arc<OfLoader>>>,
}

/// Adds the time from its creation to its drop to the total wait.
#[derive(Debug)]
pub(super) struct WaitTimer {
    since: Instant,
    counters: Arc<AllCounters>,
    loader: u64,
}

impl Drop for WaitTimer {
    fn drop(&mut self) {
        let waited_us = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.counters.add(self.loader, waited_us, |counters| &counters.waited_us);
    }
}

/// Counters of a prefetcher since it was started, or those of one loader, and the current state of the prefetcher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Objects that were ready when they were taken.
    pub hits: u64,
    /// Objects that were being read when they were taken.
    pub late: u64,
    /// Objects that were announced, and not being read yet, when they were taken.
    pub queued: u64,
    /// Objects that were not announced.
    pub misses: u64,
    /// Objects that were read.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Reads that failed after all retries.
    pub failed: u64,
    /// Results that were dropped for lack of memory, to be read again.
    pub evicted: u64,
    /// Reads whose result exceeded the budget.
    pub over_budget: u64,
    /// Requests for a block that the limits did not allow.
    pub blocks_refused: u64,
    /// Number of completed reads after which no other read started for lack of memory, or because no further object was
    /// announced for lack of memory.
    pub memory_limited: u64,
    /// Number of completed reads after which no other read started because the limit of concurrent reads was reached.
    pub request_limited: u64,
    /// Time that workers and callers waited for objects, from the request to its last answer, summed over all requests.
    pub waited: Duration,
    /// Entries that are announced or demanded, and not taken.
    pub announced: usize,
    /// Running reads.
    pub in_flight: usize,
    /// Maximum number of running reads; demanded reads may exceed it.
    pub limit: usize,
    /// Memory use of the arena.
    pub memory: Usage,
    /// Bytes of the arena that hold objects that were read ahead and not taken.
    pub ahead: u64,
    /// Metrics of the requests of all clients that it uses, including requests of other users of these clients; of a
    /// loader: of its own requests.
    pub requests: MetricsSnapshot,
}

impl AllCounters {
    fn loaders(&self) -> MutexGuard<'_, HashMap<u64, Arc<OfLoader>>> {
        self.loaders.lock().expect("no holder of this lock panics")
    }

    fn of(&self, loader: u64) -> Arc<OfLoader> {
        let _inside = fork::enter();
        self.loaders().entry(loader).or_default().clone()
    }

    /// Forgets the counters of a loader that no longer exists.
    pub(super) fn remove(&self, loader: u64) {
        let removed = {
            let _inside = fork::enter();
            self.loaders().remove(&loader)
        };
        drop(removed);
    }

    /// Adds to a counter of a loader and of the prefetcher.
    pub(super) fn add(&self, loader: u64, count: u64, counter: impl Fn(&Counters) -> &AtomicU64) {
        counter(&self.whole).fetch_add(count, Ordering::Relaxed);
        counter(&self.of(loader).counters).fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn found(&self, loader: u64, found: TakeOutcome) {
        self.add(loader, 1, |counters| &counters.found[found as usize]);
    }

    pub(super) fn read(&self, loader: u64, bytes: u64) {
        self.add(loader, 1, |counters| &counters.objects);
        self.add(loader, bytes, |counters| &counters.bytes);
    }

    /// Number of objects read.
    pub(super) fn objects(&self) -> u64 {
        self.whole.objects.load(Ordering::Relaxed)
    }

    /// Records, after a read for `loader` that succeeded, why no other read was started.
    pub(super) fn halted(&self, loader: u64, halt: Halt) {
        match halt {
            Halt::Idle => {}
            Halt::OutOfMemory => self.add(loader, 1, |counters| &counters.memory_limited),
            Halt::Limited => self.add(loader, 1, |counters| &counters.request_limited),
        }
    }

    /// Starts to measure the wait of a request.
    pub(super) fn wait_timer(self: &Arc<Self>, loader: u64) -> WaitTimer {
        WaitTimer { since: Instant::now(), counters: self.clone(), loader }
    }

    /// A client that also records the metrics of a loader.
    pub(super) fn client(&self, loader: u64, client: &Arc<Client>) -> Arc<Client> {
        let of_loader = self.of(loader);
        let _inside = fork::enter();
        let mut clients = of_loader.clients.lock().expect("no holder of this lock panics");
        if let Some([_, measured]) = clients.iter().find(|[known, _]| Arc::ptr_eq(known, client)) {
            return measured.clone();
        }
        let measured = Arc::new(client.measured());
        clients.push([client.clone(), measured.clone()]);
        measured
    }

    /// The counters, with the current state taken from `now`; of a loader with the metrics of its own requests.
    pub(super) fn report(&self, loader: Option<u64>, now: Stats) -> Stats {
        let Some(loader) = loader else { return self.whole.report(now) };
        let of_loader = self.of(loader);
        let _inside = fork::enter();
        let mut requests = MetricsSnapshot::default();
        let clients = of_loader.clients.lock().expect("no holder of this lock panics");
        clients.iter().for_each(|[_, measured]| requests.merge(&measured.metrics().snapshot()));
        of_loader.counters.report(Stats { requests, ..now })
    }
}

impl Counters {
    fn report(&self, now: Stats) -> Stats {
        let [hits, late, queued, misses] = std::array::from_fn(|index| self.found[index].load(Ordering::Relaxed));
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            hits,
            late,
            queued,
            misses,
            objects: count(&self.objects),
            bytes: count(&self.bytes),
            failed: count(&self.failed),
            evicted: count(&self.evicted),
            over_budget: count(&self.over_budget),
            blocks_refused: count(&self.blocks_refused),
            memory_limited: count(&self.memory_limited),
            request_limited: count(&self.request_limited),
            waited: Duration::from_micros(count(&self.waited_us)),
            ..now
        }
    }
}
