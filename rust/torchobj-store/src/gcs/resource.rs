//! The JSON of objects (JSON API reference, "Objects"), and CRC32C. Does no I/O.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::{CrcAlgorithm, Digest, checksum_combine};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use torchobj_core::types::{Attributes, ListEntry, ObjectChecksum, ObjectHead, PartReceipt, Payload, Version};

use crate::http::date;

/// Name of the metadata entry with the nonce of an upload. Attributes do not contain it.
pub(super) const NONCE: &str = "torchobj-upload";

/// The fields of [`Resource`] in a response.
pub(super) const FIELDS: &str = "name,size,generation,timeCreated,storageClass,contentType,contentEncoding,\
    contentDisposition,contentLanguage,cacheControl,crc32c,metadata";

/// The metadata of an object. In a request, only the fields that are set.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Resource {
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "or_default")]
    pub(super) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) crc32c: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_encoding: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_disposition: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_language: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_control: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) storage_class: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "texts")]
    pub(super) metadata: BTreeMap<String, String>,
    // Only in responses. Numbers of 64 bits are strings; those of emulators may be numbers.
    #[serde(skip_serializing, deserialize_with = "text")]
    size: Option<String>,
    #[serde(skip_serializing, deserialize_with = "text")]
    generation: Option<String>,
    #[serde(skip_serializing, deserialize_with = "text")]
    time_created: Option<String>,
}

/// A field that is absent if it is null.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(field: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(field)?.unwrap_or_default())
}

/// A text, or a number as its digits; `None` for anything else.
fn text<'de, D: Deserializer<'de>>(field: D) -> Result<Option<String>, D::Error> {
    Value::deserialize(field).map(text_of)
}

fn text_of(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Metadata, whose values are texts.
fn texts<'de, D: Deserializer<'de>>(field: D) -> Result<BTreeMap<String, String>, D::Error> {
    let values = or_default::<_, BTreeMap<String, Value>>(field)?.into_iter();
    Ok(values.filter_map(|(name, value)| Some((name, text_of(value)?))).collect())
}

impl Resource {
    /// The metadata of a new object with these attributes. `storage_class` is used if the attributes have none.
    pub(super) fn new(attributes: &Attributes, storage_class: Option<&str>) -> Self {
        let content_type = attributes.content_type.as_deref().unwrap_or("application/octet-stream");
        Self {
            content_type: Some(content_type.to_owned()),
            content_encoding: attributes.content_encoding.clone(),
            content_disposition: attributes.content_disposition.clone(),
            content_language: attributes.content_language.clone(),
            cache_control: attributes.cache_control.clone(),
            storage_class: attributes.storage_class.as_deref().or(storage_class).map(str::to_owned),
            metadata: attributes.metadata.iter().cloned().collect(),
            ..Self::default()
        }
    }

    /// The metadata that the client of google-cloud-storage returns of an object that was written.
    pub(super) fn of_sdk(object: google_cloud_storage::model::Object) -> Self {
        Self {
            name: object.name,
            crc32c: object.checksums.and_then(|checksums| checksums.crc32c).map(encode),
            metadata: object.metadata.into_iter().collect(),
            size: Some(object.size.to_string()),
            generation: Some(object.generation.to_string()),
            ..Self::default()
        }
    }

    /// Type, encoding, disposition, language and cache control.
    pub(super) fn headers(&self) -> [Option<&String>; 5] {
        let Self { content_type, content_encoding, content_disposition, content_language, cache_control, .. } = self;
        [content_type, content_encoding, content_disposition, content_language, cache_control].map(Option::as_ref)
    }

    /// The generation, if it is a number.
    pub(super) fn version(&self) -> Option<Version> {
        let generation = self.generation.as_deref()?;
        generation.parse::<u64>().ok().map(|_| Version::new(generation))
    }

    /// Size in bytes.
    pub(super) fn size(&self) -> Option<u64> {
        self.size.as_deref()?.parse().ok().filter(|size| *size <= i64::MAX as u64)
    }

    /// Time of creation of this generation, in milliseconds since 1970. `updated` also changes with the metadata.
    pub(super) fn created_ms(&self) -> Option<i64> {
        date::rfc3339_ms(self.time_created.as_deref()?)
    }

    /// The nonce of the upload that created the object.
    pub(super) fn nonce(&self) -> Option<&str> {
        self.metadata.get(NONCE).map(String::as_str)
    }

    /// Size, version, attributes and CRC32C; `None` without a size or a generation.
    pub(super) fn into_head(mut self) -> Option<ObjectHead> {
        self.metadata.remove(NONCE);
        Some(ObjectHead {
            size: self.size()?,
            version: Some(self.version()?),
            modified_ms: self.created_ms(),
            checksum: self.crc32c.as_deref().and_then(decode).map(ObjectChecksum::Crc32C),
            attributes: Attributes {
                content_type: self.content_type,
                content_encoding: self.content_encoding,
                content_disposition: self.content_disposition,
                content_language: self.content_language,
                cache_control: self.cache_control,
                storage_class: self.storage_class,
                metadata: self.metadata.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value)).collect(),
            },
        })
    }

    /// An entry of a listing.
    pub(super) fn into_entry(self) -> ListEntry {
        ListEntry {
            size: self.size(),
            version: self.version(),
            modified_ms: self.created_ms(),
            storage_class: self.storage_class.map(Into::into),
            key: self.name,
        }
    }
}

