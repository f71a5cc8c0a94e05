//! Downloads one object to a file: parallel parts into a temporary file, which is renamed when it is complete. A special file is
//! written in order.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest, checksum_combine};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;
use tokio::sync::Mutex;

use super::counters::Counters;
use super::folder::Folder;
use super::journal::{Journal, Recorded};
use super::local::{error_of, in_place, url_of};
use super::mtime::Mtime;
use super::sink::{BLOCK_BYTES, FileSink, PartFile};
use super::special::{SpecialFile, SpecialWriter, wait_for};
use super::temporary::Temporary;
use super::{FileState, Transferred, same, source};
use crate::buffer::{Memory, PendingBuffer};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::read::{Expected, First, ReadAhead, ReadAheadConfig, crc_of, difference, part_bytes, parts};
use crate::types::{ByteRange, GetRequest, ObjectChecksum, Version};

/// The checksum by which a journal identifies the parts of an object without a CRC.
const JOURNAL_CRC: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// Maximum number of parts of a file that are received at the same time, each with a block of 1 MiB in memory.
const MAX_PARTS: usize = 64;

/// An object to download.
#[derive(Clone, Debug, Default)]
pub struct Download {
    /// The object.
    pub key: String,
    /// Size and time of the last write in milliseconds since 1970, as far as a listing has them; `None` without a listing.
    pub listed: Option<(Option<u64>, Option<i64>)>,
    /// The version to read, if the caller selected one.
    pub version: Option<Version>,
    /// Whether a file that is equal to the object is kept.
    pub skip_unchanged: bool,
}

/// An object, as its first response describes it.
struct RemoteObject {
    size: u64,
    version: Option<Version>,
    checksum: Option<ObjectChecksum>,
    mtime: Option<Mtime>,
    /// A response with its first bytes.
    first: Option<First>,
}

/// The file that a download creates.
struct LocalFile {
    folder: Arc<OwnedFd>,
    name: String,
    /// For messages.
    path: PathBuf,
}

impl Client {
    /// Downloads an object to the file `name` in `folder`, and counts it as the only file of the transfer.
    ///
    /// # Errors
    /// Those of [`download_file`](Self::download_file), and those of opening the folder.
    pub async fn download_one(
        self: &Arc<Self>,
        download: Download,
        folder: &Path,
        name: &str,
        counters: &Arc<Counters>,
    ) -> Result<Transferred> {
        let path = folder.join(name);
        let done = match in_place(|| SpecialFile::find(&path)) {
            Some(special) => self.download_into(download, &path, special, counters).await?,
            None => {
                let folder = in_place(|| Folder::open(folder))?;
                let done = self.download_file(download, &folder, name, counters).await?;
                in_place(|| folder.sync())?;
                done
            }
        };
        counters.done(done.size, done.skipped);
        Ok(done)
    }

    /// Writes an object into a special file, in order. It is written as it arrives: a failure leaves its beginning there.
    async fn download_into(
        self: &Arc<Self>,
        download: Download,
        path: &Path,
        special: SpecialFile,
        counters: &Arc<Counters>,
    ) -> Result<Transferred> {
        let failed = |error| error_of(Operation::Put, path, error);
        if let Some(reason) = special.refusal(false) {
            return Err(Error::new(ErrorKind::InvalidKey, Operation::Put, url_of(path), reason));
        }
        // A response to HEAD has the current version only.
        let object = match download.version {
            Some(_) => self.find(&Download { listed: None, ..download.clone() }).await?,
            None => self.head_object(&download.key).await?,
        };
        counters.found(object.size);
        counters.found_all();
        let mut reader = ReadAhead::new(self.clone(), &download.key, ReadAheadConfig::default())
            .with_version(object.version.clone());
        let mut writer = SpecialWriter::new(special);
        let crc = object.checksum.and_then(crc_of);
        let mut digest = crc.map(|(algorithm, _)| Digest::new(algorithm));
        let mut position = 0;
        while position < object.size {
            let length = BLOCK_BYTES.min(usize::try_from(object.size - position).unwrap_or(BLOCK_BYTES));
            let (pending, mut dest) = PendingBuffer::new(Memory::allocate(length).map_err(failed)?);
            let count = reader.read_at(position, &mut dest).await?;
            let bytes = pending.close(dest);
            if let Some(digest) = &mut digest {
                digest.update(bytes.as_slice());
            }
            writer = wait_for(move |caller| writer.write(bytes.as_slice(), caller).map(|()| writer))
                .await
                .map_err(failed)?;
            position += count as u64;
            counters.add(count as u64);
        }
        wait_for(|caller| writer.finish(caller, true)).await.map_err(failed)?;
        if let (Some((algorithm, expected)), Some(digest)) = (crc, digest)
            && let Some(message) = difference(algorithm, expected, digest.finalize())
        {
            let url = self.store().url(&download.key);
            let message = format!("{message}; the bytes were written to {}", path.display());
            return Err(Error::new(ErrorKind::Integrity, Operation::Get, url, message));
        }
        Ok(Transferred { size: object.size, version: object.version, skipped: false, file: None })
    }

