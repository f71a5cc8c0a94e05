//! Sends requests to a bucket without the SDK: every GET, HEAD, LIST, PUT, part and commit. Signs them, and interprets
//! their redirects and errors.

use std::fmt::Display;
use std::sync::Arc;

use async_trait::async_trait;
use aws_smithy_async::time::TimeSource;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};

use super::bucket::{Bucket, Signing};
use super::clock::is_skewed;
use super::endpoint::Address;
use super::error::{CLOCK, ErrorDocument, refusal};
use super::sign::{self, Canonical, Signer, Timestamp, UNSIGNED_PAYLOAD};
use crate::http::{
    self, Anonymous, Authorize, Dialect, ErrorResponse, Failure, HostAddress, Origin, Refusal, Request, RequestHead,
    Response, Unauthorized,
};

impl Bucket {
    /// The address and the signer for one request.
    pub(super) async fn dialect(&self, operation: Operation) -> Result<BucketDialect<'_>> {
        let address = self.address(operation).await?;
        let signing = self.signer(operation, &address).await?;
        Ok(BucketDialect { bucket: self, address, signing, skew_s: self.account.clock.skew_s() })
    }
}

const CONSOLE: &str =
    "the endpoint is the console of MinIO: endpoint_url must have the port of its S3 API, by default 9000";

/// Returns whether the `Server` of a response is the web console of MinIO.
fn is_console(server: &str) -> bool {
    server.eq_ignore_ascii_case("MinIO Console")
}

/// Signs requests (AWS General Reference, "Create a signed AWS API request").
struct SigV4<'a> {
    signer: &'a Signer,
    bucket: &'a Bucket,
}

impl Authorize for SigV4<'_> {
    fn authorize(&self, request: &Unauthorized<'_>, head: &mut RequestHead) -> Result<(), Failure> {
        let time = Timestamp::new(self.bucket.account.clock.now());
        // The body of a POST has no checksum header, so its hash is signed.
        let payload_hash = (request.method == "POST").then(|| sign::payload_hash(request.payload.pieces()));
        let mut headers = Vec::with_capacity(request.headers.len() + 4);
        headers.push(("x-amz-content-sha256", payload_hash.as_deref().unwrap_or(UNSIGNED_PAYLOAD)));
        headers.push(("x-amz-date", time.as_str()));
        headers.extend(self.signer.session_token().map(|token| ("x-amz-security-token", token)));
        for (name, value) in &headers {
            head.push(name, value)?;
        }
        headers.push(("host", request.host));
        let signed = request.headers.iter().filter(|(name, _)| name.starts_with("x-amz-"));
        headers.extend(signed.map(|(name, value)| (*name, &**value)));
        headers.sort_unstable_by_key(|(name, _)| *name);
        let Unauthorized { method, path, query, .. } = *request;
        let canonical = Canonical { method, path, query, headers: &headers };
        // The value contains the access key and the region, so it is checked too.
        head.push_with("authorization", |out| self.signer.authorize_into(out, &time, &canonical))
    }
}

/// The address and the signer of one request, and the [`Dialect`] of its response.
pub(super) struct BucketDialect<'a> {
    bucket: &'a Bucket,
    address: Arc<Address>,
    signing: Option<Signing>,
    skew_s: i64,
}

