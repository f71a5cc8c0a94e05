//! Parts of an upload as objects, and their composition. Listings omit them. At most 32 objects can be composed into one, so
//! more parts are composed in levels. Groups of 32 parts are composed while later parts are being sent.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Mutex;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::{Attributes, Condition, PartReceipt, Payload, Upload, Version};

use super::request::Bucket;
use super::resource::{FIELDS, Resource, Written, combine, encode};

/// Name of the metadata entry of a part with the key of its object.
pub(super) const KEY: &str = "torchobj-key";

/// Prefix of the names of parts, followed by the id of the upload.
pub(super) const PREFIX: &str = ".torchobj-parts/";

/// Maximum number of sources of a compose (JSON API reference, "Objects: compose").
const MAX_SOURCES: usize = 32;

/// Maximum number of consecutive pages of a listing of parts without an object.
const MAX_EMPTY_PAGES: usize = 100;

/// Number of concurrent composes of a commit, which holds one permit.
const CONCURRENT: usize = 16;

/// The prefix of the names of the parts of an upload. Without a slash, which would create a folder in a bucket with a
/// hierarchical namespace.
fn prefix_of(upload_id: &str) -> String {
    format!("{PREFIX}{upload_id}-")
}

/// An object that contains consecutive parts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PartObject {
    name: String,
    generation: Version,
    /// Numbers of the first and the last part, from 1.
    numbers: (u32, u32),
    size: u64,
    crc32c: u32,
}

/// The parts of an upload that has begun.
#[derive(Default)]
pub(super) struct Parts(Mutex<PartsState>);

#[derive(Default)]
struct PartsState {
    /// Parts by their numbers.
    parts: BTreeMap<u32, PartObject>,
    /// Composed objects by the numbers of their first and last part.
    composed: HashMap<(u32, u32), PartObject>,
    /// First parts of groups that are being composed.
    composing: HashSet<u32>,
    /// All objects that requests may have created and that are not deleted, by their names. `None`: the request has no
    /// response yet, or it was lost.
    objects: HashMap<String, Option<Version>>,
}

impl PartsState {
    /// Returns the parts of a group that is complete, is not the last one so far, and is not being composed.
    fn next_group(&mut self) -> Option<Vec<PartObject>> {
        let size = u32::try_from(MAX_SOURCES).expect("32");
        let last = *self.parts.last_key_value()?.0;
        let complete = (1..last).step_by(MAX_SOURCES).take_while(|first| first + size <= last).find(|first| {
            !self.composing.contains(first)
                && !self.composed.contains_key(&(*first, first + size - 1))
                && self.parts.range(*first..first + size).count() == MAX_SOURCES
        })?;
        self.composing.insert(complete);
        Some(self.parts.range(complete..complete + size).map(|(_, part)| part.clone()).collect())
    }
}

impl Parts {
    fn sent(&self) -> std::sync::MutexGuard<'_, PartsState> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// A new name of an object of this upload.
    fn new_name(&self, upload: &Upload, (first, last): (u32, u32)) -> String {
        let name = format!("{}{first}-{last}-{:016x}", prefix_of(&upload.id), fastrand::u64(..));
        self.sent().objects.insert(name.clone(), None);
        name
    }

    /// Whether no object is known to be in the bucket. Requests without a response may have created some.
    pub(super) fn has_none_known(&self) -> bool {
        self.sent().objects.values().all(Option::is_none)
    }

    /// Whether requests without a response may still create objects.
    pub(super) fn has_unanswered(&self) -> bool {
        self.sent().objects.values().any(Option::is_none)
    }

    /// Removes objects that are deleted.
    pub(super) fn deleted(&self, names: &[String]) {
        let mut sent = self.sent();
        for name in names {
            sent.objects.remove(name);
        }
    }

    /// Replaces the objects whose responses were lost by those that are in the bucket.
    fn replace_unknown(&self, listed: &[(String, Version)]) {
        let mut sent = self.sent();
        sent.objects.retain(|_, generation| generation.is_some());
        sent.objects.extend(listed.iter().map(|(name, generation)| (name.clone(), Some(generation.clone()))));
    }

