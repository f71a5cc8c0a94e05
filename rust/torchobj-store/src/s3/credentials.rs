//! Loads the configuration of the SDK, and credentials of S3: from the provider chain of the SDK, or from a credential provider
//! of the user.

use std::error::Error;
use std::sync::{Arc, RwLock};

use async_trait::async_trait;
use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::imds::client::error::ImdsError;
use aws_config::meta::ProviderChainError;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::{ProfileFileCredentialsProvider, ProfileFileRegionProvider};
use aws_config::provider_config::ProviderConfig;
use aws_config::{BehaviorVersion, SdkConfig};
use aws_credential_types::Credentials as SdkCredentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_types::region::Region;

use super::connector::Connector;
use super::sign::{DEFAULT_REGION, Identity};
use crate::config::S3Config;
use crate::credentials::{CredentialProvider, Credentials, Fresh, LoadError, Loader, NoneFound, failed, required};
use crate::env;
use crate::http::root_cause;

/// Loads settings from the environment, the profiles and the instance.
pub(super) async fn load_sdk_config(config: &S3Config, connector: &Connector) -> SdkConfig {
    let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12()).http_client(connector.clone());
    if let Some(profile) = &config.profile {
        loader = loader.profile_name(profile);
    }
    if let Some(region) = &config.region {
        loader = loader.region(Region::new(region.clone()));
    } else {
        // Without the region of the instance: the bucket may be in another one, which its responses contain.
        let chain = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new());
        loader = loader.region(chain.or_else(profile_region(config)));
    }
    if config.anonymous || config.credential_provider.is_some() {
        loader = loader.no_credentials();
    } else if let Some(profile) = &config.profile {
        loader = loader.credentials_provider(profile_credentials(profile, config, connector).await);
    }
    loader.load().await
}

fn profile_region(config: &S3Config) -> ProfileFileRegionProvider {
    let builder = ProfileFileRegionProvider::builder();
    match &config.profile {
        Some(profile) => builder.profile_name(profile).build(),
        None => builder.build(),
    }
}

/// The credentials of a profile that the caller has named. The chain of the SDK would look into the environment first.
async fn profile_credentials(
    profile: &str,
    config: &S3Config,
    connector: &Connector,
) -> ProfileFileCredentialsProvider {
    let configured = config.region.clone().map(Region::new);
    let chain = RegionProviderChain::first_try(configured).or_else(EnvironmentVariableRegionProvider::new());
    // A role of the profile is assumed in this region.
    let region = chain.or_else(profile_region(config)).or_else(Region::from_static(DEFAULT_REGION)).region().await;
    let settings = ProviderConfig::without_region().with_http_client(connector.clone()).with_region(region);
    ProfileFileCredentialsProvider::builder().configure(&settings).profile_name(profile).build()
}

/// The provider chain of the SDK: environment, profiles, roles, instance.
pub(super) struct SdkChain {
    config: S3Config,
    connector: Connector,
    provider: RwLock<SharedCredentialsProvider>,
}

impl SdkChain {
    /// The chain of a configuration; `None`: requests are not signed.
    pub(super) fn new(sdk: &SdkConfig, config: &S3Config, connector: &Connector) -> Option<Self> {
        let provider = RwLock::new(sdk.credentials_provider()?);
        Some(Self { config: config.clone(), connector: connector.clone(), provider })
    }

