//! What an object that is fetched as it is read needs, in the process that opened it and in its forked children.

use std::sync::Arc;

use pyo3::prelude::*;
use tokio::sync::Mutex;
use torchobj_core::fork::Local;
use torchobj_core::read::{ReadAhead, Window};

use crate::store::NativeStore;

/// How an object is fetched, in any process: a forked child begins anew, at the same position.
pub(super) struct Fetched {
    store: Py<NativeStore>,
    window: Window,
    ahead: Local<Arc<Mutex<ReadAhead>>>,
}

impl Fetched {
    pub(super) fn new(py: Python<'_>, store: Py<NativeStore>, key: &str, window: Window) -> PyResult<Self> {
        let ahead = ReadAhead::new(store.get().client(py)?, key, window);
        Ok(Self { store, window, ahead: Local::new(Arc::new(Mutex::new(ahead))) })
    }

    /// The reader of this process.
    pub(super) fn ahead(&mut self, py: Python<'_>, key: &str) -> PyResult<Arc<Mutex<ReadAhead>>> {
        if self.ahead.get().is_none() {
            *self = Self::new(py, self.store.clone_ref(py), key, self.window)?;
        }
        Ok(self.ahead.get().expect("made here, just now or before").clone())
    }
}
