//! Where things lie in the file of an arena. Touches no segment; what is done with its words is in `words`.
//!
//! ```text
//! header   one page: owner, budget, flags
//! states   one word a granted segment: which of those that had it, and where it is
//! lanes    one a worker: its request, and the answers
//! data     segments
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::map::Map;

/// What the file of an arena begins with; the last byte is the version of this layout.
pub(super) const MAGIC: u64 = u64::from_be_bytes(*b"torchob\x01");

/// How many segments can be with workers and in transit at a time.
pub(super) const SEGMENTS: u32 = 1 << 20;
/// How many workers can be attached at a time.
pub(super) const LANES: u32 = 256;
/// How many objects one request names at most, wanted and announced; what is more takes several.
pub(super) const MOST_OBJECTS: usize = 4096;
/// How many bytes of names one request has at most.
pub(super) const MOST_NAME_BYTES: usize = 8 * MOST_OBJECTS;

const STATES: u64 = 4096;
const LANES_START: u64 = STATES + 4 * SEGMENTS as u64;
const LANE_BYTES: u64 = 34 * 4096;
const REQUEST: u64 = 64;
const ANSWERS: u64 = REQUEST + 8 * MOST_OBJECTS as u64;
/// Where segments begin.
pub(super) const DATA: u64 = 40 << 20;

const _: () = assert!(ANSWERS + 24 * MOST_OBJECTS as u64 <= LANE_BYTES);
const _: () = assert!(LANES_START + LANES as u64 * LANE_BYTES <= DATA);

/// The header.
#[derive(Clone, Copy)]
pub(super) struct Header<'a>(pub(super) &'a Map);

impl<'a> Header<'a> {
    pub(super) fn magic(self) -> &'a AtomicU64 {
        self.0.long(0)
    }
    /// Process id of the owner.
    pub(super) fn owner(self) -> &'a AtomicU32 {
        self.0.word(8)
    }
    /// One behind the last lane that was ever taken.
    pub(super) fn lanes(self) -> &'a AtomicU32 {
        self.0.word(12)
    }
    /// Not 0 while the owner waits for memory: whoever releases some, rings.
    pub(super) fn starving(self) -> &'a AtomicU32 {
        self.0.word(16)
    }
    /// Not 0 once the owner answers nobody any more, though it may live.
    pub(super) fn closed(self) -> &'a AtomicU32 {
        self.0.word(20)
    }
    /// What segments may take, in bytes.
    pub(super) fn budget(self) -> &'a AtomicU64 {
        self.0.long(24)
    }
    /// The word of granted segment `id`.
    pub(super) fn state(self, id: u32) -> &'a AtomicU32 {
        assert!(id < SEGMENTS);
        self.0.word(STATES + 4 * u64::from(id))
    }
    pub(super) fn lane(self, index: u32) -> Lane<'a> {
        assert!(index < LANES);
        Lane { map: self.0, base: LANES_START + u64::from(index) * LANE_BYTES }
    }
}

/// A lane. A request and its answers are published by `asked` and `answered`: what else lies in a lane is written
/// before its number is stored with `Release`, and read after that was loaded with `Acquire`.
#[derive(Clone, Copy)]
pub(super) struct Lane<'a> {
    map: &'a Map,
    base: u64,
}

impl<'a> Lane<'a> {
    /// Process id of the worker; 0 while nobody's.
    pub(super) fn worker(self) -> &'a AtomicU32 {
        self.map.word(self.base)
    }
    /// Number of the last request.
    pub(super) fn asked(self) -> &'a AtomicU32 {
        self.map.word(self.base + 4)
    }
    /// Number of the last request that was answered. Workers sleep on it.
    pub(super) fn answered(self) -> &'a AtomicU32 {
        self.map.word(self.base + 8)
    }
    /// How many objects the request wants.
    pub(super) fn count(self) -> &'a AtomicU32 {
        self.map.word(self.base + 12)
    }
    /// What they are objects of.
    pub(super) fn source(self) -> &'a AtomicU64 {
        self.map.long(self.base + 16)
    }
    /// How many objects it announces: they stand behind those that it wants.
    pub(super) fn ahead(self) -> &'a AtomicU32 {
        self.map.word(self.base + 24)
    }
    /// For which iterator of the worker it announces them.
    pub(super) fn iterator(self) -> &'a AtomicU32 {
        self.map.word(self.base + 28)
    }
    /// Which iterator of the worker has ended; 0 for none.
    pub(super) fn ended(self) -> &'a AtomicU32 {
        self.map.word(self.base + 32)
    }
    /// How many bytes of names stand in place of numbers; 0 for numbers.
    pub(super) fn name_bytes(self) -> &'a AtomicU32 {
        self.map.word(self.base + 56)
    }
    /// Object `position` of the request.
    pub(super) fn object(self, position: usize) -> &'a AtomicU64 {
        assert!(position < MOST_OBJECTS);
        self.map.long(self.base + REQUEST + 8 * position as u64)
    }
    /// Word `part` of answer `position`.
    pub(super) fn answer(self, position: usize, part: u64) -> &'a AtomicU64 {
        assert!(position < MOST_OBJECTS && part < 3);
        self.map.long(self.base + ANSWERS + 24 * position as u64 + 8 * part)
    }
}

/// The answer of who cannot answer.
pub(super) const REFUSED: Answer = Answer { id: SEGMENTS, generation: 0, offset: 0, len: 0, failed: true };

impl Lane<'_> {
    /// Writes names, which are not more than `MOST_NAME_BYTES`, in place of numbers.
    pub(super) fn write_names(self, bytes: &[u8]) {
        use std::sync::atomic::Ordering::Relaxed;
        for (position, part) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.object(position).store(u64::from_le_bytes(word), Relaxed);
        }
        self.name_bytes().store(u32::try_from(bytes.len()).expect("at most MOST_NAME_BYTES"), Relaxed);
    }

    /// The bytes of the names, as many as it says and there can be.
    pub(super) fn read_names(self) -> Vec<u8> {
        use std::sync::atomic::Ordering::Relaxed;
        let count = (self.name_bytes().load(Relaxed) as usize).min(MOST_NAME_BYTES);
        let mut bytes = Vec::with_capacity(count.next_multiple_of(8));
        for position in 0..count.div_ceil(8) {
            bytes.extend_from_slice(&self.object(position).load(Relaxed).to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }
}

/// One answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The granted segment, and which of those that had this id.
    pub id: u32,
    pub generation: u32,
    /// Where in the file.
    pub offset: u64,
    pub len: u64,
    /// Whether the bytes are those of an error.
    pub failed: bool,
}

const FAILED: u64 = 1 << 63;

impl Lane<'_> {
    pub(super) fn write_answer(self, position: usize, answer: Answer) {
        use std::sync::atomic::Ordering::Relaxed;
        let Answer { id, generation, offset, len, failed } = answer;
        self.answer(position, 0).store(u64::from(id) | u64::from(generation) << 32, Relaxed);
        self.answer(position, 1).store(offset, Relaxed);
        self.answer(position, 2).store(len | if failed { FAILED } else { 0 }, Relaxed);
    }

    #[expect(clippy::cast_possible_truncation, reason = "two halves of one word")]
    pub(super) fn read_answer(self, position: usize) -> Answer {
        use std::sync::atomic::Ordering::Relaxed;
        let [name, offset, len] = [0, 1, 2].map(|part| self.answer(position, part).load(Relaxed));
        let (id, generation) = (name as u32, (name >> 32) as u32);
        Answer { id, generation, offset, len: len & !FAILED, failed: len & FAILED != 0 }
    }
}
