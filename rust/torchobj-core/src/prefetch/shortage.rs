//! What to say of reads that overdraw the budget, and who holds the memory. Frees nothing, and logs nothing itself.

use std::time::{Duration, Instant};

use super::job::Next;

/// How long there is no memory before that is said: a large batch is through by then.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is said again.
const PAUSE: Duration = Duration::from_secs(60);

const MIB: u64 = 1 << 20;

/// Who holds the memory of an arena, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Holders {
    pub budget: u64,
    pub used: u64,
    /// What workers hold, and what is on its way from them.
    pub workers: u64,
    /// What was read and not taken, or is being read.
    pub ahead: u64,
}

/// Since when memory is short, and what was said of it.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    since: Option<Instant>,
    said: Option<Instant>,
    said_large: bool,
}

impl Shortage {
    /// Notes a decision of the window's, made at `now`. What is to be said of it.
    pub(super) fn note<B>(
        &mut self,
        next: &Next<B>,
        now: Instant,
        holders: impl FnOnce() -> Holders,
    ) -> Option<String> {
        let job = match next {
            Next::Start(job) if job.overdraws => job,
            Next::Start(_) => {
                self.since = None;
                return None;
            }
            Next::Starved => {
                self.since.get_or_insert(now);
                return None;
            }
            Next::Evict(_) | Next::Idle => return None,
        };
        let since = *self.since.get_or_insert(now);
        let holders = holders();
        let charge = job.reservation.bytes();
        if charge > holders.budget && !self.said_large {
            self.said_large = true;
            let budget = holders.budget;
            return Some(format!(
                "an object of {charge} bytes is larger than the budget of {budget} bytes for all that is read ahead, which \
                 is overdrawn for it and others like it: torchobj.set_budget sets a larger one"
            ));
        }
        let quiet = self.said.is_none_or(|said| now.duration_since(said) >= PAUSE);
        if charge > holders.budget || now.duration_since(since) < PATIENCE || !quiet {
            return None;
        }
        self.said = Some(now);
        Some(describe(holders, now.duration_since(since)))
    }
}

fn describe(holders: Holders, lasted: Duration) -> String {
    let Holders { budget, used, workers, ahead } = holders;
    let trainer = used.saturating_sub(workers + ahead);
    let [budget, used, workers, ahead, trainer] = [budget, used, workers, ahead, trainer].map(|bytes| bytes / MIB);
    let seconds = lasted.as_secs();
    format!(
        "for {seconds} s there is no memory to read ahead: of a budget of {budget} MiB {used} MiB are in use; DataLoader \
         workers hold {workers} MiB, this process holds {trainer} MiB, and {ahead} MiB are read and not taken yet. \
         Who keeps a view of a buffer, or a reader, keeps its memory: keep a copy instead, or set a larger budget by \
         torchobj.set_budget"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::job::{Job, Object, Reservation};
    use super::*;

    fn start(charge: u64, overdraws: bool) -> Next<()> {
        let reservation = Reservation::new(&Arc::default(), charge);
        let object = Object { source: 1, index: 1 };
        Next::Start(Job { number: 1, object, reservation, overdraws, cancelled: Arc::default() })
    }

    fn holders() -> Holders {
        Holders { budget: 64 * MIB, used: 70 * MIB, workers: 50 * MIB, ahead: 5 * MIB }
    }

    #[test]
    fn who_holds_the_memory_is_said_when_it_is_short_for_long_and_not_at_every_read() {
        let (mut shortage, began) = (Shortage::default(), Instant::now());
        let after = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(shortage.note(&Next::<()>::Starved, after(0), holders), None);
        assert_eq!(shortage.note(&start(MIB, true), after(9), holders), None);
        let said = shortage.note(&start(MIB, true), after(11), holders).unwrap();
        for figure in ["for 11 s", "budget of 64 MiB", "workers hold 50 MiB", "this process holds 15 MiB"] {
            assert!(said.contains(figure), "{said}");
        }
        assert_eq!(shortage.note(&start(MIB, true), after(60), holders), None);
        assert!(shortage.note(&start(MIB, true), after(71), holders).is_some());
    }

    #[test]
    fn memory_that_came_back_ends_a_shortage() {
        let (mut shortage, began) = (Shortage::default(), Instant::now());
        let after = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(shortage.note(&Next::<()>::Starved, after(0), holders), None);
        assert_eq!(shortage.note(&start(MIB, false), after(8), holders), None);
        assert_eq!(shortage.note(&start(MIB, true), after(12), holders), None);
    }

    #[test]
    fn an_object_that_is_larger_than_the_budget_is_said_once() {
        let mut shortage = Shortage::default();
        let said = shortage.note(&start(65 * MIB, true), Instant::now(), holders).unwrap();
        assert!(said.contains("larger than the budget of 67108864 bytes"), "{said}");
        assert_eq!(shortage.note(&start(65 * MIB, true), Instant::now(), holders), None);
    }
}
