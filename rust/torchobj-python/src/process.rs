//! Keeps one client per configuration and bucket in a process. A forked child leaks the clients of its parent and makes
//! its own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use torchobj_core::cache::{CacheConfig, CacheValues, CachedStore, DiskCache};
use torchobj_core::client::Client;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::file_store::FileStore;
use torchobj_core::fork::{self, Local};
use torchobj_core::memory::MemoryStore;
use torchobj_core::policy::{ConcurrencyLimit, Counts, MetricsSnapshot, Outcome, Policy};
use torchobj_core::prefix::PrefixStore;
use torchobj_core::runtime::{cleaned_up, end_calls as end_all, is_ending, start};
use torchobj_core::store::ObjectStore;
use torchobj_core::upload::unfinished;
use torchobj_store::config::{GcsConfig, ProviderConfig, S3Config};
use torchobj_store::gcs::{self, GcsStore};
use torchobj_store::s3::{self, S3Store};

use crate::config::StoreConfig;
use crate::own::discard_all;
use crate::wait::SIGNAL_CHECK_INTERVAL;
use crate::{buffer, log};

/// Cache key of a client. Stores with equal keys share a client.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct StoreKey {
    provider: ProviderConfig,
    policy: Policy,
    /// The bucket, or the folder of a `file` URL.
    bucket: String,
    /// Prefix of all keys.
    prefix: String,
    cache: Option<CacheConfig>,
}

impl StoreKey {
    /// The key of a bucket or folder, or of a prefix in it.
    ///
    /// # Errors
    /// `Config`: no provider has this scheme.
    pub(crate) fn new(scheme: &str, bucket: String, prefix: String, config: StoreConfig) -> Result<Self> {
        let StoreConfig { providers, policy, cache } = config;
        match providers.for_scheme(scheme) {
            Some(provider) => Ok(Self { provider, policy, bucket, prefix, cache }),
            None => {
                let url = format!("{scheme}://{bucket}");
                let message = format!("no store for scheme {scheme:?}: must be s3, gs, file or memory");
                Err(Error::new(ErrorKind::Config, Operation::Connect, url, message))
            }
        }
    }
}

#[derive(Default)]
struct Clients {
    s3_accounts: HashMap<S3Config, Arc<s3::Account>>,
    gcs_accounts: HashMap<GcsConfig, Arc<gcs::Account>>,
    /// The client of a configuration whose concurrency limit and retry quota all others share.
    first: HashMap<(ProviderConfig, Policy), Arc<Client>>,
    clients: HashMap<StoreKey, Arc<Client>>,
    memory: HashMap<String, Arc<MemoryStore>>,
    /// `None` for one that cannot be used.
    caches: HashMap<CacheConfig, Option<Arc<DiskCache>>>,
}

static CLIENTS: Mutex<Option<Local<Clients>>> = Mutex::new(None);

/// Returns the client of this process for a key.
pub(crate) fn client(key: &StoreKey) -> Result<Arc<Client>> {
    // Clients need the runtime.
    start()?;
    let _inside = fork::enter();
    let mut clients = CLIENTS.lock().expect("no holder of this lock panics");
    let clients = Local::in_slot(&mut clients, Clients::default);
    if let Some(client) = clients.clients.get(key) {
        return Ok(client.clone());
    }
    let mut store = clients.store(key)?;
    // Other stores have no `cache_identity`: they create no folder.
    if let (Some(config), ProviderConfig::S3(_) | ProviderConfig::Gcs(_)) = (&key.cache, &key.provider)
        && let Some(cache) = clients.cache(config)?
    {
        store = Arc::new(CachedStore::new(store, cache));
    }
    if !key.prefix.is_empty() {
        store = Arc::new(PrefixStore::new(store, &key.prefix));
    }
    let StoreKey { provider, policy, .. } = key.clone();
    let client = match clients.first.entry((provider, policy.clone())) {
        Entry::Occupied(first) => Arc::new(first.get().sharing(store)),
        Entry::Vacant(first) => first.insert(Arc::new(Client::new(store, policy))).clone(),
    };
    clients.clients.insert(key.clone(), client.clone());
    Ok(client)
}

impl Clients {
    fn store(&mut self, key: &StoreKey) -> Result<Arc<dyn ObjectStore>> {
        let bucket = &key.bucket;
        match &key.provider {
            ProviderConfig::S3(config) => {
                let account = cached(&mut self.s3_accounts, config, s3::Account::new)?;
                Ok(Arc::new(S3Store::new(account, bucket)))
            }
            ProviderConfig::Gcs(config) => {
                let account = cached(&mut self.gcs_accounts, config, gcs::Account::new)?;
                Ok(Arc::new(GcsStore::new(account, bucket)))
            }
            ProviderConfig::File(config) => Ok(Arc::new(FileStore::with_config(Path::new("/").join(bucket), *config))),
            ProviderConfig::Memory => {
                let store = self.memory.entry(bucket.clone()).or_insert_with(|| Arc::new(MemoryStore::new(bucket)));
                Ok(store.clone())
            }
        }
    }

    /// The disk cache of a configuration; `None` if it cannot be used.
    fn cache(&mut self, config: &CacheConfig) -> Result<Option<Arc<DiskCache>>> {
        if let Some(cache) = self.caches.get(config) {
            return Ok(cache.clone());
        }
        let cache = DiskCache::open(config.clone())?.map(Arc::new);
        self.caches.insert(config.clone(), cache.clone());
        Ok(cache)
    }
}

