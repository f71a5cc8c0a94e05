//! A store with its policies: permits, rate limit, timeouts, retries and metrics. Holds the calls with short responses;
//! reads are in `read`, uploads in `upload`.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::policy::{
    Attempts, ConcurrencyLimit, HedgeDelay, MemoryLimit, Metrics, Permit, Policy, Quota, RateLimit, with_idle_timeout,
    within,
};
use crate::store::ObjectStore;
use crate::types::{Condition, ListEntry, ListPage, ListRequest, ObjectHead, Payload, Upload, Version};
use crate::url::ObjectUrl;

/// Added to the timeout of a delete for each key.
const TIMEOUT_PER_KEY: Duration = Duration::from_millis(500);

/// Timeout of a server-side copy. The response is sent when the copy is done: several GiB take minutes.
const COPY_TIMEOUT: Duration = Duration::from_secs(600);

/// Maximum number of pages of a listing of buckets, so that a faulty server does not extend it for ever.
const MAX_BUCKET_PAGES: usize = 10_000;

/// Maximum number of connections of a client: a quarter of the limit on open files, of which others need the rest.
pub fn max_connections() -> usize {
    let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
    limit.map_or(usize::MAX, |limit| (limit / 4).max(1))
}

/// A store with its policies. Shared by concurrent tasks in an `Arc`.
#[derive(Clone, Debug)]
pub struct Client {
    store: Arc<dyn ObjectStore>,
    policy: Policy,
    permits: Arc<ConcurrencyLimit>,
    quota: Arc<Quota>,
    rate_limit: Option<Arc<RateLimit>>,
    hedge_delay: Arc<HedgeDelay>,
    metrics: Arc<Metrics>,
    /// Memory of files that are uploaded.
    file_memory: Arc<MemoryLimit>,
    /// Whether the store was found to ignore `start_after` of listings.
    ignores_start_after: Arc<AtomicBool>,
}

impl Client {
    /// A client with its own permits and retry quota.
    pub fn new(store: Arc<dyn ObjectStore>, policy: Policy) -> Self {
        let max = max_connections();
        if policy.max_in_flight > max {
            log::warn!(
                "max_in_flight={} is reduced to {max}, a quarter of the limit on open files: raise it by `ulimit -n`",
                policy.max_in_flight
            );
        }
        let cap = policy.max_in_flight_cap.map(|cap| cap.min(max));
        let permits = ConcurrencyLimit::new(policy.max_in_flight.min(max), cap);
        let quota = Arc::new(Quota::new(permits.max()));
        let rate_limit = policy.upload_bytes_per_s.map(|rate| Arc::new(RateLimit::new(rate)));
        let (file_memory, hedge_delay) = (Arc::new(MemoryLimit::of_files(&policy)), Arc::default());
        let (metrics, ignores_start_after) = (Arc::default(), Arc::default());
        Self { store, policy, permits, quota, rate_limit, hedge_delay, metrics, file_memory, ignores_start_after }
    }

    /// A client of another bucket of the account, with the same permits, rate limit and quota; the rest is its own.
    #[must_use]
    pub fn sharing(&self, store: Arc<dyn ObjectStore>) -> Self {
        Self { store, hedge_delay: Arc::default(), metrics: Arc::default(), ..self.clone() }
    }

    /// The same client, with metrics of its own, which are also added to those of this one.
    #[must_use]
    pub fn measured(&self) -> Self {
        Self { metrics: Metrics::part_of(&self.metrics), ..self.clone() }
    }

    /// The store.
    pub fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// The settings.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Waits for a permit for one in-flight request.
    pub(crate) async fn permit(&self) -> Permit {
        self.permits.acquire().await
    }

    /// The limit on concurrent requests, shared by the clients of an account.
    pub fn permits(&self) -> &Arc<ConcurrencyLimit> {
        &self.permits
    }

    /// Waits until the rate limit allows `payload` to be sent. Called before a permit is taken, so that the wait holds none.
    pub(crate) async fn wait_for_rate(&self, payload: &Payload) {
        if let Some(rate_limit) = &self.rate_limit {
            rate_limit.acquire(payload.len() as u64).await;
        }
    }

    /// The memory of all files that are uploaded concurrently.
    pub(crate) fn file_memory(&self) -> &MemoryLimit {
        &self.file_memory
    }

    /// The hedge delay of reads.
    pub(crate) fn hedge_delay(&self) -> &HedgeDelay {
        &self.hedge_delay
    }

