//! Resolves the address of a bucket with the endpoint rules of the SDK, once per bucket and region.

use aws_sdk_s3::config::endpoint::{DefaultResolver, Params, ResolveEndpoint};
use http::Uri;
use torchobj_core::error::Result;

use super::config::{Account, Environment, misconfigured};
use super::trusted_hosts;
use crate::config::Addressing;
use crate::http::{HostAddress, Origin, PoolMap, sanitize};

/// The server of a bucket, and the region and service of its signatures.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) origin: Origin,
    /// The host of the store, without the bucket.
    pub(super) endpoint_host: String,
    pub(super) bucket_in_host: bool,
    pub(super) region: String,
    pub(super) service: String,
    /// Requests need signatures that only the SDK implements (S3 Express, SigV4A).
    pub(super) sdk_only: bool,
}

impl Account {
    /// The address of `bucket` in `region`; that of the region if the name is empty.
    pub(super) async fn resolve(&self, environment: &Environment, bucket: &str, region: &str) -> Result<Address> {
        let refuse = |error: &dyn std::fmt::Display| misconfigured(&format!("bucket {bucket:?}: {error}"));
        if !is_region(region) {
            let region = sanitize(region, 64);
            return Err(misconfigured(&format!("region={region:?}: must be letters, digits, '-', '_' and '.'")));
        }
        // The message omits the URL, which may contain a password or a token.
        if environment.endpoint_url.as_ref().is_some_and(|url| url.contains(['@', '?', '#'])) {
            let message = "endpoint_url, or its environment variable: must have no user, password, query or fragment";
            return Err(misconfigured(message));
        }
        let has_scheme = |url: &String| url.starts_with("https://") || url.starts_with("http://");
        if let Some(url) = environment.endpoint_url.as_ref().filter(|url| !has_scheme(url)) {
            let message = format!(
                "endpoint_url, or its environment variable: {:?} must begin with https:// or http://",
                sanitize(url, 200)
            );
            return Err(misconfigured(&message));
        }
        let configured: Option<Uri> = environment.endpoint_url.as_deref().and_then(|url| url.parse().ok());
        let path = configured.as_ref().map_or("", |url| url.path().trim_end_matches('/'));
        // Below an endpoint that ends with the bucket, keys would begin with its name, and a listing would read an object.
        let ends_with_bucket = path.strip_suffix(bucket).is_some_and(|base| base.ends_with('/'));
        if ends_with_bucket && self.config.addressing != Addressing::Path {
            let path = sanitize(path, 200);
            let message = format!(
                "endpoint_url, or its environment variable: the path {path} ends with the bucket, which belongs in the URL \
                 s3://{bucket} only; addressing_style=\"path\" accepts it as a prefix of the server"
            );
            return Err(misconfigured(&message));
        }
        if !path.is_empty() {
            let path = sanitize(path, 200);
            log::warn!(
                "the endpoint has the path {path}, and buckets are expected below it. \
                 A bucket belongs in the URL, such as s3://bucket"
            );
        }
        let mut params = Params::builder().region(region);
        params = params
            .set_bucket((!bucket.is_empty()).then(|| bucket.to_owned()))
            .set_use_fips(environment.sdk.use_fips())
            .set_use_dual_stack(environment.sdk.use_dual_stack())
            .set_endpoint(environment.endpoint_url.clone())
            .set_force_path_style(self.path_style(environment).then_some(true));
        let params = params.build().map_err(|error| refuse(&error))?;
        let endpoint = DefaultResolver::new().resolve_endpoint(&params).await.map_err(|error| refuse(&error))?;
        let uri: Uri = endpoint.url().parse().map_err(|error| refuse(&error))?;
        let host = uri.host().ok_or_else(|| refuse(&"the endpoint has no host"))?.to_owned();
        // For a bucket whose name is not valid in a host name, the rules ignore the setting and use the path.
        if self.config.addressing == Addressing::Virtual && !host.starts_with(bucket) {
            return Err(misconfigured(&format!(
                "addressing_style=\"virtual\": bucket {bucket:?} cannot be part of a host"
            )));
        }
        let endpoint_host = match configured.as_ref().and_then(Uri::host) {
            Some(endpoint) => endpoint.to_owned(),
            None => host.strip_prefix(&format!("{bucket}.")).unwrap_or(&host).to_owned(),
        };
        let bucket_in_host = host == format!("{bucket}.{endpoint_host}");
        // The preferred scheme comes first.
        let scheme = endpoint.auth_schemes().first();
        let property = |name: &str| scheme?.get(name)?.as_string().map(str::to_owned);
        let sdk_only = scheme.is_some_and(|scheme| scheme.name() != "sigv4");
        Ok(Address {
            origin: Origin::of(&uri, &self.pools),
            endpoint_host,
            bucket_in_host,
            region: property("signingRegion").unwrap_or_else(|| region.to_owned()),
            service: property("signingName").unwrap_or_else(|| "s3".to_owned()),
            sdk_only,
        })
    }
}

