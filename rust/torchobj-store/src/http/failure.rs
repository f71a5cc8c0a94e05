//! Failures of an exchange, error responses, and their conversion into errors. Truncates and escapes text of servers
//! before it becomes part of a message.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::time::Duration;

use torchobj_core::error::{Error, ErrorKind, Operation};

use super::date::skew_s;

/// The next step if a response lacks what the provider always sends.
pub(crate) const OTHER_SERVER: &str = "another server has answered, such as a proxy or a login page: check endpoint_url and the \
    proxy variables of the environment";

/// The next step if a server does not answer a request without TLS as one of HTTP.
pub(super) const NEEDS_TLS: &str = "if the server uses TLS, begin endpoint_url with https://";

/// The next step after an object was written again.
pub(crate) const CHANGED: &str = "it was written again after it was listed or first read: list or open it again; a dataset \
    of a manifest file reads it as it is now with on_change=\"accept\"";

/// Upper bound on `Retry-After`.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Why an exchange over a connection failed. The store adds the operation and the URL.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    pub(crate) message: Cow<'static, str>,
    pub(crate) source: Option<io::Error>,
    /// What the user can do next.
    pub(crate) hint: Option<&'static str>,
}

impl Failure {
    pub(super) fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, message: message.into(), source: None, hint: None }
    }

    pub(super) fn broken(message: &'static str, source: io::Error) -> Self {
        Self { kind: ErrorKind::Reset, message: message.into(), source: Some(source), hint: None }
    }

    /// The error of `operation` on `url`.
    pub(crate) fn into_error(self, operation: Operation, url: String) -> Error {
        let error = Error::new(self.kind, operation, url, self.message);
        let error = match self.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        };
        match self.source {
            Some(source) => error.with_source(source),
            None => error,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// An error response with its body, from our connections or from an SDK.
#[derive(Clone, Copy)]
pub(crate) struct ErrorResponse<'a> {
    pub(crate) status: u16,
    /// The value of a header.
    pub(crate) header: &'a (dyn Fn(&str) -> Option<String> + Sync),
    /// Empty for a response to HEAD.
    pub(crate) body: &'a [u8],
}

/// An error response, parsed by the dialect of the provider.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: ErrorKind,
    /// Error code of the provider.
    pub(crate) code: Option<String>,
    /// Message of the provider; `None`: the reason phrase of the status is used.
    pub(crate) message: Option<String>,
    pub(crate) request_id: Option<String>,
    /// What the user can do next.
    pub(crate) hint: Option<Cow<'static, str>>,
}

impl Refusal {
    /// The error of `operation` on `url` that received `response`.
    pub(crate) fn into_error(self, operation: Operation, url: String, response: &ErrorResponse<'_>) -> Error {
        let message =
            self.message.map_or_else(|| reason(response.status).to_owned(), |message| sanitize(&message, 500));
        let retry_after = (response.header)("retry-after").and_then(|text| seconds_until(text.trim()));
        let retry_after = retry_after.map(|seconds| Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
        let error = Error::new(self.kind, operation, url, message)
            .with_status(response.status, self.code.map(|code| sanitize(&code, 100)))
            .with_request_id(self.request_id.map(|id| sanitize(&id, 200)))
            .with_retry_after(retry_after);
        match self.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}

/// The seconds of a `Retry-After`, which may be a date (RFC 9110, section 10.2.3).
fn seconds_until(text: &str) -> Option<u64> {
    text.parse().ok().or_else(|| u64::try_from(skew_s(text)?).ok())
}

/// The reason phrase of a status.
fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("unknown status")
}

/// Classifies a status without an error code.
pub(crate) fn kind_of_status(operation: Operation, status: u16) -> ErrorKind {
    let reading = matches!(operation, Operation::Get | Operation::Head);
    match status {
        301 | 307 | 308 => ErrorKind::Misaddressed,
        401 => ErrorKind::Credentials,
        403 => ErrorKind::AccessDenied,
        404 => ErrorKind::NotFound,
        405 | 501 => ErrorKind::Unsupported,
        408 => ErrorKind::Timeout,
        412 if reading => ErrorKind::Changed,
        412 => ErrorKind::Precondition,
        416 => ErrorKind::Range,
        429 | 503 => ErrorKind::Throttled,
        500..=599 => ErrorKind::Server,
        // An unknown error in the body of a successful response.
        200..=299 => ErrorKind::Server,
        _ => ErrorKind::InvalidRequest,
    }
}

/// Escapes control characters in the text of a server, and truncates it to about `max_bytes`, for messages and logs.
pub(crate) fn sanitize(text: &str, max_bytes: usize) -> String {
    let mut sanitized = String::new();
    for letter in text.chars() {
        if sanitized.len() >= max_bytes {
            return sanitized + "...";
        }
        if letter.is_control() { sanitized.extend(letter.escape_default()) } else { sanitized.push(letter) }
    }
    sanitized
}

/// Displays an error with its causes, which the `Display` of the AWS SDK and of hyper omits.
#[derive(Debug)]
pub(crate) struct Chain<E>(pub(crate) E);

impl<E: std::error::Error> fmt::Display for Chain<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl<E: std::error::Error> std::error::Error for Chain<E> {}

/// The message of the first cause of an error, for SDKs whose errors above it repeat each other.
pub(crate) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let cause = std::iter::successors(Some(error), |error| error.source()).last();
    sanitize(&cause.map_or_else(String::new, ToString::to_string), 500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_condition_is_changed_for_a_read_and_precondition_for_a_write() {
        assert_eq!(kind_of_status(Operation::Get, 412), ErrorKind::Changed);
        assert_eq!(kind_of_status(Operation::Put, 412), ErrorKind::Precondition);
    }

    #[test]
    fn a_retry_after_is_a_number_of_seconds_or_a_date() {
        assert_eq!((seconds_until("7"), seconds_until("Sun, 06 Nov 1994 08:49:37 GMT")), (Some(7), None));
        let later = seconds_until("Fri, 31 Dec 9999 23:59:59 GMT").unwrap();
        assert!(later > 1_000_000_000, "{later}");
        assert_eq!(seconds_until("soon"), None);
    }

    #[test]
    fn text_of_a_server_is_escaped_and_truncated() {
        assert_eq!(sanitize("plain é \"x\"", 20), "plain é \"x\"");
        assert_eq!(sanitize("a\r\nWARNING forged\u{1b}[2J", 300), "a\\r\\nWARNING forged\\u{1b}[2J");
        let long = sanitize(&"x".repeat(100_000), 300);
        assert!(long.len() == 303 && long.ends_with("..."), "{}", long.len());
    }
}
