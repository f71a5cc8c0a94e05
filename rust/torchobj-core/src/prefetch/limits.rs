//! Sums the concurrency limits and metrics of the clients of all sources. Creates no client and sends no request.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};

use super::{KnownSource, Prefetcher};
use crate::client::Client;
use crate::engine::add_once;
use crate::fork;
use crate::policy::{ConcurrencyLimit, Metrics, MetricsSnapshot};

impl Prefetcher {
    fn limits(&self) -> MutexGuard<'_, Vec<Arc<ConcurrencyLimit>>> {
        self.limits.lock().expect("no holder of this lock panics")
    }

    fn metrics(&self) -> MutexGuard<'_, Vec<Arc<Metrics>>> {
        self.metrics.lock().expect("no holder of this lock panics")
    }

    /// Includes the requests of these clients in the metrics.
    pub(super) fn add_metrics<'a>(&self, clients: impl IntoIterator<Item = &'a Arc<Client>>) {
        let mut metrics = self.metrics();
        clients.into_iter().for_each(|client| add_once(&mut metrics, client.metrics()));
    }

    /// Sets the clients whose limits are summed: those of these sources.
    pub(super) fn update_limits(&self, sources: &HashMap<u64, KnownSource>) {
        let mut limits = self.limits();
        limits.clear();
        let mut add = |client: &Arc<Client>| add_once(&mut limits, client.permits());
        for known in sources.values() {
            match known {
                KnownSource::Listed(source) => source.clients.iter().for_each(&mut add),
                KnownSource::Named(names) => names.clients().for_each(&mut add),
            }
        }
    }

    /// Metrics of the requests of all clients ever added.
    pub(super) fn measured(&self) -> MetricsSnapshot {
        let mut requests = MetricsSnapshot::default();
        self.metrics().iter().for_each(|metrics| requests.merge(&metrics.snapshot()));
        requests
    }

    /// Maximum number of concurrent announced reads. A read that is backing off has no request in flight and does not
    /// count.
    pub(super) fn limit(&self) -> usize {
        let _inside = fork::enter();
        self.limits().iter().map(|limit| limit.read_ahead_limit() + limit.backing_off()).sum::<usize>().max(1)
    }

    /// Records that demand exceeded the limit.
    pub(super) fn record_demand_exceeded(&self) {
        let _inside = fork::enter();
        self.limits().iter().for_each(|limit| limit.demand_exceeded());
    }
}
