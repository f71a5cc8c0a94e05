//! The store for S3 and compatible servers.
//!
//! An [`Account`] is a configuration and the state that its buckets share; an [`S3Store`] is one bucket. Frequent requests
//! are sent by `http`: `endpoint` resolves the address of the bucket, `request` signs (`sign`) and accepts redirects
//! (`trusted_hosts`), `get`, `put`, `list` and `multipart` build requests, and `error` and `xml` parse responses. Rare requests
//! go through the SDK (`sdk`, `connector`): `copy`, `delete`, and those of `multipart` other than parts and commits. If only
//! the SDK can sign requests, or `force_sdk` is set, it sends all of them. `identity` finds whose credentials sign, in the
//! environment and in `profiles`, and `credentials` loads them.

mod bucket;
mod checksum;
mod clock;
mod config;
mod connector;
mod copy;
mod credentials;
mod delete;
mod endpoint;
mod error;
mod get;
mod identity;
mod list;
mod multipart;
mod profiles;
mod put;
mod request;
mod sdk;
pub mod sign;
mod trusted_hosts;
#[cfg(test)]
mod untrusted;
mod xml;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::{GetResult, ObjectStore};
use torchobj_core::types::{
    Capabilities, ChecksumAlgorithm, Condition, GetRequest, KeyRules, ListPage, ListRequest, ObjectHead, PartReceipt,
    Payload, PutOptions, Upload, Version,
};
use torchobj_core::url::ObjectUrl;

use bucket::Bucket;
pub use config::Account;

use crate::config::{Checksum, Encryption};

/// A store for one bucket.
pub struct S3Store(Arc<Bucket>);

impl S3Store {
    /// A store for the bucket `name` of an account; one without a name lists the buckets. Sends no requests.
    pub fn new(account: Arc<Account>, name: &str) -> Self {
        Self(Arc::new(Bucket::new(account, name)))
    }

    /// Returns an error if the server ignores conditions of writes. The endpoint may be in a profile, which
    /// [`ObjectStore::capabilities`] does not wait for.
    async fn check_conditional(&self, operation: Operation, key: &str) -> Result<()> {
        self.0.account.environment().await;
        if self.0.account.conditional_writes() {
            return Ok(());
        }
        let message = "the server does not compare versions before it writes or deletes";
        let error = self.error(ErrorKind::Unsupported, operation, key, message);
        Err(error.with_hint(
            "for Google Cloud Storage use gs:// URLs; S3Options(conditional_writes=True) if the server supports If-Match",
        ))
    }

    /// Returns an error if the object of an upload exists. Ceph and others ignore If-None-Match when an upload is completed; the
    /// condition is sent nevertheless.
    async fn check_absent(&self, key: &str) -> Result<()> {
        if self.0.account.environment().await.endpoint_url.is_none() || self.0.head(key).await.is_err() {
            return Ok(());
        }
        Err(self.error(ErrorKind::Precondition, Operation::Commit, key, "the object exists"))
    }

    /// Says of an error that it is one of the condition: the server does not implement it, or compares it wrongly. Ceph 16
    /// refuses an If-Match with the quotes of its own ETags.
    async fn about_condition(&self, error: Error, key: &str, condition: &Condition) -> Error {
        let header = match condition {
            Condition::Absent => "If-None-Match",
            Condition::Matches(_) => "If-Match",
            Condition::Always => return error,
        };
        let hint = "S3Options(conditional_writes=False) declares that";
        if error.status() == Some(501) {
            return error.with_hint(format!("the server does not implement the condition ({header}): {hint}"));
        }
        if let Condition::Matches(version) = condition
            && error.kind() == ErrorKind::Precondition
            && let Ok(head) = self.0.head(key).await
            && head.version.as_ref() == Some(version)
        {
            let message = "the server refuses If-Match with the version that the object has";
            return self.error(ErrorKind::Unsupported, error.operation(), key, message).with_hint(hint);
        }
        error
    }
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing else: the parts of a store have secrets.
        f.write_str(&self.url(""))
    }
}

