//! Resolves host names, and spreads connections over all addresses: S3 returns other addresses with each query. Makes no
//! connections.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::Mutex as AsyncMutex;

/// Time after which a host is resolved again.
const REFRESH_AFTER: Duration = Duration::from_secs(10);

/// Time for which an address is used after the last response that contained it.
const MAX_AGE: Duration = Duration::from_secs(300);

#[derive(Debug, Default)]
struct Host {
    resolved_at: Option<Instant>,
    /// Addresses, and the time of the last response that contained each.
    addresses: Vec<(IpAddr, Instant)>,
    /// Index of the address that the next connection tries first.
    next: usize,
}

/// Resolves host names and caches their addresses.
#[derive(Debug, Default)]
pub(super) struct Resolver {
    hosts: Mutex<HashMap<String, Host>>,
    /// Held during a query: concurrent callers wait for its response.
    resolving: AsyncMutex<()>,
}

impl Resolver {
    /// Returns the addresses of `host`, in another order for each caller.
    pub(super) async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = bare.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        // RFC 6761, section 6.3: these names always resolve to the loopback addresses.
        if bare.ends_with(".localhost") {
            return Ok(vec![(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()]);
        }
        if let Some(addresses) = self.cached(host, port) {
            return Ok(addresses);
        }
        let _resolving = self.resolving.lock().await;
        if let Some(addresses) = self.cached(host, port) {
            return Ok(addresses);
        }
        let found: Vec<IpAddr> = tokio::net::lookup_host((host, port)).await?.map(|address| address.ip()).collect();
        self.add(host, &found, Instant::now());
        self.cached(host, port).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address")))
    }

    fn add(&self, host: &str, found: &[IpAddr], now: Instant) {
        let mut hosts = self.hosts.lock().expect("no holder of this lock panics");
        let host = hosts.entry(host.to_owned()).or_default();
        host.resolved_at = Some(now);
        host.addresses.retain(|(address, at)| !found.contains(address) && now.duration_since(*at) < MAX_AGE);
        host.addresses.extend(found.iter().map(|address| (*address, now)));
    }

    /// The cached addresses of `host`, unless it must be resolved again.
    fn cached(&self, host: &str, port: u16) -> Option<Vec<SocketAddr>> {
        let mut hosts = self.hosts.lock().expect("no holder of this lock panics");
        let host = hosts.get_mut(host)?;
        if host.addresses.is_empty() || host.resolved_at?.elapsed() > REFRESH_AFTER {
            return None;
        }
        host.next = (host.next + 1) % host.addresses.len();
        let (before, after) = host.addresses.split_at(host.next);
        Some(after.iter().chain(before).map(|(address, _)| SocketAddr::new(*address, port)).collect())
    }

    /// Removes an address that could not be connected to, until a response contains it again.
    pub(super) fn unreachable(&self, host: &str, address: IpAddr) {
        let mut hosts = self.hosts.lock().expect("no holder of this lock panics");
        if let Some(host) = hosts.get_mut(host) {
            host.addresses.retain(|(cached, _)| *cached != address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn callers_try_different_addresses_first() {
        let resolver = Resolver::default();
        resolver.add("h", &[ip(1), ip(2), ip(3)], Instant::now());
        let mut firsts: Vec<_> = (0..3).map(|_| resolver.cached("h", 80).unwrap()[0].ip()).collect();
        firsts.sort();
        assert_eq!(firsts, [ip(1), ip(2), ip(3)]);
    }

    #[test]
    fn addresses_of_earlier_responses_are_used_until_they_expire() {
        let resolver = Resolver::default();
        let now = Instant::now();
        resolver.add("h", &[ip(1)], now);
        resolver.add("h", &[ip(2)], now + Duration::from_secs(60));
        assert_eq!(resolver.cached("h", 80).unwrap().len(), 2);
        resolver.add("h", &[ip(3)], now + Duration::from_secs(301));
        assert_eq!(resolver.cached("h", 80).unwrap().len(), 2, "the first address has expired");
        resolver.unreachable("h", ip(3));
        assert_eq!(resolver.cached("h", 80).unwrap().len(), 1);
    }
}
