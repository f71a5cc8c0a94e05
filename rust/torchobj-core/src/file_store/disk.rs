//! Opens, writes, replaces and deletes files. A write is to a temporary file beside the target, which is renamed. Files are replaced
//! and deleted under the lock of their folder, also on the condition of a version. Special files are neither. Knows no keys.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::files::folder::sync_folder;
use crate::files::pseudo::has_unknown_size;
use crate::files::special::SpecialFile;
use crate::files::temporary::{PREFIX, mode_beside};
use crate::types::{Condition, Version};
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};
use rustix::fs::OFlags;

/// Configuration of folders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileConfig {
    /// Whether a write returns only after the file and its folder are flushed to the disk.
    pub sync: bool,
}

impl Default for FileConfig {
    fn default() -> Self {
        Self { sync: true }
    }
}

/// The version of a file: inode, size and mtime, which change if the file is replaced or rewritten.
pub(super) fn version(metadata: &Metadata) -> Version {
    let (inode, size) = (metadata.ino(), metadata.len());
    Version::new(format!("{inode:x}-{size:x}-{:x}.{:x}", metadata.mtime(), metadata.mtime_nsec()))
}

pub(super) fn modified_ms(metadata: &Metadata) -> i64 {
    metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000
}

/// A regular file that is open for reading.
pub(super) struct RegularFile {
    pub(super) file: File,
    pub(super) metadata: Metadata,
    /// All bytes of a file whose size is not known before they are read.
    pub(super) content: Option<Bytes>,
}

impl RegularFile {
    /// Opens a regular file; anything else is `NotFound`. `O_NONBLOCK`: opening a FIFO would wait for a writer.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed();
        let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let mut content = None;
        if has_unknown_size(&file, &metadata)? {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            content = Some(bytes.into());
        }
        Ok(Self { file, metadata, content })
    }

    /// Size in bytes.
    pub(super) fn size(&self) -> u64 {
        self.content.as_ref().map_or(self.metadata.len(), |content| content.len() as u64)
    }

    /// The version, which depends on the bytes of a file whose size is not known.
    pub(super) fn version(&self) -> Version {
        let Some(content) = &self.content else { return version(&self.metadata) };
        let crc = checksum(CrcAlgorithm::Crc64Nvme, content);
        Version::new(format!("{:x}-{:x}-crc64:{crc:x}", self.metadata.ino(), content.len()))
    }
}

/// Returns the metadata of a regular file, its size and its version. Reads a file whose size is not known.
pub(super) fn stat(path: &Path) -> io::Result<(Metadata, u64, Version)> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::ErrorKind::NotFound.into());
    }
    if metadata.blocks() == 0 {
        match RegularFile::open(path) {
            // The metadata of a file that cannot be read can be.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            opened => {
                let opened = opened?;
                let (size, version) = (opened.size(), opened.version());
                return Ok((opened.metadata, size, version));
            }
        }
    }
    let (size, version) = (metadata.len(), version(&metadata));
    Ok((metadata, size, version))
}

/// Returns the size of a regular file, or `None` if it is not known before the file is read.
pub(super) fn listed_size(path: &Path, metadata: &Metadata) -> Option<u64> {
    let is_unknown = || RegularFile::open(path).is_ok_and(|found| found.content.is_some());
    (metadata.len() > 0 || !is_unknown()).then_some(metadata.len())
}

/// Returns whether a folder on the way from the folder `tree` to a file is a symbolic link.
pub(super) fn has_link(tree: &Path, target: &Path) -> bool {
    let above = target.ancestors().skip(1).take_while(|path| *path != tree && path.starts_with(tree));
    above.into_iter().any(Path::is_symlink)
}

