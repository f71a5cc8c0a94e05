//! Segments that left the owner's process: granted to workers, taken back, and taken over by the trainer. Allocates
//! nothing but copies.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::layout::{Answer, DATA, Header, SEGMENTS};
use super::owner::{Arena, Books};
use super::segment::Segment;
use super::space::Extent;
use super::words::{self, Place};
use crate::buffer::Buffer;
use crate::fork;

/// How long a trainer has to take what a worker offered to it before it died.
const ORPHANED: Duration = Duration::from_secs(30);
/// The same once no loader reads any more.
const SETTLED: Duration = Duration::from_secs(1);

/// The segments that are with workers, and on their way from them, by id.
#[derive(Debug, Default)]
pub(super) struct Grants {
    all: Vec<Granted>,
    /// Ids that are in use.
    out: Vec<u32>,
    /// Unused ids.
    free: Vec<u32>,
    pub(super) transferred: u64,
    pub(super) copied: u64,
}

/// A segment that left this process.
#[derive(Debug)]
struct Granted {
    extent: Option<Extent>,
    len: u64,
    generation: u32,
    lane: u32,
    /// Where its id stands among those in use.
    position: usize,
    /// Since when it is on its way from a worker that died.
    orphaned: Option<Instant>,
    /// The trainer copies it at the moment: it must not be freed.
    copying: bool,
}

/// What the trainer does with a segment that it was offered.
enum Taking {
    /// It is the trainer's.
    Over(Extent, u64),
    /// Its worker still has it.
    Copy(Extent, u64),
}

impl Grants {
    /// Bytes of the arena that they take.
    pub(super) fn capacity(&self) -> u64 {
        self.out.iter().map(|id| self.all[*id as usize].extent.map_or(0, |extent| extent.capacity)).sum()
    }

    /// An id for a segment of `lane`, and its generation; `None` when all are in use.
    fn add(&mut self, lane: u32, extent: Extent, len: u64) -> Option<(u32, u32)> {
        let position = self.out.len();
        let granted = |generation| Granted {
            extent: Some(extent),
            len,
            generation,
            lane,
            position,
            orphaned: None,
            copying: false,
        };
        let id = match self.free.pop() {
            Some(id) => {
                let generation = words::next_generation(self.all[id as usize].generation);
                self.all[id as usize] = granted(generation);
                id
            }
            None if self.all.len() < SEGMENTS as usize => {
                self.all.push(granted(words::next_generation(0)));
                u32::try_from(self.all.len() - 1).expect("less than a million")
            }
            None => return None,
        };
        self.out.push(id);
        Some((id, self.all[id as usize].generation))
    }

    /// Begins to take a segment; `None` when it was not offered, or was taken before.
    fn take(&mut self, id: u32, generation: u32, place: Option<Place>) -> Option<Taking> {
        let granted = self.all.get_mut(id as usize).filter(|granted| granted.generation == generation)?;
        if granted.copying {
            return None;
        }
        match place? {
            Place::Claimed | Place::Released => None,
            Place::Offered if granted.orphaned.is_none() => {
                granted.copying = true;
                Some(Taking::Copy(granted.extent?, granted.len))
            }
            // The worker dropped it, or it died.
            Place::Offered | Place::Transferred => {
                let (extent, len) = self.remove(id)?;
                self.transferred += 1;
                Some(Taking::Over(extent, len))
            }
        }
    }

    /// Ends the copying of a segment; `made` tells whether it succeeded. Returns the segment itself where its worker has
    /// died or, which `decline` tells, dropped it meanwhile; the copy is not needed then.
    fn copied(&mut self, id: u32, made: bool, decline: impl FnOnce() -> bool) -> Option<(Extent, u64)> {
        let granted = &mut self.all[id as usize];
        granted.copying = false;
        if granted.orphaned.is_none() && decline() {
            self.copied += u64::from(made);
            return None;
        }
        self.transferred += 1;
        self.remove(id)
    }

