//! Allocates extents of an arena by size class and counts the bytes in use. Touches no memory.
//!
//! A free extent keeps its pages *resident* and is the first to be allocated again: the first access to a page costs
//! more than copying its bytes. When used and resident bytes together exceed the budget, the pages of free extents are
//! *released*: the caller punches them out of the file. A released extent keeps its offset.

use std::collections::{BTreeMap, VecDeque};

/// Unit of extents: one page of 4 KiB.
pub(super) const GRANULE: u64 = 4096;

/// Size classes per power of two: at most a fifth of an extent is unused.
const STEPS: u64 = 4;

/// A range of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Start, relative to the start of the space.
    pub offset: u64,
    /// Length in bytes: the size of the class.
    pub capacity: u64,
}

/// Free extents of one size class, the most recently freed last.
#[derive(Debug, Default)]
struct Class {
    resident: VecDeque<u64>,
    released: Vec<u64>,
}

/// The free and used extents of an arena.
#[derive(Debug)]
pub(super) struct Space {
    size: u64,
    /// Extents beyond this offset were never allocated.
    end: u64,
    used: u64,
    resident: u64,
    classes: BTreeMap<u64, Class>,
    /// Free ranges without pages that belong to no class: length by offset.
    gaps: BTreeMap<u64, u64>,
}

/// Exceeds the size of every arena file. Longer requests count as this length: they are refused, and sums do not
/// overflow.
const LARGEST: u64 = 1 << 48;

/// Capacity of the smallest class that holds `len` bytes, at most [`LARGEST`].
pub(super) fn capacity_of(len: u64) -> u64 {
    let granules = len.min(LARGEST).div_ceil(GRANULE).max(1);
    if granules <= STEPS {
        return granules * GRANULE;
    }
    let base = 1 << granules.ilog2();
    let step = base / STEPS;
    granules.next_multiple_of(step) * GRANULE
}

impl Space {
    /// A space of `size` bytes.
    pub(super) fn new(size: u64) -> Self {
        Self { size, end: 0, used: 0, resident: 0, classes: BTreeMap::new(), gaps: BTreeMap::new() }
    }

    /// Bytes of allocated extents.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Bytes of free extents whose pages are kept.
    pub(super) fn resident(&self) -> u64 {
        self.resident
    }

    /// Size of the space in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Allocates an extent for `len` bytes, also beyond the budget. `None` when no free range is large enough.
    pub(super) fn allocate(&mut self, len: u64) -> Option<Extent> {
        let capacity = capacity_of(len);
        let class = self.classes.entry(capacity).or_default();
        let offset = if let Some(offset) = class.resident.pop_back() {
            self.resident -= capacity;
            offset
        } else if let Some(offset) = class.released.pop() {
            offset
        } else if self.size - self.end >= capacity {
            let offset = self.end;
            self.end += capacity;
            offset
        } else {
            let (offset, length) =
                self.gaps.iter().map(|(at, of)| (*at, *of)).find(|(_, length)| *length >= capacity)?;
            self.gaps.remove(&offset);
            if length > capacity {
                self.gaps.insert(offset + capacity, length - capacity);
            }
            offset
        };
        self.used += capacity;
        Some(Extent { offset, capacity })
    }

    /// Frees an extent.
    pub(super) fn free(&mut self, extent: Extent) {
        self.withdraw(extent);
        self.restore(extent);
    }

    /// Withdraws a used extent, whose pages belong to forked children: it is not in use, and not free until it is restored.
    pub(super) fn withdraw(&mut self, extent: Extent) {
        self.used -= extent.capacity;
    }

    /// Frees an extent that was withdrawn.
    pub(super) fn restore(&mut self, extent: Extent) {
        self.resident += extent.capacity;
        self.classes.entry(extent.capacity).or_default().resident.push_back(extent.offset);
    }

    /// Joins all released extents with their neighbours; extents of any class can be allocated from the result.
    pub(super) fn merge(&mut self) {
        for (capacity, class) in &mut self.classes {
            self.gaps.extend(class.released.drain(..).map(|offset| (offset, *capacity)));
        }
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (offset, length) in std::mem::take(&mut self.gaps) {
            match merged.last_mut() {
                Some((begin, before)) if *begin + *before == offset => *before += length,
                _ => merged.push((offset, length)),
            }
        }
        // A free range that ends at `end` joins the part that was never allocated.
        if let Some((offset, _)) = merged.pop_if(|(offset, length)| *offset + *length == self.end) {
            self.end = offset;
        }
        self.gaps = merged.into_iter().collect();
    }

