//! Resolves redirects, and checks the rules for every provider: a redirect may not change the scheme or the port, or have
//! user information. Sends no requests.

use std::net::IpAddr;

use super::{HostAddress, default_port, sanitize};

/// Resolves the `location` of a redirect by `from`; `None`: the same server. `accept` decides about another host.
///
/// # Errors
/// The redirect is not followed: another scheme, another port, user information, or a host that is not accepted.
pub(crate) fn resolve<T>(
    location: &str,
    from: &HostAddress,
    accept: impl FnOnce(&HostAddress) -> Option<T>,
) -> Result<Option<T>, String> {
    let Some((scheme, authority)) = split(location, from) else { return Ok(None) };
    let to = || {
        let host = sanitize(authority.rsplit('@').next().unwrap_or_default(), 200);
        format!("{}://{host}", sanitize(&scheme, 20))
    };
    let tls = match scheme.as_str() {
        "https" => true,
        "http" => false,
        _ => return Err(format!("a redirect to {} is not followed: not an HTTP URL", to())),
    };
    if authority.contains('@') {
        return Err(format!("a redirect to {} is not followed: it has user information", to()));
    }
    let Some((host, port)) = host_and_port(authority, tls) else {
        return Err(format!("a redirect to {} is not followed: not a URL", to()));
    };
    match (from.tls, tls) {
        (true, false) => return Err(format!("a redirect from https to {} is not followed: it leaves TLS", to())),
        (false, true) => return Err(format!("a redirect from http to {} is not followed", to())),
        _ => {}
    }
    if port == from.port {
        if same_host(&host, &from.host) {
            return Ok(None);
        }
        if let Some(accepted) = accept(&HostAddress { host, port, tls }) {
            return Ok(Some(accepted));
        }
    }
    Err(format!("a redirect to {} is not followed: it does not belong to the endpoint {}", to(), from.host))
}

/// Scheme and authority of a URL; `None` for a path on the same server.
fn split<'a>(location: &'a str, from: &HostAddress) -> Option<(String, &'a str)> {
    let (scheme, rest) = match location.strip_prefix("//") {
        Some(rest) => (if from.tls { "https" } else { "http" }, rest),
        None => location.split_once("://").filter(|(scheme, _)| {
            scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
        })?,
    };
    let authority = rest.split(['/', '?', '#', '\\']).next().unwrap_or_default();
    Some((scheme.to_ascii_lowercase(), authority))
}

/// The host in lower case, without a trailing dot, and the port.
fn host_and_port(authority: &str, tls: bool) -> Option<(String, u16)> {
    let behind = authority.rfind(']').map_or(0, |at| at + 1);
    let (host, port) = match authority[behind..].split_once(':') {
        Some((rest, port)) => (&authority[..behind + rest.len()], port),
        None => (authority, ""),
    };
    let port = match port {
        "" => default_port(tls),
        port if port.bytes().all(|byte| byte.is_ascii_digit()) => port.parse().ok()?,
        _ => return None,
    };
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':' | b'[' | b']');
    (!host.is_empty() && host.bytes().all(plain)).then_some((host, port))
}

/// Returns whether the host of a redirect is `name`, whatever its case and notation.
pub(crate) fn same_host(host: &str, name: &str) -> bool {
    let address = |host: &str| host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
    match (address(host), address(name)) {
        (Some(host), Some(name)) => host == name,
        (None, None) => name.strip_suffix('.').unwrap_or(name).eq_ignore_ascii_case(host),
        _ => false,
    }
}
