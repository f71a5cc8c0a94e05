//! Sizes of the parts of an upload. Does no I/O.

use std::ops::Range;

use crate::types::Capabilities;

/// Maximum number of times that the part size doubles: larger parts would not fit into memory.
const MAX_DOUBLINGS: u64 = 10;

/// Sizes of the parts of uploads to a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartSizes {
    /// Size of the first parts, in bytes.
    pub(crate) first_bytes: u64,
    /// Maximum number of parts of an upload to the store.
    pub(crate) max_parts: u32,
    max_bytes: u64,
}

impl PartSizes {
    /// Parts of `part_bytes`, within the limits of the store.
    pub(crate) fn new(part_bytes: u64, store: &Capabilities) -> Self {
        let first_bytes = part_bytes.max(store.min_part_bytes).min(store.max_put_bytes);
        Self { first_bytes, max_parts: store.max_parts, max_bytes: store.max_put_bytes }
    }

    /// Returns the size in bytes of part `number` (from 1) of an upload of unknown size. It doubles after each 9 % of
    /// `max_parts`.
    ///
    /// With first parts of 8 MiB, the 10 000 parts of S3 hold 11 TiB, and all parts of a 7 GiB object have the same size.
    pub(crate) fn growing(&self, number: u32) -> u64 {
        let parts_per_size = (u64::from(self.max_parts) * 9 / 100).max(1);
        let doublings = u64::from(number.saturating_sub(1)) / parts_per_size;
        self.first_bytes.saturating_mul(1 << doublings.min(MAX_DOUBLINGS)).min(self.max_bytes)
    }

    /// Returns the parts of an object of `size` bytes, in order. All but the last have the same size, which is larger than
    /// `first_bytes` if there would be too many parts otherwise.
    pub(crate) fn even(&self, size: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        const MIB: u64 = 1 << 20;
        let min_bytes = size.div_ceil(u64::from(self.max_parts)).next_multiple_of(MIB);
        crate::read::parts(0..size, self.first_bytes.max(min_bytes).min(self.max_bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIB: u64 = 1 << 40;
    const S3_PARTS: u32 = 10_000;

    fn sizes(first_bytes: u64) -> PartSizes {
        PartSizes { first_bytes, max_parts: S3_PARTS, max_bytes: 5 << 30 }
    }

    #[test]
    fn ten_thousand_growing_parts_hold_five_tebibytes() {
        for part_bytes in [5 << 20, 8 << 20, 64 << 20] {
            let total: u64 = (1..=S3_PARTS).map(|number| sizes(part_bytes).growing(number)).sum();
            assert!(total >= 5 * TIB, "{part_bytes}: {total}");
        }
    }

    #[test]
    fn the_first_parts_have_the_same_size() {
        assert!((1..=900).all(|number| sizes(8 << 20).growing(number) == 8 << 20));
        assert_eq!(sizes(8 << 20).growing(901), 16 << 20);
    }

    #[test]
    fn three_parts_at_most_double_each_time() {
        let few = PartSizes { first_bytes: 1000, max_parts: 3, max_bytes: 3000 };
        assert_eq!([1, 2, 3].map(|number| few.growing(number)), [1000, 2000, 3000]);
    }

    proptest! {
        #[test]
        fn even_parts_cover_the_object_and_are_never_too_many(size in 1..6 * TIB) {
            let (mut count, mut at) = (0, 0);
            for part in sizes(8 << 20).even(size) {
                prop_assert_eq!(part.start, at);
                at = part.end;
                count += 1;
            }
            prop_assert_eq!(at, size);
            prop_assert!(count <= S3_PARTS);
        }
    }
}
