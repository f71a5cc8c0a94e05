//! ListObjectsV2, without the SDK, and ListBuckets.

use torchobj_core::error::{Operation, Result};
use torchobj_core::types::{ListEntry, ListPage, ListRequest, Payload};

use super::Bucket;
use super::xml;
use crate::http::Request;

/// Maximum size of a page. 1000 keys of 1024 bytes are 3 MiB if each byte is percent-encoded, plus the other elements.
const MAX_PAGE_BYTES: usize = 16 << 20;

/// Buckets of a page. Without a limit there are no pages, and an account with more than 10 000 buckets is refused (API
/// reference, "ListBuckets").
const MAX_BUCKETS: i32 = 1000;

impl Bucket {
    /// One page of ListBuckets, through the SDK.
    pub(super) async fn buckets(&self, continuation: Option<&str>) -> Result<ListPage> {
        let operation = Operation::ListBuckets;
        let request = self.sdk(operation).await?.list_buckets().max_buckets(MAX_BUCKETS);
        let request = request.set_continuation_token(continuation.map(str::to_owned));
        let output = self.sdk_output(operation, None, request.send()).await?;
        let entries = output.buckets.unwrap_or_default().into_iter().map(|bucket| ListEntry {
            key: bucket.name.unwrap_or_default(),
            size: None,
            version: None,
            modified_ms: bucket.creation_date.and_then(|time| time.to_millis().ok()),
            storage_class: None,
        });
        let continuation = output.continuation_token.filter(|token| !token.is_empty());
        Ok(ListPage { entries: entries.collect(), prefixes: Vec::new(), continuation })
    }

    /// One page of ListObjectsV2.
    pub(super) async fn list(&self, listing: &ListRequest<'_>) -> Result<ListPage> {
        let max_keys = listing.max_entries.map(|max| max.min(1000).to_string());
        let query = [
            listing.continuation.map(|token| ("continuation-token", token)),
            listing.delimiter.map(|delimiter| ("delimiter", delimiter)),
            Some(("encoding-type", "url")),
            Some(("list-type", "2")),
            max_keys.as_deref().map(|max| ("max-keys", max)),
            Some(("prefix", listing.prefix)),
            listing.start_after.map(|key| ("start-after", key)),
        ];
        let query: Vec<(&str, &str)> = query.into_iter().flatten().collect();
        let payload = Payload::default();
        let operation = Operation::List;
        let request = self.request(operation, "GET", None, &query, Vec::new(), &payload);
        // Error messages contain the prefix.
        let request = Request { key: Some(listing.prefix), ..request };
        self.dialect(operation).await?.document(&request, MAX_PAGE_BYTES, xml::list_page).await
    }
}
