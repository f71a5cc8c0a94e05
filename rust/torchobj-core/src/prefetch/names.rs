//! Assigns numbers to objects that are named one by one: equal names share a number while it is in use. Reads nothing.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use crate::client::Client;
use crate::error::Result;
use crate::object_ref::ObjectRef;

/// Creates the client of a base URL such as `s3://bucket`.
pub type CreateClient = dyn Fn(&str) -> Result<Arc<Client>> + Send + Sync;

/// Number of names that may be added before unused ones are removed.
const SWEEP_INTERVAL: usize = 1 << 16;

struct NameEntry {
    record: Arc<[u8]>,
    /// Value of `Names::sweeps` when the name was last used.
    sweeps: u64,
}

/// The names of one source.
pub(super) struct Names {
    create_client: Arc<CreateClient>,
    /// By base URL.
    clients: HashMap<String, Arc<Client>>,
    numbers: HashMap<Arc<[u8]>, u64>,
    entries: HashMap<u64, NameEntry>,
    next: u64,
    sweeps: u64,
    sweep_at: usize,
}

impl Names {
    pub(super) fn new(create_client: Arc<CreateClient>) -> Self {
        Self {
            create_client,
            clients: HashMap::new(),
            numbers: HashMap::new(),
            entries: HashMap::new(),
            next: 0,
            sweeps: 0,
            sweep_at: SWEEP_INTERVAL,
        }
    }

    /// The number of a record that [`ObjectRef::to_bytes`] serialized.
    pub(super) fn number(&mut self, record: &[u8]) -> u64 {
        let sweeps = self.sweeps;
        if let Some(number) = self.numbers.get(record) {
            self.entries.get_mut(number).expect("each number has an entry").sweeps = sweeps;
            return *number;
        }
        let (number, record) = (self.next, Arc::from(record));
        self.next += 1;
        self.numbers.insert(Arc::clone(&record), number);
        self.entries.insert(number, NameEntry { record, sweeps });
        number
    }

    /// The object of a number.
    pub(super) fn get(&self, number: u64) -> Option<ObjectRef> {
        ObjectRef::from_bytes(&self.entries.get(&number)?.record)
    }

    /// The client of an object, and whether it was just created.
    pub(super) fn client(&mut self, object: &ObjectRef) -> Result<(Arc<Client>, bool)> {
        if let Some(client) = self.clients.get(object.base()) {
            return Ok((client.clone(), false));
        }
        let client = (self.create_client)(object.base())?;
        self.clients.insert(object.base().to_owned(), client.clone());
        Ok((client, true))
    }

    /// The part size of the client of an object, if the client was created.
    pub(super) fn part_bytes(&self, object: &ObjectRef) -> Option<u64> {
        self.clients.get(object.base()).map(|client| client.policy().part_bytes)
    }

    /// The clients that were created.
    pub(super) fn clients(&self) -> impl Iterator<Item = &Arc<Client>> {
        self.clients.values()
    }

    /// Returns whether `sweep` should be called.
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.sweep_at
    }

    /// Removes names whose numbers are not in `used`, except those requested since the last sweep: their numbers may
    /// not be announced yet.
    pub(super) fn sweep(&mut self, used: &HashSet<u64>) {
        let Self { numbers, entries, sweeps, .. } = self;
        entries.retain(|number, entry| {
            let keep = entry.sweeps == *sweeps || used.contains(number);
            if !keep {
                numbers.remove(&entry.record);
            }
            keep
        });
        self.sweeps += 1;
        self.sweep_at = self.entries.len() + SWEEP_INTERVAL.max(used.len());
    }
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

    fn record(index: usize) -> Vec<u8> {
        ObjectRef::new(format!("memory://b/{index}"), 0, None, None, None).unwrap().to_bytes()
    }

    #[test]
    fn equal_names_share_a_number() {
        let mut names = names();
        let first = names.number(&record(1));
        assert_eq!(names.number(&record(1)), first);
        assert_ne!(names.number(&record(2)), first);
        assert_eq!(names.get(first).unwrap().key(), "1");
        assert_eq!(names.get(99), None);
    }

    #[test]
    fn unused_names_are_removed_and_used_ones_stay() {
        let mut names = names();
        let used = HashSet::from([names.number(&record(0))]);
        for index in 1..4 * SWEEP_INTERVAL {
            names.number(&record(index));
            if names.is_full() {
                names.sweep(&used);
            }
            assert!(names.entries.len() <= 2 * SWEEP_INTERVAL + 1, "{names:?}");
        }
        assert_eq!(names.numbers.len(), names.entries.len());
        assert_eq!(names.number(&record(0)), *used.iter().next().unwrap());
        let readded = names.number(&record(1));
        assert_eq!(names.get(readded).unwrap().key(), "1");
    }
}
