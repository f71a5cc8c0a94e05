//! What the buckets of one configuration share: connections, credentials, the SDK's configuration, and the clock.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::ProfileFileRegionProvider;
use aws_config::{BehaviorVersion, ConfigLoader, SdkConfig};
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    Builder, IdentityCache, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use aws_types::os_shim_internal::{Env, Fs};
use aws_types::service_config::ServiceConfigKey;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use tokio::sync::OnceCell;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::fork;

use super::credentials::{Credentials, ForSdk};
use super::wire::Wire;
use crate::config::{Addressing, Encryption, S3Config};
use crate::env;
use crate::http::date::skew_s;
use crate::http::{Dialer, Pool, shown};

/// Where an endpoint knows no regions, signatures name this one: FlashBlade, SwiftStack, MinIO and Ceph take it.
pub(super) const DEFAULT_REGION: &str = "us-east-1";

/// A key of SSE-C, as its three headers want it. It is in no `Debug`.
#[derive(Clone)]
pub(super) struct CustomerKey {
    pub(super) key: String,
    pub(super) md5: String,
}

impl fmt::Debug for CustomerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomerKey").finish_non_exhaustive()
    }
}

/// One configuration, and everything that its buckets share.
#[derive(Debug)]
pub struct Account {
    pub(super) config: S3Config,
    pub(super) pool: Pool,
    wire: Wire,
    /// Asked of the environment, the profiles and the instance at the first use.
    environment: OnceCell<Environment>,
    pub(super) customer_key: Option<CustomerKey>,
    /// Seconds that the stores' clock is ahead of ours.
    skew_s: AtomicI64,
}

/// What the environment says. The SDK's part is in no `Debug`: it shows the properties of profiles, secret keys among
/// them.
pub(super) struct Environment {
    pub(super) sdk: SdkConfig,
    /// `None` when requests are not signed.
    pub(super) credentials: Option<Arc<Credentials>>,
    pub(super) endpoint_url: Option<String>,
    /// `None`: to be found out.
    pub(super) region: Option<String>,
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoint_url, region, .. } = self;
        f.debug_struct("Environment")
            .field("endpoint_url", endpoint_url)
            .field("region", region)
            .finish_non_exhaustive()
    }
}

impl Account {
    /// An account; nothing is asked of the network before its first use.
    ///
    /// # Errors
    /// `Config`: a proxy that is no URL, a file that cannot be read.
    pub fn new(mut config: S3Config) -> Result<Self> {
        if config.http.ca_bundle.is_none() {
            config.http.ca_bundle = env::first_of(&[env::AWS_CA_BUNDLE]).map(|(_, path)| path.into());
        }
        let refuse = |what: String| move |source: std::io::Error| misconfigured(&what).with_source(source);
        let dialer = Arc::new(Dialer::new(&config.http).map_err(refuse("a proxy of the environment".to_owned()))?);
        let customer_key = match &config.encryption {
            Encryption::CustomerKeyFile(path) => {
                // Not the path: it may be the key itself, given in place of its file.
                let hint = "it must be the path of a file with the 32 bytes of the key, raw or in Base64";
                let key = CustomerKey::read(path).map_err(refuse("customer_key_file".to_owned()));
                Some(key.map_err(|error| error.with_hint(hint))?)
            }
            _ => None,
        };
        Ok(Self::over(dialer, config, customer_key))
    }

    pub(super) fn over(dialer: Arc<Dialer>, config: S3Config, customer_key: Option<CustomerKey>) -> Self {
        fill_statics();
        let wire = Wire::new(dialer.clone(), config.http.keep_alive);
        let pool = Pool::new(dialer);
        let (environment, skew_s) = (OnceCell::new(), AtomicI64::new(0));
        Self { config, pool, wire, environment, customer_key, skew_s }
    }

