//! A worker's side of an arena: requests objects; `claim` holds the segments that it was granted. Allocates and frees
//! nothing, and takes no lock that another thread could have held at a fork.
//!
//! A wait calls a check of the caller, which runs signal handlers of Python, and these may request objects too. Therefore no
//! lock is held during a wait: each request has a slot of its own.
#![expect(unsafe_code, reason = "takes ownership of descriptors; the use states its invariant")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, Once};

use rustix::thread::futex;

use super::attachment::{Attachment, OWNER_CHECK_TIMESPEC, Unanswered, notify};
use super::block::Block;
use super::claim::Claim;
use super::layout::{Answer, BLOCKS, REFUSED, WorkerSlot};
use super::map::Map;
use super::owner::Arena;
use super::request;
use super::slots::{TakenSlot, WorkerSlots};
use super::sync;
use crate::descriptor::Descriptor;
use crate::error::{Error, ErrorKind, Operation};
use crate::source_key::SourceKey;

/// An arena, in a process that does not own it.
#[derive(Debug)]
pub struct Worker {
    attachment: Arc<Attachment>,
    /// The loader that this process works for.
    loader: AtomicU64,
    slots: WorkerSlots,
    /// Next iterator number; 0 means no iterator.
    iterators: AtomicU32,
    /// Iterators that ended and were not reported to the owner yet. Locked only briefly: a signal handler may end an
    /// iterator.
    ended_iterators: Mutex<Vec<u32>>,
    /// Blocks that this process has mapped. Their files are closed.
    blocks: Mutex<Vec<Arc<Block>>>,
}

/// Objects that a worker will demand later, for one of its iterators.
#[derive(Clone, Copy, Debug, Default)]
pub struct Announcement<'a> {
    /// Number from [`Worker::new_iterator`].
    pub iterator: u32,
    /// The objects, in the order of use.
    pub objects: &'a [SourceKey],
}

/// The result for one object.
#[derive(Debug)]
pub enum Reply {
    /// Its bytes.
    Claimed(Arc<Claim>),
    /// An error, serialized by [`crate::error::Error::to_bytes`].
    Failed(Vec<u8>),
}

impl Worker {
    /// Attaches in a forked child of the owner.
    ///
    /// # Errors
    /// The owner has exited.
    pub fn inherit(arena: &Arena) -> io::Result<Self> {
        let (map, eventfd) = arena.shared();
        Self::new(map, eventfd)
    }

    /// Attaches in a process that received the descriptors from the owner.
    ///
    /// # Errors
    /// The descriptors are not those of an arena, or the owner has exited.
    pub fn attach(file: OwnedFd, eventfd: OwnedFd) -> io::Result<Self> {
        Self::new(Arc::new(Map::attach(file)?), Arc::new(Descriptor::new(eventfd)?))
    }

