//! Server-side copies.

use std::time::Duration;

use serde::Deserialize;
use tokio::time::sleep;
use torchobj_core::error::{ErrorKind, Operation, Result, Retry};
use torchobj_core::types::{Payload, Version};
use torchobj_core::url::ObjectUrl;

use super::request::{Bucket, path_in};
use super::resource::{Resource, or_default};

/// Maximum number of failed steps of one copy that are repeated, and the pause before the first repetition.
const MAX_FAILURES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);

/// The response to one step of a copy.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Rewritten {
    #[serde(default, deserialize_with = "or_default")]
    done: bool,
    rewrite_token: Option<String>,
    resource: Option<Resource>,
}

impl Bucket {
    /// Copies an object with its attributes. A large object, or one of another location or storage class, takes several
    /// requests, each of which continues where the previous one stopped.
    pub(super) async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        let operation = Operation::Copy;
        if source.scheme != "gs" {
            let message = format!("cannot copy from {source}: another provider");
            return Err(self.error(ErrorKind::Unsupported, operation, Some(key), &message));
        }
        let mut path = path_in(&source.bucket, "/o/", &source.key);
        path.extend_from_slice(b"/rewriteTo/");
        path.extend_from_slice(&self.path("/o/", key)[b"storage/v1/".len()..]);
        let kms_key = self.account.config.kms_key_name.as_deref().map(|name| ("destinationKmsKeyName", name));
        let (payload, mut token, mut failures) = (Payload::default(), None::<String>, 0);
        loop {
            let rewrite_token = token.as_deref().map(|token| ("rewriteToken", token));
            let query: Vec<_> = kms_key.into_iter().chain(rewrite_token).collect();
            let request = self.request(operation, "POST", Some(key), path.clone(), &query, Vec::new(), &payload);
            let step = match self.json::<Rewritten>(&request).await {
                // The token continues where the last step stopped; another attempt of the caller would begin again.
                Err(error) if token.is_some() && failures < MAX_FAILURES && error.retry() != Retry::Never => {
                    failures += 1;
                    sleep(PAUSE * failures).await;
                    continue;
                }
                step => step?,
            };
            match step {
                Rewritten { done: true, resource: Some(resource), .. } => {
                    if resource.name != key {
                        let message = format!("the response is for the object {:?}", resource.name);
                        return Err(self.protocol(operation, key, &message));
                    }
                    return self.version_of(operation, key, &resource);
                }
                Rewritten { done: false, rewrite_token: Some(next), .. } => token = Some(next),
                _ => return Err(self.protocol(operation, key, "the response has neither an object nor a token")),
            }
        }
    }
}
