//! Sends requests through the AWS SDK, and converts its outputs and errors. `requests` has the frequent requests, which the
//! SDK sends only if it must.

use aws_sdk_s3::error::SdkError;
use aws_sdk_s3::types::{ChecksumAlgorithm, RequestPayer, ServerSideEncryption};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_runtime_api::client::result::ConnectorError;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};

use super::bucket::Bucket;
use super::checksum::Algorithm;
use super::connector::{PageError, dial_error};
use super::error::ErrorDocument;
use crate::config::Encryption;
use crate::http::{Chain, ErrorResponse, OTHER_SERVER, connect_failure, error_of};

/// Adds the headers of SSE-C to a request.
macro_rules! customer_key {
    ($bucket:ident, $request:ident) => {
        match &$bucket.account.customer_key {
            None => $request,
            Some(customer) => $request
                .sse_customer_algorithm("AES256")
                .sse_customer_key(&customer.key)
                .sse_customer_key_md5(&customer.md5),
        }
    };
}

/// Adds the headers of attributes and encryption to a request that creates an object.
macro_rules! new_object {
    ($bucket:ident, $request:expr, $attributes:expr) => {{
        let (encryption, key_id) = $bucket.server_side_encryption();
        let request = $request
            .content_type($attributes.content_type.as_deref().unwrap_or("application/octet-stream"))
            .set_content_encoding($attributes.content_encoding.clone())
            .set_content_disposition($attributes.content_disposition.clone())
            .set_content_language($attributes.content_language.clone())
            .set_cache_control($attributes.cache_control.clone())
            .set_storage_class($bucket.storage_class($attributes).map(aws_sdk_s3::types::StorageClass::from))
            .set_server_side_encryption(encryption)
            .set_ssekms_key_id(key_id)
            .set_request_payer($bucket.request_payer());
        customer_key!($bucket, request)
    }};
}

mod requests;

pub(super) use {customer_key, new_object};

impl From<Algorithm> for ChecksumAlgorithm {
    fn from(algorithm: Algorithm) -> Self {
        Self::from(algorithm.element().trim_start_matches("Checksum"))
    }
}

impl Bucket {
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

    /// Returns the output of an SDK call, or converts its error.
    pub(super) async fn sdk_output<T, E: std::error::Error + Send + Sync + 'static>(
        &self,
        operation: Operation,
        key: Option<&str>,
        call: impl Future<Output = std::result::Result<T, SdkError<E, HttpResponse>>>,
    ) -> Result<T> {
        let dialect = self.dialect(operation).await?;
        let error = match call.await {
            Ok(output) => return Ok(output),
            Err(error) => error,
        };
        let Some(raw) = error.raw_response() else { return Err(self.sdk_failure(operation, key, error)) };
        let header = |name: &str| raw.headers().get(name).map(str::to_owned);
        let body = raw.body().bytes().unwrap_or_default();
        if raw.status().is_success() && ErrorDocument::parse(body).code.is_none() {
            // A response that the SDK cannot parse.
            let head = (raw.status().as_u16(), raw.headers().get("content-type"));
            let unexpected = self.unexpected(operation, key, head, body, "the AWS SDK failed");
            return Err(match unexpected.kind() {
                ErrorKind::OtherServer => unexpected,
                _ => unexpected.with_source(Chain(error)),
            });
        }
        let response = ErrorResponse { status: raw.status().as_u16(), header: &header, body };
        Err(error_of(&dialect, operation, key, &response).await)
    }

    fn sdk_failure<E: std::error::Error + Send + Sync + 'static>(
        &self,
        operation: Operation,
        key: Option<&str>,
        error: SdkError<E, HttpResponse>,
    ) -> Error {
        if let Some(cause) = dial_error(&error) {
            return self.failure(operation, key, connect_failure(cause));
        }
        let mut causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        if let Some(page) = causes.find_map(|cause| cause.downcast_ref::<PageError>()) {
            return self.error(ErrorKind::OtherServer, operation, key, &page.to_string()).with_hint(OTHER_SERVER);
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
        self.error(kind, operation, key, "the AWS SDK failed").with_source(Chain(error))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use torchobj_core::store::ObjectStore;
    use torchobj_core::types::ListRequest;

    use crate::config::S3Config;
    use crate::fake::{Fake, http_response};
    use crate::s3::{Account, S3Store};

    use super::*;

    fn store(endpoint_url: &str, force_sdk: bool) -> S3Store {
        let endpoint_url = Some(endpoint_url.to_owned());
        let config = S3Config { endpoint_url, anonymous: true, force_sdk, ..S3Config::default() };
        S3Store::new(Arc::new(Account::new(config).unwrap()), "b")
    }

    #[tokio::test]
    async fn a_refused_connection_is_the_same_error_through_the_sdk() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let ours = store(&url, false).head("k").await.unwrap_err();
        let sdks = store(&url, true).head("k").await.unwrap_err();
        assert_eq!(sdks.kind(), ErrorKind::Connect);
        assert_eq!(sdks.to_string(), ours.to_string());
    }

    #[tokio::test]
    async fn a_failed_tls_handshake_is_the_same_error_through_the_sdk() {
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
    async fn a_truncated_listing_without_a_continuation_is_an_error() {
        let fake = Fake::start(|head| {
            let root = if head.contains("uploads") { "ListMultipartUploadsResult" } else { "ListBucketResult" };
            http_response(200, "", &format!("<{root}><IsTruncated>true</IsTruncated></{root}>"))
        })
        .await;
        for force_sdk in [false, true] {
            let store = store(&fake.url, force_sdk);
            assert_eq!(store.list(ListRequest::default()).await.unwrap_err().kind(), ErrorKind::Protocol);
            assert_eq!(store.uploads("").await.unwrap_err().kind(), ErrorKind::Protocol);
        }
    }
}
