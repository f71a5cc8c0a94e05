//! A worker's side of an arena: asks for objects, and holds what it was granted. Allocates and frees nothing, takes no
//! lock that another thread could have held at a fork.
#![expect(unsafe_code, reason = "makes memory of segments; each use says which invariant it keeps")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use rustix::event::Timespec;
use rustix::process::Pid;
use rustix::thread::futex;

use super::layout::{self, Answer, Header, LANES, Lane, MOST_NAME_BYTES, MOST_OBJECTS, REFUSED};
use super::map::Map;
use super::owner::{Arena, ring};
use super::serve::{is_gone, watch};
use super::words;
use crate::buffer::{Buffer, Landing, Memory};
use crate::error::{Error, ErrorKind, Operation};

/// How often a worker that waits looks whether the owner lives.
const GLANCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// An arena, in a process that another one owns it for.
pub struct Worker {
    map: Arc<Map>,
    bell: OwnedFd,
    owner: Pid,
    /// Readable when the owner is gone; `None` where the system gives none.
    watch: Option<OwnedFd>,
    process: u32,
    /// The lane that this process took. One request at a time.
    lane: Mutex<Option<Taken>>,
    /// Names of iterators; 0 is none's.
    iterators: AtomicU32,
    /// Iterators whose end the owner was not told. Held for a moment only: it may be a signal's handler that ends one.
    ended: Mutex<Vec<u32>>,
}

/// A lane, as its worker knows it.
#[derive(Clone, Copy)]
struct Taken {
    index: u32,
    /// Of the last request.
    number: u32,
    /// How many answers to that, which may announce only, nobody has looked at: who asked was interrupted.
    left: Option<usize>,
}

/// Objects that a worker will want, and for which of its iterators.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ahead<'a> {
    /// What [`Worker::new_iterator`] gave.
    pub iterator: u32,
    /// In the order in which they will be wanted.
    pub objects: &'a [u64],
}

/// Why a worker got no answers.
#[derive(Debug)]
pub enum Unanswered<E> {
    /// The process that owns the arena is gone.
    OwnerGone,
    /// There are as many workers as there are lanes.
    NoLane,
    /// What the caller's glance said.
    Interrupted(E),
}

/// What became of one object.
#[derive(Debug)]
pub enum Reply {
    /// Its bytes.
    Landed(Arc<Claim>),
    /// An error, as [`crate::error::Error::to_bytes`] wrote it.
    Failed(Vec<u8>),
}

impl Worker {
    /// In a forked child of the owner.
    ///
    /// # Errors
    /// The owner is gone, or the system gives no more descriptors.
    pub fn inherit(arena: &Arena) -> io::Result<Self> {
        Self::on(arena.map().clone(), arena.bell().try_clone_to_owned()?)
    }

    /// In a process that got the descriptors by other means.
    ///
    /// # Errors
    /// They are not those of an arena, or the owner is gone.
    pub fn attach(file: OwnedFd, bell: OwnedFd) -> io::Result<Self> {
        Self::on(Arc::new(Map::attach(file)?), bell)
    }

    /// The descriptors to [`attach`](Self::attach) by, in a process that was given them by number.
    pub fn received(file: RawFd, bell: RawFd) -> [OwnedFd; 2] {
        // SAFETY: whoever calls has just got these descriptors from `multiprocessing`, for this, and uses them no more.
        [file, bell].map(|number| unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// In a forked child of a worker: one of its own. The lane and the locks of this one are its process's.
    ///
    /// # Errors
    /// As [`inherit`](Self::inherit).
    pub fn again(&self) -> io::Result<Self> {
        Self::on(self.map.clone(), self.bell.try_clone()?)
    }

    fn on(map: Arc<Map>, bell: OwnedFd) -> io::Result<Self> {
        let header = Header(&map);
        if map.len() < layout::DATA || header.magic().load(Acquire) != layout::MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no arena of this version of torchobj"));
        }
        let owner = i32::try_from(header.owner().load(Relaxed)).ok().and_then(Pid::from_raw);
        let owner = owner.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the arena has no owner"))?;
        let watch = watch(owner);
        if is_gone(owner, watch.as_ref()) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process that owns the arena is gone"));
        }
        let (lane, ended) = (Mutex::new(None), Mutex::new(Vec::new()));
        let process = std::process::id();
        Ok(Self { map, bell, owner, watch, process, lane, iterators: AtomicU32::new(1), ended })
    }

