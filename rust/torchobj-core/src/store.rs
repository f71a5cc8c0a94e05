//! What everything above needs of a store. One call is one attempt: a store says what kind of failure it met and
//! retries nothing; retries, resume, timeouts and permits stand once, in `transfer`, over every store.

use std::fmt::Debug;
use std::ops::Range;

use async_trait::async_trait;

use crate::buffer::Dest;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::types::{
    Capabilities, Condition, GetRequest, ListPage, ListRequest, ObjectHead, PartReceipt, Payload, PutOptions, Upload,
    Version,
};
use crate::url::ObjectUrl;

/// A bucket, or a folder, that holds objects by key.
///
/// Dropping the future of any call cancels it; a request that was on its way shuts its socket down.
#[async_trait]
pub trait ObjectStore: Debug + Send + Sync + 'static {
    /// The URL of a key, for people.
    fn url(&self, key: &str) -> String;

    /// What this store can do.
    fn capabilities(&self) -> Capabilities;

    /// Asks for an object or a range. The answer has its head; its body waits to be read.
    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn Opened>>;

    /// Size, version and attributes of an object.
    async fn head(&self, key: &str) -> Result<ObjectHead>;

    /// One page of keys.
    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage>;

    /// Writes an object in one request. It becomes visible whole, or not at all.
    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version>;

    /// Begins an upload in parts. Nothing is visible before its commit.
    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload>;

    /// Writes part `number` (from 1). A part that was written before under this number is replaced.
    async fn put_part(&self, upload: &Upload, number: u32, offset: u64, payload: &Payload) -> Result<PartReceipt>;

    /// Makes the upload the object, from `parts` in order.
    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version>;

    /// Whether the object now is what this upload would have made it: asked when the answer to a commit was lost.
    async fn committed(&self, upload: &Upload, parts: &[PartReceipt]) -> Result<Option<Version>>;

    /// Forgets an upload and its parts. An upload that is gone already is no error.
    async fn abort(&self, upload: &Upload) -> Result<()>;

    /// Uploads under `prefix` that began and were neither committed nor aborted.
    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>>;

    /// Copies an object of the same kind of store to `key`, with its attributes.
    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version>;

    /// Deletes objects; one that does not exist is no error. Returns those that could not be deleted.
    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>>;

    /// Deletes an object if it is of this version; one that does not exist is no error.
    ///
    /// # Errors
    /// `Precondition` where it is of another version; `Unsupported` where the store cannot compare and delete in one
    /// step.
    async fn delete_if(&self, key: &str, version: &Version) -> Result<()>;

    /// An error of this store about `key`.
    fn error(&self, kind: ErrorKind, operation: Operation, key: &str, message: &str) -> Error {
        Error::new(kind, operation, self.url(key), message)
    }

    /// Refuses a key that the store cannot hold.
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

/// An answer whose head has arrived. Dropping it gives up the body.
#[async_trait]
pub trait Opened: Send {
    /// Size of the whole object in bytes.
    fn size(&self) -> u64;

    /// The version that answers.
    fn version(&self) -> Option<&Version>;

    /// Which bytes of the object the body holds.
    fn range(&self) -> Range<u64>;

    /// Whether the response itself announced how long its body is. Where it did not, `size` and `range` are what was
    /// expected, and no byte of the body counts before the body has ended there. The caller then must not read only the
    /// beginning of `range`.
    fn announced(&self) -> bool {
        true
    }

    /// Receives the body into `dest`, from where it is filled to, and returns when the body ended or `dest` is full:
    /// another `dest` then takes what follows.
    /// After an error `dest` says how far it came.
    async fn read_into(&mut self, dest: &mut Dest) -> Result<()>;
}
