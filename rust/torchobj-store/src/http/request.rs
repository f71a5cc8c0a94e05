//! Sends one request to a provider and returns its response or its error: writes the head, follows redirects, reads the
//! body of an error. [`Authorize`] and [`Dialect`] implement the differences between providers. Does not retry.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::Payload;

use super::dialect::Dialect;
use super::{Failure, Origin, Proxy, Response, encode, redirect, sanitize};

/// Maximum number of redirects of a request.
const MAX_REDIRECTS: usize = 3;

/// Maximum number of characters of a URL in the log: those of the longest key, 1024 bytes, and its bucket.
const MAX_LOGGED: usize = 1200;

/// Names in lower case, and values.
pub(crate) type Headers<'a> = Vec<(&'a str, Cow<'a, str>)>;

/// A request, independent of the server that it is sent to.
pub(crate) struct Request<'a> {
    pub(crate) operation: Operation,
    pub(crate) method: &'static str,
    /// The key in error messages; `None`: the bucket.
    pub(crate) key: Option<&'a str>,
    /// Path relative to that of the [`Origin`], percent-encoded; empty: the path of the origin.
    pub(crate) path: Vec<u8>,
    /// Names and values, not encoded, sorted by name.
    pub(crate) query: &'a [(&'a str, &'a str)],
    /// `Host`, `User-Agent`, `Content-Length` and the headers of [`Authorize`] are added.
    pub(crate) headers: Headers<'a>,
    pub(crate) payload: &'a Payload,
}

/// Adds the headers that authenticate a request.
pub(crate) trait Authorize: Send + Sync {
    /// Appends headers to the head of `request`.
    ///
    /// # Errors
    /// A value that no header can contain.
    fn authorize(&self, request: &Unauthorized<'_>, head: &mut RequestHead) -> Result<(), Failure>;
}

/// A request before [`Authorize`] adds its headers.
pub(crate) struct Unauthorized<'a> {
    pub(crate) method: &'static str,
    /// Percent-encoded.
    pub(crate) path: &'a [u8],
    /// Percent-encoded, without `?`.
    pub(crate) query: &'a [u8],
    pub(crate) host: &'a str,
    pub(crate) headers: &'a [(&'a str, Cow<'a, str>)],
    pub(crate) payload: &'a Payload,
}

/// Sends requests without authentication.
pub(crate) struct Anonymous;

impl Authorize for Anonymous {
    fn authorize(&self, _: &Unauthorized<'_>, _: &mut RequestHead) -> Result<(), Failure> {
        Ok(())
    }
}

/// Sends a request to `origin`, and follows redirects that `dialect` accepts. Returns a response with a status of success;
/// its body is not received yet.
///
/// # Errors
/// Any other response, as parsed by `dialect`; a redirect that is not followed; a failed connection.
pub(crate) async fn send(
    request: &Request<'_>,
    origin: &Origin,
    authorize: &dyn Authorize,
    dialect: &dyn Dialect,
) -> Result<Response> {
    let (operation, url) = (request.operation, || dialect.url(request.key));
    let mut redirected: Option<Origin> = None;
    for _ in 0..=MAX_REDIRECTS {
        let origin = redirected.as_ref().unwrap_or(origin);
        let started = Instant::now();
        let response = exchange(request, origin, authorize).await;
        log_request(request, &response, started.elapsed(), dialect);
        let response = response.map_err(|failure| failure.into_error(operation, url()))?;
        if (200..=299).contains(&response.status) {
            return Ok(response);
        }
        match response.header("location") {
            Some(location) if matches!(response.status, 307 | 308) => {
                let to = redirect::resolve(location, origin.pool.server(), |server| dialect.redirected(server));
                let to = to.map_err(|message| {
                    let failure = Failure::new(ErrorKind::InvalidRequest, message);
                    let error = failure.into_error(operation, url()).with_status(response.status, None);
                    error.with_hint("if it is the same store, set endpoint_url to it")
                })?;
                // `None`: the same server. The path of `location` is ignored.
                if to.is_some() {
                    redirected = to;
                }
            }
            _ => return Err(response.into_error(operation, request.key, dialect).await),
        }
    }
    Err(Failure::new(ErrorKind::Protocol, "too many redirects").into_error(operation, url()))
}

/// Logs a request and the head of its response. The query and the headers are left out: they may contain secrets.
fn log_request(request: &Request<'_>, response: &Result<Response, Failure>, took: Duration, dialect: &dyn Dialect) {
    if !log::log_enabled!(log::Level::Debug) {
        return;
    }
    let (operation, url) = (request.operation, sanitize(&dialect.url(request.key), MAX_LOGGED));
    let ms = took.as_secs_f64() * 1000.0;
    match response {
        Ok(response) => {
            let received = response.length().unwrap_or_default();
            let sent = request.payload.len();
            log::debug!("{operation} {url}: {}, {sent} bytes sent, {received} to receive, {ms:.1} ms", response.status);
        }
        Err(failure) => log::debug!("{operation} {url}: {failure}, {ms:.1} ms"),
    }
}

/// Sends a request to `origin` and returns its response with any status.
pub(crate) async fn exchange(
    request: &Request<'_>,
    origin: &Origin,
    authorize: &dyn Authorize,
) -> Result<Response, Failure> {
    let head = head(request, origin, authorize)?;
    let mut lease = origin.pool.lease().await?;
    let bodiless = request.method == "HEAD";
    let status = lease.exchange(&head.0, request.payload.pieces(), bodiless).await?;
    Ok(Response { lease, status })
}

