//! Writing whole files, copying and deleting them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::ObjectStore;
use torchobj_core::types::{Condition, Payload, PutOptions, Version};
use torchobj_core::url::ObjectUrl;

use super::read::foreign;
use super::{FileStore, TEMPORARY, version};
use crate::config::FileConfig;

/// A file that is being written beside its target; removed when it is dropped unpublished.
pub(super) struct Temporary {
    path: PathBuf,
}

impl Temporary {
    /// Makes the file, and the folders above it.
    pub(super) fn create(target: &Path, id: &str) -> io::Result<(Self, File)> {
        let folder = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
        fs::create_dir_all(folder)?;
        let path = Self::path_for(target, id);
        let file = File::create_new(&path)?;
        Ok((Self { path }, file))
    }

    /// Takes over a file that was made before.
    pub(super) fn adopt(path: PathBuf) -> Self {
        Self { path }
    }

    /// Leaves the file for a later call.
    pub(super) fn leave(mut self) {
        self.path = PathBuf::new();
    }

    /// Where the file of upload `id` lies. The target's own name is not part of it: it may be 255 bytes long.
    pub(super) fn path_for(target: &Path, id: &str) -> PathBuf {
        target.with_file_name(format!("{TEMPORARY}{id}"))
    }

    /// Makes the file the object, durably if `config.sync`. A name that is taken is `AlreadyExists` if the condition says
    /// so.
    pub(super) fn publish(
        self,
        file: &File,
        target: &Path,
        condition: &Condition,
        config: FileConfig,
    ) -> io::Result<Version> {
        if config.sync {
            file.sync_all()?;
        }
        if target.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let folder = open_folder(target)?;
        match condition {
            Condition::Always => {
                // A file system without locks has no conditional writes, which alone need this.
                let _lock = FolderLock::acquire(&folder).ok();
                fs::rename(&self.path, target)?;
            }
            // A link never replaces; the temporary name goes with `self`.
            Condition::Absent => fs::hard_link(&self.path, target)?,
            Condition::Matches(version) => match while_it_is(target, version, |path| fs::rename(&self.path, path)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                done => done?,
            },
        }
        if config.sync {
            folder.sync_all()?;
        }
        Ok(version(&file.metadata()?))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // After a rename it is gone, which is as good.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl FileStore {
    /// A name that no other upload has.
    pub(super) fn new_id() -> String {
        format!("{:032x}", fastrand::u128(..))
    }

    pub(super) async fn put_file(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        let operation = Operation::Put;
        self.check_key(operation, key)?;
        self.refuse_attributes(operation, key, options)?;
        let (target, payload, condition) = (self.path(key), payload.clone(), options.condition.clone());
        let config = self.config;
        let write = move || {
            let (temporary, mut file) = Temporary::create(&target, &Self::new_id())?;
            for piece in payload.pieces() {
                file.write_all(piece)?;
            }
            temporary.publish(&file, &target, &condition, config)
        };
        self.blocking(operation, key, write).await.map_err(blocked_by_a_file)
    }

    pub(super) async fn copy_file(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        let operation = Operation::Copy;
        self.check_key(operation, key)?;
        if source.scheme != "file" {
            return Err(foreign(self, source, key));
        }
        let (from, target, config) = (Path::new("/").join(&source.key), self.path(key), self.config);
        let copy = move || {
            let mut from = File::open(from)?;
            let (temporary, mut file) = Temporary::create(&target, &Self::new_id())?;
            io::copy(&mut from, &mut file)?;
            temporary.publish(&file, &target, &Condition::Always, config)
        };
        self.blocking(operation, key, copy).await.map_err(blocked_by_a_file)
    }

    pub(super) async fn delete_files(&self, keys: &[String]) -> Vec<(String, Error)> {
        let operation = Operation::Delete;
        let mut failed = Vec::new();
        for key in keys {
            // The folders above it stay, empty or not: who made them is not known here.
            let path = self.path(key);
            match self.blocking(operation, key, move || remove(&path)).await {
                Err(error) if error.kind() != ErrorKind::NotFound => failed.push((key.clone(), error)),
                _ => {}
            }
        }
        failed
    }

    pub(super) async fn delete_file_if(&self, key: &str, version: &Version) -> Result<()> {
        let (path, version) = (self.path(key), version.clone());
        let delete = move || match while_it_is(&path, &version, |path| fs::remove_file(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        };
        self.blocking(Operation::Delete, key, delete).await
    }
}

/// The lock of a folder. Every call that replaces or deletes a file of the folder holds it for that moment, in every
/// process that writes through this store. To make a file under a new name needs no lock.
struct FolderLock<'a>(&'a File);

impl<'a> FolderLock<'a> {
    /// Waits for the lock.
    ///
    /// # Errors
    /// The file system has no locks.
    fn acquire(folder: &'a File) -> io::Result<Self> {
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
        // Not left to the close: a child forked meanwhile has a copy of the descriptor, and the lock with it.
        let _ = self.0.unlock();
    }
}

/// Opens the folder of a file. To open a FIFO in its place would wait for a writer.
fn open_folder(path: &Path) -> io::Result<File> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let flags = (OFlags::DIRECTORY | OFlags::CLOEXEC).bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(folder)
}