/// Creates a folder and those above it, and makes their names durable if `sync`.
fn create_folders(folder: &Path, sync: bool) -> io::Result<()> {
    let Some(above) = folder.parent().filter(|_| sync && !folder.is_dir()) else {
        return fs::create_dir_all(folder);
    };
    create_folders(above, sync)?;
    match fs::create_dir(folder) {
        Ok(()) => match open_folder(folder) {
            // A folder may be written to and not be read.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            opened => sync_folder(opened?),
        },
        Err(_) if folder.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

/// A file that is written beside its target. Dropping it removes the file, unless it was published or kept.
pub(super) struct TemporaryFile {
    path: PathBuf,
}

impl TemporaryFile {
    /// Creates the file and the folders above it.
    pub(super) fn create(target: &Path, id: &str, config: FileConfig) -> io::Result<(Self, File)> {
        let folder = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
        create_folders(folder, config.sync)?;
        let path = Self::path_for(target, id);
        let replaced = fs::metadata(target).ok().filter(Metadata::is_file);
        let mode = mode_beside(replaced.map(|replaced| replaced.mode()));
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path)?;
        Ok((Self { path }, file))
    }

    /// Takes over an existing file.
    pub(super) fn adopt(path: PathBuf) -> Self {
        Self { path }
    }

    /// Keeps the file for a later call.
    pub(super) fn keep(mut self) {
        self.path = PathBuf::new();
    }

    /// Path of the file of upload `id`. It does not contain the name of the target, which may have 255 bytes.
    pub(super) fn path_for(target: &Path, id: &str) -> PathBuf {
        target.with_file_name(format!("{PREFIX}{id}"))
    }

    /// Renames the file to `target`, durably if `config.sync`. It gets the permissions of the file that it replaces.
    ///
    /// # Errors
    /// `AlreadyExists` if the condition is not met; `InvalidFilename` if a special file has the name by now.
    pub(super) fn publish(
        self,
        file: &File,
        target: &Path,
        condition: &Condition,
        config: FileConfig,
    ) -> io::Result<Version> {
        if let Ok(replaced) = fs::symlink_metadata(target)
            && replaced.is_file()
        {
            file.set_permissions(Permissions::from_mode(replaced.mode() & 0o777))?;
        }
        if config.sync {
            file.sync_all()?;
        }
        if target.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if SpecialFile::find(target).is_some() {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        let folder = open_folder(target)?;
        match condition {
            Condition::Always => {
                // Only conditional writes need the lock; a file system without locks does not support them.
                let _lock = FolderLock::acquire(&folder).ok();
                fs::rename(&self.path, target)?;
            }
            // `hard_link` never replaces a file. Dropping `self` removes the temporary name.
            Condition::Absent => fs::hard_link(&self.path, target)?,
            Condition::Matches(version) => {
                match if_version_matches(target, version, |path| fs::rename(&self.path, path)) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        return Err(io::ErrorKind::AlreadyExists.into());
                    }
                    done => done?,
                }
            }
        }
        if config.sync {
            sync_folder(folder)?;
        }
        Ok(version(&file.metadata()?))
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // It does not exist any more after a rename.
            let _ = fs::remove_file(&self.path);
        }
    }
}

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
/// `AlreadyExists` if the file has another version; `NotFound` if it does not exist; `InvalidFilename` if it is a special file.
pub(super) fn if_version_matches(
    path: &Path,
    expected: &Version,
    change: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let folder = open_folder(path)?;
    let _lock = FolderLock::acquire(&folder).map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error))?;
    if SpecialFile::find(path).is_some() {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    match fs::metadata(path) {
        Ok(metadata) if version(&metadata) == *expected => change(path),
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) => Err(error),
    }
}

/// Removes a file under the lock of its folder, so that a conditional write of it is atomic.
///
/// # Errors
/// `InvalidFilename` if it is a special file.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    if SpecialFile::find(path).is_some() {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    // Removing a file does not need permission to open its folder; a conditional write does.
    let folder = open_folder(path).ok();
    let _lock = folder.as_ref().and_then(|folder| FolderLock::acquire(folder).ok());
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::id::unique_id;

    /// Returns a new folder with one file, and the version of the file.
    fn one_file(name: &str) -> (PathBuf, PathBuf, Version) {
        let folder = std::env::temp_dir().join(format!("torchobj-{name}-{}", unique_id()));
        let target = folder.join("k");
        let version = write(&target, b"one").unwrap();
        (folder, target, version)
    }

    fn write(target: &Path, content: &[u8]) -> io::Result<Version> {
        let (temporary, mut file) = TemporaryFile::create(target, &unique_id(), FileConfig::default())?;
        file.write_all(content)?;
        temporary.publish(&file, target, &Condition::Always, FileConfig::default())
    }

    /// Runs `change` in another thread, and returns when it has ended, or 100 ms after it has begun.
    fn run_concurrently(change: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
        let (progress, receiver) = mpsc::channel();
        let thread = thread::spawn(move || {
            let _ = progress.send("begun");
            change();
            let _ = progress.send("ended");
        });
        assert_eq!(receiver.recv(), Ok("begun"));
        let _ = receiver.recv_timeout(Duration::from_millis(100));
        thread
    }

    #[test]
    fn a_conditional_delete_does_not_remove_a_file_written_after_its_check() {
        let (folder, target, version) = one_file("delete-if");
        let (temporary, mut file) = TemporaryFile::create(&target, &unique_id(), FileConfig::default()).unwrap();
        file.write_all(b"two").unwrap();
        let mut writer = None;
        if_version_matches(&target, &version, |path| {
            let target = target.clone();
            writer = Some(run_concurrently(move || {
                temporary.publish(&file, &target, &Condition::Always, FileConfig::default()).unwrap();
            }));
            fs::remove_file(path)
        })
        .unwrap();
        writer.unwrap().join().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"two");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_conditional_write_does_not_restore_a_file_deleted_after_its_check() {
        let (folder, target, version) = one_file("put-if");
        let id = unique_id();
        let (_temporary, _file) = TemporaryFile::create(&target, &id, FileConfig::default()).unwrap();
        let written = TemporaryFile::path_for(&target, &id);
        let mut deleter = None;
        if_version_matches(&target, &version, |path| {
            let target = target.clone();
            deleter = Some(run_concurrently(move || remove(&target).unwrap()));
            fs::rename(&written, path)
        })
        .unwrap();
        deleter.unwrap().join().unwrap();
        assert!(!target.exists());
        fs::remove_dir_all(folder).unwrap();
    }
}
