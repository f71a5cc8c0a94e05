//! Object stores for torchobj: they implement the trait of `torchobj-core`, one attempt per call, and say what kind of
//! failure they met. Knows no Python.
//!
//! The map: [`config`] is what a store is set up with, `env` what is read of the environment · `http` speaks HTTP/1.1
//! over TCP and TLS · [`s3`] is S3 and what speaks like it · [`file`] is a folder.

pub mod config;
pub mod env;
#[cfg(test)]
mod fake;
pub mod file;
mod http;
pub mod s3;
