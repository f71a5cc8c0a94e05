//! The store for folders: keys are relative paths. Writes are atomic, by rename; a version is inode, size and mtime.
//!
//! An object is written to a temporary file beside its target (`disk`), which listings (`walk`) skip. A lock of the folder
//! makes conditional writes atomic. A special file, such as a FIFO, is written in order instead (`special`, `writers`): it is no object,
//! and neither replaced nor deleted. All file operations run on the blocking threads of the runtime.

mod disk;
mod get;
mod multipart;
mod special;
mod walk;
mod writers;

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::files::local::is_full;
use crate::runtime::clean_up;
use crate::store::{GetResult, ObjectStore};
use crate::types::{
    Attributes, Capabilities, Condition, GetRequest, KeyRules, ListPage, ListRequest, ObjectHead, PartReceipt, Payload,
    PutOptions, Upload, Version,
};
use crate::url::ObjectUrl;
use async_trait::async_trait;
use tokio::task::JoinHandle;

use crate::id::unique_id;
pub use disk::FileConfig;
use disk::{RegularFile, TemporaryFile, if_version_matches, modified_ms, remove, stat};
use walk::{Walk, Walks};
use writers::Writers;

/// Maximum number of entries of a page, as on S3.
const PAGE_ENTRIES: usize = 1000;

/// A folder as a store.
#[derive(Clone, Debug)]
pub struct FileStore {
    root: Arc<Path>,
    walks: Arc<Walks>,
    writers: Arc<Writers>,
    config: FileConfig,
}

/// Number of bytes after which long work checks whether its call was cancelled.
const CHECKED_BYTES: usize = 8 << 20;

/// Whether the call that waits for some work was cancelled.
#[derive(Clone, Debug, Default)]
struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    /// Fails if it was.
    fn check(&self) -> io::Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(io::Error::other("cancelled")) } else { Ok(()) }
    }
}

/// Work on a blocking thread. If it is dropped before the work is done, the end of the process waits for the work, which removes
/// its temporary file.
struct Running<T: Send + 'static> {
    /// `None` after the drop.
    work: Option<JoinHandle<io::Result<T>>>,
    cancelled: Cancelled,
}

impl<T: Send + 'static> Drop for Running<T> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take().filter(|work| !work.is_finished()) {
            self.cancelled.0.store(true, Ordering::Relaxed);
            clean_up(async move { drop(work.await) });
        }
    }
}

impl FileStore {
    /// A store for `root`, which the first write creates if it does not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_config(root, FileConfig::default())
    }

    /// A store for `root` with `config`.
    pub fn with_config(root: impl Into<PathBuf>, config: FileConfig) -> Self {
        Self { root: root.into().into(), walks: Arc::default(), writers: Arc::default(), config }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.root.join(key)
    }

    /// Runs `work` on a blocking thread, and adds the operation and the URL to its error.
    async fn blocking<T: Send + 'static>(
        &self,
        operation: Operation,
        key: &str,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.cancellable(operation, key, |_| work()).await
    }

    /// The same for long work, which ends early if its argument says that the call was cancelled.
    async fn cancellable<T: Send + 'static>(
        &self,
        operation: Operation,
        key: &str,
        work: impl FnOnce(&Cancelled) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let cancelled = Cancelled::default();
        let seen = cancelled.clone();
        let mut running = Running { work: Some(tokio::task::spawn_blocking(move || work(&seen))), cancelled };
        let done = running.work.as_mut().expect("taken when it is dropped").await;
        let done = done.unwrap_or_else(|lost| Err(io::Error::other(lost)));
        done.map_err(|error| self.io_error(operation, key, error))
    }

    fn io_error(&self, operation: Operation, key: &str, error: io::Error) -> Error {
        let (kind, message) = match error.kind() {
            io::ErrorKind::NotFound if operation == Operation::List => (ErrorKind::NoBucket, "no such folder"),
            io::ErrorKind::NotFound => (ErrorKind::NotFound, "no such file"),
            // Folders, and paths below a file, are not objects.
            io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory => (ErrorKind::NotFound, "not a file"),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                (ErrorKind::AccessDenied, "permission denied")
            }
            io::ErrorKind::AlreadyExists => (ErrorKind::Precondition, "the condition does not hold"),
            io::ErrorKind::Unsupported => (ErrorKind::Unsupported, "the file system does not support this operation"),
            io::ErrorKind::InvalidFilename => {
                (ErrorKind::InvalidKey, "a device, FIFO, socket or descriptor, which is neither replaced nor deleted")
            }
            io::ErrorKind::InvalidData => (ErrorKind::Changed, "the file changed"),
            _ if is_full(&error) => (ErrorKind::Io, "no space for the file"),
            _ => (ErrorKind::Io, "I/O error"),
        };
        self.error(kind, operation, key, message).with_source(error)
    }

    /// Refuses attributes: a file cannot store them.
    fn refuse_attributes(&self, operation: Operation, key: &str, options: &PutOptions) -> Result<()> {
        if options.attributes == Attributes::default() {
            return Ok(());
        }
        Err(self.error(ErrorKind::Unsupported, operation, key, "files have no headers, metadata or storage class"))
    }
}

