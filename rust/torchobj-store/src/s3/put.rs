//! PutObject without the SDK, and headers of all writes.

use std::borrow::Cow;

use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::{Attributes, ChecksumAlgorithm, Condition, Payload, PutOptions, Version};

use super::Bucket;
use super::checksum::Algorithm;
use super::get::METADATA;
use super::xml;
use crate::config::{Checksum, Encryption};
use crate::http::{Headers, invalid_header_value, is_header_value, metadata_problem};

impl Bucket {
    /// The checksum algorithm of request bodies. `known`: the caller has computed this one already.
    pub(super) async fn algorithm(&self, known: Option<ChecksumAlgorithm>) -> Option<Algorithm> {
        match self.account.config.checksum {
            Checksum::Off => None,
            Checksum::Crc32C => Some(Algorithm::Crc32C),
            Checksum::Crc64Nvme => Some(Algorithm::Crc64Nvme),
            Checksum::Auto if self.account.environment().await.checksums_when_required => None,
            Checksum::Auto if known == Some(ChecksumAlgorithm::Crc32) => Some(Algorithm::Crc32),
            Checksum::Auto => Some(match self.account.environment().await.endpoint_url {
                None => Algorithm::Crc64Nvme,
                Some(_) => Algorithm::Crc32C,
            }),
        }
    }

    /// PutObject.
    pub(super) async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        let operation = Operation::Put;
        let metadata = self.metadata_headers(operation, key, &options.attributes)?;
        let mut headers = self.attribute_headers(&options.attributes);
        headers.extend(metadata.iter().map(|(name, value)| (name.as_str(), Cow::Borrowed(*value))));
        headers.extend(condition_header(&options.condition));
        if let Some(algorithm) = self.algorithm(options.checksum).await {
            headers.push((algorithm.header(), Cow::Owned(algorithm.encode(algorithm.of(payload)))));
        }
        let request = self.request(operation, "PUT", Some(key), &[], headers, payload);
        let response = self.dialect(operation).await?.send(&request).await?;
        self.version_of(operation, key, response.header("etag").and_then(xml::header_etag))
    }

    /// Headers of attributes, storage class and encryption, without the metadata.
    fn attribute_headers<'a>(&'a self, attributes: &'a Attributes) -> Headers<'a> {
        let mut headers = self.customer_key_headers();
        let mut push = |name, value: Option<&'a str>| headers.extend(value.map(|value| (name, Cow::Borrowed(value))));
        push("content-type", Some(attributes.content_type.as_deref().unwrap_or("application/octet-stream")));
        push("content-encoding", attributes.content_encoding.as_deref());
        push("content-disposition", attributes.content_disposition.as_deref());
        push("content-language", attributes.content_language.as_deref());
        push("cache-control", attributes.cache_control.as_deref());
        push("x-amz-storage-class", self.storage_class(attributes));
        match &self.account.config.encryption {
            Encryption::Bucket | Encryption::CustomerKeyFile(_) => {}
            Encryption::Aes256 => push("x-amz-server-side-encryption", Some("AES256")),
            Encryption::Kms { key_id, dual_layer } => {
                push("x-amz-server-side-encryption", Some(if *dual_layer { "aws:kms:dsse" } else { "aws:kms" }));
                push("x-amz-server-side-encryption-aws-kms-key-id", key_id.as_deref());
            }
        }
        headers
    }

    /// Refuses values that no header can contain, before they are passed to the SDK, whose own error shows the value.
    pub(super) fn check_options(&self, operation: Operation, key: &str, options: &PutOptions) -> Result<()> {
        let headers =
            self.attribute_headers(&options.attributes).into_iter().chain(condition_header(&options.condition));
        match headers.into_iter().find(|(_, value)| !is_header_value(value.as_bytes())) {
            None => Ok(()),
            Some((name, _)) => Err(self.failure(operation, Some(key), invalid_header_value(name))),
        }
    }

    /// The storage class of an object: that of its attributes, otherwise that of the configuration.
    pub(super) fn storage_class<'a>(&'a self, attributes: &'a Attributes) -> Option<&'a str> {
        attributes.storage_class.as_deref().or(self.account.config.storage_class.as_deref())
    }

    /// Metadata as headers.
    ///
    /// # Errors
    /// `Config`: a name or a value that no header can contain.
    pub(super) fn metadata_headers<'a>(
        &self,
        operation: Operation,
        key: &str,
        attributes: &'a Attributes,
    ) -> Result<Vec<(String, &'a str)>> {
        if let Some(problem) = metadata_problem(attributes) {
            return Err(self.error(ErrorKind::Config, operation, Some(key), &problem));
        }
        let header = |name: &str| format!("{METADATA}{}", name.to_ascii_lowercase());
        Ok(attributes.metadata.iter().map(|(name, value)| (header(name), value.as_str())).collect())
    }

    /// The headers of SSE-C, for requests that read or write bytes.
    pub(super) fn customer_key_headers<'a>(&self) -> Headers<'a> {
        let Some(customer) = &self.account.customer_key else { return Vec::new() };
        vec![
            ("x-amz-server-side-encryption-customer-algorithm", Cow::Borrowed("AES256")),
            ("x-amz-server-side-encryption-customer-key", Cow::Owned(customer.key.clone())),
            ("x-amz-server-side-encryption-customer-key-md5", Cow::Owned(customer.md5.clone())),
        ]
    }
}

pub(super) fn condition_header(condition: &Condition) -> Option<(&str, Cow<'_, str>)> {
    match condition {
        Condition::Always => None,
        Condition::Absent => Some(("if-none-match", Cow::Borrowed("*"))),
        Condition::Matches(version) => Some(("if-match", Cow::Borrowed(version.as_str()))),
    }
}
