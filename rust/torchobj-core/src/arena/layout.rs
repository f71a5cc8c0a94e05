//! Layout of the arena's file. Touches no segment; `sync` defines the protocols on its words.
//!
//! ```text
//! header   owner, budget, flags
//!          states   one word per granted segment or block: generation and state
//!          slots    one per worker: its request and the answers
//! data     segments
//! ```
#![expect(unsafe_code, reason = "declares that the header consists of atomic words")]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::map::Words;

/// First bytes of the file; the last byte is the version of this layout.
pub(super) const MAGIC: u64 = u64::from_be_bytes(*b"torchob\x04");

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

/// Offset of the first segment.
pub(super) const DATA: u64 = 40 << 20;

const _: () = assert!(size_of::<ArenaHeader>() as u64 <= DATA);

/// What precedes the segments in the file.
#[repr(C)]
pub(super) struct ArenaHeader {
    pub(super) magic: AtomicU64,
    /// Limit of the bytes of all segments.
    pub(super) budget: AtomicU64,
    /// Identity of the owner's process.
    pub(super) owner: AtomicU64,
    /// Index of the last slot that was ever used, plus one.
    pub(super) used_slots: AtomicU32,
    /// Nonzero while the owner waits for memory: a process that drops a segment notifies the owner.
    pub(super) memory_needed: AtomicU32,
    /// Nonzero once the owner answers no further requests, though its process may live.
    pub(super) closed: AtomicU32,
    /// Nonzero after a worker has found all slots in use: the owner looks for workers that have exited.
    pub(super) slot_needed: AtomicU32,
    /// Counts the slots that were freed. A worker that needs one waits on it as a futex.
    pub(super) vacated: AtomicU32,
    states: States,
    slots: [WorkerSlot; SLOTS as usize],
}

/// State words of the granted segments and blocks, by id. The alignment keeps them out of the cache lines of the words before.
#[repr(C, align(4096))]
struct States([AtomicU32; GRANTS as usize]);

// SAFETY: all fields are atomic words.
unsafe impl Words for ArenaHeader {}

impl ArenaHeader {
    /// State word of the granted segment or block `id`.
    pub(super) fn state(&self, id: u32) -> &AtomicU32 {
        &self.states.0[id as usize]
    }

    pub(super) fn slot(&self, index: u32) -> &WorkerSlot {
        &self.slots[index as usize]
    }
}

/// The slot of a worker. The sequence numbers `requested` and `answered` publish a request and its answers: the other
/// words are written before the number is stored with `Release`, and read after it is loaded with `Acquire`.
#[repr(C, align(4096))]
pub(super) struct WorkerSlot {
    /// Identity of the worker's process; 0 while the slot is free.
    pub(super) worker: AtomicU64,
    /// The fork by which the owner started the worker's process, in the count of the owner; 0 if it was not forked by the owner.
    pub(super) born: AtomicU64,
    /// Number of the last request.
    pub(super) requested: AtomicU32,
    /// Number of the last answered request. The worker waits on it as a futex.
    pub(super) answered: AtomicU32,
    /// Number of demanded objects.
    pub(super) count: AtomicU32,
    /// Number of announced objects; they follow the demanded ones.
    pub(super) announced: AtomicU32,
    /// Iterator of the worker that announced them. Of a request for a block: the number of the worker.
    pub(super) iterator: AtomicU32,
    /// Iterator of the worker that ended; 0 for none.
    pub(super) ended: AtomicU32,
    /// Length of the names, which replace numbers; 0 for numbers.
    name_bytes: AtomicU32,
    /// Number of the source that the objects belong to.
    pub(super) source: AtomicU64,
    /// The loader that the worker belongs to.
    pub(super) loader: AtomicU64,
    pub(super) objects: [AtomicU64; MAX_OBJECTS],
    answers: [[AtomicU64; 3]; MAX_OBJECTS],
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

/// Written for each object before the handler runs; remains where the handler gives no answer.
pub(super) const REFUSED: Answer = Answer { id: GRANTS, generation: 0, offset: 0, len: 0, failed: true };

impl WorkerSlot {
    /// Clears what the previous request may have set.
    pub(super) fn clear(&self) {
        for word in [&self.name_bytes, &self.announced, &self.iterator] {
            word.store(0, Relaxed);
        }
    }

    /// Writes numbers, as many as there is room for. Returns how many.
    pub(super) fn write_numbers(&self, numbers: impl IntoIterator<Item = u64>) -> usize {
        self.objects.iter().zip(numbers).map(|(object, number)| object.store(number, Relaxed)).count()
    }

    /// Writes names, of at most `MAX_NAME_BYTES` bytes, instead of numbers.
    pub(super) fn write_names(&self, bytes: &[u8]) {
        for (object, part) in self.objects.iter().zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            object.store(u64::from_le_bytes(word), Relaxed);
        }
        self.name_bytes.store(u32::try_from(bytes.len()).expect("at most MAX_NAME_BYTES"), Relaxed);
    }

    /// The bytes of the names. The length is limited to `MAX_NAME_BYTES`, even if the worker wrote a larger one.
    pub(super) fn read_names(&self) -> Vec<u8> {
        let count = (self.name_bytes.load(Relaxed) as usize).min(MAX_NAME_BYTES);
        let mut bytes = Vec::with_capacity(count.next_multiple_of(8));
        for object in &self.objects[..count.div_ceil(8)] {
            bytes.extend_from_slice(&object.load(Relaxed).to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }

    pub(super) fn write_answer(&self, position: usize, answer: Answer) {
        let Answer { id, generation, offset, len, failed } = answer;
        let parts = [u64::from(id) | u64::from(generation) << 32, offset, len | if failed { FAILED } else { 0 }];
        self.answers[position].iter().zip(parts).for_each(|(word, part)| word.store(part, Relaxed));
    }

    #[expect(clippy::cast_possible_truncation, reason = "two halves of one word")]
    pub(super) fn read_answer(&self, position: usize) -> Answer {
        let [name, offset, len] = self.answers[position].each_ref().map(|word| word.load(Relaxed));
        let (id, generation) = (name as u32, (name >> 32) as u32);
        Answer { id, generation, offset, len: len & !FAILED, failed: len & FAILED != 0 }
    }
}