    /// An account with credentials of a test, in place of the environment's.
    #[cfg(test)]
    pub(super) fn of(config: S3Config, customer_key: Option<CustomerKey>, identity: super::sign::Identity) -> Self {
        use aws_credential_types::provider::SharedCredentialsProvider;
        let super::sign::Identity { access_key, secret_key, session_token } = identity;
        let keys = aws_credential_types::Credentials::new(access_key, secret_key, session_token, None, "test");
        let provider = SharedCredentialsProvider::new(keys);
        let same = provider.clone();
        let source =
            move || -> Pin<Box<dyn Future<Output = _> + Send>> { Box::pin(std::future::ready(Some(same.clone()))) };
        let environment = Environment {
            sdk: SdkConfig::builder().behavior_version(BehaviorVersion::v2026_01_12()).build(),
            credentials: Some(Arc::new(Credentials::new(provider, Box::new(source)))),
            endpoint_url: config.endpoint_url.clone(),
            region: Some(DEFAULT_REGION.to_owned()),
        };
        let dialer = Arc::new(Dialer::new(&config.http).expect("the environment of a test has no odd proxy"));
        let account = Self::over(dialer, config, customer_key);
        account.environment.set(environment).expect("it was made just above");
        account
    }

    /// What the environment says, asked once.
    pub(super) async fn environment(&self) -> &Environment {
        self.environment.get_or_init(|| self.ask_environment()).await
    }

    async fn ask_environment(&self) -> Environment {
        let config = &self.config;
        let sdk = loader(config, &self.wire).load().await;
        let (again, wire) = (config.clone(), self.wire.clone());
        let source = move || -> Pin<Box<dyn Future<Output = _> + Send>> {
            let loader = loader(&again, &wire);
            Box::pin(async move { loader.load().await.credentials_provider() })
        };
        let credentials = sdk.credentials_provider();
        let credentials = credentials.map(|provider| Arc::new(Credentials::new(provider, Box::new(source))));
        let endpoint_url = config.endpoint_url.clone().or_else(|| configured_endpoint(&sdk));
        // Behind a path without a slash at its end the SDK's rules put the bucket's name into its last component.
        let endpoint_url = endpoint_url.map(|url| if url.ends_with('/') { url } else { url + "/" });
        let path = endpoint_url.as_ref().and_then(|url| url.parse::<http::Uri>().ok().map(|url| url.path().to_owned()));
        if let Some(path) = path.filter(|path| path != "/" && !path.contains('@')) {
            let path = shown(&path, 200);
            log::warn!(
                "the endpoint has the path {path}: buckets are looked for below it. A bucket belongs in the URL, as s3://bucket"
            );
        }
        let region = sdk.region().map(ToString::to_string);
        let region = region.or_else(|| endpoint_url.as_ref().map(|_| DEFAULT_REGION.to_owned()));
        Environment { sdk, credentials, endpoint_url, region }
    }

    /// The name of the profile that was chosen, where it is in neither of the shared files.
    pub(super) async fn missing_profile(&self) -> Option<String> {
        let chosen = self.config.profile.clone().map(Into::into);
        #[expect(deprecated, reason = "its new name is in a crate of the SDK's insides")]
        let files = aws_config::profile::profile_file::ProfileFiles::default();
        let profiles = aws_config::profile::load(&Fs::real(), &Env::real(), &files, chosen).await.ok()?;
        let name = profiles.selected_profile();
        (name != "default" && profiles.get_profile(name).is_none()).then(|| name.to_owned())
    }

    /// An SDK client for `region`.
    pub(super) fn sdk(&self, environment: &Environment, region: &str) -> aws_sdk_s3::Client {
        let mut builder = Builder::from(&environment.sdk)
            .region(Region::new(region.to_owned()))
            .http_client(self.wire.clone())
            // Credentials are kept here: a cache of the SDK's own would go on with what was replaced.
            .identity_cache(IdentityCache::no_cache())
            // Attempts are counted, and silences ended, above the trait.
            .retry_config(RetryConfig::disabled())
            .timeout_config(TimeoutConfig::disabled())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
        builder.set_endpoint_url(environment.endpoint_url.clone());
        if self.path_style(environment) {
            builder = builder.force_path_style(true);
        }
        match &environment.credentials {
            Some(credentials) => builder = builder.credentials_provider(ForSdk(credentials.clone())),
            None => builder = builder.allow_no_auth(),
        }
        aws_sdk_s3::Client::from_conf(builder.build())
    }