    /// Returns the objects of `parts`, composed where that is done. `None` if one of them was not sent.
    fn sources(&self, parts: &[PartReceipt]) -> Option<Vec<PartObject>> {
        let sent = self.sent();
        let mut sources = Vec::new();
        for group in parts.chunk_by(|one, next| group_of(one.number) == group_of(next.number)) {
            let numbers = (group.first()?.number, group.last()?.number);
            match sent.composed.get(&numbers) {
                Some(composed) => sources.push(composed.clone()),
                None => {
                    for receipt in group {
                        let part = sent.parts.get(&receipt.number)?;
                        // A part that was sent again has the same bytes, but the receipt must be of this upload.
                        (receipt.version == part.generation && receipt.size == part.size)
                            .then(|| sources.push(part.clone()))?;
                    }
                }
            }
        }
        Some(sources)
    }
}

fn group_of(number: u32) -> u32 {
    number.saturating_sub(1) / u32::try_from(MAX_SOURCES).expect("32")
}

/// The body of a compose.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Compose<'a> {
    source_objects: Vec<SourceObject<'a>>,
    destination: &'a Resource,
}

#[derive(Serialize)]
struct SourceObject<'a> {
    name: &'a str,
    generation: &'a str,
}

impl Bucket {
    /// Writes a part as an object, and then composes a group of earlier parts if one is complete.
    pub(super) async fn put_object_part(
        &self,
        upload: &Upload,
        parts: &Parts,
        object: &Resource,
        number: u32,
        payload: &Payload,
    ) -> Result<PartReceipt> {
        let name = parts.new_name(upload, (number, number));
        let resource = part_resource(name.clone(), object, upload);
        let (operation, key) = (Operation::PutPart, upload.key.as_str());
        let (size, crc32c) = (payload.len() as u64, self.crc32c(operation, key, payload)?);
        let written = self.insert(operation, key, resource, crc32c, payload, &Condition::Always).await?;
        let generation = self.version_of(operation, key, &written)?;
        let part = PartObject { name, generation: generation.clone(), numbers: (number, number), size, crc32c };
        let group = {
            let mut sent = parts.sent();
            sent.objects.insert(part.name.clone(), Some(generation.clone()));
            sent.parts.insert(number, part);
            sent.next_group()
        };
        if let Some(group) = group {
            // If this fails, the commit composes the group.
            let composed = self.compose_parts(upload, parts, object, &group).await;
            parts.sent().composing.remove(&group[0].numbers.0);
            if let Err(error) = composed {
                log::debug!("parts {}.. of {} are composed at the commit: {error}", group[0].numbers.0, upload.key);
            }
        }
        Ok(PartReceipt { number, size, version: generation, checksum: Some(crc32c.into()) })
    }

