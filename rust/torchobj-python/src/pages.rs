//! A listing while it is made: the datasets use its pages as they come.

use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use torchobj_core::client::Client;
use torchobj_core::error::Result as Listing;
use torchobj_core::fork::Local;
use torchobj_core::list::{Filter, Listed};
use torchobj_core::manifest::Manifest as Packed;
use torchobj_core::runtime::{Task, runtime};

use crate::error::OrRaise;

use crate::manifest::Manifest;
use crate::store::NativeStore;
use crate::wait::wait;

/// What is listed, and where.
struct Prefix {
    client: Arc<Client>,
    base: String,
    filter: Filter,
}

impl Prefix {
    /// The next page, how far the listing is then, and whether there are more.
    async fn page(self: Arc<Self>, mut listed: Listed) -> Listing<(Packed, Listed, bool)> {
        let mut page = Packed::default();
        let Self { client, base, filter } = &*self;
        let more = client.list_page_into(&mut page, base, filter, &mut listed).await?;
        Ok((page, listed, more))
    }
}

struct Coming {
    prefix: Arc<Prefix>,
    next: Option<Task<Listing<(Packed, Listed, bool)>>>,
}

/// The pages of a listing, each a manifest; the next one is on its way while one is used.
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct ManifestPages {
    coming: Local<Coming>,
    whole: Packed,
}

#[pymethods]
impl ManifestPages {
    /// Arguments as for `Manifest.from_listing`.
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
        let listed = Listed::new(&prefix);
        let prefix = Arc::new(Prefix { client: store.client(py)?, base, filter });
        let first = prefix.clone().page(listed);
        let next = py.detach(|| {
            let _runtime = runtime().enter();
            Task::spawn(first)
        });
        Ok(Self { coming: Local::new(Coming { prefix, next: Some(next) }), whole: Packed::default() })
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Manifest>> {
        let inherited = || PyRuntimeError::new_err("this listing is the parent's: a forked process begins its own");
        let coming = self.coming.get_mut().ok_or_else(inherited)?;
        let Some(next) = coming.next.take() else { return Ok(None) };
        let prefix = coming.prefix.clone();
        let (page, next) = wait(py, async move {
            match next.await {
                Ok(Ok((page, listed, more))) => (Ok(page), more.then(|| Task::spawn(prefix.page(listed)))),
                Ok(Err(error)) => (Err(error), None),
                Err(lost) => std::panic::resume_unwind(lost.into_panic()),
            }
        })?;
        coming.next = next;
        let page = page.or_raise(py)?;
        self.whole.append(&page);
        Ok(Some(Manifest::of(page)))
    }

    /// The URL of object `index` of those that were listed so far.
    fn url(&self, index: usize) -> PyResult<String> {
        let object = self.whole.get(index).ok_or_else(|| PyIndexError::new_err(format!("index {index}")))?;
        Ok(object.url())
    }

    /// All objects that were listed so far.
    fn whole(&self) -> Manifest {
        let mut whole = self.whole.clone();
        whole.shrink();
        Manifest::of(whole)
    }
}
