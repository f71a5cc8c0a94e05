//! Merges the ranges of an object into parts, one request each. Does no I/O.

use std::ops::Range;

/// Smaller gaps between two ranges are read and discarded: another request costs more.
const SMALL_GAP_BYTES: u64 = 4 << 10;

/// Larger gaps are never read: 1 MiB is about what a connection receives in 20 ms, the time to a first byte.
const MAX_GAP_BYTES: u64 = 1 << 20;

/// Larger gaps are read while they are at most this fraction of the bytes of the ranges.
const MIN_RANGE_TO_GAP_RATIO: u64 = 8;

/// A part of one range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fragment {
    /// Index of the range, in the order given.
    pub(super) index: usize,
    /// Range of the object; never empty.
    pub(super) range: Range<u64>,
}

/// The range of one request: fragments in the order of their bytes, and the gaps between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CoalescedPart {
    /// Never empty, and without overlaps.
    pub(super) fragments: Vec<Fragment>,
}

impl CoalescedPart {
    /// The range from the first fragment to the last.
    pub(super) fn range(&self) -> Range<u64> {
        let first = self.fragments.first().expect("a part has a fragment");
        let last = self.fragments.last().expect("a part has a fragment");
        first.range.start..last.range.end
    }
}

/// The parts that read `ranges`, which may overlap and have any order. No part exceeds `part_bytes`; the fragments of
/// one range are in the order of its bytes.
pub(super) fn parts(ranges: &[Range<u64>], part_bytes: u64) -> Vec<CoalescedPart> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|index| !ranges[*index].is_empty()).collect();
    order.sort_by_key(|index| ranges[*index].start);
    let (mut parts, mut group) = (Vec::<CoalescedPart>::new(), None::<RangeGroup>);
    for index in order {
        let mut rest = ranges[index].clone();
        let joined = group.as_mut().is_some_and(|group| group.join(&rest));
        if !joined {
            group = Some(RangeGroup::new(&rest, u64::MAX));
        }
        let mut open = joined;
        while !rest.is_empty() {
            let part = parts.last_mut().filter(|_| open);
            // Bytes that the part can still take after the gap.
            let remaining = part
                .as_ref()
                .map_or(0, |part| part.range().start.saturating_add(part_bytes).saturating_sub(rest.start));
            let fragment = |range| Fragment { index, range };
            match part {
                Some(part) if remaining > 0 => {
                    let cut = rest.end.min(rest.start.saturating_add(remaining));
                    part.fragments.push(fragment(rest.start..cut));
                    rest.start = cut;
                }
                _ => {
                    let cut = rest.end.min(rest.start.saturating_add(part_bytes));
                    parts.push(CoalescedPart { fragments: vec![fragment(rest.start..cut)] });
                    rest.start = cut;
                }
            }
            open = true;
        }
    }
    parts
}

/// Ranges whose gaps are read.
#[derive(Debug)]
pub(crate) struct RangeGroup {
    /// From the first range to the last.
    span: Range<u64>,
    range_bytes: u64,
    /// Total of the gaps above `SMALL_GAP_BYTES`.
    gap_bytes: u64,
    max_bytes: u64,
}

impl RangeGroup {
    /// A group of one range. From its first range to the last there are at most `max_bytes`, if this one is not larger.
    pub(crate) fn new(range: &Range<u64>, max_bytes: u64) -> Self {
        Self { span: range.clone(), range_bytes: range.end - range.start, gap_bytes: 0, max_bytes }
    }

    /// Returns whether a range overlaps the span of the group.
    pub(crate) fn overlaps(&self, range: &Range<u64>) -> bool {
        range.start < self.span.end && self.span.start < range.end
    }

    /// The group with another range, before or after the others; `None` if its gap or the group is too large, or it
    /// overlaps them.
    pub(crate) fn joined(&self, range: &Range<u64>) -> Option<Self> {
        let before = self.span.start.checked_sub(range.end);
        let gap = range.start.checked_sub(self.span.end).or(before)?;
        let gap_bytes = self.gap_bytes + if gap <= SMALL_GAP_BYTES { 0 } else { gap };
        let range_bytes = self.range_bytes + (range.end - range.start);
        let span = self.span.start.min(range.start)..self.span.end.max(range.end);
        let is_small = gap <= MAX_GAP_BYTES && gap_bytes * MIN_RANGE_TO_GAP_RATIO <= range_bytes;
        let max_bytes = self.max_bytes;
        (is_small && span.end - span.start <= max_bytes).then_some(Self { span, range_bytes, gap_bytes, max_bytes })
    }

