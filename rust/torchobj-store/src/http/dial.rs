//! Connects to servers: name resolution, TCP, proxy tunnel, TLS, each with a time limit. Does not pool connections.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::io::Errno;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::time::timeout;
use torchobj_core::fork;

use super::HostAddress;
use super::dns::Resolver;
use super::proxy::{Proxies, Proxy};
use super::socket::{Socket, Transport};
use super::tls::TlsStream;
use super::trust;
use crate::config::HttpConfig;

/// Returns whether the limit on open files of this process or of the system is reached.
pub(super) fn is_out_of_descriptors(error: &io::Error) -> bool {
    let codes = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Connects to servers, with the settings of one client.
#[derive(Debug)]
pub(crate) struct Dialer {
    config: HttpConfig,
    resolver: Resolver,
    proxies: Proxies,
    /// Initialized at the first use, because reading the system's certificates takes milliseconds.
    tls: OnceLock<Arc<ClientConfig>>,
}

impl Dialer {
    /// A dialer with `config`, and the proxies of the environment.
    pub(crate) fn new(config: &HttpConfig) -> io::Result<Self> {
        let proxies = Proxies::from_env()?;
        Ok(Self { config: config.clone(), resolver: Resolver::default(), proxies, tls: OnceLock::new() })
    }

    /// A dialer that sends plain HTTP requests to the proxy at `url`.
    #[cfg(test)]
    pub(crate) fn through(url: &str) -> Self {
        let proxies = Proxies::forwarding(url);
        let config = HttpConfig::default();
        Self { config, resolver: Resolver::default(), proxies, tls: OnceLock::new() }
    }

    /// Maximum idle time of a pooled connection.
    pub(super) fn keep_alive(&self) -> Duration {
        self.config.keep_alive
    }

    /// The proxy that forwards plain HTTP requests to `server`. Such requests have the absolute URL in their request line.
    pub(crate) fn forward_proxy(&self, server: &HostAddress) -> Option<&Proxy> {
        self.proxies.for_server(server).filter(|_| !server.tls)
    }

    fn tls(&self) -> io::Result<Arc<ClientConfig>> {
        if let Some(config) = self.tls.get() {
            return Ok(config.clone());
        }
        // The first configuration in a process initializes statics of the TLS library.
        let _inside = fork::enter();
        let config = trust::tls_config(&self.config)?;
        Ok(self.tls.get_or_init(|| config).clone())
    }

    /// Connects to `server`, directly or through its proxy.
    pub(crate) async fn dial(&self, server: &HostAddress) -> io::Result<Box<dyn Transport>> {
        let proxy = self.proxies.for_server(server);
        let (host, port) = proxy.map_or((server.host.as_str(), server.port), |proxy| (&proxy.host, proxy.port));
        let mut socket = self.connect(host, port).await?;
        if !server.tls {
            socket.is_forwarded = proxy.is_some();
            return Ok(Box::new(socket));
        }
        let name = ServerName::try_from(server.host.trim_matches(['[', ']']).to_owned()).map_err(io::Error::other)?;
        let tls = self.tls()?;
        let handshake = async move {
            if let Some(proxy) = proxy {
                proxy.tunnel(&mut socket, server).await?;
            }
            TlsStream::connect(socket, tls, name).await
        };
        let stream = timeout(self.config.connect_timeout, handshake)
            .await
            .map_err(|_| self.timed_out(&format!("TLS handshake with {}", server.authority())))??;
        Ok(Box::new(stream))
    }

    /// Connects to the first address of `host` that accepts a connection.
    async fn connect(&self, host: &str, port: u16) -> io::Result<Socket> {
        let limit = self.config.connect_timeout;
        let addresses = timeout(limit, self.resolver.resolve(host, port))
            .await
            .map_err(|_| self.timed_out(&format!("resolving {host}")))?
            .map_err(|error| io::Error::new(error.kind(), format!("cannot resolve {host}: {error}")))?;
        let mut last = None;
        for address in addresses {
            let error = match timeout(limit, Socket::connect(address)).await {
                Ok(Ok(socket)) => return Ok(socket),
                // The other addresses would fail too. The caller checks the errno.
                Ok(Err(error)) if is_out_of_descriptors(&error) => return Err(error),
                Ok(Err(error)) => io::Error::new(error.kind(), format!("cannot connect to {address}: {error}")),
                Err(_) => self.timed_out(&format!("connecting to {address}")),
            };
            self.resolver.unreachable(host, address.ip());
            last = Some(error);
        }
        Err(last.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"))))
    }

    fn timed_out(&self, what: &str) -> io::Error {
        let seconds = self.config.connect_timeout.as_secs_f64();
        io::Error::new(io::ErrorKind::TimedOut, format!("{what} took more than {seconds} s"))
    }
}
