//! The records of a manifest in memory, in blocks of which only the first record has its whole key.
//!
//! ```text
//! record := shared  length  size+1 (0: unknown)  base*4+tag  version  suffix
//! ```
//!
//! `shared` is the number of bytes that the key has in common with the key before it, absent in the first record of a
//! block; `suffix` is the rest of the key, of `length` bytes. There is one 8-byte start per block, so that access by index
//! decodes half a block on average.
//!
//! The records are private to the process, or in a sealed file which spawned processes map:
//!
//! ```text
//! file := magic  number of objects  start of each block  records
//! ```

#[cfg(target_os = "linux")]
use std::{
    fs::File,
    io,
    os::fd::{BorrowedFd, RawFd},
    os::unix::fs::FileExt,
    sync::Arc,
};

use super::record::{PackedVersion, VERSION_TAGS, read_number, write_number};
#[cfg(target_os = "linux")]
use crate::buffer::SealedFile;

/// Objects per block: half a byte of start per object, and 8 records to decode per access.
const BLOCK: usize = 16;

/// Identifies the file of a manifest. Only processes of the same build exchange it.
#[cfg(target_os = "linux")]
const MAGIC: u64 = u64::from_le_bytes(*b"tobjman1");

/// Below this size a file per manifest costs more than a copy per process.
#[cfg(target_os = "linux")]
const MIN_SHARED_BYTES: usize = 1 << 20;

/// Records are moved to the file in pieces of this size, so that they are never in memory twice.
#[cfg(target_os = "linux")]
const MOVED_BYTES: usize = 16 << 20;

/// A record without its key.
pub(super) struct Row<'a> {
    pub(super) base: u64,
    pub(super) size: Option<u64>,
    pub(super) version: PackedVersion<'a>,
}

/// The records of a manifest.
#[derive(Clone, Default)]
pub(super) struct Packed {
    pub(super) len: usize,
    last_key: Vec<u8>,
    place: Place,
}

/// Where the records are.
#[derive(Clone)]
enum Place {
    Private {
        starts: Vec<u64>,
        records: Vec<u8>,
    },
    #[cfg(target_os = "linux")]
    Shared(Arc<SealedFile>),
}

impl Default for Place {
    fn default() -> Self {
        Self::Private { starts: Vec::new(), records: Vec::new() }
    }
}

impl PartialEq for Packed {
    fn eq(&self, other: &Self) -> bool {
        // Equal objects have equal records.
        self.len == other.len && self.records() == other.records()
    }
}

impl Packed {
    pub(super) fn push(&mut self, key: &[u8], row: &Row<'_>) {
        self.make_private();
        let is_first = self.len.is_multiple_of(BLOCK);
        let shared = match is_first {
            true => 0,
            false => self.last_key.iter().zip(key).take_while(|(one, other)| one == other).count(),
        };
        let Place::Private { starts, records } = &mut self.place else { unreachable!("made private above") };
        if is_first {
            starts.push(records.len() as u64);
        } else {
            write_number(records, shared as u64);
        }
        write_number(records, (key.len() - shared) as u64);
        write_number(records, row.size.map_or(0, |size| size.saturating_add(1)));
        write_number(records, row.base * VERSION_TAGS + u64::from(row.version.tag()));
        row.version.write(records);
        records.extend_from_slice(&key[shared..]);
        self.last_key.truncate(shared);
        self.last_key.extend_from_slice(&key[shared..]);
        self.len += 1;
    }

    /// Copies shared records to private memory.
    fn make_private(&mut self) {
        #[cfg(target_os = "linux")]
        if let Place::Shared(_) = self.place {
            let starts = (0..self.len.div_ceil(BLOCK)).filter_map(|block| self.start(block)).map(|start| start as u64);
            self.place = Place::Private { starts: starts.collect(), records: self.records().to_vec() };
            self.last_key =
                self.len.checked_sub(1).and_then(|last| self.rows(last)).map_or_else(Vec::new, |mut rows| {
                    rows.next();
                    rows.key
                });
        }
    }

    pub(super) fn shrink(&mut self) {
        if let Place::Private { starts, records } = &mut self.place {
            starts.shrink_to_fit();
            records.shrink_to_fit();
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        match &self.place {
            Place::Private { starts, records } => records.capacity() + starts.capacity() * size_of::<u64>(),
            #[cfg(target_os = "linux")]
            Place::Shared(file) => file.as_slice().len(),
        }
    }

    fn records(&self) -> &[u8] {
        match &self.place {
            Place::Private { records, .. } => records,
            #[cfg(target_os = "linux")]
            Place::Shared(file) => file.as_slice().get(records_at(self.len)..).unwrap_or_default(),
        }
    }

    fn start(&self, block: usize) -> Option<usize> {
        let start = match &self.place {
            Place::Private { starts, .. } => *starts.get(block)?,
            #[cfg(target_os = "linux")]
            Place::Shared(file) => word(file.as_slice(), HEADER_WORDS + block)?,
        };
        usize::try_from(start).ok()
    }

    /// The records from `begin` on. `None` if there is no record `begin`, or if the file is malformed.
    pub(super) fn rows(&self, begin: usize) -> Option<Rows<'_>> {
        let mut rows = self.block_of(begin)?;
        for _ in 0..begin % BLOCK {
            rows.next()?;
        }
        Some(rows)
    }

    /// The size in record `index`.
    pub(super) fn size(&self, index: usize) -> Option<u64> {
        let mut rows = self.block_of(index)?;
        for _ in 0..index % BLOCK {
            rows.next_fields()?;
        }
        rows.next_fields()?.row.size
    }

