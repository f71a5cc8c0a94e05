//! The credentials of an account, from wherever the SDK finds them. Loaded once, then renewed ahead of their expiry by
//! one task; no request waits for a renewal while the old ones hold.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use aws_credential_types::Credentials as SdkCredentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use tokio::sync::Mutex;
use torchobj_core::runtime::Task;

use super::sign::Identity;

/// How long before their expiry credentials are renewed, unless they live for less than twice as long.
const AHEAD: Duration = Duration::from_secs(300);

/// Waits between two attempts to renew that failed.
const RETRY_EVERY: Duration = Duration::from_secs(10);

/// Credentials that were loaded.
#[derive(Clone)]
pub(super) struct Loaded {
    pub(super) identity: Identity,
    expires: Option<SystemTime>,
    /// Counts identities: a load that gives the same one again is none.
    pub(super) generation: u64,
}

/// Finds out anew where credentials come from: a provider of the SDK reads the shared files once.
pub(super) type Source =
    Box<dyn Fn() -> Pin<Box<dyn Future<Output = Option<SharedCredentialsProvider>> + Send>> + Send + Sync>;

/// What is known, and how to know more.
pub(super) struct Credentials {
    source: Source,
    provider: RwLock<SharedCredentialsProvider>,
    loaded: RwLock<Option<Arc<Loaded>>>,
    /// The generation that the store knows not, or 0: the next request looks for others.
    unknown: AtomicU64,
    /// One load at a time.
    loading: Mutex<Loading>,
}

#[derive(Default)]
struct Loading {
    /// The task that renews, once there is something to renew.
    renewal: Option<Task<()>>,
    /// When asking anew last gave what was there already.
    in_vain: Option<Instant>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The SDK's providers show the files that they read.
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    pub(super) fn new(provider: SharedCredentialsProvider, source: Source) -> Self {
        let (provider, unknown) = (RwLock::new(provider), AtomicU64::new(0));
        Self { source, provider, loaded: RwLock::default(), unknown, loading: Mutex::default() }
    }

    fn loaded(&self) -> Option<Arc<Loaded>> {
        self.loaded.read().expect("no holder of this lock panics").clone()
    }

    fn known(&self) -> Option<Arc<Loaded>> {
        let loaded = self.loaded()?;
        let holds = loaded.expires.is_none_or(|expires| SystemTime::now() < expires);
        (holds && loaded.generation != self.unknown.load(Ordering::Relaxed)).then_some(loaded)
    }

    /// Credentials that hold now.
    pub(super) async fn current(self: &Arc<Self>) -> Result<Arc<Loaded>, CredentialsError> {
        if let Some(loaded) = self.known() {
            return Ok(loaded);
        }
        let mut loading = self.loading.lock().await;
        if let Some(loaded) = self.known() {
            return Ok(loaded);
        }
        let unknown = self.unknown.swap(0, Ordering::Relaxed) != 0;
        let loaded = if unknown { self.load_anew().await? } else { self.load().await? };
        if loaded.expires.is_some() && loading.renewal.is_none() {
            loading.renewal = Some(Task::spawn(renew(Arc::downgrade(self))));
        }
        Ok(loaded)
    }

    async fn load(&self) -> Result<Arc<Loaded>, CredentialsError> {
        let provider = self.provider.read().expect("no holder of this lock panics").clone();
        let found = provider.provide_credentials().await?;
        let mut loaded = self.loaded.write().expect("no holder of this lock panics");
        let identity = Identity {
            access_key: found.access_key_id().to_owned(),
            secret_key: found.secret_access_key().to_owned(),
            session_token: found.session_token().map(str::to_owned),
        };
        let generation = match &*loaded {
            None => 1,
            Some(before) if before.identity == identity => before.generation,
            Some(before) => before.generation + 1,
        };
        let fresh = Arc::new(Loaded { identity, expires: found.expiry(), generation });
        *loaded = Some(fresh.clone());
        Ok(fresh)
    }

    async fn load_anew(&self) -> Result<Arc<Loaded>, CredentialsError> {
        if let Some(provider) = (self.source)().await {
            *self.provider.write().expect("no holder of this lock panics") = provider;
        }
        self.load().await
    }

    /// The store said that the credentials of `generation` have expired: whether there are others now.
    pub(super) async fn replaced(&self, generation: u64) -> bool {
        const AGAIN_AFTER: Duration = Duration::from_secs(1);
        let mut loading = self.loading.lock().await;
        if self.loaded().is_some_and(|loaded| loaded.generation != generation) {
            return true;
        }
        // Many requests are refused at once: one asks for all.
        if loading.in_vain.is_some_and(|since| since.elapsed() < AGAIN_AFTER) {
            return false;
        }
        let replaced = match self.load_anew().await {
            Ok(loaded) => loaded.generation != generation,
            Err(error) => {
                log::warn!("the credentials have expired and others could not be loaded: {error}");
                false
            }
        };
        loading.in_vain = (!replaced).then(Instant::now);
        replaced
    }

