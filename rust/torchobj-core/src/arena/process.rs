//! Detects the exit of another process, also after its process id was assigned again.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use crate::descriptor::Descriptor;
use crate::fork;

/// Another process.
#[derive(Debug)]
pub(super) struct ProcessWatch {
    /// Its identity, as of `fork::generation`.
    identity: u64,
    process: Option<Pid>,
    /// `None` if the system provides none, or the process had exited.
    pidfd: Option<Descriptor>,
}

impl ProcessWatch {
    /// Watches the process with an identity of `fork::generation`.
    pub(super) fn new(identity: u64) -> Self {
        let process = i32::try_from(fork::pid_of(identity)).ok().and_then(Pid::from_raw);
        let pidfd = process.and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok());
        // Compared after the pidfd was opened, which keeps to the process.
        let pidfd = pidfd.filter(|_| !fork::is_replaced(identity)).and_then(|pidfd| Descriptor::new(pidfd).ok());
        Self { identity, process, pidfd }
    }

    /// Its identity.
    pub(super) fn identity(&self) -> u64 {
        self.identity
    }

    /// Returns whether it has exited.
    pub(super) fn has_exited(&self) -> bool {
        let Some(process) = self.process else { return true };
        match self.pidfd.as_ref().map(Descriptor::get) {
            Some(Ok(pidfd)) => {
                let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                matches!(poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&now)), Ok(1..))
            }
            Some(Err(_)) | None => test_kill_process(process) == Err(Errno::SRCH) || fork::is_replaced(self.identity),
        }
    }

    /// As where the system provides no pidfd.
    #[cfg(test)]
    pub(super) fn without_pidfd(self) -> Self {
        Self { pidfd: None, ..self }
    }
}
