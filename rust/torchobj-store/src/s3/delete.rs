//! Deletes objects, through the SDK.

use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::types::Version;

use super::bucket::Bucket;
use super::error::kind_of;

impl Bucket {
    /// DeleteObject, or DeleteObjects for several.
    pub(super) async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        // XML 1.0 does not allow these characters, so DeleteObjects cannot contain such keys.
        let is_forbidden = |character: char| character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}');
        let (single, several): (Vec<_>, Vec<_>) = keys.iter().partition(|key| key.chars().any(is_forbidden));
        let mut failed = Vec::new();
        match several.as_slice() {
            [] => {}
            [key] => failed.extend(self.delete_one(key, None).await.err().map(|error| ((*key).clone(), error))),
            several => match self.delete_several(several).await {
                Ok(errors) => failed.extend(errors),
                // The XML API of Google Cloud Storage does not support DeleteObjects.
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

    /// DeleteObject, with If-Match if `version` is given. Succeeds if the object does not exist.
    pub(super) async fn delete_one(&self, key: &str, version: Option<&Version>) -> Result<()> {
        let operation = Operation::Delete;
        let request = self.sdk(operation).await?.delete_object().bucket(&self.name).key(key);
        let request = request.set_if_match(version.map(|version| version.as_str().to_owned()));
        let request = request.set_request_payer(self.request_payer());
        match self.sdk_output(operation, Some(key), request.send()).await {
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
        let output = self.sdk_output(operation, None, request.send()).await?;
        let errors = output.errors.unwrap_or_default();
        // A retry must not delete another key.
        if let Some(other) = errors.iter().filter_map(|failed| failed.key.as_ref()).find(|key| !keys.contains(key)) {
            let message = "the response names a key that was not requested";
            return Err(self.error(ErrorKind::Protocol, operation, Some(other), message));
        }
        let failed = errors.into_iter().filter_map(|failed| {
            let key = failed.key?;
            let kind = kind_of(operation, 200, failed.code.as_deref());
            let kind = if failed.code.as_deref() == Some("AccessDenied") { ErrorKind::AccessDenied } else { kind };
            let error = self.error(kind, operation, Some(&key), failed.message.as_deref().unwrap_or_default());
            (kind != ErrorKind::NotFound).then(|| (key, error.with_status(200, failed.code)))
        });
        Ok(failed.collect())
    }
}
