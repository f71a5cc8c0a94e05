//! AWS Signature Version 4 in the `Authorization` header, with an unsigned payload. Does no I/O.
//!
//! The four HMACs that derive a key are computed once per day, region, service and credentials. A request then needs two
//! short SHA-256 and one HMAC. Source: AWS General Reference, "Create a signed AWS API request".

use std::sync::RwLock;
use std::time::{SystemTime, UNIX_EPOCH};

use aws_smithy_types::date_time::{DateTime, Format};
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

type HmacSha256 = Hmac<Sha256>;

/// Region of signatures for endpoints without regions. FlashBlade, SwiftStack, MinIO and Ceph accept it.
pub(super) const DEFAULT_REGION: &str = "us-east-1";

/// The last second of the year 9999, since 1970. The format has four digits for a year.
const MAX_SECONDS: u64 = 253_402_300_799;

/// Value of `x-amz-content-sha256` for an unsigned body. TLS and a checksum header protect its integrity.
pub const UNSIGNED_PAYLOAD: &str = "UNSIGNED-PAYLOAD";

/// An access key. Without `Debug`, because it has secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    /// Access key id, which is not secret.
    pub access_key: String,
    /// Secret access key.
    pub secret_key: String,
    /// Session token of temporary credentials.
    pub session_token: Option<String>,
}

/// The time of a request in the format of SigV4: `20260102T030405Z`.
#[derive(Clone, PartialEq, Eq)]
pub struct Timestamp(String);

impl Timestamp {
    /// The timestamp of `time`. Times before 1970 or after 9999 are clamped: the clock skew is that of any `Date` header.
    pub fn new(time: SystemTime) -> Self {
        let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()).min(MAX_SECONDS);
        let date = DateTime::from_secs(seconds.cast_signed()).fmt(Format::DateTime);
        let mut text = date.expect("the year is at most 9999");
        text.retain(|letter| !matches!(letter, '-' | ':'));
        Self(text)
    }

    /// `20260102T030405Z`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn day(&self) -> &str {
        &self.0[..8]
    }
}

/// The signed elements of a request. `path` and `query` are encoded; `headers` are sorted by their lower-case names, and
/// contain `host` and every `x-amz-*` header of the request.
#[derive(Debug, Clone, Copy)]
pub struct Canonical<'a> {
    /// `GET`, `PUT` …
    pub method: &'a str,
    /// The request path, starting with `/`.
    pub path: &'a [u8],
    /// The query string without `?`, with sorted pairs.
    pub query: &'a [u8],
    /// Lower-case names, and values.
    pub headers: &'a [(&'a str, &'a str)],
}

/// A key derived for one day, region and service.
struct DerivedKey {
    day: String,
    mac: HmacSha256,
    /// `20260102/us-east-1/s3/aws4_request`
    scope: String,
}

/// Signs requests of one identity for one region and service.
pub struct Signer {
    identity: Identity,
    region: String,
    service: String,
    derived: RwLock<std::sync::Arc<DerivedKey>>,
}

impl Signer {
    /// A signer for `identity` in `region`, for `service` (`s3`, or that of the endpoint rules).
    pub fn new(identity: Identity, region: impl Into<String>, service: impl Into<String>) -> Self {
        let (region, service) = (region.into(), service.into());
        let today = Timestamp::new(SystemTime::now());
        let derived = RwLock::new(std::sync::Arc::new(derive(&identity, today.day(), &region, &service)));
        Self { identity, region, service, derived }
    }

    /// The session token, which must be sent and signed as `x-amz-security-token`.
    pub fn session_token(&self) -> Option<&str> {
        self.identity.session_token.as_deref()
    }

    fn key_of(&self, day: &str) -> std::sync::Arc<DerivedKey> {
        let current = self.derived.read().expect("no holder of this lock panics").clone();
        if current.day == day {
            return current;
        }
        let fresh = std::sync::Arc::new(derive(&self.identity, day, &self.region, &self.service));
        *self.derived.write().expect("no holder of this lock panics") = fresh.clone();
        fresh
    }

