//! Reads and writes objects through the client of google-cloud-storage, if `force_sdk` is set. It connects by itself: settings
//! of connections and a path in the endpoint do not apply. The server verifies checksums of writes. Those of reads are not
//! verified here, and the client does not expose the range of a response: only its length is checked.

use std::convert::Infallible;
use std::io;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use google_cloud_storage::model_ext::{ObjectHighlights, ReadRange};
use google_cloud_storage::streaming_source::{Seek, SizeHint, StreamingSource};
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::{GetResult, ObjectChecksum};
use torchobj_core::types::{Attributes, ByteRange, Condition, GetRequest, Payload, Version};

use super::get::or_changed;
use super::request::Bucket;
use super::resource::{NONCE, Resource};
use crate::http::{BodyHeaders, Chain, ErrorResponse, HttpGetResult, OTHER_SERVER, error_of};

impl Bucket {
    /// The name of the bucket for the client.
    fn sdk_name(&self) -> String {
        format!("projects/_/buckets/{}", self.name)
    }

    /// The bytes of an object or a range.
    pub(super) async fn sdk_open(&self, get: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let operation = Operation::Get;
        let mut read = self.account.sdk().await?.read_object(self.sdk_name(), get.key).compute_crc32c(false);
        if let Some(project) = &self.account.config.user_project {
            read = read.with_quota_project(project);
        }
        read = match &get.range {
            None => read,
            Some(ByteRange::Bounded(range)) => {
                read.set_read_range(ReadRange::segment(range.start, range.end.saturating_sub(range.start)))
            }
            Some(ByteRange::From(start)) => read.set_read_range(ReadRange::offset(*start)),
            Some(ByteRange::Suffix(length)) => read.set_read_range(ReadRange::tail(*length)),
        };
        if let Some(version) = get.version {
            let generation = generation(version);
            read = if version.is_selected() {
                read.set_generation(generation)
            } else {
                read.set_if_generation_match(generation)
            };
        }
        let response = match read.send().await {
            Ok(response) => response,
            Err(error) => return Err(or_changed(self.sdk_error(operation, get.key, error).await, get.version)),
        };
        let object = response.object();
        let size = u64::try_from(object.size).unwrap_or_default();
        let range = ByteRange::resolve(get.range.as_ref(), size).filter(|_| get.range.is_some());
        let content_range = range.as_ref().map(|range| format!("bytes {}-{}/{size}", range.start, range.end - 1));
        let headers = BodyHeaders {
            version: (object.generation > 0).then(|| Version::new(object.generation.to_string())),
            etag: Some(&object.etag),
            length: Some(range.map_or(size, |range| range.end - range.start)),
            range: content_range.as_deref(),
            encoding: Some(&object.content_encoding),
        };
        let details = details(&object);
        let frames = stream::unfold(response, async |mut response| {
            let next = response.next().await?;
            Some((next.map_err(io::Error::other), response))
        });
        Ok(Box::new(HttpGetResult::of_stream(self.url_of(Some(get.key)), headers, details, frames.boxed())?))
    }

    /// Writes an object with this metadata.
    pub(super) async fn sdk_insert(
        &self,
        operation: Operation,
        key: &str,
        resource: &Resource,
        crc32c: u32,
        payload: &Payload,
        condition: &Condition,
    ) -> Result<Resource> {
        let client = self.account.sdk().await?;
        let mut write = client.write_object(self.sdk_name(), &resource.name, Pieces::of(payload));
        write = write.set_metadata(resource.metadata.clone());
        write = match condition {
            Condition::Always => write,
            Condition::Absent => write.set_if_generation_match(0_i64),
            Condition::Matches(version) => write.set_if_generation_match(generation(version)),
        };
        macro_rules! set {
            ($($setter:ident: $value:expr,)*) => {
                $(if let Some(value) = $value {
                    write = write.$setter(value);
                })*
            };
        }
        let [content_type, encoding, disposition, language, cache] = resource.headers();
        set! {
            with_quota_project: &self.account.config.user_project,
            set_kms_key: &self.account.config.kms_key_name,
            set_storage_class: &resource.storage_class,
            set_content_type: content_type,
            set_content_encoding: encoding,
            set_content_disposition: disposition,
            set_content_language: language,
            set_cache_control: cache,
        }
        match write.with_known_crc32c(crc32c).send_unbuffered().await {
            Ok(object) => Ok(Resource::of_sdk(object)),
            Err(error) => Err(self.sdk_error(operation, key, error).await),
        }
    }

