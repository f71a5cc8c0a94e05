//! The trait of a store. A call makes one attempt and classifies its failure by [`ErrorKind`]. Retries, resume, timeouts and
//! permits are implemented once for all stores, in `policy`.

use std::fmt::Debug;
use std::ops::Range;

use async_trait::async_trait;

use crate::buffer::Dest;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::types::{
    Attributes, Capabilities, Condition, GetRequest, ListPage, ListRequest, ObjectHead, PartReceipt, Payload,
    PutOptions, Upload, Version,
};
use crate::url::ObjectUrl;

pub use crate::types::ObjectChecksum;

/// A bucket or a folder of objects.
///
/// Dropping the future of a call cancels it and closes the socket of its request.
#[async_trait]
pub trait ObjectStore: Debug + Send + Sync + 'static {
    /// The URL of a key, for messages.
    fn url(&self, key: &str) -> String;

    /// What tells apart stores whose URLs are the same, such as the endpoint. Contains no secret.
    fn identity(&self) -> String {
        String::new()
    }

    /// What tells apart stores whose URLs are the same, known before the first request and the same in each process, for the
    /// names of files of a cache. Contains no secret. `None` if objects must not be kept on a disk, or equal URLs, versions and
    /// sizes may have different bytes: a file system that is mounted in place of another one has the same inodes and times.
    async fn cache_identity(&self) -> Option<String> {
        None
    }

    /// The features and limits of this store.
    fn capabilities(&self) -> Capabilities;

    /// Opens an object or a range that this store has on the local disk. It sends no request, so the caller needs no permit.
    /// After an error of the body, which is none of the store, [`open`](Self::open) requests the object.
    async fn open_local(&self, request: &GetRequest<'_>) -> Option<Box<dyn GetResult>> {
        let _ = request;
        None
    }

    /// Requests an object or a range. Returns when the head of the response is received; the body is not read yet.
    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>>;

    /// Returns the size, version and attributes of an object.
    async fn head(&self, key: &str) -> Result<ObjectHead>;

    /// As [`head`](Self::head), with the checksum of the object if the store has one. On some stores this needs the
    /// permission to decrypt the object.
    async fn head_with_checksum(&self, key: &str) -> Result<ObjectHead> {
        self.head(key).await
    }

    /// Returns one page of keys.
    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage>;

    /// Returns one page of the buckets of the account of this store, or of a project on Google Cloud Storage: entries whose
    /// keys are names, with the times of creation.
    async fn buckets(&self, project: Option<&str>, continuation: Option<&str>) -> Result<ListPage> {
        let _ = (project, continuation);
        let message = "this store has no account whose buckets are listed";
        Err(self.error(ErrorKind::Unsupported, Operation::ListBuckets, "", message))
    }

    /// Writes an object in one request, atomically.
    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version>;

    /// Begins an upload in parts. Nothing is visible before its commit.
    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload>;

    /// Writes part `number` (from 1). Replaces an earlier part of this number.
    async fn put_part(&self, upload: &Upload, number: u32, offset: u64, payload: &Payload) -> Result<PartReceipt>;

    /// Makes the object from `parts`, in order.
    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version>;

    /// Returns the version of the object if this upload made it, `None` otherwise. Called if the response to a commit was
    /// lost.
    async fn committed(&self, upload: &Upload, parts: &[PartReceipt]) -> Result<Option<Version>>;

    /// Aborts an upload and deletes its parts. Succeeds if the upload does not exist.
    async fn abort(&self, upload: &Upload) -> Result<()>;

    /// Returns the uploads under `prefix` that were neither committed nor aborted.
    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>>;

    /// Copies an object of the same provider to `key`, with its attributes.
    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version>;

    /// Deletes objects; succeeds for objects that do not exist. Returns the keys that could not be deleted.
    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>>;

    /// Deletes an object if it has this version. Succeeds if the object does not exist.
    ///
    /// # Errors
    /// `Precondition` if it has another version; `Unsupported` if the store cannot compare and delete atomically.
    async fn delete_if(&self, key: &str, version: &Version) -> Result<()>;

    /// An error about `key` in this store.
    fn error(&self, kind: ErrorKind, operation: Operation, key: &str, message: &str) -> Error {
        Error::new(kind, operation, self.url(key), message)
    }

    /// Checks that the store supports `key`.
    ///
    /// # Errors
    /// `InvalidKey`.
    fn check_key(&self, operation: Operation, key: &str) -> Result<()> {
        match self.capabilities().keys.refusal(key) {
            None => Ok(()),
            Some(reason) => Err(self.error(ErrorKind::InvalidKey, operation, key, reason)),
        }
    }
}

/// A response to a GET whose head is received. Dropping it discards the body.
#[async_trait]
pub trait GetResult: Send {
    /// Size of the whole object in bytes.
    fn size(&self) -> u64;

    /// The version of the object in the response.
    fn version(&self) -> Option<&Version>;

    /// The bytes of the object that the body contains.
    fn range(&self) -> Range<u64>;

    /// The object's attributes, as [`ObjectStore::head`] returns them.
    fn attributes(&self) -> Attributes;

    /// The checksum of the whole object, even if a range was requested; `None` if the response has none.
    fn checksum(&self) -> Option<ObjectChecksum>;

    /// Returns whether the response has the length of its body. If it does not, `size` and `range` are the expected
    /// values. They are verified at the end of the body, so the caller must read all of `range`.
    fn has_length(&self) -> bool {
        true
    }

    /// Receives the body into `dest`, after the bytes that are filled already. Returns when the body ends or `dest` is full;
    /// the next call continues with another `dest`. After an error, `dest` holds the bytes received before.
    async fn read_into(&mut self, dest: &mut Dest) -> Result<()>;
}
