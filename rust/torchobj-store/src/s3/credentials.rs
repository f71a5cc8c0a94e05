//! The credentials of an account, from wherever the SDK finds them. Loaded once, then renewed ahead of their expiry by
//! one task; no request waits for a renewal while the old ones hold.

use std::fmt;
use std::sync::{Arc, RwLock, Weak};
use std::time::{Duration, SystemTime};

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
    /// Counts loads.
    pub(super) generation: u64,
}

/// What is known, and how to know more.
pub(super) struct Credentials {
    provider: SharedCredentialsProvider,
    loaded: RwLock<Option<Arc<Loaded>>>,
    /// One load at a time; the task that renews, once there is something to renew.
    loading: Mutex<Option<Task<()>>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("provider", &self.provider).finish_non_exhaustive()
    }
}

impl Credentials {
    pub(super) fn new(provider: SharedCredentialsProvider) -> Self {
        Self { provider, loaded: RwLock::default(), loading: Mutex::default() }
    }

    fn known(&self) -> Option<Arc<Loaded>> {
        let loaded = self.loaded.read().expect("no holder of this lock panics").clone()?;
        loaded.expires.is_none_or(|expires| SystemTime::now() < expires).then_some(loaded)
    }

    /// Credentials that hold now.
    pub(super) async fn current(self: &Arc<Self>) -> Result<Arc<Loaded>, CredentialsError> {
        if let Some(loaded) = self.known() {
            return Ok(loaded);
        }
        let mut renewal = self.loading.lock().await;
        if let Some(loaded) = self.known() {
            return Ok(loaded);
        }
        let loaded = self.load().await?;
        if loaded.expires.is_some() && renewal.is_none() {
            *renewal = Some(Task::spawn(renew(Arc::downgrade(self))));
        }
        Ok(loaded)
    }

    async fn load(&self) -> Result<Arc<Loaded>, CredentialsError> {
        let found = self.provider.provide_credentials().await?;
        let mut loaded = self.loaded.write().expect("no holder of this lock panics");
        let generation = loaded.as_ref().map_or(1, |loaded| loaded.generation + 1);
        let identity = Identity {
            access_key: found.access_key_id().to_owned(),
            secret_key: found.secret_access_key().to_owned(),
            session_token: found.session_token().map(str::to_owned),
        };
        let fresh = Arc::new(Loaded { identity, expires: found.expiry(), generation });
        *loaded = Some(fresh.clone());
        Ok(fresh)
    }

    /// The store said that the credentials of `generation` have expired: the next request loads others.
    pub(super) fn expired(&self, generation: u64) {
        let mut loaded = self.loaded.write().expect("no holder of this lock panics");
        if let Some(old) = loaded.as_ref().filter(|loaded| loaded.generation == generation) {
            *loaded = Some(Arc::new(Loaded { expires: Some(SystemTime::UNIX_EPOCH), ..Loaded::clone(old) }));
        }
    }
}

/// Renews, until nobody has the credentials any more.
async fn renew(credentials: Weak<Credentials>) {
    loop {
        let Some(this) = credentials.upgrade() else { return };
        let expires = this.loaded.read().expect("no holder of this lock panics").as_ref().and_then(|l| l.expires);
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
    use std::sync::atomic::{AtomicU32, Ordering};

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
        Arc::new(Credentials::new(SharedCredentialsProvider::new(Counting(AtomicU32::new(0), life))))
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
        credentials.expired(old.generation);
        credentials.expired(old.generation);
        let new = credentials.current().await.unwrap();
        assert_eq!(new.identity.access_key, "key2");
        credentials.expired(old.generation);
        assert_eq!(credentials.current().await.unwrap().identity.access_key, "key2");
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
