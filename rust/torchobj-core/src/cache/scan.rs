//! Goes through the files of a cache: corrects the count, evicts, and lists entries for the command line.

use std::collections::VecDeque;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::entry::{BLOCK_BYTES, END_BYTES, EntryKey, are_intact};
use super::folder::{CacheFolder, Found};
use super::usage::{LOCK_TIMEOUT, disk_bytes, file_options};

/// Seconds after which the count is compared with the files again.
pub(super) const SCAN_EVERY_S: u64 = 3600;

/// What was evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Number of entries.
    pub files: u64,
    /// Their bytes on the disk.
    pub disk_bytes: u64,
}

/// The paths in a folder of the cache; none if it does not exist, or is a symbolic link.
fn paths_in(folder: &Path) -> io::Result<impl Iterator<Item = io::Result<PathBuf>> + use<>> {
    let files = match fs::symlink_metadata(folder) {
        Ok(found) if found.is_dir() => Some(fs::read_dir(folder)?),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => None,
    };
    Ok(files.into_iter().flatten().map(|file| file.map(|file| file.path())))
}

/// Opens a file of the cache for reading.
pub(super) fn open(path: &Path) -> io::Result<(File, Metadata)> {
    let file = file_options().read(true).open(path)?;
    let found = file.metadata()?;
    if found.is_file() { Ok((file, found)) } else { Err(io::ErrorKind::InvalidData.into()) }
}

impl CacheFolder {
    /// Deletes what killed processes left, and corrects the count if the last scan was `every_s` ago or the count is unknown.
    pub(super) fn correct(&self, now_s: u64, every_s: u64) -> io::Result<()> {
        self.sweep()?;
        let began = self.usage.change(|counts| {
            let is_recent = counts.scanned_s <= now_s && now_s - counts.scanned_s < every_s;
            if is_recent && counts.used != u64::MAX {
                return Ok(None);
            }
            // Other processes that start now do not scan.
            counts.scanned_s = now_s;
            Ok(Some(counts.changed))
        })?;
        let Some(before) = began else { return Ok(()) };
        let mut sum = 0;
        self.each(|found| sum += disk_bytes(found.length))?;
        self.usage.change(|counts| {
            let found = sum + self.writing_bytes(counts)?;
            // The sum may lack files that were published meanwhile, and include some that were deleted.
            let changed = counts.changed.wrapping_sub(before);
            let (least, most) = (found.saturating_sub(changed), found.saturating_add(changed));
            if !(least..=most).contains(&counts.used) {
                counts.used = most;
            }
            Ok(())
        })
    }

    /// Deletes the files that were not read since `before_s`, the oldest first and then by name, until all files have at most
    /// `target` bytes. A time in the future is set to `now_s`: the clock was wrong.
    pub(super) fn evict(&self, target: u64, before_s: i64, now_s: i64) -> io::Result<Evicted> {
        let mut candidates = Vec::new();
        self.each(|found| {
            if found.read_s > now_s {
                let _ = touch(&found.path, now_s);
            }
            if found.read_s < before_s {
                candidates.push(found);
            }
        })?;
        candidates.sort_unstable_by(|one, other| (one.read_s, &one.path).cmp(&(other.read_s, &other.path)));
        let mut evicted = Evicted::default();
        for found in candidates {
            if self.usage.counts()?.used <= target {
                break;
            }
            self.remove_entry(&found)?;
            evicted.files += 1;
            evicted.disk_bytes += disk_bytes(found.length);
        }
        Ok(evicted)
    }

    /// Deletes the file of an entry, whose trailer has the length that it was written with.
    fn remove_entry(&self, found: &Found) -> io::Result<()> {
        let trailer = open(&found.path).ok().and_then(|(file, _)| read_trailer(&file, found.length));
        self.remove(&found.path, trailer.map(|_| found.length), LOCK_TIMEOUT)
    }

    /// Calls `visit` for the file of each entry.
    fn each(&self, mut visit: impl FnMut(Found)) -> io::Result<()> {
        for folder in self.folders() {
            for path in paths_in(&folder)? {
                if let Some(found) = Found::entry(path?) {
                    visit(found);
                }
            }
        }
        Ok(())
    }

    /// The entries, in the order of their names.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn entries(self) -> io::Result<CacheEntries> {
        let (folders, others) = (self.folders().collect(), self.others()?);
        Ok(CacheEntries { folders, others, folder: self, files: VecDeque::new() })
    }
}

/// Sets the time of the last read.
fn touch(path: &Path, now_s: i64) -> io::Result<()> {
    let (file, _) = open(path)?;
    file.set_modified(UNIX_EPOCH + Duration::from_secs(now_s.unsigned_abs()))
}

