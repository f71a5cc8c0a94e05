//! Whether processes that were forked from this one still exist, with their copies of its views of shared memory.
//!
//! A *sentinel* is a file in memory that is mapped, and never written to, while this process forks: all descendants inherit
//! the mapping, whatever descriptors they close, and lose it when they exit or start another program. The system seals a file
//! against writes only when no process maps it.
#![expect(unsafe_code, reason = "maps and unmaps sentinels; each use states its invariant")]

use std::ffi::c_void;
use std::io;
use std::sync::{Mutex, MutexGuard};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::ForkGuard;
use crate::descriptor::Descriptor;

const LEN: usize = 4096;

/// Watches the children of forks `first..=last`, and their descendants.
struct Sentinel {
    first: u64,
    last: u64,
    /// `None` if the system refused the file.
    file: Option<Descriptor>,
}

/// The mapping of a sentinel in this process. A forked child keeps its copy until it exits.
struct Mapping(*mut c_void);

// SAFETY: nothing accesses the mapping.
unsafe impl Send for Mapping {}

struct Watch {
    is_enabled: bool,
    /// The sentinel that the next children inherit.
    current: Option<(Sentinel, Mapping)>,
    /// The sentinels that this process maps no more.
    earlier: Vec<Sentinel>,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { is_enabled: false, current: None, earlier: Vec::new() });

/// Entered by holders of a `ForkGuard` and by the handlers of a fork only, so that no child inherits the lock.
fn watch() -> MutexGuard<'static, Watch> {
    WATCH.lock().expect("no holder of this lock panics")
}

/// Watches the children that are forked from now on.
pub fn watch_children(_guard: &ForkGuard) {
    watch().is_enabled = true;
}

/// Returns whether the watched children of forks `after + 1..=until`, in the count of [`count`](super::count), and all processes
/// that were forked from them, have exited or started another program.
pub fn are_gone(_guard: &ForkGuard, after: u64, until: u64) -> bool {
    let mut watch = watch();
    let overlaps = |sentinel: &Sentinel| sentinel.first <= until && sentinel.last > after;
    if let Some((sentinel, Mapping(start))) = watch.current.take_if(|(sentinel, _)| overlaps(sentinel)) {
        // SAFETY: `Sentinel::mapped` created exactly this mapping, and nothing points into it. The call cannot fail.
        let _ = unsafe { munmap(start, LEN) };
        watch.earlier.push(sentinel);
    }
    watch.earlier.retain(|sentinel| !overlaps(sentinel) || sentinel.is_mapped());
    !watch.earlier.iter().any(overlaps)
}

/// Called before fork `number`.
pub(super) fn before(number: u64) {
    let mut watch = watch();
    if !watch.is_enabled {
        return;
    }
    match &mut watch.current {
        Some((sentinel, _)) => sentinel.last = number,
        None => match Sentinel::mapped(number) {
            Ok(current) => watch.current = Some(current),
            // What is in use during this fork is not reused.
            Err(_) => watch.earlier.push(Sentinel { first: number, last: number, file: None }),
        },
    }
}

/// Called in the child, which keeps the mappings.
pub(super) fn after_in_child() {
    // No thread was inside during the fork, so this lock is free.
    if let Ok(mut watch) = WATCH.lock() {
        watch.current = None;
        watch.earlier.clear();
    }
}

impl Sentinel {
    fn mapped(number: u64) -> io::Result<(Self, Mapping)> {
        let file = memfd_create("torchobj-forks", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, LEN as u64)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let file = Descriptor::new(file)?;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no existing memory.
        let start = unsafe { mmap(std::ptr::null_mut(), LEN, access, MapFlags::SHARED, file.get()?, 0) }?;
        Ok((Self { first: number, last: number, file: Some(file) }, Mapping(start)))
    }

    /// Returns whether a process still maps it, or may.
    fn is_mapped(&self) -> bool {
        let sealed = self.file.as_ref().map(|file| Ok(fcntl_add_seals(file.get()?, SealFlags::WRITE)?));
        !matches!(sealed, Some(io::Result::Ok(())))
    }
}
