//! A list of requests, run concurrently: results in the order of the requests, or as they complete.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::{Halt, RequestSource, Tasks, pump};
use crate::error::Result;
use crate::policy::{ConcurrencyLimit, within};

/// Interval at which a batch checks for a raised limit while no request completes.
const RECHECK_EVERY: Duration = Duration::from_millis(100);

/// A request of a [`Batch`].
pub trait BatchRequest: Send + 'static {
    /// The result of a successful request.
    type Output: Send + 'static;

    /// Runs it, with its retries.
    fn run(self) -> impl Future<Output = Result<Self::Output>> + Send;
}

/// A limit for [`Batch`]: the largest limit of these. Requests that are backing off do not count against it.
pub fn permitted<'a>(
    permits: impl IntoIterator<Item = &'a Arc<ConcurrencyLimit>>,
) -> impl Fn() -> usize + Send + Sync + 'static {
    let mut each = Vec::new();
    permits.into_iter().for_each(|permits| add_once(&mut each, permits));
    move || each.iter().map(|permits| permits.limit() + permits.backing_off()).max().unwrap_or(0)
}

/// Adds `one` to `all`, unless they contain it.
pub(crate) fn add_once<T>(all: &mut Vec<Arc<T>>, one: &Arc<T>) {
    if !all.iter().any(|other| Arc::ptr_eq(other, one)) {
        all.push(one.clone());
    }
}

/// Requests that run concurrently, and their results until they are taken. Dropping it aborts the requests.
pub struct Batch<R: BatchRequest> {
    shared: Arc<Shared<R>>,
}

struct Shared<R: BatchRequest> {
    tasks: Tasks,
    limit: Box<dyn Fn() -> usize + Send + Sync>,
    /// Whether the first error ends the batch.
    stop_at_error: bool,
    state: Mutex<BatchState<R>>,
    completed: Notify,
}

struct BatchState<R: BatchRequest> {
    waiting: VecDeque<R>,
    /// Requests that were taken from `waiting`.
    started: usize,
    results: Vec<Completed<R::Output>>,
    /// Requests that were added and whose result was not taken.
    pending: usize,
    /// Whether each result wakes the waiter, or the last one only.
    notify_each: bool,
    failed: bool,
}

/// The number of a request in the order they were added, and its result or panic.
type Completed<T> = (usize, thread::Result<Result<T>>);

impl<R: BatchRequest> Shared<R> {
    fn state(&self) -> MutexGuard<'_, BatchState<R>> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

impl<R: BatchRequest> RequestSource for Shared<R> {
    type Item = (usize, R);
    type Done = ();

    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn limit(&self) -> usize {
        (self.limit)().max(1)
    }

    fn next(&self) -> Result<Self::Item, Halt> {
        let mut state = self.state();
        if state.failed && self.stop_at_error {
            return Err(Halt::Idle);
        }
        let request = state.waiting.pop_front().ok_or(Halt::Idle)?;
        state.started += 1;
        Ok((state.started - 1, request))
    }

