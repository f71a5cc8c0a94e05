//! The file of an entry: its name, and the trailer that follows the bytes of the object. Does no I/O.

use std::ops::Range;

use crc_fast::{CrcAlgorithm, checksum};
use sha2::{Digest, Sha256};

use crate::types::Version;

/// The bytes that one CRC covers.
pub(super) const BLOCK_BYTES: usize = 64 << 10;

/// The last bytes of each file.
const MAGIC: [u8; 8] = *b"TOCACHE1";

/// Length of the end of a trailer, whose fields are: SHA-256 of the key, size of the object, start and end of the range, length
/// of the URL, CRC of the trailer before it, magic number.
pub(super) const END_BYTES: usize = 32 + 3 * 8 + 2 * 4 + MAGIC.len();

/// Maximum length of a URL in a trailer.
const MAX_URL_BYTES: usize = 64 << 10;

/// A range of a version of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EntryKey {
    digest: [u8; 32],
    pub(super) url: String,
    /// Size of the whole object.
    pub(super) size: u64,
    pub(super) range: Range<u64>,
}

impl EntryKey {
    /// The key of `range` of the object at `url`, of a store with this identity.
    pub(super) fn new(identity: &str, url: String, version: &Version, size: u64, range: Range<u64>) -> Self {
        let mut hash = Sha256::new();
        for text in [identity, &url, version.as_str()] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        for number in [size, range.start, range.end] {
            hash.update(number.to_le_bytes());
        }
        Self { digest: hash.finalize().into(), url, size, range }
    }

    /// The name of the file: 32 hexadecimal digits.
    pub(super) fn name(&self) -> String {
        self.digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Number of bytes of the object in the file.
    pub(super) fn length(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Length of the trailer.
    pub(super) fn trailer_bytes(&self) -> usize {
        blocks(self.length()) * 4 + self.url.len() + END_BYTES
    }

    /// Length of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.length() + self.trailer_bytes() as u64
    }

    /// The trailer of a file with these bytes of the object.
    pub(super) fn trailer(&self, bytes: &[u8]) -> Vec<u8> {
        let mut trailer = Vec::with_capacity(self.trailer_bytes());
        bytes.chunks(BLOCK_BYTES).for_each(|block| trailer.extend(crc(block).to_le_bytes()));
        trailer.extend(self.url.as_bytes());
        trailer.extend(self.digest);
        for number in [self.size, self.range.start, self.range.end] {
            trailer.extend(number.to_le_bytes());
        }
        trailer.extend(u32::try_from(self.url.len()).expect("keys have at most 1 KiB").to_le_bytes());
        trailer.extend(crc(&trailer).to_le_bytes());
        trailer.extend(MAGIC);
        trailer
    }

    /// The CRC of each block if this is the trailer of a file of this entry; `None` if it is damaged or of another entry.
    pub(super) fn block_crcs(&self, trailer: &[u8]) -> Option<Vec<u32>> {
        let (found, crcs) = Self::parse(trailer)?;
        (found == *self).then_some(crcs)
    }

    /// Length of the trailer of a file, from the last bytes of the file; `None` if it is damaged.
    pub(super) fn trailer_bytes_of(end: &[u8; END_BYTES]) -> Option<usize> {
        let number = |at: usize| u64::from_le_bytes(array(&end[at..at + 8]));
        let length = number(48).checked_sub(number(40))?;
        let url = u32::from_le_bytes(array(&end[56..60])) as usize;
        let is_possible = end[64..] == MAGIC && length < 1 << 40 && url <= MAX_URL_BYTES;
        is_possible.then(|| blocks(length) * 4 + url + END_BYTES)
    }

    /// The key and the CRCs in a whole trailer; `None` if it is damaged.
    pub(super) fn parse(trailer: &[u8]) -> Option<(Self, Vec<u32>)> {
        let end: &[u8; END_BYTES] = trailer.last_chunk()?;
        if Self::trailer_bytes_of(end)? != trailer.len() {
            return None;
        }
        let number = |at: usize| u64::from_le_bytes(array(&end[at..at + 8]));
        let summed = trailer.len() - 12;
        if crc(&trailer[..summed]) != u32::from_le_bytes(array(&end[60..64])) {
            return None;
        }
        let range = number(40)..number(48);
        let (crcs, rest) = trailer.split_at(blocks(range.end - range.start) * 4);
        let url = std::str::from_utf8(&rest[..rest.len() - END_BYTES]).ok()?.to_owned();
        let crcs = crcs.chunks_exact(4).map(|bytes| u32::from_le_bytes(array(bytes))).collect();
        Some((Self { digest: array(&end[..32]), url, size: number(32), range }, crcs))
    }
}

/// Whether whole blocks have their CRCs.
pub(super) fn are_intact(blocks: &[u8], crcs: &[u32]) -> bool {
    blocks.chunks(BLOCK_BYTES).zip(crcs).all(|(block, expected)| crc(block) == *expected)
}

/// CRC-32C.
pub(super) fn crc(bytes: &[u8]) -> u32 {
    u32::try_from(checksum(CrcAlgorithm::Crc32Iscsi, bytes)).expect("a CRC-32 has 32 bits")
}

/// Number of blocks of `length` bytes.
fn blocks(length: u64) -> usize {
    usize::try_from(length.div_ceil(BLOCK_BYTES as u64)).expect("entries fit into memory")
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the slice has this length")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(identity: &str, url: &str, version: &str, size: u64, range: Range<u64>) -> EntryKey {
        EntryKey::new(identity, url.to_owned(), &Version::new(version), size, range)
    }

    #[test]
    fn entries_that_differ_in_anything_have_different_names() {
        let keys = [
            key("e", "s3://b/k", "v", 10, 0..10),
            key("f", "s3://b/k", "v", 10, 0..10),
            key("e", "s3://b/l", "v", 10, 0..10),
            key("e", "s3://b/k", "w", 10, 0..10),
            key("e", "s3://b/k", "v", 11, 0..10),
            key("e", "s3://b/k", "v", 10, 0..9),
            key("e", "s3://b/k", "v", 10, 1..10),
            key("es", "3://b/k", "v", 10, 0..10),
        ];
        let names: std::collections::HashSet<_> = keys.iter().map(EntryKey::name).collect();
        assert_eq!(names.len(), keys.len());
    }

    #[test]
    fn a_trailer_is_read_as_it_was_written_and_every_changed_bit_is_found() {
        for length in [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES] {
            let bytes: Vec<u8> = (0..length).map(|at| (at / 7) as u8).collect();
            let entry = key("e", "s3://b/a key", "v", 1 << 20, 5..5 + length as u64);
            let trailer = entry.trailer(&bytes);
            assert_eq!(trailer.len(), entry.trailer_bytes());
            let crcs = entry.block_crcs(&trailer).unwrap();
            assert!(crcs.iter().zip(bytes.chunks(BLOCK_BYTES)).all(|(found, block)| *found == crc(block)));
            assert!(are_intact(&bytes, &crcs));
            for bit in 0..trailer.len() * 8 {
                let mut damaged = trailer.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(entry.block_crcs(&damaged), None, "bit {bit}");
            }
            assert_eq!(entry.block_crcs(&trailer[1..]), None);
            assert_eq!(key("e", "s3://b/a key", "w", 1 << 20, 5..5 + length as u64).block_crcs(&trailer), None);
        }
    }

    #[test]
    fn a_crc_is_the_published_check_value() {
        assert_eq!(crc(b"123456789"), 0xe306_9283);
    }
}
