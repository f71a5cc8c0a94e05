//! Operations on a store, for `torchobj.Store`.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::prelude::*;
use torchobj_core::client::Client;
use torchobj_core::error::{ErrorKind, Operation};
use torchobj_core::list::{Filter, ListOptions, ListStream};
use torchobj_core::read::{ClientRead, ReadRequest, try_get_many};
use torchobj_core::types::{ByteRange, Condition, PutOptions, Upload, Version};
use torchobj_core::url::ObjectUrl;

use crate::attributes::Attributes;
use crate::buffer::{self, Buffer};
use crate::config::StoreConfig;
use crate::error::{OrRaise, exception};
use crate::pages::ListPages;
use crate::process::{self, StoreKey};
use crate::wait::wait;

/// A bucket or folder, or a prefix in it, and its configuration. Creating one sends no request.
///
/// Stores with equal arguments share connections, credentials and the concurrency limit. A forked child makes its own.
/// Methods raise subclasses of `StoreError` and release the GIL.
///
/// Args:
///     scheme: `s3`, `gs`, `file` or `memory`.
///     bucket: Name of the bucket, or path of the folder.
///     config: Configuration of the store.
///     prefix: Prefix of all keys, which methods take and return without it.
///
/// Raises:
///     ConfigError: The scheme is not supported.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeStore {
    key: StoreKey,
}

impl NativeStore {
    /// The client of this process.
    pub(crate) fn client(&self, py: Python<'_>) -> PyResult<Arc<Client>> {
        py.detach(|| process::client(&self.key)).or_raise(py)
    }
}

#[pymethods]
impl NativeStore {
    #[new]
    #[pyo3(signature = (scheme, bucket, config, prefix=""))]
    fn new(py: Python<'_>, scheme: &str, bucket: String, config: StoreConfig, prefix: &str) -> PyResult<Self> {
        let key = StoreKey::new(scheme, bucket, prefix.to_owned(), config).or_raise(py)?;
        Ok(Self { key })
    }

    /// Returns the URL of a key.
    fn url(&self, py: Python<'_>, key: &str) -> PyResult<String> {
        Ok(self.client(py)?.store().url(key))
    }

    /// Reads an object, or a range of it.
    ///
    /// Args:
    ///     key: Key of the object.
    ///     start: First byte; negative: counted from the end of the object. None: the whole object.
    ///     end: End of the range, exclusive; clamped to the size of the object. None: the end of the object.
    ///     version: The version to read; None: any.
    ///
    /// Returns:
    ///     A buffer that owns its memory.
    #[pyo3(signature = (key, start=None, end=None, version=None))]
    fn get(
        &self,
        py: Python<'_>,
        key: String,
        start: Option<i64>,
        end: Option<u64>,
        version: Option<String>,
    ) -> PyResult<Buffer> {
        let client = self.client(py)?;
        let range = start.map(|start| byte_range(start, end));
        let read = ReadRequest { range, version: version.map(Version::selected), ..ReadRequest::whole(key) };
        let fetched = wait(py, async move { client.get(read).await })?.or_raise(py)?;
        Ok(fetched.buffer.into())
    }

    /// Reads ranges concurrently, and checks that all ranges of an object have the same version.
    ///
    /// Args:
    ///     ranges: Triples of a key, a start and an end, as in `get`.
    ///
    /// Returns:
    ///     A buffer for each range.
    ///
    /// Raises:
    ///     ObjectChangedError: An object was replaced between two of its ranges.
    fn get_ranges(&self, py: Python<'_>, ranges: Vec<(String, i64, Option<u64>)>) -> PyResult<Vec<Buffer>> {
        let client = self.client(py)?;
        let jobs = ranges.iter().map(|(key, start, end)| {
            let read = ReadRequest { range: Some(byte_range(*start, *end)), ..ReadRequest::whole(key) };
            ClientRead::new(client.clone(), read)
        });
        let jobs = jobs.collect();
        let fetched = wait(py, try_get_many(jobs))?.or_raise(py)?;
        let mut versions = HashMap::new();
        for ((key, ..), fetched) in ranges.iter().zip(&fetched) {
            if versions.entry(key).or_insert(&fetched.version) != &&fetched.version {
                let message = "the object was replaced between two of its ranges";
                let error = client.store().error(ErrorKind::Changed, Operation::Get, key, message);
                return Err(exception(py, &error));
            }
        }
        Ok(fetched.into_iter().map(|fetched| fetched.buffer.into()).collect())
    }

