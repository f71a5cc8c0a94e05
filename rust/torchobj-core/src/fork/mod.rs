//! Makes forking safe.
//!
//! A forked child has one thread. A lock that another thread held during the fork stays locked in the child for ever, and
//! all sockets of the parent are open in the child as well. Therefore:
//!
//! * Each short critical section that a child may enter later is guarded by [`enter`]. The `pthread_atfork` handlers wait
//!   until no thread is inside and block new entries until the fork is done, so that no such lock is held during a fork.
//! * Sockets are opened and closed inside, and registered here. The child closes its copies of the descriptors directly,
//!   not through their owners, which belong to a runtime whose threads do not exist in the child.
//! * All other state of the parent (runtime, clients, connection pools) is leaked in the child and created again: see
//!   [`Local`].
//!
//! The hooks of Python's `os.register_at_fork` cannot do this: between `before` and the fork another thread may take the
//! GIL and wait in [`enter`], while the forking thread waits for the GIL. Nothing runs between a `pthread_atfork` handler
//! and the fork.
#![expect(unsafe_code, reason = "pthread_atfork, and closing a descriptor that no object of this process owns")]

mod identity;
#[cfg(target_os = "linux")]
mod inherited;
mod local;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, Once};
use std::time::Duration;

use rustix::fs::fstat;

pub use identity::{is_replaced, pid_of};
#[cfg(target_os = "linux")]
pub use inherited::{are_gone, watch_children};
pub use local::Local;

static HANDLERS: Once = Once::new();
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static FORKING: AtomicBool = AtomicBool::new(false);
static FORKS: AtomicU64 = AtomicU64::new(0);
static BORN: AtomicU64 = AtomicU64::new(0);
/// Inodes of the sockets.
static SOCKETS: Mutex<BTreeMap<RawFd, u64>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Number of nested entries of this thread; only the outermost one counts.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A section during which the process does not fork. Ends on drop.
#[derive(Debug)]
pub struct ForkGuard(());

/// Enters a section during which the process does not fork. The section must be short: it must not wait for the network,
/// for Python's GIL, or for a lock that is held during such a wait.
pub fn enter() -> ForkGuard {
    HANDLERS.call_once(install);
    DEPTH.with(|depth| {
        if depth.get() == 0 {
            loop {
                INSIDE.fetch_add(1, Ordering::SeqCst);
                if !FORKING.load(Ordering::SeqCst) {
                    break;
                }
                INSIDE.fetch_sub(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        depth.set(depth.get() + 1);
    });
    ForkGuard(())
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        DEPTH.with(|depth| {
            depth.set(depth.get() - 1);
            if depth.get() == 0 {
                INSIDE.fetch_sub(1, Ordering::SeqCst);
            }
        });
    }
}

fn install() {
    // SAFETY: the handlers are functions of this library, which is never unloaded; they do not unwind, because none of
    // their steps panics; fork() calls them in the forking thread only.
    let error = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    assert_eq!(error, 0, "pthread_atfork fails only without memory");
}

/// Runs in the forking thread, which is not inside. Returns when no thread is inside.
extern "C" fn before() {
    FORKING.store(true, Ordering::SeqCst);
    while INSIDE.load(Ordering::SeqCst) != 0 {
        std::thread::yield_now();
    }
    let _number = FORKS.fetch_add(1, Ordering::SeqCst) + 1;
    #[cfg(target_os = "linux")]
    inherited::before(_number);
}

extern "C" fn after_in_parent() {
    FORKING.store(false, Ordering::SeqCst);
}

/// Closes the inherited sockets.
extern "C" fn after_in_child() {
    // An entry of another thread that found a fork counts itself for a moment, which the fork may copy.
    INSIDE.store(0, Ordering::SeqCst);
    FORKING.store(false, Ordering::SeqCst);
    BORN.store(FORKS.load(Ordering::SeqCst), Ordering::SeqCst);
    identity::forget();
    #[cfg(target_os = "linux")]
    inherited::after_in_child();
    // No thread was inside during the fork, so this lock is free.
    if let Ok(mut sockets) = SOCKETS.lock() {
        for (socket, inode) in std::mem::take(&mut *sockets) {
            if inode_of(socket) == inode {
                // SAFETY: no object of the child owns this copy of the descriptor: its owner in the parent is never dropped
                // in the child. A failure is ignored, because nothing can be done about it.
                let _ = unsafe { libc::close(socket) };
            }
        }
    }
}

/// Inode of an open descriptor; 0 if it is closed. The program may close our sockets, and open files under their numbers.
fn inode_of(socket: RawFd) -> u64 {
    // SAFETY: used for this call only, which refuses a number that is not open.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    fstat(socket).map_or(0, |found| found.st_ino)
}

/// Number of forks so far. Memory that was in use during a fork is also in use by the child. Read in a section, the number
/// does not change until the section ends.
pub fn count(_guard: &ForkGuard) -> u64 {
    FORKS.load(Ordering::SeqCst)
}

/// Identifies this process. State with another number belongs to another process, such as the parent, and must not be used. The
/// process id of a process that has exited is assigned again; this number is not.
pub fn generation() -> u64 {
    HANDLERS.call_once(install);
    identity::own()
}

/// The number of the fork by which its parent started this process, in the count of the parent; 0 if it was not forked, or
/// before the parent used this library.
pub fn born() -> u64 {
    BORN.load(Ordering::SeqCst)
}

/// Registers a socket, to be closed in forked children. Called in the section that opens it.
pub fn register(_guard: &ForkGuard, socket: RawFd) {
    SOCKETS.lock().expect("no holder of this lock panics").insert(socket, inode_of(socket));
}

/// Removes a socket from the registered ones. Called in the section that closes it.
pub fn unregister(_guard: &ForkGuard, socket: RawFd) {
    SOCKETS.lock().expect("no holder of this lock panics").remove(&socket);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_is_inside_during_a_fork() {
        let entered = AtomicUsize::new(0);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::SeqCst) {
                        let _outer = enter();
                        let _inner = enter();
                        entered.fetch_add(1, Ordering::SeqCst);
                        std::thread::yield_now();
                        entered.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
            for _ in 0..200 {
                let forks = count(&enter());
                before();
                assert_eq!(entered.load(Ordering::SeqCst), 0);
                after_in_parent();
                assert!(count(&enter()) > forks);
                std::thread::yield_now();
            }
            stop.store(true, Ordering::SeqCst);
        });
    }

    #[test]
    fn a_child_can_fork_although_an_entry_was_refused_during_its_fork() {
        drop(enter());
        // SAFETY: the child calls the handlers of a fork and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            before();
            INSIDE.fetch_add(1, Ordering::SeqCst);
            after_in_child();
            let inside = i32::from(INSIDE.load(Ordering::SeqCst) != 0);
            // SAFETY: ends this process.
            unsafe { libc::_exit(inside) };
        }
        let mut status = -1;
        // SAFETY: waits for the child of this test.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
