//! Checksums of bodies, as S3 wants them in headers.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::{CrcAlgorithm, Digest, checksum_combine};
use md5::Md5;
use torchobj_core::types::{PartReceipt, Payload};

/// A checksum that is sent with bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Crc64Nvme,
    Crc32C,
    /// Where what is sent comes with it.
    Crc32,
}

impl Algorithm {
    fn crc(self) -> CrcAlgorithm {
        match self {
            Self::Crc64Nvme => CrcAlgorithm::Crc64Nvme,
            Self::Crc32C => CrcAlgorithm::Crc32Iscsi,
            Self::Crc32 => CrcAlgorithm::Crc32IsoHdlc,
        }
    }

    /// The header that carries it.
    pub(super) fn header(self) -> &'static str {
        match self {
            Self::Crc64Nvme => "x-amz-checksum-crc64nvme",
            Self::Crc32C => "x-amz-checksum-crc32c",
            Self::Crc32 => "x-amz-checksum-crc32",
        }
    }

    /// The element that carries it in XML.
    pub(super) fn element(self) -> &'static str {
        match self {
            Self::Crc64Nvme => "ChecksumCRC64NVME",
            Self::Crc32C => "ChecksumCRC32C",
            Self::Crc32 => "ChecksumCRC32",
        }
    }

    /// Of the bytes of `payload`.
    pub(super) fn of(self, payload: &Payload) -> u64 {
        if let (Self::Crc32, Some(known)) = (self, payload.crc32()) {
            return known.into();
        }
        let mut digest = Digest::new(self.crc());
        for piece in payload.pieces() {
            digest.update(piece);
        }
        digest.finalize()
    }

    /// Of the bytes of all `parts`, one after the other; `None` when one has none.
    pub(super) fn of_parts(self, parts: &[PartReceipt]) -> Option<u64> {
        let mut parts = parts.iter();
        let mut whole = parts.next()?.checksum?;
        for part in parts {
            whole = checksum_combine(self.crc(), whole, part.checksum?, part.size);
        }
        Some(whole)
    }

    /// As the header's value: big-endian, in Base64.
    pub(super) fn encode(self, checksum: u64) -> String {
        match self {
            Self::Crc64Nvme => BASE64_STANDARD.encode(checksum.to_be_bytes()),
            Self::Crc32C | Self::Crc32 => BASE64_STANDARD.encode(&checksum.to_be_bytes()[4..]),
        }
    }
}

/// MD5, where S3 asks for one.
pub(super) fn md5(bytes: &[u8]) -> [u8; 16] {
    use md5::Digest;
    Md5::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use torchobj_core::types::Version;

    use super::*;

    #[test]
    fn check_values_are_those_of_the_catalogue() {
        // "123456789": Catalogue of parametrised CRC algorithms, CRC-64/NVME and CRC-32/ISCSI.
        let payload = Payload::new(vec![Bytes::from_static(b"1234"), Bytes::from_static(b"56789")]);
        assert_eq!(Algorithm::Crc64Nvme.of(&payload), 0xae8b_1486_0a79_9888);
        assert_eq!(Algorithm::Crc32C.of(&payload), 0xe306_9283);
        assert_eq!(Algorithm::Crc32C.encode(0xe306_9283), "4waSgw==");
    }

    #[test]
    fn parts_combine_to_the_whole() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| at.to_le_bytes()[1]).collect();
        for algorithm in [Algorithm::Crc64Nvme, Algorithm::Crc32C, Algorithm::Crc32] {
            let parts: Vec<_> = bytes
                .chunks(33_333)
                .map(|part| PartReceipt {
                    number: 1,
                    size: part.len() as u64,
                    version: Version::new(""),
                    checksum: Some(algorithm.of(&Bytes::copy_from_slice(part).into())),
                })
                .collect();
            let whole = algorithm.of(&Bytes::copy_from_slice(&bytes).into());
            assert_eq!(algorithm.of_parts(&parts), Some(whole));
        }
    }
}
