//! The slots of a worker process: one for each of its concurrent requests. `worker` sends the requests.

use std::cell::Cell;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::attachment::{Attachment, OWNER_CHECK_INTERVAL, OWNER_CHECK_TIMESPEC, Unanswered, notify};
use super::layout::SLOTS;
use super::sync;

/// Time limit for the owner to free the slot of a worker that has exited, when all are in use.
const SLOT_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of slots for the threads of a process, which otherwise wait for each other. Signal handlers take more.
const MAX_SLOTS: usize = 4;

thread_local! {
    /// Number of requests of this thread that wait for answers: more than one if a signal handler requests objects.
    static REQUESTS: Cell<usize> = const { Cell::new(0) };
}

/// The slots of this process. Each sends one request at a time.
#[derive(Debug, Default)]
pub(super) struct WorkerSlots {
    state: Mutex<SlotsState>,
    /// Notified when a slot is idle again.
    returned: Condvar,
}

#[derive(Debug, Default)]
struct SlotsState {
    taken: usize,
    idle: Vec<TakenSlot>,
}

impl WorkerSlots {
    fn state(&self) -> MutexGuard<'_, SlotsState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// An idle slot of this process, or another one: for the first request, for that of a signal handler, which the request
    /// that it interrupted waits for, and, up to a limit, for a thread that has waited for long.
    pub(super) fn take<E>(
        &self,
        attachment: &Attachment,
        check: &mut impl FnMut() -> Result<(), E>,
    ) -> Result<SlotInUse<'_>, Unanswered<E>> {
        let header = attachment.header();
        let (since, is_nested) = (Instant::now(), REQUESTS.get() > 0);
        loop {
            let vacated = sync::published(&header.vacated);
            let mut slots = self.state();
            if let Some(idle) = slots.idle.pop() {
                drop(slots);
                return Ok(SlotInUse::new(self, idle));
            }
            let has_waited = since.elapsed() >= OWNER_CHECK_INTERVAL;
            let may_take = is_nested || slots.taken == 0 || (has_waited && slots.taken < MAX_SLOTS);
            if let Some(index) = may_take.then(|| take_slot(attachment)).flatten() {
                slots.taken += 1;
                drop(slots);
                return Ok(SlotInUse::new(self, TakenSlot { index, number: 0, unread: None }));
            }
            if is_nested || slots.taken == 0 {
                drop(slots);
                if since.elapsed() >= SLOT_TIMEOUT {
                    return Err(Unanswered::NoFreeSlot);
                }
                header.slot_needed.store(1, Release);
                notify(&attachment.eventfd);
                let _ = futex::wait(&header.vacated, futex::Flags::empty(), vacated, Some(&OWNER_CHECK_TIMESPEC));
            } else {
                drop(self.returned.wait_timeout(slots, OWNER_CHECK_INTERVAL).expect("no holder of this lock panics"));
            }
            attachment.check(check)?;
        }
    }
}

fn take_slot(attachment: &Attachment) -> Option<u32> {
    let header = attachment.header();
    let taken = (0..SLOTS)
        .find(|index| header.slot(*index).worker.compare_exchange(0, attachment.process(), AcqRel, Relaxed).is_ok())?;
    header.slot(taken).born.store(attachment.born, Relaxed);
    header.used_slots.fetch_max(taken + 1, AcqRel);
    Some(taken)
}

/// A slot of this process, and its last request.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenSlot {
    pub(super) index: u32,
    pub(super) number: u32,
    /// Number of answers to the last request (0 if it only announced) that were not read, because the caller was
    /// interrupted.
    pub(super) unread: Option<usize>,
}

/// A slot during a request.
pub(super) struct SlotInUse<'a> {
    slots: &'a WorkerSlots,
    pub(super) slot: TakenSlot,
}

impl<'a> SlotInUse<'a> {
    fn new(slots: &'a WorkerSlots, slot: TakenSlot) -> Self {
        REQUESTS.set(REQUESTS.get() + 1);
        Self { slots, slot }
    }
}

impl Drop for SlotInUse<'_> {
    fn drop(&mut self) {
        REQUESTS.set(REQUESTS.get() - 1);
        self.slots.state().idle.push(self.slot);
        self.slots.returned.notify_one();
    }
}
