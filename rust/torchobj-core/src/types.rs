//! What a store is asked and what it answers. Plain data; no I/O.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::crc32::Crc32;

/// Which state of an object: an ETag, a generation, an inode with its mtime. Opaque above the store that made it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Version(Arc<str>);

impl Version {
    /// Wraps what the store calls the version, letter for letter.
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }

    /// The store's own text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which bytes of an object. Ends are excluded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ByteRange {
    /// `start..end`; an end behind the object's is cut.
    Bounded(Range<u64>),
    /// Everything from `start`.
    From(u64),
    /// The last `n` bytes.
    Suffix(u64),
}

impl ByteRange {
    /// The bytes of an object of `size` that `range` covers; `None` when it begins behind the end.
    pub fn resolve(range: Option<&Self>, size: u64) -> Option<Range<u64>> {
        match range {
            None => Some(0..size),
            Some(Self::Suffix(length)) => (size > 0 && *length > 0).then(|| size.saturating_sub(*length)..size),
            Some(Self::From(start)) => (*start < size).then_some(*start..size),
            Some(Self::Bounded(range)) => (range.start < size).then(|| range.start..range.end.min(size)),
        }
    }
}

/// A read.
#[derive(Clone, Debug)]
pub struct GetRequest<'a> {
    /// The object.
    pub key: &'a str,
    /// `None`: the whole object.
    pub range: Option<ByteRange>,
    /// Size of the whole object in bytes, where it is known: what a response must have that does not announce it.
    pub size: Option<u64>,
    /// Read this version or fail as `Changed`.
    pub version: Option<&'a Version>,
}

/// What an object carries besides its bytes. Metadata names are lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// `Content-Type`.
    pub content_type: Option<String>,
    /// `Content-Encoding`.
    pub content_encoding: Option<String>,
    /// `Content-Disposition`.
    pub content_disposition: Option<String>,
    /// `Content-Language`.
    pub content_language: Option<String>,
    /// `Cache-Control`.
    pub cache_control: Option<String>,
    /// The store's word, as `STANDARD_IA`.
    pub storage_class: Option<String>,
    /// The user's own names and values, printable ASCII, sorted by name.
    pub metadata: Vec<(String, String)>,
}

/// The answer to a question for metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectHead {
    /// Size of the whole object in bytes.
    pub size: u64,
    /// Its version, where the store has versions.
    pub version: Option<Version>,
    /// When it was last written, in milliseconds since 1970.
    pub modified_ms: Option<i64>,
    /// What it carries.
    pub attributes: Attributes,
}

/// When a write may happen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// Whatever is there is replaced.
    #[default]
    Always,
    /// Only if nothing is there.
    Absent,
    /// Only if this version is there.
    Matches(Version),
}

/// How an object is to be written.
#[derive(Clone, Debug, Default)]
pub struct PutOptions {
    /// What it shall carry.
    pub attributes: Attributes,
    /// When it may be written.
    pub condition: Condition,
    /// The checksum that is known of every payload, so that the store need not compute another: one of
    /// [`Capabilities::checksums`].
    pub checksum: Option<ChecksumAlgorithm>,
}

/// Bytes to be sent: pieces of memory that are kept alive until the last attempt has ended, and never copied.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    pieces: Vec<Bytes>,
    crc32: Option<u32>,
}

impl Payload {
    /// The pieces, one after the other.
    pub fn new(pieces: Vec<Bytes>) -> Self {
        Self { pieces, crc32: None }
    }

    /// Pieces, whose CRC-32 is known.
    pub fn summed(pieces: Vec<Bytes>, crc32: u32) -> Self {
        Self { pieces, crc32: Some(crc32) }
    }

    /// Its CRC-32, where that is known.
    pub fn crc32(&self) -> Option<u32> {
        self.crc32
    }

    /// Whether the memory that it is of was changed since it was summed.
    pub(crate) fn has_changed(&self) -> bool {
        let now = || self.pieces.iter().fold(Crc32::default(), |sum, piece| sum.then(Crc32::of(piece))).value();
        self.crc32.is_some_and(|crc32| crc32 != now())
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.pieces.iter().all(Bytes::is_empty)
    }

    /// The pieces in order.
    pub fn pieces(&self) -> &[Bytes] {
        &self.pieces
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self::new(vec![bytes])
    }
}