    /// Takes a segment out: what it was, unless it is gone already.
    fn remove(&mut self, id: u32) -> Option<(Extent, u64)> {
        let granted = &mut self.all[id as usize];
        let (extent, len, position) = (granted.extent.take()?, granted.len, granted.position);
        self.out.swap_remove(position);
        if let Some(moved) = self.out.get(position) {
            self.all[*moved as usize].position = position;
        }
        self.free.push(id);
        Some((extent, len))
    }
}

impl Arena {
    /// Moves a segment to the worker of `lane`.
    ///
    /// # Errors
    /// The segment, when there are a million already.
    pub(super) fn grant(&self, lane: u32, mut segment: Segment) -> Result<Answer, Segment> {
        let _inside = fork::enter();
        let mut books = self.books();
        let len = segment.len;
        let extent = segment.extent.expect("it is there until it is granted or dropped");
        let Some((id, generation)) = books.grants.add(lane, extent, len) else { return Err(segment) };
        segment.extent = None;
        words::grant(Header(self.map()).state(id), generation);
        Ok(Answer { id, generation, offset: DATA + extent.offset, len, failed: false })
    }

    /// The bytes of a segment that a worker offered to the trainer: the segment itself once the worker has dropped it, a
    /// copy as long as it has not. `None` when it was not offered, or was taken before.
    ///
    /// # Errors
    /// The arena is full, and the system has no more memory for a copy.
    pub fn adopt(self: &Arc<Self>, id: u32, generation: u32) -> io::Result<Option<Buffer>> {
        if id >= SEGMENTS {
            return Ok(None);
        }
        let word = Header(self.map()).state(id);
        let taking = {
            let _inside = fork::enter();
            let grants = &mut self.books().grants;
            grants.take(id, generation, words::place(word, generation))
        };
        match taking {
            None => Ok(None),
            Some(Taking::Over(extent, len)) => Ok(Some(Segment::new(self.clone(), extent, len).buffer())),
            Some(Taking::Copy(extent, len)) => {
                // Not under the lock: it may be large. `copying` keeps the extent from being freed.
                let copy = Segment::copied(self, extent, len);
                let over = {
                    let _inside = fork::enter();
                    self.books().grants.copied(id, copy.is_ok(), || words::decline(word, generation))
                };
                match over {
                    Some((extent, len)) => Ok(Some(Segment::new(self.clone(), extent, len).buffer())),
                    None => copy.map(Some),
                }
            }
        }
    }

    /// Frees what workers have released, and what those of `dead` lanes had. What these had offered is kept for a while:
    /// the trainer may take it yet. Returns how many bytes were freed.
    pub(super) fn sweep(&self, dead: &[u32]) -> u64 {
        self.sweep_with(dead, ORPHANED)
    }

    /// Frees what workers that died had offered to a trainer. To be called when no loader reads any more.
    pub fn collect(&self) -> u64 {
        self.sweep_with(&[], SETTLED)
    }

    fn sweep_with(&self, dead: &[u32], patience: Duration) -> u64 {
        let _inside = fork::enter();
        let mut books = self.books();
        let Books { space, grants: Grants { all, out, free, .. }, .. } = &mut *books;
        let mut freed = 0;
        out.retain(|id| {
            let segment = &mut all[*id as usize];
            let dead = dead.contains(&segment.lane);
            let gone = match words::place(Header(self.map()).state(*id), segment.generation) {
                Some(Place::Released) => true,
                Some(Place::Offered | Place::Transferred) => {
                    if dead && segment.orphaned.is_none() {
                        segment.orphaned = Some(Instant::now());
                    }
                    !segment.copying && segment.orphaned.is_some_and(|since| since.elapsed() >= patience)
                }
                Some(Place::Claimed) | None => dead,
            };
            if let Some(extent) = segment.extent.take_if(|_| gone) {
                free.push(*id);
                space.give(extent);
                freed += extent.capacity;
            }
            !gone
        });
        if freed > 0 {
            out.iter().enumerate().for_each(|(position, id)| all[*id as usize].position = position);
        }
        self.cool(&mut books);
        freed
    }
}
