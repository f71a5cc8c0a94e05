//! Transfers against a store in memory, with scripted faults.

use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};

use super::journal::Journal;
use super::temporary::Temporary;
use super::*;
use crate::client::Client;
use crate::error::{ErrorKind, Operation};
use crate::faulty_store::{Fault, FaultyStore};
use crate::memory::MemoryStore;
use crate::policy::Policy;
use crate::read::ReadRequest;
use crate::test_folder::TestFolder;
use crate::types::PutOptions;

const SIZE: usize = 20 << 20;

/// Pseudo-random bytes.
fn bytes() -> bytes::Bytes {
    static BYTES: LazyLock<bytes::Bytes> = LazyLock::new(|| {
        let mut bytes = vec![0; SIZE];
        fastrand::Rng::with_seed(1).fill(&mut bytes);
        bytes.into()
    });
    BYTES.clone()
}

/// A client of a store in memory that has `bytes` under the key `k`.
async fn client() -> (Arc<FaultyStore>, Arc<Client>) {
    let faulty = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(format!("files-{}", fastrand::u64(..))))));
    let policy = Policy { part_bytes: 1 << 20, hedge: false, ..Policy::default() };
    let client = Arc::new(Client::new(faulty.clone(), policy));
    client.put("k", bytes().into(), &PutOptions::default()).await.unwrap();
    (faulty, client)
}

