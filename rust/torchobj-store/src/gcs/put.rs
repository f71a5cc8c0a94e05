//! Writes objects in one request.

use std::borrow::Cow;

use bytes::Bytes;
use torchobj_core::error::{ErrorKind, Operation, Result, Retry};
use torchobj_core::types::{Attributes, Condition, Payload, PutOptions, Version};

use super::parts::PREFIX;
use super::request::Bucket;
use super::resource::{FIELDS, Resource, Written, crc32c, encode};
use crate::http::{encode::query_into, is_header_value, metadata_problem};

/// The condition of a write.
fn condition_parameter(condition: &Condition) -> Option<(&'static str, &str)> {
    match condition {
        Condition::Always => None,
        Condition::Absent => Some(("ifGenerationMatch", "0")),
        Condition::Matches(version) => Some(("ifGenerationMatch", version.as_str())),
    }
}

impl Bucket {
    /// Writes an object with its CRC32C.
    pub(super) async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        let operation = Operation::Put;
        let mut object = self.new_resource(operation, key, &options.attributes)?;
        key.clone_into(&mut object.name);
        let written = self
            .insert(operation, key, object, self.crc32c(operation, key, payload)?, payload, &options.condition)
            .await?;
        self.version_of(operation, key, &written)
    }

    /// CRC32C of a payload.
    ///
    /// # Errors
    /// `Integrity`: the memory was changed.
    pub(super) fn crc32c(&self, operation: Operation, key: &str, payload: &Payload) -> Result<u32> {
        let changed = || self.error(ErrorKind::Integrity, operation, Some(key), "the bytes differ from their CRC-32");
        crc32c(payload).ok_or_else(changed)
    }

    /// The version in the response to a write, which must have one.
    pub(super) fn version_of(&self, operation: Operation, key: &str, resource: &Resource) -> Result<Version> {
        let missing = || self.protocol(operation, key, "the response has no generation");
        resource.version().ok_or_else(missing)
    }

    /// The metadata of a new object.
    ///
    /// # Errors
    /// `Config`: metadata that no header can contain.
    pub(super) fn new_resource(&self, operation: Operation, key: &str, attributes: &Attributes) -> Result<Resource> {
        let refuse = |problem: &str| Err(self.error(ErrorKind::Config, operation, Some(key), problem));
        if let Some(problem) = metadata_problem(attributes) {
            return refuse(&problem);
        }
        let object = Resource::new(attributes, self.account.config.storage_class.as_deref());
        // The content type is part of the head of a body, and a response has all of them as headers.
        if object.headers().into_iter().flatten().any(|value| !is_header_value(value.as_bytes())) {
            return refuse("a content type or another header of the object has control characters");
        }
        Ok(object)
    }

    /// The parameters of a request that writes an object.
    pub(super) fn write_query<'a>(&'a self, condition: &'a Condition) -> Vec<(&'a str, &'a str)> {
        let key = self.account.config.kms_key_name.as_deref();
        condition_parameter(condition).into_iter().chain(key.map(|key| ("kmsKeyName", key))).collect()
    }

    /// Writes an object with this metadata and this CRC32C, which the server and [`verify`](Self::verify) compare, and returns its
    /// metadata. `key` is used in error messages.
    pub(super) async fn insert(
        &self,
        operation: Operation,
        key: &str,
        mut resource: Resource,
        crc32c: u32,
        payload: &Payload,
        condition: &Condition,
    ) -> Result<Resource> {
        let size = payload.len() as u64;
        if self.account.config.force_sdk {
            let made = self.sdk_insert(operation, key, &resource, crc32c, payload, condition).await?;
            let written = Written { name: &resource.name, nonce: resource.nonce(), size, crc32c };
            return self.verify(operation, key, &written, made).await;
        }
        resource.crc32c = Some(encode(crc32c));
        let boundary = format!("torchobj{:032x}", fastrand::u128(..));
        let content_type = format!("multipart/related; boundary={boundary}");
        let payload = related_body(&boundary, &resource, payload);
        let mut query = self.write_query(condition);
        query.extend([("uploadType", "multipart"), ("fields", FIELDS)]);
        let headers = vec![("content-type", Cow::Borrowed(content_type.as_str()))];
        let request = self.request(operation, "POST", Some(key), self.upload_path(), &query, headers, &payload);
        let made = self.json(&request).await?;
        let written = Written { name: &resource.name, nonce: resource.nonce(), size, crc32c };
        self.verify(operation, key, &written, made).await
    }

    /// Returns the metadata of an object that a request has written. What the response `made` omits is requested once. Deletes an
    /// object that differs, if its nonce or its name shows that this upload has created it. `key` is used in error messages.
    ///
    /// # Errors
    /// `Integrity` if the object differs, or if the store does not return its CRC32C; `Protocol` if its metadata cannot be read.
    pub(super) async fn verify(
        &self,
        operation: Operation,
        key: &str,
        written: &Written<'_>,
        mut made: Resource,
    ) -> Result<Resource> {
        let mut shown = written.is_shown_by(&made);
        if shown == Ok(false) {
            let generation = made.version();
            let found = self.resource_of(Operation::Head, key, written.name, generation.as_ref()).await;
            made = found.map_err(|error| {
                let message = "the response omits fields of the object, and its metadata could not be read";
                let unread = self.error(ErrorKind::Protocol, operation, Some(key), message);
                let unread = if error.retry() == Retry::Never { unread.permanent() } else { unread };
                unread.with_source(error)
            })?;
            shown = written.is_shown_by(&made);
        }
        let problem = match shown {
            Ok(true) => return Ok(made),
            Ok(false) => {
                let message = "the store does not return the size, the CRC32C and the metadata of the object, so it is not \
                     known whether the object is intact";
                return Err(self.error(ErrorKind::Integrity, operation, Some(key), message).permanent());
            }
            Err(problem) => problem,
        };
        let error = self.error(ErrorKind::Integrity, operation, Some(key), &problem);
        let is_own = made.name == written.name
            && (written.name.starts_with(PREFIX) || made.nonce().is_some() && made.nonce() == written.nonce);
        let Some(generation) = made.version().filter(|_| is_own) else { return Err(error) };
        match self.delete_one(written.name, Some(&generation)).await {
            Ok(()) => Err(error.with_hint("the object was deleted")),
            Err(problem) => Err(error.with_hint(format!("the object could not be deleted: {problem}"))),
        }
    }

    /// The path of requests that upload bytes.
    pub(super) fn upload_path(&self) -> Vec<u8> {
        let mut path = b"upload/storage/v1/b/".to_vec();
        query_into(&mut path, &self.name);
        path.extend_from_slice(b"/o");
        path
    }
}

/// The body of a multipart upload: the metadata and the bytes (JSON API, "Upload objects", "Multipart upload").
fn related_body(boundary: &str, resource: &Resource, payload: &Payload) -> Payload {
    let json = serde_json::to_string(resource).expect("strings are valid JSON");
    let content_type = resource.content_type.as_deref().unwrap_or("application/octet-stream");
    let head = format!(
        "--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json}\r\n\
         --{boundary}\r\nContent-Type: {content_type}\r\n\r\n"
    );
    let tail = format!("\r\n--{boundary}--\r\n");
    let pieces = payload.pieces().iter().cloned();
    Payload::new([Bytes::from(head)].into_iter().chain(pieces).chain([Bytes::from(tail)]).collect())
}
