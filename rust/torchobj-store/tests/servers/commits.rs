//! Commits of multipart uploads whose response is slow, incomplete, an error after white space, or missing. `torchobj-core`
//! tests the timeouts in paused time. These tests need Python: `make rust` runs them.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use crate::server::{Server, run_all};
use serde_json::{Value, json};
use torchobj_conformance::pattern;
use torchobj_core::client::Client;
use torchobj_core::error::ErrorKind;
use torchobj_core::policy::Policy;
use torchobj_core::read::ReadRequest;
use torchobj_core::types::PutOptions;
use torchobj_store::config::S3Config;

const COMMIT: &str = "CompleteMultipartUpload";
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

/// A write whose first `times` commits have a fault; `None`: all.
struct Case {
    /// Prefix `test/` of the keys of a test.
    key: &'static str,
    times: Option<u32>,
    action: Value,
    expected: Expected,
}

#[derive(Clone, Copy)]
enum Expected {
    /// The object is written, with this number of commits.
    Written(usize),
    Error(ErrorKind, &'static str),
}

/// The writes of all tests: their faults are given to one server at once.
fn cases() -> Vec<Case> {
    let case = |key, times: Option<u32>, expected, action| Case { key, times, action, expected };
    let (once, twice) = (Expected::Written(1), Expected::Written(2));
    let timeout = Expected::Error(ErrorKind::Timeout, "no result within commit_timeout_s=3");
    let unknown = |kind| Expected::Error(kind, "it is not known whether the object was written");
    vec![
        case("no response/k", Some(1), twice, json!({"delay_first_byte_s": 3600, "status": 500})),
        case("white space/k", Some(1), once, json!({"white_space_s": 1.2 * IDLE_TIMEOUT.as_secs_f64()})),
        case("no result/error", Some(1), twice, json!({"white_space_s": 0.2, "error_in_200": "InternalError"})),
        case("no result/cut", Some(1), twice, json!({"white_space_s": 0.2, "cut_body": 0.5})),
        // The server stops sending within the white space.
        case("no result/silent", Some(1), twice, json!({"white_space_s": 0.2, "stall_body_at": 1, "stall_s": 3600})),
        case("endless/k", None, timeout, json!({"white_space_s": 3600, "status": 500})),
        // The server has committed the upload and still sends white space: the object exists.
        case("endless/committed", Some(3), once, json!({"white_space_s": 3600})),
        // After several lost responses the last error is a reset; after one, that the upload does not exist.
        case("unknown/all", None, unknown(ErrorKind::Reset), json!({"lose_response": true})),
        case("unknown/first", Some(1), unknown(ErrorKind::UploadGone), json!({"lose_response": true})),
    ]
}

/// The server of these tests. Keys begin with the name of the client.
fn server() -> Arc<Server> {
    static SERVER: LazyLock<Arc<Server>> = LazyLock::new(|| {
        let server = Server::start("strict", &[]);
        let mut rules = vec![json!({"operation": "HeadObject", "key": "/unknown/", "action": {"status": 403}})];
        for Case { key, times, action, .. } in cases() {
            for client in ["ours", "sdk"] {
                let key = format!("^{client}/{key}$");
                rules.push(json!({"operation": COMMIT, "key": key, "times": times, "action": action}));
            }
        }
        server.control("POST", "faults", &json!(rules));
        server.control("POST", "buckets", &json!({"name": "commits"}));
        Arc::new(server)
    });
    SERVER.clone()
}

/// Makes the writes of `test` with our own connections and with the SDK, all concurrently. Returns one of the clients.
async fn check(test: &str, commit_timeout_s: u64) -> Arc<Client> {
    let server = server();
    let ours = server.client("commits", server.config(), policy(commit_timeout_s));
    let sdk = S3Config { force_sdk: true, ..server.config() };
    let sdk = server.client("commits", sdk, policy(commit_timeout_s));
    let cases: Vec<Case> = cases().into_iter().filter(|case| case.key.starts_with(&format!("{test}/"))).collect();
    let clients = [("ours", ours.clone()), ("sdk", sdk)];
    let writes = clients.iter().flat_map(|(name, client)| {
        let server = &server;
        cases
            .iter()
            .map(move |case| write(server.clone(), client.clone(), format!("{name}/{}", case.key), case.expected))
    });
    run_all(writes.collect::<Vec<_>>()).await;
    ours
}

async fn write(server: Arc<Server>, client: Arc<Client>, key: String, expected: Expected) {
    let (body, options) = (pattern(BODY_BYTES, 1), PutOptions::default());
    let put = client.put(&key, body.clone().into(), &options);
    let put = tokio::time::timeout(LONG, put).await.unwrap_or_else(|_| panic!("{key}: timed out"));
    match expected {
        Expected::Written(expected) => {
            put.unwrap_or_else(|error| panic!("{key}: {error}"));
            let requests = server.control("GET", "requests", &Value::Null);
            let commit = |request: &&Value| request["operation"] == COMMIT && request["key"] == *key;
            assert_eq!(requests.as_array().unwrap().iter().filter(commit).count(), expected, "{key}");
            assert!(client.get(ReadRequest::whole(&key)).await.unwrap().buffer.as_slice() == body, "{key}");
        }
        Expected::Error(kind, message) => {
            let error = put.expect_err("the commit cannot have succeeded");
            assert_eq!(error.kind(), kind, "{key}: {error}");
            let error = error.to_string();
            assert!(error.starts_with("commit s3://") && error.contains(message), "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_commit_without_a_response_is_retried_after_the_idle_timeout() {
    let client = check("no response", 100).await;
    for prefix in ["ours/no response/", "sdk/no response/"] {
        assert!(client.uploads(prefix).await.unwrap().is_empty(), "{prefix}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn white_space_prevents_the_idle_timeout_of_a_commit() {
    check("white space", 100).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn white_space_without_a_result_is_a_failed_attempt() {
    check("no result", 100).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_commit_timeout_limits_endless_white_space() {
    check("endless", 3).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_failed_check_after_a_lost_response_does_not_replace_the_error() {
    check("unknown", 100).await;
}
