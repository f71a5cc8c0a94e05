//! Checks the host of a redirect: only hosts of the same store may receive signatures and keys.

use crate::http::redirect;

/// Domains of the partitions of AWS. Each partition has separate hosts, accounts and signatures.
const PARTITIONS: [&str; 7] = [
    "amazonaws.com",
    "amazonaws.com.cn",
    "amazonaws.eu",
    "c2s.ic.gov",
    "sc2s.sgov.gov",
    "csp.hci.ic.gov",
    "cloud.adc-e.uk",
];

/// Returns the normalized `host` if a request for `bucket` at the host `endpoint` may be redirected to it, and whether it
/// contains the bucket. Accepted are `endpoint`, `bucket.endpoint`, and on AWS the hosts of S3 in the same partition.
pub(super) fn accept(host: &str, endpoint: &str, bucket: &str) -> Option<(String, bool)> {
    let virtual_host = format!("{bucket}.{endpoint}");
    for (name, bucket_in_host) in [(endpoint, false), (&virtual_host, true)] {
        // In the notation of the endpoint, so that both share a pool.
        if redirect::same_host(host, name) {
            return Some((name.to_owned(), bucket_in_host));
        }
    }
    in_same_partition(host, endpoint, bucket).map(|bucket_in_host| (host.to_owned(), bucket_in_host))
}

/// Returns whether `host` contains `bucket`, if it is a host of S3 in the partition of `endpoint` and contains no other
/// bucket.
fn in_same_partition(host: &str, endpoint: &str, bucket: &str) -> Option<bool> {
    let endpoint = S3Host::parse(&endpoint.to_ascii_lowercase())?;
    let is_accepted = |host: S3Host| host.partition == endpoint.partition && host.fips >= endpoint.fips;
    if S3Host::parse(host).is_some_and(is_accepted) {
        return Some(false);
    }
    let bare = host.strip_prefix(bucket)?.strip_prefix('.')?;
    S3Host::parse(bare).is_some_and(is_accepted).then_some(true)
}

/// A host of S3 without a bucket (AWS General Reference, "Amazon S3 endpoints and quotas").
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
                [legacy] if legacy.strip_prefix("s3-").is_some_and(is_aws_region) => false,
                ["s3", region] | ["s3", "dualstack", region] if is_aws_region(region) => false,
                ["s3-fips", region] | ["s3-fips", "dualstack", region] if is_aws_region(region) => true,
                _ => return None,
            };
            Some(Self { partition, fips })
        })
    }
}

