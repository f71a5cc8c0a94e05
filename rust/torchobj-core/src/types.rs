//! Arguments and results of the calls of a store. Plain data, no I/O.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::crc32::Crc32;

/// The version of an object: an ETag, a generation, or an inode with its mtime. Opaque outside of the store that made it.
#[derive(Clone)]
pub struct Version {
    text: Arc<str>,
    selected: bool,
    found: bool,
}

impl Version {
    /// Wraps the store's text of a version, unchanged. A read fails if the object has another version.
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        Self { text: text.into(), selected: false, found: false }
    }

    /// A version that the caller selected: a store that keeps replaced versions reads it even if it is not the current one.
    pub fn selected(text: impl Into<Arc<str>>) -> Self {
        Self { text: text.into(), selected: true, found: false }
    }

    /// The same version, for the other requests of a read that had named none, and of a download: they must have it, and the disk
    /// cache neither answers nor admits them.
    #[must_use]
    pub fn found(self) -> Self {
        Self { found: true, ..self }
    }

    /// Whether this is a version for the requests of one read or download only: see [`found`](Self::found).
    pub fn is_found(&self) -> bool {
        self.found
    }

    /// Whether the caller selected this version.
    pub fn is_selected(&self) -> bool {
        self.selected
    }

    /// The store's text of the version.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// Versions are equal if their texts are.
impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Version {}

impl Hash for Version {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A range of the bytes of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ByteRange {
    /// `start..end`, end excluded. Truncated at the end of the object.
    Bounded(Range<u64>),
    /// All bytes from `start`.
    From(u64),
    /// The last `n` bytes.
    Suffix(u64),
}

impl ByteRange {
    /// Returns the bytes of an object of `size` bytes that `range` covers; `None` if it begins at or after the end.
    pub fn resolve(range: Option<&Self>, size: u64) -> Option<Range<u64>> {
        match range {
            None => Some(0..size),
            Some(Self::Suffix(length)) => (size > 0 && *length > 0).then(|| size.saturating_sub(*length)..size),
            Some(Self::From(start)) => (*start < size).then_some(*start..size),
            Some(Self::Bounded(range)) => (range.start < size).then(|| range.start..range.end.min(size)),
        }
    }
}

/// A GET of an object or a range.
#[derive(Clone, Debug)]
pub struct GetRequest<'a> {
    /// The key of the object.
    pub key: &'a str,
    /// The range to read; `None` for the whole object.
    pub range: Option<ByteRange>,
    /// Size of the whole object in bytes, if known: the expected size if the response does not have it.
    pub size: Option<u64>,
    /// The expected version: the request fails with `Changed` if the object has another one.
    pub version: Option<&'a Version>,
    /// Whether the response should have the checksum of the object. Not all stores send it without this.
    pub checksum: bool,
    /// The ranges that the caller keeps, ascending; it discards the bytes between them. Empty if it keeps all of `range`.
    pub parts: &'a [Range<u64>],
}

impl<'a> GetRequest<'a> {
    /// A request for a whole object, of any version.
    pub fn whole(key: &'a str) -> Self {
        Self { key, range: None, size: None, version: None, checksum: false, parts: &[] }
    }
}

/// Headers and metadata of an object. Metadata names are lower case.
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
    /// The storage class, such as `STANDARD_IA`.
    pub storage_class: Option<String>,
    /// User-defined names and values, printable ASCII, sorted by name.
    pub metadata: Vec<(String, String)>,
}

/// Size, version and attributes of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectHead {
    /// Size of the whole object in bytes.
    pub size: u64,
    /// Its version, if the store has versions.
    pub version: Option<Version>,
    /// Time of the last write, in milliseconds since 1970.
    pub modified_ms: Option<i64>,
    /// Its attributes.
    pub attributes: Attributes,
    /// The checksum of its bytes; `None` unless it was requested and the store has one.
    pub checksum: Option<ObjectChecksum>,
}

/// Condition of a write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// Replaces an existing object.
    #[default]
    Always,
    /// Fails if the object exists.
    Absent,
    /// Fails unless the object has this version.
    Matches(Version),
}

/// Options of a write.
#[derive(Clone, Debug, Default)]
pub struct PutOptions {
    /// Attributes of the object.
    pub attributes: Attributes,
    /// Condition of the write.
    pub condition: Condition,
    /// The checksum that every payload has, of [`Capabilities::checksums`]: the store does not compute another one.
    pub checksum: Option<ChecksumAlgorithm>,
    /// The key is that of a file of a tree, whose target has this number of bytes: a store of files follows no symbolic link
    /// below the target.
    pub tree_bytes: Option<usize>,
}

