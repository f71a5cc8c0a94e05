//! The conformance suite on a folder.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]
#![expect(clippy::print_stdout, reason = "says which check fails")]

use std::path::PathBuf;
use std::sync::Arc;

use torchobj_core::buffer::{Landing, Memory};
use torchobj_core::client::Client;
use torchobj_core::conformance::SUITE;
use torchobj_core::error::ErrorKind;
use torchobj_core::read::Read;
use torchobj_core::store::ObjectStore;
use torchobj_core::transfer::Policy;
use torchobj_core::types::GetRequest;
use torchobj_store::file::FileStore;

/// A folder that is gone with the test.
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

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_passes_the_suite() {
    for (name, check) in SUITE {
        println!("{name}");
        let folder = Folder::new(name);
        check(Arc::new(Client::new(Arc::new(FileStore::new(&folder.0)), small_parts()))).await;
    }
}

#[tokio::test]
async fn nothing_half_written_is_listed_or_stays() {
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
async fn a_file_that_becomes_shorter_while_it_is_read_has_changed_and_fills_no_more_than_was_read() {
    let folder = Folder::new("shorter");
    let store = FileStore::new(&folder.0);
    store.put("k", &bytes::Bytes::from(vec![7; 6 << 20]).into(), &Default::default()).await.unwrap();
    let mut opened = store.open(GetRequest { key: "k", range: None, version: None }).await.unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(folder.0.join("k")).unwrap();
    file.set_len(1_000_000).unwrap();
    let (_landing, mut dest) = Landing::new(Memory::allocate(6 << 20).unwrap());
    let error = opened.read_into(&mut dest).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
    assert_eq!(dest.filled(), 1_000_000);
}

#[tokio::test]
async fn a_runtime_of_one_thread_reads_files_too() {
    let folder = Folder::new("one-thread");
    let client = Arc::new(Client::new(Arc::new(FileStore::new(&folder.0)), small_parts()));
    let body = bytes::Bytes::from(vec![7; 1 << 20]);
    client.put("k", body.clone().into(), &Default::default()).await.unwrap();
    assert_eq!(client.get(Read::whole("k")).await.unwrap().buffer.as_slice(), body);
}
