//! Attributes of objects in the headers of responses. Does no I/O.

use torchobj_core::types::Attributes;

use super::{Lease, is_token};

/// Names of the headers of a provider.
pub(crate) struct AttributeHeaders {
    /// Prefix of metadata headers.
    pub(crate) metadata: &'static str,
    /// The storage class.
    pub(crate) storage_class: &'static str,
    /// Name of a metadata entry that attributes do not contain.
    pub(crate) hidden: &'static str,
}

impl AttributeHeaders {
    /// Parses the attributes of the object in a response.
    pub(crate) fn parse(&self, lease: &Lease) -> Attributes {
        let text = |name| lease.header(name).map(str::to_owned);
        let mut metadata: Vec<_> = lease
            .headers()
            .map(|(name, value)| (name.to_ascii_lowercase(), value))
            .filter_map(|(name, value)| Some((name.strip_prefix(self.metadata)?.to_owned(), value.to_owned())))
            .filter(|(name, _)| name != self.hidden)
            .collect();
        metadata.sort();
        Attributes {
            content_type: text("content-type"),
            content_encoding: text("content-encoding"),
            content_disposition: text("content-disposition"),
            content_language: text("content-language"),
            cache_control: text("cache-control"),
            storage_class: text(self.storage_class),
            metadata,
        }
    }
}

/// Returns a message about metadata that no header can contain.
pub(crate) fn metadata_problem(attributes: &Attributes) -> Option<String> {
    let invalid = |(name, value): &&(String, String)| {
        let printable = value.bytes().all(|byte| matches!(byte, b' '..=b'~')) && value.trim() == value;
        !is_token(name) || !printable
    };
    let (name, value) = attributes.metadata.iter().find(invalid)?;
    Some(format!("metadata {name:?}={value:?}: names must be tokens, values printable ASCII"))
}
