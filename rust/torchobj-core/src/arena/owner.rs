//! The owner's side of an arena: the only one that allocates and frees.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::futex;

use super::grants::Grants;
use super::layout::{self, Answer, DATA, Header, LANES};
use super::map::Map;
use super::request::{Asked, Request, split_names};
use super::segment::Segment;
use super::size::{self, Limits, Size};
use super::space::{Extent, Space, capacity_of};
use super::words;
use crate::fork;

/// An arena, in the process that owns it.
pub struct Arena {
    map: Arc<Map>,
    bell: OwnedFd,
    owner: u32,
    budget: u64,
    books: Mutex<Books>,
}

pub(super) struct Books {
    pub(super) space: Space,
    pub(super) grants: Grants,
    overdrawn: u64,
}

/// What an arena holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// What segments may take.
    pub budget: u64,
    /// What they take.
    pub used: u64,
    /// What workers hold of that, and what is on its way to the trainer.
    pub granted: u64,
    /// How often the budget was overdrawn.
    pub overdrawn: u64,
    /// Segments that the trainer took over from workers.
    pub transferred: u64,
    /// Segments that it copied, since the worker still had them.
    pub copied: u64,
}

impl Arena {
    /// A new arena whose segments take `budget` bytes, and more only when somebody waits. The budget is smaller where the
    /// limits of the process leave less; that is logged.
    ///
    /// # Errors
    /// The system refuses a file in memory, or its address space. The message says what to do about it.
    pub fn create(budget: u64) -> io::Result<Arc<Self>> {
        Self::create_within(budget, Limits::of_process())
    }

