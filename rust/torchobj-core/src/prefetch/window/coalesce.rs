//! Reads entries together: adds the entries that follow a started read to it. The caller decides which objects are read
//! with one request.

use super::super::job::{Job, Object};
use super::Window;

/// Maximum number of entries that are added to a read: their results are handed over one after the other.
const MAX_NEIGHBOURS: usize = 255;

impl<B, W> Window<B, W> {
    /// Adds the entries to `job` that are next in its order, as long as `joins` returns true for their objects and the
    /// budget has space for them. The limit of read-ahead is not observed: near it, each read would be of one entry.
    /// `fits` as in [`next_demanded`](Self::next_demanded).
    pub(in crate::prefetch) fn extend(
        &mut self,
        job: &mut Job,
        mut joins: impl FnMut(Object) -> bool,
        fits: impl Fn(u64, u64) -> bool,
    ) {
        let Some(first) = self.entries.get(&job.first.number).filter(|first| !first.alone) else { return };
        let (iterator, demanded) = (first.iterator, first.waiter.is_some());
        while job.neighbours.len() < MAX_NEIGHBOURS {
            let next = match demanded {
                true => self.demanded.front().copied(),
                false => self
                    .iterators
                    .get(&iterator)
                    .and_then(|iterator_state| iterator_state.queued.range(job.first.number..).next().copied()),
            };
            let Some((number, entry)) = next.and_then(|number| Some((number, self.entries.get(&number)?))) else {
                return;
            };
            let is_separate = entry.alone || self.reading.contains_key(&entry.object);
            if is_separate || !fits(entry.charge, self.reserved()) || !joins(entry.object) {
                return;
            }
            if demanded {
                self.demanded.pop_front();
            } else if let Some(iterator_state) = self.iterators.get_mut(&iterator) {
                iterator_state.queued.remove(&number);
            }
            job.needed.add();
            let neighbour = self.read(number, &job.needed);
            job.neighbours.push(neighbour);
        }
    }

    /// Queues an entry again whose read together with others failed. It is read alone then.
    pub(in crate::prefetch) fn requeue_alone(&mut self, number: u64) {
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.alone = true;
            self.requeue(number);
        }
    }
}
