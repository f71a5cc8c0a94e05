//! Pools idle connections. The most recently used one is reused first; connections are closed before the server would.

use std::collections::HashMap;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustls::CertificateError;
use tokio::time::Instant;
use torchobj_core::client::max_connections;
use torchobj_core::error::ErrorKind;

use super::dial::is_out_of_descriptors;
use super::proxy::Proxy;
use super::{Connection, Dialer, Failure, HostAddress};

/// The connection pools of one client, by server.
pub(crate) struct PoolMap {
    dialer: Arc<Dialer>,
    pools: Mutex<HashMap<HostAddress, Arc<ConnectionPool>>>,
    idle: Arc<IdleCount>,
}

/// Number of idle connections of all pools of a client, and its maximum.
struct IdleCount {
    current: AtomicUsize,
    max: usize,
}

impl PoolMap {
    pub(crate) fn new(dialer: Arc<Dialer>) -> Self {
        let idle = Arc::new(IdleCount { current: AtomicUsize::new(0), max: max_connections() });
        Self { dialer, pools: Mutex::default(), idle }
    }

    /// The pool of connections to `server`.
    pub(crate) fn pool(&self, server: &HostAddress) -> Arc<ConnectionPool> {
        let mut pools = self.pools.lock().expect("no holder of this lock panics");
        let pool = pools.entry(server.clone()).or_insert_with(|| {
            let (dialer, idle_count) = (self.dialer.clone(), self.idle.clone());
            Arc::new(ConnectionPool { server: server.clone(), dialer, idle: Mutex::default(), idle_count })
        });
        pool.clone()
    }
}

/// All pooled connections to one server.
pub(crate) struct ConnectionPool {
    server: HostAddress,
    dialer: Arc<Dialer>,
    idle: Mutex<Idle>,
    /// Includes the other pools of the client.
    idle_count: Arc<IdleCount>,
}

#[derive(Default)]
struct Idle {
    /// The least recently used first.
    connections: Vec<(Connection, Instant)>,
    /// Whether the task that closes expired connections runs.
    task_running: bool,
}

impl ConnectionPool {
    /// The server.
    pub(crate) fn server(&self) -> &HostAddress {
        &self.server
    }

    /// The proxy that forwards plain HTTP requests.
    pub(crate) fn forward_proxy(&self) -> Option<&Proxy> {
        self.dialer.forward_proxy(&self.server)
    }

    /// A connection for one request: an idle one, or a new one.
    pub(crate) async fn lease(self: &Arc<Self>) -> Result<Lease, Failure> {
        while let Some(connection) = self.pop() {
            if connection.is_idle() {
                return Ok(Lease::new(self, connection));
            }
        }
        match self.dialer.dial(&self.server).await {
            Ok(transport) => Ok(Lease::new(self, Connection::new(transport))),
            Err(error) => Err(connect_failure(&error)),
        }
    }

    fn pop(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        let (connection, since) = idle.connections.pop()?;
        if since.elapsed() < self.dialer.keep_alive() {
            self.idle_count.current.fetch_sub(1, Ordering::Relaxed);
            return Some(connection);
        }
        // The most recently used one has expired, so all have. They are closed after the lock is released.
        let old = std::mem::take(&mut idle.connections);
        self.idle_count.current.fetch_sub(old.len() + 1, Ordering::Relaxed);
        drop(idle);
        drop(old);
        None
    }

