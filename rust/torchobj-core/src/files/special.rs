//! Devices, FIFOs and descriptors: files that are opened and written from their start to their end, and never replaced.
//!
//! `/dev/stdout`, `/dev/fd/N` and `/proc/self/fd/N` name a descriptor, whatever it is: a regular file is written at the
//! position that the descriptor has. A write waits for the reader of a FIFO or a terminal; the thread that waits ends soon
//! after its caller does not wait any more.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::policy::within;

/// Time between two checks whether the caller still waits. Well below any idle timeout.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of links that a path is followed through, as in the kernel (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// A write of this size does not block once there is space, if another process shares the descriptor and made it blocking
/// (pipe(7), `PIPE_BUF`).
const SHARED_BYTES: usize = 4096;

/// Size of the writes to other files, between which the caller can cancel.
const WRITE_BYTES: usize = 1 << 20;

/// A wait for the reader of a FIFO is logged after this time.
const NOTICE_AFTER: Duration = Duration::from_secs(5);

/// A file that is written and never replaced.
#[derive(Clone, Debug)]
pub struct SpecialFile {
    path: PathBuf,
    /// The descriptor of this process that it names.
    descriptor: Option<RawFd>,
}

impl SpecialFile {
    /// Finds the special file under a path, through symbolic links. `None` for a regular file, a folder, or nothing.
    pub fn find(path: &Path) -> Option<Self> {
        let mut at = path.to_owned();
        for _ in 0..MAX_LINKS {
            let Ok(link) = fs::read_link(&at) else { break };
            let folder = fs::canonicalize(folder_of(&at)).ok()?;
            if let Some(process) = process_of_descriptors(&folder) {
                let descriptor = at.file_name()?.to_str()?.parse().ok()?;
                let is_own = fs::canonicalize("/proc/self").is_ok_and(|own| own == process);
                return Some(Self { path: at, descriptor: is_own.then_some(descriptor) });
            }
            at = folder.join(link);
        }
        let kind = fs::metadata(path).ok()?.file_type();
        (!kind.is_file() && !kind.is_dir()).then(|| Self { path: path.to_owned(), descriptor: None })
    }

    /// Returns why the file cannot be written; `None` if it can be tried. `conditional`: the write has a condition.
    pub fn refusal(&self, conditional: bool) -> Option<&'static str> {
        if conditional {
            return Some("a device, FIFO or descriptor has no versions: it is written without a condition only");
        }
        let is_socket = || fs::metadata(&self.path).is_ok_and(|found| found.file_type().is_socket());
        (self.descriptor.is_none() && is_socket())
            .then_some("a socket cannot be opened for writing, and is not replaced by a file")
    }

    /// Opens the file. Waits for the reader of a FIFO.
    fn open(&self, caller: &Caller) -> io::Result<Opened> {
        if let Some(file) = self.descriptor.and_then(duplicate) {
            return Ok(Opened { file, is_shared: true });
        }
        let mut options = OpenOptions::new();
        options.write(true).custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC).bits().cast_signed());
        let began = Instant::now();
        let mut noticed = false;
        loop {
            match options.open(&self.path) {
                // A FIFO without a reader.
                Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) && self.is_fifo() => {
                    if !noticed && began.elapsed() >= NOTICE_AFTER {
                        noticed = true;
                        log::warn!("{} is a FIFO without a reader: the write waits for one", self.path.display());
                    }
                }
                Ok(file) => {
                    // A regular file behind a descriptor of another process, as a shell opens it.
                    if file.metadata()?.is_file() {
                        file.set_len(0)?;
                    }
                    return Ok(Opened { file, is_shared: false });
                }
                Err(error) => return Err(error),
            }
            caller.check()?;
            std::thread::sleep(POLL_INTERVAL / 4);
        }
    }

    fn is_fifo(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|found| found.file_type().is_fifo())
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// The folder of the process whose descriptors are in a folder: `/proc/PID` of `/proc/PID/fd` and `/proc/PID/task/TID/fd`.
fn process_of_descriptors(folder: &Path) -> Option<&Path> {
    let above = folder.strip_prefix("/proc").ok()?.file_name().filter(|name| *name == "fd").and(folder.parent())?;
    match above.parent()?.file_name()? {
        name if name == "task" => above.ancestors().nth(2),
        _ => Some(above),
    }
}

