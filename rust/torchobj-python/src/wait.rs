//! Runs work on the runtime while the calling thread waits without the GIL. Ctrl-C ends the wait, and the work.

use std::future::Future;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use torchobj_core::runtime::runtime;

use crate::{buffer, log};

/// How often a waiting thread looks whether a signal is there.
const GLANCE: Duration = Duration::from_millis(100);

/// How long work that was cancelled may take to let go of what it holds.
const LET_GO: Duration = Duration::from_millis(500);

/// Waits for `work`.
pub(crate) fn wait<T: Send + 'static>(py: Python<'_>, work: impl Future<Output = T> + Send + 'static) -> PyResult<T> {
    log::refresh_level(py);
    let (sender, mut receiver) = sync_channel(1);
    let task = py.detach(|| {
        runtime().spawn(async move {
            // Nobody receives it after an interrupt.
            let _ = sender.send(work.await);
        })
    });
    loop {
        let received;
        (received, receiver) = receive(py, receiver, GLANCE);
        log::deliver(py);
        match received {
            Ok(done) => {
                buffer::release_lent(py);
                return Ok(done);
            }
            Err(RecvTimeoutError::Disconnected) => return Err(PyRuntimeError::new_err("the work panicked: a bug")),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Err(interrupt) = py.check_signals() {
            task.abort();
            drop(receive(py, receiver, LET_GO));
            buffer::release_lent(py);
            return Err(interrupt);
        }
    }
}

type Received<T> = (Result<T, RecvTimeoutError>, Receiver<T>);

fn receive<T: Send>(py: Python<'_>, receiver: Receiver<T>, limit: Duration) -> Received<T> {
    py.detach(move || (receiver.recv_timeout(limit), receiver))
}
