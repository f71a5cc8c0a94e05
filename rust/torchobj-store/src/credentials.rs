//! Loads the credentials of an account, of any provider, in a separate task, and refreshes them before they expire. A
//! request waits for that task if there are no valid credentials; otherwise it uses the current ones.
//!
//! A [`Loader`] loads credentials of a provider. A [`CredentialProvider`] is a loader that calls a callable of the user,
//! which implements [`CredentialSource`].

use std::error::Error;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use tokio::sync::{Mutex, oneshot};
use torchobj_core::runtime::Task;

use crate::http::{Chain, sanitize};

/// Credentials are refreshed this long before they expire, or after half of their lifetime if that is later.
const REFRESH_AHEAD: Duration = Duration::from_secs(300);

/// Average delay after a failed refresh.
const RETRY_EVERY: Duration = Duration::from_secs(10);

/// Time limit of a call of a credential provider: less than `first_byte_timeout`, so that a request that waits for it fails
/// with its error and is not retried.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// The reason why credentials could not be loaded.
pub(crate) type LoadError = Arc<dyn Error + Send + Sync>;

/// Credentials returned by a credential provider. Types with secrets have no `Debug`.
pub struct ProvidedCredentials {
    /// Access key id of S3.
    pub access_key_id: Option<String>,
    /// Secret access key of S3.
    pub secret_access_key: Option<String>,
    /// Session token of S3, or an access token.
    pub token: Option<String>,
    /// Time of expiry; `None`: never.
    pub expires_at: Option<SystemTime>,
}

/// Receives the credentials that a callable returned, or an error message without secrets.
pub type CredentialSender = oneshot::Sender<Result<ProvidedCredentials, String>>;

/// Runs a callable of the user that returns credentials.
pub trait CredentialSource: Send + Sync {
    /// Identifies the callable in this process: clients of the same callable share credentials.
    fn id(&self) -> u64;

    /// Starts a call, on a thread that may block for a short time. The call sends its result to `sender` when it ends.
    fn start(&self, sender: CredentialSender);
}

/// The `credential_provider` of a configuration. Comparison and hash use its id.
#[derive(Clone)]
pub struct CredentialProvider(Arc<dyn CredentialSource>);

impl CredentialProvider {
    /// A provider that calls `source`.
    pub fn new(source: Arc<dyn CredentialSource>) -> Self {
        Self(source)
    }

    /// Calls it, for at most [`CALL_TIMEOUT`].
    pub(crate) async fn call(&self) -> Result<ProvidedCredentials, String> {
        self.call_within(CALL_TIMEOUT).await
    }

    async fn call_within(&self, limit: Duration) -> Result<ProvidedCredentials, String> {
        let late = |_| format!("credential_provider did not return within {} s", limit.as_secs_f64());
        let gone = || "credential_provider was not called, or its thread ended".to_owned();
        let (sender, receiver) = oneshot::channel();
        let source = self.0.clone();
        let called = async {
            tokio::task::spawn_blocking(move || source.start(sender)).await.map_err(|_| gone())?;
            receiver.await.map_err(|_| gone())?
        };
        let called = tokio::time::timeout(limit, called).await.map_err(late)?;
        let provided = called.map_err(|message| sanitize(&message, 500))?;
        match provided.expires_at.map(|expires| expires.elapsed()) {
            Some(Ok(ago)) => {
                Err(format!("credential_provider returned credentials that expired {:.1} s ago", ago.as_secs_f64()))
            }
            _ => Ok(provided),
        }
    }
}

impl PartialEq for CredentialProvider {
    fn eq(&self, other: &Self) -> bool {
        self.0.id() == other.0.id()
    }
}

impl Eq for CredentialProvider {}

impl Hash for CredentialProvider {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.id().hash(state);
    }
}