/// Returns whether a host name and a signature can contain this region: at most 64 letters, digits, `-`, `_` and `.`.
pub(super) fn is_region(region: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=64).contains(&region.len()) && region.bytes().all(plain)
}

impl Address {
    /// The endpoint with its path, without the bucket, for messages.
    pub(super) fn endpoint(&self, bucket: &str) -> String {
        let path = String::from_utf8_lossy(&self.origin.path);
        let path = if self.bucket_in_host { &path } else { path.strip_suffix(&format!("/{bucket}/")).unwrap_or(&path) };
        format!("{}{}", self.origin.url(), path.trim_end_matches('/'))
    }

    /// The origin of the same bucket at `server`; `None` if `server` does not belong to the same store.
    pub(super) fn redirected(&self, server: &HostAddress, bucket: &str, pools: &PoolMap) -> Option<Origin> {
        let (host, bucket_in_host) = trusted_hosts::accept(&server.host, &self.endpoint_host, bucket)?;
        let server = HostAddress { host, ..server.clone() };
        let mut path = self.origin.path.clone();
        let in_path = format!("{bucket}/");
        match (self.bucket_in_host, bucket_in_host) {
            (true, false) => path.extend_from_slice(in_path.as_bytes()),
            (false, true) if path.ends_with(in_path.as_bytes()) => path.truncate(path.len() - in_path.len()),
            _ => {}
        }
        Some(Origin { host: server.host_header(), pool: pools.pool(&server), path })
    }
}

#[cfg(test)]
mod tests {
    use aws_config::{BehaviorVersion, SdkConfig};
    use torchobj_core::error::ErrorKind;

    use super::*;
    use crate::config::S3Config;

    async fn address(config: S3Config, bucket: &str, region: &str) -> Result<Address> {
        let environment = Environment {
            sdk: SdkConfig::builder().behavior_version(BehaviorVersion::v2026_01_12()).build(),
            credentials: None,
            endpoint_url: config.endpoint_url.clone(),
            region: None,
            checksums_when_required: false,
        };
        Account::new(config).unwrap().resolve(&environment, bucket, region).await
    }

    fn custom(endpoint: &str, addressing: Addressing) -> S3Config {
        S3Config { endpoint_url: Some(endpoint.into()), addressing, ..S3Config::default() }
    }

    #[tokio::test]
    async fn the_host_contains_a_bucket_of_aws_unless_its_name_has_dots() {
        let plain = address(S3Config::default(), "bucket", "eu-west-1").await.unwrap();
        assert_eq!(
            (plain.origin.host.as_str(), plain.origin.path.as_slice()),
            ("bucket.s3.eu-west-1.amazonaws.com", &b"/"[..])
        );
        assert_eq!((plain.region.as_str(), plain.service.as_str(), plain.sdk_only), ("eu-west-1", "s3", false));
        let dotted = address(S3Config::default(), "my.bucket", "eu-west-1").await.unwrap();
        assert_eq!(
            (dotted.origin.host.as_str(), dotted.origin.path.as_slice()),
            ("s3.eu-west-1.amazonaws.com", &b"/my.bucket/"[..])
        );
    }

