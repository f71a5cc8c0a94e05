//! One client per configuration and bucket in a process. What a forked child inherits belongs to its parent: it is
//! leaked there, never dropped, and built anew.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::fork::{self, Local};
use torchobj_core::memory::MemoryStore;
use torchobj_core::runtime::{cleaned_up, start};
use torchobj_core::store::ObjectStore;
use torchobj_core::transfer::Policy;
use torchobj_store::config::S3Config;
use torchobj_store::file::FileStore;
use torchobj_store::s3::{Account, S3Store};

use crate::{buffer, log};

/// What clients are known by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) scheme: String,
    /// The bucket; the folder for `file`.
    pub(crate) bucket: String,
    /// The environment that it was named in, by its fingerprint: another one may mean another endpoint or account.
    pub(crate) environment: u64,
}

#[derive(Default)]
struct Clients {
    accounts: HashMap<(u64, S3Config), Arc<Account>>,
    /// The client whose permits and retries those of the same configuration share.
    first: HashMap<(u64, S3Config, Policy), Arc<Client>>,
    clients: HashMap<(Place, S3Config, Policy), Arc<Client>>,
    memory: HashMap<String, Arc<MemoryStore>>,
}

static CLIENTS: Mutex<Option<Local<Clients>>> = Mutex::new(None);

/// The client of this process for a place.
pub(crate) fn client(place: &Place, config: S3Config, policy: Policy) -> Result<Arc<Client>> {
    // Whatever is asked of a client runs on it.
    start()?;
    let _inside = fork::enter();
    let mut clients = CLIENTS.lock().expect("no holder of this lock panics");
    let clients = Local::in_slot(&mut clients, Clients::default);
    let key = (place.clone(), config, policy);
    if let Some(client) = clients.clients.get(&key) {
        return Ok(client.clone());
    }
    let (_, config, policy) = key.clone();
    let store = clients.store(place, &config)?;
    let first = clients.first.entry((place.environment, config, policy.clone()));
    let client = match first {
        std::collections::hash_map::Entry::Occupied(first) => Arc::new(first.get().sharing(store)),
        std::collections::hash_map::Entry::Vacant(first) => first.insert(Arc::new(Client::new(store, policy))).clone(),
    };
    clients.clients.insert(key, client.clone());
    Ok(client)
}

impl Clients {
    fn store(&mut self, place: &Place, config: &S3Config) -> Result<Arc<dyn ObjectStore>> {
        match place.scheme.as_str() {
            "s3" => {
                let known = (place.environment, config.clone());
                let account = match self.accounts.get(&known) {
                    Some(account) => account.clone(),
                    None => {
                        let account = Arc::new(Account::new(config.clone())?);
                        self.accounts.insert(known, account.clone());
                        account
                    }
                };
                Ok(Arc::new(S3Store::new(account, &place.bucket)))
            }
            "file" => Ok(Arc::new(FileStore::new(Path::new("/").join(&place.bucket)))),
            "memory" => {
                let name = &place.bucket;
                let store = self.memory.entry(name.clone()).or_insert_with(|| Arc::new(MemoryStore::new(name)));
                Ok(store.clone())
            }
            scheme => {
                let url = format!("{scheme}://{}", place.bucket);
                let message = format!("no store for scheme {scheme:?}: there are s3, file and memory");
                Err(Error::new(ErrorKind::Config, Operation::Connect, url, message))
            }
        }
    }
}

/// Waits, for at most `limit_s`, until what dropped writers left behind is cleaned up; to be called at exit.
#[pyfunction]
pub(crate) fn finish(py: Python<'_>, limit_s: f64) {
    py.detach(|| cleaned_up(Duration::from_secs_f64(limit_s)));
    buffer::release_lent(py);
    log::deliver(py);
}
