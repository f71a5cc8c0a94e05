//! Faults of Google Cloud Storage, injected by the strict server, and objects that change: each results in correct bytes or in
//! an error. These tests need Python: `make rust` runs them.

use std::sync::Arc;
use std::time::Duration;

use crate::server::{Server, run_all};
use serde_json::{Value, json};
use torchobj_conformance::pattern;
use torchobj_core::client::Client;
use torchobj_core::error::{ErrorKind, Result};
use torchobj_core::policy::Policy;
use torchobj_core::read::ReadRequest;
use torchobj_core::types::{ByteRange, Condition, PutOptions, Version};
use torchobj_core::url::ObjectUrl;
use torchobj_store::config::GcsConfig;

const MIB: u64 = 1 << 20;

fn policy() -> Policy {
    Policy {
        part_bytes: MIB,
        whole_below_bytes: 2 * MIB,
        write_buffer_bytes: 2 * MIB,
        max_attempts: 5,
        retry_timeout: Duration::from_secs(60),
        ..Policy::default()
    }
}

struct Bench {
    server: Arc<Server>,
    bucket: &'static str,
    client: Arc<Client>,
}

impl Bench {
    /// A new bucket on a server of its own.
    fn new(bucket: &'static str) -> Self {
        Self::on(Arc::new(Server::start("strict-gcs", &[])), bucket, &json!({}), policy())
    }

    /// A new bucket on the server that tests without faults share.
    fn shared(bucket: &'static str, flags: &Value) -> Self {
        Self::on(Server::shared_strict_gcs(), bucket, flags, policy())
    }

    fn on(server: Arc<Server>, bucket: &'static str, flags: &Value, policy: Policy) -> Self {
        let client = server.gcs_bucket(bucket, server.gcs_config(), policy);
        let mut flags = flags.clone();
        flags["name"] = bucket.into();
        server.control("POST", "buckets", &flags);
        Self { server, bucket, client }
    }

    /// The same bucket through another client.
    fn with(&self, config: GcsConfig, policy: Policy) -> Self {
        let client = self.server.gcs_client(self.bucket, config, policy);
        Self { server: self.server.clone(), bucket: self.bucket, client }
    }

    fn faults(&self, operation: &str, times: Option<u32>, action: &Value) {
        self.server.control("POST", "faults", &json!([{"operation": operation, "times": times, "action": action}]));
    }

    async fn put(&self, key: &str, length: u64) -> (bytes::Bytes, Version) {
        let body = pattern(usize::try_from(length).unwrap(), length);
        let version = self.client.put(key, body.clone().into(), &PutOptions::default()).await.unwrap();
        (body, version)
    }

