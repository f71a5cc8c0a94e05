//! Segments or blocks that left the owner's process, by id: granted to workers, or on their way to the trainer.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::block::Block;
use super::layout::{GRANTS, SEGMENTS};
use super::space::Extent;
use super::sync::{self, GrantState};

/// What can be granted to a worker.
pub(super) trait Grantable: Clone {
    /// The worker of a grant has exited without dropping it: a process that it forked may have a view. `born` is the fork by which
    /// this process started the worker; 0 if it did not fork it.
    fn inherit(&mut self, born: u64);
}

/// An extent that left the owner's process.
#[derive(Clone, Copy, Debug)]
pub(super) struct GrantedExtent {
    pub(super) extent: Extent,
    /// Number of forks of the owner before those whose processes may have a view; `None` if there are none.
    pub(super) forks: Option<u64>,
}

impl Grantable for GrantedExtent {
    fn inherit(&mut self, born: u64) {
        self.forks = born.checked_sub(1);
    }
}

impl Grantable for Arc<Block> {
    /// The block is not reused.
    fn inherit(&mut self, _born: u64) {
        self.discard();
    }
}

/// What was granted to workers and neither freed nor adopted: extents of the arena, or blocks.
#[derive(Debug)]
pub(super) struct Grants<M> {
    /// The ids of this table, end excluded.
    ids: Range<u32>,
    /// By id, relative to the first.
    entries: Vec<Grant<M>>,
    used_ids: Vec<u32>,
    free_ids: Vec<u32>,
    pub(super) transferred: u64,
    pub(super) copied: u64,
}

/// A segment or block that left this process.
#[derive(Debug)]
struct Grant<M> {
    memory: Option<M>,
    len: u64,
    generation: u32,
    to: GrantedTo,
    /// Index of its id in `used_ids`.
    position: usize,
    /// When the exit of its worker was detected, if the segment was offered.
    orphaned_at: Option<Instant>,
    /// The trainer copies it: it must not be freed.
    copying: bool,
    /// Its worker has exited, and the trainer will not adopt it.
    abandoned: bool,
}

/// How the trainer adopts the memory of a grant.
pub(super) enum Adoption<M> {
    /// The trainer holds it now.
    Transfer(M, u64),
    /// The worker still maps it; the trainer copies it.
    Copy(M, u64),
}

/// The worker that a grant is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct GrantedTo {
    /// Index of its slot.
    pub(super) slot: u32,
    /// Number that its loader assigned; 0 for segments.
    pub(super) worker: u32,
    /// The fork by which the owner started its process; 0 if it did not fork it.
    pub(super) born: u64,
}

impl Grants<GrantedExtent> {
    /// The grants of segments.
    pub(super) fn of_segments() -> Self {
        Self::new(0..SEGMENTS)
    }

    /// Bytes of the arena that the granted segments take.
    pub(super) fn capacity(&self) -> u64 {
        let of = |id: &u32| self.entry(*id).memory.as_ref().map_or(0, |granted| granted.extent.capacity);
        self.used_ids.iter().map(of).sum()
    }
}

impl Grants<Arc<Block>> {
    /// The grants of blocks.
    pub(super) fn of_blocks() -> Self {
        Self::new(SEGMENTS..GRANTS)
    }
}

impl<M: Grantable> Grants<M> {
    fn new(ids: Range<u32>) -> Self {
        Self { ids, entries: Vec::new(), used_ids: Vec::new(), free_ids: Vec::new(), transferred: 0, copied: 0 }
    }

    fn entry(&self, id: u32) -> &Grant<M> {
        &self.entries[(id - self.ids.start) as usize]
    }

    fn entry_mut(&mut self, id: u32) -> &mut Grant<M> {
        &mut self.entries[(id - self.ids.start) as usize]
    }

    /// Adds memory that is granted to a worker. Returns its id and generation; `None` when all ids are in use.
    pub(super) fn add(&mut self, to: GrantedTo, memory: M, len: u64) -> Option<(u32, u32)> {
        let position = self.used_ids.len();
        let grant = |generation| Grant {
            memory: Some(memory),
            len,
            generation,
            to,
            position,
            orphaned_at: None,
            copying: false,
            abandoned: false,
        };
        let id = match self.free_ids.pop() {
            Some(id) => {
                let generation = sync::next_generation(self.entry(id).generation);
                *self.entry_mut(id) = grant(generation);
                id
            }
            None if self.entries.len() < self.ids.len() => {
                self.entries.push(grant(sync::next_generation(0)));
                self.ids.start + u32::try_from(self.entries.len() - 1).expect("less than two million")
            }
            None => return None,
        };
        self.used_ids.push(id);
        Some((id, self.entry(id).generation))
    }

