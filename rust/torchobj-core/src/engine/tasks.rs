//! The running tasks of one source.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::fork;
use crate::runtime::clean_up;

tokio::task_local! {
    /// Of the running task.
    static RUNNING: Arc<Guard>;
}

/// Kept by each task of a source, and by the tasks that these start, until they have ended.
#[derive(Debug)]
struct Guard {
    _own: mpsc::Sender<Infallible>,
    /// Of the task that started the source.
    _outer: Option<Arc<Self>>,
}

/// The tasks that run the requests of a source. Dropping it aborts them.
#[derive(Debug)]
pub(crate) struct Tasks {
    handle: Handle,
    pub(super) running: AtomicUsize,
    /// Set by a thread that found the maximum number of tasks running.
    pub(super) refused: AtomicBool,
    /// `None` after an abort: no further task starts.
    started: Mutex<Option<Started>>,
}

#[derive(Debug)]
struct Started {
    set: JoinSet<()>,
    guard: Arc<Guard>,
    /// Closed when all guards were dropped.
    ended: mpsc::Receiver<Infallible>,
}

impl Tasks {
    /// Tasks on the runtime of `handle`.
    pub(crate) fn new(handle: Handle) -> Self {
        let (own, ended) = mpsc::channel(1);
        let guard = Arc::new(Guard { _own: own, _outer: RUNNING.try_with(Arc::clone).ok() });
        let started = Mutex::new(Some(Started { set: JoinSet::new(), guard, ended }));
        Self { handle, running: AtomicUsize::new(0), refused: AtomicBool::new(false), started }
    }

    /// Number of running tasks.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    fn started(&self) -> MutexGuard<'_, Option<Started>> {
        self.started.lock().expect("no holder of this lock panics")
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let _inside = fork::enter();
        let mut started = self.started();
        if let Some(Started { set, guard, .. }) = &mut *started {
            // Remove tasks that have ended: the set stays as large as the maximum number that ran concurrently.
            while set.try_join_next().is_some() {}
            set.spawn_on(RUNNING.scope(guard.clone(), task), &self.handle);
        }
    }

    /// Aborts all tasks. No further task starts. The end of the process waits until they have ended: only then does a task
    /// drop its uploads, which aborts them.
    pub(crate) fn abort(&self) {
        let started = self.started().take();
        let Some(Started { mut set, .. }) = started else { return };
        set.abort_all();
        while set.try_join_next().is_some() {}
        if !set.is_empty() {
            clean_up(async move { while set.join_next().await.is_some() {} });
        }
    }

    /// Aborts all tasks and waits until they, and the tasks that they started, have ended: none of them writes to the
    /// memory of its request afterwards. No further task starts.
    pub(crate) async fn shutdown(&self) {
        let started = self.started().take();
        if let Some(Started { mut set, guard, mut ended }) = started {
            set.shutdown().await;
            drop(guard);
            while ended.recv().await.is_some() {}
        }
    }
}
