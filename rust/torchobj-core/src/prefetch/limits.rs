//! How many reads the clients of all sources permit, and what their requests met. Makes no client, and no read.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};

use super::{Known, Prefetcher};
use crate::client::Client;
use crate::fork;
use crate::transfer::{Measured, Metrics, Permits};

impl Prefetcher {
    fn permits(&self) -> MutexGuard<'_, Vec<Arc<Permits>>> {
        self.permits.lock().expect("no holder of this lock panics")
    }

    fn metrics(&self) -> MutexGuard<'_, Vec<Arc<Metrics>>> {
        self.metrics.lock().expect("no holder of this lock panics")
    }

    /// Counts what the requests of these clients meet from now on.
    pub(super) fn see_metrics<'a>(&self, clients: impl IntoIterator<Item = &'a Arc<Client>>) {
        let mut metrics = self.metrics();
        clients.into_iter().for_each(|client| add_once(&mut metrics, client.metrics()));
    }

    /// Asks the clients of these sources for permits from now on, and no others.
    pub(super) fn see_permits(&self, sources: &HashMap<u64, Known>) {
        let mut permits = self.permits();
        permits.clear();
        let mut see = |client: &Arc<Client>| add_once(&mut permits, client.permits());
        for known in sources.values() {
            match known {
                Known::Listed(source) => source.clients.iter().for_each(&mut see),
                Known::Named(names) => names.made().for_each(&mut see),
            }
        }
    }

    /// What the requests met of all clients that there ever were.
    pub(super) fn measured(&self) -> Measured {
        let mut requests = Measured::default();
        self.metrics().iter().for_each(|metrics| requests.merge(&metrics.measured()));
        requests
    }

    /// How many announced reads there may be at a time. One that waits to try again is no request in flight.
    pub(super) fn limit(&self) -> usize {
        let _inside = fork::enter();
        self.permits().iter().map(|permits| permits.ahead() + permits.resting()).sum::<usize>().max(1)
    }

    /// Says that more reads could be made if there were leave.
    pub(super) fn reach(&self) {
        let _inside = fork::enter();
        self.permits().iter().for_each(|permits| permits.reach());
    }
}

fn add_once<T>(all: &mut Vec<Arc<T>>, one: &Arc<T>) {
    if !all.iter().any(|other| Arc::ptr_eq(other, one)) {
        all.push(one.clone());
    }
}
