//! The running tasks of one source.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::fork;

/// The tasks that run the requests of a source. Dropping it aborts them.
#[derive(Debug)]
pub(crate) struct Tasks {
    handle: Handle,
    pub(super) running: AtomicUsize,
    /// Set by a thread that found the maximum number of tasks running.
    pub(super) refused: AtomicBool,
    /// `None` after an abort: no further task starts.
    set: Mutex<Option<JoinSet<()>>>,
}

impl Tasks {
    /// Tasks on the runtime of `handle`.
    pub(crate) fn new(handle: Handle) -> Self {
        let set = Mutex::new(Some(JoinSet::new()));
        Self { handle, running: AtomicUsize::new(0), refused: AtomicBool::new(false), set }
    }

    /// Number of running tasks.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    fn set(&self) -> MutexGuard<'_, Option<JoinSet<()>>> {
        self.set.lock().expect("no holder of this lock panics")
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let _inside = fork::enter();
        let mut set = self.set();
        if let Some(set) = &mut *set {
            // Remove tasks that have ended: the set stays as large as the maximum number that ran concurrently.
            while set.try_join_next().is_some() {}
            set.spawn_on(task, &self.handle);
        }
    }

    /// Aborts all tasks. No further task starts.
    pub(crate) fn abort(&self) {
        drop(self.set().take());
    }

    /// Aborts all tasks and waits until they have ended. No further task starts.
    pub(crate) async fn shutdown(&self) {
        let set = self.set().take();
        if let Some(mut set) = set {
            set.shutdown().await;
        }
    }
}
