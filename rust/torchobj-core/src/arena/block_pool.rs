//! The pool of an owner's blocks: reuses unused ones, the most recently used first, within a limit of their bytes. Holds none
//! that is in use.

use std::sync::{Arc, Once, Weak};

use rustix::process::{Resource, getrlimit};

use super::block::Block;
use super::layout::MAX_BLOCKS;
use super::space::capacity_of;

/// Share of the descriptors of the process that blocks may take.
const DESCRIPTOR_SHARE: u64 = 4;

/// The blocks of an owner.
#[derive(Debug)]
pub(super) struct BlockPool {
    limit: u64,
    max_blocks: u64,
    /// Unused blocks and the slot of the worker that filled each last, the most recently used last.
    unused: Vec<(Arc<Block>, u32)>,
    /// Blocks in use, with the slot of the worker that received each.
    used: Vec<(Weak<Block>, u32)>,
    next_number: u32,
    /// Bytes of all blocks except discarded ones.
    bytes: u64,
    granted: u64,
}

impl BlockPool {
    /// No blocks yet, and at most `limit` bytes of them.
    pub(super) fn new(limit: u64) -> Self {
        let max_blocks = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |limit| limit / DESCRIPTOR_SHARE);
        let max_blocks = max_blocks.min(MAX_BLOCKS.into());
        Self { limit, max_blocks, unused: Vec::new(), used: Vec::new(), next_number: 0, bytes: 0, granted: 0 }
    }

    /// Bytes of all blocks except discarded ones, whose pages are freed when the last process that views them exits.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the blocks that are not in use.
    pub(super) fn unused_bytes(&self) -> u64 {
        self.unused.iter().map(|(block, _)| block.capacity).sum()
    }

    /// Number of requests for which a block was taken.
    pub(super) fn granted(&self) -> u64 {
        self.granted
    }

    /// Returns a block for the worker of `slot`, of the first of these lengths that the limits and the system allow, and the
    /// position of this length.
    pub(super) fn take_first(&mut self, slot: u32, lengths: &[u64]) -> Option<(usize, Arc<Block>)> {
        let taken =
            lengths.iter().enumerate().find_map(|(position, len)| self.take(slot, *len).map(|block| (position, block)));
        self.granted += u64::from(taken.is_some());
        taken
    }

    /// Returns a block of at least `len` bytes.
    fn take(&mut self, slot: u32, len: u64) -> Option<Arc<Block>> {
        let capacity = capacity_of(len);
        // Twice the size is fine: padded batches differ in length.
        let fits = |block: &Block| block.capacity >= capacity && block.capacity / 2 <= capacity;
        // A worker that has mapped the block already writes to it without a page fault.
        let own = self.unused.iter().rposition(|(block, of)| *of == slot && fits(block));
        let block = match own.or_else(|| self.unused.iter().rposition(|(block, _)| fits(block))) {
            Some(position) => self.unused.remove(position).0,
            None => self.create(capacity)?,
        };
        if block.descriptor().is_none() {
            // The program has closed it: no other worker can map the block.
            self.discard(&block);
            return self.take(slot, len);
        }
        self.used.push((Arc::downgrade(&block), slot));
        Some(block)
    }

    fn create(&mut self, capacity: u64) -> Option<Arc<Block>> {
        let unused = self.unused_bytes();
        let (limit, max_blocks) = (self.limit, self.max_blocks);
        let fits = |bytes: u64, count: usize| bytes.saturating_add(capacity) <= limit && (count as u64) < max_blocks;
        if !fits(self.bytes - unused, self.used.len()) {
            return None;
        }
        while !self.unused.is_empty() && !fits(self.bytes, self.unused.len() + self.used.len()) {
            let (oldest, _) = self.unused.remove(0);
            self.discard(&oldest);
        }
        let block = match Block::create(self.next_number, capacity) {
            Ok(block) => block,
            Err(error) => {
                // Fewer blocks from now on, so that descriptors are left for others.
                self.free_unused();
                self.max_blocks = (self.used.len() as u64).max(1);
                static WARNED: Once = Once::new();
                WARNED.call_once(|| {
                    log::warn!(
                        "batches take memory that is not recycled: the system refuses another block: {error}; allow this \
                         process more open files (ulimit -n) or more memory"
                    );
                });
                return None;
            }
        };
        self.next_number = self.next_number.wrapping_add(1);
        self.bytes += block.capacity;
        Some(Arc::new(block))
    }

    /// Takes back a block that is no longer in use. Its caller drops its own reference next.
    pub(super) fn give(&mut self, block: Arc<Block>) {
        let Some(position) = self.used.iter().position(|(used, _)| std::ptr::eq(used.as_ptr(), Arc::as_ptr(&block)))
        else {
            return;
        };
        let (_, slot) = self.used.swap_remove(position);
        if block.is_discarded() {
            // Its pages belong to a forked child.
            self.bytes -= block.capacity;
        } else {
            self.unused.push((block, slot));
        }
    }

    /// Unused memory: no process has a view of it.
    fn discard(&mut self, block: &Block) {
        block.discard();
        block.free_pages();
        self.bytes -= block.capacity;
    }

    /// Frees all unused blocks.
    pub(super) fn free_unused(&mut self) {
        for (block, _) in std::mem::take(&mut self.unused) {
            self.discard(&block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_most_recently_used_block_of_a_worker_is_reused_first() {
        let mut pool = BlockPool::new(64 * MIB);
        let [a, b, c] = [1, 1, 2].map(|slot| pool.take(slot, MIB).unwrap());
        let numbers = [a.number, b.number, c.number];
        [a, b, c].into_iter().for_each(|block| pool.give(block));
        assert_eq!([1, 1, 1].map(|slot| pool.take(slot, MIB).unwrap().number), [numbers[1], numbers[0], numbers[2]]);
        assert_eq!((pool.bytes(), pool.unused_bytes()), (3 * MIB, 0));
    }

    #[test]
    fn blocks_in_use_limit_new_ones_and_unused_blocks_do_not() {
        let mut pool = BlockPool::new(4 * MIB);
        let held = pool.take(0, 3 * MIB).unwrap();
        assert!(pool.take(0, 2 * MIB).is_none());
        pool.give(held);
        assert!(pool.take(1, 4 * MIB).is_some(), "the unused block of another size was freed");
        assert_eq!(pool.bytes(), 4 * MIB);
        assert!(pool.take(1, u64::MAX).is_none());
    }

    #[test]
    fn the_first_length_that_fits_is_granted() {
        let mut pool = BlockPool::new(4 * MIB);
        let (position, held) = pool.take_first(0, &[3 * MIB, MIB]).unwrap();
        let (_, small) = pool.take_first(0, &[MIB]).unwrap();
        assert_eq!((position, held.capacity), (0, 3 * MIB));
        let number = small.number;
        pool.give(small);
        let (position, small) = pool.take_first(0, &[3 * MIB, MIB]).unwrap();
        assert_eq!((position, small.number), (1, number), "a request that cannot fit frees no unused block");
        assert!(pool.take_first(0, &[3 * MIB, MIB]).is_none());
        assert_eq!(pool.granted(), 3);
    }

    #[test]
    fn a_discarded_block_is_not_reused() {
        let mut pool = BlockPool::new(4 * MIB);
        let block = pool.take(0, MIB).unwrap();
        let number = block.number;
        block.discard();
        pool.give(block);
        assert_eq!(pool.bytes(), 0);
        assert_ne!(pool.take(0, MIB).unwrap().number, number);
    }
}