fn download() -> Download {
    Download { key: "k".to_owned(), ..Download::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_break_off_are_resumed_and_verified() {
    let (faulty, client) = client().await;
    let folder = TestFolder::new();
    faulty.script(Operation::Get, [Fault::CutBody(300_000), Fault::CutBody(1), Fault::Fail(ErrorKind::Reset)]);
    let done = client.download_one(download(), &folder.0, "f", &Arc::default()).await.unwrap();
    assert_eq!((done.size, faulty.pending()), (SIZE as u64, 0));
    assert_eq!(std::fs::read(folder.0.join("f")).unwrap(), bytes());
    assert_eq!(folder.names(), ["f"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_download_continues_with_the_missing_parts() {
    let (faulty, client) = client().await;
    let folder = TestFolder::new();
    // The store refuses the rest: with one attempt, the download fails and keeps its parts.
    let policy = Policy { max_attempts: 1, max_in_flight: 1, max_in_flight_cap: None, ..client.policy().clone() };
    let once = Arc::new(Client::new(faulty.clone(), policy));
    faulty.script(Operation::Get, std::iter::repeat_n(Fault::Delay(std::time::Duration::ZERO), 7));
    faulty.script(Operation::Get, [Fault::Fail(ErrorKind::Reset)]);
    once.download_one(download(), &folder.0, "f", &Arc::default()).await.unwrap_err();
    assert_eq!(folder.names().len(), 1);
    // Each of the missing parts takes one of these.
    faulty.script(Operation::Get, std::iter::repeat_n(Fault::Delay(std::time::Duration::ZERO), 40));
    let counters = Arc::<Counters>::default();
    once.download_one(download(), &folder.0, "f", &counters).await.unwrap();
    let parts = 40 - faulty.pending();
    assert!((1..SIZE.div_ceil(1 << 20)).contains(&parts), "{parts}");
    assert_eq!(std::fs::read(folder.0.join("f")).unwrap(), bytes());
    assert_eq!(counters.snapshot().bytes_done, SIZE as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_uploaded_in_parts_within_its_memory() {
    let (_, client) = client().await;
    let folder = TestFolder::new();
    let path = folder.0.join("f");
    std::fs::write(&path, bytes()).unwrap();
    let policy = Policy { write_buffer_bytes: 1 << 20, ..client.policy().clone() };
    let client = Arc::new(Client::new(Arc::new(MemoryStore::new("target")), policy));
    let upload = UploadFile { path, key: "new".to_owned(), options: PutOptions::default(), skip_unchanged: false };
    let counters = Arc::<Counters>::default();
    client.upload_one(upload, &counters).await.unwrap();
    assert_eq!(client.get(ReadRequest::whole("new")).await.unwrap().buffer.as_slice(), bytes());
    assert_eq!(counters.snapshot().bytes_done, SIZE as u64);
}

#[tokio::test]
async fn a_size_that_no_disk_holds_is_an_error_before_any_memory_is_taken() {
    let (faulty, client) = client().await;
    let folder = TestFolder::new();
    for (size, kind) in [(1 << 62, ErrorKind::Protocol), (1 << 46, ErrorKind::Io)] {
        faulty.script(Operation::Head, [Fault::WrongSize(size)]);
        let error = client.download_one(download(), &folder.0, "f", &Arc::default()).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(folder.names(), [""; 0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_continues_only_from_the_same_endpoint() {
    let inner = Arc::new(MemoryStore::new("endpoints"));
    let fill = Client::new(inner.clone(), Policy::default());
    Arc::new(fill).put("k", bytes().into(), &PutOptions::default()).await.unwrap();
    let folder = TestFolder::new();
    let policy = Policy {
        part_bytes: 1 << 20,
        hedge: false,
        max_attempts: 1,
        max_in_flight: 1,
        max_in_flight_cap: None,
        ..Policy::default()
    };
    let at = |endpoint| {
        let store = Arc::new(FaultyStore::new(inner.clone()).at(endpoint));
        (store.clone(), Arc::new(Client::new(store, policy.clone())))
    };
    let instantly = || Fault::Delay(std::time::Duration::ZERO);
    let (faulty, first) = at("https://one");
    faulty.script(Operation::Get, std::iter::repeat_n(instantly(), 7).chain([Fault::Fail(ErrorKind::Reset)]));
    first.download_one(download(), &folder.0, "f", &Arc::default()).await.unwrap_err();
    // The same URL and version at another endpoint may be other bytes.
    let (faulty, second) = at("https://two");
    faulty.script(Operation::Get, std::iter::repeat_n(instantly(), 40));
    second.download_one(download(), &folder.0, "f", &Arc::default()).await.unwrap();
    assert_eq!(40 - faulty.pending(), SIZE.div_ceil(1 << 20));
    assert_eq!(std::fs::read(folder.0.join("f")).unwrap(), bytes());
}

#[test]
fn a_temporary_file_that_was_begun_before_its_target_becomes_as_private() {
    use std::os::unix::fs::PermissionsExt;
    let folder = TestFolder::new();
    let mut first = Temporary::open(&descriptor(&folder), "f").unwrap();
    first.keep(true);
    drop(first);
    std::fs::write(folder.0.join("f"), "old").unwrap();
    std::fs::set_permissions(folder.0.join("f"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let second = Temporary::open(&descriptor(&folder), "f").unwrap();
    assert_eq!(second.file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    second.publish("f", None).unwrap();
}

fn descriptor(folder: &TestFolder) -> Arc<OwnedFd> {
    Arc::new(OwnedFd::from(std::fs::File::open(&folder.0).unwrap()))
}

#[test]
fn a_journal_has_the_parts_that_were_recorded_and_only_for_its_object() {
    let folder = TestFolder::new();
    let temporary = Temporary::open(&descriptor(&folder), "f").unwrap();
    let (journal, recorded) = Journal::open(&temporary.file, "object", 10_000, 1000).unwrap();
    assert_eq!((recorded.part_bytes, recorded.parts), (1000, vec![None; 10]));
    journal.record(3, 33).unwrap();
    journal.record(0, 0).unwrap();
    let (_, recorded) = Journal::open(&temporary.file, "object", 10_000, 500).unwrap();
    let mut expected = vec![None; 10];
    (expected[0], expected[3]) = (Some(0), Some(33));
    assert_eq!((recorded.part_bytes, recorded.parts), (1000, expected));
    let (_, recorded) = Journal::open(&temporary.file, "another", 10_000, 1000).unwrap();
    assert_eq!(recorded.parts, vec![None; 10]);
}

#[test]
fn a_temporary_file_that_is_in_use_is_left_alone() {
    let folder = TestFolder::new();
    let first = Temporary::open(&descriptor(&folder), "f").unwrap();
    let second = Temporary::open(&descriptor(&folder), "f").unwrap();
    assert!(first.resumable && !second.resumable);
    assert_eq!(folder.names().len(), 2);
    second.publish("f", None).unwrap();
    drop(first);
    assert_eq!(folder.names(), ["f"]);
}
