//! Opens the folders of a tree, component by component, without following symbolic links. Creates missing ones, and makes the
//! names in them durable.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
use rustix::io::Errno;

use super::local::error_of;
use super::temporary::PREFIX;
use crate::error::{Operation, Result};
use crate::types::KeyRules;

/// Folders that are kept open. A listing is sorted, so that the files of a folder follow each other.
const KEPT_OPEN: usize = 64;

/// A folder that files are downloaded to.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    root: Arc<OwnedFd>,
    /// Folders below it, by their relative paths.
    open: Mutex<HashMap<String, Arc<OwnedFd>>>,
    /// Relative paths of the folders with new names; the folder itself is an empty one.
    changed: Mutex<HashSet<String>>,
}

impl Folder {
    /// Opens a folder. Its own path may contain symbolic links.
    ///
    /// # Errors
    /// `NotFound`, `AccessDenied`, or `InvalidKey` if it is a file.
    pub fn open(path: &Path) -> Result<Self> {
        let root = openat(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let root = root.map_err(|error| error_of(Operation::Put, path, error.into()))?;
        Ok(Self { path: path.to_owned(), root: Arc::new(root), open: Mutex::default(), changed: Mutex::default() })
    }

    /// The path of a file in it, for messages.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Whether a relative path is that of a temporary file, or below a folder with such a name.
    pub(super) fn is_temporary(name: &str) -> bool {
        name.split('/').any(|component| component.starts_with(PREFIX))
    }

    /// Returns why a file below the folder cannot have this relative path; `None` if it can.
    pub(super) fn refusal(name: &str) -> Option<&'static str> {
        if Self::is_temporary(name) {
            return Some("names that begin with `.torchobj-` are those of temporary files");
        }
        KeyRules::Path.refusal(name)
    }

    /// Records that a file below the folder has got its name.
    pub(super) fn published(&self, name: &str) {
        self.has_changed(name.rsplit_once('/').map_or("", |(folder, _)| folder));
    }

    fn has_changed(&self, folder: &str) {
        let mut changed = self.changed.lock().expect("no holder of this lock panics");
        if !changed.contains(folder) {
            changed.insert(folder.to_owned());
        }
    }

    /// Makes the names of new files and folders durable.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn sync(&self) -> Result<()> {
        let changed = std::mem::take(&mut *self.changed.lock().expect("no holder of this lock panics"));
        for folder in changed {
            // The path of a file in it, without the name of the file.
            let path = if folder.is_empty() { String::new() } else { format!("{folder}/") };
            let synced = self.parent_of(&path).and_then(|(opened, _)| sync_folder(&opened));
            synced.map_err(|error| error_of(Operation::Put, &self.path.join(&folder), error))?;
        }
        Ok(())
    }

    /// Opens the folder of the file with the relative path `name`, and creates it if it does not exist. Returns it with
    /// the name of the file in it.
    ///
    /// # Errors
    /// `NotADirectory` if a component is a file or a symbolic link.
    pub(super) fn parent_of<'n>(&self, name: &'n str) -> io::Result<(Arc<OwnedFd>, &'n str)> {
        let Some((folder, file)) = name.rsplit_once('/') else { return Ok((self.root.clone(), name)) };
        if let Some(open) = self.open.lock().expect("no holder of this lock panics").get(folder) {
            return Ok((open.clone(), file));
        }
        let (mut at, mut above) = (self.root.clone(), 0);
        for component in folder.split('/') {
            let (opened, is_new) = open_or_create(&at, component)?;
            if is_new {
                self.has_changed(folder[..above].trim_end_matches('/'));
            }
            (at, above) = (Arc::new(opened), above + component.len() + 1);
        }
        let mut open = self.open.lock().expect("no holder of this lock panics");
        if open.len() >= KEPT_OPEN {
            open.clear();
        }
        open.insert(folder.to_owned(), at.clone());
        Ok((at, file))
    }
}

/// Returns the folder `name` in `parent`, and whether it was created.
fn open_or_create(parent: &OwnedFd, name: &str) -> io::Result<(OwnedFd, bool)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || openat(parent, name, flags, Mode::empty());
    let (opened, is_new) = match open() {
        Err(Errno::NOENT) => {
            match mkdirat(parent, name, Mode::from_raw_mode(0o777)) {
                // Another task has created it.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            (open(), true)
        }
        opened => (opened, false),
    };
    match opened {
        // A symbolic link, on systems that do not report it as `NOTDIR`.
        Err(Errno::LOOP | Errno::MLINK) => Err(Errno::NOTDIR.into()),
        opened => Ok((opened?, is_new)),
    }
}

/// Makes the names in a folder durable, if its file system can.
pub(crate) fn sync_folder(folder: impl AsFd) -> io::Result<()> {
    let folder = File::from(folder.as_fd().try_clone_to_owned()?);
    match folder.sync_all() {
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::INVAL | Errno::NOTSUP)) => Ok(()),
        synced => synced,
    }
}
