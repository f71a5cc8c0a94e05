//! Assigns ranges of objects to the buffer of a wave, or to memory of the reads. Does no I/O.

use std::collections::HashMap;
use std::ops::Range;

use super::{ArrayRead, DESCRIPTOR_BYTES, Frame, Step, length};
use crate::buffer::Dest;
use crate::read::tile::Tile;

/// Alignment of reads in the buffer, enough for any element.
pub(super) const ALIGNMENT: u64 = 16;

/// A step of a wave. Ranges are in its buffer.
pub(super) struct Planned {
    /// Index among the reads of the wave.
    pub(super) read: usize,
    pub(super) head: Range<u64>,
    pub(super) descriptor: Range<u64>,
    pub(super) body: Body,
}

pub(super) enum Body {
    /// The first range of the object that has bytes of the step.
    Direct(usize),
    Buffered(Range<u64>, Option<Tile>),
}

/// Ranges of a wave, in the order of their ranges in the buffer.
#[derive(Default)]
pub(super) struct Layout {
    pub(super) buffer_bytes: u64,
    /// Object, offset and target of each.
    pub(super) ranges: Vec<(usize, u64, Target)>,
    /// Number of ranges of each object.
    counts: HashMap<usize, usize>,
}

pub(super) enum Target {
    Buffer(Range<u64>),
    Memory(Dest),
}

impl Layout {
    fn add(&mut self, object: usize, offset: u64, target: Target) -> usize {
        let count = self.counts.entry(object).or_default();
        self.ranges.push((object, offset, target));
        *count += 1;
        *count - 1
    }

    /// Reserves a range of the buffer of which byte `aligned` is aligned, for bytes of an object.
    fn reserve(&mut self, object: usize, source: Range<u64>, aligned: u64) -> Range<u64> {
        let start = (self.buffer_bytes + aligned).next_multiple_of(ALIGNMENT) - aligned;
        let range = start..start + (source.end - source.start);
        self.buffer_bytes = range.end;
        self.add(object, source.start, Target::Buffer(range.clone()));
        range
    }

    /// Plans a step of a read, which is number `index` of the wave.
    pub(super) fn plan(&mut self, index: usize, read: &mut ArrayRead, step: Step) -> Planned {
        let (object, array) = (read.object, read.array.clone());
        let (mut head, mut descriptor) = (0..0, 0..0);
        let head_bytes = match &read.frame {
            Frame::Described(before) if !read.has_frame => before.len() as u64,
            _ => 0,
        };
        let descriptor_bytes = if head_bytes > 0 && read.is_whole { DESCRIPTOR_BYTES } else { 0 };
        read.has_frame = true;
        let source = array.start - head_bytes..array.end.saturating_add(descriptor_bytes);
        if let Step::Array = step {
            let range = self.reserve(object, source, head_bytes);
            let body = range.start + head_bytes..range.end - descriptor_bytes;
            (head, descriptor) = (range.start..body.start, body.end..range.end);
            return Planned { read: index, head, descriptor, body: Body::Buffered(body, None) };
        }
        if head_bytes > 0 {
            head = self.reserve(object, source.start..array.start, 0);
            descriptor = self.reserve(object, array.end..source.end, 0);
        }
        let body = match step {
            Step::Direct(mut dest, runs) => {
                let first = self.counts.get(&object).copied().unwrap_or(0);
                for start in &runs.starts {
                    let run = dest.split_to(length(runs.bytes));
                    self.add(object, array.start.saturating_add(*start), Target::Memory(run));
                }
                Body::Direct(first)
            }
            Step::Tile(tile, runs) => {
                let start = self.buffer_bytes.next_multiple_of(ALIGNMENT);
                self.buffer_bytes = start;
                for run in &runs.starts {
                    let at = self.buffer_bytes;
                    self.buffer_bytes += runs.bytes;
                    self.add(object, array.start.saturating_add(*run), Target::Buffer(at..self.buffer_bytes));
                }
                Body::Buffered(start..self.buffer_bytes, Some(tile))
            }
            Step::Array => unreachable!("handled above"),
        };
        Planned { read: index, head, descriptor, body }
    }
}
