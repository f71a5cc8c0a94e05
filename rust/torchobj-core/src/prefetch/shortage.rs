//! Warnings about reads that exceed the budget, with the holders of the memory. Frees nothing and does not log.

use std::time::{Duration, Instant};

use super::decision::Decision;

/// Duration of a shortage before a warning: a large batch is over by then.
const WARN_AFTER: Duration = Duration::from_secs(10);
/// Minimum time between two warnings.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

const MIB: u64 = 1 << 20;

/// Bytes of an arena by holder.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Holders {
    pub budget: u64,
    pub used: u64,
    /// Held by workers, or on their way to the trainer.
    pub workers: u64,
    /// Read ahead and not taken, or being read.
    pub ahead: u64,
}

/// Start of the current shortage, and the warnings so far.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    started_at: Option<Instant>,
    last_warning: Option<Instant>,
    warned_large: bool,
}

impl Shortage {
    /// Records a decision of the window at `now`. Returns a warning to log.
    pub(super) fn observe<B>(
        &mut self,
        next: &Decision<B>,
        now: Instant,
        holders: impl FnOnce() -> Holders,
    ) -> Option<String> {
        let read = match next {
            Decision::Read(read) if read.exceeds_budget => read,
            Decision::Read(_) => {
                self.started_at = None;
                return None;
            }
            Decision::OutOfMemory => {
                self.started_at.get_or_insert(now);
                return None;
            }
            Decision::Evict(..) | Decision::Idle => return None,
        };
        let started_at = *self.started_at.get_or_insert(now);
        let holders = holders();
        let charge: u64 = read.entries.iter().map(|entry| entry.reservation.bytes).sum();
        if charge > holders.budget && !self.warned_large {
            self.warned_large = true;
            let budget = holders.budget;
            return Some(format!(
                "an object of {charge} bytes is larger than the budget of {budget} bytes for objects that are read \
                 ahead; it is read beyond the budget, like other objects of this size: set a larger budget with \
                 torchobj.set_memory_budget"
            ));
        }
        let due = self.last_warning.is_none_or(|last_warning| now.duration_since(last_warning) >= WARN_INTERVAL);
        if charge > holders.budget || now.duration_since(started_at) < WARN_AFTER || !due {
            return None;
        }
        self.last_warning = Some(now);
        Some(describe(holders, now.duration_since(started_at)))
    }
}

fn describe(holders: Holders, lasted: Duration) -> String {
    let Holders { budget, used, workers, ahead } = holders;
    let trainer = used.saturating_sub(workers + ahead);
    let [budget, used, workers, ahead, trainer] = [budget, used, workers, ahead, trainer].map(|bytes| bytes / MIB);
    let seconds = lasted.as_secs();
    format!(
        "no memory to read ahead for {seconds} s: {used} MiB of a budget of {budget} MiB are in use; DataLoader \
         workers hold {workers} MiB, this process holds {trainer} MiB, and {ahead} MiB are read and not taken yet. A \
         view of a buffer, or a reader, keeps the memory of the whole object: copy the bytes that you keep, or set a \
         larger budget with torchobj.set_memory_budget"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::decision::{CoalescedRead, EntryRead, Needed, ObjectId, Reservation};
    use super::*;

    fn start(charge: u64, exceeds_budget: bool) -> Decision<()> {
        let reservation = Reservation::new(&Arc::default(), charge);
        let first = EntryRead { number: 1, object: ObjectId { source: 1, index: 1 }, loader: 0, reservation };
        Decision::Read(CoalescedRead { entries: vec![first], exceeds_budget, needed: Needed::new() })
    }

    fn holders() -> Holders {
        Holders { budget: 64 * MIB, used: 70 * MIB, workers: 50 * MIB, ahead: 5 * MIB }
    }

    #[test]
    fn a_long_shortage_is_warned_of_with_the_holders_and_not_at_every_read() {
        let (mut shortage, began) = (Shortage::default(), Instant::now());
        let after = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(shortage.observe(&Decision::<()>::OutOfMemory, after(0), holders), None);
        assert_eq!(shortage.observe(&start(MIB, true), after(9), holders), None);
        let warning = shortage.observe(&start(MIB, true), after(11), holders).unwrap();
        for part in ["for 11 s", "budget of 64 MiB", "workers hold 50 MiB", "this process holds 15 MiB"] {
            assert!(warning.contains(part), "{warning}");
        }
        assert_eq!(shortage.observe(&start(MIB, true), after(60), holders), None);
        assert!(shortage.observe(&start(MIB, true), after(71), holders).is_some());
    }

    #[test]
    fn a_read_within_the_budget_ends_a_shortage() {
        let (mut shortage, began) = (Shortage::default(), Instant::now());
        let after = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(shortage.observe(&Decision::<()>::OutOfMemory, after(0), holders), None);
        assert_eq!(shortage.observe(&start(MIB, false), after(8), holders), None);
        assert_eq!(shortage.observe(&start(MIB, true), after(12), holders), None);
    }

    #[test]
    fn an_object_larger_than_the_budget_is_warned_of_once() {
        let mut shortage = Shortage::default();
        let warning = shortage.observe(&start(65 * MIB, true), Instant::now(), holders).unwrap();
        assert!(warning.contains("larger than the budget of 67108864 bytes"), "{warning}");
        assert_eq!(shortage.observe(&start(65 * MIB, true), Instant::now(), holders), None);
    }
}
