//! Parses the XML documents of S3.

use quick_xml::Reader;
use quick_xml::events::Event;
use torchobj_core::types::{ListEntry, ListPage, Version};

use crate::http::date;
use crate::http::encode::decode_listed;

/// A document that cannot be parsed.
#[derive(Debug)]
pub(super) struct XmlError(String);

impl<E: std::error::Error> From<E> for XmlError {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

impl std::fmt::Display for XmlError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "malformed XML: {}", self.0)
    }
}

/// Calls `leaf` with the path and the text of each element that contains no other element.
pub(super) fn for_each_leaf(document: &[u8], mut leaf: impl FnMut(&[String], String)) -> Result<(), XmlError> {
    parse(document, |event| {
        if let XmlEvent::Leaf(path, text) = event {
            leaf(path, text);
        }
    })
}

enum XmlEvent<'a> {
    /// The path and the text of an element that contains no other element.
    Leaf(&'a [String], String),
    /// The path of another element, at its end.
    End(&'a [String]),
}

/// Maximum depth of elements; that of S3 is 4. The time to parse a document grows with its depth.
const MAX_DEPTH: usize = 16;

fn parse(document: &[u8], mut on_event: impl FnMut(XmlEvent<'_>)) -> Result<(), XmlError> {
    let mut reader = Reader::from_reader(document);
    let mut path: Vec<String> = Vec::new();
    let mut text = String::new();
    let mut is_leaf = false;
    loop {
        match reader.read_event()? {
            Event::Start(_) if path.len() == MAX_DEPTH => {
                return Err(XmlError(format!("more than {MAX_DEPTH} nested elements")));
            }
            Event::Start(tag) => {
                path.push(tag.local_name().as_ref().to_owned());
                text.clear();
                is_leaf = true;
            }
            Event::Empty(tag) => {
                path.push(tag.local_name().as_ref().to_owned());
                on_event(XmlEvent::Leaf(&path, String::new()));
                path.pop();
                is_leaf = false;
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::CData(piece) => text.push_str(&piece),
            Event::GeneralRef(entity) => match entity.resolve_char_ref()? {
                Some(letter) => text.push(letter),
                None => text.push_str(quick_xml::escape::resolve_xml_entity(&entity).unwrap_or_default()),
            },
            Event::End(_) => {
                let text = std::mem::take(&mut text);
                on_event(if is_leaf { XmlEvent::Leaf(&path, text) } else { XmlEvent::End(&path) });
                path.pop();
                is_leaf = false;
            }
            Event::Eof if path.is_empty() => return Ok(()),
            Event::Eof => return Err(XmlError(format!("it ends within <{}>", path.join("><")))),
            _ => {}
        }
    }
}

/// Parses a page of ListObjectsV2. Decodes keys by the encoding in the response, which may differ from the requested one.
pub(super) fn list_page(document: &[u8]) -> Result<ListPage, XmlError> {
    let mut page = ListPage::default();
    let mut encoded = false;
    let mut truncated = false;
    let mut next = None;
    let mut entry = Entry::default();
    let mut root = None;
    let mut without_key = false;
    parse(document, |event| match event {
        XmlEvent::Leaf(path, text) => match path.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [_, "EncodingType"] => encoded = text == "url",
            [_, "IsTruncated"] => truncated = text == "true",
            [_, "NextContinuationToken"] => next = Some(text),
            [_, "CommonPrefixes", "Prefix"] => page.prefixes.push(text),
            [_, "Contents", "Key"] => entry.key = Some(text),
            [_, "Contents", "Size"] => entry.size = text.trim().parse().ok(),
            [_, "Contents", "ETag"] => entry.etag = Some(text),
            [_, "Contents", "LastModified"] => entry.modified_ms = date::rfc3339_ms(&text),
            [_, "Contents", "StorageClass"] => entry.storage_class = Some(text),
            _ => {}
        },
        XmlEvent::End(path) => {
            if matches!(path, [_, contents] if contents == "Contents") {
                match std::mem::take(&mut entry).into_list_entry() {
                    Some(entry) => page.entries.push(entry),
                    None => without_key = true,
                }
            } else if let [name] = path {
                root = Some(name.clone());
            }
        }
    })?;
    if root.as_deref() != Some("ListBucketResult") {
        return Err(XmlError(format!("<{}> is not a listing", root.unwrap_or_default())));
    }
    if without_key {
        return Err(XmlError("an object without a key".to_owned()));
    }
    if encoded {
        // `EncodingType` may follow the keys, so they are decoded at the end.
        let decode = |text: &mut String| {
            if let Some(decoded) = decode_listed(text) {
                *text = decoded;
            }
        };
        page.entries.iter_mut().for_each(|entry| decode(&mut entry.key));
        page.prefixes.iter_mut().for_each(decode);
    }
    page.continuation = continuation(truncated, next).map_err(|problem| XmlError(problem.to_owned()))?;
    Ok(page)
}

/// The continuation of a listing. A truncated page without one is an error, because it would be mistaken for the last.
pub(super) fn continuation(truncated: bool, next: Option<String>) -> Result<Option<String>, &'static str> {
    match next.filter(|next| truncated && !next.is_empty()) {
        None if truncated => Err("the listing is truncated and has no continuation"),
        next => Ok(next),
    }
}

#[derive(Default)]
struct Entry {
    key: Option<String>,
    size: Option<u64>,
    etag: Option<String>,
    modified_ms: Option<i64>,
    storage_class: Option<String>,
}

impl Entry {
    fn into_list_entry(self) -> Option<ListEntry> {
        let Self { key, size, etag, modified_ms, storage_class } = self;
        let version = etag.and_then(|etag| listed_version(&etag));
        Some(ListEntry { key: key?, size, version, modified_ms, storage_class })
    }
}

/// The version in a listing; `None` if its ETag is empty.
pub(super) fn listed_version(etag: &str) -> Option<Version> {
    (!matches!(etag, "" | "\"\"")).then(|| quoted(etag))
}

/// An ETag with quotes, as in headers. Some stores omit the quotes in XML.
pub(super) fn quoted(etag: &str) -> Version {
    if etag.ends_with('"') { Version::new(etag) } else { Version::new(format!("\"{etag}\"")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix>p%2F</Prefix>
 <Contents><Key>p/a+b%2Bc</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified><ETag>&quot;abc&quot;</ETag>
  <Size>7</Size><Owner><ID>x</ID></Owner><StorageClass>STANDARD</StorageClass></Contents>
 <Contents><Key>p/%F0%9F%8E%89</Key><ETag>def</ETag><Size>0</Size></Contents>
 <CommonPrefixes><Prefix>p/x+y/</Prefix></CommonPrefixes>
 <IsTruncated>true</IsTruncated><NextContinuationToken>t&amp;1&#x3D;</NextContinuationToken>ENCODING</ListBucketResult>"#;

    #[test]
    fn keys_are_decoded_by_the_encoding_in_the_response() {
        let page = list_page(PAGE.replace("ENCODING", "<EncodingType>url</EncodingType>").as_bytes()).unwrap();
        let keys: Vec<_> = page.entries.iter().map(|entry| entry.key.as_str()).collect();
        assert_eq!(keys, ["p/a b+c", "p/🎉"]);
        assert_eq!(page.prefixes, ["p/x y/"]);
        let page = list_page(PAGE.replace("ENCODING", "").as_bytes()).unwrap();
        assert_eq!(page.entries[0].key, "p/a+b%2Bc");
    }

    #[test]
    fn all_fields_of_an_entry_are_parsed() {
        let page = list_page(PAGE.replace("ENCODING", "").as_bytes()).unwrap();
        let first = &page.entries[0];
        assert_eq!((first.size, first.version.clone()), (Some(7), Some(Version::new("\"abc\""))));
        assert_eq!((first.modified_ms, first.storage_class.as_deref()), (Some(1_767_323_045_000), Some("STANDARD")));
        assert_eq!(page.entries[1].version, Some(Version::new("\"def\"")));
        assert_eq!(page.continuation.as_deref(), Some("t&1="));
    }

    #[test]
    fn a_truncated_page_must_have_a_continuation() {
        let token = "<NextContinuationToken>t&amp;1&#x3D;</NextContinuationToken>";
        for without in ["", "<NextContinuationToken/>", "<NextContinuationToken></NextContinuationToken>"] {
            let problem = list_page(PAGE.replace(token, without).as_bytes()).unwrap_err();
            assert!(problem.to_string().contains("truncated"), "{problem}");
            let last = PAGE.replace(token, without).replace("true", "false");
            assert_eq!(list_page(last.as_bytes()).unwrap().continuation, None);
        }
    }

    #[test]
    fn a_missing_or_malformed_size_or_etag_is_none() {
        for size in ["", "<Size/>", "<Size>many</Size>", "<Size>-1</Size>", "<Size>99999999999999999999</Size>"] {
            for etag in ["", "<ETag/>", "<ETag>&quot;&quot;</ETag>"] {
                let page =
                    format!("<ListBucketResult><Contents><Key>k</Key>{size}{etag}</Contents></ListBucketResult>");
                let entry = &list_page(page.as_bytes()).unwrap().entries[0];
                assert_eq!((entry.size, &entry.version), (None, &None), "{page}");
            }
        }
    }

    #[test]
    fn deep_nesting_is_malformed() {
        let (open, close) = ("<a>".repeat(17), "</a>".repeat(17));
        assert!(list_page(format!("{open}{close}").as_bytes()).unwrap_err().0.contains("more than 16"));
        assert!(list_page(format!("<ListBucketResult>{}</ListBucketResult>", &open[..45]).as_bytes()).is_err());
    }

    #[test]
    fn an_object_without_a_key_is_malformed() {
        let page = b"<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>";
        assert!(list_page(page).unwrap_err().to_string().contains("without a key"));
    }

    #[test]
    fn the_last_page_has_no_continuation_and_an_incomplete_page_is_an_error() {
        let last = PAGE.replace("true", "false");
        assert_eq!(list_page(last.as_bytes()).unwrap().continuation, None);
        assert!(list_page(b"<ListBucketResult><Contents></Wrong>").is_err());
        assert!(list_page(b"<Error><Code>SlowDown</Code></Error>").is_err());
        assert!(list_page(PAGE.split_at(PAGE.len() / 2).0.as_bytes()).is_err());
    }
}