/// The object that a write makes.
#[derive(Clone, Copy)]
pub(super) struct Written<'a> {
    pub(super) name: &'a str,
    /// The nonce in its metadata.
    pub(super) nonce: Option<&'a str>,
    pub(super) size: u64,
    pub(super) crc32c: u32,
}

impl Written<'_> {
    /// Returns whether `made` shows that the object exists. If `false`, it omits the name, the size, the CRC32C, the generation or
    /// the nonce.
    ///
    /// # Errors
    /// What differs.
    pub(super) fn is_shown_by(&self, made: &Resource) -> Result<bool, String> {
        let name = Some(made.name.as_str()).filter(|name| !name.is_empty());
        if let Some(name) = name.filter(|name| *name != self.name) {
            return Err(format!("the response is for the object {name:?}, not for {:?}", self.name));
        }
        if made.nonce().is_some() && made.nonce() != self.nonce {
            return Err("the object is that of another upload".to_owned());
        }
        let crc32c = made.crc32c.as_deref().and_then(decode);
        if made.size().is_some_and(|size| size != self.size) || crc32c.is_some_and(|crc32c| crc32c != self.crc32c) {
            return Err(format!(
                "the store made an object of {} bytes with CRC32C {} from {} bytes with CRC32C {}",
                made.size().unwrap_or(self.size),
                crc32c.map_or_else(|| "unknown".to_owned(), encode),
                self.size,
                encode(self.crc32c),
            ));
        }
        let is_complete = name.is_some() && made.size().is_some() && crc32c.is_some() && made.version().is_some();
        Ok(is_complete && made.nonce() == self.nonce)
    }
}

/// CRC32C of a payload; `None` if its memory has changed since its CRC-32 was computed.
pub(super) fn crc32c(payload: &Payload) -> Option<u32> {
    /// The second checksum reads these bytes from the processor's cache.
    const CHUNK_BYTES: usize = 128 << 10;
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    let mut known = payload.crc32().map(|crc32| (crc32, Digest::new(CrcAlgorithm::Crc32IsoHdlc)));
    for chunk in payload.pieces().iter().flat_map(|piece| piece.chunks(CHUNK_BYTES)) {
        digest.update(chunk);
        if let Some((_, digest)) = &mut known {
            digest.update(chunk);
        }
    }
    let unchanged = known.is_none_or(|(crc32, digest)| narrow(digest.finalize()) == crc32);
    unchanged.then(|| narrow(digest.finalize()))
}

/// CRC32C of two consecutive sequences of bytes; `length` is that of the second one.
pub(super) fn combine(first: u32, second: u32, length: u64) -> u32 {
    narrow(checksum_combine(CrcAlgorithm::Crc32Iscsi, first.into(), second.into(), length))
}

/// Size and CRC32C of the object that consists of these parts.
pub(super) fn totals(receipts: &[PartReceipt]) -> (u64, u32) {
    let crc_of = |receipt: &PartReceipt| receipt.checksum.and_then(|checksum| u32::try_from(checksum).ok());
    receipts.iter().fold((0, 0), |(size, crc), receipt| {
        (size + receipt.size, combine(crc, crc_of(receipt).unwrap_or_default(), receipt.size))
    })
}

pub(super) fn narrow(crc: u64) -> u32 {
    u32::try_from(crc).expect("a CRC of 32 bits")
}

/// Formats CRC32C: big-endian, in Base64.
pub(super) fn encode(crc: u32) -> String {
    BASE64_STANDARD.encode(crc.to_be_bytes())
}

