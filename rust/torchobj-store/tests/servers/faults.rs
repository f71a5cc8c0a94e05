//! Faults of servers and networks, injected by the strict server: each results in correct bytes or in an error.
//! These tests need Python: `make rust` runs them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::server::{Server, run_all};
use futures_util::future::join_all;
use serde_json::{Value, json};
use torchobj_conformance::pattern;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, ErrorKind, Result};
use torchobj_core::policy::Policy;
use torchobj_core::read::ReadRequest;
use torchobj_core::types::{Condition, ListRequest, PutOptions};
use torchobj_core::upload::Writer;
use torchobj_store::config::S3Config;

const MIB: u64 = 1 << 20;

/// Small parts of reads; those of writes have the minimum size of S3.
fn policy() -> Policy {
    Policy {
        part_bytes: MIB,
        whole_below_bytes: 2 * MIB,
        write_buffer_bytes: 10 * MIB,
        max_attempts: 5,
        retry_timeout: Duration::from_secs(60),
        ..Policy::default()
    }
}

/// Short timeouts, for servers that stop responding.
fn impatient() -> Policy {
    Policy { first_byte_timeout: Duration::from_secs(1), idle_timeout: Duration::from_secs(1), ..policy() }
}

/// The policy for a request with this fault.
fn policy_for(action: &Value) -> Policy {
    if is_silent(action) { impatient() } else { policy() }
}

/// Whether the server stops responding, which only a timeout ends.
fn is_silent(action: &Value) -> bool {
    !action["delay_first_byte_s"].is_null() || !action["stall_s"].is_null()
}

/// A rule for the first `times` requests of `operation` for `key`; `None`: for all.
fn rule(operation: &str, key: &str, times: Option<u32>, action: &Value) -> Value {
    json!({"operation": operation, "key": format!("^{key}$"), "times": times, "action": action})
}

#[derive(Clone)]
struct Bench {
    server: Arc<Server>,
    bucket: &'static str,
    client: Arc<Client>,
}

impl Bench {
    /// A new bucket on a server of its own.
    fn new(bucket: &'static str) -> Self {
        Self::on(Arc::new(Server::start("strict", &[])), bucket)
    }

    fn on(server: Arc<Server>, bucket: &'static str) -> Self {
        let client = server.bucket(bucket, server.config(), policy());
        Self { server, bucket, client }
    }

    /// The same bucket through another client.
    fn with(&self, policy: Policy) -> Self {
        let client = self.server.client(self.bucket, self.server.config(), policy);
        Self { server: self.server.clone(), bucket: self.bucket, client }
    }

    fn faults(&self, rules: &[Value]) {
        self.server.control("POST", "faults", &json!(rules));
    }

    fn requests(&self) -> Vec<Value> {
        self.server.control("GET", "requests", &Value::Null).as_array().unwrap().clone()
    }

