//! Uploads to Google Cloud Storage in parts: any number of parts, lost responses, restricted buckets, concurrent writers.
//! These tests need Python: `make rust` runs them.

use std::sync::Arc;
use std::time::Duration;

use crate::server::{Server, run_all};
use serde_json::{Value, json};
use torchobj_conformance::pattern;
use torchobj_core::client::Client;
use torchobj_core::error::{Error, ErrorKind, Result};
use torchobj_core::files::{Counters, UploadFile};
use torchobj_core::policy::Policy;
use torchobj_core::read::ReadRequest;
use torchobj_core::types::{Condition, PutOptions, Upload, Version};
use torchobj_core::upload::Writer;
use torchobj_store::config::{GcsConfig, ParallelUpload};

const KIB: usize = 1 << 10;

fn policy(part_bytes: usize) -> Policy {
    Policy {
        part_bytes: part_bytes as u64,
        whole_below_bytes: part_bytes as u64,
        write_buffer_bytes: 64 * part_bytes as u64,
        max_attempts: 5,
        retry_timeout: Duration::from_secs(60),
        ..Policy::default()
    }
}

#[derive(Clone)]
struct Bench {
    server: Arc<Server>,
    bucket: &'static str,
    client: Arc<Client>,
}

impl Bench {
    /// A new bucket on a server of its own.
    fn new(policy: Policy) -> Self {
        let server = Arc::new(Server::start("strict-gcs", &[]));
        let config = server.gcs_config();
        Self::on(server, "bucket", &json!({}), config, policy)
    }

    fn on(server: Arc<Server>, bucket: &'static str, flags: &Value, config: GcsConfig, policy: Policy) -> Self {
        let client = server.gcs_bucket(bucket, config, policy);
        let mut flags = flags.clone();
        flags["name"] = bucket.into();
        server.control("POST", "buckets", &flags);
        Self { server, bucket, client }
    }

    fn faults(&self, rules: &Value) {
        self.server.control("POST", "faults", rules);
    }

    /// Sets the counts of `operations` to zero.
    fn count(&self, operations: &[&str]) {
        // A rule counts the requests that it matches; this action is not a rule.
        let rule = |operation| json!({"operation": operation, "action": {"chunked": false}});
        self.faults(&operations.iter().map(rule).collect());
    }

    /// The number of requests of each operation of `count` since then.
    fn counts(&self) -> Vec<u64> {
        let rules = self.server.control("GET", "faults", &Value::Null);
        rules.as_array().unwrap().iter().map(|rule| rule["matched"].as_u64().unwrap()).collect()
    }

    /// The bucket, as the server reports it.
    fn report(&self) -> Value {
        let buckets = self.server.control("GET", "buckets", &Value::Null);
        buckets.as_array().unwrap().iter().find(|bucket| bucket["name"] == self.bucket).unwrap().clone()
    }

    /// Number of objects in the bucket, those of uploads included.
    fn objects(&self) -> u64 {
        self.report()["objects"].as_u64().unwrap()
    }

    /// Writes `parts` parts of `part_bytes`.
    async fn upload(&self, key: &str, parts: usize, part_bytes: usize, options: PutOptions) -> Result<Version> {
        let body = pattern(parts * part_bytes, parts as u64);
        let mut writer = Writer::new(self.client.clone(), key, options).unwrap();
        for part in body.chunks(part_bytes) {
            assert_eq!(writer.fill(part).unwrap(), part.len());
            writer.send_part().await?;
        }
        writer.close().await
    }