    /// Starts the adoption of a segment; `None` if it was not offered, or was adopted before.
    pub(super) fn adopt(&mut self, id: u32, generation: u32, state: Option<GrantState>) -> Option<Adoption<M>> {
        let index = id.checked_sub(self.ids.start)?;
        let grant = self.entries.get_mut(index as usize).filter(|grant| grant.generation == generation)?;
        if grant.copying {
            return None;
        }
        match state? {
            GrantState::Claimed | GrantState::Returned => None,
            GrantState::Offered if grant.orphaned_at.is_none() => {
                grant.copying = true;
                Some(Adoption::Copy(grant.memory.clone()?, grant.len))
            }
            // The worker has exited, or dropped it.
            GrantState::Offered | GrantState::Transferred => {
                let (mut memory, len) = self.remove(id)?;
                if state == Some(GrantState::Offered) {
                    memory.inherit(self.entry(id).to.born);
                }
                self.transferred += 1;
                Some(Adoption::Transfer(memory, len))
            }
        }
    }

    /// Ends the copy of a segment, which `succeeded` or not. If its worker has exited or, as `decline` reports, dropped
    /// the segment meanwhile, returns the segment itself: the copy is not needed then.
    pub(super) fn finish_copy(&mut self, id: u32, succeeded: bool, decline: impl FnOnce() -> bool) -> Option<(M, u64)> {
        let grant = self.entry_mut(id);
        grant.copying = false;
        let orphaned = grant.orphaned_at.is_some();
        if !orphaned && decline() {
            self.copied += u64::from(succeeded);
            return None;
        }
        self.transferred += 1;
        let (mut memory, len) = self.remove(id)?;
        if orphaned {
            memory.inherit(self.entry(id).to.born);
        }
        Some((memory, len))
    }

    fn remove(&mut self, id: u32) -> Option<(M, u64)> {
        let grant = self.entry_mut(id);
        let (memory, len, position) = (grant.memory.take()?, grant.len, grant.position);
        self.used_ids.swap_remove(position);
        if let Some(moved) = self.used_ids.get(position).copied() {
            self.entry_mut(moved).position = position;
        }
        self.free_ids.push(id);
        Some((memory, len))
    }

    /// Makes the next [`reclaim`](Self::reclaim) remove what these workers, given by their numbers, had offered.
    pub(super) fn abandon(&mut self, workers: &[u32]) {
        for grant in self.entries.iter_mut().filter(|grant| grant.memory.is_some()) {
            grant.abandoned |= workers.contains(&grant.to.worker);
        }
    }

    /// Removes what workers returned, and the segments of the workers of the `exited` slots. What an exited worker had
    /// offered is removed after `orphan_timeout` only. `state` returns the state of a segment, by id and generation.
    /// Returns the memory to free.
    pub(super) fn reclaim(
        &mut self,
        exited: &[u32],
        orphan_timeout: Duration,
        state: impl Fn(u32, u32) -> Option<GrantState>,
    ) -> Vec<M> {
        let Self { ids, entries, used_ids, free_ids, .. } = self;
        let mut freed = Vec::new();
        let index = |id: u32| (id - ids.start) as usize;
        used_ids.retain(|id| {
            let grant = &mut entries[index(*id)];
            let exited = grant.abandoned || exited.contains(&grant.to.slot);
            let state = state(*id, grant.generation);
            let unused = match state {
                Some(GrantState::Returned) => true,
                Some(GrantState::Offered | GrantState::Transferred) => {
                    if exited && grant.orphaned_at.is_none() {
                        grant.orphaned_at = Some(Instant::now());
                    }
                    let timed_out = grant.orphaned_at.is_some_and(|since| since.elapsed() >= orphan_timeout);
                    !grant.copying && (grant.abandoned || timed_out)
                }
                Some(GrantState::Claimed) | None => exited,
            };
            if let Some(mut memory) = grant.memory.take_if(|_| unused) {
                if matches!(state, Some(GrantState::Claimed | GrantState::Offered) | None) {
                    memory.inherit(grant.to.born);
                }
                free_ids.push(*id);
                freed.push(memory);
            }
            !unused
        });
        if !freed.is_empty() {
            used_ids.iter().enumerate().for_each(|(position, id)| entries[index(*id)].position = position);
        }
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_an_exited_worker_had_not_dropped_is_not_reused() {
        for copying in [false, true] {
            let (mut grants, block) = (Grants::of_blocks(), Arc::new(Block::create(0, 4096).unwrap()));
            let (id, generation) = grants.add(GrantedTo { slot: 0, worker: 1, born: 0 }, block.clone(), 10).unwrap();
            let adopt = |grants: &mut Grants<_>| grants.adopt(id, generation, Some(GrantState::Offered));
            if copying {
                assert!(matches!(adopt(&mut grants), Some(Adoption::Copy(..))));
            }
            assert!(grants.reclaim(&[0], Duration::MAX, |_, _| Some(GrantState::Offered)).is_empty());
            if copying {
                assert!(
                    grants
                        .finish_copy(id, true, || unreachable!("the offer of an exited worker is not declined"))
                        .is_some()
                );
            } else {
                assert!(matches!(adopt(&mut grants), Some(Adoption::Transfer(..))));
            }
            assert!(block.is_discarded());
        }
    }
}
