//! What must hold when the process forks.
//!
//! A forked child has one thread. Whatever lock another thread held at that moment stays locked for ever in the child,
//! and every socket of the parent is open in it too. So:
//!
//! * Each short critical section that a child may enter later runs inside [`enter`]. Handlers of `pthread_atfork` wait
//!   until nobody is inside, and let nobody in until the fork is done; then no such lock is held.
//! * Sockets are opened and closed inside, and registered here; the child closes its copies of them raw, without
//!   the objects that own them, which belong to a runtime whose threads do not exist in the child.
//! * Everything else of the parent (runtime, clients, pools of connections) is leaked in the child and built anew:
//!   see [`Local`].
//!
//! Not by the hooks of Python's `os.register_at_fork`: between its `before` and the fork another thread may get the GIL
//! and wait, with it, to enter, while the forking thread waits for the GIL. Nothing runs between a handler of
//! `pthread_atfork` and the fork.
#![expect(unsafe_code, reason = "pthread_atfork, and closing a descriptor that no object of this process owns")]

mod local;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, Once};
use std::time::Duration;

pub use local::Local;

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

/// Enters a section during which the process does not fork. Short: no waiting for the network, for Python's GIL, nor
/// for another lock that is held across such a wait.
pub fn enter() -> Inside {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(install);
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

fn install() {
    // SAFETY: the handlers are functions of this library, which is never unloaded; they do not unwind (no step of theirs
    // panics), and are called by fork() in the forking thread only.
    let refused = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    assert_eq!(refused, 0, "the system has no memory for three handlers");
}

/// In the forking thread, which is not inside. Returns when nobody is.
extern "C" fn before() {
    CLOSED.store(true, Ordering::SeqCst);
    while INSIDE.load(Ordering::SeqCst) != 0 {
        std::thread::yield_now();
    }
}

extern "C" fn after_in_parent() {
    CLOSED.store(false, Ordering::SeqCst);
}

/// Closes the inherited sockets.
extern "C" fn after_in_child() {
    CLOSED.store(false, Ordering::SeqCst);
    // Nobody was inside at the fork, so nobody holds this lock.
    if let Ok(mut sockets) = SOCKETS.lock() {
        for socket in std::mem::take(&mut *sockets) {
            // SAFETY: the parent's object owns its own descriptor, not this copy, and is never dropped in the child.
            // A failure leaves nothing to be done.
            let _ = unsafe { libc::close(socket) };
        }
    }
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
