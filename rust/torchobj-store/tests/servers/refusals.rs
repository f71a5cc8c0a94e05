//! Invalid headers, rejected credentials, and secrets in `Debug`. These tests need Python: `make rust` runs them.

use std::time::{Duration, Instant};

use crate::server::Server;
use serde_json::json;
use torchobj_conformance::pattern;
use torchobj_core::error::ErrorKind;
use torchobj_core::policy::Policy;
use torchobj_core::read::ReadRequest;
use torchobj_core::types::{Attributes, Condition, ListRequest, PutOptions, Version};
use torchobj_store::config::{Encryption, S3Config};
use torchobj_store::s3::sign::Identity;

/// Parts of the minimum size of S3.
fn policy() -> Policy {
    Policy { part_bytes: 5 << 20, whole_below_bytes: 6 << 20, write_buffer_bytes: 10 << 20, ..Policy::default() }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_attribute_with_a_line_break_is_a_config_error_with_and_without_the_sdk() {
    let server = Server::shared_strict();
    let ours = server.bucket("injected", server.config(), policy());
    let by_sdk = S3Config { force_sdk: true, ..server.config() };
    let by_sdk = server.client("injected", by_sdk, policy());
    let evil = || Some("a\r\nx-amz-acl: public-read".to_owned());
    let attributes = [
        ("type", Attributes { content_type: evil(), ..Attributes::default() }),
        ("encoding", Attributes { content_encoding: evil(), ..Attributes::default() }),
        ("disposition", Attributes { content_disposition: evil(), ..Attributes::default() }),
        ("language", Attributes { content_language: evil(), ..Attributes::default() }),
        ("cache", Attributes { cache_control: evil(), ..Attributes::default() }),
        ("storage", Attributes { storage_class: evil(), ..Attributes::default() }),
        ("metadata", Attributes { metadata: vec![("a".into(), evil().unwrap())], ..Attributes::default() }),
    ];
    let mut options: Vec<_> =
        attributes.map(|(name, attributes)| (name, PutOptions { attributes, ..PutOptions::default() })).into();
    let condition = Condition::Matches(Version::new(evil().unwrap()));
    options.push(("match", PutOptions { condition, ..PutOptions::default() }));
    for client in [&ours, &by_sdk] {
        for (name, options) in &options {
            for length in [10, 7 << 20] {
                let error = client.put("k", pattern(length, 1).into(), options).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Config, "{name}, {length} bytes: {error:?}");
                assert!(error.to_string().contains(name) && !error.to_string().contains('\n'), "{error}");
            }
        }
    }
    assert!(ours.list(ListRequest::default()).await.unwrap().entries.is_empty());
    assert!(ours.uploads("").await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn rejected_credentials_are_an_error_without_retries_until_they_are_replaced() {
    let server = Server::shared_strict();
    let owner = server.bucket("credentials", server.config(), policy());
    owner.put("k", pattern(1000, 1).into(), &PutOptions::default()).await.unwrap();
    let of = |access_key: &str, secret_key: &str, token: Option<&str>| Identity {
        access_key: access_key.into(),
        secret_key: secret_key.into(),
        session_token: token.map(str::to_owned),
    };
    let account = json!({"access_key": "ASIAEXPIRED", "secret_key": "s", "token": "t", "expires_in_s": -1});
    server.control("POST", "accounts", &account);
    let good = server.identity();
    let refused = [
        ("expired", of("ASIAEXPIRED", "s", Some("t")), "ExpiredToken"),
        ("mistyped", of(&good.access_key, "another", None), "SignatureDoesNotMatch"),
        ("unknown", of("AKIAUNKNOWN", "s", None), "InvalidAccessKeyId"),
    ];
    for force_sdk in [false, true] {
        for (name, bad, code) in &refused {
            let profile = format!("{name}-{force_sdk}");
            Server::set_profile(&profile, bad);
            let config = S3Config { profile: Some(profile.clone()), force_sdk, ..server.config() };
            let client = server.client("credentials", config, policy());
            for _ in 0..2 {
                let error = client.get(ReadRequest::whole("k")).await.unwrap_err();
                assert_eq!((error.kind(), error.attempts()), (ErrorKind::Credentials, 1), "{profile}: {error}");
                assert_eq!(error.code(), Some(*code));
            }
            Server::set_profile(&profile, &good);
            // Expired credentials are reloaded once a second.
            let deadline = Instant::now() + Duration::from_secs(5);
            while let Err(error) = client.get(ReadRequest::whole("k")).await {
                assert!(*name == "expired" && Instant::now() < deadline, "{profile}: {error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_debug_of_a_client_contains_no_secret() {
    let server = Server::shared_strict();
    let key = "Y2FuYXJ5LVNFQ1JFVC1rZXktb2YtMzItYnl0ZXMhISE=";
    let file = std::env::temp_dir().join(format!("torchobj-customer-key-{}", std::process::id()));
    std::fs::write(&file, key).unwrap();
    for force_sdk in [false, true] {
        let encryption = Encryption::CustomerKeyFile(file.clone());
        let config = S3Config { force_sdk, encryption, ..server.config() };
        let client = server.bucket(&format!("debug-{force_sdk}"), config, policy());
        client.put("k", pattern(7 << 20, 1).into(), &PutOptions::default()).await.unwrap();
        let shown = format!("{client:?} {:#?}", client.store());
        assert!(shown.contains("s3://") && !shown.contains(key), "the SSE-C key is shown");
        assert!(!shown.contains(&server.identity().secret_key), "the secret key of a profile is shown");
        assert!(!shown.contains(&*file.to_string_lossy()), "the file of a key is shown");
    }
    std::fs::remove_file(file).unwrap();
}
