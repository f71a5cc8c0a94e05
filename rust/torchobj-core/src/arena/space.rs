//! Which bytes of an arena are whose: extents by size class, and how many bytes are in use. Touches no memory.
//!
//! An extent that comes back is kept *warm*, its pages in memory, and is the first to be handed out again: a page that
//! is touched for the first time costs more than the copy of its bytes. Where used and warm bytes together exceed the
//! budget, warm extents are *cooled*: whoever asked punches their pages out of the file. Cold extents keep their place.

use std::collections::{BTreeMap, VecDeque};

/// What extents are measured in: a page, where pages have 4 KiB.
pub(super) const GRANULE: u64 = 4096;

/// Classes grow by a quarter of a power of two, so that at most a fifth of an extent is never touched.
const STEPS: u64 = 4;

/// A piece of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Where it begins, from the beginning of the space.
    pub offset: u64,
    /// How long it is: the size of its class.
    pub capacity: u64,
}

/// Free extents of one class, the newest last.
#[derive(Debug, Default)]
struct Class {
    warm: VecDeque<u64>,
    cold: Vec<u64>,
}

/// The books of an arena.
#[derive(Debug)]
pub(super) struct Space {
    size: u64,
    budget: u64,
    /// Nothing behind this was ever handed out.
    end: u64,
    used: u64,
    warm: u64,
    classes: BTreeMap<u64, Class>,
    /// What is free and of no class, by where it begins: its length. Without pages.
    gaps: BTreeMap<u64, u64>,
}

/// More than any file of an arena has. What is longer counts as this: no space has room for it, and sums do not overflow.
const LARGEST: u64 = 1 << 48;

