//! Sends requests of the JSON API to a bucket: adds tokens, and interprets errors.

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use serde::de::{DeserializeOwned, Error as _};
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::types::{Condition, Payload, Version};

use super::config::Account;
use super::credentials::{Token, USER_PROJECT};
use super::error::{is_error, refusal};
use crate::credentials::{Loaded, described};
use crate::http::{
    self, Authorize, Dialect, ErrorResponse, Failure, Headers, HostAddress, MAX_ERROR_BYTES, Origin, Refusal, Request,
    RequestHead, Response, Unauthorized, encode, is_page, sanitize,
};

/// Maximum size of the JSON of a response. A page of 1000 names of 1024 bytes, each escaped, has 6 MiB.
const MAX_JSON_BYTES: usize = 16 << 20;

/// A bucket of an account.
pub(super) struct Bucket {
    pub(super) account: Arc<Account>,
    pub(super) name: String,
}

impl Bucket {
    pub(super) fn new(account: Arc<Account>, name: &str) -> Self {
        Self { account, name: name.to_owned() }
    }

    /// The URL of a key or of the bucket; `gs://` without a bucket.
    pub(super) fn url_of(&self, key: Option<&str>) -> String {
        if self.name.is_empty() {
            return "gs://".to_owned();
        }
        ["gs://", &self.name, "/", key.unwrap_or_default()].concat()
    }

    /// An error of an operation on a key or on the bucket.
    pub(super) fn error(&self, kind: ErrorKind, operation: Operation, key: Option<&str>, message: &str) -> Error {
        Error::new(kind, operation, self.url_of(key), sanitize(message, 1000))
    }

    /// The error of a response that is complete and not valid: a retry would receive the same one.
    pub(super) fn protocol(&self, operation: Operation, key: &str, message: &str) -> Error {
        self.error(ErrorKind::Protocol, operation, Some(key), message).permanent()
    }

    /// The path of the bucket, or of an object or a collection in it: a suffix such as `/o/` and a name.
    pub(super) fn path(&self, suffix: &str, name: &str) -> Vec<u8> {
        path_in(&self.name, suffix, name)
    }

    /// Returns an error if no object has this version: a generation is a positive number, and 0 would mean that there is no
    /// object.
    pub(super) fn check_version(&self, operation: Operation, key: &str, version: &Version) -> Result<()> {
        let text = version.as_str();
        if text.starts_with(|first: char| matches!(first, '1'..='9')) && text.parse::<i64>().is_ok() {
            return Ok(());
        }
        let kind = if operation == Operation::Get { ErrorKind::Changed } else { ErrorKind::Precondition };
        let message = format!("no object has the version {version:?}: a generation is a positive number");
        Err(self.error(kind, operation, Some(key), &message))
    }

    /// Returns an error if the condition of a write cannot hold.
    pub(super) fn check_condition(&self, operation: Operation, key: &str, condition: &Condition) -> Result<()> {
        match condition {
            Condition::Matches(version) => self.check_version(operation, key, version),
            Condition::Always | Condition::Absent => Ok(()),
        }
    }

