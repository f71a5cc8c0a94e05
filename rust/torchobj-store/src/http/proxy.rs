//! Which proxy a request takes, and the tunnel through it. Does not connect.

use std::io;
use std::net::{IpAddr, Ipv4Addr};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::Uri;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Target;
use super::socket::Socket;
use crate::env;

/// The proxies of the environment, read once per client.
#[derive(Debug, Default)]
pub(super) struct Proxies {
    https: Option<Proxy>,
    http: Option<Proxy>,
    direct: Vec<String>,
}

/// A proxy that speaks HTTP.
#[derive(Clone)]
pub(crate) struct Proxy {
    pub(super) host: String,
    pub(super) port: u16,
    /// `Basic …`, from the URL's user and password.
    authorization: Option<String>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Proxy({}:{})", self.host, self.port)
    }
}

impl Proxies {
    /// Those of the environment.
    pub(super) fn from_env() -> io::Result<Self> {
        let proxy = |names: &[&'static str]| env::first_of(names).map(|(name, url)| parse(name, &url)).transpose();
        let direct = env::first_of(&env::NO_PROXY).map(|(_, hosts)| hosts).unwrap_or_default();
        let direct = direct.split(',').map(|host| host.trim().to_ascii_lowercase()).filter(|host| !host.is_empty());
        Ok(Self { https: proxy(&env::HTTPS_PROXY)?, http: proxy(&env::HTTP_PROXY)?, direct: direct.collect() })
    }

    #[cfg(test)]
    pub(super) fn forwarding(url: &str) -> Self {
        Self { http: Some(parse("http_proxy", url).unwrap()), ..Self::default() }
    }

    /// The proxy for `target`, if it is not reached directly.
    pub(super) fn of(&self, target: &Target) -> Option<&Proxy> {
        let proxy = if target.tls { self.https.as_ref() } else { self.http.as_ref() };
        proxy.filter(|_| !self.is_direct(&target.host, target.port))
    }

    /// Whether `NO_PROXY` names a host: by itself, by a domain it is in, with or without its port, by a range of addresses
    /// (`10.0.0.0/8`), or by `*`. Addresses of the link itself, where machines and containers get credentials from, are never a proxy's.
    fn is_direct(&self, host: &str, port: u16) -> bool {
        let host = host.to_ascii_lowercase();
        if host.parse::<Ipv4Addr>().is_ok_and(|address| address.is_link_local()) || host.contains("fd00:ec2::") {
            return true;
        }
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        self.direct.iter().any(|rule| {
            if let (Some(address), Some(range)) = (address, Range::parse(rule)) {
                return range.contains(address);
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

/// Addresses that share the first bits of one; a single address shares them all.
struct Range {
    address: IpAddr,
    bits: u32,
}

impl Range {
    fn parse(rule: &str) -> Option<Self> {
        let (address, bits) = rule.split_once('/').map_or((rule, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.trim_matches(['[', ']']).parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Some(most), |bits| bits.parse().ok().filter(|bits| *bits <= most))?;
        Some(Self { address, bits })
    }

    fn contains(&self, address: IpAddr) -> bool {
        let differing = match (self.address, address) {
            (IpAddr::V4(ours), IpAddr::V4(other)) => (ours.to_bits() ^ other.to_bits()).leading_zeros(),
            (IpAddr::V6(ours), IpAddr::V6(other)) => (ours.to_bits() ^ other.to_bits()).leading_zeros(),
            _ => return false,
        };
        differing >= self.bits
    }
}

fn parse(name: &str, url: &str) -> io::Result<Proxy> {
    // Not the URL: a password may be in it.
    let refuse = |problem: &str| {
        let message = format!("{name} {problem}: expected the URL of an http proxy, as http://proxy:3128");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: Uri = with_scheme.parse().map_err(|_| refuse("is no URL"))?;
    if uri.scheme_str() != Some("http") {
        let scheme = uri.scheme_str().unwrap_or_default();
        return Err(refuse(&format!("begins with {scheme}://, which is not spoken")));
    }
    let authority = uri.authority().ok_or_else(|| refuse("names no host"))?;
    // A password with a `/` ends the authority: what is in front of it is no host.
    if uri.path_and_query().is_some_and(|path| path.as_str() != "/")
        || authority.port().is_none() && authority.as_str().ends_with(':')
    {
        return Err(refuse("has a path or a query (in a password, / ? # and @ are written %2F %3F %23 and %40)"));
    }
    let authorization = authority.as_str().rsplit_once('@').map(|(user, _)| {
        let user = percent_decode(user);
        format!("Basic {}", BASE64_STANDARD.encode(user))
    });
    Ok(Proxy { host: authority.host().to_owned(), port: authority.port_u16().unwrap_or(80), authorization })
}

fn percent_decode(text: &str) -> Vec<u8> {
    // The decoder of listings knows `+` as a space, which in a password it is not.
    super::encode::decode_listed(&text.replace('+', "%2B")).unwrap_or_else(|| text.to_owned()).into_bytes()
}

impl Proxy {
    /// What `Proxy-Authorization` says, where the proxy's URL has a user. To a tunnel it is said by `tunnel`.
    pub(crate) fn authorization(&self) -> Option<&str> {
        self.authorization.as_deref()
    }

    /// Asks the proxy, over `socket`, for a tunnel to `target`.
    pub(super) async fn tunnel(&self, socket: &mut Socket, target: &Target) -> io::Result<()> {
        let authority = target.authority();
        let mut request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n");
        if let Some(authorization) = &self.authorization {
            request.push_str(&format!("Proxy-Authorization: {authorization}\r\n"));
        }
        request.push_str("\r\n");
        socket.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        // Byte by byte: what follows the head belongs to the tunnel.
        while !answer.ends_with(b"\r\n\r\n") {
            if answer.len() > 16 << 10 {
                return Err(io::Error::other(format!("{self:?}: its answer to CONNECT has no end")));
            }
            answer.push(socket.read_u8().await?);
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        response.parse(&answer).map_err(io::Error::other)?;
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

    fn direct(rules: &str) -> Proxies {
        Proxies { direct: rules.split(',').map(str::to_owned).collect(), ..Proxies::default() }
    }

    #[test]
    fn no_proxy_names_hosts_domains_and_ports() {
        let rules = direct("localhost,.example.com,10.0.0.1:9000,s3.amazonaws.com");
        for host in ["localhost", "a.example.com", "example.com", "b.s3.amazonaws.com"] {
            assert!(rules.is_direct(host, 443), "{host}");
        }
        for host in ["notexample.com", "10.0.0.1", "amazonaws.com"] {
            assert!(!rules.is_direct(host, 443), "{host}");
        }
        assert!(rules.is_direct("10.0.0.1", 9000));
        assert!(direct("*").is_direct("anything", 1));
        for metadata in ["169.254.169.254", "169.254.170.2", "[fd00:ec2::254]"] {
            assert!(direct("").is_direct(metadata, 80), "{metadata}");
        }
    }

    #[test]
    fn no_proxy_names_ranges_of_addresses() {
        let rules = direct("10.0.0.0/8,192.168.1.77/24,fd00:1::/32,::1,172.16.0.1,0.0.0.0/33,10.1.0.0/x");
        for host in ["10.255.0.1", "192.168.1.1", "[fd00:1:2::3]", "[::1]", "172.16.0.1"] {
            assert!(rules.is_direct(host, 443), "{host}");
        }
        for host in ["11.0.0.1", "192.168.2.1", "[fd00:2::1]", "[::2]", "172.16.0.2", "10.example", "s3.amazonaws.com"]
        {
            assert!(!rules.is_direct(host, 443), "{host}");
        }
        assert!(direct("0.0.0.0/0").is_direct("8.8.8.8", 1) && !direct("0.0.0.0/0").is_direct("[::1]", 1));
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
    fn what_is_no_http_proxy_is_refused_by_name() {
        for (url, problem) in [
            ("socks5://user:secret@proxy:1080", "begins with socks5://"),
            ("http://", "is no URL"),
            ("http://user:secret@a b", "is no URL"),
            ("http://user:12/secret@proxy:3128", "has a path"),
            ("http://user:12?secret@proxy:3128", "has a path"),
        ] {
            let error = parse("https_proxy", url).unwrap_err().to_string();
            assert!(error.starts_with(&format!("https_proxy {problem}")) && !error.contains("secret"), "{error}");
        }
    }
}
