//! Deletes files.

use std::fs;
use std::io;
use std::path::Path;

use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::types::Version;

use super::FileStore;
use super::lock::{FolderLock, if_version_matches, open_folder};

impl FileStore {
    pub(super) async fn delete_files(&self, keys: &[String]) -> Vec<(String, Error)> {
        let operation = Operation::Delete;
        let mut failed = Vec::new();
        for key in keys {
            // Folders are never removed, even empty ones: they may not have been made by this store.
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
        let delete = move || match if_version_matches(&path, &version, |path| fs::remove_file(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        };
        self.blocking(Operation::Delete, key, delete).await
    }
}

/// Removes a file under the lock of its folder, so that a conditional write of it is atomic.
fn remove(path: &Path) -> io::Result<()> {
    // Removing a file does not need permission to open its folder; a conditional write does.
    let folder = open_folder(path).ok();
    let _lock = folder.as_ref().and_then(|folder| FolderLock::acquire(folder).ok());
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use torchobj_core::types::Condition;

    use super::super::put::TemporaryFile;
    use super::*;
    use crate::config::FileConfig;

    /// Returns a new folder with one file, and the version of the file.
    fn one_file(name: &str) -> (PathBuf, PathBuf, Version) {
        let folder = std::env::temp_dir().join(format!("torchobj-{name}-{}", FileStore::new_id()));
        let target = folder.join("k");
        let version = write(&target, b"one").unwrap();
        (folder, target, version)
    }

    fn write(target: &Path, content: &[u8]) -> io::Result<Version> {
        let (temporary, mut file) = TemporaryFile::create(target, &FileStore::new_id())?;
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
        let (temporary, mut file) = TemporaryFile::create(&target, &FileStore::new_id()).unwrap();
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
        let id = FileStore::new_id();
        let (_temporary, _file) = TemporaryFile::create(&target, &id).unwrap();
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
