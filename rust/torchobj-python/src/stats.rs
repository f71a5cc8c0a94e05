//! The memory and statistics of the prefetcher of this process.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use torchobj_core::policy::Counts;

use crate::prefetcher::existing;

/// Releases the memory of the prefetcher of this process that is not in use.
#[pyfunction]
pub(crate) fn release_free_memory(py: Python<'_>) {
    if let Some(prefetcher) = existing() {
        py.detach(|| prefetcher.arena().release_free_pages());
    }
}

/// Returns the counters and the memory of the prefetcher of this process; an empty dict if it has none.
///
/// Args:
///     loader: Number of a loader, which this process assigned: the counters are its own. None: they are those of the process.
#[pyfunction]
#[pyo3(signature = (loader=None))]
pub(crate) fn prefetch_stats(py: Python<'_>, loader: Option<u64>) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    let Some(prefetcher) = existing() else { return Ok(dict) };
    let stats = py.detach(|| prefetcher.stats(loader));
    dict.set_item("hits", stats.hits)?;
    dict.set_item("late", stats.late)?;
    dict.set_item("queued", stats.queued)?;
    dict.set_item("misses", stats.misses)?;
    dict.set_item("objects", stats.objects)?;
    dict.set_item("bytes", stats.bytes)?;
    dict.set_item("failed", stats.failed)?;
    dict.set_item("evicted", stats.evicted)?;
    dict.set_item("memory_limited", stats.memory_limited)?;
    dict.set_item("request_limited", stats.request_limited)?;
    dict.set_item("waited_s", stats.waited.as_secs_f64())?;
    dict.set_item("announced", stats.announced)?;
    dict.set_item("in_flight", stats.in_flight)?;
    dict.set_item("in_flight_limit", stats.limit)?;
    dict.set_item("budget_bytes", stats.memory.budget)?;
    dict.set_item("used_bytes", stats.memory.used)?;
    dict.set_item("granted_bytes", stats.memory.granted)?;
    dict.set_item("ahead_bytes", stats.ahead)?;
    dict.set_item("over_budget", stats.over_budget)?;
    dict.set_item("transferred", stats.memory.transferred)?;
    dict.set_item("copied", stats.memory.copied)?;
    dict.set_item("block_bytes", stats.memory.blocks)?;
    dict.set_item("blocks_refused", stats.blocks_refused)?;
    let quantile = |counts: &Counts, share| counts.quantile(share).map(|took| took.as_secs_f64());
    let requests = &stats.requests;
    dict.set_item("first_byte_p50_s", quantile(&requests.first_byte, 0.5))?;
    dict.set_item("first_byte_p99_s", quantile(&requests.first_byte, 0.99))?;
    dict.set_item("body_p50_s", quantile(&requests.body, 0.5))?;
    dict.set_item("body_p99_s", quantile(&requests.body, 0.99))?;
    dict.set_item("retries", requests.retries)?;
    dict.set_item("throttled", requests.throttled)?;
    dict.set_item("connect_failures", requests.connect_failures)?;
    dict.set_item("hedges", requests.hedges)?;
    dict.set_item("hedges_won", requests.hedges_won)?;
    Ok(dict)
}