fn head(request: &Request<'_>, origin: &Origin, authorize: &dyn Authorize) -> Result<RequestHead, Failure> {
    let Request { method, headers, payload, .. } = request;
    let path = origin.path_of(&request.path);
    let mut query = Vec::new();
    for (index, (name, value)) in request.query.iter().enumerate() {
        query.extend_from_slice(if index > 0 { b"&" } else { b"" });
        encode::query_into(&mut query, name);
        query.push(b'=');
        encode::query_into(&mut query, value);
    }
    let mut head = RequestHead::new(origin, method, &path, &query)?;
    for (name, value) in headers {
        head.push(name, value)?;
    }
    head.push("user-agent", concat!("torchobj/", env!("CARGO_PKG_VERSION")))?;
    if matches!(*method, "PUT" | "POST" | "PATCH") {
        head.push("content-length", &payload.len().to_string())?;
    }
    let host = origin.host.as_str();
    authorize.authorize(&Unauthorized { method, path: &path, query: &query, host, headers, payload }, &mut head)?;
    head.0.extend_from_slice(b"\r\n");
    Ok(head)
}

/// Writes the head of a request.
pub(crate) struct RequestHead(Vec<u8>);

impl RequestHead {
    /// Writes the request line and `Host`. For a proxy that forwards, the request line has the absolute URL, and
    /// `Proxy-Authorization` is added.
    fn new(origin: &Origin, method: &str, path: &[u8], query: &[u8]) -> Result<Self, Failure> {
        let mut out = Vec::with_capacity(640);
        let forward_proxy = origin.pool.forward_proxy();
        out.extend_from_slice(method.as_bytes());
        out.push(b' ');
        if forward_proxy.is_some() {
            out.extend_from_slice(b"http://");
            out.extend_from_slice(origin.host.as_bytes());
        }
        out.extend_from_slice(path);
        if !query.is_empty() {
            out.push(b'?');
            out.extend_from_slice(query);
        }
        out.extend_from_slice(b" HTTP/1.1\r\n");
        let mut head = Self(out);
        if let Some(authorization) = forward_proxy.and_then(Proxy::authorization) {
            head.push("proxy-authorization", authorization)?;
        }
        head.push("host", &origin.host)?;
        Ok(head)
    }

    /// Appends a header.
    ///
    /// # Errors
    /// The name is not a token, or the value contains control characters.
    pub(crate) fn push(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        self.push_with(name, |out| out.extend_from_slice(value.as_bytes()))
    }

    /// Appends a header whose value `value` writes.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(crate) fn push_with(&mut self, name: &str, value: impl FnOnce(&mut Vec<u8>)) -> Result<(), Failure> {
        if !is_token(name) {
            return Err(Failure::new(ErrorKind::Config, format!("{name:?} is not the name of a header")));
        }
        let line = self.0.len();
        self.0.extend_from_slice(name.as_bytes());
        self.0.extend_from_slice(b": ");
        let start = self.0.len();
        value(&mut self.0);
        if !is_header_value(&self.0[start..]) {
            self.0.truncate(line);
            return Err(invalid_header_value(name));
        }
        self.0.extend_from_slice(b"\r\n");
        Ok(())
    }
}

/// Returns whether a header can have this value: it contains no control characters except tabs.
pub(crate) fn is_header_value(value: &[u8]) -> bool {
    value.iter().all(|byte| !byte.is_ascii_control() || *byte == b'\t')
}

/// Returns whether a header can have this name (RFC 9110, section 5.6.2).
pub(crate) fn is_token(text: &str) -> bool {
    let letter = |byte: u8| {
        byte.is_ascii_alphanumeric()
            || matches!(byte, b'-' | b'!' | b'#'..=b'\'' | b'*' | b'+' | b'.' | b'^'..=b'`' | b'|' | b'~')
    };
    !text.is_empty() && text.bytes().all(letter)
}

/// The failure for a value that no header can contain. Omits the value, which may be a token or a key.
pub(crate) fn invalid_header_value(name: &str) -> Failure {
    Failure::new(ErrorKind::Config, format!("header {name}: a value with control characters"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_in_a_header_value_are_refused_except_tabs() {
        for value in ["a\r\nx-amz-acl: public-read", "a\n", "a\r", "\0", "\x7f", "\x1b[2J"] {
            let mut head = RequestHead(Vec::new());
            let failure = head.push("content-type", value).unwrap_err();
            assert_eq!(failure.to_string(), "header content-type: a value with control characters", "{value:?}");
            assert!(head.0.is_empty(), "{value:?}");
        }
        let mut head = RequestHead(Vec::new());
        head.push("cache-control", "a\tb ü").unwrap();
        assert_eq!(head.0, "cache-control: a\tb ü\r\n".as_bytes());
    }

    #[test]
    fn a_header_name_that_is_not_a_token_is_refused() {
        for name in ["", "a b", "a:b", "x-amz-meta-a\r\nx-amz-acl", "ü"] {
            let mut head = RequestHead(Vec::new());
            head.push(name, "value").expect_err(name);
            assert!(head.0.is_empty(), "{name:?}");
        }
    }
}
