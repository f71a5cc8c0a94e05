//! State shared by the buckets of one configuration: connections, credentials, SDK configuration and clock skew.

use std::path::PathBuf;
use std::sync::Arc;

use aws_config::{BehaviorVersion, SdkConfig};
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    Builder, IdentityCache, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use aws_types::service_config::ServiceConfigKey;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use tokio::sync::OnceCell;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::fork;

use super::clock::Clock;
use super::connector::Connector;
#[cfg(test)]
use super::credentials::Fixed;
use super::credentials::{CredentialsForSdk, Provided, SdkChain, load_sdk_config};
use super::identity::{self, Source};
use super::profiles::{Profiles, user_path};
use super::sign::{DEFAULT_REGION, Identity};
use crate::config::{Addressing, Encryption, S3Config};
use crate::credentials::{Credentials, Loader};
use crate::env::{self, Variables};
use crate::http::{Dialer, PoolMap};

/// A key of SSE-C, in the format of its headers.
#[derive(Clone)]
pub(super) struct CustomerKey {
    pub(super) key: String,
    pub(super) md5: String,
}

/// A configuration, and the state that its buckets share.
pub struct Account {
    pub(super) config: S3Config,
    pub(super) pools: PoolMap,
    connector: Connector,
    /// Loaded at the first use.
    environment: OnceCell<Environment>,
    pub(super) customer_key: Option<CustomerKey>,
    pub(super) clock: Clock,
}

/// Settings from environment variables and profiles.
pub(super) struct Environment {
    pub(super) sdk: SdkConfig,
    /// `None`: requests are not signed.
    pub(super) credentials: Option<Arc<Credentials<Identity>>>,
    pub(super) endpoint_url: Option<String>,
    /// `None`: detected.
    pub(super) region: Option<String>,
    /// Whether `AWS_REQUEST_CHECKSUM_CALCULATION` or a profile restricts checksums to requests that require one.
    pub(super) checksums_when_required: bool,
}

/// Variables that the SDK reads (AWS SDKs and Tools Reference Guide, "Environment variables"), and those of botocore and
/// requests. The shared configuration files are below HOME.
const VARIABLES: Variables = Variables { names: &["HOME", "BOTO_CONFIG", "REQUESTS_CA_BUNDLE"], prefixes: &["AWS_"] };

impl Account {
    /// Fingerprint of the environment variables that a new account depends on.
    pub fn fingerprint() -> u64 {
        env::fingerprint(&[VARIABLES, env::CONNECTIONS])
    }

    /// An account. Sends no requests.
    ///
    /// # Errors
    /// `Config`: the URL of a proxy is not valid, or a file cannot be read.
    pub fn new(mut config: S3Config) -> Result<Self> {
        config.http.ca_bundle = Self::ca_bundle(&config);
        let refuse = |what: String| move |source: std::io::Error| misconfigured(&what).with_source(source);
        let dialer = Arc::new(Dialer::new(&config.http).map_err(refuse("a proxy of the environment".to_owned()))?);
        let customer_key = match &config.encryption {
            Encryption::CustomerKeyFile(path) => {
                // The message omits the path: a user may pass the key itself by mistake.
                let hint = "it must be the path of a file that contains the key of 32 bytes, raw or in Base64";
                let key = CustomerKey::read(path).map_err(refuse("customer_key_file".to_owned()));
                Some(key.map_err(|error| error.with_hint(hint))?)
            }
            _ => None,
        };
        Ok(Self::with_dialer(dialer, config, customer_key))
    }

    pub(super) fn with_dialer(dialer: Arc<Dialer>, config: S3Config, customer_key: Option<CustomerKey>) -> Self {
        initialize_sdk();
        let connector = Connector::new(dialer.clone(), config.http.keep_alive);
        let pools = PoolMap::new(dialer);
        Self { config, pools, connector, environment: OnceCell::new(), customer_key, clock: Clock::default() }
    }

    /// An account with the credentials of a test, instead of those of the environment.
    #[cfg(test)]
    pub(super) fn with_identity(config: S3Config, customer_key: Option<CustomerKey>, identity: Identity) -> Self {
        let environment = Environment {
            sdk: SdkConfig::builder().behavior_version(BehaviorVersion::v2026_01_12()).build(),
            credentials: Some(Arc::new(Credentials::new(Box::new(Fixed(identity))))),
            endpoint_url: config.endpoint_url.clone(),
            region: Some(DEFAULT_REGION.to_owned()),
            checksums_when_required: false,
        };
        let dialer = Arc::new(Dialer::new(&config.http).expect("the environment of a test has no invalid proxy"));
        let account = Self::with_dialer(dialer, config, customer_key);
        assert!(account.environment.set(environment).is_ok(), "it was made just above");
        account
    }

    /// The settings of the environment, loaded once.
    pub(super) async fn environment(&self) -> &Environment {
        self.environment.get_or_init(|| self.load_environment()).await
    }

