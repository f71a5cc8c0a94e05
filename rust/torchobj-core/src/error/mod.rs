//! The one error of this crate and of every store: what kind of failure, in which operation, on which URL.
//! Decisions match [`ErrorKind`]; nothing reads the text.

mod travel;

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

/// Result of anything that touches a store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, by what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No such object.
    NotFound,
    /// No such bucket or folder.
    NoBucket,
    /// The credentials are valid, the permission is missing.
    AccessDenied,
    /// No credentials were found, or the store knows them not.
    Credentials,
    /// The object is no longer the version that was asked for.
    Changed,
    /// A condition of a write did not hold: the object exists, or another writer was first.
    Precondition,
    /// The range begins behind the end of the object.
    Range,
    /// The store cannot hold this key.
    InvalidKey,
    /// The store cannot do this.
    Unsupported,
    /// The store understood the request and refuses it for ever.
    InvalidRequest,
    /// A setting or a URL is wrong.
    Config,
    /// The store asks for fewer requests (503 SlowDown, 429).
    Throttled,
    /// The store failed (500, 502, 503, 504).
    Server,
    /// No connection could be made.
    Connect,
    /// The connection broke within a request.
    Reset,
    /// A kept connection had been closed by the store before this request reached it.
    Stale,
    /// Nothing came for too long.
    Timeout,
    /// The body ended before its announced length.
    ShortBody,
    /// The answer is not what was asked for: another range, no length, a malformed head.
    Protocol,
    /// The bucket lives in another region; the store has learnt which.
    Misaddressed,
    /// The clock of this machine is off; the store has learnt by how much.
    ClockSkew,
    /// The credentials expired; the store has asked for new ones.
    ExpiredCredentials,
    /// The multipart upload is gone: completed, aborted, or never begun.
    UploadGone,
    /// Bytes arrived, and are not what was sent.
    Integrity,
    /// The local disk or memory failed.
    Io,
    /// The work was cancelled.
    Cancelled,
}

/// When the same request may be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// It would fail again.
    Never,
    /// At once: something was learnt, or a stale connection was used up.
    Now,
    /// After a backoff.
    Later,
    /// After a longer backoff: the store is overloaded.
    Throttled,
}

impl ErrorKind {
    /// When a request that failed so may be tried again.
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

    /// Whether the store may have done what was asked although no answer arrived.
    pub fn outcome_unknown(self) -> bool {
        matches!(self, Self::Server | Self::Reset | Self::Stale | Self::Timeout | Self::ShortBody | Self::Protocol)
    }
}

/// What was being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// Forgetting an upload.
    Abort,
    /// Listing unfinished uploads.
    ListUploads,
    /// Copying an object.
    Copy,
    /// Deleting objects.
    Delete,
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
            Self::Copy => "copy",
            Self::Delete => "delete",
        })
    }
}

/// A failure of one operation on one URL. Small to move: its fields are boxed.
pub struct Error(Box<Fields>);

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
    attempts: u32,
    elapsed: Option<Duration>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error with a message that says what the caller does not know yet; the rest is added by `with_…`.
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
            attempts: 1,
            elapsed: None,
            source: None,
        }))
    }

    /// The HTTP status and the store's own error code, if it sent one.
    #[must_use]
    pub fn with_status(mut self, status: u16, code: Option<String>) -> Self {
        self.0.status = Some(status);
        self.0.code = code;
        self
    }

    /// The id by which the store's operators find this request.
    #[must_use]
    pub fn with_request_id(mut self, request_id: Option<String>) -> Self {
        self.0.request_id = request_id;
        self
    }

    /// How long the store asked to wait.
    #[must_use]
    pub fn with_retry_after(mut self, retry_after: Option<Duration>) -> Self {
        self.0.retry_after = retry_after;
        self
    }

    /// What the user can do next.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// How often it was tried, and for how long.
    #[must_use]
    pub fn with_attempts(mut self, attempts: u32, elapsed: Duration) -> Self {
        self.0.attempts = attempts;
        self.0.elapsed = Some(elapsed);
        self
    }

    /// The error underneath.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The same failure under another kind: a caller knows more than the store did.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// What went wrong, for decisions.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was being done.
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// On which URL.
    pub fn url(&self) -> &str {
        &self.0.url
    }

    /// HTTP status, where there was an answer.
    pub fn status(&self) -> Option<u16> {
        self.0.status
    }

    /// The store's own error code, as `SlowDown`.
    pub fn code(&self) -> Option<&str> {
        self.0.code.as_deref()
    }

    /// The store's id of the request.
    pub fn request_id(&self) -> Option<&str> {
        self.0.request_id.as_deref()
    }

    /// How long the store asked to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// How often it was tried.
    pub fn attempts(&self) -> u32 {
        self.0.attempts
    }
}

impl fmt::Display for Error {
    /// One line: `get s3://b/k: 503 SlowDown: please wait, after 5 attempts in 12.4 s (request id ABC); hint`.
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
            // Refused before anything was asked.
            (1, _) if fields.status.is_none() && fields.kind.retry() == Retry::Never => {}
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
    fn the_line_names_everything_an_operator_needs() {
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
    fn an_error_without_an_answer_still_reads_well() {
        let error = Error::new(ErrorKind::Connect, Operation::List, "s3://b/", "cannot connect to h:1");
        assert_eq!(error.to_string(), "list s3://b/: cannot connect to h:1, after 1 attempt");
    }
}
