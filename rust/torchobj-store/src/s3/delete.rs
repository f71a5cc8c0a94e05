//! Deletes objects: several with one DeleteObjects request, or one by one through the SDK.

use std::borrow::Cow;
use std::sync::atomic::Ordering;

use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use quick_xml::escape::escape;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::types::{Payload, Version};

use super::bucket::Bucket;
use super::checksum::md5;
use super::error::kind_of;
use super::xml;
use crate::config::Checksum;

/// Number of concurrent deletes of one call, which holds one permit.
const CONCURRENT: usize = 16;

/// Maximum size of the response to DeleteObjects: an error for each of 1000 keys of 1024 bytes, each of which may be escaped.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// An error in the response to DeleteObjects.
#[derive(Default)]
struct Failed {
    key: String,
    code: String,
    message: String,
}

impl Bucket {
    /// Deletes objects: one with DeleteObject, several with DeleteObjects, if the server supports it.
    pub(super) async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        // XML 1.0 does not allow these characters, so DeleteObjects cannot contain such keys.
        let is_forbidden = |character: char| character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}');
        let (mut single, several): (Vec<_>, Vec<_>) = keys.iter().partition(|key| key.chars().any(is_forbidden));
        let (mut failed, mut refused) = (Vec::new(), None);
        if several.len() <= 1 || self.no_bulk_delete.load(Ordering::Relaxed) {
            single.extend(several);
        } else {
            let by_sdk = self.by_sdk().await?;
            let deleted =
                if by_sdk { self.sdk_delete_several(&several).await } else { self.delete_several(&several).await };
            match deleted {
                Ok(errors) => failed.extend(errors),
                Err(error) if is_unsupported(&error) => {
                    log::debug!("objects are deleted one by one, because {error}");
                    single.extend(&several);
                    refused = Some((error, several));
                }
                Err(error) => return Err(error),
            }
        }
        let delete = |key: &String| {
            let key = key.clone();
            async move { self.delete_one(&key, None).await.err().map(|error| (key, error)) }
        };
        let deletes: Vec<_> = single.into_iter().map(delete).collect();
        let singles = stream::iter(deletes).buffer_unordered(CONCURRENT).filter_map(std::future::ready);
        failed.extend(singles.collect::<Vec<_>>().await);
        if let Some((error, keys)) = refused
            && is_refused_always(&error)
            && failed.iter().all(|(key, _)| !keys.contains(&key))
        {
            self.no_bulk_delete.store(true, Ordering::Relaxed);
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

    /// DeleteObjects. The API requires a checksum of the body: custom endpoints may know only Content-MD5.
    async fn delete_several(&self, keys: &[&String]) -> Result<Vec<(String, Error)>> {
        let operation = Operation::Delete;
        let mut document = String::from("<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
        for key in keys {
            document.extend(["<Object><Key>", &escape(key.as_str()), "</Key></Object>"]);
        }
        document.push_str("<Quiet>true</Quiet></Delete>");
        let payload = Payload::from(Bytes::from(document));
        let body = payload.pieces().concat();
        let mut headers = vec![("content-type", Cow::Borrowed("application/xml"))];
        let endpoint = self.account.environment().await.endpoint_url.is_some();
        let is_explicit = matches!(self.account.config.checksum, Checksum::Crc32C | Checksum::Crc64Nvme);
        let algorithm = self.algorithm(None).await.filter(|_| is_explicit || !endpoint);
        if algorithm.is_none() || endpoint {
            headers.push(("content-md5", Cow::Owned(BASE64_STANDARD.encode(md5(&body)))));
        }
        if let Some(algorithm) = algorithm {
            headers.push((algorithm.header(), Cow::Owned(algorithm.encode(algorithm.of(&payload)))));
        }
        let request = self.request(operation, "POST", None, &[("delete", "")], headers, &payload);
        let failed = self.dialect(operation).await?.document(&request, MAX_RESPONSE_BYTES, failed_in).await?;
        self.failed_deletes(keys, failed)
    }

    /// DeleteObjects through the SDK, for requests that only it can sign.
    async fn sdk_delete_several(&self, keys: &[&String]) -> Result<Vec<(String, Error)>> {
        let operation = Operation::Delete;
        let identifiers = keys.iter().map(|key| ObjectIdentifier::builder().key(*key).build().expect("it has a key"));
        let delete = Delete::builder().set_objects(Some(identifiers.collect())).quiet(true).build();
        let request = self.sdk(operation).await?.delete_objects().bucket(&self.name);
        let request = request.delete(delete.expect("it has objects")).set_request_payer(self.request_payer());
        let output = self.sdk_output(operation, None, request.send()).await?;
        let failed = output.errors.unwrap_or_default().into_iter().map(|failed| Failed {
            key: failed.key.unwrap_or_default(),
            code: failed.code.unwrap_or_default(),
            message: failed.message.unwrap_or_default(),
        });
        self.failed_deletes(keys, failed.collect())
    }

    /// The errors in the response to DeleteObjects.
    fn failed_deletes(&self, keys: &[&String], failed: Vec<Failed>) -> Result<Vec<(String, Error)>> {
        let operation = Operation::Delete;
        // A retry must not delete another key.
        if let Some(other) = failed.iter().map(|failed| &failed.key).find(|key| !keys.contains(key)) {
            let message = "the response names a key that was not requested";
            return Err(self.error(ErrorKind::Protocol, operation, Some(other), message).permanent());
        }
        let failed = failed.into_iter().filter_map(|Failed { key, code, message }| {
            let kind = kind_of(operation, 200, Some(&code));
            let error = self.error(kind, operation, Some(&key), &message);
            (kind != ErrorKind::NotFound).then(|| (key, error.with_status(200, Some(code))))
        });
        Ok(failed.collect())
    }
}

/// Returns whether the server may delete the objects one by one although it refused DeleteObjects.
fn is_unsupported(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidRequest | ErrorKind::Integrity)
        && matches!(error.status(), Some(400 | 405 | 501))
}

