//! Reads arrays, and slices of them, that lie one behind the other in objects, as in a distributed checkpoint. `tile`
//! divides a slice and `scatter` reads the ranges; the caller copies the buffered reads to their targets.
//!
//! A [`SlicePlan`] executes its reads in waves, in the order in which they were added. A slice with long runs is
//! received in the memory of its read. Everything else is received in one buffer for each wave: whole arrays, and
//! slices tile by tile. A wave ends once its buffer exceeds a limit, by at most one array or tile.
//!
//! An array may have a frame: known bytes precede it in its object, and a descriptor with its CRC-32 follows it. A read
//! that finds another frame ends with [`Outcome::OtherFrame`]; the contents of its memory are unspecified then.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::scatter::{ScatterRange, ScatterRead, open, scatter};
use super::tile::{Runs, Slice, Tile};
use crate::buffer::{Buffer, Dest, Memory, PendingBuffer, ReceivedBytes};
use crate::client::Client;
use crate::crc32::Crc32;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::types::Version;

/// Shorter runs of a slice are read with the bytes between them.
const MIN_RUN_BYTES: u64 = 4 << 10;

/// The range of a larger whole array is compared with the size of the object before memory is allocated.
const UNCHECKED_BYTES: u64 = 1 << 20;

/// Start of the descriptor behind an array, before the CRC-32 (APPNOTE.TXT 4.3.9).
const DESCRIPTOR_MARK: &[u8] = b"PK\x07\x08";

/// Length of the mark and the CRC-32.
const DESCRIPTOR_BYTES: u64 = 8;

/// What is known of the bytes around an array.
#[derive(Clone, Debug)]
pub enum Frame {
    /// These bytes precede the array, and a descriptor follows it.
    Described(Bytes),
    /// Nothing that is read. The CRC-32 of the array, or 0 if it is unknown.
    None(u32),
}

/// An array, or a tile of a slice, in the buffer of a [`Wave`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferedRead {
    /// Number of the read.
    pub read: usize,
    /// Offset in the buffer.
    pub start: usize,
    /// `None` for a whole array.
    pub tile: Option<Tile>,
}

/// How a read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All bytes were read. The CRC-32 matches if the array was read whole and its CRC-32 is known.
    Complete,
    /// The array has another frame.
    OtherFrame,
    /// The CRC-32 differs.
    Damaged,
}

/// The result of one wave.
pub struct Wave {
    /// The bytes of the buffered reads.
    pub buffer: Buffer,
    /// Reads without memory of their own, in the order of the reads.
    pub buffered: Vec<BufferedRead>,
    /// The reads that ended, in their order.
    pub ended: Vec<(usize, Outcome)>,
}

/// Reads to execute, of objects whose keys start with one prefix.
pub struct SlicePlan {
    client: Arc<Client>,
    prefix: String,
    verify: bool,
    wave_bytes: u64,
    tile_bytes: u64,
    objects: Vec<PlannedObject>,
    numbers: HashMap<String, usize>,
    reads: VecDeque<ArrayRead>,
    added: usize,
    /// Bytes of the last frame: most arrays of a checkpoint have those of the array before them.
    last_frame: Bytes,
    /// First and end address of the memory of all reads: no two of them share any.
    reserved: BTreeMap<usize, usize>,
    received: ReceivedBytes,
}

struct PlannedObject {
    key: String,
    /// Version and size, from the first response. All waves read this version.
    known: Option<(Option<Version>, u64)>,
}

struct ArrayRead {
    number: usize,
    object: usize,
    frame: Frame,
    /// The array in its object.
    array: Range<u64>,
    is_whole: bool,
    steps: VecDeque<Step>,
    /// Whether the frame was read, or is part of the first step.
    has_frame: bool,
    /// CRC-32 of the bytes read so far, and of the whole array as its frame has it (0: unknown).
    sum: Crc32,
    expected_sum: u32,
    has_other_frame: bool,
}

/// What is received at once.
enum Step {
    /// The whole array, with its frame.
    Array,
    /// Runs of the slice, in memory of the read.
    Direct(Dest, Runs),
    /// Runs of the object, in the buffer.
    Tile(Tile, Runs),
}

