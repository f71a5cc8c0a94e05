//! Recycled blocks of 1 KiB and more, by size class. Knows nothing of who uses them.
//!
//! The first write to a fresh page costs a fault and a zeroing by the kernel, more than the copy of the bytes. Blocks
//! that come back are kept, at most [`RETAINED_BYTES`] of them, the newest handed out first because it is warm. (The
//! allocator gives a batch of 4 KiB blocks back to the kernel: 1.25 faults an object, 1.5 of 15 µs.)
#![expect(unsafe_code, reason = "maps and unmaps pages; each use says which invariant it keeps")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;
use std::sync::Mutex;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::fork;

/// Below this the allocator does as well.
pub(super) const SMALLEST_BYTES: usize = 1 << 10;

/// From here on a block is a mapping of its own; a smaller one is the allocator's.
const MAPPED_BYTES: usize = 32 << 10;

/// Blocks above this are never kept: they are few, and the kernel maps them in huge pages.
const LARGEST_KEPT_BYTES: usize = 16 << 20;

/// How much is kept in all: a batch of images, or the parts of one upload.
const RETAINED_BYTES: usize = 64 << 20;

/// Where huge pages begin to pay: the size of one on x86-64 and on aarch64 with 4 KiB pages.
#[cfg(target_os = "linux")]
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Classes grow by a quarter of a power of two, so that at most a fifth of a block's pages stay untouched.
const STEPS: usize = 4;

/// A free block: its pages are mapped, initialised, and nobody else knows them.
struct Free(NonNull<u8>);

// SAFETY: a free block has no user; whoever takes it out of the pool is its only one.
unsafe impl Send for Free {}

struct Pool {
    /// Free blocks by class; the newest last.
    classes: [Vec<Free>; CLASSES],
    retained_bytes: usize,
}

/// Classes from `SMALLEST_BYTES` to `LARGEST_KEPT_BYTES`: fourteen doublings of four steps, and the last itself.
const CLASSES: usize = 14 * STEPS + 1;

static POOL: Mutex<Pool> = Mutex::new(Pool { classes: [const { Vec::new() }; CLASSES], retained_bytes: 0 });

/// Class and capacity of the smallest block that holds `len`; `None` when such blocks are not kept.
fn class_of(len: usize) -> Option<(usize, usize)> {
    if len > LARGEST_KEPT_BYTES {
        return None;
    }
    let mut base = SMALLEST_BYTES;
    let mut class = 0;
    while base * 2 <= len {
        base *= 2;
        class += STEPS;
    }
    let step = base / STEPS;
    let steps = (len - base).div_ceil(step);
    Some((class + steps, base + steps * step))
}

/// A block for `len` bytes, and its capacity, to be given back with it.
pub(super) fn take(len: usize) -> io::Result<(NonNull<u8>, usize)> {
    let (class, capacity) = match class_of(len) {
        Some((class, capacity)) => (Some(class), capacity),
        None => (None, len.next_multiple_of(4096)),
    };
    if let Some(class) = class {
        let _inside = fork::enter();
        let mut pool = POOL.lock().expect("no holder of this lock panics");
        if let Some(Free(block)) = pool.classes[class].pop() {
            pool.retained_bytes -= capacity;
            return Ok((block, capacity));
        }
    }
    let block = if capacity < MAPPED_BYTES { allocate(capacity)? } else { map(capacity)? };
    Ok((block, capacity))
}

/// Takes a block back from its only user.
pub(super) fn give(block: NonNull<u8>, capacity: usize) {
    if let Some((class, _)) = class_of(capacity) {
        let _inside = fork::enter();
        let mut pool = POOL.lock().expect("no holder of this lock panics");
        if pool.retained_bytes + capacity <= RETAINED_BYTES {
            pool.retained_bytes += capacity;
            pool.classes[class].push(Free(block));
            return;
        }
    }
    if capacity < MAPPED_BYTES {
        // SAFETY: `allocate` made this block with this layout, and its only user has given it back.
        unsafe { dealloc(block.as_ptr(), layout(capacity)) }
    } else {
        unmap(block, capacity);
    }
}

fn layout(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, 64).expect("a class is no larger than 16 MiB")
}

fn allocate(capacity: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: the smallest class is larger than nothing.
    NonNull::new(unsafe { alloc_zeroed(layout(capacity)) }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn map(capacity: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory that exists.
    let start = unsafe {
        mmap_anonymous(std::ptr::null_mut(), capacity, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }?;
    #[cfg(target_os = "linux")]
    if capacity >= HUGE_PAGE_BYTES {
        // Advice only: where the kernel has no huge pages, small ones do.
        // SAFETY: the range is exactly the mapping made above.
        let _ = unsafe { rustix::mm::madvise(start, capacity, rustix::mm::Advice::LinuxHugepage) };
    }
    Ok(NonNull::new(start.cast()).expect("the kernel maps nothing at 0"))
}

fn unmap(block: NonNull<u8>, capacity: usize) {
    // SAFETY: `map` made exactly this mapping, and its only user has given it back. It cannot fail for such a range.
    let _ = unsafe { munmap(block.as_ptr().cast(), capacity) };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_class_holds_what_it_is_for_and_wastes_little(len in SMALLEST_BYTES..=LARGEST_KEPT_BYTES) {
            let (class, capacity) = class_of(len).unwrap();
            prop_assert!(class < CLASSES && capacity >= len && capacity - len <= capacity / 5 + 1, "{class} {capacity}");
            prop_assert_eq!(class_of(capacity), Some((class, capacity)));
        }
    }

    #[test]
    fn a_block_that_comes_back_is_handed_out_again() {
        for len in [1_234, 12_345_678] {
            let (block, capacity) = take(len).unwrap();
            give(block, capacity);
            assert_eq!(take(len).unwrap().0, block);
            give(block, capacity);
        }
    }
}
