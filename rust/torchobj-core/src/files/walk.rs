//! Finds the files below a folder. Symbolic links are followed, except into a folder that contains the link.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::local::error_of;
use super::temporary::PREFIX;
use crate::error::{Error, ErrorKind, Operation, Result};

/// A file below a folder.
#[derive(Debug)]
pub(super) struct Found {
    /// Its path relative to the folder.
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) size: u64,
}

/// A folder that is being walked.
struct Level {
    entries: std::vec::IntoIter<(String, PathBuf)>,
    /// Device and inode.
    id: (u64, u64),
    /// Path relative to the root, with a trailing slash.
    prefix: String,
}

/// The files below a folder, in the order of their names within each folder. What cannot be read is an error with its
/// relative path, and the walk goes on.
pub(super) struct Walk {
    levels: Vec<Level>,
    root: Option<PathBuf>,
}

impl Walk {
    pub(super) fn new(root: &Path) -> Self {
        Self { levels: Vec::new(), root: Some(root.to_owned()) }
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
            match entry.file_name().into_string() {
                // Temporary files of downloads and of file:// stores.
                Ok(name) if name.starts_with(PREFIX) => {}
                Ok(name) => entries.push((name, entry.path())),
                Err(name) => {
                    let url = super::local::url_of(&entry.path());
                    let error = Error::new(ErrorKind::InvalidKey, Operation::Put, url, "the name is not UTF-8");
                    refused.push((format!("{prefix}{}", name.to_string_lossy()), error));
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
        let root = self.root.take().expect("a walk runs once");
        let refused = self.enter(&root, String::new()).map_err(|error| error_of(Operation::Put, &root, error))?;
        if !refused.into_iter().all(|refused| each(Err(refused))) {
            return Ok(());
        }
        while let Some(level) = self.levels.last_mut() {
            let Some((name, path)) = level.entries.next() else {
                self.levels.pop();
                continue;
            };
            let name = format!("{}{name}", level.prefix);
            let failed = |error| (name.clone(), error_of(Operation::Put, &path, error));
            let more = match fs::metadata(&path) {
                Err(error) => each(Err(failed(error))),
                Ok(metadata) if metadata.is_dir() => match self.enter(&path, format!("{name}/")) {
                    Ok(refused) => refused.into_iter().all(|refused| each(Err(refused))),
                    Err(error) => each(Err(failed(error))),
                },
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
