//! Decides where a redirect may lead: to another name of the same store, which may see signatures and keys. Sends
//! nothing.

use std::net::IpAddr;

use crate::http::{Target, shown};

/// Domains of the partitions of AWS. Each has hostnames, accounts and signatures of its own.
const PARTITIONS: [&str; 7] = [
    "amazonaws.com",
    "amazonaws.com.cn",
    "amazonaws.eu",
    "c2s.ic.gov",
    "sc2s.sgov.gov",
    "csp.hci.ic.gov",
    "cloud.adc-e.uk",
];

/// Where an accepted redirect leads.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Redirect {
    pub(super) target: Target,
    /// Whether the bucket is part of the host, and not of the path.
    pub(super) bucket_in_host: bool,
}

/// Where `location` leads a request for `bucket` that `from` redirects. `endpoint` is the host of the store, without the
/// bucket.
///
/// # Errors
/// Why it is not followed: another scheme, another port, a host that is not the endpoint or the bucket's name below it,
/// and on AWS not one of S3 in the same partition.
pub(super) fn resolve(
    location: &str,
    from: &Target,
    endpoint: &str,
    bucket: &str,
    bucket_in_host: bool,
) -> Result<Redirect, String> {
    let Some((scheme, authority)) = split(location, from) else {
        return Ok(Redirect { target: from.clone(), bucket_in_host });
    };
    let place = || format!("{}://{}", shown(&scheme, 20), shown(authority.rsplit('@').next().unwrap_or_default(), 200));
    let tls = match scheme.as_str() {
        "https" => true,
        "http" => false,
        _ => return Err(format!("a redirect to {}, which is no URL of HTTP, is not followed", place())),
    };
    if authority.contains('@') {
        return Err(format!("a redirect to {} with user information is not followed", place()));
    }
    let Some((host, port)) = host_and_port(authority, tls) else {
        return Err(format!("a redirect to {}, which is no URL, is not followed", place()));
    };
    match (from.tls, tls) {
        (true, false) => return Err(format!("a redirect from https to {} is not followed: it leaves TLS", place())),
        (false, true) => return Err(format!("a redirect from http to {} is not followed", place())),
        _ => {}
    }
    if port == from.port {
        let below = format!("{bucket}.{endpoint}");
        for (name, bucket_in_host) in [(from.host.as_str(), bucket_in_host), (endpoint, false), (&below, true)] {
            // The name is spelled as it was resolved first, whatever the redirect's spelling.
            if same_host(&host, name) {
                return Ok(Redirect { target: Target { host: name.to_owned(), port, tls }, bucket_in_host });
            }
        }
        if let Some(bucket_in_host) = in_same_partition(&host, endpoint, bucket) {
            return Ok(Redirect { target: Target { host, port, tls }, bucket_in_host });
        }
    }
    Err(format!("a redirect to {} is not followed: it is not the endpoint that was asked, {endpoint}", place()))
}

/// Scheme and authority of a URL; `None` for a path on the same server.
fn split<'a>(location: &'a str, from: &Target) -> Option<(String, &'a str)> {
    let (scheme, rest) = match location.strip_prefix("//") {
        Some(rest) => (if from.tls { "https" } else { "http" }, rest),
        None => location.split_once("://").filter(|(scheme, _)| {
            scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
        })?,
    };
    let authority = rest.split(['/', '?', '#', '\\']).next().unwrap_or_default();
    Some((scheme.to_ascii_lowercase(), authority))
}

/// The host in lower case, without a dot at its end, and the port.
fn host_and_port(authority: &str, tls: bool) -> Option<(String, u16)> {
    let behind = authority.rfind(']').map_or(0, |at| at + 1);
    let (host, port) = match authority[behind..].split_once(':') {
        Some((rest, port)) => (&authority[..behind + rest.len()], port),
        None => (authority, ""),
    };
    let port = match port {
        "" if tls => 443,
        "" => 80,
        port if port.bytes().all(|byte| byte.is_ascii_digit()) => port.parse().ok()?,
        _ => return None,
    };
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':' | b'[' | b']');
    (!host.is_empty() && host.bytes().all(plain)).then_some((host, port))
}

fn same_host(host: &str, name: &str) -> bool {
    let address = |host: &str| host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
    match (address(host), address(name)) {
        (Some(host), Some(name)) => host == name,
        (None, None) => name.strip_suffix('.').unwrap_or(name).eq_ignore_ascii_case(host),
        _ => false,
    }
}

