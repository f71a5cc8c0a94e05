//! A store in memory, for tests and as the reference for other stores.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Bound, Range};
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;

use crate::buffer::Dest;
use crate::crc32::Crc32;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::store::{GetResult, ObjectChecksum, ObjectStore};
use crate::types::{
    Attributes, ByteRange, Capabilities, Condition, GetRequest, KeyRules, ListEntry, ListPage, ListRequest, ObjectHead,
    PartReceipt, Payload, PutOptions, Upload, Version,
};
use crate::url::ObjectUrl;

/// Maximum number of entries of a page: small, so that listings of tests have several pages.
const PAGE_ENTRIES: usize = 100;

#[derive(Clone, Debug)]
struct StoredObject {
    body: Bytes,
    version: Version,
    modified_ms: i64,
    attributes: Attributes,
}

#[derive(Debug)]
struct Pending {
    upload: Upload,
    attributes: Attributes,
    parts: BTreeMap<u32, (PartReceipt, Bytes)>,
}

#[derive(Debug, Default)]
struct MemoryState {
    objects: BTreeMap<String, StoredObject>,
    uploads: HashMap<String, Pending>,
    /// Versions of the objects that uploads made, by upload id.
    commits: HashMap<String, Version>,
    /// Number of versions and uploads so far.
    serial: u64,
}

/// A bucket in memory. Dropping the store deletes its objects.
#[derive(Debug)]
pub struct MemoryStore {
    name: String,
    state: Mutex<MemoryState>,
}

impl MemoryStore {
    /// An empty bucket; its URL is `memory://name`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn find(&self, operation: Operation, key: &str) -> Result<StoredObject> {
        self.check_key(operation, key)?;
        let found = self.state().objects.get(key).cloned();
        found.ok_or_else(|| self.error(ErrorKind::NotFound, operation, key, "no such object"))
    }

    fn gone(&self, operation: Operation, upload: &Upload) -> Error {
        self.error(ErrorKind::UploadGone, operation, &upload.key, "no such upload")
    }

    fn write(
        &self,
        operation: Operation,
        key: &str,
        body: Bytes,
        attributes: Attributes,
        condition: &Condition,
    ) -> Result<Version> {
        let mut state = self.state();
        let current = state.objects.get(key).map(|object| &object.version);
        let holds = match condition {
            Condition::Always => true,
            Condition::Absent => current.is_none(),
            Condition::Matches(version) => current == Some(version),
        };
        if !holds {
            return Err(self.error(ErrorKind::Precondition, operation, key, "the condition does not hold"));
        }
        let version = state.next("version");
        let object = StoredObject { body, version: version.clone(), modified_ms: now_ms(), attributes };
        state.objects.insert(key.to_owned(), object);
        Ok(version)
    }
}

impl MemoryState {
    fn next(&mut self, what: &str) -> Version {
        self.serial += 1;
        Version::new(format!("{what}-{}", self.serial))
    }
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn join(payload: &Payload) -> Bytes {
    payload.pieces().concat().into()
}

struct MemoryGetResult {
    object: StoredObject,
    range: Range<u64>,
    taken: usize,
}

#[async_trait]
impl GetResult for MemoryGetResult {
    fn size(&self) -> u64 {
        self.object.body.len() as u64
    }

    fn version(&self) -> Option<&Version> {
        Some(&self.object.version)
    }

    fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    fn attributes(&self) -> Attributes {
        self.object.attributes.clone()
    }

    fn checksum(&self) -> Option<ObjectChecksum> {
        Some(ObjectChecksum::Crc32(Crc32::of(&self.object.body).value()))
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        let range =
            usize::try_from(self.range.start).expect("in memory")..usize::try_from(self.range.end).expect("in memory");
        self.taken += dest.fill(&self.object.body[range][self.taken..]);
        Ok(())
    }
}

#[async_trait]
impl ObjectStore for MemoryStore {
    fn url(&self, key: &str) -> String {
        format!("memory://{}/{key}", self.name)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            keys: KeyRules::Raw,
            put_if_absent: true,
            put_if_matches: true,
            attributes: true,
            upload_sessions: true,
            min_part_bytes: 1,
            max_parts: 10_000,
            max_put_bytes: u64::MAX,
            max_object_bytes: 1 << 46,
            max_delete_keys: 1000,
            checksums: &[],
            ordered_listing: true,
            parallel_listing: true,
        }
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let object = self.find(Operation::Get, request.key)?;
        if request.version.is_some_and(|version| *version != object.version) {
            return Err(self.error(ErrorKind::Changed, Operation::Get, request.key, "the object changed"));
        }
        match ByteRange::resolve(request.range.as_ref(), object.body.len() as u64) {
            Some(range) => Ok(Box::new(MemoryGetResult { object, range, taken: 0 })),
            None => Err(self.error(ErrorKind::Range, Operation::Get, request.key, "the range begins after the end")),
        }
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        let StoredObject { body, version, modified_ms, attributes } = self.find(Operation::Head, key)?;
        let size = body.len() as u64;
        Ok(ObjectHead { size, version: Some(version), modified_ms: Some(modified_ms), attributes, checksum: None })
    }