/// Calls `change` with a file that is of this version, while no other call replaces or deletes it. `AlreadyExists` where
/// the file is of another version, `NotFound` where there is none.
fn while_it_is(path: &Path, expected: &Version, change: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let folder = open_folder(path)?;
    let _lock = FolderLock::acquire(&folder).map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error))?;
    match fs::metadata(path) {
        Ok(metadata) if version(&metadata) == *expected => change(path),
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) => Err(error),
    }
}

/// Removes a file, but not between the check and the change of a conditional write.
fn remove(path: &Path) -> io::Result<()> {
    // Removing a file takes no permission to open its folder; a conditional write of one does.
    let folder = open_folder(path).ok();
    let _lock = folder.as_ref().and_then(|folder| FolderLock::acquire(folder).ok());
    fs::remove_file(path)
}

/// On a write, what stands in the way is a file where the key wants a folder, or the other way round.
pub(super) fn blocked_by_a_file(error: Error) -> Error {
    if error.kind() != ErrorKind::NotFound || error.operation() == Operation::Copy {
        return error;
    }
    error.with_kind(ErrorKind::InvalidKey).with_hint("a folder and a file cannot have one name")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// A new folder with one file, and the version of that.
    fn one_file(name: &str) -> (PathBuf, PathBuf, Version) {
        let folder = std::env::temp_dir().join(format!("torchobj-{name}-{}", FileStore::new_id()));
        let target = folder.join("k");
        let version = write(&target, b"one").unwrap();
        (folder, target, version)
    }

    fn write(target: &Path, content: &[u8]) -> io::Result<Version> {
        let (temporary, mut file) = Temporary::create(target, &FileStore::new_id())?;
        file.write_all(content)?;
        temporary.publish(&file, target, &Condition::Always, FileConfig::default())
    }

    /// Calls `change` in the middle of a change under a condition, which goes on when `change` has ended or blocks.
    fn meanwhile(change: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
        let (ended, waits) = mpsc::channel();
        let thread = thread::spawn(move || {
            change();
            let _ = ended.send(());
        });
        let _ = waits.recv_timeout(Duration::from_millis(300));
        thread
    }

    #[test]
    fn a_conditional_delete_does_not_remove_what_is_written_after_its_check() {
        let (folder, target, version) = one_file("delete-if");
        let mut writer = None;
        while_it_is(&target, &version, |path| {
            let target = target.clone();
            writer = Some(meanwhile(move || drop(write(&target, b"two").unwrap())));
            fs::remove_file(path)
        })
        .unwrap();
        writer.unwrap().join().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"two");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_conditional_write_does_not_restore_what_is_deleted_after_its_check() {
        let (folder, target, version) = one_file("put-if");
        let (temporary, _file) = Temporary::create(&target, &FileStore::new_id()).unwrap();
        let mut deleter = None;
        while_it_is(&target, &version, |path| {
            let target = target.clone();
            deleter = Some(meanwhile(move || remove(&target).unwrap()));
            fs::rename(&temporary.path, path)
        })
        .unwrap();
        deleter.unwrap().join().unwrap();
        assert!(!target.exists());
        fs::remove_dir_all(folder).unwrap();
    }
}
