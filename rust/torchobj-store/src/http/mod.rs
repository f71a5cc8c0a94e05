//! HTTP/1.1 over TCP and TLS, made for bodies of known length that are received into their destination. Knows no
//! provider.
//!
//! `dial` makes a connection (`dns`, `proxy`, `socket`, `tls` by `trust`), a `pool` keeps it, and a [`Connection`] speaks
//! one request at a time over it: the head by httparse, the body straight into its destination. What is chunked, or
//! has no length, goes through hyper (`odd`). An [`OpenedObject`] is a response to GET whose headers were checked; its body
//! comes from a connection, or in `frames`. `range`, `date` and `encode` write and parse what stands in headers and
//! URLs; `failure` makes errors.

mod connection;
pub(crate) mod date;
mod dial;
mod dns;
pub(crate) mod encode;
mod failure;
mod frames;
mod head;
mod object;
mod odd;
mod pool;
mod proxy;
pub(crate) mod range;
mod response;
mod socket;
mod tls;
mod transport;
mod trust;

pub(crate) use connection::Connection;
pub(crate) use dial::Dialer;
pub(crate) use failure::{Chain, Failure, Refusal, kind_of_status, shown};
pub(crate) use head::Framing;
pub(crate) use object::{BodyHeaders, OpenedObject};
pub(crate) use odd::OddBody;
pub(crate) use pool::{Lease, Line, Pool, refused};
pub(crate) use proxy::Proxy;
pub(crate) use response::Response;
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