/// Turns `NotFound` of a write into `InvalidKey`: a file exists where the key needs a folder, or vice versa.
fn path_conflict(error: Error) -> Error {
    if error.kind() != ErrorKind::NotFound || error.operation() == Operation::Copy {
        return error;
    }
    error.with_kind(ErrorKind::InvalidKey).with_hint("a folder and a file cannot have the same name")
}

#[async_trait]
impl ObjectStore for FileStore {
    fn url(&self, key: &str) -> String {
        let root = self.root.to_string_lossy();
        format!("file://{}/{key}", root.trim_end_matches('/'))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            keys: KeyRules::Path,
            put_if_absent: true,
            put_if_matches: true,
            attributes: false,
            upload_sessions: true,
            min_part_bytes: 1,
            max_parts: 10_000,
            max_put_bytes: u64::MAX,
            max_object_bytes: 1 << 46,
            max_delete_keys: 1000,
            checksums: &[],
            ordered_listing: true,
            parallel_listing: false,
        }
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        self.open_file(request).await
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.check_key(Operation::Head, key)?;
        let path = self.path(key);
        let (metadata, size, version) = self.blocking(Operation::Head, key, move || stat(&path)).await?;
        Ok(ObjectHead {
            size,
            version: Some(version),
            modified_ms: Some(modified_ms(&metadata)),
            attributes: Attributes::default(),
            checksum: None,
        })
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        let max = request.max_entries.map_or(PAGE_ENTRIES, |max| PAGE_ENTRIES.min(max as usize));
        let (root, walks, saved) = (self.root.clone(), self.walks.clone(), self.walks.take(&request));
        let new = Walk::new(&request);
        let list = move || {
            let mut walk = match saved {
                Some(walk) => walk,
                None => new.start(&root)?,
            };
            let page = walk.page(max)?;
            if page.continuation.is_some() {
                walks.save(walk);
            }
            Ok(page)
        };
        self.blocking(Operation::List, request.prefix, list).await
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        let operation = Operation::Put;
        self.check_key(operation, key)?;
        self.refuse_attributes(operation, key, options)?;
        if let Some(special) = self.special(operation, key, options).await? {
            return self.write_special(operation, key, special, payload).await;
        }
        let (target, payload, condition) = (self.path(key), payload.clone(), options.condition.clone());
        let config = self.config;
        let write = move |cancelled: &Cancelled| {
            let (temporary, mut file) = TemporaryFile::create(&target, &unique_id(), config)?;
            for bytes in payload.pieces().iter().flat_map(|piece| piece.chunks(CHECKED_BYTES)) {
                cancelled.check()?;
                file.write_all(bytes)?;
            }
            temporary.publish(&file, &target, &condition, config)
        };
        self.cancellable(operation, key, write).await.map_err(path_conflict)
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        self.begin(key, options).await
    }

    async fn put_part(&self, upload: &Upload, number: u32, offset: u64, payload: &Payload) -> Result<PartReceipt> {
        self.write_part(upload, number, offset, payload).await
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version> {
        self.commit_upload(upload, parts, condition).await
    }

    async fn committed(&self, _upload: &Upload, _parts: &[PartReceipt]) -> Result<Option<Version>> {
        // The result of a rename is not lost.
        Ok(None)
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.abort_upload(upload).await
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        self.list_uploads(prefix).await
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        let operation = Operation::Copy;
        self.check_key(operation, key)?;
        if source.scheme != "file" {
            let message = format!("cannot copy from {source}: the source must be a file:// URL");
            return Err(self.error(ErrorKind::Unsupported, operation, key, &message));
        }
        let (from, target, config) = (Path::new("/").join(&source.key), self.path(key), self.config);
        if let Some(special) = self.special(operation, key, &PutOptions::default()).await? {
            return self.copy_to_special(key, &from, special).await;
        }
        let copy = move |cancelled: &Cancelled| {
            let from = RegularFile::open(&from)?;
            let (temporary, mut file) = TemporaryFile::create(&target, &unique_id(), config)?;
            file.write_all(from.content.as_deref().unwrap_or_default())?;
            while from.content.is_none() && io::copy(&mut (&from.file).take(CHECKED_BYTES as u64), &mut file)? > 0 {
                cancelled.check()?;
            }
            temporary.publish(&file, &target, &Condition::Always, config)
        };
        self.cancellable(operation, key, copy).await.map_err(path_conflict)
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
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
        Ok(failed)
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        let (path, version) = (self.path(key), version.clone());
        let delete = move || match if_version_matches(&path, &version, |path| fs::remove_file(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        };
        self.blocking(Operation::Delete, key, delete).await
    }
}
