//! Layout of the arena's file. Touches no segment; `sync` defines the protocols on its words.
//!
//! ```text
//! header   one page: owner, budget, flags
//! states   one word per granted segment or block: generation and state
//! slots    one per worker: its request and the answers
//! data     segments
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::map::Map;

/// First bytes of the file; the last byte is the version of this layout.
pub(super) const MAGIC: u64 = u64::from_be_bytes(*b"torchob\x02");

/// Maximum number of segments that are granted to workers or on their way to the trainer.
pub(super) const SEGMENTS: u32 = 1 << 20;
/// Maximum number of blocks. Each takes a file descriptor of the owner.
pub(super) const MAX_BLOCKS: u32 = 256;
/// Number of ids of grants: those of segments, then those of blocks.
pub(super) const GRANTS: u32 = SEGMENTS + MAX_BLOCKS;
/// Maximum number of attached workers.
pub(super) const SLOTS: u32 = 256;
/// Maximum number of objects in one request, demanded and announced; a longer list takes several requests.
pub(super) const MAX_OBJECTS: usize = 4096;
/// Maximum length of all names in one request.
pub(super) const MAX_NAME_BYTES: usize = 8 * MAX_OBJECTS;

/// The source of requests for a block, whose objects are lengths in the order of preference. The offset of an answer is the
/// number of the block, in the upper half, and the owner's descriptor of its file.
pub(super) const BLOCKS: u64 = u64::MAX;

const STATES: u64 = 4096;
const SLOTS_START: u64 = STATES + 4 * GRANTS as u64;
const SLOT_BYTES: u64 = 34 * 4096;
const REQUEST: u64 = 64;
const ANSWERS: u64 = REQUEST + 8 * MAX_OBJECTS as u64;
/// Offset of the first segment.
pub(super) const DATA: u64 = 40 << 20;

const _: () = assert!(ANSWERS + 24 * MAX_OBJECTS as u64 <= SLOT_BYTES);
const _: () = assert!(SLOTS_START + SLOTS as u64 * SLOT_BYTES <= DATA);

/// The header of the file.
#[derive(Clone, Copy)]
pub(super) struct ArenaHeader<'a>(pub(super) &'a Map);

impl<'a> ArenaHeader<'a> {
    pub(super) fn magic(self) -> &'a AtomicU64 {
        self.0.long(0)
    }
    /// Process id of the owner.
    pub(super) fn owner(self) -> &'a AtomicU32 {
        self.0.word(8)
    }
    /// Index of the last slot that was ever used, plus one.
    pub(super) fn slots(self) -> &'a AtomicU32 {
        self.0.word(12)
    }
    /// Nonzero while the owner waits for memory: a process that drops a segment notifies the owner.
    pub(super) fn memory_needed(self) -> &'a AtomicU32 {
        self.0.word(16)
    }
    /// Nonzero once the owner answers no further requests, though its process may live.
    pub(super) fn closed(self) -> &'a AtomicU32 {
        self.0.word(20)
    }
    /// Nonzero after a worker has found all slots in use: the owner looks for workers that have exited.
    pub(super) fn slot_needed(self) -> &'a AtomicU32 {
        self.0.word(32)
    }
    /// Counts the slots that were freed. A worker that needs one waits on it as a futex.
    pub(super) fn vacated(self) -> &'a AtomicU32 {
        self.0.word(36)
    }
    /// Limit of the bytes of all segments.
    pub(super) fn budget(self) -> &'a AtomicU64 {
        self.0.long(24)
    }
    /// State word of the granted segment or block `id`.
    pub(super) fn state(self, id: u32) -> &'a AtomicU32 {
        assert!(id < GRANTS);
        self.0.word(STATES + 4 * u64::from(id))
    }
    pub(super) fn slot(self, index: u32) -> WorkerSlot<'a> {
        assert!(index < SLOTS);
        WorkerSlot { map: self.0, base: SLOTS_START + u64::from(index) * SLOT_BYTES }
    }
}

