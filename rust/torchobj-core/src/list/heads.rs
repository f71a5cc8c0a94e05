//! Sends HEAD requests for many objects concurrently: for keys, or for the objects of a listing while it continues.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::{Filter, ListOptions, ListStream};
use crate::client::Client;
use crate::engine::{Batch, BatchRequest, permitted, run_all, try_run_all};
use crate::error::{ErrorKind, Operation, Result};
use crate::runtime::Task;
use crate::types::{ListPage, ObjectHead};

/// Maximum number of objects of a result of [`Scan::next`], and of objects whose HEAD requests wait for a permit.
const CHUNK: usize = 1000;

struct HeadRequest {
    client: Arc<Client>,
    key: String,
    checksum: bool,
}

impl BatchRequest for HeadRequest {
    type Output = (String, ObjectHead);

    async fn run(self) -> Result<Self::Output> {
        let Self { client, key, checksum } = self;
        if checksum {
            return Ok((key.clone(), client.head_with_checksum(&key).await?));
        }
        // Some stores return it with every head.
        let head = ObjectHead { checksum: None, ..client.head(&key).await? };
        Ok((key, head))
    }
}

fn requests(client: &Arc<Client>, keys: Vec<String>, checksum: bool) -> Vec<HeadRequest> {
    keys.into_iter().map(|key| HeadRequest { client: client.clone(), key, checksum }).collect()
}

/// Returns the keys with the size, version and attributes of their objects, or the errors, in the order of the keys.
/// `checksum`: also with the checksums that the store has.
pub async fn head_many(client: &Arc<Client>, keys: Vec<String>, checksum: bool) -> Vec<Result<(String, ObjectHead)>> {
    run_all(requests(client, keys, checksum), permitted([client.permits()])).await
}

/// As [`head_many`], if no request fails.
///
/// # Errors
/// The first error of a request, which aborts the others.
pub async fn try_head_many(
    client: &Arc<Client>,
    keys: Vec<String>,
    checksum: bool,
) -> Result<Vec<(String, ObjectHead)>> {
    try_run_all(requests(client, keys, checksum), permitted([client.permits()])).await
}

/// The user metadata that an object must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HasMetadata {
    /// Any, or none.
    Any,
    /// At least one entry.
    Some,
    /// An entry with this name, in lower case.
    Named(String),
}

impl HasMetadata {
    fn selects(&self, head: &ObjectHead) -> bool {
        let metadata = &head.attributes.metadata;
        match self {
            Self::Any => true,
            Self::Some => !metadata.is_empty(),
            Self::Named(name) => metadata.iter().any(|(other, _)| other == name),
        }
    }
}

/// The attributes of all objects of a listing, in no order. Dropping it aborts its requests.
#[derive(Debug)]
pub struct Scan {
    client: Arc<Client>,
    /// The keys of each page.
    pages: mpsc::Receiver<Result<Vec<String>>>,
    _listing: Task<()>,
    heads: Batch<HeadRequest>,
    listed: bool,
    has_metadata: HasMetadata,
}

impl Scan {
    /// Starts to list `prefix`. `filter` selects objects by their key, `has_metadata` by their metadata.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(client: Arc<Client>, prefix: &str, filter: Option<Filter>, has_metadata: HasMetadata) -> Self {
        // One page is received while the HEAD requests of another one are sent.
        let (sender, pages) = mpsc::channel(1);
        let options = ListOptions { filter, ordered: false, ..ListOptions::default() };
        let mut stream = ListStream::new(client.clone(), prefix, options);
        let listing = Task::spawn(async move {
            loop {
                let keys = |page: ListPage| page.entries.into_iter().map(|entry| entry.key).collect();
                let Some(page) = stream.next().await.map(|page| page.map(keys)).transpose() else { break };
                let failed = page.is_err();
                if sender.send(page).await.is_err() || failed {
                    break;
                }
            }
        });
        let heads = Batch::new(permitted([client.permits()]), false);
        Self { client, pages, _listing: listing, heads, listed: false, has_metadata }
    }

    /// Returns the next objects that were received, at least one; `None` after the last one. An object that was deleted after
    /// it was listed is omitted.
    ///
    /// # Errors
    /// Those of a listing and of HEAD requests. The scan cannot be continued afterwards.
    pub async fn next(&mut self) -> Result<Option<Vec<(String, ObjectHead)>>> {
        let mut found = Vec::new();
        loop {
            let listing = !self.listed && self.heads.pending() < self.heads.limit() + CHUNK;
            let head = tokio::select! {
                page = self.pages.recv(), if listing => {
                    match page.transpose()? {
                        Some(keys) => {
                            let requests = requests(&self.client, keys, false);
                            requests.into_iter().for_each(|request| self.heads.push(request));
                        },
                        None => self.listed = true,
                    }
                    continue;
                }
                head = self.heads.next(), if self.heads.pending() > 0 => head,
                else => return Ok((!found.is_empty()).then_some(found)),
            };
            match head {
                Some((_, Ok((key, head)))) if self.has_metadata.selects(&head) => found.push((key, head)),
                // It was deleted after it was listed.
                Some((_, Err(error)))
                    if error.kind() == ErrorKind::NotFound && error.operation() == Operation::Head => {}
                Some((_, Err(error))) => return Err(error),
                _ => {}
            }
            if found.len() >= CHUNK {
                return Ok(Some(found));
            }
        }
    }
}