impl SlicePlan {
    /// A plan without reads. The keys of its objects start with `prefix`.
    ///
    /// `verify`: compares the CRC-32 of arrays that are read whole. `wave_bytes`: size of a buffer that ends a wave.
    /// `tile_bytes`: maximum size of a tile.
    pub fn new(client: Arc<Client>, prefix: String, verify: bool, wave_bytes: u64, tile_bytes: u64) -> Self {
        let (objects, numbers, reads) = (Vec::new(), HashMap::new(), VecDeque::new());
        let (reserved, last_frame) = (BTreeMap::new(), Bytes::new());
        Self {
            client,
            prefix,
            verify,
            wave_bytes,
            tile_bytes,
            objects,
            numbers,
            reads,
            added: 0,
            last_frame,
            reserved,
            received: ReceivedBytes::default(),
        }
    }

    /// Counts the bytes of all waves that have arrived in their memory, for progress.
    pub fn received(&self) -> ReceivedBytes {
        self.received.clone()
    }

    /// The frame of an array that `before` precedes. Holds a copy of the bytes, which consecutive equal frames share.
    pub fn described(&mut self, before: &[u8]) -> Frame {
        if self.last_frame != before {
            self.last_frame = Bytes::copy_from_slice(before);
        }
        Frame::Described(self.last_frame.clone())
    }

    /// Adds a read of an array of `bytes` bytes, whole, to the buffer. Its frame, or without one the array, starts at
    /// `offset` of the object. Returns the number of the read.
    pub fn add_array(&mut self, name: &str, offset: u64, frame: Frame, bytes: u64) -> usize {
        self.add(name, offset, frame, bytes, true, [Step::Array].into())
    }

    /// Adds a read of a slice of an array: to `memory`, which has the size of the slice, or tile by tile. Memory of
    /// other reads is not used, nor memory for short runs. Returns the number of the read.
    pub fn add_slice(&mut self, name: &str, offset: u64, frame: Frame, slice: &Slice, memory: Option<Memory>) -> usize {
        let runs = slice.runs(MIN_RUN_BYTES);
        let memory = memory.filter(|memory| memory.len() as u64 == slice.bytes());
        let steps = match (memory, runs) {
            (Some(memory), Some(runs)) if self.reserve(&memory) => [Step::Direct(open(memory), runs)].into(),
            _ => slice.tiles(self.tile_bytes).into_iter().map(|(rows, tile)| tile_step(slice, &rows, tile)).collect(),
        };
        self.add(name, offset, frame, slice.array_bytes(), slice.is_whole(), steps)
    }

    fn add(
        &mut self,
        name: &str,
        offset: u64,
        frame: Frame,
        bytes: u64,
        is_whole: bool,
        steps: VecDeque<Step>,
    ) -> usize {
        let object = match self.numbers.get(name) {
            Some(number) => *number,
            None => {
                self.objects.push(PlannedObject { key: format!("{}{name}", self.prefix), known: None });
                self.numbers.insert(name.to_owned(), self.objects.len() - 1);
                self.objects.len() - 1
            }
        };
        let (before, expected_sum) = match &frame {
            Frame::Described(before) => (before.len() as u64, 0),
            Frame::None(crc32) => (0, *crc32),
        };
        let start = offset.saturating_add(before);
        let (array, sum) = (start..start.saturating_add(bytes), Crc32::default());
        let (number, has_frame, has_other_frame) = (self.added, false, false);
        self.added += 1;
        self.reads.push_back(ArrayRead {
            number,
            object,
            frame,
            array,
            is_whole,
            steps,
            has_frame,
            sum,
            expected_sum,
            has_other_frame,
        });
        number
    }

    /// Returns whether no other read has any of this memory, and reserves it then.
    fn reserve(&mut self, memory: &Memory) -> bool {
        let Range { start, end } = memory.addresses();
        let is_free = self.reserved.range(..end).next_back().is_none_or(|(_, other_end)| *other_end <= start);
        if is_free {
            self.reserved.insert(start, end);
        }
        is_free
    }

