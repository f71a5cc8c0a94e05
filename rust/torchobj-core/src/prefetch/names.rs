//! Assigns numbers to objects that are named one by one: equal names share a number while it is in use. Reads nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use crate::client::Client;
use crate::engine::add_once;
use crate::error::Result;
use crate::object_ref::ObjectRef;
use crate::types::Version;

/// Returns the client of an object: the same one for objects of a bucket with the same configuration.
pub type ClientOf = dyn Fn(&ObjectRef) -> Result<Arc<Client>> + Send + Sync;

/// Number of names that may be added before unused ones are removed.
const SWEEP_INTERVAL: usize = 1 << 16;

struct NameEntry {
    name: Arc<ObjectRef>,
    /// Value of `Names::sweeps` when the name was last used.
    sweeps: u64,
}

/// A name by its object: equal for all ranges of one version.
#[derive(Clone, Debug)]
struct RangedObject(Arc<ObjectRef>);

impl RangedObject {
    fn key(&self) -> (&str, Option<&str>, Option<u64>) {
        (self.0.url(), self.0.version().map(Version::as_str), self.0.size())
    }
}

impl PartialEq for RangedObject {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for RangedObject {}

impl Hash for RangedObject {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

/// Ends of the ranges of an object, by their starts and the numbers of their names.
type Ranges = BTreeMap<(u64, u64), u64>;

/// The range of a reference, if it has an end, is not empty, and is within the object as far as its size is known.
pub(super) fn range_of(name: &ObjectRef) -> Option<Range<u64>> {
    let range = name.start()..name.end()?;
    (!range.is_empty() && name.size().is_none_or(|size| range.end <= size)).then_some(range)
}

/// The names of one source.
pub(super) struct Names {
    client_of: Arc<ClientOf>,
    /// The clients of the objects that were read, each once.
    clients: Vec<Arc<Client>>,
    numbers: HashMap<Arc<ObjectRef>, u64>,
    entries: HashMap<u64, NameEntry>,
    ranges: HashMap<RangedObject, Ranges>,
    next: u64,
    sweeps: u64,
    sweep_at: usize,
}

impl Names {
    pub(super) fn new(client_of: Arc<ClientOf>) -> Self {
        Self {
            client_of,
            clients: Vec::new(),
            numbers: HashMap::new(),
            entries: HashMap::new(),
            ranges: HashMap::new(),
            next: 0,
            sweeps: 0,
            sweep_at: SWEEP_INTERVAL,
        }
    }

    /// The number of a name.
    pub(super) fn number(&mut self, name: &Arc<ObjectRef>) -> u64 {
        let sweeps = self.sweeps;
        if let Some(number) = self.numbers.get(name) {
            self.entries.get_mut(number).expect("each number has an entry").sweeps = sweeps;
            return *number;
        }
        let (number, name) = (self.next, name.clone());
        self.next += 1;
        self.numbers.insert(name.clone(), number);
        if let Some(range) = range_of(&name) {
            self.ranges.entry(RangedObject(name.clone())).or_default().insert((range.start, number), range.end);
        }
        self.entries.insert(number, NameEntry { name, sweeps });
        number
    }

    /// The object of a number.
    pub(super) fn get(&self, number: u64) -> Option<&Arc<ObjectRef>> {
        self.entries.get(&number).map(|entry| &entry.name)
    }

    /// The ranges of the object of a name that start before its own, the last one first, with their numbers.
    pub(super) fn before(&self, name: &Arc<ObjectRef>) -> impl Iterator<Item = (u64, Range<u64>)> {
        let (ranges, start) = (self.ranges.get(&RangedObject(name.clone())), name.start());
        ranges.into_iter().flat_map(move |ranges| ranges.range(..(start, 0)).rev()).map(numbered)
    }

    /// The ranges of the object of a name that start after its own, in their order, with their numbers.
    pub(super) fn after(&self, name: &Arc<ObjectRef>) -> impl Iterator<Item = (u64, Range<u64>)> {
        let (ranges, next) = (self.ranges.get(&RangedObject(name.clone())), name.start().saturating_add(1));
        ranges.into_iter().flat_map(move |ranges| ranges.range((next, 0)..)).map(numbered)
    }

    /// The range of a number, if it is one of the object of `first`.
    pub(super) fn range_within(&self, first: &Arc<ObjectRef>, number: u64) -> Option<Range<u64>> {
        let name = self.get(number)?;
        range_of(name).filter(|_| RangedObject(name.clone()) == RangedObject(first.clone()))
    }

