//! The uploads that writers of Python own. At the end of the process they are dropped, which aborts them: Python may never drop
//! the writers.

use std::sync::{Arc, Weak};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::Mutex;
use torchobj_core::fork::{self, Local};

/// The upload of a writer, which is taken when it ends.
pub(crate) struct Own<T>(Local<Arc<Mutex<Option<T>>>>);

/// Drops the upload of a writer, which aborts it in the background.
pub(crate) trait Discard: Send + Sync {
    /// Returns false if a call uses it.
    fn discard(&self) -> bool;
}

impl<T: Send> Discard for Mutex<Option<T>> {
    fn discard(&self) -> bool {
        self.try_lock().map(|mut upload| drop(upload.take())).is_ok()
    }
}

type Uploads = Vec<Weak<dyn Discard>>;

/// The uploads of the writers of this process.
static WRITERS: std::sync::Mutex<Option<Local<Uploads>>> = std::sync::Mutex::new(None);

fn with_writers<R>(with: impl FnOnce(&mut Uploads) -> R) -> R {
    let _inside = fork::enter();
    let mut writers = WRITERS.lock().expect("no holder of this lock panics");
    let writers = Local::in_slot(&mut writers, Vec::new);
    writers.retain(|writer| writer.strong_count() > 0);
    with(writers)
}

/// Drops the uploads of all writers. Returns false if calls use some of them.
pub(crate) fn discard_all() -> bool {
    let writers: Vec<_> = with_writers(|writers| writers.iter().filter_map(Weak::upgrade).collect());
    writers.iter().filter(|writer| !writer.discard()).count() == 0
}

impl<T: Send + 'static> Own<T> {
    /// Owns `upload`.
    pub(crate) fn new(upload: T) -> Self {
        let upload = Arc::new(Mutex::new(Some(upload)));
        let weak: Weak<dyn Discard> = Arc::downgrade(&upload) as _;
        with_writers(|writers| writers.push(weak));
        Self(Local::new(upload))
    }

    /// The upload; an error in a forked child.
    pub(crate) fn get(&self) -> PyResult<Arc<Mutex<Option<T>>>> {
        let inherited = || PyValueError::new_err("this writer belongs to the parent of this forked process");
        self.0.get().cloned().ok_or_else(inherited)
    }
}