    /// Executes the next wave; `None` if no read is left.
    ///
    /// # Errors
    /// `Range` if an object ends before an array, `Changed` if another version replaced an object since the first wave,
    /// and the errors of [`scatter`]. The plan cannot be used any more then.
    pub async fn read(&mut self) -> Result<Option<Wave>> {
        if self.reads.is_empty() {
            return Ok(None);
        }
        let (mut layout, mut reads, mut steps) = (Layout::default(), Vec::new(), Vec::new());
        while layout.buffer_bytes < self.wave_bytes
            && let Some(mut read) = self.reads.pop_front()
        {
            if matches!(read.steps.front(), Some(Step::Array)) && read.array.end - read.array.start > UNCHECKED_BYTES {
                self.check_size(read.object, &read.array).await?;
            }
            while layout.buffer_bytes < self.wave_bytes
                && let Some(step) = read.steps.pop_front()
            {
                steps.push(layout.plan(reads.len(), &mut read, step));
            }
            reads.push(read);
        }
        let checksum = self.verify
            && steps.iter().any(|step| matches!(step.body, ArrayBytes::Direct(_)) && reads[step.read].is_whole);
        let (buffer, sums) = self.receive(layout, checksum).await?;
        let mut buffered = Vec::new();
        for step in steps {
            let read = &mut reads[step.read];
            read.check_frame(&buffer.as_slice()[span(&step.head)], &buffer.as_slice()[span(&step.descriptor)]);
            let sums_array = self.verify && read.is_whole;
            match step.body {
                ArrayBytes::Direct(first) if sums_array => {
                    let bytes = read.array.end - read.array.start;
                    read.sum = Crc32::known(sums[&read.object][first], bytes);
                }
                ArrayBytes::Direct(_) => {}
                ArrayBytes::Buffered(range, tile) => {
                    if sums_array {
                        read.sum = read.sum.then(Crc32::of(&buffer.as_slice()[span(&range)]));
                    }
                    buffered.push(BufferedRead { read: read.number, start: length(range.start), tile });
                }
            }
        }
        let mut ended = Vec::new();
        for read in reads {
            match read.outcome() {
                Some(outcome) => ended.push((read.number, outcome)),
                None => self.reads.push_front(read),
            }
        }
        let outcome = |number| ended.binary_search_by_key(&number, |(ended, _)| *ended).map(|index| ended[index].1);
        buffered.retain(|read| outcome(read.read) != Ok(Outcome::OtherFrame));
        Ok(Some(Wave { buffer, buffered, ended }))
    }

    /// Compares a range with the size of its object, which a HEAD request tells if it is unknown.
    async fn check_size(&mut self, object: usize, range: &Range<u64>) -> Result<()> {
        let PlannedObject { key, known } = &mut self.objects[object];
        let size = match known {
            Some((_, size)) => *size,
            None => {
                let head = self.client.head(key).await?;
                known.insert((head.version, head.size)).1
            }
        };
        if range.end <= size {
            return Ok(());
        }
        let message = format!("requested bytes {range:?}, the object has {size}");
        Err(self.client.store().error(ErrorKind::Range, Operation::Get, key, &message))
    }

    /// Receives all ranges. Returns the buffer, and the CRC-32 of the ranges of each object if requested.
    async fn receive(&mut self, layout: Layout, checksum: bool) -> Result<(Buffer, HashMap<usize, Vec<u32>>)> {
        let bytes = length(layout.buffer_bytes.next_multiple_of(ALIGNMENT));
        let no_buffer = |message: String| {
            let url = self.client.store().url(&self.prefix);
            Error::new(ErrorKind::Io, Operation::Get, &*url, message)
        };
        let memory = Memory::allocate(bytes)
            .map_err(|source| no_buffer(format!("no memory for {bytes} bytes")).with_source(source))?;
        let (pending, mut rest) = PendingBuffer::new(memory);
        let mut at = 0;
        let mut reads: BTreeMap<usize, ScatterRead> = BTreeMap::new();
        for (object, offset, target) in layout.ranges {
            let dest = match target {
                RangeSink::Memory(dest) => dest,
                RangeSink::Buffer(range) => {
                    drop(rest.split_to(length(range.start - at)));
                    at = range.end;
                    rest.split_to(length(range.end - range.start))
                }
            };
            let read = reads.entry(object).or_insert_with(|| {
                let PlannedObject { key, known } = &self.objects[object];
                let version = known.as_ref().and_then(|(version, _)| version.clone());
                ScatterRead {
                    client: self.client.clone(),
                    key: key.clone(),
                    version,
                    ranges: Vec::new(),
                    arrived: self.received.clone(),
                }
            });
            read.ranges.push(ScatterRange { offset, dest });
        }
        drop(rest);
        let (numbers, reads): (Vec<_>, Vec<_>) = reads.into_iter().unzip();
        let results = scatter(reads, checksum).await?;
        let buffer = pending.finish(bytes).map_err(|_| no_buffer("a writer of the buffer is left".to_owned()))?;
        let mut sums = HashMap::new();
        for (object, result) in numbers.into_iter().zip(results) {
            self.objects[object].known = Some((result.version, result.size));
            sums.insert(object, result.crc32);
        }
        Ok((buffer, sums))
    }
}

