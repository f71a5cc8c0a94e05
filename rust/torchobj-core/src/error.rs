//! The error type of this crate and of every store: the kind of failure, the operation and the URL. Decisions match
//! [`ErrorKind`], never the text.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Result of an operation on a store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kinds of failures. A kind determines whether a request is retried and which exception Python raises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No such object.
    NotFound,
    /// No such bucket or folder.
    NoBucket,
    /// The credentials are valid, but the permission is missing.
    AccessDenied,
    /// No credentials were found, or the store does not accept them.
    Credentials,
    /// The object no longer has the requested version.
    Changed,
    /// The condition of a write does not hold: the object exists, or has another version.
    Precondition,
    /// The range begins at or after the end of the object.
    Range,
    /// The store does not support this key.
    InvalidKey,
    /// The store does not support this operation.
    Unsupported,
    /// The store rejects the request permanently.
    InvalidRequest,
    /// A setting or a URL is invalid.
    Config,
    /// The store throttles requests (503 SlowDown, 429).
    Throttled,
    /// The store failed (500, 502, 503, 504).
    Server,
    /// The connection could not be established.
    Connect,
    /// The connection broke during a request.
    Reset,
    /// The store closed a pooled connection before this request reached it.
    Stale,
    /// A timeout expired.
    Timeout,
    /// The body ended before its declared length.
    ShortBody,
    /// The response does not match the request: another range, no length, or a malformed head.
    Protocol,
    /// The response lacks what the store always sends: another server has answered, such as a proxy with a login page.
    OtherServer,
    /// The bucket is in another region. The store has detected it and uses it from now on.
    Misaddressed,
    /// The clock of this machine is wrong. The store has detected the clock skew and corrects for it from now on.
    ClockSkew,
    /// The credentials expired. The store has requested new ones.
    ExpiredCredentials,
    /// The multipart upload does not exist: completed, aborted, or never begun.
    UploadGone,
    /// The received bytes differ from those sent.
    Integrity,
    /// The local disk or memory failed.
    Io,
    /// The work was cancelled.
    Cancelled,
}

/// Whether and when a failed request may be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Never: it would fail again.
    Never,
    /// At once: the store has corrected its region, clock or credentials, or a pooled connection was stale.
    Now,
    /// After a backoff.
    Later,
    /// After a longer backoff: the store throttles requests.
    Throttled,
}

impl ErrorKind {
    /// Returns whether and when a request that failed with this kind may be retried.
    pub fn retry(self) -> Retry {
        match self {
            Self::Throttled => Retry::Throttled,
            Self::Stale | Self::Misaddressed | Self::ClockSkew | Self::ExpiredCredentials => Retry::Now,
            Self::Server
            | Self::Connect
            | Self::Reset
            | Self::Timeout
            | Self::ShortBody
            | Self::Protocol
            | Self::Integrity => Retry::Later,
            _ => Retry::Never,
        }
    }

    /// Returns whether the store may have processed the request although the response is missing.
    pub fn outcome_unknown(self) -> bool {
        matches!(
            self,
            Self::Server
                | Self::Reset
                | Self::Stale
                | Self::Timeout
                | Self::ShortBody
                | Self::Protocol
                | Self::OtherServer
        )
    }
}

/// Operations on a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Operation {
    /// Setting up a store: endpoint, region, credentials.
    Connect,
    /// Reading an object or a range.
    Get,
    /// Reading metadata.
    Head,
    /// Listing keys.
    List,
    /// Writing an object in one request.
    Put,
    /// Beginning an upload in parts.
    BeginUpload,
    /// Writing a part.
    PutPart,
    /// Making an upload visible.
    Commit,
    /// Aborting an upload.
    Abort,
    /// Listing unfinished uploads.
    ListUploads,
    /// Listing the buckets of an account.
    ListBuckets,
    /// Copying an object.
    Copy,
    /// Deleting objects.
    Delete,
}