    pub(super) fn create_within(wanted: u64, limits: Limits) -> io::Result<Arc<Self>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = bell.map_err(|error| size::refused("eventfd", error.into()))?;
        let file = Map::file_in_memory().map_err(|error| size::refused("memfd_create", error))?;
        let mut fits = Size::within(wanted, limits);
        let (map, Size { budget, space }) = loop {
            let Some(size) = fits else { return Err(size::too_little(limits)) };
            match Map::create(file.try_clone()?, DATA + size.space) {
                Ok(map) => break (map, size),
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EFBIG)) => fits = size.halved(),
                Err(error) => return Err(size::refused("its file", error)),
            }
        };
        if budget < wanted {
            log::warn!(
                "objects that are read ahead may take {} MiB instead of {} MiB of memory: {limits}",
                budget >> 20,
                wanted >> 20
            );
        }
        let header = Header(&map);
        header.owner().store(std::process::id(), Relaxed);
        header.budget().store(budget, Relaxed);
        header.magic().store(layout::MAGIC, Release);
        let books = Books { space: Space::new(space, budget), grants: Grants::default(), overdrawn: 0 };
        Ok(Arc::new(Self { map: Arc::new(map), bell, owner: std::process::id(), budget, books: Mutex::new(books) }))
    }

    /// Its file, for who attaches.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.map.file()
    }

    /// What workers ring when they ask; a wait for it is a wait for requests.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The file's mapping, which forked children have too.
    pub(super) fn map(&self) -> &Arc<Map> {
        &self.map
    }

    /// The process that owns it.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Whether this is the process that owns it, and not a forked child.
    pub fn is_ours(&self) -> bool {
        self.owner == std::process::id()
    }

    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        assert!(self.is_ours(), "only the owner of an arena keeps its books, process {}: a bug", self.owner);
        self.books.lock().expect("no holder of this lock panics")
    }

    /// What it holds.
    pub fn usage(&self) -> Usage {
        let _inside = fork::enter();
        let books = self.books();
        let Books { space, grants, overdrawn } = &*books;
        Usage {
            budget: space.budget(),
            used: space.used(),
            granted: grants.capacity(),
            overdrawn: *overdrawn,
            transferred: grants.transferred,
            copied: grants.copied,
        }
    }

    /// What segments may take, in bytes.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Whether the budget has room for `len` bytes beside `reserved`.
    pub fn fits(&self, len: u64, reserved: u64) -> bool {
        let _inside = fork::enter();
        let books = self.books();
        books.space.used().saturating_add(reserved).saturating_add(capacity_of(len)) <= books.space.budget()
    }

    /// How much of the budget `len` bytes take.
    pub fn charge(len: u64) -> u64 {
        capacity_of(len)
    }

    /// A segment of `len` bytes, whether or not the budget has room.
    ///
    /// # Errors
    /// The file is full: of what is in use, or for this one.
    pub fn segment(self: &Arc<Self>, len: u64) -> io::Result<Arc<Segment>> {
        let _inside = fork::enter();
        let mut books = self.books();
        let extent = match books.space.take(len) {
            Some(extent) => extent,
            None => self.take_of_what_is_free(&mut books, len)?,
        };
        if books.space.used() > books.space.budget() {
            books.overdrawn += 1;
        }
        self.cool(&mut books);
        Ok(Segment::new(self.clone(), extent, len))
    }

    /// An extent of what is free in pieces of other sizes.
    fn take_of_what_is_free(&self, books: &mut Books, len: u64) -> io::Result<Extent> {
        for extent in books.space.cool(0) {
            let _ = self.map.punch(DATA + extent.offset, extent.capacity);
        }
        books.space.merge();
        let (size, used) = (books.space.size(), books.space.used());
        books.space.take(len).ok_or_else(|| {
            let message = format!(
                "the arena, which has {} MiB for objects that are read ahead, has no room for {len} bytes beside the {} \
                 MiB in use: let go of batches, or allow this process more address space (ulimit -v)",
                size >> 20,
                used >> 20
            );
            io::Error::new(io::ErrorKind::OutOfMemory, message)
        })
    }

    /// Gives back the pages of what is free beyond the budget.
    pub(super) fn cool(&self, books: &mut Books) {
        let limit = books.space.budget();
        for extent in books.space.cool(limit) {
            // A file in memory can be punched; if not, its pages stay, and are used again.
            let _ = self.map.punch(DATA + extent.offset, extent.capacity);
        }
    }

    /// Gives back the pages of everything that is free. For when nothing is read for a while.
    pub fn rest(&self) {
        let _inside = fork::enter();
        let mut books = self.books();
        for extent in books.space.cool(0) {
            let _ = self.map.punch(DATA + extent.offset, extent.capacity);
        }
    }

    pub(super) fn free(&self, extent: Extent) {
        // A forked child has a copy of what its parent owned; it frees nothing.
        if self.is_ours() {
            let _inside = fork::enter();
            let mut books = self.books();
            books.space.give(extent);
            self.cool(&mut books);
            drop(books);
            if words::needed(Header(&self.map).starving()) {
                ring(&self.bell);
            }
        }
    }

    /// Says that the owner waits for memory: from now on its bell rings when some comes back. Whether that is news; what
    /// came back before is free then, and is to be looked at again.
    pub fn starve(&self) -> bool {
        let news = words::starve(Header(&self.map).starving());
        if news {
            self.sweep(&[]);
        }
        news
    }

    /// Says that the owner does not wait for memory.
    pub fn sate(&self) {
        Header(&self.map).starving().store(0, Relaxed);
    }

    /// Says that nobody answers any more.
    pub(super) fn close(&self) {
        Header(&self.map).closed().store(1, Release);
    }

    /// Whether the owner waits for memory.
    pub(super) fn starves(&self) -> bool {
        Header(&self.map).starving().load(Relaxed) != 0
    }

    /// Lanes that have a worker, with its process id.
    pub(super) fn lanes(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let header = Header(&self.map);
        let end = header.lanes().load(Acquire).min(LANES);
        (0..end).map(move |index| (index, header.lane(index).worker().load(Acquire))).filter(|(_, worker)| *worker != 0)
    }

    /// The request of a lane, if its number is not `last`.
    pub(super) fn request(&self, lane: u32, last: u32) -> Option<Request> {
        let shared = Header(&self.map).lane(lane);
        let number = words::published(shared.asked());
        if number == last {
            return None;
        }
        let count = (shared.count().load(Relaxed) as usize).min(layout::MOST_OBJECTS);
        let end = (count + shared.ahead().load(Relaxed) as usize).min(layout::MOST_OBJECTS);
        let numbers =
            |positions: Range<usize>| positions.map(|position| shared.object(position).load(Relaxed)).collect();
        let (objects, ahead) = match shared.read_names() {
            bytes if bytes.is_empty() => (Asked::Numbers(numbers(0..count)), numbers(count..end)),
            bytes => (Asked::Names(split_names(&bytes, count)), Vec::new()),
        };
        let (source, iterator) = (shared.source().load(Relaxed), shared.iterator().load(Relaxed));
        let ended = Some(shared.ended().load(Relaxed)).filter(|ended| *ended != 0);
        Some(Request { lane, number, source, objects, ahead, iterator, ended })
    }

    pub(super) fn write_answer(&self, lane: u32, position: usize, answer: Answer) {
        Header(&self.map).lane(lane).write_answer(position, answer);
    }

    /// Publishes the answers of a request and wakes its worker.
    pub(super) fn publish(&self, lane: u32, number: u32) {
        let answered = Header(&self.map).lane(lane).answered();
        words::publish(answered, number);
        // Nobody there is as good as somebody woken.
        let _ = futex::wake(answered, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Makes a lane anybody's again, after its worker is gone and its segments are swept.
    pub(super) fn vacate(&self, lane: u32) {
        let lane = Header(&self.map).lane(lane);
        lane.asked().store(0, Relaxed);
        lane.answered().store(0, Relaxed);
        lane.worker().store(0, Release);
    }
}

/// Rings a bell.
pub(super) fn ring(bell: &OwnedFd) {
    // A full counter is a bell that rings.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} bytes of process {})", self.map.len(), self.owner)
    }
}