#[async_trait]
impl ObjectStore for S3Store {
    fn url(&self, key: &str) -> String {
        self.0.url_of(Some(key))
    }

    fn identity(&self) -> String {
        self.0.endpoint()
    }

    async fn cache_identity(&self) -> Option<String> {
        // Objects that are encrypted with a key of the customer do not leave memory.
        if matches!(self.0.account.config.encryption, Encryption::CustomerKeyFile(_)) {
            return None;
        }
        // Names of buckets are unique in AWS, whatever their regions, which are found by a request.
        Some(self.0.account.environment().await.endpoint_url.clone().unwrap_or_else(|| "aws".to_owned()))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            keys: if self.0.account.config.keys_are_paths { KeyRules::Path } else { KeyRules::Raw },
            put_if_absent: self.0.account.conditional_writes(),
            put_if_matches: self.0.account.conditional_writes(),
            attributes: true,
            upload_sessions: true,
            // User guide, "Amazon S3 multipart upload limits".
            min_part_bytes: 5 << 20,
            max_parts: 10_000,
            max_put_bytes: 5 << 30,
            // AWS allows 50 TB (user guide, "Amazon S3 object sizes"), other servers of S3 may allow more.
            max_object_bytes: 1 << 46,
            // API reference, "DeleteObjects".
            max_delete_keys: 1000,
            checksums: match self.0.account.config.checksum {
                Checksum::Off => &[],
                Checksum::Crc64Nvme => &[ChecksumAlgorithm::Crc64Nvme],
                Checksum::Crc32C => &[ChecksumAlgorithm::Crc32C],
                Checksum::Auto => &[ChecksumAlgorithm::Crc64Nvme, ChecksumAlgorithm::Crc32C, ChecksumAlgorithm::Crc32],
            },
            ordered_listing: !self.0.is_directory_bucket(),
            parallel_listing: !self.0.is_directory_bucket(),
        }
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        if self.0.by_sdk().await? { self.0.sdk_open(request).await } else { self.0.open(request).await }
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.0.head(key).await
    }

    async fn head_with_checksum(&self, key: &str) -> Result<ObjectHead> {
        self.0.head_with_checksum(key).await
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        if self.0.by_sdk().await? { self.0.sdk_list(&request).await } else { self.0.list(&request).await }
    }

    async fn buckets(&self, _project: Option<&str>, continuation: Option<&str>) -> Result<ListPage> {
        self.0.buckets(continuation).await
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        if options.condition != Condition::Always {
            self.check_conditional(Operation::Put, key).await?;
        }
        let written = if self.0.by_sdk().await? {
            self.0.sdk_put(key, payload, options).await
        } else {
            self.0.put(key, payload, options).await
        };
        match written {
            Ok(version) => Ok(version),
            Err(error) => Err(self.about_condition(error, key, &options.condition).await),
        }
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        self.0.begin_upload(key, options).await
    }

    async fn put_part(&self, upload: &Upload, number: u32, _offset: u64, payload: &Payload) -> Result<PartReceipt> {
        if self.0.by_sdk().await? {
            self.0.sdk_put_part(upload, number, payload).await
        } else {
            self.0.put_part(upload, number, payload).await
        }
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version> {
        if *condition != Condition::Always {
            self.check_conditional(Operation::Commit, &upload.key).await?;
        }
        if *condition == Condition::Absent {
            self.check_absent(&upload.key).await?;
        }
        match self.0.commit(upload, parts, condition).await {
            Ok(version) => Ok(version),
            Err(error) => Err(self.about_condition(error, &upload.key, condition).await),
        }
    }

    async fn committed(&self, upload: &Upload, _parts: &[PartReceipt]) -> Result<Option<Version>> {
        self.0.committed(upload).await
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.0.abort(upload).await
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        self.0.uploads(prefix).await
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        self.0.copy(source, key).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        self.0.delete(keys).await
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.check_conditional(Operation::Delete, key).await?;
        match self.0.delete_one(key, Some(version)).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.about_condition(error, key, &Condition::Matches(version.clone())).await),
        }
    }
}