    /// The PEM file of trusted CA certificates, in the order of botocore: the option, `AWS_CA_BUNDLE`, the profile, and
    /// `REQUESTS_CA_BUNDLE`; `None`: those of the system.
    pub fn ca_bundle(config: &S3Config) -> Option<PathBuf> {
        let variable = |name| env::first_of(&[name]).map(|(_, path)| user_path(&path));
        let of_profile = || {
            let profiles = Profiles::load(config.profile.as_deref()).ok()?;
            Some(user_path(profiles.get(profiles.selected(), "ca_bundle").filter(|path| !path.is_empty())?))
        };
        let configured = config.http.ca_bundle.clone().or_else(|| variable("AWS_CA_BUNDLE"));
        configured.or_else(of_profile).or_else(|| variable("REQUESTS_CA_BUNDLE"))
    }

    /// The source of the credentials that requests are signed with, unless the configuration has them, and whether it is known
    /// to have some. Sends no requests.
    ///
    /// # Errors
    /// The source cannot be used; message and next step.
    pub fn credential_source(config: &S3Config) -> std::result::Result<(String, bool), (String, String)> {
        let found = Profiles::load(config.profile.as_deref()).and_then(|profiles| identity::find(&profiles));
        match found {
            Ok(found) => Ok((found.name, !matches!(found.source, Source::Instance))),
            Err(refused) => Err((refused.message, refused.hint.unwrap_or_default())),
        }
    }

    async fn load_environment(&self) -> Environment {
        let config = &self.config;
        let profiles = Profiles::load(config.profile.as_deref());
        if let (Err(refused), true) = (&profiles, config.anonymous) {
            log::warn!("settings of profiles are not used: {refused}");
        }
        let sdk = load_sdk_config(config, &self.connector, profiles.as_ref().ok()).await;
        let loader: Option<Box<dyn Loader<Identity>>> = match &config.credential_provider {
            Some(provider) => Some(Box::new(Provided(provider.clone()))),
            None if config.anonymous => None,
            None => Some(Box::new(SdkChain::new(config, &self.connector))),
        };
        let credentials = loader.map(|loader| Arc::new(Credentials::new(loader)));
        let endpoint_url = config.endpoint_url.clone().or_else(|| configured_endpoint(&sdk));
        // If the path of the endpoint has no trailing slash, the rules of the SDK append the bucket to its last component.
        let endpoint_url = endpoint_url.map(|url| if url.ends_with('/') { url } else { url + "/" });
        let region = sdk.region().map(ToString::to_string);
        let region = region.or_else(|| endpoint_url.as_ref().map(|_| DEFAULT_REGION.to_owned()));
        let checksums_when_required =
            sdk.request_checksum_calculation() == Some(RequestChecksumCalculation::WhenRequired);
        Environment { sdk, credentials, endpoint_url, region, checksums_when_required }
    }

    /// An SDK client for `region`.
    pub(super) fn sdk(&self, environment: &Environment, region: &str) -> aws_sdk_s3::Client {
        let mut builder = Builder::from(&environment.sdk)
            .region(Region::new(region.to_owned()))
            .http_client(self.connector.clone())
            .time_source(self.clock.clone())
            // It would add the skew that the clock has already.
            .disable_clock_skew_correction(true)
            // `Credentials` caches them; the cache of the SDK would return replaced ones.
            .identity_cache(IdentityCache::no_cache())
            // The callers of the trait implement retries and timeouts.
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
            Some(credentials) => builder = builder.credentials_provider(CredentialsForSdk(credentials.clone())),
            None => builder = builder.allow_no_auth(),
        }
        aws_sdk_s3::Client::from_conf(builder.build())
    }

    /// Returns whether the server compares versions before it writes. The S3 interface of Google Cloud Storage ignores
    /// If-Match and If-None-Match.
    pub(super) fn conditional_writes(&self) -> bool {
        const GOOGLE: &str = ".googleapis.com";
        self.config.conditional_writes.unwrap_or_else(|| {
            let loaded = self.environment.get().and_then(|environment| environment.endpoint_url.clone());
            let variable = || env::first_of(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]).map(|(_, url)| url);
            let url = loaded.or_else(|| self.config.endpoint_url.clone()).or_else(variable);
            let host = url.and_then(|url| url.parse::<http::Uri>().ok()?.host().map(str::to_ascii_lowercase));
            host.is_none_or(|host| !host.trim_end_matches('.').ends_with(GOOGLE))
        })
    }

    /// Returns whether requests name the bucket in the path. Custom endpoints rarely have a DNS name for each bucket.
    pub(super) fn path_style(&self, environment: &Environment) -> bool {
        match self.config.addressing {
            Addressing::Path => true,
            Addressing::Virtual => false,
            Addressing::Auto => environment.endpoint_url.is_some(),
        }
    }
}

/// Initializes the statics of the SDK: endpoint rules of each service, and telemetry. The first client in a process does so,
/// and the first request makes clients that load credentials. A fork during that would leave a static locked in the child.
fn initialize_sdk() {
    let _inside = fork::enter();
    let config = SdkConfig::builder().behavior_version(BehaviorVersion::v2026_01_12()).build();
    aws_sdk_s3::Client::new(&config);
    aws_sdk_sts::Client::new(&config);
    aws_sdk_sso::Client::new(&config);
    aws_sdk_ssooidc::Client::new(&config);
}

/// The endpoint in `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` or a profile, as the SDK reads it.
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
            return Err(std::io::Error::other("the file does not contain a key of 32 bytes"));
        }
        let md5 = BASE64_STANDARD.encode(super::checksum::md5(&key));
        Ok(Self { key: BASE64_STANDARD.encode(key), md5 })
    }
}
