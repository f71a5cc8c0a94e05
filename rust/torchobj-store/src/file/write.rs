//! Writing whole files, copying and deleting them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::ObjectStore;
use torchobj_core::types::{Condition, Payload, PutOptions, Version};
use torchobj_core::url::ObjectUrl;

use super::read::foreign;
use super::{FileStore, TEMPORARY, version};

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

    /// Makes the file the object, durably. A name that is taken is `AlreadyExists` if the condition says so.
    pub(super) fn publish(self, file: &File, target: &Path, condition: &Condition) -> io::Result<Version> {
        file.sync_all()?;
        if target.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        match condition {
            Condition::Always => fs::rename(&self.path, target)?,
            // A link never replaces; the temporary name goes with `self`.
            Condition::Absent => fs::hard_link(&self.path, target)?,
            Condition::Matches(version) => match while_it_is(target, version, |path| fs::rename(&self.path, path)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                done => done?,
            },
        }
        let folder = File::open(target.parent().ok_or(io::ErrorKind::InvalidInput)?)?;
        folder.sync_all()?;
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
        let write = move || {
            let (temporary, mut file) = Temporary::create(&target, &Self::new_id())?;
            for piece in payload.pieces() {
                file.write_all(piece)?;
            }
            temporary.publish(&file, &target, &condition)
        };
        self.blocking(operation, key, write).await.map_err(blocked_by_a_file)
    }

    pub(super) async fn copy_file(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        let operation = Operation::Copy;
        self.check_key(operation, key)?;
        if source.scheme != "file" {
            return Err(foreign(self, source, key));
        }
        let (from, target) = (Path::new("/").join(&source.key), self.path(key));
        let copy = move || {
            let mut from = File::open(from)?;
            let (temporary, mut file) = Temporary::create(&target, &Self::new_id())?;
            io::copy(&mut from, &mut file)?;
            temporary.publish(&file, &target, &Condition::Always)
        };
        self.blocking(operation, key, copy).await.map_err(blocked_by_a_file)
    }

    pub(super) async fn delete_files(&self, keys: &[String]) -> Vec<(String, Error)> {
        let operation = Operation::Delete;
        let mut failed = Vec::new();
        for key in keys {
            // The folders above it stay, empty or not: who made them is not known here.
            let path = self.path(key);
            match self.blocking(operation, key, move || fs::remove_file(path)).await {
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

/// Calls `change` with a file that is of this version, while no other call of this function changes a file of the same
/// folder, in whatever process. `AlreadyExists` where the file is of another version, `NotFound` where there is none.
fn while_it_is(path: &Path, expected: &Version, change: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let folder = File::open(path.parent().ok_or(io::ErrorKind::InvalidInput)?)?;
    folder.lock().map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error))?;
    let found = fs::metadata(path);
    let changed = match found {
        Ok(metadata) if version(&metadata) == *expected => change(path),
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) => Err(error),
    };
    // Not left to the close: a child forked meanwhile has a copy of the descriptor, and the lock with it.
    folder.unlock()?;
    changed
}

/// On a write, what stands in the way is a file where the key wants a folder, or the other way round.
pub(super) fn blocked_by_a_file(error: Error) -> Error {
    if error.kind() != ErrorKind::NotFound || error.operation() == Operation::Copy {
        return error;
    }
    error.with_kind(ErrorKind::InvalidKey).with_hint("a folder and a file cannot have one name")
}