/// Returns whether a label is a region such as `eu-west-1`, `us-iso-east-1` or `eusc-de-east-1`.
fn is_aws_region(label: &str) -> bool {
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
    use crate::fake::{Fake, http_response};
    use crate::http::HostAddress;
    use crate::s3::S3Store;
    use crate::s3::config::{Account, CustomerKey};
    use crate::s3::sign::Identity;

    /// Resolves a redirect of a request for the bucket `b` at `endpoint`: the host, and whether it contains the bucket.
    fn follow(endpoint: &str, location: &str) -> Result<(String, bool), String> {
        let from = HostAddress::of(&endpoint.parse().unwrap());
        let resolved = redirect::resolve(location, &from, |to| super::accept(&to.host, &from.host, "b"))?;
        Ok(resolved.unwrap_or_else(|| (from.host.clone(), false)))
    }

    fn assert_accepted(endpoint: &str, location: &str, host: &str, bucket_in_host: bool) {
        let followed =
            follow(endpoint, location).unwrap_or_else(|problem| panic!("{endpoint} to {location}: {problem}"));
        assert_eq!((followed.0.as_str(), followed.1), (host, bucket_in_host), "{location}");
    }

    #[test]
    fn a_redirect_to_the_endpoint_or_the_virtual_host_of_the_bucket_is_followed() {
        const STORE: &str = "https://store.example:9000";
        for location in
            ["/b/k", "k", "", "https://store.example:9000/x", "HTTPS://Store.EXAMPLE.:9000", "//store.example:9000"]
        {
            assert_accepted(STORE, location, "store.example", false);
        }
        assert_accepted(STORE, "https://b.store.example:9000/k", "b.store.example", true);
        assert_accepted("http://[::1]:80", "http://[0:0::1]/k", "[::1]", false);
        assert_accepted("https://store.example", "https://store.example:443/k?x=http://evil", "store.example", false);
    }

    #[test]
    fn a_redirect_to_another_host_port_or_scheme_is_refused() {
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
            follow(STORE, location).expect_err(location);
        }
        follow("http://127.0.0.1:9000", "http://127.0.0.2:9000/").expect_err("another address");
        follow("http://127.0.0.1:9000", "http://[::ffff:127.0.0.1]:9000/").expect_err("another family");
    }

    #[test]
    fn a_refused_redirect_has_a_short_message_without_secrets() {
        let problem = follow("https://store.example", "http://store.example/k").unwrap_err();
        assert!(problem.contains("leaves TLS") && problem.contains("http://store.example"), "{problem}");
        let problem =
            follow("https://store.example", "https://u:SECRET@store.example/k?X-Amz-Signature=SECRET").unwrap_err();
        assert!(!problem.contains("SECRET"), "{problem}");
        let problem = follow("https://store.example", &format!("https://{}/", "x\u{1b}".repeat(5000))).unwrap_err();
        assert!(problem.len() < 1000 && !problem.contains('\u{1b}'), "{problem}");
    }

    #[test]
    fn a_redirect_to_a_host_of_s3_in_the_same_partition_is_followed() {
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
                assert_accepted(from, &format!("https://{host}/k"), host, bucket_in_host);
            }
        }
        const CHINA: &str = "https://s3.cn-north-1.amazonaws.com.cn";
        assert_accepted(
            CHINA,
            "https://b.s3.cn-northwest-1.amazonaws.com.cn/k",
            "b.s3.cn-northwest-1.amazonaws.com.cn",
            true,
        );
    }

    #[test]
    fn a_redirect_to_a_host_that_resembles_s3_is_refused() {
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
            follow("https://s3.eu-west-1.amazonaws.com", &format!("https://{host}/k")).expect_err(host);
        }
        // An endpoint with FIPS does not redirect to one without.
        follow("https://s3-fips.us-east-1.amazonaws.com", "https://s3.us-east-1.amazonaws.com/").expect_err("no FIPS");
        follow("https://store.example", "https://s3.amazonaws.com/").expect_err("not the endpoint");
    }

    const SECRETS: [&str; 2] = ["canary-session-token", "Y2FuYXJ5LWN1c3RvbWVyLWtleQ=="];

    /// Calls all operations of a store, and returns their errors.
    async fn call_all(endpoint_url: &str, force_sdk: bool) -> Vec<Error> {
        let identity = Identity {
            access_key: "AKIACANARY".into(),
            secret_key: "canary-secret-key".into(),
            session_token: Some(SECRETS[0].into()),
        };
        let customer = CustomerKey { key: SECRETS[1].into(), md5: "m".into() };
        let config = S3Config { endpoint_url: Some(endpoint_url.into()), force_sdk, ..S3Config::default() };
        let store = S3Store::new(Arc::new(Account::with_identity(config, Some(customer), identity)), "b");
        let upload = Upload::of_other_client("k".into(), "u".into(), None);
        let part = PartReceipt { number: 1, size: 1, version: Version::new("\"e\""), checksum: None };
        let (payload, options) = (Payload::from(bytes::Bytes::from_static(b"x")), PutOptions::default());
        let source = ObjectUrl::parse("s3://b/from").unwrap();
        let get = GetRequest::whole("k");
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
        .map(|(index, error)| error.unwrap_or_else(|| panic!("call {index} accepted the response of another host")))
        .collect()
    }

    #[tokio::test]
    async fn a_redirect_to_another_host_is_not_followed_by_any_operation() {
        for status in [307, 308] {
            for force_sdk in [false, true] {
                let other_url = Arc::new(OnceLock::<String>::new());
                let to = other_url.clone();
                let endpoint = Fake::start(move |_| {
                    http_response(status, &format!("Location: {}/b/k\r\n", to.get().unwrap()), "")
                });
                let endpoint = endpoint.await;
                // Same port, another host.
                let address = endpoint.url.strip_prefix("http://").unwrap().replace("127.0.0.1", "127.0.0.2");
                let other = Fake::start_at(&address, |_| http_response(200, "ETag: \"evil\"\r\n", "evil")).await;
                other_url.set(other.url.clone()).unwrap();
                for error in call_all(&endpoint.url, force_sdk).await {
                    assert!(!SECRETS.iter().any(|secret| error.to_string().contains(secret)), "{error}");
                    assert_eq!((error.kind(), error.status()), (ErrorKind::InvalidRequest, Some(status)), "{error}");
                }
                assert_eq!(other.heads(), Vec::<String>::new());
                assert_eq!(endpoint.heads().len(), 11, "{:#?}", endpoint.heads());
            }
        }
    }

    #[tokio::test]
    async fn a_redirect_to_the_virtual_host_of_the_bucket_requests_the_same_key() {
        let own_port = Arc::new(OnceLock::<String>::new());
        let port = own_port.clone();
        let fake = Fake::start(move |head| {
            let location = format!("Location: http://b.s3.localhost:{}/anything\r\n", port.get().unwrap());
            if head.contains("host: b.s3.localhost") {
                http_response(200, "ETag: \"e\"\r\n", "x")
            } else {
                http_response(307, &location, "")
            }
        })
        .await;
        let port = fake.url.rsplit_once(':').unwrap().1;
        own_port.set(port.to_owned()).unwrap();
        let endpoint_url = Some(format!("http://s3.localhost:{port}"));
        let config = S3Config { endpoint_url, anonymous: true, ..S3Config::default() };
        let store = S3Store::new(Arc::new(Account::new(config).unwrap()), "b");
        let result = store.open(GetRequest::whole("folder/k")).await.unwrap();
        assert_eq!(result.size(), 1);
        let lines: Vec<_> = fake.heads().iter().map(|head| head.lines().next().unwrap().to_owned()).collect();
        assert_eq!(lines, ["GET /b/folder/k HTTP/1.1", "GET /folder/k HTTP/1.1"]);
    }
}
