//! HTTP/1.1 over TCP and TLS, made for bodies of known length that land where they are wanted.
//!
//! `dial` makes a connection (`dns`, `proxy`, `socket`, `tls` by `trust`), a `pool` keeps it, and a [`Connection`] speaks
//! one request at a time over it: the head by httparse, the body straight into its destination. What is chunked, or
//! has no length, goes through hyper (`odd`). Knows no store.

mod connection;
mod dial;
mod dns;
mod head;
mod odd;
mod pool;
mod proxy;
mod socket;
mod tls;
mod transport;
mod trust;

use std::fmt;
use std::io;

use torchobj_core::error::ErrorKind;

pub(crate) use connection::Connection;
pub(crate) use dial::Dialer;
pub(crate) use head::Framing;
pub(crate) use odd::OddBody;
pub(crate) use pool::{Lease, Line, Pool, refused};
pub(crate) use proxy::Proxy;
pub(crate) use transport::Transport;

/// A server: where a connection goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) tls: bool,
}

impl Target {
    /// `host:port`
    pub(crate) fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// What the `Host` header says: without the port where it is the scheme's own.
    pub(crate) fn host_header(&self) -> String {
        let usual = if self.tls { 443 } else { 80 };
        if self.port == usual { self.host.clone() } else { self.authority() }
    }
}

/// Why an exchange over a connection failed. The store adds what was asked of whom.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    pub(crate) message: &'static str,
    pub(crate) source: Option<io::Error>,
    /// What the user can do next.
    pub(crate) hint: Option<&'static str>,
}

impl Failure {
    fn new(kind: ErrorKind, message: &'static str) -> Self {
        Self { kind, message, source: None, hint: None }
    }

    fn broken(message: &'static str, source: io::Error) -> Self {
        Self { kind: ErrorKind::Reset, message, source: Some(source), hint: None }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)
    }
}
