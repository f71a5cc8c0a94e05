//! The count of the bytes of a folder, which its processes share: a small file that is changed under its lock. Reads of the cache
//! need neither.

use std::fs::{File, OpenOptions};
use std::io::{self, Error};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::entry::crc;
use crate::fork;

/// Time after which a change is given up: a process that was stopped holds the lock.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const RECHECK_EVERY: Duration = Duration::from_millis(1);

/// A file takes whole pages of the disk.
const PAGE_BYTES: u64 = 4 << 10;

/// How every file of the cache is opened: no symbolic link is followed, no FIFO is waited for, and a new file is for this user only.
pub(super) fn file_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed());
    options
}

/// Bytes on the disk of a file of `length` bytes. Depends on its length only, so that what is added is subtracted again;
/// a file system that compresses allocates less.
pub(super) fn disk_bytes(length: u64) -> u64 {
    length.next_multiple_of(PAGE_BYTES)
}

/// The counts of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Bytes of all files, temporary ones included; never too low. `u64::MAX` if unknown.
    pub(super) used: u64,
    /// Sum of the bytes of all files that were ever published or deleted, modulo 2^64.
    pub(super) changed: u64,
    /// When the last scan began, in seconds since 1970. 0 if the count may be too high.
    pub(super) scanned_s: u64,
}

impl Counts {
    const UNKNOWN: Self = Self { used: u64::MAX, changed: 0, scanned_s: 0 };
    const BYTES: usize = 28;

    fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (number, to) in [self.used, self.changed, self.scanned_s].into_iter().zip(bytes.chunks_exact_mut(8)) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        let sum = crc(&bytes[..24]);
        bytes[24..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The counts in a file; unknown if it is damaged.
    fn read(file: &File) -> Self {
        let mut bytes = [0; Self::BYTES];
        let found = file.read_exact_at(&mut bytes, 0).ok().and_then(|()| Self::decode(&bytes));
        found.unwrap_or(Self::UNKNOWN)
    }

    fn write(self, file: &File) -> io::Result<()> {
        file.write_all_at(&self.encode(), 0)
    }

    fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let found = Self { used: number(0), changed: number(8), scanned_s: number(16) };
        (found.encode() == *bytes).then_some(found)
    }

    /// Adds the bytes of a file that is about to be written. Returns whether they fit.
    pub(super) fn reserve(&mut self, bytes: u64, max_bytes: u64) -> bool {
        let fits = self.used.checked_add(bytes).is_some_and(|used| used <= max_bytes);
        if fits {
            self.used += bytes;
        }
        fits
    }

    /// Records that a file is published or deleted.
    pub(super) fn change(&mut self, bytes: u64) {
        self.changed = self.changed.wrapping_add(bytes);
    }

    /// Subtracts the bytes of a file that was deleted.
    pub(super) fn release(&mut self, bytes: u64) {
        if self.used != u64::MAX {
            self.used = self.used.saturating_sub(bytes);
        }
    }
}

/// The file with the counts of a folder.
#[derive(Debug)]
pub(super) struct Usage(PathBuf);

impl Usage {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// The counts at this moment.
    pub(super) fn counts(&self) -> io::Result<Counts> {
        self.change(|counts| Ok(*counts))
    }

    /// Calls `change` with the counts, under the lock, and stores them, also after an error. `change` must be short: it may
    /// delete one file.
    ///
    /// # Errors
    /// Those of `change`; `TimedOut` if another process holds the lock for 2 s.
    pub(super) fn change<T>(&self, change: impl FnMut(&mut Counts) -> io::Result<T>) -> io::Result<T> {
        self.change_within(LOCK_TIMEOUT, change)
    }

    /// As [`change`](Self::change), and waits for the lock no longer than `patience`.
    pub(super) fn change_within<T>(
        &self,
        patience: Duration,
        mut change: impl FnMut(&mut Counts) -> io::Result<T>,
    ) -> io::Result<T> {
        self.locked(patience, |file| {
            let before = Counts::read(file);
            let mut counts = before;
            let result = change(&mut counts);
            if counts != before {
                counts.write(file)?;
            }
            result
        })
    }

