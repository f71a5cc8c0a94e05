//! Loads the configuration of the SDK, and credentials of S3: from the source that `identity` finds, with the providers of the
//! SDK, or from a credential provider of the user.

use std::error::Error;
use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use aws_config::credential_process::CredentialProcessProvider;
use aws_config::ecs::EcsCredentialsProvider;
use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::imds::client::error::ImdsError;
use aws_config::imds::credentials::ImdsCredentialsProvider;
use aws_config::meta::region::RegionProviderChain;
#[expect(deprecated, reason = "their new path is in an internal crate of the SDK")]
use aws_config::profile::profile_file::{ProfileFileKind, ProfileFiles};
use aws_config::provider_config::ProviderConfig;
use aws_config::sso::SsoCredentialsProvider;
use aws_config::sts::AssumeRoleProvider;
use aws_config::{BehaviorVersion, SdkConfig};
use aws_credential_types::Credentials as SdkCredentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_types::region::Region;

use super::connector::Connector;
use super::identity::{self, Found, Source};
use super::profiles::Profiles;
use super::sign::{DEFAULT_REGION, Identity};
use crate::config::S3Config;
use crate::credentials::{
    CredentialProvider, Credentials, Fresh, LoadError, Loader, NoneFound, Refused, failed, required,
};
use crate::env;
use crate::http::{Chain, root_cause, sanitize};

/// Name of the sessions of assumed roles whose profile has none.
const SESSION_NAME: &str = "torchobj";

/// Loads settings from the environment and the selected profile; `None`: the profiles cannot be read.
pub(super) async fn load_sdk_config(
    config: &S3Config,
    connector: &Connector,
    profiles: Option<&Profiles>,
) -> SdkConfig {
    let setting = |name| profiles.and_then(|profiles| profiles.get(profiles.selected(), name));
    let text = profiles.map_or_else(String::new, Profiles::text_for_sdk);
    #[expect(deprecated, reason = "their new path is in an internal crate of the SDK")]
    let files = ProfileFiles::builder().with_contents(ProfileFileKind::Config, text).build();
    let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12()).http_client(connector.clone());
    loader = loader.profile_files(files).profile_name("default");
    if let Some(region) = &config.region {
        loader = loader.region(Region::new(region.clone()));
    } else {
        // Without the region of the instance: the bucket may be in another one, which its responses contain.
        let chain = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new());
        let of_profile = setting("region").filter(|region| !region.is_empty());
        loader = loader.region(chain.or_else(of_profile.map(|region| Region::new(region.to_owned()))));
    }
    // `Account::sdk` sets them.
    loader.no_credentials().load().await
}

/// A source, and what loads its credentials.
struct Provider {
    found: Found,
    provider: SharedCredentialsProvider,
}

impl Provider {
    async fn find(config: &S3Config, connector: &Connector) -> Result<Self, Refused> {
        let profiles = Profiles::load(config.profile.as_deref())?;
        let found = identity::find(&profiles)?;
        let sdk = load_sdk_config(config, connector, Some(&profiles)).await;
        let setting = profiles.get(profiles.selected(), "sts_regional_endpoints").map(str::to_owned);
        let endpoints = env::first_of(&["AWS_STS_REGIONAL_ENDPOINTS"]).map(|(_, value)| value).or(setting);
        // The global endpoint is in this region.
        let legacy = endpoints.is_some_and(|value| value == "legacy").then(|| Region::from_static(DEFAULT_REGION));
        let region = legacy.or_else(|| sdk.region().cloned()).unwrap_or_else(|| Region::from_static(DEFAULT_REGION));
        let sdk = sdk.into_builder().region(region).build();
        let provider = provider_of(&found.source, &sdk, connector).await;
        Ok(Self { found, provider })
    }
}

async fn provider_of(source: &Source, sdk: &SdkConfig, connector: &Connector) -> SharedCredentialsProvider {
    let settings = ProviderConfig::without_region()
        .with_http_client(connector.clone())
        .with_region(sdk.region().cloned())
        .with_use_fips(sdk.use_fips())
        .with_use_dual_stack(sdk.use_dual_stack());
    match source {
        Source::Keys(keys) => {
            let Identity { access_key, secret_key, session_token } = keys.clone();
            SharedCredentialsProvider::new(SdkCredentials::new(access_key, secret_key, session_token, None, "torchobj"))
        }
        Source::Role { base, role } => {
            let base = Box::pin(provider_of(base, sdk, connector)).await;
            let session_name = role.session_name.as_deref().unwrap_or(SESSION_NAME);
            let mut builder = AssumeRoleProvider::builder(&role.arn).configure(sdk).session_name(session_name);
            if let Some(external_id) = &role.external_id {
                builder = builder.external_id(external_id);
            }
            if let Some(seconds) = role.duration_s {
                builder = builder.session_length(Duration::from_secs(seconds));
            }
            SharedCredentialsProvider::new(builder.build_from_provider(base).await)
        }
        Source::WebIdentity { token_file, role_arn, session_name } => {
            let session_name = session_name.clone().unwrap_or_else(|| SESSION_NAME.to_owned());
            let (client, token_file, role_arn) = (aws_sdk_sts::Client::new(sdk), token_file.clone(), role_arn.clone());
            SharedCredentialsProvider::new(WebIdentity { client, token_file, role_arn, session_name })
        }
        Source::Sso { session, region, start_url, account_id, role_name } => {
            let mut builder = SsoCredentialsProvider::builder()
                .configure(&settings)
                .region(Region::new(region.clone()))
                .start_url(start_url)
                .account_id(account_id)
                .role_name(role_name);
            builder.set_session_name(session.clone());
            SharedCredentialsProvider::new(builder.build())
        }
        // The provider has a shell, which expands nothing in single quotes. Without input, so that the command cannot wait for
        // a user.
        Source::Process(command) => {
            let quoted = command.iter().map(|word| format!(" '{}'", word.replace('\'', r"'\''")));
            let command = format!("exec </dev/null; exec{}", quoted.collect::<String>());
            SharedCredentialsProvider::new(CredentialProcessProvider::new(command))
        }
        Source::Container => {
            SharedCredentialsProvider::new(EcsCredentialsProvider::builder().configure(&settings).build())
        }
        Source::Instance => {
            SharedCredentialsProvider::new(ImdsCredentialsProvider::builder().configure(&settings).build())
        }
    }
}

