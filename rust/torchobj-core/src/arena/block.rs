//! The memory of one batch: a file of its own, which a worker fills and the trainer reads. `block_pool` keeps unused ones.
//!
//! A block has a file of its own, because a process that is forked while the trainer holds a batch keeps a view of its
//! memory: such a block is *discarded* instead of reused, and its pages live until the last of these processes exits.
#![expect(unsafe_code, reason = "declares that the header consists of atomic words")]

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags, open};

use super::map::{Map, Words};
use crate::fork;

/// First bytes of the file; the last byte is the version of this layout.
const MAGIC: u64 = u64::from_be_bytes(*b"tobjblk\x03");

/// Offset of the memory. The page before it is the header.
pub(super) const START: u64 = 4096;

/// The start of the file.
#[repr(C)]
struct BlockHeader {
    magic: AtomicU64,
    /// Identity of the owner's process: another one may have its process id later.
    owner: AtomicU64,
    number: AtomicU32,
    /// Nonzero once the block was discarded.
    discarded: AtomicU32,
}

// SAFETY: all fields are atomic words.
unsafe impl Words for BlockHeader {}

const _: () = assert!(size_of::<BlockHeader>() as u64 <= START);

/// The file of a block, mapped by this process.
#[derive(Debug)]
pub(super) struct Block {
    map: Map,
    /// Distinguishes the blocks of an owner.
    pub(super) number: u32,
    /// Bytes of memory, without the header.
    pub(super) capacity: u64,
}

impl Block {
    /// Creates a block. Its memory has no pages yet.
    ///
    /// # Errors
    /// The system refuses the file, a descriptor or the address space.
    pub(super) fn create(number: u32, capacity: u64) -> io::Result<Self> {
        let block = Self { map: Map::create(Map::file_in_memory()?, START + capacity)?, number, capacity };
        let header: &BlockHeader = block.map.header();
        header.owner.store(fork::generation(), Relaxed);
        header.number.store(number, Relaxed);
        header.magic.store(MAGIC, Release);
        Ok(block)
    }

    /// Maps the block that process `owner` has open as `descriptor`. `len` bytes will be written: they get pages now, by
    /// one system call instead of a fault for each. The file is closed.
    ///
    /// # Errors
    /// The system does not show the descriptors of the owner, the process has no descriptor left, or `descriptor` is not this
    /// block.
    pub(super) fn attach(owner: u64, descriptor: u32, number: u32, len: u64) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{descriptor}", fork::pid_of(owner));
        let mut map = Map::attach(open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)?;
        map.close();
        let block = Self { number, capacity: map.len().saturating_sub(START), map };
        let is_block = |header: &BlockHeader| {
            let found = (header.magic.load(Acquire), header.owner.load(Relaxed), header.number.load(Relaxed));
            found == (MAGIC, owner, number)
        };
        // A shorter file has no header.
        if block.map.len() < START || block.capacity < len || !is_block(block.map.header()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is not the granted block"));
        }
        block.map.populate(START, len);
        Ok(block)
    }

    /// Marks the block: the owner does not grant it again, and workers unmap it at their next request for a block.
    pub(super) fn discard(&self) {
        self.map.header::<BlockHeader>().discarded.store(1, Release);
    }

    /// Returns whether a process has called [`discard`](Self::discard).
    pub(super) fn is_discarded(&self) -> bool {
        self.map.header::<BlockHeader>().discarded.load(Acquire) != 0
    }

    /// Frees the pages, also where other processes still map them.
    pub(super) fn free_pages(&self) {
        // If the system refuses to punch the hole, the pages are freed with the last mapping.
        let _ = self.map.punch(START, self.capacity);
    }

    /// Number of the owner's descriptor of the file. `None` if the program has closed it.
    pub(super) fn descriptor(&self) -> Option<u32> {
        let file = self.map.file();
        file.get().is_ok().then(|| u32::try_from(file.number()).expect("descriptors are not negative"))
    }

    /// Address of the first `len` bytes.
    pub(super) fn at(&self, len: u64) -> NonNull<u8> {
        self.map.at(START, len)
    }
}

static VIEWED: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

/// A block while this process may have views of it: in a worker from grant to transfer, in the trainer from adoption on.
#[derive(Debug)]
pub(super) struct ViewedBlock {
    block: Arc<Block>,
    range: Range<usize>,
    /// Number of forks when the views began.
    forks: u64,
}

impl ViewedBlock {
    /// Begins the views of the first `len` bytes.
    pub(super) fn new(block: Arc<Block>, len: u64) -> Self {
        let start = block.at(len).addr().get();
        let range = start..start + usize::try_from(len).expect("it is mapped");
        let inside = fork::enter();
        VIEWED.lock().expect("no holder of this lock panics").push(range.clone());
        Self { block, range, forks: fork::count(&inside) }
    }

    /// Address of the first `len` bytes.
    pub(super) fn at(&self, len: u64) -> NonNull<u8> {
        self.block.at(len)
    }

    /// Returns the block after the last view. It is discarded if this process has forked: the child may have a view.
    pub(super) fn end(&self) -> &Arc<Block> {
        if fork::count(&fork::enter()) != self.forks {
            self.block.discard();
        }
        &self.block
    }
}

impl Drop for ViewedBlock {
    fn drop(&mut self) {
        let _inside = fork::enter();
        let mut viewed = VIEWED.lock().expect("no holder of this lock panics");
        if let Some(position) = viewed.iter().rposition(|range| *range == self.range) {
            viewed.swap_remove(position);
        }
    }
}

/// Returns whether an address is within a block of which this process has views.
pub fn in_block(address: usize) -> bool {
    let _inside = fork::enter();
    VIEWED.lock().expect("no holder of this lock panics").iter().any(|range| range.contains(&address))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn another_mapping_of_a_block_has_its_mark() {
        let block = Block::create(7, MIB).unwrap();
        let (owner, descriptor) = (fork::generation(), block.descriptor().unwrap());
        let attached = Block::attach(owner, descriptor, 7, MIB).unwrap();
        assert_eq!(attached.capacity, MIB);
        block.discard();
        assert!(attached.is_discarded());
        assert!(Block::attach(owner, descriptor, 8, MIB).is_err());
        assert!(Block::attach(owner, descriptor, 7, 2 * MIB).is_err());
        // Another process had the same process id.
        assert!(Block::attach(owner + (1 << 60), descriptor, 7, MIB).is_err());
        // The owner may have opened another file under the number of the descriptor.
        let other = Map::create(Map::file_in_memory().unwrap(), 5).unwrap();
        let descriptor = u32::try_from(other.file().number()).unwrap();
        for len in [0, MIB] {
            assert!(Block::attach(owner, descriptor, 7, len).is_err());
        }
    }

    #[test]
    fn an_address_is_found_while_the_block_is_viewed() {
        let block = Arc::new(Block::create(7, MIB).unwrap());
        let start = block.at(1000).addr().get();
        let viewed = ViewedBlock::new(block, 1000);
        assert_eq!([start - 1, start, start + 999, start + 1000].map(in_block), [false, true, true, false]);
        drop(viewed);
        assert!(!in_block(start));
    }
}
