//! Converts the attributes of an object from and to a dict.

use std::collections::BTreeMap;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use torchobj_core::types;

/// Attributes of an object, as a dict. A missing entry is not set.
pub(crate) struct Attributes(pub(crate) types::Attributes);

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
            let strings = value.extract::<BTreeMap<String, String>>();
            strings.map_err(|_| wrong("metadata", "a dict whose keys and values are str"))
        });
        Ok(Self(types::Attributes {
            content_type: text("content_type")?,
            content_encoding: text("content_encoding")?,
            content_disposition: text("content_disposition")?,
            content_language: text("content_language")?,
            cache_control: text("cache_control")?,
            storage_class: text("storage_class")?,
            metadata: metadata.transpose()?.unwrap_or_default().into_iter().collect(),
        }))
    }
}

impl<'py> IntoPyObject<'py> for Attributes {
    type Target = PyDict;
    type Output = Bound<'py, PyDict>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("content_type", self.0.content_type)?;
        dict.set_item("content_encoding", self.0.content_encoding)?;
        dict.set_item("content_disposition", self.0.content_disposition)?;
        dict.set_item("content_language", self.0.content_language)?;
        dict.set_item("cache_control", self.0.cache_control)?;
        dict.set_item("storage_class", self.0.storage_class)?;
        dict.set_item("metadata", self.0.metadata.into_iter().collect::<BTreeMap<_, _>>())?;
        Ok(dict)
    }
}
