//! Faults of servers and networks, injected by the strict server: each results in correct bytes or in an error.
//! These tests need Python: `make rust` runs them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::server::Server;
use serde_json::{Value, json};
use torchobj_conformance::pattern;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, ErrorKind, Result};
use torchobj_core::read::Read;
use torchobj_core::transfer::Policy;
use torchobj_core::types::{Condition, ListRequest, PutOptions};
use torchobj_core::upload::Writer;
use torchobj_store::config::S3Config;

const MIB: u64 = 1 << 20;

/// Short timeouts.
fn policy() -> Policy {
    Policy {
        part_bytes: 5 * MIB,
        whole_below_bytes: 6 * MIB,
        write_buffer_bytes: 10 * MIB,
        max_attempts: 5,
        // Throttled attempts are not counted, so the time is limited too.
        retry_timeout: Duration::from_secs(15),
        first_byte_timeout: Duration::from_millis(300),
        idle_timeout: Duration::from_millis(300),
        ..Policy::default()
    }
}

/// A rule for the first `times` requests of `operation`; `None`: for all.
fn rule(operation: &str, times: Option<u32>, action: &Value) -> Value {
    json!([{"operation": operation, "times": times, "action": action}])
}

struct Bench {
    server: Server,
    client: Arc<Client>,
}

impl Bench {
    fn new(name: &str) -> Self {
        let server = Server::start("strict", &[]);
        let client = server.bucket(name, server.config(), policy());
        Self { server, client }
    }

    fn faults(&self, rules: &Value) {
        self.server.control("POST", "faults", rules);
    }

    fn clear(&self) {
        self.server.control("DELETE", "faults", &Value::Null);
    }

    /// Number of requests of an operation since the last call.
    fn count(&self, operation: &str) -> usize {
        let requests = self.server.control("GET", "requests", &Value::Null);
        self.server.control("DELETE", "requests", &Value::Null);
        requests.as_array().unwrap().iter().filter(|request| request["operation"] == operation).count()
    }

    async fn put(&self, key: &str, length: u64) -> bytes::Bytes {
        let body = pattern(usize::try_from(length).unwrap(), length);
        self.client.put(key, body.clone().into(), &PutOptions::default()).await.unwrap();
        body
    }

