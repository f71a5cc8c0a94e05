//! Reading objects and their heads, on the hot path.

use std::borrow::Cow;

use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::store::Opened;
use torchobj_core::types::{Attributes, GetRequest, ObjectHead, Payload, Version};

use super::Bucket;
use super::answer::{ServerError, error};
use super::request::Ask;
use crate::http::{OpenedObject, Response, date, range};

/// Metadata under which an upload notes its nonce: never shown.
pub(super) const NONCE_HEADER: &str = "x-amz-meta-torchobj-upload";

impl Bucket {
    /// Asks for an object or a range.
    pub(super) async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn Opened>> {
        let mut headers = self.customer_key_headers();
        if let Some(range) = &request.range {
            headers.push(("range", Cow::Owned(range::header(range))));
        }
        // A weak ETag matches nothing (RFC 9110, section 8.8.3.2): the answer's own is compared above instead.
        if let Some(version) = request.version.filter(|version| !version.as_str().starts_with("W/")) {
            headers.push(("if-match", Cow::Borrowed(version.as_str())));
        }
        // A server that compresses on the way says nothing of the object's own length.
        headers.push(("accept-encoding", Cow::Borrowed("identity")));
        let payload = Payload::default();
        let operation = Operation::Get;
        let ask = Ask { operation, method: "GET", key: Some(request.key), query: &[], headers, payload: &payload };
        let mut answer = self.ask(&ask).await?;
        let version = answer.header("etag").map(Version::new);
        let length = answer.length();
        let expected = length.is_none() || request.size.is_none_or(|size| length == Some(size));
        let is_xml = answer.header("content-type").is_some_and(|kind| kind.contains("xml"));
        if is_xml && (version.is_none() || answer.status == 200 && !expected) {
            answer = self.unless_error(&ask, answer).await?;
        }
        let (url, head) = (self.url_of(ask.key), || self.head(request.key));
        Ok(Box::new(OpenedObject::of_response(answer, url, version, request.size, head).await?))
    }

    /// A 200 whose body is an error, as proxies of S3 make them: objects have an ETag, errors have none.
    async fn unless_error(&self, ask: &Ask<'_>, mut answer: Response) -> Result<Response> {
        const LARGEST_ERROR_BYTES: u64 = 64 << 10;
        if answer.length().is_none_or(|length| length > LARGEST_ERROR_BYTES) {
            return Ok(answer);
        }
        let text = answer.lease.peek_text().await.map_err(|failure| self.failure(ask.operation, ask.key, failure))?;
        let said = ServerError::parse(text);
        if said.code.is_none() {
            return Ok(answer);
        }
        let header = |name: &str| answer.header(name).map(str::to_owned);
        Err(error(ask.operation, self.url_of(ask.key), answer.status, said, header))
    }

    /// Size, version and attributes.
    pub(super) async fn head(&self, key: &str) -> Result<ObjectHead> {
        Ok(self.head_with_nonce(key).await?.0)
    }

    /// The same, and the nonce of the upload that made the object.
    pub(super) async fn head_with_nonce(&self, key: &str) -> Result<(ObjectHead, Option<String>)> {
        let payload = Payload::default();
        let headers = self.customer_key_headers();
        let operation = Operation::Head;
        let ask = Ask { operation, method: "HEAD", key: Some(key), query: &[], headers, payload: &payload };
        let answer = self.ask(&ask).await?;
        let size = answer.header("content-length").and_then(|length| length.trim().parse().ok());
        let size =
            size.ok_or_else(|| self.error(ErrorKind::Protocol, operation, Some(key), "an answer without a size"))?;
        let head = ObjectHead {
            size,
            version: answer.header("etag").map(Version::new),
            modified_ms: answer.header("last-modified").and_then(date::http_ms),
            attributes: attributes(&answer),
        };
        Ok((head, answer.header(NONCE_HEADER).map(str::to_owned)))
    }
}

fn attributes(answer: &Response) -> Attributes {
    let text = |name| answer.header(name).map(str::to_owned);
    let mut metadata: Vec<_> = answer
        .lease
        .answer()
        .headers()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .filter(|(name, _)| name != NONCE_HEADER)
        .filter_map(|(name, value)| Some((name.strip_prefix("x-amz-meta-")?.to_owned(), value.to_owned())))
        .collect();
    metadata.sort();
    Attributes {
        content_type: text("content-type"),
        content_encoding: text("content-encoding"),
        content_disposition: text("content-disposition"),
        content_language: text("content-language"),
        cache_control: text("cache-control"),
        storage_class: text("x-amz-storage-class"),
        metadata,
    }
}