/// Whether `host` is S3 in the partition of `endpoint`, for no other bucket than `bucket`; and whether it names that.
fn in_same_partition(host: &str, endpoint: &str, bucket: &str) -> Option<bool> {
    let endpoint = S3Host::parse(&endpoint.to_ascii_lowercase())?;
    let accepted = |found: S3Host| found.partition == endpoint.partition && found.fips >= endpoint.fips;
    if S3Host::parse(host).is_some_and(accepted) {
        return Some(false);
    }
    let bare = host.strip_prefix(bucket)?.strip_prefix('.')?;
    S3Host::parse(bare).is_some_and(accepted).then_some(true)
}

/// A hostname of S3 without a bucket (AWS General Reference, "Amazon S3 endpoints and quotas").
struct S3Host {
    partition: &'static str,
    fips: bool,
}

impl S3Host {
    fn parse(host: &str) -> Option<Self> {
        PARTITIONS.into_iter().find_map(|partition| {
            let labels: Vec<_> = host.strip_suffix(partition)?.strip_suffix('.')?.split('.').collect();
            let fips = match labels[..] {
                ["s3" | "s3-external-1" | "s3-accelerate"] | ["s3-accelerate", "dualstack"] => false,
                [legacy] if legacy.strip_prefix("s3-").is_some_and(is_region) => false,
                ["s3", region] | ["s3", "dualstack", region] if is_region(region) => false,
                ["s3-fips", region] | ["s3-fips", "dualstack", region] if is_region(region) => true,
                _ => return None,
            };
            Some(Self { partition, fips })
        })
    }
}

