//! Python bindings: extract arguments, release the GIL, call torchobj-core and torchobj-store, and wrap the result.
//!
//! `files` transfers files and folders. `store`, `manifest`, `pages`, `scan`, `object_ref`, `upload` and `tar` define classes. `arrow`
//! exports listings. `get_many` reads objects, also into Python buffers, and `slice_plan` slices of arrays.
//! A `source` reads ahead, through the `prefetcher` of this process or of another one, and `announcing` iterators announce.
//! `cache` has the files of a disk cache. `blocks` is the memory of batches. `buffer` shares memory
//! with Python, and reads it as files. `process` keeps one client per configuration and process. `wait` runs a future while
//! the calling thread waits without the GIL. `credentials` calls credential providers of the user. `pickle` measures
//! pickles. `attributes`, `config`, `error` and `log` convert values.

#[cfg(target_os = "linux")]
mod announcing;
mod arrow;
mod attributes;
#[cfg(target_os = "linux")]
mod blocks;
mod buffer;
mod cache;
mod config;
mod credentials;
mod error;
mod files;
mod get_many;
mod log;
mod manifest;
mod object_ref;
mod own;
mod pages;
mod pickle;
#[cfg(target_os = "linux")]
mod prefetcher;
mod process;
mod scan;
mod slice_plan;
#[cfg(target_os = "linux")]
mod source;
mod store;
mod tar;
mod upload;
mod wait;

use pyo3::prelude::*;

/// Native functions and classes of torchobj. Private: names change without notice.
#[pymodule(name = "_torchobj")]
mod native {
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use crate::announcing::Announcer;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use crate::blocks::NativeBlocks;
    #[pymodule_export]
    use crate::buffer::{Buffer, ObjectReader};
    #[pymodule_export]
    use crate::cache::CacheFiles;
    #[pymodule_export]
    use crate::config::{default_config, s3_ca_bundle, s3_credential_source};
    #[pymodule_export]
    use crate::credentials::CredentialAnswer;
    #[pymodule_export]
    use crate::files::{download_file, download_tree, is_special_file, upload_file, upload_tree};
    #[pymodule_export]
    use crate::get_many::{crc32_combine, get_many, scatter};
    #[pymodule_export]
    use crate::manifest::{ManifestBuilder, ManifestPages, NativeManifest};
    #[pymodule_export]
    use crate::object_ref::{ObjectRef, read_refs};
    #[pymodule_export]
    use crate::pages::ListPages;
    #[pymodule_export]
    use crate::pickle::pickle_nesting;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use crate::prefetcher::{
        adopt, enter_loader, offer, prefetch_stats, release_free_memory, remove_loader, start_prefetcher,
        work_for_loader,
    };
    #[pymodule_export]
    use crate::process::{end_calls, finish, process_id, process_number, request_stats};
    #[pymodule_export]
    use crate::scan::{ScanPages, heads};
    #[pymodule_export]
    use crate::slice_plan::{NativeSlicePlan, NativeWave};
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use crate::source::{ObjectSource, SourceIterator};
    #[pymodule_export]
    use crate::store::NativeStore;
    #[pymodule_export]
    use crate::tar::{TarIndexer, TarReader};
    #[pymodule_export]
    use crate::upload::{NativeGather, NativeWriter, close_gathers};
    #[pymodule_export]
    use crate::wait::Cancellation;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::log::install();
        // Installs the fork handlers before another thread can fork.
        drop(torchobj_core::fork::enter());
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