    async fn put(&self, key: &str, length: u64) -> bytes::Bytes {
        let body = pattern(usize::try_from(length).unwrap(), length);
        self.client.put(key, body.clone().into(), &PutOptions::default()).await.unwrap();
        body
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
        (json!({"status": 503, "code": "SlowDown"}), ErrorKind::Throttled),
        (json!({"status": 500, "code": "InternalError"}), ErrorKind::Server),
        (json!({"status": 429}), ErrorKind::Throttled),
        (json!({"status": 400, "code": "RequestTimeout"}), ErrorKind::Timeout),
        (json!({"cut_body": 0.5}), ErrorKind::ShortBody),
        (json!({"cut_body": 0.0}), ErrorKind::ShortBody),
        (json!({"cut_body": 0.5, "reset": true}), ErrorKind::Reset),
        (json!({"reset": "before_head"}), ErrorKind::Reset),
        (json!({"wrong_content_range": true}), ErrorKind::Protocol),
        (json!({"shorter_length": 10}), ErrorKind::Protocol),
        (json!({"error_in_200": "InternalError"}), ErrorKind::Server),
        (json!({"delay_first_byte_s": 60}), ErrorKind::Timeout),
        (json!({"stall_body_at": 1000, "stall_s": 60}), ErrorKind::Timeout),
    ];
    let (mut rules, mut reads, mut late_reads) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (action, kind)) in actions.into_iter().enumerate() {
        let times = if action["status"] == 503 { 3 } else { 2 };
        // Throttled attempts are not counted: the time ends them, after at least five.
        let (mut lasting, mut policy) = (action.clone(), policy_for(&action));
        if kind == ErrorKind::Throttled {
            lasting["headers"] = json!({"Retry-After": "0"});
            policy.retry_timeout = Duration::from_secs(5);
        }
        for (size, length, fault) in
            [("small", 100_000, &action), ("large", 3 * MIB + 5, &action), ("lasting", 100_000, &lasting)]
        {
            let key = format!("{size}-{index}");
            let times = (size != "lasting").then_some(times);
            let is_late = is_silent(&action) || times.is_none() && kind == ErrorKind::Throttled;
            let reads = if is_late { &mut late_reads } else { &mut reads };
            rules.push(rule("GetObject", &key, times, fault));
            let body = bench.put(&key, length).await;
            let bench = bench.with(if times.is_none() { policy.clone() } else { policy_for(&action) });
            let action = fault.clone();
            reads.push(async move {
                let started = Instant::now();
                let got = bench.get(&key).await;
                if let Some(times) = times {
                    let got = got.unwrap_or_else(|error| panic!("{action}, {times} times, {key}: {error}"));
                    assert!(got == body, "{action}, {times} times, {key}");
                    return;
                }
                let error = got.expect_err("a fault that persists");
                // Each attempt receives a part of a truncated body, so the error may be another one in the end.
                let kinds = [kind, ErrorKind::Stale, ErrorKind::Reset];
                assert!(kinds.contains(&error.kind()), "{action} for ever: {error:?}");
                assert!(error.url().ends_with(&format!("/{key}")) && error.attempts() >= 5, "{action}: {error}");
                assert!(started.elapsed() < Duration::from_secs(20), "{action}: {:?}", started.elapsed());
            });
        }
    }
    bench.faults(&rules);
    run_all(reads).await;
    // After the others: those with short timeouts do not wait for responses to them. Lasting throttling takes as long.
    run_all(late_reads).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_unusual_but_valid_response_is_read() {
    let bench = Bench::new("unusual");
    let actions = [
        json!({"longer_body": 100}),
        json!({"longer_body": 100_000}),
        json!({"chunked": true}),
        json!({"no_length": true}),
        json!({"informational": 100}),
        json!({"informational": 103}),
        json!({"close_after": true}),
        json!({"slow_drip": 400_000}),
        json!({"ignore_range": true}),
    ];
    let rule = |(index, action)| rule("GetObject", &format!("(small|large)-{index}"), None, action);
    bench.faults(&actions.iter().enumerate().map(rule).collect::<Vec<_>>());
    run_all(actions.into_iter().enumerate().map(|(index, action)| {
        // The second read may use the connection of the first.
        let bench = bench.with(policy());
        async move {
            let [small, large] = ["small", "large"].map(|size| format!("{size}-{index}"));
            let body = bench.put(&small, 100_000).await;
            assert!(bench.get(&small).await.unwrap() == body, "{action}");
            assert!(bench.get(&small).await.unwrap() == body, "{action}, again");
            if action["slow_drip"].is_null() && action["ignore_range"].is_null() {
                let body = bench.put(&large, 3 * MIB + 5).await;
                assert!(bench.get(&large).await.unwrap() == body, "{action}");
            }
        }
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_incomplete_body_is_resumed_at_its_byte_and_version() {
    let bench = Bench::new("resume");
    let body = bench.put("k", MIB).await;
    bench.server.control("DELETE", "requests", &Value::Null);
    let cut = rule("GetObject", "k", Some(1), &json!({"cut_body": 700_000}));
    bench.faults(std::slice::from_ref(&cut));
    assert!(bench.get("k").await.unwrap() == body);
    let second = &bench.requests()[1]["headers"];
    assert_eq!(second["range"], format!("bytes=700000-{}", MIB - 1));
    assert!(second["if-match"].is_string(), "{second}");
    // The object is replaced during the read, which is an error. Throttled attempts last until then.
    let throttled = json!({"status": 503, "headers": {"Retry-After": "0"}});
    bench.faults(&[cut, rule("GetObject", "k", None, &throttled)]);
    let (read, ()) = tokio::join!(bench.get("k"), async {
        bench.server.until_fired(1).await;
        bench.put("k", MIB + 1).await;
        bench.server.control("DELETE", "faults", &Value::Null);
    });
    assert_eq!(read.unwrap_err().kind(), ErrorKind::Changed);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_write_recovers_from_temporary_faults() {
    let bench = Bench::new("writes");
    let actions = [
        json!({"status": 503, "code": "SlowDown"}),
        json!({"status": 500}),
        json!({"reset": "before_head"}),
        json!({"reset": "after_request"}),
        json!({"lose_response": true}),
        json!({"early_response": 503}),
        json!({"delay_first_byte_s": 60}),
        json!({"informational": 100}),
        json!({"chunked": true}),
        json!({"close_after": true}),
    ];
    let mut writes = vec![
        ("CompleteMultipartUpload", json!({"error_in_200": "InternalError"})),
        ("CreateMultipartUpload", json!({"status": 503, "code": "SlowDown"})),
    ];
    for action in actions {
        for operation in ["PutObject", "UploadPart", "CompleteMultipartUpload"] {
            // hyper reports a response before the end of the request only as a broken connection.
            if operation != "CompleteMultipartUpload" || action["early_response"].is_null() {
                writes.push((operation, action.clone()));
            }
        }
    }
    let key = |operation: &str, action: &Value| format!("{operation} {action}").replace(['{', '}', '"'], "");
    let rule = |(operation, action): &(&str, Value)| rule(operation, &key(operation, action), Some(2), action);
    bench.faults(&writes.iter().map(rule).collect::<Vec<_>>());
    let write = |(operation, action): (&str, Value)| {
        let (bench, key) = (bench.with(policy_for(&action)), key(operation, &action));
        let length = if operation == "PutObject" { 900_000 } else { 6 * MIB };
        async move {
            let body = bench.put(&key, length).await;
            assert!(bench.get(&key).await.unwrap() == body, "{key}");
        }
    };
    let (silent, others): (Vec<_>, Vec<_>) = writes.into_iter().partition(|(_, action)| is_silent(action));
    run_all(others.into_iter().map(write)).await;
    // After the others: those with short timeouts do not wait for responses to them.
    run_all(silent.into_iter().map(write)).await;
    assert!(bench.client.uploads("").await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_conditional_write_whose_response_is_lost_succeeds() {
    let bench = Bench::new("settled");
    let absent = PutOptions { condition: Condition::Absent, ..PutOptions::default() };
    for (length, operation) in [(1000, "PutObject"), (6 * MIB, "CompleteMultipartUpload")] {
        bench.faults(&[rule(operation, operation, Some(1), &json!({"lose_response": true}))]);
        let body = pattern(usize::try_from(length).unwrap(), 7);
        bench.client.put(operation, body.clone().into(), &absent).await.unwrap();
        assert!(bench.get(operation).await.unwrap() == body);
        // The object exists, and was written by another upload.
        bench.faults(&[rule(operation, operation, Some(1), &json!({"status": 500}))]);
        let error = bench.client.put(operation, pattern(1000, 8).into(), &absent).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Precondition, "{error}");
    }
    assert!(bench.client.uploads("").await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_failed_writer_does_not_change_the_object_and_aborts_its_upload() {
    let bench = Bench::new("writers");
    let cases = [
        ("UploadPart", json!({"status": 403, "code": "AccessDenied"})),
        ("UploadPart", json!({"status": 500})),
        ("CompleteMultipartUpload", json!({"status": 403, "code": "AccessDenied"})),
        ("CompleteMultipartUpload", json!({"error_in_200": "InternalError"})),
        ("CreateMultipartUpload", json!({"status": 403, "code": "AccessDenied"})),
    ];
    let rule =
        |(index, (operation, action)): (usize, &(&str, Value))| rule(operation, &format!("{index}"), None, action);
    bench.faults(&cases.iter().enumerate().map(rule).collect::<Vec<_>>());
    run_all(cases.into_iter().enumerate().map(|(index, (operation, action))| {
        let (bench, key) = (bench.with(policy()), format!("{index}"));
        async move {
            let before = bench.put(&key, 1000).await;
            let mut writer = Writer::new(bench.client.clone(), &key, PutOptions::default()).unwrap();
            let body = pattern(1 << 20, 3);
            let mut failed: Result<()> = Ok(());
            'writing: for _ in 0..12 {
                let mut rest = &body[..];
                while !rest.is_empty() {
                    let count = writer.fill(rest).unwrap();
                    rest = &rest[count..];
                    if !rest.is_empty() {
                        failed = writer.send_part().await;
                        if failed.is_err() {
                            break 'writing;
                        }
                    }
                }
            }
            let error: Error = match failed {
                Err(error) => error,
                Ok(()) => writer.close().await.expect_err("the write cannot have succeeded"),
            };
            assert!(
                matches!(error.kind(), ErrorKind::AccessDenied | ErrorKind::Server),
                "{operation} {action}: {error}"
            );
            assert!(bench.get(&key).await.unwrap() == before, "{operation}");
            assert!(bench.client.uploads(&key).await.unwrap().is_empty(), "{operation}");
        }
    }))
    .await;
    assert!(bench.client.uploads("").await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_listing_recovers_from_temporary_faults() {
    let bench = Bench::new("lists");
    for index in 0..30 {
        bench.put(&format!("k{index:02}"), 10).await;
    }
    for action in [
        json!({"status": 503, "code": "SlowDown"}),
        json!({"cut_body": 0.5}),
        json!({"reset": "before_head"}),
        json!({"delay_first_byte_s": 60}),
        json!({"chunked": true}),
        json!({"chunked": true, "cut_body": 0.5}),
        json!({"no_length": true, "cut_body": 0.5}),
        json!({"error_in_200": "InternalError"}),
    ] {
        bench.faults(&[json!({"operation": "ListObjectsV2", "times": 2, "action": action})]);
        let client = bench.with(policy_for(&action)).client;
        let page = client.list(ListRequest::default()).await.unwrap_or_else(|error| panic!("{action}: {error}"));
        assert_eq!(page.entries.len(), 30, "{action}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_idle_connection_closed_by_the_server_does_not_count_as_an_attempt() {
    let bench = Bench::new("stale");
    let body = bench.put("k", 1000).await;
    for _ in 0..20 {
        assert!(bench.get("k").await.unwrap() == body);
        bench.server.control("POST", "close_idle", &Value::Null);
    }
    // The connection of a chunked listing is returned to the pool.
    bench.faults(&[json!({"operation": "ListObjectsV2", "action": {"chunked": true}})]);
    let before = bench.server.control("GET", "connections", &Value::Null)["total_accepted"].as_u64().unwrap();
    for _ in 0..10 {
        bench.client.list(ListRequest::default()).await.unwrap();
    }
    let after = bench.server.control("GET", "connections", &Value::Null)["total_accepted"].as_u64().unwrap();
    assert!(after - before <= 1, "{before} {after}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_region_and_the_clock_skew_are_detected_from_errors() {
    let server = Server::start("strict", &[]);
    let create = |name: &str, region: &str| {
        server.control("POST", "buckets", &json!({"name": name, "region": region}));
    };
    create("far", "ap-southeast-2");
    let far = server.client("far", server.config(), policy());
    far.put("k", pattern(10, 1).into(), &PutOptions::default()).await.unwrap();
    far.put("large", pattern(7 << 20, 1).into(), &PutOptions::default()).await.unwrap();
    assert_eq!(far.head("k").await.unwrap().size, 10);
    // The first request is one of the SDK.
    create("far-too", "eu-north-1");
    let config = S3Config { force_sdk: true, region: Some("us-west-2".into()), ..server.config() };
    let far = server.client("far-too", config, policy());
    far.put("k", pattern(10, 1).into(), &PutOptions::default()).await.unwrap();
    // A response to HEAD has no body; the region is in its headers.
    create("far-head", "eu-north-1");
    let far = server.client("far-head", server.config(), policy());
    assert_eq!(far.head("k").await.unwrap_err().kind(), ErrorKind::NotFound);
    for offset_s in [7200, -7200] {
        server.control("POST", "clock", &json!({"offset_s": offset_s}));
        let client = server.client("far", server.config(), policy());
        assert_eq!(client.head("k").await.unwrap().size, 10, "{offset_s}");
        let jobs = (0..20).map(|_| client.get(ReadRequest::whole("k")));
        assert!(join_all(jobs).await.iter().all(Result::is_ok), "{offset_s}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_permanent_error_is_not_retried() {
    let bench = Bench::on(Server::shared_strict(), "clear");
    bench.put("k", 1000).await;
    let error =
        bench.server.client("missing-bucket", bench.server.config(), policy()).get(ReadRequest::whole("k")).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoBucket);
    assert!(error.request_id().is_some() && error.to_string().contains("404 NoSuchBucket"), "{error}");
    let error = bench.get("missing").await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::NotFound, 1));
    let anonymous = S3Config { anonymous: true, ..bench.server.config() };
    let error =
        bench.server.client("clear", anonymous.clone(), policy()).get(ReadRequest::whole("k")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
    bench.server.control("POST", "buckets", &json!({"name": "open", "public": true}));
    let owner = bench.server.client("open", bench.server.config(), policy());
    owner.put("k", pattern(10, 1).into(), &PutOptions::default()).await.unwrap();
    bench.server.client("open", anonymous, policy()).get(ReadRequest::whole("k")).await.unwrap();
    bench.server.control("POST", "buckets", &json!({"name": "pays", "requester_pays": true}));
    let pays = bench.server.client("pays", S3Config { requester_pays: true, ..bench.server.config() }, policy());
    pays.put("k", pattern(7 << 20, 1).into(), &PutOptions::default()).await.unwrap();
    let client = bench.server.client("pays", bench.server.config(), policy());
    assert_eq!(client.get(ReadRequest::whole("k")).await.unwrap_err().kind(), ErrorKind::AccessDenied);
}