    /// Appends the value of the `Authorization` header to `out`.
    pub fn authorize_into(&self, out: &mut Vec<u8>, time: &Timestamp, request: &Canonical<'_>) {
        let key = self.key_of(time.day());
        let mut mac = key.mac.clone();
        mac.update(b"AWS4-HMAC-SHA256\n");
        mac.update(time.0.as_bytes());
        mac.update(b"\n");
        mac.update(key.scope.as_bytes());
        mac.update(b"\n");
        let mut hex = [0; 64];
        hex::encode_to_slice(digest(request), &mut hex).expect("32 bytes are 64 digits");
        mac.update(&hex);
        out.extend_from_slice(b"AWS4-HMAC-SHA256 Credential=");
        out.extend_from_slice(self.identity.access_key.as_bytes());
        out.push(b'/');
        out.extend_from_slice(key.scope.as_bytes());
        out.extend_from_slice(b", SignedHeaders=");
        for (index, (name, _)) in request.headers.iter().enumerate() {
            if index > 0 {
                out.push(b';');
            }
            out.extend_from_slice(name.as_bytes());
        }
        out.extend_from_slice(b", Signature=");
        hex::encode_to_slice(mac.finalize().into_bytes(), &mut hex).expect("32 bytes are 64 digits");
        out.extend_from_slice(&hex);
    }
}

/// SHA-256 of the canonical request.
fn digest(request: &Canonical<'_>) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(request.method.as_bytes());
    hash.update(b"\n");
    hash.update(request.path);
    hash.update(b"\n");
    hash.update(request.query);
    hash.update(b"\n");
    for (name, value) in request.headers {
        hash.update(name.as_bytes());
        hash.update(b":");
        update_trimmed(&mut hash, value);
        hash.update(b"\n");
    }
    hash.update(b"\n");
    for (index, (name, _)) in request.headers.iter().enumerate() {
        if index > 0 {
            hash.update(b";");
        }
        hash.update(name.as_bytes());
    }
    hash.update(b"\n");
    let payload = request.headers.iter().find(|(name, _)| *name == "x-amz-content-sha256");
    hash.update(payload.map_or(UNSIGNED_PAYLOAD, |(_, hash)| hash).as_bytes());
    hash.finalize().into()
}

/// Value of `x-amz-content-sha256` for a signed body.
pub(super) fn payload_hash(pieces: &[Bytes]) -> String {
    let mut hash = Sha256::new();
    for piece in pieces {
        hash.update(piece);
    }
    hex::encode(hash.finalize())
}

/// Hashes the value of a header without leading and trailing spaces, and with each run of spaces collapsed to one.
fn update_trimmed(hash: &mut Sha256, value: &str) {
    let value = value.trim_matches(' ');
    if !value.contains("  ") {
        return hash.update(value.as_bytes());
    }
    for (index, word) in value.split(' ').filter(|word| !word.is_empty()).enumerate() {
        if index > 0 {
            hash.update(b" ");
        }
        hash.update(word.as_bytes());
    }
}

fn derive(identity: &Identity, day: &str, region: &str, service: &str) -> DerivedKey {
    let step = |key: &[u8], data: &str| -> [u8; 32] {
        let mut mac = keyed(key);
        mac.update(data.as_bytes());
        mac.finalize().into_bytes().into()
    };
    let secret = format!("AWS4{}", identity.secret_key);
    let key = step(&step(&step(&step(secret.as_bytes(), day), region), service), "aws4_request");
    DerivedKey { day: day.to_owned(), mac: keyed(&key), scope: format!("{day}/{region}/{service}/aws4_request") }
}

