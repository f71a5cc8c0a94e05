//! GetObject and HeadObject, without the SDK.

use std::borrow::Cow;

use torchobj_core::error::{Operation, Result};
use torchobj_core::store::{GetResult, ObjectChecksum};
use torchobj_core::types::{GetRequest, ObjectHead, Payload, Version};

use super::Bucket;
use super::checksum;
use super::xml;
use crate::config::Checksum;
use crate::http::{AttributeHeaders, DetailsParser, HttpGetResult, Response, date, range};

/// Name of the metadata entry with the nonce of an upload. Attributes do not contain it.
pub(super) const NONCE: &str = "torchobj-upload";

/// Prefix of metadata headers.
pub(super) const METADATA: &str = "x-amz-meta-";

const ATTRIBUTES: AttributeHeaders =
    AttributeHeaders { metadata: METADATA, storage_class: "x-amz-storage-class", hidden: NONCE };

const DETAILS: DetailsParser = DetailsParser {
    attributes: |lease| ATTRIBUTES.parse(lease),
    checksum: |lease| checksum::of_object(|name| lease.header(name)),
};

impl Bucket {
    /// GetObject of an object or a range.
    pub(super) async fn open(&self, get: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let mut headers = self.customer_key_headers();
        if let Some(range) = &get.range {
            headers.push(("range", Cow::Owned(range::header(range))));
        }
        // A weak ETag never matches (RFC 9110, section 8.8.3.2): the caller compares the ETag of the response instead.
        if let Some(version) = get.version.filter(|version| !version.as_str().starts_with("W/")) {
            headers.push(("if-match", Cow::Borrowed(version.as_str())));
        }
        if get.checksum {
            headers.extend(self.checksum_mode());
        }
        // A compressed response does not have the length of the object.
        headers.push(("accept-encoding", Cow::Borrowed("identity")));
        let payload = Payload::default();
        let operation = Operation::Get;
        let request = self.request(operation, "GET", Some(get.key), &[], headers, &payload);
        let dialect = self.dialect(operation).await?;
        let mut response = dialect.send(&request).await?;
        let version = response.header("etag").and_then(xml::header_etag);
        let length = response.length();
        let expected = length.is_none() || get.size.is_none_or(|size| length == Some(size));
        let is_xml = response.header("content-type").is_some_and(|kind| kind.contains("xml"));
        // Proxies of S3 may send errors with status 200. An object has an ETag, an error has none.
        if is_xml && (version.is_none() || response.status == 200 && !expected) {
            response = response.unless_error(operation, request.key, &dialect).await?;
        }
        let version = Some(self.version_in(operation, get.key, &response)?);
        let (url, head) = (self.url_of(request.key), || self.head(get.key));
        Ok(Box::new(HttpGetResult::of_response(response, url, version, get.size, DETAILS, head).await?))
    }

    /// Size, version and attributes of an object.
    pub(super) async fn head(&self, key: &str) -> Result<ObjectHead> {
        Ok(self.head_with_nonce(key).await?.0)
    }

    /// Size, version, attributes and checksum of an object. An ETag that is an MD5 is used if there is no other checksum.
    pub(super) async fn head_with_checksum(&self, key: &str) -> Result<ObjectHead> {
        let by_sdk = self.by_sdk().await?;
        Ok(if by_sdk { self.sdk_head(key, true).await } else { self.own_head(key, true).await }?.0)
    }

    /// The version in the response to a read.
    fn version_in(&self, operation: Operation, key: &str, response: &Response) -> Result<Version> {
        let version = self.version_of(operation, key, response.header("etag").and_then(xml::header_etag));
        version.map_err(|error| response.refuse(error))
    }

    /// Whether checksums are requested.
    pub(super) fn has_checksums(&self) -> bool {
        self.account.config.checksum != Checksum::Off
    }

    /// The header that requests the checksum of an object.
    fn checksum_mode(&self) -> Option<(&'static str, Cow<'static, str>)> {
        self.has_checksums().then_some(("x-amz-checksum-mode", Cow::Borrowed("ENABLED")))
    }

    /// Size, version and attributes of an object, and the nonce of the upload that created it.
    pub(super) async fn head_with_nonce(&self, key: &str) -> Result<(ObjectHead, Option<String>)> {
        if self.by_sdk().await? { self.sdk_head(key, false).await } else { self.own_head(key, false).await }
    }

    /// HeadObject. `checksum`: requests the checksum.
    async fn own_head(&self, key: &str, checksum: bool) -> Result<(ObjectHead, Option<String>)> {
        let payload = Payload::default();
        let mut headers = self.customer_key_headers();
        if checksum {
            headers.extend(self.checksum_mode());
        }
        let operation = Operation::Head;
        let request = self.request(operation, "HEAD", Some(key), &[], headers, &payload);
        let response = self.dialect(operation).await?.send(&request).await?;
        let is_marker = response.header("x-amz-request-id").is_some() && is_marker(key);
        let version = match self.version_in(operation, key, &response) {
            Err(_) if is_marker => None,
            version => Some(version?),
        };
        let size = response.header("content-length").and_then(|length| length.trim().parse().ok());
        let size = size.ok_or_else(|| self.missing(operation, key, "Content-Length"))?;
        let head = ObjectHead {
            size,
            version,
            modified_ms: response.header("last-modified").and_then(date::http_ms),
            attributes: ATTRIBUTES.parse(&response.lease),
            checksum: if checksum { of_response(&response) } else { None },
        };
        Ok((head, response.header(&[METADATA, NONCE].concat()).map(str::to_owned)))
    }
}

