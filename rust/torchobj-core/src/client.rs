//! A store joined with the policies that stand over it. What reads and writes go through; they live in `read` and
//! `upload`, the short calls here.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::read::Read;
use crate::store::ObjectStore;
use crate::transfer::{Attempts, Lateness, Metrics, Pace, Permit, Permits, Policy, Quota, idle, within};
use crate::types::{Condition, ListPage, ListRequest, ObjectHead, Payload, PutOptions, Upload, Version};
use crate::upload::of_changed_memory;
use crate::url::ObjectUrl;

/// What one key of many adds to the time that a delete may take.
const PER_DELETE: Duration = Duration::from_millis(500);

/// A server-side copy answers at its end: several GiB take minutes.
const COPY_TIMEOUT: Duration = Duration::from_secs(600);

/// How many connections a client may have: a quarter of the limit on open files, so that other clients, what is open in the
/// program, and its pipes have the rest.
pub fn most_connections() -> usize {
    let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
    limit.map_or(usize::MAX, |limit| (limit / 4).max(1))
}

/// A store, and how it is used: cheap to share, safe to use from many tasks at once.
#[derive(Debug)]
pub struct Client {
    store: Arc<dyn ObjectStore>,
    policy: Policy,
    permits: Arc<Permits>,
    quota: Arc<Quota>,
    pace: Option<Arc<Pace>>,
    lateness: Lateness,
    metrics: Arc<Metrics>,
}

impl Client {
    /// A client with permits and a retry quota of its own.
    pub fn new(store: Arc<dyn ObjectStore>, policy: Policy) -> Self {
        let most = most_connections();
        if policy.max_in_flight > most {
            log::warn!("at most {most} requests are in flight: a quarter of the limit on open files (ulimit -n)");
        }
        let cap = policy.max_in_flight_cap.map(|cap| cap.min(most));
        let permits = Permits::new(policy.max_in_flight.min(most), cap);
        let quota = Arc::new(Quota::new(permits.most()));
        let pace = policy.upload_bytes_per_s.map(|rate| Arc::new(Pace::new(rate)));
        Self { store, policy, permits, quota, pace, lateness: Lateness::default(), metrics: Arc::default() }
    }

    /// Another store under the permits and the quota of this client: another bucket of one account. How soon it answers
    /// is counted for itself.
    #[must_use]
    pub fn sharing(&self, store: Arc<dyn ObjectStore>) -> Self {
        let (policy, permits, quota) = (self.policy.clone(), self.permits.clone(), self.quota.clone());
        let pace = self.pace.clone();
        Self { store, policy, permits, quota, pace, lateness: Lateness::default(), metrics: Arc::default() }
    }

    /// The store underneath.
    pub fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// How it is used.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Waits for leave to have a request in flight.
    pub(crate) async fn permit(&self) -> Permit {
        self.permits.acquire().await
    }

    /// How many requests may be in flight: shared by the clients of an account.
    pub(crate) fn permits(&self) -> &Arc<Permits> {
        &self.permits
    }

    /// Waits until so many bytes may be sent; before a permit is taken, which others need meanwhile.
    pub(crate) async fn pace(&self, payload: &Payload) {
        if let Some(pace) = &self.pace {
            pace.leave(payload.len() as u64).await;
        }
    }

    /// When an answer is late.
    pub(crate) fn lateness(&self) -> &Lateness {
        &self.lateness
    }

