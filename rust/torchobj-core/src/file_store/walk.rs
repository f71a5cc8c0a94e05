//! Walks folders: depth first, in key order. A walk is saved between two pages, so that each folder is read once.

use std::collections::VecDeque;
use std::fs::{DirEntry, FileType};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::files::temporary::PREFIX;
use crate::types::{ListEntry, ListPage, ListRequest};
use rustix::io::Errno;

use super::disk::{listed_size, modified_ms, version};

/// Maximum number of saved walks. A listing whose walk was dropped walks again from the root, up to its position.
const MAX_SAVED_WALKS: usize = 4;

/// Walks of listings that have not ended, the least recently used first.
#[derive(Debug, Default)]
pub(super) struct Walks(Mutex<VecDeque<Walk>>);

impl Walks {
    pub(super) fn take(&self, request: &ListRequest<'_>) -> Option<Walk> {
        let mut walks = self.0.lock().expect("no holder of this lock panics");
        let at = walks.iter().position(|walk| walk.continues_with(request))?;
        walks.remove(at)
    }

    pub(super) fn save(&self, walk: Walk) {
        let mut walks = self.0.lock().expect("no holder of this lock panics");
        if walks.len() == MAX_SAVED_WALKS {
            walks.pop_front();
        }
        walks.push_back(walk);
    }
}

/// A listing and its position.
#[derive(Debug)]
pub(super) struct Walk {
    prefix: String,
    delimiter: Option<String>,
    /// Keys and common prefixes up to this are skipped.
    after: Option<String>,
    /// The last key or common prefix that was listed.
    last: Option<String>,
    /// The open folders, from the root to the current one.
    open: Vec<Level>,
}

/// An open folder.
#[derive(Debug)]
struct Level {
    path: PathBuf,
    /// Prefix of its keys.
    base: String,
    /// Remaining names, sorted.
    names: std::vec::IntoIter<String>,
}

impl Level {
    fn read(path: &Path, base: String, above: &[Self]) -> io::Result<Self> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            // Keys are UTF-8.
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with(PREFIX) {
                continue;
            }
            let Some(kind) = kind(&entry, path, above)? else { continue };
            if kind.is_dir() {
                // With the slash, the name of a folder sorts like its keys.
                names.push(format!("{name}/"));
            } else if kind.is_file() {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(Self { path: path.to_owned(), base, names: names.into_iter() })
    }
}

/// Returns the type of an entry, or of the target of a link; `None` for a link to an open folder, which would be listed
/// without end.
fn kind(entry: &DirEntry, folder: &Path, above: &[Level]) -> io::Result<Option<FileType>> {
    let kind = entry.file_type()?;
    if !kind.is_symlink() {
        return Ok(Some(kind));
    }
    let Some(target) = unless_unreadable(std::fs::metadata(entry.path()))? else { return Ok(None) };
    let is_target = |path: &Path| {
        std::fs::metadata(path).is_ok_and(|other| (other.dev(), other.ino()) == (target.dev(), target.ino()))
    };
    let is_cycle = target.is_dir() && (is_target(folder) || above.iter().any(|level| is_target(&level.path)));
    Ok((!is_cycle).then(|| target.file_type()))
}

/// Returns `None` for a file or folder that was deleted during the listing, that cannot be read, or whose link is part of a
/// cycle: the listing skips it.
fn unless_unreadable<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            log::warn!("a file or folder is missing in a listing, it cannot be read: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl Walk {
    pub(super) fn new(request: &ListRequest<'_>) -> Self {
        Self {
            prefix: request.prefix.to_owned(),
            delimiter: request.delimiter.map(str::to_owned),
            after: request.continuation.or(request.start_after).map(str::to_owned),
            last: None,
            open: Vec::new(),
        }
    }

    pub(super) fn start(mut self, root: &Path) -> io::Result<Self> {
        match Level::read(root, String::new(), &[]) {
            Ok(level) => self.open.push(level),
            // A root that does not exist is an empty store if its parent exists: the first write makes it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && root.parent().is_some_and(Path::is_dir) => {}
            Err(error) => return Err(error),
        }
        Ok(self)
    }

    fn continues_with(&self, request: &ListRequest<'_>) -> bool {
        request.continuation.is_some_and(|at| self.last.as_deref() == Some(at))
            && self.prefix == request.prefix
            && self.delimiter.as_deref() == request.delimiter
    }

    pub(super) fn page(&mut self, max: usize) -> io::Result<ListPage> {
        let mut page = ListPage::default();
        while let Some(level) = self.open.last() {
            let Some(name) = level.names.as_slice().first() else {
                self.open.pop();
                continue;
            };
            let (path, key) = (level.path.join(name), format!("{}{name}", level.base));
            let full = page.entries.len() + page.prefixes.len() == max;
            if key.ends_with('/') {
                self.advance();
                self.enter(&path, key)?;
            } else if !self.contains(&key) {
                self.advance();
            } else if full {
                page.continuation = self.last.clone();
                break;
            } else {
                self.advance();
                self.list(&path, key, &mut page)?;
            }
        }
        Ok(page)
    }

    fn advance(&mut self) {
        self.open.last_mut().and_then(|level| level.names.next());
    }

    /// Opens a folder if it can contain keys of the listing.
    fn enter(&mut self, path: &Path, base: String) -> io::Result<()> {
        let below_prefix = base.starts_with(&self.prefix) || self.prefix.starts_with(&base);
        // Every key of this folder sorts before `after`.
        let is_before = self.after.as_deref().is_some_and(|after| after > base.as_str() && !after.starts_with(&base));
        if !below_prefix || is_before || self.is_listed(self.common_prefix(&base)) {
            return Ok(());
        }
        if let Some(level) = unless_unreadable(Level::read(path, base, &self.open))? {
            self.open.push(level);
        }
        Ok(())
    }

    /// The common prefix that a listing with a delimiter contains instead of `key`.
    fn common_prefix<'a>(&self, key: &'a str) -> Option<&'a str> {
        let rest = key.strip_prefix(&self.prefix)?;
        let delimiter = self.delimiter.as_deref()?;
        Some(&key[..self.prefix.len() + rest.find(delimiter)? + delimiter.len()])
    }

    /// Returns whether a common prefix was listed already.
    fn is_listed(&self, prefix: Option<&str>) -> bool {
        prefix.is_some_and(|prefix| {
            self.last.as_deref() == Some(prefix) || self.after.as_deref().is_some_and(|after| after.starts_with(prefix))
        })
    }

    /// Returns whether the listing contains `key` after its position.
    fn contains(&self, key: &str) -> bool {
        key.starts_with(&self.prefix)
            && self.after.as_deref().is_none_or(|after| key > after)
            && !self.is_listed(self.common_prefix(key))
    }

    fn list(&mut self, path: &Path, key: String, page: &mut ListPage) -> io::Result<()> {
        if let Some(prefix) = self.common_prefix(&key) {
            let prefix = prefix.to_owned();
            page.prefixes.push(prefix.clone());
            self.last = Some(prefix);
            return Ok(());
        }
        let Some(metadata) = unless_unreadable(std::fs::metadata(path))?.filter(std::fs::Metadata::is_file) else {
            return Ok(());
        };
        let size = listed_size(path, &metadata);
        self.last = Some(key.clone());
        page.entries.push(ListEntry {
            key,
            size,
            version: size.map(|_| version(&metadata)),
            modified_ms: Some(modified_ms(&metadata)),
            storage_class: None,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::store::ObjectStore;

    use std::path::PathBuf;

    use super::super::FileStore;
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
