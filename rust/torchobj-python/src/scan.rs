//! Attributes of many objects.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyList};
use torchobj_core::client::Client;
use torchobj_core::error::Result;
use torchobj_core::fork::Local;
use torchobj_core::list::{Filter, HasMetadata, Scan, head_many, try_head_many};
use torchobj_core::types::ObjectHead;

use crate::attributes::Attributes;
use crate::error::{OrRaise, exception};
use crate::pages::{NextPage, Paged, export, own};
use crate::store::NativeStore;
use crate::wait::wait;

/// Key, size, version, modified (milliseconds since 1970), attributes, checksum.
type Head = (String, u64, Option<String>, Option<i64>, Attributes, Option<String>);

fn head((key, head): (String, ObjectHead)) -> Head {
    let version = head.version.map(|version| version.as_str().to_owned());
    let checksum = head.checksum.map(|checksum| checksum.to_string());
    (key, head.size, version, head.modified_ms, Attributes(head.attributes), checksum)
}

/// Returns the attributes of objects, by concurrent HEAD requests.
///
/// Args:
///     store: The store.
///     keys: Keys of the objects.
///     return_errors: Whether the list contains an exception for each object whose request failed, instead of raising the
///         first one.
///     checksum: Whether checksums are requested.
///
/// Returns:
///     Key, size, version, time of the last modification in milliseconds since 1970, attributes and checksum of each object, in
///     order.
#[pyfunction]
#[pyo3(signature = (store, keys, return_errors=false, checksum=false))]
pub(crate) fn heads<'py>(
    py: Python<'py>,
    store: &NativeStore,
    keys: Vec<String>,
    return_errors: bool,
    checksum: bool,
) -> PyResult<Bound<'py, PyList>> {
    let client = store.client(py)?;
    let list = PyList::empty(py);
    if !return_errors {
        for found in wait(py, async move { try_head_many(&client, keys, checksum).await })?.or_raise(py)? {
            list.append(head(found))?;
        }
        return Ok(list);
    }
    for found in wait(py, async move { head_many(&client, keys, checksum).await })? {
        match found {
            Ok(found) => list.append(head(found))?,
            Err(error) => list.append(exception(py, &error).into_value(py))?,
        }
    }
    Ok(list)
}

/// Iterator over the attributes of all objects under a prefix, in lists and in no order. Requests the next ones while the
/// caller uses a list. An object is a tuple as of `heads`, without a checksum.
///
/// Args:
///     store: The store.
///     prefix: Prefix of the keys.
///     glob: Keeps only keys whose part after the prefix matches.
///     has_metadata: Keeps only objects with user metadata: of this name, or any if it is the empty string.
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct ScanPages {
    next: Local<NextPage<Heads>>,
}

struct Heads {
    client: Arc<Client>,
    prefix: String,
    filter: Option<Filter>,
    has_metadata: HasMetadata,
    scan: Option<Scan>,
}

impl Paged for Heads {
    type Page = Vec<(String, ObjectHead)>;

    async fn next(&mut self) -> Result<(Option<Self::Page>, bool)> {
        let Self { client, prefix, filter, has_metadata, scan } = self;
        let new = || Scan::new(client.clone(), prefix, filter.take(), has_metadata.clone());
        let page = scan.get_or_insert_with(new).next().await?;
        let more = page.is_some();
        Ok((page, more))
    }
}

#[pymethods]
impl ScanPages {
    #[new]
    fn new(
        py: Python<'_>,
        store: &NativeStore,
        prefix: String,
        glob: Option<&str>,
        has_metadata: Option<String>,
    ) -> PyResult<Self> {
        let has_metadata = match has_metadata {
            None => HasMetadata::Any,
            Some(name) if name.is_empty() => HasMetadata::Some,
            Some(name) => HasMetadata::Named(name.to_lowercase()),
        };
        let filter = glob.map(|glob| Filter::new(Some(glob), Vec::new(), None)).transpose().or_raise(py)?;
        let client = store.client(py)?;
        let heads = Heads { client, prefix, filter, has_metadata, scan: None };
        Ok(Self { next: Local::new(NextPage::Unused(heads)) })
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Vec<Head>>> {
        let page = own(&mut self.next)?.take(py)?;
        Ok(page.map(|page| page.into_iter().map(head).collect()))
    }

    /// Exports the remaining objects as an Arrow stream. The iterator is exhausted then.
    ///
    /// Args:
    ///     requested_schema: Ignored.
    #[pyo3(signature = (requested_schema=None))]
    #[expect(unused_variables, reason = "the protocol allows to return another schema")]
    fn __arrow_c_stream__<'py>(
        &mut self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        export(py, &mut self.next, true, |columns, page| {
            page.iter().for_each(|(key, head)| columns.push_head(key, head));
        })
    }
}
