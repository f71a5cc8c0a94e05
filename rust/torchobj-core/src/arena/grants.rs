//! Segments that left the owner's process, by id: granted to workers, or on their way to the trainer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::block::Block;
use super::layout::SEGMENTS;
use super::space::Extent;
use super::sync::{self, GrantState};

/// The segments that were granted to workers and neither freed nor adopted.
#[derive(Debug, Default)]
pub(super) struct Grants {
    entries: Vec<Grant>,
    used_ids: Vec<u32>,
    free_ids: Vec<u32>,
    pub(super) transferred: u64,
    pub(super) copied: u64,
}

/// The memory of a granted segment.
#[derive(Clone, Debug)]
pub(super) enum Granted {
    /// A part of the arena.
    Extent(Extent),
    /// A block, which its worker fills.
    Block(Arc<Block>),
}

impl Granted {
    /// Bytes of the arena.
    fn capacity(&self) -> u64 {
        match self {
            Self::Extent(extent) => extent.capacity,
            Self::Block(_) => 0,
        }
    }
}

/// A segment that left this process.
#[derive(Debug)]
struct Grant {
    memory: Option<Granted>,
    len: u64,
    generation: u32,
    slot: u32,
    /// Process id of the worker.
    worker: u32,
    /// Index of its id in `used_ids`.
    position: usize,
    /// When the exit of its worker was detected, if the segment was offered.
    orphaned_at: Option<Instant>,
    /// The trainer copies it: it must not be freed.
    copying: bool,
    /// Its worker has exited, and the trainer will not adopt it.
    abandoned: bool,
}

/// How the trainer adopts a segment.
pub(super) enum Adoption {
    /// The trainer holds the segment now.
    Transfer(Granted, u64),
    /// The worker still maps the segment; the trainer copies it.
    Copy(Granted, u64),
}

impl Grants {
    /// Bytes of the arena that the granted segments take.
    pub(super) fn capacity(&self) -> u64 {
        let of = |id: &u32| self.entries[*id as usize].memory.as_ref().map_or(0, Granted::capacity);
        self.used_ids.iter().map(of).sum()
    }

    /// Adds a segment of a worker, given by its slot and process id. Returns its id and generation; `None` when all ids
    /// are in use.
    pub(super) fn add(&mut self, (slot, worker): (u32, u32), memory: Granted, len: u64) -> Option<(u32, u32)> {
        let position = self.used_ids.len();
        let grant = |generation| Grant {
            memory: Some(memory),
            len,
            generation,
            slot,
            worker,
            position,
            orphaned_at: None,
            copying: false,
            abandoned: false,
        };
        let id = match self.free_ids.pop() {
            Some(id) => {
                let generation = sync::next_generation(self.entries[id as usize].generation);
                self.entries[id as usize] = grant(generation);
                id
            }
            None if self.entries.len() < SEGMENTS as usize => {
                self.entries.push(grant(sync::next_generation(0)));
                u32::try_from(self.entries.len() - 1).expect("less than a million")
            }
            None => return None,
        };
        self.used_ids.push(id);
        Some((id, self.entries[id as usize].generation))
    }

    /// Starts the adoption of a segment; `None` if it was not offered, or was adopted before.
    pub(super) fn adopt(&mut self, id: u32, generation: u32, state: Option<GrantState>) -> Option<Adoption> {
        let grant = self.entries.get_mut(id as usize).filter(|grant| grant.generation == generation)?;
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
                let (memory, len) = self.remove(id)?;
                if state == Some(GrantState::Offered) {
                    discard_block(&memory);
                }
                self.transferred += 1;
                Some(Adoption::Transfer(memory, len))
            }
        }
    }

    /// Ends the copy of a segment, which `succeeded` or not. If its worker has exited or, as `decline` reports, dropped
    /// the segment meanwhile, returns the segment itself: the copy is not needed then.
    pub(super) fn finish_copy(
        &mut self,
        id: u32,
        succeeded: bool,
        decline: impl FnOnce() -> bool,
    ) -> Option<(Granted, u64)> {
        let grant = &mut self.entries[id as usize];
        grant.copying = false;
        let orphaned = grant.orphaned_at.is_some();
        if !orphaned && decline() {
            self.copied += u64::from(succeeded);
            return None;
        }
        self.transferred += 1;
        self.remove(id).inspect(|(memory, _)| {
            if orphaned {
                discard_block(memory);
            }
        })
    }

    fn remove(&mut self, id: u32) -> Option<(Granted, u64)> {
        let grant = &mut self.entries[id as usize];
        let (memory, len, position) = (grant.memory.take()?, grant.len, grant.position);
        self.used_ids.swap_remove(position);
        if let Some(moved) = self.used_ids.get(position) {
            self.entries[*moved as usize].position = position;
        }
        self.free_ids.push(id);
        Some((memory, len))
    }

    /// Makes the next [`reclaim`](Self::reclaim) remove the blocks that these workers had offered.
    pub(super) fn abandon_blocks(&mut self, workers: &[u32]) {
        for id in &self.used_ids {
            let grant = &mut self.entries[*id as usize];
            grant.abandoned |= workers.contains(&grant.worker) && matches!(grant.memory, Some(Granted::Block(_)));
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
    ) -> Vec<Granted> {
        let Self { entries, used_ids, free_ids, .. } = self;
        let mut freed = Vec::new();
        used_ids.retain(|id| {
            let grant = &mut entries[*id as usize];
            let exited = grant.abandoned || exited.contains(&grant.slot);
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
            if let Some(memory) = grant.memory.take_if(|_| unused) {
                if matches!(state, Some(GrantState::Claimed | GrantState::Offered) | None) {
                    discard_block(&memory);
                }
                free_ids.push(*id);
                freed.push(memory);
            }
            !unused
        });
        if !freed.is_empty() {
            used_ids.iter().enumerate().for_each(|(position, id)| entries[*id as usize].position = position);
        }
        freed
    }
}

/// Marks a block whose worker exited without dropping it: a child of that worker may have a view of it.
fn discard_block(memory: &Granted) {
    if let Granted::Block(block) = memory {
        block.discard();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_an_exited_worker_had_not_dropped_is_not_reused() {
        for copying in [false, true] {
            let (mut grants, block) = (Grants::default(), Arc::new(Block::create(0, 4096).unwrap()));
            let (id, generation) = grants.add((0, 1), Granted::Block(block.clone()), 10).unwrap();
            let adopt = |grants: &mut Grants| grants.adopt(id, generation, Some(GrantState::Offered));
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
