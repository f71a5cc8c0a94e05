//! Goes through the files of a cache: corrects the count, evicts, and lists entries for the command line.

use std::collections::VecDeque;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use rustix::fs::OFlags;

use super::entry::{BLOCK_BYTES, END_BYTES, EntryKey, crc};
use super::folder::CacheFolder;
use super::usage::disk_bytes;

/// Seconds after which the count is compared with the files again.
const SCAN_EVERY_S: u64 = 3600;

/// A file that a scan found.
#[derive(Debug)]
struct Found {
    /// When it was last read, in seconds since 1970.
    read_s: i64,
    length: u64,
    path: PathBuf,
}

/// Opens a file of the cache for reading. Follows no symbolic link and waits for no FIFO.
pub(super) fn open(path: &std::path::Path) -> io::Result<(File, Metadata)> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if found.is_file() { Ok((file, found)) } else { Err(io::ErrorKind::InvalidData.into()) }
}

impl CacheFolder {
    /// Deletes what killed processes left, and corrects the count if the last scan was an hour ago or the count is unknown.
    pub(super) fn correct(&self, now_s: u64) -> io::Result<()> {
        self.sweep()?;
        let began = self.usage.change(|counts| {
            let is_recent = counts.scanned_s <= now_s && now_s - counts.scanned_s < SCAN_EVERY_S;
            if is_recent && counts.used != u64::MAX {
                return Ok(None);
            }
            // Other processes that start now do not scan.
            counts.scanned_s = now_s;
            Ok(Some(counts.published))
        })?;
        let Some(published) = began else { return Ok(()) };
        let mut sum = 0;
        self.each(|found| sum += disk_bytes(found.length))?;
        self.usage.change(|counts| {
            // A file that was published meanwhile may be missing in the sum.
            let since = counts.published.wrapping_sub(published);
            let found = sum.saturating_add(since).saturating_add(self.writing_bytes(counts)?);
            counts.used = counts.used.min(found);
            Ok(())
        })
    }

    /// Deletes the files that were not read since `before_s`, the oldest first, until all files have at most `target` bytes; any
    /// file while they have more than `max_bytes`, which may have been lowered. A time in the future is set to `now_s`:
    /// the clock was wrong. Returns the number of deleted files.
    pub(super) fn evict(&self, target: u64, max_bytes: u64, before_s: i64, now_s: i64) -> io::Result<u64> {
        let is_over = self.usage.counts()?.used > max_bytes;
        let mut candidates = Vec::new();
        self.each(|found| {
            if found.read_s > now_s {
                let _ = touch(&found.path, now_s);
            }
            if is_over || found.read_s < before_s {
                candidates.push(found);
            }
        })?;
        candidates.sort_unstable_by_key(|found| found.read_s);
        let mut evicted = 0;
        for found in candidates {
            let used = self.usage.counts()?.used;
            if used <= target || (found.read_s >= before_s && used <= max_bytes) {
                break;
            }
            self.remove(&found.path, found.length)?;
            evicted += 1;
        }
        Ok(evicted)
    }

    /// Calls `visit` for each file.
    fn each(&self, mut visit: impl FnMut(Found)) -> io::Result<()> {
        for folder in self.folders() {
            let files = match fs::read_dir(folder) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                files => files?,
            };
            for file in files {
                let file = file?;
                // It may be deleted meanwhile.
                if let Ok(metadata) = file.metadata() {
                    visit(Found { read_s: metadata.mtime(), length: metadata.len(), path: file.path() });
                }
            }
        }
        Ok(())
    }

    /// The entries, in the order of their names.
    pub fn entries(self) -> CacheEntries {
        CacheEntries { folders: self.folders().collect(), folder: self, files: VecDeque::new() }
    }
}

/// Sets the time of the last read.
fn touch(path: &std::path::Path, now_s: i64) -> io::Result<()> {
    let (file, _) = open(path)?;
    file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(now_s.unsigned_abs()))
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
}

impl CacheEntries {
    /// Accounted bytes of all files; `None` if they are not known before a scan.
    ///
    /// # Errors
    /// The count cannot be read.
    pub fn used_bytes(&self) -> io::Result<Option<u64>> {
        self.folder.used_bytes()
    }

    /// Returns whether the file of an entry has the bytes that were written.
    pub fn is_intact(&self, entry: &CacheEntry) -> bool {
        let check = || {
            let (file, _) = open(&entry.file.path).ok()?;
            let (key, crcs) = read_trailer(&file, entry.file.length)?;
            let mut block = vec![0; BLOCK_BYTES];
            for (number, expected) in crcs.chunks_exact(4).enumerate() {
                let at = (number * BLOCK_BYTES) as u64;
                let length = usize::try_from(key.length() - at).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES));
                file.read_exact_at(&mut block[..length], at).ok()?;
                if crc(&block[..length]).to_le_bytes() != *expected {
                    return None;
                }
            }
            Some(())
        };
        check().is_some()
    }

    /// Deletes the file of an entry.
    ///
    /// # Errors
    /// It cannot be deleted.
    pub fn remove(&self, entry: &CacheEntry) -> io::Result<()> {
        self.folder.remove(&entry.file.path, entry.file.length)
    }
}

impl Iterator for CacheEntries {
    type Item = io::Result<CacheEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let Some(path) = self.files.pop_front() else {
                match fs::read_dir(self.folders.pop_front()?) {
                    Ok(files) => self.files = files.filter_map(|file| Some(file.ok()?.path())).collect(),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Some(Err(error)),
                }
                continue;
            };
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            let (read_s, length) = (metadata.mtime(), metadata.len());
            let key = open(&path).ok().and_then(|(file, _)| read_trailer(&file, length)).map(|(key, _)| key);
            let object = key.map(|key| (key.url, key.range.start, key.range.end, key.size));
            let disk_bytes = disk_bytes(length);
            return Some(Ok(CacheEntry { object, disk_bytes, read_s, file: Found { read_s, length, path } }));
        }
    }
}

/// Key and CRCs of a file, from its trailer; `None` if it is damaged.
fn read_trailer(file: &File, length: u64) -> Option<(EntryKey, Vec<u8>)> {
    let mut end = [0; END_BYTES];
    file.read_exact_at(&mut end, length.checked_sub(END_BYTES as u64)?).ok()?;
    let trailer_bytes = EntryKey::trailer_bytes_of(&end)?;
    let mut trailer = vec![0; usize::try_from(length).map_or(trailer_bytes, |length| trailer_bytes.min(length))];
    let at = length - trailer.len() as u64;
    file.read_exact_at(&mut trailer, at).ok()?;
    let (key, crcs) = EntryKey::parse(&trailer)?;
    (key.file_bytes() == length).then(|| (key, crcs.to_vec()))
}
