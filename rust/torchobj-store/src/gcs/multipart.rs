//! Uploads in parts: as objects that are composed (`parts`), or one after the other (`resumable`).

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;
use tokio::time::sleep;
use torchobj_core::error::{ErrorKind, Operation, Result, Retry};
use torchobj_core::types::{Condition, PartReceipt, Payload, PutOptions, Upload, Version};

use super::parts::{self, PREFIX, Parts};
use super::request::Bucket;
use super::resource::{NONCE, Resource, Written, totals};
use super::resumable::Resumable;
use crate::config::ParallelUpload;
use crate::id::unique_id;

/// Name of the metadata entry of a part with the key of its object.
pub(super) const KEY: &str = "torchobj-key";

/// Classes without a minimum storage duration, whose objects can be deleted at any time without a fee ("Storage classes").
/// The last three are names of earlier versions of the API.
const WITHOUT_FEE: [&str; 4] = ["STANDARD", "REGIONAL", "MULTI_REGIONAL", "DURABLE_REDUCED_AVAILABILITY"];

/// Pauses before the bucket is searched for parts of an aborted upload. A server may store a part that it received before its
/// connection was closed.
const LATE_PARTS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(300), Duration::from_millis(700)];

/// Maximum number of consecutive pages of a listing of parts without an object.
const MAX_EMPTY_PAGES: usize = 100;

/// An upload of this process.
#[derive(Debug)]
pub(super) struct State {
    /// The metadata of the object.
    object: Resource,
    sending: Sending,
}

#[derive(Debug)]
enum Sending {
    Parts(Parts),
    Resumable(Resumable),
}

/// Settings of a bucket that restrict parts of uploads.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct BucketSettings {
    storage_class: String,
    retention_policy: Option<serde_json::Value>,
    default_event_based_hold: bool,
}

impl Default for BucketSettings {
    fn default() -> Self {
        Self { storage_class: WITHOUT_FEE[0].to_owned(), retention_policy: None, default_event_based_hold: false }
    }
}

/// What is known about uploads in parts to a bucket.
#[derive(Debug, Default)]
pub(super) struct Restrictions {
    /// The class of objects without one of their own.
    storage_class: String,
    /// Why no object is uploaded in parts.
    reason: Option<String>,
    /// Whether the reason was logged.
    warned: AtomicBool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Permissions {
    permissions: Vec<String>,
}

impl Bucket {
    /// Begins an upload. Sends no request for an upload in parts, except to examine the bucket once.
    pub(super) async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        let operation = Operation::BeginUpload;
        let mut object = self.new_resource(operation, key, &options.attributes)?;
        let (id, nonce) = (unique_id(), unique_id());
        object.metadata.insert(NONCE.to_owned(), nonce.clone());
        let parallel = self.uploads_in_parallel(operation, object.storage_class.as_deref()).await?;
        let sending = if parallel {
            Sending::Parts(Parts::default())
        } else {
            Sending::Resumable(self.start_resumable(key, &object, &options.condition).await?)
        };
        let upload = Upload {
            key: key.to_owned(),
            id: id.clone(),
            nonce,
            begun_ms: None,
            checksum: options.checksum,
            sequential: !parallel,
        };
        self.begun().insert(id, Arc::new(State { object, sending }));
        Ok(upload)
    }

    /// Returns whether objects of this storage class (`None`: that of the bucket) are uploaded in parts.
    async fn uploads_in_parallel(&self, operation: Operation, storage_class: Option<&str>) -> Result<bool> {
        match self.account.config.parallel_upload {
            ParallelUpload::On => return Ok(true),
            ParallelUpload::Off => return Ok(false),
            ParallelUpload::Auto => {}
        }
        if storage_class.is_some_and(|class| !WITHOUT_FEE.contains(&class)) {
            return Ok(false);
        }
        let restrictions = self.restrictions.get_or_try_init(|| self.find_restrictions(operation)).await?;
        let reason = match &restrictions.reason {
            None if storage_class.is_some() || WITHOUT_FEE.contains(&restrictions.storage_class.as_str()) => {
                return Ok(true);
            }
            None => format!("its storage class is {}", restrictions.storage_class),
            Some(reason) => reason.clone(),
        };
        if !restrictions.warned.swap(true, Ordering::Relaxed) {
            log::warn!(
                "{}: large objects are uploaded sequentially, because {reason}. GCSOptions(parallel_upload=False) silences \
                 this warning; True uploads in parallel parts, if parts can be deleted at no cost",
                self.url_of(None)
            );
        }
        Ok(false)
    }

