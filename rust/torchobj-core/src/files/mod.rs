//! Transfers of whole files and folders: an object to a file, a file to an object, and trees of them.
//!
//! `download` receives the parts of an object into a [`FileSink`](sink::FileSink) each, which write to one `temporary`
//! file beside the target. Its `journal` records the parts that are complete, so that a process that was killed continues
//! with the missing ones. Only a complete file is renamed to its name. `folder` opens the folders of a tree one by one and
//! follows no symbolic link. `upload` reads the parts of a `source` file into recycled memory within a budget. `same`
//! compares a file with an object, for transfers that skip unchanged files. `special` files are written in order and never
//! replaced; `pseudo` files have no size before they are read. `tree` runs many of these transfers from a
//! listing or from a `walk` of a folder; `counters` shows their progress. `mtime` is the format of times in metadata, and
//! `local` converts errors of the file system.
//!
//! Files are read and written on the threads of the runtime, which meanwhile moves its other tasks to another thread.

mod counters;
mod download;
pub(crate) mod folder;
mod journal;
pub(crate) mod local;
mod mtime;
pub(crate) mod pseudo;
mod same;
mod sink;
mod source;
pub mod special;
pub(crate) mod temporary;
#[cfg(test)]
mod tests;
mod tree;
mod upload;
mod walk;

pub use counters::{Counters, Snapshot};
pub use download::Download;
pub use folder::Folder;
pub use tree::{TreeOptions, TreeResult};
pub use upload::UploadFile;

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use crate::types::Version;

/// Identifies the contents of a local file: another file has another inode, and a changed one another time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileState {
    /// Device.
    pub device: u64,
    /// Inode.
    pub inode: u64,
    /// Size in bytes.
    pub size: u64,
    /// Time of the last modification, in nanoseconds since 1970.
    pub mtime_ns: i64,
}

impl FileState {
    fn of(metadata: &Metadata) -> Self {
        let mtime_ns = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
        Self { device: metadata.dev(), inode: metadata.ino(), size: metadata.len(), mtime_ns }
    }
}

/// A file or object that was transferred, or that was skipped because it is unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transferred {
    /// Size in bytes.
    pub size: u64,
    /// The version of the object, if the store has versions.
    pub version: Option<Version>,
    /// Whether nothing was transferred because both are the same.
    pub skipped: bool,
    /// The file as it was read or written; `None` if it was skipped.
    pub file: Option<FileState>,
}
