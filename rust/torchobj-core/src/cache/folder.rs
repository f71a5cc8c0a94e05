//! The folder of a cache: where files are, who may use it, and how they are written and deleted within the shared count. Does not
//! decide what is kept.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::process::geteuid;

use super::entry::EntryKey;
use super::usage::{Counts, LOCK_TIMEOUT, Usage, disk_bytes, file_options};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::id::unique_id;

/// The subfolder of this version of the format. A later one has its own.
const FORMAT: &str = "v1";
/// Subfolder of `FORMAT` with the files that are being written.
const WRITING: &str = "writing";
const USAGE: &str = "usage";

/// The file that a cache has before all others: a folder with other files and without it is not a cache. Programs that make backups
/// skip folders with it (<https://bford.info/cachedir/>).
const TAG: &str = "CACHEDIR.TAG";
const TAG_TEXT: &str =
    "Signature: 8a477f597d28d172789f06886806bc55\n# Disk cache of torchobj: `torchobj cache --help`.\n";

/// The digits of an entry's name after those of its folder.
const FILE_NAME_DIGITS: usize = 30;

/// The digits of the name of a file that is being written: those of [`unique_id`].
const TEMPORARY_NAME_DIGITS: usize = 32;

/// A file of the cache in its folder.
#[derive(Debug)]
pub(super) struct Found {
    /// When it was last read, in seconds since 1970.
    pub(super) read_s: i64,
    pub(super) length: u64,
    pub(super) path: PathBuf,
}

impl Found {
    /// The file of an entry at `path`; `None` if it is deleted meanwhile, or of another program.
    pub(super) fn entry(path: PathBuf) -> Option<Self> {
        Self::at(path, FILE_NAME_DIGITS)
    }

    /// The file at `path` that is being written, or was when its process was killed; `None` as for [`entry`](Self::entry).
    fn temporary(path: PathBuf) -> Option<Self> {
        Self::at(path, TEMPORARY_NAME_DIGITS)
    }

    fn at(path: PathBuf, digits: usize) -> Option<Self> {
        let is_named = path.file_name().is_some_and(|name| is_hexadecimal(name, digits));
        let found = fs::symlink_metadata(&path).ok().filter(|found| is_named && found.is_file())?;
        Some(Self { read_s: found.mtime(), length: found.len(), path })
    }
}

/// What became of a file to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// It is in the folder.
    Published,
    /// Another process or thread has written it.
    Existed,
    /// All files would have more than the maximum number of bytes.
    Full,
    /// It would leave too few bytes of the file system free.
    NoSpace,
}

/// The folder of a cache.
#[derive(Debug)]
pub struct CacheFolder {
    path: PathBuf,
    pub(super) usage: Usage,
}

impl CacheFolder {
    /// The cache in `folder`, which is created if it does not exist.
    ///
    /// # Errors
    /// `Config` if the folder belongs to another user, others may write to it, it has files of other programs where those of the
    /// cache would be, or it is on a network file system; `Io` if it cannot be created.
    pub fn create(folder: &Path) -> Result<Self> {
        Self::check_link(folder)?;
        let failed = |source: io::Error| {
            let is_file = matches!(source.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory);
            let kind = if is_file { ErrorKind::Config } else { ErrorKind::Io };
            refusal(kind, folder, "the cache folder cannot be created").with_source(source)
        };
        private_folder().recursive(true).create(folder).map_err(failed)?;
        check_owner(folder, &fs::metadata(folder).map_err(failed)?)?;
        let path = folder.join(FORMAT);
        private_folder().recursive(true).create(&path).map_err(failed)?;
        check_owner(&path, &fs::symlink_metadata(&path).map_err(failed)?)?;
        let is_new = mark(&path).map_err(failed)?;
        check_mark(&path)?;
        private_folder().recursive(true).create(path.join(WRITING)).map_err(failed)?;
        let cache = Self::open(folder)?;
        if is_new {
            // Unless another process has counted meanwhile, no process has written: the count was unknown.
            let counted = cache.usage.change(|counts| {
                counts.used = if counts.used == u64::MAX { 0 } else { counts.used };
                Ok(())
            });
            counted.map_err(failed)?;
        }
        Ok(cache)
    }

