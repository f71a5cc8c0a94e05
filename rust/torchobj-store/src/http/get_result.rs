//! Results of GET requests: checks that the headers of a response agree with each other and with the known size of the
//! object, and receives its body. Sends no requests.

use std::io;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use torchobj_core::buffer::Dest;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::{GetResult, ObjectChecksum};
use torchobj_core::types::{Attributes, ObjectHead, Version};

use super::frames::Frames;
use super::range::parse_content_range;
use super::{Framing, Lease, Response, sanitize};

/// A response to GET whose headers were checked; its body is not received yet.
pub(crate) struct HttpGetResult {
    url: String,
    size: u64,
    range: Range<u64>,
    version: Option<Version>,
    has_length: bool,
    body: PendingBody,
}

/// Parses the attributes and the checksum of an object from the headers of a response.
#[derive(Clone, Copy)]
pub(crate) struct DetailsParser {
    pub(crate) attributes: fn(&Lease) -> Attributes,
    /// The checksum of the whole object; `None` if the headers have none, or only that of a part.
    pub(crate) checksum: fn(&Lease) -> Option<ObjectChecksum>,
}

/// The attributes and the checksum of an object.
pub(crate) type Details = (Attributes, Option<ObjectChecksum>);

/// A body that is not received yet.
enum PendingBody {
    /// A body whose length is known: it is received directly into its destination. Its headers are parsed only if the
    /// caller needs them, because reads of small objects do not.
    Length(Lease, DetailsParser),
    Frames(Frames, Box<Details>),
}

/// Headers of a response that describe its body.
pub(crate) struct BodyHeaders<'a> {
    pub(crate) version: Option<Version>,
    /// `ETag`.
    pub(crate) etag: Option<&'a str>,
    /// `Content-Length`.
    pub(crate) length: Option<u64>,
    /// `Content-Range`.
    pub(crate) range: Option<&'a str>,
    /// `Content-Encoding`.
    pub(crate) encoding: Option<&'a str>,
}

impl HttpGetResult {
    /// The result of a GET of `url`. `size` is the size of the object, if it is known. If it is not, and the response does not
    /// have it either, `head` requests it.
    pub(crate) async fn of_response<F>(
        response: Response,
        url: String,
        version: Option<Version>,
        size: Option<u64>,
        details: DetailsParser,
        head: impl FnOnce() -> F + Send,
    ) -> Result<Self>
    where
        F: Future<Output = Result<ObjectHead>> + Send,
    {
        let headers = BodyHeaders {
            version,
            etag: response.header("etag"),
            length: response.length(),
            range: content_range(&response),
            encoding: response.header("content-encoding"),
        };
        let (range, found_size) = headers.extent(size.is_some()).map_err(|message| {
            let error = protocol(&url, &message);
            // A request without a range shows that the object is empty.
            if headers.is_of_empty() { error.with_kind(ErrorKind::Range) } else { error }
        })?;
        if response.lease.framing() == Framing::Empty {
            return Err(protocol(&url, "the response has no body"));
        }
        let (version, is_long) = (headers.version, headers.length.is_some());
        let has_length = range.is_some();
        let size = match found_size.or(size) {
            Some(size) => size,
            None => {
                let head = head().await?;
                if head.version != version {
                    let message = format!("GET responds with version {version:?}, HEAD with {:?}", head.version);
                    return Err(protocol(&url, &message));
                }
                head.size
            }
        };
        let range = range.unwrap_or(0..size);
        if range.is_empty() && size > 0 {
            let message = format!("the response has no bytes: the object has {size} bytes");
            return Err(protocol(&url, &message).with_kind(ErrorKind::Range));
        }
        if range.end > size {
            return Err(protocol(&url, &format!("the response has the bytes {range:?} of an object of {size} bytes")));
        }
        let body = if is_long {
            PendingBody::Length(response.lease, details)
        } else {
            let details = ((details.attributes)(&response.lease), (details.checksum)(&response.lease));
            let frames = Frames::of_response(response.lease, range.end - range.start, has_length);
            PendingBody::Frames(frames, Box::new(details))
        };
        Ok(Self { url, size, range, version, has_length, body })
    }

    /// The result of a GET by an SDK; `frames` is its body.
    pub(crate) fn of_stream(
        url: String,
        headers: BodyHeaders<'_>,
        details: Details,
        frames: BoxStream<'static, io::Result<Bytes>>,
    ) -> Result<Self> {
        let extent = headers.extent(false).map_err(|message| protocol(&url, &message))?;
        let (Some(range), Some(size), Some(_)) = (extent.0, extent.1, headers.length) else {
            return Err(protocol(&url, "the response has no Content-Length, or no size of the object").permanent());
        };
        let body = PendingBody::Frames(Frames::of_stream(frames, range.end - range.start), Box::new(details));
        Ok(Self { url, size, range, version: headers.version, has_length: true, body })
    }
}

