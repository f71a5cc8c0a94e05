//! Frequent requests through the SDK: for buckets whose requests only the SDK can sign (S3 Express, multi-region access
//! points), or if `force_sdk` is set.

use std::io;
use std::pin::Pin;

use aws_sdk_s3::operation::RequestId;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{ChecksumMode, ChecksumType, CompletedMultipartUpload, CompletedPart, EncodingType};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::poll_fn;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::store::GetResult;
use torchobj_core::types::{
    Attributes, Condition, GetRequest, ListEntry, ListPage, ListRequest, ObjectHead, PartReceipt, Payload, PutOptions,
    Upload, Version,
};

use super::super::bucket::Bucket;
use super::super::checksum::{self, Algorithm};
use super::super::get::{METADATA, NONCE, is_marker};
use super::super::xml;
use crate::http::{BodyHeaders, Chain, HttpGetResult, range};

/// Adds a checksum to a request or a part.
macro_rules! checksum {
    ($request:ident, $checksum:expr) => {
        match $checksum.map(|(algorithm, checksum)| (algorithm, algorithm.encode(checksum))) {
            None => $request,
            Some((Algorithm::Crc64Nvme, checksum)) => $request.checksum_crc64_nvme(checksum),
            Some((Algorithm::Crc32C, checksum)) => $request.checksum_crc32_c(checksum),
            Some((Algorithm::Crc32, checksum)) => $request.checksum_crc32(checksum),
        }
    };
}

/// Adds the condition of a write to a request.
macro_rules! condition {
    ($request:ident, $condition:expr) => {
        match $condition {
            Condition::Always => $request,
            Condition::Absent => $request.if_none_match("*"),
            Condition::Matches(version) => $request.if_match(version.as_str()),
        }
    };
}

/// The attributes of an output. The outputs of GetObject and HeadObject have the same fields, but different types.
macro_rules! attributes {
    ($output:ident) => {{
        let metadata = $output.metadata.unwrap_or_default().into_iter();
        let mut metadata: Vec<_> = metadata.filter(|(name, _)| name != NONCE).collect();
        metadata.sort();
        Attributes {
            content_type: $output.content_type,
            content_encoding: $output.content_encoding,
            content_disposition: $output.content_disposition,
            content_language: $output.content_language,
            cache_control: $output.cache_control,
            storage_class: $output.storage_class.map(|class| class.as_str().to_owned()),
            metadata,
        }
    }};
}

/// The checksum of the object in an output.
macro_rules! object_checksum {
    ($output:ident) => {
        checksum::of_object(|name| match name {
            "x-amz-checksum-type" => $output.checksum_type.as_ref().map(ChecksumType::as_str),
            "x-amz-checksum-crc64nvme" => $output.checksum_crc64_nvme.as_deref(),
            "x-amz-checksum-crc32c" => $output.checksum_crc32_c.as_deref(),
            "x-amz-checksum-crc32" => $output.checksum_crc32.as_deref(),
            "x-amz-checksum-sha256" => $output.checksum_sha256.as_deref(),
            "content-range" => $output.content_range.as_deref(),
            _ => None,
        })
    };
}