/// An entry of a cache, as the command line shows it.
#[derive(Debug)]
pub struct CacheEntry {
    /// URL, start and end of the bytes, and size of the object; `None` if the file is damaged.
    pub object: Option<(String, u64, u64, u64)>,
    /// Bytes on the disk.
    pub disk_bytes: u64,
    /// When it was last read, in seconds since 1970.
    pub read_s: i64,
    file: Found,
}

/// Iterates over the entries of a cache.
#[derive(Debug)]
pub struct CacheEntries {
    folder: CacheFolder,
    folders: VecDeque<PathBuf>,
    files: VecDeque<PathBuf>,
    others: Vec<PathBuf>,
}

impl CacheEntries {
    /// Files and folders of other programs that were found so far. They are neither counted nor deleted.
    pub fn others(&self) -> &[PathBuf] {
        &self.others
    }

    /// Deletes what killed processes left, and counts the files.
    ///
    /// # Errors
    /// A file cannot be read or deleted, or another process holds the lock of the count for 2 s.
    pub fn correct(&self) -> io::Result<()> {
        self.folder.correct(now_s(), 0)
    }

    /// Counts the files, and deletes those that were read longest ago, until all have at most `max_bytes`.
    ///
    /// # Errors
    /// As [`correct`](Self::correct).
    pub fn evict(&self, max_bytes: u64) -> io::Result<Evicted> {
        self.correct()?;
        self.folder.evict(max_bytes, i64::MAX, i64::try_from(now_s()).unwrap_or(i64::MAX))
    }

    /// Accounted bytes of all files; `None` if they are not known before a scan.
    ///
    /// # Errors
    /// The count cannot be read.
    pub fn used_bytes(&self) -> io::Result<Option<u64>> {
        self.folder.used_bytes()
    }

    /// Returns whether the file of an entry has the bytes that were written; `None` if it was deleted meanwhile.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn is_intact(&self, entry: &CacheEntry) -> io::Result<Option<bool>> {
        let file = match open(&entry.file.path) {
            Ok((file, _)) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let message = format!("{} cannot be opened: {error}", entry.file.path.display());
                return Err(io::Error::new(error.kind(), message));
            }
        };
        let check = || {
            let (key, crcs) = read_trailer(&file, entry.file.length)?;
            let mut block = vec![0; BLOCK_BYTES];
            for (number, expected) in crcs.iter().enumerate() {
                let at = (number * BLOCK_BYTES) as u64;
                let length = usize::try_from(key.length() - at).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES));
                file.read_exact_at(&mut block[..length], at).ok()?;
                are_intact(&block[..length], std::slice::from_ref(expected)).then_some(())?;
            }
            Some(())
        };
        Ok(Some(check().is_some()))
    }

    /// Deletes the file of an entry.
    ///
    /// # Errors
    /// It cannot be deleted.
    pub fn remove(&self, entry: &CacheEntry) -> io::Result<()> {
        self.folder.remove_entry(&entry.file)
    }
}

impl Iterator for CacheEntries {
    type Item = io::Result<CacheEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let Some(path) = self.files.pop_front() else {
                match paths_in(&self.folders.pop_front()?).and_then(Iterator::collect) {
                    Ok(files) => self.files = files,
                    Err(error) => return Some(Err(error)),
                }
                continue;
            };
            let Some(file) = Found::entry(path.clone()) else {
                if fs::symlink_metadata(&path).is_ok() {
                    self.others.push(path);
                }
                continue;
            };
            let key = match open(&path) {
                Ok((opened, _)) => read_trailer(&opened, file.length).map(|(key, _)| key),
                // It was deleted meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(_) => None,
            };
            let object = key.map(|key| (key.url, key.range.start, key.range.end, key.size));
            return Some(Ok(CacheEntry { object, disk_bytes: disk_bytes(file.length), read_s: file.read_s, file }));
        }
    }
}

/// Key and CRCs of a file, from its trailer; `None` if it is damaged.
fn read_trailer(file: &File, length: u64) -> Option<(EntryKey, Vec<u32>)> {
    let mut end = [0; END_BYTES];
    file.read_exact_at(&mut end, length.checked_sub(END_BYTES as u64)?).ok()?;
    let trailer_bytes = EntryKey::trailer_bytes_of(&end)?;
    let mut trailer = vec![0; usize::try_from(length).map_or(trailer_bytes, |length| trailer_bytes.min(length))];
    let at = length - trailer.len() as u64;
    file.read_exact_at(&mut trailer, at).ok()?;
    let (key, crcs) = EntryKey::parse(&trailer)?;
    (key.file_bytes() == length).then_some((key, crcs))
}

/// Seconds since 1970.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}
