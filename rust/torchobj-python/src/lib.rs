//! The binding: takes arguments, releases the GIL, calls torchobj-core and torchobj-store, and wraps the result.
//!
//! The map: `store`, `manifest`, `pages`, `object_ref`, `writer` and `gather` are the classes · `scatter` reads into memory of
//! Python's · `source` and `ref_source` read ahead,
//! `reach` finds who reads for this process · `buffer` is memory that both sides see, and readers of it · `process` keeps
//! one client per configuration and process · `pickle` measures pickles · `wait` runs work while Python waits · `config`, `error` and `log` translate.

mod buffer;
mod config;
mod error;
mod gather;
mod log;
mod manifest;
mod object_ref;
mod pages;
mod pickle;
mod process;
#[cfg(target_os = "linux")]
mod reach;
#[cfg(target_os = "linux")]
mod ref_source;
mod scatter;
#[cfg(target_os = "linux")]
mod source;
#[cfg(target_os = "linux")]
mod stats;
mod store;
mod wait;
mod writer;

use pyo3::prelude::*;

/// What the package `torchobj` is made of. Not for others: names change without notice.
#[pymodule(name = "_torchobj")]
mod native {
    #[pymodule_export]
    use crate::buffer::{Buffer, ObjectReader};
    #[pymodule_export]
    use crate::config::default_config;
    #[pymodule_export]
    use crate::gather::{NativeGather, close_gathers, crc32_joined};
    #[pymodule_export]
    use crate::manifest::Manifest;
    #[pymodule_export]
    use crate::object_ref::{ObjectRef, read_refs};
    #[pymodule_export]
    use crate::pages::ManifestPages;
    #[pymodule_export]
    use crate::pickle::pickle_nesting;
    #[pymodule_export]
    use crate::process::finish;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use crate::ref_source::RefSource;
    #[pymodule_export]
    use crate::scatter::scatter;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use crate::source::{Announcer, NativeIteration, NativeSource, adopt, offer, start_prefetcher};
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use crate::stats::prefetch_stats;
    #[pymodule_export]
    use crate::store::{ListPages, NativeStore, get_many};
    #[pymodule_export]
    use crate::writer::NativeWriter;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::log::install();
        // Sets up what a fork needs, while nobody can fork in the middle of it.
        drop(torchobj_core::fork::enter());
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
