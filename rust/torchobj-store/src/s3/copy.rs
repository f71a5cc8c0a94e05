//! Server-side copies, through the SDK. The steps of a large copy are retried here; to the caller of the trait, the copy is
//! one attempt.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_s3::types::StorageClass;
use futures_util::StreamExt;
use torchobj_core::client::Client;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::policy::Policy;
use torchobj_core::types::{Condition, ObjectHead, PartReceipt, PutOptions, Upload, Version};
use torchobj_core::upload::{Commit, CommitFailure, begin};
use torchobj_core::url::ObjectUrl;

use super::S3Store;
use super::bucket::Bucket;
use super::sdk::customer_key;
use super::xml;
use crate::http::encode;

/// Maximum size of an object of CopyObject (API reference, "CopyObject").
const MAX_COPY_BYTES: u64 = 5 << 30;

/// Part size of larger copies.
const PART_BYTES: u64 = 512 << 20;
/// Maximum number of parts that are copied concurrently.
const MAX_CONCURRENT_PARTS: usize = 8;

/// A commit takes "several minutes" at most (API reference, "CompleteMultipartUpload"). The caller limits the whole copy.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(300);

/// Retries of a step, so that a single failed step does not restart a copy of terabytes.
fn policy() -> Policy {
    Policy {
        max_attempts: 4,
        commit_timeout: COMMIT_TIMEOUT,
        max_in_flight: MAX_CONCURRENT_PARTS,
        max_in_flight_cap: None,
        ..Policy::default()
    }
}

/// Runs `step` with the retries of `client`.
async fn with_retries<T, F: Future<Output = Result<T>>>(client: &Client, mut step: impl FnMut() -> F) -> Result<T> {
    let mut attempts = client.attempts();
    loop {
        match step().await {
            Ok(done) => {
                attempts.succeeded();
                return Ok(done);
            }
            Err(error) => attempts.failed(error).await?,
        }
    }
}

impl Bucket {
    /// Copies an object of this account, with its attributes.
    pub(super) async fn copy(self: &Arc<Self>, source: &ObjectUrl, key: &str) -> Result<Version> {
        let operation = Operation::Copy;
        if source.scheme != "s3" {
            let message = format!("cannot copy from {source}: the source must be an s3:// URL");
            return Err(self.error(ErrorKind::Unsupported, operation, Some(key), &message));
        }
        let from = Arc::new(Self::new(self.account.clone(), &source.bucket));
        let head = from.head(&source.key).await?;
        if head.size > MAX_COPY_BYTES {
            return self.copy_in_parts(source, &head, key).await;
        }
        let (encryption, key_id) = self.server_side_encryption();
        let mut request = self
            .sdk(operation)
            .await?
            .copy_object()
            .bucket(&self.name)
            .key(key)
            .copy_source(copy_source(&source.bucket, &source.key))
            .set_copy_source_if_match(head.version.as_ref().map(|version| version.as_str().to_owned()))
            .set_storage_class(self.storage_class(&head.attributes).map(StorageClass::from))
            .set_server_side_encryption(encryption)
            .set_ssekms_key_id(key_id)
            .set_request_payer(self.request_payer());
        request = customer_key!(self, request);
        if let Some(customer) = &self.account.customer_key {
            request = request.copy_source_sse_customer_algorithm("AES256").copy_source_sse_customer_key(&customer.key);
            request = request.copy_source_sse_customer_key_md5(&customer.md5);
        }
        let output = self.sdk_output(operation, Some(key), request.send()).await?;
        let etag = output.copy_object_result.and_then(|result| result.e_tag);
        self.version_of(operation, key, etag.map(|etag| xml::quoted(&etag)))
    }

    async fn copy_in_parts(self: &Arc<Self>, source: &ObjectUrl, head: &ObjectHead, key: &str) -> Result<Version> {
        let options = PutOptions { attributes: head.attributes.clone(), ..PutOptions::default() };
        // The caller has the permit of the whole copy, and retries it with its own policy.
        let client = Arc::new(Client::new(Arc::new(S3Store(self.clone())), policy()));
        let mut begun = begin(&client, key, &options).await?;
        let upload = begun.upload().clone();
        let committed = match self.copy_parts(source, head, &upload, &client).await {
            Ok(parts) => commit_copy(&client, &upload, &parts).await,
            Err(error) => Err(error.into()),
        };
        begun.end(committed, ready(())).await
    }

    async fn copy_parts(
        &self,
        source: &ObjectUrl,
        head: &ObjectHead,
        upload: &Upload,
        client: &Client,
    ) -> Result<Vec<PartReceipt>> {
        let starts = (0..head.size).step_by(usize::try_from(PART_BYTES).expect("it is small"));
        let copies = (1_u32..).zip(starts).map(|(number, start)| {
            let end = (start + PART_BYTES).min(head.size);
            with_retries(client, move || self.copy_part(source, head, upload, number, start..end))
        });
        let mut copies = futures_util::stream::iter(copies).buffered(MAX_CONCURRENT_PARTS);
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
            .copy_source(copy_source(&source.bucket, &source.key))
            .copy_source_range(format!("bytes={}-{}", range.start, range.end - 1))
            .set_copy_source_if_match(head.version.as_ref().map(|version| version.as_str().to_owned()))
            .set_request_payer(self.request_payer());
        request = customer_key!(self, request);
        if let Some(customer) = &self.account.customer_key {
            request = request.copy_source_sse_customer_algorithm("AES256").copy_source_sse_customer_key(&customer.key);
            request = request.copy_source_sse_customer_key_md5(&customer.md5);
        }
        let output = self.sdk_output(operation, Some(&upload.key), request.send()).await?;
        let etag = output.copy_part_result.and_then(|result| result.e_tag);
        let version = self.version_of(operation, &upload.key, etag.map(|etag| xml::quoted(&etag)))?;
        Ok(PartReceipt { number, size: range.end - range.start, version, checksum: None })
    }
}

