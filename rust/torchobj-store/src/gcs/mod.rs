//! The store for Google Cloud Storage, through its JSON API over HTTP/1.1.
//!
//! An [`Account`] is a configuration and the state that its buckets share; a [`GcsStore`] is one bucket. `credentials` loads
//! tokens with google-cloud-auth. `request` adds the token to requests and parses errors (`error`); `get`, `put`, `list`,
//! `copy` and `delete` build requests, and `resource` parses the JSON of objects. `multipart` uploads an object in `parts`,
//! objects that are composed into it, or as one `resumable` upload. With `force_sdk`, objects are read and written through the
//! crate google-cloud-storage (`sdk`).

mod config;
mod copy;
mod credentials;
mod delete;
mod error;
mod get;
mod list;
mod multipart;
mod parts;
mod put;
mod request;
mod resource;
mod resumable;
mod sdk;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use torchobj_core::error::{Error, Operation, Result};
use torchobj_core::store::{GetResult, ObjectStore};
use torchobj_core::types::{
    Capabilities, ChecksumAlgorithm, Condition, GetRequest, KeyRules, ListPage, ListRequest, ObjectHead, PartReceipt,
    Payload, PutOptions, Upload, Version,
};
use torchobj_core::url::ObjectUrl;

pub use config::Account;
use multipart::Uploads;
use request::Bucket;

/// A store for one bucket.
pub struct GcsStore {
    bucket: Arc<Bucket>,
    uploads: Uploads,
}

impl GcsStore {
    /// A store for the bucket `name` of an account; one without a name lists the buckets. Sends no requests.
    pub fn new(account: Arc<Account>, name: &str) -> Self {
        let bucket = Arc::new(Bucket::new(account, name));
        Self { uploads: Uploads::new(bucket.clone()), bucket }
    }
}

impl fmt::Debug for GcsStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing else: the parts of a store have secrets.
        f.write_str(&self.url(""))
    }
}

#[async_trait]
impl ObjectStore for GcsStore {
    fn url(&self, key: &str) -> String {
        self.bucket.url_of(Some(key))
    }

    fn identity(&self) -> String {
        let origin = &self.bucket.account.origin;
        format!("{}{}", origin.url(), String::from_utf8_lossy(&origin.path))
    }

    async fn cache_identity(&self) -> Option<String> {
        Some(self.identity())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            keys: KeyRules::Gcs { reserved: parts::PREFIX },
            put_if_absent: true,
            put_if_matches: true,
            attributes: true,
            upload_sessions: false,
            min_part_bytes: 1,
            // Three levels of composes.
            max_parts: 32 * 32 * 32,
            // Cloud Storage, "Quotas & limits".
            max_put_bytes: 5 << 40,
            max_object_bytes: 5 << 40,
            // Each is one request.
            max_delete_keys: 256,
            checksums: &[ChecksumAlgorithm::Crc32C],
            ordered_listing: true,
            parallel_listing: true,
        }
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        if let Some(version) = request.version {
            self.bucket.check_version(Operation::Get, request.key, version)?;
        }
        if self.bucket.account.config.force_sdk {
            self.bucket.sdk_open(request).await
        } else {
            self.bucket.open(request).await
        }
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.bucket.head(key).await
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        self.bucket.list(&request).await
    }

    async fn buckets(&self, project: Option<&str>, continuation: Option<&str>) -> Result<ListPage> {
        self.bucket.buckets(project, continuation).await
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.bucket.check_condition(Operation::Put, key, &options.condition)?;
        self.bucket.put(key, payload, options).await
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        self.bucket.check_condition(Operation::BeginUpload, key, &options.condition)?;
        self.uploads.begin(key, options).await
    }

    async fn put_part(&self, upload: &Upload, number: u32, offset: u64, payload: &Payload) -> Result<PartReceipt> {
        self.uploads.put_part(upload, number, offset, payload).await
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version> {
        self.bucket.check_condition(Operation::Commit, &upload.key, condition)?;
        self.uploads.commit(upload, parts, condition).await
    }

    async fn committed(&self, upload: &Upload, parts: &[PartReceipt]) -> Result<Option<Version>> {
        self.uploads.committed(upload, parts).await
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.uploads.abort(upload).await
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        self.bucket.list_uploads(prefix).await
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        self.bucket.copy(source, key).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        Ok(self.bucket.delete_each(keys).await)
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.bucket.check_version(Operation::Delete, key, version)?;
        self.bucket.delete_one(key, Some(version)).await
    }
}