    /// Downloads an object to the file with the relative path `name` in `folder`. The file appears when it is complete; an
    /// earlier file is replaced. It is durable once the folder is [synchronized](Folder::sync). If the transfer is interrupted and the object has several parts, the next call continues
    /// with the missing ones.
    ///
    /// # Errors
    /// Those of [`get`](Self::get); `InvalidKey` if `name` is not a path below the folder; `Integrity` if the bytes do not
    /// have the checksum of the object; `Io` if there is no space.
    pub async fn download_file(
        self: &Arc<Self>,
        download: Download,
        folder: &Folder,
        name: &str,
        counters: &Arc<Counters>,
    ) -> Result<Transferred> {
        self.store().check_key(Operation::Get, &download.key)?;
        if let Some(reason) = Folder::refusal(name) {
            return Err(self
                .store()
                .error(ErrorKind::InvalidKey, Operation::Get, &download.key, reason)
                .with_hint(format!("{name:?} cannot be the path of a file")));
        }
        let target = in_place(|| LocalFile::open(folder, name))?;
        let mut known = None;
        if download.skip_unchanged
            && let Some((file, size)) = in_place(|| target.existing())
            && download.listed.and_then(|(listed, _)| listed).is_none_or(|listed| listed == size)
        {
            let object = self.head_object(&download.key).await?;
            let mtime = file.metadata().map(|metadata| source::mtime_of(&metadata));
            let mtime = mtime.map_err(|error| target.failed(error))?;
            let same = size == object.size
                && match object.checksum {
                    Some(checksum) => {
                        same::has_checksum(&file, size, checksum).await.map_err(|error| target.failed(error))?
                    }
                    None => object.mtime == Some(mtime),
                };
            if same {
                if download.listed.is_none() {
                    counters.found(size);
                    counters.found_all();
                }
                return Ok(Transferred { size, version: object.version, skipped: true, file: None });
            }
            known = Some(object);
        }
        let object = match known {
            Some(object) if download.version.is_none() => object,
            _ => self.find(&download).await?,
        };
        let (size, version) = (object.size, object.version.clone());
        if download.listed.is_none() {
            counters.found(size);
            counters.found_all();
        }
        let file = self.receive_file(download.key, object, &target, counters).await?;
        folder.published(name);
        Ok(Transferred { size, version, skipped: false, file: Some(file) })
    }

    /// Requests what must be known of an object: by GET if it is small or the version is selected, otherwise by HEAD.
    async fn find(&self, download: &Download) -> Result<RemoteObject> {
        let (size, modified_ms) = download.listed.unwrap_or_default();
        let range = match &download.version {
            Some(_) => Some(ByteRange::Bounded(0..self.policy().part_bytes)),
            None if size.is_some_and(|size| size < self.policy().whole_below_bytes) => None,
            None => return self.head_object(&download.key).await,
        };
        let bytes = size.unwrap_or(self.policy().part_bytes);
        let version = download.version.as_ref();
        let request = GetRequest { range, version, checksum: true, ..GetRequest::whole(&download.key) };
        let first = match self.open_first(request.clone(), bytes).await {
            // Every range of an empty object is refused.
            Err(error) if error.kind() == ErrorKind::Range => {
                self.open_first(GetRequest { range: None, ..request }, bytes).await?
            }
            first => first?,
        };
        let result = &first.result;
        Ok(RemoteObject {
            size: result.size(),
            version: version.or(result.version()).cloned(),
            checksum: result.checksum(),
            mtime: same::mtime_of(&result.attributes(), modified_ms),
            first: Some(first),
        })
    }

