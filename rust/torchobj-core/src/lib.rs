//! torchobj's core: moves bytes between object stores and memory. Knows no HTTP, no cloud and no Python.
//!
//! The map, from below: [`error`] [`url`] [`types`] [`crc32`] are plain data · [`fork`] and [`runtime`] are about the process ·
//! [`buffer`] is memory · [`store`] is the trait that a store implements, [`memory`] and [`wrap`] implement it here ·
//! [`transfer`] holds the policies that stand over any store · [`client`] joins a store with them, and reads
//! ([`read`]), writes ([`upload`]) and lists ([`manifest`]) · [`object_ref`] names what is not listed · [`pickle`] measures
//! untrusted pickles.

#[cfg(target_os = "linux")]
pub mod arena;
pub mod buffer;
pub mod client;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod crc32;
pub mod error;
pub mod fork;
pub mod list;
pub mod manifest;
pub mod memory;
pub mod object_ref;
pub mod pickle;
#[cfg(target_os = "linux")]
pub mod prefetch;
pub mod read;
pub mod runtime;
pub mod store;
pub mod transfer;
pub mod types;
pub mod upload;
pub mod url;
pub mod wrap;
