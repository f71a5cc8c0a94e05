//! The file of an arena, in memory: made, mapped, and punched. Knows nothing of what lies where.
#![expect(unsafe_code, reason = "maps a file and points into it; each use says which invariant it keeps")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::memfd_create;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// A file without a name, mapped whole. Its length never changes: that is sealed.
#[derive(Debug)]
pub(super) struct Map {
    file: OwnedFd,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is shared memory at a fixed address; what lies in it is reached by atomics, or by `copy_in` and
// `copy_out` and `Memory`, whose callers say who else has access.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// A new file without a name and without bytes.
    ///
    /// # Errors
    /// The system refuses it.
    pub(super) fn file_in_memory() -> io::Result<OwnedFd> {
        Ok(memfd_create("torchobj-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?)
    }

    /// A new file, made `len` bytes long, none of which has a page.
    ///
    /// # Errors
    /// The system refuses so long a file, or so much of the address space. The file may be tried with another length.
    pub(super) fn create(file: OwnedFd, len: u64) -> io::Result<Self> {
        ftruncate(&file, len)?;
        let map = Self::of(file)?;
        fcntl_add_seals(&map.file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(map)
    }

    /// The file of another process.
    ///
    /// # Errors
    /// It is not sealed, or the system refuses so much of the address space.
    pub(super) fn attach(file: OwnedFd) -> io::Result<Self> {
        // One that can shrink would make reading it a fault.
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no file of an arena"));
        }
        Self::of(file)
    }

    fn of(file: OwnedFd) -> io::Result<Self> {
        let len = usize::try_from(fstat(&file)?.st_size).map_err(io::Error::other)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED | MapFlags::NORESERVE, &file, 0) }?;
        // Advice only. SAFETY: the range is exactly the mapping made above.
        let _ = unsafe { madvise(start, len, Advice::LinuxDontDump) };
        Ok(Self { file, start: NonNull::new(start.cast()).expect("the kernel maps nothing at 0"), len })
    }

    /// The file.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Gives the pages of a range back; it reads as zeroes from then on.
    pub(super) fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        Ok(fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?)
    }

    /// Where `len` bytes at `offset` are.
    ///
    /// # Panics
    /// When they lie outside.
    pub(super) fn at(&self, offset: u64, len: u64) -> NonNull<u8> {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len()),
            "{len} bytes at {offset} of {}",
            self.len
        );
        // SAFETY: the offset lies within the mapping, as was just checked.
        unsafe { self.start.add(usize::try_from(offset).expect("it is mapped")) }
    }

    /// The word at `offset`, a multiple of 4.
    pub(super) fn word(&self, offset: u64) -> &AtomicU32 {
        let place = self.at(offset, 4).cast::<AtomicU32>();
        assert!(place.is_aligned());
        // SAFETY: within the mapping, aligned, and mapped for as long as `self`; all access to it is by atomics.
        unsafe { place.as_ref() }
    }

    /// The double word at `offset`, a multiple of 8.
    pub(super) fn long(&self, offset: u64) -> &AtomicU64 {
        let place = self.at(offset, 8).cast::<AtomicU64>();
        assert!(place.is_aligned());
        // SAFETY: as in `word`.
        unsafe { place.as_ref() }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: `attach` made exactly this mapping; whatever points into it keeps the `Map`. It cannot fail.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
