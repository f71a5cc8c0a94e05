//! The mapping of an arena in a process that does not own it. Checks that the owner lives; sends no requests.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::process::Pid;

use super::layout::{self, ArenaHeader};
use super::map::Map;
use super::serve::{has_exited, open_pidfd};

/// Interval at which a waiting worker checks that the owner lives.
pub(super) const OWNER_CHECK_INTERVAL: Duration = Duration::from_secs(1);
pub(super) const OWNER_CHECK_TIMESPEC: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Error of a request that got no answers.
#[derive(Debug)]
pub enum Unanswered<E> {
    /// The process that owns the arena has exited or closed it.
    OwnerGone,
    /// All slots are in use.
    NoFreeSlot,
    /// The caller's check returned an error.
    Interrupted(E),
}

/// An arena that this process is attached to.
#[derive(Debug)]
pub(super) struct Attachment {
    pub(super) map: Arc<Map>,
    pub(super) eventfd: OwnedFd,
    owner: Pid,
    /// pidfd of the owner; `None` if the system provides none.
    pidfd: Option<OwnedFd>,
    /// Process id of the process that is attached.
    pub(super) process: u32,
}

impl Attachment {
    /// Attaches the current process.
    ///
    /// # Errors
    /// `map` is not that of an arena, or the owner has exited.
    pub(super) fn new(map: Arc<Map>, eventfd: OwnedFd) -> io::Result<Arc<Self>> {
        if map.len() < layout::DATA || map.header::<ArenaHeader>().magic.load(Acquire) != layout::MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the file is not an arena of this version of torchobj",
            ));
        }
        let owner = i32::try_from(map.header::<ArenaHeader>().owner.load(Relaxed)).ok().and_then(Pid::from_raw);
        let owner = owner.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the arena has no owner"))?;
        let pidfd = open_pidfd(owner);
        if has_exited(owner, pidfd.as_ref()) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process that owns the arena has exited"));
        }
        Ok(Arc::new(Self { map, eventfd, owner, pidfd, process: std::process::id() }))
    }

    /// Returns whether the current process is the one that is attached; false in a forked child.
    pub(super) fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    pub(super) fn header(&self) -> &ArenaHeader {
        self.map.header()
    }

    /// Process id of the owner.
    pub(super) fn owner(&self) -> u32 {
        self.header().owner.load(Relaxed)
    }

    /// Runs the check of a caller that waits, and checks that the owner answers requests.
    pub(super) fn check<E>(&self, check: &mut impl FnMut() -> Result<(), E>) -> Result<(), Unanswered<E>> {
        check().map_err(Unanswered::Interrupted)?;
        // A closed arena gives no answers, though its process may live.
        if has_exited(self.owner, self.pidfd.as_ref()) || self.header().closed.load(Acquire) != 0 {
            return Err(Unanswered::OwnerGone);
        }
        Ok(())
    }
}
