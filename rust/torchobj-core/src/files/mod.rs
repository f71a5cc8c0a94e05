//! Transfers of whole files and folders: an object to a file, a file to an object, and trees of them.
//!
//! `download` receives the parts of an object into a [`FileSink`](sink::FileSink) each, which write to one `temporary`
//! file beside the target. Its `journal` records the parts that are complete, so that a process that was killed continues
//! with the missing ones. Only a complete file is renamed to its name. `folder` opens the folders of a tree one by one and
//! follows no symbolic link. `upload` reads the parts of a `source` file into recycled memory within a budget. `same`
//! compares a file with an object, for transfers that skip unchanged files. `tree` runs many of these transfers from a
//! listing or from a `walk` of a folder; `counters` shows their progress. `mtime` is the format of times in metadata, and
//! `local` converts errors of the file system.
//!
//! Files are read and written on the threads of the runtime, which meanwhile moves its other tasks to another thread.

mod counters;
mod download;
mod folder;
mod journal;
mod local;
mod mtime;
mod same;
mod sink;
mod source;
mod temporary;
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

use crate::types::Version;

/// A file or object that was transferred, or that was skipped because it is unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transferred {
    /// Size in bytes.
    pub size: u64,
    /// The version of the object, if the store has versions.
    pub version: Option<Version>,
    /// Whether nothing was transferred because both are the same.
    pub skipped: bool,
}