    /// The cache in `folder`, which must exist.
    ///
    /// # Errors
    /// As [`create`](Self::create), and `NotFound` if it contains no cache.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::check_link(folder)?;
        let path = folder.join(FORMAT);
        let missing = |source: io::Error| {
            let (kind, message) = match source.kind() {
                io::ErrorKind::NotFound => (ErrorKind::NotFound, "there is no cache in this folder"),
                _ => (ErrorKind::Io, "the cache folder cannot be read"),
            };
            refusal(kind, folder, message).with_source(source)
        };
        check_owner(folder, &fs::metadata(folder).map_err(missing)?)?;
        check_owner(&path, &fs::symlink_metadata(&path).map_err(missing)?)?;
        check_mark(&path)?;
        let writing = path.join(WRITING);
        check_owner(&writing, &fs::symlink_metadata(&writing).map_err(missing)?)?;
        check_file_system(&path)?;
        let usage = Usage::new(path.join(USAGE));
        Ok(Self { path, usage })
    }

    /// Refuses a symbolic link that another user may change.
    fn check_link(folder: &Path) -> Result<()> {
        match fs::symlink_metadata(folder) {
            Ok(found) if found.is_symlink() && found.uid() != geteuid().as_raw() => {
                Err(refusal(ErrorKind::Config, folder, "the cache folder is a symbolic link of another user"))
            }
            _ => Ok(()),
        }
    }

    /// What is in the folder and is not of the cache.
    pub(super) fn others(&self) -> io::Result<Vec<PathBuf>> {
        let mut others = Vec::new();
        for found in fs::read_dir(&self.path)? {
            let found = found?;
            let name = found.file_name();
            let is_entries = is_hexadecimal(&name, 2) && found.file_type()?.is_dir();
            if !is_entries && ![WRITING, USAGE, TAG].iter().any(|own| name == *own) {
                others.push(found.path());
            }
        }
        for found in fs::read_dir(self.path.join(WRITING))? {
            let path = found?.path();
            if Found::temporary(path.clone()).is_none() && fs::symlink_metadata(&path).is_ok() {
                others.push(path);
            }
        }
        Ok(others)
    }

    /// Path of the file with this name.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        let (folder, rest) = name.split_at(2);
        self.path.join(folder).join(rest)
    }

    /// The folders with files.
    pub(super) fn folders(&self) -> impl Iterator<Item = PathBuf> + use<> {
        let path = self.path.clone();
        (0..=u8::MAX).map(move |number| path.join(format!("{number:02x}")))
    }

    /// Accounted bytes of all files; `None` if they are not known before a scan.
    pub(super) fn used_bytes(&self) -> io::Result<Option<u64>> {
        Ok(Some(self.usage.counts()?.used).filter(|used| *used != u64::MAX))
    }

    /// Bytes that the file system can still take; `u64::MAX` if unknown.
    pub(super) fn free_bytes(&self) -> io::Result<u64> {
        let space = statvfs(&self.path)?;
        Ok(if space.f_blocks == 0 { u64::MAX } else { space.f_bavail.saturating_mul(space.f_frsize) })
    }

    /// Writes the file of an entry if all files have at most `max_bytes` then, and the file system has `min_free_bytes`.
    pub(super) fn write(
        &self,
        key: &EntryKey,
        bytes: &[u8],
        max_bytes: u64,
        min_free_bytes: u64,
    ) -> io::Result<Written> {
        let target = self.path_of(&key.name());
        if fs::symlink_metadata(&target).is_ok() {
            return Ok(Written::Existed);
        }
        let (length, size) = (key.file_bytes(), disk_bytes(key.file_bytes()));
        if self.free_bytes()? < size.saturating_add(min_free_bytes) {
            return Ok(Written::NoSpace);
        }
        let temporary = Temporary::create(&self.path.join(WRITING))?;
        // Its length says what is reserved, to a process that finds the file of a killed one.
        let set_length = || temporary.file.set_len(length);
        let reserved = self.usage.add_then(|counts| counts.reserve(size, max_bytes), set_length);
        if !matches!(reserved, Ok(true)) {
            temporary.delete();
            return reserved.map(|_| Written::Full);
        }
        let published = self.publish(&temporary, key, bytes, &target);
        if !matches!(published, Ok(Written::Published)) {
            self.usage.change(|counts| {
                temporary.delete();
                counts.release(size);
                Ok(())
            })?;
        }
        published
    }

    fn publish(&self, temporary: &Temporary, key: &EntryKey, bytes: &[u8], target: &Path) -> io::Result<Written> {
        temporary.file.write_all_at(bytes, 0)?;
        temporary.file.write_all_at(&key.trailer(bytes), bytes.len() as u64)?;
        let folder = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
        match private_folder().create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let is_published = self.usage.add_then(
            |counts| {
                counts.change(disk_bytes(key.file_bytes()));
                fs::symlink_metadata(target).is_err()
            },
            || fs::rename(&temporary.path, target),
        )?;
        Ok(if is_published { Written::Published } else { Written::Existed })
    }

    /// Deletes a file, which was written with `length` bytes; `None` if that is unknown. Succeeds if it does not exist. Follows no
    /// symbolic link. A file that has another length now may have been counted with either, so the count stays, and a scan is due.
    pub(super) fn remove(&self, path: &Path, length: Option<u64>, patience: Duration) -> io::Result<()> {
        self.usage.change_within(patience, |counts| {
            let found = fs::symlink_metadata(path).ok().filter(Metadata::is_file).map(|found| found.len());
            match fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                removed => removed?,
            }
            counts.change(disk_bytes(found.max(length).unwrap_or(0)));
            match length.filter(|length| found == Some(*length)) {
                Some(length) => counts.release(disk_bytes(length)),
                None => counts.scanned_s = 0,
            }
            Ok(())
        })
    }

    /// Deletes the temporary files of processes that were killed.
    pub(super) fn sweep(&self) -> io::Result<()> {
        for found in fs::read_dir(self.path.join(WRITING))? {
            let Some(Found { path, .. }) = Found::temporary(found?.path()) else { continue };
            let Ok(file) = file_options().read(true).open(&path) else { continue };
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                self.remove(&path, Some(file.metadata()?.len()), LOCK_TIMEOUT)?;
                // Its process may have been killed before it had set the length of what it reserved.
                self.usage.change(|counts| {
                    counts.scanned_s = 0;
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Bytes of the files that are being written. Called under the lock of the counts.
    pub(super) fn writing_bytes(&self, _locked: &Counts) -> io::Result<u64> {
        let mut sum = 0;
        for found in fs::read_dir(self.path.join(WRITING))? {
            // It may be published or deleted meanwhile by a process that was refused.
            sum += Found::temporary(found?.path()).map_or(0, |found| disk_bytes(found.length));
        }
        Ok(sum)
    }
}

/// A file that is being written. It is locked until this is dropped: another process deletes an unlocked one.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    /// A new file in `folder`.
    fn create(folder: &Path) -> io::Result<Self> {
        loop {
            let path = folder.join(unique_id());
            let file = file_options().write(true).create_new(true).open(&path)?;
            // A sweep of a process that starts may find it before it is locked, and deletes it.
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error.into()),
                Ok(()) if file.metadata()?.nlink() == 0 => {}
                Ok(()) => return Ok(Self { path, file }),
            }
        }
    }

    /// Deletes the file. It does not exist if the folder was removed.
    fn delete(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn private_folder() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
}

/// Whether `name` is one of `length` hexadecimal digits.
fn is_hexadecimal(name: &OsStr, length: usize) -> bool {
    let digits = name.as_bytes();
    digits.len() == length && digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Marks a folder as a cache if it is empty. Returns whether it was.
fn mark(path: &Path) -> io::Result<bool> {
    for found in fs::read_dir(path)? {
        if found?.file_name() != TAG {
            return Ok(false);
        }
    }
    let tag = path.join(TAG);
    // It may be empty: a process was killed, or is writing it now.
    if !TAG_TEXT.as_bytes().starts_with(&fs::read(&tag).unwrap_or_default()) {
        return Ok(false);
    }
    let file = file_options().write(true).create(true).truncate(false).open(tag)?;
    file.write_all_at(TAG_TEXT.as_bytes(), 0)?;
    Ok(true)
}

/// Refuses a folder that no cache has marked: its files are those of another program.
fn check_mark(path: &Path) -> Result<()> {
    if fs::read(path.join(TAG)).is_ok_and(|text| text == TAG_TEXT.as_bytes()) {
        return Ok(());
    }
    let message =
        format!("the folder has files of another program and no {TAG} of a cache: name another folder for the cache");
    Err(refusal(ErrorKind::Config, path, &message))
}

fn refusal(kind: ErrorKind, folder: &Path, message: &str) -> Error {
    Error::new(kind, Operation::Connect, format!("file://{}", folder.display()), message)
}

/// Refuses a folder to which another user may write: its files would be returned as objects.
fn check_owner(folder: &Path, found: &Metadata) -> Result<()> {
    let refuse = |message: &str| Err(refusal(ErrorKind::Config, folder, message));
    if !found.is_dir() {
        return refuse("the cache folder must be a folder, and no symbolic link");
    }
    if found.uid() != geteuid().as_raw() {
        return refuse("the cache folder belongs to another user: each user needs a folder of their own");
    }
    if found.mode() & 0o022 != 0 {
        return refuse("other users may write to the cache folder: run `chmod 700` on it, or name another folder");
    }
    Ok(())
}

/// Refuses network file systems: their locks and reads wait for a server, and several machines would share the count.
#[cfg(target_os = "linux")]
fn check_file_system(folder: &Path) -> Result<()> {
    if is_network(rustix::fs::statfs(folder).map_or(0, |found| found.f_type as u32)) {
        let message = "the cache folder is on a network file system: name a folder of a local disk";
        return Err(refusal(ErrorKind::Config, folder, message));
    }
    Ok(())
}

/// Whether a magic number of statfs(2) is one of NFS, SMB, SMB2, CIFS, Lustre, Ceph, BeeGFS, 9P or GPFS. FUSE is not among them: disks of
/// containers without root may be FUSE.
#[cfg(target_os = "linux")]
fn is_network(magic: u32) -> bool {
    const NETWORK: [u32; 9] =
        [0x6969, 0x517b, 0xfe53_4d42, 0xff53_4d42, 0x0bd0_0bd0, 0x00c3_6400, 0x1983_0326, 0x0102_1997, 0x4750_4653];
    NETWORK.contains(&magic)
}

#[cfg(not(target_os = "linux"))]
fn check_file_system(_: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, lchown, symlink};

    use super::*;
    use crate::test_folder::TestFolder;

    #[test]
    fn a_folder_to_which_others_may_write_is_refused() {
        let folder = TestFolder::new();
        let refused = |path: &PathBuf| {
            let error = CacheFolder::create(path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            error.to_string()
        };
        let shared = folder.0.join("shared");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o770)).unwrap();
        assert!(refused(&shared).contains("other users may write to the cache folder"));
        let own = folder.0.join("a/b");
        CacheFolder::create(&own).unwrap();
        assert_eq!(fs::metadata(&own).unwrap().mode() & 0o777, 0o700);
        fs::remove_dir_all(own.join("v1")).unwrap();
        symlink(&folder.0, own.join("v1")).unwrap();
        assert!(refused(&own).contains("symbolic link"));
        fs::write(folder.0.join("file"), "").unwrap();
        assert!(CacheFolder::create(&folder.0.join("file")).is_err());
        let none = CacheFolder::open(&folder.0.join("none")).unwrap_err();
        assert_eq!(none.kind(), ErrorKind::NotFound);
        assert_eq!(none.to_string().matches("os error").count(), 1, "{none}");
        let unreadable = CacheFolder::open(&folder.0.join("file/none")).unwrap_err();
        assert!(
            unreadable.kind() == ErrorKind::Io && unreadable.to_string().contains("cannot be read"),
            "{unreadable}"
        );
    }

    #[test]
    fn a_folder_with_files_of_another_program_is_refused() {
        let folder = TestFolder::new();
        let path = folder.0.join("v1");
        fs::create_dir(&path).unwrap();
        // One that was killed as it made the folder, and one that marks its own caches.
        let tag = path.join("CACHEDIR.TAG");
        fs::write(&tag, "Signature: 8a47").unwrap();
        CacheFolder::create(&folder.0).unwrap();
        fs::remove_dir_all(path.join("writing")).unwrap();
        for (name, text) in
            [("CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n# another program"), ("notes", "")]
        {
            fs::remove_dir_all(&path).unwrap();
            fs::create_dir(&path).unwrap();
            fs::write(path.join(name), text).unwrap();
            for refused in [CacheFolder::create(&folder.0).unwrap_err(), CacheFolder::open(&folder.0).unwrap_err()] {
                assert_eq!(refused.kind(), ErrorKind::Config);
                assert!(refused.to_string().contains("name another folder"), "{refused}");
            }
            assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
            assert_eq!(fs::read(path.join(name)).unwrap(), text.as_bytes());
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn network_file_systems_are_refused_and_local_ones_are_not() {
        // NFS, SMB, Lustre and GPFS; ext4, XFS, Btrfs, overlayfs, tmpfs and FUSE.
        assert!([0x6969, 0xfe53_4d42, 0x0bd0_0bd0, 0x4750_4653].into_iter().all(is_network));
        let local = [0xef53, 0x5846_5342, 0x9123_683e, 0x794c_7630, 0x0102_1994, 0x6573_5546];
        assert!(!local.into_iter().any(is_network));
    }

    #[test]
    fn a_link_of_another_user_is_refused() {
        let folder = TestFolder::new();
        let link = folder.0.join("link");
        symlink(&folder.0, &link).unwrap();
        CacheFolder::create(&link).unwrap();
        // Only the superuser may give a link to another user.
        if lchown(&link, Some(65_534), None).is_ok() {
            let refused = CacheFolder::create(&link).unwrap_err();
            assert!(refused.kind() == ErrorKind::Config && refused.to_string().contains("another user"), "{refused}");
        }
    }
}
