//! One bucket: where it is, and what signs for it. What can be asked of it stands in the rooms beside.

use std::fmt;
use std::sync::{Arc, OnceLock, RwLock};

use tokio::sync::Mutex;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::Payload;

use super::account::{Account, DEFAULT_REGION};
use super::answer::ServerError;
use super::endpoint::{Address, is_region};
use super::request::push_request_line;
use super::sign::Signer;
use crate::http::{Chain, shown};

/// A signer, and the generation of credentials that it signs with.
pub(super) type Signing = (Arc<Signer>, u64);

/// A bucket of an account.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) account: Arc<Account>,
    pub(super) name: String,
    known: RwLock<Known>,
    /// One resolution at a time.
    resolving: Mutex<()>,
    by_sdk: OnceLock<bool>,
}

/// What was found out. The SDK's client is in no `Debug`: it shows where credentials come from.
#[derive(Default)]
struct Known {
    /// The region that the store itself told.
    region: Option<String>,
    address: Option<Arc<Address>>,
    signing: Option<Signing>,
    sdk: Option<aws_sdk_s3::Client>,
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { region, address, .. } = self;
        f.debug_struct("Known").field("region", region).field("address", address).finish_non_exhaustive()
    }
}

impl Bucket {
    pub(super) fn new(account: Arc<Account>, name: &str) -> Self {
        let (known, resolving, by_sdk) = (RwLock::default(), Mutex::default(), OnceLock::new());
        Self { account, name: name.to_owned(), known, resolving, by_sdk }
    }

    /// Whether it is one of S3 Express, or an access point to one: they list in no order (user guide, "Directory buckets").
    pub(super) fn is_directory_bucket(&self) -> bool {
        self.name.ends_with("--x-s3") || self.name.ends_with("-xa-s3")
    }

    /// The URL of a key, or of the bucket.
    pub(super) fn url_of(&self, key: Option<&str>) -> String {
        ["s3://", &self.name, "/", key.unwrap_or_default()].concat()
    }

    /// Whether the SDK makes all requests: by the setting, or because we cannot sign them.
    pub(super) async fn by_sdk(&self) -> Result<bool> {
        if let Some(by_sdk) = self.by_sdk.get() {
            return Ok(*by_sdk);
        }
        let by_sdk = self.account.config.force_sdk || self.address(Operation::Connect).await?.sdk_only;
        Ok(*self.by_sdk.get_or_init(|| by_sdk))
    }

    /// Where the bucket is.
    pub(super) async fn address(&self, operation: Operation) -> Result<Arc<Address>> {
        if let Some(address) = &self.known.read().expect("no holder of this lock panics").address {
            return Ok(address.clone());
        }
        let _resolving = self.resolving.lock().await;
        let learnt = {
            let known = self.known.read().expect("no holder of this lock panics");
            if let Some(address) = &known.address {
                return Ok(address.clone());
            }
            known.region.clone()
        };
        let environment = self.account.environment().await;
        let region = match learnt.or_else(|| environment.region.clone()) {
            Some(region) => region,
            None => self.find_region(operation).await?,
        };
        let address = Arc::new(self.account.resolve(environment, &self.name, &region).await?);
        self.known.write().expect("no holder of this lock panics").address = Some(address.clone());
        Ok(address)
    }

    /// Asks S3 in which region the bucket is: anybody may, and every answer says it, also a refusal.
    pub(super) async fn find_region(&self, operation: Operation) -> Result<String> {
        let environment = self.account.environment().await;
        let address = self.account.resolve(environment, &self.name, DEFAULT_REGION).await?;
        let mut head = Vec::new();
        push_request_line(&mut head, &address.line, "HEAD", &address.host, &address.path_of(None), b"");
        head.extend_from_slice(format!("host: {}\r\nuser-agent: torchobj\r\n\r\n", address.host).as_bytes());
        let failed = |failure| self.failure(operation, None, failure);
        let mut lease = address.line.lease().await.map_err(failed)?;
        let status = lease.connection().exchange(&head, Payload::default().pieces(), true).await.map_err(failed)?;
        match (lease.header("x-amz-bucket-region"), status) {
            (Some(region), _) if is_region(region) => {
                log::info!("{} is in region {region}", self.url_of(None));
                Ok(region.to_owned())
            }
            (Some(region), _) => {
                let message = format!("x-amz-bucket-region is not a valid region: {}", shown(region, 64));
                Err(self.error(ErrorKind::Protocol, operation, None, &message).with_status(status, None))
            }
            (None, 404) => {
                let message = "no such bucket";
                Err(self.error(ErrorKind::NoBucket, operation, None, message).with_status(status, None))
            }
            (None, 500..) => {
                Err(super::answer::error(operation, self.url_of(None), status, ServerError::default(), |_| None))
            }
            (None, _) => Ok(DEFAULT_REGION.to_owned()),
        }
    }

    /// The store said in which region the bucket is.
    pub(super) fn learn_region(&self, region: &str) {
        let mut known = self.known.write().expect("no holder of this lock panics");
        if known.region.as_deref() != Some(region) && is_region(region) {
            log::warn!("{} is in region {region}: set region to save the detour", self.url_of(None));
            *known = Known { region: Some(region.to_owned()), ..Known::default() };
        }
    }

    /// What signs requests to `address`; `None` when they are not signed.
    pub(super) async fn signer(&self, operation: Operation, address: &Arc<Address>) -> Result<Option<Signing>> {
        let environment = self.account.environment().await;
        let Some(credentials) = &environment.credentials else { return Ok(None) };
        let loaded = match credentials.current().await {
            Ok(loaded) => loaded,
            Err(error) => {
                let hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role, or \
                    S3Options(anonymous=True) for a public bucket";
                let message = match self.account.missing_profile().await {
                    Some(profile) => format!("the profile {profile:?} does not exist; no credentials"),
                    None => "no credentials".to_owned(),
                };
                let error = self.error(ErrorKind::Credentials, operation, None, &message).with_source(Chain(error));
                return Err(error.with_hint(hint));
            }
        };
        {
            let known = self.known.read().expect("no holder of this lock panics");
            let current = known.address.as_ref().is_some_and(|known| Arc::ptr_eq(known, address));
            match &known.signing {
                Some(signing) if signing.1 == loaded.generation && current => return Ok(Some(signing.clone())),
                _ => {}
            }
        }
        let signer = Signer::new(loaded.identity.clone(), address.region.clone(), address.service.clone());
        let signing = (Arc::new(signer), loaded.generation);
        let mut known = self.known.write().expect("no holder of this lock panics");
        if known.address.as_ref().is_some_and(|known| Arc::ptr_eq(known, address)) {
            known.signing = Some(signing.clone());
        }
        Ok(Some(signing))
    }

    /// The SDK's client for the bucket's region.
    pub(super) async fn sdk(&self, operation: Operation) -> Result<aws_sdk_s3::Client> {
        let address = self.address(operation).await?;
        if let Some(sdk) = &self.known.read().expect("no holder of this lock panics").sdk {
            return Ok(sdk.clone());
        }
        let sdk = self.account.sdk(self.account.environment().await, &address.region);
        self.known.write().expect("no holder of this lock panics").sdk = Some(sdk.clone());
        Ok(sdk)
    }
}
