//! Regions of memory and who gives them back. Knows nothing of what is written to them.
#![expect(unsafe_code, reason = "owns raw regions; each use says which invariant it keeps")]

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use super::pool;

/// A region of initialised bytes with one owner.
pub struct Memory {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
}

/// How a region is given back.
enum Owner {
    /// Nothing to give back: the region is empty.
    Empty,
    /// A boxed slice of the global allocator, turned into raw parts.
    Heap,
    /// A block of the pool; its capacity is that of a size class, or of its own.
    Pooled { capacity: usize },
    /// The caller's: kept exported until this is dropped.
    Lent { _keep: Box<dyn Any + Send + Sync> },
}

// SAFETY: a `Memory` is the only owner of its region (constructors below take it over whole), so moving it to another
// thread moves the region; what is lent is `Send + Sync` itself.
unsafe impl Send for Memory {}
// SAFETY: through `&Memory` the region can only be read, and only by `Buffer`, which exists when no writer does.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed or recycled memory of `len` bytes; what it holds is unspecified.
    ///
    /// # Errors
    /// The system has no more memory.
    pub fn allocate(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len, owner: Owner::Empty });
        }
        if len < pool::SMALLEST_BYTES {
            let boxed = Box::into_raw(vec![0_u8; len].into_boxed_slice());
            let start = NonNull::new(boxed.cast::<u8>()).expect("a Box is never null");
            return Ok(Self { start, len, owner: Owner::Heap });
        }
        let (start, capacity) = pool::take(len)?;
        Ok(Self { start, len, owner: Owner::Pooled { capacity } })
    }

    /// Memory of the caller's.
    ///
    /// # Safety
    /// `start..start + len` is initialised, writable, and neither moved nor freed until `keep` is dropped; nobody
    /// else writes to it meanwhile through Rust references.
    pub unsafe fn lent(start: NonNull<u8>, len: usize, keep: Box<dyn Any + Send + Sync>) -> Self {
        Self { start, len, owner: Owner::Lent { _keep: keep } }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The addresses that it covers: to tell regions apart, not to be used.
    pub fn addresses(&self) -> Range<usize> {
        let start = self.start.addr().get();
        start..start + self.len
    }

    /// Asks the kernel for huge pages where none were touched yet: one fault then brings 2 MiB. (Fresh memory of 1 GiB,
    /// measured: 0.57 s until it was written, and so 0.25 s.)
    pub fn advise_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        {
            let Range { start, end } = self.addresses();
            let first = start.next_multiple_of(pool::HUGE_PAGE_BYTES);
            let length = end.saturating_sub(first) / pool::HUGE_PAGE_BYTES * pool::HUGE_PAGE_BYTES;
            if length > 0 {
                // Advice only: where the kernel has no huge pages, small ones do.
                // SAFETY: `first..first + length` lies within the region, which is mapped while `self` lives; what its
                // pages hold does not change.
                let _ = unsafe {
                    let first = self.start.as_ptr().add(first - start).cast();
                    rustix::mm::madvise(first, length, rustix::mm::Advice::LinuxHugepage)
                };
            }
        }
    }

    /// Where it begins.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.owner {
            Owner::Empty | Owner::Lent { .. } => {}
            Owner::Heap => {
                let slice = std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.len);
                // SAFETY: `allocate` made exactly this slice by `Box::into_raw`, and only this drop takes it back.
                drop(unsafe { Box::from_raw(slice) });
            }
            Owner::Pooled { capacity } => pool::give(self.start, capacity),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = match self.owner {
            Owner::Empty => "empty",
            Owner::Heap => "heap",
            Owner::Pooled { .. } => "pooled",
            Owner::Lent { .. } => "lent",
        };
        write!(f, "Memory({} bytes, {owner})", self.len)
    }
}

/// What a test lends.
#[cfg(test)]
struct Back {
    slice: NonNull<[u8]>,
    back: std::sync::mpsc::Sender<Vec<u8>>,
}

#[cfg(test)]
// SAFETY: its slice is its own, and nobody looks at it before the drop.
unsafe impl Send for Back {}
#[cfg(test)]
// SAFETY: as above.
unsafe impl Sync for Back {}

#[cfg(test)]
impl Drop for Back {
    fn drop(&mut self) {
        // SAFETY: `sent_back` made it of a `Box`, and only this drop takes it back.
        let slice = unsafe { Box::from_raw(self.slice.as_ptr()) };
        // A test may have gone without it.
        let _ = self.back.send(slice[1..].to_vec());
    }
}

#[cfg(test)]
impl Memory {
    /// Memory of `len` zeros at an odd address, that are sent to `back` once nobody writes to them any more.
    pub(crate) fn sent_back(len: usize, back: std::sync::mpsc::Sender<Vec<u8>>) -> Self {
        let slice = NonNull::from(Box::leak(vec![0_u8; len + 1].into_boxed_slice()));
        // SAFETY: one byte lies before, and `Back` keeps all of them until it is dropped.
        unsafe { Self::lent(slice.cast::<u8>().add(1), len, Box::new(Back { slice, back })) }
    }
}
