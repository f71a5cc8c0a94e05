//! Addresses of a host, spread: S3 answers each question with other addresses, and connections shall not all go to
//! one of them. Knows no sockets.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::Mutex as AsyncMutex;

/// How long an answer is taken as new.
const FRESH: Duration = Duration::from_secs(10);

/// How long an address is still used after it was last in an answer.
const KNOWN: Duration = Duration::from_secs(300);

#[derive(Debug, Default)]
struct Host {
    asked_at: Option<Instant>,
    /// Addresses and when they were last in an answer.
    addresses: Vec<(IpAddr, Instant)>,
    turn: usize,
}

/// What is known of hosts.
#[derive(Debug, Default)]
pub(super) struct Resolver {
    hosts: Mutex<HashMap<String, Host>>,
    /// One question at a time: others wait for its answer.
    asking: AsyncMutex<()>,
}

impl Resolver {
    /// Addresses of `host`, each caller's beginning at another one.
    pub(super) async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = bare.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        // RFC 6761, section 6.3: these are the loopback, whatever a resolver says.
        if bare.ends_with(".localhost") {
            return Ok(vec![(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()]);
        }
        if let Some(addresses) = self.known(host, port) {
            return Ok(addresses);
        }
        let _asking = self.asking.lock().await;
        if let Some(addresses) = self.known(host, port) {
            return Ok(addresses);
        }
        let found: Vec<IpAddr> = tokio::net::lookup_host((host, port)).await?.map(|address| address.ip()).collect();
        self.learn(host, &found, Instant::now());
        self.known(host, port).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address")))
    }

    fn learn(&self, host: &str, found: &[IpAddr], now: Instant) {
        let mut hosts = self.hosts.lock().expect("no holder of this lock panics");
        let known = hosts.entry(host.to_owned()).or_default();
        known.asked_at = Some(now);
        known.addresses.retain(|(address, at)| !found.contains(address) && now.duration_since(*at) < KNOWN);
        known.addresses.extend(found.iter().map(|address| (*address, now)));
    }

    fn known(&self, host: &str, port: u16) -> Option<Vec<SocketAddr>> {
        let mut hosts = self.hosts.lock().expect("no holder of this lock panics");
        let known = hosts.get_mut(host)?;
        if known.addresses.is_empty() || known.asked_at?.elapsed() > FRESH {
            return None;
        }
        known.turn = (known.turn + 1) % known.addresses.len();
        let (before, after) = known.addresses.split_at(known.turn);
        Some(after.iter().chain(before).map(|(address, _)| SocketAddr::new(*address, port)).collect())
    }

    /// An address that could not be reached: no longer used, unless the next answer has it again.
    pub(super) fn unreachable(&self, host: &str, address: IpAddr) {
        let mut hosts = self.hosts.lock().expect("no holder of this lock panics");
        if let Some(known) = hosts.get_mut(host) {
            known.addresses.retain(|(known, _)| *known != address);
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
    fn connections_begin_at_different_addresses() {
        let resolver = Resolver::default();
        resolver.learn("h", &[ip(1), ip(2), ip(3)], Instant::now());
        let mut firsts: Vec<_> = (0..3).map(|_| resolver.known("h", 80).unwrap()[0].ip()).collect();
        firsts.sort();
        assert_eq!(firsts, [ip(1), ip(2), ip(3)]);
    }

    #[test]
    fn addresses_of_earlier_answers_are_still_used_for_a_while() {
        let resolver = Resolver::default();
        let now = Instant::now();
        resolver.learn("h", &[ip(1)], now);
        resolver.learn("h", &[ip(2)], now + Duration::from_secs(60));
        assert_eq!(resolver.known("h", 80).unwrap().len(), 2);
        resolver.learn("h", &[ip(3)], now + Duration::from_secs(301));
        assert_eq!(resolver.known("h", 80).unwrap().len(), 2, "the first has aged");
        resolver.unreachable("h", ip(3));
        assert_eq!(resolver.known("h", 80).unwrap().len(), 1);
    }
}
