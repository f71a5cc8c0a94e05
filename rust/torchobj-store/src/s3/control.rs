//! What is rare, through the SDK: uploads begun and aborted; objects deleted.

use aws_sdk_s3::error::SdkError;
use aws_sdk_s3::types::{
    ChecksumAlgorithm, ChecksumType, CompletedMultipartUpload, CompletedPart, Delete, ObjectIdentifier, RequestPayer,
    ServerSideEncryption, StorageClass,
};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_runtime_api::client::result::ConnectorError;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::types::{Condition, PartReceipt, PutOptions, Upload, Version};

use super::bucket::Bucket;
use super::checksum::Algorithm;
use super::get::NONCE_HEADER;
use super::request::Used;
use super::wire::undialed;
use super::xml;
use crate::config::Encryption;
use crate::http::{Chain, refused};

impl Bucket {
    /// CreateMultipartUpload.
    pub(super) async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        let operation = Operation::BeginUpload;
        let attributes = &options.attributes;
        self.check_options(operation, key, options)?;
        let nonce = format!("{:032x}", fastrand::u128(..));
        let mut metadata: std::collections::HashMap<String, String> = self
            .metadata_headers(operation, key, attributes)?
            .into_iter()
            .map(|(header, value)| (header["x-amz-meta-".len()..].to_owned(), value.to_owned()))
            .collect();
        metadata.insert(NONCE_HEADER["x-amz-meta-".len()..].to_owned(), nonce.clone());
        let (algorithm, checksum_type) = match self.algorithm(options.checksum).await {
            None => (None, None),
            Some(Algorithm::Crc64Nvme) => (Some(ChecksumAlgorithm::Crc64Nvme), Some(ChecksumType::FullObject)),
            // Stores that are not AWS know the parts' checksums longer than the whole object's.
            Some(Algorithm::Crc32C) => (Some(ChecksumAlgorithm::Crc32C), None),
            Some(Algorithm::Crc32) => (Some(ChecksumAlgorithm::Crc32), None),
        };
        let (encryption, key_id) = self.server_side_encryption();
        let customer = self.account.customer_key.as_ref();
        let request = self
            .sdk(operation)
            .await?
            .create_multipart_upload()
            .bucket(&self.name)
            .key(key)
            .set_metadata(Some(metadata))
            .content_type(attributes.content_type.as_deref().unwrap_or("application/octet-stream"))
            .set_content_encoding(attributes.content_encoding.clone())
            .set_content_disposition(attributes.content_disposition.clone())
            .set_content_language(attributes.content_language.clone())
            .set_cache_control(attributes.cache_control.clone())
            .set_storage_class(self.storage_class(attributes).map(StorageClass::from))
            .set_checksum_algorithm(algorithm)
            .set_checksum_type(checksum_type)
            .set_server_side_encryption(encryption)
            .set_ssekms_key_id(key_id)
            .set_sse_customer_algorithm(customer.map(|_| "AES256".to_owned()))
            .set_sse_customer_key(customer.map(|customer| customer.key.clone()))
            .set_sse_customer_key_md5(customer.map(|customer| customer.md5.clone()))
            .set_request_payer(self.request_payer());
        let answer = self.sdk_answer(operation, Some(key), request.send()).await?;
        let id = answer
            .upload_id
            .ok_or_else(|| self.error(ErrorKind::Protocol, operation, Some(key), "an answer without an upload id"))?;
        Ok(Upload { key: key.to_owned(), id, nonce, begun_ms: None, checksum: options.checksum })
    }

    /// CompleteMultipartUpload, for what only the SDK signs.
    pub(super) async fn sdk_commit(
        &self,
        upload: &Upload,
        parts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Version> {
        let operation = Operation::Commit;
        let algorithm = self.algorithm(upload.checksum).await;
        let completed = parts.iter().map(|part| {
            let mut completed = CompletedPart::builder()
                .part_number(i32::try_from(part.number).unwrap_or(i32::MAX))
                .e_tag(part.version.as_str());
            match (algorithm, part.checksum) {
                (Some(algorithm @ Algorithm::Crc64Nvme), Some(checksum)) => {
                    completed = completed.checksum_crc64_nvme(algorithm.encode(checksum));
                }
                (Some(algorithm @ Algorithm::Crc32C), Some(checksum)) => {
                    completed = completed.checksum_crc32_c(algorithm.encode(checksum));
                }
                (Some(algorithm @ Algorithm::Crc32), Some(checksum)) => {
                    completed = completed.checksum_crc32(algorithm.encode(checksum));
                }
                _ => {}
            }
            completed.build()
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
        if let Some(customer) = &self.account.customer_key {
            request = request.sse_customer_algorithm("AES256").sse_customer_key(&customer.key);
            request = request.sse_customer_key_md5(&customer.md5);
        }
        request = match condition {
            Condition::Always => request,
            Condition::Absent => request.if_none_match("*"),
            Condition::Matches(version) => request.if_match(version.as_str()),
        };
        let answer = self.sdk_answer(operation, Some(&upload.key), request.send()).await?;
        let etag = answer.e_tag.map(|etag| xml::quoted(&etag));
        etag.ok_or_else(|| self.error(ErrorKind::Protocol, operation, Some(&upload.key), "an answer without an ETag"))
    }

    /// Whether the object carries the nonce of this upload.
    pub(super) async fn committed(&self, upload: &Upload) -> Result<Option<Version>> {
        let head = if self.by_sdk().await? {
            self.sdk_head(&upload.key).await
        } else {
            self.head_with_nonce(&upload.key).await
        };
        match head {
            Ok((head, nonce)) => Ok(head.version.filter(|_| nonce.as_deref() == Some(&upload.nonce))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// AbortMultipartUpload. One that is gone is no error.
    pub(super) async fn abort(&self, upload: &Upload) -> Result<()> {
        let operation = Operation::Abort;
        let request = self.sdk(operation).await?.abort_multipart_upload();
        let request = request.bucket(&self.name).key(&upload.key).upload_id(&upload.id);
        let request = request.set_request_payer(self.request_payer());
        match self.sdk_answer(operation, Some(&upload.key), request.send()).await {
            Err(error) if error.kind() != ErrorKind::UploadGone => Err(error),
            _ => Ok(()),
        }
    }

    /// DeleteObject, or DeleteObjects for several.
    pub(super) async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        // XML 1.0 cannot carry control characters, so neither can DeleteObjects.
        let (single, several): (Vec<_>, Vec<_>) = keys.iter().partition(|key| key.chars().any(char::is_control));
        let mut failed = Vec::new();
        match several.as_slice() {
            [] => {}
            [key] => failed.extend(self.delete_one(key, None).await.err().map(|error| ((*key).clone(), error))),
            several => match self.delete_several(several).await {
                Ok(errors) => failed.extend(errors),
                // The S3 interface of Google Cloud Storage has no DeleteObjects.
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    for key in several {
                        failed.extend(self.delete_one(key, None).await.err().map(|error| ((*key).clone(), error)));
                    }
                }
                Err(error) => return Err(error),
            },
        }
        for key in single {
            failed.extend(self.delete_one(key, None).await.err().map(|error| (key.clone(), error)));
        }
        Ok(failed)
    }

    /// DeleteObject, with If-Match where a version is given. One that does not exist is no error.
    pub(super) async fn delete_one(&self, key: &str, version: Option<&Version>) -> Result<()> {
        let operation = Operation::Delete;
        let request = self.sdk(operation).await?.delete_object().bucket(&self.name).key(key);
        let request = request.set_if_match(version.map(|version| version.as_str().to_owned()));
        let request = request.set_request_payer(self.request_payer());
        match self.sdk_answer(operation, Some(key), request.send()).await {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    async fn delete_several(&self, keys: &[&String]) -> Result<Vec<(String, Error)>> {
        let operation = Operation::Delete;
        let identifiers = keys.iter().map(|key| ObjectIdentifier::builder().key(*key).build().expect("it has a key"));
        let delete = Delete::builder().set_objects(Some(identifiers.collect())).quiet(true).build();
        let request = self.sdk(operation).await?.delete_objects().bucket(&self.name);
        let request = request.delete(delete.expect("it has objects")).set_request_payer(self.request_payer());
        let answer = self.sdk_answer(operation, None, request.send()).await?;
        let failed = answer.errors.unwrap_or_default().into_iter().filter_map(|failed| {
            let key = failed.key?;
            let kind = super::answer::kind_of(operation, 200, failed.code.as_deref());
            let kind = if failed.code.as_deref() == Some("AccessDenied") { ErrorKind::AccessDenied } else { kind };
            let error = self.error(kind, operation, Some(&key), failed.message.as_deref().unwrap_or_default());
            (kind != ErrorKind::NotFound).then(|| (key, error.with_status(200, failed.code)))
        });
        Ok(failed.collect())
    }

    pub(super) fn request_payer(&self) -> Option<RequestPayer> {
        self.account.config.requester_pays.then_some(RequestPayer::Requester)
    }

    pub(super) fn server_side_encryption(&self) -> (Option<ServerSideEncryption>, Option<String>) {
        match &self.account.config.encryption {
            Encryption::Bucket | Encryption::CustomerKeyFile(_) => (None, None),
            Encryption::Aes256 => (Some(ServerSideEncryption::Aes256), None),
            Encryption::Kms { key_id, dual_layer: true } => (Some(ServerSideEncryption::AwsKmsDsse), key_id.clone()),
            Encryption::Kms { key_id, dual_layer: false } => (Some(ServerSideEncryption::AwsKms), key_id.clone()),
        }
    }

    /// The SDK's answer, or the error that its failure is.
    pub(super) async fn sdk_answer<T, E: std::error::Error + Send + Sync + 'static>(
        &self,
        operation: Operation,
        key: Option<&str>,
        call: impl Future<Output = std::result::Result<T, SdkError<E, HttpResponse>>>,
    ) -> Result<T> {
        let address = self.address(operation).await?;
        let signer = self.signer(operation, &address).await?;
        let skew_s = self.account.skew_s();
        let error = match call.await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let Some(raw) = error.raw_response() else { return Err(self.sdk_failure(operation, key, error)) };
        let header = |name: &str| raw.headers().get(name).map(str::to_owned);
        let used = Used { region: &address.region, skew_s, generation: signer.map(|(_, generation)| generation) };
        let text = raw.body().bytes().unwrap_or_default();
        Err(self.refusal(operation, key, raw.status().as_u16(), text, header, used).await)
    }

    fn sdk_failure<E: std::error::Error + Send + Sync + 'static>(
        &self,
        operation: Operation,
        key: Option<&str>,
        error: SdkError<E, HttpResponse>,
    ) -> Error {
        if let Some(refusal) = undialed(&error) {
            return self.failure(operation, key, refused(refusal));
        }
        let kind = match &error {
            SdkError::TimeoutError(_) => ErrorKind::Timeout,
            SdkError::DispatchFailure(failure) => match failure.as_connector_error() {
                Some(connector) if ConnectorError::is_timeout(connector) => ErrorKind::Timeout,
                Some(connector) if connector.is_user() => ErrorKind::InvalidRequest,
                _ => ErrorKind::Reset,
            },
            SdkError::ResponseError(_) => ErrorKind::Protocol,
            SdkError::ConstructionFailure(_) => ErrorKind::Config,
            _ => ErrorKind::InvalidRequest,
        };
        self.error(kind, operation, key, "the SDK failed").with_source(Chain(error))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use torchobj_core::store::ObjectStore;
    use torchobj_core::types::ListRequest;

    use crate::config::S3Config;
    use crate::fake::{Fake, answer};
    use crate::s3::{Account, S3Store};

    use super::*;

    fn store(endpoint_url: &str, force_sdk: bool) -> S3Store {
        let endpoint_url = Some(endpoint_url.to_owned());
        let config = S3Config { endpoint_url, anonymous: true, force_sdk, ..S3Config::default() };
        S3Store::new(Arc::new(Account::new(config).unwrap()), "b")
    }

    #[tokio::test]
    async fn a_connection_that_is_refused_is_the_same_error_through_the_sdk() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let ours = store(&url, false).head("k").await.unwrap_err();
        let sdks = store(&url, true).head("k").await.unwrap_err();
        assert_eq!(sdks.kind(), ErrorKind::Connect);
        assert_eq!(sdks.to_string(), ours.to_string());
    }

    #[tokio::test]
    async fn a_tls_handshake_that_fails_is_the_same_error_through_the_sdk() {
        let fake = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("https://{}", fake.local_addr().unwrap());
        std::thread::spawn(move || {
            for socket in fake.incoming() {
                let _ = std::io::Write::write_all(&mut socket.unwrap(), b"HTTP/1.1 400 Bad Request\r\n\r\n");
            }
        });
        let ours = store(&url, false).head("k").await.unwrap_err();
        let sdks = store(&url, true).head("k").await.unwrap_err();
        assert_eq!(ours.kind(), ErrorKind::InvalidRequest, "{ours}");
        assert_eq!((sdks.kind(), sdks.to_string()), (ours.kind(), ours.to_string()));
    }

    #[tokio::test]
    async fn a_listing_that_goes_on_and_does_not_say_where_is_no_whole_listing() {
        let fake = Fake::start(|head| {
            let root = if head.contains("uploads") { "ListMultipartUploadsResult" } else { "ListBucketResult" };
            answer(200, "", &format!("<{root}><IsTruncated>true</IsTruncated></{root}>"))
        })
        .await;
        for force_sdk in [false, true] {
            let store = store(&fake.url, force_sdk);
            assert_eq!(store.list(ListRequest::default()).await.unwrap_err().kind(), ErrorKind::Protocol);
            assert_eq!(store.uploads("").await.unwrap_err().kind(), ErrorKind::Protocol);
        }
    }
}
