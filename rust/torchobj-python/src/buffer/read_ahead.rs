//! A read-ahead reader that survives a fork.

use std::sync::Arc;

use pyo3::prelude::*;
use tokio::sync::Mutex;
use torchobj_core::fork::Local;
use torchobj_core::read::{ReadAhead, ReadAheadConfig};
use torchobj_core::types::Version;

use crate::store::NativeStore;

/// Reads an object ahead. A forked child makes its own read-ahead at the same position.
pub(super) struct ReadAheadSource {
    store: Py<NativeStore>,
    window: ReadAheadConfig,
    version: Option<Version>,
    ahead: Local<Arc<Mutex<ReadAhead>>>,
}

impl ReadAheadSource {
    pub(super) fn new(
        py: Python<'_>,
        store: Py<NativeStore>,
        key: &str,
        window: ReadAheadConfig,
        version: Option<Version>,
    ) -> PyResult<Self> {
        let ahead = ReadAhead::new(store.get().client(py)?, key, window).with_version(version.clone());
        Ok(Self { store, window, version, ahead: Local::new(Arc::new(Mutex::new(ahead))) })
    }

    /// The read-ahead of this process.
    pub(super) fn ahead(&mut self, py: Python<'_>, key: &str) -> PyResult<Arc<Mutex<ReadAhead>>> {
        if self.ahead.get().is_none() {
            *self = Self::new(py, self.store.clone_ref(py), key, self.window, self.version.clone())?;
        }
        Ok(self.ahead.get().expect("it was made above if it was missing").clone())
    }
}