    async fn get(&self, key: &str) -> Result<Vec<u8>> {
        Ok(self.client.get(ReadRequest::whole(key)).await?.buffer.as_slice().to_vec())
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_read_recovers_from_temporary_faults_and_reports_permanent_ones() {
    let bench = Bench::new("reads");
    let actions = [
        (json!({"status": 503}), ErrorKind::Throttled),
        (json!({"status": 429}), ErrorKind::Throttled),
        (json!({"status": 500}), ErrorKind::Server),
        (json!({"cut_body": 0.5}), ErrorKind::ShortBody),
        (json!({"cut_body": 0.5, "reset": true}), ErrorKind::Reset),
        (json!({"reset": "before_head"}), ErrorKind::Reset),
        (json!({"wrong_content_range": true}), ErrorKind::Protocol),
        (json!({"shorter_length": 10}), ErrorKind::Protocol),
        (json!({"delay_first_byte_s": 60}), ErrorKind::Timeout),
        (json!({"stall_body_at": 1000, "stall_s": 60}), ErrorKind::Timeout),
    ];
    let (small, large) = (pattern(100_000, 1), pattern(3 << 20, 2));
    let (mut rules, mut reads, mut late_reads) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (action, kind)) in actions.into_iter().enumerate() {
        let timeout = if kind == ErrorKind::Timeout { Duration::from_secs(1) } else { policy().idle_timeout };
        for (size, body) in [("small", &small), ("large", &large), ("lasting", &small)] {
            let mut policy = Policy { first_byte_timeout: timeout, idle_timeout: timeout, ..policy() };
            let (key, body, mut action) = (format!("{size}-{index}"), body.clone(), action.clone());
            bench.client.put(&key, body.clone().into(), &PutOptions::default()).await.unwrap();
            let times = (size != "lasting").then_some(2);
            let is_late = kind == ErrorKind::Timeout || times.is_none() && kind == ErrorKind::Throttled;
            let reads = if is_late { &mut late_reads } else { &mut reads };
            // Throttled attempts are not counted: the time ends them, after at least five.
            if times.is_none() && kind == ErrorKind::Throttled {
                action["headers"] = json!({"Retry-After": "0"});
                policy.retry_timeout = Duration::from_secs(5);
            }
            rules.push(json!({"operation": "GetMedia", "key": format!("^{key}$"), "times": times, "action": action}));
            let bench = bench.with(bench.server.gcs_config(), policy);
            reads.push(async move {
                let got = bench.get(&key).await;
                if times.is_some() {
                    assert!(got.unwrap_or_else(|error| panic!("{action}, {key}: {error}")) == body, "{action}, {key}");
                    return;
                }
                let error = got.expect_err("a fault that persists");
                let kinds = [kind, ErrorKind::Stale, ErrorKind::Reset];
                assert!(kinds.contains(&error.kind()), "{action} for ever: {error:?}");
                assert!(error.url() == format!("gs://reads/{key}") && error.attempts() >= 5, "{action}: {error}");
            });
        }
    }
    bench.server.control("POST", "faults", &json!(rules));
    run_all(reads).await;
    // After the others: those with short timeouts do not wait for responses to them. Lasting throttling takes as long.
    run_all(late_reads).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_response_that_ignores_the_range_or_the_generation_is_refused() {
    let bench = Bench::new("ignored");
    let (body, version) = bench.put("k", 3 * MIB).await;
    bench.faults("GetMedia", None, &json!({"ignore_range": true}));
    assert!(bench.get("k").await.is_err() || bench.get("k").await.unwrap() == body);
    let middle = ReadRequest { range: Some(ByteRange::Bounded(5..500)), ..ReadRequest::whole("k") };
    assert_eq!(bench.client.get(middle).await.unwrap_err().kind(), ErrorKind::Protocol);
    bench.faults("GetMedia", None, &json!({"wrong_generation": true}));
    let pinned = ReadRequest { version: Some(version), ..ReadRequest::whole("k") };
    assert_eq!(bench.client.get(pinned).await.unwrap_err().kind(), ErrorKind::Changed);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_object_that_is_replaced_between_two_ranges_is_changed_and_a_selected_generation_is_read() {
    for (bucket, versioning) in [("replaced", false), ("replaced-versioned", true)] {
        let bench = Bench::shared(bucket, &json!({"versioning": versioning}));
        let (old, first) = bench.put("k", 1000).await;
        let (new, second) = bench.put("k", 2000).await;
        let read = |version: Version| {
            let range = Some(ByteRange::Bounded(10..20));
            bench.client.get(ReadRequest { range, version: Some(version), ..ReadRequest::whole("k") })
        };
        assert_eq!(read(first.clone()).await.unwrap_err().kind(), ErrorKind::Changed, "versioning={versioning}");
        assert_eq!(read(second.clone()).await.unwrap().buffer.as_slice(), &new[10..20]);
        let selected = read(Version::selected(first.as_str())).await;
        if versioning {
            let selected = selected.unwrap();
            assert_eq!((selected.buffer.as_slice(), selected.version), (&old[10..20], Some(first)));
        } else {
            let error = selected.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Changed);
            assert!(error.to_string().contains("was replaced or deleted"), "{error}");
        }
        let deleted = bench.client.delete_if("k", &Version::new("17")).await.unwrap_err();
        assert_eq!(deleted.kind(), ErrorKind::Precondition);
        bench.client.delete_if("k", &second).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_large_read_of_a_selected_generation_pins_every_range() {
    let bench = Bench::shared("pinned", &json!({"versioning": true}));
    let (old, first) = bench.put("k", 3 * MIB + 1).await;
    bench.put("k", 100).await;
    let read = ReadRequest { version: Some(Version::selected(first.as_str())), ..ReadRequest::whole("k") };
    assert!(bench.client.get(read).await.unwrap().buffer.as_slice() == old);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_body_with_another_checksum_is_an_error_if_checksums_are_verified() {
    let bench = Bench::new("checksums");
    bench.put("k", 100_000).await;
    bench.faults("GetMedia", None, &json!({"corrupt_byte_at": 500}));
    for verify_checksums in [false, true] {
        let bench = bench.with(bench.server.gcs_config(), Policy { verify_checksums, ..policy() });
        let kind = bench.get("k").await.err().map(|error| error.kind());
        assert_eq!(kind, verify_checksums.then_some(ErrorKind::Integrity));
        let range = ReadRequest { range: Some(ByteRange::Bounded(0..5)), ..ReadRequest::whole("k") };
        bench.client.get(range).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_object_that_is_stored_compressed_is_read_as_it_is_stored() {
    let bench = Bench::shared("compressed", &json!({}));
    let mut options = PutOptions::default();
    options.attributes.content_encoding = Some("gzip".into());
    let body = pattern(3 << 20, 3);
    bench.client.put("k.gz", body.clone().into(), &options).await.unwrap();
    assert!(bench.get("k.gz").await.unwrap() == body);
    let range = ReadRequest { range: Some(ByteRange::Bounded(1000..2000)), ..ReadRequest::whole("k.gz") };
    assert!(bench.client.get(range).await.unwrap().buffer.as_slice() == &body[1000..2000]);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn writes_recover_from_lost_responses_and_report_conditions() {
    let bench = Bench::new("writes");
    for action in [json!({"lose_response": true}), json!({"status": 503}), json!({"reset": "after_request"})] {
        for condition in [Condition::Always, Condition::Absent] {
            let key = format!("{action} {condition:?}");
            bench.faults("InsertObject", Some(1), &action);
            let options = PutOptions { condition, ..PutOptions::default() };
            bench.client.put(&key, pattern(5000, 1).into(), &options).await.unwrap();
            assert!(bench.get(&key).await.unwrap() == pattern(5000, 1), "{key}");
        }
    }
    bench.faults("DeleteObject", Some(1), &json!({"lose_response": true}));
    bench.client.delete(&["x".to_owned(), "y".to_owned()]).await.unwrap();
    bench.faults("InsertObject", None, &json!({"status": 400}));
    let refused = bench.client.put("k", pattern(10, 1).into(), &PutOptions::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidRequest, "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_large_copy_takes_several_requests() {
    let bench = Bench::new("copies");
    let (body, _) = bench.put("from", 5 * MIB).await;
    bench.server.control("PUT", "limits", &json!({"rewrite_bytes": 1 << 20}));
    bench.client.copy(&ObjectUrl::parse("gs://copies/from").unwrap(), "to").await.unwrap();
    assert!(bench.get("to").await.unwrap() == body);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn errors_name_the_cause_and_the_next_step() {
    let bench = Bench::shared("requester-pays", &json!({"requester_pays": true}));
    let error = bench.get("k").await.unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidRequest && error.to_string().contains("user_project"), "{error}");
    let paying = GcsConfig { user_project: Some("payer".into()), ..bench.server.gcs_config() };
    let paying = bench.with(paying, policy()).client;
    paying.put("k", pattern(10, 1).into(), &PutOptions::default()).await.unwrap();
    paying.get(ReadRequest::whole("k")).await.unwrap();
    let missing = bench.server.gcs_client("no-such-bucket", bench.server.gcs_config(), policy());
    assert_eq!(missing.get(ReadRequest::whole("k")).await.unwrap_err().kind(), ErrorKind::NoBucket);
    let anonymous = GcsConfig { anonymous: true, credential_provider: None, ..bench.server.gcs_config() };
    let error = bench.with(anonymous, policy()).get("k").await.unwrap_err();
    assert!(error.kind() == ErrorKind::Credentials && error.to_string().contains("anonymous=True"), "{error}");

    let locked = Bench::shared("locked", &json!({}));
    locked.put("k", 10).await;
    locked.server.control("POST", "buckets", &json!({"name": "locked", "retention_s": 3600}));
    for error in [
        locked.client.delete(&["k".to_owned()]).await.unwrap_err(),
        locked.client.put("k", pattern(5, 1).into(), &PutOptions::default()).await.unwrap_err(),
    ] {
        assert!(error.kind() == ErrorKind::InvalidRequest && error.to_string().contains("retention"), "{error}");
    }
}
