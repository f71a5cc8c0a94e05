//! The server of a bucket, and the prefix of the paths of its requests.

use std::sync::Arc;

use super::{ConnectionPool, HostAddress, PoolMap};

/// The server and path prefix of requests.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) pool: Arc<ConnectionPool>,
    /// The value of the `Host` header.
    pub(crate) host: String,
    /// Prefix of paths, such as `/` or `/bucket/`.
    pub(crate) path: Vec<u8>,
}

impl Origin {
    /// The server of `url`, with its path.
    pub(crate) fn of(url: &http::Uri, pools: &PoolMap) -> Self {
        let server = HostAddress::of(url);
        let mut path = url.path().as_bytes().to_vec();
        if path.last() != Some(&b'/') {
            path.push(b'/');
        }
        Self { host: server.host_header(), pool: pools.pool(&server), path }
    }

    /// The URL of the server, for messages.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.pool.server().tls { "https" } else { "http" };
        format!("{scheme}://{}", self.host)
    }

    /// The path of a request. An empty `path` is that of the origin, without the trailing slash.
    pub(crate) fn path_of(&self, path: &[u8]) -> Vec<u8> {
        match &*self.path {
            [base @ .., b'/'] if path.is_empty() && !base.is_empty() => base.to_vec(),
            base => [base, path].concat(),
        }
    }
}
