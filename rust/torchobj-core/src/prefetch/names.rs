//! Assigns numbers to objects that are named one by one: equal names share a number while it is in use. Reads nothing.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use crate::client::Client;
use crate::engine::add_once;
use crate::error::Result;
use crate::object_ref::ObjectRef;

/// Returns the client of an object: the same one for objects of a bucket with the same configuration.
pub type ClientOf = dyn Fn(&ObjectRef) -> Result<Arc<Client>> + Send + Sync;

/// Number of names that may be added before unused ones are removed.
const SWEEP_INTERVAL: usize = 1 << 16;

struct NameEntry {
    name: Arc<ObjectRef>,
    /// Value of `Names::sweeps` when the name was last used.
    sweeps: u64,
}

/// The names of one source.
pub(super) struct Names {
    client_of: Arc<ClientOf>,
    /// The clients of the objects that were read, each once.
    clients: Vec<Arc<Client>>,
    numbers: HashMap<Arc<ObjectRef>, u64>,
    entries: HashMap<u64, NameEntry>,
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
        self.entries.insert(number, NameEntry { name, sweeps });
        number
    }

    /// The object of a number.
    pub(super) fn get(&self, number: u64) -> Option<&Arc<ObjectRef>> {
        self.entries.get(&number).map(|entry| &entry.name)
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
        let Self { numbers, entries, sweeps, .. } = self;
        entries.retain(|number, entry| {
            let keep = entry.sweeps == *sweeps || used.contains(number);
            if !keep {
                numbers.remove(&entry.name);
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
}
