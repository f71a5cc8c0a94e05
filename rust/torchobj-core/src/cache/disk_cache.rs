//! The cache of a process: finds entries, and writes new ones on a thread of its own. `folder` has the files, `scan` what
//! goes through all of them.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::entry::EntryKey;
use super::folder::{CacheFolder, Written};
use super::scan::{SCAN_EVERY_S, open};
use super::usage::disk_bytes;
use crate::buffer::Buffer;
use crate::counters::counters;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::files::local::is_full;
use crate::read::mismatch;
use crate::store::ObjectChecksum;

/// Maximum number of bytes that wait to be written. More are dropped.
const QUEUE_BYTES: usize = 64 << 20;

/// Time that the read of a damaged file waits for the lock of the count. It is deleted by a later read if that is too short.
const DAMAGED_PATIENCE: Duration = Duration::from_millis(10);

/// The time of the last read is set if it is older than this, or than half of the time after which the entry expires.
const TOUCH_EVERY: Duration = Duration::from_secs(3600);

/// Time for which nothing is admitted after a file did not fit.
const FULL_PAUSE: Duration = Duration::from_secs(1);

/// Minimum time between two searches for expired entries, which read the metadata of all files, and as a multiple of the time that
/// the search took.
const EVICT_EVERY: Duration = Duration::from_secs(60);
const EVICT_EVERY_TIMES: u32 = 100;

/// Settings of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CacheConfig {
    /// The folder, which is created. Processes with the same folder share the cache.
    pub folder: PathBuf,
    /// Maximum number of bytes of all files.
    pub max_bytes: u64,
    /// Nothing is written that leaves fewer bytes of the file system free.
    pub min_free_bytes: u64,
    /// Ranges that are longer are not admitted.
    pub max_object_bytes: u64,
    /// Entries that were not read for this time may be evicted.
    pub ttl: Duration,
    /// Whether new entries are written. Without it, the folder is not created either.
    pub admit: bool,
}

counters! {
    /// What a cache did.
    struct Counters;

    /// The counters of a cache.
    pub struct CacheValues {
        counters {
            cache_admitted,
            cache_admitted_bytes,
            cache_dropped,
            cache_damaged,
            cache_evicted,
        }
        current { cache_pending, }
    }
}

/// The bytes of an entry to be written. Counts them until it is dropped.
#[derive(Debug)]
pub(super) struct Queued {
    shared: Arc<Shared>,
    bytes: usize,
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.shared.queued_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.shared.pending.fetch_sub(1, Ordering::Release);
    }
}

/// An entry to be written.
#[derive(Debug)]
struct Write {
    key: EntryKey,
    bytes: Buffer,
    checksum: Option<ObjectChecksum>,
    queued: Queued,
}

/// Which reasons to admit nothing were logged.
#[derive(Debug)]
struct Warned {
    too_large: Once,
    max_bytes: Once,
    no_space: Once,
}

/// What the tasks and the threads of a cache share.
#[derive(Debug)]
struct Shared {
    config: CacheConfig,
    folder: CacheFolder,
    counters: Counters,
    queued_bytes: AtomicUsize,
    pending: AtomicU64,
    warned: Warned,
    /// Set by an error of the disk after which nothing is written any more.
    off: AtomicBool,
    /// Until when nothing is admitted, in milliseconds since `began`.
    full_until_ms: AtomicU64,
    /// The time at which the cache was opened. Later times follow from the monotonic clock, so that a clock that is set
    /// meanwhile does not make all entries expire.
    began: (SystemTime, Instant),
}

/// The disk cache of a process.
#[derive(Debug)]
pub struct DiskCache {
    shared: Arc<Shared>,
    writes: Sender<Write>,
}

impl DiskCache {
    /// Opens the cache of a folder and starts its threads. `None`, after a warning, if the folder cannot be created or the threads
    /// cannot be started; without one if nothing is admitted and the folder has no cache.
    ///
    /// # Errors
    /// Those of [`CacheFolder::create`] whose kind is `Config`: the settings have to be corrected.
    pub fn open(config: CacheConfig) -> Result<Option<Self>> {
        let admit = config.admit;
        match Self::start(config) {
            Err(error) if error.kind() == ErrorKind::NotFound && !admit => Ok(None),
            Err(error) if error.kind() != ErrorKind::Config => {
                log::warn!("the disk cache is not used by this process: {error}");
                Ok(None)
            }
            started => started.map(Some),
        }
    }