    /// Stores what `add` adds to the counts, and then calls `act`, which may write or rename one file: a process that is killed in
    /// between leaves counts that are too high. Restores them if `act` fails. Returns what `add` does, and does not act if that is
    /// false.
    ///
    /// # Errors
    /// Those of `act`; `TimedOut` if another process holds the lock for 2 s.
    pub(super) fn add_then(
        &self,
        mut add: impl FnMut(&mut Counts) -> bool,
        mut act: impl FnMut() -> io::Result<()>,
    ) -> io::Result<bool> {
        self.locked(LOCK_TIMEOUT, |file| {
            let before = Counts::read(file);
            let mut counts = before;
            if !add(&mut counts) {
                return Ok(false);
            }
            counts.write(file)?;
            if let Err(error) = act() {
                before.write(file)?;
                return Err(error);
            }
            Ok(true)
        })
    }

    /// Calls `act` with the file while it is locked.
    fn locked<T>(&self, patience: Duration, mut act: impl FnMut(&File) -> io::Result<T>) -> io::Result<T> {
        let until = Instant::now() + patience;
        loop {
            {
                // A child that is forked meanwhile would have a copy of the descriptor, which keeps the lock.
                let _inside = fork::enter();
                let file = file_options().read(true).write(true).create(true).truncate(false).open(&self.0)?;
                match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => return act(&file),
                    Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if Instant::now() > until {
                return Err(Error::new(io::ErrorKind::TimedOut, "another process holds the lock of the cache"));
            }
            std::thread::sleep(RECHECK_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    fn set(usage: &Usage, used: u64) {
        let set = |counts: &mut Counts| {
            counts.used = used;
            Ok(())
        };
        usage.change(set).unwrap();
    }

    #[test]
    fn reservations_never_exceed_the_maximum_and_an_unknown_count_is_full() {
        let folder = TestFolder::new();
        let usage = Usage::new(folder.0.join("usage"));
        assert_eq!(usage.counts().unwrap(), Counts::UNKNOWN);
        assert!(!usage.change(|counts| Ok(counts.reserve(1, u64::MAX - 1))).unwrap());
        set(&usage, 0);
        let fits = std::thread::scope(|scope| {
            let reserve = || (0..100).filter(|_| usage.change(|counts| Ok(counts.reserve(10, 995))).unwrap()).count();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(reserve)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert_eq!((fits, usage.counts().unwrap().used), (99, 990));
        let release = |counts: &mut Counts| {
            counts.release(2000);
            Ok(())
        };
        usage.change(release).unwrap();
        assert_eq!(usage.counts().unwrap().used, 0);
    }

    #[test]
    fn counts_are_stored_before_what_they_count_and_restored_after_an_error() {
        let folder = TestFolder::new();
        let usage = Usage::new(folder.0.join("usage"));
        set(&usage, 5);
        let stored = || Counts::read(&File::open(&usage.0).unwrap()).used;
        let mut seen = 0;
        let act = || {
            seen = stored();
            Ok(())
        };
        assert!(usage.add_then(|counts| counts.reserve(10, 20), act).unwrap());
        assert_eq!((seen, stored()), (15, 15));
        assert!(!usage.add_then(|counts| counts.reserve(10, 20), || panic!("it does not fit")).unwrap());
        let failed = usage.add_then(|counts| counts.reserve(5, 20), || Err(io::ErrorKind::StorageFull.into()));
        assert_eq!((failed.unwrap_err().kind(), stored()), (io::ErrorKind::StorageFull, 15));
    }

    #[test]
    fn a_damaged_file_is_an_unknown_count() {
        let folder = TestFolder::new();
        let usage = Usage::new(folder.0.join("usage"));
        set(&usage, 5);
        let good = std::fs::read(&usage.0).unwrap();
        for bit in 0..good.len() * 8 {
            let mut damaged = good.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&usage.0, damaged).unwrap();
            assert_eq!(usage.counts().unwrap(), Counts::UNKNOWN);
        }
        std::fs::write(&usage.0, &good[..20]).unwrap();
        assert_eq!(usage.counts().unwrap(), Counts::UNKNOWN);
    }
}
