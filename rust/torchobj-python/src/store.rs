//! A store, as `torchobj.Store` uses it.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, ErrorKind, Operation};
use torchobj_core::fork::Local;
use torchobj_core::list::Pages;
use torchobj_core::read::{Job, Landed, Read, Target, get_many as read_many};
use torchobj_core::runtime::{Task, runtime};
use torchobj_core::types::{Attributes, ByteRange, Condition, ListPage, ObjectHead, PutOptions, Upload, Version};
use torchobj_core::url::ObjectUrl;

use crate::buffer::{self, Buffer};
use crate::config::StoreConfig;
use crate::error::{OrRaise, exception};
use crate::process::{self, StoreKey};
use crate::wait::wait;

/// Key, size, version, modified (milliseconds since 1970), storage class.
type Entry = (String, Option<u64>, Option<String>, Option<i64>, Option<String>);

/// Content type, encoding, disposition, language, cache control, storage class, metadata.
pub(crate) type AttributeFields = (
    Option<String>,
    Option<String>,
    Option<String>,
    Option<String>,
    Option<String>,
    Option<String>,
    Vec<(String, String)>,
);

/// A bucket or folder, and how it is used.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeStore {
    key: StoreKey,
}

impl NativeStore {
    /// The client of the process that asks.
    pub(crate) fn client(&self, py: Python<'_>) -> PyResult<Arc<Client>> {
        py.detach(|| process::client(&self.key)).or_raise(py)
    }
}

#[pymethods]
impl NativeStore {
    #[new]
    fn new(py: Python<'_>, scheme: &str, bucket: String, config: StoreConfig) -> PyResult<Self> {
        let environment = torchobj_store::env::fingerprint();
        let key = StoreKey::new(scheme, bucket, &config.providers(), config.policy(), environment).or_raise(py)?;
        Ok(Self { key })
    }

    /// The URL of a key.
    fn url(&self, py: Python<'_>, key: &str) -> PyResult<String> {
        Ok(self.client(py)?.store().url(key))
    }

