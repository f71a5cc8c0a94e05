//! The temporary file of a download: beside its target, locked, and renamed to it when it is complete.
//!
//! Its name depends on that of the target only, so that a download finds what an earlier one left behind, and no more than
//! one such file exists for a target. If another process is downloading to the same target, the name is a random one.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, fchmod, flock, fstat, fstatvfs,
    futimens, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::mtime::Mtime;
use crate::id::unique_id;

/// Prefix of the names of temporary files, also of those of file:// stores. Walks and listings of folders skip them.
pub(crate) const PREFIX: &str = ".torchobj-";

/// A file can be replaced between its opening and its locking. More often than this is not by chance.
const ATTEMPTS: usize = 100;

/// A locked temporary file. Dropping it removes the file, unless it was published or kept.
#[derive(Debug)]
pub(super) struct Temporary {
    folder: Arc<OwnedFd>,
    name: String,
    pub(super) file: Arc<File>,
    /// Whether this process alone uses the name of the target's temporary file: a later download of the target finds it.
    pub(super) resumable: bool,
    remove: bool,
}

impl Temporary {
    /// Opens or creates the temporary file of `target` in `folder`.
    pub(super) fn open(folder: &Arc<OwnedFd>, target: &str) -> io::Result<Self> {
        let mut name = name_of(target);
        let mut resumable = true;
        for _ in 0..ATTEMPTS {
            let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let mode = Mode::from_raw_mode(mode_beside(existing_mode(folder, target)));
            let file = match openat(folder, &name, flags, mode) {
                // A symbolic link or a folder.
                Err(Errno::LOOP | Errno::MLINK | Errno::ISDIR) => {
                    (name, resumable) = (random_name(), false);
                    continue;
                }
                file => file?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                // Another process holds it, or the file system has no locks.
                Err(_) if resumable => {
                    (name, resumable) = (random_name(), false);
                    continue;
                }
                // The random name is of this process only.
                Err(_) => {}
            }
            let own = fstat(&file)?;
            match statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) if is_same(&own, &found) => {}
                // The process that held it has renamed or removed it.
                Ok(_) | Err(Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            }
            // A file with another name, or a special file.
            if own.st_nlink != 1 || FileType::from_raw_mode(own.st_mode) != FileType::RegularFile {
                unlinkat(folder, &name, AtFlags::empty())?;
                continue;
            }
            // An earlier download may have begun before the target existed.
            if !mode.contains(Mode::from_raw_mode(own.st_mode & 0o777)) {
                fchmod(&file, Mode::from_raw_mode(own.st_mode) & mode)?;
            }
            let file = Arc::new(File::from(file));
            return Ok(Self { folder: folder.clone(), name, file, resumable, remove: true });
        }
        Err(io::Error::other(format!("another program replaces the temporary file {name} continually")))
    }

    /// Keeps the file when this is dropped, for a later download.
    pub(super) fn keep(&mut self, keep: bool) {
        self.remove = !keep;
    }

    /// Number of bytes that the file system lacks to hold `size` bytes in this file; 0 if they fit or this is unknown.
    pub(super) fn missing_bytes(&self, size: u64) -> io::Result<u64> {
        let space = fstatvfs(&*self.file)?;
        // Some file systems do not report their size.
        if space.f_blocks == 0 {
            return Ok(0);
        }
        let allocated = u64::try_from(fstat(&*self.file)?.st_blocks).unwrap_or(0) * 512;
        let available = space.f_bavail.saturating_mul(space.f_frsize);
        Ok(size.saturating_sub(allocated).saturating_sub(available))
    }

    /// Makes the bytes of the file durable and gives it the name `target`. An existing file is replaced, and its permissions are
    /// kept; a special file is not replaced. The name is durable after a [`sync`](super::Folder::sync) of the folder.
    pub(super) fn publish(mut self, target: &str, mtime: Option<Mtime>) -> io::Result<()> {
        if let Some((tv_sec, tv_nsec)) = mtime.and_then(Mtime::parts) {
            let time = Timespec { tv_sec, tv_nsec: tv_nsec.into() };
            futimens(&*self.file, &Timestamps { last_access: time, last_modification: time })?;
        }
        let found = statat(&self.folder, target, AtFlags::SYMLINK_NOFOLLOW).ok();
        match found.map(|found| (FileType::from_raw_mode(found.st_mode), found.st_mode)) {
            Some((FileType::RegularFile, mode)) => fchmod(&*self.file, Mode::from_raw_mode(mode & 0o777))?,
            None | Some((FileType::Symlink | FileType::Directory, _)) => {}
            // It was created during the download.
            Some(_) => return Err(Errno::EXIST.into()),
        }
        self.file.sync_all()?;
        renameat(&self.folder, &self.name, &self.folder, target)?;
        self.remove = false;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if self.remove {
            // Best effort: the next download to this target reuses the file.
            let _ = unlinkat(&self.folder, &self.name, AtFlags::empty());
        }
    }
}

/// The permissions of the regular file `name`, if it exists.
fn existing_mode(folder: &OwnedFd, name: &str) -> Option<u32> {
    let found = statat(folder, name, AtFlags::empty()).ok()?;
    (FileType::from_raw_mode(found.st_mode) == FileType::RegularFile).then_some(found.st_mode)
}

/// The permissions of a temporary file before the umask: it may have the bytes of a file that others must not read, so it
/// has none that the file that it replaces lacks, except to be written by its owner.
pub(crate) fn mode_beside(replaced: Option<u32>) -> u32 {
    0o666 & (replaced.unwrap_or(0o666) | 0o600)
}

fn is_same(one: &Stat, other: &Stat) -> bool {
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}

/// The name of the temporary file of `target`.
fn name_of(target: &str) -> String {
    let hash = Sha256::digest(target.as_bytes());
    let digits: String = hash[..12].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{PREFIX}{digits}.part")
}

fn random_name() -> String {
    format!("{PREFIX}{}.part", unique_id())
}