impl Bucket {
    /// GetObject.
    pub(in crate::s3) async fn sdk_open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let operation = Operation::Get;
        let key = request.key;
        let mut call = self
            .sdk(operation)
            .await?
            .get_object()
            .bucket(&self.name)
            .key(key)
            .set_range(request.range.as_ref().map(range::header))
            .set_request_payer(self.request_payer());
        if let Some(version) = request.version.filter(|version| !version.as_str().starts_with("W/")) {
            call = call.if_match(version.as_str());
        }
        call = customer_key!(self, call);
        call = call.set_checksum_mode((request.checksum && self.has_checksums()).then_some(ChecksumMode::Enabled));
        let output = self.sdk_output(operation, Some(key), call.send()).await?;
        let checksum = object_checksum!(output);
        let encoding = output.content_encoding.clone();
        let headers = BodyHeaders {
            version: Some(self.version_of(operation, key, output.e_tag.as_deref().and_then(xml::header_etag))?),
            etag: output.e_tag.as_deref(),
            length: output.content_length.and_then(|length| u64::try_from(length).ok()),
            range: output.content_range.as_deref(),
            encoding: encoding.as_deref(),
        };
        let details = (attributes!(output), checksum);
        let mut body = output.body;
        let frames = poll_fn(move |context| {
            Pin::new(&mut body).poll_next(context).map_err(|error| io::Error::other(Chain(error)))
        });
        Ok(Box::new(HttpGetResult::of_stream(self.url_of(Some(key)), headers, details, frames.boxed())?))
    }

    /// HeadObject, with the nonce of the upload that created the object. `checksum`: requests the checksum.
    pub(in crate::s3) async fn sdk_head(&self, key: &str, checksum: bool) -> Result<(ObjectHead, Option<String>)> {
        let operation = Operation::Head;
        let mut call = self.sdk(operation).await?.head_object().bucket(&self.name).key(key);
        call = call.set_request_payer(self.request_payer());
        call = customer_key!(self, call);
        call = call.set_checksum_mode((checksum && self.has_checksums()).then_some(ChecksumMode::Enabled));
        let output = self.sdk_output(operation, Some(key), call.send()).await?;
        let checksum = if checksum { object_checksum!(output) } else { None };
        let nonce = output.metadata.as_ref().and_then(|metadata| metadata.get(NONCE)).cloned();
        let is_known = output.request_id().is_some();
        let attributes = attributes!(output);
        let version = match output.e_tag.as_deref().and_then(xml::header_etag) {
            None if is_known && is_marker(key) => None,
            etag => Some(self.version_of(operation, key, etag)?),
        };
        let size = output.content_length.and_then(|length| u64::try_from(length).ok());
        let size = size.ok_or_else(|| self.missing(operation, key, "Content-Length"))?;
        let modified_ms = output.last_modified.and_then(|time| time.to_millis().ok());
        Ok((ObjectHead { size, version, modified_ms, attributes, checksum }, nonce))
    }

    /// ListObjectsV2.
    pub(in crate::s3) async fn sdk_list(&self, request: &ListRequest<'_>) -> Result<ListPage> {
        let operation = Operation::List;
        let call = self
            .sdk(operation)
            .await?
            .list_objects_v2()
            .bucket(&self.name)
            .prefix(request.prefix)
            .encoding_type(EncodingType::Url)
            .set_delimiter(request.delimiter.map(str::to_owned))
            .set_start_after(request.start_after.map(str::to_owned))
            .set_continuation_token(request.continuation.map(str::to_owned))
            .set_max_keys(request.max_entries.and_then(|max| i32::try_from(max).ok()))
            .set_request_payer(self.request_payer());
        let output = self.sdk_output(operation, Some(request.prefix), call.send()).await?;
        let wrong =
            |problem: &str| self.error(ErrorKind::Protocol, operation, Some(request.prefix), problem).permanent();
        let continuation = xml::continuation(output.is_truncated == Some(true), output.next_continuation_token);
        let continuation = continuation.map_err(wrong)?;
        let encoded = output.encoding_type == Some(EncodingType::Url);
        let decode = |key: Option<String>| {
            let key = key.unwrap_or_default();
            xml::listed_key(&key, encoded).map(|decoded| decoded.unwrap_or(key)).map_err(|problem| wrong(&problem))
        };
        let entries = output.contents.unwrap_or_default().into_iter().map(|object| {
            Ok(ListEntry {
                key: decode(object.key)?,
                size: object.size.and_then(|size| u64::try_from(size).ok()),
                version: object.e_tag.and_then(|etag| xml::listed_version(&etag)),
                modified_ms: object.last_modified.and_then(|time| time.to_millis().ok()),
                storage_class: object.storage_class.map(|class| class.as_str().into()),
            })
        });
        let prefixes = output.common_prefixes.unwrap_or_default().into_iter().map(|prefix| decode(prefix.prefix));
        Ok(ListPage {
            entries: entries.collect::<Result<_>>()?,
            prefixes: prefixes.collect::<Result<_>>()?,
            continuation,
        })
    }

    /// PutObject.
    pub(in crate::s3) async fn sdk_put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        let operation = Operation::Put;
        let attributes = &options.attributes;
        self.check_options(operation, key, options)?;
        let metadata = self.metadata_headers(operation, key, attributes)?.into_iter();
        let metadata = metadata.map(|(header, value)| (header[METADATA.len()..].to_owned(), value.to_owned()));
        let call = self.sdk(operation).await?.put_object().bucket(&self.name).key(key).body(stream(payload));
        let mut call = new_object!(self, call.set_metadata(Some(metadata.collect())), attributes);
        let checksum = self.algorithm(options.checksum).await.map(|algorithm| (algorithm, algorithm.of(payload)));
        call = checksum!(call, checksum).set_checksum_algorithm(checksum.map(|(algorithm, _)| algorithm.into()));
        call = condition!(call, &options.condition);
        let sent = call.customize().disable_payload_signing().send();
        let output = self.sdk_output(operation, Some(key), sent).await?;
        self.version_of(operation, key, output.e_tag.as_deref().and_then(xml::header_etag))
    }

    /// UploadPart.
    pub(in crate::s3) async fn sdk_put_part(
        &self,
        upload: &Upload,
        number: u32,
        payload: &Payload,
    ) -> Result<PartReceipt> {
        let operation = Operation::PutPart;
        let mut call = self
            .sdk(operation)
            .await?
            .upload_part()
            .bucket(&self.name)
            .key(&upload.key)
            .upload_id(&upload.id)
            .part_number(i32::try_from(number).unwrap_or(i32::MAX))
            .body(stream(payload))
            .set_request_payer(self.request_payer());
        call = customer_key!(self, call);
        let checksum = self.algorithm(upload.checksum).await.map(|algorithm| (algorithm, algorithm.of(payload)));
        call = checksum!(call, checksum).set_checksum_algorithm(checksum.map(|(algorithm, _)| algorithm.into()));
        let sent = call.customize().disable_payload_signing().send();
        let output = self.sdk_output(operation, Some(&upload.key), sent).await?;
        let version = self.version_of(operation, &upload.key, output.e_tag.as_deref().and_then(xml::header_etag))?;
        Ok(PartReceipt {
            number,
            size: payload.len() as u64,
            version,
            checksum: checksum.map(|(_, checksum)| checksum),
        })
    }

    /// CompleteMultipartUpload.
    pub(in crate::s3) async fn sdk_commit(
        &self,
        upload: &Upload,
        parts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Option<Version>> {
        let operation = Operation::Commit;
        let algorithm = self.algorithm(upload.checksum).await;
        let completed = parts.iter().map(|part| {
            let completed = CompletedPart::builder()
                .part_number(i32::try_from(part.number).unwrap_or(i32::MAX))
                .e_tag(part.version.as_str());
            checksum!(completed, algorithm.zip(part.checksum)).build()
        });
        let mut request = self
            .sdk(operation)
            .await?
            .complete_multipart_upload()
            .bucket(&self.name)
            .key(&upload.key)
            .upload_id(&upload.id)
            .multipart_upload(CompletedMultipartUpload::builder().set_parts(Some(completed.collect())).build())
            .set_request_payer(self.request_payer());
        if let Some(algorithm @ Algorithm::Crc64Nvme) = algorithm {
            let whole = algorithm.of_parts(parts).map(|checksum| algorithm.encode(checksum));
            request = request.set_checksum_crc64_nvme(whole).checksum_type(ChecksumType::FullObject);
        }
        request = customer_key!(self, request);
        request = condition!(request, condition);
        let output = self.sdk_output(operation, Some(&upload.key), request.send()).await?;
        Ok(output.e_tag.and_then(|etag| xml::etag(&etag)))
    }
}

/// The body of an SDK request. Several pieces are copied into one.
fn stream(payload: &Payload) -> ByteStream {
    match payload.pieces() {
        [piece] => ByteStream::from(piece.clone()),
        pieces => ByteStream::from(Bytes::from(pieces.concat())),
    }
}
