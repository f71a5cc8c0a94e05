//! A frozen listing, as the datasets use it.

use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use torchobj_core::list::Filter;
use torchobj_core::manifest::Manifest as Packed;
use torchobj_core::read::{Job, Read, get_many};
use torchobj_core::url::ObjectUrl;

use crate::buffer::ObjectReader;
use crate::error::{OrRaise, exception};
use crate::store::{NativeStore, first_error};
use crate::wait::wait;

/// Keys, sizes and versions of objects, packed: about 30 bytes an object beside its key. Never changes.
#[pyclass(module = "torchobj", frozen)]
pub(crate) struct Manifest {
    packed: Arc<Packed>,
}

#[pymethods]
impl Manifest {
    /// A manifest from what `bytes(manifest)` gave.
    #[new]
    fn new(data: &[u8]) -> PyResult<Self> {
        let packed =
            Packed::from_bytes(data).ok_or_else(|| PyValueError::new_err("these are no bytes of a manifest"))?;
        Ok(Self { packed: Arc::new(packed) })
    }

    /// Lists what is under a prefix. `base` is the URL of the store without a slash at its end.
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

    /// A manifest of URLs; sizes and versions are not known.
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

    /// What tells two listings apart: 32 hexadecimal digits.
    fn digest(&self) -> String {
        self.packed.digest()
    }

    /// Memory of the manifest in bytes, keys included.
    fn memory_bytes(&self) -> usize {
        self.packed.memory_bytes()
    }

    /// The schemes with buckets that occur, as `s3://bucket`.
    fn bases(&self) -> Vec<String> {
        self.packed.bases().to_vec()
    }

    /// The URL of object `index`.
    fn url(&self, index: usize) -> PyResult<String> {
        Ok(self.object(index)?.url())
    }

    /// Base, key, size and version of object `index`.
    fn entry(&self, index: usize) -> PyResult<(String, String, Option<u64>, Option<String>)> {
        let object = self.object(index)?;
        let version = object.version.map(|version| version.as_str().to_owned());
        Ok((object.base.to_owned(), object.key.to_owned(), object.size, version))
    }

    /// Reads objects as readers, all at once. `stores` are those of `bases`, in its order. With `return_errors` there is
    /// an exception in place of what could not be read.
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
            jobs.push(Job { client: client.clone(), read });
        }
        let results = wait(py, get_many(jobs, !return_errors))?;
        let list = PyList::empty(py);
        if return_errors {
            for (index, result) in indices.iter().zip(results) {
                match result {
                    Ok(landed) => list.append(ObjectReader::landed(py, self.object(*index)?, landed)?)?,
                    Err(error) => list.append(exception(py, &error).into_value(py))?,
                }
            }
            return Ok(list);
        }
        for (index, landed) in indices.iter().zip(first_error(py, results)?) {
            list.append(ObjectReader::landed(py, self.object(*index)?, landed)?)?;
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
