//! The owner's side of an arena: allocates and frees segments, grants segments and blocks to workers, adopts and reclaims
//! them, and reads the requests of workers.
#![expect(unsafe_code, reason = "creates memory regions over segments and blocks; each use states its invariant")]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::futex;

use super::attachment::notify;
use super::block::{Block, ViewedBlock};
use super::block_pool::BlockPool;
use super::grants::{Adoption, Grantable, GrantedExtent, GrantedTo, Grants};
use super::layout::{self, Answer, ArenaHeader, DATA, GRANTS, SEGMENTS, SLOTS};
use super::map::Map;
use super::request::{self, WorkerRequest};
use super::size::{self, Limits, Size};
use super::space::{Extent, Space, capacity_of};
use super::sync;
use super::usage::Usage;
use crate::buffer::{Buffer, Memory, PendingBuffer};
use crate::descriptor::Descriptor;
use crate::fork::{self, ForkGuard};

/// Time in which a trainer must adopt what an exited worker had offered.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(30);
/// The same while no loader reads.
const ORPHAN_TIMEOUT_IDLE: Duration = Duration::from_secs(1);

/// An arena, in the process that owns it.
#[derive(Debug)]
pub struct Arena {
    map: Arc<Map>,
    /// Shared with the attachment of a forked child, which needs no descriptor of its own.
    eventfd: Arc<Descriptor>,
    owner: u64,
    budget: u64,
    state: Mutex<ArenaState>,
}

#[derive(Debug)]
struct ArenaState {
    space: Space,
    segments: Grants<GrantedExtent>,
    blocks: Grants<Arc<Block>>,
    /// Blocks that are not in use.
    pool: BlockPool,
    /// Extents that are withdrawn while forked children may have views of them: those of the forks after the first number until
    /// the second.
    inherited: Vec<(u64, u64, Extent)>,
}

impl ArenaState {
    /// Frees an extent, of which this process had views since it had forked `forks` times; `None` if it had none. Withdraws it
    /// while processes that were forked since exist. Returns the bytes freed.
    fn free(&mut self, extent: Extent, forks: Option<u64>, inside: &ForkGuard) -> u64 {
        let now = fork::count(inside);
        match forks {
            Some(forks) if forks != now && !fork::are_gone(inside, forks, now) => {
                self.space.withdraw(extent);
                self.inherited.push((forks, now, extent));
                0
            }
            _ => {
                self.space.free(extent);
                extent.capacity
            }
        }
    }

    /// Frees the withdrawn extents of processes that have exited.
    fn restore(&mut self, inside: &ForkGuard) {
        let Self { space, inherited, .. } = self;
        for (.., extent) in inherited.extract_if(.., |(after, until, _)| fork::are_gone(inside, *after, *until)) {
            space.restore(extent);
        }
    }
}

impl Arena {
    /// Creates an arena whose segments take `budget` bytes; a demanded object may exceed it. Logs a warning and uses a
    /// smaller budget where the limits of the process require it.
    ///
    /// # Errors
    /// The system refuses the `memfd` or the address space. The message names the limit to raise.
    pub fn create(budget: u64) -> io::Result<Arc<Self>> {
        Self::create_within(budget, Limits::of_process())
    }

