//! One request to a bucket, signed, and its answer or its error. The hot path: every GET, HEAD, LIST, PUT and part.

use std::borrow::Cow;

use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::types::Payload;

use super::Bucket;
use super::answer::{self, ServerError};
use super::endpoint::Address;
use super::redirect;
use super::sign::{self, Canonical, Signer, Timestamp, UNSIGNED_PAYLOAD};
use crate::http::{Failure, Framing, Lease, Line, Proxy, Response, encode, shown};

/// Errors of S3 are a few hundred bytes; a proxy's page of HTML is not read to its end.
const LARGEST_ERROR_BYTES: usize = 64 << 10;

/// Redirects that one request follows.
const MOST_REDIRECTS: usize = 3;

/// What is asked.
pub(super) struct Ask<'a> {
    pub(super) operation: Operation,
    pub(super) method: &'static str,
    /// `None` asks the bucket.
    pub(super) key: Option<&'a str>,
    /// Names and values, sorted by name.
    pub(super) query: &'a [(&'a str, &'a str)],
    /// Lower-case names and values. Those that begin with `x-amz-` are signed.
    pub(super) headers: Vec<(&'a str, Cow<'a, str>)>,
    pub(super) payload: &'a Payload,
}

/// What a request was made with.
pub(super) struct Used<'a> {
    pub(super) region: &'a str,
    pub(super) skew_s: i64,
    /// Of the credentials.
    pub(super) generation: Option<u64>,
}

impl Bucket {
    /// Asks, at the bucket's address, and where that answers with a temporary redirect, there.
    pub(super) async fn ask(&self, ask: &Ask<'_>) -> Result<Response> {
        let address = self.address(ask.operation).await?;
        let signer = self.signer(ask.operation, &address).await?;
        let skew_s = self.account.skew_s();
        let mut elsewhere: Option<Address> = None;
        for _ in 0..=MOST_REDIRECTS {
            let at = elsewhere.as_ref().unwrap_or(&address);
            let head = self.head_of(ask, at, signer.as_ref().map(|(signer, _)| &**signer))?;
            let failed = |failure| self.failure(ask.operation, ask.key, failure);
            let mut lease = at.line.lease().await.map_err(failed)?;
            let bodiless = ask.method == "HEAD";
            let status = lease.connection().exchange(&head, ask.payload.pieces(), bodiless).await.map_err(failed)?;
            match status {
                200..=299 => return Ok(Response { lease, status }),
                307 | 308 if lease.header("location").is_some() => {
                    let location = lease.header("location").unwrap_or_default();
                    let (target, endpoint) = (at.line.target(), &at.endpoint_host);
                    let redirect = redirect::resolve(location, target, endpoint, &self.name, at.bucket_in_host);
                    let redirect = redirect.map_err(|problem| {
                        let error = self.error(ErrorKind::InvalidRequest, ask.operation, ask.key, &problem);
                        error
                            .with_status(status, None)
                            .with_hint("where that is the store itself, set endpoint_url to it")
                    })?;
                    let line = self.account.pool.line(&redirect.target);
                    elsewhere = Some(at.redirected(redirect, &self.name, line));
                }
                _ => {
                    let used = Used { region: &address.region, skew_s, generation: signer.map(|(_, number)| number) };
                    return Err(self.refused(ask, lease, status, used).await);
                }
            }
        }
        Err(self.error(ErrorKind::Protocol, ask.operation, ask.key, "too many redirects"))
    }