impl BodyHeaders<'_> {
    /// Returns the range of the body and the size of the whole object, as far as the response has them. `size_known`: the caller
    /// knows the size.
    fn extent(&self, size_known: bool) -> Result<(Option<Range<u64>>, Option<u64>), String> {
        self.check_encoding(size_known || self.length.is_some())?;
        let Some(header) = self.range else {
            return Ok((self.length.map(|length| 0..length), self.length));
        };
        let (range, size) =
            parse_content_range(header).ok_or_else(|| format!("the Content-Range {header:?} is not valid"))?;
        match self.length {
            Some(length) if length != range.end - range.start => {
                Err(format!("the body has {length} bytes, its Content-Range {range:?}"))
            }
            _ => Ok((Some(range), size)),
        }
    }

    /// Whether the response is to a range of an empty object. That of s3rver declares a byte, which is never sent.
    fn is_of_empty(&self) -> bool {
        self.range.and_then(parse_content_range).is_some_and(|(_, size)| size == Some(0))
    }

    /// Refuses a body that a proxy may have compressed. A response with an object that was stored with a Content-Encoding has
    /// a strong ETag (RFC 9110, section 8.8.1) and the length of the object. `length_known`: the response has the length, or is
    /// compared with the known size.
    fn check_encoding(&self, length_known: bool) -> Result<(), String> {
        let mut encodings = self.encoding.unwrap_or_default().split(',').map(str::trim);
        // S3 removes `aws-chunked`, which is an encoding of uploads; other stores do not.
        let Some(encoding) = encodings.find(|name| !matches!(*name, "" | "identity" | "aws-chunked")) else {
            return Ok(());
        };
        let strong = self.etag.is_some_and(|etag| !etag.starts_with("W/"));
        if strong && length_known {
            return Ok(());
        }
        let missing = if strong { "Content-Length" } else { "strong ETag" };
        Err(format!("Content-Encoding {encoding} without a {missing}: a proxy may have compressed the object"))
    }
}

/// The `Content-Range` of a response. One with status 200 may be a part of the object all the same.
fn content_range(response: &Response) -> Option<&str> {
    let header = response.header("content-range");
    if response.status == 206 {
        return Some(header.unwrap_or_default());
    }
    let length = |(range, _): (Range<u64>, _)| range.end - range.start;
    header.filter(|header| response.length().is_some() && parse_content_range(header).map(length) == response.length())
}

fn protocol(url: &str, message: &str) -> Error {
    Error::new(ErrorKind::Protocol, Operation::Get, url, sanitize(message, 1000))
}

#[async_trait]
impl GetResult for HttpGetResult {
    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    fn has_length(&self) -> bool {
        self.has_length
    }

    fn attributes(&self) -> Attributes {
        match &self.body {
            PendingBody::Length(lease, headers) => (headers.attributes)(lease),
            PendingBody::Frames(_, details) => details.0.clone(),
        }
    }

    fn checksum(&self) -> Option<ObjectChecksum> {
        match &self.body {
            PendingBody::Length(lease, headers) => (headers.checksum)(lease),
            PendingBody::Frames(_, details) => details.1,
        }
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        let read = match &mut self.body {
            PendingBody::Length(lease, _) => lease.read_body(dest).await.map(|()| None),
            PendingBody::Frames(frames, _) => frames.read_into(dest).await,
        };
        match read {
            Ok(None) => Ok(()),
            Ok(Some(message)) => Err(protocol(&self.url, &message)),
            Err(failure) => Err(failure.into_error(Operation::Get, self.url.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers<'a>(length: Option<u64>, range: Option<&'a str>, etag: &'a str, encoding: &'a str) -> BodyHeaders<'a> {
        // The version is a generation, not an ETag.
        let version = Some(Version::new("1700000000000000"));
        BodyHeaders { version, etag: Some(etag), length, range, encoding: Some(encoding) }
    }

    #[test]
    fn a_length_must_match_the_content_range() {
        let extent = |length, range| headers(length, range, "\"e\"", "").extent(false);
        assert_eq!(extent(Some(10), None), Ok((Some(0..10), Some(10))));
        assert_eq!(extent(Some(10), Some("bytes 5-14/100")), Ok((Some(5..15), Some(100))));
        assert_eq!(extent(None, Some("bytes 5-14/100")), Ok((Some(5..15), Some(100))));
        assert_eq!(extent(Some(10), Some("bytes 5-14/*")), Ok((Some(5..15), None)));
        assert_eq!(extent(Some(0), Some("bytes 0--1/0")), Ok((Some(0..0), Some(0))));
        assert_eq!(extent(None, None), Ok((None, None)));
        extent(Some(9), Some("bytes 5-14/100")).expect_err("one byte less");
        extent(Some(1), Some("bytes 0--1/0")).expect_err("an empty object with a byte");
    }

    #[test]
    fn an_encoded_body_is_accepted_only_with_a_strong_etag_and_a_known_length() {
        for (etag, length, size_known, encoding, accepted) in [
            ("\"e\"", Some(4), false, "gzip", true),
            ("\"e\"", None, true, "gzip", true),
            ("\"e\"", None, false, "gzip", false),
            ("W/\"e\"", Some(4), true, "gzip", false),
            ("W/\"e\"", None, false, "identity, aws-chunked", true),
        ] {
            let extent = headers(length, None, etag, encoding).extent(size_known);
            assert_eq!(extent.is_ok(), accepted, "{etag} {encoding}");
        }
    }
}