    fn start(config: CacheConfig) -> Result<Self> {
        let failed = |source: io::Error| {
            let url = format!("file://{}", config.folder.display());
            let message = "the thread of the disk cache cannot be started";
            Error::new(ErrorKind::Io, Operation::Connect, url, message).with_source(source)
        };
        let shared = Arc::new(Shared::open(config.clone())?);
        let (writes, queue) = channel();
        // Without writes, the count is of no use, and the folder may be read-only.
        if config.admit {
            let named = |name: &str| thread::Builder::new().name(name.to_owned());
            let (writer, scanner) = (shared.clone(), shared.clone());
            named("torchobj-cache").spawn(move || writer.write_all(&queue)).map_err(failed)?;
            named("torchobj-scan").spawn(move || scanner.correct()).map_err(failed)?;
        }
        Ok(Self { shared, writes })
    }

    /// Whether new entries are written.
    pub(super) fn is_writable(&self) -> bool {
        self.shared.config.admit
    }

    /// Whether an entry of `length` bytes may exist.
    pub(super) fn may_have(&self, length: u64) -> bool {
        length <= self.shared.config.max_object_bytes.min(self.shared.config.max_bytes)
    }

    /// Opens the file of an entry. `None` if the cache does not have it.
    pub(super) fn find(&self, key: &EntryKey) -> Option<File> {
        let path = self.shared.folder.path_of(&key.name());
        let is_damaged = match open(&path) {
            Ok((file, found)) if found.len() == key.file_bytes() => {
                self.shared.touch(&file, found.modified().ok());
                return Some(file);
            }
            // Cut, a symbolic link, or no regular file.
            Ok(_) => true,
            // Otherwise it does not exist, or no descriptor is left for it.
            Err(error) => is_no_file(&error),
        };
        if is_damaged {
            self.remove_damaged(key);
        }
        None
    }

    /// Deletes the file of an entry that does not have its bytes.
    pub(super) fn remove_damaged(&self, key: &EntryKey) {
        let shared = &self.shared;
        let path = shared.folder.path_of(&key.name());
        let is_first = shared.counters.cache_damaged.fetch_add(1, Ordering::Relaxed) == 0;
        let level = if is_first { log::Level::Warn } else { log::Level::Debug };
        log::log!(level, "{}: its file in the disk cache is damaged and is deleted: {}", key.url, path.display());
        if let Err(error) = shared.folder.remove(&path, Some(key.file_bytes()), DAMAGED_PATIENCE) {
            log::debug!("{} is not deleted: {error}", path.display());
        }
    }

    /// Returns what counts the bytes of an entry until it is written; `None` if it is not admitted, or if too many wait.
    pub(super) fn admit(&self, key: &EntryKey) -> Option<Queued> {
        let shared = &self.shared;
        if !self.may_have(key.length()) {
            shared.warned.too_large.call_once(|| {
                let CacheConfig { max_object_bytes, max_bytes, .. } = shared.config;
                log::warn!(
                    "{}: {} bytes are too many for the disk cache, and are requested in each epoch, as others of more than \
                     max_object_bytes={max_object_bytes} or max_bytes={max_bytes}: raise these limits",
                    key.url,
                    key.length(),
                );
            });
            return None;
        }
        if !shared.is_open() {
            return None;
        }
        let bytes = usize::try_from(key.length()).ok()?;
        let before = shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        shared.pending.fetch_add(1, Ordering::Relaxed);
        let queued = Queued { shared: shared.clone(), bytes };
        // One entry is always admitted.
        (before == 0 || before + bytes <= QUEUE_BYTES).then_some(queued)
    }

    /// Counts an entry that was received and is not queued.
    pub(super) fn drop_one(&self) {
        self.shared.drop_one();
    }

    /// Queues an entry to be written. Its bytes are compared with `checksum`, if it is one of a whole object.
    pub(super) fn write(&self, key: EntryKey, bytes: Buffer, checksum: Option<ObjectChecksum>, queued: Queued) {
        if self.writes.send(Write { key, bytes, checksum, queued }).is_err() {
            self.shared.drop_one();
        }
    }

