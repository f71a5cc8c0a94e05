//! Failures of an exchange, responses that refuse a request, and the errors that both become. Text of servers is cut
//! and escaped here before a message shows it.

use std::fmt;
use std::io;
use std::time::Duration;

use torchobj_core::error::{Error, ErrorKind, Operation};

/// The longest wait that a server may ask for with `Retry-After`.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Why an exchange over a connection failed. The store adds the operation and the URL.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    pub(crate) message: &'static str,
    pub(crate) source: Option<io::Error>,
    /// What the user can do next.
    pub(crate) hint: Option<&'static str>,
}

impl Failure {
    pub(super) fn new(kind: ErrorKind, message: &'static str) -> Self {
        Self { kind, message, source: None, hint: None }
    }

    pub(super) fn broken(message: &'static str, source: io::Error) -> Self {
        Self { kind: ErrorKind::Reset, message, source: Some(source), hint: None }
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
        f.write_str(self.message)
    }
}

/// A response that is not a success, as the provider's dialect understood it.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: ErrorKind,
    pub(crate) status: u16,
    /// The provider's name of the error.
    pub(crate) code: Option<String>,
    /// The provider's text; without one the message is the reason phrase of the status.
    pub(crate) message: Option<String>,
    pub(crate) request_id: Option<String>,
    /// The `Retry-After` header.
    pub(crate) retry_after: Option<String>,
}

impl Refusal {
    /// The error of `operation` on `url`.
    pub(crate) fn into_error(self, operation: Operation, url: String) -> Error {
        let message = self.message.map_or_else(|| reason(self.status).to_owned(), |message| shown(&message, 500));
        let retry_after = self.retry_after.and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
        Error::new(self.kind, operation, url, message)
            .with_status(self.status, self.code.map(|code| shown(&code, 100)))
            .with_request_id(self.request_id.map(|id| shown(&id, 200)))
            .with_retry_after(retry_after.map(|wait| wait.min(LONGEST_RETRY_AFTER)))
    }
}

/// The reason phrase of a status. A response to HEAD has no body with a message.
fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("unknown status")
}

/// The kind of failure that a status alone means.
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
        // A 200 whose body is an unknown error is a failure of the server.
        200..=299 => ErrorKind::Server,
        _ => ErrorKind::InvalidRequest,
    }
}

/// Text of a server as a message or a log may show it: on one line, without control characters, about `most_bytes` long.
pub(crate) fn shown(text: &str, most_bytes: usize) -> String {
    let mut shown = String::new();
    for letter in text.chars() {
        if shown.len() >= most_bytes {
            return shown + "...";
        }
        if letter.is_control() { shown.extend(letter.escape_default()) } else { shown.push(letter) }
    }
    shown
}

/// Shows an error with its causes, which the `Display` of the AWS SDK and of hyper leaves out.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_condition_means_changed_to_a_read_and_precondition_to_a_write() {
        assert_eq!(kind_of_status(Operation::Get, 412), ErrorKind::Changed);
        assert_eq!(kind_of_status(Operation::Put, 412), ErrorKind::Precondition);
    }

    #[test]
    fn text_of_a_server_is_shown_on_one_line_and_cut() {
        assert_eq!(shown("plain é \"x\"", 20), "plain é \"x\"");
        assert_eq!(shown("a\r\nWARNING forged\u{1b}[2J", 300), "a\\r\\nWARNING forged\\u{1b}[2J");
        let long = shown(&"x".repeat(100_000), 300);
        assert!(long.len() == 303 && long.ends_with("..."), "{}", long.len());
    }
}
