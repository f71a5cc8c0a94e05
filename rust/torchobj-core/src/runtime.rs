//! The tokio runtime of a process, tasks on it that are aborted on drop, and cleanup that continues in the background.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinError, JoinHandle, JoinSet};

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork::{self, Local};

/// More threads do not increase the throughput of one process, and other ranks use the same machine.
const MAX_THREADS: usize = 8;

struct Process {
    runtime: Runtime,
    cleaning: Mutex<JoinSet<()>>,
}

static CURRENT: Mutex<Option<Local<&'static Process>>> = Mutex::new(None);

/// The runtime of this process. A forked child starts its own and leaks the one of its parent.
///
/// # Panics
/// If threads or the event loop cannot be created. Entry points call [`start`] first, which returns an error.
pub fn runtime() -> &'static Runtime {
    &process().runtime
}

/// Starts the runtime of this process, unless it is started already.
///
/// # Errors
/// `Io` if threads or the event loop cannot be created. The message has the next step.
pub fn start() -> Result<()> {
    let refused = |error: io::Error| {
        let message = format!(
            "torchobj cannot start its threads and its event loop, which need clone, epoll and eventfd: {error}: allow \
             them in the seccomp profile of the container, and more threads and open files (ulimit -u, ulimit -n)"
        );
        Error::new(ErrorKind::Io, Operation::Connect, "", message)
    };
    started().map(drop).map_err(refused)
}

fn process() -> &'static Process {
    started().expect("entry points have called `start`")
}

fn started() -> io::Result<&'static Process> {
    let _inside = fork::enter();
    let mut current = CURRENT.lock().expect("no holder of this lock panics");
    if let Some(process) = current.as_ref().and_then(Local::get) {
        return Ok(process);
    }
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MAX_THREADS);
    let runtime = Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("torchobj")
        .enable_io()
        .enable_time()
        .build()?;
    let process: &'static Process = Box::leak(Box::new(Process { runtime, cleaning: Mutex::new(JoinSet::new()) }));
    *current = Some(Local::new(process));
    Ok(process)
}

/// The state of this process, if it is started.
fn existing() -> Option<&'static Process> {
    let _inside = fork::enter();
    CURRENT.lock().expect("no holder of this lock panics").as_ref().and_then(Local::get).copied()
}

/// Starts cleanup in the background, such as the abort of a dropped upload. `work` has its own timeouts; [`cleaned_up`]
/// waits for it before the process exits.
pub fn clean_up(work: impl Future<Output = ()> + Send + 'static) {
    let process = process();
    let _inside = fork::enter();
    let mut cleaning = process.cleaning.lock().expect("no holder of this lock panics");
    while cleaning.try_join_next().is_some() {}
    cleaning.spawn_on(work, process.runtime.handle());
}

/// Waits for at most `limit` until all work of [`clean_up`] is done. Must not be called on the runtime. Does not start a
/// runtime.
pub fn cleaned_up(limit: Duration) {
    let Some(process) = existing() else { return };
    let cleaning = std::mem::take(&mut *process.cleaning.lock().expect("no holder of this lock panics"));
    if !cleaning.is_empty() {
        // After a timeout, unfinished uploads may stay in the bucket.
        let _ = process.runtime.block_on(async { tokio::time::timeout(limit, cleaning.join_all()).await });
    }
}

/// A task on the runtime. Awaiting it returns its result; dropping it aborts it.
#[derive(Debug)]
pub struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    /// Starts `work` on the current runtime.
    pub fn spawn(work: impl Future<Output = T> + Send + 'static) -> Self {
        Self(tokio::spawn(work))
    }
}

impl<T> Future for Task<T> {
    type Output = std::result::Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context)
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