    /// Reads the first and the last bytes of an object, of the same version.
    ///
    /// Args:
    ///     key: Key of the object.
    ///     head_bytes: Number of bytes from the start.
    ///     tail_bytes: Number of bytes from the end.
    ///
    /// Returns:
    ///     `(head, tail, size, version)`; head and tail overlap if the object is small.
    fn get_ends(
        &self,
        py: Python<'_>,
        key: String,
        head_bytes: u64,
        tail_bytes: u64,
    ) -> PyResult<(Buffer, Buffer, u64, Option<String>)> {
        let client = self.client(py)?;
        let read =
            wait(py, async move { client.get_head_and_tail(&key, head_bytes, tail_bytes).await })?.or_raise(py)?;
        let version = read.version.map(|version| version.as_str().to_owned());
        Ok((read.head.into(), read.tail.into(), read.size, version))
    }

    /// Returns the size, the version, the time of the last modification and the attributes of an object. The time is in
    /// milliseconds since 1970.
    fn head(&self, py: Python<'_>, key: String) -> PyResult<(u64, Option<String>, Option<i64>, Attributes)> {
        let client = self.client(py)?;
        let head = wait(py, async move { client.head(&key).await })?.or_raise(py)?;
        let version = head.version.map(|version| version.as_str().to_owned());
        Ok((head.size, version, head.modified_ms, Attributes(head.attributes)))
    }

    /// Returns the buckets of the account: names, and times of creation in milliseconds since 1970. The store needs no bucket.
    ///
    /// Args:
    ///     project: The project, on Google Cloud Storage.
    #[pyo3(signature = (project=None))]
    fn buckets(&self, py: Python<'_>, project: Option<String>) -> PyResult<Vec<(String, Option<i64>)>> {
        let client = self.client(py)?;
        let buckets = wait(py, async move { client.buckets(project.as_deref()).await })?.or_raise(py)?;
        Ok(buckets.into_iter().map(|bucket| (bucket.key, bucket.modified_ms)).collect())
    }

    /// Writes an object.
    ///
    /// Args:
    ///     key: Key of the object.
    ///     data: A contiguous buffer. It must not change during the call, and is not used afterwards.
    ///     attributes: Headers and metadata of the object.
    ///     overwrite: Whether an existing object may be replaced.
    ///     if_version: The version that is replaced.
    ///
    /// Returns:
    ///     The version of the object.
    ///
    /// Raises:
    ///     PreconditionFailedError: The condition is not met.
    #[pyo3(signature = (key, data, attributes, overwrite=true, if_version=None))]
    fn put(
        &self,
        py: Python<'_>,
        key: String,
        data: &Bound<'_, PyAny>,
        attributes: Attributes,
        overwrite: bool,
        if_version: Option<String>,
    ) -> PyResult<String> {
        let client = self.client(py)?;
        let options = put_options(attributes, overwrite, if_version);
        let payload = buffer::share(data)?.into();
        let version = wait(py, async move { client.put(&key, payload, &options).await })?.or_raise(py)?;
        Ok(version.as_str().to_owned())
    }

