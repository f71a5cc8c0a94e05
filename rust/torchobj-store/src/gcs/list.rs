//! Lists objects and buckets.

use serde::Deserialize;
use torchobj_core::error::{Operation, Result};
use torchobj_core::types::{ListPage, ListRequest, Payload};

use super::parts;
use super::request::Bucket;
use super::resource::{Resource, or_default};

/// Maximum number of entries of a page (JSON API reference, "Objects: list").
const MAX_ENTRIES: u32 = 1000;

/// A page of a listing.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Page {
    #[serde(deserialize_with = "or_default")]
    pub(super) items: Vec<Resource>,
    #[serde(deserialize_with = "or_default")]
    prefixes: Vec<String>,
    next_page_token: Option<String>,
}

impl Page {
    /// The token for the next page.
    pub(super) fn continuation(&self) -> Option<String> {
        self.next_page_token.clone().filter(|token| !token.is_empty())
    }
}

impl Bucket {
    /// One page of a listing, without the parts of uploads.
    pub(super) async fn list(&self, listing: &ListRequest<'_>) -> Result<ListPage> {
        let max = listing.max_entries.unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES).to_string();
        // Exclusive: the smallest end after the key itself and before other keys without control characters.
        let end = listing.end.map(|key| format!("{key} "));
        let query = [
            Some(("prefix", listing.prefix)),
            Some(("maxResults", max.as_str())),
            Some(("fields", "items(name,size,generation,timeCreated,storageClass),prefixes,nextPageToken")),
            listing.delimiter.map(|delimiter| ("delimiter", delimiter)),
            // Inclusive.
            listing.start_after.map(|key| ("startOffset", key)),
            end.as_deref().map(|end| ("endOffset", end)),
            listing.continuation.map(|token| ("pageToken", token)),
        ];
        let query: Vec<_> = query.into_iter().flatten().collect();
        let page = self.page(Operation::List, listing.prefix, &query).await?;
        let continuation = page.continuation();
        let mut entries: Vec<_> = page.items.into_iter().map(Resource::into_entry).collect();
        entries
            .retain(|entry| !entry.key.starts_with(parts::PREFIX) && Some(entry.key.as_str()) != listing.start_after);
        let mut prefixes = page.prefixes;
        prefixes.retain(|prefix| !prefix.starts_with(parts::PREFIX));
        if entries.iter().map(|entry| &entry.key).chain(&prefixes).any(String::is_empty) {
            return Err(self.protocol(Operation::List, listing.prefix, "the response has an object without a name"));
        }
        Ok(ListPage { entries, prefixes, continuation })
    }

    /// One page of the buckets of a project. An emulator needs none.
    pub(super) async fn buckets(&self, project: Option<&str>, continuation: Option<&str>) -> Result<ListPage> {
        let query = [
            Some(("fields", "items(name,timeCreated),nextPageToken")),
            Some(("maxResults", "1000")),
            project.map(|project| ("project", project)),
            continuation.map(|token| ("pageToken", token)),
        ];
        let query: Vec<_> = query.into_iter().flatten().collect();
        let (operation, payload) = (Operation::ListBuckets, Payload::default());
        let path = b"storage/v1/b".to_vec();
        let page: Page = self.json(&self.request(operation, "GET", None, path, &query, Vec::new(), &payload)).await?;
        let continuation = page.continuation();
        let entries = page.items.into_iter().map(Resource::into_entry).collect();
        Ok(ListPage { entries, prefixes: Vec::new(), continuation })
    }

    /// One page of a listing with these parameters; `prefix` is used in error messages.
    pub(super) async fn page(&self, operation: Operation, prefix: &str, query: &[(&str, &str)]) -> Result<Page> {
        let payload = Payload::default();
        let request = self.request(operation, "GET", Some(prefix), self.path("/o", ""), query, Vec::new(), &payload);
        self.json(&request).await
    }
}
