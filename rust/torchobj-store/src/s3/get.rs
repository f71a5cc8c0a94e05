//! Reading objects and their heads, on the hot path.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use torchobj_core::buffer::Dest;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::Opened;
use torchobj_core::types::{Attributes, GetRequest, ObjectHead, Payload, Version};

use super::Bucket;
use super::answer::{ServerError, error};
use super::odd::Odd;
use super::request::{Answer, Ask};
use crate::http::{Framing, Lease, date, range};

/// Metadata under which an upload notes its nonce: never shown.
pub(super) const NONCE_HEADER: &str = "x-amz-meta-torchobj-upload";

impl Bucket {
    /// Asks for an object or a range.
    pub(super) async fn open(self: &Arc<Self>, request: GetRequest<'_>) -> Result<Box<dyn Opened>> {
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
        let length = match answer.lease.answer().framing() {
            Framing::Length(length) => Some(length),
            Framing::Empty | Framing::Odd => None,
        };
        let expected = length.is_none() || request.size.is_none_or(|size| length == Some(size));
        let is_xml = answer.header("content-type").is_some_and(|kind| kind.contains("xml"));
        if is_xml && (version.is_none() || answer.status == 200 && !expected) {
            answer = self.unless_error(&ask, answer).await?;
        }
        let wrong = |message: &str| self.error(ErrorKind::Protocol, operation, Some(request.key), message);
        let known = length.is_some() || request.size.is_some();
        check_encoding(answer.header("content-encoding"), version.as_ref(), known)
            .map_err(|message| wrong(&message))?;
        let announced = match answer.status {
            206 => {
                let header = answer.header("content-range").unwrap_or_default();
                Some(
                    range::parse_content_range(header)
                        .ok_or_else(|| wrong(&format!("206 with Content-Range {header:?}")))?,
                )
            }
            _ => None,
        };
        let (range, size) = match (answer.lease.answer().framing(), &announced) {
            (Framing::Length(length), Some((range, size))) if length == range.end - range.start => {
                (range.clone(), *size)
            }
            (Framing::Length(length), None) => (0..length, length),
            (Framing::Length(length), Some((range, _))) => {
                return Err(wrong(&format!("the body has {length} bytes, its Content-Range {range:?}")));
            }
            (Framing::Empty, _) => return Err(wrong("an answer without a body")),
            (Framing::Odd, Some((range, size))) => (range.clone(), *size),
            (Framing::Odd, None) => {
                let size = self.expected_size(&request, version.as_ref()).await?;
                (0..size, size)
            }
        };
        let known = announced.is_some() || length.is_some();
        let mut lease = answer.lease;
        let body = match length {
            Some(_) => Body::Coming(lease),
            None => {
                let body = lease.stream("GET").await;
                let body = body.map_err(|failure| self.failure(operation, Some(request.key), failure))?;
                Body::Odd(Box::new(Odd::new(lease, body, range.end - range.start, known)))
            }
        };
        let (bucket, key) = (self.clone(), request.key.to_owned());
        Ok(Box::new(OpenedObject { bucket, key, size, range, version, announced: known, body }))
    }

    /// Size of an object whose response does not announce it: as it was listed, or by HEAD.
    async fn expected_size(&self, request: &GetRequest<'_>, version: Option<&Version>) -> Result<u64> {
        if let Some(size) = request.size {
            return Ok(size);
        }
        let head = self.head(request.key).await?;
        if head.version.as_ref() != version {
            let message = format!("GET answers with version {version:?}, HEAD with {:?}", head.version);
            return Err(self.error(ErrorKind::Protocol, Operation::Get, Some(request.key), &message));
        }
        Ok(head.size)
    }

    /// A 200 whose body is an error, as proxies of S3 make them: objects have an ETag, errors have none.
    async fn unless_error(&self, ask: &Ask<'_>, mut answer: Answer) -> Result<Answer> {
        const LARGEST_ERROR_BYTES: u64 = 64 << 10;
        match answer.lease.answer().framing() {
            Framing::Length(length) if length <= LARGEST_ERROR_BYTES => {}
            _ => return Ok(answer),
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

fn attributes(answer: &Answer) -> Attributes {
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

/// Refuses a body that something between the store and here may have encoded. Objects that were stored with a
/// Content-Encoding come as they are, with a strong ETag (RFC 9110, section 8.8.1) and with the length of the object,
/// which is announced, or `known` and compared.
pub(super) fn check_encoding(encoding: Option<&str>, version: Option<&Version>, known: bool) -> Result<(), String> {
    let encodings = encoding.unwrap_or_default().split(',').map(str::trim);
    // S3 strips `aws-chunked`, which is an encoding of uploads; others keep it.
    let Some(encoding) = encodings.into_iter().find(|name| !matches!(*name, "" | "identity" | "aws-chunked")) else {
        return Ok(());
    };
    let strong = version.is_some_and(|version| !version.as_str().starts_with("W/"));
    if strong && known {
        return Ok(());
    }
    let missing = if strong { "Content-Length" } else { "strong ETag" };
    Err(format!("Content-Encoding {encoding} without a {missing}: a proxy may have compressed the object"))
}

/// A body that is on its way.
enum Body {
    /// Of a length that was announced.
    Coming(Lease),
    Odd(Box<Odd>),
}

struct OpenedObject {
    bucket: Arc<Bucket>,
    key: String,
    size: u64,
    range: Range<u64>,
    version: Option<Version>,
    announced: bool,
    body: Body,
}

#[async_trait]
impl Opened for OpenedObject {
    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    fn announced(&self) -> bool {
        self.announced
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<(), Error> {
        let fail = |failure| self.bucket.failure(Operation::Get, Some(&self.key), failure);
        match &mut self.body {
            Body::Coming(lease) => lease.connection().read_body(dest).await.map_err(fail),
            Body::Odd(odd) => match odd.read_into(dest).await.map_err(fail)? {
                None => Ok(()),
                Some(message) => Err(self.bucket.error(ErrorKind::Protocol, Operation::Get, Some(&self.key), &message)),
            },
        }
    }
}
