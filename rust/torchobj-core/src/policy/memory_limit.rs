//! Limits the memory that concurrent transfers of files share.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Policy;

/// Files that are uploaded concurrently share the memory of this number of writers: 256 MiB by default, enough for 2.5 GB/s
/// at 80 MB/s per connection.
const FILE_BUFFERS: u64 = 4;

/// Memory that transfers reserve before they allocate it. First come, first served.
#[derive(Debug)]
pub(crate) struct MemoryLimit {
    free_kib: Arc<Semaphore>,
    total_kib: u32,
}

/// Reserved memory, until it is dropped.
#[derive(Debug)]
pub(crate) struct ReservedMemory {
    _permit: OwnedSemaphorePermit,
}

impl MemoryLimit {
    /// The limit of all files that a client uploads.
    pub(crate) fn of_files(policy: &Policy) -> Self {
        Self::new(FILE_BUFFERS * policy.write_buffer_bytes)
    }

    /// A limit of `bytes`.
    fn new(bytes: u64) -> Self {
        let total_kib = u32::try_from(bytes / 1024).unwrap_or(u32::MAX).max(1);
        Self { free_kib: Arc::new(Semaphore::new(total_kib as usize)), total_kib }
    }

    /// Waits until `bytes` are free. More than the limit is reserved when nothing else is.
    pub(crate) async fn reserve(&self, bytes: u64) -> ReservedMemory {
        let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(self.total_kib);
        let permit = self.free_kib.clone().acquire_many_owned(kib).await;
        ReservedMemory { _permit: permit.expect("the semaphore is never closed") }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn memory_is_reserved_until_it_is_dropped_and_more_than_the_limit_alone() {
        let limit = MemoryLimit::new(10 << 10);
        let first = limit.reserve(6 << 10).await;
        assert!(limit.reserve(5 << 10).now_or_never().is_none());
        let second = limit.reserve(4 << 10).await;
        drop((first, second));
        let _all = limit.reserve(1 << 30).await;
        assert!(limit.reserve(1).now_or_never().is_none());
    }
}
