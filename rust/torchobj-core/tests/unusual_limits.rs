//! The conformance suite on a provider with unusual limits: at most three parts per upload, seven keys per delete and four
//! million bytes per request, no conditions, no attributes, and MD5 as its only checksum. It refuses requests beyond these
//! limits, so the suite passes only if core reads them.

#![expect(clippy::print_stdout, reason = "prints the name of the running check")]
#![expect(clippy::unwrap_used, reason = "a test, also outside its functions")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use torchobj_conformance::SUITE;
use torchobj_core::buffer::Dest;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::policy::Policy;
use torchobj_core::runtime::cleaned_up;
use torchobj_core::store::{GetResult, ObjectChecksum, ObjectStore};
use torchobj_core::types::{
    Attributes, ByteRange, Capabilities, ChecksumAlgorithm, Condition, GetRequest, KeyRules, ListEntry, ListPage,
    ListRequest, ObjectHead, PartReceipt, Payload, PutOptions, Upload, Version,
};
use torchobj_core::url::ObjectUrl;

const MAX_PARTS: u32 = 3;
const MAX_KEYS: usize = 7;
const MAX_BYTES: usize = 4_000_000;

type Object = (Bytes, Version);

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Object>,
    uploads: BTreeMap<String, (Upload, BTreeMap<u32, Object>)>,
    ended: BTreeMap<String, Version>,
    serial: u64,
}

#[derive(Debug, Default)]
struct Dictionary(Mutex<State>);

impl State {
    fn version(&mut self) -> Version {
        self.serial += 1;
        Version::new(self.serial.to_string())
    }

    fn insert(&mut self, key: &str, body: Bytes) -> Version {
        let version = self.version();
        self.objects.insert(key.to_owned(), (body, version.clone()));
        version
    }
}

impl Dictionary {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn refused(&self, operation: Operation, key: &str, limit: &str) -> Error {
        self.error(ErrorKind::InvalidRequest, operation, key, limit)
    }

    fn gone(&self, operation: Operation, upload: &Upload) -> Error {
        self.error(ErrorKind::UploadGone, operation, &upload.key, "no such upload")
    }

    fn find(&self, operation: Operation, key: &str) -> Result<Object> {
        let found = self.state().objects.get(key).cloned();
        found.ok_or_else(|| self.error(ErrorKind::NotFound, operation, key, "no such object"))
    }

    /// Returns the bytes of a payload, within the limit of one request.
    fn body(&self, operation: Operation, key: &str, payload: &Payload) -> Result<Bytes> {
        if payload.len() > MAX_BYTES {
            return Err(self.refused(operation, key, "more bytes than one request may have"));
        }
        Ok(payload.pieces().concat().into())
    }

    fn check(&self, operation: Operation, key: &str, options: &PutOptions) -> Result<()> {
        assert_eq!(options.checksum, None, "core uses only checksums that the provider supports");
        assert_eq!(options.condition, Condition::Always, "core refuses conditions that the provider does not support");
        match options.attributes == Attributes::default() {
            true => self.check_key(operation, key),
            false => Err(self.error(ErrorKind::Unsupported, operation, key, "attributes are not supported")),
        }
    }
}

struct OddGetResult {
    object: Object,
    range: Range<u64>,
    taken: usize,
}

#[async_trait]
impl GetResult for OddGetResult {
    fn size(&self) -> u64 {
        self.object.0.len() as u64
    }

    fn version(&self) -> Option<&Version> {
        Some(&self.object.1)
    }

    fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    fn attributes(&self) -> Attributes {
        Attributes::default()
    }

    fn checksum(&self) -> Option<ObjectChecksum> {
        None
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        let [start, end] = [self.range.start, self.range.end].map(|at| usize::try_from(at).unwrap());
        self.taken += dest.fill(&self.object.0[start + self.taken..end]);
        Ok(())
    }
}

