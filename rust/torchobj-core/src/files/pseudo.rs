//! Files of `/proc`, `/sys` and similar file systems: the kernel makes their bytes when they are read, and their size is not
//! known before.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::io::Errno;

/// Files of `/sys` have the size of a page, which has at most 64 KiB.
const MAX_PAGE_BYTES: u64 = 64 << 10;

/// Returns whether the size of a regular file is not the number of its bytes: 0 although it has some, or a page that has no
/// block although its end is earlier.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn has_unknown_size(file: &File, metadata: &Metadata) -> io::Result<bool> {
    let byte_at = |position| match file.read_at(&mut [0], position) {
        // It can be read from its start only.
        Err(error) if error.raw_os_error() == Some(Errno::SPIPE.raw_os_error()) => Ok(None),
        read => read.map(|count| Some(count == 1)),
    };
    Ok(match metadata.len() {
        0 => byte_at(0)? != Some(false),
        size if metadata.blocks() == 0 && size <= MAX_PAGE_BYTES => byte_at(size - 1)? != Some(true),
        _ => false,
    })
}