    /// The client of an object, and whether it is the first object of it that is read.
    pub(super) fn client(&mut self, object: &ObjectRef) -> Result<(Arc<Client>, bool)> {
        let client = (self.client_of)(object)?;
        let before = self.clients.len();
        add_once(&mut self.clients, &client);
        Ok((client, self.clients.len() > before))
    }

    /// The part size of the client of an object, if there is a client.
    pub(super) fn part_bytes(&self, object: &ObjectRef) -> Option<u64> {
        (self.client_of)(object).ok().map(|client| client.policy().part_bytes)
    }

    /// The clients of the objects that were read.
    pub(super) fn clients(&self) -> impl Iterator<Item = &Arc<Client>> {
        self.clients.iter()
    }

    /// Returns whether `sweep` should be called.
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.sweep_at
    }

    /// Removes names whose numbers are not in `used`, except those requested since the last sweep: their numbers may
    /// not be announced yet.
    pub(super) fn sweep(&mut self, used: &HashSet<u64>) {
        let Self { numbers, entries, ranges, sweeps, .. } = self;
        entries.retain(|number, entry| {
            let keep = entry.sweeps == *sweeps || used.contains(number);
            if !keep {
                numbers.remove(&entry.name);
                let object = RangedObject(entry.name.clone());
                if let Some(of_object) = ranges.get_mut(&object) {
                    of_object.remove(&(entry.name.start(), *number));
                    if of_object.is_empty() {
                        ranges.remove(&object);
                    }
                }
            }
            keep
        });
        self.sweeps += 1;
        self.sweep_at = self.entries.len() + SWEEP_INTERVAL.max(used.len());
    }
}

fn numbered((&(start, number), &end): (&(u64, u64), &u64)) -> (u64, Range<u64>) {
    (number, start..end)
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Names({} objects)", self.entries.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        Names::new(Arc::new(|_| unreachable!("nothing is read")))
    }

    fn name(index: usize) -> Arc<ObjectRef> {
        Arc::new(ObjectRef::new(format!("memory://b/{index}"), 0, None, None, None).unwrap())
    }

    #[test]
    fn equal_names_share_a_number() {
        let mut names = names();
        let first = names.number(&name(1));
        assert_eq!(names.number(&name(1)), first);
        assert_ne!(names.number(&name(2)), first);
        assert_eq!(names.get(first).unwrap().key(), "1");
        assert_eq!(names.get(99), None);
    }

    #[test]
    fn unused_names_are_removed_and_used_ones_stay() {
        let mut names = names();
        let used = HashSet::from([names.number(&name(0))]);
        for index in 1..4 * SWEEP_INTERVAL {
            names.number(&name(index));
            if names.is_full() {
                names.sweep(&used);
            }
            assert!(names.entries.len() <= 2 * SWEEP_INTERVAL + 1, "{names:?}");
        }
        assert_eq!(names.numbers.len(), names.entries.len());
        assert_eq!(names.number(&name(0)), *used.iter().next().unwrap());
        let readded = names.number(&name(1));
        assert_eq!(names.get(readded).unwrap().key(), "1");
    }

    #[test]
    fn the_ranges_of_an_object_are_found_by_their_place() {
        let mut names = names();
        let range = |key: &str, start, end| {
            Arc::new(ObjectRef::new(format!("memory://b/{key}"), start, Some(end), None, None).unwrap())
        };
        let ranges = [(10, 20), (0, 5), (30, 40), (30, 31), (20, 25)].map(|(start, end)| range("a", start, end));
        let numbers = [0, 1, 2, 3, 4].map(|index: usize| names.number(&ranges[index]));
        names.number(&range("other", 5, 10));
        names.number(&range("a", 7, 7));
        names.number(&name(1));
        let after: Vec<_> = names.after(&ranges[0]).collect();
        assert_eq!(after, [(numbers[4], 20..25), (numbers[2], 30..40), (numbers[3], 30..31)]);
        let before: Vec<_> = names.before(&ranges[4]).collect();
        assert_eq!(before, [(numbers[0], 10..20), (numbers[1], 0..5)]);
        for _ in 0..2 {
            names.sweep(&HashSet::from([numbers[0]]));
        }
        assert_eq!((names.ranges.len(), names.after(&ranges[1]).count()), (1, 1));
    }
}
