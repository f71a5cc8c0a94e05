//! HTTP/1.1 client over TCP and TLS, optimized for bodies of known length that are received directly into their
//! destination. Independent of the provider.
//!
//! [`send`] sends a [`Request`] to an [`Origin`]: it writes the head, to which the provider's [`Authorize`] adds headers,
//! follows redirects (`redirect`) that its [`Dialect`] accepts, and returns a [`Response`], or the error that the dialect
//! parses from it. An [`HttpGetResult`] is a response to GET whose headers were checked; its body is received from a
//! connection or in `frames`.
//!
//! Below that, `dial` connects to a server (`dns`, `proxy`, `socket`, `tls`, `trust`), a `pool` keeps idle connections, and
//! a [`Connection`] exchanges one request at a time. It parses the head with httparse and receives a body of known length
//! directly into its destination, others in frames. `range`, `date` and `encode` write and parse parts of headers and URLs,
//! `attributes` those of objects; `failure` classifies errors.

mod attributes;
mod connection;
pub(crate) mod date;
mod dial;
mod dialect;
mod dns;
pub(crate) mod encode;
mod failure;
mod frames;
mod get_result;
mod head;
mod origin;
mod pool;
mod proxy;
pub(crate) mod range;
pub(crate) mod redirect;
mod request;
mod response;
mod socket;
mod tls;
mod trust;

pub(crate) use attributes::{AttributeHeaders, metadata_problem};
pub(crate) use connection::Connection;
pub(crate) use dial::Dialer;
pub(crate) use dialect::{Dialect, error_of};
pub(crate) use failure::{
    CHANGED, Chain, ErrorResponse, Failure, OTHER_SERVER, Refusal, kind_of_status, root_cause, sanitize,
};
pub(crate) use get_result::{BodyHeaders, DetailsParser, HttpGetResult};
pub(crate) use head::Framing;
pub(crate) use origin::Origin;
pub(crate) use pool::{ConnectionPool, Lease, PoolMap, connect_failure};
pub(crate) use proxy::Proxy;
pub(crate) use request::{
    Anonymous, Authorize, Headers, Request, RequestHead, Unauthorized, exchange, invalid_header_value, is_header_value,
    is_token, send,
};
pub(crate) use response::{MAX_ERROR_BYTES, Response, is_html, is_page, refuse};
pub(crate) use socket::Transport;

/// The server that a connection goes to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HostAddress {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) tls: bool,
}

impl HostAddress {
    /// The server of a URL.
    pub(crate) fn of(url: &http::Uri) -> Self {
        let tls = url.scheme_str() == Some("https");
        let port = url.port_u16().unwrap_or(default_port(tls));
        Self { host: url.host().unwrap_or_default().to_owned(), port, tls }
    }

    /// `host:port`
    pub(crate) fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// The value of the `Host` header, without the default port of the scheme.
    pub(crate) fn host_header(&self) -> String {
        if self.port == default_port(self.tls) { self.host.clone() } else { self.authority() }
    }
}

fn default_port(tls: bool) -> u16 {
    if tls { 443 } else { 80 }
}
