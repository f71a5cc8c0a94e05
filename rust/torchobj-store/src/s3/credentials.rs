//! Loads credentials of S3: from the provider chain of the SDK, or from a credential provider of the user.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, RwLock};

use async_trait::async_trait;
use aws_credential_types::Credentials as SdkCredentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};

use super::sign::Identity;
use crate::credentials::{CredentialProvider, Credentials, Fresh, LoadError, Loader, failed, required};
use crate::env;

/// Makes a new provider of the SDK. A provider reads the shared configuration files only once.
pub(super) type ProviderFactory =
    Box<dyn Fn() -> Pin<Box<dyn Future<Output = Option<SharedCredentialsProvider>> + Send>> + Send + Sync>;

/// The provider chain of the SDK: environment, profiles, roles, instance.
pub(super) struct SdkChain {
    new_provider: ProviderFactory,
    provider: RwLock<SharedCredentialsProvider>,
}

impl SdkChain {
    pub(super) fn new(provider: SharedCredentialsProvider, new_provider: ProviderFactory) -> Self {
        Self { new_provider, provider: RwLock::new(provider) }
    }
}

#[async_trait]
impl Loader<Identity> for SdkChain {
    async fn load(&self, bypass_cache: bool) -> Result<Fresh<Identity>, LoadError> {
        if bypass_cache && let Some(provider) = (self.new_provider)().await {
            *self.provider.write().expect("no holder of this lock panics") = provider;
        }
        let provider = self.provider.read().expect("no holder of this lock panics").clone();
        let found = provider.provide_credentials().await.map_err(|error| Arc::new(error) as LoadError)?;
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