fn keyed(key: &[u8]) -> HmacSha256 {
    HmacSha256::new_from_slice(key).expect("HMAC takes a key of any length")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use aws_credential_types::Credentials;
    use aws_sigv4::http_request::{
        PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningSettings,
        UriPathNormalizationMode, sign,
    };
    use aws_sigv4::sign::v4;
    use proptest::prelude::*;

    use super::*;
    use crate::http::encode;

    fn ours(method: &str, key: &str, query: &[(String, String)], headers: &[(&str, &str)], time: SystemTime) -> String {
        let mut path = b"/bucket/".to_vec();
        encode::key_into(&mut path, key);
        let mut canonical_query = Vec::new();
        for (name, value) in query {
            if !canonical_query.is_empty() {
                canonical_query.push(b'&');
            }
            encode::query_into(&mut canonical_query, name);
            canonical_query.push(b'=');
            encode::query_into(&mut canonical_query, value);
        }
        let signer = Signer::new(identity(), "eu-west-3", "s3");
        let mut out = Vec::new();
        let canonical = Canonical { method, path: &path, query: &canonical_query, headers };
        signer.authorize_into(&mut out, &Timestamp::new(time), &canonical);
        String::from_utf8(out).unwrap()
    }

    fn identity() -> Identity {
        Identity {
            access_key: "AKIDEXAMPLE".into(),
            secret_key: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".into(),
            session_token: None,
        }
    }

    fn sdk_signature(method: &str, uri: &str, headers: &[(&str, &str)], time: SystemTime) -> String {
        let credentials = Credentials::new(identity().access_key, identity().secret_key, None, None, "test").into();
        let mut settings = SigningSettings::default();
        settings.percent_encoding_mode = PercentEncodingMode::Single;
        settings.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
        settings.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
        let params = v4::SigningParams::builder()
            .identity(&credentials)
            .region("eu-west-3")
            .name("s3")
            .time(time)
            .settings(settings)
            .build()
            .unwrap()
            .into();
        let sent = headers.iter().copied().filter(|(name, _)| *name != "x-amz-date" && *name != "x-amz-content-sha256");
        let request = SignableRequest::new(method, uri, sent, SignableBody::UnsignedPayload).unwrap();
        let (instructions, _) = sign(request, &params).unwrap().into_parts();
        let (headers, _) = instructions.into_parts();
        headers.iter().find(|header| header.name() == "authorization").unwrap().value().to_owned()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn signatures_equal_those_of_aws_sigv4(
            key in prop_oneof![
                ".{1,40}",
                "[ -~]{1,40}",
                "(a|/|//|\\.|\\.\\.|%41|%|\\+| |\\?|#|&|=|~|🎉|é){1,12}",
            ],
            prefix in "[ -~]{0,12}",
            metadata in "[!-~]{1,8}( {1,3}[!-~]{1,8}){0,2}",
            seconds in 0u64..4_000_000_000,
        ) {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            let stamp = Timestamp::new(time);
            let headers = [
                ("host", "bucket.example:9000"),
                ("x-amz-content-sha256", UNSIGNED_PAYLOAD),
                ("x-amz-date", stamp.as_str()),
                ("x-amz-meta-note", metadata.as_str()),
            ];
            let query = [("list-type".to_owned(), "2".to_owned()), ("prefix".to_owned(), prefix)];
            let mut encoded = Vec::new();
            encode::key_into(&mut encoded, &key);
            let mut uri = format!("http://bucket.example:9000/bucket/{}?", std::str::from_utf8(&encoded).unwrap());
            for (index, (name, value)) in query.iter().enumerate() {
                let mut pair = Vec::new();
                encode::query_into(&mut pair, name);
                pair.push(b'=');
                encode::query_into(&mut pair, value);
                uri.push_str(if index > 0 { "&" } else { "" });
                uri.push_str(std::str::from_utf8(&pair).unwrap());
            }
            prop_assert_eq!(ours("GET", &key, &query, &headers, time), sdk_signature("GET", &uri, &headers, time));
        }
    }

    #[test]
    fn a_time_beyond_the_year_9999_is_clamped() {
        for (seconds, text) in [(253_402_300_799, "99991231T235959Z"), (253_402_300_800, "99991231T235959Z")] {
            assert_eq!(Timestamp::new(UNIX_EPOCH + Duration::from_secs(seconds)).as_str(), text);
        }
    }

    #[test]
    fn each_day_has_its_own_key() {
        let signer = Signer::new(identity(), "us-east-1", "s3");
        let canonical = Canonical { method: "GET", path: b"/", query: b"", headers: &[("host", "h")] };
        let (mut first, mut second) = (Vec::new(), Vec::new());
        signer.authorize_into(&mut first, &Timestamp::new(UNIX_EPOCH), &canonical);
        signer.authorize_into(&mut second, &Timestamp::new(UNIX_EPOCH + Duration::from_secs(86_400)), &canonical);
        assert!(first.starts_with(b"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/19700101/us-east-1/s3/aws4_request"));
        assert!(second.starts_with(b"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/19700102/us-east-1/s3/aws4_request"));
    }
}