/// Checks that [`ProvidedCredentials`] has a value, and that a header can contain it.
pub(crate) fn required(name: &str, value: Option<String>) -> Result<String, String> {
    match value {
        Some(value) if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(value),
        Some(_) => {
            Err(format!("credential_provider returned a value of {name:?} that is empty, or not printable ASCII"))
        }
        None => Err(format!("credential_provider returned no {name:?}")),
    }
}

/// The error of a load.
pub(crate) fn failed(message: &str) -> LoadError {
    Arc::from(Box::<dyn Error + Send + Sync>::from(message))
}

/// No source of a provider has credentials.
#[derive(Debug)]
pub(crate) struct NoneFound {
    /// The sources.
    pub(crate) sources: String,
    /// Why the last one, the metadata service of the machine, has none.
    pub(crate) reason: String,
}

impl fmt::Display for NoneFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "none were found in {} ({})", self.sources, self.reason)
    }
}

impl Error for NoneFound {}

/// Credentials that cannot be used, and why.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) message: String,
    /// The next step; `None`: that of any failed load.
    pub(crate) hint: Option<String>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Refused {}

/// The message of a failed load, and the next step: `hint`, before what only the machines of the provider have.
pub(crate) fn described(error: &LoadError, hint: &str) -> (String, String) {
    if let Some(Refused { message, hint: own }) = error.downcast_ref() {
        return (message.clone(), own.clone().unwrap_or_else(|| hint.to_owned()));
    }
    match error.downcast_ref::<NoneFound>() {
        Some(NoneFound { sources, reason }) => {
            let hint = format!("{hint} (the metadata service of the machine: {reason})");
            (format!("no credentials were found in {sources}"), hint)
        }
        None => (format!("no credentials: {}", Chain(error)), hint.to_owned()),
    }
}

/// Credentials returned by a [`Loader`].
pub(crate) struct Fresh<I> {
    pub(crate) identity: I,
    pub(crate) expires: Option<SystemTime>,
}

/// Loads the credentials of an account.
#[async_trait]
pub(crate) trait Loader<I>: Send + Sync {
    /// Loads credentials. `bypass_cache`: a cached result must not be used, because the store refused it.
    async fn load(&self, bypass_cache: bool) -> Result<Fresh<I>, LoadError>;
}

/// The current credentials.
pub(crate) struct Loaded<I> {
    pub(crate) identity: I,
    pub(crate) expires: Option<SystemTime>,
    /// Number of the identity, from 1. A load that returns the same identity does not change it.
    pub(crate) generation: u64,
}

/// The credentials of an account: the current ones, and their loader.
pub(crate) struct Credentials<I> {
    loader: Box<dyn Loader<I>>,
    loaded: RwLock<Option<Arc<Loaded<I>>>>,
    /// The generation whose access key the store does not know, or 0: the next request loads others.
    rejected: AtomicU64,
    /// Held during a load, so that only one runs.
    loading: Mutex<Loading<I>>,
}

struct Loading<I> {
    /// The running load; the request that started it may have been cancelled.
    running: Option<Task<Result<Arc<Loaded<I>>, LoadError>>>,
    /// Time and error of the last load, if it failed.
    failed: Option<(Instant, LoadError)>,
    /// The task that refreshes credentials that expire.
    refresh: Option<Task<()>>,
    /// Time of the last load that replaced expired credentials by the same ones.
    unchanged_at: Option<Instant>,
}