    async fn get(&self, key: &str) -> Result<Vec<u8>> {
        Ok(self.client.get(ReadRequest::whole(key)).await?.buffer.as_slice().to_vec())
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_object_of_any_number_of_parts_is_complete_and_no_part_is_left() {
    let bench = Bench::new(policy(KIB));
    for (index, parts) in [1, 31, 32, 33, 1024, 1025, 1090].into_iter().enumerate() {
        let key = format!("parts-{parts}");
        bench.count(&["InsertObject", "ComposeObject", "DeleteObject"]);
        // The CRC32C of the composed object is compared with that of the parts.
        bench.upload(&key, parts, KIB, PutOptions::default()).await.unwrap();
        let counts = bench.counts();
        assert!(bench.get(&key).await.unwrap() == pattern(parts * KIB, parts as u64), "{parts}");
        let composed = |objects: usize| if objects > 32 { objects / 32 + usize::from(objects % 32 > 1) } else { 0 };
        let (groups, supergroups) = (composed(parts), composed(parts.div_ceil(32)));
        let expected = [parts, groups + supergroups + 1, parts + groups + supergroups].map(|count| count as u64);
        assert_eq!(counts, expected, "{parts}");
        assert_eq!(bench.objects(), index as u64 + 1, "{parts}");
    }
    assert_eq!(bench.client.uploads("").await.unwrap(), Vec::<Upload>::new());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_bucket_with_versioning_keeps_no_generation_of_a_part() {
    let server = Arc::new(Server::start("strict-gcs", &[]));
    let config = server.gcs_config();
    let bench = Bench::on(server, "versioned", &json!({"versioning": true}), config, policy(KIB));
    bench.upload("k", 70, KIB, PutOptions::default()).await.unwrap();
    let lost = json!([{"operation": "InsertObject", "times": 3, "action": {"lose_response": true}}]);
    bench.faults(&lost);
    bench.upload("l", 40, KIB, PutOptions::default()).await.unwrap();
    let store = bench.client.store();
    let aborted = store.begin_upload("m", &PutOptions::default()).await.unwrap();
    store.put_part(&aborted, 1, 0, &pattern(KIB, 1).into()).await.unwrap();
    store.abort(&aborted).await.unwrap();
    let bucket = bench.report();
    assert_eq!((bucket["objects"].as_u64(), bucket["noncurrent"].as_u64()), (Some(2), Some(0)));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn groups_of_parts_are_composed_while_later_parts_are_sent() {
    let bench = Bench::new(policy(KIB));
    bench.upload("k", 200, KIB, PutOptions::default()).await.unwrap();
    let requests = bench.server.control("GET", "requests", &Value::Null);
    let requests = requests.as_array().unwrap();
    let first = requests.iter().position(|request| request["operation"] == "ComposeObject").unwrap();
    let last = requests.iter().rposition(|request| request["operation"] == "InsertObject").unwrap();
    assert!(first < last, "{first} {last}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn lost_responses_are_settled_by_the_nonce_and_no_part_is_left() {
    let bench = Bench::new(policy(KIB));
    let lost = |operation: &str, times: u32| json!({"operation": operation, "times": times, "action": {"lose_response": true}});
    bench.faults(&json!([lost("ComposeObject", 2), lost("InsertObject", 3), lost("DeleteObject", 3)]));
    for condition in [Condition::Always, Condition::Absent] {
        let key = format!("{condition:?}");
        let options = PutOptions { condition, ..PutOptions::default() };
        bench.upload(&key, 40, KIB, options).await.unwrap();
        assert!(bench.get(&key).await.unwrap() == pattern(40 * KIB, 40));
        bench.faults(
            &json!([{"operation": "ComposeObject", "key": key, "times": 2, "action": {"lose_response": true}}]),
        );
    }
    // The response to a delete was lost: its object was deleted.
    assert_eq!(bench.objects(), 2);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_object_with_another_checksum_is_deleted_and_the_error_says_so() {
    let bench = Bench::new(policy(KIB));
    bench.faults(&json!([{"operation": "ComposeObject", "action": {"wrong_checksum": true}}]));
    let error = bench.upload("k", 3, KIB, PutOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Integrity, "{error}");
    assert_eq!(bench.client.head("k").await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(bench.objects(), 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn what_the_response_to_a_write_omits_is_requested_and_what_it_denies_is_an_error() {
    let server = Arc::new(Server::start("strict-gcs", &[]));
    for parallel_upload in [ParallelUpload::On, ParallelUpload::Off] {
        let config = GcsConfig { parallel_upload, ..server.gcs_config() };
        let bucket = if parallel_upload == ParallelUpload::On { "parts" } else { "resumable" };
        let bench = Bench::on(server.clone(), bucket, &json!({}), config, policy(256 * KIB));
        let old = bench.upload("old", 2, 256 * KIB, PutOptions::default()).await.unwrap();
        // The parts are multiples of 256 KiB, so the last request of a resumable upload has no bytes.
        let last = if parallel_upload == ParallelUpload::On { "ComposeObject" } else { "ResumableStatus" };
        for (operation, parts) in [("InsertObject", 0), (last, 2)] {
            let write = async |key: &str, body: &str| {
                let action = json!({"replace_body": body});
                bench.faults(&json!([{"operation": operation, "key": format!("^{key}$"), "action": action}]));
                if parts > 0 {
                    return bench.upload(key, parts, 256 * KIB, PutOptions::default()).await;
                }
                bench.client.put(key, pattern(100, 1).into(), &PutOptions::default()).await
            };
            // Each omits something of the right response.
            for (index, body) in ["{}", r#"{"name":"KEY"}"#, r#"{"name":"KEY","size":"SIZE"}"#].into_iter().enumerate()
            {
                let (key, size) = (format!("{operation}-{index}"), if parts > 0 { 512 * KIB } else { 100 });
                let body = body.replace("KEY", &key).replace("SIZE", &size.to_string());
                let version = write(&key, &body).await.unwrap();
                assert_eq!(bench.client.head(&key).await.unwrap().version, Some(version), "{operation} {body}");
            }
            let bodies = [
                r#"{"name":"other","size":"100","generation":"1"}"#,
                r#"{"name":"old","size":"7"}"#,
                r#"{"name":"old","crc32c":"AAAAAA=="}"#,
            ];
            for body in bodies {
                let error = write("old", body).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Integrity, "{operation} {body}: {error}");
            }
            // An old generation. The server makes the object nevertheless, which is found.
            let body = format!(r#"{{"name":"old","generation":"{}"}}"#, old.as_str());
            let version = write("old", &body).await.unwrap();
            assert_eq!(bench.client.head("old").await.unwrap().version, Some(version), "{operation}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_object_that_the_compose_has_not_made_is_an_error_and_the_old_object_remains() {
    let bench = Bench::new(policy(KIB));
    let old = bench.upload("k", 2, KIB, PutOptions::default()).await.unwrap();
    for body in [json!({"name": "k", "generation": old.as_str()}), json!({"generation": old.as_str()}), json!({})] {
        // The server responds, but does not compose.
        let action = json!({"status": 200, "body": body.to_string()});
        bench.faults(&json!([{"operation": "ComposeObject", "action": action}]));
        let error = bench.upload("k", 3, KIB, PutOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Integrity, "{body}: {error}");
        assert!(bench.get("k").await.unwrap() == pattern(2 * KIB, 2), "{body}");
        assert_eq!(bench.objects(), 1, "{body}: the parts are deleted");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn buckets_that_restrict_parts_get_resumable_uploads() {
    let server = Arc::new(Server::start("strict-gcs", &[]));
    let bench_of =
        |bucket, flags: &Value| Bench::on(server.clone(), bucket, flags, server.gcs_config(), policy(300 * KIB));
    for (bucket, flags) in [
        ("class", json!({"storage_class": "NEARLINE"})),
        ("retention", json!({"retention_s": 3600})),
        ("hold", json!({"default_event_based_hold": true})),
        ("no-delete", json!({"denied": ["storage.objects.delete"]})),
        ("no-settings", json!({"denied": ["storage.buckets.get"]})),
    ] {
        let bench = bench_of(bucket, &flags);
        bench.count(&["StartResumable", "InsertObject"]);
        bench.upload("k", 3, 300 * KIB, PutOptions::default()).await.unwrap();
        assert_eq!(bench.counts(), [1, 0], "{flags}");
        assert!(bench.get("k").await.unwrap() == pattern(900 * KIB, 3), "{flags}");
    }
    // The settings of the bucket are known to be fine, but not the class of this object.
    let bench = bench_of("any", &json!({}));
    bench.count(&["StartResumable"]);
    let mut options = PutOptions::default();
    options.attributes.storage_class = Some("COLDLINE".into());
    bench.upload("k", 3, 300 * KIB, options).await.unwrap();
    assert_eq!(bench.counts(), [1]);
    assert_eq!(bench.client.head("k").await.unwrap().attributes.storage_class.as_deref(), Some("COLDLINE"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn a_resumable_upload_recovers_from_faults_and_ends_with_a_typed_error_if_its_session_is_gone() {
    let part = 700 * KIB;
    let server = Arc::new(Server::start("strict-gcs", &[]));
    let serial = GcsConfig { parallel_upload: ParallelUpload::Off, ..server.gcs_config() };
    let bench = Bench::on(server, "bucket", &json!({}), serial, policy(part));
    let actions = [
        json!({"persist_bytes": 256 * KIB}),
        json!({"persist_bytes": 0}),
        json!({"lose_response": true}),
        json!({"status": 503}),
        json!({"reset": "before_head"}),
        json!({"reset": "after_request"}),
        json!({"no_answer": true}),
    ];
    let cases = (0..actions.len()).flat_map(|index| [0, 1, 4, 5].map(|skip| (index, skip))).collect::<Vec<_>>();
    let rule = |(index, skip): &(usize, u32)| {
        let key = format!("^{index}-{skip}$");
        json!({"operation": "ResumableChunk", "key": key, "skip": skip, "times": 1, "action": actions[*index]})
    };
    let gone = |key: &str, skip: u32, times: u32| json!({"operation": "ResumableChunk", "key": key, "skip": skip, "times": times, "action": {"status": 410}});
    // Each of these is the first fault of one upload; the second upload of a key has none.
    let lost = [("^memory$", 2), ("^file$", 2), ("^last$", 4)].map(|(key, skip)| gone(key, skip, 1));
    let twice = gone("^twice$", 0, 2);
    bench.faults(&cases.iter().map(rule).chain([gone("^gone$", 2, 1), twice]).chain(lost).collect());
    let body = pattern(5 * part, 5);
    run_all(cases.into_iter().map(|(index, skip)| {
        let (bench, body, action) = (bench.clone(), body.clone(), actions[index].clone());
        async move {
            let key = format!("{index}-{skip}");
            let version = bench.upload(&key, 5, part, PutOptions::default()).await;
            let version = version.unwrap_or_else(|error| panic!("{action} {skip}: {error}"));
            assert!(bench.get(&key).await.unwrap() == body, "{action} {skip}");
            assert_eq!(bench.client.head(&key).await.unwrap().version, Some(version), "{action} {skip}");
        }
    }))
    .await;
    let error: Error = bench.upload("gone", 5, part, PutOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UploadGone, "{error}");
    assert!(!error.to_string().contains("upload_id"), "{error}");
    assert_eq!(bench.client.head("gone").await.unwrap_err().kind(), ErrorKind::NotFound);
    // An upload from memory or from a file begins again, once.
    for key in ["memory", "last"] {
        bench.client.put(key, body.clone().into(), &PutOptions::default()).await.unwrap();
        assert!(bench.get(key).await.unwrap() == body, "{key}");
    }
    let path = std::env::temp_dir().join(format!("torchobj-gone-{}", std::process::id()));
    std::fs::write(&path, &body).unwrap();
    let options = PutOptions::default();
    let file = UploadFile { path: path.clone(), key: "file".into(), options, skip_unchanged: false };
    bench.client.upload_one(file, &Arc::new(Counters::default())).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(bench.get("file").await.unwrap() == body);
    let twice = bench.client.put("twice", body.clone().into(), &PutOptions::default()).await.unwrap_err();
    assert_eq!(twice.kind(), ErrorKind::UploadGone, "{twice}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn one_of_two_writers_of_an_object_succeeds() {
    let server = Server::shared_strict_gcs();
    for (bucket, parallel_upload) in [("writers-on", ParallelUpload::On), ("writers-off", ParallelUpload::Off)] {
        let config = GcsConfig { parallel_upload, ..server.gcs_config() };
        let bench = Bench::on(server.clone(), bucket, &json!({}), config, policy(300 * KIB));
        for round in 0..5 {
            let key = format!("k{round}");
            let options = || PutOptions { condition: Condition::Absent, ..PutOptions::default() };
            let (one, two) =
                tokio::join!(bench.upload(&key, 3, 300 * KIB, options()), bench.upload(&key, 4, 300 * KIB, options()));
            let (parts, lost) = match (one, two) {
                (Ok(_), Err(lost)) => (3, lost),
                (Err(lost), Ok(_)) => (4, lost),
                other => panic!("{other:?}"),
            };
            assert_eq!(lost.kind(), ErrorKind::Precondition, "{lost}");
            assert!(bench.get(&key).await.unwrap() == pattern(parts * 300 * KIB, parts as u64));
        }
        assert_eq!(bench.objects(), 5, "no part is left");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn an_upload_of_another_process_is_found_and_aborted_and_other_objects_are_kept() {
    let server = Server::shared_strict_gcs();
    let config = server.gcs_config();
    let bench = Bench::on(server, "other-process", &json!({}), config, policy(KIB));
    let store = bench.client.store();
    let one = store.begin_upload("a/one", &PutOptions::default()).await.unwrap();
    let two = store.begin_upload("b/two", &PutOptions::default()).await.unwrap();
    for upload in [&one, &two] {
        for number in 1..=40 {
            store.put_part(upload, number, 0, &pattern(KIB, 1).into()).await.unwrap();
        }
    }
    // Another process knows only what is in the bucket.
    let other = bench.server.gcs_client("other-process", bench.server.gcs_config(), policy(KIB));
    let found = other.uploads("a/").await.unwrap();
    assert_eq!(found.iter().map(|upload| (&upload.key, &upload.id)).collect::<Vec<_>>(), [(&one.key, &one.id)]);
    assert!(found[0].begun_ms.is_some_and(|begun| begun > 1_700_000_000_000));
    // An id with another key is not that upload.
    other.abort(&Upload::of_other_client("c".into(), one.id.clone(), None)).await.unwrap();
    other.abort(&Upload::of_other_client("c".into(), "../..".into(), None)).await.unwrap();
    assert_eq!(other.uploads("").await.unwrap().len(), 2);
    other.abort(&found[0]).await.unwrap();
    assert_eq!(other.uploads("").await.unwrap().iter().map(|upload| &upload.id).collect::<Vec<_>>(), [&two.id]);
    other.abort(&two).await.unwrap();
    assert_eq!(bench.objects(), 0);
}