async fn commit_copy(client: &Client, upload: &Upload, parts: &[PartReceipt]) -> Result<Version, CommitFailure> {
    let condition = &Condition::Always;
    let commit = Commit { store: client.store(), policy: client.policy(), permits: None, upload, parts, condition };
    commit.run(client.attempts()).await
}

/// The value of `x-amz-copy-source`.
fn copy_source(bucket: &str, key: &str) -> String {
    let mut out = Vec::with_capacity(bucket.len() + key.len() + 1);
    encode::key_into(&mut out, bucket);
    out.push(b'/');
    encode::key_into(&mut out, key);
    String::from_utf8(out).expect("percent-encoding yields ASCII")
}

#[cfg(test)]
mod tests {
    use torchobj_core::policy::within;
    use torchobj_core::runtime::runtime;
    use torchobj_core::types::Attributes;

    use super::*;
    use crate::config::S3Config;
    use crate::fake::{Fake, http_response};
    use crate::s3::Account;

    /// The successful responses to the requests of a copy in parts.
    fn success(head: &str) -> String {
        const COPIED: &str = "<CopyPartResult><ETag>e</ETag></CopyPartResult>";
        match head.split(' ').next().unwrap() {
            "POST" if head.contains("uploads") => http_response(
                200,
                "",
                "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
            ),
            "PUT" => http_response(200, "", COPIED),
            "POST" => {
                http_response(200, "", "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")
            }
            _ => http_response(204, "", ""),
        }
    }

    async fn copy(url: &str) -> Result<Version> {
        let endpoint_url = Some(url.to_owned());
        let config = S3Config { endpoint_url, anonymous: true, ..S3Config::default() };
        let bucket = Arc::new(Bucket::new(Arc::new(Account::new(config).unwrap()), "b"));
        let source = ObjectUrl::parse("s3://b/from").unwrap();
        let head = ObjectHead {
            size: 3 * PART_BYTES,
            version: None,
            modified_ms: None,
            attributes: Attributes::default(),
            checksum: None,
        };
        bucket.copy_in_parts(&source, &head, "to").await
    }

    #[test]
    fn one_failure_of_each_step_does_not_fail_a_copy() {
        runtime().block_on(async {
            let mut refused = std::collections::HashSet::new();
            let fake = Fake::start(move |head| {
                let step = head.split(' ').take(2).collect::<Vec<_>>().join(" ");
                if refused.insert(step) {
                    return http_response(500, "", "<Error><Code>InternalError</Code></Error>");
                }
                success(head)
            })
            .await;
            copy(&fake.url).await.unwrap();
            assert_eq!((fake.count("PUT", "partNumber"), fake.count("DELETE", "")), (6, 0));
        });
    }

    #[test]
    fn a_failed_or_cancelled_copy_aborts_its_upload() {
        runtime().block_on(async {
            let fake = Fake::start(|head| {
                let denied = http_response(403, "", "<Error><Code>AccessDenied</Code></Error>");
                if head.contains("partNumber=2") { denied } else { success(head) }
            })
            .await;
            assert_eq!(copy(&fake.url).await.unwrap_err().kind(), ErrorKind::AccessDenied);
            // Twice, for a part that arrives late.
            assert_eq!(fake.count("DELETE", "uploadId=u"), 2);
            let (asked, mut parts) = tokio::sync::mpsc::unbounded_channel();
            let fake = Fake::start(move |head| {
                if !head.contains("partNumber") {
                    return success(head);
                }
                asked.send(()).unwrap();
                String::new()
            })
            .await;
            tokio::select! {
                done = copy(&fake.url) => panic!("{done:?}"),
                _ = parts.recv() => {}
            }
            aborted(&fake).await;
        });
    }

    #[test]
    fn a_copy_that_is_cancelled_while_its_upload_begins_aborts_the_upload() {
        runtime().block_on(async {
            let (asked, mut begins) = tokio::sync::mpsc::unbounded_channel();
            let (cancelled, may_begin) = std::sync::mpsc::channel();
            let fake = Fake::start(move |head| {
                if head.starts_with("POST") && head.contains("uploads") {
                    asked.send(()).unwrap();
                    // The upload has begun, and its id arrives after the copy was cancelled.
                    may_begin.recv().unwrap();
                }
                success(head)
            })
            .await;
            tokio::select! {
                done = copy(&fake.url) => panic!("{done:?}"),
                _ = begins.recv() => {}
            }
            cancelled.send(()).unwrap();
            aborted(&fake).await;
            assert_eq!(fake.count("PUT", ""), 0);
        });
    }

    /// Waits until the upload is aborted in the background.
    async fn aborted(fake: &Fake) {
        let aborted = async {
            while fake.count("DELETE", "uploadId=u") == 0 {
                tokio::task::yield_now().await;
            }
        };
        within(Duration::from_secs(20), aborted).await.expect("the upload is aborted");
    }
}
