//! The store for folders: keys are relative paths. Writes are atomic, by rename; a version is inode, size and mtime.
//!
//! An object is written to a temporary file beside its target, which listings skip. `lock` makes conditional writes atomic.
//! All file operations run on the blocking threads of the runtime.

mod copy;
mod delete;
mod entry;
mod get;
mod list;
mod lock;
mod multipart;
mod put;
mod walk;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::{GetResult, ObjectStore};
use torchobj_core::types::{
    Attributes, Capabilities, Condition, GetRequest, KeyRules, ListPage, ListRequest, ObjectHead, PartReceipt, Payload,
    PutOptions, Upload, Version,
};
use torchobj_core::url::ObjectUrl;

use crate::config::FileConfig;
use walk::Walks;

/// A folder as a store.
#[derive(Clone, Debug)]
pub struct FileStore {
    root: Arc<Path>,
    walks: Arc<Walks>,
    config: FileConfig,
}

impl FileStore {
    /// A store for `root`, which the first write creates if it does not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_config(root, FileConfig::default())
    }

    /// A store for `root` with `config`.
    pub fn with_config(root: impl Into<PathBuf>, config: FileConfig) -> Self {
        Self { root: root.into().into(), walks: Arc::default(), config }
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
        let done = tokio::task::spawn_blocking(work).await;
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
            io::ErrorKind::InvalidData => (ErrorKind::Changed, "the file changed"),
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
        self.head_file(key).await
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        self.list_page(request).await
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.put_file(key, payload, options).await
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
        self.copy_file(source, key).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        Ok(self.delete_files(keys).await)
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.delete_file_if(key, version).await
    }
}
