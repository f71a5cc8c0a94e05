//! The disk cache: keeps bytes of objects in files of a local folder, so that later reads of them send no request. Knows nothing
//! of datasets, passes and owners.
//!
//! [`CachedStore`] decorates the store of a provider, and `Client` asks it ([`open_local`](crate::store::ObjectStore::open_local))
//! before it takes a permit. An *entry* has the bytes of one range of one version of an object: those that one request read, or
//! the whole object. The name of its file is a hash of the store, URL, version, size and range (`entry`), so a changed object is
//! another entry, and nothing is ever rewritten. The bytes are followed by a CRC-32C of each block; a hit compares the blocks
//! that it reads. An entry that is damaged is deleted, and the read continues at the store.
//!
//! A miss is admitted: what the request receives is copied (`admission`) and queued for the thread of the cache (`disk_cache`),
//! which writes it under a temporary name and renames it. Reads never wait for writes; if the queue is full, the copy is dropped.
//!
//! All processes that use the folder share a count of its bytes (`usage`), which is changed under a lock. A writer adds the size
//! of its file to the count before it writes, and locks the temporary file: if the process is killed, another one finds the file
//! unlocked, deletes it, and subtracts its size. So the count is never too low, and `max_bytes` is never exceeded. A scan in the
//! background (`scan`) corrects a count that is too high, or that was damaged.
//!
//! Only files with names of entries, in a folder that a cache has marked (`folder`), are ever counted or deleted. An error of the
//! disk, or a process that is stopped with the lock, ends or delays writes, and no reads.
//!
//! Each sample is used once per epoch, so the least recently used object is the one that is used next: recency evicts what
//! is needed. Objects are admitted until the folder is full, and stay. Only those that were not read for `ttl` are evicted,
//! the oldest first, when there is no space. The time of the last read is the mtime of the file, set at most once an hour, or once
//! in half of `ttl` if that is shorter.

mod admission;
mod cached_store;
mod disk_cache;
mod entry;
mod folder;
mod hit;
mod scan;
#[cfg(test)]
mod scan_tests;
#[cfg(test)]
mod tests;
mod usage;

pub use cached_store::CachedStore;
pub use disk_cache::{CacheConfig, CacheValues, DiskCache};
pub use folder::CacheFolder;
pub use scan::{CacheEntries, CacheEntry, Evicted};
