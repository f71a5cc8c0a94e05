//! A compact, immutable listing, for datasets.

use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use torchobj_core::list::Filter;
use torchobj_core::manifest::Manifest as Packed;
use torchobj_core::read::{Job, Read, get_many, try_get_many};
use torchobj_core::url::ObjectUrl;

use crate::buffer::ObjectReader;
use crate::error::{OrRaise, exception};
use crate::store::NativeStore;
use crate::wait::wait;

/// A compact, immutable list of objects: about 30 bytes per object, plus its key.
///
/// `dataset.manifest` is one. `bytes(manifest)` serializes it, and pickles contain that form. Manifests are equal if their
/// objects are.
///
/// Args:
///     data: A manifest serialized by `bytes(manifest)`.
///
/// Raises:
///     ValueError: `data` is not a manifest.
#[pyclass(module = "torchobj", frozen)]
pub(crate) struct Manifest {
    packed: Arc<Packed>,
}

#[pymethods]
impl Manifest {
    #[new]
    fn new(data: &[u8]) -> PyResult<Self> {
        let packed = Packed::from_bytes(data).ok_or_else(|| PyValueError::new_err("these bytes are not a manifest"))?;
        Ok(Self { packed: Arc::new(packed) })
    }

    /// Lists the objects under a prefix.
    ///
    /// Args:
    ///     store: The store to list.
    ///     base: URL of the store, without a trailing slash.
    ///     prefix: Prefix of the keys, not percent-encoded.
    ///     glob: Keeps only keys whose part after the prefix matches.
    ///     suffixes: Keeps only keys that end with one of these; empty: all.
    ///     limit: Maximum number of objects, in key order; None: no limit.
    ///
    /// Raises:
    ///     ConfigError: `glob` is not valid.
    ///     StoreError: The listing failed.
    #[staticmethod]
    #[pyo3(signature = (store, base, prefix, glob=None, suffixes=vec![], limit=None))]
    fn from_listing(
        py: Python<'_>,
        store: &NativeStore,
        base: String,
        prefix: String,
        glob: Option<&str>,
        suffixes: Vec<String>,
        limit: Option<usize>,
    ) -> PyResult<Self> {
        let client = store.client(py)?;
        let filter = Filter::new(glob, suffixes, limit).or_raise(py)?;
        let listed = wait(py, async move {
            let mut manifest = Packed::default();
            client.list_into(&mut manifest, &base, &prefix, &filter).await.map(|()| manifest)
        })?;
        Ok(Self::of(listed.or_raise(py)?))
    }

    /// Makes a manifest of objects, in this order, without their sizes and versions.
    ///
    /// Args:
    ///     urls: URLs of objects.
    ///
    /// Raises:
    ///     ConfigError: One of them is not a URL.
    #[staticmethod]
    fn from_urls(py: Python<'_>, urls: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut manifest = Packed::default();
        for url in urls.try_iter()? {
            let url = ObjectUrl::parse(&url?.extract::<String>()?).or_raise(py)?;
            manifest.push(&format!("{}://{}", url.scheme, url.bucket), &url.key, None, None);
        }
        manifest.shrink();
        Ok(Self::of(manifest))
    }

    fn __len__(&self) -> usize {
        self.packed.len()
    }

    fn __repr__(&self) -> String {
        format!("<torchobj.Manifest of {} objects>", self.packed.len())
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.packed == other.packed
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.packed.to_bytes())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, (Bound<'py, PyBytes>,)) {
        (slf.get_type().into_any(), (slf.get().__bytes__(slf.py()),))
    }

    /// Returns a hash of the manifest, 32 hexadecimal digits. Equal manifests have the same digest.
    fn digest(&self) -> String {
        self.packed.digest()
    }

    /// Returns the memory of the manifest in bytes, including the keys.
    fn memory_bytes(&self) -> usize {
        self.packed.memory_bytes()
    }

    /// Returns the URLs of the stores of the objects, such as `s3://bucket`.
    fn bases(&self) -> Vec<String> {
        self.packed.bases().to_vec()
    }

    /// Returns the URL of an object.
    ///
    /// Args:
    ///     index: Index of the object, from 0.
    ///
    /// Raises:
    ///     IndexError: `index` is out of range.
    fn url(&self, index: usize) -> PyResult<String> {
        Ok(self.object(index)?.url())
    }

    /// Returns the store, the key, the size in bytes and the version of an object.
    ///
    /// Args:
    ///     index: Index of the object, from 0.
    ///
    /// Returns:
    ///     `(base, key, size, version)`; size and version are None if the listing did not contain them.
    ///
    /// Raises:
    ///     IndexError: `index` is out of range.
    fn entry(&self, index: usize) -> PyResult<(String, String, Option<u64>, Option<String>)> {
        let object = self.object(index)?;
        let version = object.version.map(|version| version.as_str().to_owned());
        Ok((object.base.to_owned(), object.key.to_owned(), object.size, version))
    }

    /// Reads objects concurrently, with the GIL released.
    ///
    /// Args:
    ///     stores: A store for each of `bases()`, in that order.
    ///     indices: Indices of the objects.
    ///     return_errors: Whether the list contains an exception for each object that could not be read, instead of
    ///         raising the first one.
    ///
    /// Returns:
    ///     An `ObjectReader` for each object, in this order, whose bytes are in memory.
    ///
    /// Raises:
    ///     IndexError: An index is out of range, or `stores` is too short.
    ///     StoreError: An object could not be read, unless `return_errors`.
    #[pyo3(signature = (stores, indices, return_errors=false))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        stores: Vec<Bound<'py, NativeStore>>,
        indices: Vec<usize>,
        return_errors: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let clients = stores.iter().map(|store| store.get().client(py)).collect::<PyResult<Vec<_>>>()?;
        let mut jobs = Vec::with_capacity(indices.len());
        for index in &indices {
            let object = self.object(*index)?;
            let base = self.packed.bases().iter().position(|base| base == object.base);
            let client =
                base.and_then(|base| clients.get(base)).ok_or_else(|| PyIndexError::new_err("a store is missing"))?;
            let read = Read { size: object.size, version: object.version, ..Read::whole(object.key) };
            jobs.push(Job::new(client.clone(), read));
        }
        let list = PyList::empty(py);
        if return_errors {
            for (index, result) in indices.iter().zip(wait(py, get_many(jobs))?) {
                match result {
                    Ok(fetched) => list.append(ObjectReader::fetched(py, self.object(*index)?, fetched)?)?,
                    Err(error) => list.append(exception(py, &error).into_value(py))?,
                }
            }
            return Ok(list);
        }
        for (index, fetched) in indices.iter().zip(wait(py, try_get_many(jobs))?.or_raise(py)?) {
            list.append(ObjectReader::fetched(py, self.object(*index)?, fetched)?)?;
        }
        Ok(list)
    }
}

impl Manifest {
    pub(crate) fn of(packed: Packed) -> Self {
        Self { packed: Arc::new(packed) }
    }

    pub(crate) fn packed(&self) -> Arc<Packed> {
        self.packed.clone()
    }

    fn object(&self, index: usize) -> PyResult<torchobj_core::manifest::Object<'_>> {
        self.packed.get(index).ok_or_else(|| PyIndexError::new_err(format!("index {index} of {}", self.packed.len())))
    }
}