    async fn get(&self, key: &str) -> Result<Vec<u8>> {
        Ok(self.client.get(Read::whole(key)).await?.buffer.as_slice().to_vec())
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_read_recovers_from_temporary_faults_and_reports_permanent_ones() {
    let bench = Bench::new("reads");
    let small = bench.put("small", 100_000).await;
    let large = bench.put("large", 12 * MIB + 5).await;
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
        (json!({"delay_first_byte_s": 60}), ErrorKind::Timeout),
        (json!({"stall_body_at": 1000, "stall_s": 60}), ErrorKind::Timeout),
        (json!({"error_in_200": "InternalError"}), ErrorKind::Server),
    ];
    for (action, kind) in actions {
        for (key, body) in [("small", &small), ("large", &large)] {
            let times = if action["status"] == 503 { 3 } else { 2 };
            bench.faults(&rule("GetObject", Some(times), &action));
            let got = bench.get(key).await.unwrap_or_else(|error| panic!("{action}, {times} times, {key}: {error}"));
            assert!(got == **body, "{action}, {times} times, {key}");
        }
        bench.faults(&rule("GetObject", None, &action));
        let started = Instant::now();
        let error = bench.get("small").await.expect_err("a fault that persists");
        // Each attempt receives a part of a truncated body, so the error may be another one in the end.
        let kinds = [kind, ErrorKind::Stale, ErrorKind::Reset];
        assert!(kinds.contains(&error.kind()), "{action} for ever: {error:?}");
        assert!(error.url().ends_with("/small") && error.attempts() >= 5, "{action}: {error}");
        assert!(started.elapsed() < Duration::from_secs(20), "{action}: {:?}", started.elapsed());
        bench.clear();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_unusual_but_valid_response_is_read() {
    let bench = Bench::new("odd");
    let small = bench.put("small", 100_000).await;
    let large = bench.put("large", 12 * MIB + 5).await;
    let actions = [
        json!({"longer_body": 100}),
        json!({"longer_body": 100_000}),
        json!({"chunked": true}),
        json!({"no_length": true}),
        json!({"informational": 100}),
        json!({"informational": 103}),
        json!({"close_after": true}),
        json!({"slow_drip": 400_000}),
    ];
    for action in actions {
        bench.faults(&rule("GetObject", None, &action));
        assert!(bench.get("small").await.unwrap() == small, "{action}");
        assert!(bench.get("small").await.unwrap() == small, "{action}, again");
        if action["slow_drip"].is_null() {
            assert!(bench.get("large").await.unwrap() == large, "{action}");
        }
        bench.clear();
    }
    bench.faults(&rule("GetObject", None, &json!({"ignore_range": true})));
    assert!(bench.get("small").await.unwrap() == small);
    bench.clear();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_incomplete_body_is_resumed_at_its_byte_and_version() {
    let bench = Bench::new("resume");
    let body = bench.put("k", 4 * MIB).await;
    bench.count("GetObject");
    bench.faults(&rule("GetObject", Some(1), &json!({"cut_body": 3_000_000})));
    assert!(bench.get("k").await.unwrap() == body);
    let requests = bench.server.control("GET", "requests", &Value::Null);
    let second = &requests.as_array().unwrap()[1]["headers"];
    assert_eq!(second["range"], format!("bytes=3000000-{}", 4 * MIB - 1));
    assert!(second["if-match"].is_string(), "{second}");
    // The object is replaced during the read, which is an error.
    bench.faults(&rule("GetObject", Some(1), &json!({"stall_body_at": 1_000_000, "stall_s": 60})));
    let (read, _) = tokio::join!(bench.get("k"), async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        bench.put("k", 4 * MIB + 1).await
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
    for action in &actions {
        bench.faults(&rule("PutObject", Some(2), action));
        let body = bench.put("k", 900_000).await;
        bench.clear();
        assert!(bench.get("k").await.unwrap() == body, "{action}");
        for operation in ["UploadPart", "CompleteMultipartUpload"] {
            if operation == "CompleteMultipartUpload" && !action["early_response"].is_null() {
                // hyper reports a response before the end of the request only as a broken connection.
                continue;
            }
            bench.faults(&rule(operation, Some(2), action));
            let body = bench.put("k", 11 * MIB).await;
            bench.clear();
            assert!(bench.get("k").await.unwrap() == body, "{operation} {action}");
        }
    }
    bench.faults(&rule("CompleteMultipartUpload", Some(2), &json!({"error_in_200": "InternalError"})));
    let body = bench.put("k", 11 * MIB).await;
    assert!(bench.get("k").await.unwrap() == body);
    bench.faults(&rule("CreateMultipartUpload", Some(2), &json!({"status": 503, "code": "SlowDown"})));
    bench.put("k", 12 * MIB).await;
    assert!(bench.client.uploads("").await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_conditional_write_whose_response_is_lost_succeeds() {
    let bench = Bench::new("settled");
    let absent = PutOptions { condition: Condition::Absent, ..PutOptions::default() };
    for (length, operation) in [(1000, "PutObject"), (11 * MIB, "CompleteMultipartUpload")] {
        bench.faults(&rule(operation, Some(1), &json!({"lose_response": true})));
        let body = pattern(usize::try_from(length).unwrap(), 7);
        bench.client.put(operation, body.clone().into(), &absent).await.unwrap();
        assert!(bench.get(operation).await.unwrap() == body);
        // The object exists, and was written by another upload.
        bench.faults(&rule(operation, Some(1), &json!({"status": 500})));
        let error = bench.client.put(operation, pattern(1000, 8).into(), &absent).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Precondition, "{error}");
    }
    assert!(bench.client.uploads("").await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_failed_writer_does_not_change_the_object_and_aborts_its_upload() {
    let bench = Bench::new("writers");
    let before = bench.put("k", 1000).await;
    for (operation, action) in [
        ("UploadPart", json!({"status": 403, "code": "AccessDenied"})),
        ("UploadPart", json!({"status": 500})),
        ("CompleteMultipartUpload", json!({"status": 403, "code": "AccessDenied"})),
        ("CompleteMultipartUpload", json!({"error_in_200": "InternalError"})),
        ("CreateMultipartUpload", json!({"status": 403, "code": "AccessDenied"})),
    ] {
        bench.faults(&rule(operation, None, &action));
        let mut writer = Writer::new(bench.client.clone(), "k", PutOptions::default()).unwrap();
        let body = pattern(1 << 20, 3);
        let mut failed: Result<()> = Ok(());
        'writing: for _ in 0..23 {
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
        assert!(matches!(error.kind(), ErrorKind::AccessDenied | ErrorKind::Server), "{operation} {action}: {error}");
        bench.clear();
        assert!(bench.get("k").await.unwrap() == before, "{operation}");
        assert!(bench.client.uploads("").await.unwrap().is_empty(), "{operation}");
    }
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
        bench.faults(&rule("ListObjectsV2", Some(2), &action));
        let page = bench.client.list(ListRequest::default()).await.unwrap_or_else(|error| panic!("{action}: {error}"));
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
    bench.faults(&rule("ListObjectsV2", None, &json!({"chunked": true})));
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
        let jobs = (0..20).map(|_| client.get(Read::whole("k")));
        assert!(futures_util::future::join_all(jobs).await.iter().all(Result::is_ok), "{offset_s}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_permanent_error_is_not_retried() {
    let bench = Bench::new("clear");
    bench.put("k", 1000).await;
    let error = bench.server.client("missing-bucket", bench.server.config(), policy()).get(Read::whole("k")).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoBucket);
    assert!(error.request_id().is_some() && error.to_string().contains("404 NoSuchBucket"), "{error}");
    let error = bench.get("missing").await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::NotFound, 1));
    let anonymous = S3Config { anonymous: true, ..bench.server.config() };
    let error = bench.server.client("clear", anonymous.clone(), policy()).get(Read::whole("k")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
    bench.server.control("POST", "buckets", &json!({"name": "open", "public": true}));
    let owner = bench.server.client("open", bench.server.config(), policy());
    owner.put("k", pattern(10, 1).into(), &PutOptions::default()).await.unwrap();
    bench.server.client("open", anonymous, policy()).get(Read::whole("k")).await.unwrap();
    bench.server.control("POST", "buckets", &json!({"name": "pays", "requester_pays": true}));
    let pays = bench.server.client("pays", S3Config { requester_pays: true, ..bench.server.config() }, policy());
    pays.put("k", pattern(7 << 20, 1).into(), &PutOptions::default()).await.unwrap();
    let client = bench.server.client("pays", bench.server.config(), policy());
    assert_eq!(client.get(Read::whole("k")).await.unwrap_err().kind(), ErrorKind::AccessDenied);
}
