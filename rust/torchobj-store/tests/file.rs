//! The conformance suite on a folder.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]
#![expect(clippy::print_stdout, reason = "says which check fails")]

use std::path::PathBuf;
use std::sync::Arc;

use torchobj_core::client::Client;
use torchobj_core::conformance::SUITE;
use torchobj_core::transfer::Policy;
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
