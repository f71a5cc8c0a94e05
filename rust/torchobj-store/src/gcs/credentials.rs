//! Loads access tokens: Application Default Credentials by google-cloud-auth, or a credential provider of the user.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use google_cloud_auth::credentials::{
    Builder, CacheableResource, Credentials as SdkCredentials, CredentialsProvider, EntityTag,
};
use google_cloud_auth::errors::CredentialsError;
use http::{Extensions, HeaderMap, HeaderValue};
use serde::Deserialize;
use tokio::sync::Mutex;
use torchobj_core::policy::within;

use crate::credentials::{
    CALL_TIMEOUT, CredentialProvider, Credentials, Fresh, LoadError, Loader, NoneFound, failed, required,
};
use crate::env;
use crate::http::{root_cause, sanitize};

/// OAuth 2.0 scope for reading and writing objects ("Cloud Storage authentication", "Scopes").
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";

/// Header with the project that is billed.
pub(super) const USER_PROJECT: &str = "x-goog-user-project";

/// google-cloud-auth caches a token, refreshes it 240 s before it expires, and does not expose the time of expiry. Its cache is
/// read again at most this much later.
const READ_CACHE_AFTER: Duration = Duration::from_secs(60);

/// Headers that authenticate requests.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Token {
    /// `Authorization`.
    pub(super) authorization: String,
    /// [`USER_PROJECT`], if the credentials have a quota project.
    pub(super) quota_project: Option<String>,
}

/// Application Default Credentials.
pub(super) struct Adc {
    universe_domain: Option<String>,
    source: Mutex<Option<SdkCredentials>>,
}

impl Adc {
    pub(super) fn new(universe_domain: Option<String>) -> Self {
        Self { universe_domain, source: Mutex::default() }
    }

    fn build(&self) -> Result<SdkCredentials, LoadError> {
        let mut builder = Builder::default().with_scopes([SCOPE]);
        if let Some(domain) = &self.universe_domain {
            builder = builder.with_universe_domain(domain);
        }
        builder.build().map_err(|error| failure(&error))
    }
}

/// The error of Application Default Credentials, with the file that contains them. Omits its contents.
fn failure(error: &(dyn Error + 'static)) -> LoadError {
    const FILE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
    let cause = root_cause(error);
    let (path, named) = match env::first_of(&[FILE, "HOME"]) {
        Some((FILE, path)) => (PathBuf::from(&path), format!("{FILE}={path}")),
        Some((_, home)) => {
            let path = PathBuf::from(home).join(".config/gcloud/application_default_credentials.json");
            (path.clone(), path.display().to_string())
        }
        None => return failed(&cause),
    };
    let named = sanitize(&named, 300);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        // Without a file the service account of the machine is used.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !named.starts_with(FILE) => {
            let sources = format!("{FILE}, {named}, or a service account of this machine");
            return Arc::new(NoneFound { sources, reason: cause });
        }
        Err(error) => return failed(&format!("{named}: {error}")),
    };
    let Ok(file) = serde_json::from_slice::<CredentialsFile>(&text) else {
        return failed(&format!("{named}: not a credentials file: it is damaged, or not JSON"));
    };
    let source = file.credential_source.and_then(|source| source.file);
    failed(&match source.map(|source| (std::fs::metadata(&source), source)) {
        Some((Err(error), source)) => format!("{named}: credential_source.file={source}: {error}"),
        _ => format!("{named} ({}): {cause}", file.kind.as_deref().unwrap_or("without a type")),
    })
}

/// The fields of a credentials file that error messages name.
#[derive(Deserialize)]
struct CredentialsFile {
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Of an `external_account`.
    credential_source: Option<SubjectToken>,
}

#[derive(Deserialize)]
struct SubjectToken {
    file: Option<String>,
}

#[async_trait]
impl Loader<Token> for Adc {
    async fn load(&self, bypass_cache: bool) -> Result<Fresh<Token>, LoadError> {
        let mut source = self.source.lock().await;
        if bypass_cache {
            *source = None;
        }
        let credentials = match &*source {
            Some(credentials) => credentials.clone(),
            None => self.build()?,
        };
        // After a permanent error google-cloud-auth stops refreshing, so a new source is built for the next load.
        *source = None;
        let headers = match within(CALL_TIMEOUT, credentials.headers(Extensions::new())).await {
            Some(Ok(CacheableResource::New { data, .. })) => data,
            Some(Ok(CacheableResource::NotModified)) => return Err(failed("google-cloud-auth returned no token")),
            Some(Err(error)) => return Err(failure(&error)),
            None => return Err(failed(&format!("no token within {} s", CALL_TIMEOUT.as_secs()))),
        };
        *source = Some(credentials);
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).map(str::to_owned);
        let authorization = text("authorization").ok_or_else(|| failed("the credentials have no access token"))?;
        let identity = Token { authorization, quota_project: text(USER_PROJECT) };
        Ok(Fresh { identity, expires: Some(SystemTime::now() + READ_CACHE_AFTER) })
    }
}

#[async_trait]
impl Loader<Token> for CredentialProvider {
    async fn load(&self, _bypass_cache: bool) -> Result<Fresh<Token>, LoadError> {
        let token = async {
            let provided = self.call().await?;
            let authorization = format!("Bearer {}", required("token", provided.token)?);
            Ok(Fresh { identity: Token { authorization, quota_project: None }, expires: provided.expires_at })
        };
        token.await.map_err(|message: String| failed(&message))
    }
}

/// The current token, for the SDK.
#[derive(Debug)]
pub(super) struct TokensForSdk(pub(super) Arc<Credentials<Token>>);

impl CredentialsProvider for TokensForSdk {
    async fn headers(&self, _: Extensions) -> Result<CacheableResource<HeaderMap>, CredentialsError> {
        let loaded = self.0.current().await;
        let loaded = loaded.map_err(|error| CredentialsError::from_msg(false, error.to_string()))?;
        let mut headers = HeaderMap::new();
        let mut push = |name: &'static str, value: &str| {
            let value =
                HeaderValue::from_str(value).map_err(|_| CredentialsError::from_msg(false, "not a valid token"))?;
            headers.insert(name, value);
            Ok(())
        };
        push("authorization", &loaded.identity.authorization)?;
        if let Some(project) = &loaded.identity.quota_project {
            push(USER_PROJECT, project)?;
        }
        Ok(CacheableResource::New { entity_tag: EntityTag::new(), data: headers })
    }

    async fn universe_domain(&self) -> Option<String> {
        None
    }
}
