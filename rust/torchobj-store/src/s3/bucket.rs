//! A bucket: its address, region, signer and SDK client, cached. Its operations are in the other modules.

use std::borrow::Cow;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, RwLock};

use tokio::sync::Mutex;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::types::{Payload, Version};

use super::config::Account;
use super::endpoint::{Address, is_region};
use super::error::refusal;
use super::sign::{DEFAULT_REGION, Signer};
use super::xml;
use crate::credentials::{Refused, described};
use crate::http::{
    Anonymous, ErrorResponse, Failure, Headers, OTHER_SERVER, Request, encode, exchange, is_page, refuse, sanitize,
};

/// A signer, and the generation of its credentials.
pub(super) type Signing = (Arc<Signer>, u64);

/// A bucket of an account.
pub(super) struct Bucket {
    pub(super) account: Arc<Account>,
    pub(super) name: String,
    cache: RwLock<Cache>,
    /// Held while the address is resolved, so that this is done once.
    resolving: Mutex<()>,
    by_sdk: OnceLock<bool>,
    /// Whether the server has refused DeleteObjects.
    pub(super) no_bulk_delete: AtomicBool,
}

/// Cached state of a bucket.
#[derive(Default)]
struct Cache {
    /// The region, if a response of the store contained it.
    region: Option<String>,
    address: Option<Arc<Address>>,
    signing: Option<Signing>,
    sdk: Option<aws_sdk_s3::Client>,
}

impl Bucket {
    pub(super) fn new(account: Arc<Account>, name: &str) -> Self {
        let (cache, resolving, by_sdk) = (RwLock::default(), Mutex::default(), OnceLock::new());
        Self { account, name: name.to_owned(), cache, resolving, by_sdk, no_bulk_delete: AtomicBool::new(false) }
    }

    /// Returns whether this is a directory bucket (S3 Express) or an access point of one. Their listings are not ordered (user
    /// guide, "Directory buckets").
    pub(super) fn is_directory_bucket(&self) -> bool {
        self.name.ends_with("--x-s3") || self.name.ends_with("-xa-s3")
    }

    /// The URL of a key or of the bucket; `s3://` without a bucket.
    pub(super) fn url_of(&self, key: Option<&str>) -> String {
        if self.name.is_empty() {
            return "s3://".to_owned();
        }
        ["s3://", &self.name, "/", key.unwrap_or_default()].concat()
    }

    /// An error of an operation on a key or on the bucket.
    pub(super) fn error(&self, kind: ErrorKind, operation: Operation, key: Option<&str>, message: &str) -> Error {
        Error::new(kind, operation, self.url_of(key), sanitize(message, 1000))
    }

    /// The error of an operation whose exchange failed.
    pub(super) fn failure(&self, operation: Operation, key: Option<&str>, failure: Failure) -> Error {
        failure.into_error(operation, self.url_of(key))
    }

    /// The version in a response about an object, which must have one.
    ///
    /// # Errors
    /// `OtherServer`: S3 always sends an ETag, a login page of a proxy has none.
    pub(super) fn version_of(&self, operation: Operation, key: &str, etag: Option<Version>) -> Result<Version> {
        etag.ok_or_else(|| self.missing(operation, key, "ETag"))
    }

    /// The error of a response without `what`, which S3 and compatible servers always send.
    pub(super) fn missing(&self, operation: Operation, key: &str, what: &str) -> Error {
        let message = format!("the response has no {what}, which S3 and compatible servers always send");
        self.error(ErrorKind::OtherServer, operation, Some(key), &message).with_hint(OTHER_SERVER)
    }

    /// The error of a successful response whose document is not the expected one. Only damaged XML, and an empty body, are
    /// requested again.
    pub(super) fn unexpected(
        &self,
        operation: Operation,
        key: Option<&str>,
        (status, content_type): (u16, Option<&str>),
        document: &[u8],
        problem: &str,
    ) -> Error {
        if is_page(document, content_type, "<?xml", "xml") {
            let message = "the response is a page, and not the XML that S3 always sends";
            return refuse(self.error(ErrorKind::OtherServer, operation, key, message), status, content_type);
        }
        let error = self.error(ErrorKind::Protocol, operation, key, problem).with_status(status, None);
        let is_whole = !document.trim_ascii_start().is_empty() && xml::for_each_element(document, |_, _| {}).is_ok();
        if is_whole { error.permanent() } else { error }
    }