    /// Whether buckets are named in the path. Custom endpoints seldom have a name in the DNS for each bucket.
    pub(super) fn path_style(&self, environment: &Environment) -> bool {
        match self.config.addressing {
            Addressing::Path => true,
            Addressing::Virtual => false,
            Addressing::Auto => environment.endpoint_url.is_some(),
        }
    }

    /// Seconds that the stores' clock is ahead of ours, as far as is known.
    pub(super) fn skew_s(&self) -> i64 {
        self.skew_s.load(Ordering::Relaxed)
    }

    /// The time that requests are signed with.
    pub(super) fn now(&self) -> SystemTime {
        let skew_s = self.skew_s();
        let now = SystemTime::now();
        let by = Duration::from_secs(skew_s.unsigned_abs());
        if skew_s >= 0 { now + by } else { now - by }
    }

    /// Learns the store's clock from an answer's `Date`; false when the request was signed with it already.
    pub(super) fn learn_clock(&self, date: Option<&str>, used_skew_s: i64) -> bool {
        const NOTICED_S: u64 = 60;
        let Some(skew_s) = date.and_then(skew_s) else { return false };
        if self.skew_s.swap(skew_s, Ordering::Relaxed).abs_diff(skew_s) > NOTICED_S {
            log::warn!("the clock of this machine is off by {skew_s} s: requests are signed with the store's");
        }
        used_skew_s.abs_diff(skew_s) > NOTICED_S
    }

    /// Whether a request was signed with a time that S3 does not take: more than 15 minutes from its own.
    pub(super) fn is_skewed(&self, date: Option<&str>, used_skew_s: i64) -> bool {
        const ALLOWED_S: u64 = 15 * 60;
        date.and_then(skew_s).is_some_and(|skew_s| used_skew_s.abs_diff(skew_s) >= ALLOWED_S)
    }
}

/// Has the SDK fill its statics: endpoint rules, a set for each service, and telemetry. Its first client in a process
/// does so, and the first request makes clients, to look for credentials: a fork in the middle of it would leave a
/// static locked in the child for ever.
fn fill_statics() {
    let _inside = fork::enter();
    let config = SdkConfig::builder().behavior_version(BehaviorVersion::v2026_01_12()).build();
    aws_sdk_s3::Client::new(&config);
    aws_sdk_sts::Client::new(&config);
    aws_sdk_sso::Client::new(&config);
    aws_sdk_ssooidc::Client::new(&config);
}

/// What asks the environment, the profiles and the instance.
fn loader(config: &S3Config, wire: &Wire) -> ConfigLoader {
    let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12()).http_client(wire.clone());
    if let Some(profile) = &config.profile {
        loader = loader.profile_name(profile);
    }
    if let Some(region) = &config.region {
        loader = loader.region(Region::new(region.clone()));
    } else {
        // The instance is not asked: what counts is where the bucket is, and the bucket says it.
        let chain = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new());
        loader = loader.region(chain.or_else(ProfileFileRegionProvider::new()));
    }
    if config.anonymous {
        loader = loader.no_credentials();
    }
    loader
}

/// The endpoint that `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` or a profile names, as the SDK itself reads it.
fn configured_endpoint(sdk: &SdkConfig) -> Option<String> {
    let key = ServiceConfigKey::builder().service_id("S3").env("AWS_ENDPOINT_URL").profile("endpoint_url").build();
    let key = key.expect("all three are set");
    let of_service = sdk.service_config().and_then(|config| config.load_config(key));
    of_service.or_else(|| sdk.endpoint_url().map(str::to_owned))
}

pub(super) fn misconfigured(message: &str) -> Error {
    Error::new(ErrorKind::Config, Operation::Connect, "s3://", message)
}

impl CustomerKey {
    fn read(path: &std::path::Path) -> std::io::Result<Self> {
        let text = std::fs::read(path)?;
        let key = match <[u8; 32]>::try_from(text.as_slice()) {
            Ok(key) => key.to_vec(),
            Err(_) => BASE64_STANDARD.decode(text.trim_ascii()).unwrap_or_default(),
        };
        if key.len() != 32 {
            return Err(std::io::Error::other("the file has no such key"));
        }
        let md5 = BASE64_STANDARD.encode(super::checksum::md5(&key));
        Ok(Self { key: BASE64_STANDARD.encode(key), md5 })
    }
}