/// Whether a key may be that of a folder, which has no ETag on servers that store objects as files, such as s3proxy.
pub(super) fn is_marker(key: &str) -> bool {
    key.ends_with('/')
}

/// The checksum of the object in a response to HEAD; otherwise the MD5 that is its ETag. The ETag of an object that is
/// encrypted with a key of KMS or of the customer is no MD5 (API reference, "Object").
fn of_response(response: &Response) -> Option<ObjectChecksum> {
    let md5 = || {
        let hidden = ["x-amz-server-side-encryption-aws-kms-key-id", "x-amz-server-side-encryption-customer-algorithm"];
        let etag = response.header("etag")?;
        let encrypted = hidden.iter().any(|name| response.header(name).is_some());
        if encrypted { None } else { checksum::md5_of_etag(etag) }
    };
    checksum::of_object(|name| response.header(name)).or_else(|| md5().map(ObjectChecksum::Md5))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use torchobj_core::buffer::{Memory, PendingBuffer};
    use torchobj_core::client::Client;
    use torchobj_core::list::try_head_many;
    use torchobj_core::policy::Policy;
    use torchobj_core::runtime::runtime;
    use torchobj_core::store::ObjectStore;
    use torchobj_core::types::Attributes;

    use super::*;
    use crate::config::S3Config;
    use crate::fake::{Fake, http_response};
    use crate::s3::{Account, S3Store};

    #[test]
    fn heads_without_the_permission_to_decrypt_have_no_checksum() {
        runtime().block_on(async {
            let fake = Fake::start(|head| {
                if head.contains("x-amz-checksum-mode") {
                    return http_response(403, "", "");
                }
                http_response(200, "ETag: \"00000000000000000000000000000aff\"\r\n", "")
            })
            .await;
            let config = S3Config { endpoint_url: Some(fake.url.clone()), anonymous: true, ..S3Config::default() };
            let store = S3Store::new(Arc::new(Account::new(config).unwrap()), "b");
            let client = Arc::new(Client::new(Arc::new(store), Policy::default()));
            let heads = try_head_many(&client, vec!["k".to_owned()], true).await.unwrap();
            assert_eq!((heads[0].1.size, heads[0].1.checksum), (0, None));
            assert_eq!(fake.count("HEAD", ""), 2);
        });
    }

    #[tokio::test]
    async fn a_get_returns_the_attributes_and_the_checksum_of_its_response() {
        const HEADERS: &str = "ETag: \"e\"\r\nContent-Type: image/png\r\nx-amz-storage-class: STANDARD_IA\r\n\
            x-amz-meta-B: 2\r\nx-amz-meta-A: 1\r\nx-amz-meta-torchobj-upload: nonce\r\n\
            x-amz-checksum-crc32c: 4waSgw==\r\nx-amz-checksum-type: FULL_OBJECT\r\n";
        let chunked = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{HEADERS}\r\n1\r\nx\r\n0\r\n\r\n");
        let part = format!("Content-Range: bytes 0-0/2\r\n{HEADERS}");
        let whole = Some(ObjectChecksum::Crc32C(0xe306_9283));
        for (response, by_sdk, checksum) in [
            (http_response(200, HEADERS, "x"), true, whole),
            (http_response(206, &part, "x"), true, None),
            (chunked, false, whole),
        ] {
            let fake = Fake::start(move |_| response.clone()).await;
            for force_sdk in if by_sdk { &[false, true][..] } else { &[false] } {
                let endpoint_url = Some(fake.url.clone());
                let config = S3Config { endpoint_url, anonymous: true, force_sdk: *force_sdk, ..S3Config::default() };
                let store = S3Store::new(Arc::new(Account::new(config).unwrap()), "b");
                let get = GetRequest { size: Some(1), ..GetRequest::whole("k") };
                let mut result = store.open(get).await.unwrap();
                let (_pending, mut dest) = PendingBuffer::new(Memory::allocate(1).unwrap());
                result.read_into(&mut dest).await.unwrap();
                let expected = Attributes {
                    content_type: Some("image/png".into()),
                    storage_class: Some("STANDARD_IA".into()),
                    metadata: vec![("a".into(), "1".into()), ("b".into(), "2".into())],
                    ..Attributes::default()
                };
                assert_eq!((result.attributes(), result.checksum()), (expected, checksum), "force_sdk={force_sdk}");
            }
        }
    }
}
