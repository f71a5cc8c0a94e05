//! Iterators over the pages of a listing, which request the next page while the caller uses one.

use std::panic::resume_unwind;
use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use torchobj_core::client::Client;
use torchobj_core::error::Result;
use torchobj_core::fork::Local;
use torchobj_core::list::{Filter, Listed, Pages};
use torchobj_core::manifest::Manifest as Packed;
use torchobj_core::runtime::{Task, runtime};
use torchobj_core::types::ListPage;

use crate::error::OrRaise;
use crate::manifest::Manifest;
use crate::store::NativeStore;
use crate::wait::wait;

/// A listing and its position.
trait Listing: Sized + Send + 'static {
    type Page: Send + 'static;

    /// Requests the next page. Advances the position.
    fn next(&mut self) -> impl Future<Output = Result<Option<Self::Page>>> + Send;

    /// Returns whether the last page was returned.
    fn ended(&self) -> bool;
}

/// A listing and its next page; `None` at its end.
type Requested<L> = (L, Result<Option<<L as Listing>::Page>>);

/// A listing, the next page of which is requested in the background.
struct NextPage<L: Listing>(Option<Task<Requested<L>>>);

impl<L: Listing> NextPage<L> {
    fn new(py: Python<'_>, listing: L) -> Self {
        py.detach(|| {
            let _runtime = runtime().enter();
            Self(Some(Self::request(listing)))
        })
    }

    fn request(mut listing: L) -> Task<Requested<L>> {
        Task::spawn(async move {
            let page = listing.next().await;
            (listing, page)
        })
    }

    /// Waits for the next page and requests the one after it; `None` at the end of the listing.
    fn take(&mut self, py: Python<'_>) -> PyResult<Option<L::Page>> {
        let Some(next) = self.0.take() else { return Ok(None) };
        let (page, next) = wait(py, async move {
            let (listing, page) = next.await.unwrap_or_else(|lost| resume_unwind(lost.into_panic()));
            let more = page.is_ok() && !listing.ended();
            (page, more.then(|| Self::request(listing)))
        })?;
        self.0 = next;
        page.or_raise(py)
    }
}

/// The next page of a listing of this process.
fn own<L: Listing>(next: &mut Local<NextPage<L>>) -> PyResult<&mut NextPage<L>> {
    let inherited = || PyRuntimeError::new_err("this listing belongs to the parent of this forked process");
    next.get_mut().ok_or_else(inherited)
}

/// Key, size, version, modified (milliseconds since 1970), storage class.
type Entry = (String, Option<u64>, Option<String>, Option<i64>, Option<String>);

/// Iterator over the pages of a listing: pairs of entries and common prefixes. Requests the next page while the caller uses
/// one. An entry is key, size, version, time of the last modification in milliseconds since 1970, and storage class.
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct ListPages {
    next: Local<NextPage<Keys>>,
}

struct Keys {
    client: Arc<Client>,
    pages: Pages,
}

impl Listing for Keys {
    type Page = ListPage;

    async fn next(&mut self) -> Result<Option<ListPage>> {
        self.pages.next(&self.client).await
    }

    fn ended(&self) -> bool {
        self.pages.ended()
    }
}

impl ListPages {
    pub(crate) fn new(py: Python<'_>, client: Arc<Client>, pages: Pages) -> Self {
        Self { next: Local::new(NextPage::new(py, Keys { client, pages })) }
    }
}

#[pymethods]
impl ListPages {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<(Vec<Entry>, Vec<String>)>> {
        let Some(page) = own(&mut self.next)?.take(py)? else { return Ok(None) };
        let entries = page.entries.into_iter().map(|entry| {
            let version = entry.version.map(|version| version.as_str().to_owned());
            (entry.key, entry.size, version, entry.modified_ms, entry.storage_class)
        });
        Ok(Some((entries.collect(), page.prefixes)))
    }
}

/// Iterator over the pages of a listing, each a `Manifest`. Requests the next page while the caller uses one.
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
    next: Local<NextPage<Objects>>,
    whole: Packed,
}

struct Objects {
    client: Arc<Client>,
    base: String,
    filter: Filter,
    listed: Listed,
    ended: bool,
}

impl Listing for Objects {
    type Page = Packed;

    async fn next(&mut self) -> Result<Option<Packed>> {
        let mut page = Packed::default();
        let Self { client, base, filter, listed, .. } = self;
        self.ended = !client.list_page_into(&mut page, base, filter, listed).await?;
        Ok(Some(page))
    }

    fn ended(&self) -> bool {
        self.ended
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
        let listed = Listed::new(&client, &prefix, &filter);
        let objects = Objects { client, base, filter, listed, ended: false };
        Ok(Self { next: Local::new(NextPage::new(py, objects)), whole: Packed::default() })
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Manifest>> {
        let Some(page) = own(&mut self.next)?.take(py)? else { return Ok(None) };
        self.whole.append(&page);
        Ok(Some(Manifest::of(page)))
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
    fn whole(&self) -> Manifest {
        let mut whole = self.whole.clone();
        whole.shrink();
        Manifest::of(whole)
    }
}
