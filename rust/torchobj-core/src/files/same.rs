//! Compares a local file with an object: by the checksum of the store, or by the time of modification.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crc_fast::{CrcAlgorithm, Digest as Crc};
use md5::Md5;
use sha2::{Digest, Sha256};

use super::local::in_place;
use super::mtime::{self, Mtime};
use crate::buffer::{Memory, PendingBuffer};
use crate::read::crc_of;
use crate::types::{Attributes, ObjectChecksum};

/// Bytes that are read and hashed by one blocking call.
const BLOCK_BYTES: usize = 1 << 20;

/// The time of modification that an object has in its metadata, otherwise that of the object itself.
pub(super) fn mtime_of(attributes: &Attributes, modified_ms: Option<i64>) -> Option<Mtime> {
    let entry = attributes.metadata.iter().find(|(name, _)| name == mtime::NAME);
    entry.and_then(|(_, text)| Mtime::parse(text)).or_else(|| modified_ms.map(Mtime::of_ms))
}

/// Returns whether the first `size` bytes of a file have a checksum.
pub(super) async fn has_checksum(file: &File, size: u64, checksum: ObjectChecksum) -> io::Result<bool> {
    hash(file, 0..size, Hash::new(checksum)).await
}

/// Returns whether a range of a file has a CRC.
pub(super) async fn has_crc(file: &File, range: Range<u64>, algorithm: CrcAlgorithm, value: u64) -> io::Result<bool> {
    hash(file, range, Hash::Crc(Crc::new(algorithm), value)).await
}

async fn hash(file: &File, range: Range<u64>, mut hash: Hash) -> io::Result<bool> {
    let mut at = range.start;
    while at < range.end {
        // Lets other tasks run, and this one be cancelled.
        tokio::task::yield_now().await;
        let length = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(BLOCK_BYTES);
        let (pending, mut dest) = PendingBuffer::new(Memory::allocate(length)?);
        in_place(|| file.read_exact_at(dest.unfilled_mut(), at))?;
        dest.advance(length);
        hash.update(pending.close(dest).as_slice());
        at += length as u64;
    }
    Ok(hash.matches())
}

/// A hash that is being computed, and its expected value.
enum Hash {
    Crc(Crc, u64),
    Md5(Md5, [u8; 16]),
    Sha256(Sha256, [u8; 32]),
}

impl Hash {
    fn new(expected: ObjectChecksum) -> Self {
        match (expected, crc_of(expected)) {
            (_, Some((algorithm, value))) => Self::Crc(Crc::new(algorithm), value),
            (ObjectChecksum::Sha256(value), _) => Self::Sha256(Sha256::new(), value),
            (ObjectChecksum::Md5(value), _) => Self::Md5(Md5::new(), value),
            _ => unreachable!("all others are CRCs"),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc(digest, _) => digest.update(bytes),
            Self::Md5(digest, _) => digest.update(bytes),
            Self::Sha256(digest, _) => digest.update(bytes),
        }
    }

    fn matches(self) -> bool {
        match self {
            Self::Crc(digest, expected) => digest.finalize() == expected,
            Self::Md5(digest, expected) => digest.finalize()[..] == expected[..],
            Self::Sha256(digest, expected) => digest.finalize()[..] == expected[..],
        }
    }
}
