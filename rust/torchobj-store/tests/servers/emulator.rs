//! The conformance suite on a server of any kind, for `tests/store/test_emulators.py`, which lists what each emulator lacks.

#![expect(clippy::print_stdout, reason = "the results are read from there")]

use std::env;
use std::time::{Duration, Instant};

use crate::server::Server;
use tokio::time::timeout;
use torchobj_conformance::SUITE;
use torchobj_core::policy::Policy;
use torchobj_store::config::{Checksum, S3Config};

/// No check takes longer, not even on an emulator that answers each of its requests with an error that is retried.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs the suite on the server of the kind `TORCHOBJ_SERVER`. Each word of `TORCHOBJ_SERVER_SETTINGS` changes the default
/// configuration. Prints the result of each check.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the name of a server: make matrix"]
async fn the_suite_runs_on_the_named_server() {
    let kind = env::var("TORCHOBJ_SERVER").expect("TORCHOBJ_SERVER is set");
    let settings = env::var("TORCHOBJ_SERVER_SETTINGS").unwrap_or_default();
    let is_set = |setting| settings.split_whitespace().any(|word| word == setting);
    let server = Server::start(&kind, &[]);
    let policy = Policy {
        part_bytes: 1 << 20,
        whole_below_bytes: 2 << 20,
        write_buffer_bytes: 10 << 20,
        // Some accept few connections.
        max_in_flight: 8,
        max_in_flight_cap: None,
        max_attempts: 3,
        ..Policy::default()
    };
    println!("{kind}:");
    for (index, (name, check)) in SUITE.iter().enumerate() {
        let bucket = format!("suite-{index}");
        let client = if is_set("gcs") {
            server.gcs_bucket(&bucket, server.gcs_config(), policy.clone())
        } else {
            let checksum = if is_set("checksum=none") { Checksum::Off } else { Checksum::Auto };
            let conditional_writes = is_set("conditional_writes=False").then_some(false);
            let keys_are_paths = is_set("key_rules=path");
            let config = S3Config { checksum, conditional_writes, keys_are_paths, ..server.config() };
            server.bucket(&bucket, config, policy.clone())
        };
        let begun = Instant::now();
        let mut task = tokio::spawn(check(client));
        let result = match timeout(LIMIT, &mut task).await {
            Ok(Ok(())) => "passed",
            Ok(Err(_)) => "failed",
            Err(_) => "timed-out",
        };
        task.abort();
        println!("{result} {name} {:.1} s", begun.elapsed().as_secs_f64());
    }
}
