//! The sources of a prefetcher: their objects, and their clients with the limits and metrics of these. Sends no request.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::decision::ObjectId;
use super::names::{Names, range_of};
use crate::arena::Arena;
use crate::client::Client;
use crate::engine::add_once;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::manifest::Manifest;
use crate::policy::{ConcurrencyLimit, Metrics, MetricsSnapshot};
use crate::read::ReadRequest;
use crate::source_key::SourceKey;

/// Assumed size of an object of unknown size, before one was read.
pub(super) const UNKNOWN_BYTES: u64 = 128 << 10;

/// A manifest and the clients that read its objects.
#[derive(Clone, Debug)]
pub struct ListedSource {
    /// The objects.
    pub manifest: Arc<Manifest>,
    /// One client for each base of the manifest.
    pub clients: Vec<Arc<Client>>,
    /// Whether an object must have the size and version of the manifest, which otherwise only estimate it.
    pub pinned: bool,
}

/// A source that was added.
#[derive(Debug)]
pub(super) enum RegisteredSource {
    Listed(ListedSource),
    Named(Names),
}

/// Sources by number.
pub(super) type SourceMap = HashMap<u64, RegisteredSource>;

/// The number of an object of a source. A reference that is new to its source gets one.
pub(super) fn number(sources: &mut SourceMap, source: u64, key: &SourceKey) -> ObjectId {
    let index = match (key, sources.get_mut(&source)) {
        (SourceKey::Index(index), _) => *index,
        (SourceKey::Ref(name), Some(RegisteredSource::Named(names))) => names.number(name),
        // An unknown source: reading this number returns the error.
        (SourceKey::Ref(_), _) => u64::MAX,
    };
    ObjectId { source, index }
}

/// All sources of a prefetcher.
#[derive(Debug)]
pub(super) struct Sources {
    registered: Mutex<SourceMap>,
    /// Concurrency limits of the clients of all current sources, each once.
    limits: Mutex<Vec<Arc<ConcurrencyLimit>>>,
    /// Metrics of the clients of all sources ever added, each once. Clients live as long as the process.
    metrics: Mutex<Vec<Arc<Metrics>>>,
    /// Moving average of the sizes that were unknown before the read.
    mean_bytes: AtomicU64,
}

impl Default for Sources {
    fn default() -> Self {
        Self {
            registered: Mutex::default(),
            limits: Mutex::default(),
            metrics: Mutex::default(),
            mean_bytes: AtomicU64::new(UNKNOWN_BYTES),
        }
    }
}

