//! What must hold when the process forks. Knows no Python: the binding calls [`before`], [`after_in_parent`] and
//! [`after_in_child`] from the interpreter's own hooks.
//!
//! A forked child has one thread. Whatever lock another thread held at that moment stays locked for ever in the child,
//! and every socket of the parent is open in it too. So:
//!
//! * Each short critical section that a child may enter later runs inside [`enter`]. `before` waits until nobody is
//!   inside and lets nobody in until the fork is done; then no such lock is held.
//! * Sockets are opened and closed inside, and registered here; the child closes its copies of them raw, without
//!   the objects that own them, which belong to a runtime whose threads do not exist in the child.
//! * Everything else of the parent (runtime, clients, pools of connections) is leaked in the child and built anew:
//!   see [`generation`].

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

static INSIDE: AtomicUsize = AtomicUsize::new(0);
static CLOSED: AtomicBool = AtomicBool::new(false);
static SOCKETS: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

thread_local! {
    /// How often this thread is inside; only the outermost entry counts.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Proof of being inside; leaving is dropping it.
#[derive(Debug)]
pub struct Inside(());

/// Enters a section during which the process does not fork. Short: no waiting for the network, nor for another lock
/// that is held across such a wait.
pub fn enter() -> Inside {
    DEPTH.with(|depth| {
        if depth.get() == 0 {
            loop {
                INSIDE.fetch_add(1, Ordering::SeqCst);
                if !CLOSED.load(Ordering::SeqCst) {
                    break;
                }
                INSIDE.fetch_sub(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        depth.set(depth.get() + 1);
    });
    Inside(())
}

impl Drop for Inside {
    fn drop(&mut self) {
        DEPTH.with(|depth| {
            depth.set(depth.get() - 1);
            if depth.get() == 0 {
                INSIDE.fetch_sub(1, Ordering::SeqCst);
            }
        });
    }
}

/// Called by the forking thread, which is not inside. Returns when nobody is.
pub fn before() {
    CLOSED.store(true, Ordering::SeqCst);
    while INSIDE.load(Ordering::SeqCst) != 0 {
        std::thread::yield_now();
    }
}

/// Called in the parent after the fork.
pub fn after_in_parent() {
    CLOSED.store(false, Ordering::SeqCst);
}

/// Called in the child after the fork. Returns the inherited sockets: the caller closes them.
pub fn after_in_child() -> Vec<RawFd> {
    CLOSED.store(false, Ordering::SeqCst);
    std::mem::take(&mut *SOCKETS.lock().expect("no holder of this lock panics")).into_iter().collect()
}

/// Which process this is. State that was built under another number belongs to the parent and must not be touched.
pub fn generation() -> u32 {
    std::process::id()
}

/// Notes a socket of ours. To be called inside, in the same section that opened it.
pub fn register(_inside: &Inside, socket: RawFd) {
    SOCKETS.lock().expect("no holder of this lock panics").insert(socket);
}

/// Forgets a socket of ours. To be called inside, in the same section that closes it.
pub fn forget(_inside: &Inside, socket: RawFd) {
    SOCKETS.lock().expect("no holder of this lock panics").remove(&socket);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_inside_while_the_door_is_closed() {
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
                before();
                assert_eq!(entered.load(Ordering::SeqCst), 0);
                after_in_parent();
                std::thread::yield_now();
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}
