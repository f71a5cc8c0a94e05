//! Uploads in parts: as objects that are composed (`parts`), or one after the other (`resumable`).

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use torchobj_core::error::{Error, ErrorKind, Operation, Result, Retry};
use torchobj_core::types::{Condition, PartReceipt, Payload, PutOptions, Upload, Version};

use super::parts::{self, PREFIX, Parts};
use super::request::Bucket;
use super::resource::{NONCE, Resource};
use super::resumable::Resumable;
use crate::config::ParallelUpload;

/// Name of the metadata entry of a part with the key of its object.
pub(super) const KEY: &str = "torchobj-key";

/// The class whose objects can be deleted at any time without a fee ("Storage classes", "Minimum storage duration").
const STANDARD: &str = "STANDARD";

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
        Self { storage_class: STANDARD.to_owned(), retention_policy: None, default_event_based_hold: false }
    }
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
        let [id, nonce] = [(), ()].map(|()| format!("{:032x}", fastrand::u128(..)));
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
        self.uploads.lock().expect("no holder of this lock panics").insert(id, Arc::new(State { object, sending }));
        Ok(upload)
    }

    /// Returns whether objects of this storage class (`None`: that of the bucket) are uploaded in parts.
    async fn uploads_in_parallel(&self, operation: Operation, storage_class: Option<&str>) -> Result<bool> {
        match self.account.config.parallel_upload {
            ParallelUpload::On => return Ok(true),
            ParallelUpload::Off => return Ok(false),
            ParallelUpload::Auto => {}
        }
        if storage_class.is_some_and(|class| class != STANDARD) {
            return Ok(false);
        }
        self.parallel.get_or_try_init(|| self.allows_parts(operation, storage_class.is_some())).await.copied()
    }

    /// Requests the settings of the bucket, and whether the credentials may create and delete objects. `class_known`: the
    /// storage class of parts is not that of the bucket.
    async fn allows_parts(&self, operation: Operation, class_known: bool) -> Result<bool> {
        let payload = Payload::default();
        let query = [("fields", "storageClass,retentionPolicy,defaultEventBasedHold")];
        let request = self.request(operation, "GET", None, self.path("", ""), &query, Vec::new(), &payload);
        let reason = match self.json::<BucketSettings>(&request).await {
            Ok(BucketSettings { storage_class, .. }) if !class_known && storage_class != STANDARD => {
                format!("its storage class is {storage_class}")
            }
            Ok(BucketSettings { retention_policy: Some(_), .. }) => "it has a retention policy".to_owned(),
            Ok(BucketSettings { default_event_based_hold: true, .. }) => "it has a default hold".to_owned(),
            Ok(_) => {
                let query = ["storage.objects.create", "storage.objects.delete"].map(|name| ("permissions", name));
                let path = self.path("/iam/testPermissions", "");
                let request = self.request(operation, "GET", None, path, &query, Vec::new(), &payload);
                let granted = match self.json::<Permissions>(&request).await {
                    // An emulator may not implement it.
                    Err(error) if error.kind().retry() == Retry::Never => Permissions::default(),
                    granted => granted?,
                };
                if query.iter().all(|(_, name)| granted.permissions.iter().any(|granted| granted == name)) {
                    return Ok(true);
                }
                "the credentials are not known to have the permission storage.objects.delete".to_owned()
            }
            Err(error) if error.kind() == ErrorKind::AccessDenied => {
                "the credentials do not have the permission storage.buckets.get".to_owned()
            }
            Err(error) => return Err(error),
        };
        log::warn!(
            "{}: objects are uploaded one part after the other, because {reason}; GCSOptions(parallel_upload=True) uploads \
             parts in parallel, and False silences this warning",
            self.url_of(None)
        );
        Ok(false)
    }

    fn state(&self, operation: Operation, upload: &Upload) -> Result<Arc<State>> {
        let found = self.uploads.lock().expect("no holder of this lock panics").get(&upload.id).cloned();
        found.ok_or_else(|| self.gone(operation, upload))
    }

    fn gone(&self, operation: Operation, upload: &Upload) -> Error {
        self.error(ErrorKind::UploadGone, operation, Some(&upload.key), "no such upload in this process")
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
                let object = state.object.clone();
                let made = self.compose_object(upload, parts, &state.object, object, receipts, condition).await?;
                self.delete_parts(upload, parts).await;
                made
            }
            Sending::Resumable(session) => self.finish_resumable(&upload.key, session, receipts, condition).await?,
        };
        self.uploads.lock().expect("no holder of this lock panics").remove(&upload.id);
        self.version_of(operation, &upload.key, &object)
    }

    /// Returns the version of the object if its metadata contains the nonce of this upload.
    pub(super) async fn committed(&self, upload: &Upload) -> Result<Option<Version>> {
        let object = match self.resource(Operation::Head, &upload.key).await {
            Ok(object) => object,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let version = object.version().filter(|_| object.nonce() == Some(&upload.nonce));
        if version.is_some()
            && let Ok(state) = self.state(Operation::Commit, upload)
        {
            if let Sending::Parts(parts) = &state.sending {
                self.delete_parts(upload, parts).await;
            }
            self.uploads.lock().expect("no holder of this lock panics").remove(&upload.id);
        }
        Ok(version)
    }

    /// Aborts an upload, also one of another process, and deletes its parts.
    pub(super) async fn abort(&self, upload: &Upload) -> Result<()> {
        let operation = Operation::Abort;
        let state = self.uploads.lock().expect("no holder of this lock panics").remove(&upload.id);
        if let Some(State { sending: Sending::Resumable(session), .. }) = state.as_deref() {
            return self.cancel_resumable(&upload.key, session).await;
        }
        if upload.id.is_empty() || !upload.id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Ok(());
        }
        match self.delete_generations(self.list_parts(operation, upload).await?).await.pop() {
            None => Ok(()),
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
            let Some((id, _)) = part.name[PREFIX.len()..].split_once('/') else { continue };
            let begun = uploads.entry((key.clone(), id.to_owned())).or_default();
            *begun = (*begun).into_iter().chain(part.created_ms()).min();
        }
        Ok(uploads.into_iter().map(|((key, id), begun_ms)| Upload::of_other_client(key, id, begun_ms)).collect())
    }

    /// Lists objects whose names begin with `prefix`. `key` is that in error messages.
    async fn list_objects(&self, operation: Operation, key: &str, prefix: &str) -> Result<Vec<Resource>> {
        let (mut found, mut token) = (Vec::new(), None::<String>);
        loop {
            let fields = "items(name,generation,timeCreated,metadata),nextPageToken";
            let mut query = vec![("prefix", prefix), ("fields", fields)];
            query.extend(token.as_deref().map(|token| ("pageToken", token)));
            let page = self.page(operation, key, &query).await?;
            found.extend(page.items.into_iter().filter(|item| item.name.starts_with(prefix)));
            match page.next_page_token {
                None => return Ok(found),
                Some(next) if token.as_ref() == Some(&next) => {
                    return Err(self.error(ErrorKind::Protocol, operation, Some(key), "the listing repeats a page"));
                }
                next => token = next,
            }
        }
    }
}
