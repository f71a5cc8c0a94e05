//! An object whose response has begun: checks that its headers agree with each other and with what is known of the
//! object, and receives its body. Sends no request.

use std::io;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use torchobj_core::buffer::Dest;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::Opened;
use torchobj_core::types::{ObjectHead, Version};

use super::frames::Frames;
use super::range::parse_content_range;
use super::{Framing, Lease, Response, shown};

/// The head of an object and its body, which has not been received.
pub(crate) struct OpenedObject {
    url: String,
    size: u64,
    range: Range<u64>,
    version: Option<Version>,
    announced: bool,
    body: Body,
}

/// A body that has not been received.
enum Body {
    /// Of a length that the response announced: received straight into its destination.
    Length(Lease),
    Frames(Frames),
}

/// What the headers of a response announce of its body.
pub(crate) struct BodyHeaders<'a> {
    pub(crate) version: Option<Version>,
    /// `Content-Length`.
    pub(crate) length: Option<u64>,
    /// `Content-Range`.
    pub(crate) range: Option<&'a str>,
    /// `Content-Encoding`.
    pub(crate) encoding: Option<&'a str>,
}

impl OpenedObject {
    /// The object of a response to GET of `url`. `size` is the object's, where it is known; where it is not and the
    /// response announces none, `head` asks for it.
    pub(crate) async fn of_response<F>(
        response: Response,
        url: String,
        version: Option<Version>,
        size: Option<u64>,
        head: impl FnOnce() -> F + Send,
    ) -> Result<Self>
    where
        F: Future<Output = Result<ObjectHead>> + Send,
    {
        let headers = BodyHeaders {
            version,
            length: response.length(),
            range: (response.status == 206).then(|| response.header("content-range").unwrap_or_default()),
            encoding: response.header("content-encoding"),
        };
        let found = headers.extent(size.is_some()).map_err(|message| protocol(&url, &message))?;
        if response.lease.answer().framing() == Framing::Empty {
            return Err(protocol(&url, "a response without a body"));
        }
        let (version, is_long) = (headers.version, headers.length.is_some());
        let announced = found.is_some();
        let (range, size) = match (found, size) {
            (Some(found), _) => found,
            (None, Some(size)) => (0..size, size),
            (None, None) => {
                let head = head().await?;
                if head.version != version {
                    let message = format!("GET responds with version {version:?}, HEAD with {:?}", head.version);
                    return Err(protocol(&url, &message));
                }
                (0..head.size, head.size)
            }
        };
        let body = if is_long {
            Body::Length(response.lease)
        } else {
            let frames = Frames::of_response(response.lease, range.end - range.start, announced).await;
            match frames {
                Ok(frames) => Body::Frames(frames),
                Err(failure) => return Err(failure.into_error(Operation::Get, url)),
            }
        };
        Ok(Self { url, size, range, version, announced, body })
    }

    /// The object of a response that an SDK received, and whose body is `frames`.
    pub(crate) fn of_stream(
        url: String,
        headers: BodyHeaders<'_>,
        frames: BoxStream<'static, io::Result<Bytes>>,
    ) -> Result<Self> {
        let found = headers.extent(false).map_err(|message| protocol(&url, &message))?;
        let Some((range, size)) = found.filter(|_| headers.length.is_some()) else {
            return Err(protocol(&url, "a response without a Content-Length"));
        };
        let body = Body::Frames(Frames::of_stream(frames, range.end - range.start));
        Ok(Self { url, size, range, version: headers.version, announced: true, body })
    }
}

impl BodyHeaders<'_> {
    /// The range that the body holds, and the size of the whole object; `None` where they are not announced. `known` says
    /// whether the size is known from elsewhere.
    fn extent(&self, known: bool) -> Result<Option<(Range<u64>, u64)>, String> {
        self.check_encoding(known || self.length.is_some())?;
        let Some(header) = self.range else {
            return Ok(self.length.map(|length| (0..length, length)));
        };
        let (range, size) =
            parse_content_range(header).ok_or_else(|| format!("the Content-Range {header:?} is not valid"))?;
        match self.length {
            Some(length) if length != range.end - range.start => {
                Err(format!("the body has {length} bytes, its Content-Range {range:?}"))
            }
            _ => Ok(Some((range, size))),
        }
    }

    /// Refuses a body that a proxy between the store and here may have encoded. Objects that were stored with a
    /// Content-Encoding come as they are, with a strong ETag (RFC 9110, section 8.8.1) and with the length of the object,
    /// which is announced, or `known` and compared.
    fn check_encoding(&self, known: bool) -> Result<(), String> {
        let mut encodings = self.encoding.unwrap_or_default().split(',').map(str::trim);
        // S3 strips `aws-chunked`, which is an encoding of uploads; other stores keep it.
        let Some(encoding) = encodings.find(|name| !matches!(*name, "" | "identity" | "aws-chunked")) else {
            return Ok(());
        };
        let strong = self.version.as_ref().is_some_and(|version| !version.as_str().starts_with("W/"));
        if strong && known {
            return Ok(());
        }
        let missing = if strong { "Content-Length" } else { "strong ETag" };
        Err(format!("Content-Encoding {encoding} without a {missing}: a proxy may have compressed the object"))
    }
}

fn protocol(url: &str, message: &str) -> Error {
    Error::new(ErrorKind::Protocol, Operation::Get, url, shown(message, 1000))
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

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        let read = match &mut self.body {
            Body::Length(lease) => lease.connection().read_body(dest).await.map(|()| None),
            Body::Frames(frames) => frames.read_into(dest).await,
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

    fn headers<'a>(length: Option<u64>, range: Option<&'a str>, etag: &str, encoding: &'a str) -> BodyHeaders<'a> {
        BodyHeaders { version: Some(Version::new(etag)), length, range, encoding: Some(encoding) }
    }

    #[test]
    fn a_length_and_a_content_range_must_agree() {
        let extent = |length, range| headers(length, range, "\"e\"", "").extent(false);
        assert_eq!(extent(Some(10), None), Ok(Some((0..10, 10))));
        assert_eq!(extent(Some(10), Some("bytes 5-14/100")), Ok(Some((5..15, 100))));
        assert_eq!(extent(None, Some("bytes 5-14/100")), Ok(Some((5..15, 100))));
        assert_eq!(extent(None, None), Ok(None));
        extent(Some(9), Some("bytes 5-14/100")).expect_err("one byte less");
        extent(Some(10), Some("bytes 5-14/*")).expect_err("no size");
    }

    #[test]
    fn an_encoded_body_is_the_object_only_with_a_strong_etag_and_a_known_length() {
        for (etag, length, known, encoding, right) in [
            ("\"e\"", Some(4), false, "gzip", true),
            ("\"e\"", None, true, "gzip", true),
            ("\"e\"", None, false, "gzip", false),
            ("W/\"e\"", Some(4), true, "gzip", false),
            ("W/\"e\"", None, false, "identity, aws-chunked", true),
        ] {
            assert_eq!(headers(length, None, etag, encoding).extent(known).is_ok(), right, "{etag} {encoding}");
        }
    }
}
