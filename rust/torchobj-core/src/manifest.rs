//! A manifest: an immutable listing of keys, sizes and versions in packed form. Does no I/O.
//!
//! It consists of one blob of consecutive records, and the start of each:
//!
//! ```text
//! record  := length  size+1 (0: unknown)  bucket  version  key
//! version := 0 | 1 md5 | 2 md5 parts | 3 length text
//! ```
//!
//! Lengths and numbers are LEB128. `md5` is 16 bytes: an ETag in the form of S3, `"<32 hex>"` or `"<32 hex>-<parts>"`,
//! takes 17 to 20 bytes instead of a string. An object takes its key and about 30 bytes, 8 of them for the start of its
//! record. The blob is serialized, the starts are not.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::types::Version;

/// One object of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object<'a> {
    /// Scheme and bucket: `s3://bucket`, `file://`.
    pub base: &'a str,
    /// The key.
    pub key: &'a str,
    /// Size in bytes, if known.
    pub size: Option<u64>,
    /// The version, if known.
    pub version: Option<Version>,
}

impl Object<'_> {
    /// The URL, in the form that [`crate::url::ObjectUrl`] parses.
    pub fn url(&self) -> String {
        format!("{}/{}", self.base, self.key)
    }
}

/// A listing of objects, in the order in which they were added.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    bases: Vec<String>,
    records: Vec<u8>,
    starts: Vec<u64>,
}

impl Manifest {
    /// Appends an object.
    pub fn push(&mut self, base: &str, key: &str, size: Option<u64>, version: Option<&Version>) {
        let base = match self.bases.iter().position(|known| known == base) {
            Some(index) => index,
            None => {
                self.bases.push(base.to_owned());
                self.bases.len() - 1
            }
        };
        let mut record = Vec::with_capacity(key.len() + 32);
        write_number(&mut record, size.map_or(0, |size| size + 1));
        write_number(&mut record, base as u64);
        write_version(&mut record, version);
        record.extend_from_slice(key.as_bytes());
        self.starts.push(self.records.len() as u64);
        write_number(&mut self.records, record.len() as u64);
        self.records.extend_from_slice(&record);
    }

    /// Appends the objects of another manifest.
    pub fn append(&mut self, other: &Self) {
        for object in (0..other.len()).filter_map(|index| other.get(index)) {
            self.push(object.base, object.key, object.size, object.version.as_ref());
        }
    }

    /// Frees unused capacity.
    pub fn shrink(&mut self) {
        self.records.shrink_to_fit();
        self.starts.shrink_to_fit();
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Returns whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Bytes of memory, including the keys.
    pub fn memory_bytes(&self) -> usize {
        self.records.capacity() + self.starts.capacity() * size_of::<u64>()
    }

    /// The bases of the objects, in the order of their first occurrence.
    pub fn bases(&self) -> &[String] {
        &self.bases
    }

    /// Returns object `index`; `None` if there is no such object.
    pub fn get(&self, index: usize) -> Option<Object<'_>> {
        let start = usize::try_from(*self.starts.get(index)?).expect("it is in memory");
        let (object, _) = read_record(&self.bases, self.records.get(start..)?)?;
        Some(object)
    }

    /// Identifies the content of this manifest: hex of the first 16 bytes of its SHA-256.
    pub fn digest(&self) -> String {
        let hash = Sha256::digest(self.to_bytes());
        hash[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Serializes the manifest: one line per base, an empty line, and the records.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.records.len() + 64);
        for base in &self.bases {
            bytes.extend_from_slice(base.as_bytes());
            bytes.push(b'\n');
        }
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.records);
        bytes
    }

    /// Deserializes what [`to_bytes`](Self::to_bytes) wrote; `None` if `bytes` are malformed.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut manifest = Self::default();
        let mut rest = bytes;
        loop {
            let end = rest.iter().position(|byte| *byte == b'\n')?;
            let line = std::str::from_utf8(&rest[..end]).ok()?;
            rest = &rest[end + 1..];
            if line.is_empty() {
                break;
            }
            manifest.bases.push(line.to_owned());
        }
        manifest.records = rest.to_vec();
        while !rest.is_empty() {
            manifest.starts.push((manifest.records.len() - rest.len()) as u64);
            (_, rest) = read_record(&manifest.bases, rest)?;
        }
        Some(manifest)
    }
}

impl fmt::Debug for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Manifest({} objects of {:?})", self.len(), self.bases)
    }
}

/// Reads the record at the start of `bytes`. Returns it and the remaining bytes.
fn read_record<'a>(bases: &'a [String], bytes: &'a [u8]) -> Option<(Object<'a>, &'a [u8])> {
    let (length, bytes) = read_number(bytes)?;
    let (record, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
    let (size, record) = read_number(record)?;
    let (base, record) = read_number(record)?;
    let (version, record) = read_version(record)?;
    let base = bases.get(usize::try_from(base).ok()?)?;
    Some((Object { base, key: std::str::from_utf8(record).ok()?, size: size.checked_sub(1), version }, rest))
}

