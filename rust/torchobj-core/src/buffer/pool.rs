//! Recycles blocks of at least 1 KiB, for any user: small ones by size class, large ones by their size.
//!
//! The first write to a new page costs a fault and zeroing by the kernel, more than the copy of the bytes. Freed blocks
//! are kept, up to [`RETAINED_BYTES`], and the most recently freed is reused first because it is in the cache. (The
//! system allocator returns a batch of 4 KiB blocks to the kernel: 1.25 faults per object, 1.5 of 15 µs. Zeroing new huge
//! pages is 0.15 of the 0.33 CPU-s per GB of a read of 64 MiB.) The kernel may take the pages of large free blocks back
//! when memory becomes scarce.
#![expect(unsafe_code, reason = "maps and unmaps pages; each use states its invariant")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;
use std::sync::Mutex;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::fork;

/// Smaller blocks come from the system allocator, which is equally fast for them.
pub(super) const MIN_POOLED_BYTES: usize = 1 << 10;

/// Blocks of at least this size are mapped; smaller ones come from the system allocator.
const MAPPED_BYTES: usize = 32 << 10;

/// Larger blocks have no size class.
const MAX_CLASS_BYTES: usize = 8 << 20;

/// Maximum size of all kept blocks with a class: the results of a read of 2,000 images.
const RETAINED_BYTES: usize = 256 << 20;

/// Beyond this size of all kept blocks with a class, the kernel may take the pages of further ones back. It is that of a
/// batch of images, or of the parts of one upload.
const RESIDENT_BYTES: usize = 64 << 20;

/// Maximum size of all kept blocks without a class. With many readers few blocks are free at a time.
const RETAINED_LARGE_BYTES: usize = 256 << 20;

/// Size of a huge page on x86-64, and on aarch64 with 4 KiB pages.
#[cfg(target_os = "linux")]
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Size classes per power of two: at most a fifth of a block's pages stay untouched.
const STEPS: usize = 4;

/// A free block. Its pages are mapped and initialised, and nothing else refers to it.
struct Free(NonNull<u8>);

// SAFETY: a free block has no user, and only the user that takes it out of the pool accesses it.
unsafe impl Send for Free {}

struct Pool {
    /// Free blocks by class, the most recently freed last.
    classes: [Vec<Free>; CLASSES],
    retained_bytes: usize,
    /// Free blocks without a class and their capacities, the most recently freed last.
    large: Vec<(usize, Free)>,
    retained_large_bytes: usize,
}

impl Pool {
    const fn new() -> Self {
        Self { classes: [const { Vec::new() }; CLASSES], retained_bytes: 0, large: Vec::new(), retained_large_bytes: 0 }
    }

    /// Takes the most recently freed large block that holds `len` bytes and wastes at most a fifth.
    fn take_large(&mut self, len: usize) -> Option<(NonNull<u8>, usize)> {
        let fits = |capacity: usize| (len..=len + len / 4).contains(&capacity);
        let index = self.large.iter().rposition(|(capacity, _)| fits(*capacity))?;
        let (capacity, Free(block)) = self.large.remove(index);
        self.retained_large_bytes -= capacity;
        Some((block, capacity))
    }

    /// Keeps a large block. Returns those that were freed first if too many are kept.
    fn keep_large(&mut self, block: NonNull<u8>, capacity: usize) -> Vec<(usize, Free)> {
        self.large.push((capacity, Free(block)));
        self.retained_large_bytes += capacity;
        let mut evicted = 0;
        while self.retained_large_bytes > RETAINED_LARGE_BYTES {
            self.retained_large_bytes -= self.large[evicted].0;
            evicted += 1;
        }
        self.large.drain(..evicted).collect()
    }
}

/// Classes from `MIN_POOLED_BYTES` to `MAX_CLASS_BYTES`: thirteen doublings of four steps, and the last itself.
const CLASSES: usize = 13 * STEPS + 1;

static POOL: Mutex<Pool> = Mutex::new(Pool::new());

/// Class and capacity of the smallest block that holds `len` bytes; `None` for large blocks.
fn class_of(len: usize) -> Option<(usize, usize)> {
    if len > MAX_CLASS_BYTES {
        return None;
    }
    let mut base = MIN_POOLED_BYTES;
    let mut class = 0;
    while base * 2 <= len {
        base *= 2;
        class += STEPS;
    }
    let step = base / STEPS;
    let steps = (len - base).div_ceil(step);
    Some((class + steps, base + steps * step))
}

/// Takes a block for `len` bytes. Returns it with its capacity, which `give` needs.
pub(super) fn take(len: usize) -> io::Result<(NonNull<u8>, usize)> {
    let capacity = {
        let _inside = fork::enter();
        let mut pool = POOL.lock().expect("no holder of this lock panics");
        match class_of(len) {
            Some((class, capacity)) => {
                if let Some(Free(block)) = pool.classes[class].pop() {
                    pool.retained_bytes -= capacity;
                    return Ok((block, capacity));
                }
                capacity
            }
            None => {
                if let Some(found) = pool.take_large(len) {
                    return Ok(found);
                }
                len.next_multiple_of(4096)
            }
        }
    };
    let block = if capacity < MAPPED_BYTES { allocate(capacity)? } else { map(capacity)? };
    Ok((block, capacity))
}

