//! The journal of a download: which parts of a temporary file are complete, and their checksums. It is stored in the file
//! itself, after the bytes of the object, and is cut off before the file gets its name.
//!
//! A journal is used again only for the same version of the same object. The caller compares the parts with their checksums
//! then: after a crash of the system the file may lack bytes that the journal has recorded.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"tobjpt01";

/// Magic, identity, size of a part.
const HEADER_BYTES: usize = 8 + 32 + 8;

/// Offset of the records in the journal.
const RECORDS: u64 = 64;

/// Bytes of a record: the number of the part, from 1, and its checksum.
const RECORD_BYTES: usize = 16;

/// Records of the parts of one download.
#[derive(Debug)]
pub(super) struct Journal {
    file: Arc<File>,
    /// Position in the file.
    start: u64,
}

/// What a journal contains.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Recorded {
    /// Size of the parts.
    pub(super) part_bytes: u64,
    /// The checksum of each part that is complete.
    pub(super) parts: Vec<Option<u64>>,
}

impl Recorded {
    /// No part is complete.
    pub(super) fn new(size: u64, part_bytes: u64) -> Self {
        let count = usize::try_from(size.div_ceil(part_bytes)).expect("the parts are in memory");
        Self { part_bytes, parts: vec![None; count] }
    }
}

impl Journal {
    /// Reads the journal of an object with `size` bytes, or begins a new one with parts of `part_bytes`. `identity` contains
    /// all on which the bytes of the file depend.
    pub(super) fn open(file: &Arc<File>, identity: &str, size: u64, part_bytes: u64) -> io::Result<(Self, Recorded)> {
        let journal = Self { file: file.clone(), start: size.next_multiple_of(4096) };
        let identity: [u8; 32] = Sha256::digest(format!("{size}\n{identity}").as_bytes()).into();
        if let Some(recorded) = journal.read(&identity, size) {
            return Ok((journal, recorded));
        }
        // Discards what an earlier download has left.
        file.set_len(0)?;
        file.set_len(size)?;
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend(MAGIC);
        header.extend(identity);
        header.extend(part_bytes.to_le_bytes());
        file.write_all_at(&header, journal.start)?;
        Ok((journal, Recorded::new(size, part_bytes)))
    }

    fn read(&self, identity: &[u8; 32], size: u64) -> Option<Recorded> {
        let mut header = [0; HEADER_BYTES];
        self.file.read_exact_at(&mut header, self.start).ok()?;
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("a number has eight bytes"));
        let part_bytes = number(&header[40..]);
        if &header[..8] != MAGIC || header[8..40] != identity[..] || part_bytes == 0 {
            return None;
        }
        let count = usize::try_from(size.div_ceil(part_bytes)).ok()?;
        let length = self.file.metadata().ok()?.len().saturating_sub(self.start + RECORDS);
        let recorded = usize::try_from(length).ok()?.min(count * RECORD_BYTES);
        let mut records = vec![0; recorded];
        self.file.read_exact_at(&mut records, self.start + RECORDS).ok()?;
        let mut parts = vec![None; count];
        for (index, record) in records.chunks_exact(RECORD_BYTES).enumerate() {
            if number(&record[..8]) == index as u64 + 1 {
                parts[index] = Some(number(&record[8..]));
            }
        }
        Some(Recorded { part_bytes, parts })
    }

    /// Records that part `index` is in the file.
    pub(super) fn record(&self, index: usize, checksum: u64) -> io::Result<()> {
        let mut record = [0; RECORD_BYTES];
        record[..8].copy_from_slice(&(index as u64 + 1).to_le_bytes());
        record[8..].copy_from_slice(&checksum.to_le_bytes());
        self.file.write_all_at(&record, self.start + RECORDS + (index * RECORD_BYTES) as u64)
    }
}
