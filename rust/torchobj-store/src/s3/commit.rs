//! CompleteMultipartUpload: the answer may begin with minutes of white space, and end in an error. Retries nothing.

use std::borrow::Cow;
use std::fmt::Write;

use bytes::Bytes;
use quick_xml::escape::escape;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::{Condition, PartReceipt, Payload, Upload, Version};

use super::answer::{ServerError, error};
use super::bucket::Bucket;
use super::checksum::Algorithm;
use super::put::condition_header;
use super::request::Ask;
use super::xml;

/// White space included: S3 sends a byte every few seconds.
const LARGEST_ANSWER_BYTES: usize = 1 << 20;

impl Bucket {
    /// Makes the parts the object.
    pub(super) async fn commit(
        &self,
        upload: &Upload,
        parts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Version> {
        if self.by_sdk().await? {
            return self.sdk_commit(upload, parts, condition).await;
        }
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
        let ask = Ask { operation, method: "POST", key, query: &query, headers, payload: &payload };
        let mut answer = self.ask(&ask).await?;
        let text = answer.lease.read_text(ask.method, LARGEST_ANSWER_BYTES).await;
        let text = text.map_err(|failure| self.failure(operation, key, failure))?;
        result(text.trim_ascii()).map_err(|problem| {
            let said = ServerError::parse(&text);
            if said.code.is_none() {
                return self.error(ErrorKind::Protocol, operation, key, &problem);
            }
            // S3 answers 200 before it knows how the commit ends.
            let header = |name: &str| answer.header(name).map(str::to_owned);
            error(operation, self.url_of(key), answer.status, said, header)
        })
    }
}

/// The version in `<CompleteMultipartUploadResult>`.
fn result(document: &[u8]) -> std::result::Result<Version, String> {
    let mut etag = None;
    let read = xml::each_text(document, |path, text| {
        if let [root, name] = path
            && root == "CompleteMultipartUploadResult"
            && name == "ETag"
        {
            etag = Some(xml::quoted(&text));
        }
    });
    read.map_err(|problem| problem.to_string())?;
    etag.ok_or_else(|| "an answer without an ETag".to_owned())
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
    fn the_document_names_each_part_with_its_checksum() {
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
    fn a_result_has_its_etag_in_its_own_document_and_is_whole() {
        let whole = "<?xml version=\"1.0\"?>\n \n <CompleteMultipartUploadResult><ETag>&quot;e-2&quot;</ETag>\
            </CompleteMultipartUploadResult>";
        assert_eq!(result(whole.as_bytes()).unwrap(), Version::new("\"e-2\""));
        for wrong in [
            "",
            "<CompleteMultipartUploadResult><ETag>e</ETag>",
            "<CompleteMultipartUploadResult></CompleteMultipartUploadResult>",
            "<Error><Code>InternalError</Code><ETag>e</ETag></Error>",
            "<html><ETag>e</ETag></html>",
        ] {
            result(wrong.as_bytes()).expect_err(wrong);
        }
    }
}
