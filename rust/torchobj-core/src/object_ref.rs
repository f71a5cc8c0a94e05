//! A reference to an object or a range, from which a sample is made. Does no I/O.

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::manifest::{ObjectInfo, read_number, read_version, write_number, write_version};
use crate::read::ReadRequest;
use crate::types::{ByteRange, Version};
use crate::url::{ObjectUrl, canonical};

/// Maximum length of the URL and the version of a reference, in bytes. Keys of S3 have up to 1024 bytes, paths of Linux up
/// to 4096. A request of a worker holds at least one reference.
pub const MAX_BYTES: usize = 16 << 10;

/// An object, or bytes `start..end` of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectRef {
    url: String,
    /// Index of the key in the URL.
    key_at: usize,
    start: u64,
    end: Option<u64>,
    size: Option<u64>,
    version: Option<Version>,
}

impl ObjectRef {
    /// Bytes `start..end` of the object at `url`; all bytes from `start` if `end` is `None`.
    ///
    /// # Errors
    /// `Config` if `url` names no object or is too long, or if `end < start`.
    pub fn new(url: String, start: u64, end: Option<u64>, size: Option<u64>, version: Option<Version>) -> Result<Self> {
        let refuse = |url: &str, message: String| Err(Error::new(ErrorKind::Config, Operation::Get, url, message));
        let length = url.len() + version.as_ref().map_or(0, |version| version.as_str().len());
        if length > MAX_BYTES {
            let begin: String = url.chars().take(60).collect();
            let message = format!("URL and version have {length} bytes: must be at most {MAX_BYTES}");
            return refuse(&format!("{begin}…"), message);
        }
        let key = ObjectUrl::parse(&url)?.key.len();
        if key == 0 {
            return refuse(&url, "names no object: expected scheme://bucket/key".to_owned());
        }
        if let Some(end) = end.filter(|end| *end < start) {
            return refuse(&url, format!("range {start}..{end}: must have start <= end"));
        }
        let url = canonical(url);
        // The caller named this version, so it is read even if it is not the current one.
        let version = version.map(|version| Version::selected(version.as_str()));
        Ok(Self { key_at: url.len() - key, url, start, end, size, version })
    }

    /// The URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The URL of the bucket: `s3://bucket`.
    pub fn base(&self) -> &str {
        &self.url[..self.key_at - 1]
    }

    /// The key, unchanged.
    pub fn key(&self) -> &str {
        &self.url[self.key_at..]
    }

    /// The object, as an entry of a manifest, without its size and version.
    pub fn object(&self) -> ObjectInfo<'_> {
        ObjectInfo { base: self.base(), key: self.key().to_owned(), size: None, version: None }
    }

    /// Start of the range.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// End of the range, excluded; `None` for the end of the object.
    pub fn end(&self) -> Option<u64> {
        self.end
    }

    /// Size of the whole object, if known.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// The expected version, if any.
    pub fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    /// Number of bytes of the range, if it can be computed from the end and the size.
    pub fn length(&self) -> Option<u64> {
        let end = match (self.end, self.size) {
            (Some(end), Some(size)) => Some(end.min(size)),
            (end, size) => end.or(size),
        };
        end.map(|end| end.saturating_sub(self.start))
    }

    /// The read of this object or range.
    pub fn read(&self) -> ReadRequest {
        let range = match (self.start, self.end) {
            (0, None) => None,
            (start, None) => Some(ByteRange::From(start)),
            (start, Some(end)) => Some(ByteRange::Bounded(start..end)),
        };
        ReadRequest { range, size: self.size, version: self.version.clone(), ..ReadRequest::whole(self.key()) }
    }

    /// Serializes the reference: `start  end+1 (0: none)  size+1 (0: unknown)  version  url`, encoded as in a manifest.
    /// Equal references have equal bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.url.len() + 32);
        write_number(&mut bytes, self.start);
        write_number(&mut bytes, self.end.map_or(0, |end| end.saturating_add(1)));
        write_number(&mut bytes, self.size.map_or(0, |size| size.saturating_add(1)));
        write_version(&mut bytes, self.version.as_ref());
        bytes.extend_from_slice(self.url.as_bytes());
        bytes
    }

    /// Deserializes what [`to_bytes`](Self::to_bytes) wrote; `None` if `bytes` are malformed.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (start, bytes) = read_number(bytes)?;
        let (end, bytes) = read_number(bytes)?;
        let (size, bytes) = read_number(bytes)?;
        let (version, url) = read_version(bytes)?;
        let url = std::str::from_utf8(url).ok()?.to_owned();
        Self::new(url, start, end.checked_sub(1), size.checked_sub(1), version).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn named(start: u64, end: Option<u64>, size: Option<u64>) -> ObjectRef {
        ObjectRef::new("s3://bucket/a key".to_owned(), start, end, size, None).unwrap()
    }

    proptest! {
        #[test]
        fn a_deserialized_reference_is_equal(
            key in ".{1,40}",
            start in 0_u64..1 << 40,
            length in proptest::option::of(0_u64..1 << 40),
            size in proptest::option::of(0_u64..1 << 50),
            version in proptest::option::of(".{0,40}"),
        ) {
            let end = length.map(|length| start + length);
            let url = format!("memory://b/{key}");
            let sent = ObjectRef::new(url, start, end, size, version.map(Version::new)).unwrap();
            prop_assert_eq!(sent.key(), &key);
            prop_assert_eq!(sent.base(), "memory://b");
            prop_assert_eq!(ObjectRef::from_bytes(&sent.to_bytes()), Some(sent));
        }

        #[test]
        fn arbitrary_bytes_are_a_reference_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Some(read) = ObjectRef::from_bytes(&bytes) {
                prop_assert_eq!(ObjectRef::from_bytes(&read.to_bytes()), Some(read));
            }
        }
    }

    #[test]
    fn the_length_is_computed_from_the_range_and_the_size() {
        assert_eq!(named(0, None, None).length(), None);
        assert_eq!(named(0, None, Some(7)).length(), Some(7));
        assert_eq!(named(3, None, Some(7)).length(), Some(4));
        assert_eq!(named(3, Some(5), None).length(), Some(2));
        assert_eq!(named(3, Some(50), Some(7)).length(), Some(4));
        assert_eq!(named(9, Some(50), Some(7)).length(), Some(0));
    }

    #[test]
    fn urls_without_an_object_and_invalid_ranges_are_refused() {
        let long = format!("s3://bucket/{}", "k".repeat(MAX_BYTES));
        for url in ["key", "s3://bucket", "s3://bucket/", "s3:///key", "file://host/x", &long] {
            let error = ObjectRef::new(url.to_owned(), 0, None, None, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
        }
        let error = ObjectRef::new("s3://b/k".to_owned(), 5, Some(4), None, None).unwrap_err();
        assert_eq!(error.to_string(), "get s3://b/k: range 5..4: must have start <= end");
    }
}
