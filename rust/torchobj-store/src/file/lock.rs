//! Replaces or deletes a file if it has an expected version, under the lock of its folder.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use torchobj_core::types::Version;

use super::entry::version;

/// The lock of a folder. Every process that writes through this store holds it while it replaces or deletes a file of the
/// folder. Creating a file under a new name needs no lock.
pub(super) struct FolderLock<'a>(&'a File);

impl<'a> FolderLock<'a> {
    /// Waits for the lock.
    ///
    /// # Errors
    /// The file system does not support locks.
    pub(super) fn acquire(folder: &'a File) -> io::Result<Self> {
        loop {
            match folder.lock() {
                // A signal handler ran.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                locked => return locked.map(|()| Self(folder)),
            }
        }
    }
}

impl Drop for FolderLock<'_> {
    fn drop(&mut self) {
        // Closing the file is not enough: a forked child has a copy of the descriptor, which keeps the lock.
        let _ = self.0.unlock();
    }
}

/// Opens the folder of a file. `O_DIRECTORY`: opening a FIFO would block.
pub(super) fn open_folder(path: &Path) -> io::Result<File> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let flags = (OFlags::DIRECTORY | OFlags::CLOEXEC).bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(folder)
}

/// Calls `change` if the file has the version `expected`. No other call replaces or deletes the file meanwhile.
///
/// # Errors
/// `AlreadyExists` if the file has another version; `NotFound` if it does not exist.
pub(super) fn if_version_matches(
    path: &Path,
    expected: &Version,
    change: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let folder = open_folder(path)?;
    let _lock = FolderLock::acquire(&folder).map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error))?;
    match fs::metadata(path) {
        Ok(metadata) if version(&metadata) == *expected => change(path),
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) => Err(error),
    }
}