pub(crate) fn write_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

pub(crate) fn read_number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut number = 0;
    for (index, byte) in bytes.iter().enumerate().take(10) {
        number |= u64::from(byte & 0x7f).checked_shl(u32::try_from(7 * index).ok()?)?;
        if byte & 0x80 == 0 {
            return Some((number, &bytes[index + 1..]));
        }
    }
    None
}

pub(crate) fn write_version(out: &mut Vec<u8>, version: Option<&Version>) {
    let Some(text) = version.map(Version::as_str) else { return out.push(0) };
    match parse_md5(text) {
        Some((md5, None)) => {
            out.push(1);
            out.extend_from_slice(&md5);
        }
        Some((md5, Some(parts))) => {
            out.push(2);
            out.extend_from_slice(&md5);
            write_number(out, parts);
        }
        None => {
            out.push(3);
            write_number(out, text.len() as u64);
            out.extend_from_slice(text.as_bytes());
        }
    }
}

pub(crate) fn read_version(bytes: &[u8]) -> Option<(Option<Version>, &[u8])> {
    let (tag, bytes) = bytes.split_first()?;
    match tag {
        0 => Some((None, bytes)),
        1 => {
            let (md5, rest) = bytes.split_first_chunk()?;
            Some((Some(Version::new(format_md5(md5, None))), rest))
        }
        2 => {
            let (md5, rest) = bytes.split_first_chunk()?;
            let (parts, rest) = read_number(rest)?;
            Some((Some(Version::new(format_md5(md5, Some(parts)))), rest))
        }
        3 => {
            let (length, bytes) = read_number(bytes)?;
            let (text, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
            Some((Some(Version::new(std::str::from_utf8(text).ok()?)), rest))
        }
        _ => None,
    }
}

/// Parses an ETag in the form of S3. `None` if `format_md5` would not return the same text.
fn parse_md5(text: &str) -> Option<([u8; 16], Option<u64>)> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    let (hex, parts) = match inner.split_once('-') {
        Some((hex, parts)) => (hex, Some(parts.parse::<u64>().ok()?)),
        None => (inner, None),
    };
    if hex.len() != 32 {
        return None;
    }
    let mut md5 = [0; 16];
    for (index, byte) in md5.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    (format_md5(&md5, parts) == text).then_some((md5, parts))
}

fn format_md5(md5: &[u8; 16], parts: Option<u64>) -> String {
    let hex: String = md5.iter().map(|byte| format!("{byte:02x}")).collect();
    match parts {
        None => format!("\"{hex}\""),
        Some(parts) => format!("\"{hex}-{parts}\""),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn version() -> impl Strategy<Value = Option<Version>> {
        let text = prop_oneof![
            "\"[0-9a-f]{32}\"",
            "\"[0-9a-f]{32}-[1-9][0-9]{0,3}\"",
            "\"[0-9A-F]{32}\"",
            "\"[0-9a-f]{32}-0[0-9]\"",
            ".{0,40}",
        ];
        proptest::option::of(text.prop_map(Version::new))
    }

    proptest! {
        #[test]
        fn pushed_objects_are_returned_before_and_after_serialization(
            objects in proptest::collection::vec(
                ("s3://[a-c]", "[^\n]{1,40}", proptest::option::of(0..1u64 << 50), version()), 0..40),
        ) {
            let mut manifest = Manifest::default();
            for (base, key, size, version) in &objects {
                manifest.push(base, key, *size, version.as_ref());
            }
            for manifest in [&manifest, &Manifest::from_bytes(&manifest.to_bytes()).unwrap()] {
                prop_assert_eq!(manifest.len(), objects.len());
                for (index, (base, key, size, version)) in objects.iter().enumerate() {
                    let expected = Object { base, key, size: *size, version: version.clone() };
                    prop_assert_eq!(manifest.get(index), Some(expected));
                }
                prop_assert_eq!(manifest.get(objects.len()), None);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Manifest::from_bytes(&bytes);
        }
    }

    #[test]
    fn an_object_takes_at_most_64_bytes_in_addition_to_its_key() {
        let mut manifest = Manifest::default();
        let mut keys = 0;
        for index in 0..100_000_u64 {
            let key = format!("train/{index:08}.jpg");
            keys += key.len();
            let etag = Version::new(format!("\"{:032x}-12\"", u128::from(index) << 60));
            manifest.push("s3://bucket", &key, Some(1 << 40), Some(&etag));
        }
        manifest.shrink();
        let overhead = (manifest.memory_bytes() - keys) as f64 / 100_000.0;
        assert!(overhead <= 64.0, "{overhead}");
    }

    #[test]
    fn different_listings_have_different_digests() {
        let (mut one, mut two) = (Manifest::default(), Manifest::default());
        one.push("s3://b", "k", Some(1), None);
        two.push("s3://b", "k", Some(2), None);
        assert_ne!(one.digest(), two.digest());
        assert_eq!(one.digest(), one.clone().digest());
        assert_eq!(one.digest().len(), 32);
    }
}
