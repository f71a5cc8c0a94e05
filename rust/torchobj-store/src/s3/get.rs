//! Reading objects and their heads, on the hot path.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use torchobj_core::buffer::Dest;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::Opened;
use torchobj_core::types::{Attributes, ByteRange, GetRequest, ObjectHead, Payload, Version};

use super::Bucket;
use super::answer::{ServerError, error, http_date_ms, number};
use super::request::{Answer, Ask};
use crate::http::{Framing, Lease};

/// A body without a length is collected before it is landed; larger ones are refused.
const LARGEST_ODD_BYTES: usize = 1 << 30;

/// Metadata under which an upload notes its nonce: never shown.
pub(super) const NONCE_HEADER: &str = "x-amz-meta-torchobj-upload";

impl Bucket {
    /// Asks for an object or a range.
    pub(super) async fn open(self: &Arc<Self>, request: GetRequest<'_>) -> Result<Box<dyn Opened>> {
        let mut headers = self.customer_key_headers();
        if let Some(range) = &request.range {
            headers.push(("range", Cow::Owned(range_header(range))));
        }
        // A weak ETag matches nothing (RFC 9110, section 8.8.3.2): the answer's own is compared above instead.
        if let Some(version) = request.version.filter(|version| !version.as_str().starts_with("W/")) {
            headers.push(("if-match", Cow::Borrowed(version.as_str())));
        }
        let payload = Payload::default();
        let operation = Operation::Get;
        let ask = Ask { operation, method: "GET", key: Some(request.key), query: &[], headers, payload: &payload };
        let mut answer = self.ask(&ask).await?;
        let version = answer.header("etag").map(Version::new);
        if version.is_none() && answer.header("content-type").is_some_and(|kind| kind.contains("xml")) {
            answer = self.unless_error(&ask, answer).await?;
        }
        let wrong = |message: &str| self.error(ErrorKind::Protocol, operation, Some(request.key), message);
        let announced = match answer.status {
            206 => {
                let header = answer.header("content-range").unwrap_or_default();
                Some(content_range(header).ok_or_else(|| wrong(&format!("206 with Content-Range {header:?}")))?)
            }
            _ => None,
        };
        let (range, size, body) = match (answer.lease.answer().framing(), announced) {
            (Framing::Length(length), Some((range, size))) if length == range.end - range.start => {
                (range, size, Body::Coming(answer.lease))
            }
            (Framing::Length(length), None) => (0..length, length, Body::Coming(answer.lease)),
            (Framing::Length(length), Some((range, _))) => {
                return Err(wrong(&format!("the body has {length} bytes, its Content-Range {range:?}")));
            }
            (Framing::Empty, _) => return Err(wrong("an answer without a body")),
            (Framing::Odd, announced) => {
                let text = answer.lease.read_text("GET", LARGEST_ODD_BYTES).await;
                let text = text.map_err(|failure| self.failure(operation, Some(request.key), failure))?;
                let length = text.len() as u64;
                let (range, size) = announced.unwrap_or((0..length, length));
                (range, size, Body::Here(text, 0))
            }
        };
        Ok(Box::new(OpenedObject { bucket: self.clone(), key: request.key.to_owned(), size, range, version, body }))
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
        let size = number(answer.header("content-length"));
        let size =
            size.ok_or_else(|| self.error(ErrorKind::Protocol, operation, Some(key), "an answer without a size"))?;
        let head = ObjectHead {
            size,
            version: answer.header("etag").map(Version::new),
            modified_ms: answer.header("last-modified").and_then(http_date_ms),
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

/// `Range`, whose ends are included.
pub(super) fn range_header(range: &ByteRange) -> String {
    match range {
        ByteRange::Bounded(range) => format!("bytes={}-{}", range.start, range.end.saturating_sub(1)),
        ByteRange::From(start) => format!("bytes={start}-"),
        ByteRange::Suffix(length) => format!("bytes=-{length}"),
    }
}

/// The range and the size of the whole in `bytes 0-9/100`.
pub(super) fn content_range(header: &str) -> Option<(Range<u64>, u64)> {
    let (range, size) = header.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, size): (u64, u64, u64) = (first.parse().ok()?, last.parse().ok()?, size.parse().ok()?);
    (first <= last && last < size).then_some((first..last + 1, size))
}

/// A body that is on its way, or was collected.
enum Body {
    Coming(Lease),
    Here(Vec<u8>, usize),
}

struct OpenedObject {
    bucket: Arc<Bucket>,
    key: String,
    size: u64,
    range: Range<u64>,
    version: Option<Version>,
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

    async fn read_into(&mut self, dest: &mut Dest) -> Result<(), Error> {
        match &mut self.body {
            Body::Coming(lease) => {
                let read = lease.connection().read_body(dest).await;
                read.map_err(|failure| self.bucket.failure(Operation::Get, Some(&self.key), failure))
            }
            Body::Here(text, taken) => {
                *taken += dest.fill(&text[*taken..]);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_written_with_their_ends_included() {
        assert_eq!(range_header(&ByteRange::Bounded(0..10)), "bytes=0-9");
        assert_eq!(range_header(&ByteRange::From(7)), "bytes=7-");
        assert_eq!(range_header(&ByteRange::Suffix(3)), "bytes=-3");
    }

    #[test]
    fn a_content_range_is_read_or_refused() {
        assert_eq!(content_range("bytes 0-9/100"), Some((0..10, 100)));
        for wrong in ["", "bytes 0-9/*", "bytes 9-0/100", "bytes 0-100/100", "items 0-9/100", "bytes */100"] {
            assert_eq!(content_range(wrong), None, "{wrong}");
        }
    }
}
