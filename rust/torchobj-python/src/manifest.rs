//! A compact, immutable list of objects, for datasets. Files and processes are left to Python.

use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use torchobj_core::client::Client;
use torchobj_core::error::Result;
use torchobj_core::fork::Local;
use torchobj_core::list::{Filter, ManifestListing};
use torchobj_core::manifest::{Columns, Manifest};
use torchobj_core::read::{ClientRead, ReadRequest};
use torchobj_core::url::ObjectUrl;

use crate::error::OrRaise;
use crate::get_many::read_each;
use crate::object_ref::readers;
use crate::pages::{NextPage, Paged, own};
use crate::store::NativeStore;
use crate::wait::wait;

/// What a manifest is made of.
#[derive(FromPyObject)]
enum Data<'py> {
    Manifest(Bound<'py, NativeManifest>),
    Bytes(Bound<'py, PyBytes>),
}

/// The native side of `torchobj.Manifest`.
///
/// On Linux, a manifest of at least 1 MiB is in a sealed file in memory, which other processes can map.
///
/// Args:
///     data: A manifest serialized by `bytes(manifest)`, or a manifest to share.
///
/// Raises:
///     ValueError: `data` is not a manifest.
#[pyclass(module = "torchobj._torchobj", frozen, subclass)]
pub(crate) struct NativeManifest {
    packed: Arc<Manifest>,
}

#[pymethods]
impl NativeManifest {
    #[new]
    fn new(py: Python<'_>, data: Data<'_>) -> PyResult<Self> {
        match data {
            Data::Bytes(bytes) => {
                let bytes = bytes.as_bytes();
                let packed = py.detach(|| Manifest::from_bytes(bytes));
                Ok(Self::of(packed.ok_or_else(|| PyValueError::new_err("these bytes are not a manifest"))?))
            }
            Data::Manifest(manifest) => Ok(Self { packed: manifest.get().packed.clone() }),
        }
    }

    /// Maps the file of a manifest of another process.
    ///
    /// Args:
    ///     file: Duplicate of its `descriptor()`, valid in this process, which this call closes.
    ///     bases: Its `bases()`.
    ///     digest: Its `digest()`.
    ///
    /// Raises:
    ///     OSError: It is not the file of a manifest, or the system refuses the address space.
    #[cfg(target_os = "linux")]
    #[staticmethod]
    fn received(file: i32, bases: Vec<String>, digest: String) -> PyResult<Self> {
        Ok(Self { packed: Arc::new(Manifest::received(file, bases, digest)?) })
    }

    /// Returns the file descriptor of the memory of the manifest, or None if its memory is private to this process.
    fn descriptor(&self) -> Option<i32> {
        #[cfg(target_os = "linux")]
        return self.packed.file().map(|file| std::os::fd::AsRawFd::as_raw_fd(&file));
        #[cfg(not(target_os = "linux"))]
        None
    }

    /// Returns objects as columns in Arrow's layout, without Python objects.
    ///
    /// Args:
    ///     begin: Index of the first object.
    ///     end: Index after the last object.
    ///
    /// Returns:
    ///     Indices of the bases (int32), offsets of the keys (int32) and the keys, sizes (int64; -1: unknown), offsets of the
    ///     versions (int32) and the versions (empty: unknown).
    ///
    /// Raises:
    ///     IndexError: An object is out of range, or the texts exceed 2 GiB.
    fn columns<'py>(&self, py: Python<'py>, begin: usize, end: usize) -> PyResult<[Bound<'py, PyBytes>; 6]> {
        let columns = py.detach(|| self.packed.columns(begin..end));
        let columns = columns.ok_or_else(|| PyIndexError::new_err(format!("objects {begin}..{end}")))?;
        let Columns { bases, key_offsets, keys, sizes, version_offsets, versions } = columns;
        Ok([bases, key_offsets, keys, sizes, version_offsets, versions].map(|column| PyBytes::new(py, &column)))
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
            let mut manifest = Manifest::default();
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
        let mut manifest = Manifest::default();
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
        PyBytes::new(py, &py.detach(|| self.packed.to_bytes()))
    }

    /// Returns a hash of the objects, 32 hexadecimal digits. Equal manifests have the same digest, in any version of
    /// torchobj. The first call computes it.
    fn digest(&self, py: Python<'_>) -> &str {
        py.detach(|| self.packed.digest())
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
        Ok((object.base.to_owned(), object.key, object.size, version))
    }

    /// Reads objects concurrently, with the GIL released.
    ///
    /// Args:
    ///     stores: A store for each of `bases()`, in that order.
    ///     indices: Indices of the objects.
    ///     return_errors: Whether the list contains an exception for each object that could not be read, instead of
    ///         raising the first one.
    ///     pinned: Whether an object must have the size and version of the manifest.
    ///
    /// Returns:
    ///     An `ObjectReader` for each object, in this order, whose bytes are in memory.
    ///
    /// Raises:
    ///     IndexError: An index is out of range, or `stores` is too short.
    ///     StoreError: An object could not be read, unless `return_errors`.
    #[pyo3(signature = (stores, indices, return_errors=false, pinned=true))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        stores: Vec<Bound<'py, NativeStore>>,
        indices: Vec<usize>,
        return_errors: bool,
        pinned: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let clients = stores.iter().map(|store| store.get().client(py)).collect::<PyResult<Vec<_>>>()?;
        let mut jobs = Vec::with_capacity(indices.len());
        for index in &indices {
            let object = self.object(*index)?;
            let base = self.packed.bases().iter().position(|base| base == object.base);
            let client =
                base.and_then(|base| clients.get(base)).ok_or_else(|| PyIndexError::new_err("a store is missing"))?;
            jobs.push(ClientRead::new(client.clone(), ReadRequest::listed(object, pinned)));
        }
        let results = read_each(py, jobs, return_errors)?.into_iter();
        let objects = indices.iter().map(|index| self.packed.get(*index).expect("it was found above"));
        readers(py, objects, results.map(|result| result.map(|fetched| fetched.buffer.into())), true)
    }
}

