//! The stores on real servers, and with the faults of the strict ones: one binary, because linking the SDKs takes longer than
//! most of these tests. `server` starts servers.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod commits;
mod emulator;
mod faults;
mod gcs;
mod gcs_faults;
mod gcs_uploads;
mod refusals;
mod s3;
mod server;