    /// The store said that it does not know the credentials of `generation`: the next request looks for others.
    pub(super) fn refused(&self, generation: u64) {
        self.unknown.store(generation, Ordering::Relaxed);
    }
}

/// Renews, until nobody has the credentials any more.
async fn renew(credentials: Weak<Credentials>) {
    loop {
        let Some(this) = credentials.upgrade() else { return };
        let expires = this.loaded().and_then(|loaded| loaded.expires);
        drop(this);
        let left = expires.and_then(|expires| expires.duration_since(SystemTime::now()).ok()).unwrap_or(RETRY_EVERY);
        // Ranks that started together shall not ask together.
        let early = AHEAD.min(left / 2).mul_f64(1.0 - 0.2 * fastrand::f64());
        tokio::time::sleep((left - early).max(Duration::from_secs(1))).await;
        let Some(this) = credentials.upgrade() else { return };
        if let Err(error) = this.load().await {
            log::warn!("credentials could not be renewed, trying again: {error}");
            drop(this);
            tokio::time::sleep(RETRY_EVERY.mul_f64(0.5 + fastrand::f64())).await;
        }
    }
}

/// The same credentials for the SDK's own requests.
#[derive(Debug)]
pub(super) struct ForSdk(pub(super) Arc<Credentials>);

impl ProvideCredentials for ForSdk {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(async {
            let loaded = self.0.current().await?;
            let Identity { access_key, secret_key, session_token } = loaded.identity.clone();
            Ok(SdkCredentials::new(access_key, secret_key, session_token, loaded.expires, "torchobj"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// Counts loads; each gives credentials that live so long.
    #[derive(Debug)]
    struct Counting(AtomicU32, Option<Duration>);

    impl ProvideCredentials for Counting {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            let count = self.0.fetch_add(1, Ordering::SeqCst) + 1;
            let expires = self.1.map(|life| SystemTime::now() + life);
            future::ProvideCredentials::ready(Ok(SdkCredentials::new(
                format!("key{count}"),
                "s",
                None,
                expires,
                "test",
            )))
        }
    }

    fn counting(life: Option<Duration>) -> Arc<Credentials> {
        let provider = SharedCredentialsProvider::new(Counting(AtomicU32::new(0), life));
        let same = provider.clone();
        Arc::new(Credentials::new(provider, Box::new(move || Box::pin(std::future::ready(Some(same.clone()))))))
    }

    /// Credentials that are always the same, and how often they were looked for anew.
    fn fixed() -> (Arc<Credentials>, Arc<AtomicU32>) {
        let provider = || SharedCredentialsProvider::new(SdkCredentials::new("key", "s", None, None, "test"));
        let asked = Arc::new(AtomicU32::new(0));
        let counted = asked.clone();
        let source: Source = Box::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Box::pin(std::future::ready(Some(provider())))
        });
        (Arc::new(Credentials::new(provider(), source)), asked)
    }

    #[tokio::test]
    async fn requests_at_once_load_once() {
        let credentials = counting(None);
        let loads = futures_util::future::join_all((0..50).map(|_| credentials.current())).await;
        assert!(loads.into_iter().all(|loaded| loaded.unwrap().identity.access_key == "key1"));
    }

    #[tokio::test]
    async fn what_the_store_calls_expired_is_loaded_anew_once() {
        let credentials = counting(None);
        let old = credentials.current().await.unwrap();
        assert!(credentials.replaced(old.generation).await);
        assert!(credentials.replaced(old.generation).await);
        assert_eq!(credentials.current().await.unwrap().identity.access_key, "key2");
    }

    #[tokio::test]
    async fn expired_credentials_that_are_the_same_again_are_not_replaced_and_are_asked_for_once() {
        let (credentials, asked) = fixed();
        let old = credentials.current().await.unwrap();
        let refused = futures_util::future::join_all((0..50).map(|_| credentials.replaced(old.generation))).await;
        assert!(refused.into_iter().all(|replaced| !replaced));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn what_the_store_does_not_know_is_looked_for_anew_at_the_next_request_only() {
        let (credentials, asked) = fixed();
        let generation = credentials.current().await.unwrap().generation;
        credentials.refused(generation);
        for _ in 0..3 {
            assert_eq!(credentials.current().await.unwrap().generation, generation);
        }
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn renewal_comes_before_the_expiry_and_no_request_waits() {
        let credentials = counting(Some(Duration::from_secs(4)));
        credentials.current().await.unwrap();
        tokio::time::timeout(Duration::from_secs(4), async {
            while credentials.known().is_some_and(|loaded| loaded.generation == 1) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .expect("renewed before the four seconds were over");
        assert!(credentials.known().is_some(), "the old ones held until the new ones came");
    }
}