/// Assumes a role with the token in a file. The provider of the SDK does not read the endpoint of STS in a profile.
#[derive(Debug)]
struct WebIdentity {
    client: aws_sdk_sts::Client,
    token_file: PathBuf,
    role_arn: String,
    session_name: String,
}

impl WebIdentity {
    async fn assume(&self) -> Result<SdkCredentials, CredentialsError> {
        // A file is replaced before its token expires.
        let token = std::fs::read_to_string(&self.token_file).map_err(CredentialsError::provider_error)?;
        let request = self.client.assume_role_with_web_identity().role_arn(&self.role_arn);
        let request = request.role_session_name(&self.session_name).web_identity_token(token);
        let assumed = request.send().await.map_err(CredentialsError::provider_error)?;
        let keys = assumed.credentials.ok_or_else(|| CredentialsError::unhandled("STS returned no credentials"))?;
        let expires = SystemTime::try_from(keys.expiration).map_err(CredentialsError::unhandled)?;
        let token = Some(keys.session_token);
        Ok(SdkCredentials::new(keys.access_key_id, keys.secret_access_key, token, Some(expires), "torchobj"))
    }
}

impl ProvideCredentials for WebIdentity {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.assume())
    }
}

/// Loads credentials of the environment, of a profile, or of the machine.
pub(super) struct SdkChain {
    config: S3Config,
    connector: Connector,
    /// Found at the first load.
    provider: RwLock<Option<Arc<Provider>>>,
}

impl SdkChain {
    pub(super) fn new(config: &S3Config, connector: &Connector) -> Self {
        Self { config: config.clone(), connector: connector.clone(), provider: RwLock::default() }
    }

    async fn provider(&self, bypass_cache: bool) -> Result<Arc<Provider>, Refused> {
        let known = self.provider.read().expect("no holder of this lock panics").clone();
        match known.filter(|_| !bypass_cache) {
            Some(provider) => Ok(provider),
            None => {
                let provider = Arc::new(Provider::find(&self.config, &self.connector).await?);
                *self.provider.write().expect("no holder of this lock panics") = Some(provider.clone());
                Ok(provider)
            }
        }
    }
}

/// The error of a load: [`NoneFound`] if there is no source but a machine that has no role.
fn failure(found: &Found, error: &CredentialsError, config: &S3Config) -> LoadError {
    let causes = || std::iter::successors(Some(error as &(dyn Error + 'static)), |error| (*error).source());
    let is_absent =
        matches!(error, CredentialsError::CredentialsNotLoaded(_)) || causes().any(|cause| cause.is::<ImdsError>());
    if matches!(found.source, Source::Instance) && is_absent {
        let profiles = Profiles::load(config.profile.as_deref());
        let (selected, files) = match &profiles {
            Ok(profiles) => (sanitize(profiles.selected(), 100), profiles.files()),
            Err(_) => ("default".to_owned(), "~/.aws".to_owned()),
        };
        let environment = if config.profile.is_some() { "" } else { "the environment, " };
        let sources = format!("{environment}the profile {selected:?} of {files}, or a role of this machine");
        return Arc::new(NoneFound { sources, reason: root_cause(error) });
    }
    let message = format!("no credentials: {}: {}", found.name, sanitize(&Chain(error).to_string(), 800));
    Arc::new(Refused { message, hint: found.hint.clone() })
}

#[async_trait]
impl Loader<Identity> for SdkChain {
    async fn load(&self, bypass_cache: bool) -> Result<Fresh<Identity>, LoadError> {
        let provider = self.provider(bypass_cache).await.map_err(|refused| Arc::new(refused) as LoadError)?;
        let loaded = provider.provider.provide_credentials().await;
        let loaded = loaded.map_err(|error| failure(&provider.found, &error, &self.config))?;
        let identity = Identity {
            access_key: loaded.access_key_id().to_owned(),
            secret_key: loaded.secret_access_key().to_owned(),
            // A process or a container may return an empty one with permanent keys; botocore sends none then.
            session_token: loaded.session_token().filter(|token| !token.is_empty()).map(str::to_owned),
        };
        check_text(&identity).map_err(|message| {
            let hint = Some("copy the value again, in one line and without quotes".to_owned());
            Arc::new(Refused { message: format!("no credentials: {message}"), hint }) as LoadError
        })?;
        log::debug!("requests are signed with credentials of {}", provider.found.name);
        Ok(Fresh { identity, expires: loaded.expiry() })
    }
}

/// Loads credentials of a credential provider, unless the environment names a profile that does not exist: as for boto3, its
/// endpoint and region could be meant.
pub(super) struct Provided(pub(super) CredentialProvider);

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
impl Loader<Identity> for Provided {
    async fn load(&self, _bypass_cache: bool) -> Result<Fresh<Identity>, LoadError> {
        Profiles::load(None).map_err(|refused| Arc::new(refused) as LoadError)?;
        let keys = async {
            let provided = self.0.call().await?;
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
