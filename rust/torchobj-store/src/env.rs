//! Every environment variable that torchobj reads by itself, in one list. The AWS SDK reads its own beside them:
//! credentials, profiles, regions and endpoints (AWS SDKs and Tools Reference Guide, "Environment variables").

use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

/// PEM file of the certificates to trust.
pub(crate) const AWS_CA_BUNDLE: &str = "AWS_CA_BUNDLE";
/// Proxy for `https` endpoints, a URL; the lower-case name wins.
pub(crate) const HTTPS_PROXY: [&str; 2] = ["https_proxy", "HTTPS_PROXY"];
/// Proxy for `http` endpoints. Only the lower-case name: a CGI program takes the other from a request's `Proxy` header.
pub(crate) const HTTP_PROXY: [&str; 1] = ["http_proxy"];
/// Hosts that are reached without a proxy.
pub(crate) const NO_PROXY: [&str; 2] = ["no_proxy", "NO_PROXY"];

/// The first of `names` that is set and not empty, and its value.
pub(crate) fn first_of(names: &[&'static str]) -> Option<(&'static str, String)> {
    let set = names.iter().filter_map(|name| Some((*name, std::env::var(name).ok()?)));
    set.into_iter().find(|(_, value)| !value.is_empty())
}

/// What, besides the variables of AWS, decides how a store is reached: proxies, trust, and where profiles lie.
const BESIDES: [&str; 8] =
    ["https_proxy", "HTTPS_PROXY", "http_proxy", "no_proxy", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "HOME"];

/// A hash of every variable that an account is set up from, ours and the SDK's: while it stays the same, so does what a
/// new account would find in the environment. It means nothing to another process.
pub fn fingerprint() -> u64 {
    of(std::env::vars_os())
}

fn of(variables: impl Iterator<Item = (OsString, OsString)>) -> u64 {
    static KEY: OnceLock<RandomState> = OnceLock::new();
    let counts = |name: &str| name.starts_with("AWS_") || BESIDES.contains(&name);
    let mut read: Vec<_> = variables.filter(|(name, _)| name.to_str().is_some_and(counts)).collect();
    read.sort_unstable();
    // A key of this process's own: nobody learns a secret from the hash.
    KEY.get_or_init(RandomState::new).hash_one(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_account_is_set_up_from_changes_the_fingerprint_and_nothing_else_does() {
        let of = |variables: &[(&str, &str)]| of(variables.iter().map(|(name, value)| (name.into(), value.into())));
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
        assert_eq!(fingerprint(), fingerprint());
    }
}
