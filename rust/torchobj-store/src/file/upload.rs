//! Uploads in parts: a temporary file beside the target, parts written where they belong, a rename at the commit.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::ObjectStore;
use torchobj_core::transfer::within;
use torchobj_core::types::{Condition, KeyRules, PartReceipt, Payload, PutOptions, Upload, Version};

use super::write::{Temporary, blocked_by_a_file};
use super::{FileStore, TEMPORARY, modified_ms};

/// Well below any limit on silence.
const AWAKE_EVERY: Duration = Duration::from_millis(100);

/// Wakes the caller again and again while a file system works: flushing a large file takes minutes, and is no silence.
async fn kept_awake<T>(every: Duration, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    loop {
        if let Some(done) = within(every, work.as_mut()).await {
            return done;
        }
    }
}

/// The first line of the temporary file's companion: which key it becomes.
fn note_path(temporary: &Path) -> PathBuf {
    temporary.with_extension("key")
}

impl FileStore {
    fn gone(&self, operation: Operation, upload: &Upload) -> Error {
        self.error(ErrorKind::UploadGone, operation, &upload.key, "no such upload")
    }

    /// The same, when a file of an upload is not there.
    fn or_gone<T>(&self, operation: Operation, upload: &Upload, done: Result<T>) -> Result<T> {
        done.map_err(|error| match error.kind() {
            ErrorKind::NotFound => self.gone(operation, upload),
            _ => error,
        })
    }

    pub(super) async fn begin(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        let operation = Operation::BeginUpload;
        self.check_key(operation, key)?;
        self.refuse_attributes(operation, key, options)?;
        let (target, id) = (self.path(key), Self::new_id());
        let upload =
            Upload { key: key.to_owned(), id: id.clone(), nonce: String::new(), begun_ms: None, checksum: None };
        let key_text = key.to_owned();
        let create = move || {
            let (temporary, _) = Temporary::create(&target, &id)?;
            fs::write(note_path(&Temporary::path_for(&target, &id)), key_text)?;
            temporary.leave();
            Ok(())
        };
        self.blocking(operation, key, create).await.map_err(blocked_by_a_file)?;
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
        let (path, payload) = (Temporary::path_for(&self.path(&upload.key), &upload.id), payload.clone());
        let write = move || {
            let file = OpenOptions::new().write(true).open(path)?;
            let mut at = offset;
            for piece in payload.pieces() {
                file.write_all_at(piece, at)?;
                at += piece.len() as u64;
            }
            Ok(at - offset)
        };
        let size = self.or_gone(operation, upload, self.blocking(operation, &upload.key, write).await)?;
        let version = Version::new(format!("{offset:x}+{size:x}"));
        Ok(PartReceipt { number, size, version, checksum: None })
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
        let (target, condition, config) = (self.path(&upload.key), condition.clone(), self.config);
        let path = Temporary::path_for(&target, &upload.id);
        let commit = move || {
            let file = OpenOptions::new().write(true).open(&path)?;
            // A part that was given up may have been longer than the one that took its place.
            file.set_len(size)?;
            let temporary = Temporary::adopt(path.clone());
            if condition == Condition::Absent && target.exists() {
                temporary.leave();
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            let version = temporary.publish(&file, &target, &condition, config)?;
            fs::remove_file(note_path(&path))?;
            Ok(version)
        };
        self.or_gone(operation, upload, kept_awake(AWAKE_EVERY, self.blocking(operation, &upload.key, commit)).await)
    }

    pub(super) async fn abort_upload(&self, upload: &Upload) -> Result<()> {
        self.check_key(Operation::Abort, &upload.key)?;
        if !upload.id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Ok(());
        }
        let path = Temporary::path_for(&self.path(&upload.key), &upload.id);
        let abort = move || {
            for path in [note_path(&path), path] {
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
                let Some(id) = name.strip_prefix(TEMPORARY).and_then(|name| name.strip_suffix(".key")) else { return };
                let Ok(key) = fs::read_to_string(path) else { return };
                // The note of an upload lies beside its target; a key that leads elsewhere was not written by this store.
                if KeyRules::Path.refusal(&key).is_some() || root.join(&key).parent() != path.parent() {
                    return;
                }
                let begun_ms = fs::metadata(path).ok().map(|metadata| modified_ms(&metadata));
                if key.starts_with(&prefix_text) {
                    uploads.push(Upload { key, id: id.to_owned(), nonce: String::new(), begun_ms, checksum: None });
                }
            };
            match Self::each_temporary(&root, &mut found) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(uploads),
            }
        };
        self.blocking(Operation::ListUploads, prefix, list).await
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;

    #[tokio::test]
    async fn a_file_system_that_flushes_for_minutes_is_not_silent() {
        let mut left = 3;
        // It is never woken by what it waits for.
        let flush = std::future::poll_fn(|_| {
            left -= 1;
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        });
        kept_awake(Duration::from_millis(1), flush).await;
    }
}