    /// Reads an object, or bytes `start..end` of it; a negative `start` counts from the end.
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
        let read = Read { range, version: version.map(Version::new), ..Read::whole(key) };
        let landed = wait(py, async move { client.get(read).await })?.or_raise(py)?;
        Ok(landed.buffer.into())
    }

    /// Reads ranges `(key, start, end)`, and checks that those of one object are of one version.
    fn get_ranges(&self, py: Python<'_>, ranges: Vec<(String, i64, Option<u64>)>) -> PyResult<Vec<Buffer>> {
        let client = self.client(py)?;
        let jobs = ranges.iter().map(|(key, start, end)| {
            let read = Read { range: Some(byte_range(*start, *end)), ..Read::whole(key) };
            Job { client: client.clone(), read }
        });
        let jobs = jobs.collect();
        let landed = wait(py, read_many(jobs, true))?;
        let landed = first_error(py, landed)?;
        let mut versions = HashMap::new();
        for ((key, ..), landed) in ranges.iter().zip(&landed) {
            if versions.entry(key).or_insert(&landed.version) != &&landed.version {
                let message = "the object was replaced between two of its ranges";
                let error = client.store().error(ErrorKind::Changed, Operation::Get, key, message);
                return Err(exception(py, &error));
            }
        }
        Ok(landed.into_iter().map(|landed| landed.buffer.into()).collect())
    }

    /// The first and the last bytes of an object, its size and its version.
    fn get_ends(
        &self,
        py: Python<'_>,
        key: String,
        head_bytes: u64,
        tail_bytes: u64,
    ) -> PyResult<(Buffer, Buffer, u64, Option<String>)> {
        let client = self.client(py)?;
        let ends = wait(py, async move { client.get_ends(&key, head_bytes, tail_bytes).await })?.or_raise(py)?;
        let version = ends.version.map(|version| version.as_str().to_owned());
        Ok((ends.head.into(), ends.tail.into(), ends.size, version))
    }

    /// Size, version, modified, and attributes of an object.
    fn head(&self, py: Python<'_>, key: String) -> PyResult<(u64, Option<String>, Option<i64>, AttributeFields)> {
        let client = self.client(py)?;
        let head = wait(py, async move { client.head(&key).await })?.or_raise(py)?;
        let ObjectHead { size, version, modified_ms, attributes: a } = head;
        let attributes = (
            a.content_type,
            a.content_encoding,
            a.content_disposition,
            a.content_language,
            a.cache_control,
            a.storage_class,
            a.metadata,
        );
        Ok((size, version.map(|version| version.as_str().to_owned()), modified_ms, attributes))
    }

    /// Writes any buffer as an object and returns its version.
    #[pyo3(signature = (key, data, attributes, if_none_match=false, if_match=None))]
    fn put(
        &self,
        py: Python<'_>,
        key: String,
        data: &Bound<'_, PyAny>,
        attributes: AttributeFields,
        if_none_match: bool,
        if_match: Option<String>,
    ) -> PyResult<String> {
        let client = self.client(py)?;
        let options = put_options(attributes, if_none_match, if_match);
        let payload = buffer::share(data)?.into();
        let version = wait(py, async move { client.put(&key, payload, &options).await })?.or_raise(py)?;
        Ok(version.as_str().to_owned())
    }

    /// Pages of a listing.
    #[pyo3(signature = (prefix, delimiter=None, start_after=None))]
    fn list(
        &self,
        py: Python<'_>,
        prefix: String,
        delimiter: Option<String>,
        start_after: Option<String>,
    ) -> PyResult<ListPages> {
        let client = self.client(py)?;
        let pages = Pages::new(&prefix, delimiter.as_deref(), start_after.as_deref());
        let first = next_page(client.clone(), pages);
        let next = py.detach(|| {
            let _runtime = runtime().enter();
            Task::spawn(first)
        });
        Ok(ListPages { coming: Local::new(Coming { client, next: Some(next) }) })
    }

    /// Copies an object of the same kind of store.
    fn copy(&self, py: Python<'_>, source_url: &str, key: String) -> PyResult<String> {
        let client = self.client(py)?;
        let source = ObjectUrl::parse(source_url).or_raise(py)?;
        let version = wait(py, async move { client.copy(&source, &key).await })?.or_raise(py)?;
        Ok(version.as_str().to_owned())
    }

    /// Deletes objects.
    fn delete(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<()> {
        let client = self.client(py)?;
        wait(py, async move { client.delete(&keys).await })?.or_raise(py)
    }

    /// Deletes an object if it is of this version.
    fn delete_if(&self, py: Python<'_>, key: String, version: String) -> PyResult<()> {
        let client = self.client(py)?;
        wait(py, async move { client.delete_if(&key, &Version::new(version)).await })?.or_raise(py)
    }

    /// Forgets an unfinished upload.
    fn abort_upload(&self, py: Python<'_>, key: String, upload_id: String) -> PyResult<()> {
        let client = self.client(py)?;
        let upload = Upload { key, id: upload_id, nonce: String::new(), begun_ms: None, checksum: None };
        wait(py, async move { client.abort(&upload).await })?.or_raise(py)
    }

    /// Unfinished uploads under a prefix: key, id, and when they began in milliseconds since 1970.
    fn uploads(&self, py: Python<'_>, prefix: String) -> PyResult<Vec<(String, String, Option<i64>)>> {
        let client = self.client(py)?;
        let uploads = wait(py, async move { client.uploads(&prefix).await })?.or_raise(py)?;
        Ok(uploads.into_iter().map(|upload| (upload.key, upload.id, upload.begun_ms)).collect())
    }
}