    async fn head_object(&self, key: &str) -> Result<RemoteObject> {
        let head = self.head_with_checksum(key).await?;
        let mtime = same::mtime_of(&head.attributes, head.modified_ms);
        Ok(RemoteObject { size: head.size, version: head.version, checksum: head.checksum, mtime, first: None })
    }

    /// Receives an object into the temporary file of its target, and publishes it.
    async fn receive_file(
        self: &Arc<Self>,
        key: String,
        mut object: RemoteObject,
        target: &LocalFile,
        counters: &Arc<Counters>,
    ) -> Result<FileState> {
        let (size, failed) = (object.size, |error| target.failed(error));
        let own_part_bytes = match (&object.first, size < self.policy().whole_below_bytes) {
            (Some(first), _) => first.result.range().end,
            (None, true) => size,
            (None, false) => part_bytes(self.policy(), size),
        };
        let mut temporary = in_place(|| Temporary::open(&target.folder, &target.name)).map_err(failed)?;
        let url = self.store().url(&key);
        // First of all: the lists of parts are as long as the size demands.
        let max_bytes = self.store().capabilities().max_object_bytes;
        if size > max_bytes {
            let message = format!("the object has {size} bytes, the store allows {max_bytes}");
            return Err(Error::new(ErrorKind::Protocol, Operation::Get, url, message));
        }
        let missing = in_place(|| temporary.missing_bytes(size)).map_err(failed)?;
        if missing > 0 {
            let message =
                format!("no space for the file: it has {size} bytes, the file system lacks {missing} of them");
            let error = Error::new(ErrorKind::Io, Operation::Put, url_of(&target.path), message);
            return Err(error.with_source(io::Error::from(Errno::NOSPC)));
        }
        let crc = object.checksum.and_then(crc_of);
        // Two parts are worth a journal, and only a version shows that both are of the same object.
        let journaled = own_part_bytes < size && temporary.resumable;
        let prepared = in_place(|| {
            let Some(version) = object.version.as_ref().filter(|_| journaled) else {
                temporary.file.set_len(0)?;
                return Ok((None, Recorded::new(size, own_part_bytes.max(1))));
            };
            let identity = format!("{}\n{url}\n{version:?}\n{:?}", self.store().identity(), object.checksum);
            let (journal, recorded) = Journal::open(&temporary.file, &identity, size, own_part_bytes)?;
            Ok((Some(journal), recorded))
        });
        let (journal, Recorded { part_bytes, parts: mut sums }) = prepared.map_err(failed)?;
        let algorithm = crc.map_or(JOURNAL_CRC, |(algorithm, _)| algorithm);
        if sums.is_empty() {
            sums.push(None);
        }
        for (sum, range) in sums.iter_mut().zip(parts(0..size, part_bytes)) {
            if let Some(value) = *sum
                && !same::has_crc(&temporary.file, range, algorithm, value).await.map_err(failed)?
            {
                *sum = None;
            }
        }
        // An interrupted transfer continues with the parts that are missing.
        temporary.keep(journal.is_some());
        let part_file = Arc::new(PartFile {
            file: temporary.file.clone(),
            path: target.path.clone(),
            url,
            algorithm: (crc.is_some() || journal.is_some()).then_some(algorithm),
            journal,
            counters: counters.clone(),
            writing: Mutex::default(),
        });
        let received = self.receive_missing(key.into(), &mut object, &part_file, part_bytes, &mut sums).await;
        let received = received.and_then(|()| {
            let Some((algorithm, expected)) = crc else { return Ok(()) };
            let lengths = parts(0..size, part_bytes).map(|range| range.end - range.start);
            let sums = sums.iter().map(|sum| sum.unwrap_or_default());
            let whole = sums
                .zip(lengths)
                .reduce(|(whole, length), (sum, next)| (checksum_combine(algorithm, whole, sum, next), length + next));
            match difference(algorithm, expected, whole.map_or(0, |(sum, _)| sum)) {
                None => Ok(()),
                Some(message) => Err(Error::new(ErrorKind::Integrity, Operation::Get, &*part_file.url, message)),
            }
        });
        if let Err(error) = received {
            return Err(abandon(error, &mut temporary, size));
        }
        drop(part_file);
        let published = in_place(|| {
            temporary.file.set_len(size)?;
            let file = temporary.file.clone();
            temporary.publish(&target.name, object.mtime)?;
            file.metadata()
        });
        published.map(|metadata| FileState::of(&metadata)).map_err(failed)
    }