    /// Composes all parts into the object.
    pub(super) async fn compose_object(
        &self,
        upload: &Upload,
        parts: &Parts,
        object: &Resource,
        receipts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Resource> {
        let (operation, key) = (Operation::Commit, upload.key.as_str());
        let mut sources = parts.sources(receipts).ok_or_else(|| {
            self.error(ErrorKind::InvalidRequest, operation, Some(key), "a part differs from the uploaded one")
        })?;
        if sources.len() > MAX_SOURCES {
            // Groups of parts first, so that no bytes are composed more often than others.
            let is_part = |source: &PartObject| source.numbers.0 == source.numbers.1;
            let group = |source: &PartObject| is_part(source).then(|| group_of(source.numbers.0));
            let groups = sources.chunk_by(|one, next| group(one).is_some() && group(one) == group(next));
            sources = self.compose_each(upload, parts, object, groups.map(<[PartObject]>::to_vec).collect()).await?;
        }
        while sources.len() > MAX_SOURCES {
            let groups = sources.chunks(MAX_SOURCES).map(<[PartObject]>::to_vec);
            sources = self.compose_each(upload, parts, object, groups.collect()).await?;
        }
        self.compose(operation, key, key, &sources, object.clone(), condition).await
    }

    /// Composes each group of consecutive objects of an upload.
    async fn compose_each(
        &self,
        upload: &Upload,
        parts: &Parts,
        object: &Resource,
        groups: Vec<Vec<PartObject>>,
    ) -> Result<Vec<PartObject>> {
        let compose = |group: Vec<PartObject>| async move { self.compose_parts(upload, parts, object, &group).await };
        stream::iter(groups.into_iter().map(compose)).buffered(CONCURRENT).try_collect().await
    }

    /// Composes consecutive objects of an upload into one, and deletes them.
    async fn compose_parts(
        &self,
        upload: &Upload,
        parts: &Parts,
        object: &Resource,
        group: &[PartObject],
    ) -> Result<PartObject> {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { unreachable!("a group has sources") };
        let numbers = (first.numbers.0, last.numbers.1);
        if let [only] = group {
            return Ok(only.clone());
        }
        if let Some(composed) = parts.sent().composed.get(&numbers) {
            return Ok(composed.clone());
        }
        let name = parts.new_name(upload, numbers);
        let resource = part_resource(name.clone(), object, upload);
        let operation = Operation::Commit;
        let made = self.compose(operation, &upload.key, &name, group, resource, &Condition::Always).await?;
        let generation = self.version_of(operation, &upload.key, &made)?;
        let (size, crc32c) = totals(group);
        let composed = PartObject { name, generation, numbers, size, crc32c };
        {
            let mut sent = parts.sent();
            sent.objects.insert(composed.name.clone(), Some(composed.generation.clone()));
            sent.composed.insert(numbers, composed.clone());
        }
        let done = group.iter().map(|source| (source.name.clone(), source.generation.clone()));
        self.delete_objects(parts, done.collect()).await;
        Ok(composed)
    }

    /// Composes `sources` into the object `target`, and verifies it. `key` is used in error messages.
    async fn compose(
        &self,
        operation: Operation,
        key: &str,
        target: &str,
        sources: &[PartObject],
        mut destination: Resource,
        condition: &Condition,
    ) -> Result<Resource> {
        let (size, crc32c) = totals(sources);
        destination.crc32c = Some(encode(crc32c));
        // The name is part of the path.
        destination.name.clear();
        let source_objects =
            sources.iter().map(|source| SourceObject { name: &source.name, generation: source.generation.as_str() });
        let body = Compose { source_objects: source_objects.collect(), destination: &destination };
        let payload = Payload::from(Bytes::from(serde_json::to_vec(&body).expect("strings are valid JSON")));
        let mut path = self.path("/o/", target);
        path.extend_from_slice(b"/compose");
        let mut query = self.write_query(condition);
        query.push(("fields", FIELDS));
        let headers = vec![("content-type", "application/json".into())];
        let request = self.request(operation, "POST", Some(key), path, &query, headers, &payload);
        let made = self.json(&request).await?;
        let written = Written { name: target, nonce: destination.nonce(), size, crc32c };
        self.verify(operation, key, &written, made).await
    }

    /// Lists the objects of an upload and their generations. Another object below the same prefix is not a part.
    pub(super) async fn list_parts(&self, operation: Operation, upload: &Upload) -> Result<Vec<(String, Version)>> {
        let listed = self.list_objects(operation, &upload.key, &prefix_of(&upload.id)).await?;
        let belongs = |part: &Resource| part.metadata.get(KEY) == Some(&upload.key);
        let part = |part: Resource| part.version().map(|generation| (part.name, generation));
        Ok(listed.into_iter().filter(belongs).filter_map(part).collect())
    }

    /// Returns the uploads whose keys begin with `prefix` and that have parts in the bucket.
    pub(super) async fn list_uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
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
        let wrong = |problem: &str| self.protocol(operation, key, problem);
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

    /// Deletes all objects of an upload that this process may have created, after its commit.
    pub(super) async fn delete_parts(&self, upload: &Upload, parts: &Parts) {
        self.delete_known(parts).await;
        let unknown: Vec<_> =
            parts.sent().objects.clone().into_iter().filter(|(_, generation)| generation.is_none()).collect();
        if !unknown.is_empty() {
            match self.list_parts(Operation::Abort, upload).await {
                Ok(listed) => {
                    let missing = unknown.iter().filter(|(name, _)| listed.iter().all(|(listed, _)| listed != name));
                    let missing = missing.count();
                    if missing > 0 {
                        log::warn!(
                            "upload {} of {} is complete; {missing} requests for its parts had no response, and may still \
                             create objects: see Store.unfinished_uploads",
                            upload.id,
                            self.url_of(Some(&upload.key)),
                        );
                    }
                    parts.replace_unknown(&listed);
                    self.delete_objects(parts, listed).await;
                }
                Err(error) => log::debug!("{error}"),
            }
        }
        let left = parts.sent().objects.len();
        if left > 0 {
            log::warn!(
                "upload {} of {} is complete, but {left} of its parts could not be deleted: see Store.unfinished_uploads",
                upload.id,
                self.url_of(Some(&upload.key)),
            );
        }
    }

    /// Deletes the objects of an upload whose generations are known.
    pub(super) async fn delete_known(&self, parts: &Parts) {
        let known = parts.sent().objects.clone().into_iter();
        self.delete_objects(parts, known.filter_map(|(name, generation)| Some((name, generation?))).collect()).await;
    }

    async fn delete_objects(&self, parts: &Parts, objects: Vec<(String, Version)>) {
        let failed = self.delete_generations(objects.clone()).await;
        for (_, error) in &failed {
            log::debug!("{error}");
        }
        let failed: HashSet<_> = failed.into_iter().map(|(name, _)| name).collect();
        let deleted = objects.into_iter().map(|(name, _)| name).filter(|name| !failed.contains(name));
        parts.deleted(&deleted.collect::<Vec<_>>());
    }
}

/// Size and CRC32C of the concatenation of `sources`.
fn totals(sources: &[PartObject]) -> (u64, u32) {
    sources.iter().fold((0, 0), |(size, crc), source| (size + source.size, combine(crc, source.crc32c, source.size)))
}

/// The metadata of an object of an upload: the storage class of its target, and the target's key.
fn part_resource(name: String, object: &Resource, upload: &Upload) -> Resource {
    let metadata = BTreeMap::from([(KEY.to_owned(), upload.key.clone())]);
    let mut part = Resource::new(&Attributes::default(), object.storage_class.as_deref());
    (part.name, part.metadata) = (name, metadata);
    part
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use torchobj_core::store::ObjectStore;

    use super::*;
    use crate::config::GcsConfig;
    use crate::fake::{Fake, http_response};
    use crate::gcs::{Account, GcsStore};

    fn part(number: u32) -> PartObject {
        let generation = Version::new(number.to_string());
        PartObject { name: format!("p{number}"), generation, numbers: (number, number), size: 1, crc32c: 0 }
    }

    #[test]
    fn a_group_is_composed_once_and_only_if_it_is_complete_and_a_later_part_exists() {
        let mut sent = PartsState::default();
        for number in (1..=32).filter(|number| *number != 7) {
            sent.parts.insert(number, part(number));
        }
        sent.parts.insert(40, part(40));
        assert_eq!(sent.next_group(), None);
        sent.parts.insert(7, part(7));
        let numbers: Vec<_> = sent.next_group().unwrap().iter().map(|source| source.numbers.0).collect();
        assert_eq!(numbers, (1..=32).collect::<Vec<_>>());
        assert_eq!(sent.next_group(), None);
        let mut exact = PartsState::default();
        exact.parts.extend((1..=32).map(|number| (number, part(number))));
        assert_eq!(exact.next_group(), None, "the last group so far");
    }

    #[test]
    fn the_sources_of_a_commit_are_the_composed_groups_and_the_other_parts() {
        let parts = Parts::default();
        parts.sent().parts.extend((1..=40).map(|number| (number, part(number))));
        let whole = PartObject { numbers: (1, 32), name: "composed".into(), ..part(1) };
        parts.sent().composed.insert((1, 32), whole);
        let receipt =
            |number: u32| PartReceipt { number, size: 1, version: Version::new(number.to_string()), checksum: None };
        let receipts: Vec<_> = (1..=40).map(receipt).collect();
        let names: Vec<_> = parts.sources(&receipts).unwrap().into_iter().map(|source| source.name).collect();
        let expected = ["composed", "p33", "p34", "p35", "p36", "p37", "p38", "p39", "p40"];
        assert_eq!(names, expected);
        let wrong = PartReceipt { version: Version::new("0"), ..receipt(40) };
        assert_eq!(parts.sources(&[receipt(39), wrong]), None);
        assert_eq!(parts.sources(&[receipt(41)]), None);
    }

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