    async fn sdk_error(&self, operation: Operation, key: &str, error: google_cloud_storage::Error) -> Error {
        if let Some(status) = error.http_status_code() {
            let header =
                |name: &str| error.http_headers()?.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
            // The client parses the JSON of an error, and keeps the body of any other one.
            let body = match (error.http_payload(), error.status()) {
                (Some(body), _) => body.to_vec(),
                (None, Some(status)) => status.message.clone().into_bytes(),
                (None, None) => Vec::new(),
            };
            let response = ErrorResponse { status, header: &header, body: &body };
            return match self.dialect(operation).await {
                Ok(dialect) => error_of(&dialect, operation, Some(key), &response).await,
                Err(error) => error,
            };
        }
        let kind = match &error {
            error if error.is_timeout() => ErrorKind::Timeout,
            error if error.is_connect() => ErrorKind::Connect,
            error if error.is_authentication() => ErrorKind::Credentials,
            error if error.is_binding() || error.is_serialization() => ErrorKind::InvalidRequest,
            error if error.is_deserialization() => ErrorKind::OtherServer,
            _ => ErrorKind::Reset,
        };
        let hint = (kind == ErrorKind::OtherServer).then_some(OTHER_SERVER);
        let failed = self.error(kind, operation, Some(key), "google-cloud-storage failed").with_source(Chain(error));
        if let Some(hint) = hint { failed.with_hint(hint) } else { failed }
    }
}

/// A version as a number. [`Bucket::check_version`] has checked that it is one.
fn generation(version: &Version) -> i64 {
    version.as_str().parse().unwrap_or(i64::MAX)
}

fn details(object: &ObjectHighlights) -> (Attributes, Option<ObjectChecksum>) {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let metadata = object.metadata.iter().filter(|(name, _)| *name != NONCE);
    let mut metadata: Vec<_> = metadata.map(|(name, value)| (name.to_ascii_lowercase(), value.clone())).collect();
    metadata.sort();
    let attributes = Attributes {
        content_type: text(&object.content_type),
        content_encoding: text(&object.content_encoding),
        content_disposition: text(&object.content_disposition),
        content_language: text(&object.content_language),
        // The client does not return it.
        cache_control: None,
        storage_class: text(&object.storage_class),
        metadata,
    };
    let checksum = object.checksums.as_ref().and_then(|checksums| checksums.crc32c).map(ObjectChecksum::Crc32C);
    (attributes, checksum)
}

/// A payload as a source of the client.
struct Pieces {
    all: Vec<Bytes>,
    /// The pieces that are not sent yet, in reverse order.
    left: Vec<Bytes>,
}

impl Pieces {
    fn of(payload: &Payload) -> Self {
        let all = payload.pieces().to_vec();
        Self { left: all.iter().rev().cloned().collect(), all }
    }
}

impl StreamingSource for Pieces {
    type Error = Infallible;

    async fn next(&mut self) -> Option<std::result::Result<Bytes, Infallible>> {
        self.left.pop().map(Ok)
    }

    async fn size_hint(&self) -> std::result::Result<SizeHint, Infallible> {
        Ok(SizeHint::with_exact(self.left.iter().map(|piece| piece.len() as u64).sum()))
    }
}

impl Seek for Pieces {
    type Error = Infallible;

    async fn seek(&mut self, offset: u64) -> std::result::Result<(), Infallible> {
        let mut skip = usize::try_from(offset).unwrap_or(usize::MAX);
        self.left = self.all.clone();
        for piece in &mut self.left {
            let from = skip.min(piece.len());
            skip -= from;
            *piece = piece.slice(from..);
        }
        self.left.reverse();
        Ok(())
    }
}