    /// The records from the start of the block of `index` on.
    fn block_of(&self, index: usize) -> Option<Rows<'_>> {
        if index >= self.len {
            return None;
        }
        let block = index / BLOCK;
        let rest = self.records().get(self.start(block)?..)?;
        Some(Rows { rest, index: block * BLOCK, len: self.len, key: Vec::with_capacity(64) })
    }
}

/// Iterates over records.
pub(super) struct Rows<'a> {
    rest: &'a [u8],
    index: usize,
    len: usize,
    /// The key of the last record.
    pub(super) key: Vec<u8>,
}

/// A record, with the bytes of its key that differ from the key before it.
struct Fields<'a> {
    row: Row<'a>,
    shared: usize,
    suffix: &'a [u8],
}

impl<'a> Rows<'a> {
    /// The next record; its key is `key`.
    pub(super) fn next(&mut self) -> Option<Row<'a>> {
        let Fields { row, shared, suffix } = self.next_fields()?;
        if shared > self.key.len() {
            return None;
        }
        self.key.truncate(shared);
        self.key.extend_from_slice(suffix);
        Some(row)
    }

    /// The next record and its key.
    pub(super) fn next_with_key(&mut self) -> Option<(Row<'a>, &[u8])> {
        let row = self.next()?;
        Some((row, &self.key))
    }

    fn next_fields(&mut self) -> Option<Fields<'a>> {
        if self.index >= self.len {
            return None;
        }
        let is_first = self.index.is_multiple_of(BLOCK);
        let (shared, rest) = if is_first { (0, self.rest) } else { read_number(self.rest)? };
        let (length, rest) = read_number(rest)?;
        let (size, rest) = read_number(rest)?;
        let (base_and_tag, rest) = read_number(rest)?;
        let tag = u8::try_from(base_and_tag % VERSION_TAGS).expect("there are four tags");
        let (version, rest) = PackedVersion::read(tag, rest)?;
        let (suffix, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        self.rest = rest;
        self.index += 1;
        let row = Row { base: base_and_tag / VERSION_TAGS, size: size.checked_sub(1), version };
        Some(Fields { row, shared: usize::try_from(shared).ok()?, suffix })
    }
}

/// Words before the starts: magic and number of objects.
#[cfg(target_os = "linux")]
const HEADER_WORDS: usize = 2;

#[cfg(target_os = "linux")]
fn word(bytes: &[u8], index: usize) -> Option<u64> {
    let start = index.checked_mul(8)?;
    Some(u64::from_le_bytes(bytes.get(start..start.checked_add(8)?)?.try_into().expect("the range has 8 bytes")))
}

/// Offset of the records in the file of `len` objects.
#[cfg(target_os = "linux")]
fn records_at(len: usize) -> usize {
    (HEADER_WORDS + len.div_ceil(BLOCK)) * 8
}

/// Moves `records` to the file at `at`, from their end, so that the memory of each piece is freed before the next one.
#[cfg(target_os = "linux")]
fn move_to(file: &File, at: u64, records: &mut Vec<u8>) -> io::Result<()> {
    while !records.is_empty() {
        let begin = records.len().saturating_sub(MOVED_BYTES);
        file.write_all_at(&records[begin..], at + begin as u64)?;
        records.truncate(begin);
        records.shrink_to_fit();
    }
    Ok(())
}

#[cfg(target_os = "linux")]
impl Packed {
    /// Moves the records to a file, unless they are few.
    ///
    /// # Errors
    /// The system refuses the file; the records are unchanged.
    pub(super) fn share(&mut self) -> io::Result<()> {
        let (len, memory_bytes) = (self.len, self.memory_bytes());
        let Place::Private { starts, records } = &mut self.place else { return Ok(()) };
        if memory_bytes < MIN_SHARED_BYTES {
            return Ok(());
        }
        let file = SealedFile::unsealed("torchobj-manifest")?;
        let (at, total) = (records_at(len) as u64, records.len());
        let mut head = Vec::with_capacity(records_at(len));
        for word in [MAGIC, len as u64].iter().chain(starts.iter()) {
            head.extend_from_slice(&word.to_le_bytes());
        }
        file.write_all_at(&head, 0)?;
        drop(head);
        let sealed = move_to(&file, at, records).and_then(|()| SealedFile::seal(file.try_clone()?));
        match sealed {
            Ok(sealed) => self.place = Place::Shared(Arc::new(sealed)),
            Err(error) => {
                let kept = records.len();
                records.resize(total, 0);
                file.read_exact_at(&mut records[kept..], at + kept as u64)?;
                return Err(error);
            }
        }
        self.last_key = Vec::new();
        Ok(())
    }

    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.place {
            Place::Private { .. } => None,
            Place::Shared(file) => Some(file.file()),
        }
    }

    /// The records in the file of another process.
    ///
    /// # Errors
    /// It is not the file of a manifest, or the system refuses the address space.
    pub(super) fn received(file: RawFd) -> io::Result<Self> {
        let file = SealedFile::received(file)?;
        let refused = || io::Error::new(io::ErrorKind::InvalidInput, "the file is not a manifest");
        let magic = word(file.as_slice(), 0).ok_or_else(refused)?;
        let len = word(file.as_slice(), 1).and_then(|len| usize::try_from(len).ok()).ok_or_else(refused)?;
        // A record has at least 3 bytes.
        if magic != MAGIC || len > file.as_slice().len() || records_at(len) > file.as_slice().len() {
            return Err(refused());
        }
        Ok(Self { len, last_key: Vec::new(), place: Place::Shared(Arc::new(file)) })
    }
}