    /// Requests the settings of the bucket, and whether the credentials have the permissions that parts need.
    async fn find_restrictions(&self, operation: Operation) -> Result<Restrictions> {
        let payload = Payload::default();
        let query = [("fields", "storageClass,retentionPolicy,defaultEventBasedHold")];
        let request = self.request(operation, "GET", None, self.path("", ""), &query, Vec::new(), &payload);
        let BucketSettings { storage_class, retention_policy, default_event_based_hold } =
            match self.json(&request).await {
                Err(error) if error.kind() == ErrorKind::AccessDenied => {
                    let reason = Some("the credentials do not have the permission storage.buckets.get".to_owned());
                    return Ok(Restrictions { reason, ..Restrictions::default() });
                }
                settings => settings?,
            };
        let reason = if retention_policy.is_some() {
            Some("it has a retention policy".to_owned())
        } else if default_event_based_hold {
            Some("it has a default hold".to_owned())
        } else {
            let query = ["create", "delete", "get", "list"].map(|name| format!("storage.objects.{name}"));
            let query = query.each_ref().map(|name| ("permissions", name.as_str()));
            let path = self.path("/iam/testPermissions", "");
            let request = self.request(operation, "GET", None, path, &query, Vec::new(), &payload);
            let granted = match self.json::<Permissions>(&request).await {
                // An emulator may not implement it.
                Err(error) if error.kind().retry() == Retry::Never => Permissions::default(),
                granted => granted?,
            };
            let missing = query.iter().find(|(_, name)| granted.permissions.iter().all(|granted| granted != name));
            missing.map(|(_, name)| format!("the credentials are not known to have the permission {name}"))
        };
        Ok(Restrictions { storage_class, reason, ..Restrictions::default() })
    }

    fn state(&self, operation: Operation, upload: &Upload) -> Result<Arc<State>> {
        let found = self.begun().get(&upload.id).cloned();
        let message = "no such upload in this process";
        found.ok_or_else(|| self.error(ErrorKind::UploadGone, operation, Some(&upload.key), message))
    }

    /// Writes a part.
    pub(super) async fn put_part(
        &self,
        upload: &Upload,
        number: u32,
        offset: u64,
        payload: &Payload,
    ) -> Result<PartReceipt> {
        let state = self.state(Operation::PutPart, upload)?;
        match &state.sending {
            Sending::Parts(parts) => self.put_object_part(upload, parts, &state.object, number, payload).await,
            Sending::Resumable(session) => {
                let crc32c = self.send_chunk(&upload.key, session, offset, payload).await?;
                let version = Version::new(format!("{offset}"));
                let checksum = Some(crc32c.into());
                Ok(PartReceipt { number, size: payload.len() as u64, version, checksum })
            }
        }
    }

    /// Makes the object, and deletes the parts.
    pub(super) async fn commit(
        &self,
        upload: &Upload,
        receipts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Version> {
        let operation = Operation::Commit;
        let state = self.state(operation, upload)?;
        let object = match &state.sending {
            Sending::Parts(parts) => {
                let made = self.compose_object(upload, parts, &state.object, receipts, condition).await?;
                self.delete_parts(upload, parts).await;
                made
            }
            Sending::Resumable(session) => self.finish_resumable(&upload.key, session, receipts, condition).await?,
        };
        self.begun().remove(&upload.id);
        self.version_of(operation, &upload.key, &object)
    }

    /// Returns the version of the object if its metadata contains the nonce of this upload.
    pub(super) async fn committed(&self, upload: &Upload, receipts: &[PartReceipt]) -> Result<Option<Version>> {
        let (operation, key) = (Operation::Commit, upload.key.as_str());
        let object = match self.resource(Operation::Head, key).await {
            Ok(object) if object.nonce() == Some(&upload.nonce) => object,
            Ok(_) => return Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let (size, crc32c) = totals(receipts);
        let written = Written { name: key, nonce: Some(&upload.nonce), size, crc32c };
        let version = self.verify(operation, key, &written, object).await?.version();
        if let Ok(state) = self.state(operation, upload) {
            if let Sending::Parts(parts) = &state.sending {
                self.delete_parts(upload, parts).await;
            }
            self.begun().remove(&upload.id);
        }
        Ok(version)
    }

    /// Aborts an upload, also one of another process, and deletes its parts.
    pub(super) async fn abort(&self, upload: &Upload) -> Result<()> {
        let operation = Operation::Abort;
        let state = self.state(operation, upload).ok();
        match state.as_deref().map(|state| &state.sending) {
            Some(Sending::Resumable(session)) => self.cancel_resumable(&upload.key, session).await?,
            Some(Sending::Parts(parts)) => {
                self.delete_known(parts).await;
                for pause in LATE_PARTS {
                    sleep(pause).await;
                    match self.delete_listed(operation, upload).await {
                        // The parts that have a response are deleted.
                        Err(error) if error.kind() == ErrorKind::AccessDenied && parts.has_none_known() => break,
                        deleted => parts.deleted(&deleted?),
                    }
                    if !parts.has_unanswered() {
                        break;
                    }
                }
            }
            None => drop(self.delete_listed(operation, upload).await?),
        }
        self.begun().remove(&upload.id);
        Ok(())
    }

    /// Deletes the parts of an upload that are in the bucket. Returns their names.
    async fn delete_listed(&self, operation: Operation, upload: &Upload) -> Result<Vec<String>> {
        if upload.id.is_empty() || !upload.id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Ok(Vec::new());
        }
        let listed = self.list_parts(operation, upload).await?;
        let names = listed.iter().map(|(name, _)| name.clone()).collect();
        match self.delete_generations(listed).await.pop() {
            None => Ok(names),
            Some((_, error)) => Err(error),
        }
    }

    /// Lists the objects of an upload and their generations. Another object below the same prefix is not a part.
    pub(super) async fn list_parts(&self, operation: Operation, upload: &Upload) -> Result<Vec<(String, Version)>> {
        let listed = self.list_objects(operation, &upload.key, &parts::prefix_of(&upload.id)).await?;
        let belongs = |part: &Resource| part.metadata.get(KEY) == Some(&upload.key);
        let part = |part: Resource| part.version().map(|generation| (part.name, generation));
        Ok(listed.into_iter().filter(belongs).filter_map(part).collect())
    }

    /// Returns the uploads whose keys begin with `prefix` and that have parts in the bucket.
    pub(super) async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        let mut uploads: BTreeMap<(String, String), Option<i64>> = BTreeMap::new();
        for part in self.list_objects(Operation::ListUploads, prefix, PREFIX).await? {
            let Some(key) = part.metadata.get(KEY).filter(|key| key.starts_with(prefix)) else { continue };
            let Some((id, _)) = part.name[PREFIX.len()..].split_once('-') else { continue };
            let begun = uploads.entry((key.clone(), id.to_owned())).or_default();
            *begun = (*begun).into_iter().chain(part.created_ms()).min();
        }
        Ok(uploads.into_iter().map(|((key, id), begun_ms)| Upload::of_other_client(key, id, begun_ms)).collect())
    }

