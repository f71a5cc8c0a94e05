//! Runs many requests concurrently.
//!
//! A [`RequestSource`] decides which request is next and how many may run: by permits, by a memory budget, by what callers
//! wait for. The executor starts tasks up to that limit; each task runs one request after the other, so that no task is
//! created per request and no central loop feeds them. [`Batch`] is the source of a list of requests, the prefetcher's
//! window is another. A [`Sink`] receives the bytes of a request. The engine knows no objects, no HTTP and
//! no Python.

mod batch;
mod sink;
mod tasks;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(crate) use batch::add_once;
pub use batch::{Batch, BatchRequest, permitted, run_all, try_run_all};
pub use sink::{Allocate, Sink};
pub(crate) use tasks::Tasks;

/// The reason why no further request was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Halt {
    /// No request is waiting.
    Idle,
    /// A request is waiting, but there is no memory for it.
    OutOfMemory,
    /// A request is waiting, but the maximum number of requests is running.
    Limited,
}

/// Supplies requests and runs each of them.
pub(crate) trait RequestSource: Send + Sync + Sized + 'static {
    /// One request.
    type Item: Send + 'static;

    /// What [`halted`](Self::halted) learns about a request that succeeded.
    type Done: Send;

    /// The tasks that run its requests.
    fn tasks(&self) -> &Tasks;

    /// Maximum number of concurrent requests. It may change at any time.
    fn limit(&self) -> usize;

    /// The next request.
    ///
    /// # Errors
    /// The reason why no request is available. After that changes, [`pump`] must be called.
    fn next(&self) -> Result<Self::Item, Halt>;

    /// The next request that a caller waits for, and that is started although `limit` requests are running.
    ///
    /// # Errors
    /// The reason why no request is available.
    fn next_demanded(&self) -> Result<Self::Item, Halt> {
        Err(Halt::Limited)
    }

    /// Runs a request. `None` if it failed. Must not panic.
    fn run(self: &Arc<Self>, item: Self::Item) -> impl Future<Output = Option<Self::Done>> + Send;

    /// Records, after a request that succeeded, why the next one was not started.
    fn halted(&self, _done: Self::Done, _halt: Halt) {}
}

/// Starts tasks until the limit is reached or no request is waiting. Returns the reason why no further task started.
pub(crate) fn pump<S: RequestSource>(source: &Arc<S>) -> Halt {
    loop {
        match admit(&**source) {
            Ok(item) => source.tasks().spawn(run(source.clone(), item)),
            Err(halt) => return halt,
        }
    }
}

/// A request for one more task.
///
/// A thread counts as a task while it checks for a request. Another thread may therefore find the limit reached
/// although no request is running, and hold a request that the first thread did not see. It sets `refused`, and the
/// later of the two checks again.
fn admit<S: RequestSource>(source: &S) -> Result<S::Item, Halt> {
    let tasks = source.tasks();
    loop {
        let limit = source.limit();
        let within = |now| (now < limit).then_some(now + 1);
        if tasks.running.fetch_update(Ordering::SeqCst, Ordering::SeqCst, within).is_ok() {
            let item = source.next();
            if item.is_ok() {
                return item;
            }
            tasks.running.fetch_sub(1, Ordering::SeqCst);
            if !tasks.refused.swap(false, Ordering::SeqCst) {
                return item;
            }
        } else {
            let item = source.next_demanded();
            if item.is_ok() {
                tasks.running.fetch_add(1, Ordering::SeqCst);
                return item;
            }
            tasks.refused.store(true, Ordering::SeqCst);
            if tasks.running.load(Ordering::SeqCst) >= limit {
                return item;
            }
        }
    }
}

/// A running task; uncounted when dropped, also by an abort.
struct Running<S: RequestSource>(Arc<S>);

impl<S: RequestSource> Drop for Running<S> {
    fn drop(&mut self) {
        self.0.tasks().running.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn run<S: RequestSource>(source: Arc<S>, mut item: S::Item) {
    let running = Running(source);
    let source = &running.0;
    loop {
        let done = source.run(item).await;
        // Another task may be started now, concurrently with the next request of this one.
        let halt = pump(source);
        let over = source.tasks().running() > source.limit();
        let next = if over { Err(halt) } else { source.next() };
        if let Some(done) = done {
            source.halted(done, next.as_ref().err().copied().unwrap_or(halt));
        }
        match next {
            Ok(next) => item = next,
            Err(_) => break,
        }
    }
    let source = source.clone();
    drop(running);
    // Requests may have been added since this task checked.
    pump(&source);
}
