//! Uploads in parts: as objects that are composed (`parts`), or one after the other (`resumable`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::OnceCell;
use tokio::time::sleep;
use torchobj_core::error::{ErrorKind, Operation, Result, Retry};
use torchobj_core::id::unique_id;
use torchobj_core::types::{Condition, PartReceipt, Payload, PutOptions, Upload, Version};

use super::parts::Parts;
use super::request::Bucket;
use super::resource::{NONCE, Resource, Written, or_default, totals};
use super::resumable::Resumable;
use crate::config::ParallelUpload;

/// Classes without a minimum storage duration, whose objects can be deleted at any time without a fee ("Storage classes").
/// The last three are names of earlier versions of the API.
const WITHOUT_FEE: [&str; 4] = ["STANDARD", "REGIONAL", "MULTI_REGIONAL", "DURABLE_REDUCED_AVAILABILITY"];

/// Pauses before the bucket is searched for parts of an aborted upload. A server may store a part that it received before its
/// connection was closed; the last pause is for a busy one.
const LATE_PARTS: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(300), Duration::from_millis(700), Duration::from_secs(2)];

/// The uploads to a bucket.
pub(super) struct Uploads {
    bucket: Arc<Bucket>,
    /// Found at the first upload.
    restrictions: OnceCell<Restrictions>,
    /// The uploads of this process that have begun, by id.
    begun: Mutex<HashMap<String, Arc<UploadState>>>,
}

/// An upload of this process.
struct UploadState {
    /// The metadata of the object.
    object: Resource,
    sending: Sending,
}

enum Sending {
    Parts(Parts),
    Resumable(Resumable),
}

/// Settings of a bucket that restrict parts of uploads.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct BucketSettings {
    storage_class: Option<String>,
    retention_policy: Option<serde_json::Value>,
    #[serde(deserialize_with = "or_default")]
    default_event_based_hold: bool,
}

/// What is known about uploads in parts to a bucket.
#[derive(Default)]
struct Restrictions {
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
    #[serde(deserialize_with = "or_default")]
    permissions: Vec<String>,
}

impl Uploads {
    pub(super) fn new(bucket: Arc<Bucket>) -> Self {
        Self { bucket, restrictions: OnceCell::new(), begun: Mutex::default() }
    }

    fn begun(&self) -> MutexGuard<'_, HashMap<String, Arc<UploadState>>> {
        self.begun.lock().expect("no holder of this lock panics")
    }

    /// Begins an upload. Sends no request for an upload in parts, except to examine the bucket once.
    pub(super) async fn begin(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        let operation = Operation::BeginUpload;
        let mut object = self.bucket.new_resource(operation, key, &options.attributes)?;
        let (id, nonce) = (unique_id(), unique_id());
        object.metadata.insert(NONCE.to_owned(), nonce.clone());
        let parallel = self.uploads_in_parallel(operation, object.storage_class.as_deref()).await?;
        let sending = if parallel {
            Sending::Parts(Parts::default())
        } else {
            Sending::Resumable(self.bucket.start_resumable(key, &object, &options.condition).await?)
        };
        let upload = Upload {
            key: key.to_owned(),
            id: id.clone(),
            nonce,
            begun_ms: None,
            checksum: options.checksum,
            sequential: !parallel,
        };
        self.begun().insert(id, Arc::new(UploadState { object, sending }));
        Ok(upload)
    }

    /// Returns whether objects of this storage class (`None`: that of the bucket) are uploaded in parts.
    async fn uploads_in_parallel(&self, operation: Operation, storage_class: Option<&str>) -> Result<bool> {
        match self.bucket.account.config.parallel_upload {
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
                self.bucket.url_of(None)
            );
        }
        Ok(false)
    }

    /// Requests the settings of the bucket, and whether the credentials have the permissions that parts need.
    async fn find_restrictions(&self, operation: Operation) -> Result<Restrictions> {
        let payload = Payload::default();
        let query = [("fields", "storageClass,retentionPolicy,defaultEventBasedHold")];
        let request =
            self.bucket.request(operation, "GET", None, self.bucket.path("", ""), &query, Vec::new(), &payload);
        let BucketSettings { storage_class, retention_policy, default_event_based_hold } =
            match self.bucket.json(&request).await {
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
            let path = self.bucket.path("/iam/testPermissions", "");
            let request = self.bucket.request(operation, "GET", None, path, &query, Vec::new(), &payload);
            let granted = match self.bucket.json::<Permissions>(&request).await {
                // An emulator may not implement it.
                Err(error) if error.retry() == Retry::Never => Permissions::default(),
                granted => granted?,
            };
            let missing = query.iter().find(|(_, name)| granted.permissions.iter().all(|granted| granted != name));
            missing.map(|(_, name)| format!("the credentials are not known to have the permission {name}"))
        };
        let storage_class = storage_class.unwrap_or_else(|| WITHOUT_FEE[0].to_owned());
        Ok(Restrictions { storage_class, reason, ..Restrictions::default() })
    }

    fn state(&self, operation: Operation, upload: &Upload) -> Result<Arc<UploadState>> {
        let found = self.begun().get(&upload.id).cloned();
        let message = "no such upload in this process";
        found.ok_or_else(|| self.bucket.error(ErrorKind::UploadGone, operation, Some(&upload.key), message))
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
            Sending::Parts(parts) => self.bucket.put_object_part(upload, parts, &state.object, number, payload).await,
            Sending::Resumable(session) => {
                let crc32c = self.bucket.send_chunk(&upload.key, session, offset, payload).await?;
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
                let made = self.bucket.compose_object(upload, parts, &state.object, receipts, condition).await?;
                self.bucket.delete_parts(upload, parts).await;
                made
            }
            Sending::Resumable(session) => {
                self.bucket.finish_resumable(&upload.key, session, receipts, condition).await?
            }
        };
        self.begun().remove(&upload.id);
        self.bucket.version_of(operation, &upload.key, &object)
    }

    /// Returns the version of the object if its metadata contains the nonce of this upload.
    pub(super) async fn committed(&self, upload: &Upload, receipts: &[PartReceipt]) -> Result<Option<Version>> {
        let (operation, key) = (Operation::Commit, upload.key.as_str());
        let object = match self.bucket.resource(Operation::Head, key).await {
            Ok(object) if object.nonce() == Some(&upload.nonce) => object,
            Ok(_) => return Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let (size, crc32c) = totals(receipts);
        let written = Written { name: key, nonce: Some(&upload.nonce), size, crc32c };
        let version = self.bucket.verify(operation, key, &written, object).await?.version();
        if let Ok(state) = self.state(operation, upload) {
            if let Sending::Parts(parts) = &state.sending {
                self.bucket.delete_parts(upload, parts).await;
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
            Some(Sending::Resumable(session)) => self.bucket.cancel_resumable(&upload.key, session).await?,
            Some(Sending::Parts(parts)) => {
                self.bucket.delete_known(parts).await;
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
        let listed = self.bucket.list_parts(operation, upload).await?;
        let names = listed.iter().map(|(name, _)| name.clone()).collect();
        match self.bucket.delete_generations(listed).await.pop() {
            None => Ok(names),
            Some((_, error)) => Err(error),
        }
    }
}
