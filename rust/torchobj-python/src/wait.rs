//! Runs a future on the runtime while the calling thread waits without the GIL. Ctrl-C cancels the future.

use std::future::Future;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use torchobj_core::runtime::runtime;

use crate::{buffer, log};

/// Interval at which a waiting thread checks for signals.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Time limit for cancelled work to release its memory.
const CANCEL_TIMEOUT: Duration = Duration::from_millis(500);

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
    log::refresh_level(py);
    let (sender, mut receiver) = sync_channel(1);
    let task = py.detach(|| {
        runtime().spawn(async move {
            // The receiver is dropped after an interrupt.
            let _ = sender.send(work.await);
        })
    });
    loop {
        let received;
        (received, receiver) = receive(py, receiver, SIGNAL_CHECK_INTERVAL);
        log::deliver(py);
        match received {
            Ok(done) => {
                buffer::release_exports(py);
                return Ok(done);
            }
            Err(RecvTimeoutError::Disconnected) => return Err(PyRuntimeError::new_err("the work panicked: a bug")),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Err(interrupt) = py.check_signals().and_then(|()| report(py)) {
            task.abort();
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
