//! The hot path's requests, through the SDK: for buckets whose requests we cannot sign (S3 Express, multi-region access
//! points), and for everybody who sets `force_sdk`.

use std::io;
use std::pin::Pin;

use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{ChecksumAlgorithm, EncodingType, StorageClass};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::poll_fn;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::store::Opened;
use torchobj_core::types::{
    Attributes, Condition, GetRequest, ListEntry, ListPage, ListRequest, ObjectHead, PartReceipt, Payload, PutOptions,
    Upload, Version,
};

use super::bucket::Bucket;
use super::checksum::Algorithm;
use super::get::NONCE_HEADER;
use super::xml;
use crate::http::encode::decode_listed;
use crate::http::{BodyHeaders, Chain, OpenedObject, range};

impl Bucket {
    /// GetObject.
    pub(super) async fn sdk_open(&self, request: GetRequest<'_>) -> Result<Box<dyn Opened>> {
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
        if let Some(customer) = &self.account.customer_key {
            call = call.sse_customer_algorithm("AES256").sse_customer_key(&customer.key);
            call = call.sse_customer_key_md5(&customer.md5);
        }
        let answer = self.sdk_answer(operation, Some(key), call.send()).await?;
        let headers = BodyHeaders {
            version: answer.e_tag.map(Version::new),
            length: answer.content_length.and_then(|length| u64::try_from(length).ok()),
            range: answer.content_range.as_deref(),
            encoding: answer.content_encoding.as_deref(),
        };
        let mut body = answer.body;
        let frames = poll_fn(move |context| {
            Pin::new(&mut body).poll_next(context).map_err(|error| io::Error::other(Chain(error)))
        });
        Ok(Box::new(OpenedObject::of_stream(self.url_of(Some(key)), headers, frames.boxed())?))
    }

    /// HeadObject, and the nonce of the upload that made the object.
    pub(super) async fn sdk_head(&self, key: &str) -> Result<(ObjectHead, Option<String>)> {
        let operation = Operation::Head;
        let mut call = self.sdk(operation).await?.head_object().bucket(&self.name).key(key);
        call = call.set_request_payer(self.request_payer());
        if let Some(customer) = &self.account.customer_key {
            call = call.sse_customer_algorithm("AES256").sse_customer_key(&customer.key);
            call = call.sse_customer_key_md5(&customer.md5);
        }
        let answer = self.sdk_answer(operation, Some(key), call.send()).await?;
        let mut metadata = answer.metadata.unwrap_or_default();
        let nonce = metadata.remove(&NONCE_HEADER["x-amz-meta-".len()..]);
        let mut metadata: Vec<_> = metadata.into_iter().collect();
        metadata.sort();
        let attributes = Attributes {
            content_type: answer.content_type,
            content_encoding: answer.content_encoding,
            content_disposition: answer.content_disposition,
            content_language: answer.content_language,
            cache_control: answer.cache_control,
            storage_class: answer.storage_class.map(|class| class.as_str().to_owned()),
            metadata,
        };
        let size = answer.content_length.and_then(|length| u64::try_from(length).ok());
        let size =
            size.ok_or_else(|| self.error(ErrorKind::Protocol, operation, Some(key), "an answer without a size"))?;
        let modified_ms = answer.last_modified.and_then(|time| time.to_millis().ok());
        Ok((ObjectHead { size, version: answer.e_tag.map(Version::new), modified_ms, attributes }, nonce))
    }

    /// ListObjectsV2.
    pub(super) async fn sdk_list(&self, request: &ListRequest<'_>) -> Result<ListPage> {
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
            .set_max_keys(request.max_entries.and_then(|most| i32::try_from(most).ok()))
            .set_request_payer(self.request_payer());
        let answer = self.sdk_answer(operation, Some(request.prefix), call.send()).await?;
        let continuation = xml::continuation(answer.is_truncated == Some(true), answer.next_continuation_token);
        let continuation = continuation
            .map_err(|problem| self.error(ErrorKind::Protocol, operation, Some(request.prefix), problem))?;
        let encoded = answer.encoding_type.is_some();
        let decode = |key: String| if encoded { decode_listed(&key).unwrap_or(key) } else { key };
        let entries = answer.contents.unwrap_or_default().into_iter().filter_map(|object| {
            Some(ListEntry {
                key: decode(object.key?),
                size: object.size.and_then(|size| u64::try_from(size).ok()),
                version: object.e_tag.and_then(|etag| xml::listed_version(&etag)),
                modified_ms: object.last_modified.and_then(|time| time.to_millis().ok()),
                storage_class: object.storage_class.map(|class| class.as_str().to_owned()),
            })
        });
        let prefixes = answer.common_prefixes.unwrap_or_default().into_iter().filter_map(|prefix| prefix.prefix);
        Ok(ListPage { entries: entries.collect(), prefixes: prefixes.map(decode).collect(), continuation })
    }