impl Operation {
    /// All operations, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::Connect,
        Self::Get,
        Self::Head,
        Self::List,
        Self::Put,
        Self::BeginUpload,
        Self::PutPart,
        Self::Commit,
        Self::Abort,
        Self::ListUploads,
        Self::ListBuckets,
        Self::Copy,
        Self::Delete,
    ];
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "connect",
            Self::Get => "get",
            Self::Head => "head",
            Self::List => "list",
            Self::Put => "put",
            Self::BeginUpload => "begin upload",
            Self::PutPart => "put part",
            Self::Commit => "commit",
            Self::Abort => "abort",
            Self::ListUploads => "list uploads",
            Self::ListBuckets => "list buckets",
            Self::Copy => "copy",
            Self::Delete => "delete",
        })
    }
}

/// A failure of one operation on one URL. Its fields are boxed, so that a `Result` is small.
pub struct Error(Box<Fields>);

#[derive(Serialize, Deserialize)]
struct Fields {
    kind: ErrorKind,
    operation: Operation,
    url: String,
    message: String,
    status: Option<u16>,
    code: Option<String>,
    request_id: Option<String>,
    retry_after: Option<Duration>,
    hint: Option<String>,
    permanent: bool,
    attempts: u32,
    elapsed: Option<Duration>,
    #[serde(serialize_with = "serialize_source", deserialize_with = "deserialize_source")]
    source: Option<Source>,
}

type Source = Box<dyn StdError + Send + Sync>;

impl Error {
    /// An error with a message. Its text already contains the operation and the URL; the `with_…` methods add details.
    pub fn new(kind: ErrorKind, operation: Operation, url: impl Into<String>, message: impl Into<String>) -> Self {
        Self(Box::new(Fields {
            kind,
            operation,
            url: url.into(),
            message: message.into(),
            status: None,
            code: None,
            request_id: None,
            retry_after: None,
            hint: None,
            permanent: false,
            attempts: 1,
            elapsed: None,
            source: None,
        }))
    }

    /// Sets the HTTP status and the error code of the store, if it sent one.
    #[must_use]
    pub fn with_status(mut self, status: u16, code: Option<String>) -> Self {
        self.0.status = Some(status);
        self.0.code = code;
        self
    }

    /// Sets the store's id of the request.
    #[must_use]
    pub fn with_request_id(mut self, request_id: Option<String>) -> Self {
        self.0.request_id = request_id;
        self
    }

    /// Sets the wait that the store requested by `Retry-After`.
    #[must_use]
    pub fn with_retry_after(mut self, retry_after: Option<Duration>) -> Self {
        self.0.retry_after = retry_after;
        self
    }

    /// Sets the next step for the user.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Sets a next step, before the one that the error has.
    #[must_use]
    pub fn with_first_hint(self, first: &str) -> Self {
        let hint = self.0.hint.as_ref().map_or_else(|| first.to_owned(), |hint| format!("{first}; {hint}"));
        self.with_hint(hint)
    }

    /// Marks a failure that a retry would repeat, although others of its kind are retried: a response that is complete, and in
    /// which something is missing or invalid.
    #[must_use]
    pub fn permanent(mut self) -> Self {
        self.0.permanent = true;
        self
    }

    /// Sets the number of attempts and the time since the first one.
    #[must_use]
    pub fn with_attempts(mut self, attempts: u32, elapsed: Duration) -> Self {
        self.0.attempts = attempts;
        self.0.elapsed = Some(elapsed);
        self
    }

    /// Sets the underlying error.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Replaces the kind: for a caller that can classify the failure better than the store.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether and when the request may be retried.
    pub fn retry(&self) -> Retry {
        if self.is_permanent() { Retry::Never } else { self.0.kind.retry() }
    }

    /// Whether it was marked by [`permanent`](Self::permanent).
    pub fn is_permanent(&self) -> bool {
        self.0.permanent
    }

    /// The operation that failed.
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// The URL of the object or bucket.
    pub fn url(&self) -> &str {
        &self.0.url
    }

    /// The HTTP status, if there was a response.
    pub fn status(&self) -> Option<u16> {
        self.0.status
    }

    /// The error code of the store, such as `SlowDown`.
    pub fn code(&self) -> Option<&str> {
        self.0.code.as_deref()
    }

    /// The store's id of the request.
    pub fn request_id(&self) -> Option<&str> {
        self.0.request_id.as_deref()
    }

    /// The wait that the store requested by `Retry-After`.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The number of attempts.
    pub fn attempts(&self) -> u32 {
        self.0.attempts
    }

