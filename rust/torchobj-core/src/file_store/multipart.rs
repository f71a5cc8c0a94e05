//! Multipart uploads: parts are written to a temporary file beside the target at their offsets; the commit renames it.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::files::temporary::PREFIX;
use crate::policy::within;
use crate::store::ObjectStore;
use crate::types::{Condition, KeyRules, PartReceipt, Payload, PutOptions, Upload, Version};

use super::disk::{TemporaryFile, modified_ms};
use super::{FileStore, path_conflict};
use crate::id::unique_id;

/// Well below any idle timeout.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Wakes the caller periodically while `work` runs: flushing a large file takes minutes, which is not a stall.
async fn poll_periodically<T>(every: Duration, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    loop {
        if let Some(done) = within(every, work.as_mut()).await {
            return done;
        }
    }
}

/// Path of the file that contains the key of an upload, beside its temporary file.
fn key_file_path(temporary: &Path) -> PathBuf {
    temporary.with_extension("key")
}

fn receipt(number: u32, offset: u64, size: u64) -> PartReceipt {
    PartReceipt { number, size, version: Version::new(format!("{offset:x}+{size:x}")), checksum: None }
}

impl FileStore {
    pub(super) fn no_upload(&self, operation: Operation, upload: &Upload) -> Error {
        self.error(ErrorKind::UploadGone, operation, &upload.key, "no such upload")
    }

    /// Turns `NotFound` into [`Self::no_upload`].
    fn or_no_upload<T>(&self, operation: Operation, upload: &Upload, done: Result<T>) -> Result<T> {
        done.map_err(|error| match error.kind() {
            ErrorKind::NotFound => self.no_upload(operation, upload),
            _ => error,
        })
    }

    pub(super) async fn begin(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        let operation = Operation::BeginUpload;
        self.check_key(operation, key)?;
        self.refuse_attributes(operation, key, options)?;
        if let Some(special) = self.special(operation, key, options).await? {
            return Ok(self.begin_special(key, special));
        }
        let (target, id, config) = (self.path(key), unique_id(), self.config);
        let upload = Upload::of_other_client(key.to_owned(), id.clone(), None);
        let key_text = key.to_owned();
        let create = move || {
            let (temporary, _) = TemporaryFile::create(&target, &id, config)?;
            fs::write(key_file_path(&TemporaryFile::path_for(&target, &id)), key_text)?;
            temporary.keep();
            Ok(())
        };
        self.blocking(operation, key, create).await.map_err(path_conflict)?;
        Ok(upload)
    }

    pub(super) async fn write_part(
        &self,
        upload: &Upload,
        number: u32,
        offset: u64,
        payload: &Payload,
    ) -> Result<PartReceipt> {
        let operation = Operation::PutPart;
        if upload.sequential {
            let size = self.write_next(upload, offset, payload).await?;
            return Ok(receipt(number, offset, size));
        }
        let (path, payload) = (TemporaryFile::path_for(&self.path(&upload.key), &upload.id), payload.clone());
        let write = move || {
            let file = OpenOptions::new().write(true).open(path)?;
            let mut at = offset;
            for piece in payload.pieces() {
                file.write_all_at(piece, at)?;
                at += piece.len() as u64;
            }
            Ok(at - offset)
        };
        let size = self.or_no_upload(operation, upload, self.blocking(operation, &upload.key, write).await)?;
        Ok(receipt(number, offset, size))
    }

    pub(super) async fn commit_upload(
        &self,
        upload: &Upload,
        parts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Version> {
        let operation = Operation::Commit;
        let mut size = 0;
        for part in parts {
            if part.version != Version::new(format!("{size:x}+{:x}", part.size)) {
                let message = format!("part {} is not what was uploaded", part.number);
                return Err(self.error(ErrorKind::InvalidRequest, operation, &upload.key, &message));
            }
            size += part.size;
        }
        if let Some(writer) = self.writers.take(&upload.id) {
            return self.end_special(upload, writer).await;
        }
        let (target, condition, config) = (self.path(&upload.key), condition.clone(), self.config);
        let path = TemporaryFile::path_for(&target, &upload.id);
        let commit = move || {
            let file = OpenOptions::new().write(true).open(&path)?;
            // A cancelled attempt of the last part may have written more bytes than its replacement.
            file.set_len(size)?;
            let temporary = TemporaryFile::adopt(path.clone());
            if condition == Condition::Absent && target.exists() {
                temporary.keep();
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            let version = temporary.publish(&file, &target, &condition, config)?;
            // The object exists: a concurrent abort may have deleted the key file.
            if let Err(error) = fs::remove_file(key_file_path(&path))
                && error.kind() != io::ErrorKind::NotFound
            {
                log::warn!("{}: cannot be deleted: {error}", key_file_path(&path).display());
            }
            Ok(version)
        };
        self.or_no_upload(
            operation,
            upload,
            poll_periodically(POLL_INTERVAL, self.blocking(operation, &upload.key, commit)).await,
        )
    }

    pub(super) async fn abort_upload(&self, upload: &Upload) -> Result<()> {
        self.check_key(Operation::Abort, &upload.key)?;
        if !upload.id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Ok(());
        }
        if self.writers.take(&upload.id).is_some() {
            return Ok(());
        }
        let path = TemporaryFile::path_for(&self.path(&upload.key), &upload.id);
        let abort = move || {
            for path in [key_file_path(&path), path] {
                match fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            Ok(())
        };
        self.blocking(Operation::Abort, &upload.key, abort).await
    }

    pub(super) async fn list_uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        let (root, prefix_text) = (self.root.clone(), prefix.to_owned());
        let list = move || {
            let mut uploads = Vec::new();
            let mut found = |path: &Path| {
                let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                let Some(id) = name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(".key")) else { return };
                let Ok(key) = fs::read_to_string(path) else { return };
                // The key file is in the folder of its key; if not, no store wrote it. The writer may have another root.
                let Some(name) = Path::new(&key).file_name() else { return };
                let object = path.with_file_name(name);
                if KeyRules::Path.refusal(&key).is_some() || !object.ends_with(&key) {
                    return;
                }
                let Some(key) = object.strip_prefix(&root).ok().and_then(Path::to_str).map(str::to_owned) else {
                    return;
                };
                let begun_ms = fs::metadata(path).ok().map(|metadata| modified_ms(&metadata));
                if key.starts_with(&prefix_text) {
                    uploads.push(Upload::of_other_client(key, id.to_owned(), begun_ms));
                }
            };
            match each_temporary(&root, &mut found) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(uploads),
            }
        };
        self.blocking(Operation::ListUploads, prefix, list).await
    }
}

/// Calls `found` with the path of every temporary file.
fn each_temporary(folder: &Path, found: &mut dyn FnMut(&Path)) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            each_temporary(&entry.path(), found)?;
        } else if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            found(&entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;

    #[tokio::test]
    async fn a_slow_flush_wakes_the_caller_periodically() {
        let mut left = 3;
        // A future that never wakes its task.
        let flush = std::future::poll_fn(|_| {
            left -= 1;
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        });
        poll_periodically(Duration::from_millis(1), flush).await;
    }
}
