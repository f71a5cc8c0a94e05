//! Memory of batches, which workers request from the process of their loader.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use torchobj_core::arena::{Unanswered, in_block};
use torchobj_core::prefetch::{PrefetcherHandle, existing};

use crate::buffer::Buffer;
use crate::prefetcher::check_signals;

/// Recycled memory for the batches that DataLoader workers build. The process that creates this object owns the memory.
///
/// Raises:
///     RuntimeError: This process has no prefetcher.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeBlocks {
    prefetcher: PrefetcherHandle,
}

#[pymethods]
impl NativeBlocks {
    #[new]
    fn new() -> PyResult<Self> {
        let prefetcher = existing().ok_or_else(|| PyRuntimeError::new_err("this process has no prefetcher"))?;
        Ok(Self { prefetcher: PrefetcherHandle::started(prefetcher) })
    }

    /// The same memory, in a worker started by spawn or forkserver.
    ///
    /// Args:
    ///     owner: `process_number()` of the owner.
    ///     file: Descriptor of the arena.
    ///     eventfd: Descriptor of its eventfd.
    #[staticmethod]
    fn attach(owner: u64, file: i32, eventfd: i32) -> PyResult<Self> {
        Ok(Self { prefetcher: PrefetcherHandle::attach(owner, file, eventfd)? })
    }

    /// `process_number()` of the owner.
    #[getter]
    fn owner(&self) -> u64 {
        self.prefetcher.owner()
    }

    /// File descriptors of the arena and of its eventfd, for `attach`.
    ///
    /// Raises:
    ///     OSError: The program has closed them.
    fn descriptors(&self) -> PyResult<(i32, i32)> {
        Ok(self.prefetcher.descriptors()?)
    }

    /// Requests memory of `preferred` bytes, or of `size` bytes if that is more or the limits of the owner do not allow the
    /// former. Its content is undefined.
    ///
    /// Args:
    ///     size: Number of bytes that are needed.
    ///     preferred: Number of bytes of a larger block.
    ///     worker: Number of this worker, for `reclaim`.
    ///
    /// Returns:
    ///     A buffer. It is returned to the owner when it and all of its views are deleted. None if the limits do not allow
    ///     it, or the owner has exited.
    fn block(&self, py: Python<'_>, size: u64, preferred: u64, worker: u32) -> PyResult<Option<Buffer>> {
        let attached = self.prefetcher.worker()?;
        let lengths = [preferred, size];
        let lengths = if preferred > size { &lengths[..] } else { &lengths[1..] };
        match py.detach(|| attached.block(worker, lengths, check_signals)) {
            Ok(claim) => Ok(claim.map(Buffer::claimed)),
            Err(Unanswered::Interrupted(signal)) => Err(signal),
            Err(Unanswered::OwnerGone | Unanswered::NoFreeSlot) => Ok(None),
        }
    }

    /// Recycles the blocks that workers had offered and that will not be adopted.
    ///
    /// Args:
    ///     workers: Numbers of workers that have exited.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts a list by value")]
    fn reclaim(&self, workers: Vec<u32>) {
        if let Some(prefetcher) = self.prefetcher.prefetcher() {
            prefetcher.arena().reclaim_blocks(&workers);
        }
    }

    /// Returns whether an address is within a block of which this process has views.
    #[staticmethod]
    fn contains(address: usize) -> bool {
        in_block(address)
    }
}
