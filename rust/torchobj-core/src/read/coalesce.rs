//! Joins the segments that are wanted of an object into parts, each of them one request. Does no I/O.

use std::ops::Range;

/// A gap of so many bytes between two segments is read with them: a request costs more.
const SMALL_GAP_BYTES: u64 = 4 << 10;

/// No larger gap is ever read: within the wait for a first byte, 20 ms, a connection brings about so much.
const LARGEST_GAP_BYTES: u64 = 1 << 20;

/// Gaps that are not small are read while they are at most this fraction of the bytes that are wanted.
const WANTED_TO_GAPS: u64 = 8;

/// Some bytes of one segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Which of the segments, in the order they were given.
    pub(super) segment: usize,
    /// Which bytes of the object; never empty.
    pub(super) range: Range<u64>,
}

/// What one request reads: pieces in the order of their bytes, and the gaps between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Never empty; they do not overlap.
    pub(super) pieces: Vec<Piece>,
}

impl Part {
    /// The bytes from the first piece to the last.
    pub(super) fn range(&self) -> Range<u64> {
        let first = self.pieces.first().expect("a part has a piece");
        let last = self.pieces.last().expect("a part has a piece");
        first.range.start..last.range.end
    }
}

/// The parts that read `segments`, which may come in any order and cover the same bytes. None is larger than
/// `part_bytes`; those of one segment come in the order of its bytes.
pub(super) fn parts(segments: &[Range<u64>], part_bytes: u64) -> Vec<Part> {
    let mut order: Vec<usize> = (0..segments.len()).filter(|index| !segments[*index].is_empty()).collect();
    order.sort_by_key(|index| segments[*index].start);
    let (mut parts, mut group) = (Vec::<Part>::new(), Group::default());
    for segment in order {
        let mut rest = segments[segment].clone();
        let joined = group.join(&rest);
        if !joined {
            group = Group { end: rest.end, wanted_bytes: rest.end - rest.start, gap_bytes: 0 };
        }
        let mut open = joined;
        while !rest.is_empty() {
            let part = parts.last_mut().filter(|_| open);
            // What of the part is left behind the gap.
            let room = part.as_ref().map_or(0, |part| (part.range().start + part_bytes).saturating_sub(rest.start));
            let piece = |range| Piece { segment, range };
            match part {
                Some(part) if room > 0 => {
                    let cut = rest.end.min(rest.start + room);
                    part.pieces.push(piece(rest.start..cut));
                    rest.start = cut;
                }
                _ => {
                    let cut = rest.end.min(rest.start + part_bytes);
                    parts.push(Part { pieces: vec![piece(rest.start..cut)] });
                    rest.start = cut;
                }
            }
            open = true;
        }
    }
    parts
}

/// Segments whose gaps are read.
#[derive(Debug, Default)]
struct Group {
    end: u64,
    wanted_bytes: u64,
    /// Of the gaps that are not small.
    gap_bytes: u64,
}

impl Group {
    /// Adds a segment that begins no earlier than those before it; or says that it is too far away, or overlaps them.
    fn join(&mut self, segment: &Range<u64>) -> bool {
        let length = segment.end - segment.start;
        let Some(gap) = segment.start.checked_sub(self.end).filter(|_| self.wanted_bytes > 0) else { return false };
        let gap_bytes = self.gap_bytes + if gap <= SMALL_GAP_BYTES { 0 } else { gap };
        let wanted_bytes = self.wanted_bytes + length;
        if gap > LARGEST_GAP_BYTES || gap_bytes * WANTED_TO_GAPS > wanted_bytes {
            return false;
        }
        *self = Self { end: segment.end, wanted_bytes, gap_bytes };
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    /// Segments of all sizes, near and far, some of them empty, some over others; in any order.
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
        fn each_wanted_byte_is_read_exactly_once_for_its_segment(segments in layouts(), part_bytes in 1000..8 * MIB) {
            let parts = parts(&segments, part_bytes);
            let mut reached: Vec<u64> = segments.iter().map(|segment| segment.start).collect();
            for Piece { segment, range } in parts.iter().flat_map(|part| &part.pieces) {
                prop_assert!(!range.is_empty());
                prop_assert_eq!(range.start, reached[*segment]);
                reached[*segment] = range.end;
            }
            prop_assert!(segments.iter().zip(reached).all(|(segment, reached)| segment.end == reached));
        }

        #[test]
        fn a_part_is_in_order_and_bounded_and_its_gaps_are_small(segments in layouts(), part_bytes in 1000..8 * MIB) {
            for part in parts(&segments, part_bytes) {
                prop_assert!(part.range().end - part.range().start <= part_bytes);
                for [one, next] in part.pieces.array_windows() {
                    prop_assert!(one.range.end <= next.range.start);
                    prop_assert!(next.range.start - one.range.end <= LARGEST_GAP_BYTES);
                }
            }
        }

        #[test]
        fn the_gaps_are_an_eighth_of_what_is_wanted_and_4_kib_a_segment(segments in layouts()) {
            let read: u64 = parts(&segments, 8 * MIB).iter().map(|part| part.range().end - part.range().start).sum();
            let wanted: u64 = segments.iter().map(|segment| segment.end - segment.start).sum();
            prop_assert!(read <= wanted + wanted / 8 + 4 * KIB * segments.len() as u64);
        }
    }

    /// How many requests it takes.
    fn requests(segments: &[Range<u64>]) -> usize {
        parts(segments, 8 * MIB).len()
    }

    #[test]
    fn segments_side_by_side_are_one_request() {
        let segments: Vec<_> = (0..1000).rev().map(|at| at * 1000..(at + 1) * 1000).collect();
        assert_eq!(requests(&segments), 1);
    }

    #[test]
    fn a_small_gap_is_always_read() {
        assert_eq!(requests(&[0..1, 4 * KIB + 1..4 * KIB + 2]), 1);
        assert_eq!(requests(&[0..1, 4 * KIB + 2..4 * KIB + 3]), 2);
    }

    #[test]
    fn a_gap_of_64_kib_is_read_between_large_segments_alone() {
        assert_eq!(requests(&[0..MIB, MIB + 64 * KIB..2 * MIB]), 1);
        assert_eq!(requests(&[0..64 * KIB, 128 * KIB..192 * KIB]), 2);
    }

    #[test]
    fn no_gap_above_1_mib_is_read() {
        let segment = |start| start..start + 3 * MIB;
        assert_eq!(parts(&[segment(0), segment(3 * MIB), segment(6 * MIB), segment(10 * MIB)], 100 * MIB).len(), 1);
        assert_eq!(parts(&[segment(0), segment(3 * MIB), segment(6 * MIB), segment(10 * MIB + 1)], 100 * MIB).len(), 2);
    }

    #[test]
    fn a_segment_above_a_part_is_cut() {
        assert_eq!(requests(&[5..20 * MIB + 5, 0..5]), 3);
    }
}
