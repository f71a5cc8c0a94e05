//! The conformance suite on servers of Google Cloud Storage. These tests need Python and the servers: `make rust` runs them.

#![expect(clippy::print_stdout, reason = "names the check that fails")]

use crate::server::Server;
use torchobj_conformance::SUITE;
use torchobj_core::policy::Policy;
use torchobj_store::config::{GcsConfig, ParallelUpload};

/// What fake-gcs-server 1.56 does not implement.
const FAKE_GCS_SERVER_GAPS: [&str; 3] = [
    // The Content-Range of an empty object is malformed.
    "head_and_tail_have_size_and_version",
    // A response to a read has no storage class.
    "a_get_has_the_attributes_and_the_checksum_of_the_object",
    // A compose ignores ifGenerationMatch.
    "a_commit_if_absent_never_replaces",
];

fn policy() -> Policy {
    Policy { part_bytes: 1 << 20, whole_below_bytes: 2 << 20, write_buffer_bytes: 2 << 20, ..Policy::default() }
}

async fn run(server: &Server, config: &GcsConfig, prefix: &str, except: &[&str]) {
    let mut failed = Vec::new();
    for (index, (name, check)) in SUITE.iter().enumerate() {
        if except.contains(name) {
            continue;
        }
        let client = server.gcs_bucket(&format!("{prefix}-{index}"), config.clone(), policy());
        if let Err(panic) = tokio::spawn(check(client)).await {
            println!("{name}: {panic}");
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_strict_server_passes_the_whole_suite() {
    let server = Server::shared_strict_gcs();
    run(&server, &server.gcs_config(), "json", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_strict_server_passes_the_suite_with_resumable_uploads() {
    let server = Server::shared_strict_gcs();
    let config = GcsConfig { parallel_upload: ParallelUpload::Off, ..server.gcs_config() };
    run(&server, &config, "resumable", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_strict_server_passes_the_suite_through_the_sdk() {
    let server = Server::shared_strict_gcs();
    // The client does not return Cache-Control with a read.
    let except = ["a_get_has_the_attributes_and_the_checksum_of_the_object"];
    run(&server, &GcsConfig { force_sdk: true, ..server.gcs_config() }, "sdk", &except).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python and fake-gcs-server: make rust"]
async fn fake_gcs_server_passes_the_suite() {
    let server = Server::start("fake-gcs-server", &[]);
    for (prefix, force_sdk) in [("json", false), ("sdk", true)] {
        let config = GcsConfig { parallel_upload: ParallelUpload::On, force_sdk, ..server.gcs_config() };
        let mut except = FAKE_GCS_SERVER_GAPS.to_vec();
        if force_sdk {
            // The client sends the content type in the metadata only, where the server ignores it.
            except.extend(["attributes_are_stored", "a_copy_has_the_same_bytes_and_attributes"]);
        }
        run(&server, &config, prefix, &except).await;
    }
}