    /// Serializes the error for [`from_bytes`](Self::from_bytes) in another process of this machine. Of its source only the
    /// text is included.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(&self.0).expect("texts and numbers can be serialized")
    }

    /// Deserializes what [`to_bytes`](Self::to_bytes) wrote.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).map(Self).unwrap_or_else(|source| {
            let message = format!("an error that cannot be deserialized: {}", String::from_utf8_lossy(bytes));
            Self::new(ErrorKind::Io, Operation::Get, "", message).with_source(source)
        })
    }
}

#[expect(clippy::ref_option, reason = "the signature that serde requires")]
fn serialize_source<S: Serializer>(source: &Option<Source>, serializer: S) -> Result<S::Ok, S::Error> {
    source.as_ref().map(ToString::to_string).serialize(serializer)
}

fn deserialize_source<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Source>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Source::from))
}

impl fmt::Display for Error {
    /// Writes one line: `get s3://b/k: 503 SlowDown: please wait, after 5 attempts in 12.4 s (request id ABC); hint`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = &*self.0;
        write!(f, "{} {}:", fields.operation, fields.url)?;
        if let Some(status) = fields.status {
            write!(f, " {status}")?;
        }
        if let Some(code) = &fields.code {
            write!(f, " {code}")?;
        }
        if !fields.message.is_empty() {
            let colon = if fields.status.is_some() || fields.code.is_some() { ":" } else { "" };
            write!(f, "{colon} {}", fields.message)?;
        }
        if let Some(source) = &fields.source {
            write!(f, ": {source}")?;
        }
        match (fields.attempts, fields.elapsed) {
            // Rejected without a request.
            (1, _) if fields.status.is_none() && self.retry() == Retry::Never => {}
            (1, _) => write!(f, ", after 1 attempt")?,
            (attempts, Some(elapsed)) => write!(f, ", after {attempts} attempts in {:.1} s", elapsed.as_secs_f64())?,
            (attempts, None) => write!(f, ", after {attempts} attempts")?,
        }
        if let Some(request_id) = &fields.request_id {
            write!(f, " (request id {request_id})")?;
        }
        if let Some(hint) = &fields.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({self})", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_status_code_attempts_request_id_and_hint() {
        let error = Error::new(ErrorKind::Throttled, Operation::Get, "s3://b/k", "please wait")
            .with_status(503, Some("SlowDown".into()))
            .with_request_id(Some("ABC".into()))
            .with_attempts(5, Duration::from_millis(12_400))
            .with_hint("lower max_in_flight");
        assert_eq!(
            error.to_string(),
            "get s3://b/k: 503 SlowDown: please wait, after 5 attempts in 12.4 s (request id ABC); lower max_in_flight"
        );
    }

    #[test]
    fn the_text_of_an_error_without_a_response_has_the_attempt() {
        let error = Error::new(ErrorKind::Connect, Operation::List, "s3://b/", "cannot connect to h:1");
        assert_eq!(error.to_string(), "list s3://b/: cannot connect to h:1, after 1 attempt");
    }

    #[test]
    fn a_deserialized_error_has_the_same_kind_and_text() {
        let error = Error::new(ErrorKind::Throttled, Operation::Head, "s3://b/k\u{1f}é", "please wait")
            .with_status(503, Some("SlowDown".into()))
            .with_request_id(Some("ABC".into()))
            .with_attempts(5, Duration::from_millis(12_400))
            .with_source(std::io::Error::other("underneath"))
            .with_hint("lower max_in_flight");
        let arrived = Error::from_bytes(&error.to_bytes());
        assert_eq!((arrived.kind(), arrived.operation()), (error.kind(), error.operation()));
        assert_eq!(arrived.to_string(), error.to_string());
        assert!(StdError::source(&arrived).is_some());
        let without_source = Error::new(ErrorKind::NotFound, Operation::Get, "s3://b/k", "");
        let arrived = Error::from_bytes(&without_source.to_bytes());
        assert_eq!(format!("{arrived:?}"), format!("{without_source:?}"));
        assert!(StdError::source(&arrived).is_none());
        assert_eq!(Error::from_bytes(b"what").kind(), ErrorKind::Io);
    }
}