/// Returns whether the server would refuse DeleteObjects again. Another status of 400 may be that of one request only, such as of
/// one that a proxy damaged.
fn is_refused_always(error: &Error) -> bool {
    error.kind() == ErrorKind::Unsupported || matches!(error.code(), Some("InvalidRequest" | "InvalidArgument"))
}

/// Parses the errors in `<DeleteResult>`.
fn failed_in(document: &[u8]) -> std::result::Result<Vec<Failed>, String> {
    let (mut failed, mut is_result) = (Vec::new(), false);
    let mut last = Failed::default();
    let parsed = xml::for_each_element(document, |path, text| {
        let (["DeleteResult", path @ ..], text) = (path, text.unwrap_or_default()) else { return };
        match path {
            [] => is_result = true,
            ["Error", "Key"] => text.clone_into(&mut last.key),
            ["Error", "Code"] => text.clone_into(&mut last.code),
            ["Error", "Message"] => text.clone_into(&mut last.message),
            ["Error"] => failed.push(std::mem::take(&mut last)),
            _ => {}
        }
    });
    parsed.map_err(|problem| problem.to_string())?;
    if is_result { Ok(failed) } else { Err("it is not the result of DeleteObjects".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_errors_of_single_keys_are_parsed_and_another_document_is_malformed() {
        let error =
            "<Error><Key>a&amp;b</Key><VersionId>v</VersionId><Code>AccessDenied</Code><Message>no</Message></Error>";
        let other = "<Error><Code>InternalError</Code><Key>c</Key></Error>";
        let text = format!("<DeleteResult><Deleted><Key>x</Key></Deleted>{error}{other}</DeleteResult>");
        let failed: Vec<_> = failed_in(text.as_bytes()).unwrap();
        let fields: Vec<_> = failed.iter().map(|failed| (failed.key.as_str(), failed.code.as_str())).collect();
        assert_eq!(fields, [("a&b", "AccessDenied"), ("c", "InternalError")]);
        for empty in ["<DeleteResult/>", "<DeleteResult></DeleteResult>", "<DeleteResult>\n</DeleteResult>"] {
            assert!(failed_in(empty.as_bytes()).unwrap().is_empty());
        }
        for wrong in ["", "<html></html>", "<Error><Code>SlowDown</Code></Error>", "<DeleteResult>"] {
            assert!(failed_in(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
