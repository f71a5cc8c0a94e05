//! The conformance suite on S3 servers. These tests need Python and the servers: `make rust` runs them.

#![expect(clippy::print_stdout, reason = "names the check that fails")]

use std::sync::Arc;

use crate::server::Server;
use torchobj_conformance::SUITE;
use torchobj_core::client::Client;
use torchobj_core::policy::Policy;
use torchobj_store::config::{Addressing, Checksum, S3Config};

/// Small parts of reads. Those of writes have the minimum size of S3.
fn policy() -> Policy {
    Policy { part_bytes: 1 << 20, whole_below_bytes: 2 << 20, write_buffer_bytes: 10 << 20, ..Policy::default() }
}

async fn run(server: &Server, config: &S3Config, prefix: &str, except: &[&str]) {
    let mut failed = Vec::new();
    for (index, (name, check)) in SUITE.iter().enumerate() {
        if except.contains(name) {
            continue;
        }
        let client: Arc<Client> = server.bucket(&format!("{prefix}-{index}"), config.clone(), policy());
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
    let server = Server::shared_strict();
    for (prefix, checksum) in [("nvme", Checksum::Crc64Nvme), ("c", Checksum::Crc32C), ("off", Checksum::Off)] {
        run(&server, &S3Config { checksum, ..server.config() }, prefix, &[]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_strict_server_passes_the_suite_through_the_sdk() {
    let server = Server::shared_strict();
    run(&server, &S3Config { force_sdk: true, ..server.config() }, "sdk", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python: make rust"]
async fn the_strict_server_passes_the_suite_over_tls_and_with_virtual_addressing() {
    let server = Server::start("strict", &["--tls"]);
    let mut config = server.config();
    config.http.ca_bundle = Some(server.text("ca_file").into());
    run(&server, &config, "tls", &[]).await;
    let server = Server::shared_strict();
    let port = server.text("endpoint").rsplit_once(':').unwrap().1.to_owned();
    let endpoint_url = Some(format!("http://s3.localhost:{port}"));
    let config = S3Config { endpoint_url, addressing: Addressing::Virtual, ..server.config() };
    run(&server, &config, "host", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python and versitygw: make rust"]
async fn versitygw_passes_the_suite() {
    let server = Server::start("versitygw", &[]);
    run(&server, &S3Config { keys_are_paths: true, ..server.config() }, "gw", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Python and moto: make rust"]
async fn moto_passes_the_suite() {
    let server = Server::start("moto", &[]);
    // moto 5.2 responds to a part of an aborted upload with a traceback, and closes the connection. It holds no lock from the
    // check of a condition to the write.
    let except = ["an_aborted_upload_accepts_no_parts", "one_of_two_conditional_writers_succeeds"];
    run(&server, &server.config(), "moto", &except).await;
}