    /// Receives the parts whose checksum is not known yet, and completes `sums`.
    async fn receive_missing(
        self: &Arc<Self>,
        key: Arc<str>,
        object: &mut RemoteObject,
        file: &Arc<PartFile>,
        part_bytes: u64,
        sums: &mut [Option<u64>],
    ) -> Result<()> {
        // The disk cache would only keep another copy on the disk.
        let version = object.version.clone().map(Version::found);
        let expected = Expected { size: Some(object.size), version };
        let mut first = object.first.take();
        let mut missing = Vec::new();
        for (index, sum) in sums.iter().enumerate() {
            let start = index as u64 * part_bytes;
            let range = start..(start + part_bytes).min(object.size);
            let length = usize::try_from(range.end - range.start).expect("a part fits the address space");
            match sum {
                Some(_) => file.counters.add(length as u64),
                None => missing.push((range, FileSink::new(file.clone(), index, start, length))),
            }
        }
        // The response has the first part only.
        first = first.filter(|first| missing.first().is_some_and(|(range, _)| *range == first.result.range()));
        let filled = match missing.len() {
            0 => Vec::new(),
            1 => {
                let (range, mut sink) = missing.pop().expect("it has one element");
                self.receive(&key, range, &expected, &mut sink, first).await?;
                vec![sink]
            }
            _ => self.receive_all(key, expected, missing.into_iter(), first, MAX_PARTS).await?,
        };
        for sink in filled {
            let (index, sum) = sink.checksum();
            sums[index] = Some(sum);
        }
        Ok(())
    }
}

/// Removes the temporary file after an error that would occur again. Adds what a full file system lacks.
fn abandon(error: Error, temporary: &mut Temporary, size: u64) -> Error {
    let kind = error.kind();
    if kind.outcome_unknown() || matches!(kind, ErrorKind::Throttled | ErrorKind::Connect | ErrorKind::Cancelled) {
        return error;
    }
    let missing = temporary.missing_bytes(size).unwrap_or(0);
    temporary.keep(false);
    if kind == ErrorKind::Io && missing > 0 {
        return error.with_hint(format!("the object has {size} bytes, the file system lacks {missing} of them"));
    }
    error
}

impl LocalFile {
    fn open(folder: &Folder, name: &str) -> Result<Self> {
        let path = folder.path_of(name);
        let opened =
            folder.parent_of(name).and_then(|(parent, file)| match statat(&parent, file, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::Directory => Err(Errno::ISDIR.into()),
                Ok(_) if SpecialFile::find(&path).is_some() => Err(Errno::EXIST.into()),
                Ok(_) | Err(Errno::NOENT) => Ok((parent, file)),
                Err(error) => Err(error.into()),
            });
        match opened {
            Ok((folder, file)) => Ok(Self { folder, name: file.to_owned(), path }),
            Err(error) => Err(error_of(Operation::Put, &path, error)),
        }
    }

    /// Opens the file that exists under the name, if it is a regular one. Returns it with its size.
    fn existing(&self) -> Option<(File, u64)> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.folder, &self.name, flags, Mode::empty()).ok()?);
        let metadata = file.metadata().ok()?;
        metadata.is_file().then_some((file, metadata.len()))
    }

    fn failed(&self, error: io::Error) -> Error {
        error_of(Operation::Put, &self.path, error)
    }
}