    async fn run(self: &Arc<Self>, (number, request): Self::Item) -> Option<()> {
        let result = AssertUnwindSafe(request.run()).catch_unwind().await;
        let succeeded = matches!(result, Ok(Ok(_)));
        let notify = {
            let mut state = self.state();
            state.failed |= !succeeded;
            state.results.push((number, result));
            state.notify_each || state.results.len() == state.pending || (state.failed && self.stop_at_error)
        };
        if notify {
            self.completed.notify_one();
        }
        succeeded.then_some(())
    }
}

impl<R: BatchRequest> Batch<R> {
    /// An empty batch on the runtime of the caller, of which at most `limit()` requests run concurrently. With
    /// `stop_at_error` no request starts after one has failed.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(limit: impl Fn() -> usize + Send + Sync + 'static, stop_at_error: bool) -> Self {
        let state = BatchState {
            waiting: VecDeque::new(),
            started: 0,
            results: Vec::new(),
            pending: 0,
            notify_each: true,
            failed: false,
        };
        let shared = Shared {
            tasks: Tasks::new(Handle::current()),
            limit: Box::new(limit),
            stop_at_error,
            state: Mutex::new(state),
            completed: Notify::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Adds a request. Starts it as soon as the limit allows.
    pub fn push(&self, request: R) {
        {
            let mut state = self.shared.state();
            state.waiting.push_back(request);
            state.pending += 1;
        }
        pump(&self.shared);
    }

    /// Number of requests that were added and whose results were not taken.
    pub fn pending(&self) -> usize {
        self.shared.state().pending
    }

    /// Maximum number of concurrent requests. It may change.
    pub fn limit(&self) -> usize {
        self.shared.limit()
    }

    /// The next result in the order of completion, with the number of its request; `None` when all were taken. After a
    /// failure with `stop_at_error`, requests that did not complete return no results: drop the batch.
    pub async fn next(&self) -> Option<(usize, Result<R::Output>)> {
        loop {
            {
                let mut state = self.shared.state();
                if state.pending == 0 {
                    return None;
                }
                if let Some((number, result)) = state.results.pop() {
                    state.pending -= 1;
                    return Some((number, result.unwrap_or_else(|panic| resume_unwind(panic))));
                }
            }
            self.wait().await;
        }
    }

    /// Waits until a result wakes the waiter.
    async fn wait(&self) {
        while within(RECHECK_EVERY, self.shared.completed.notified()).await.is_none() {
            // A request that is backing off needs no permit: start another one.
            pump(&self.shared);
        }
    }

    /// Waits for all requests, or with `stop_at_error` for the first that fails.
    async fn all(&self) -> Vec<Completed<R::Output>> {
        loop {
            {
                let mut state = self.shared.state();
                let stopped = state.failed && self.shared.stop_at_error;
                if stopped || state.results.len() == state.pending {
                    return std::mem::take(&mut state.results);
                }
            }
            self.wait().await;
        }
    }

    /// Aborts all requests and waits until their tasks have ended.
    pub async fn shutdown(&self) {
        self.shared.state().waiting.clear();
        self.shared.tasks.shutdown().await;
    }
}

impl<R: BatchRequest> Drop for Batch<R> {
    fn drop(&mut self) {
        self.shared.tasks.abort();
        let waiting = std::mem::take(&mut self.shared.state().waiting);
        drop(waiting);
    }
}

impl<R: BatchRequest> fmt::Debug for Batch<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batch({} pending)", self.pending())
    }
}

/// Runs all requests, at most `limit()` concurrently, also after failures. Results are in the order of the requests.
/// Dropping the future aborts the requests. A panic of a request is resumed here.
pub async fn run_all<R: BatchRequest>(
    requests: Vec<R>,
    limit: impl Fn() -> usize + Send + Sync + 'static,
) -> Vec<Result<R::Output>> {
    let completed = run_ordered(requests, limit, false).await;
    completed.into_iter().map(|(_, result)| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
}

/// Runs all requests, at most `limit()` concurrently. Outputs are in the order of the requests. Dropping the future
/// aborts the requests. A panic of a request is resumed here.
///
/// # Errors
/// The first error of a request, which aborts the others.
pub async fn try_run_all<R: BatchRequest>(
    requests: Vec<R>,
    limit: impl Fn() -> usize + Send + Sync + 'static,
) -> Result<Vec<R::Output>> {
    // Requests that were aborted have no results.
    let completed = run_ordered(requests, limit, true).await;
    completed.into_iter().map(|(_, result)| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
}

/// Runs requests to the end, or to the first error. Results are in the order of the requests.
async fn run_ordered<R: BatchRequest>(
    requests: Vec<R>,
    limit: impl Fn() -> usize + Send + Sync + 'static,
    stop_at_error: bool,
) -> Vec<Completed<R::Output>> {
    let batch = Batch::new(limit, stop_at_error);
    {
        let mut state = batch.shared.state();
        state.pending = requests.len();
        state.results.reserve_exact(requests.len());
        state.waiting = requests.into();
        state.notify_each = false;
    }
    pump(&batch.shared);
    let mut completed = batch.all().await;
    batch.shutdown().await;
    completed.sort_unstable_by_key(|(number, _)| *number);
    completed
}
