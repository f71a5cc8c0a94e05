//! The mapping of an arena in a process that does not own it. Checks that the owner lives; sends no requests.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use rustix::event::Timespec;

use super::layout::{self, Answer, ArenaHeader};
use super::map::Map;
use super::process::ProcessWatch;
use super::sync;
use crate::descriptor::Descriptor;
use crate::fork;

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
    pub(super) eventfd: Arc<Descriptor>,
    owner: ProcessWatch,
    /// The process that is attached.
    process: u64,
    /// Fork by which the owner started it; 0 if it was not forked by the owner.
    pub(super) born: u64,
    inherited: Mutex<InheritedClaims>,
}

/// Claims that this process has dropped, while processes that it forked may have views of their segments.
#[derive(Debug)]
struct InheritedClaims {
    /// With the number of forks before the views began.
    claims: Vec<(u64, Answer)>,
    checked: Instant,
}

impl Attachment {
    /// Attaches the current process.
    ///
    /// # Errors
    /// `map` is not that of an arena, or the owner has exited.
    pub(super) fn new(map: Arc<Map>, eventfd: Arc<Descriptor>) -> io::Result<Arc<Self>> {
        if map.len() < layout::DATA || map.header::<ArenaHeader>().magic.load(Acquire) != layout::MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the file is not an arena of this version of torchobj",
            ));
        }
        let owner = ProcessWatch::new(map.header::<ArenaHeader>().owner.load(Relaxed));
        if owner.has_exited() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process that owns the arena has exited"));
        }
        fork::watch_children(&fork::enter());
        let born = if std::os::unix::process::parent_id() == fork::pid_of(owner.identity()) { fork::born() } else { 0 };
        let inherited = Mutex::new(InheritedClaims { claims: Vec::new(), checked: Instant::now() });
        Ok(Arc::new(Self { map, eventfd, owner, process: fork::generation(), born, inherited }))
    }

    /// Returns whether the current process is the one that is attached; false in a forked child.
    pub(super) fn is_ours(&self) -> bool {
        self.process == fork::generation()
    }

    /// The process that is attached.
    pub(super) fn process(&self) -> u64 {
        self.process
    }

    pub(super) fn header(&self) -> &ArenaHeader {
        self.map.header()
    }

    /// Identity of the owner's process.
    pub(super) fn owner(&self) -> u64 {
        self.owner.identity()
    }

    /// Drops the claim on the segment or block that was granted by `answer`, which this process claimed after `forks` forks: at
    /// once, or when no process that was forked since may have views of it.
    pub(super) fn drop_claim(&self, answer: Answer, forks: u64) {
        let inside = fork::enter();
        let now = fork::count(&inside);
        if now == forks || fork::are_gone(&inside, forks, now) {
            self.drop_now(answer);
        } else {
            self.inherited.lock().expect("no holder of this lock panics").claims.push((forks, answer));
        }
    }

    /// Drops claims whose views ended with the processes that had inherited them. Called with each request.
    pub(super) fn drop_inherited(&self) {
        let inside = fork::enter();
        let mut inherited = self.inherited.lock().expect("no holder of this lock panics");
        if inherited.claims.is_empty() || inherited.checked.elapsed() < OWNER_CHECK_INTERVAL {
            return;
        }
        inherited.checked = Instant::now();
        let now = fork::count(&inside);
        for (_, answer) in inherited.claims.extract_if(.., |(forks, _)| fork::are_gone(&inside, *forks, now)) {
            self.drop_now(answer);
        }
    }

    fn drop_now(&self, answer: Answer) {
        let header = self.header();
        if sync::drop_claim(header.state(answer.id), answer.generation, &header.memory_needed) {
            notify(&self.eventfd);
        }
    }

    /// Runs the check of a caller that waits, and checks that the owner answers requests.
    pub(super) fn check<E>(&self, check: &mut impl FnMut() -> Result<(), E>) -> Result<(), Unanswered<E>> {
        check().map_err(Unanswered::Interrupted)?;
        // A closed arena gives no answers, though its process may live.
        if self.owner.has_exited() || self.header().closed.load(Acquire) != 0 {
            return Err(Unanswered::OwnerGone);
        }
        Ok(())
    }
}

/// Notifies an eventfd. The owner looks for requests once a second even if it is not notified.
pub(super) fn notify(eventfd: &Descriptor) {
    match eventfd.get() {
        // The write fails only when the counter is at its maximum: the eventfd is readable then.
        Ok(eventfd) => drop(rustix::io::write(eventfd, &1_u64.to_ne_bytes())),
        Err(error) => {
            static WARNED: Once = Once::new();
            WARNED.call_once(|| log::warn!("reads of this process take up to a second each: {error}"));
        }
    }
}