    /// Adds the counters to those of other caches.
    pub fn add_to(&self, sums: &mut CacheValues) {
        self.shared.counters.add_to(sums);
        sums.cache_pending += self.shared.pending.load(Ordering::Acquire);
    }
}

impl Shared {
    fn open(config: CacheConfig) -> Result<Self> {
        let folder = if config.admit { CacheFolder::create(&config.folder) } else { CacheFolder::open(&config.folder) };
        Ok(Self {
            folder: folder?,
            counters: Counters::default(),
            queued_bytes: AtomicUsize::new(0),
            pending: AtomicU64::new(0),
            warned: Warned { too_large: Once::new(), max_bytes: Once::new(), no_space: Once::new() },
            off: AtomicBool::new(false),
            full_until_ms: AtomicU64::new(0),
            began: (SystemTime::now(), Instant::now()),
            config,
        })
    }

    /// Whether entries are written now: no error has ended the writes, and there was space for the last one.
    fn is_open(&self) -> bool {
        !self.off.load(Ordering::Relaxed) && self.now_ms() >= self.full_until_ms.load(Ordering::Relaxed)
    }

    /// Milliseconds since the cache was opened.
    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.1.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn now(&self) -> SystemTime {
        self.began.0 + self.began.1.elapsed()
    }

    fn touch(&self, file: &File, modified: Option<SystemTime>) {
        let now = self.now();
        let every = TOUCH_EVERY.min(self.config.ttl / 2);
        if modified.is_none_or(|modified| now.duration_since(modified).map_or(true, |age| age > every)) {
            // A folder that is mounted read-only is read nevertheless.
            let _ = file.set_modified(now);
        }
    }

    /// Stops writing to the cache, and warns once.
    fn turn_off(&self, error: &io::Error) {
        if !self.off.swap(true, Ordering::Relaxed) {
            let folder = self.config.folder.display();
            log::warn!("this process writes no more to the disk cache in {folder}: {error}");
        }
    }

    fn correct(&self) {
        let now_s = self.now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        if let Err(error) = self.folder.correct(now_s, SCAN_EVERY_S) {
            log::warn!("the files of the disk cache in {} cannot be counted: {error}", self.config.folder.display());
        }
    }

    /// Writes what is queued, until the cache is dropped.
    fn write_all(&self, queue: &Receiver<Write>) {
        let mut evicts_at = Instant::now();
        for write in queue {
            match self.write(&write, &mut evicts_at) {
                Ok(Some(Written::Published)) => {
                    self.counters.cache_admitted.fetch_add(1, Ordering::Relaxed);
                    self.counters.cache_admitted_bytes.fetch_add(write.key.length(), Ordering::Relaxed);
                }
                Ok(Some(Written::Existed)) => {}
                Ok(not_written) => {
                    if let Some(full) = not_written {
                        self.pause(full);
                    }
                    self.drop_one();
                }
                Err(error) => {
                    if is_full(&error) {
                        self.pause(Written::NoSpace);
                    } else if !is_transient(&error) {
                        self.turn_off(&error);
                    }
                    self.drop_one();
                }
            }
            drop(write.queued);
        }
    }

    /// Writes an entry, after expired ones have made space for it; `None` if it is not written now, or is not what the store has.
    fn write(&self, write: &Write, evicts_at: &mut Instant) -> io::Result<Option<Written>> {
        let (key, bytes) = (&write.key, write.bytes.as_slice());
        if !self.is_open() || write.checksum.is_some_and(|expected| mismatch(expected, bytes).is_some()) {
            return Ok(None);
        }
        let CacheConfig { max_bytes, min_free_bytes, .. } = self.config;
        let mut written = self.folder.write(key, bytes, max_bytes, min_free_bytes)?;
        let is_full = matches!(written, Written::Full | Written::NoSpace);
        if is_full && self.evict(disk_bytes(key.file_bytes()), evicts_at)? > 0 {
            written = self.folder.write(key, bytes, max_bytes, min_free_bytes)?;
        }
        Ok(Some(written))
    }