    /// A request for `key` or for the bucket. Headers that begin with `x-amz-` are signed.
    pub(super) fn request<'a>(
        &self,
        operation: Operation,
        method: &'static str,
        key: Option<&'a str>,
        query: &'a [(&'a str, &'a str)],
        mut headers: Headers<'a>,
        payload: &'a Payload,
    ) -> Request<'a> {
        let mut path = Vec::new();
        encode::key_into(&mut path, key.unwrap_or_default());
        if self.account.config.requester_pays {
            headers.push(("x-amz-request-payer", Cow::Borrowed("requester")));
        }
        Request { operation, method, key, path, query, headers, payload }
    }

    /// Returns whether the SDK sends all requests: if `force_sdk` is set, or if only the SDK can sign them.
    pub(super) async fn by_sdk(&self) -> Result<bool> {
        if let Some(by_sdk) = self.by_sdk.get() {
            return Ok(*by_sdk);
        }
        let by_sdk = self.account.config.force_sdk || self.address(Operation::Connect).await?.sdk_only;
        Ok(*self.by_sdk.get_or_init(|| by_sdk))
    }

    /// The address of the bucket.
    pub(super) async fn address(&self, operation: Operation) -> Result<Arc<Address>> {
        if let Some(address) = &self.cache.read().expect("no holder of this lock panics").address {
            return Ok(address.clone());
        }
        let _resolving = self.resolving.lock().await;
        let region = {
            let cache = self.cache.read().expect("no holder of this lock panics");
            if let Some(address) = &cache.address {
                return Ok(address.clone());
            }
            cache.region.clone()
        };
        let environment = self.account.environment().await;
        let region = match region.or_else(|| environment.region.clone()) {
            Some(region) => region,
            None if self.name.is_empty() => DEFAULT_REGION.to_owned(),
            None => self.find_region(operation).await?,
        };
        let address = Arc::new(self.account.resolve(environment, &self.name, &region).await?);
        self.cache.write().expect("no holder of this lock panics").address = Some(address.clone());
        Ok(address)
    }

    /// The endpoint with the path of its buckets; empty before the first request.
    pub(super) fn endpoint(&self) -> String {
        let cache = self.cache.read().expect("no holder of this lock panics");
        let origin = cache.address.as_ref().map(|address| &address.origin);
        origin.map_or(String::new(), |origin| format!("{}{}", origin.url(), String::from_utf8_lossy(&origin.path)))
    }

    /// Requests the region of the bucket. S3 sends it in every response, even without permissions.
    pub(super) async fn find_region(&self, operation: Operation) -> Result<String> {
        let environment = self.account.environment().await;
        let address = self.account.resolve(environment, &self.name, DEFAULT_REGION).await?;
        let payload = Payload::default();
        let request = self.request(operation, "HEAD", None, &[], Vec::new(), &payload);
        let response = exchange(&request, &address.origin, &Anonymous).await;
        let response = response.map_err(|failure| self.failure(operation, None, failure))?;
        let status = response.status;
        match (response.header("x-amz-bucket-region"), status) {
            (Some(region), _) if is_region(region) => {
                log::info!("{} is in region {region}", self.url_of(None));
                Ok(region.to_owned())
            }
            (Some(region), _) => {
                let message = format!("x-amz-bucket-region is not a valid region: {}", sanitize(region, 64));
                Err(self.error(ErrorKind::Protocol, operation, None, &message).with_status(status, None).permanent())
            }
            (None, 404) => {
                let message = "the bucket does not exist";
                Err(self.error(ErrorKind::NoBucket, operation, None, message).with_status(status, None))
            }
            (None, 500..) => {
                let response = ErrorResponse { status, header: &|_| None, body: b"" };
                let refusal = refusal(operation, &response, &self.account.config);
                Err(refusal.into_error(operation, self.url_of(None), &response))
            }
            (None, _) => Ok(DEFAULT_REGION.to_owned()),
        }
    }

    /// Sets the region to that in a response of the store.
    pub(super) fn set_region(&self, region: &str) {
        let mut cache = self.cache.write().expect("no holder of this lock panics");
        if cache.region.as_deref() != Some(region) && is_region(region) {
            log::warn!("{} is in region {region}: set region to avoid redirects", self.url_of(None));
            *cache = Cache { region: Some(region.to_owned()), ..Cache::default() };
        }
    }

    /// The signer of requests to `address`; `None`: requests are not signed.
    pub(super) async fn signer(&self, operation: Operation, address: &Arc<Address>) -> Result<Option<Signing>> {
        let environment = self.account.environment().await;
        let Some(credentials) = &environment.credentials else { return Ok(None) };
        let loaded = match credentials.current().await {
            Ok(loaded) => loaded,
            Err(error) if self.account.config.credential_provider.is_some() && !error.is::<Refused>() => {
                let failed = self.error(ErrorKind::Credentials, operation, None, "no credentials");
                return Err(failed.with_source(error));
            }
            Err(error) => {
                let hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE to a profile of `aws configure` or \
                    `aws sso login`, or S3Options(anonymous=True) for a public bucket";
                let (message, hint) = described(&error, hint);
                return Err(self.error(ErrorKind::Credentials, operation, None, &message).with_hint(hint));
            }
        };
        {
            let cache = self.cache.read().expect("no holder of this lock panics");
            let current = cache.address.as_ref().is_some_and(|cached| Arc::ptr_eq(cached, address));
            match &cache.signing {
                Some(signing) if signing.1 == loaded.generation && current => return Ok(Some(signing.clone())),
                _ => {}
            }
        }
        let signer = Signer::new(loaded.identity.clone(), address.region.clone(), address.service.clone());
        let signing = (Arc::new(signer), loaded.generation);
        let mut cache = self.cache.write().expect("no holder of this lock panics");
        if cache.address.as_ref().is_some_and(|cached| Arc::ptr_eq(cached, address)) {
            cache.signing = Some(signing.clone());
        }
        Ok(Some(signing))
    }

    /// The SDK client for the region of the bucket.
    pub(super) async fn sdk(&self, operation: Operation) -> Result<aws_sdk_s3::Client> {
        let address = self.address(operation).await?;
        if let Some(sdk) = &self.cache.read().expect("no holder of this lock panics").sdk {
            return Ok(sdk.clone());
        }
        let sdk = self.account.sdk(self.account.environment().await, &address.region);
        self.cache.write().expect("no holder of this lock panics").sdk = Some(sdk.clone());
        Ok(sdk)
    }
}
