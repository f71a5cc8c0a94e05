//! Lists unfinished uploads, through the SDK.

use std::collections::HashSet;

use aws_sdk_s3::types::EncodingType;
use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::Upload;

use super::Bucket;
use super::xml;
use crate::http::encode::decode_listed;

/// Pages in a row without an upload. No version is passed over here, so none is expected.
const MOST_EMPTY_PAGES: usize = 100;

impl Bucket {
    /// ListMultipartUploads, all pages.
    pub(super) async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        let operation = Operation::ListUploads;
        let wrong = |problem: &str| self.error(ErrorKind::Protocol, operation, Some(prefix), problem);
        let (mut uploads, mut markers, mut empty_pages) = (Vec::new(), HashSet::new(), 0);
        let (mut key_marker, mut id_marker) = (None, None);
        loop {
            let request = self.sdk(operation).await?.list_multipart_uploads();
            let request = request.bucket(&self.name).prefix(prefix).encoding_type(EncodingType::Url);
            let request = request.set_key_marker(key_marker).set_upload_id_marker(id_marker);
            let request = request.set_request_payer(self.request_payer());
            let page = self.sdk_answer(operation, Some(prefix), request.send()).await?;
            let encoded = page.encoding_type.is_some();
            let decode = |key: String| if encoded { decode_listed(&key).unwrap_or(key) } else { key };
            let listed = page.uploads.unwrap_or_default();
            empty_pages = if listed.is_empty() { empty_pages + 1 } else { 0 };
            for upload in listed {
                let (Some(key), Some(id)) = (upload.key, upload.upload_id) else { continue };
                let begun_ms = upload.initiated.and_then(|time| time.to_millis().ok());
                let key = decode(key);
                // Some stores list more than they were asked for.
                if key.starts_with(prefix) {
                    uploads.push(Upload { key, id, nonce: String::new(), begun_ms, checksum: None });
                }
            }
            let next = xml::continuation(page.is_truncated == Some(true), page.next_key_marker).map_err(wrong)?;
            let Some(next) = next.map(decode) else { return Ok(uploads) };
            let marker = (next, page.next_upload_id_marker);
            if !markers.insert(marker.clone()) {
                return Err(wrong(&format!("the listing repeats the marker {:?}: it would never end", marker.0)));
            }
            if empty_pages >= MOST_EMPTY_PAGES {
                let problem = format!("{MOST_EMPTY_PAGES} pages in a row without an upload, and the listing goes on");
                return Err(wrong(&problem));
            }
            (key_marker, id_marker) = (Some(marker.0), marker.1);
        }
    }
}
