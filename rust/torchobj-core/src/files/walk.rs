//! Finds the files below a folder that a filter selects. Symbolic links are followed, except into a folder that contains the
//! link. What the filter does not select is not opened, and no failure.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::local::{error_of, url_of};
use super::temporary::PREFIX;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::list::Filter;

/// A file below a folder.
#[derive(Debug)]
pub(super) struct Found {
    /// Its path relative to the folder.
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) size: u64,
}

/// A name in a folder.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    name: String,
    path: PathBuf,
    /// Whether it is a regular file, and not a folder or a link to one.
    is_file: bool,
}

/// A folder that is being walked.
struct Level {
    entries: std::vec::IntoIter<Entry>,
    /// Device and inode.
    id: (u64, u64),
    /// Path relative to the root, with a trailing slash.
    prefix: String,
}

/// The files below a folder, in the order of their names within each folder. What cannot be read is an error with its
/// relative path, and the walk goes on.
pub(super) struct Walk<'a> {
    levels: Vec<Level>,
    root: &'a Path,
    filter: &'a Filter,
}

impl<'a> Walk<'a> {
    pub(super) fn new(root: &'a Path, filter: &'a Filter) -> Self {
        Self { levels: Vec::new(), root, filter }
    }

    /// Whether the filter selects a path, or may select a path below it if it is a folder.
    fn concerns(&self, name: &str, may_be_folder: bool) -> bool {
        self.filter.selects_name(name) || (may_be_folder && self.filter.selects_below(&format!("{name}/")))
    }

    fn enter(&mut self, path: &Path, prefix: String) -> io::Result<Vec<(String, Error)>> {
        let metadata = fs::metadata(path)?;
        let id = (metadata.dev(), metadata.ino());
        if self.levels.iter().any(|level| level.id == id) {
            log::warn!("{} is a symbolic link to a folder that contains it: skipped", path.display());
            return Ok(Vec::new());
        }
        let (mut entries, mut refused) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let (path, is_file) = (entry.path(), entry.file_type().is_ok_and(|kind| kind.is_file()));
            match entry.file_name().into_string() {
                // Temporary files of downloads and of file:// stores.
                Ok(name) if name.starts_with(PREFIX) => {}
                Ok(name) => entries.push(Entry { name, path, is_file }),
                Err(name) => {
                    let name = format!("{prefix}{}", name.to_string_lossy());
                    if self.concerns(&name, !is_file) {
                        let message = "the name is not UTF-8";
                        refused.push((name, Error::new(ErrorKind::InvalidKey, Operation::Put, url_of(&path), message)));
                    }
                }
            }
        }
        entries.sort_unstable();
        self.levels.push(Level { entries: entries.into_iter(), id, prefix });
        Ok(refused)
    }

    /// Calls `each` with every file, or with the relative path and the error of what cannot be read. Ends early if it
    /// returns false.
    pub(super) fn run(mut self, mut each: impl FnMut(Result<Found, (String, Error)>) -> bool) -> Result<()> {
        let root = self.root;
        let refused = self.enter(root, String::new()).map_err(|error| error_of(Operation::List, root, error))?;
        if !refused.into_iter().all(|refused| each(Err(refused))) {
            return Ok(());
        }
        while let Some(level) = self.levels.last_mut() {
            let Some(Entry { name, path, is_file }) = level.entries.next() else {
                self.levels.pop();
                continue;
            };
            let name = format!("{}{name}", level.prefix);
            let more = match fs::metadata(&path) {
                // A link that leads nowhere is no folder.
                Err(error) if !self.concerns(&name, !is_file && !leads_nowhere(&error)) => true,
                Err(error) => each(Err((name, error_of(Operation::Get, &path, error)))),
                Ok(metadata) if metadata.is_dir() => {
                    let folder = format!("{name}/");
                    match self.filter.selects_below(&folder).then(|| self.enter(&path, folder)) {
                        None => true,
                        Some(Ok(refused)) => refused.into_iter().all(|refused| each(Err(refused))),
                        Some(Err(error)) => each(Err((name, error_of(Operation::List, &path, error)))),
                    }
                }
                Ok(_) if !self.filter.selects_name(&name) => true,
                Ok(metadata) if metadata.is_file() => each(Ok(Found { name, path, size: metadata.len() })),
                Ok(_) => {
                    log::warn!("{} is not a regular file: skipped", path.display());
                    true
                }
            };
            if !more {
                break;
            }
        }
        Ok(())
    }
}

fn leads_nowhere(error: &io::Error) -> bool {
    let kinds = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory, io::ErrorKind::InvalidFilename];
    kinds.contains(&error.kind()) || error.raw_os_error() == Some(Errno::LOOP.raw_os_error())
}
