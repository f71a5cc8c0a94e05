//! Parses the XML documents of S3.

use std::sync::Arc;

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

/// Maximum depth of elements; that of S3 is 4.
const MAX_DEPTH: usize = 16;

/// Calls `on_end` at the end of each element, with the names of the open elements from the root to itself, without namespaces,
/// and with its text if it contains no other element.
pub(super) fn for_each_element(document: &[u8], mut on_end: impl FnMut(&[&str], Option<&str>)) -> Result<(), XmlError> {
    let mut reader = Reader::from_reader(document);
    reader.config_mut().expand_empty_elements = true;
    // The first `depth` are open; the others are reused.
    let mut names: Vec<String> = Vec::new();
    let mut depth = 0;
    let mut text = String::new();
    let mut is_leaf = false;
    loop {
        match reader.read_event()? {
            Event::Start(_) if depth == 0 && !names.is_empty() => {
                return Err(XmlError("it has two roots".to_owned()));
            }
            Event::Start(_) if depth == MAX_DEPTH => {
                return Err(XmlError(format!("more than {MAX_DEPTH} nested elements")));
            }
            Event::Start(tag) => {
                if depth == names.len() {
                    names.push(String::new());
                }
                names[depth].clear();
                names[depth].push_str(tag.local_name().as_ref());
                depth += 1;
                text.clear();
                is_leaf = true;
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::CData(piece) => text.push_str(&piece),
            Event::GeneralRef(entity) => match entity.resolve_char_ref()? {
                Some(letter) => text.push(letter),
                // Without a DTD, XML has five.
                None => match quick_xml::escape::resolve_xml_entity(&entity) {
                    Some(letter) => text.push_str(letter),
                    None => return Err(XmlError(format!("unknown entity &{};", &*entity))),
                },
            },
            Event::End(_) => {
                let mut path = [""; MAX_DEPTH];
                path.iter_mut().zip(&names[..depth]).for_each(|(element, name)| *element = name);
                on_end(&path[..depth], is_leaf.then_some(text.as_str()));
                depth -= 1;
                is_leaf = false;
            }
            Event::Eof if depth == 0 => return Ok(()),
            Event::Eof => return Err(XmlError(format!("it ends within {depth} elements"))),
            _ => {}
        }
    }
}

/// Parses a page of ListObjectsV2. Decodes keys by the encoding in the response, which may differ from the requested one.
pub(super) fn list_page(document: &[u8]) -> Result<ListPage, XmlError> {
    let mut page = PageBuilder::default();
    for_each_element(document, |path, text| page.end(path, text))?;
    page.finish()
}

/// A page that is being parsed.
#[derive(Default)]
struct PageBuilder {
    page: ListPage,
    is_listing: bool,
    encoded: bool,
    truncated: bool,
    next: Option<String>,
    entry: Entry,
    problem: Option<String>,
    /// The last date and the last storage class; those of the next entry are often the same.
    date: (String, Option<i64>),
    storage_class: Arc<str>,
}

impl PageBuilder {
    fn end(&mut self, path: &[&str], text: Option<&str>) {
        let ["ListBucketResult", path @ ..] = path else { return };
        match (path, text) {
            ([], _) => self.is_listing = true,
            (["Contents", name], Some(text)) => self.field(name, text),
            (["Contents"], _) => match std::mem::take(&mut self.entry).into_list_entry() {
                Some(entry) => self.page.entries.push(entry),
                None => self.problem = Some("an object without a key".to_owned()),
            },
            (["CommonPrefixes", "Prefix"], Some(text)) => self.page.prefixes.push(text.to_owned()),
            (["EncodingType"], Some(text)) => self.encoded = text == "url",
            (["NextContinuationToken"], Some(text)) => self.next = Some(text.to_owned()),
            (["IsTruncated"], Some(text)) => match text.trim() {
                "true" | "True" | "TRUE" => self.truncated = true,
                "false" | "False" | "FALSE" => self.truncated = false,
                other => self.problem = Some(format!("IsTruncated is {other:?}")),
            },
            _ => {}
        }
    }

    /// Adds an element of `Contents`.
    fn field(&mut self, name: &str, text: &str) {
        let Self { entry, date, storage_class, .. } = self;
        match name {
            "Key" => {
                let earlier = entry.key.replace(text.to_owned());
                if earlier.is_some() {
                    self.problem = Some("an object with two keys".to_owned());
                }
            }
            "Size" => entry.size = text.trim().parse().ok().filter(|size| *size <= i64::MAX as u64),
            "ETag" => entry.version = listed_version(text),
            "LastModified" => {
                if date.0 != text {
                    *date = (text.to_owned(), date::rfc3339_ms(text));
                }
                entry.modified_ms = date.1;
            }
            "StorageClass" => {
                if **storage_class != *text {
                    *storage_class = text.into();
                }
                entry.storage_class = Some(storage_class.clone());
            }
            _ => {}
        }
    }

    fn finish(self) -> Result<ListPage, XmlError> {
        let Self { mut page, is_listing, encoded, truncated, next, problem, .. } = self;
        if !is_listing {
            return Err(XmlError("it is not a listing".to_owned()));
        }
        if let Some(problem) = problem {
            return Err(XmlError(problem));
        }
        // `EncodingType` may follow the keys, so they are decoded at the end.
        let keys = page.entries.iter_mut().map(|entry| &mut entry.key);
        for key in keys.chain(&mut page.prefixes) {
            if let Some(decoded) = listed_key(key, encoded).map_err(XmlError)? {
                *key = decoded;
            }
        }
        page.continuation = continuation(truncated, next).map_err(|problem| XmlError(problem.to_owned()))?;
        Ok(page)
    }
}

/// Decodes a key or a common prefix of a listing; `None` if it is what the response has.
///
/// # Errors
/// It is empty, or its encoding is not valid: the text names another object.
pub(super) fn listed_key(text: &str, encoded: bool) -> Result<Option<String>, String> {
    if text.is_empty() {
        return Err("an object or a common prefix with an empty key".to_owned());
    }
    if !encoded || !text.contains(['%', '+']) {
        return Ok(None);
    }
    decode_listed(text).map(Some).ok_or_else(|| format!("the key {text:?} is not valid with encoding-type=url"))
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
    version: Option<Version>,
    modified_ms: Option<i64>,
    storage_class: Option<Arc<str>>,
}

impl Entry {
    fn into_list_entry(self) -> Option<ListEntry> {
        let Self { key, size, version, modified_ms, storage_class } = self;
        Some(ListEntry { key: key?, size, version, modified_ms, storage_class })
    }
}

/// The version in a listing; `None` if its ETag is empty.
pub(super) fn listed_version(etag: &str) -> Option<Version> {
    (!matches!(etag, "" | "\"\"")).then(|| quoted(etag))
}

/// An ETag that may be empty.
pub(super) fn etag(etag: &str) -> Option<Version> {
    (!etag.trim_matches('"').is_empty()).then(|| quoted(etag))
}

/// The ETag in a header of a response, which must not be empty.
pub(super) fn header_etag(etag: &str) -> Option<Version> {
    (!etag.is_empty()).then(|| quoted(etag))
}

/// An ETag with quotes, as in headers. Some stores omit the quotes.
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
        for size in [
            "",
            "<Size/>",
            "<Size>many</Size>",
            "<Size>-1</Size>",
            "<Size>9223372036854775808</Size>",
            "<Size>99999999999999999999</Size>",
        ] {
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

    /// A page with this text in `Contents`, `CommonPrefixes` and at its end.
    fn page_of(contents: &str, prefixes: &str, end: &str) -> Result<ListPage, XmlError> {
        let contents = format!("<Contents>{contents}</Contents><CommonPrefixes>{prefixes}</CommonPrefixes>");
        list_page(format!("<ListBucketResult>{contents}{end}</ListBucketResult>").as_bytes())
    }

    #[test]
    fn an_object_without_a_key_or_with_two_is_malformed() {
        for key in ["<Size>1</Size>", "<Key/>", "<Key></Key>", "<Key>a<b>c</b></Key>", "<Key>a</Key><Key>b</Key>"] {
            assert!(page_of(key, "", "").unwrap_err().to_string().contains("key"), "{key}");
        }
        assert!(page_of("<Key>a</Key>", "<Prefix/>", "").unwrap_err().to_string().contains("empty key"));
    }

    #[test]
    fn a_key_that_cannot_be_decoded_is_malformed_and_any_other_is_unchanged() {
        const URL: &str = "<EncodingType>url</EncodingType>";
        for key in ["caf&eacute;", "&#0;", "&#xD800;", "&#x110000;", "a&b", "&nbsp;"] {
            page_of(&format!("<Key>{key}</Key>"), "", "").expect_err(key);
            page_of("<Key>k</Key>", &format!("<Prefix>{key}</Prefix>"), URL).expect_err(key);
        }
        for key in ["a%FFb", "a%", "a%2", "a%zz", "a%+5", "%C3", "%ED%A0%80"] {
            let contents = format!("<Key>{key}</Key>");
            assert!(page_of(&contents, "", URL).unwrap_err().to_string().contains(key), "{key}");
            page_of("<Key>k</Key>", &format!("<Prefix>{key}</Prefix>"), URL).expect_err(key);
            assert_eq!(page_of(&contents, "", "").unwrap().entries[0].key, key, "without an encoding");
        }
        for (listed, key) in [
            ("caf%C3%A9", "café"),
            ("café", "café"),
            ("caf&#233;", "café"),
            (" a ", " a "),
            ("%2525", "%25"),
            ("%00", "\0"),
        ] {
            assert_eq!(page_of(&format!("<Key>{listed}</Key>"), "", URL).unwrap().entries[0].key, key, "{listed}");
        }
        let amp = page_of("<Key>a&amp;amp;&lt;&#x26;</Key>", "", "").unwrap();
        assert_eq!(amp.entries[0].key, "a&amp;<&");
    }

    #[test]
    fn a_page_that_may_be_truncated_is_not_the_last() {
        let end =
            |value: &str| format!("<IsTruncated>{value}</IsTruncated><NextContinuationToken>t</NextContinuationToken>");
        for value in ["true", " true\n", "True", "TRUE"] {
            assert_eq!(
                page_of("<Key>a</Key>", "", &end(value)).unwrap().continuation.as_deref(),
                Some("t"),
                "{value:?}"
            );
        }
        for value in ["false", "False"] {
            assert_eq!(page_of("<Key>a</Key>", "", &end(value)).unwrap().continuation, None);
        }
        page_of("<Key>a</Key>", "", &end("maybe")).expect_err("neither");
    }

    #[test]
    fn the_last_page_has_no_continuation_and_an_incomplete_page_is_an_error() {
        let last = PAGE.replace("true", "false");
        assert_eq!(list_page(last.as_bytes()).unwrap().continuation, None);
        assert!(list_page(b"<ListBucketResult><Contents></Wrong>").is_err());
        assert!(list_page(b"<Error><Code>SlowDown</Code></Error>").is_err());
        for other in ["<Error><Code>InternalError</Code></Error>", "<ListBucketResult/>", "<a>", "</a>"] {
            assert!(list_page(format!("{last}{other}").as_bytes()).is_err(), "{other}");
        }
        assert!(list_page(format!("{last}\n<!-- end -->\n").as_bytes()).is_ok());
        assert!(list_page(PAGE.split_at(PAGE.len() / 2).0.as_bytes()).is_err());
    }
}
