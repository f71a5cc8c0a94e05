//! The suite on the store in memory, and on one whose every operation fails now and then.

#![expect(clippy::print_stdout, reason = "says which check fails")]

use std::sync::Arc;
use std::time::Duration;

use torchobj_core::client::Client;
use torchobj_core::conformance::SUITE;
use torchobj_core::error::{ErrorKind, Operation};
use torchobj_core::memory::MemoryStore;
use torchobj_core::transfer::Policy;
use torchobj_core::wrap::{Fault, FaultyStore};

/// Small parts: large objects of a test are a few hundred kilobytes.
fn policy() -> Policy {
    Policy { part_bytes: 64 << 10, whole_below_bytes: 128 << 10, write_buffer_bytes: 256 << 10, ..Policy::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_passes_the_suite() {
    for (name, check) in SUITE {
        println!("{name}");
        check(Arc::new(Client::new(Arc::new(MemoryStore::new(*name)), policy()))).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_now_and_then_passes_the_suite() {
    let faults = [
        Fault::Fail(ErrorKind::Server),
        Fault::LoseAnswer,
        Fault::Fail(ErrorKind::Stale),
        Fault::Late(Duration::from_millis(5)),
    ];
    let operations = [
        Operation::Get,
        Operation::Head,
        Operation::List,
        Operation::Put,
        Operation::PutPart,
        Operation::Commit,
        Operation::Copy,
        Operation::Delete,
    ];
    for (name, check) in SUITE {
        if ["a_wrong_part_is_refused_at_the_commit", "an_upload_that_ended_takes_no_parts"].contains(name) {
            // Speaks to the store itself, where nothing retries.
            continue;
        }
        println!("{name}");
        let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(*name))));
        for operation in operations {
            store.script(operation, faults);
        }
        // An upload whose id was lost cannot be told from another writer's, and stays until it is swept.
        store.script(Operation::BeginUpload, [Fault::Fail(ErrorKind::Server), Fault::Fail(ErrorKind::Reset)]);
        store.script(Operation::Get, [Fault::CutBody(5), Fault::WrongRange]);
        check(Arc::new(Client::new(store, policy()))).await;
    }
}
