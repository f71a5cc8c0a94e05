//! Iterators over the pages of a listing, which request the next page while the caller uses one.

use std::panic::resume_unwind;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyString};
use torchobj_core::error::Result;
use torchobj_core::fork::Local;
use torchobj_core::list::ListStream;
use torchobj_core::runtime::Task;
use torchobj_core::types::ListPage;

use crate::arrow;
use crate::error::OrRaise;
use crate::wait::wait;

/// Pages of a listing or of HEAD requests, and a position among them.
pub(crate) trait Paged: Sized + Send + 'static {
    type Page: Send + 'static;

    /// Requests the next page. Advances the position. Returns `None` at the end, and whether another page may follow.
    fn next(&mut self) -> impl Future<Output = Result<(Option<Self::Page>, bool)>> + Send;
}

/// A listing, and the result of its next request.
type Requested<L> = (L, Result<(Option<<L as Paged>::Page>, bool)>);

/// A listing. After its second page, the next one is requested in the background: a caller may need the first page only.
pub(crate) enum NextPage<L: Paged> {
    Unused(L),
    /// After the first page.
    Used(L),
    Requested(Task<Requested<L>>),
    Ended,
}

impl<L: Paged> NextPage<L> {
    fn request(mut listing: L) -> Task<Requested<L>> {
        Task::spawn(async move {
            let page = listing.next().await;
            (listing, page)
        })
    }

    /// Waits for the next page and may request the one after it; `None` at the end of the listing.
    pub(crate) fn take(&mut self, py: Python<'_>) -> PyResult<Option<L::Page>> {
        let current = std::mem::replace(self, Self::Ended);
        let ahead = !matches!(current, Self::Unused(_));
        let (page, next) = wait(py, async move {
            let (listing, page) = match current {
                Self::Ended => return (Ok((None, false)), Self::Ended),
                Self::Unused(mut listing) | Self::Used(mut listing) => {
                    let page = listing.next().await;
                    (listing, page)
                }
                Self::Requested(next) => next.await.unwrap_or_else(|lost| resume_unwind(lost.into_panic())),
            };
            let next = match page.as_ref().is_ok_and(|(_, more)| *more) {
                true if ahead => Self::Requested(Self::request(listing)),
                true => Self::Used(listing),
                false => Self::Ended,
            };
            (page, next)
        })?;
        *self = next;
        Ok(page.or_raise(py)?.0)
    }
}

/// The next page of a listing of this process.
pub(crate) fn own<L: Paged>(next: &mut Local<NextPage<L>>) -> PyResult<&mut NextPage<L>> {
    let inherited = || PyRuntimeError::new_err("this listing belongs to the parent of this forked process");
    next.get_mut().ok_or_else(inherited)
}

/// Exports the remaining pages as an Arrow stream. `push` appends a page to the columns.
pub(crate) fn export<'py, L: Paged>(
    py: Python<'py>,
    next: &mut Local<NextPage<L>>,
    with_attributes: bool,
    push: impl Fn(&mut arrow::Columns, L::Page) + Send + 'static,
) -> PyResult<Bound<'py, PyCapsule>> {
    let mut remaining = Local::new(std::mem::replace(own(next)?, NextPage::Ended));
    let rows = move |py: Python<'_>, columns: &mut arrow::Columns| {
        let page = own(&mut remaining)?.take(py)?;
        let more = page.is_some();
        page.into_iter().for_each(|page| push(columns, page));
        Ok(more)
    };
    arrow::stream(py, with_attributes, Box::new(rows))
}

/// Key, size, version, modified (milliseconds since 1970), storage class.
type Entry<'py> = (String, Option<u64>, Option<Bound<'py, PyString>>, Option<i64>, Option<Bound<'py, PyString>>);

/// Entries and common prefixes.
type Page<'py> = (Vec<Entry<'py>>, Vec<String>);

/// Iterator over the pages of a listing: pairs of entries and common prefixes. Requests the next page while the caller uses
/// one. An entry is key, size, version, time of the last modification in milliseconds since 1970, and storage class.
#[pyclass(module = "torchobj._torchobj")]
pub(crate) struct ListPages {
    next: Local<NextPage<ListStream>>,
}

impl Paged for ListStream {
    type Page = ListPage;

    async fn next(&mut self) -> Result<(Option<ListPage>, bool)> {
        Ok((self.next().await?, !self.ended()))
    }
}

impl ListPages {
    pub(crate) fn new(stream: ListStream) -> Self {
        Self { next: Local::new(NextPage::Unused(stream)) }
    }
}

#[pymethods]
impl ListPages {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Page<'py>>> {
        let Some(page) = own(&mut self.next)?.take(py)? else { return Ok(None) };
        let entries = page.entries.into_iter().map(|entry| {
            let version = entry.version.map(|version| PyString::new(py, version.as_str()));
            let storage_class = entry.storage_class.map(|class| PyString::intern(py, &class));
            (entry.key, entry.size, version, entry.modified_ms, storage_class)
        });
        Ok(Some((entries.collect(), page.prefixes)))
    }

    /// Exports the objects of the remaining pages as an Arrow stream. The iterator is exhausted then.
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
        export(py, &mut self.next, false, |columns, page| page.entries.iter().for_each(|entry| columns.push(entry)))
    }
}
