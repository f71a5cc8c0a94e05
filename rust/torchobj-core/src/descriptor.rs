//! Descriptors that the program around this library may close, such as by `os.closerange`, and whose numbers then name files
//! of the program. They are noticed: the files of the program are neither written to nor closed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use rustix::fs::fstat;

/// A descriptor of this library.
#[derive(Debug)]
pub struct Descriptor {
    /// `None` while it is dropped.
    file: Option<OwnedFd>,
    identity: (u64, u64),
}

impl Descriptor {
    /// Owns a descriptor, which is open.
    ///
    /// # Errors
    /// The descriptor is not open.
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let identity = identity_of(file.as_fd())?;
        Ok(Self { file: Some(file), identity })
    }

    /// The descriptor, for one use. Costs a system call.
    ///
    /// # Errors
    /// The program has closed it.
    pub fn get(&self) -> io::Result<BorrowedFd<'_>> {
        let file = self.file.as_ref().expect("it is present until it is dropped").as_fd();
        if identity_of(file).is_ok_and(|identity| identity == self.identity) {
            return Ok(file);
        }
        let message = format!(
            "descriptor {} of torchobj was closed by this program, as os.closerange does: close only descriptors that the \
             program has opened",
            file.as_raw_fd()
        );
        Err(io::Error::new(io::ErrorKind::NotConnected, message))
    }

    /// Its number.
    pub fn number(&self) -> RawFd {
        self.file.as_ref().expect("it is present until it is dropped").as_raw_fd()
    }

    /// Another descriptor of the same file.
    ///
    /// # Errors
    /// The program has closed this one, or the process may not open another.
    pub fn try_clone(&self) -> io::Result<Self> {
        Self::new(self.get()?.try_clone_to_owned()?)
    }
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.number()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let is_ours = self.get().is_ok();
        if let Some(file) = self.file.take()
            && !is_ours
        {
            // The number is that of a file of the program, or of none.
            let _ = file.into_raw_fd();
        }
    }
}

/// Device and inode. Eventfds share one with each other and with epoll, timerfd and others, where a write of a counter fails or
/// wakes up once too often.
fn identity_of(file: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let found = fstat(file)?;
    #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss, reason = "their types depend on the system")]
    Ok((found.st_dev as u64, found.st_ino as u64))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_closed_descriptor_is_noticed_and_the_file_that_took_its_number_stays_open() {
        let open = |path| OwnedFd::from(File::open(path).unwrap());
        let mut descriptor = Descriptor::new(open("/proc/self/exe")).unwrap();
        assert!(descriptor.get().is_ok() && descriptor.try_clone().is_ok());
        // As a program that opens a file of its own under the number that it closed.
        rustix::io::dup2(open("/dev/null"), descriptor.file.as_mut().unwrap()).unwrap();
        let error = descriptor.get().unwrap_err().to_string();
        assert!(error.contains("was closed by this program"), "{error}");
        let number = descriptor.number();
        drop(descriptor);
        assert!(std::path::Path::new(&format!("/proc/self/fd/{number}")).exists());
    }
}
