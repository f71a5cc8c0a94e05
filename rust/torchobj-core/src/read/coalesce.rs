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
