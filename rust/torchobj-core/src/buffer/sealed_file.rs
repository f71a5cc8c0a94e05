//! A file in memory that no process can change any more. Processes that receive its descriptor map the same pages.
#![expect(unsafe_code, reason = "maps a file and reads it; each use states its invariant")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Without the first, the bytes could change while they are read; without the second, access would raise SIGBUS.
const REQUIRED: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK);

/// A sealed `memfd`, mapped whole for reading.
#[derive(Debug)]
pub struct SealedFile {
    file: OwnedFd,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is at a fixed address, and the seals forbid every write to the file.
unsafe impl Send for SealedFile {}
// SAFETY: as above.
unsafe impl Sync for SealedFile {}

impl SealedFile {
    /// Creates an empty `memfd`, to be written and then passed to [`seal`](Self::seal). `name` appears in `/proc`.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn unsealed(name: &str) -> io::Result<File> {
        Ok(File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?))
    }

    /// Forbids further changes of a file that [`unsealed`](Self::unsealed) created, and maps it.
    ///
    /// # Errors
    /// The file is empty, or the system refuses the address space.
    pub fn seal(file: File) -> io::Result<Self> {
        fcntl_add_seals(&file, REQUIRED | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file.into())
    }

    /// Maps the file of a descriptor that this process received, and owns the descriptor.
    ///
    /// # Errors
    /// The file is not sealed, or the system refuses the address space.
    pub fn received(file: RawFd) -> io::Result<Self> {
        if file < 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a file descriptor"));
        }
        // SAFETY: a descriptor is a number without memory; the caller received it for this purpose, and a closed one is
        // refused by the next call.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        if !fcntl_get_seals(&file)?.contains(REQUIRED) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is not sealed"));
        }
        Self::map(file)
    }

    fn map(file: OwnedFd) -> io::Result<Self> {
        let len = usize::try_from(fstat(&file)?.st_size).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no existing memory.
        let start = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &file, 0) }?;
        Ok(Self { file, start: NonNull::new(start.cast()).expect("the kernel maps nothing at 0"), len })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: exactly the mapping, which lives as long as `self`. The seals, which `seal` set or `received` checked,
        // forbid every write and truncation.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The file, to pass it to another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SealedFile {
    fn drop(&mut self) {
        // SAFETY: `map` created exactly this mapping, and slices of it borrow `self`. The call cannot fail.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::IntoRawFd;

    use super::*;

    #[test]
    fn another_mapping_of_the_descriptor_has_the_same_bytes() {
        let mut file = SealedFile::unsealed("test").unwrap();
        file.write_all(b"bytes").unwrap();
        let sealed = SealedFile::seal(file).unwrap();
        let other = SealedFile::received(sealed.file().try_clone_to_owned().unwrap().into_raw_fd()).unwrap();
        assert_eq!((sealed.as_slice(), other.as_slice()), (&b"bytes"[..], &b"bytes"[..]));
        assert!(File::from(other.file().try_clone_to_owned().unwrap()).write_all(b"x").is_err());
    }

    #[test]
    fn a_file_that_can_still_change_is_refused() {
        let mut file = SealedFile::unsealed("test").unwrap();
        file.write_all(b"bytes").unwrap();
        assert!(SealedFile::received(file.into_raw_fd()).is_err());
        assert!(SealedFile::received(-1).is_err());
    }
}