/// One page of a listing is asked for.
#[derive(Clone, Debug, Default)]
pub struct ListRequest<'a> {
    /// Keys begin with this.
    pub prefix: &'a str,
    /// Keys with this behind the prefix are folded into common prefixes.
    pub delimiter: Option<&'a str>,
    /// Keys sort behind this.
    pub start_after: Option<&'a str>,
    /// What the page before said of the next one.
    pub continuation: Option<&'a str>,
    /// At most so many entries; the store may give fewer.
    pub max_entries: Option<u32>,
}

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The whole key.
    pub key: String,
    /// Size in bytes, where the listing has one.
    pub size: Option<u64>,
    /// Its version, where the listing tells.
    pub version: Option<Version>,
    /// When it was last written, in milliseconds since 1970.
    pub modified_ms: Option<i64>,
    /// The store's word for its storage class, where the listing tells.
    pub storage_class: Option<String>,
}

/// A page of a listing.
#[derive(Clone, Debug, Default)]
pub struct ListPage {
    /// Objects, sorted by the bytes of their keys where the store lists in order.
    pub entries: Vec<ListEntry>,
    /// Common prefixes, sorted.
    pub prefixes: Vec<String>,
    /// How to ask for the next page; `None` on the last.
    pub continuation: Option<String>,
}

/// An upload in parts that has begun and is not visible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// The object it will become.
    pub key: String,
    /// The store's name for it.
    pub id: String,
    /// What its object will be known by, when the answer to the commit is lost; empty for an upload of others.
    pub nonce: String,
    /// When it began, in milliseconds since 1970, where a listing of uploads tells.
    pub begun_ms: Option<i64>,
    /// The checksum that is known of each part.
    pub checksum: Option<ChecksumAlgorithm>,
}

/// What the store gave for a part, to be shown at the commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartReceipt {
    /// Counted from 1.
    pub number: u32,
    /// Length in bytes.
    pub size: u64,
    /// The part's version.
    pub version: Version,
    /// CRC of the part's bytes, where the store's setting asks for one.
    pub checksum: Option<u64>,
}

/// An algorithm for the checksum of an object or a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChecksumAlgorithm {
    /// CRC-32 of IEEE 802.3, as zip files have it.
    Crc32,
    /// CRC-32 of Castagnoli.
    Crc32C,
    /// CRC-64/NVME.
    Crc64Nvme,
    /// MD5.
    Md5,
}

/// Which keys a store can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRules {
    /// Any UTF-8 of 1 to 1024 bytes.
    Raw,
    /// Paths: no empty, `.` or `..` component, none longer than 255 bytes, no `/` at either end, no NUL.
    Path,
}

impl KeyRules {
    /// Why `key` cannot be held, or `None`.
    pub fn refusal(self, key: &str) -> Option<&'static str> {
        if key.is_empty() {
            return Some("the key is empty");
        }
        if key.len() > 1024 {
            return Some("the key is longer than 1024 bytes");
        }
        if self == Self::Raw {
            return None;
        }
        if key.contains('\0') {
            return Some("this store keeps keys as paths: NUL cannot be in one");
        }
        for component in key.split('/') {
            match component {
                "" => return Some("this store keeps keys as paths: `//` and a `/` at an end cannot be in one"),
                "." | ".." => return Some("this store keeps keys as paths: `.` and `..` cannot be components"),
                long if long.len() > 255 => return Some("this store keeps keys as paths: a component is too long"),
                _ => {}
            }
        }
        None
    }
}

/// What a store can do. What it cannot, it refuses by `Unsupported` or `InvalidKey`; nothing above asks which it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Which keys it can hold.
    pub keys: KeyRules,
    /// Whether `Condition::Absent` is kept, for puts and for commits.
    pub put_if_absent: bool,
    /// Whether `Condition::Matches` is kept.
    pub put_if_matches: bool,
    /// Whether it keeps content headers, metadata and storage class.
    pub attributes: bool,
    /// Smallest size of a part that is not the last.
    pub min_part_bytes: u64,
    /// Largest number of parts.
    pub max_parts: u32,
    /// Largest object that one put or one part may carry.
    pub max_put_bytes: u64,
    /// Largest number of keys of one delete.
    pub max_delete_keys: usize,
    /// The checksums that the store compares with what it received.
    pub checksums: &'static [ChecksumAlgorithm],
    /// Whether listings are sorted by the bytes of their keys.
    pub ordered_listing: bool,
}
