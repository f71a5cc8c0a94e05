//! The tokio runtime of a process, the calls that its threads wait for, tasks that are aborted on drop, and cleanup that
//! continues in the background. At the end of the process, calls are aborted, and cleanup is waited for.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::task::{Context, Poll, ready};
use std::thread::ThreadId;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::{AbortHandle, JoinError, JoinHandle, JoinSet};
use tokio::time::timeout;

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork::{self, Local};

/// More threads do not increase the throughput of one process, and other ranks use the same machine.
const MAX_THREADS: usize = 8;

struct Process {
    runtime: Runtime,
    /// Work that threads wait for.
    calls: Mutex<JoinSet<()>>,
    cleaning: Mutex<JoinSet<()>>,
    /// The thread that ends the process; only its calls run.
    ending: OnceLock<ThreadId>,
}

impl Process {
    /// Whether a thread other than the caller ends the process.
    fn ends_elsewhere(&self) -> bool {
        self.ending.get().is_some_and(|thread| *thread != std::thread::current().id())
    }
}

fn locked(tasks: &Mutex<JoinSet<()>>) -> MutexGuard<'_, JoinSet<()>> {
    tasks.lock().expect("no holder of this lock panics")
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
    let process: &'static Process = Box::leak(Box::new(Process {
        runtime,
        calls: Mutex::default(),
        cleaning: Mutex::default(),
        ending: OnceLock::new(),
    }));
    *current = Some(Local::new(process));
    Ok(process)
}

/// The state of this process, if it is started.
fn existing() -> Option<&'static Process> {
    let _inside = fork::enter();
    CURRENT.lock().expect("no holder of this lock panics").as_ref().and_then(Local::get).copied()
}

/// Starts the work of a call, for which the calling thread waits. `None` after [`end_calls`] by another thread.
pub fn call(work: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
    let process = process();
    let _inside = fork::enter();
    let mut calls = locked(&process.calls);
    // With the lock: `end_calls` aborts what was started before.
    if process.ends_elsewhere() {
        return None;
    }
    while calls.try_join_next().is_some() {}
    Some(calls.spawn_on(work, process.runtime.handle()))
}

/// Whether another thread has ended the calls of this process.
pub fn calls_ended() -> bool {
    existing().is_some_and(Process::ends_elsewhere)
}

/// Whether [`end_calls`] was called.
pub fn is_ending() -> bool {
    existing().is_some_and(|process| process.ending.get().is_some())
}

/// Aborts all calls. From now on, only the calling thread starts calls: it ends the process. Does not start a runtime.
pub fn end_calls() {
    let Some(process) = existing() else { return };
    // A second call, by the same thread, changes nothing.
    let _ = process.ending.set(std::thread::current().id());
    locked(&process.calls).abort_all();
}

/// Starts cleanup in the background, such as the abort of a dropped upload. `work` has its own timeouts; [`cleaned_up`]
/// waits for it before the process exits.
pub fn clean_up(work: impl Future<Output = ()> + Send + 'static) {
    let process = process();
    let _inside = fork::enter();
    let handle = Handle::try_current().unwrap_or_else(|_| process.runtime.handle().clone());
    let mut cleaning = locked(&process.cleaning);
    while cleaning.try_join_next().is_some() {}
    cleaning.spawn_on(work, &handle);
}

/// Waits for at most `limit` until all calls have ended and all work of [`clean_up`] is done, also that which ends later or
/// cleanup itself starts. Returns whether it is. Must not be called on the runtime. Does not start a runtime.
pub fn cleaned_up(limit: Duration) -> bool {
    let Some(process) = existing() else { return true };
    let ended = poll_fn(|context| {
        // A call that ends has started its cleanup before.
        for tasks in [&process.calls, &process.cleaning] {
            let mut tasks = locked(tasks);
            while ready!(tasks.poll_join_next(context)).is_some() {}
        }
        Poll::Ready(())
    });
    process.runtime.block_on(async { timeout(limit, ended).await }).is_ok()
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
