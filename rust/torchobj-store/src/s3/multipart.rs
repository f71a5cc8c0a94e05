//! Multipart uploads. Parts and commits are sent without the SDK, other requests with it.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write;

use aws_sdk_s3::types::{ChecksumType, EncodingType};
use bytes::Bytes;
use quick_xml::escape::escape;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::id::unique_id;
use torchobj_core::types::{Condition, PartReceipt, Payload, PutOptions, Upload, Version};

use super::bucket::Bucket;
use super::checksum::Algorithm;
use super::get::{METADATA, NONCE};
use super::put::condition_header;
use super::sdk::{customer_key, new_object};
use super::xml;

/// Maximum size of the response to a commit, including white space: S3 sends one byte every few seconds.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// Maximum number of consecutive pages without an upload.
const MAX_EMPTY_PAGES: usize = 100;

impl Bucket {
    /// CreateMultipartUpload.
    pub(super) async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        let operation = Operation::BeginUpload;
        let attributes = &options.attributes;
        self.check_options(operation, key, options)?;
        let nonce = unique_id();
        let mut metadata: std::collections::HashMap<String, String> = self
            .metadata_headers(operation, key, attributes)?
            .into_iter()
            .map(|(header, value)| (header[METADATA.len()..].to_owned(), value.to_owned()))
            .collect();
        metadata.insert(NONCE.to_owned(), nonce.clone());
        let algorithm = self.algorithm(options.checksum).await;
        // Other stores than AWS support checksums of parts, but not all of them those of the whole object.
        let checksum_type = (algorithm == Some(Algorithm::Crc64Nvme)).then_some(ChecksumType::FullObject);
        let request = self.sdk(operation).await?.create_multipart_upload().bucket(&self.name).key(key);
        let request = new_object!(self, request.set_metadata(Some(metadata)), attributes);
        let request = request.set_checksum_algorithm(algorithm.map(Into::into)).set_checksum_type(checksum_type);
        let output = self.sdk_output(operation, Some(key), request.send()).await?;
        let id = output.upload_id.filter(|id| !id.is_empty());
        let id = id.ok_or_else(|| self.missing(operation, key, "UploadId"))?;
        Ok(Upload { key: key.to_owned(), id, nonce, begun_ms: None, checksum: options.checksum, sequential: false })
    }

    /// UploadPart.
    pub(super) async fn put_part(&self, upload: &Upload, number: u32, payload: &Payload) -> Result<PartReceipt> {
        let operation = Operation::PutPart;
        let mut headers = self.customer_key_headers();
        let checksum = self.algorithm(upload.checksum).await.map(|algorithm| (algorithm, algorithm.of(payload)));
        if let Some((algorithm, checksum)) = checksum {
            headers.push((algorithm.header(), Cow::Owned(algorithm.encode(checksum))));
        }
        let part_number = number.to_string();
        let query = [("partNumber", part_number.as_str()), ("uploadId", upload.id.as_str())];
        let request = self.request(operation, "PUT", Some(&upload.key), &query, headers, payload);
        let response = self.dialect(operation).await?.send(&request).await?;
        let etag = response.header("etag").and_then(xml::header_etag);
        let version = self.version_of(operation, &upload.key, etag)?;
        Ok(PartReceipt {
            number,
            size: payload.len() as u64,
            version,
            checksum: checksum.map(|(_, checksum)| checksum),
        })
    }

    /// CompleteMultipartUpload. S3 may send white space for minutes before the result or an error.
    pub(super) async fn commit(
        &self,
        upload: &Upload,
        parts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Version> {
        let version = if self.by_sdk().await? {
            self.sdk_commit(upload, parts, condition).await?
        } else {
            self.own_commit(upload, parts, condition).await?
        };
        if let Some(version) = version {
            return Ok(version);
        }
        let found = self.committed(upload).await?;
        self.version_of(Operation::Commit, &upload.key, found)
    }

    /// Returns the version in the response; `None` if it is empty, as that of Ceph 16, or missing.
    async fn own_commit(
        &self,
        upload: &Upload,
        parts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Option<Version>> {
        let (operation, key) = (Operation::Commit, Some(upload.key.as_str()));
        let algorithm = self.algorithm(upload.checksum).await;
        let mut headers = self.customer_key_headers();
        headers.push(("content-type", Cow::Borrowed("application/xml")));
        headers.extend(condition_header(condition));
        if let Some(algorithm @ Algorithm::Crc64Nvme) = algorithm {
            let whole = algorithm.of_parts(parts).map(|checksum| algorithm.encode(checksum));
            headers.extend(whole.map(|whole| (algorithm.header(), Cow::Owned(whole))));
            headers.push(("x-amz-checksum-type", Cow::Borrowed("FULL_OBJECT")));
        }
        let payload = Payload::from(Bytes::from(document(parts, algorithm)));
        let query = [("uploadId", upload.id.as_str())];
        let request = self.request(operation, "POST", key, &query, headers, &payload);
        self.dialect(operation).await?.document(&request, MAX_RESPONSE_BYTES, result).await
    }

    /// Returns the version of the object if its metadata contains the nonce of this upload.
    pub(super) async fn committed(&self, upload: &Upload) -> Result<Option<Version>> {
        match self.head_with_nonce(&upload.key).await {
            Ok((head, nonce)) => Ok(head.version.filter(|_| nonce.as_deref() == Some(&upload.nonce))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// AbortMultipartUpload. Succeeds if the upload does not exist.
    pub(super) async fn abort(&self, upload: &Upload) -> Result<()> {
        let operation = Operation::Abort;
        let request = self.sdk(operation).await?.abort_multipart_upload();
        let request = request.bucket(&self.name).key(&upload.key).upload_id(&upload.id);
        let request = request.set_request_payer(self.request_payer());
        match self.sdk_output(operation, Some(&upload.key), request.send()).await {
            Err(error) if error.kind() != ErrorKind::UploadGone => Err(error),
            _ => Ok(()),
        }
    }

    /// ListMultipartUploads, all pages.
    pub(super) async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        let operation = Operation::ListUploads;
        let wrong = |problem: &str| self.error(ErrorKind::Protocol, operation, Some(prefix), problem).permanent();
        // MinIO lists the uploads of the key that equals the prefix only, and all of them without a prefix.
        let is_aws = self.account.environment().await.endpoint_url.is_none();
        let requested = if is_aws { prefix } else { "" };
        let (mut uploads, mut found, mut markers, mut empty_pages) = (Vec::new(), HashSet::new(), HashSet::new(), 0);
        let (mut key_marker, mut id_marker) = (None, None);
        loop {
            let request = self.sdk(operation).await?.list_multipart_uploads();
            let request = request.bucket(&self.name).prefix(requested).encoding_type(EncodingType::Url);
            let request = request.set_key_marker(key_marker).set_upload_id_marker(id_marker);
            let request = request.set_request_payer(self.request_payer());
            let page = match self.sdk_output(operation, Some(prefix), request.send()).await {
                // The response of gofakes3 if the bucket never had an upload.
                Err(error) if error.kind() == ErrorKind::UploadGone => return Ok(uploads),
                page => page?,
            };
            let encoded = page.encoding_type == Some(EncodingType::Url);
            let decode = |key: String| {
                let decoded = xml::listed_key(&key, encoded).map_err(|problem| wrong(&problem))?;
                Ok(decoded.unwrap_or(key))
            };
            let listed = page.uploads.unwrap_or_default();
            empty_pages = if listed.is_empty() { empty_pages + 1 } else { 0 };
            for upload in listed {
                let (Some(key), Some(id)) = (upload.key, upload.upload_id) else { continue };
                let begun_ms = upload.initiated.and_then(|time| time.to_millis().ok());
                let key = decode(key)?;
                if !found.insert((key.clone(), id.clone())) {
                    return Err(wrong(&format!("the listing repeats the upload {id} of {key:?}")));
                }
                if key.starts_with(prefix) {
                    uploads.push(Upload::of_other_client(key, id, begun_ms));
                }
            }
            let next = xml::continuation(page.is_truncated == Some(true), page.next_key_marker).map_err(wrong)?;
            let Some(next) = next.map(decode).transpose()? else { return Ok(uploads) };
            let marker = (next, page.next_upload_id_marker);
            if !markers.insert(marker.clone()) {
                return Err(wrong(&format!("the listing repeats the marker {:?}", marker.0)));
            }
            if empty_pages >= MAX_EMPTY_PAGES {
                let problem = format!("the listing has {MAX_EMPTY_PAGES} consecutive pages without an upload");
                return Err(wrong(&problem));
            }
            (key_marker, id_marker) = (Some(marker.0), marker.1);
        }
    }
}

/// Parses the version in `<CompleteMultipartUploadResult>`, which may be empty or missing.
fn result(document: &[u8]) -> std::result::Result<Option<Version>, String> {
    let (mut etag, mut is_result) = (None, false);
    let read = xml::for_each_element(document.trim_ascii(), |path, text| match path {
        ["CompleteMultipartUploadResult", "ETag"] => etag = text.and_then(xml::etag),
        ["CompleteMultipartUploadResult"] => is_result = true,
        _ => {}
    });
    read.map_err(|problem| problem.to_string())?;
    if is_result { Ok(etag) } else { Err("it is not the result of CompleteMultipartUpload".to_owned()) }
}

fn document(parts: &[PartReceipt], algorithm: Option<Algorithm>) -> String {
    let mut document = String::from("<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for part in parts {
        let etag = escape(part.version.as_str());
        write!(document, "<Part><PartNumber>{}</PartNumber><ETag>{etag}</ETag>", part.number)
            .expect("a string takes any text");
        if let (Some(algorithm), Some(checksum)) = (algorithm, part.checksum) {
            let (name, value) = (algorithm.element(), algorithm.encode(checksum));
            write!(document, "<{name}>{value}</{name}>").expect("a string takes any text");
        }
        document.push_str("</Part>");
    }
    document.push_str("</CompleteMultipartUpload>");
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(number: u32, etag: &str, checksum: Option<u64>) -> PartReceipt {
        PartReceipt { number, size: 1, version: Version::new(etag), checksum }
    }

    #[test]
    fn the_document_contains_each_part_with_its_checksum() {
        let parts = [part(1, "\"a\"", Some(0xe306_9283)), part(2, "<&>", None)];
        assert_eq!(
            document(&parts, Some(Algorithm::Crc32C)),
            "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Part><PartNumber>1</PartNumber>\
             <ETag>&quot;a&quot;</ETag><ChecksumCRC32C>4waSgw==</ChecksumCRC32C></Part><Part><PartNumber>2</PartNumber>\
             <ETag>&lt;&amp;&gt;</ETag></Part></CompleteMultipartUpload>"
        );
        assert!(!document(&parts, None).contains("Checksum"));
    }

    #[test]
    fn a_result_must_be_complete_and_may_have_an_etag() {
        let whole = "<?xml version=\"1.0\"?>\n \n <CompleteMultipartUploadResult><ETag>&quot;e-2&quot;</ETag>\
            </CompleteMultipartUploadResult>";
        assert_eq!(result(whole.as_bytes()).unwrap(), Some(Version::new("\"e-2\"")));
        for none in [&whole.replace("&quot;e-2&quot;", ""), "<CompleteMultipartUploadResult/>"] {
            assert_eq!(result(none.as_bytes()).unwrap(), None, "{none}");
        }
        for wrong in [
            "",
            "<CompleteMultipartUploadResult><ETag>e</ETag>",
            "<Error><Code>InternalError</Code><ETag>e</ETag></Error>",
            "<html><ETag>e</ETag></html>",
        ] {
            result(wrong.as_bytes()).expect_err(wrong);
        }
    }
}