    async fn head_with_checksum(&self, key: &str) -> Result<ObjectHead> {
        let checksum = Some(ObjectChecksum::Crc32(Crc32::of(&self.find(Operation::Head, key)?.body).value()));
        Ok(ObjectHead { checksum, ..self.head(key).await? })
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        let max_entries = request.max_entries.map_or(PAGE_ENTRIES, |max| PAGE_ENTRIES.min(max as usize));
        let mut page = ListPage::default();
        let mut last = request.continuation.or(request.start_after).map(str::to_owned);
        let state = self.state();
        loop {
            let after = match &last {
                Some(last) if last.as_str() >= request.prefix => Bound::Excluded(last.clone()),
                _ => Bound::Included(request.prefix.to_owned()),
            };
            let mut keys = state.objects.range::<String, _>((after, Bound::Unbounded));
            let Some((key, object)) = keys.next().filter(|(key, _)| key.starts_with(request.prefix)) else {
                return Ok(page);
            };
            if page.entries.len() + page.prefixes.len() == max_entries {
                page.continuation = last;
                return Ok(page);
            }
            let folded = request.delimiter.and_then(|delimiter| {
                let end = request.prefix.len() + key[request.prefix.len()..].find(delimiter)? + delimiter.len();
                Some(key[..end].to_owned())
            });
            if let Some(prefix) = folded {
                // Sorts after every key of this prefix and before all later keys.
                last = Some(format!("{prefix}{}", char::MAX));
                page.prefixes.push(prefix);
                continue;
            }
            last = Some(key.clone());
            page.entries.push(ListEntry {
                key: key.clone(),
                size: Some(object.body.len() as u64),
                version: Some(object.version.clone()),
                modified_ms: Some(object.modified_ms),
                storage_class: object.attributes.storage_class.as_deref().map(Into::into),
            });
        }
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.check_key(Operation::Put, key)?;
        self.write(Operation::Put, key, join(payload), options.attributes.clone(), &options.condition)
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        self.check_key(Operation::BeginUpload, key)?;
        let mut state = self.state();
        let id = state.next("upload").as_str().to_owned();
        let upload = Upload {
            key: key.to_owned(),
            id: id.clone(),
            nonce: String::new(),
            begun_ms: Some(now_ms()),
            checksum: options.checksum,
            sequential: false,
        };
        let pending =
            Pending { upload: upload.clone(), attributes: options.attributes.clone(), parts: BTreeMap::new() };
        state.uploads.insert(id, pending);
        Ok(upload)
    }

    async fn put_part(&self, upload: &Upload, number: u32, _offset: u64, payload: &Payload) -> Result<PartReceipt> {
        let mut state = self.state();
        let version = state.next("part");
        let pending = state.uploads.get_mut(&upload.id).ok_or_else(|| self.gone(Operation::PutPart, upload))?;
        let receipt = PartReceipt { number, size: payload.len() as u64, version, checksum: None };
        pending.parts.insert(number, (receipt.clone(), join(payload)));
        Ok(receipt)
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version> {
        let (body, attributes) = {
            let state = self.state();
            let pending = state.uploads.get(&upload.id).ok_or_else(|| self.gone(Operation::Commit, upload))?;
            let mut body = Vec::new();
            for receipt in parts {
                match pending.parts.get(&receipt.number) {
                    Some((stored, bytes)) if stored == receipt => body.extend_from_slice(bytes),
                    _ => {
                        let message = format!("part {} differs from the uploaded one", receipt.number);
                        let kind = ErrorKind::InvalidRequest;
                        return Err(self.error(kind, Operation::Commit, &upload.key, &message));
                    }
                }
            }
            (body, pending.attributes.clone())
        };
        let version = self.write(Operation::Commit, &upload.key, body.into(), attributes, condition)?;
        let mut state = self.state();
        state.uploads.remove(&upload.id);
        state.commits.insert(upload.id.clone(), version.clone());
        Ok(version)
    }

    async fn committed(&self, upload: &Upload, _parts: &[PartReceipt]) -> Result<Option<Version>> {
        let state = self.state();
        let object = state.objects.get(&upload.key).map(|object| &object.version);
        Ok(state.commits.get(&upload.id).filter(|version| object == Some(version)).cloned())
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.state().uploads.remove(&upload.id);
        Ok(())
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        let state = self.state();
        let uploads = state.uploads.values().map(|pending| &pending.upload);
        Ok(uploads.filter(|upload| upload.key.starts_with(prefix)).cloned().collect())
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        if (source.scheme.as_str(), &source.bucket) != ("memory", &self.name) {
            let message = format!("cannot copy from {source}: another store");
            return Err(self.error(ErrorKind::Unsupported, Operation::Copy, key, &message));
        }
        let object = self.find(Operation::Copy, &source.key)?;
        self.write(Operation::Copy, key, object.body, object.attributes, &Condition::Always)
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        let mut state = self.state();
        for key in keys {
            state.objects.remove(key);
        }
        Ok(Vec::new())
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        let mut state = self.state();
        match state.objects.get(key) {
            Some(current) if current.version != *version => {
                Err(self.error(ErrorKind::Precondition, Operation::Delete, key, "the condition does not hold"))
            }
            _ => {
                state.objects.remove(key);
                Ok(())
            }
        }
    }
}