    #[tokio::test]
    async fn the_path_contains_the_bucket_on_a_custom_endpoint() {
        let address = address(custom("http://10.0.0.1:9000/base/", Addressing::Auto), "b", "us-east-1").await.unwrap();
        assert_eq!((address.origin.host.as_str(), address.origin.path.as_slice()), ("10.0.0.1:9000", &b"/base/b/"[..]));
        assert_eq!(address.origin.path_of(b"a%20b//c"), b"/base/b/a%20b//c");
        assert_eq!(address.origin.path_of(b""), b"/base/b");
        assert_eq!(address.endpoint("b"), "http://10.0.0.1:9000/base");
    }

    #[tokio::test]
    async fn an_endpoint_that_ends_with_the_bucket_is_a_config_error_unless_its_path_is_meant() {
        for url in ["http://h:9000/b", "http://h:9000/b/", "https://h/base/b"] {
            let error = address(custom(url, Addressing::Auto), "b", "us-east-1").await.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(error.to_string().contains("ends with the bucket"), "{error}");
        }
        for url in ["http://h:9000/bb/", "http://h:9000/b/base/", "http://h:9000/", "http://b", "http://h:9000/B/"] {
            address(custom(url, Addressing::Auto), "b", "us-east-1").await.unwrap();
        }
        let meant = address(custom("http://h:9000/b/", Addressing::Path), "b", "us-east-1").await.unwrap();
        assert_eq!(meant.origin.path, b"/b/b/");
        address(custom("http://h:9000/", Addressing::Auto), "", "us-east-1").await.unwrap();
    }

    #[tokio::test]
    async fn the_host_contains_the_bucket_on_a_custom_endpoint_with_virtual_addressing() {
        let virtual_host = custom("https://store.example", Addressing::Virtual);
        let address = address(virtual_host, "bucket", "us-east-1").await.unwrap();
        assert_eq!((address.origin.host.as_str(), address.origin.path.as_slice()), ("bucket.store.example", &b"/"[..]));
    }

    #[tokio::test]
    async fn the_sdk_sends_requests_that_only_it_can_sign() {
        let express = address(S3Config::default(), "data--use1-az4--x-s3", "us-east-1").await.unwrap();
        assert!(express.sdk_only);
        let multi_region =
            address(S3Config::default(), "arn:aws:s3::123456789012:accesspoint:mfzwi23gnjvgw.mrap", "us-east-1");
        assert!(multi_region.await.unwrap().sdk_only);
        let point = address(S3Config::default(), "arn:aws:s3:eu-west-1:123456789012:accesspoint:mine", "eu-west-1");
        let point = point.await.unwrap();
        assert!(
            !point.sdk_only && point.origin.host.starts_with("mine-123456789012.s3-accesspoint.eu-west-1."),
            "{}",
            point.origin.host
        );
    }

    #[tokio::test]
    async fn an_endpoint_that_is_not_http_is_refused() {
        let error = address(custom("ftp://x", Addressing::Auto), "b", "us-east-1").await.err().unwrap();
        assert!(error.to_string().contains("ftp://x"), "{error}");
    }

    #[tokio::test]
    async fn a_region_with_invalid_characters_and_an_endpoint_with_secrets_are_config_errors() {
        for region in ["eu-west-1\r\nx-amz-acl: public-read", "", "a b", "a/b", &"x".repeat(65)] {
            let error = address(custom("http://h:1", Addressing::Auto), "b", region).await.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(error.to_string().contains("region=") && !error.to_string().contains('\n'), "{error}");
        }
        for url in ["http://user:CANARY@h:1", "http://h:1/?token=CANARY", "http://h:1/#CANARY", "CANARY@h"] {
            let error = address(custom(url, Addressing::Auto), "b", "us-east-1").await.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(!error.to_string().contains("CANARY"), "{error}");
        }
    }
}
