//! How large the parts of an upload are. Does no I/O.

use std::ops::Range;

/// S3 takes at most so many parts (user guide, "Amazon S3 multipart upload limits").
pub(super) const MOST_PARTS: u64 = 10_000;

/// The largest part S3 takes (same page).
const LARGEST_PART_BYTES: u64 = 5 << 30;

/// After so many parts of one size the size doubles.
const PARTS_PER_SIZE: u64 = 900;

/// Size of part `number` (from 1) of an upload whose end is not known, in bytes.
///
/// From 8 MiB on, ten thousand parts hold 11 TiB, and an object of 7 GiB is written in parts of one size.
pub(super) fn growing_part_bytes(part_bytes: u64, number: u32) -> u64 {
    let doublings = u64::from(number.saturating_sub(1)) / PARTS_PER_SIZE;
    part_bytes.saturating_mul(1 << doublings.min(10)).min(LARGEST_PART_BYTES)
}

/// The parts of an object of `size` bytes, in order: `part_bytes` each, or as much as ten thousand parts ask for.
pub(super) fn even_parts(size: u64, part_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    const MIB: u64 = 1 << 20;
    let least = size.div_ceil(MOST_PARTS).next_multiple_of(MIB);
    crate::read::parts(0..size, part_bytes.max(least))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIB: u64 = 1 << 40;

    #[test]
    fn ten_thousand_growing_parts_hold_five_tebibytes() {
        for part_bytes in [5 << 20, 8 << 20, 64 << 20] {
            let total: u64 = (1..=10_000).map(|number| growing_part_bytes(part_bytes, number)).sum();
            assert!(total >= 5 * TIB, "{part_bytes}: {total}");
        }
    }

    #[test]
    fn the_first_parts_have_one_size() {
        assert!((1..=900).all(|number| growing_part_bytes(8 << 20, number) == 8 << 20));
        assert_eq!(growing_part_bytes(8 << 20, 901), 16 << 20);
    }

    proptest! {
        #[test]
        fn even_parts_cover_the_object_and_are_never_too_many(size in 1..6 * TIB) {
            let (mut count, mut at) = (0_u64, 0);
            for part in even_parts(size, 8 << 20) {
                prop_assert_eq!(part.start, at);
                at = part.end;
                count += 1;
            }
            prop_assert_eq!(at, size);
            prop_assert!(count <= MOST_PARTS);
        }
    }
}