/// Returns a block, from its only user, to the pool.
pub(super) fn give(block: NonNull<u8>, capacity: usize) {
    let Some((class, _)) = class_of(capacity) else { return give_large(block, capacity) };
    let retained_bytes = {
        let _inside = fork::enter();
        POOL.lock().expect("no holder of this lock panics").retained_bytes
    };
    if capacity >= MAPPED_BYTES && retained_bytes > RESIDENT_BYTES {
        allow_reclaim(block, capacity);
    }
    {
        let _inside = fork::enter();
        let mut pool = POOL.lock().expect("no holder of this lock panics");
        if pool.retained_bytes + capacity <= RETAINED_BYTES {
            pool.retained_bytes += capacity;
            pool.classes[class].push(Free(block));
            return;
        }
    }
    if capacity < MAPPED_BYTES {
        // SAFETY: `allocate` created this block with this layout, and its only user has returned it.
        unsafe { dealloc(block.as_ptr(), layout(capacity)) }
    } else {
        unmap(block, capacity);
    }
}

fn give_large(block: NonNull<u8>, capacity: usize) {
    if capacity > RETAINED_LARGE_BYTES {
        return unmap(block, capacity);
    }
    allow_reclaim(block, capacity);
    let evicted = {
        let _inside = fork::enter();
        POOL.lock().expect("no holder of this lock panics").keep_large(block, capacity)
    };
    for (capacity, Free(block)) in evicted {
        unmap(block, capacity);
    }
}

/// Allows the kernel to replace the pages of a mapped block by zeros, to free memory, until they are written again. Advice
/// only.
fn allow_reclaim(block: NonNull<u8>, capacity: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the range is exactly a mapping of `map`, private and without a file. Nothing refers to it, and its next
    // user reads no byte that it has not written.
    let _ = unsafe { rustix::mm::madvise(block.as_ptr().cast(), capacity, rustix::mm::Advice::LinuxFree) };
    #[cfg(not(target_os = "linux"))]
    let _ = (block, capacity);
}

fn layout(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, 64).expect("a class is no larger than 8 MiB")
}

fn allocate(capacity: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: the smallest class is not empty.
    NonNull::new(unsafe { alloc_zeroed(layout(capacity)) }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn map(capacity: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address that the kernel chooses overlaps no existing memory.
    let start = unsafe {
        mmap_anonymous(std::ptr::null_mut(), capacity, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }?;
    #[cfg(target_os = "linux")]
    if capacity >= HUGE_PAGE_BYTES {
        // Advice only: without huge pages the kernel uses small ones.
        // SAFETY: the range is exactly the mapping created above.
        let _ = unsafe { rustix::mm::madvise(start, capacity, rustix::mm::Advice::LinuxHugepage) };
    }
    Ok(NonNull::new(start.cast()).expect("the kernel maps nothing at 0"))
}

fn unmap(block: NonNull<u8>, capacity: usize) {
    // SAFETY: `map` created exactly this mapping, and its only user has returned it. The call cannot fail for such a
    // range.
    let _ = unsafe { munmap(block.as_ptr().cast(), capacity) };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_size_class_fits_its_lengths_with_little_waste(len in MIN_POOLED_BYTES..=MAX_CLASS_BYTES) {
            let (class, capacity) = class_of(len).unwrap();
            prop_assert!(class < CLASSES && capacity >= len && capacity - len <= capacity / 5 + 1, "{class} {capacity}");
            prop_assert_eq!(class_of(capacity), Some((class, capacity)));
        }
    }

    #[test]
    fn a_freed_block_is_reused() {
        for len in [1_234, 1_234_567, 123_456_789] {
            let (block, capacity) = take(len).unwrap();
            give(block, capacity);
            assert_eq!(take(len).unwrap().0, block);
            give(block, capacity);
        }
    }

    #[test]
    fn a_large_block_is_reused_for_almost_its_size_only() {
        let mut pool = Pool::new();
        assert!(pool.keep_large(NonNull::dangling(), 40 << 20).is_empty());
        assert!(pool.take_large(41 << 20).is_none());
        assert!(pool.take_large(31 << 20).is_none());
        assert_eq!(pool.take_large(32 << 20), Some((NonNull::dangling(), 40 << 20)));
        assert_eq!(pool.retained_large_bytes, 0);
    }

    #[test]
    fn the_oldest_large_blocks_make_room() {
        let mut pool = Pool::new();
        for size in [100, 90, 60_usize] {
            assert!(pool.keep_large(NonNull::dangling(), size << 20).is_empty());
        }
        let evicted = pool.keep_large(NonNull::dangling(), 160 << 20);
        assert_eq!(evicted.iter().map(|(capacity, _)| capacity >> 20).collect::<Vec<_>>(), [100, 90]);
        assert_eq!(pool.retained_large_bytes, 220 << 20);
    }
}