/// Returns the account of a configuration, or makes it.
fn cached<C: Clone + Eq + Hash, A>(
    accounts: &mut HashMap<C, Arc<A>>,
    config: &C,
    make: impl FnOnce(C) -> Result<A>,
) -> Result<Arc<A>> {
    if let Some(account) = accounts.get(config) {
        return Ok(account.clone());
    }
    let account = Arc::new(make(config.clone())?);
    accounts.insert(config.clone(), account.clone());
    Ok(account)
}

/// Returns the metrics of the requests of this process, by all of its clients; a forked child starts at zero.
///
/// Returns:
///     Numbers by name. `requests` has the number of attempts by operation and outcome, in the order of `outcomes`; `first_byte`,
///     `body`, `reads` and `others` have the number of durations, their sum, and their 50th, 90th and 99th percentiles, in seconds.
#[pyfunction]
pub(crate) fn request_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (found, cached, permits) = py.detach(measured);
    let dict = PyDict::new(py);
    let requests = PyDict::new(py);
    for (operation, counts) in Operation::ALL.iter().zip(&found.requests) {
        requests.set_item(operation.to_string().replace(' ', "_"), counts)?;
    }
    dict.set_item("outcomes", Outcome::ALL.map(Outcome::name))?;
    dict.set_item("requests", requests)?;
    set_counts(&dict, found.by_name())?;
    set_counts(&dict, cached.by_name())?;
    dict.set_item("in_flight", permits.iter().map(|limit| limit.in_use()).sum::<usize>())?;
    dict.set_item("in_flight_limit", permits.iter().map(|limit| limit.limit()).sum::<usize>())?;
    dict.set_item("backing_off", permits.iter().map(|limit| limit.backing_off()).sum::<usize>())?;
    for (name, counts) in
        [("first_byte", &found.first_byte), ("body", &found.body), ("reads", &found.reads), ("others", &found.others)]
    {
        dict.set_item(name, durations(counts))?;
    }
    Ok(dict)
}

/// Sets the counts of a core struct under their names; a time in microseconds, `…_us`, is set in seconds as `…_s`.
pub(crate) fn set_counts(dict: &Bound<'_, PyDict>, counts: impl Iterator<Item = (&'static str, u64)>) -> PyResult<()> {
    for (name, count) in counts {
        match name.strip_suffix("_us") {
            Some(stem) => dict.set_item(format!("{stem}_s"), Duration::from_micros(count).as_secs_f64())?,
            None => dict.set_item(name, count)?,
        }
    }
    Ok(())
}

/// The number of samples, their sum, and their 50th, 90th and 99th percentiles, in seconds.
fn durations(counts: &Counts) -> (u64, f64, [Option<f64>; 3]) {
    let percentiles = [0.5, 0.9, 0.99].map(|share| counts.quantile(share).map(|took| took.as_secs_f64()));
    (counts.number(), counts.total().as_secs_f64(), percentiles)
}

/// The sums over all clients and disk caches of this process, and their concurrency limits, each once.
fn measured() -> (MetricsSnapshot, CacheValues, Vec<Arc<ConcurrencyLimit>>) {
    let _inside = fork::enter();
    let clients = CLIENTS.lock().expect("no holder of this lock panics");
    let (mut found, mut cached) = (MetricsSnapshot::default(), CacheValues::default());
    let Some(clients) = clients.as_ref().and_then(Local::get) else { return (found, cached, Vec::new()) };
    clients.caches.values().flatten().for_each(|cache| cache.add_to(&mut cached));
    clients.clients.values().for_each(|client| client.metrics().add_to(&mut found));
    (found, cached, clients.first.values().map(|client| client.permits().clone()).collect())
}

/// Returns a number that identifies this process.
///
/// No other process of the machine has it, also not one that gets the same process id later. A forked child has its own.
#[pyfunction]
pub(crate) fn process_number() -> u64 {
    fork::generation()
}

/// Returns the process id of a process.
///
/// Args:
///     number: `process_number()` of the process.
#[pyfunction]
pub(crate) fn process_id(number: u64) -> u32 {
    fork::pid_of(number)
}

/// Ends the calls of all other threads, and the uploads of all writers, for the end of the process: only the calling thread
/// can use stores afterwards. `finish` waits for it.
#[pyfunction]
pub(crate) fn end_calls(py: Python<'_>) {
    py.detach(end_all);
}

/// Waits until all calls have ended, and until the uploads that they and dropped writers began are aborted. A signal ends the
/// wait.
///
/// Args:
///     limit_s: Maximum number of seconds.
///
/// Returns:
///     URL of the object, id and state of each upload that is neither committed nor aborted. The id is None if the store has
///     not responded to its beginning; the state is whether a warning has named it.
#[pyfunction]
pub(crate) fn finish(py: Python<'_>, limit_s: f64) -> Vec<(String, Option<String>, bool)> {
    let until = Instant::now() + Duration::from_secs_f64(limit_s);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let finished = py.detach(|| {
            // A call that has not ended may use a writer.
            let discarded = !is_ending() || discard_all();
            cleaned_up(left.min(SIGNAL_CHECK_INTERVAL)) && discarded
        });
        buffer::release_exports(py);
        let delivered = log::deliver(py);
        if finished || left.is_zero() || delivered.and_then(|()| py.check_signals()).is_err() {
            break;
        }
    }
    py.detach(unfinished).into_iter().map(|upload| (upload.url, upload.id, upload.warned)).collect()
}
