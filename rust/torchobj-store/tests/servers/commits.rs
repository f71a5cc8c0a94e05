//! Commits of multipart uploads whose response is slow, incomplete, an error after white space, or missing. `torchobj-core`
//! tests the timeouts in paused time. These tests need Python: `make rust` runs them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::server::Server;
use serde_json::{Value, json};
use torchobj_conformance::pattern;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, ErrorKind};
use torchobj_core::read::Read;
use torchobj_core::transfer::Policy;
use torchobj_core::types::PutOptions;
use torchobj_store::config::S3Config;

const BODY_BYTES: usize = 6 << 20;
/// Longer than a commit takes on a busy machine, because the tests assert exact numbers of commits.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit of a write on a busy machine.
const LONG: Duration = Duration::from_secs(120);

fn policy(commit_timeout_s: u64) -> Policy {
    Policy {
        part_bytes: 5 << 20,
        whole_below_bytes: 5 << 20,
        max_attempts: 3,
        first_byte_timeout: IDLE_TIMEOUT,
        idle_timeout: IDLE_TIMEOUT,
        commit_timeout: Duration::from_secs(commit_timeout_s),
        ..Policy::default()
    }
}

struct Bench {
    server: Server,
    /// One with our own connections, and one with the SDK.
    clients: [Arc<Client>; 2],
}

impl Bench {
    fn new(name: &str, commit_timeout_s: u64) -> Self {
        let server = Server::start("strict", &[]);
        let ours = server.bucket(name, server.config(), policy(commit_timeout_s));
        let sdk = S3Config { force_sdk: true, ..server.config() };
        let sdk = server.client(name, sdk, policy(commit_timeout_s));
        Self { server, clients: [ours, sdk] }
    }

    fn faults(&self, rules: &Value) {
        self.server.control("POST", "faults", rules);
        self.server.control("DELETE", "requests", &Value::Null);
    }

    fn commits(&self) -> usize {
        let requests = self.server.control("GET", "requests", &Value::Null);
        let commit = |request: &&Value| request["operation"] == "CompleteMultipartUpload";
        requests.as_array().unwrap().iter().filter(commit).count()
    }

    /// Writes an object in parts, with `action` on the first `times` commits, and reads it. Returns the number of commits.
    async fn written(&self, client: &Arc<Client>, action: &Value, times: u32) -> usize {
        self.faults(&json!([{"operation": "CompleteMultipartUpload", "times": times, "action": action}]));
        let body = pattern(BODY_BYTES, u64::from(times));
        let options = PutOptions::default();
        let put = client.put("k", body.clone().into(), &options);
        let put = tokio::time::timeout(LONG, put).await.unwrap_or_else(|_| panic!("{action}: timed out"));
        put.unwrap_or_else(|error| panic!("{action}: {error}"));
        let commits = self.commits();
        assert!(client.get(Read::whole("k")).await.unwrap().buffer.as_slice() == body, "{action}");
        commits
    }

    /// Returns the error of a write in parts.
    async fn write_error(&self, client: &Arc<Client>, rules: &Value) -> Error {
        self.faults(rules);
        let started = Instant::now();
        let options = PutOptions::default();
        let put = client.put("k", pattern(BODY_BYTES, 1).into(), &options);
        let put = tokio::time::timeout(LONG, put).await.unwrap_or_else(|_| panic!("{rules}: timed out"));
        let error = put.expect_err("the commit cannot have succeeded");
        assert!(error.to_string().starts_with("commit s3://"), "{error} after {:?}", started.elapsed());
        error
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_commit_without_a_response_is_retried_after_the_idle_timeout() {
    let bench = Bench::new("silent", 100);
    for client in &bench.clients {
        assert_eq!(bench.written(client, &json!({"delay_first_byte_s": 3600, "status": 500}), 1).await, 2);
    }
    assert!(bench.clients[0].uploads("").await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn white_space_prevents_the_idle_timeout_of_a_commit() {
    let bench = Bench::new("spaces", 100);
    for client in &bench.clients {
        let white_space_s = 1.2 * IDLE_TIMEOUT.as_secs_f64();
        assert_eq!(bench.written(client, &json!({"white_space_s": white_space_s}), 1).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn white_space_without_a_result_is_a_failed_attempt() {
    let bench = Bench::new("broken", 100);
    for client in &bench.clients {
        let error = json!({"white_space_s": 0.2, "error_in_200": "InternalError"});
        assert_eq!(bench.written(client, &error, 1).await, 2);
        assert_eq!(bench.written(client, &json!({"white_space_s": 0.2, "cut_body": 0.5}), 1).await, 2);
        // The server stops sending within the white space.
        let silent = json!({"white_space_s": 0.2, "stall_body_at": 1, "stall_s": 3600});
        assert_eq!(bench.written(client, &silent, 1).await, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_commit_timeout_limits_endless_white_space() {
    let bench = Bench::new("endless", 3);
    for client in &bench.clients {
        let endless =
            json!([{"operation": "CompleteMultipartUpload", "action": {"white_space_s": 3600, "status": 500}}]);
        let error = bench.write_error(client, &endless).await;
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("no result within commit_timeout_s=3"), "{error}");
        // The server has committed the upload and still sends white space: the object exists.
        assert_eq!(bench.written(client, &json!({"white_space_s": 3600}), 3).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_failed_check_after_a_lost_response_does_not_replace_the_error() {
    let bench = Bench::new("lost", 100);
    for client in &bench.clients {
        // After several lost responses the last error is a reset; after one, that the upload does not exist.
        for (times, kind) in [(None, ErrorKind::Reset), (Some(1), ErrorKind::UploadGone)] {
            let rules = json!([
                {"operation": "CompleteMultipartUpload", "times": times, "action": {"lose_response": true}},
                {"operation": "HeadObject", "action": {"status": 403}},
            ]);
            let error = bench.write_error(client, &rules).await;
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains("it is not known whether the object was written"), "{error}");
        }
    }
}