    fn push(self: &Arc<Self>, connection: Connection) {
        if self.idle_count.current.fetch_add(1, Ordering::Relaxed) >= self.idle_count.max {
            self.idle_count.current.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        idle.connections.push((connection, Instant::now()));
        if !idle.task_running {
            idle.task_running = true;
            tokio::spawn(close_expired(Arc::downgrade(self), self.dialer.keep_alive()));
        }
    }

    /// Closes expired connections. Returns the time until the next one expires; `None` if no connection is left.
    fn close_expired(&self, keep_alive: Duration) -> Option<Duration> {
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        let old = idle.connections.partition_point(|(_, since)| since.elapsed() >= keep_alive);
        let old: Vec<_> = idle.connections.drain(..old).collect();
        self.idle_count.current.fetch_sub(old.len(), Ordering::Relaxed);
        let next = idle.connections.first().map(|(_, since)| keep_alive.saturating_sub(since.elapsed()));
        idle.task_running = next.is_some();
        drop(idle);
        drop(old);
        next
    }
}

/// Closes expired connections until no idle connection is left, or the pool is dropped.
async fn close_expired(pool: Weak<ConnectionPool>, keep_alive: Duration) {
    let mut wait = keep_alive;
    loop {
        tokio::time::sleep(wait.max(Duration::from_millis(10))).await;
        let Some(pool) = pool.upgrade() else { return };
        match pool.close_expired(keep_alive) {
            Some(next) => wait = next,
            None => return,
        }
    }
}

/// The next step if the server does not answer as one of TLS.
const NO_TLS: &str = "if the server does not use TLS, begin endpoint_url with http://";

/// Classifies the failure of a connect. Copies the error, because the SDK owns its errors.
pub(crate) fn connect_failure(error: &io::Error) -> Failure {
    let (kind, message) = match error.kind() {
        io::ErrorKind::TimedOut => (ErrorKind::Timeout, "no connection"),
        // Not retried: a certificate that is not trusted will not be trusted later.
        io::ErrorKind::InvalidData => (ErrorKind::InvalidRequest, "the TLS handshake failed"),
        io::ErrorKind::InvalidInput => (ErrorKind::Config, "no connection"),
        _ => (ErrorKind::Connect, "no connection"),
    };
    let source = Some(io::Error::new(error.kind(), error.to_string()));
    Failure { kind, message: message.into(), source, hint: hint(error) }
}

/// The next step for the user after a failed TLS handshake, or when the limit on open files is reached.
fn hint(error: &io::Error) -> Option<&'static str> {
    if is_out_of_descriptors(error) {
        return Some("raise the limit on open files: ulimit -n");
    }
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return Some(NO_TLS);
    }
    match error.get_ref()?.downcast_ref()? {
        rustls::Error::InvalidMessage(_) => Some(NO_TLS),
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => Some(
            "set ca_bundle to the PEM file of the CA that signed the server's certificate, by the variable AWS_CA_BUNDLE \
                for s3:// and SSL_CERT_FILE for gs://",
        ),
        rustls::Error::InvalidCertificate(CertificateError::Other(other))
            if other.to_string().contains("UnsupportedCertVersion") =>
        {
            Some(
                "the server's certificate is of X.509 version 1, which is not supported: create one of version 3, such as by \
                `openssl req -x509 -addext subjectAltName=DNS:host -addext basicConstraints=CA:FALSE`",
            )
        }
        rustls::Error::InvalidCertificate(CertificateError::Other(_)) => Some(
            "the self-signed certificate of the server must not be a CA certificate, also if ca_bundle (AWS_CA_BUNDLE) \
             contains it: create it with basicConstraints=CA:FALSE, or sign it with a CA and set ca_bundle to that of the CA",
        ),
        _ => None,
    }
}

/// A connection in use. Dropping it returns the connection to the pool if the response was read to its end, and closes it
/// otherwise.
pub(crate) struct Lease {
    pool: Arc<ConnectionPool>,
    /// Taken when the lease is dropped.
    connection: Option<Connection>,
}

impl Lease {
    fn new(pool: &Arc<ConnectionPool>, connection: Connection) -> Self {
        Self { pool: pool.clone(), connection: Some(connection) }
    }

    /// Whether the connection uses TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.pool.server().tls
    }
}

impl Deref for Lease {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.connection.as_ref().expect("the connection is taken only by drop")
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("the connection is taken only by drop")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take().filter(Connection::is_reusable) {
            self.pool.push(connection);
        }
    }
}
