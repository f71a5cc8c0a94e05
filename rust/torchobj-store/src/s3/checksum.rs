//! Checksums of bodies, in the format of S3.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::{CrcAlgorithm, Digest, checksum_combine};
use md5::Md5;
use torchobj_core::store::ObjectChecksum;
use torchobj_core::types::{PartReceipt, Payload};

/// A checksum algorithm for request bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Crc64Nvme,
    Crc32C,
    /// Used if the caller has computed it already.
    Crc32,
}

impl Algorithm {
    /// The CRC, the name of its header, and that of its XML element.
    fn properties(self) -> (CrcAlgorithm, &'static str, &'static str) {
        match self {
            Self::Crc64Nvme => (CrcAlgorithm::Crc64Nvme, "x-amz-checksum-crc64nvme", "ChecksumCRC64NVME"),
            Self::Crc32C => (CrcAlgorithm::Crc32Iscsi, "x-amz-checksum-crc32c", "ChecksumCRC32C"),
            Self::Crc32 => (CrcAlgorithm::Crc32IsoHdlc, "x-amz-checksum-crc32", "ChecksumCRC32"),
        }
    }

    /// Name of its header.
    pub(super) fn header(self) -> &'static str {
        self.properties().1
    }

    /// Name of its XML element.
    pub(super) fn element(self) -> &'static str {
        self.properties().2
    }

    /// Computes the checksum of `payload`.
    pub(super) fn of(self, payload: &Payload) -> u64 {
        if let (Self::Crc32, Some(known)) = (self, payload.crc32()) {
            return known.into();
        }
        let mut digest = Digest::new(self.properties().0);
        for piece in payload.pieces() {
            digest.update(piece);
        }
        digest.finalize()
    }

    /// Combines the checksums of `parts`, in order; `None` if one of them has none.
    pub(super) fn of_parts(self, parts: &[PartReceipt]) -> Option<u64> {
        let mut parts = parts.iter();
        let mut whole = parts.next()?.checksum?;
        for part in parts {
            whole = checksum_combine(self.properties().0, whole, part.checksum?, part.size);
        }
        Some(whole)
    }

    /// Formats a checksum as a header value: big-endian, in Base64.
    pub(super) fn encode(self, checksum: u64) -> String {
        match self {
            Self::Crc64Nvme => BASE64_STANDARD.encode(checksum.to_be_bytes()),
            Self::Crc32C | Self::Crc32 => BASE64_STANDARD.encode(&checksum.to_be_bytes()[4..]),
        }
    }
}

/// Parses the checksum of a whole object in the headers of a response. S3 sends it only on request
/// (`x-amz-checksum-mode`); other stores always do.
pub(super) fn of_object<'a>(header: impl Fn(&str) -> Option<&'a str>) -> Option<ObjectChecksum> {
    // The checksum of a multipart upload may be one of the checksums of its parts; that of a range may be one of a part
    // (user guide, "Checking object integrity").
    if header("x-amz-checksum-type")? != "FULL_OBJECT" || header("content-range").is_some() {
        return None;
    }
    fn bytes<const N: usize>(value: Option<&str>) -> Option<[u8; N]> {
        BASE64_STANDARD.decode(value?).ok()?.try_into().ok()
    }
    let u32_of = |name| bytes(header(name)).map(u32::from_be_bytes);
    let crc64 = bytes(header(Algorithm::Crc64Nvme.header())).map(u64::from_be_bytes);
    crc64
        .map(ObjectChecksum::Crc64Nvme)
        .or_else(|| u32_of(Algorithm::Crc32C.header()).map(ObjectChecksum::Crc32C))
        .or_else(|| u32_of(Algorithm::Crc32.header()).map(ObjectChecksum::Crc32))
        .or_else(|| bytes(header("x-amz-checksum-sha256")).map(ObjectChecksum::Sha256))
}

/// MD5, which the headers of SSE-C contain.
pub(super) fn md5(bytes: &[u8]) -> [u8; 16] {
    use md5::Digest;
    Md5::digest(bytes).into()
}

/// The MD5 that is the ETag of an object that was written in one request; `None` for other ETags.
pub(super) fn md5_of_etag(etag: &str) -> Option<[u8; 16]> {
    let digits = etag.strip_prefix('"')?.strip_suffix('"')?;
    if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(digits, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use torchobj_core::types::Version;

    use super::*;

    #[test]
    fn checksums_equal_the_check_values_of_the_crc_catalogue() {
        // "123456789": Catalogue of parametrised CRC algorithms, CRC-64/NVME and CRC-32/ISCSI.
        let payload = Payload::new(vec![Bytes::from_static(b"1234"), Bytes::from_static(b"56789")]);
        assert_eq!(Algorithm::Crc64Nvme.of(&payload), 0xae8b_1486_0a79_9888);
        assert_eq!(Algorithm::Crc32C.of(&payload), 0xe306_9283);
        assert_eq!(Algorithm::Crc32C.encode(0xe306_9283), "4waSgw==");
    }

    #[test]
    fn only_a_checksum_of_a_whole_object_is_used() {
        const WHOLE: (&str, &str) = ("x-amz-checksum-type", "FULL_OBJECT");
        const CRC32C: (&str, &str) = ("x-amz-checksum-crc32c", "4waSgw==");
        let of = |headers: &[(&str, &'static str)]| {
            of_object(|name| headers.iter().find(|(known, _)| *known == name).map(|(_, value)| *value))
        };
        assert_eq!(of(&[WHOLE, CRC32C]), Some(ObjectChecksum::Crc32C(0xe306_9283)));
        assert_eq!(of(&[WHOLE, ("x-amz-checksum-crc32", "4waSgw==")]), Some(ObjectChecksum::Crc32(0xe306_9283)));
        let crc64 = ("x-amz-checksum-crc64nvme", "rosUhgp5mIg=");
        assert_eq!(of(&[WHOLE, crc64, CRC32C]), Some(ObjectChecksum::Crc64Nvme(0xae8b_1486_0a79_9888)));
        let sha256 = ("x-amz-checksum-sha256", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=");
        assert_eq!(of(&[WHOLE, sha256]), Some(ObjectChecksum::Sha256([0; 32])));
        for headers in [
            &[CRC32C][..],
            &[("x-amz-checksum-type", "COMPOSITE"), CRC32C],
            &[WHOLE, CRC32C, ("content-range", "bytes 0-4/9")],
            &[WHOLE, ("x-amz-checksum-crc32c", "4waSgw==-3")],
            &[WHOLE, ("x-amz-checksum-crc32c", "rosUhgp5mIg=")],
            &[WHOLE, ("x-amz-checksum-sha1", "4waSgw==")],
            &[WHOLE],
        ] {
            assert_eq!(of(headers), None, "{headers:?}");
        }
    }

    #[test]
    fn only_an_etag_of_32_hexadecimal_digits_is_an_md5() {
        let md5 = md5_of_etag("\"00000000000000000000000000000aff\"").unwrap();
        assert_eq!(md5[13..], [0, 0x0a, 0xff]);
        for etag in ["00000000000000000000000000000aff", "\"0aff-3\"", "W/\"00000000000000000000000000000aff\"", "\"\""]
        {
            assert_eq!(md5_of_etag(etag), None, "{etag}");
        }
    }

    #[test]
    fn combined_checksums_of_parts_equal_that_of_the_whole() {
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
