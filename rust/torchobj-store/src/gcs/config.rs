//! State shared by the buckets of one configuration: connections and credentials.

use std::sync::Arc;

use google_cloud_auth::credentials::Credentials as SdkCredentials;
use google_cloud_storage::client::Storage;
use tokio::sync::OnceCell;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};

use super::credentials::{Adc, Token, TokensForSdk};
use crate::config::GcsConfig;
use crate::credentials::{Credentials, Loader};
use crate::env::{self, Variables};
use crate::http::{Dialer, Origin, PoolMap};

/// Variables that Application Default Credentials depend on (google-cloud-auth), and the endpoint of an emulator. The file
/// of gcloud's credentials is below HOME.
const VARIABLES: Variables =
    Variables { names: &["HOME", "GCE_METADATA_HOST", EMULATOR_HOST], prefixes: &["GOOGLE_", "CLOUDSDK_"] };

/// URL of an emulator, as the client libraries of Google read it. Without a scheme it is `http`.
const EMULATOR_HOST: &str = "STORAGE_EMULATOR_HOST";

/// Domain of the public cloud.
const DEFAULT_UNIVERSE: &str = "googleapis.com";

/// A configuration, and the state that its buckets share.
pub struct Account {
    pub(super) config: GcsConfig,
    pub(super) origin: Origin,
    /// `None`: requests have no token.
    pub(super) credentials: Option<Arc<Credentials<Token>>>,
    sdk: OnceCell<Storage>,
}

impl Account {
    /// Fingerprint of the environment variables that a new account depends on.
    pub fn fingerprint() -> u64 {
        env::fingerprint(&[VARIABLES, env::CONNECTIONS])
    }

    /// An account. Sends no requests.
    ///
    /// # Errors
    /// `Config`: the URL of the endpoint or of a proxy is not valid, or a file cannot be read.
    pub fn new(config: GcsConfig) -> Result<Self> {
        let dialer = Dialer::new(&config.http);
        let dialer = dialer.map_err(|source| misconfigured("a proxy of the environment").with_source(source))?;
        let pools = PoolMap::new(Arc::new(dialer));
        let emulator = env::first_of(&[EMULATOR_HOST]).map(|(_, host)| host);
        let emulator = emulator.filter(|_| config.endpoint_url.is_none());
        let emulator = emulator.map(|host| if host.contains("://") { host } else { format!("http://{host}") });
        // Requests to an emulator have no token.
        let anonymous = config.anonymous || emulator.is_some();
        let universe = config.universe_domain.as_deref().unwrap_or(DEFAULT_UNIVERSE);
        let url = config.endpoint_url.clone().or(emulator).unwrap_or_else(|| format!("https://storage.{universe}"));
        let setting = if config.endpoint_url.is_some() { "endpoint_url" } else { EMULATOR_HOST };
        let origin = origin(setting, &url, &pools)?;
        let loader: Option<Box<dyn Loader<Token>>> = match &config.credential_provider {
            _ if anonymous => None,
            Some(provider) => Some(Box::new(provider.clone())),
            None => Some(Box::new(Adc::new(config.universe_domain.clone()))),
        };
        let credentials = loader.map(|loader| Arc::new(Credentials::new(loader)));
        Ok(Self { config, origin, credentials, sdk: OnceCell::new() })
    }

    /// The client of the SDK.
    pub(super) async fn sdk(&self) -> Result<&Storage> {
        let build = async || {
            let builder = Storage::builder()
                .with_endpoint(self.origin.url())
                // The callers of the trait implement retries and timeouts.
                .with_retry_policy(google_cloud_gax::retry_policy::NeverRetry)
                .with_read_resume_policy(google_cloud_storage::read_resume_policy::NeverResume)
                // Large objects are written in parts.
                .with_resumable_upload_threshold(usize::MAX);
            let builder = match &self.credentials {
                Some(tokens) => builder.with_credentials(SdkCredentials::from(TokensForSdk(tokens.clone()))),
                None => builder.with_credentials(google_cloud_auth::credentials::anonymous::Builder::new().build()),
            };
            builder.build().await
        };
        let built = self.sdk.get_or_try_init(build).await;
        built.map_err(|error| misconfigured("the client of google-cloud-storage").with_source(error))
    }
}

/// The origin of requests to `url`, the value of `setting`.
fn origin(setting: &str, url: &str, pools: &PoolMap) -> Result<Origin> {
    // The message omits the URL, which may contain a password or a token.
    if url.contains(['@', '?', '#']) {
        return Err(misconfigured(&format!("{setting}: must have no user, password, query or fragment")));
    }
    let refuse = |reason: &str| misconfigured(&format!("{setting}={url}: {reason}"));
    let parsed: http::Uri = url.parse().map_err(|error| refuse("not a URL").with_source(error))?;
    if !matches!(parsed.scheme_str(), Some("https" | "http")) {
        return Err(refuse("must begin with https:// or http://"));
    }
    if parsed.host().is_none_or(str::is_empty) {
        return Err(refuse("the URL has no host"));
    }
    Ok(Origin::of(&parsed, pools))
}

fn misconfigured(message: &str) -> Error {
    Error::new(ErrorKind::Config, Operation::Connect, "gs://", message)
}
