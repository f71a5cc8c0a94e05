//! Object stores that implement the `ObjectStore` trait of `torchobj-core`. A call makes one attempt and classifies its
//! failure; retries are up to the caller. Does not depend on Python.
//!
//! [`config`] configures stores, and [`env`] reads environment variables. [`credentials`] loads and refreshes credentials.
//! `http` implements HTTP/1.1 over TCP and TLS. [`s3`] is the store for S3 and compatible servers, [`gcs`]
//! for Google Cloud Storage.

pub mod config;
pub mod credentials;
pub mod env;
#[cfg(test)]
mod fake;
pub mod gcs;
mod http;
pub mod s3;
