//! CRC-32 of IEEE 802.3, as in zip files and S3, computed piece by piece.

use crc_fast::{CrcAlgorithm, Digest, checksum};

/// From this length on, the CRC of a piece is computed once and combined with each sum. Combining takes about as long as the
/// CRC of 10 KiB.
const COMBINE_BYTES: usize = 16 << 10;

/// The checksum of some bytes, and their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crc32 {
    value: u32,
    len: u64,
}

impl Crc32 {
    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self { value: low(checksum(CrcAlgorithm::Crc32IsoHdlc, bytes)), len: bytes.len() as u64 }
    }

    /// A known checksum of `len` bytes.
    pub fn known(value: u32, len: u64) -> Self {
        Self { value, len }
    }

    /// The value of the checksum.
    pub fn value(self) -> u32 {
        self.value
    }

    /// The checksum of the concatenation of these bytes and those of `next`.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        // As a polynomial, this checksum is multiplied by x^(bits of `next`).
        let powers = (0..u64::BITS).filter(|power| next.len >> power & 1 == 1);
        let shifted = powers.fold(self.value, |value, power| multiply(ZERO_BYTES[power as usize], value));
        Self { value: shifted ^ next.value, len: self.len + next.len }
    }

    /// The checksum of the concatenation of these bytes and `bytes`.
    fn and(self, bytes: &[u8]) -> Self {
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32IsoHdlc, u64::from(!self.value));
        digest.update(bytes);
        Self { value: low(digest.finalize()), len: self.len + bytes.len() as u64 }
    }

    /// Appends `bytes` to all of `sums`.
    pub(crate) fn add<const N: usize>(bytes: &[u8], sums: [&mut Self; N]) {
        if bytes.len() < COMBINE_BYTES {
            sums.into_iter().for_each(|sum| *sum = sum.and(bytes));
        } else {
            let own = Self::of(bytes);
            sums.into_iter().for_each(|sum| *sum = sum.then(own));
        }
    }
}

/// The polynomial of IEEE 802.3 without its highest term. In all numbers of this module the highest bit is the lowest power.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// Appending 2^n zero bytes to a message multiplies its checksum by entry n: x^(8 · 2^n).
const ZERO_BYTES: [u32; 64] = {
    let mut powers = [0x0080_0000; 64];
    let mut n = 1;
    while n < powers.len() {
        powers[n] = multiply(powers[n - 1], powers[n - 1]);
        n += 1;
    }
    powers
};

/// The product of two polynomials modulo [`POLYNOMIAL`]. (`crc_fast::checksum_combine` computes a matrix for each power
/// instead, which is much slower.)
const fn multiply(one: u32, mut other: u32) -> u32 {
    let (mut product, mut bit) = (0, 1 << 31);
    while bit != 0 {
        if one & bit != 0 {
            product ^= other;
        }
        other = (other >> 1) ^ if other & 1 == 1 { POLYNOMIAL } else { 0 };
        bit >>= 1;
    }
    product
}

fn low(checksum: u64) -> u32 {
    u32::try_from(checksum).expect("a CRC-32 has 32 bits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_checksum_of_the_check_string_is_that_of_the_catalogue() {
        // Catalogue of parametrised CRC algorithms, CRC-32/ISO-HDLC.
        assert_eq!(Crc32::of(b"123456789").value(), 0xcbf4_3926);
        assert_eq!(Crc32::default(), Crc32::of(b""));
    }

    proptest! {
        #[test]
        fn the_checksums_of_added_and_combined_pieces_are_that_of_the_whole(cuts in proptest::collection::vec(0_usize..40_000, 0..6)) {
            let whole: Vec<u8> = (0..cuts.iter().sum::<usize>()).map(|at| (at * 7 + at / 251) as u8).collect();
            let (mut at, mut added, mut combined) = (0, Crc32::default(), Crc32::default());
            for length in cuts {
                let piece = &whole[at..at + length];
                Crc32::add(piece, [&mut added]);
                combined = combined.then(Crc32::of(piece));
                at += length;
            }
            prop_assert_eq!(added, Crc32::of(&whole));
            prop_assert_eq!(combined, added);
        }
    }
}
