//! Writes whole files: to a temporary file beside the target, which is renamed to it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::ObjectStore;
use torchobj_core::types::{Condition, Payload, PutOptions, Version};

use super::FileStore;
use super::entry::{TEMPORARY, version};
use super::lock::{FolderLock, if_version_matches, open_folder};
use crate::config::FileConfig;

/// A file that is written beside its target. Dropping it removes the file, unless it was published or kept.
pub(super) struct TemporaryFile {
    path: PathBuf,
}

impl TemporaryFile {
    /// Creates the file and the folders above it.
    pub(super) fn create(target: &Path, id: &str) -> io::Result<(Self, File)> {
        let folder = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
        fs::create_dir_all(folder)?;
        let path = Self::path_for(target, id);
        let file = File::create_new(&path)?;
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
        target.with_file_name(format!("{TEMPORARY}{id}"))
    }

    /// Renames the file to `target`, durably if `config.sync`.
    ///
    /// # Errors
    /// `AlreadyExists` if the condition is not met.
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
            folder.sync_all()?;
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

impl FileStore {
    /// A unique id of an upload.
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
            let (temporary, mut file) = TemporaryFile::create(&target, &Self::new_id())?;
            for piece in payload.pieces() {
                file.write_all(piece)?;
            }
            temporary.publish(&file, &target, &condition, config)
        };
        self.blocking(operation, key, write).await.map_err(path_conflict)
    }
}

/// Turns `NotFound` of a write into `InvalidKey`: a file exists where the key needs a folder, or vice versa.
pub(super) fn path_conflict(error: Error) -> Error {
    if error.kind() != ErrorKind::NotFound || error.operation() == Operation::Copy {
        return error;
    }
    error.with_kind(ErrorKind::InvalidKey).with_hint("a folder and a file cannot have the same name")
}
