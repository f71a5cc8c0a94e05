//! Lists files, in pages of a walk.

use torchobj_core::error::{Operation, Result};
use torchobj_core::types::{ListPage, ListRequest};

use super::FileStore;
use super::walk::Walk;

/// Maximum number of entries of a page, as on S3.
const PAGE_ENTRIES: usize = 1000;

impl FileStore {
    pub(super) async fn list_page(&self, request: ListRequest<'_>) -> Result<ListPage> {
        let max = request.max_entries.map_or(PAGE_ENTRIES, |max| PAGE_ENTRIES.min(max as usize));
        let (root, walks, saved) = (self.root.clone(), self.walks.clone(), self.walks.take(&request));
        let new = Walk::new(&request);
        let list = move || {
            let mut walk = match saved {
                Some(walk) => walk,
                None => new.start(&root)?,
            };
            let page = walk.page(max)?;
            if page.continuation.is_some() {
                walks.save(walk);
            }
            Ok(page)
        };
        self.blocking(Operation::List, request.prefix, list).await
    }
}

#[cfg(test)]
mod tests {
    use torchobj_core::store::ObjectStore;

    use std::path::PathBuf;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str, files: &[&str]) -> Self {
            let root = std::env::temp_dir().join(format!("torchobj-list-{}-{name}", std::process::id()));
            for file in files {
                let path = root.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, b"x").unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    async fn keys(store: &FileStore, request: ListRequest<'_>) -> (ListPage, Vec<String>) {
        let mut page = store.list(request).await.unwrap();
        let keys = std::mem::take(&mut page.entries).into_iter().map(|entry| entry.key).collect();
        (page, keys)
    }

    #[tokio::test]
    async fn a_folder_is_read_once_for_all_pages() {
        let folder = Folder::new("once", &["a/1", "a/2", "a/3"]);
        let store = FileStore::new(&folder.0);
        let one = |continuation| ListRequest { max_entries: Some(1), continuation, ..ListRequest::default() };
        let (page, first) = keys(&store, one(None)).await;
        // A second read of the folder would list this key, which sorts after the first.
        std::fs::write(folder.0.join("a/15"), b"x").unwrap();
        std::fs::remove_file(folder.0.join("a/2")).unwrap();
        let (_, second) = keys(&store, one(page.continuation.as_deref())).await;
        assert_eq!((first, second), (vec!["a/1".to_owned()], vec!["a/3".to_owned()]));
        // A page that is requested again uses a new walk.
        assert_eq!(keys(&store, one(page.continuation.as_deref())).await.1, ["a/15"]);
    }

    #[tokio::test]
    async fn links_are_followed_except_broken_ones_and_cycles() {
        let folder = Folder::new("links", &["a/b/1", "c/2"]);
        let link = |to: &str, from: &str| std::os::unix::fs::symlink(to, folder.0.join(from)).unwrap();
        link("..", "a/up");
        link(".", "a/b/here");
        link("nowhere", "a/broken");
        link("circle", "a/circle");
        link("../c", "a/other");
        link("1", "a/b/file");
        let (_, keys) = keys(&FileStore::new(&folder.0), ListRequest::default()).await;
        assert_eq!(keys, ["a/b/1", "a/b/file", "a/other/2", "c/2"]);
    }

    #[tokio::test]
    async fn pages_of_several_walks_equal_those_of_one_walk() {
        let folder = Folder::new("anew", &["a-1", "a/1", "a/2", "a/x/1", "a/x/2", "b/1", "b/2", "c"]);
        for delimiter in [None, Some("/"), Some("x/"), Some("1")] {
            for prefix in ["", "a", "a/"] {
                let mut listed = Vec::new();
                for reuse_walk in [true, false] {
                    let (mut all, mut continuation) = (Vec::new(), None::<String>);
                    let mut store = FileStore::new(&folder.0);
                    loop {
                        let continued = continuation.as_deref();
                        let request = ListRequest {
                            prefix,
                            delimiter,
                            max_entries: Some(1),
                            continuation: continued,
                            ..Default::default()
                        };
                        let (page, keys) = keys(&store, request).await;
                        all.extend(keys.into_iter().chain(page.prefixes));
                        continuation = page.continuation;
                        if continuation.is_none() {
                            break;
                        }
                        if !reuse_walk {
                            store = FileStore::new(&folder.0);
                        }
                    }
                    listed.push(all);
                }
                assert_eq!(listed[0], listed[1], "{prefix:?} {delimiter:?}");
            }
        }
    }
}
