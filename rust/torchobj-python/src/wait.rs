//! Runs a future on the runtime while the calling thread waits without the GIL. Ctrl-C cancels the future, and so do the
//! cancellation of the thread's calls and the end of the process.

use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PySystemExit};
use pyo3::prelude::*;
use torchobj_core::runtime::{call, calls_ended};

use crate::{buffer, log};

/// Interval at which a waiting thread checks for signals.
pub(crate) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Time limit for cancelled work to release its memory.
const CANCEL_TIMEOUT: Duration = Duration::from_millis(500);

thread_local! {
    /// The cancellation that this thread has entered.
    static ENTERED: RefCell<Option<Arc<Cancelled>>> = const { RefCell::new(None) };
}

#[derive(Debug, Default)]
struct Cancelled {
    cancelled: AtomicBool,
    /// Of the thread that made this one.
    outer: Option<Arc<Self>>,
}

impl Cancelled {
    fn get(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.outer.as_ref().is_some_and(|outer| outer.get())
    }
}

/// Cancels the calls of threads that have entered it, now and later: each raises SystemExit, which ends its thread. It is
/// cancelled as well if the thread that made it has entered one that is.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct Cancellation(Arc<Cancelled>);

#[pymethods]
impl Cancellation {
    #[new]
    fn new() -> Self {
        let outer = ENTERED.with_borrow(Clone::clone);
        Self(Arc::new(Cancelled { outer, ..Cancelled::default() }))
    }

    /// Enters it, for the rest of the thread.
    fn enter(&self) {
        ENTERED.set(Some(self.0.clone()));
    }

    /// Cancels the calls.
    fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Whether the calls of this thread are cancelled, or another thread ends the process.
pub(crate) fn is_cancelled() -> bool {
    ENTERED.with_borrow(|entered| entered.as_ref().is_some_and(|entered| entered.get())) || calls_ended()
}

fn check_cancelled() -> PyResult<()> {
    if is_cancelled() { Err(PySystemExit::new_err("the call was cancelled")) } else { Ok(()) }
}

/// Runs `work` and returns its output.
pub(crate) fn wait<T: Send + 'static>(py: Python<'_>, work: impl Future<Output = T> + Send + 'static) -> PyResult<T> {
    wait_reporting(py, work, |_| Ok(()))
}

/// Runs `work` and returns its output. Calls `report` in this thread about every 0.1 s meanwhile; its error cancels the work.
pub(crate) fn wait_reporting<T: Send + 'static>(
    py: Python<'_>,
    work: impl Future<Output = T> + Send + 'static,
    mut report: impl FnMut(Python<'_>) -> PyResult<()>,
) -> PyResult<T> {
    log::refresh_level(py)?;
    check_cancelled()?;
    let (sender, mut receiver) = sync_channel(1);
    let task = py.detach(|| {
        call(async move {
            // The receiver is dropped after an interrupt.
            let _ = sender.send(work.await);
        })
    });
    loop {
        let received;
        (received, receiver) = receive(py, receiver, SIGNAL_CHECK_INTERVAL);
        let delivered = log::deliver(py);
        match received {
            Ok(done) => {
                buffer::release_exports(py);
                return delivered.map(|()| done);
            }
            Err(RecvTimeoutError::Disconnected) => {
                check_cancelled()?;
                return Err(PyRuntimeError::new_err("the work panicked: a bug"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let interrupted = delivered.and_then(|()| py.check_signals()).and_then(|()| check_cancelled());
        if let Err(interrupt) = interrupted.and_then(|()| report(py)) {
            if let Some(task) = task {
                task.abort();
            }
            drop(receive(py, receiver, CANCEL_TIMEOUT));
            buffer::release_exports(py);
            return Err(interrupt);
        }
    }
}

type Received<T> = (Result<T, RecvTimeoutError>, Receiver<T>);

fn receive<T: Send>(py: Python<'_>, receiver: Receiver<T>, limit: Duration) -> Received<T> {
    py.detach(move || (receiver.recv_timeout(limit), receiver))
}