/// Bytes to send: pieces of memory that are kept alive until the last attempt ends, and never copied.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    pieces: Vec<Bytes>,
    crc32: Option<u32>,
}

impl Payload {
    /// The concatenation of `pieces`.
    pub fn new(pieces: Vec<Bytes>) -> Self {
        Self { pieces, crc32: None }
    }

    /// The concatenation of `pieces`, with its CRC-32.
    pub fn with_crc32(pieces: Vec<Bytes>, crc32: u32) -> Self {
        Self { pieces, crc32: Some(crc32) }
    }

    /// The CRC-32, if known.
    pub fn crc32(&self) -> Option<u32> {
        self.crc32
    }

    /// Returns whether the memory was changed since its CRC-32 was computed.
    pub(crate) fn has_changed(&self) -> bool {
        let now = || self.pieces.iter().fold(Crc32::default(), |sum, piece| sum.then(Crc32::of(piece))).value();
        self.crc32.is_some_and(|crc32| crc32 != now())
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }

    /// Returns whether the length is 0.
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

/// A request for one page of a listing.
#[derive(Clone, Debug, Default)]
pub struct ListRequest<'a> {
    /// Only keys that begin with this prefix.
    pub prefix: &'a str,
    /// Keys that contain this delimiter after the prefix are grouped into common prefixes.
    pub delimiter: Option<&'a str>,
    /// Only keys that sort after this one.
    pub start_after: Option<&'a str>,
    /// Keys after this one are not needed. The store may list them.
    pub end: Option<&'a str>,
    /// The continuation token of the previous page.
    pub continuation: Option<&'a str>,
    /// Maximum number of entries; the store may return fewer.
    pub max_entries: Option<u32>,
}

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The full key.
    pub key: String,
    /// Size in bytes, if the listing has it.
    pub size: Option<u64>,
    /// Version, if the listing has it.
    pub version: Option<Version>,
    /// Time of the last write, in milliseconds since 1970.
    pub modified_ms: Option<i64>,
    /// Storage class as named by the store, if the listing has it.
    pub storage_class: Option<Arc<str>>,
}

/// A page of a listing.
#[derive(Clone, Debug, Default)]
pub struct ListPage {
    /// Objects, sorted by the bytes of their keys if the store lists in order.
    pub entries: Vec<ListEntry>,
    /// Common prefixes, sorted.
    pub prefixes: Vec<String>,
    /// The continuation token for the next page; `None` on the last page.
    pub continuation: Option<String>,
}

/// An upload in parts that has begun. Its object is not visible before the commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Key of the object.
    pub key: String,
    /// The store's id of the upload.
    pub id: String,
    /// Identifies the object of this upload if the response to its commit is lost; empty for an upload of another client.
    pub nonce: String,
    /// When it began, in milliseconds since 1970, if the listing of uploads has it.
    pub begun_ms: Option<i64>,
    /// The checksum that each part has.
    pub checksum: Option<ChecksumAlgorithm>,
    /// Whether the store accepts a part only after the preceding one.
    pub sequential: bool,
}

impl Upload {
    /// An upload of another client, which can be aborted.
    pub fn of_other_client(key: String, id: String, begun_ms: Option<i64>) -> Self {
        Self { key, id, nonce: String::new(), begun_ms, checksum: None, sequential: false }
    }
}

/// The response of the store to a part, required for the commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartReceipt {
    /// Number of the part, from 1.
    pub number: u32,
    /// Length in bytes.
    pub size: u64,
    /// Version of the part.
    pub version: Version,
    /// CRC of the part's bytes, if the store is configured to use one.
    pub checksum: Option<u64>,
}

/// An algorithm for the checksum of an object or a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChecksumAlgorithm {
    /// CRC-32 of IEEE 802.3, as in zip files.
    Crc32,
    /// CRC-32 of Castagnoli.
    Crc32C,
    /// CRC-64/NVME.
    Crc64Nvme,
    /// MD5.
    Md5,
}

