//! Converts the attributes of an object from and to a dict.

use std::collections::BTreeMap;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use torchobj_core::types;

/// Attributes of an object, as a dict. A missing entry is not set.
#[derive(IntoPyObject)]
pub(crate) struct Attributes {
    content_type: Option<String>,
    content_encoding: Option<String>,
    content_disposition: Option<String>,
    content_language: Option<String>,
    cache_control: Option<String>,
    storage_class: Option<String>,
    metadata: BTreeMap<String, String>,
}

impl<'py> FromPyObject<'_, 'py> for Attributes {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let dict = object.cast::<PyDict>()?;
        let wrong = |name: &str, expected: &str| PyTypeError::new_err(format!("{name}: must be {expected}"));
        let text = |name| -> PyResult<Option<String>> {
            let value = dict.get_item(name)?.filter(|value| !value.is_none());
            value.map(|value| value.extract().map_err(|_| wrong(name, "a str"))).transpose()
        };
        let metadata = dict.get_item("metadata")?.map(|value| {
            let strings = value.extract();
            strings.map_err(|_| wrong("metadata", "a dict whose keys and values are str"))
        });
        Ok(Self {
            content_type: text("content_type")?,
            content_encoding: text("content_encoding")?,
            content_disposition: text("content_disposition")?,
            content_language: text("content_language")?,
            cache_control: text("cache_control")?,
            storage_class: text("storage_class")?,
            metadata: metadata.transpose()?.unwrap_or_default(),
        })
    }
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