/// The slot of a worker. The sequence numbers `requested` and `answered` publish a request and its answers: the other
/// words are written before the number is stored with `Release`, and read after it is loaded with `Acquire`.
#[derive(Clone, Copy)]
pub(super) struct WorkerSlot<'a> {
    map: &'a Map,
    base: u64,
}

impl<'a> WorkerSlot<'a> {
    /// Process id of the worker; 0 while the slot is free.
    pub(super) fn worker(self) -> &'a AtomicU32 {
        self.map.word(self.base)
    }
    /// Number of the last request.
    pub(super) fn requested(self) -> &'a AtomicU32 {
        self.map.word(self.base + 4)
    }
    /// Number of the last answered request. The worker waits on it as a futex.
    pub(super) fn answered(self) -> &'a AtomicU32 {
        self.map.word(self.base + 8)
    }
    /// Number of demanded objects.
    pub(super) fn count(self) -> &'a AtomicU32 {
        self.map.word(self.base + 12)
    }
    /// Number of the source that the objects belong to.
    pub(super) fn source(self) -> &'a AtomicU64 {
        self.map.long(self.base + 16)
    }
    /// Number of announced objects; they follow the demanded ones.
    pub(super) fn announced(self) -> &'a AtomicU32 {
        self.map.word(self.base + 24)
    }
    /// Iterator of the worker that announced them.
    pub(super) fn iterator(self) -> &'a AtomicU32 {
        self.map.word(self.base + 28)
    }
    /// Iterator of the worker that ended; 0 for none.
    pub(super) fn ended(self) -> &'a AtomicU32 {
        self.map.word(self.base + 32)
    }
    /// The loader that the worker belongs to.
    pub(super) fn loader(self) -> &'a AtomicU64 {
        self.map.long(self.base + 40)
    }
    /// Length of the names, which replace numbers; 0 for numbers.
    pub(super) fn name_bytes(self) -> &'a AtomicU32 {
        self.map.word(self.base + 56)
    }
    /// Object `position` of the request.
    pub(super) fn object(self, position: usize) -> &'a AtomicU64 {
        assert!(position < MAX_OBJECTS);
        self.map.long(self.base + REQUEST + 8 * position as u64)
    }
    /// Word `part` of answer `position`.
    pub(super) fn answer(self, position: usize, part: u64) -> &'a AtomicU64 {
        assert!(position < MAX_OBJECTS && part < 3);
        self.map.long(self.base + ANSWERS + 24 * position as u64 + 8 * part)
    }
}

/// Written for each object before the handler runs; remains where the handler gives no answer.
pub(super) const REFUSED: Answer = Answer { id: GRANTS, generation: 0, offset: 0, len: 0, failed: true };

impl WorkerSlot<'_> {
    /// Writes names, of at most `MAX_NAME_BYTES` bytes, instead of numbers.
    pub(super) fn write_names(self, bytes: &[u8]) {
        use std::sync::atomic::Ordering::Relaxed;
        for (position, part) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.object(position).store(u64::from_le_bytes(word), Relaxed);
        }
        self.name_bytes().store(u32::try_from(bytes.len()).expect("at most MAX_NAME_BYTES"), Relaxed);
    }

    /// The bytes of the names. The length is limited to `MAX_NAME_BYTES`, even if the worker wrote a larger one.
    pub(super) fn read_names(self) -> Vec<u8> {
        use std::sync::atomic::Ordering::Relaxed;
        let count = (self.name_bytes().load(Relaxed) as usize).min(MAX_NAME_BYTES);
        let mut bytes = Vec::with_capacity(count.next_multiple_of(8));
        for position in 0..count.div_ceil(8) {
            bytes.extend_from_slice(&self.object(position).load(Relaxed).to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }
}

/// The answer for one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Id of the grant; `generation` distinguishes the grants that had this id.
    pub id: u32,
    pub generation: u32,
    /// Offset in the file.
    pub offset: u64,
    pub len: u64,
    /// Whether the bytes are a serialized error.
    pub failed: bool,
}

const FAILED: u64 = 1 << 63;

impl WorkerSlot<'_> {
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
