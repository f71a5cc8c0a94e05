//! Counts the files and bytes of a transfer, for the thread that shows its progress.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The counters of one transfer, which its tasks share.
#[derive(Debug, Default)]
pub struct Counters {
    files_done: AtomicU64,
    files_found: AtomicU64,
    bytes_done: AtomicU64,
    bytes_found: AtomicU64,
    skipped: AtomicU64,
    /// Whether all files were found.
    complete: AtomicBool,
}

/// The values of the counters at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Number of files that are done, including the skipped ones.
    pub files_done: u64,
    /// Number of files of the transfer, once it is known.
    pub files_total: Option<u64>,
    /// Number of bytes that are done, including those of skipped files.
    pub bytes_done: u64,
    /// Number of bytes of the transfer, once it is known.
    pub bytes_total: Option<u64>,
    /// Number of files that were skipped.
    pub skipped: u64,
}

impl Counters {
    /// Reads the counters.
    pub fn snapshot(&self) -> Snapshot {
        let complete = self.complete.load(Ordering::Acquire);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Snapshot {
            files_done: read(&self.files_done),
            files_total: complete.then(|| read(&self.files_found)),
            bytes_done: read(&self.bytes_done),
            bytes_total: complete.then(|| read(&self.bytes_found)),
            skipped: read(&self.skipped),
        }
    }

    /// Records a file that will be transferred.
    pub(super) fn found(&self, bytes: u64) {
        self.files_found.fetch_add(1, Ordering::Relaxed);
        self.bytes_found.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records that all files were found.
    pub(super) fn found_all(&self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Records bytes that are done.
    pub(super) fn add(&self, bytes: u64) {
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes back the size of a file that turned out to be unknown.
    pub(super) fn lost_size(&self, bytes: u64) {
        self.bytes_found.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Records bytes that are done of a file whose size was not known.
    pub(super) fn grew(&self, bytes: u64) {
        self.bytes_found.fetch_add(bytes, Ordering::Relaxed);
        self.add(bytes);
    }

    /// Takes back bytes that are transferred again.
    pub(super) fn take_back(&self, bytes: u64) {
        self.bytes_done.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Records a file that is done. The bytes of a skipped one are counted as well.
    pub(super) fn done(&self, size: u64, skipped: bool) {
        if skipped {
            self.skipped.fetch_add(1, Ordering::Relaxed);
            self.add(size);
        }
        self.files_done.fetch_add(1, Ordering::Relaxed);
    }
}