    /// Lists objects whose names begin with `prefix`. `key` is used in error messages.
    async fn list_objects(&self, operation: Operation, key: &str, prefix: &str) -> Result<Vec<Resource>> {
        let wrong = |problem: &str| self.error(ErrorKind::Protocol, operation, Some(key), problem);
        let (mut found, mut token, mut tokens) = (Vec::<Resource>::new(), None::<String>, HashSet::new());
        let mut empty_pages = 0;
        loop {
            let fields = "items(name,generation,timeCreated,metadata),nextPageToken";
            let mut query = vec![("prefix", prefix), ("fields", fields)];
            query.extend(token.as_deref().map(|token| ("pageToken", token)));
            let mut page = self.page(operation, key, &query).await?;
            empty_pages = if page.items.is_empty() { empty_pages + 1 } else { 0 };
            for item in page.items.drain(..).filter(|item| item.name.starts_with(prefix)) {
                if found.last().is_some_and(|last| item.name <= last.name) {
                    return Err(wrong(&format!("the listing repeats {:?}, or is not in order", item.name)));
                }
                found.push(item);
            }
            let Some(next) = page.continuation() else { return Ok(found) };
            if !tokens.insert(next.clone()) {
                return Err(wrong("the listing repeats a page"));
            }
            if empty_pages >= MAX_EMPTY_PAGES {
                return Err(wrong(&format!("the listing has {MAX_EMPTY_PAGES} consecutive pages without an object")));
            }
            token = Some(next);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use torchobj_core::error::ErrorKind;
    use torchobj_core::store::ObjectStore;

    use crate::config::GcsConfig;
    use crate::fake::{Fake, http_response};
    use crate::gcs::{Account, GcsStore};

    #[tokio::test]
    async fn a_listing_of_parts_that_repeats_one_or_has_no_end_is_an_error() {
        for items in ["[]", r#"[{"name":".torchobj-parts/u-1","generation":"1","metadata":{"torchobj-key":"k"}}]"#] {
            let mut number = 0;
            let fake = Fake::start(move |_| {
                number += 1;
                http_response(200, "", &format!(r#"{{"items":{items},"nextPageToken":"{number}"}}"#))
            })
            .await;
            let config = GcsConfig { endpoint_url: Some(fake.url.clone()), anonymous: true, ..GcsConfig::default() };
            let store = GcsStore::new(Arc::new(Account::new(config).unwrap()), "b");
            assert_eq!(store.uploads("").await.unwrap_err().kind(), ErrorKind::Protocol);
            assert!(fake.count("GET", "/o?") <= 100);
        }
    }
}