impl<I> fmt::Debug for Credentials<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The `Debug` of a loader could contain secrets.
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl<I: Clone + PartialEq + Send + Sync + 'static> Credentials<I> {
    pub(crate) fn new(loader: Box<dyn Loader<I>>) -> Self {
        let loading = Mutex::new(Loading { running: None, failed: None, refresh: None, unchanged_at: None });
        Self { loader, loaded: RwLock::default(), rejected: AtomicU64::new(0), loading }
    }

    fn loaded(&self) -> Option<Arc<Loaded<I>>> {
        self.loaded.read().expect("no holder of this lock panics").clone()
    }

    /// The current credentials, if they are valid.
    fn valid(&self) -> Option<Arc<Loaded<I>>> {
        let loaded = self.loaded()?;
        let unexpired = loaded.expires.is_none_or(|expires| SystemTime::now() < expires);
        (unexpired && loaded.generation != self.rejected.load(Ordering::Relaxed)).then_some(loaded)
    }

    /// Returns valid credentials; loads them if there are none.
    pub(crate) async fn current(self: &Arc<Self>) -> Result<Arc<Loaded<I>>, LoadError> {
        if let Some(loaded) = self.valid() {
            return Ok(loaded);
        }
        let started = Instant::now();
        let mut loading = self.loading.lock().await;
        if let Some(loaded) = self.valid() {
            return Ok(loaded);
        }
        // Requests that waited for the same load share its error, so that a loader that blocks delays each only once.
        if let Some((_, error)) = loading.failed.as_ref().filter(|(at, _)| *at >= started) {
            return Err(error.clone());
        }
        let rejected = self.rejected.swap(0, Ordering::Relaxed) != 0;
        let loaded = self.load(&mut loading, rejected).await?;
        if loaded.expires.is_some() && loading.refresh.is_none() {
            loading.refresh = Some(Task::spawn(refresh(Arc::downgrade(self))));
        }
        Ok(loaded)
    }

    /// Waits for the running load, or for a new one if none runs. Cancelling the wait does not cancel the load.
    async fn load(self: &Arc<Self>, loading: &mut Loading<I>, bypass_cache: bool) -> Result<Arc<Loaded<I>>, LoadError> {
        let started = || {
            let this = self.clone();
            Task::spawn(async move { Ok(this.publish(this.loader.load(bypass_cache).await?)) })
        };
        let outcome = loading.running.get_or_insert_with(started).await;
        loading.running = None;
        let outcome = outcome.unwrap_or_else(|lost| std::panic::resume_unwind(lost.into_panic()));
        loading.failed = outcome.as_ref().err().map(|error| (Instant::now(), error.clone()));
        outcome
    }

    fn publish(&self, Fresh { identity, expires }: Fresh<I>) -> Arc<Loaded<I>> {
        let mut loaded = self.loaded.write().expect("no holder of this lock panics");
        let generation = match &*loaded {
            None => 1,
            Some(before) if before.identity == identity => before.generation,
            Some(before) => before.generation + 1,
        };
        let fresh = Arc::new(Loaded { identity, expires, generation });
        *loaded = Some(fresh.clone());
        fresh
    }

    /// Replaces the credentials of `generation`, which have expired according to the store. Returns whether others are
    /// current now.
    pub(crate) async fn replace_expired(self: &Arc<Self>, generation: u64) -> bool {
        const AGAIN_AFTER: Duration = Duration::from_secs(1);
        let mut loading = self.loading.lock().await;
        if self.loaded().is_some_and(|loaded| loaded.generation != generation) {
            return true;
        }
        // Many requests are refused at the same time: only one of them loads.
        if loading.unchanged_at.is_some_and(|at| at.elapsed() < AGAIN_AFTER) {
            return false;
        }
        let replaced = match self.load(&mut loading, true).await {
            Ok(loaded) => loaded.generation != generation,
            Err(error) => {
                log::warn!("the credentials have expired and could not be reloaded: {error}");
                false
            }
        };
        loading.unchanged_at = (!replaced).then(Instant::now);
        replaced
    }

    /// Records that the store rejected the credentials of `generation`: the next request loads others.
    pub(crate) fn reject(&self, generation: u64) {
        self.rejected.store(generation, Ordering::Relaxed);
    }
}

