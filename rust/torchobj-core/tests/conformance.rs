//! The conformance suite on the store in memory, with and without scripted faults of all operations.

#![expect(clippy::print_stdout, reason = "prints the name of the running check")]

#[expect(dead_code, reason = "unit tests use more of it")]
#[path = "support/faulty_store.rs"]
mod faulty_store;

use std::sync::Arc;
use std::time::Duration;

use torchobj_conformance::SUITE;
use torchobj_core::cache::{CacheConfig, CachedStore, DiskCache};
use torchobj_core::client::Client;
use torchobj_core::error::{ErrorKind, Operation};
use torchobj_core::id::unique_id;
use torchobj_core::memory::MemoryStore;
use torchobj_core::policy::Policy;
use torchobj_core::prefix::PrefixStore;
use torchobj_core::store::ObjectStore;
use torchobj_core::types::{Payload, PutOptions};

use self::faulty_store::{Fault, FaultyStore};

/// Small parts, so that the large objects of the suite have a few hundred kilobytes.
fn policy() -> Policy {
    Policy { part_bytes: 64 << 10, whole_below_bytes: 128 << 10, write_buffer_bytes: 256 << 10, ..Policy::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_store_passes_the_suite() {
    for (name, check) in SUITE {
        println!("{name}");
        check(Arc::new(Client::new(Arc::new(MemoryStore::new(*name)), policy()))).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_a_prefix_passes_the_suite() {
    for (name, check) in SUITE {
        println!("{name}");
        let memory = Arc::new(MemoryStore::new(*name));
        for key in ["prefix", "prefix/", "a", "prefixed"] {
            memory.put(key, &Payload::default(), &PutOptions::default()).await.unwrap();
        }
        check(Arc::new(Client::new(Arc::new(PrefixStore::new(memory, "prefix/")), policy()))).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_with_a_disk_cache_passes_the_suite() {
    let folder = std::env::temp_dir().join(format!("torchobj-cache-{}", unique_id()));
    let config = CacheConfig {
        folder: folder.clone(),
        max_bytes: 1 << 30,
        min_free_bytes: 0,
        max_object_bytes: 64 << 20,
        ttl: Duration::from_secs(86_400),
        admit: true,
    };
    let cache = Arc::new(DiskCache::open(config).unwrap().unwrap());
    // Twice: the second store reads what the first has written, if its versions are the same.
    for (name, check) in SUITE.iter().chain(SUITE) {
        println!("{name}");
        let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(*name))));
        let cached = Arc::new(CachedStore::new(store, cache.clone()));
        check(Arc::new(Client::new(Arc::new(PrefixStore::new(cached, "prefix/")), policy()))).await;
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_with_occasional_faults_passes_the_suite() {
    let faults = [
        Fault::Fail(ErrorKind::Server),
        Fault::LoseResponse,
        Fault::Fail(ErrorKind::Stale),
        Fault::Delay(Duration::from_millis(5)),
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
        if [
            "a_get_has_the_attributes_and_the_checksum_of_the_object",
            "a_wrong_part_is_refused_at_the_commit",
            "an_aborted_upload_accepts_no_parts",
        ]
        .contains(name)
        {
            // These checks call the store directly, without retries.
            continue;
        }
        println!("{name}");
        let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(*name))));
        for operation in operations {
            store.script(operation, faults);
        }
        // No lost responses: an upload whose id is lost cannot be distinguished from one of another writer, so it would
        // stay in the bucket.
        store.script(Operation::BeginUpload, [Fault::Fail(ErrorKind::Server), Fault::Fail(ErrorKind::Reset)]);
        store.script(Operation::Get, [Fault::CutBody(5), Fault::WrongRange]);
        check(Arc::new(Client::new(store, policy()))).await;
    }
}
