//! Every environment variable that torchobj reads by itself, in one list. The AWS SDK reads its own beside them:
//! credentials, profiles, regions and endpoints (AWS SDKs and Tools Reference Guide, "Environment variables").

/// PEM file of the certificates to trust.
pub(crate) const AWS_CA_BUNDLE: &str = "AWS_CA_BUNDLE";
/// Proxy for `https` endpoints, a URL; the lower-case name wins.
pub(crate) const HTTPS_PROXY: [&str; 2] = ["https_proxy", "HTTPS_PROXY"];
/// Proxy for `http` endpoints. Only the lower-case name: a CGI program takes the other from a request's `Proxy` header.
pub(crate) const HTTP_PROXY: [&str; 1] = ["http_proxy"];
/// Hosts that are reached without a proxy.
pub(crate) const NO_PROXY: [&str; 2] = ["no_proxy", "NO_PROXY"];

/// The value of the first of `names` that is set and not empty.
pub(crate) fn first(names: &[&str]) -> Option<String> {
    names.iter().filter_map(|name| std::env::var(name).ok()).find(|value| !value.is_empty())
}
