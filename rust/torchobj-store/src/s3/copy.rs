//! Copies on the server, through the SDK. Bytes do not pass through here.

use std::sync::Arc;

use aws_sdk_s3::types::{RequestPayer, StorageClass};
use futures_util::StreamExt;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::{Condition, ObjectHead, PartReceipt, PutOptions, Upload, Version};
use torchobj_core::url::ObjectUrl;

use super::bucket::Bucket;
use super::encode;
use super::xml;

/// CopyObject takes objects up to this (API reference, "CopyObject").
const LARGEST_COPY_BYTES: u64 = 5 << 30;

/// Larger ones are copied in parts of this, so many at a time.
const PART_BYTES: u64 = 512 << 20;
const PARTS_AT_A_TIME: usize = 8;

impl Bucket {
    /// Copies an object of this account, with its attributes.
    pub(super) async fn copy(self: &Arc<Self>, source: &ObjectUrl, key: &str) -> Result<Version> {
        let operation = Operation::Copy;
        if source.scheme != "s3" {
            let message = format!("cannot copy from {source}: another kind of store");
            return Err(self.error(ErrorKind::Unsupported, operation, Some(key), &message));
        }
        let from = Arc::new(Self::new(self.account.clone(), &source.bucket));
        let head =
            if from.by_sdk().await? { from.sdk_head(&source.key).await?.0 } else { from.head(&source.key).await? };
        if head.size > LARGEST_COPY_BYTES {
            return self.copy_in_parts(source, &head, key).await;
        }
        let (encryption, key_id) = self.server_side_encryption();
        let mut request = self
            .sdk(operation)
            .await?
            .copy_object()
            .bucket(&self.name)
            .key(key)
            .copy_source(encode::copy_source(&source.bucket, &source.key))
            .set_copy_source_if_match(head.version.as_ref().map(|version| version.as_str().to_owned()))
            .set_storage_class(self.storage_class(&head.attributes).map(StorageClass::from))
            .set_server_side_encryption(encryption)
            .set_ssekms_key_id(key_id)
            .set_request_payer(self.request_payer());
        if let Some(customer) = &self.account.customer_key {
            request = request.sse_customer_algorithm("AES256").sse_customer_key(&customer.key);
            request = request.sse_customer_key_md5(&customer.md5);
            request = request.copy_source_sse_customer_algorithm("AES256").copy_source_sse_customer_key(&customer.key);
            request = request.copy_source_sse_customer_key_md5(&customer.md5);
        }
        let answer = self.sdk_answer(operation, Some(key), request.send()).await?;
        let etag = answer.copy_object_result.and_then(|result| result.e_tag);
        etag.map(|etag| xml::quoted(&etag))
            .ok_or_else(|| self.error(ErrorKind::Protocol, operation, Some(key), "an answer without an ETag"))
    }

    async fn copy_in_parts(&self, source: &ObjectUrl, head: &ObjectHead, key: &str) -> Result<Version> {
        let options = PutOptions { attributes: head.attributes.clone(), ..PutOptions::default() };
        let upload = self.begin_upload(key, &options).await?;
        let copied = self.copy_parts(source, head, &upload).await;
        let committed = match copied {
            Ok(parts) => self.commit(&upload, &parts, &Condition::Always).await,
            Err(error) => Err(error),
        };
        if committed.is_err()
            && let Err(error) = self.abort(&upload).await
        {
            log::warn!("upload {} stays in the bucket: {error}", upload.id);
        }
        committed
    }

    async fn copy_parts(&self, source: &ObjectUrl, head: &ObjectHead, upload: &Upload) -> Result<Vec<PartReceipt>> {
        let starts = (0..head.size).step_by(usize::try_from(PART_BYTES).expect("it is small"));
        let copies = (1_u32..).zip(starts).map(|(number, start)| {
            let end = (start + PART_BYTES).min(head.size);
            self.copy_part(source, head, upload, number, start..end)
        });
        let mut copies = futures_util::stream::iter(copies).buffered(PARTS_AT_A_TIME);
        let mut parts = Vec::new();
        while let Some(part) = copies.next().await {
            parts.push(part?);
        }
        Ok(parts)
    }

    async fn copy_part(
        &self,
        source: &ObjectUrl,
        head: &ObjectHead,
        upload: &Upload,
        number: u32,
        range: std::ops::Range<u64>,
    ) -> Result<PartReceipt> {
        let operation = Operation::Copy;
        let mut request = self
            .sdk(operation)
            .await?
            .upload_part_copy()
            .bucket(&self.name)
            .key(&upload.key)
            .upload_id(&upload.id)
            .part_number(i32::try_from(number).unwrap_or(i32::MAX))
            .copy_source(encode::copy_source(&source.bucket, &source.key))
            .copy_source_range(format!("bytes={}-{}", range.start, range.end - 1))
            .set_copy_source_if_match(head.version.as_ref().map(|version| version.as_str().to_owned()))
            .set_request_payer(self.account.config.requester_pays.then_some(RequestPayer::Requester));
        if let Some(customer) = &self.account.customer_key {
            request = request.sse_customer_algorithm("AES256").sse_customer_key(&customer.key);
            request = request.sse_customer_key_md5(&customer.md5);
            request = request.copy_source_sse_customer_algorithm("AES256").copy_source_sse_customer_key(&customer.key);
            request = request.copy_source_sse_customer_key_md5(&customer.md5);
        }
        let answer = self.sdk_answer(operation, Some(&upload.key), request.send()).await?;
        let etag = answer.copy_part_result.and_then(|result| result.e_tag);
        let etag = etag.ok_or_else(|| {
            self.error(ErrorKind::Protocol, operation, Some(&upload.key), "an answer without an ETag")
        })?;
        Ok(PartReceipt { number, size: range.end - range.start, version: xml::quoted(&etag), checksum: None })
    }
}
