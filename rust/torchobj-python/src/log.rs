//! Events of Rust in Python's logger `torchobj`. Threads of the runtime only queue them; a thread that holds the GIL
//! anyway, because it waits or has just waited for them, delivers them.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::prelude::*;
use torchobj_core::fork;

/// More than this is not kept: the oldest is dropped, and counted.
const MOST_EVENTS: usize = 1000;

struct Queue;

static EVENTS: Mutex<VecDeque<(Level, String)>> = Mutex::new(VecDeque::new());
static DROPPED: AtomicUsize = AtomicUsize::new(0);
static WAITING: AtomicUsize = AtomicUsize::new(0);

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
        if events.len() == MOST_EVENTS {
            events.pop_front();
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        events.push_back((record.level(), record.args().to_string()));
        WAITING.store(events.len(), Ordering::Release);
    }

    fn flush(&self) {}
}

/// Makes the queue the logger of this process.
pub(crate) fn install() {
    // Another logger there means that this module was loaded twice; the first one stays.
    if log::set_logger(&Queue).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Takes over the level of Python's logger, at most once a second.
pub(crate) fn refresh_level(py: Python<'_>) {
    static REFRESHED: Mutex<Option<Instant>> = Mutex::new(None);
    {
        let _inside = fork::enter();
        let mut refreshed = REFRESHED.lock().expect("no holder of this lock panics");
        if refreshed.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            return;
        }
        *refreshed = Some(Instant::now());
    }
    let level = || -> PyResult<u32> {
        let logger = py.import("logging")?.call_method1("getLogger", ("torchobj",))?;
        logger.call_method0("getEffectiveLevel")?.extract()
    };
    if let Ok(level) = level() {
        set_level(level);
    }
}

/// Sets the level from which on events are kept: a number of Python's `logging`.
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

/// Gives what is queued to Python's logger.
pub(crate) fn deliver(py: Python<'_>) {
    if WAITING.load(Ordering::Acquire) == 0 {
        return;
    }
    let events = {
        let _inside = fork::enter();
        WAITING.store(0, Ordering::Release);
        std::mem::take(&mut *EVENTS.lock().expect("no holder of this lock panics"))
    };
    let dropped = DROPPED.swap(0, Ordering::Relaxed);
    let deliver = || -> PyResult<()> {
        let logger = py.import("logging")?.call_method1("getLogger", ("torchobj",))?;
        if dropped > 0 {
            logger.call_method1("warning", ("%d events were dropped", dropped))?;
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
    if let Err(error) = deliver() {
        // A handler of the user's that raises must not make a read fail.
        error.write_unraisable(py, None);
    }
}