    /// PutObject.
    pub(super) async fn sdk_put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        let operation = Operation::Put;
        let attributes = &options.attributes;
        self.check_options(operation, key, options)?;
        let metadata = self.metadata_headers(operation, key, attributes)?.into_iter();
        let metadata = metadata.map(|(header, value)| (header["x-amz-meta-".len()..].to_owned(), value.to_owned()));
        let (encryption, key_id) = self.server_side_encryption();
        let mut call = self
            .sdk(operation)
            .await?
            .put_object()
            .bucket(&self.name)
            .key(key)
            .body(stream(payload))
            .set_metadata(Some(metadata.collect()))
            .content_type(attributes.content_type.as_deref().unwrap_or("application/octet-stream"))
            .set_content_encoding(attributes.content_encoding.clone())
            .set_content_disposition(attributes.content_disposition.clone())
            .set_content_language(attributes.content_language.clone())
            .set_cache_control(attributes.cache_control.clone())
            .set_storage_class(self.storage_class(attributes).map(StorageClass::from))
            .set_server_side_encryption(encryption)
            .set_ssekms_key_id(key_id)
            .set_request_payer(self.request_payer());
        if let Some(customer) = &self.account.customer_key {
            call = call.sse_customer_algorithm("AES256").sse_customer_key(&customer.key);
            call = call.sse_customer_key_md5(&customer.md5);
        }
        call = match self.algorithm(options.checksum).await {
            None => call,
            Some(algorithm @ Algorithm::Crc64Nvme) => call
                .checksum_algorithm(ChecksumAlgorithm::Crc64Nvme)
                .checksum_crc64_nvme(algorithm.encode(algorithm.of(payload))),
            Some(algorithm @ Algorithm::Crc32C) => call
                .checksum_algorithm(ChecksumAlgorithm::Crc32C)
                .checksum_crc32_c(algorithm.encode(algorithm.of(payload))),
            Some(algorithm @ Algorithm::Crc32) => call
                .checksum_algorithm(ChecksumAlgorithm::Crc32)
                .checksum_crc32(algorithm.encode(algorithm.of(payload))),
        };
        call = match &options.condition {
            Condition::Always => call,
            Condition::Absent => call.if_none_match("*"),
            Condition::Matches(version) => call.if_match(version.as_str()),
        };
        let sent = call.customize().disable_payload_signing().send();
        let answer = self.sdk_answer(operation, Some(key), sent).await?;
        let etag = answer.e_tag.map(Version::new);
        etag.ok_or_else(|| self.error(ErrorKind::Protocol, operation, Some(key), "an answer without an ETag"))
    }

    /// UploadPart.
    pub(super) async fn sdk_put_part(&self, upload: &Upload, number: u32, payload: &Payload) -> Result<PartReceipt> {
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
        if let Some(customer) = &self.account.customer_key {
            call = call.sse_customer_algorithm("AES256").sse_customer_key(&customer.key);
            call = call.sse_customer_key_md5(&customer.md5);
        }
        let checksum = self.algorithm(upload.checksum).await.map(|algorithm| (algorithm, algorithm.of(payload)));
        call = match checksum {
            None => call,
            Some((algorithm @ Algorithm::Crc64Nvme, checksum)) => {
                call.checksum_algorithm(ChecksumAlgorithm::Crc64Nvme).checksum_crc64_nvme(algorithm.encode(checksum))
            }
            Some((algorithm @ Algorithm::Crc32C, checksum)) => {
                call.checksum_algorithm(ChecksumAlgorithm::Crc32C).checksum_crc32_c(algorithm.encode(checksum))
            }
            Some((algorithm @ Algorithm::Crc32, checksum)) => {
                call.checksum_algorithm(ChecksumAlgorithm::Crc32).checksum_crc32(algorithm.encode(checksum))
            }
        };
        let sent = call.customize().disable_payload_signing().send();
        let answer = self.sdk_answer(operation, Some(&upload.key), sent).await?;
        let etag = answer.e_tag.map(Version::new);
        let version = etag.ok_or_else(|| {
            self.error(ErrorKind::Protocol, operation, Some(&upload.key), "an answer without an ETag")
        })?;
        Ok(PartReceipt {
            number,
            size: payload.len() as u64,
            version,
            checksum: checksum.map(|(_, checksum)| checksum),
        })
    }
}

/// The SDK takes one piece without a copy; several are joined.
fn stream(payload: &Payload) -> ByteStream {
    match payload.pieces() {
        [piece] => ByteStream::from(piece.clone()),
        pieces => ByteStream::from(Bytes::from(pieces.concat())),
    }
}