    /// Whether this is the process that made this, and not a forked child.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// The arena's file, for who attaches.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.map.file()
    }

    /// What the owner listens to.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Whether the owner's process is gone.
    fn orphaned(&self) -> bool {
        is_gone(self.owner, self.watch.as_ref())
    }

    /// What the owner's segments may take, in bytes.
    pub fn budget(&self) -> u64 {
        Header(&self.map).budget().load(Relaxed)
    }

    /// A new iterator of this worker: what is announced for it can be cancelled together.
    pub fn new_iterator(&self) -> u32 {
        self.iterators.fetch_add(1, Relaxed)
    }

    /// Ends an iterator. The owner hears it with the next request, or by the end of this process; until then others may
    /// have the memory of what it did not use.
    pub fn end_iterator(&self, iterator: u32) {
        self.ended.lock().expect("no holder of this lock panics").push(iterator);
    }

    /// Asks for objects of `source` and waits for all of them; `ahead` is announced behind them. `glance` is called
    /// about once a second, and at signals; what it returns as an error ends the wait.
    ///
    /// # Errors
    /// See [`Unanswered`].
    pub fn ask<E>(
        self: &Arc<Self>,
        source: u64,
        mut objects: &[u64],
        mut ahead: Ahead<'_>,
        mut glance: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Reply>, Unanswered<E>> {
        let mut lane = self.lane.lock().expect("no holder of this lock panics");
        let mut replies = Vec::with_capacity(objects.len());
        while !(objects.is_empty() && ahead.objects.is_empty()) {
            let (now, later) = objects.split_at(objects.len().min(MOST_OBJECTS));
            let (behind, rest) = ahead.objects.split_at(ahead.objects.len().min(MOST_OBJECTS - now.len()));
            (objects, ahead.objects) = (later, rest);
            let write = |shared: Lane<'_>| {
                for (position, object) in now.iter().chain(behind).enumerate() {
                    shared.object(position).store(*object, Relaxed);
                }
                shared.ahead().store(u32::try_from(behind.len()).expect("at most MOST_OBJECTS"), Relaxed);
                shared.iterator().store(ahead.iterator, Relaxed);
            };
            replies.append(&mut self.request(&mut lane, source, now.len(), write, &mut glance)?);
        }
        Ok(replies)
    }

    /// Asks for objects of `source` by names; otherwise as [`ask`](Self::ask).
    ///
    /// # Errors
    /// See [`Unanswered`].
    ///
    /// # Panics
    /// A name is longer than a request: 32 KiB.
    pub fn ask_by_name<E>(
        self: &Arc<Self>,
        source: u64,
        names: &[Vec<u8>],
        mut glance: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Reply>, Unanswered<E>> {
        let mut lane = self.lane.lock().expect("no holder of this lock panics");
        let mut replies = Vec::with_capacity(names.len());
        let mut rest = names;
        while !rest.is_empty() {
            let mut bytes = Vec::new();
            let mut count = 0;
            for name in rest.iter().take(MOST_OBJECTS) {
                if bytes.len() + 2 + name.len() > MOST_NAME_BYTES {
                    break;
                }
                bytes.extend_from_slice(&u16::try_from(name.len()).expect("at most 32 KiB").to_le_bytes());
                bytes.extend_from_slice(name);
                count += 1;
            }
            assert!(count > 0, "a name of {} bytes fits into no request", rest[0].len());
            let write = |shared: Lane<'_>| shared.write_names(&bytes);
            replies.append(&mut self.request(&mut lane, source, count, write, &mut glance)?);
            rest = &rest[count..];
        }
        Ok(replies)
    }

    /// One request, whose `count` wanted objects `write` writes to the lane, with what else it says.
    fn request<E>(
        self: &Arc<Self>,
        lane: &mut Option<Taken>,
        source: u64,
        count: usize,
        write: impl FnOnce(Lane<'_>),
        glance: &mut impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Reply>, Unanswered<E>> {
        let taken = match *lane {
            Some(taken) => taken,
            None => Taken { index: self.take_lane().ok_or(Unanswered::NoLane)?, number: 0, left: None },
        };
        let index = taken.index;
        if let Some(left) = taken.left {
            // Until it is answered the owner may read the lane.
            self.wait(index, taken.number, glance)?;
            drop(self.replies(index, left));
        }
        let number = taken.number.wrapping_add(1);
        *lane = Some(Taken { index, number, left: Some(count) });
        let shared = Header(&self.map).lane(index);
        // What this request does not say, the one before may have said.
        for word in [shared.name_bytes(), shared.ahead(), shared.iterator()] {
            word.store(0, Relaxed);
        }
        write(shared);
        shared.source().store(source, Relaxed);
        shared.count().store(u32::try_from(count).expect("at most MOST_OBJECTS"), Relaxed);
        let ended = self.ended.lock().expect("no holder of this lock panics").pop();
        shared.ended().store(ended.unwrap_or(0), Relaxed);
        words::publish(shared.asked(), number);
        ring(&self.bell);
        self.wait(index, number, glance)?;
        *lane = Some(Taken { index, number, left: None });
        Ok(self.replies(index, count))
    }

    fn replies(self: &Arc<Self>, lane: u32, count: usize) -> Vec<Reply> {
        let shared = Header(&self.map).lane(lane);
        (0..count).map(|position| self.reply(shared.read_answer(position))).collect()
    }

    fn take_lane(&self) -> Option<u32> {
        let header = Header(&self.map);
        let taken = (0..LANES)
            .find(|index| header.lane(*index).worker().compare_exchange(0, self.process, AcqRel, Relaxed).is_ok())?;
        header.lanes().fetch_max(taken + 1, AcqRel);
        Some(taken)
    }

    fn wait<E>(&self, lane: u32, number: u32, glance: &mut impl FnMut() -> Result<(), E>) -> Result<(), Unanswered<E>> {
        let answered = Header(&self.map).lane(lane).answered();
        loop {
            let seen = words::published(answered);
            if seen == number {
                return Ok(());
            }
            // Woken, interrupted, too late, or changed meanwhile: all mean to look again.
            let woken = futex::wait(answered, futex::Flags::empty(), seen, Some(&GLANCE));
            if woken.is_err() && words::published(answered) != number {
                glance().map_err(Unanswered::Interrupted)?;
                // Nobody answers any more, though its process may live.
                if self.orphaned() || Header(&self.map).closed().load(Acquire) != 0 {
                    return Err(Unanswered::OwnerGone);
                }
            }
        }
    }

    fn reply(self: &Arc<Self>, answer: Answer) -> Reply {
        if answer == REFUSED {
            let message = "its memory could not be passed to a worker: a million buffers are with workers, or a bug";
            return Reply::Failed(Error::new(ErrorKind::Io, Operation::Get, "", message).to_bytes());
        }
        let claim = Arc::new(Claim { worker: self.clone(), answer, lent: AtomicBool::new(false) });
        if answer.failed { Reply::Failed(claim.buffer().as_slice().to_vec()) } else { Reply::Landed(claim) }
    }
}

/// A segment that a worker was granted. Dropping it transfers it to the trainer if it was offered, and else releases it.
pub struct Claim {
    worker: Arc<Worker>,
    answer: Answer,
    /// Whether its memory was lent: once.
    lent: AtomicBool,
}

/// The name under which the trainer finds a segment that a worker offered to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Id of the granted segment.
    pub id: u32,
    /// Which of the segments that had this id.
    pub generation: u32,
}

impl Claim {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.answer.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.answer.len == 0
    }

    /// Process id of the arena's owner.
    pub fn owner(&self) -> u32 {
        Header(&self.worker.map).owner().load(Relaxed)
    }

    /// Offers the segment to the trainer, which gets its memory once this claim is dropped, and a copy of its bytes before
    /// that. Until the claim is dropped its bytes may be read here, and not be written. `None` where it was offered
    /// before, and in a forked child of the worker.
    pub fn offer(&self) -> Option<Offer> {
        let Answer { id, generation, .. } = self.answer;
        let offered = self.worker.is_ours() && words::offer(Header(&self.worker.map).state(id), generation);
        offered.then_some(Offer { id, generation })
    }

    /// Its bytes. The claim lives as long as these do.
    ///
    /// # Panics
    /// When it is called twice.
    pub fn buffer(self: &Arc<Self>) -> Buffer {
        assert!(!self.lent.swap(true, Relaxed), "the memory of a claim is lent once");
        let Answer { offset, len, .. } = self.answer;
        let start = self.worker.map.at(offset, len);
        let len = usize::try_from(len).expect("it is mapped");
        // SAFETY: the owner granted the segment to this process alone, and takes it back only after the claim in `keep`
        // is dropped; it is lent once, as was just checked; the mapping lives with the worker; the owner wrote these bytes
        // before it answered. Once it is offered (`offer`) the owner may read it too, and nobody writes to it.
        let memory = unsafe { Memory::lent(start, len, Box::new(self.clone())) };
        let (landing, dest) = Landing::new(memory);
        drop(dest);
        landing.finish(len).expect("its one writer was just dropped")
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A forked child of a worker holds a copy of a claim that is not its own.
        if self.worker.is_ours() {
            let Answer { id, generation, .. } = self.answer;
            let header = Header(&self.worker.map);
            if words::release(header.state(id), generation, header.starving()) {
                ring(&self.worker.bell);
            }
        }
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Claim({} bytes)", self.answer.len)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({} bytes, process {})", self.map.len(), self.process)
    }
}
