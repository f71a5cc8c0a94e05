//! Selects the proxy for a server, and opens tunnels through it. Does not connect to the proxy.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::Uri;
use ipnet::IpNet;
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::HostAddress;
use super::socket::Socket;
use crate::env;

/// The proxy settings of the environment, read once per client.
#[derive(Debug, Default)]
pub(super) struct Proxies {
    https: Option<Proxy>,
    http: Option<Proxy>,
    no_proxy: Vec<String>,
    /// Whether `HTTP_PROXY` is set, and no variable that is used in its place.
    ignores_http: bool,
}

/// Completed when it was logged that `HTTP_PROXY` is ignored.
static IGNORED: Once = Once::new();

/// An HTTP proxy.
#[derive(Clone)]
pub(crate) struct Proxy {
    pub(super) host: String,
    pub(super) port: u16,
    /// `Basic …`, from the user and password in the URL of the proxy.
    authorization: Option<String>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Proxy({}:{})", self.host, self.port)
    }
}

impl Proxies {
    /// The proxies of the environment.
    pub(super) fn from_env() -> io::Result<Self> {
        let proxy = |names: &[&'static str]| env::first_of(names).map(|(name, url)| parse(name, &url)).transpose();
        let no_proxy = env::first_of(&env::NO_PROXY).map(|(_, hosts)| hosts).unwrap_or_default();
        let no_proxy = no_proxy.split(',').map(|host| host.trim().to_ascii_lowercase()).filter(|host| !host.is_empty());
        let http = proxy(&env::HTTP_PROXY)?;
        let ignores_http = http.is_none() && env::first_of(&["HTTP_PROXY"]).is_some();
        Ok(Self { https: proxy(&env::HTTPS_PROXY)?, http, no_proxy: no_proxy.collect(), ignores_http })
    }

    #[cfg(test)]
    pub(super) fn forwarding(url: &str) -> Self {
        Self { http: Some(parse("http_proxy", url).unwrap()), ..Self::default() }
    }

    /// The proxy for `server`; `None`: connections to it are direct.
    pub(super) fn for_server(&self, server: &HostAddress) -> Option<&Proxy> {
        let proxy = if server.tls { self.https.as_ref() } else { self.http.as_ref() };
        if self.ignores_http && !server.tls && !IGNORED.is_completed() && !self.is_direct(&server.host, server.port) {
            IGNORED.call_once(|| {
                log::warn!(
                    "HTTP_PROXY is ignored, as by curl, because clients of a CGI program can set it: requests to http://{} \
                     use no proxy. Set http_proxy for one, or add the host to NO_PROXY.",
                    server.authority()
                );
            });
        }
        proxy.filter(|_| !self.is_direct(&server.host, server.port))
    }

    /// Returns whether `NO_PROXY` contains a host: its name or address, a domain of it, either of them with its port, a network
    /// (`10.0.0.0/8`), or `*`. Link-local addresses, from which machines and containers get credentials, are always direct.
    fn is_direct(&self, host: &str, port: u16) -> bool {
        let host = host.to_ascii_lowercase();
        if host.parse::<Ipv4Addr>().is_ok_and(|address| address.is_link_local()) || host.contains("fd00:ec2::") {
            return true;
        }
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        self.no_proxy.iter().any(|rule| {
            if let (Some(address), Some(network)) = (address, network(rule)) {
                return network.contains(&address);
            }
            let (rule, of_port) = match rule.rsplit_once(':') {
                Some((name, of_port)) if !name.contains(':') => (name, of_port.parse::<u16>().ok()),
                _ => (rule.as_str(), None),
            };
            let domain = rule.trim_start_matches('*').trim_start_matches('.');
            of_port.is_none_or(|of_port| of_port == port)
                && (rule == "*"
                    || host == domain
                    || host.strip_suffix(domain).is_some_and(|rest| !domain.is_empty() && rest.ends_with('.')))
        })
    }
}

/// Parses an IP network in CIDR notation, or a single address.
fn network(rule: &str) -> Option<IpNet> {
    let rule = rule.replace(['[', ']'], "");
    rule.parse().ok().or_else(|| rule.parse::<IpAddr>().ok().map(IpNet::from))
}

fn parse(name: &str, url: &str) -> io::Result<Proxy> {
    // The message omits the URL, which may contain a password.
    let refuse = |problem: &str| {
        let message = format!("{name} {problem}: expected the URL of an HTTP proxy, such as http://proxy:3128");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: Uri = with_scheme.parse().map_err(|_| refuse("is not a URL"))?;
    if uri.scheme_str() != Some("http") {
        let scheme = uri.scheme_str().unwrap_or_default();
        return Err(refuse(&format!("begins with {scheme}://, which is not supported")));
    }
    let authority = uri.authority().ok_or_else(|| refuse("has no host"))?;
    // A `/` in a password would end the authority.
    if uri.path_and_query().is_some_and(|path| path.as_str() != "/")
        || authority.port().is_none() && authority.as_str().ends_with(':')
    {
        return Err(refuse("has a path or a query (in a password, write / ? # @ as %2F %3F %23 %40)"));
    }
    let authorization = authority.as_str().rsplit_once('@').map(|(user, _)| {
        let user: Vec<u8> = percent_decode_str(user).collect();
        format!("Basic {}", BASE64_STANDARD.encode(user))
    });
    Ok(Proxy { host: authority.host().to_owned(), port: authority.port_u16().unwrap_or(80), authorization })
}

impl Proxy {
    /// The value of `Proxy-Authorization` for forwarded requests, if the URL of the proxy has a user.
    pub(crate) fn authorization(&self) -> Option<&str> {
        self.authorization.as_deref()
    }

    /// Opens a tunnel to `server` over `socket`, which is connected to the proxy.
    pub(super) async fn tunnel(&self, socket: &mut Socket, server: &HostAddress) -> io::Result<()> {
        let authority = server.authority();
        let mut request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n");
        if let Some(authorization) = &self.authorization {
            request.push_str(&format!("Proxy-Authorization: {authorization}\r\n"));
        }
        request.push_str("\r\n");
        socket.write_all(request.as_bytes()).await?;
        let mut head = Vec::new();
        // Byte by byte: the bytes after the head belong to the tunnel.
        while !head.ends_with(b"\r\n\r\n") {
            if head.len() > 16 << 10 {
                return Err(io::Error::other(format!("{self:?}: the response to CONNECT is larger than 16 KiB")));
            }
            head.push(socket.read_u8().await?);
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        response.parse(&head).map_err(io::Error::other)?;
        match response.code {
            Some(200..=299) => Ok(()),
            code => {
                let (code, reason) = (code.unwrap_or_default(), response.reason.unwrap_or_default());
                Err(io::Error::other(format!("{self:?} refused the tunnel to {authority}: {code} {reason}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_no_proxy(no_proxy: &str) -> Proxies {
        Proxies { no_proxy: no_proxy.split(',').map(str::to_owned).collect(), ..Proxies::default() }
    }

    #[test]
    fn no_proxy_contains_hosts_domains_and_ports() {
        let proxies = with_no_proxy("localhost,.example.com,10.0.0.1:9000,s3.amazonaws.com");
        for host in ["localhost", "a.example.com", "example.com", "b.s3.amazonaws.com"] {
            assert!(proxies.is_direct(host, 443), "{host}");
        }
        for host in ["notexample.com", "10.0.0.1", "amazonaws.com"] {
            assert!(!proxies.is_direct(host, 443), "{host}");
        }
        assert!(proxies.is_direct("10.0.0.1", 9000));
        assert!(with_no_proxy("*").is_direct("anything", 1));
        for metadata in ["169.254.169.254", "169.254.170.2", "[fd00:ec2::254]"] {
            assert!(with_no_proxy("").is_direct(metadata, 80), "{metadata}");
        }
    }

    #[test]
    fn no_proxy_contains_networks() {
        let proxies = with_no_proxy("10.0.0.0/8,192.168.1.77/24,fd00:1::/32,::1,172.16.0.1,0.0.0.0/33,10.1.0.0/x");
        for host in ["10.255.0.1", "192.168.1.1", "[fd00:1:2::3]", "[::1]", "172.16.0.1"] {
            assert!(proxies.is_direct(host, 443), "{host}");
        }
        for host in ["11.0.0.1", "192.168.2.1", "[fd00:2::1]", "[::2]", "172.16.0.2", "10.example", "s3.amazonaws.com"]
        {
            assert!(!proxies.is_direct(host, 443), "{host}");
        }
        assert!(
            with_no_proxy("0.0.0.0/0").is_direct("8.8.8.8", 1) && !with_no_proxy("0.0.0.0/0").is_direct("[::1]", 1)
        );
    }

    #[test]
    fn the_password_of_a_proxy_is_sent_and_not_shown() {
        let proxy = parse("https_proxy", "http://user:p%40ss+word@proxy.local:3128").unwrap();
        assert_eq!((proxy.host.as_str(), proxy.port), ("proxy.local", 3128));
        assert_eq!(
            proxy.authorization.as_deref(),
            Some(&*format!("Basic {}", BASE64_STANDARD.encode("user:p@ss+word")))
        );
        assert_eq!(format!("{proxy:?}"), "Proxy(proxy.local:3128)");
    }

    #[test]
    fn the_error_of_an_invalid_proxy_names_its_variable_and_shows_no_password() {
        for (url, problem) in [
            ("socks5://user:secret@proxy:1080", "begins with socks5://"),
            ("http://", "is not a URL"),
            ("http://user:secret@a b", "is not a URL"),
            ("http://user:12/secret@proxy:3128", "has a path"),
            ("http://user:12?secret@proxy:3128", "has a path"),
        ] {
            let error = parse("https_proxy", url).unwrap_err().to_string();
            assert!(error.starts_with(&format!("https_proxy {problem}")) && !error.contains("secret"), "{error}");
        }
    }
}