#[async_trait]
impl ObjectStore for Dictionary {
    fn url(&self, key: &str) -> String {
        format!("dictionary://d/{key}")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            keys: KeyRules::Raw,
            put_if_absent: false,
            put_if_matches: false,
            attributes: false,
            upload_sessions: true,
            min_part_bytes: 1,
            max_parts: MAX_PARTS,
            max_put_bytes: MAX_BYTES as u64,
            max_object_bytes: 1 << 46,
            max_delete_keys: MAX_KEYS,
            checksums: &[ChecksumAlgorithm::Md5],
            ordered_listing: true,
            parallel_listing: false,
        }
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let object = self.find(Operation::Get, request.key)?;
        if request.version.is_some_and(|version| *version != object.1) {
            return Err(self.error(ErrorKind::Changed, Operation::Get, request.key, "another version"));
        }
        let range = ByteRange::resolve(request.range.as_ref(), object.0.len() as u64);
        let error = || self.error(ErrorKind::Range, Operation::Get, request.key, "the range begins after the end");
        Ok(Box::new(OddGetResult { range: range.ok_or_else(error)?, object, taken: 0 }))
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        let (body, version) = self.find(Operation::Head, key)?;
        let attributes = Attributes::default();
        Ok(ObjectHead {
            size: body.len() as u64,
            version: Some(version),
            modified_ms: None,
            attributes,
            checksum: None,
        })
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        let mut page = ListPage::default();
        let after = request.continuation.or(request.start_after).unwrap_or_default();
        let max_entries = request.max_entries.unwrap_or(5).min(5) as usize;
        for (key, (body, version)) in &self.state().objects {
            let Some(rest) = key.strip_prefix(request.prefix).filter(|_| key.as_str() > after) else { continue };
            let end = request.delimiter.and_then(|delimiter| Some(rest.find(delimiter)? + delimiter.len()));
            let folded = end.map(|end| format!("{}{}", request.prefix, &rest[..end]));
            // The continuation is the last key or prefix of the previous page.
            let known = page.prefixes.last().or(request.continuation.map(str::to_owned).as_ref()).cloned();
            if folded.is_some() && folded.as_ref().zip(known).is_some_and(|(folded, known)| known.starts_with(folded)) {
                continue;
            }
            if page.entries.len() + page.prefixes.len() == max_entries {
                let last = page.entries.last().map(|entry| &entry.key).max(page.prefixes.last());
                page.continuation = last.cloned();
                break;
            }
            match folded {
                Some(prefix) => page.prefixes.push(prefix),
                None => page.entries.push(ListEntry {
                    key: key.clone(),
                    size: Some(body.len() as u64),
                    version: Some(version.clone()),
                    modified_ms: None,
                    storage_class: None,
                }),
            }
        }
        Ok(page)
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.check(Operation::Put, key, options)?;
        let body = self.body(Operation::Put, key, payload)?;
        Ok(self.state().insert(key, body))
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        self.check(Operation::BeginUpload, key, options)?;
        let mut state = self.state();
        let id = state.version().as_str().to_owned();
        let upload = Upload::of_other_client(key.to_owned(), id.clone(), None);
        state.uploads.insert(id, (upload.clone(), BTreeMap::new()));
        Ok(upload)
    }

    async fn put_part(&self, upload: &Upload, number: u32, _offset: u64, payload: &Payload) -> Result<PartReceipt> {
        if number > MAX_PARTS {
            return Err(self.refused(Operation::PutPart, &upload.key, "more parts than an upload may have"));
        }
        let body = self.body(Operation::PutPart, &upload.key, payload)?;
        let mut state = self.state();
        let version = state.version();
        let Some((_, parts)) = state.uploads.get_mut(&upload.id) else {
            return Err(self.gone(Operation::PutPart, upload));
        };
        parts.insert(number, (body, version.clone()));
        Ok(PartReceipt { number, size: payload.len() as u64, version, checksum: None })
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], _condition: &Condition) -> Result<Version> {
        let mut state = self.state();
        let Some((_, stored)) = state.uploads.get(&upload.id) else {
            return Err(self.gone(Operation::Commit, upload));
        };
        let mut body = Vec::new();
        for part in parts {
            match stored.get(&part.number) {
                Some((bytes, version)) if *version == part.version => body.extend_from_slice(bytes),
                _ => return Err(self.refused(Operation::Commit, &upload.key, "not the part that was stored")),
            }
        }
        state.uploads.remove(&upload.id);
        let version = state.insert(&upload.key, body.into());
        state.ended.insert(upload.id.clone(), version.clone());
        Ok(version)
    }

    async fn committed(&self, upload: &Upload, _parts: &[PartReceipt]) -> Result<Option<Version>> {
        Ok(self.state().ended.get(&upload.id).cloned())
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.state().uploads.remove(&upload.id);
        Ok(())
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        let state = self.state();
        let uploads = state.uploads.values().map(|(upload, _)| upload);
        Ok(uploads.filter(|upload| upload.key.starts_with(prefix)).cloned().collect())
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        if source.scheme != "dictionary" {
            return Err(self.error(ErrorKind::Unsupported, Operation::Copy, key, "another store"));
        }
        let (body, _) = self.find(Operation::Copy, &source.key)?;
        Ok(self.state().insert(key, body))
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        if keys.len() > MAX_KEYS {
            return Err(self.refused(Operation::Delete, &keys[0], "more keys than one request may have"));
        }
        let mut state = self.state();
        state.objects.retain(|key, _| !keys.contains(key));
        Ok(Vec::new())
    }

    async fn delete_if(&self, key: &str, _version: &Version) -> Result<()> {
        Err(self.error(ErrorKind::Unsupported, Operation::Delete, key, "no conditions"))
    }
}

fn client(part_bytes: u64) -> Arc<Client> {
    let policy = Policy { part_bytes, whole_below_bytes: part_bytes, ..Policy::default() };
    Arc::new(Client::new(Arc::new(Dictionary::default()), policy))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_with_unusual_limits_passes_the_suite() {
    for (name, check) in SUITE {
        println!("{name}");
        check(client(50_000)).await;
    }
}

#[tokio::test]
async fn a_larger_part_size_is_reduced_to_the_limit_of_the_provider() {
    let client = client(8 << 20);
    let body = Bytes::from(vec![7; 3 * MAX_BYTES]);
    client.put("k", body.clone().into(), &PutOptions::default()).await.unwrap();
    assert_eq!(client.head("k").await.unwrap().size, body.len() as u64);
    let larger = Bytes::from(vec![7; 3 * MAX_BYTES + 1]);
    let error = client.put("larger", larger.into(), &PutOptions::default()).await.unwrap_err();
    assert!(error.to_string().contains("more than 3 parts"), "{error}");
    // The abort runs in the background.
    tokio::task::spawn_blocking(|| cleaned_up(Duration::from_secs(20))).await.unwrap();
    assert!(client.uploads("").await.unwrap().is_empty());
}
