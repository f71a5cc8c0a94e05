//! The objects of a store below a prefix, as a store.

use std::sync::Arc;

use async_trait::async_trait;

use crate::error::{Error, Operation, Result};
use crate::store::{GetResult, ObjectStore};
use crate::types::{
    Capabilities, Condition, GetRequest, ListPage, ListRequest, ObjectHead, PartReceipt, Payload, PutOptions, Upload,
    Version,
};
use crate::url::ObjectUrl;

/// The objects of a store whose keys begin with a prefix. Keys are passed and listed without it; URLs and errors have the whole
/// key.
#[derive(Debug)]
pub struct PrefixStore {
    inner: Arc<dyn ObjectStore>,
    prefix: String,
}

impl PrefixStore {
    /// The objects of `inner` whose keys begin with `prefix`.
    pub fn new(inner: Arc<dyn ObjectStore>, prefix: impl Into<String>) -> Self {
        Self { inner, prefix: prefix.into() }
    }

    fn whole(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn relative(&self, key: String) -> String {
        key.strip_prefix(&self.prefix).map(str::to_owned).unwrap_or(key)
    }

    fn whole_options(&self, options: &PutOptions) -> PutOptions {
        let tree_bytes = options.tree_bytes.map(|bytes| self.prefix.len() + bytes);
        PutOptions { tree_bytes, ..options.clone() }
    }

    fn whole_upload(&self, upload: &Upload) -> Upload {
        Upload { key: self.whole(&upload.key), ..upload.clone() }
    }

    fn relative_upload(&self, upload: Upload) -> Upload {
        Upload { key: self.relative(upload.key), ..upload }
    }
}

#[async_trait]
impl ObjectStore for PrefixStore {
    fn url(&self, key: &str) -> String {
        self.inner.url(&self.whole(key))
    }

    fn identity(&self) -> String {
        self.inner.identity()
    }

    async fn cache_identity(&self) -> Option<String> {
        self.inner.cache_identity().await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn open_local(&self, request: &GetRequest<'_>) -> Option<Box<dyn GetResult>> {
        self.inner.open_local(&GetRequest { key: &self.whole(request.key), ..request.clone() }).await
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        self.inner.open(GetRequest { key: &self.whole(request.key), ..request }).await
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.inner.head(&self.whole(key)).await
    }

    async fn head_with_checksum(&self, key: &str) -> Result<ObjectHead> {
        self.inner.head_with_checksum(&self.whole(key)).await
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        let (prefix, whole) = (self.whole(request.prefix), |key: Option<&str>| key.map(|key| self.whole(key)));
        let (start_after, end) = (whole(request.start_after), whole(request.end));
        let request =
            ListRequest { prefix: &prefix, start_after: start_after.as_deref(), end: end.as_deref(), ..request };
        let mut page = self.inner.list(request).await?;
        page.prefixes = page.prefixes.into_iter().map(|prefix| self.relative(prefix)).collect();
        for entry in &mut page.entries {
            entry.key = self.relative(std::mem::take(&mut entry.key));
        }
        // An empty object with the key of the prefix itself marks a folder.
        page.entries.retain(|entry| !entry.key.is_empty());
        Ok(page)
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.inner.put(&self.whole(key), payload, &self.whole_options(options)).await
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        Ok(self.relative_upload(self.inner.begin_upload(&self.whole(key), &self.whole_options(options)).await?))
    }

    async fn put_part(&self, upload: &Upload, number: u32, offset: u64, payload: &Payload) -> Result<PartReceipt> {
        self.inner.put_part(&self.whole_upload(upload), number, offset, payload).await
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version> {
        self.inner.commit(&self.whole_upload(upload), parts, condition).await
    }

    async fn committed(&self, upload: &Upload, parts: &[PartReceipt]) -> Result<Option<Version>> {
        self.inner.committed(&self.whole_upload(upload), parts).await
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.inner.abort(&self.whole_upload(upload)).await
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        let uploads = self.inner.uploads(&self.whole(prefix)).await?;
        Ok(uploads.into_iter().map(|upload| self.relative_upload(upload)).collect())
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        self.inner.copy(source, &self.whole(key)).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        let keys: Vec<String> = keys.iter().map(|key| self.whole(key)).collect();
        let failed = self.inner.delete(&keys).await?;
        Ok(failed.into_iter().map(|(key, error)| (self.relative(key), error)).collect())
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.inner.delete_if(&self.whole(key), version).await
    }

    fn check_key(&self, operation: Operation, key: &str) -> Result<()> {
        // The prefix itself is no object.
        let key = if key.is_empty() { String::new() } else { self.whole(key) };
        self.inner.check_key(operation, &key)
    }
}