    pub(super) fn create_within(requested_budget: u64, limits: Limits) -> io::Result<Arc<Self>> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let eventfd = eventfd.map_err(io::Error::from).and_then(Descriptor::new);
        let eventfd = Arc::new(eventfd.map_err(|error| size::creation_error("eventfd", error))?);
        let file = Map::file_in_memory().map_err(|error| size::creation_error("memfd_create", error))?;
        let mut fits = Size::within(requested_budget, limits);
        let (map, Size { budget, space }) = loop {
            let Some(size) = fits else { return Err(size::limits_too_low(limits)) };
            match Map::create(file.try_clone()?, DATA + size.space) {
                Ok(map) => break (map, size),
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EFBIG)) => fits = size.halved(),
                Err(error) => return Err(size::creation_error("its file", error)),
            }
        };
        if budget < requested_budget {
            log::warn!(
                "the memory for objects that are read ahead is limited to {} MiB instead of {} MiB: {limits}",
                budget >> 20,
                requested_budget >> 20
            );
        }
        let header: &ArenaHeader = map.header();
        header.owner.store(fork::generation(), Relaxed);
        header.budget.store(budget, Relaxed);
        header.magic.store(layout::MAGIC, Release);
        let state = ArenaState {
            space: Space::new(space),
            segments: Grants::of_segments(),
            blocks: Grants::of_blocks(),
            pool: BlockPool::new(budget),
            inherited: Vec::new(),
        };
        fork::watch_children(&fork::enter());
        Ok(Arc::new(Self { map: Arc::new(map), eventfd, owner: fork::generation(), budget, state: Mutex::new(state) }))
    }

    /// The arena's file. Another process attaches to it.
    pub fn file(&self) -> &Descriptor {
        self.map.file()
    }

    /// The eventfd that workers notify after writing a request.
    pub fn eventfd(&self) -> &Descriptor {
        &self.eventfd
    }

    /// The mapping of the file, and the eventfd. Forked children share them.
    pub(super) fn shared(&self) -> (Arc<Map>, Arc<Descriptor>) {
        (self.map.clone(), self.eventfd.clone())
    }

    pub(super) fn header(&self) -> &ArenaHeader {
        self.map.header()
    }

    /// Returns whether the current process is the owner; false in a forked child.
    pub fn is_ours(&self) -> bool {
        self.owner == fork::generation()
    }

    fn state(&self) -> MutexGuard<'_, ArenaState> {
        assert!(
            self.is_ours(),
            "the state of an arena belongs to its owner, process {}: a bug",
            fork::pid_of(self.owner)
        );
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Current memory use.
    pub fn usage(&self) -> Usage {
        let _inside = fork::enter();
        let state = self.state();
        let ArenaState { space, segments, blocks, pool, .. } = &*state;
        Usage {
            budget: self.budget,
            used: space.used(),
            resident: space.used() + space.resident(),
            granted: segments.capacity(),
            transferred: segments.transferred + blocks.transferred,
            copied: segments.copied + blocks.copied,
            blocks: pool.bytes(),
            used_blocks: pool.bytes() - pool.unused_bytes(),
            granted_blocks: pool.granted(),
        }
    }

    /// Limit of the bytes of all segments.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Returns whether a segment of `len` bytes fits the budget together with the segments in use and `reserved` bytes.
    pub fn fits(&self, len: u64, reserved: u64) -> bool {
        let _inside = fork::enter();
        let state = self.state();
        state.space.used().saturating_add(reserved).saturating_add(capacity_of(len)) <= self.budget
    }

    /// Bytes of the budget that a segment of `len` bytes takes.
    pub fn charge(len: u64) -> u64 {
        capacity_of(len)
    }

    /// Allocates a segment of `len` bytes, also beyond the budget.
    ///
    /// # Errors
    /// The file has no free extent of this size.
    pub fn segment(self: &Arc<Self>, len: u64) -> io::Result<Arc<Segment>> {
        let inside = fork::enter();
        let mut state = self.state();
        let extent = match state.space.allocate(len) {
            Some(extent) => extent,
            None => {
                state.restore(&inside);
                self.allocate_merged(&mut state, len)?
            }
        };
        let exceeds_budget = state.space.used() > self.budget;
        self.release_pages(&mut state, self.budget);
        Ok(Segment::new(self.clone(), extent, len, exceeds_budget, fork::count(&inside)))
    }

    /// Merges free extents of all size classes and allocates an extent from the result.
    fn allocate_merged(&self, state: &mut ArenaState, len: u64) -> io::Result<Extent> {
        self.release_pages(state, 0);
        state.space.merge();
        let (size, used) = (state.space.size(), state.space.used());
        state.space.allocate(len).ok_or_else(|| {
            let message = format!(
                "the arena ({} MiB for objects that are read ahead) has no free space for {len} bytes; {} MiB are in use: \
                 delete batches that are not needed, or allow this process more address space (ulimit -v)",
                size >> 20,
                used >> 20
            );
            io::Error::new(io::ErrorKind::OutOfMemory, message)
        })
    }

    /// Releases pages of free extents until used and resident bytes fit `limit`.
    fn release_pages(&self, state: &mut ArenaState, limit: u64) {
        for extent in state.space.release(limit) {
            // If the system refuses to punch the hole, the pages stay resident and are reused.
            let _ = self.map.punch(DATA + extent.offset, extent.capacity);
        }
    }

    /// Releases the pages of all free extents, and all unused blocks. Called when the prefetcher is idle.
    pub fn release_free_pages(&self) {
        let _inside = fork::enter();
        let mut state = self.state();
        self.release_pages(&mut state, 0);
        state.pool.free_unused();
    }

    /// Returns whether a worker is attached.
    pub fn has_workers(&self) -> bool {
        self.slots().next().is_some()
    }

    /// Requests a notification of the eventfd when memory is freed. Returns false if this was requested already.
    /// Otherwise frees what workers returned before the call; the caller checks for free memory again.
    pub fn set_memory_needed(&self) -> bool {
        let newly_set = sync::set_memory_needed(&self.header().memory_needed);
        if newly_set {
            self.reclaim(&[]);
        }
        newly_set
    }

    /// Cancels [`set_memory_needed`](Self::set_memory_needed).
    pub fn clear_memory_needed(&self) {
        self.header().memory_needed.store(0, Relaxed);
    }

    /// Slots that have a worker, with the identity of its process.
    pub(super) fn slots(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let header = self.header();
        let end = header.used_slots.load(Acquire).min(SLOTS);
        (0..end).map(move |index| (index, header.slot(index).worker.load(Acquire))).filter(|(_, worker)| *worker != 0)
    }

    /// The request of a slot, unless its number is `last`.
    pub(super) fn request(&self, slot: u32, last: u32) -> Option<WorkerRequest> {
        let shared = self.header().slot(slot);
        let number = sync::published(&shared.requested);
        if number == last {
            return None;
        }
        let count = (shared.count.load(Relaxed) as usize).min(layout::MAX_OBJECTS);
        let end = (count + shared.announced.load(Relaxed) as usize).min(layout::MAX_OBJECTS);
        let mut objects = request::read_objects(shared, end);
        let announced = objects.split_off(count);
        let (source, iterator) = (shared.source.load(Relaxed), shared.iterator.load(Relaxed));
        let ended = Some(shared.ended.load(Relaxed)).filter(|ended| *ended != 0);
        let (worker, loader) = (shared.worker.load(Relaxed), shared.loader.load(Relaxed));
        Some(WorkerRequest { slot, worker, loader, number, source, objects, announced, iterator, ended })
    }

    /// Publishes the answers of a request and wakes its worker.
    pub(super) fn publish(&self, slot: u32, number: u32) {
        let answered = &self.header().slot(slot).answered;
        sync::publish(answered, number);
        // An error means that no worker waits.
        let _ = futex::wake(answered, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Frees a slot, and wakes the workers that wait for one. Its worker has exited and its segments were freed.
    pub(super) fn vacate(&self, slot: u32) {
        let header = self.header();
        let slot = header.slot(slot);
        slot.requested.store(0, Relaxed);
        slot.answered.store(0, Relaxed);
        slot.born.store(0, Relaxed);
        slot.worker.store(0, Release);
        let vacated = &header.vacated;
        sync::publish(vacated, sync::published(vacated).wrapping_add(1));
        // An error means that no worker waits.
        let _ = futex::wake(vacated, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Grants a segment to the worker of `slot`.
    ///
    /// # Errors
    /// Returns the segment when all ids, a million, are in use.
    pub(super) fn grant(&self, slot: u32, mut segment: Segment) -> Result<Answer, Segment> {
        let _inside = fork::enter();
        let mut state = self.state();
        let len = segment.len;
        let extent = segment.extent.expect("it is present until the segment is granted or dropped");
        let granted = GrantedExtent { extent, forks: None };
        let Some((id, generation)) = state.segments.add(self.granted_to(slot, 0), granted, len) else {
            return Err(segment);
        };
        segment.extent = None;
        sync::grant(self.header().state(id), generation);
        Ok(Answer { id, generation, offset: DATA + extent.offset, len, failed: false })
    }

    fn granted_to(&self, slot: u32, worker: u32) -> GrantedTo {
        GrantedTo { slot, worker, born: self.header().slot(slot).born.load(Relaxed) }
    }

    /// Grants a block, whose content is undefined, to the worker of `slot` with number `worker`: of the first of these lengths that
    /// the limits allow. Returns the position of this length too; `None` if they allow none.
    pub(super) fn grant_block(&self, slot: u32, worker: u32, lengths: &[u64]) -> Option<(usize, Answer)> {
        let _inside = fork::enter();
        let mut state = self.state();
        let (position, block) = state.pool.take_first(slot, lengths)?;
        let len = lengths[position];
        let to = self.granted_to(slot, worker);
        let add = |descriptor| Some((descriptor, state.blocks.add(to, block.clone(), len)?));
        let Some((descriptor, (id, generation))) = block.descriptor().and_then(add) else {
            state.pool.give(block);
            return None;
        };
        sync::grant(self.header().state(id), generation);
        let offset = u64::from(block.number) << 32 | u64::from(descriptor);
        Some((position, Answer { id, generation, offset, len, failed: false }))
    }

    /// The bytes of a segment or block that a worker offered to the trainer: the memory itself once the worker has dropped it,
    /// a copy before that. `None` if it was not offered, or was adopted before.
    ///
    /// # Errors
    /// The arena is full, and the system has no more memory for a copy.
    pub fn adopt(self: &Arc<Self>, id: u32, generation: u32) -> io::Result<Option<Buffer>> {
        match id {
            ..SEGMENTS => self.adopt_from(|state| &mut state.segments, id, generation),
            SEGMENTS..GRANTS => self.adopt_from(|state| &mut state.blocks, id, generation),
            GRANTS.. => Ok(None),
        }
    }

    fn adopt_from<M: Adoptable>(
        self: &Arc<Self>,
        grants: impl Fn(&mut ArenaState) -> &mut Grants<M>,
        id: u32,
        generation: u32,
    ) -> io::Result<Option<Buffer>> {
        let word = self.header().state(id);
        let adoption = {
            let _inside = fork::enter();
            grants(&mut self.state()).adopt(id, generation, sync::grant_state(word, generation))
        };
        match adoption {
            None => Ok(None),
            Some(Adoption::Transfer(memory, len)) => Ok(Some(memory.adopted(self, len))),
            Some(Adoption::Copy(memory, len)) => {
                // Not under the lock: the copy may be large. `copying` keeps the memory from being freed.
                let copy = memory.copied(self, len);
                let transferred = {
                    let _inside = fork::enter();
                    grants(&mut self.state()).finish_copy(id, copy.is_ok(), || sync::decline(word, generation))
                };
                match transferred {
                    Some((memory, len)) => Ok(Some(memory.adopted(self, len))),
                    None => copy.map(Some),
                }
            }
        }
    }

    /// Frees what workers returned, and the segments of the workers of the `exited` slots. What an exited worker had
    /// offered is kept for a while, for the trainer to adopt. Returns the number of bytes freed.
    pub(super) fn reclaim(&self, exited: &[u32]) -> u64 {
        self.reclaim_after(exited, ORPHAN_TIMEOUT)
    }

    /// Frees what exited workers had offered. Called when no loader reads.
    pub fn reclaim_orphans(&self) -> u64 {
        self.reclaim_after(&[], ORPHAN_TIMEOUT_IDLE)
    }

    /// Frees the blocks that workers had offered, given by the numbers that their loader assigned. Called when they have exited
    /// and the trainer has adopted all that it will.
    pub fn reclaim_blocks(&self, workers: &[u32]) {
        let inside = fork::enter();
        self.state().blocks.abandon(workers);
        drop(inside);
        self.reclaim(&[]);
    }

    fn reclaim_after(&self, exited: &[u32], orphan_timeout: Duration) -> u64 {
        let inside = fork::enter();
        let mut state = self.state();
        let header = self.header();
        let grant_state = |id, generation| sync::grant_state(header.state(id), generation);
        let returned = state.segments.reclaim(exited, orphan_timeout, grant_state);
        let freed = returned.into_iter().map(|granted| state.free(granted.extent, granted.forks, &inside)).sum();
        let returned = state.blocks.reclaim(exited, orphan_timeout, grant_state);
        returned.into_iter().for_each(|block| state.pool.give(block));
        self.release_pages(&mut state, self.budget);
        freed
    }

    /// Frees the memory that forked children had views of, as far as they have exited. Called about once a second.
    pub(super) fn reclaim_inherited(&self) {
        let inside = fork::enter();
        let mut state = self.state();
        if !state.inherited.is_empty() {
            state.restore(&inside);
            self.release_pages(&mut state, self.budget);
        }
    }
}

/// A range of the arena that the owner's process may write to. Dropping it frees the range.
#[derive(Debug)]
pub struct Segment {
    arena: Arc<Arena>,
    /// `None` after it was granted to a worker.
    extent: Option<Extent>,
    len: u64,
    exceeds_budget: bool,
    /// Number of forks before the views of this process began.
    forks: u64,
    /// Whether `memory` was called.
    taken: AtomicBool,
}

impl Segment {
    fn new(arena: Arc<Arena>, extent: Extent, len: u64, exceeds_budget: bool, forks: u64) -> Arc<Self> {
        Arc::new(Self { arena, extent: Some(extent), len, exceeds_budget, forks, taken: AtomicBool::new(false) })
    }

    /// Returns whether the budget was exceeded when it was allocated.
    pub fn exceeds_budget(&self) -> bool {
        self.exceeds_budget
    }

    /// The bytes, which were written before.
    ///
    /// # Panics
    /// As [`memory`](Self::memory).
    pub fn buffer(self: &Arc<Self>) -> Buffer {
        let memory = self.memory();
        let len = memory.len();
        Buffer::over(memory, len)
    }

    /// The memory of the segment, for one writer. Keeps the segment alive.
    ///
    /// # Panics
    /// A second call.
    pub fn memory(self: &Arc<Self>) -> Memory {
        assert!(!self.taken.swap(true, Relaxed), "the memory of a segment is taken once");
        let extent = self.extent.expect("it is present until the segment is granted or dropped");
        let start = self.arena.map.at(DATA + extent.offset, self.len);
        let len = usize::try_from(self.len).expect("it is mapped");
        // SAFETY: only this segment uses the extent until it is freed, and the `Arc` passed to `taken` keeps it (a
        // segment is granted only after it was moved out of its `Arc`); `memory` returns it once, as was just checked;
        // the mapping lives as long as the arena; pages of a `memfd` read as zeroes before the first write.
        unsafe { Memory::borrowed(start, len, Box::new(self.clone())) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // A forked child has copies of its parent's segments and must not free them.
        if self.arena.is_ours()
            && let Some(extent) = self.extent.take()
        {
            let inside = fork::enter();
            let mut state = self.arena.state();
            // A child that was forked meanwhile may have a view.
            state.free(extent, Some(self.forks), &inside);
            self.arena.release_pages(&mut state, self.arena.budget);
            drop(state);
            if sync::memory_needed(&self.arena.header().memory_needed) {
                notify(&self.arena.eventfd);
            }
        }
    }
}

/// A block while the trainer holds it. Dropping it gives the block back.
struct HeldBlock {
    arena: Arc<Arena>,
    viewed: ViewedBlock,
}

impl Drop for HeldBlock {
    fn drop(&mut self) {
        // A forked child has copies of its parent's blocks and must not free them.
        if self.arena.is_ours() {
            // No fork between the two.
            let _inside = fork::enter();
            let block = self.viewed.end().clone();
            self.arena.state().pool.give(block);
        }
    }
}

/// Memory that the trainer adopts from a worker.
trait Adoptable: Grantable {
    /// The first `len` bytes, which belong to the trainer alone.
    fn adopted(self, arena: &Arc<Arena>, len: u64) -> Buffer;

    /// A copy of the first `len` bytes.
    fn copied(&self, arena: &Arc<Arena>, len: u64) -> io::Result<Buffer>;
}

impl Adoptable for GrantedExtent {
    fn adopted(self, arena: &Arc<Arena>, len: u64) -> Buffer {
        let forks = self.forks.unwrap_or_else(|| fork::count(&fork::enter()));
        Segment::new(arena.clone(), self.extent, len, false, forks).buffer()
    }

    /// To a new segment, or to the heap if the arena is full.
    fn copied(&self, arena: &Arc<Arena>, len: u64) -> io::Result<Buffer> {
        let memory = arena.segment(len).map(|segment| segment.memory()).or_else(|_| allocate(len))?;
        Ok(copy(arena.map.at(DATA + self.extent.offset, len), len, memory))
    }
}

impl Adoptable for Arc<Block> {
    fn adopted(self, arena: &Arc<Arena>, len: u64) -> Buffer {
        let held = HeldBlock { arena: arena.clone(), viewed: ViewedBlock::new(self, len) };
        let start = held.viewed.at(len);
        let len = usize::try_from(len).expect("it is mapped");
        // SAFETY: `held` keeps the mapping, and the owner grants the block again only after `held` is dropped. The worker has
        // dropped its claim, or has exited (`Grants::adopt`).
        Buffer::over(unsafe { Memory::borrowed(start, len, Box::new(held)) }, len)
    }

    /// To the heap.
    fn copied(&self, _arena: &Arc<Arena>, len: u64) -> io::Result<Buffer> {
        Ok(copy(self.at(len), len, allocate(len)?))
    }
}

/// Copies `len` bytes of an offered segment into `memory`.
fn copy(start: NonNull<u8>, len: u64, memory: Memory) -> Buffer {
    let len = usize::try_from(len).expect("it is mapped");
    let (pending, mut dest) = PendingBuffer::new(memory);
    let unfilled = &mut dest.unfilled_mut()[..len];
    // SAFETY: the only caller (`Arena::adopt`) passes `len` bytes that are mapped, as `at` checked, and that no new memory
    // overlaps: they are neither freed nor granted again while their grant is marked as `copying`. No reference to them is
    // created, because the worker may still write to a block; the copy may then have bytes of before and after.
    unsafe { std::ptr::copy_nonoverlapping(start.as_ptr(), unfilled.as_mut_ptr(), len) };
    dest.advance(len);
    pending.close(dest)
}

fn allocate(len: u64) -> io::Result<Memory> {
    Memory::allocate(usize::try_from(len).expect("it is mapped"))
}