    /// Selects free extents to release until used and resident bytes fit `limit` or no free extent is resident. The
    /// caller punches each of them out of the file before the next allocation.
    pub(super) fn release(&mut self, limit: u64) -> Vec<Extent> {
        let mut released = Vec::new();
        // Large extents first: fewer system calls.
        for (&capacity, class) in self.classes.iter_mut().rev() {
            while self.used + self.resident > limit {
                // The oldest first: the most recently freed are reused first.
                let Some(offset) = class.resident.pop_front() else { break };
                class.released.push(offset);
                self.resident -= capacity;
                released.push(Extent { offset, capacity });
            }
        }
        released
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Adds an extent and asserts that it overlaps none of the others.
    fn insert(extents: &mut BTreeMap<u64, Extent>, extent: Extent) {
        if let Some((_, before)) = extents.range(..=extent.offset).next_back() {
            assert!(before.offset + before.capacity <= extent.offset, "{before:?} overlaps {extent:?}");
        }
        if let Some((_, after)) = extents.range(extent.offset..).next() {
            assert!(extent.offset + extent.capacity <= after.offset, "{extent:?} overlaps {after:?}");
        }
        extents.insert(extent.offset, extent);
    }

    proptest! {
        /// As in `Arena`, an allocation that fails is repeated after a merge.
        #[test]
        fn extents_of_a_full_space_never_overlap(steps in prop::collection::vec((any::<bool>(), 1_u64..100_000, any::<prop::sample::Index>()), 1..200)) {
            let mut space = Space::new(1 << 19);
            let mut allocated: BTreeMap<u64, Extent> = BTreeMap::new();
            for (take, len, which) in steps {
                if take || allocated.is_empty() {
                    let taken = space.allocate(len).or_else(|| {
                        space.release(0);
                        space.merge();
                        space.allocate(len)
                    });
                    let Some(extent) = taken else { continue };
                    prop_assert!(extent.offset + extent.capacity <= 1 << 19);
                    insert(&mut allocated, extent);
                } else {
                    let offset = *which.get(&allocated.keys().copied().collect::<Vec<_>>());
                    space.free(allocated.remove(&offset).unwrap());
                }
            }
            // Once all extents are free, the whole space can be allocated as one.
            allocated.values().for_each(|extent| space.free(*extent));
            space.release(0);
            space.merge();
            prop_assert_eq!(space.allocate(1 << 19).map(|extent| extent.offset), Some(0));
        }

        #[test]
        fn a_size_class_fits_its_lengths_with_little_waste(len in 1_u64..1 << 40) {
            let capacity = capacity_of(len);
            prop_assert!(capacity >= len && capacity.is_multiple_of(GRANULE));
            prop_assert!(capacity - len < GRANULE.max(len / 4 + GRANULE));
            prop_assert_eq!(capacity_of(capacity), capacity);
        }

        /// Compared with a simple model: a list of the allocated extents.
        #[test]
        fn allocated_extents_never_overlap(steps in prop::collection::vec((any::<bool>(), 1_u64..300_000, any::<prop::sample::Index>()), 1..200)) {
            let budget = 1 << 20;
            let mut space = Space::new(1 << 40);
            let mut allocated: BTreeMap<u64, Extent> = BTreeMap::new();
            for (take, len, which) in steps {
                if take || allocated.is_empty() {
                    let extent = space.allocate(len).unwrap();
                    prop_assert!(extent.capacity >= len);
                    insert(&mut allocated, extent);
                } else {
                    let offset = *which.get(&allocated.keys().copied().collect::<Vec<_>>());
                    space.free(allocated.remove(&offset).unwrap());
                }
                for released in space.release(budget) {
                    prop_assert!(!allocated.contains_key(&released.offset));
                }
                let used: u64 = allocated.values().map(|extent| extent.capacity).sum();
                prop_assert_eq!(space.used(), used);
                prop_assert!(space.resident == 0 || space.used + space.resident <= budget);
            }
        }
    }

    #[test]
    fn the_most_recently_freed_extent_is_reused_first_and_released_extents_last() {
        let mut space = Space::new(1 << 30);
        let [a, b] = [5000, 5000].map(|len| space.allocate(len).unwrap());
        space.free(a);
        space.free(b);
        assert_eq!(space.release(b.capacity), [a]);
        assert_eq!([space.allocate(6000), space.allocate(6000)], [Some(b), Some(a)]);
    }

    #[test]
    fn a_length_beyond_the_largest_is_refused_without_overflow() {
        assert_eq!(capacity_of(u64::MAX), LARGEST);
        assert!(Space::new(1 << 47).allocate(u64::MAX).is_none());
    }

    #[test]
    fn free_extents_of_other_classes_are_merged_when_the_space_is_full() {
        let mut space = Space::new(64 << 10);
        let small: Vec<Extent> = (0..16).map(|_| space.allocate(4096).unwrap()).collect();
        assert!(space.allocate(4096).is_none());
        // Free all but one in the middle.
        small.iter().filter(|extent| extent.offset != 20 << 10).for_each(|extent| space.free(*extent));
        assert!(space.allocate(32 << 10).is_none());
        assert_eq!(space.release(0).len(), 15);
        space.merge();
        let large = space.allocate(32 << 10).unwrap();
        assert_eq!(large.offset, 24 << 10);
        assert_eq!(space.allocate(20 << 10).map(|extent| extent.offset), Some(0));
        assert_eq!(space.allocate(8 << 10).map(|extent| extent.offset), Some(56 << 10));
        assert!(space.allocate(1).is_none());
    }

    #[test]
    fn a_full_space_refuses_allocations() {
        let mut space = Space::new(8192);
        assert!(space.allocate(8193).is_none());
        assert!(space.allocate(8192).is_some());
        assert!(space.allocate(1).is_none());
    }
}