/// Refreshes credentials before they expire, until they are dropped.
async fn refresh<I: Clone + PartialEq + Send + Sync + 'static>(credentials: Weak<Credentials<I>>) {
    loop {
        let Some(this) = credentials.upgrade() else { return };
        let expires = this.loaded().and_then(|loaded| loaded.expires);
        drop(this);
        let left = expires.and_then(|expires| expires.duration_since(SystemTime::now()).ok()).unwrap_or(RETRY_EVERY);
        // Jitter: ranks that started at the same time should not refresh at the same time.
        let early = REFRESH_AHEAD.min(left / 2).mul_f64(1.0 - 0.2 * fastrand::f64());
        tokio::time::sleep((left - early).max(Duration::from_secs(1))).await;
        let Some(this) = credentials.upgrade() else { return };
        let refreshed = this.load(&mut *this.loading.lock().await, false).await;
        drop(this);
        if let Err(error) = refreshed {
            log::warn!("the credentials could not be refreshed, retrying: {error}");
            tokio::time::sleep(RETRY_EVERY.mul_f64(0.5 + fastrand::f64())).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    type TestCredentials = Arc<Credentials<String>>;

    /// Counts loads, and those that bypass the cache. Load n returns `make(n)`.
    struct CountingLoader<F>(Arc<[AtomicU32; 2]>, F);

    #[async_trait]
    impl<F: Fn(u32) -> Result<Fresh<String>, String> + Send + Sync> Loader<String> for CountingLoader<F> {
        async fn load(&self, bypass_cache: bool) -> Result<Fresh<String>, LoadError> {
            self.0[1].fetch_add(u32::from(bypass_cache), Ordering::SeqCst);
            let count = self.0[0].fetch_add(1, Ordering::SeqCst) + 1;
            tokio::time::sleep(Duration::from_millis(10)).await;
            (self.1)(count).map_err(|message| failed(&message))
        }
    }

    fn loading(
        make: impl Fn(u32) -> Result<Fresh<String>, String> + Send + Sync + 'static,
    ) -> (TestCredentials, Arc<[AtomicU32; 2]>) {
        let counts = Arc::default();
        (Arc::new(Credentials::new(Box::new(CountingLoader(Arc::clone(&counts), make)))), counts)
    }

    /// Credentials that differ with each load, and expire after `life`.
    fn counting(life: Option<Duration>) -> TestCredentials {
        let fresh =
            move |count| Fresh { identity: format!("key{count}"), expires: life.map(|life| SystemTime::now() + life) };
        loading(move |count| Ok(fresh(count))).0
    }

    /// Credentials that are the same with each load, and the numbers of loads and of loads that bypass the cache.
    fn fixed() -> (TestCredentials, Arc<[AtomicU32; 2]>) {
        loading(|_| Ok(Fresh { identity: "key".to_owned(), expires: None }))
    }

    #[tokio::test]
    async fn concurrent_requests_load_credentials_once() {
        let credentials = counting(None);
        let loads = futures_util::future::join_all((0..50).map(|_| credentials.current())).await;
        assert!(loads.into_iter().all(|loaded| loaded.unwrap().identity == "key1"));
    }

    #[tokio::test]
    async fn credentials_that_the_store_reports_as_expired_are_reloaded_once() {
        let credentials = counting(None);
        let old = credentials.current().await.unwrap();
        assert!(credentials.replace_expired(old.generation).await);
        assert!(credentials.replace_expired(old.generation).await);
        assert_eq!(credentials.current().await.unwrap().identity, "key2");
    }

    #[tokio::test]
    async fn expired_credentials_that_do_not_change_are_reloaded_once() {
        let (credentials, counts) = fixed();
        let old = credentials.current().await.unwrap();
        let refused = (0..50).map(|_| credentials.replace_expired(old.generation));
        let refused = futures_util::future::join_all(refused).await;
        assert!(refused.into_iter().all(|replaced| !replaced));
        assert_eq!(counts[1].load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn rejected_credentials_are_reloaded_by_the_next_request_only() {
        let (credentials, counts) = fixed();
        let generation = credentials.current().await.unwrap().generation;
        credentials.reject(generation);
        for _ in 0..3 {
            assert_eq!(credentials.current().await.unwrap().generation, generation);
        }
        assert_eq!(counts[1].load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn credentials_are_refreshed_before_they_expire_and_no_request_waits() {
        let credentials = counting(Some(Duration::from_secs(4)));
        credentials.current().await.unwrap();
        tokio::time::timeout(Duration::from_secs(4), async {
            while credentials.valid().is_some_and(|loaded| loaded.generation == 1) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .expect("refreshed within four seconds");
        assert!(credentials.valid().is_some(), "the old credentials were valid until the new ones were loaded");
    }

    #[tokio::test]
    async fn requests_that_wait_for_a_load_share_its_error_and_the_next_request_loads_again() {
        let (credentials, counts) = loading(|count| match count {
            1 => Err("no network".to_owned()),
            _ => Ok(Fresh { identity: "key".to_owned(), expires: None }),
        });
        let waited = futures_util::future::join_all((0..50).map(|_| credentials.current())).await;
        assert!(waited.into_iter().all(|failed| failed.is_err_and(|error| error.to_string() == "no network")));
        assert_eq!(counts[0].load(Ordering::SeqCst), 1);
        assert_eq!(credentials.current().await.unwrap().identity, "key");
    }

    #[tokio::test]
    async fn a_load_continues_when_the_request_that_started_it_is_cancelled() {
        let (credentials, counts) = fixed();
        let cancelled = tokio::time::timeout(Duration::from_millis(1), credentials.current()).await;
        assert!(cancelled.is_err());
        assert_eq!(credentials.current().await.unwrap().identity, "key");
        assert_eq!(counts[0].load(Ordering::SeqCst), 1);
    }

    /// A callable of the user; `None`: one that never returns.
    struct Callable(Option<fn() -> Result<ProvidedCredentials, String>>);

    impl CredentialSource for Callable {
        fn id(&self) -> u64 {
            7
        }

        fn start(&self, sender: CredentialSender) {
            match self.0 {
                Some(call) => drop(sender.send(call())),
                None => drop(tokio::spawn(async move {
                    std::future::pending::<()>().await;
                    drop(sender);
                })),
            }
        }
    }

    fn provider(call: Option<fn() -> Result<ProvidedCredentials, String>>) -> CredentialProvider {
        CredentialProvider::new(Arc::new(Callable(call)))
    }

    fn provided(expires_at: Option<SystemTime>) -> ProvidedCredentials {
        let text = |text: &str| Some(text.to_owned());
        let (access_key_id, secret_access_key, token) = (text("id"), text("canary"), text("canary"));
        ProvidedCredentials { access_key_id, secret_access_key, token, expires_at }
    }

    #[tokio::test]
    async fn a_provider_that_does_not_return_fails_after_the_timeout() {
        let error = provider(None).call_within(Duration::from_millis(500)).await.err().unwrap();
        assert_eq!(error, "credential_provider did not return within 0.5 s");
    }

    #[tokio::test]
    async fn a_provider_that_returns_expired_credentials_fails() {
        let expired = || Ok(provided(Some(SystemTime::now() - Duration::from_secs(90))));
        let error = provider(Some(expired)).call().await.err().unwrap();
        assert!(error.starts_with("credential_provider returned credentials that expired 90."), "{error}");
        assert!(provider(Some(|| Ok(provided(None)))).call().await.is_ok());
    }

    #[test]
    fn providers_are_compared_by_id() {
        assert!(provider(None) == provider(Some(|| Ok(provided(None)))));
    }

    #[test]
    fn a_missing_value_or_one_that_no_header_can_contain_is_refused_without_showing_it() {
        assert_eq!(required("token", Some("abc/+=".to_owned())), Ok("abc/+=".to_owned()));
        assert_eq!(required("token", None), Err("credential_provider returned no \"token\"".to_owned()));
        for value in ["", "canary\n", "canary x", "canaryé"] {
            let error = required("token", Some(value.to_owned())).unwrap_err();
            assert!(error.contains("\"token\"") && !error.contains("canary"), "{error}");
        }
    }
}
