//! Identifies a process by more than its process id, which the system assigns again after the process has exited.

use std::sync::atomic::{AtomicU64, Ordering};

/// Low bits of an identity: the process id, of at most 22 bits on Linux.
const PID_BITS: u32 = 24;
/// The bits above them: when the process started, in ticks of 10 ms since the start of the system.
const START_BITS: u32 = 32;

/// The identity of this process; 0 if it is not known yet.
static OWN: AtomicU64 = AtomicU64::new(0);
/// The bits above those: number of forks from the process that loaded this library.
static DEPTH: AtomicU64 = AtomicU64::new(0);

/// The identity of this process.
pub(super) fn own() -> u64 {
    let own = OWN.load(Ordering::Relaxed);
    let process = std::process::id();
    // A child that was created without `fork` has run no handler.
    if own != 0 && pid_of(own) == process {
        return own;
    }
    let start = start_of(process).unwrap_or(0);
    let own = DEPTH.load(Ordering::Relaxed) << (PID_BITS + START_BITS) | start << PID_BITS | u64::from(process);
    OWN.store(own, Ordering::Relaxed);
    own
}

/// Process id of the process with this identity.
pub fn pid_of(generation: u64) -> u32 {
    (generation & ((1 << PID_BITS) - 1)) as u32
}

/// Returns whether the process that has the process id of `generation` now is another one. False if that is unknown, and if
/// no process has the id.
pub fn is_replaced(generation: u64) -> bool {
    let start = generation >> PID_BITS & ((1 << START_BITS) - 1);
    start != 0 && start_of(pid_of(generation)).is_some_and(|now| now != start)
}

/// Called in a forked child.
pub(super) fn forget() {
    DEPTH.fetch_add(1, Ordering::Relaxed);
    OWN.store(0, Ordering::Relaxed);
}

/// When a process started. `None` if it has exited, or the system does not tell.
fn start_of(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // proc_pid_stat(5): the name, which may contain anything, is in parentheses. The third field follows it, and the start is
    // the 22nd.
    let ticks: u64 = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(22 - 3)?.parse().ok()?;
    Some(ticks & ((1 << START_BITS) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_the_id_of_another_is_told_apart() {
        let own = own();
        assert_eq!((pid_of(own), own), (std::process::id(), super::own()));
        if !cfg!(target_os = "linux") {
            return;
        }
        assert!(!is_replaced(own));
        assert!(is_replaced(own - (1 << PID_BITS)), "it had started a tick earlier");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let others = start_of(child.id()).unwrap() << PID_BITS | u64::from(child.id());
        assert!(!is_replaced(others));
        assert!(is_replaced(others + (7 << PID_BITS)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_replaced(others), "it has exited, and its id is free");
    }
}