    /// The error of a load: [`NoneFound`] unless a source has credentials that cannot be loaded.
    fn failure(&self, error: CredentialsError) -> LoadError {
        let causes = || std::iter::successors(Some(&error as &(dyn Error + 'static)), |error| (*error).source());
        let chain = causes().find_map(|cause| cause.downcast_ref::<ProviderChainError<CredentialsError>>());
        match &self.config.profile {
            Some(profile) if matches!(error, CredentialsError::CredentialsNotLoaded(_)) => {
                failed(&format!("the profile {profile:?} of ~/.aws has none"))
            }
            None if chain.is_some() || causes().any(|cause| cause.is::<ImdsError>()) => {
                let last = chain.and_then(|chain| Some(chain.attempts().last()?.error()));
                let profile = env::first_of(&["AWS_PROFILE"]).map_or_else(|| "default".to_owned(), |(_, name)| name);
                let sources = format!("the environment, the profile {profile:?} of ~/.aws, or a role of this machine");
                Arc::new(NoneFound { sources, reason: root_cause(last.unwrap_or(&error)) })
            }
            _ => Arc::new(error),
        }
    }
}

#[async_trait]
impl Loader<Identity> for SdkChain {
    async fn load(&self, bypass_cache: bool) -> Result<Fresh<Identity>, LoadError> {
        // A provider reads the shared configuration files only once.
        if bypass_cache
            && let Some(provider) = load_sdk_config(&self.config, &self.connector).await.credentials_provider()
        {
            *self.provider.write().expect("no holder of this lock panics") = provider;
        }
        let provider = self.provider.read().expect("no holder of this lock panics").clone();
        let found = provider.provide_credentials().await.map_err(|error| self.failure(error))?;
        let identity = Identity {
            access_key: found.access_key_id().to_owned(),
            secret_key: found.secret_access_key().to_owned(),
            session_token: found.session_token().map(str::to_owned),
        };
        check_text(&identity).map_err(|message| failed(&message))?;
        Ok(Fresh { identity, expires: found.expiry() })
    }
}

/// Checks that a request can contain the credentials. The message omits them, and names the variable that contains one.
fn check_text(identity: &Identity) -> Result<(), String> {
    let Identity { access_key, secret_key, session_token } = identity;
    let token = session_token.as_deref().unwrap_or("-");
    for (what, variable, value) in [
        ("access key id", "AWS_ACCESS_KEY_ID", access_key.as_str()),
        ("secret access key", "AWS_SECRET_ACCESS_KEY", secret_key),
        ("session token", "AWS_SESSION_TOKEN", token),
    ] {
        if value.bytes().all(|byte| byte.is_ascii_graphic()) {
            continue;
        }
        let is_variable = env::first_of(&[variable]).is_some_and(|(_, set)| set.trim() == value.trim());
        let source =
            if is_variable { variable.to_owned() } else { format!("the {what} of the profile or the provider") };
        let end = if value.ends_with(['\n', '\r']) { ": it has a newline at its end" } else { "" };
        return Err(format!("{source} must be printable ASCII without spaces{end}"));
    }
    Ok(())
}

#[async_trait]
impl Loader<Identity> for CredentialProvider {
    async fn load(&self, _bypass_cache: bool) -> Result<Fresh<Identity>, LoadError> {
        let keys = async {
            let provided = self.call().await?;
            let identity = Identity {
                access_key: required("access_key_id", provided.access_key_id)?,
                secret_key: required("secret_access_key", provided.secret_access_key)?,
                session_token: provided.token.map(|token| required("token", Some(token))).transpose()?,
            };
            Ok(Fresh { identity, expires: provided.expires_at })
        };
        keys.await.map_err(|message: String| failed(&message))
    }
}

/// Provides [`Credentials`] to the SDK.
#[derive(Debug)]
pub(super) struct CredentialsForSdk(pub(super) Arc<Credentials<Identity>>);

impl ProvideCredentials for CredentialsForSdk {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(async {
            let loaded = self.0.current().await.map_err(CredentialsError::provider_error)?;
            let Identity { access_key, secret_key, session_token } = loaded.identity.clone();
            Ok(SdkCredentials::new(access_key, secret_key, session_token, loaded.expires, "torchobj"))
        })
    }
}

/// The credentials of a test.
#[cfg(test)]
pub(super) struct Fixed(pub(super) Identity);

#[cfg(test)]
#[async_trait]
impl Loader<Identity> for Fixed {
    async fn load(&self, _bypass_cache: bool) -> Result<Fresh<Identity>, LoadError> {
        Ok(Fresh { identity: self.0.clone(), expires: None })
    }
}
