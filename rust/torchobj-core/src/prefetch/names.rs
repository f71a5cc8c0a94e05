//! Numbers for objects that are named as they come: what is equal has one number while anybody uses it. Reads nothing.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use crate::client::Client;
use crate::error::Result;
use crate::object_ref::ObjectRef;

/// Makes the client of a base, as `s3://bucket`.
pub type Clients = dyn Fn(&str) -> Result<Arc<Client>> + Send + Sync;

/// Names that are kept before it is looked which of them are still used.
const LEAST_SWEPT: usize = 1 << 16;

struct Entry {
    record: Arc<[u8]>,
    /// The sweep before which it was last asked for.
    round: u64,
}

/// The names of one source.
pub(super) struct Names {
    clients: Arc<Clients>,
    /// By base.
    made: HashMap<String, Arc<Client>>,
    numbers: HashMap<Arc<[u8]>, u64>,
    entries: HashMap<u64, Entry>,
    next: u64,
    round: u64,
    sweep_at: usize,
}

impl Names {
    pub(super) fn new(clients: Arc<Clients>) -> Self {
        Self {
            clients,
            made: HashMap::new(),
            numbers: HashMap::new(),
            entries: HashMap::new(),
            next: 0,
            round: 0,
            sweep_at: LEAST_SWEPT,
        }
    }

    /// The number of what [`ObjectRef::to_bytes`] made.
    pub(super) fn number(&mut self, record: &[u8]) -> u64 {
        let round = self.round;
        if let Some(number) = self.numbers.get(record) {
            self.entries.get_mut(number).expect("whatever has a number is there").round = round;
            return *number;
        }
        let (number, record) = (self.next, Arc::from(record));
        self.next += 1;
        self.numbers.insert(Arc::clone(&record), number);
        self.entries.insert(number, Entry { record, round });
        number
    }

    /// The object of a number.
    pub(super) fn get(&self, number: u64) -> Option<ObjectRef> {
        ObjectRef::from_bytes(&self.entries.get(&number)?.record)
    }

    /// The client of an object, and whether it was made just now.
    pub(super) fn client(&mut self, object: &ObjectRef) -> Result<(Arc<Client>, bool)> {
        if let Some(client) = self.made.get(object.base()) {
            return Ok((client.clone(), false));
        }
        let client = (self.clients)(object.base())?;
        self.made.insert(object.base().to_owned(), client.clone());
        Ok((client, true))
    }

    /// The clients that were made.
    pub(super) fn made(&self) -> impl Iterator<Item = &Arc<Client>> {
        self.made.values()
    }

    /// Whether it is time to sweep.
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.sweep_at
    }

    /// Forgets what is not among `used`, and was not asked for since the last sweep: a number that was just given out is
    /// not announced yet.
    pub(super) fn sweep(&mut self, used: &HashSet<u64>) {
        let Self { numbers, entries, round, .. } = self;
        entries.retain(|number, entry| {
            let kept = entry.round == *round || used.contains(number);
            if !kept {
                numbers.remove(&entry.record);
            }
            kept
        });
        self.round += 1;
        self.sweep_at = self.entries.len() + LEAST_SWEPT.max(used.len());
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
    fn equal_names_have_one_number_and_others_another() {
        let mut names = names();
        let first = names.number(&record(1));
        assert_eq!(names.number(&record(1)), first);
        assert_ne!(names.number(&record(2)), first);
        assert_eq!(names.get(first).unwrap().key(), "1");
        assert_eq!(names.get(99), None);
    }

    #[test]
    fn names_that_nobody_uses_are_forgotten_and_used_ones_stay() {
        let mut names = names();
        let used = HashSet::from([names.number(&record(0))]);
        for index in 1..5 * LEAST_SWEPT {
            names.number(&record(index));
            if names.is_full() {
                names.sweep(&used);
            }
            assert!(names.entries.len() <= 2 * LEAST_SWEPT + 1, "{names:?}");
        }
        assert_eq!(names.numbers.len(), names.entries.len());
        assert_eq!(names.number(&record(0)), *used.iter().next().unwrap());
        let late = names.number(&record(1));
        assert_eq!(names.get(late).unwrap().key(), "1");
    }
}