    /// Makes space for a file of this size, and for some more. Returns the number of entries that were evicted: none before
    /// `evicts_at`, which is set to the next time.
    fn evict(&self, size: u64, evicts_at: &mut Instant) -> io::Result<u64> {
        let began = Instant::now();
        if began < *evicts_at {
            return Ok(0);
        }
        let CacheConfig { max_bytes, min_free_bytes, .. } = self.config;
        let now_s = seconds(self.now());
        let before_s = seconds(self.now() - self.config.ttl.min(Duration::from_secs(u32::MAX.into())));
        let space = size.max(max_bytes / 16);
        let used = self.folder.used_bytes()?.unwrap_or(u64::MAX);
        let missing = space.saturating_add(min_free_bytes).saturating_sub(self.folder.free_bytes()?);
        let target = max_bytes.saturating_sub(space).min(used.saturating_sub(missing));
        let evicted = self.folder.evict(target, before_s, now_s)?.files;
        *evicts_at = Instant::now() + EVICT_EVERY.max(EVICT_EVERY_TIMES * began.elapsed());
        self.counters.cache_evicted.fetch_add(evicted, Ordering::Relaxed);
        Ok(evicted)
    }

    /// Admits nothing for a while: an entry did not fit. Logs the first time.
    fn pause(&self, full: Written) {
        let pause_ms = u64::try_from(FULL_PAUSE.as_millis()).unwrap_or(u64::MAX);
        self.full_until_ms.store(self.now_ms() + pause_ms, Ordering::Relaxed);
        let CacheConfig { max_bytes, min_free_bytes, .. } = self.config;
        let folder = self.config.folder.display();
        if full == Written::Full {
            self.warned.max_bytes.call_once(|| {
                log::info!("the disk cache in {folder} has reached max_bytes={max_bytes}: it keeps what it has");
            });
        } else {
            self.warned.no_space.call_once(|| {
                let free = self.folder.free_bytes().map_or_else(|error| error.to_string(), |free| free.to_string());
                log::warn!(
                    "the disk cache in {folder} admits nothing: {free} bytes of its disk are free, and \
                     min_free_bytes={min_free_bytes} have to stay free; delete other files, or lower min_free_bytes"
                );
            });
        }
    }

    /// Counts an entry that was received and is not written.
    fn drop_one(&self) {
        self.counters.cache_dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether what has the name of a file is no regular file.
fn is_no_file(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData || error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error())
}

/// Whether a later write may succeed.
fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{AlreadyExists, Interrupted, IsADirectory, NotADirectory, TimedOut, WouldBlock};
    matches!(error.kind(), AlreadyExists | Interrupted | IsADirectory | NotADirectory | TimedOut | WouldBlock)
}

/// Seconds since 1970.
fn seconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{Memory, PendingBuffer};
    use crate::test_folder::TestFolder;
    use crate::types::Version;

    #[test]
    fn what_is_queued_after_an_entry_that_does_not_fit_or_is_not_that_of_the_store_is_dropped_and_counted() {
        let folder = TestFolder::new();
        let config = CacheConfig {
            folder: folder.0.clone(),
            max_bytes: 20_000,
            min_free_bytes: 0,
            max_object_bytes: 1 << 20,
            ttl: Duration::from_secs(60),
            admit: true,
        };
        let shared = Arc::new(Shared::open(config).unwrap());
        let (writes, queue) = channel();
        // One of another checksum, one that fits, one that does not, and one that would fit.
        for (number, length) in [1000, 1000, 30_000, 1000].into_iter().enumerate() {
            let version = Version::new(number.to_string());
            let key = EntryKey::new("e", "s3://b/k".to_owned(), &version, length, 0..length);
            let length = usize::try_from(length).unwrap();
            let (pending, mut dest) = PendingBuffer::new(Memory::allocate(length).unwrap());
            drop(dest.split_off(length));
            dest.fill(&vec![7; length]);
            let checksum = (number == 0).then_some(ObjectChecksum::Crc32C(1));
            shared.pending.fetch_add(1, Ordering::Relaxed);
            let queued = Queued { shared: shared.clone(), bytes: 0 };
            writes.send(Write { key, bytes: pending.close(dest), checksum, queued }).unwrap();
        }
        drop(writes);
        shared.write_all(&queue);
        let mut values = CacheValues::default();
        shared.counters.add_to(&mut values);
        assert_eq!((values.cache_admitted, values.cache_dropped), (1, 3));
        assert_eq!(shared.pending.load(Ordering::Acquire), 0);
        assert!(shared.warned.max_bytes.is_completed() && !shared.warned.no_space.is_completed());
    }
}