/// Reads whole objects of any stores: `jobs` are pairs of a store and a key. Results are buffers, or with `into` the
/// number of bytes written; with `return_errors` an exception in place of what could not be read.
#[pyfunction]
#[pyo3(signature = (jobs, into=None, return_errors=false))]
pub(crate) fn get_many<'py>(
    py: Python<'py>,
    jobs: Vec<(Bound<'py, NativeStore>, String)>,
    into: Option<Vec<Bound<'py, PyAny>>>,
    return_errors: bool,
) -> PyResult<Bound<'py, PyList>> {
    let lent = into.is_some();
    let mut memory = match into {
        Some(buffers) => buffer::lend_all(&buffers)?.into_iter().map(Target::Given).collect(),
        None => Vec::new(),
    };
    memory.resize_with(jobs.len(), Target::default);
    let clients = clients(py, jobs.iter().map(|(store, _)| store))?;
    let reads = clients.into_iter().zip(&jobs).zip(memory);
    let reads =
        reads.map(|((client, (_, key)), into)| Job { client, read: Read { into, ..Read::whole(key.as_str()) } });
    let reads = reads.collect();
    let results = wait(py, read_many(reads, !return_errors))?;
    let list = PyList::empty(py);
    if return_errors {
        for result in results {
            match result {
                Ok(landed) if lent => list.append(landed.buffer.len())?,
                Ok(landed) => list.append(Buffer::from(landed.buffer).into_pyobject(py)?)?,
                Err(error) => list.append(exception(py, &error).into_value(py))?,
            }
        }
        return Ok(list);
    }
    for landed in first_error(py, results)? {
        if lent {
            list.append(landed.buffer.len())?;
        } else {
            list.append(Buffer::from(landed.buffer).into_pyobject(py)?)?;
        }
    }
    Ok(list)
}

/// The clients of `stores`, most of which are one and the same.
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

/// All results, or the first error that is not the consequence of another.
pub(crate) fn first_error(py: Python<'_>, results: Vec<Result<Landed, Error>>) -> PyResult<Vec<Landed>> {
    let consequence = |error: &Error| error.kind() == ErrorKind::Cancelled;
    if let Some(Err(error)) = results.iter().find(|result| result.as_ref().is_err_and(|error| !consequence(error))) {
        return Err(exception(py, error));
    }
    results.into_iter().collect::<Result<_, _>>().or_raise(py)
}

fn byte_range(start: i64, end: Option<u64>) -> ByteRange {
    match (u64::try_from(start), end) {
        (Err(_), _) => ByteRange::Suffix(start.unsigned_abs()),
        (Ok(start), None) => ByteRange::From(start),
        (Ok(start), Some(end)) => ByteRange::Bounded(start..end.max(start)),
    }
}

/// Options of a write from the fields of Python.
pub(crate) fn put_options(fields: AttributeFields, if_none_match: bool, if_match: Option<String>) -> PutOptions {
    let (content_type, content_encoding, content_disposition, content_language, cache_control, storage_class, metadata) =
        fields;
    let attributes = Attributes {
        content_type,
        content_encoding,
        content_disposition,
        content_language,
        cache_control,
        storage_class,
        metadata,
    };
    let condition = match (if_none_match, if_match) {
        (true, _) => Condition::Absent,
        (false, Some(version)) => Condition::Matches(Version::new(version)),
        (false, None) => Condition::Always,
    };
    PutOptions { attributes, condition, checksum: None }
}

/// Pages of a listing; the next is fetched while one is used.
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct ListPages {
    coming: Local<Coming>,
}

struct Coming {
    client: Arc<Client>,
    next: Option<Task<Page>>,
}

/// How far a listing is, and the page that was asked for.
type Page = (Pages, Result<Option<ListPage>, Error>);

async fn next_page(client: Arc<Client>, mut pages: Pages) -> Page {
    let page = pages.next(&client).await;
    (pages, page)
}

#[pymethods]
impl ListPages {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<(Vec<Entry>, Vec<String>)>> {
        let inherited = || PyRuntimeError::new_err("this listing is the parent's: a forked process begins its own");
        let coming = self.coming.get_mut().ok_or_else(inherited)?;
        let Some(next) = coming.next.take() else { return Ok(None) };
        let client = coming.client.clone();
        let (page, next) = wait(py, async move {
            let (pages, page) = match next.await {
                Ok(page) => page,
                Err(lost) => std::panic::resume_unwind(lost.into_panic()),
            };
            let more = page.is_ok() && !pages.ended();
            (page, more.then(|| Task::spawn(next_page(client, pages))))
        })?;
        coming.next = next;
        let Some(page) = page.or_raise(py)? else { return Ok(None) };
        let entries = page.entries.into_iter().map(|entry| {
            let version = entry.version.map(|version| version.as_str().to_owned());
            (entry.key, entry.size, version, entry.modified_ms, entry.storage_class)
        });
        Ok(Some((entries.collect(), page.prefixes)))
    }
}