    /// A request for `path`, with the headers of every request.
    #[expect(clippy::too_many_arguments, reason = "the parts of a request")]
    pub(super) fn request<'a>(
        &'a self,
        operation: Operation,
        method: &'static str,
        key: Option<&'a str>,
        path: Vec<u8>,
        query: &'a [(&'a str, &'a str)],
        mut headers: Headers<'a>,
        payload: &'a Payload,
    ) -> Request<'a> {
        if let Some(project) = &self.account.config.user_project {
            headers.push((USER_PROJECT, Cow::Borrowed(project.as_str())));
        }
        Request { operation, method, key, path, query, headers, payload }
    }

    /// Sends a request. Returns a response with a status of success.
    pub(super) async fn send(&self, request: &Request<'_>) -> Result<Response> {
        let dialect = self.dialect(request.operation).await?;
        http::send(request, &self.account.origin, &dialect, &dialect).await
    }

    /// Sends a request and parses the JSON of its response.
    pub(super) async fn json<T: DeserializeOwned>(&self, request: &Request<'_>) -> Result<T> {
        let response = self.send(request).await?;
        self.parse(request.operation, request.key, response).await
    }

    /// Receives and parses the JSON of a response.
    pub(super) async fn parse<T: DeserializeOwned>(
        &self,
        operation: Operation,
        key: Option<&str>,
        mut response: Response,
    ) -> Result<T> {
        let text = response.read_text(MAX_JSON_BYTES).await;
        let text = text.map_err(|failure| failure.into_error(operation, self.url_of(key)))?;
        if text.len() <= MAX_ERROR_BYTES && is_error(&text) {
            let response = ErrorResponse { status: response.status, header: &|_| None, body: &text };
            let mut refusal = refusal(operation, &response);
            let message = refusal.message.unwrap_or_default();
            refusal.message = Some(format!("an error with status {}: {message}", response.status));
            return Err(refusal.into_error(operation, self.url_of(key), &response));
        }
        // serde would take an array for an object without fields.
        let parsed = match text.trim_ascii_start().starts_with(b"[") {
            true => Err(serde_json::Error::custom("an array")),
            false => serde_json::from_slice(&text),
        };
        parsed.map_err(|error| {
            if is_page(&text, response.header("content-type"), "{", "json") {
                let message = "the response is a page, and not the JSON that Google Cloud Storage always sends";
                return response.refuse(self.error(ErrorKind::OtherServer, operation, key, message));
            }
            // The message of serde_json may contain text of the server.
            let message = format!("the response is not the expected JSON: {error}");
            let invalid = self.error(ErrorKind::Protocol, operation, key, &message).with_status(response.status, None);
            if error.is_data() { invalid.permanent() } else { invalid }
        })
    }

    /// The token for one request, and the interpretation of its response.
    pub(super) async fn dialect(&self, operation: Operation) -> Result<BucketDialect<'_>> {
        let token = match &self.account.credentials {
            None => None,
            Some(credentials) => {
                let loaded = credentials.current().await;
                Some(loaded.map_err(|source| {
                    let hint = "set GOOGLE_APPLICATION_CREDENTIALS to a credentials file, run `gcloud auth \
                        application-default login`, or attach a service account to the machine; \
                        GCSOptions(anonymous=True) for a public bucket";
                    let (message, hint) = described(&source, hint);
                    let error = self.error(ErrorKind::Credentials, operation, None, &message);
                    if self.account.config.credential_provider.is_some() { error } else { error.with_hint(hint) }
                })?)
            }
        };
        Ok(BucketDialect { bucket: self, token })
    }
}

/// The path of a bucket, or of an object or a collection in it.
pub(super) fn path_in(bucket: &str, suffix: &str, name: &str) -> Vec<u8> {
    let mut path = b"storage/v1/b/".to_vec();
    encode::query_into(&mut path, bucket);
    path.extend_from_slice(suffix.as_bytes());
    encode::query_into(&mut path, name);
    path
}

/// The token of one request, and the [`Dialect`] of its response.
pub(super) struct BucketDialect<'a> {
    bucket: &'a Bucket,
    token: Option<Arc<Loaded<Token>>>,
}

impl Authorize for BucketDialect<'_> {
    fn authorize(&self, request: &Unauthorized<'_>, head: &mut RequestHead) -> Result<(), Failure> {
        let Some(Token { authorization, quota_project }) = self.token.as_ref().map(|loaded| &loaded.identity) else {
            return Ok(());
        };
        head.push("authorization", authorization)?;
        match quota_project {
            Some(project) if request.headers.iter().all(|(name, _)| *name != USER_PROJECT) => {
                head.push(USER_PROJECT, project)
            }
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl Dialect for BucketDialect<'_> {
    fn url(&self, key: Option<&str>) -> String {
        self.bucket.url_of(key)
    }

    fn refusal(&self, operation: Operation, response: &ErrorResponse<'_>) -> Refusal {
        refusal(operation, response)
    }

    /// Tokens are sent to the endpoint only.
    fn redirected(&self, _: &HostAddress) -> Option<Origin> {
        None
    }

    /// Replaces a token that was refused, so that the request can be retried.
    async fn recover(&self, _: Operation, response: &ErrorResponse<'_>, error: Error) -> Error {
        let account = &self.bucket.account;
        if error.kind() == ErrorKind::ExpiredCredentials {
            return match (&account.credentials, &self.token) {
                (Some(credentials), Some(token)) if credentials.replace_expired(token.generation).await => error,
                (_, Some(_)) => {
                    let hint = "the token is not valid, and its source returns the same one";
                    error.with_kind(ErrorKind::Credentials).with_hint(hint)
                }
                (_, None) => error.with_kind(ErrorKind::Credentials).with_hint(
                    "the request had no token, because GCSOptions(anonymous=True) or STORAGE_EMULATOR_HOST is set",
                ),
            };
        }
        if matches!(response.status, 403 | 404) {
            let (url, path) = (account.origin.url(), String::from_utf8_lossy(&account.origin.path));
            let endpoint = format!("the endpoint is {url}{}", path.trim_end_matches('/'));
            // A permanent refusal of a request that has reached the object is none of the endpoint.
            return if error.kind() == ErrorKind::InvalidRequest { error } else { error.with_first_hint(&endpoint) };
        }
        error
    }
}
