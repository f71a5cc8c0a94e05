//! Errors of the file system as errors of an operation, and blocking calls on the threads of the runtime.

use std::io;
use std::path::Path;

use tokio::runtime::{Handle, RuntimeFlavor};

use crate::error::{Error, ErrorKind, Operation};

/// Runs blocking `work` on this thread. A multi-threaded runtime moves the other tasks of the thread to another one.
pub(crate) fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        // There is no other thread to move tasks to.
        RuntimeFlavor::CurrentThread => work(),
        _ => tokio::task::block_in_place(work),
    }
}

/// The error of `operation` on a local file.
pub(super) fn error_of(operation: Operation, path: &Path, error: io::Error) -> Error {
    let (kind, message) = match error.kind() {
        io::ErrorKind::NotFound => (ErrorKind::NotFound, "no such file or folder"),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            (ErrorKind::AccessDenied, "permission denied")
        }
        io::ErrorKind::IsADirectory | io::ErrorKind::DirectoryNotEmpty => {
            (ErrorKind::InvalidKey, "a folder has this name")
        }
        io::ErrorKind::AlreadyExists => {
            (ErrorKind::InvalidKey, "a device, pipe or socket has this name, and is not replaced by a file")
        }
        io::ErrorKind::NotADirectory => (
            ErrorKind::InvalidKey,
            "a file or a symbolic link is where a folder is needed; symbolic links are not followed",
        ),
        io::ErrorKind::InvalidData => (ErrorKind::Changed, "the file changed while it was read"),
        _ if is_full(&error) => (ErrorKind::Io, "no space for the file"),
        _ => (ErrorKind::Io, "the file system failed"),
    };
    Error::new(kind, operation, url_of(path), message).with_source(error)
}

/// The URL of a local file, for messages.
pub(super) fn url_of(path: &Path) -> String {
    format!("file://{}", path.display())
}

/// Whether the file system has no space for a file of this size.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}
