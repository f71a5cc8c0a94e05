//! The conformance suite on a folder.

#![expect(clippy::print_stdout, reason = "names the check that fails")]

use std::path::PathBuf;
use std::sync::Arc;

use torchobj_conformance::SUITE;
use torchobj_core::buffer::{Memory, PendingBuffer};
use torchobj_core::client::Client;
use torchobj_core::error::ErrorKind;
use torchobj_core::file_store::FileStore;
use torchobj_core::policy::Policy;
use torchobj_core::read::ReadRequest;
use torchobj_core::store::ObjectStore;
use torchobj_core::types::{Condition, GetRequest, Payload, PutOptions, Upload};

/// A temporary folder.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("torchobj-{}-{name}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn small_parts() -> Policy {
    Policy { part_bytes: 64 << 10, whole_below_bytes: 128 << 10, write_buffer_bytes: 256 << 10, ..Policy::default() }
}

fn payload(text: &str) -> Payload {
    bytes::Bytes::from(text.to_owned()).into()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_passes_the_suite() {
    for (name, check) in SUITE {
        println!("{name}");
        let folder = Folder::new(name);
        check(Arc::new(Client::new(Arc::new(FileStore::new(&folder.0)), small_parts()))).await;
    }
}

#[tokio::test]
async fn an_unfinished_upload_is_not_listed_and_abort_removes_its_files() {
    let folder = Folder::new("half");
    let client = Arc::new(Client::new(Arc::new(FileStore::new(&folder.0)), small_parts()));
    let store = client.store();
    let upload = store.begin_upload("a/k", &Default::default()).await.unwrap();
    assert!(store.list(Default::default()).await.unwrap().entries.is_empty());
    assert_eq!(store.uploads("a/").await.unwrap().len(), 1);
    store.abort(&upload).await.unwrap();
    assert_eq!(std::fs::read_dir(folder.0.join("a")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_truncated_while_it_is_read_is_an_error_after_the_bytes_that_were_read() {
    let folder = Folder::new("shorter");
    let store = FileStore::new(&folder.0);
    store.put("k", &bytes::Bytes::from(vec![7; 6 << 20]).into(), &Default::default()).await.unwrap();
    let mut result = store.open(GetRequest::whole("k")).await.unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(folder.0.join("k")).unwrap();
    file.set_len(1_000_000).unwrap();
    let (_pending, mut dest) = PendingBuffer::new(Memory::allocate(6 << 20).unwrap());
    let error = result.read_into(&mut dest).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
    assert_eq!(dest.filled(), 1_000_000);
}

#[tokio::test]
async fn files_are_read_on_a_single_threaded_runtime() {
    let folder = Folder::new("one-thread");
    let client = Arc::new(Client::new(Arc::new(FileStore::new(&folder.0)), small_parts()));
    let body = bytes::Bytes::from(vec![7; 1 << 20]);
    client.put("k", body.clone().into(), &Default::default()).await.unwrap();
    assert_eq!(client.get(ReadRequest::whole("k")).await.unwrap().buffer.as_slice(), body);
}

#[tokio::test]
async fn deleting_an_object_does_not_remove_its_folder() {
    let folder = Folder::new("folders-stay");
    std::fs::create_dir_all(folder.0.join("of the user/inner")).unwrap();
    let client = Arc::new(Client::new(Arc::new(FileStore::new(&folder.0)), small_parts()));
    client.put("of the user/inner/k", payload("x"), &Default::default()).await.unwrap();
    client.delete(&["of the user/inner/k".to_owned()]).await.unwrap();
    assert_eq!(std::fs::read_dir(folder.0.join("of the user/inner")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_conditional_delete_removes_only_the_expected_version() {
    let folder = Folder::new("delete-if");
    let client = Arc::new(Client::new(Arc::new(FileStore::new(&folder.0)), small_parts()));
    let old = client.put("a/k", payload("one"), &Default::default()).await.unwrap();
    let new = client.put("a/k", payload("two"), &Default::default()).await.unwrap();
    let refused = client.delete_if("a/k", &old).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    assert_eq!(std::fs::read(folder.0.join("a/k")).unwrap(), b"two");
    client.delete_if("a/k", &new).await.unwrap();
    client.delete_if("a/k", &new).await.unwrap();
    client.delete_if("no folder/k", &new).await.unwrap();
    assert!(!folder.0.join("a/k").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_one_of_concurrent_conditional_writes_succeeds() {
    let folder = Folder::new("replace-if");
    let store = Arc::new(FileStore::new(&folder.0));
    let client = Arc::new(Client::new(store.clone(), small_parts()));
    for round in 0..20 {
        let version = client.put("k", payload(&format!("old {round}")), &Default::default()).await.unwrap();
        let options = Arc::new(PutOptions { condition: Condition::Matches(version.clone()), ..Default::default() });
        let puts = (0..4).map(|writer| {
            let (store, options) = (store.clone(), options.clone());
            tokio::spawn(async move { store.put("k", &payload(&format!("new {writer}")), &options).await.is_ok() })
        });
        let delete = {
            let store = store.clone();
            tokio::spawn(async move { store.delete_if("k", &version).await.is_ok() })
        };
        let mut won = usize::from(delete.await.unwrap());
        for put in puts.collect::<Vec<_>>() {
            won += usize::from(put.await.unwrap());
        }
        assert_eq!(won, 1, "round {round}");
    }
}

#[tokio::test]
async fn a_key_file_that_names_a_path_outside_of_its_folder_is_ignored() {
    let folder = Folder::new("notes");
    let root = folder.0.join("root");
    std::fs::create_dir_all(root.join("a")).unwrap();
    for victim in [".torchobj-5", ".torchobj-5.key", "x"] {
        std::fs::write(folder.0.join(victim), "victim").unwrap();
    }
    for key in ["../x", "a/../../x", "/x", "b/x", "a/"] {
        std::fs::write(root.join("a/.torchobj-5.key"), key).unwrap();
        let store = FileStore::new(&root);
        assert!(store.uploads("").await.unwrap().is_empty(), "{key}");
        let upload = |id: &str| Upload::of_other_client(key.into(), id.into(), None);
        let _ = store.abort(&upload("5")).await;
        let _ = store.abort(&Upload { key: "a/x".into(), ..upload("/../../.torchobj-5") }).await;
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 4, "{key}");
    }
}