    /// Adds a range. Returns false if it is not [`joined`](Self::joined).
    pub(crate) fn join(&mut self, range: &Range<u64>) -> bool {
        self.joined(range).map(|joined| *self = joined).is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    /// Ranges of all sizes, near and far, empty and overlapping, in any order.
    fn layouts() -> impl Strategy<Value = Vec<Range<u64>>> {
        let size = prop_oneof![Just(0), 1..9_u64, 1..20 * KIB, 1..3 * MIB];
        let step = prop_oneof![Just(-3_i64), Just(0), 0..9_i64, 0..6_000_i64, 0..3_000_000_i64];
        let apart = vec((step, size), 0..40).prop_map(|steps| {
            let mut at = 0_u64;
            let place = |(step, size): (i64, u64)| {
                let start = at.saturating_add_signed(step);
                at = start + size;
                start..at
            };
            steps.into_iter().map(place).collect::<Vec<_>>()
        });
        apart.prop_shuffle()
    }

    proptest! {
        #[test]
        fn each_byte_of_a_range_is_read_exactly_once(ranges in layouts(), part_bytes in 1000..8 * MIB) {
            let parts = parts(&ranges, part_bytes);
            let mut reached: Vec<u64> = ranges.iter().map(|range| range.start).collect();
            for Fragment { index, range } in parts.iter().flat_map(|part| &part.fragments) {
                prop_assert!(!range.is_empty());
                prop_assert_eq!(range.start, reached[*index]);
                reached[*index] = range.end;
            }
            prop_assert!(ranges.iter().zip(reached).all(|(range, reached)| range.end == reached));
        }

        #[test]
        fn a_part_is_in_order_and_bounded_and_its_gaps_are_small(ranges in layouts(), part_bytes in 1000..8 * MIB) {
            for part in parts(&ranges, part_bytes) {
                prop_assert!(part.range().end - part.range().start <= part_bytes);
                for [one, next] in part.fragments.array_windows() {
                    prop_assert!(one.range.end <= next.range.start);
                    prop_assert!(next.range.start - one.range.end <= MAX_GAP_BYTES);
                }
            }
        }

        #[test]
        fn gaps_are_limited_to_an_eighth_of_the_ranges_and_4_kib_each(ranges in layouts()) {
            let read: u64 = parts(&ranges, 8 * MIB).iter().map(|part| part.range().end - part.range().start).sum();
            let range_bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            prop_assert!(read <= range_bytes + range_bytes / 8 + 4 * KIB * ranges.len() as u64);
        }
    }

    /// Number of requests.
    fn requests(ranges: &[Range<u64>]) -> usize {
        parts(ranges, 8 * MIB).len()
    }

    #[test]
    fn adjacent_ranges_are_one_request() {
        let ranges: Vec<_> = (0..1000).rev().map(|at| at * 1000..(at + 1) * 1000).collect();
        assert_eq!(requests(&ranges), 1);
    }

    #[test]
    fn a_small_gap_is_always_read() {
        assert_eq!(requests(&[0..1, 4 * KIB + 1..4 * KIB + 2]), 1);
        assert_eq!(requests(&[0..1, 4 * KIB + 2..4 * KIB + 3]), 2);
    }

    #[test]
    fn a_gap_of_64_kib_is_read_only_between_large_ranges() {
        assert_eq!(requests(&[0..MIB, MIB + 64 * KIB..2 * MIB]), 1);
        assert_eq!(requests(&[0..64 * KIB, 128 * KIB..192 * KIB]), 2);
    }

    #[test]
    fn no_gap_above_1_mib_is_read() {
        let range = |start| start..start + 3 * MIB;
        assert_eq!(parts(&[range(0), range(3 * MIB), range(6 * MIB), range(10 * MIB)], 100 * MIB).len(), 1);
        assert_eq!(parts(&[range(0), range(3 * MIB), range(6 * MIB), range(10 * MIB + 1)], 100 * MIB).len(), 2);
    }

    #[test]
    fn a_range_larger_than_a_part_is_divided() {
        assert_eq!(requests(&[5..20 * MIB + 5, 0..5]), 3);
    }

    #[test]
    fn a_range_at_the_end_of_the_number_space_ends() {
        let range = u64::MAX - 100..u64::MAX - 50;
        let parts = parts(&[range.clone(), range.start + 60..u64::MAX], 8 * MIB);
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].range(), range.start..u64::MAX);
    }
}