/// A checksum of all bytes of an object, as stored by the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectChecksum {
    /// CRC-32 of IEEE 802.3, as in zip files.
    Crc32(u32),
    /// CRC-32 of Castagnoli.
    Crc32C(u32),
    /// CRC-64/NVME.
    Crc64Nvme(u64),
    /// MD5.
    Md5([u8; 16]),
    /// SHA-256.
    Sha256([u8; 32]),
}

impl fmt::Display for ObjectChecksum {
    /// Writes the algorithm and the hexadecimal digits: `crc32c:e3069283`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits =
            |f: &mut fmt::Formatter<'_>, bytes: &[u8]| bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"));
        match self {
            Self::Crc32(value) => write!(f, "crc32:{value:08x}"),
            Self::Crc32C(value) => write!(f, "crc32c:{value:08x}"),
            Self::Crc64Nvme(value) => write!(f, "crc64nvme:{value:016x}"),
            Self::Md5(bytes) => f.write_str("md5:").and_then(|()| digits(f, bytes)),
            Self::Sha256(bytes) => f.write_str("sha256:").and_then(|()| digits(f, bytes)),
        }
    }
}

/// The keys that a store supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRules {
    /// Any UTF-8 of 1 to 1024 bytes.
    Raw,
    /// The rules of Google Cloud Storage: UTF-8 of 1 to 1024 bytes without CR and LF, except `.`, `..` and names that begin with
    /// `.well-known/acme-challenge/` or with this prefix, which is reserved for parts of uploads.
    Gcs {
        /// Prefix of the names of parts.
        reserved: &'static str,
    },
    /// Paths: no empty, `.` or `..` component, none longer than 255 bytes, no `/` at either end, no NUL.
    Path,
}

impl KeyRules {
    /// Returns why `key` is not supported; `None` if it is.
    pub fn refusal(self, key: &str) -> Option<&'static str> {
        if key.is_empty() {
            return Some("the key is empty");
        }
        if key.len() > 1024 {
            return Some("the key is longer than 1024 bytes");
        }
        match self {
            Self::Raw => return None,
            // Google Cloud Storage, "About Cloud Storage objects", "Object names".
            Self::Gcs { .. } if key.contains(['\r', '\n']) => {
                return Some("the key contains a carriage return or line feed");
            }
            Self::Gcs { .. } if matches!(key, "." | "..") => return Some("the keys `.` and `..` are not allowed"),
            Self::Gcs { .. } if key.starts_with(".well-known/acme-challenge/") => {
                return Some("keys must not begin with `.well-known/acme-challenge/`");
            }
            Self::Gcs { reserved } if key.starts_with(reserved) => {
                return Some("keys that begin with `.torchobj-parts/` are reserved for parts of uploads");
            }
            Self::Gcs { .. } => return None,
            Self::Path => {}
        }
        if key.contains('\0') {
            return Some("keys of this store are paths: NUL is not allowed");
        }
        for component in key.split('/') {
            match component {
                "" => return Some("keys of this store are paths: `//` and a leading or trailing `/` are not allowed"),
                "." | ".." => return Some("keys of this store are paths: components `.` and `..` are not allowed"),
                long if long.len() > 255 => {
                    return Some("keys of this store are paths: a component is longer than 255 bytes");
                }
                _ => {}
            }
        }
        None
    }
}

/// Features and limits of a store, to which core adapts. Calls beyond them fail with `Unsupported` or `InvalidKey`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The keys that it supports.
    pub keys: KeyRules,
    /// Whether it supports `Condition::Absent`, for puts and for commits.
    pub put_if_absent: bool,
    /// Whether it supports `Condition::Matches`.
    pub put_if_matches: bool,
    /// Whether it stores content headers, metadata and storage class.
    pub attributes: bool,
    /// Whether an upload is a session of the store, so that it is listed before its first part is stored.
    pub upload_sessions: bool,
    /// Minimum size of a part that is not the last.
    pub min_part_bytes: u64,
    /// Maximum number of parts of an upload.
    pub max_parts: u32,
    /// Maximum size of one put or one part.
    pub max_put_bytes: u64,
    /// Maximum size of an object.
    pub max_object_bytes: u64,
    /// Maximum number of keys of one delete.
    pub max_delete_keys: usize,
    /// The checksums that the store compares with the received bytes.
    pub checksums: &'static [ChecksumAlgorithm],
    /// Whether listings are sorted by the bytes of their keys.
    pub ordered_listing: bool,
    /// Whether ranges of keys can be listed concurrently, each from its own `start_after`.
    pub parallel_listing: bool,
}
