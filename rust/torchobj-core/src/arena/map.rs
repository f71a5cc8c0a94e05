//! Creates, maps and punches the file of an arena. `layout` defines its content.
#![expect(unsafe_code, reason = "maps a file and points into it; each use states its invariant")]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::descriptor::Descriptor;

/// A `memfd`, mapped whole. Its length is sealed.
#[derive(Debug)]
pub(super) struct Map {
    /// `None` after [`close`](Self::close).
    file: Option<Descriptor>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is shared memory at a fixed address. All access is by atomics or through `Memory`, whose callers
// guarantee exclusive access to their range.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Creates an empty `memfd`.
    ///
    /// # Errors
    /// The system refuses it.
    pub(super) fn file_in_memory() -> io::Result<OwnedFd> {
        Ok(memfd_create("torchobj-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?)
    }

    /// Extends an empty file to `len` bytes, seals and maps it. It has no pages yet.
    ///
    /// # Errors
    /// The system refuses the length or the address space. The caller may retry with another length.
    pub(super) fn create(file: OwnedFd, len: u64) -> io::Result<Self> {
        ftruncate(&file, len)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::of(file)
    }

    /// Maps the file that another process created.
    ///
    /// # Errors
    /// The file is not sealed, or the system refuses the address space.
    pub(super) fn attach(file: OwnedFd) -> io::Result<Self> {
        // Access to a file that another process shrinks raises SIGBUS.
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is not an arena"));
        }
        Self::of(file)
    }

    fn of(file: OwnedFd) -> io::Result<Self> {
        let len = usize::try_from(fstat(&file)?.st_size).map_err(io::Error::other)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no existing memory.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED | MapFlags::NORESERVE, &file, 0) }?;
        // Advice only. SAFETY: the range is exactly the mapping created above.
        let _ = unsafe { madvise(start, len, Advice::LinuxDontDump) };
        let file = Some(Descriptor::new(file)?);
        Ok(Self { file, start: NonNull::new(start.cast()).expect("the kernel maps nothing at 0"), len })
    }

    /// The file.
    ///
    /// # Panics
    /// It was closed.
    pub(super) fn file(&self) -> &Descriptor {
        self.file.as_ref().expect("only mappings that no other process needs are without their file")
    }

    /// Closes the file, which stays mapped.
    pub(super) fn close(&mut self) {
        self.file = None;
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Releases the pages of a range, in all processes; it reads as zeroes afterwards.
    pub(super) fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let start = self.at(offset, len);
        let len = usize::try_from(len).expect("it is mapped");
        // Not by the descriptor, which the program may have closed. SAFETY: the range is within the mapping, as `at` checked, and
        // its callers pass memory without users.
        Ok(unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxRemove) }?)
    }

    /// Gives a range pages that can be written to without a fault, as far as the system does (Linux 5.14).
    pub(super) fn populate(&self, offset: u64, len: u64) {
        let start = self.at(offset, len);
        let len = usize::try_from(len).expect("it is mapped");
        // An error leaves the pages to faults. SAFETY: the range is within the mapping, as `at` checked; populating
        // changes no bytes.
        let _ = unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
    }

    /// Address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// The range exceeds the file.
    pub(super) fn at(&self, offset: u64, len: u64) -> NonNull<u8> {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len()),
            "range of {len} bytes at {offset} exceeds the file of {} bytes",
            self.len
        );
        // SAFETY: the offset is within the mapping, as was just checked.
        unsafe { self.start.add(usize::try_from(offset).expect("it is mapped")) }
    }

    /// The words at the start of the file.
    ///
    /// # Panics
    /// The file is shorter.
    pub(super) fn header<T: Words>(&self) -> &T {
        let start = self.at(0, size_of::<T>() as u64).cast::<T>();
        assert!(start.is_aligned());
        // SAFETY: within the mapping, aligned, and mapped as long as `self` lives; all access to it is atomic.
        unsafe { start.as_ref() }
    }
}

/// Words of shared memory.
///
/// # Safety
/// The type consists of atomic integers only, so that any bytes are valid, also while other processes write them.
pub(super) unsafe trait Words {}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: `of` created exactly this mapping, and everything that points into it keeps the `Map`. The call
        // cannot fail.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
