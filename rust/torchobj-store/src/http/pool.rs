//! Keeps connections that are idle, the newest used first, none longer than the server would.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustls::CertificateError;
use tokio::time::Instant;
use torchobj_core::client::most_connections;
use torchobj_core::error::ErrorKind;

use super::dial::is_out_of_descriptors;
use super::head::Head;
use super::odd::OddBody;
use super::proxy::Proxy;
use super::{Connection, Dialer, Failure, Target};

/// Connections to all servers of one client.
#[derive(Debug)]
pub(crate) struct Pool {
    dialer: Arc<Dialer>,
    lines: Mutex<HashMap<Target, Arc<Line>>>,
    idle: Arc<IdleCount>,
}

/// How many connections of all lines are idle, and how many may be: a job that reads from many hosts keeps some of each.
#[derive(Debug)]
struct IdleCount {
    now: AtomicUsize,
    most: usize,
}

impl Pool {
    pub(crate) fn new(dialer: Arc<Dialer>) -> Self {
        let idle = Arc::new(IdleCount { now: AtomicUsize::new(0), most: most_connections() });
        Self { dialer, lines: Mutex::default(), idle }
    }

    /// The connections to `target`.
    pub(crate) fn line(&self, target: &Target) -> Arc<Line> {
        let mut lines = self.lines.lock().expect("no holder of this lock panics");
        let line = lines.entry(target.clone()).or_insert_with(|| {
            let (dialer, of_all) = (self.dialer.clone(), self.idle.clone());
            Arc::new(Line { target: target.clone(), dialer, idle: Mutex::default(), of_all })
        });
        line.clone()
    }
}

/// Connections to one server.
pub(crate) struct Line {
    target: Target,
    dialer: Arc<Dialer>,
    idle: Mutex<Idle>,
    /// Those of the other lines of the pool included.
    of_all: Arc<IdleCount>,
}

#[derive(Default)]
struct Idle {
    /// The longest idle first.
    connections: Vec<(Connection, Instant)>,
    /// Whether a task is there that closes what is idle for too long.
    swept: bool,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Line({})", self.target.authority())
    }
}

impl Line {
    /// The server.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// The proxy that requests must name the target whole for.
    pub(crate) fn forwarder(&self) -> Option<&Proxy> {
        self.dialer.forwarder(&self.target)
    }

    /// A connection for one request, kept or new.
    pub(crate) async fn lease(self: &Arc<Self>) -> Result<Lease, Failure> {
        while let Some(connection) = self.pop() {
            if connection.is_quiet() {
                return Ok(Lease::new(self, connection));
            }
        }
        match self.dialer.dial(&self.target).await {
            Ok(transport) => Ok(Lease::new(self, Connection::new(transport))),
            Err(error) => Err(refused(&error)),
        }
    }

    fn pop(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        let (connection, since) = idle.connections.pop()?;
        if since.elapsed() < self.dialer.keep_alive() {
            self.of_all.now.fetch_sub(1, Ordering::Relaxed);
            return Some(connection);
        }
        // The newest is too old, so all are. They are closed without the lock.
        let old = std::mem::take(&mut idle.connections);
        self.of_all.now.fetch_sub(old.len() + 1, Ordering::Relaxed);
        drop(idle);
        drop(old);
        None
    }

