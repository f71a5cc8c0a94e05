//! Writes objects in one request.

use std::borrow::Cow;

use bytes::Bytes;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::{Attributes, Condition, Payload, PutOptions, Version};

use super::request::Bucket;
use super::resource::{FIELDS, Resource, crc32c, encode};
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
        let missing = || self.error(ErrorKind::Protocol, operation, Some(key), "the response has no generation");
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

    /// Writes an object with this metadata and this CRC32C, which the server verifies, and returns its metadata. `key` is
    /// used in error messages.
    pub(super) async fn insert(
        &self,
        operation: Operation,
        key: &str,
        mut resource: Resource,
        crc32c: u32,
        payload: &Payload,
        condition: &Condition,
    ) -> Result<Resource> {
        if self.account.config.force_sdk {
            return self.sdk_insert(operation, key, &resource, crc32c, payload, condition).await;
        }
        resource.crc32c = Some(encode(crc32c));
        let boundary = format!("torchobj{:032x}", fastrand::u128(..));
        let content_type = format!("multipart/related; boundary={boundary}");
        let payload = related_body(&boundary, &resource, payload);
        let mut query = self.write_query(condition);
        query.extend([("uploadType", "multipart"), ("fields", FIELDS)]);
        let headers = vec![("content-type", Cow::Borrowed(content_type.as_str()))];
        let request = self.request(operation, "POST", Some(key), self.upload_path(), &query, headers, &payload);
        self.json(&request).await
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
