//! Compares the bytes of a whole object with the checksum that the store sent. Does no I/O.

use crc_fast::{CrcAlgorithm, checksum};

use crate::store::ObjectChecksum;

/// Returns a message if `bytes` do not have the checksum. MD5 and SHA-256 are not computed.
pub(crate) fn mismatch(expected: ObjectChecksum, bytes: &[u8]) -> Option<String> {
    let (algorithm, expected) = crc_of(expected)?;
    difference(algorithm, expected, checksum(algorithm, bytes))
}

/// Returns a message if the CRC of the received bytes is not the one that the store sent.
pub(crate) fn difference(algorithm: CrcAlgorithm, expected: u64, found: u64) -> Option<String> {
    let name = match algorithm {
        CrcAlgorithm::Crc32IsoHdlc => "CRC32",
        CrcAlgorithm::Crc32Iscsi => "CRC32C",
        _ => "CRC64NVME",
    };
    (found != expected).then(|| format!("the received bytes have {name} {found:08x}, the store sent {expected:08x}"))
}

/// The algorithm and the value of a checksum that is a CRC.
pub(crate) fn crc_of(checksum: ObjectChecksum) -> Option<(CrcAlgorithm, u64)> {
    match checksum {
        ObjectChecksum::Crc32(crc) => Some((CrcAlgorithm::Crc32IsoHdlc, crc.into())),
        ObjectChecksum::Crc32C(crc) => Some((CrcAlgorithm::Crc32Iscsi, crc.into())),
        ObjectChecksum::Crc64Nvme(crc) => Some((CrcAlgorithm::Crc64Nvme, crc)),
        ObjectChecksum::Md5(_) | ObjectChecksum::Sha256(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_crc_is_compared_and_other_checksums_are_not() {
        // "123456789": Catalogue of parametrised CRC algorithms.
        for right in [
            ObjectChecksum::Crc32(0xcbf4_3926),
            ObjectChecksum::Crc32C(0xe306_9283),
            ObjectChecksum::Crc64Nvme(0xae8b_1486_0a79_9888),
            ObjectChecksum::Md5([0; 16]),
        ] {
            assert_eq!(mismatch(right, b"123456789"), None);
        }
        let message = mismatch(ObjectChecksum::Crc32C(1), b"123456789").unwrap();
        assert_eq!(message, "the received bytes have CRC32C e3069283, the store sent 00000001");
        assert!(mismatch(ObjectChecksum::Crc32C(u32::MAX), b"123456789").is_some());
    }
}