/// Parses CRC32C.
pub(super) fn decode(text: &str) -> Option<u32> {
    BASE64_STANDARD.decode(text).ok()?.try_into().ok().map(u32::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn the_json_of_a_request_has_only_the_fields_that_are_set() {
        let attributes = Attributes { metadata: vec![("a".into(), "1".into())], ..Attributes::default() };
        let json = serde_json::to_string(&Resource { name: "x/y".into(), ..Resource::new(&attributes, None) }).unwrap();
        assert_eq!(json, r#"{"name":"x/y","contentType":"application/octet-stream","metadata":{"a":"1"}}"#);
    }

    #[test]
    fn a_resource_without_a_size_or_a_generation_is_not_valid() {
        for text in ["{}", r#"{"size":"1"}"#, r#"{"size":"-1","generation":"5"}"#, r#"{"size":"1","generation":"x"}"#] {
            assert_eq!(serde_json::from_str::<Resource>(text).unwrap().into_head(), None, "{text}");
        }
        let text = r#"{"size":"3","generation":"17","metadata":{"A":"b","torchobj-upload":"n"},"unknown":[1]}"#;
        for text in [text, &text.replace("\"3\"", "3").replace("\"17\"", "17").replace("[1]", "null")] {
            let resource: Resource = serde_json::from_str(text).unwrap();
            assert_eq!(resource.nonce(), Some("n"));
            let head = resource.into_head().unwrap();
            assert_eq!((head.size, head.version), (3, Some(Version::new("17"))));
            assert_eq!(head.attributes.metadata, [("a".to_owned(), "b".to_owned())]);
        }
    }

    #[test]
    fn null_is_absent_and_metadata_may_have_numbers() {
        let text = r#"{"name":null,"size":3,"generation":17,"timeCreated":5,"crc32c":null,"metadata":null}"#;
        let head = serde_json::from_str::<Resource>(text).unwrap().into_head().unwrap();
        assert_eq!((head.size, head.modified_ms, head.attributes.metadata), (3, None, vec![]));
        let text = r#"{"metadata":{"a":1,"b":null,"c":"d"}}"#;
        let found = serde_json::from_str::<Resource>(text).unwrap().metadata;
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [("a", "1"), ("c", "d")].map(|(a, b)| (a.into(), b.into())));
    }

    #[test]
    fn an_object_is_shown_by_its_name_size_checksum_generation_and_nonce_only() {
        let whole = [
            r#""name":"k""#,
            r#""size":"9""#,
            r#""crc32c":"4waSgw==""#,
            r#""generation":"5""#,
            r#""metadata":{"torchobj-upload":"n"}"#,
        ];
        let written = Written { name: "k", nonce: Some("n"), size: 9, crc32c: 0xe306_9283 };
        let shown =
            |fields: &[&str]| written.is_shown_by(&serde_json::from_str(&format!("{{{}}}", fields.join(","))).unwrap());
        assert_eq!(shown(&whole), Ok(true));
        for (index, (other, malformed)) in [
            (r#""name":"l""#, r#""name":"""#),
            (r#""size":"8""#, r#""size":"nine""#),
            (r#""crc32c":"AAAAAA==""#, r#""crc32c":"4waS""#),
            ("", r#""generation":"x""#),
            (r#""metadata":{"torchobj-upload":"m"}"#, r#""metadata":{}"#),
        ]
        .into_iter()
        .enumerate()
        {
            let mut without = whole.to_vec();
            without.remove(index);
            assert_eq!(shown(&without), Ok(false), "{without:?}");
            without.push(malformed);
            assert_eq!(shown(&without), Ok(false), "{without:?}");
            without.pop();
            if !other.is_empty() {
                without.push(other);
                shown(&without).expect_err(other);
            }
        }
    }

    #[test]
    fn checksums_equal_the_check_value_of_the_crc_catalogue() {
        let of = |text: &'static [u8]| crc32c(&Bytes::from_static(text).into()).unwrap();
        assert_eq!((of(b"123456789"), decode("4waSgw==")), (0xe306_9283, Some(0xe306_9283)));
        assert_eq!(combine(of(b"1234"), of(b"56789"), 5), 0xe306_9283);
        assert_eq!(encode(0xe306_9283), "4waSgw==");
        let with_crc32 = |crc32| Payload::with_crc32(vec![Bytes::from_static(b"123456789")], crc32);
        assert_eq!(crc32c(&with_crc32(0xcbf4_3926)), Some(0xe306_9283));
        assert_eq!(crc32c(&with_crc32(0xcbf4_3927)), None, "the memory was changed");
    }
}
