//! The one tokio runtime of a process; work on it that ends when nobody waits for it any more; and the little that must
//! be done although nobody waits: cleaning up.

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

/// More threads than this do not make one process's network faster; tasks of a rank share a machine with others.
const MOST_THREADS: usize = 8;

struct Process {
    runtime: Runtime,
    cleaning: Mutex<JoinSet<()>>,
}

static CURRENT: Mutex<Option<Local<&'static Process>>> = Mutex::new(None);

/// The runtime of this process. A forked child gets its own; its parent's is leaked there, threads and all.
///
/// # Panics
/// When the system gives no threads, or no event loop: entry points call [`start`] first.
pub fn runtime() -> &'static Runtime {
    &process().runtime
}

/// Starts the runtime of this process, if it has none yet.
///
/// # Errors
/// The system refuses it. The message says what to do about it.
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
    started().expect("the system gives a process its threads and an event loop")
}

fn started() -> io::Result<&'static Process> {
    let _inside = fork::enter();
    let mut current = CURRENT.lock().expect("no holder of this lock panics");
    if let Some(process) = current.as_ref().and_then(Local::get) {
        return Ok(process);
    }
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MOST_THREADS);
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

/// What was built in this process, if anything was.
fn built() -> Option<&'static Process> {
    let _inside = fork::enter();
    CURRENT.lock().expect("no holder of this lock panics").as_ref().and_then(Local::get).copied()
}

/// Starts work that must be done although nobody waits for it: what a dropped upload leaves behind. It has time limits
/// of its own; [`cleaned_up`] waits for it before the process ends.
pub fn clean_up(work: impl Future<Output = ()> + Send + 'static) {
    let process = process();
    let _inside = fork::enter();
    let mut cleaning = process.cleaning.lock().expect("no holder of this lock panics");
    while cleaning.try_join_next().is_some() {}
    cleaning.spawn_on(work, process.runtime.handle());
}

/// Waits, for at most `limit`, until everything that [`clean_up`] started is done. Not to be called on the runtime.
/// A process without a runtime has started nothing, and gets none by this.
pub fn cleaned_up(limit: Duration) {
    let Some(process) = built() else { return };
    let cleaning = std::mem::take(&mut *process.cleaning.lock().expect("no holder of this lock panics"));
    if !cleaning.is_empty() {
        // A time-out leaves uploads in the bucket; each said so in the log, or will at the store's own sweep.
        let _ = process.runtime.block_on(async { tokio::time::timeout(limit, cleaning.join_all()).await });
    }
}

/// Work on the runtime. Waiting for it gives its result; dropping it ends it.
#[derive(Debug)]
pub struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    /// Starts `work` on the runtime of the caller.
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
