//! Reads objects and their metadata.

use std::borrow::Cow;

use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::{GetResult, ObjectChecksum};
use torchobj_core::types::{GetRequest, ObjectHead, Payload, Version};

use super::request::Bucket;
use super::resource::{FIELDS, NONCE, Resource, decode};
use crate::http::{AttributeHeaders, DetailsParser, HttpGetResult, Lease, Response, range};

const ATTRIBUTES: AttributeHeaders =
    AttributeHeaders { metadata: "x-goog-meta-", storage_class: "x-goog-storage-class", hidden: NONCE };

const DETAILS: DetailsParser = DetailsParser { attributes: |lease| ATTRIBUTES.parse(lease), checksum };

impl Bucket {
    /// The bytes of an object or a range.
    pub(super) async fn open(&self, get: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let operation = Operation::Get;
        // Objects that are stored compressed are not decompressed, so that sizes and ranges are those of the stored bytes.
        let mut headers = vec![("accept-encoding", Cow::Borrowed("gzip"))];
        if let Some(range) = &get.range {
            headers.push(("range", Cow::Owned(range::header(range))));
        }
        let version = get.version.map(|version| (version_parameter(version), version.as_str()));
        let query = [("alt", "media"), version.unwrap_or_default()];
        let query = if version.is_some() { &query[..] } else { &query[..1] };
        let payload = Payload::default();
        let request =
            self.request(operation, "GET", Some(get.key), self.path("/o/", get.key), query, headers, &payload);
        let response = self.send(&request).await.map_err(|error| or_changed(error, get.version))?;
        let version = match (response.header("x-goog-generation"), get.version) {
            (Some(generation), _) => Version::new(generation),
            (None, _) if !is_of_store(&response) => {
                let message = "the response has no header of Google Cloud Storage";
                let error = self.error(ErrorKind::OtherServer, operation, Some(get.key), message);
                return Err(response.refuse(error));
            }
            // An emulator that omits it has compared the generation. The size shows that the body is not that of an error.
            (None, Some(expected)) if get.size.is_some() || response.status == 206 => expected.clone(),
            (None, expected) => {
                // A server with one thread responds when it has sent the body, or its connection is closed.
                drop(response);
                return self.open_by_metadata(get, expected).await;
            }
        };
        let version = Some(version);
        let (url, head) = (self.url_of(request.key), || self.head(get.key));
        Ok(Box::new(HttpGetResult::of_response(response, url, version, get.size, DETAILS, head).await?))
    }

    /// The bytes of an object whose responses omit the generation: it is that of the metadata, as is the size. Later ranges could
    /// be those of another object, and a response without both could be an error with status 200.
    async fn open_by_metadata(&self, get: GetRequest<'_>, expected: Option<&Version>) -> Result<Box<dyn GetResult>> {
        let selected = expected.filter(|version| version.is_selected());
        let head = self.head_of(get.key, selected).await?;
        let version = expected.or(head.version.as_ref());
        let result = Box::pin(self.open(GetRequest { version, size: Some(head.size), ..get })).await?;
        if result.size() != head.size {
            let message = format!("the response is for an object of {} bytes, it has {}", result.size(), head.size);
            return Err(self.error(ErrorKind::Protocol, Operation::Get, Some(get.key), &message));
        }
        Ok(result)
    }

    /// Size, version and attributes of an object.
    pub(super) async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.head_of(key, None).await
    }

    async fn head_of(&self, key: &str, generation: Option<&Version>) -> Result<ObjectHead> {
        let resource = self.resource_of(Operation::Head, key, key, generation).await?;
        resource
            .into_head()
            .ok_or_else(|| self.protocol(Operation::Head, key, "the response has no size, or no generation"))
    }

    /// The metadata of an object.
    pub(super) async fn resource(&self, operation: Operation, key: &str) -> Result<Resource> {
        self.resource_of(operation, key, key, None).await
    }

    /// The metadata of the object `name`, or of a generation of it. `key` is used in error messages.
    pub(super) async fn resource_of(
        &self,
        operation: Operation,
        key: &str,
        name: &str,
        generation: Option<&Version>,
    ) -> Result<Resource> {
        let generation = generation.map(|generation| ("generation", generation.as_str()));
        let query: Vec<_> = [("fields", FIELDS)].into_iter().chain(generation).collect();
        let payload = Payload::default();
        let request = self.request(operation, "GET", Some(key), self.path("/o/", name), &query, Vec::new(), &payload);
        self.json(&request).await
    }
}

/// Whether a response with the bytes of an object is one of Google Cloud Storage or of an emulator: a page of a proxy is HTML
/// without any header of the store.
fn is_of_store(response: &Response) -> bool {
    let has_header = |(name, _): (&str, &str)| name.to_ascii_lowercase().starts_with("x-goog-");
    !response.is_html() || response.header("etag").is_some() || response.lease.headers().any(has_header)
}

/// The error of a read: a generation that the caller selected and that does not exist is `Changed`.
pub(super) fn or_changed(error: Error, version: Option<&Version>) -> Error {
    match version {
        Some(version) if version.is_selected() && error.kind() == ErrorKind::NotFound => {
            let hint = format!("generation {version:?} was replaced or deleted, or never existed");
            error.with_kind(ErrorKind::Changed).with_hint(hint)
        }
        _ => error,
    }
}

/// The parameter of a read that requires a version: `generation` also reads generations that are not current.
fn version_parameter(version: &Version) -> &'static str {
    if version.is_selected() { "generation" } else { "ifGenerationMatch" }
}

/// The checksum of the whole object, which responses with a range have as well.
fn checksum(lease: &Lease) -> Option<ObjectChecksum> {
    let headers = lease.headers().filter(|(name, _)| name.eq_ignore_ascii_case("x-goog-hash"));
    let mut hashes = headers.flat_map(|(_, value)| value.split(',').map(str::trim));
    hashes.find_map(|hash| decode(hash.strip_prefix("crc32c=")?)).map(ObjectChecksum::Crc32C)
}