impl Sources {
    pub(super) fn lock(&self) -> MutexGuard<'_, SourceMap> {
        self.registered.lock().expect("no holder of this lock panics")
    }

    fn limits(&self) -> MutexGuard<'_, Vec<Arc<ConcurrencyLimit>>> {
        self.limits.lock().expect("no holder of this lock panics")
    }

    fn metrics(&self) -> MutexGuard<'_, Vec<Arc<Metrics>>> {
        self.metrics.lock().expect("no holder of this lock panics")
    }

    /// Adds a source.
    pub(super) fn add(&self, number: u64, source: RegisteredSource) {
        if let RegisteredSource::Listed(source) = &source {
            self.add_metrics(&source.clients);
        }
        let mut sources = self.lock();
        sources.insert(number, source);
        self.update_limits(&sources);
    }

    /// Removes a source. Its running reads complete.
    pub(super) fn remove(&self, number: u64) {
        let mut sources = self.lock();
        sources.remove(&number);
        self.update_limits(&sources);
    }

    /// Includes the requests of these clients in the metrics.
    fn add_metrics<'a>(&self, clients: impl IntoIterator<Item = &'a Arc<Client>>) {
        let mut metrics = self.metrics();
        clients.into_iter().for_each(|client| add_once(&mut metrics, client.metrics()));
    }

    /// Sets the clients whose limits are summed: those of these sources.
    fn update_limits(&self, sources: &SourceMap) {
        let mut limits = self.limits();
        limits.clear();
        let mut add = |client: &Arc<Client>| add_once(&mut limits, client.permits());
        for source in sources.values() {
            match source {
                RegisteredSource::Listed(source) => source.clients.iter().for_each(&mut add),
                RegisteredSource::Named(names) => names.clients().for_each(&mut add),
            }
        }
    }

    /// Metrics of the requests of all clients ever added.
    pub(super) fn measured(&self) -> MetricsSnapshot {
        let mut requests = MetricsSnapshot::default();
        self.metrics().iter().for_each(|metrics| metrics.add_to(&mut requests));
        requests
    }

    /// Maximum number of concurrent announced reads. A read that is backing off has no request in flight and does not
    /// count.
    pub(super) fn limit(&self) -> usize {
        self.limits().iter().map(|limit| limit.read_ahead_limit() + limit.backing_off()).sum::<usize>().max(1)
    }

    /// Records that demand exceeded the limit.
    pub(super) fn record_demand_exceeded(&self) {
        self.limits().iter().for_each(|limit| limit.demand_exceeded());
    }

    /// Bytes of the budget that an object takes.
    pub(super) fn charge(&self, sources: &SourceMap, object: ObjectId) -> u64 {
        let mean = self.mean_bytes.load(Ordering::Relaxed);
        match sources.get(&object.source) {
            Some(RegisteredSource::Listed(source)) => charge(&source.manifest, object.index, Some(mean)),
            Some(RegisteredSource::Named(names)) => {
                let length = names.get(object.index).and_then(|name| name.length());
                Arena::charge(length.unwrap_or(mean))
            }
            None => Arena::charge(mean),
        }
    }

    /// Records the size of an object that was unknown before the read.
    pub(super) fn update_mean_size(&self, size: u64) {
        let mean = self.mean_bytes.load(Ordering::Relaxed);
        self.mean_bytes.store(mean - mean / 16 + size / 16, Ordering::Relaxed);
    }

    /// The client that reads an object, its request, and whether the client was just created.
    pub(super) fn request(&self, object: ObjectId) -> Result<(Arc<Client>, ReadRequest, bool)> {
        let mut sources = self.lock();
        let (manifest, clients, pinned) = match sources.get_mut(&object.source).ok_or_else(|| unknown_object(object))? {
            RegisteredSource::Listed(source) => (&source.manifest, &source.clients, source.pinned),
            RegisteredSource::Named(names) => {
                let name = names.get(object.index).ok_or_else(|| unknown_object(object))?.clone();
                let (client, new) = names.client(&name)?;
                if new {
                    self.add_metrics([&client]);
                    self.update_limits(&sources);
                }
                return Ok((client, name.read(), new));
            }
        };
        let entry = usize::try_from(object.index).ok().and_then(|index| manifest.get(index));
        let entry = entry.ok_or_else(|| unknown_object(object))?;
        let base = manifest.bases().iter().position(|base| base == entry.base);
        let client = base.and_then(|base| clients.get(base)).ok_or_else(|| unknown_object(object))?;
        let read = ReadRequest::listed(entry, pinned);
        Ok((client.clone(), read, false))
    }
}

/// The range of an object that is given by name, as [`range_of`].
pub(super) fn named_range(sources: &SourceMap, object: ObjectId) -> Option<Range<u64>> {
    let Some(RegisteredSource::Named(names)) = sources.get(&object.source) else { return None };
    range_of(names.get(object.index)?)
}

/// Bytes of the budget that an object of a manifest takes. `mean` is the assumed size if the manifest has none.
pub fn charge(manifest: &Manifest, index: u64, mean: Option<u64>) -> u64 {
    let size = usize::try_from(index).ok().and_then(|index| manifest.size(index));
    Arena::charge(size.or(mean).unwrap_or(UNKNOWN_BYTES))
}

pub(super) fn unknown_object(object: ObjectId) -> Error {
    let message =
        format!("object {} of source {} is unknown: the source was removed, or a bug", object.index, object.source);
    Error::new(ErrorKind::Config, Operation::Get, "", message)
}