    /// The head of the request, as it is sent. A value that would end its line, and begin another header, is refused.
    fn head_of(&self, ask: &Ask<'_>, address: &Address, signer: Option<&Signer>) -> Result<Vec<u8>> {
        let (host, path) = (address.host.as_str(), &*address.path_of(ask.key));
        let refuse = |name: &str| self.refused_header(ask.operation, ask.key, name);
        let time = Timestamp::new(self.account.now());
        let mut query = Vec::new();
        for (index, (name, value)) in ask.query.iter().enumerate() {
            query.extend_from_slice(if index > 0 { b"&" } else { b"" });
            encode::query_into(&mut query, name);
            query.push(b'=');
            encode::query_into(&mut query, value);
        }
        // The document of a POST has no checksum of its own.
        let payload_hash = (ask.method == "POST").then(|| sign::payload_hash(ask.payload.pieces()));
        let mut headers: Vec<(&str, &str)> = Vec::with_capacity(ask.headers.len() + 6);
        headers.push(("host", host));
        headers.extend(ask.headers.iter().map(|(name, value)| (*name, &**value)));
        if let Some(signer) = signer {
            headers.push(("x-amz-content-sha256", payload_hash.as_deref().unwrap_or(UNSIGNED_PAYLOAD)));
            headers.push(("x-amz-date", time.as_str()));
            headers.extend(signer.session_token().map(|token| ("x-amz-security-token", token)));
        }
        if self.account.config.requester_pays {
            headers.push(("x-amz-request-payer", "requester"));
        }
        let signed = |(name, _): &&(&str, &str)| *name == "host" || name.starts_with("x-amz-");
        let mut out = Vec::with_capacity(640);
        push_request_line(&mut out, &address.line, ask.method, host, path, &query);
        for (name, value) in &headers {
            push_header(&mut out, name, value).map_err(refuse)?;
        }
        push_header(&mut out, "user-agent", concat!("torchobj/", env!("CARGO_PKG_VERSION"))).map_err(refuse)?;
        if matches!(ask.method, "PUT" | "POST") {
            push_header(&mut out, "content-length", &ask.payload.len().to_string()).map_err(refuse)?;
        }
        if let Some(signer) = signer {
            let mut canonical: Vec<(&str, &str)> = headers.iter().filter(signed).copied().collect();
            canonical.sort_unstable_by_key(|(name, _)| *name);
            let canonical = Canonical { method: ask.method, path, query: &query, headers: &canonical };
            out.extend_from_slice(b"authorization: ");
            let start = out.len();
            signer.authorize_into(&mut out, &time, &canonical);
            // The access key and the region are in it.
            if !fits_header(&out[start..]) {
                return Err(refuse("authorization"));
            }
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(b"\r\n");
        Ok(out)
    }

    /// The error that a value is which no header can carry. It does not show the value, which may be a token or a key.
    pub(super) fn refused_header(&self, operation: Operation, key: Option<&str>, name: &str) -> Error {
        let message = format!("header {name}: a value with control characters");
        self.error(ErrorKind::Config, operation, key, &message)
    }

    async fn refused(&self, ask: &Ask<'_>, mut lease: Lease, status: u16, used: Used<'_>) -> Error {
        let text = if ask.method == "HEAD" || lease.answer().framing() == Framing::Empty {
            Vec::new()
        } else {
            // An answer whose body is lost is known by its status.
            lease.read_text(ask.method, LARGEST_ERROR_BYTES).await.unwrap_or_default()
        };
        let header = |name: &str| lease.header(name).map(str::to_owned);
        self.refusal(ask.operation, ask.key, status, &text, header, used).await
    }

    /// The error that a refusal is. What it teaches about region, clock and credentials is learnt, and the request may
    /// be made again at once; unless it was made with just that, and would be refused again.
    pub(super) async fn refusal(
        &self,
        operation: Operation,
        key: Option<&str>,
        status: u16,
        text: &[u8],
        header: impl Fn(&str) -> Option<String>,
        used: Used<'_>,
    ) -> Error {
        let said = ServerError::parse(text);
        let mut region = header("x-amz-bucket-region").or_else(|| said.region.clone());
        let silent = said.code.is_none();
        let code = said.code.clone();
        let mut error = answer::error(operation, self.url_of(key), status, said, &header);
        if matches!(status, 401 | 403 | 404) {
            let endpoint = self.address(operation).await.map_or_else(|_| String::new(), |address| address.url());
            let next = answer::hint(operation, error.kind(), code.as_deref()).map(|hint| format!("; {hint}"));
            error = error.with_hint(format!("the endpoint is {endpoint}{}", next.unwrap_or_default()));
        }
        if silent && status == 403 && self.account.is_skewed(header("date").as_deref(), used.skew_s) {
            error = error.with_kind(ErrorKind::ClockSkew);
        }
        if region.is_none() && operation == Operation::Head && matches!(status, 301 | 400) {
            // An answer to HEAD has no body that could say it.
            region = self.find_region(operation).await.ok();
        }
        let credentials = &self.account.environment().await.credentials;
        let learnt = match error.kind() {
            ErrorKind::ClockSkew => self.account.learn_clock(header("date").as_deref(), used.skew_s),
            ErrorKind::ExpiredCredentials => match (credentials, used.generation) {
                (Some(credentials), Some(generation)) if credentials.replaced(generation).await => true,
                _ => {
                    let hint = "the credentials have expired, and where they came from there are no others";
                    return error.with_kind(ErrorKind::Credentials).with_hint(hint);
                }
            },
            ErrorKind::Credentials => {
                if let (Some(credentials), Some(generation)) = (credentials, used.generation) {
                    credentials.refused(generation);
                }
                true
            }
            // To a wrong region S3 answers HEAD with 400 and no code.
            ErrorKind::Misaddressed | ErrorKind::InvalidRequest => match region {
                Some(region) if region != used.region => {
                    self.learn_region(&region);
                    return error.with_kind(ErrorKind::Misaddressed);
                }
                _ => error.kind() == ErrorKind::InvalidRequest,
            },
            _ => true,
        };
        if learnt { error } else { error.with_kind(ErrorKind::InvalidRequest) }
    }

    /// An error about a key, or about the bucket.
    pub(super) fn error(&self, kind: ErrorKind, operation: Operation, key: Option<&str>, message: &str) -> Error {
        Error::new(kind, operation, self.url_of(key), shown(message, 1000))
    }

    /// The error that a failure of a connection is.
    pub(super) fn failure(&self, operation: Operation, key: Option<&str>, failure: Failure) -> Error {
        failure.into_error(operation, self.url_of(key))
    }
}

/// What a request begins with; to a proxy that forwards it, with the whole URL, and who may ask it to.
pub(super) fn push_request_line(out: &mut Vec<u8>, line: &Line, method: &str, host: &str, path: &[u8], query: &[u8]) {
    let forwarder = line.forwarder();
    out.extend_from_slice(method.as_bytes());
    out.push(b' ');
    if forwarder.is_some() {
        out.extend_from_slice(b"http://");
        out.extend_from_slice(host.as_bytes());
    }
    out.extend_from_slice(path);
    if !query.is_empty() {
        out.push(b'?');
        out.extend_from_slice(query);
    }
    out.extend_from_slice(b" HTTP/1.1\r\n");
    if let Some(authorization) = forwarder.and_then(Proxy::authorization) {
        push_header(out, "proxy-authorization", authorization).expect("Base64 fits a header");
    }
}

/// Whether a value stays on its line.
pub(super) fn fits_header(value: &[u8]) -> bool {
    value.iter().all(|byte| !byte.is_ascii_control() || *byte == b'\t')
}

/// Appends a header; a value that cannot be one is refused by the header's name.
fn push_header<'a>(out: &mut Vec<u8>, name: &'a str, value: &str) -> Result<(), &'a str> {
    if !fits_header(value.as_bytes()) {
        return Err(name);
    }
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value.as_bytes());
    out.extend_from_slice(b"\r\n");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_would_begin_another_header_is_refused_and_a_tab_is_none() {
        for value in ["a\r\nx-amz-acl: public-read", "a\n", "a\r", "\0", "\x7f", "\x1b[2J"] {
            let mut out = Vec::new();
            assert_eq!(push_header(&mut out, "content-type", value), Err("content-type"), "{value:?}");
            assert!(out.is_empty(), "{value:?}");
        }
        let mut out = Vec::new();
        push_header(&mut out, "cache-control", "a\tb ü").unwrap();
        assert_eq!(out, "cache-control: a\tb ü\r\n".as_bytes());
    }
}