    /// Takes ownership of descriptors for [`attach`](Self::attach) that were received as numbers.
    pub fn received(file: RawFd, eventfd: RawFd) -> [OwnedFd; 2] {
        // SAFETY: the caller has just received these descriptors from `multiprocessing` and does not use them
        // otherwise.
        [file, eventfd].map(|number| unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// Attaches in a forked child of this worker, which needs its own slot and locks.
    ///
    /// # Errors
    /// As [`inherit`](Self::inherit).
    pub fn for_child(&self) -> io::Result<Self> {
        Self::new(self.attachment.map.clone(), self.attachment.eventfd.clone())
    }

    fn new(map: Arc<Map>, eventfd: Arc<Descriptor>) -> io::Result<Self> {
        Ok(Self {
            attachment: Attachment::new(map, eventfd)?,
            loader: AtomicU64::new(0),
            slots: WorkerSlots::default(),
            iterators: AtomicU32::new(1),
            ended_iterators: Mutex::default(),
            blocks: Mutex::default(),
        })
    }

    /// Counts the requests that follow as those of a loader.
    pub fn set_loader(&self, loader: u64) {
        self.loader.store(loader, Relaxed);
    }

    /// Returns whether the current process attached this worker; false in a forked child.
    pub fn is_ours(&self) -> bool {
        self.attachment.is_ours()
    }

    /// The arena's file. Another process attaches to it.
    pub fn file(&self) -> &Descriptor {
        self.attachment.map.file()
    }

    /// The eventfd that the owner waits on.
    pub fn eventfd(&self) -> &Descriptor {
        &self.attachment.eventfd
    }

    /// Limit of the bytes of all segments.
    pub fn budget(&self) -> u64 {
        self.attachment.header().budget.load(Relaxed)
    }

    /// Starts an iterator of this worker. All objects that are announced for it can be cancelled together.
    pub fn new_iterator(&self) -> u32 {
        self.iterators.fetch_add(1, Relaxed)
    }

    /// Ends an iterator. The owner is notified with the next request, or when this process exits; the memory of unused
    /// announced objects may be reused before.
    pub fn end_iterator(&self, iterator: u32) {
        self.ended_iterators.lock().expect("no holder of this lock panics").push(iterator);
    }

    /// Requests objects of `source` and waits for all of them; `announced` objects follow them. `check` is called about
    /// once a second and on signals; an error of it ends the wait.
    ///
    /// # Errors
    /// See [`Unanswered`].
    pub fn request<E>(
        self: &Arc<Self>,
        source: u64,
        objects: &[SourceKey],
        announced: Announcement<'_>,
        mut check: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Reply>, Unanswered<E>> {
        let mut slot = self.slots.take(&self.attachment, &mut check)?;
        let mut replies = Vec::with_capacity(objects.len());
        let all: Vec<&SourceKey> = objects.iter().chain(announced.objects).collect();
        let mut left = all.as_slice();
        while !left.is_empty() {
            let missing = objects.len() - replies.len();
            let mut written = 0;
            let write = |shared: &WorkerSlot| {
                written = request::write_objects(shared, left);
                let demanded = written.min(missing);
                shared.announced.store(u32::try_from(written - demanded).expect("at most MAX_OBJECTS"), Relaxed);
                shared.iterator.store(announced.iterator, Relaxed);
                demanded
            };
            let answers = self.send(&mut slot.slot, source, write, &mut check)?;
            replies.extend(answers.into_iter().map(|answer| self.reply(answer)));
            left = &left[written..];
        }
        Ok(replies)
    }

    /// Requests two objects of `source` by a name that is malformed.
    #[cfg(test)]
    pub(crate) fn request_malformed(self: &Arc<Self>, source: u64) -> Vec<Reply> {
        let mut check = || Ok::<(), ()>(());
        let mut slot = self.slots.take(&self.attachment, &mut check).unwrap();
        let write = |shared: &WorkerSlot| {
            shared.write_names(b"\x07\0no name");
            2
        };
        let answers = self.send(&mut slot.slot, source, write, &mut check).unwrap();
        answers.into_iter().map(|answer| self.reply(answer)).collect()
    }

    /// Requests memory, whose content is undefined, of the first of these lengths that the limits of the owner allow. `None`
    /// if they allow none. `number` is that of this worker, for [`Arena::reclaim_blocks`]. `check` is as for
    /// [`request`](Self::request).
    ///
    /// # Errors
    /// See [`Unanswered`].
    pub fn block<E>(
        self: &Arc<Self>,
        number: u32,
        lengths: &[u64],
        mut check: impl FnMut() -> Result<(), E>,
    ) -> Result<Option<Arc<Claim>>, Unanswered<E>> {
        if self.attachment.eventfd.get().is_err() {
            // Without a notification of the owner, a block takes longer than other memory.
            return Ok(None);
        }
        let mut slot = self.slots.take(&self.attachment, &mut check)?;
        let write = |shared: &WorkerSlot| {
            shared.iterator.store(number, Relaxed);
            shared.write_numbers(lengths.iter().copied())
        };
        let answers = self.send(&mut slot.slot, BLOCKS, write, &mut check)?;
        Ok(answers.into_iter().find(|answer| *answer != REFUSED).and_then(|answer| self.granted_block(answer)))
    }

    /// The claim on a granted block, which is mapped at its first use. `None` if the system does not allow that; the block is
    /// returned then.
    fn granted_block(self: &Arc<Self>, answer: Answer) -> Option<Arc<Claim>> {
        #[expect(clippy::cast_possible_truncation, reason = "two halves of one word")]
        let (number, descriptor) = ((answer.offset >> 32) as u32, answer.offset as u32);
        let mut blocks = self.blocks.lock().expect("no holder of this lock panics");
        blocks.retain(|block| !block.is_discarded());
        if let Some(block) = blocks.iter().find(|block| block.number == number) {
            return Some(Claim::of_block(self.attachment.clone(), answer, block.clone()));
        }
        let owner = self.attachment.owner();
        match Block::attach(owner, descriptor, number, answer.len) {
            Ok(block) => {
                let block = Arc::new(block);
                blocks.push(block.clone());
                Some(Claim::of_block(self.attachment.clone(), answer, block))
            }
            Err(error) => {
                static WARNED: Once = Once::new();
                WARNED.call_once(|| {
                    log::warn!(
                        "batches are not built in recycled memory: the block of the loader cannot be mapped: {error}"
                    );
                });
                // Returns the block.
                drop(Claim::new(self.attachment.clone(), answer));
                None
            }
        }
    }

    /// Sends one request, which `write` writes to the slot, and waits for the answers, as many as `write` returns.
    fn send<E>(
        self: &Arc<Self>,
        slot: &mut TakenSlot,
        source: u64,
        write: impl FnOnce(&WorkerSlot) -> usize,
        check: &mut impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Answer>, Unanswered<E>> {
        let index = slot.index;
        if let Some(unread) = slot.unread {
            // The owner may read the slot until it has answered the interrupted request.
            self.wait(index, slot.number, check)?;
            // Dropped claims return their segments and blocks.
            let unread = self.answers(index, unread).filter(|answer| *answer != REFUSED);
            unread.for_each(|answer| drop(Claim::new(self.attachment.clone(), answer)));
            slot.unread = None;
        }
        let number = slot.number.wrapping_add(1);
        let shared = self.attachment.header().slot(index);
        shared.clear();
        let count = write(shared);
        shared.source.store(source, Relaxed);
        shared.count.store(u32::try_from(count).expect("at most MAX_OBJECTS"), Relaxed);
        let ended = self.ended_iterators.lock().expect("no holder of this lock panics").pop();
        shared.ended.store(ended.unwrap_or(0), Relaxed);
        shared.loader.store(self.loader.load(Relaxed), Relaxed);
        *slot = TakenSlot { index, number, unread: Some(count) };
        sync::publish(&shared.requested, number);
        notify(&self.attachment.eventfd);
        self.attachment.drop_inherited();
        self.wait(index, number, check)?;
        slot.unread = None;
        Ok(self.answers(index, count).collect())
    }

    fn answers(&self, slot: u32, count: usize) -> impl Iterator<Item = Answer> + '_ {
        let shared = self.attachment.header().slot(slot);
        (0..count).map(move |position| shared.read_answer(position))
    }

    fn wait<E>(&self, slot: u32, number: u32, check: &mut impl FnMut() -> Result<(), E>) -> Result<(), Unanswered<E>> {
        let answered = &self.attachment.header().slot(slot).answered;
        loop {
            let seen = sync::published(answered);
            if seen == number {
                return Ok(());
            }
            // Woken, interrupted, timed out, or changed before the wait: all require another check.
            let woken = futex::wait(answered, futex::Flags::empty(), seen, Some(&OWNER_CHECK_TIMESPEC));
            if woken.is_err() && sync::published(answered) != number {
                self.attachment.check(check)?;
            }
        }
    }

    fn reply(self: &Arc<Self>, answer: Answer) -> Reply {
        if answer == REFUSED {
            let message = "the owner could not grant the object to a worker: a million segments are in use, or a bug";
            return Reply::Failed(Error::new(ErrorKind::Io, Operation::Get, "", message).to_bytes());
        }
        let claim = Claim::new(self.attachment.clone(), answer);
        if answer.failed { Reply::Failed(claim.buffer().as_slice().to_vec()) } else { Reply::Claimed(claim) }
    }
}
