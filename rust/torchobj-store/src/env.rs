//! Environment variables of connections and of the job, and a fingerprint of the variables that clients depend on. Each
//! provider lists its own variables and those that its SDK reads.

use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

/// URL of the proxy for `https` endpoints; the lower-case name takes precedence.
pub(crate) const HTTPS_PROXY: [&str; 2] = ["https_proxy", "HTTPS_PROXY"];
/// URL of the proxy for `http` endpoints. Only the lower-case name: in a CGI program, a client can set `HTTP_PROXY` by a
/// `Proxy` header.
pub(crate) const HTTP_PROXY: [&str; 1] = ["http_proxy"];
/// Hosts that are connected to without a proxy.
pub(crate) const NO_PROXY: [&str; 2] = ["no_proxy", "NO_PROXY"];

/// Number of processes of this job on this host, set by torchrun.
const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";

/// Number of ranks of a distributed job on this host; 1 if the variable is not set.
pub fn local_ranks() -> usize {
    ranks(std::env::var(LOCAL_WORLD_SIZE).ok().as_deref())
}

fn ranks(value: Option<&str>) -> usize {
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(1).max(1)
}

/// Returns the first of `names` that is set and not empty, and its value.
pub(crate) fn first_of(names: &[&'static str]) -> Option<(&'static str, String)> {
    let set = names.iter().filter_map(|name| Some((*name, std::env::var(name).ok()?)));
    set.into_iter().find(|(_, value)| !value.is_empty())
}

/// Environment variables that clients depend on.
pub(crate) struct Variables {
    pub(crate) names: &'static [&'static str],
    /// Prefixes of names.
    pub(crate) prefixes: &'static [&'static str],
}

/// Variables that connections depend on: proxies and CA certificates.
pub(crate) const CONNECTIONS: Variables = Variables {
    names: &["https_proxy", "HTTPS_PROXY", "http_proxy", "no_proxy", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"],
    prefixes: &[],
};

/// Returns a hash of variables. It changes if one of them changes. Each process has its own hash function.
pub(crate) fn fingerprint(read: &[Variables]) -> u64 {
    of(read, std::env::vars_os())
}

fn of(read: &[Variables], variables: impl Iterator<Item = (OsString, OsString)>) -> u64 {
    static KEY: OnceLock<RandomState> = OnceLock::new();
    let counts = |name: &str| {
        let listed =
            |list: &Variables| list.names.contains(&name) || list.prefixes.iter().any(|begin| name.starts_with(begin));
        read.iter().any(listed)
    };
    let mut found: Vec<_> = variables.filter(|(name, _)| name.to_str().is_some_and(counts)).collect();
    found.sort_unstable();
    // The hash key is random, so the hash reveals no secret.
    KEY.get_or_init(RandomState::new).hash_one(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_ranks_that_is_not_valid_counts_as_one() {
        let values = [None, Some("8"), Some(" 2 "), Some("0"), Some("many"), Some("")];
        assert_eq!(values.map(ranks), [1, 8, 2, 1, 1, 1]);
    }

    #[test]
    fn only_variables_that_clients_depend_on_change_the_fingerprint() {
        let read = [Variables { names: &[], prefixes: &["AWS_"] }, CONNECTIONS];
        let of =
            |variables: &[(&str, &str)]| of(&read, variables.iter().map(|(name, value)| (name.into(), value.into())));
        let before = of(&[("AWS_PROFILE", "a"), ("https_proxy", "http://p:1")]);
        assert_eq!(before, of(&[("https_proxy", "http://p:1"), ("PATH", "/bin"), ("AWS_PROFILE", "a")]));
        for changed in [
            &[("AWS_PROFILE", "b"), ("https_proxy", "http://p:1")][..],
            &[("AWS_PROFILE", "a")],
            &[("AWS_PROFILE", "a"), ("https_proxy", "http://p:1"), ("AWS_ENDPOINT_URL_S3", "http://e")],
            &[("AWS_PROFILE", "a"), ("HTTPS_PROXY", "http://p:1")],
        ] {
            assert_ne!(before, of(changed), "{changed:?}");
        }
        assert_eq!(fingerprint(&read), fingerprint(&read));
        assert_eq!(
            super::of(&[CONNECTIONS], [("AWS_PROFILE".into(), "a".into())].into_iter()),
            super::of(&[CONNECTIONS], [].into_iter())
        );
    }
}
