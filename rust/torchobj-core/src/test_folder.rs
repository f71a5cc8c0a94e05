//! Folders for tests.

use std::path::PathBuf;

/// An empty folder that is deleted when it is dropped.
pub(crate) struct TestFolder(pub(crate) PathBuf);

impl TestFolder {
    pub(crate) fn new() -> Self {
        let path = std::env::temp_dir().join(format!("torchobj-test-{:032x}", fastrand::u128(..)));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            self.0.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}