/// The capacity of the smallest class that holds `len` bytes, or [`LARGEST`].
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
    /// `size` bytes, of which `budget` may have pages.
    pub(super) fn new(size: u64, budget: u64) -> Self {
        Self { size, budget, end: 0, used: 0, warm: 0, classes: BTreeMap::new(), gaps: BTreeMap::new() }
    }

    /// Bytes that are handed out.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Bytes that there are.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that may have pages.
    pub(super) fn budget(&self) -> u64 {
        self.budget
    }

    /// An extent for `len` bytes, whether or not the budget has room; `None` when the space itself is used up.
    pub(super) fn take(&mut self, len: u64) -> Option<Extent> {
        let capacity = capacity_of(len);
        let class = self.classes.entry(capacity).or_default();
        let offset = if let Some(offset) = class.warm.pop_back() {
            self.warm -= capacity;
            offset
        } else if let Some(offset) = class.cold.pop() {
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

    /// Takes an extent back.
    pub(super) fn give(&mut self, extent: Extent) {
        self.used -= extent.capacity;
        self.warm += extent.capacity;
        self.classes.entry(extent.capacity).or_default().warm.push_back(extent.offset);
    }

    /// Makes gaps of everything that is cold, joined with those beside: extents of any class can be cut from them.
    pub(super) fn merge(&mut self) {
        for (capacity, class) in &mut self.classes {
            self.gaps.extend(class.cold.drain(..).map(|offset| (offset, *capacity)));
        }
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (offset, length) in std::mem::take(&mut self.gaps) {
            match merged.last_mut() {
                Some((begin, before)) if *begin + *before == offset => *before += length,
                _ => merged.push((offset, length)),
            }
        }
        // What ends where nothing was handed out yet is not handed out any more.
        if let Some((offset, _)) = merged.pop_if(|(offset, length)| *offset + *length == self.end) {
            self.end = offset;
        }
        self.gaps = merged.into_iter().collect();
    }

    /// Extents to be punched out so that used and warm bytes are within `limit`, or nothing is warm any more. Each is
    /// cold from now on, and must be punched before it is taken again.
    pub(super) fn cool(&mut self, limit: u64) -> Vec<Extent> {
        let mut punched = Vec::new();
        // Large ones first: few calls for many bytes.
        for (&capacity, class) in self.classes.iter_mut().rev() {
            while self.used + self.warm > limit {
                // The oldest: those that came back last are taken again first.
                let Some(offset) = class.warm.pop_front() else { break };
                class.cold.push(offset);
                self.warm -= capacity;
                punched.push(Extent { offset, capacity });
            }
        }
        punched
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Adds an extent, which overlaps none that is there.
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
        /// As the arena does: what does not fit is tried again after a merge.
        #[test]
        fn extents_of_a_space_that_is_used_up_never_overlap(steps in prop::collection::vec((any::<bool>(), 1_u64..100_000, any::<prop::sample::Index>()), 1..200)) {
            let mut space = Space::new(1 << 19, 1 << 18);
            let mut out: BTreeMap<u64, Extent> = BTreeMap::new();
            for (take, len, which) in steps {
                if take || out.is_empty() {
                    let taken = space.take(len).or_else(|| {
                        space.cool(0);
                        space.merge();
                        space.take(len)
                    });
                    let Some(extent) = taken else { continue };
                    prop_assert!(extent.offset + extent.capacity <= 1 << 19);
                    insert(&mut out, extent);
                } else {
                    let offset = *which.get(&out.keys().copied().collect::<Vec<_>>());
                    space.give(out.remove(&offset).unwrap());
                }
            }
            // Once all is free, all of it can be had at once.
            out.values().for_each(|extent| space.give(*extent));
            space.cool(0);
            space.merge();
            prop_assert_eq!(space.take(1 << 19).map(|extent| extent.offset), Some(0));
        }

        #[test]
        fn a_class_holds_what_it_is_for_and_wastes_little(len in 1_u64..1 << 40) {
            let capacity = capacity_of(len);
            prop_assert!(capacity >= len && capacity.is_multiple_of(GRANULE));
            prop_assert!(capacity - len < GRANULE.max(len / 4 + GRANULE));
            prop_assert_eq!(capacity_of(capacity), capacity);
        }

        /// Against the plainest model: a list of what is out.
        #[test]
        fn extents_that_are_out_never_overlap(steps in prop::collection::vec((any::<bool>(), 1_u64..300_000, any::<prop::sample::Index>()), 1..200)) {
            let budget = 1 << 20;
            let mut space = Space::new(1 << 40, budget);
            let mut out: BTreeMap<u64, Extent> = BTreeMap::new();
            for (take, len, which) in steps {
                if take || out.is_empty() {
                    let extent = space.take(len).unwrap();
                    prop_assert!(extent.capacity >= len);
                    insert(&mut out, extent);
                } else {
                    let offset = *which.get(&out.keys().copied().collect::<Vec<_>>());
                    space.give(out.remove(&offset).unwrap());
                }
                for punched in space.cool(budget) {
                    prop_assert!(!out.contains_key(&punched.offset));
                }
                let used: u64 = out.values().map(|extent| extent.capacity).sum();
                prop_assert_eq!(space.used(), used);
                prop_assert!(space.warm == 0 || space.used + space.warm <= budget);
            }
        }
    }

    #[test]
    fn what_came_back_last_is_taken_first_and_what_is_cold_last() {
        let mut space = Space::new(1 << 30, 1 << 30);
        let [a, b] = [5000, 5000].map(|len| space.take(len).unwrap());
        space.give(a);
        space.give(b);
        assert_eq!(space.cool(b.capacity), [a]);
        assert_eq!([space.take(6000), space.take(6000)], [Some(b), Some(a)]);
    }

    #[test]
    fn a_length_that_nothing_has_is_refused_and_overflows_nothing() {
        assert_eq!(capacity_of(u64::MAX), LARGEST);
        assert!(Space::new(1 << 47, 4096).take(u64::MAX).is_none());
    }

    #[test]
    fn what_is_free_in_pieces_of_another_class_is_used_once_nothing_else_is_left() {
        let mut space = Space::new(64 << 10, 64 << 10);
        let small: Vec<Extent> = (0..16).map(|_| space.take(4096).unwrap()).collect();
        assert!(space.take(4096).is_none());
        // All but one in the middle.
        small.iter().filter(|extent| extent.offset != 20 << 10).for_each(|extent| space.give(*extent));
        assert!(space.take(32 << 10).is_none());
        assert_eq!(space.cool(0).len(), 15);
        space.merge();
        let large = space.take(32 << 10).unwrap();
        assert_eq!(large.offset, 24 << 10);
        assert_eq!(space.take(20 << 10).map(|extent| extent.offset), Some(0));
        assert_eq!(space.take(8 << 10).map(|extent| extent.offset), Some(56 << 10));
        assert!(space.take(1).is_none());
    }

    #[test]
    fn a_space_can_be_used_up() {
        let mut space = Space::new(8192, 4096);
        assert!(space.take(8193).is_none());
        assert!(space.take(8192).is_some());
        assert!(space.take(1).is_none());
    }
}
