//! A response whose head is received.

use torchobj_core::error::{Error, Operation, Result};

use super::dialect::{Dialect, error_of};
use super::failure::NEEDS_TLS;
use super::{ErrorResponse, Failure, Framing, Lease, OTHER_SERVER, sanitize};

/// Maximum size of the body of an error. Those of S3 have a few hundred bytes; a larger page of a proxy is not read.
pub(crate) const MAX_ERROR_BYTES: usize = 64 << 10;

/// Whether a content type is that of a page for a browser.
pub(crate) fn is_html(content_type: &str) -> bool {
    content_type.trim().to_ascii_lowercase().starts_with("text/html")
}

/// Whether a body is another server's page, and no document of a store, which may be damaged or empty. A document begins with
/// `start`, and its content type contains `kind`.
pub(crate) fn is_page(body: &[u8], content_type: Option<&str>, start: &str, kind: &str) -> bool {
    let body = body.trim_ascii_start();
    let head = String::from_utf8_lossy(&body[..body.len().min(16)]).to_ascii_lowercase();
    let is_of_kind = content_type.is_none_or(|content_type| content_type.to_ascii_lowercase().contains(kind));
    let is_document = body.is_empty() || body.starts_with(start.as_bytes()) || is_of_kind;
    !is_document || head.starts_with("<html") || head.starts_with("<!doctype html") || content_type.is_some_and(is_html)
}

/// The error of a response that lacks what the provider always sends, with its status and content type.
pub(crate) fn refuse(error: Error, status: u16, content_type: Option<&str>) -> Error {
    let kind = sanitize(content_type.unwrap_or("none"), 100);
    error.with_status(status, None).with_hint(format!("its content type is {kind}: {OTHER_SERVER}"))
}

/// The head of a response, and the connection that receives its body.
pub(crate) struct Response {
    pub(crate) lease: Lease,
    pub(crate) status: u16,
}

impl Response {
    /// The value of a header. `name` is case-insensitive.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.lease.header(name)
    }

    /// Length of the body in bytes, if the response has it.
    pub(crate) fn length(&self) -> Option<u64> {
        match self.lease.framing() {
            Framing::Length(length) => Some(length),
            _ => None,
        }
    }

    /// Whether the body is a page for a browser.
    pub(crate) fn is_html(&self) -> bool {
        self.header("content-type").is_some_and(is_html)
    }

    /// The error of a response that lacks what the provider always sends, with its status and content type.
    pub(crate) fn refuse(&self, error: Error) -> Error {
        refuse(error, self.status, self.header("content-type"))
    }

    /// Receives a body of at most `limit_bytes`.
    pub(crate) async fn read_text(&mut self, limit_bytes: usize) -> Result<Vec<u8>, Failure> {
        self.lease.read_text(limit_bytes).await
    }

    /// Parses a received body as an error of the provider, for any status; `None` if it is not one.
    pub(crate) fn error_in(
        &self,
        body: &[u8],
        operation: Operation,
        key: Option<&str>,
        dialect: &dyn Dialect,
    ) -> Option<Error> {
        let header = |name: &str| self.header(name).map(str::to_owned);
        let response = ErrorResponse { status: self.status, header: &header, body };
        let refusal = dialect.refusal(operation, &response);
        refusal.code.is_some().then(|| refusal.into_error(operation, dialect.url(key), &response))
    }

    /// Receives the body of an error response, and returns its error.
    pub(crate) async fn into_error(mut self, operation: Operation, key: Option<&str>, dialect: &dyn Dialect) -> Error {
        let body = self.error_body().await;
        let header = |name: &str| self.header(name).map(str::to_owned);
        let response = ErrorResponse { status: self.status, header: &header, body: &body };
        let error = error_of(dialect, operation, key, &response).await;
        if self.status != 400 || error.code().is_some() || self.lease.is_tls() {
            return error;
        }
        // The words of nginx, Go and Apache. A response to HEAD has no body.
        let body = String::from_utf8_lossy(&body);
        if body.contains("HTTPS") || body.contains("SSL-enabled") {
            return error.with_hint(NEEDS_TLS);
        }
        if operation != Operation::Head || error.request_id().is_some() {
            return error;
        }
        error.with_first_hint(NEEDS_TLS)
    }

    /// Receives the body of an error; empty if the response has none or it cannot be received.
    async fn error_body(&mut self) -> Vec<u8> {
        self.read_text(MAX_ERROR_BYTES).await.unwrap_or_default()
    }

    /// Returns the response, or an error if its body is an error of the provider of at most 64 KiB, for any status.
    pub(crate) async fn unless_error(
        mut self,
        operation: Operation,
        key: Option<&str>,
        dialect: &dyn Dialect,
    ) -> Result<Self> {
        if self.length().is_none_or(|length| length > MAX_ERROR_BYTES as u64) {
            return Ok(self);
        }
        let body = match self.lease.peek_text().await {
            Ok(body) => body.to_vec(),
            Err(failure) => return Err(failure.into_error(operation, dialect.url(key))),
        };
        match self.error_in(&body, operation, key, dialect) {
            Some(error) => Err(error),
            None => Ok(self),
        }
    }
}