impl NativeManifest {
    #[cfg_attr(not(target_os = "linux"), expect(unused_mut, reason = "shared on Linux"))]
    pub(crate) fn of(mut packed: Manifest) -> Self {
        #[cfg(target_os = "linux")]
        packed.share();
        Self { packed: Arc::new(packed) }
    }

    pub(crate) fn packed(&self) -> Arc<Manifest> {
        self.packed.clone()
    }

    fn object(&self, index: usize) -> PyResult<torchobj_core::manifest::ObjectInfo<'_>> {
        self.packed.get(index).ok_or_else(|| PyIndexError::new_err(format!("index {index} of {}", self.packed.len())))
    }
}

/// Builds a manifest from columns, as `NativeManifest.columns` returns them.
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct ManifestBuilder {
    packed: Manifest,
}

#[pymethods]
impl ManifestBuilder {
    #[new]
    fn new() -> Self {
        Self { packed: Manifest::default() }
    }

    /// Adds objects.
    ///
    /// Args:
    ///     bases: The bases that `columns` refers to, in the order of their first occurrence.
    ///     columns: The columns.
    ///
    /// Raises:
    ///     ValueError: The columns do not fit each other.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python")]
    fn add(&mut self, py: Python<'_>, bases: Vec<String>, columns: [Vec<u8>; 6]) -> PyResult<()> {
        let [base_indices, key_offsets, keys, sizes, version_offsets, versions] = columns;
        let columns = Columns { bases: base_indices, key_offsets, keys, sizes, version_offsets, versions };
        let added = py.detach(|| self.packed.extend(&bases, &columns));
        added.ok_or_else(|| PyValueError::new_err("the columns do not fit each other"))
    }

    /// Returns the manifest. The builder is empty afterwards.
    fn finish(&mut self, py: Python<'_>) -> NativeManifest {
        let mut packed = std::mem::take(&mut self.packed);
        py.detach(|| {
            packed.shrink();
            NativeManifest::of(packed)
        })
    }
}

/// Iterator over the pages of a listing, each a `NativeManifest`. Requests the next page while the caller uses one.
///
/// Args:
///     store: The store to list.
///     base: URL of the store, without a trailing slash.
///     prefix: Prefix of the keys, not percent-encoded.
///     glob: Keeps only keys whose part after the prefix matches.
///     suffixes: Keeps only keys that end with one of these; empty: all.
///     limit: Maximum number of objects, in key order; None: no limit.
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct ManifestPages {
    next: Local<NextPage<ManifestPageState>>,
    whole: Manifest,
}

struct ManifestPageState {
    client: Arc<Client>,
    base: String,
    filter: Filter,
    listed: ManifestListing,
}

impl Paged for ManifestPageState {
    type Page = Manifest;

    async fn next(&mut self) -> Result<(Option<Manifest>, bool)> {
        let mut page = Manifest::default();
        let Self { client, base, filter, listed } = self;
        let more = client.list_page_into(&mut page, base, filter, listed).await?;
        Ok((Some(page), more))
    }
}

#[pymethods]
impl ManifestPages {
    #[new]
    fn new(
        py: Python<'_>,
        store: &NativeStore,
        base: String,
        prefix: String,
        glob: Option<&str>,
        suffixes: Vec<String>,
        limit: Option<usize>,
    ) -> PyResult<Self> {
        let filter = Filter::new(glob, suffixes, limit).or_raise(py)?;
        let client = store.client(py)?;
        let listed = ManifestListing::new(&client, &prefix, &filter);
        let objects = ManifestPageState { client, base, filter, listed };
        Ok(Self { next: Local::new(NextPage::Unused(objects)), whole: Manifest::default() })
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<NativeManifest>> {
        let Some(page) = own(&mut self.next)?.take(py)? else { return Ok(None) };
        self.whole.append(&page);
        Ok(Some(NativeManifest::of(page)))
    }

    /// Returns the URL of an object of the pages so far.
    ///
    /// Args:
    ///     index: Index of the object over all pages, from 0.
    ///
    /// Raises:
    ///     IndexError: `index` is out of range.
    fn url(&self, index: usize) -> PyResult<String> {
        let object = self.whole.get(index).ok_or_else(|| PyIndexError::new_err(format!("index {index}")))?;
        Ok(object.url())
    }

    /// Returns a manifest of all pages so far.
    fn whole(&self) -> NativeManifest {
        let mut whole = self.whole.clone();
        whole.shrink();
        NativeManifest::of(whole)
    }
}
