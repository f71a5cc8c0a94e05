//! A manifest: a compact, immutable list of objects with their sizes and versions. Does no I/O.
//!
//! `record` encodes its parts, `packed` holds the records in memory, `columns` exchanges them with tables. The digest
//! and [`to_bytes`](Manifest::to_bytes) depend on the objects only, and not on their form in memory.
//!
//! The serialized form is one line per base, an empty line, and a record per object; numbers and versions are encoded as in
//! `record`:
//!
//! ```text
//! record := length  size+1 (0: unknown)  base  version  key
//! ```

mod columns;
mod packed;
mod record;

use std::fmt;
#[cfg(target_os = "linux")]
use std::io;
#[cfg(target_os = "linux")]
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use self::packed::{Packed, Row, Rows};
use self::record::PackedVersion;
use crate::types::Version;

pub use self::columns::Columns;
pub(crate) use self::record::{read_number, read_version, write_number, write_version};

/// Bytes of serialized records that are hashed at a time.
const HASHED_BYTES: usize = 64 << 10;

/// One object of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo<'a> {
    /// Scheme and bucket: `s3://bucket`, `file://`.
    pub base: &'a str,
    /// The key.
    pub key: String,
    /// Size in bytes, if known.
    pub size: Option<u64>,
    /// The version, if known.
    pub version: Option<Version>,
}

impl ObjectInfo<'_> {
    /// The URL, in the form that [`crate::url::ObjectUrl`] parses.
    pub fn url(&self) -> String {
        format!("{}/{}", self.base, self.key)
    }
}

/// A list of objects, in the order in which they were added.
#[derive(Clone, Default)]
pub struct Manifest {
    bases: Vec<String>,
    packed: Packed,
    digest: OnceLock<String>,
}

impl PartialEq for Manifest {
    fn eq(&self, other: &Self) -> bool {
        self.bases == other.bases && self.packed == other.packed
    }
}

impl Eq for Manifest {}

impl Manifest {
    /// Appends an object.
    pub fn push(&mut self, base: &str, key: &str, size: Option<u64>, version: Option<&Version>) {
        let base = self.index_of(base);
        self.push_row(key.as_bytes(), &Row { base, size, version: PackedVersion::of(version) });
    }

    /// Index of a base, which is added if it is new.
    fn index_of(&mut self, base: &str) -> u64 {
        let index = self.bases.iter().rposition(|known| known == base).unwrap_or_else(|| {
            self.bases.push(base.to_owned());
            self.bases.len() - 1
        });
        index as u64
    }

    fn push_row(&mut self, key: &[u8], row: &Row<'_>) {
        self.digest.take();
        self.packed.push(key, row);
    }

    /// Appends the objects of another manifest.
    pub fn append(&mut self, other: &Self) {
        for object in other.iter() {
            self.push(object.base, &object.key, object.size, object.version.as_ref());
        }
    }

    /// Frees unused capacity.
    pub fn shrink(&mut self) {
        self.packed.shrink();
    }

    /// Moves a large manifest to a file in memory that spawned processes can map without a copy. A small one, and one for
    /// which the system refuses the file, stays where it is.
    #[cfg(target_os = "linux")]
    pub fn share(&mut self) {
        if let Err(error) = self.packed.share() {
            log::debug!("{self:?} stays in private memory: {error}");
        }
    }

    /// The file of a shared manifest, to pass it to another process with [`bases`](Self::bases) and
    /// [`digest`](Self::digest).
    #[cfg(target_os = "linux")]
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.packed.file()
    }

    /// Maps the file of a manifest of another process, and owns the descriptor.
    ///
    /// # Errors
    /// It is not the file of a manifest, or the system refuses the address space.
    #[cfg(target_os = "linux")]
    pub fn received(file: RawFd, bases: Vec<String>, digest: String) -> io::Result<Self> {
        Ok(Self { bases, packed: Packed::received(file)?, digest: OnceLock::from(digest) })
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.packed.len
    }

    /// Returns whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory, including the keys.
    pub fn memory_bytes(&self) -> usize {
        self.packed.memory_bytes()
    }

    /// The bases of the objects, in the order of their first occurrence.
    pub fn bases(&self) -> &[String] {
        &self.bases
    }

    /// Returns object `index`; `None` if there is no such object.
    pub fn get(&self, index: usize) -> Option<ObjectInfo<'_>> {
        let mut rows = self.packed.rows(index)?;
        let row = rows.next()?;
        self.object(&row, rows.key)
    }

    /// Returns the size of object `index`, if known.
    pub fn size(&self, index: usize) -> Option<u64> {
        self.packed.size(index)
    }

    /// The objects, in order; faster than [`get`](Self::get) for each.
    pub fn iter(&self) -> impl Iterator<Item = ObjectInfo<'_>> {
        let mut rows = self.packed.rows(0);
        std::iter::from_fn(move || {
            let rows = rows.as_mut()?;
            let row = rows.next()?;
            self.object(&row, rows.key.clone())
        })
    }

    fn object(&self, row: &Row<'_>, key: Vec<u8>) -> Option<ObjectInfo<'_>> {
        let base = self.bases.get(usize::try_from(row.base).ok()?)?;
        Some(ObjectInfo { base, key: String::from_utf8(key).ok()?, size: row.size, version: row.version.unpack() })
    }

    /// Identifies the content of this manifest: hex of the first 16 bytes of the SHA-256 of
    /// [`to_bytes`](Self::to_bytes). Computed by the first call.
    pub fn digest(&self) -> &str {
        self.digest.get_or_init(|| {
            let mut hash = Sha256::new();
            self.serialize(HASHED_BYTES, |bytes| {
                hash.update(&bytes);
                bytes.clear();
            });
            hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
        })
    }

    /// Serializes the manifest.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        self.serialize(usize::MAX, |bytes| all = std::mem::take(bytes));
        all
    }

    /// Serializes the manifest, and calls `flush` whenever there are `chunk` bytes, and at the end.
    fn serialize(&self, chunk: usize, mut flush: impl FnMut(&mut Vec<u8>)) {
        let mut out = Vec::new();
        for base in &self.bases {
            out.extend_from_slice(base.as_bytes());
            out.push(b'\n');
        }
        out.push(b'\n');
        let mut rows = self.packed.rows(0);
        let mut record = Vec::new();
        while let Some((row, key)) = rows.as_mut().and_then(Rows::next_with_key) {
            record.clear();
            write_number(&mut record, row.size.map_or(0, |size| size.saturating_add(1)));
            write_number(&mut record, row.base);
            record.push(row.version.tag());
            row.version.write(&mut record);
            write_number(&mut out, (record.len() + key.len()) as u64);
            out.extend_from_slice(&record);
            out.extend_from_slice(key);
            if out.len() >= chunk {
                flush(&mut out);
            }
        }
        flush(&mut out);
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
        while !rest.is_empty() {
            let (length, bytes) = read_number(rest)?;
            let (record, after) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
            let (size, record) = read_number(record)?;
            let (base, record) = read_number(record)?;
            let (tag, record) = record.split_first()?;
            let (version, key) = PackedVersion::read(*tag, record)?;
            std::str::from_utf8(key).ok()?;
            if base >= manifest.bases.len() as u64 {
                return None;
            }
            manifest.push_row(key, &Row { base, size: size.checked_sub(1), version });
            rest = after;
        }
        manifest.shrink();
        Some(manifest)
    }
}

impl fmt::Debug for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Manifest({} objects of {:?})", self.len(), self.bases)
    }
}

#[cfg(test)]
mod tests;