/// Duplicates a descriptor of this process; `None` if it is not open, or the kernel does not allow it.
fn duplicate(descriptor: RawFd) -> Option<File> {
    let duplicated = match descriptor {
        0 => io::stdin().as_fd().try_clone_to_owned().ok()?,
        1 => io::stdout().as_fd().try_clone_to_owned().ok()?,
        2 => io::stderr().as_fd().try_clone_to_owned().ok()?,
        _ => pidfd_getfd(pidfd_open(getpid(), PidfdFlags::empty()).ok()?, descriptor, PidfdGetfdFlags::empty()).ok()?,
    };
    Some(File::from(duplicated))
}

/// A special file that is open for writing.
#[derive(Debug)]
struct Opened {
    file: File,
    /// Whether others share its position and its flags.
    is_shared: bool,
}

/// Writes a special file from its start to its end. Opens it at the first write.
#[derive(Debug)]
pub struct SpecialWriter {
    special: SpecialFile,
    opened: Option<Opened>,
    written: u64,
}

impl SpecialWriter {
    /// A writer that has not opened the file.
    pub fn new(special: SpecialFile) -> Self {
        Self { special, opened: None, written: 0 }
    }

    /// Number of bytes written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    fn opened(&mut self, caller: &Caller) -> io::Result<&Opened> {
        match self.opened {
            Some(ref opened) => Ok(opened),
            None => Ok(self.opened.insert(self.special.open(caller)?)),
        }
    }

    /// Writes all bytes.
    ///
    /// # Errors
    /// Those of the file, or `Interrupted` if the caller does not wait any more.
    pub fn write(&mut self, mut bytes: &[u8], caller: &Caller) -> io::Result<()> {
        let length = bytes.len() as u64;
        let opened = self.opened(caller)?;
        let at_once = match opened.is_shared && !opened.file.metadata()?.is_file() {
            true => SHARED_BYTES,
            false => WRITE_BYTES,
        };
        while !bytes.is_empty() {
            caller.wait_for(&opened.file, PollFlags::OUT)?;
            match rustix::io::write(&opened.file, &bytes[..bytes.len().min(at_once)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.written += length;
        Ok(())
    }

    /// Ends the file, and makes it durable if `sync` and it is on a disk.
    ///
    /// # Errors
    /// As for `write`.
    pub fn finish(mut self, caller: &Caller, sync: bool) -> io::Result<Metadata> {
        let file = &self.opened(caller)?.file;
        let metadata = file.metadata()?;
        if sync && (metadata.is_file() || metadata.file_type().is_block_device()) {
            file.sync_all()?;
        }
        Ok(metadata)
    }
}

/// The call that waits for the work of a thread.
#[derive(Debug)]
pub struct Caller(Weak<()>);

impl Caller {
    /// Returns an error if the caller does not wait any more.
    fn check(&self) -> io::Result<()> {
        if self.0.strong_count() == 0 { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }

    /// Waits until a file can be read or written without blocking, or has failed.
    ///
    /// # Errors
    /// `Interrupted` if the caller does not wait any more.
    pub(super) fn wait_for(&self, file: &File, ready: PollFlags) -> io::Result<()> {
        let interval = Timespec::try_from(POLL_INTERVAL).expect("it is a fraction of a second");
        loop {
            self.check()?;
            match poll(&mut [PollFd::new(file, ready)], Some(&interval)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Runs blocking `work` on a thread of its own, with the caller for whom it waits. The future is woken periodically: no
/// timeout ends the work, which may wait for a reader. Dropping the future ends it at its next check.
///
/// # Errors
/// Those of the work.
pub async fn wait_for<T: Send + 'static>(
    work: impl FnOnce(&Caller) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let alive = Arc::new(());
    let caller = Caller(Arc::downgrade(&alive));
    let mut done = pin!(tokio::task::spawn_blocking(move || work(&caller)));
    loop {
        if let Some(done) = within(POLL_INTERVAL, done.as_mut()).await {
            return done.unwrap_or_else(|lost| Err(io::Error::other(lost)));
        }
    }
}