/// `eu-west-1`, `us-iso-east-1`, `eusc-de-east-1`.
fn is_region(label: &str) -> bool {
    let parts: Vec<_> = label.split('-').collect();
    let [names @ .., number] = &parts[..] else { return false };
    let word = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_lowercase());
    names.len() >= 2 && names.iter().all(word) && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};

    use torchobj_core::error::{Error, ErrorKind};
    use torchobj_core::store::ObjectStore;
    use torchobj_core::types::{Condition, GetRequest, ListRequest, PartReceipt, Payload, PutOptions, Upload, Version};
    use torchobj_core::url::ObjectUrl;

    use super::*;
    use crate::config::S3Config;
    use crate::fake::{Fake, answer};
    use crate::s3::S3Store;
    use crate::s3::account::{Account, CustomerKey};
    use crate::s3::sign::Identity;

    fn target(url: &str) -> Target {
        let from = Target { host: String::new(), port: 0, tls: false };
        let (scheme, authority) = split(url, &from).unwrap();
        let (host, port) = host_and_port(authority, scheme == "https").unwrap();
        Target { host, port, tls: scheme == "https" }
    }

    /// Where `location` leads from the bucket `b`, whose endpoint is `endpoint`.
    fn led(endpoint: &str, location: &str) -> Result<Redirect, String> {
        let from = target(endpoint);
        resolve(location, &from, &from.host, "b", false)
    }

    fn accepted(endpoint: &str, location: &str, host: &str, bucket_in_host: bool) {
        let redirect = led(endpoint, location).unwrap_or_else(|problem| panic!("{endpoint} to {location}: {problem}"));
        assert_eq!((redirect.target.host.as_str(), redirect.bucket_in_host), (host, bucket_in_host), "{location}");
    }

    #[test]
    fn the_endpoint_and_the_bucket_below_it_are_followed() {
        const STORE: &str = "https://store.example:9000";
        for location in
            ["/b/k", "k", "", "https://store.example:9000/x", "HTTPS://Store.EXAMPLE.:9000", "//store.example:9000"]
        {
            accepted(STORE, location, "store.example", false);
        }
        accepted(STORE, "https://b.store.example:9000/k", "b.store.example", true);
        accepted("http://[::1]:80", "http://[0:0::1]/k", "[::1]", false);
        accepted("https://store.example", "https://store.example:443/k?x=http://evil", "store.example", false);
    }

    #[test]
    fn another_host_port_or_scheme_is_refused() {
        const STORE: &str = "http://store.example:9000";
        for location in [
            "http://evil:9000/b/k",
            "http://store.example:9001/b/k",
            "http://store.example/b/k",
            "https://store.example:9000/b/k",
            "http://c.store.example:9000/k",
            "http://b.evil.store.example:9000/k",
            "http://store.example.evil:9000/k",
            "http://evilstore.example:9000/k",
            "http://store.example..:9000/k",
            "http://user:password@store.example:9000/k",
            "http://store.example:9000@evil/k",
            "http://evil:9000\\@store.example:9000/",
            "http://evil:9000#@store.example:9000/",
            "http://evil:9000?@store.example:9000/",
            "//evil:9000/k",
            "http://store.example:9000:80/k",
            "http://store.example:+9000/k",
            "http://store.example:99999/k",
            "http://store%2eexample:9000/k",
            "http://:9000/k",
            "http:///k",
            "ftp://store.example:9000/k",
            "gopher://evil/",
        ] {
            led(STORE, location).expect_err(location);
        }
        led("http://127.0.0.1:9000", "http://127.0.0.2:9000/").expect_err("another address");
        led("http://127.0.0.1:9000", "http://[::ffff:127.0.0.1]:9000/").expect_err("another family");
    }

    #[test]
    fn a_redirect_out_of_tls_is_refused_in_words_that_fit() {
        let problem = led("https://store.example", "http://store.example/k").unwrap_err();
        assert!(problem.contains("leaves TLS") && problem.contains("http://store.example"), "{problem}");
        let problem =
            led("https://store.example", "https://u:SECRET@store.example/k?X-Amz-Signature=SECRET").unwrap_err();
        assert!(!problem.contains("SECRET"), "{problem}");
        let problem = led("https://store.example", &format!("https://{}/", "x\u{1b}".repeat(5000))).unwrap_err();
        assert!(problem.len() < 1000 && !problem.contains('\u{1b}'), "{problem}");
    }

    #[test]
    fn names_of_s3_in_the_same_partition_are_followed() {
        for (host, bucket_in_host) in [
            ("s3.eu-west-1.amazonaws.com", false),
            ("b.s3.eu-west-1.amazonaws.com", true),
            ("b.s3-us-west-2.amazonaws.com", true),
            ("b.s3.dualstack.us-west-2.amazonaws.com", true),
            ("b.s3-fips.dualstack.us-gov-west-1.amazonaws.com", true),
            ("s3-fips.us-east-2.amazonaws.com", false),
            ("b.s3-accelerate.amazonaws.com", true),
            ("s3-external-1.amazonaws.com", false),
        ] {
            for from in ["https://s3.amazonaws.com", "https://s3.us-east-1.amazonaws.com"] {
                accepted(from, &format!("https://{host}/k"), host, bucket_in_host);
            }
        }
        const CHINA: &str = "https://s3.cn-north-1.amazonaws.com.cn";
        accepted(CHINA, "https://b.s3.cn-northwest-1.amazonaws.com.cn/k", "b.s3.cn-northwest-1.amazonaws.com.cn", true);
    }

    #[test]
    fn names_that_only_look_like_s3_are_refused() {
        for host in [
            "s3.evil.com",
            "evil-s3.amazonaws.com.attacker",
            "b.s3.amazonaws.com.attacker",
            "evil.s3.eu-west-1.amazonaws.com",
            "evil.b.s3.eu-west-1.amazonaws.com",
            "b.evil.s3.eu-west-1.amazonaws.com",
            "bs3.amazonaws.com",
            "s3.us-west-2.elb.amazonaws.com",
            "s3-1.us-west-2.elb.amazonaws.com",
            "s3.evil.amazonaws.com",
            "s3-evil.amazonaws.com",
            "ec2.eu-west-1.amazonaws.com",
            "b.s3-accesspoint.eu-west-1.amazonaws.com",
            "s3.cn-north-1.amazonaws.com.cn",
            "xamazonaws.com",
            "amazonaws.com",
            "s3.amazonaws.com:8443",
            "s3.amazonaws.com..",
        ] {
            led("https://s3.eu-west-1.amazonaws.com", &format!("https://{host}/k")).expect_err(host);
        }
        // FIPS was asked for: the names without it are not.
        led("https://s3-fips.us-east-1.amazonaws.com", "https://s3.us-east-1.amazonaws.com/").expect_err("no FIPS");
        led("https://store.example", "https://s3.amazonaws.com/").expect_err("not the endpoint");
    }

    const SECRETS: [&str; 2] = ["canary-session-token", "Y2FuYXJ5LWN1c3RvbWVyLWtleQ=="];

    /// Everything that a store can be asked for.
    async fn ask_everything(endpoint_url: &str, force_sdk: bool) -> Vec<Error> {
        let identity = Identity {
            access_key: "AKIACANARY".into(),
            secret_key: "canary-secret-key".into(),
            session_token: Some(SECRETS[0].into()),
        };
        let customer = CustomerKey { key: SECRETS[1].into(), md5: "m".into() };
        let config = S3Config { endpoint_url: Some(endpoint_url.into()), force_sdk, ..S3Config::default() };
        let store = S3Store::new(Arc::new(Account::of(config, Some(customer), identity)), "b");
        let upload = Upload { key: "k".into(), id: "u".into(), nonce: String::new(), begun_ms: None, checksum: None };
        let part = PartReceipt { number: 1, size: 1, version: Version::new("\"e\""), checksum: None };
        let (payload, options) = (Payload::from(bytes::Bytes::from_static(b"x")), PutOptions::default());
        let source = ObjectUrl::parse("s3://b/from").unwrap();
        let get = GetRequest { key: "k", range: None, size: None, version: None };
        let both = ["a".to_owned(), "c".to_owned()];
        [
            store.open(get).await.err(),
            store.head("k").await.err(),
            store.list(ListRequest::default()).await.err(),
            store.put("k", &payload, &options).await.err(),
            store.begin_upload("k", &options).await.err(),
            store.put_part(&upload, 1, 0, &payload).await.err(),
            store.commit(&upload, &[part], &Condition::Always).await.err(),
            store.abort(&upload).await.err(),
            store.uploads("").await.err(),
            store.copy(&source, "k").await.err(),
            store.delete(&both).await.err(),
        ]
        .into_iter()
        .enumerate()
        .map(|(index, error)| error.unwrap_or_else(|| panic!("call {index} took the answer of another host")))
        .collect()
    }

    #[tokio::test]
    async fn another_host_receives_no_request_no_key_and_no_signature() {
        for status in [307, 308] {
            for force_sdk in [false, true] {
                let led = Arc::new(OnceLock::<String>::new());
                let to = led.clone();
                let asked =
                    Fake::start(move |_| answer(status, &format!("Location: {}/b/k\r\n", to.get().unwrap()), ""));
                let asked = asked.await;
                // The port is the same; the host is not.
                let address = asked.url.strip_prefix("http://").unwrap().replace("127.0.0.1", "127.0.0.2");
                let foreign = Fake::start_at(&address, |_| answer(200, "ETag: \"evil\"\r\n", "evil")).await;
                led.set(foreign.url.clone()).unwrap();
                for error in ask_everything(&asked.url, force_sdk).await {
                    assert!(!SECRETS.iter().any(|secret| error.to_string().contains(secret)), "{error}");
                    assert_eq!((error.kind(), error.status()), (ErrorKind::InvalidRequest, Some(status)), "{error}");
                }
                assert_eq!(foreign.heads(), Vec::<String>::new());
                assert_eq!(asked.heads().len(), 11, "{:#?}", asked.heads());
            }
        }
    }

    #[tokio::test]
    async fn a_redirect_to_the_bucket_below_the_endpoint_asks_for_the_same_key() {
        let here = Arc::new(OnceLock::<String>::new());
        let port = here.clone();
        let fake = Fake::start(move |head| {
            let location = format!("Location: http://b.s3.localhost:{}/anything\r\n", port.get().unwrap());
            if head.contains("host: b.s3.localhost") {
                answer(200, "ETag: \"e\"\r\n", "x")
            } else {
                answer(307, &location, "")
            }
        })
        .await;
        let port = fake.url.rsplit_once(':').unwrap().1;
        here.set(port.to_owned()).unwrap();
        let endpoint_url = Some(format!("http://s3.localhost:{port}"));
        let config = S3Config { endpoint_url, anonymous: true, ..S3Config::default() };
        let store = S3Store::new(Arc::new(Account::new(config).unwrap()), "b");
        let opened = store.open(GetRequest { key: "folder/k", range: None, size: None, version: None }).await.unwrap();
        assert_eq!(opened.size(), 1);
        let lines: Vec<_> = fake.heads().iter().map(|head| head.lines().next().unwrap().to_owned()).collect();
        assert_eq!(lines, ["GET /b/folder/k HTTP/1.1", "GET /folder/k HTTP/1.1"]);
    }
}