    /// Whether the store ignores `start_after`, so that listings are serial.
    pub(crate) fn ignores_start_after(&self) -> bool {
        self.ignores_start_after.load(Ordering::Relaxed)
    }

    /// Records that the store ignores `start_after`: found by a listing of `prefix`.
    pub(crate) fn set_ignores_start_after(&self, prefix: &str) {
        if !self.ignores_start_after.swap(true, Ordering::Relaxed) {
            let url = self.store.url(prefix);
            log::warn!("{url}: the server ignores start-after: its listings are requested page after page");
        }
    }

    /// The metrics of this client.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// The attempts of a request that is about to begin.
    pub fn attempts(&self) -> Attempts<'_> {
        Attempts::new(&self.policy, &self.quota, &self.permits, &self.metrics)
    }

    /// An error of kind `Timeout`.
    pub(crate) fn timed_out(&self, operation: Operation, key: &str, message: &str) -> Error {
        self.store.error(ErrorKind::Timeout, operation, key, message)
    }

    /// Makes attempts, each by a call of `attempt`, until one succeeds.
    ///
    /// # Errors
    /// The error of the last attempt, once the retries are used up; at once an error that is not to be retried.
    pub(crate) async fn retry<T, F>(&self, attempt: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut attempts = self.attempts();
        loop {
            match attempt().await {
                Ok(result) => {
                    attempts.succeeded();
                    return Ok(result);
                }
                Err(error) => attempts.failed(error).await?,
            }
        }
    }

    /// Makes one attempt of a call with a short response, with a permit and within `first_byte_timeout`.
    pub(crate) async fn attempt<T>(
        &self,
        operation: Operation,
        key: &str,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.attempt_within(self.policy.first_byte_timeout, operation, key, call).await
    }

    /// Makes one attempt of a call that may send many bytes or requests, with a permit and an idle timeout. `bytes` are those of
    /// an object, or of its part number `part`.
    pub(crate) async fn attempt_while_active<T>(
        &self,
        operation: Operation,
        key: &str,
        bytes: usize,
        part: Option<u32>,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let mut permit = self.permit().await;
        let began = Instant::now();
        let limit = self.policy.first_byte_timeout.max(self.policy.idle_timeout);
        let Some(result) = with_idle_timeout(limit, call).await else {
            let part = part.map_or(String::new(), |number| format!(" of part {number}"));
            return Err(self.timed_out(operation, key, &format!("no progress{part} for {} s", limit.as_secs_f64())));
        };
        if result.is_ok() {
            let now = Instant::now();
            permit.transferred(bytes as u64, now);
            self.metrics.succeeded(operation, bytes as u64, now - began);
        }
        result
    }

    async fn attempt_within<T>(
        &self,
        limit: Duration,
        operation: Operation,
        key: &str,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let _permit = self.permit().await;
        let began = Instant::now();
        match within(limit, call).await {
            Some(result) => result.inspect(|_| self.metrics.succeeded(operation, 0, began.elapsed())),
            None => Err(self.timed_out(operation, key, &format!("no response within {} s", limit.as_secs_f64()))),
        }
    }

    /// Returns the size, version and attributes of an object.
    ///
    /// # Errors
    /// `NotFound`, `AccessDenied`, and errors that persist after the retries.
    pub async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.head_by(key, || self.store.head(key)).await
    }

    /// As [`head`](Self::head), with the checksum of the object if the store has one and permits to decrypt the object.
    pub(crate) async fn head_with_checksum(&self, key: &str) -> Result<ObjectHead> {
        match self.head_by(key, || self.store.head_with_checksum(key)).await {
            Err(error) if error.kind() == ErrorKind::AccessDenied => self.head(key).await,
            head => head,
        }
    }

    async fn head_by<F>(&self, key: &str, call: impl Fn() -> F) -> Result<ObjectHead>
    where
        F: Future<Output = Result<ObjectHead>>,
    {
        self.store.check_key(Operation::Head, key)?;
        self.retry(|| self.attempt(Operation::Head, key, call())).await
    }

    /// Returns the buckets of an account, of a project on Google Cloud Storage, as entries with their names and times of
    /// creation.
    ///
    /// # Errors
    /// `Unsupported` if the store has no account, `AccessDenied`, and errors that persist after the retries; `Protocol` if
    /// the store repeats a bucket or a page.
    pub async fn buckets(&self, project: Option<&str>) -> Result<Vec<ListEntry>> {
        let operation = Operation::ListBuckets;
        let refuse = |problem: &str| Err(self.store.error(ErrorKind::Protocol, operation, "", problem));
        let (mut buckets, mut continuation) = (Vec::new(), None);
        let (mut names, mut tokens) = (HashSet::new(), HashSet::new());
        loop {
            let token = continuation.as_deref();
            let page = self.retry(|| self.attempt(operation, "", self.store.buckets(project, token))).await?;
            if let Some(bucket) = page.entries.iter().find(|bucket| !names.insert(bucket.key.clone())) {
                return refuse(&format!("the listing repeats the bucket {:?}", bucket.key));
            }
            buckets.extend(page.entries);
            continuation = page.continuation;
            match &continuation {
                None => return Ok(buckets),
                Some(token) if !tokens.insert(token.clone()) => {
                    return refuse("the listing repeats a continuation token: it would never end");
                }
                Some(_) if tokens.len() > MAX_BUCKET_PAGES => {
                    return refuse(&format!("the listing has more than {MAX_BUCKET_PAGES} pages"));
                }
                Some(_) => {}
            }
        }
    }

    /// Returns one page of a listing.
    ///
    /// # Errors
    /// `NoBucket`, `AccessDenied`, and errors that persist after the retries.
    pub async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        self.retry(|| self.attempt(Operation::List, request.prefix, self.store.list(request.clone()))).await
    }

    /// Copies an object of the same provider to `key`.
    ///
    /// # Errors
    /// `NotFound`, `AccessDenied`, `Unsupported` for an object of another provider, and errors that persist after the
    /// retries.
    pub async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        self.store.check_key(Operation::Copy, key)?;
        let timed_out = || {
            let message = format!("the copy did not complete within {} s", COPY_TIMEOUT.as_secs());
            self.timed_out(Operation::Copy, key, &message)
        };
        self.retry(|| async move {
            let _permit = self.permit().await;
            let began = Instant::now();
            let copied = within(COPY_TIMEOUT, self.store.copy(source, key)).await.unwrap_or_else(|| Err(timed_out()));
            copied.inspect(|_| self.metrics.succeeded(Operation::Copy, 0, began.elapsed()))
        })
        .await
    }

    /// Deletes objects; succeeds for objects that do not exist.
    ///
    /// # Errors
    /// Errors that persist after the retries, for one of the objects that could not be deleted.
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
            // A store without bulk delete sends one request per key.
            let limit =
                self.policy.first_byte_timeout + TIMEOUT_PER_KEY * u32::try_from(keys.len()).unwrap_or(u32::MAX);
            let call = self.store.delete(&keys);
            let error = match self.attempt_within(limit, Operation::Delete, &keys[0], call).await {
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

    /// Deletes an object if it has this version. Succeeds if the object does not exist.
    ///
    /// # Errors
    /// `Precondition` if it has another version; `Unsupported` if the store cannot compare and delete atomically; and errors
    /// that persist after the retries.
    pub async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.store.check_key(Operation::Delete, key)?;
        self.retry(|| self.attempt(Operation::Delete, key, self.store.delete_if(key, version))).await
    }

    /// Returns the unfinished uploads under `prefix`.
    ///
    /// # Errors
    /// `AccessDenied`, and errors that persist after the retries.
    pub async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        self.retry(|| self.attempt_while_active(Operation::ListUploads, prefix, 0, None, self.store.uploads(prefix)))
            .await
    }

    /// Aborts an upload and deletes its parts.
    ///
    /// # Errors
    /// Errors that persist after the retries.
    pub async fn abort(&self, upload: &Upload) -> Result<()> {
        self.retry(|| self.attempt_while_active(Operation::Abort, &upload.key, 0, None, self.store.abort(upload))).await
    }

    /// Returns an error for a condition that the store does not support.
    pub(crate) fn check_condition(&self, operation: Operation, key: &str, condition: &Condition) -> Result<()> {
        let capabilities = self.store.capabilities();
        let supported = match condition {
            Condition::Always => true,
            Condition::Absent => capabilities.put_if_absent,
            Condition::Matches(_) => capabilities.put_if_matches,
        };
        if supported {
            return Ok(());
        }
        Err(self.store.error(
            ErrorKind::Unsupported,
            operation,
            key,
            "this store does not support this write condition",
        ))
    }
}
