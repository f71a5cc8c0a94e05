//! A store whose reads are answered by a disk cache, and admitted to it. All other calls are those of the store.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::OnceCell;

use super::admission::Admission;
use super::disk_cache::DiskCache;
use super::entry::EntryKey;
use super::hit::Hit;
use crate::error::{Error, Operation, Result};
use crate::store::{GetResult, ObjectStore};
use crate::types::{
    ByteRange, Capabilities, Condition, GetRequest, ListPage, ListRequest, ObjectHead, PartReceipt, Payload,
    PutOptions, Upload, Version,
};
use crate::url::ObjectUrl;

/// A store with a disk cache. Reads of a version and size that a listing or the caller gave are cached, and no others: no reads of
/// checkpoints, whose size and version are those of the first response.
#[derive(Debug)]
pub struct CachedStore {
    inner: Arc<dyn ObjectStore>,
    cache: Arc<DiskCache>,
    identity: OnceCell<Option<String>>,
}

impl CachedStore {
    /// `inner` with a cache.
    pub fn new(inner: Arc<dyn ObjectStore>, cache: Arc<DiskCache>) -> Self {
        Self { inner, cache, identity: OnceCell::new() }
    }

    /// The entry of all that is requested, and the version; `None` if it is not cached.
    async fn key<'a>(&self, request: &GetRequest<'a>) -> Option<(EntryKey, &'a Version)> {
        let (version, size) = (request.version.filter(|version| !version.is_found())?, request.size?);
        if request.checksum {
            return None;
        }
        let range = match &request.range {
            None => 0..size,
            Some(range) => ByteRange::resolve(Some(range), size)?,
        };
        let identity = self.identity.get_or_init(|| self.inner.cache_identity()).await.as_deref()?;
        Some((EntryKey::new(identity, self.inner.url(request.key), version, size, range), version))
    }

    /// The entry of another range of the object.
    fn entry(&self, key: &EntryKey, version: &Version, range: Range<u64>) -> Option<EntryKey> {
        let identity = self.identity.get()?.as_deref()?;
        Some(EntryKey::new(identity, key.url.clone(), version, key.size, range))
    }

    /// The entry of the whole object, if `key` is a part of an object that may have been read whole.
    fn whole(&self, key: &EntryKey, version: &Version) -> Option<EntryKey> {
        let is_part = key.length() < key.size && self.cache.may_have(key.size);
        self.entry(key, version, 0..key.size).filter(|_| is_part)
    }
}

#[async_trait]
impl ObjectStore for CachedStore {
    fn url(&self, key: &str) -> String {
        self.inner.url(key)
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
        // Several ranges are entries of their own.
        let (key, version) = self.key(request).await.filter(|_| request.parts.len() < 2)?;
        let range = key.range.clone();
        let (key, file) = match self.cache.find(&key) {
            Some(file) => (key, file),
            None => {
                let whole = self.whole(&key, version)?;
                let file = self.cache.find(&whole)?;
                (whole, file)
            }
        };
        Some(Box::new(Hit::new(self.cache.clone(), key, version.clone(), file, range)))
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let (key, parts) = (self.key(&request).await, request.parts);
        let result = self.inner.open(request).await?;
        let Some((key, version)) = key else { return Ok(result) };
        // A response that is not the one that was expected is refused by the caller.
        let is_expected = result.version() == Some(version) && result.size() == key.size && result.range() == key.range;
        if !is_expected || !result.has_length() || !self.cache.is_writable() {
            return Ok(result);
        }
        // An entry is what the caller keeps: in the next epoch, other ranges are joined to one request.
        let entries: VecDeque<_> = match parts {
            [] => [key].into(),
            parts => parts.iter().filter_map(|range| self.entry(&key, version, range.clone())).collect(),
        };
        Ok(Box::new(Admission::new(result, self.cache.clone(), entries)))
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.inner.head(key).await
    }

    async fn head_with_checksum(&self, key: &str) -> Result<ObjectHead> {
        self.inner.head_with_checksum(key).await
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        self.inner.list(request).await
    }

    async fn buckets(&self, project: Option<&str>, continuation: Option<&str>) -> Result<ListPage> {
        self.inner.buckets(project, continuation).await
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.inner.put(key, payload, options).await
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        self.inner.begin_upload(key, options).await
    }

    async fn put_part(&self, upload: &Upload, number: u32, offset: u64, payload: &Payload) -> Result<PartReceipt> {
        self.inner.put_part(upload, number, offset, payload).await
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version> {
        self.inner.commit(upload, parts, condition).await
    }

    async fn committed(&self, upload: &Upload, parts: &[PartReceipt]) -> Result<Option<Version>> {
        self.inner.committed(upload, parts).await
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.inner.abort(upload).await
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        self.inner.uploads(prefix).await
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        self.inner.copy(source, key).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        self.inner.delete(keys).await
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.inner.delete_if(key, version).await
    }

    fn check_key(&self, operation: Operation, key: &str) -> Result<()> {
        self.inner.check_key(operation, key)
    }
}