impl BucketDialect<'_> {
    /// Sends a request, signed if there are credentials.
    pub(super) async fn send(&self, request: &Request<'_>) -> Result<Response> {
        let origin = &self.address.origin;
        let response = match &self.signing {
            Some((signer, _)) => http::send(request, origin, &SigV4 { signer, bucket: self.bucket }, self).await?,
            None => http::send(request, origin, &Anonymous, self).await?,
        };
        // It responds with its own page to any GET and HEAD.
        if response.header("server").is_some_and(is_console) {
            let error = self.bucket.error(ErrorKind::Config, request.operation, request.key, CONSOLE);
            return Err(error.with_status(response.status, None));
        }
        Ok(response)
    }

    /// Sends a request and parses the document in its response, which has at most `max_bytes`. S3 may send an error with
    /// status 200, before it knows whether the request succeeds.
    pub(super) async fn document<T, E: Display>(
        &self,
        request: &Request<'_>,
        max_bytes: usize,
        parse: impl FnOnce(&[u8]) -> Result<T, E>,
    ) -> Result<T> {
        let Request { operation, key, .. } = *request;
        let mut response = self.send(request).await?;
        let text = response.read_text(max_bytes).await;
        let text = text.map_err(|failure| self.bucket.failure(operation, key, failure))?;
        parse(&text).map_err(|problem| {
            let head = (response.status, response.header("content-type"));
            let unexpected = || self.bucket.unexpected(operation, key, head, &text, &problem.to_string());
            response.error_in(&text, operation, key, self).unwrap_or_else(unexpected)
        })
    }
}

#[async_trait]
impl Dialect for BucketDialect<'_> {
    fn url(&self, key: Option<&str>) -> String {
        self.bucket.url_of(key)
    }

    fn refusal(&self, operation: Operation, response: &ErrorResponse<'_>) -> Refusal {
        let mut refusal = refusal(operation, response, &self.bucket.account.config);
        if (response.header)("server").as_deref().is_some_and(is_console) {
            (refusal.kind, refusal.message) = (ErrorKind::Config, Some(CONSOLE.to_owned()));
        }
        refusal
    }

    fn redirected(&self, server: &HostAddress) -> Option<Origin> {
        self.address.redirected(server, &self.bucket.name, &self.bucket.account.pools)
    }

    /// Updates region, clock skew or credentials from the response, so that the request can be retried. If nothing changed, a
    /// retry would fail again, and the kind of the error is one that is not retried.
    async fn recover(&self, operation: Operation, response: &ErrorResponse<'_>, mut error: Error) -> Error {
        let bucket = self.bucket;
        let (status, header) = (response.status, response.header);
        if matches!(status, 401 | 403 | 404) || error.kind() == ErrorKind::NoBucket {
            let endpoint = format!("the endpoint is {}", self.address.endpoint(&bucket.name));
            // A permanent refusal of a request that has reached the object is none of the endpoint.
            error = if error.kind() == ErrorKind::InvalidRequest { error } else { error.with_first_hint(&endpoint) };
        }
        let date = header("date");
        if error.code().is_none() && status == 403 && is_skewed(date.as_deref(), self.skew_s) {
            error = error.with_kind(ErrorKind::ClockSkew).with_hint(CLOCK);
        }
        let mut region = header("x-amz-bucket-region").or_else(|| ErrorDocument::parse(response.body).region);
        if region.is_none() && operation == Operation::Head && matches!(status, 301 | 400) {
            // A response to HEAD has no body with the region.
            region = bucket.find_region(operation).await.ok();
        }
        let credentials = &bucket.account.environment().await.credentials;
        let generation = self.signing.as_ref().map(|(_, generation)| *generation);
        let changed = match error.kind() {
            ErrorKind::ClockSkew => bucket.account.clock.update(date.as_deref(), self.skew_s),
            ErrorKind::ExpiredCredentials => match (credentials, generation) {
                (Some(credentials), Some(generation)) if credentials.replace_expired(generation).await => true,
                _ => {
                    let hint = "the credentials have expired, and their source returns the same ones";
                    return error.with_kind(ErrorKind::Credentials).with_hint(hint);
                }
            },
            ErrorKind::Credentials => {
                if let (Some(credentials), Some(generation)) = (credentials, generation) {
                    credentials.reject(generation);
                }
                true
            }
            // S3 responds to a HEAD in a wrong region with status 400 and no code.
            ErrorKind::Misaddressed | ErrorKind::InvalidRequest => match region {
                Some(region) if region != self.address.region => {
                    bucket.set_region(&region);
                    return error.with_kind(ErrorKind::Misaddressed);
                }
                _ => error.kind() == ErrorKind::InvalidRequest,
            },
            _ => true,
        };
        if changed { error } else { error.with_kind(ErrorKind::InvalidRequest) }
    }
}