    fn push(self: &Arc<Self>, connection: Connection) {
        if self.of_all.now.fetch_add(1, Ordering::Relaxed) >= self.of_all.most {
            self.of_all.now.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        idle.connections.push((connection, Instant::now()));
        if !idle.swept {
            idle.swept = true;
            tokio::spawn(sweep(Arc::downgrade(self), self.dialer.keep_alive()));
        }
    }

    /// Closes what is idle for too long, and says when to come again: never, when nothing is left.
    fn close_old(&self, keep_alive: Duration) -> Option<Duration> {
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        let old = idle.connections.partition_point(|(_, since)| since.elapsed() >= keep_alive);
        let old: Vec<_> = idle.connections.drain(..old).collect();
        self.of_all.now.fetch_sub(old.len(), Ordering::Relaxed);
        let next = idle.connections.first().map(|(_, since)| keep_alive.saturating_sub(since.elapsed()));
        idle.swept = next.is_some();
        drop(idle);
        drop(old);
        next
    }
}

/// Lives while there are idle connections: it ends with the last one, or with the line.
async fn sweep(line: Weak<Line>, keep_alive: Duration) {
    let mut wait = keep_alive;
    loop {
        tokio::time::sleep(wait.max(Duration::from_millis(10))).await;
        let Some(line) = line.upgrade() else { return };
        match line.close_old(keep_alive) {
            Some(next) => wait = next,
            None => return,
        }
    }
}

/// What kind of failure it is that no connection could be made. The source is a copy: the SDK keeps its errors.
pub(crate) fn refused(error: &io::Error) -> Failure {
    let (kind, message) = match error.kind() {
        io::ErrorKind::TimedOut => (ErrorKind::Timeout, "no connection"),
        // A certificate that is not trusted today is not trusted in a second.
        io::ErrorKind::InvalidData => (ErrorKind::InvalidRequest, "the TLS handshake failed"),
        io::ErrorKind::InvalidInput => (ErrorKind::Config, "no connection"),
        _ => (ErrorKind::Connect, "no connection"),
    };
    let source = Some(io::Error::new(error.kind(), error.to_string()));
    Failure { kind, message, source, hint: hint(error) }
}

/// What to do about a TLS handshake that failed, or about a limit of this process.
fn hint(error: &io::Error) -> Option<&'static str> {
    if is_out_of_descriptors(error) {
        return Some("raise the limit on open files: ulimit -n");
    }
    match error.get_ref()?.downcast_ref()? {
        rustls::Error::InvalidMessage(_) => Some("where the server speaks no TLS, begin endpoint_url with http://"),
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            Some("set ca_bundle to the PEM file of the CA that signed the certificate of the server")
        }
        rustls::Error::InvalidCertificate(CertificateError::Other(_)) => Some(
            "where ca_bundle is the server's own self-signed certificate: it must not be one of a CA; make it with \
             basicConstraints=CA:FALSE, or sign it by a CA and set ca_bundle to that CA's",
        ),
        _ => None,
    }
}

/// A connection that is in use. Dropped before its answer was taken whole it is closed, and the request with it.
pub(crate) struct Lease {
    line: Arc<Line>,
    /// Taken when the lease ends, and while a body of odd framing is streamed.
    connection: Option<Connection>,
    /// The head of the current answer and its bytes, from when its connection was taken to stream the body.
    kept: Option<Box<(Head, Vec<u8>)>>,
}

impl Lease {
    fn new(line: &Arc<Line>, connection: Connection) -> Self {
        Self { line: line.clone(), connection: Some(connection), kept: None }
    }

    /// A header of the current answer, also after its body was read or broke.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let (head, bytes) = match &self.kept {
            Some(kept) => (&kept.0, kept.1.as_slice()),
            None => self.answer().head(),
        };
        head.headers(bytes).find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// The connection.
    pub(crate) fn connection(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("only the end of the lease takes the connection")
    }

    /// The connection, to be read only.
    pub(crate) fn answer(&self) -> &Connection {
        self.connection.as_ref().expect("only the end of the lease takes the connection")
    }

    /// Takes a short body of any framing, up to `limit` bytes.
    pub(crate) async fn read_text(&mut self, method: &'static str, limit: usize) -> Result<Vec<u8>, Failure> {
        if self.answer().framing() != super::Framing::Odd {
            return self.connection().read_text(limit).await;
        }
        let mut body = self.stream(method).await?;
        let mut text = Vec::new();
        while let Some(bytes) = body.next().await? {
            if text.len() + bytes.len() > limit {
                return Err(Failure::new(ErrorKind::Protocol, "the answer is too long"));
            }
            text.extend_from_slice(&bytes);
        }
        self.give_back(body);
        Ok(text)
    }

    /// The body of the response to a `method` request, of odd framing. The lease has no connection until it is given
    /// back.
    pub(crate) async fn stream(&mut self, method: &'static str) -> Result<OddBody, Failure> {
        let connection = self.connection.take().expect("only the end of the lease takes the connection");
        let (head, bytes) = connection.head();
        self.kept = Some(Box::new((head.clone(), bytes.to_vec())));
        OddBody::open(connection, method).await
    }

    /// Keeps the connection of a body that has ended.
    pub(crate) fn give_back(&mut self, body: OddBody) {
        self.connection = Some(body.into_connection());
    }

    /// Receives a short body of known length and leaves it to be taken.
    pub(crate) async fn peek_text(&mut self) -> Result<&[u8], Failure> {
        self.connection().peek_text().await
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take().filter(Connection::is_reusable) {
            self.line.push(connection);
        }
    }
}
