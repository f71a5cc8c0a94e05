//! torchobj's core: moves bytes between object stores and memory. Depends on no HTTP library, no provider and no Python.
//!
//! The modules, from the lowest layer up:
//!
//! * [`error`], [`url`], [`types`], [`crc32`]: plain data. `counters`: declares counters. [`descriptor`], [`fork`], [`runtime`]: the process. [`buffer`]: memory.
//! * [`store`]: the trait of a store. [`memory`], [`file_store`] and [`prefix`] implement it; the crate `torchobj-conformance` is its test suite.
//! * [`cache`]: a store with a cache on the local disk.
//! * [`policy`]: the policies above every store. [`client`]: a store with its policies. [`engine`]: executes many requests.
//! * [`read`], [`upload`], [`list`]: reads, writes and listings of a client. [`files`]: transfers of files and folders. [`manifest`] and [`object_ref`]: objects by name. [`source_key`]: either of them.
//! * `arena`, `prefetch`: shared memory of a rank and its workers, and reads ahead into it.
//! * `memory_pressure`: whether memory is short.
//! * [`tar`]: tar shards as they arrive, and their headers for an index.

// The name by which files of `tests/` that unit tests include refer to this crate.
#[cfg(test)]
extern crate self as torchobj_core;

#[cfg(target_os = "linux")]
pub mod arena;
pub mod buffer;
pub mod cache;
pub mod client;
mod counters;
pub mod crc32;
pub mod descriptor;
pub mod engine;
pub mod error;
#[cfg(test)]
#[path = "../tests/support/faulty_store.rs"]
mod faulty_store;
pub mod file_store;
pub mod files;
pub mod fork;
pub mod id;
pub mod list;
pub mod manifest;
pub mod memory;
#[cfg(target_os = "linux")]
mod memory_pressure;
pub mod object_ref;
pub mod policy;
#[cfg(target_os = "linux")]
pub mod prefetch;
pub mod prefix;
pub mod read;
pub mod runtime;
pub mod source_key;
pub mod store;
pub mod tar;
#[cfg(test)]
mod test_folder;
pub mod types;
pub mod upload;
pub mod url;