    /// Lists keys.
    ///
    /// Args:
    ///     prefix: Prefix of the keys.
    ///     delimiter: Keys that contain it after the prefix are listed as common prefixes.
    ///     start_after: Lists only keys after this one.
    ///     glob: Keeps only keys whose part after the prefix matches.
    ///     ordered: Whether pages are in key order, or as they arrive.
    ///
    /// Returns:
    ///     An iterator over pages.
    #[pyo3(signature = (prefix, delimiter=None, start_after=None, glob=None, ordered=true))]
    fn list(
        &self,
        py: Python<'_>,
        prefix: &str,
        delimiter: Option<&str>,
        start_after: Option<&str>,
        glob: Option<&str>,
        ordered: bool,
    ) -> PyResult<ListPages> {
        let filter = glob.map(|glob| Filter::new(Some(glob), Vec::new(), None)).transpose().or_raise(py)?;
        let options = ListOptions { delimiter, start_after, filter, ordered };
        Ok(ListPages::new(ListStream::new(self.client(py)?, prefix, options)))
    }

    /// Copies an object on the server.
    ///
    /// Args:
    ///     source_url: URL of the object to copy; its scheme must be that of this store.
    ///     key: Key of the copy.
    ///
    /// Returns:
    ///     The version of the copy.
    fn copy(&self, py: Python<'_>, source_url: &str, key: String) -> PyResult<String> {
        let client = self.client(py)?;
        let source = ObjectUrl::parse(source_url).or_raise(py)?;
        let version = wait(py, async move { client.copy(&source, &key).await })?.or_raise(py)?;
        Ok(version.as_str().to_owned())
    }

    /// Deletes objects. Succeeds for objects that do not exist.
    fn delete(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<()> {
        let client = self.client(py)?;
        wait(py, async move { client.delete(&keys).await })?.or_raise(py)
    }

    /// Deletes an object if it has this version. Succeeds if it does not exist.
    ///
    /// Raises:
    ///     PreconditionFailedError: The object has another version.
    fn delete_if(&self, py: Python<'_>, key: String, version: String) -> PyResult<()> {
        let client = self.client(py)?;
        wait(py, async move { client.delete_if(&key, &Version::new(version)).await })?.or_raise(py)
    }

    /// Aborts an unfinished upload and deletes its parts. Succeeds if it does not exist.
    fn abort_upload(&self, py: Python<'_>, key: String, upload_id: String) -> PyResult<()> {
        let client = self.client(py)?;
        let upload = Upload::of_other_client(key, upload_id, None);
        wait(py, async move { client.abort(&upload).await })?.or_raise(py)
    }

    /// Returns the unfinished uploads under a prefix: key, id and start time in milliseconds since 1970.
    fn uploads(&self, py: Python<'_>, prefix: String) -> PyResult<Vec<(String, String, Option<i64>)>> {
        let client = self.client(py)?;
        let uploads = wait(py, async move { client.uploads(&prefix).await })?.or_raise(py)?;
        Ok(uploads.into_iter().map(|upload| (upload.key, upload.id, upload.begun_ms)).collect())
    }
}

/// The clients of `stores`, most of which are the same.
pub(crate) fn clients<'a, 'py: 'a>(
    py: Python<'py>,
    stores: impl Iterator<Item = &'a Bound<'py, NativeStore>>,
) -> PyResult<Vec<Arc<Client>>> {
    let mut known: Option<(&Bound<'_, NativeStore>, Arc<Client>)> = None;
    stores
        .map(|store| match &known {
            Some((last, client)) if last.is(store) => Ok(client.clone()),
            _ => {
                let client = store.get().client(py)?;
                known = Some((store, client.clone()));
                Ok(client)
            }
        })
        .collect()
}

fn byte_range(start: i64, end: Option<u64>) -> ByteRange {
    match (u64::try_from(start), end) {
        (Err(_), _) => ByteRange::Suffix(start.unsigned_abs()),
        (Ok(start), None) => ByteRange::From(start),
        (Ok(start), Some(end)) => ByteRange::Bounded(start..end.max(start)),
    }
}

/// Options of a write from arguments of Python.
pub(crate) fn put_options(attributes: Attributes, overwrite: bool, if_version: Option<String>) -> PutOptions {
    let condition = match (overwrite, if_version) {
        (false, _) => Condition::Absent,
        (true, Some(version)) => Condition::Matches(Version::new(version)),
        (true, None) => Condition::Always,
    };
    PutOptions { attributes: attributes.0, condition, ..PutOptions::default() }
}
