//! Counters of a prefetcher and of each loader that uses it. Cheap enough to be always enabled: a few atomic additions per
//! object. A new counter is a line of [`Stats`], and a row of `torchobj/telemetry/table.py`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::decision::TakeOutcome;
use crate::client::Client;
use crate::counters::counters;
use crate::engine::Halt;
use crate::fork;
use crate::policy::MetricsSnapshot;

counters! {
    /// The counters of a prefetcher or of a loader.
    pub(super) struct Counters;

    /// Counters of a prefetcher since it was started, or the counters of one loader, and the current state of the
    /// prefetcher.
    pub struct Stats {
        counters {
            hits,
            late,
            queued,
            misses,
            objects,
            bytes,
            failed,
            evicted,
            over_budget,
            blocks_refused,
            memory_limited,
            request_limited,
            waited_us,
        }
        current {
            announced,
            in_flight,
            in_flight_limit,
            budget_bytes,
            used_bytes,
            resident_bytes,
            granted_bytes,
            ahead_bytes,
            transferred,
            copied,
            block_bytes,
            used_block_bytes,
        }
        /// Metrics of the requests of all clients that it uses, including requests of other users of these clients; of a
        /// loader: of its own requests.
        pub requests: MetricsSnapshot,
    }
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
        self.add(loader, 1, |counters| match found {
            TakeOutcome::Hit => &counters.hits,
            TakeOutcome::InFlight => &counters.late,
            TakeOutcome::Queued => &counters.queued,
            TakeOutcome::Unannounced => &counters.misses,
        });
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

    /// The counters, added to the current state `now`; of a loader with the metrics of its own requests.
    pub(super) fn report(&self, loader: Option<u64>, mut now: Stats) -> Stats {
        let Some(loader) = loader else {
            self.whole.add_to(&mut now);
            return now;
        };
        let of_loader = self.of(loader);
        let _inside = fork::enter();
        now.requests = MetricsSnapshot::default();
        let clients = of_loader.clients.lock().expect("no holder of this lock panics");
        clients.iter().for_each(|[_, measured]| measured.metrics().add_to(&mut now.requests));
        of_loader.counters.add_to(&mut now);
        now
    }
}
