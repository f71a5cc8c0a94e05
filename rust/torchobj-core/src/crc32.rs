//! CRC-32 as zip files and S3 have it (IEEE 802.3), of bytes that come piece by piece.

use crc_fast::{CrcAlgorithm, Digest, checksum, checksum_combine};

/// From here on a piece is looked at once, and joined: joining costs about as much as looking at 10 KiB.
const JOINED_BYTES: usize = 16 << 10;

/// The checksum of some bytes, and how many there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crc32 {
    value: u32,
    len: u64,
}

impl Crc32 {
    /// Of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self { value: low(checksum(CrcAlgorithm::Crc32IsoHdlc, bytes)), len: bytes.len() as u64 }
    }

    /// The checksum itself.
    pub fn value(self) -> u32 {
        self.value
    }

    /// Of these bytes and, behind them, those of `next`.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        let (value, next_value) = (u64::from(self.value), u64::from(next.value));
        let value = match (self.len, next.len) {
            (0, _) => next_value,
            (_, 0) => value,
            (_, len) => checksum_combine(CrcAlgorithm::Crc32IsoHdlc, value, next_value, len),
        };
        Self { value: low(value), len: self.len + next.len }
    }

    /// Of these bytes and `bytes` behind them.
    fn and(self, bytes: &[u8]) -> Self {
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32IsoHdlc, u64::from(!self.value));
        digest.update(bytes);
        Self { value: low(digest.finalize()), len: self.len + bytes.len() as u64 }
    }

    /// Adds `bytes` to all of `sums`, looking at them once where they are many.
    pub(crate) fn add<const N: usize>(bytes: &[u8], sums: [&mut Self; N]) {
        if bytes.len() < JOINED_BYTES {
            sums.into_iter().for_each(|sum| *sum = sum.and(bytes));
        } else {
            let own = Self::of(bytes);
            sums.into_iter().for_each(|sum| *sum = sum.then(own));
        }
    }
}

fn low(checksum: u64) -> u32 {
    u32::try_from(checksum).expect("a CRC-32 has 32 bits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_check_value_is_that_of_the_catalogue() {
        // Catalogue of parametrised CRC algorithms, CRC-32/ISO-HDLC.
        assert_eq!(Crc32::of(b"123456789").value(), 0xcbf4_3926);
        assert_eq!(Crc32::default(), Crc32::of(b""));
    }

    proptest! {
        #[test]
        fn pieces_joined_or_added_are_the_whole(cuts in proptest::collection::vec(0_usize..40_000, 0..6)) {
            let whole: Vec<u8> = (0..cuts.iter().sum::<usize>()).map(|at| (at * 7 + at / 251) as u8).collect();
            let (mut at, mut added, mut joined) = (0, Crc32::default(), Crc32::default());
            for length in cuts {
                let piece = &whole[at..at + length];
                Crc32::add(piece, [&mut added]);
                joined = joined.then(Crc32::of(piece));
                at += length;
            }
            prop_assert_eq!(added, Crc32::of(&whole));
            prop_assert_eq!(joined, added);
        }
    }
}
