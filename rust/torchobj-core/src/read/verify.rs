//! Compares the bytes of a whole object with the checksum that the store sent. Does no I/O.

use crc_fast::{CrcAlgorithm, checksum};

use crate::store::ObjectChecksum;

/// Returns a message if `bytes` do not have the checksum. MD5 and SHA-256 are not computed.
pub(super) fn mismatch(expected: ObjectChecksum, bytes: &[u8]) -> Option<String> {
    let (name, algorithm, expected) = match expected {
        ObjectChecksum::Crc32(crc) => ("CRC32", CrcAlgorithm::Crc32IsoHdlc, u64::from(crc)),
        ObjectChecksum::Crc32C(crc) => ("CRC32C", CrcAlgorithm::Crc32Iscsi, u64::from(crc)),
        ObjectChecksum::Crc64Nvme(crc) => ("CRC64NVME", CrcAlgorithm::Crc64Nvme, crc),
        ObjectChecksum::Md5(_) | ObjectChecksum::Sha256(_) => return None,
    };
    let found = checksum(algorithm, bytes);
    (found != expected).then(|| format!("the received bytes have {name} {found:08x}, the store sent {expected:08x}"))
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
    }
}
