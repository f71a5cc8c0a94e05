//! How many requests are in flight. Knows nothing of what they do.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Leave to have one request in flight; given back when dropped.
#[derive(Debug)]
pub struct Permit {
    _permit: OwnedSemaphorePermit,
}

/// The permits of one client, handed out in the order in which they were asked for.
#[derive(Debug)]
pub struct Permits {
    semaphore: Arc<Semaphore>,
    limit: usize,
}

impl Permits {
    /// `limit` permits, at least one.
    pub fn new(limit: usize) -> Self {
        let limit = limit.max(1);
        Self { semaphore: Arc::new(Semaphore::new(limit)), limit }
    }

    /// How many there are in all.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Waits for a permit.
    pub async fn acquire(&self) -> Permit {
        let permit = self.semaphore.clone().acquire_owned().await.expect("the semaphore is never closed");
        Permit { _permit: permit }
    }
}
