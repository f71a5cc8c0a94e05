//! Tar shards of datasets: samples as the bytes arrive, and the positions of the members for an index. Does no I/O.
//!
//! [`Reader`] takes the bytes of a shard in order, in pieces of any size, and returns samples: members whose names differ
//! only in the extension. Their bodies are views of the pieces; only a body that spans several pieces is copied.
//! `Decompressor` makes such pieces from a compressed shard, one bounded block at a time. [`Walk`] needs the headers only:
//! it names the range to read next and skips large bodies. Both parse headers with `member`, and build samples with `sample`.
//!
//! The formats are those of Python's `tarfile` in stream mode: v7, ustar, GNU and pax, with long names in any of them. Sparse
//! members are refused. The grouping is that of the `webdataset` package. Unlike `tarfile`, which takes a damaged or
//! truncated header after the first member for the end of the archive, these are errors: samples would be lost silently.
//!
//! Shards are not trusted. A size in a header is not allocated before as many bytes have arrived ([`Reader`] starts with at
//! most 64 MiB and grows); headers of long names are limited to 1 MiB per member, names to 64 KiB, and members to 65 536 per
//! sample. One `push` decompresses a bounded part, and a sample of more than 256 MiB must not be more than 100 times its
//! compressed bytes.
//!
//! Names are bytes. Bindings decode them as UTF-8 with `surrogateescape`, as Python does: invalid bytes are preserved. An
//! index holds text, so [`Walk`] refuses them.

mod cache;
mod decompress;
mod extension;
#[cfg(test)]
mod fuzz;
mod header;
mod member;
mod reader;
mod sample;
#[cfg(test)]
mod tests;
mod walk;

use std::fmt;

pub use cache::ExtensionCache;
pub use decompress::Compression;
pub use reader::Reader;
pub use sample::{Member, Sample};
pub use walk::{Position, Walk};

/// Why a shard cannot be read any further, or a sample of it not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TarError {
    /// Where in the shard, in bytes; after decompression, unless the compressed bytes are damaged.
    pub offset: u64,
    /// What is wrong, with names and numbers.
    pub reason: String,
}

impl TarError {
    fn new(offset: u64, reason: impl Into<String>) -> Self {
        Self { offset, reason: reason.into() }
    }
}

impl fmt::Display for TarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offset {}: {}", self.offset, self.reason)
    }
}

impl std::error::Error for TarError {}

/// A name for messages.
fn shown(name: &[u8]) -> String {
    /// Longer names are cut.
    const SHOWN: usize = 200;
    let cut = String::from_utf8_lossy(&name[..name.len().min(SHOWN)]).into_owned();
    if name.len() > SHOWN { format!("{cut:?}…") } else { format!("{cut:?}") }
}
