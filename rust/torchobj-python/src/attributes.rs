//! Converts the attributes of an object from and to a dict.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use torchobj_core::types;

/// Attributes of an object, as a dict. `metadata` is required; a missing header is not set.
#[derive(FromPyObject, IntoPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Attributes {
    #[pyo3(default)]
    content_type: Option<String>,
    #[pyo3(default)]
    content_encoding: Option<String>,
    #[pyo3(default)]
    content_disposition: Option<String>,
    #[pyo3(default)]
    content_language: Option<String>,
    #[pyo3(default)]
    cache_control: Option<String>,
    #[pyo3(default)]
    storage_class: Option<String>,
    metadata: BTreeMap<String, String>,
}

impl From<types::Attributes> for Attributes {
    fn from(attributes: types::Attributes) -> Self {
        Self {
            content_type: attributes.content_type,
            content_encoding: attributes.content_encoding,
            content_disposition: attributes.content_disposition,
            content_language: attributes.content_language,
            cache_control: attributes.cache_control,
            storage_class: attributes.storage_class,
            metadata: attributes.metadata.into_iter().collect(),
        }
    }
}

impl From<Attributes> for types::Attributes {
    fn from(attributes: Attributes) -> Self {
        Self {
            content_type: attributes.content_type,
            content_encoding: attributes.content_encoding,
            content_disposition: attributes.content_disposition,
            content_language: attributes.content_language,
            cache_control: attributes.cache_control,
            storage_class: attributes.storage_class,
            metadata: attributes.metadata.into_iter().collect(),
        }
    }
}