    /// What its requests met.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// The attempts of one request that is about to begin.
    pub(crate) fn attempts(&self) -> Attempts<'_> {
        Attempts::new(&self.policy, &self.quota).telling(&self.permits, &self.metrics)
    }

    /// What silence means.
    pub(crate) fn silence(&self, operation: Operation, key: &str, what: &str) -> Error {
        self.store.error(ErrorKind::Timeout, operation, key, what)
    }

    /// One attempt of a call with a short answer, with its time limit.
    async fn ask<T>(&self, operation: Operation, key: &str, call: impl Future<Output = Result<T>>) -> Result<T> {
        self.ask_within(self.policy.first_byte_timeout, operation, key, call).await
    }

    async fn ask_within<T>(
        &self,
        limit: Duration,
        operation: Operation,
        key: &str,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let _permit = self.permit().await;
        match within(limit, call).await {
            Some(answer) => answer,
            None => Err(self.silence(operation, key, &format!("no answer within {} s", limit.as_secs_f64()))),
        }
    }

    /// Size, version and attributes of an object.
    ///
    /// # Errors
    /// `NotFound`, `AccessDenied`, and what persists after the retries.
    pub async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.store.check_key(Operation::Head, key)?;
        let mut attempts = self.attempts();
        loop {
            match self.ask(Operation::Head, key, self.store.head(key)).await {
                Ok(head) => {
                    attempts.succeeded();
                    return Ok(head);
                }
                Err(error) => attempts.failed(error).await?,
            }
        }
    }

    /// One page of a listing.
    ///
    /// # Errors
    /// `NoBucket`, `AccessDenied`, and what persists after the retries.
    pub async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        let mut attempts = self.attempts();
        loop {
            match self.ask(Operation::List, request.prefix, self.store.list(request.clone())).await {
                Ok(page) => {
                    attempts.succeeded();
                    return Ok(page);
                }
                Err(error) => attempts.failed(error).await?,
            }
        }
    }

    /// Writes an object in one request. A conditional write whose answer was lost is settled by reading it back.
    ///
    /// # Errors
    /// `Precondition`, `AccessDenied`, and what persists after the retries.
    pub async fn put_whole(self: &Arc<Self>, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.store.check_key(Operation::Put, key)?;
        let mut attempts = self.attempts();
        loop {
            self.pace(payload).await;
            let mut permit = self.permit().await;
            let limit = self.policy.first_byte_timeout.max(self.policy.idle_timeout);
            let error = match idle(limit, self.store.put(key, payload, options)).await {
                Some(Ok(version)) => {
                    permit.moved(payload.len() as u64, Instant::now());
                    attempts.succeeded();
                    return Ok(version);
                }
                Some(Err(error)) => error,
                None => self.silence(Operation::Put, key, &format!("nothing moved for {} s", limit.as_secs_f64())),
            };
            drop(permit);
            if error.kind() == ErrorKind::Precondition
                && attempts.outcome_unknown()
                && let Some(version) = self.holds(key, payload).await?
            {
                attempts.succeeded();
                return Ok(version);
            }
            if let Err(error) = attempts.failed(of_changed_memory(error, payload)?).await {
                // The store may have done it all the same.
                if attempts.outcome_unknown()
                    && let Ok(Some(version)) = self.holds(key, payload).await
                {
                    attempts.succeeded();
                    return Ok(version);
                }
                return Err(error);
            }
        }
    }

    /// The version of the object `key` if it is `payload`, byte for byte.
    async fn holds(self: &Arc<Self>, key: &str, payload: &Payload) -> Result<Option<Version>> {
        let landed = match self.get(Read::whole(key)).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            landed => landed?,
        };
        let mut rest = landed.buffer.as_slice();
        for piece in payload.pieces() {
            match rest.strip_prefix(&**piece) {
                Some(behind) => rest = behind,
                None => return Ok(None),
            }
        }
        Ok(landed.version.filter(|_| rest.is_empty()))
    }

    /// Copies an object of the same kind of store to `key`.
    ///
    /// # Errors
    /// `NotFound`, `AccessDenied`, `Unsupported` between kinds of store, and what persists after the retries.
    pub async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        self.store.check_key(Operation::Copy, key)?;
        let mut attempts = self.attempts();
        loop {
            let permit = self.permit().await;
            let error = match within(COPY_TIMEOUT, self.store.copy(source, key)).await {
                Some(Ok(version)) => {
                    attempts.succeeded();
                    return Ok(version);
                }
                Some(Err(error)) => error,
                None => self.silence(Operation::Copy, key, "the copy took too long"),
            };
            drop(permit);
            attempts.failed(error).await?;
        }
    }

    /// Deletes objects; one that does not exist is no error.
    ///
    /// # Errors
    /// What persists after the retries; the first of the objects that could not be deleted.
    pub async fn delete(&self, keys: &[String]) -> Result<()> {
        for key in keys {
            self.store.check_key(Operation::Delete, key)?;
        }
        for chunk in keys.chunks(self.store.capabilities().max_delete_keys) {
            self.delete_chunk(chunk.to_vec()).await?;
        }
        Ok(())
    }

    async fn delete_chunk(&self, mut keys: Vec<String>) -> Result<()> {
        let mut attempts = self.attempts();
        loop {
            // A store without bulk delete takes a request for each.
            let limit = self.policy.first_byte_timeout + PER_DELETE * u32::try_from(keys.len()).unwrap_or(u32::MAX);
            let call = self.store.delete(&keys);
            let error = match self.ask_within(limit, Operation::Delete, &keys[0], call).await {
                Ok(mut failed) => {
                    let Some((key, error)) = failed.pop() else { break };
                    keys = failed.into_iter().map(|(key, _)| key).chain([key]).collect();
                    error
                }
                Err(error) => error,
            };
            attempts.failed(error).await?;
        }
        attempts.succeeded();
        Ok(())
    }

    /// Deletes an object if it is of this version; one that does not exist is no error.
    ///
    /// # Errors
    /// `Precondition` where it is of another version; `Unsupported` where the store cannot compare and delete in one
    /// step; and what persists after the retries.
    pub async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.store.check_key(Operation::Delete, key)?;
        let mut attempts = self.attempts();
        loop {
            match self.ask(Operation::Delete, key, self.store.delete_if(key, version)).await {
                Ok(()) => {
                    attempts.succeeded();
                    return Ok(());
                }
                Err(error) => attempts.failed(error).await?,
            }
        }
    }

    /// Unfinished uploads under `prefix`.
    ///
    /// # Errors
    /// `AccessDenied`, and what persists after the retries.
    pub async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        let mut attempts = self.attempts();
        loop {
            match self.ask(Operation::ListUploads, prefix, self.store.uploads(prefix)).await {
                Ok(uploads) => {
                    attempts.succeeded();
                    return Ok(uploads);
                }
                Err(error) => attempts.failed(error).await?,
            }
        }
    }

    /// Forgets an upload and its parts.
    ///
    /// # Errors
    /// What persists after the retries.
    pub async fn abort(&self, upload: &Upload) -> Result<()> {
        let mut attempts = self.attempts();
        loop {
            match self.ask(Operation::Abort, &upload.key, self.store.abort(upload)).await {
                Ok(()) => {
                    attempts.succeeded();
                    return Ok(());
                }
                Err(error) => attempts.failed(error).await?,
            }
        }
    }

    /// Refuses a condition that the store does not keep.
    pub(crate) fn check_condition(&self, operation: Operation, key: &str, condition: &Condition) -> Result<()> {
        let capabilities = self.store.capabilities();
        let kept = match condition {
            Condition::Always => true,
            Condition::Absent => capabilities.put_if_absent,
            Condition::Matches(_) => capabilities.put_if_matches,
        };
        if kept {
            return Ok(());
        }
        Err(self.store.error(ErrorKind::Unsupported, operation, key, "this store keeps no conditions on writes"))
    }
}
