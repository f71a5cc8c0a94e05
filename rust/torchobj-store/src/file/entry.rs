//! What the names and the metadata of files say about objects.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use torchobj_core::types::Version;

/// Prefix of the names of temporary files.
pub(super) const TEMPORARY: &str = ".torchobj-";

/// The version of a file: inode, size and mtime, which change if the file is replaced or rewritten.
pub(super) fn version(metadata: &Metadata) -> Version {
    let (inode, size) = (metadata.ino(), metadata.len());
    Version::new(format!("{inode:x}-{size:x}-{:x}.{:x}", metadata.mtime(), metadata.mtime_nsec()))
}

pub(super) fn modified_ms(metadata: &Metadata) -> i64 {
    metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000
}