impl ArrayRead {
    /// Compares what was read of the frame; empty if nothing was.
    fn check_frame(&mut self, head: &[u8], descriptor: &[u8]) {
        if let Frame::Described(before) = &self.frame
            && !head.is_empty()
        {
            self.has_other_frame = head != before;
        }
        if let Some((mark, sum)) = descriptor.split_first_chunk::<4>() {
            self.has_other_frame |= mark != DESCRIPTOR_MARK;
            self.expected_sum = sum.first_chunk().map_or(0, |sum| u32::from_le_bytes(*sum));
        }
    }

    /// `None` if steps are left.
    fn outcome(&self) -> Option<Outcome> {
        if self.has_other_frame {
            return Some(Outcome::OtherFrame);
        }
        if !self.steps.is_empty() {
            return None;
        }
        // Writers that compute no CRC-32 leave 0.
        let is_summed = self.sum != Crc32::default() && self.expected_sum != 0;
        Some(if is_summed && self.sum.value() != self.expected_sum { Outcome::Damaged } else { Outcome::Complete })
    }
}

/// The step that reads a tile: its runs, or all bytes of its rows if the runs are short.
fn tile_step(slice: &Slice, rows: &Range<u64>, tile: Tile) -> Step {
    match slice.of_tile(&tile).runs(MIN_RUN_BYTES) {
        Some(Runs { bytes, starts }) => {
            let starts = starts.into_iter().map(|start| rows.start + start).collect();
            let lengths = tile.lengths.clone();
            let tile = Tile { shape: lengths, inner: vec![0; tile.inner.len()], ..tile };
            Step::Tile(tile, Runs { bytes, starts })
        }
        None => Step::Tile(tile, Runs { bytes: rows.end - rows.start, starts: vec![rows.start] }),
    }
}

fn length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a wave has at most its limit, and one array or tile")
}

fn span(range: &Range<u64>) -> Range<usize> {
    length(range.start)..length(range.end)
}

/// Alignment of reads in the buffer, enough for any element.
const ALIGNMENT: u64 = 16;

/// A step of a wave. Ranges are in its buffer.
struct Planned {
    /// Index among the reads of the wave.
    read: usize,
    head: Range<u64>,
    descriptor: Range<u64>,
    body: ArrayBytes,
}

enum ArrayBytes {
    /// The first range of the object that has bytes of the step.
    Direct(usize),
    Buffered(Range<u64>, Option<Tile>),
}

/// Ranges of a wave, in the order of their ranges in the buffer.
#[derive(Default)]
struct Layout {
    buffer_bytes: u64,
    /// Index of the object, offset and target of each.
    ranges: Vec<(usize, u64, RangeSink)>,
    /// Number of ranges of each object.
    counts: HashMap<usize, usize>,
}

enum RangeSink {
    Buffer(Range<u64>),
    Memory(Dest),
}

impl Layout {
    fn add(&mut self, object: usize, offset: u64, target: RangeSink) -> usize {
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
        self.add(object, source.start, RangeSink::Buffer(range.clone()));
        range
    }

    /// Plans a step of a read, which is number `index` of the wave.
    fn plan(&mut self, index: usize, read: &mut ArrayRead, step: Step) -> Planned {
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
            return Planned { read: index, head, descriptor, body: ArrayBytes::Buffered(body, None) };
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
                    self.add(object, array.start.saturating_add(*start), RangeSink::Memory(run));
                }
                ArrayBytes::Direct(first)
            }
            Step::Tile(tile, runs) => {
                let start = self.buffer_bytes.next_multiple_of(ALIGNMENT);
                self.buffer_bytes = start;
                for run in &runs.starts {
                    let at = self.buffer_bytes;
                    self.buffer_bytes += runs.bytes;
                    self.add(object, array.start.saturating_add(*run), RangeSink::Buffer(at..self.buffer_bytes));
                }
                ArrayBytes::Buffered(start..self.buffer_bytes, Some(tile))
            }
            Step::Array => unreachable!("handled above"),
        };
        Planned { read: index, head, descriptor, body }
    }
}
