//! Forwards log events to the Python logger `torchobj`. Threads of the runtime only queue events; a thread that holds the
//! GIL, before or after a wait, delivers them.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use torchobj_core::fork;

/// Maximum number of queued events. If it is exceeded, the oldest is dropped and counted.
const MAX_EVENTS: usize = 1000;

struct Queue;

static EVENTS: Mutex<VecDeque<(Level, String)>> = Mutex::new(VecDeque::new());
static DROPPED: AtomicUsize = AtomicUsize::new(0);
static QUEUED: AtomicUsize = AtomicUsize::new(0);

impl Log for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("torchobj")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let _inside = fork::enter();
        let mut events = EVENTS.lock().expect("no holder of this lock panics");
        if events.len() == MAX_EVENTS {
            events.pop_front();
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        events.push_back((record.level(), record.args().to_string()));
        QUEUED.store(events.len(), Ordering::Release);
    }

    fn flush(&self) {}
}

/// Installs the queue as the logger of this process.
pub(crate) fn install() {
    // If a logger is installed already, this module was loaded twice: keep the first one.
    if log::set_logger(&Queue).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Copies the level of the Python logger, at most once a second. An error is an interrupt, which arrived meanwhile.
pub(crate) fn refresh_level(py: Python<'_>) -> PyResult<()> {
    static REFRESHED: Mutex<Option<Instant>> = Mutex::new(None);
    {
        let _inside = fork::enter();
        let mut refreshed = REFRESHED.lock().expect("no holder of this lock panics");
        if refreshed.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            return Ok(());
        }
        *refreshed = Some(Instant::now());
    }
    let level = || -> PyResult<u32> {
        let logger = py.import("logging")?.call_method1("getLogger", ("torchobj",))?;
        logger.call_method0("getEffectiveLevel")?.extract()
    };
    match level() {
        Ok(level) => set_level(level),
        Err(error) if is_interrupt(py, &error) => return Err(error),
        Err(_) => {}
    }
    Ok(())
}

/// Whether an error is KeyboardInterrupt, SystemExit or what else a handler of a signal raises to end the program.
fn is_interrupt(py: Python<'_>, error: &PyErr) -> bool {
    !error.is_instance_of::<PyException>(py)
}

/// Sets the minimum level of events, as a number of Python's `logging`.
fn set_level(level: u32) {
    log::set_max_level(match level {
        0..10 => LevelFilter::Trace,
        10..20 => LevelFilter::Debug,
        20..30 => LevelFilter::Info,
        30..40 => LevelFilter::Warn,
        40..50 => LevelFilter::Error,
        _ => LevelFilter::Off,
    });
}

/// Delivers queued events to the Python logger. An error is an interrupt, which arrived meanwhile.
pub(crate) fn deliver(py: Python<'_>) -> PyResult<()> {
    if QUEUED.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let events = {
        let _inside = fork::enter();
        QUEUED.store(0, Ordering::Release);
        std::mem::take(&mut *EVENTS.lock().expect("no holder of this lock panics"))
    };
    let dropped = DROPPED.swap(0, Ordering::Relaxed);
    let deliver = || -> PyResult<()> {
        let logger = py.import("logging")?.call_method1("getLogger", ("torchobj",))?;
        if dropped > 0 {
            logger.call_method1("warning", ("%d log events were dropped", dropped))?;
        }
        for (level, text) in events {
            let number = match level {
                Level::Error => 40,
                Level::Warn => 30,
                Level::Info => 20,
                Level::Debug => 10,
                Level::Trace => 5,
            };
            logger.call_method1("log", (number, "%s", text))?;
        }
        Ok(())
    };
    match deliver() {
        Err(error) if is_interrupt(py, &error) => Err(error),
        Err(error) => {
            // An exception of a log handler must not fail the operation.
            error.write_unraisable(py, None);
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}
