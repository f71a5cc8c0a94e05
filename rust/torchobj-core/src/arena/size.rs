//! Computes the size of the arena's file and its budget from the limits of the process. Creates no file.

use std::fmt;
use std::io;

use rustix::process::{Resource, getrlimit};

use super::layout::DATA;

/// Ratio of the file's size to the budget: free extents of every size class, and segments beyond the budget, need
/// address space.
const SPARSE: u64 = 128;
const MIN_SPACE: u64 = 64 << 30;
/// Minimum ratio, where the process may map less.
const MIN_SPARSE: u64 = 4;
const MIN_BUDGET: u64 = 1 << 20;

const MIB: u64 = 1 << 20;

/// Remaining resources of the process, in bytes; `None` where it has no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// Address space (`ulimit -v`).
    pub address_space: Option<u64>,
    /// Size of one file (`ulimit -f`).
    pub file: Option<u64>,
}

impl Limits {
    /// The limits of the current process.
    pub(super) fn of_process() -> Self {
        let address_space = getrlimit(Resource::As).current.map(|limit| limit.saturating_sub(mapped_bytes()));
        Self { address_space, file: getrlimit(Resource::Fsize).current }
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.address_space, self.file) {
            (Some(left), _) => write!(f, "this process has {} MiB of address space left (ulimit -v)", left / MIB),
            (None, Some(max)) => write!(f, "files of this process are limited to {max} bytes (ulimit -f)"),
            (None, None) => write!(f, "the system refuses to map more memory"),
        }
    }
}

/// Bytes that the current process has mapped.
fn mapped_bytes() -> u64 {
    // proc(5): "VmSize:     123456 kB".
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse().ok());
    size.map_or(0, |kib: u64| kib << 10)
}

/// Budget of the segments, and size of their part of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub budget: u64,
    pub space: u64,
}

impl Size {
    /// The size for `budget`, reduced where the limits require it: the arena uses at most half of the remaining address
    /// space. `None` if the limits are too low for any arena.
    pub(super) fn within(budget: u64, limits: Limits) -> Option<Self> {
        let budget = budget.max(MIN_BUDGET);
        let max = limits.address_space.map_or(u64::MAX, |left| left / 2).min(limits.file.unwrap_or(u64::MAX));
        let space = budget.saturating_mul(SPARSE).max(MIN_SPACE).min(max.saturating_sub(DATA));
        Self { budget, space }.fitting()
    }

    /// The size to try after the system refused this one: half of it.
    pub(super) fn halved(self) -> Option<Self> {
        Self { space: self.space / 2, ..self }.fitting()
    }

    fn fitting(self) -> Option<Self> {
        let budget = self.budget.min(self.space / MIN_SPARSE);
        (budget >= MIN_BUDGET).then_some(Self { budget, ..self })
    }
}

/// The error of a system call that creates an arena, with the next step.
pub(super) fn creation_error(what: &str, error: io::Error) -> io::Error {
    let way_out = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => "allow it in the seccomp profile of the container",
        Some(libc::EMFILE | libc::ENFILE) => "allow this process more open files (ulimit -n)",
        _ => "allow this process more memory",
    };
    let message = format!("no shared memory for objects that are read ahead (the arena): {what}: {error}; {way_out}");
    // `Other`: the kind of an exhausted memory would raise Python's MemoryError, and memory is not exhausted.
    io::Error::other(message)
}

/// The error for limits that are too low.
pub(super) fn limits_too_low(limits: Limits) -> io::Error {
    let message = format!(
        "no shared memory for objects that are read ahead (the arena): {limits}, and at least {} MiB are needed: raise \
         the limit",
        (DATA + MIN_SPARSE * MIN_BUDGET).div_ceil(MIB)
    );
    io::Error::other(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn without_limits_the_file_is_much_larger_than_the_budget() {
        assert_eq!(Size::within(2 * GIB, Limits::default()), Some(Size { budget: 2 * GIB, space: 256 * GIB }));
        assert_eq!(Size::within(MIB, Limits::default()), Some(Size { budget: MIB, space: MIN_SPACE }));
    }

    #[test]
    fn an_arena_takes_at_most_half_of_the_limited_address_space() {
        let limits = Limits { address_space: Some(3 * GIB), file: None };
        let space = 3 * GIB / 2 - DATA;
        assert_eq!(Size::within(2 * GIB, limits), Some(Size { budget: space / 4, space }));
        assert_eq!(Size::within(64 * MIB, limits), Some(Size { budget: 64 * MIB, space }));
    }

    #[test]
    fn a_file_size_limit_limits_the_arena() {
        let limits = Limits { address_space: None, file: Some(100 * MIB) };
        assert_eq!(Size::within(2 * GIB, limits), Some(Size { budget: 15 * MIB, space: 60 * MIB }));
        assert_eq!(Size::within(2 * GIB, Limits { file: Some(MIB), ..limits }), None);
        assert!(limits_too_low(limits).to_string().contains("(ulimit -f), and at least 44 MiB are needed"));
    }

    #[test]
    fn a_refused_size_is_halved_down_to_the_minimum() {
        let mut sizes = vec![Size::within(2 * GIB, Limits::default()).unwrap()];
        while let Some(size) = sizes.last().copied().and_then(Size::halved) {
            sizes.push(size);
        }
        assert!(sizes.iter().all(|size| size.budget >= MIB && MIN_SPARSE * size.budget <= size.space));
        assert_eq!(sizes.last(), Some(&Size { budget: MIB, space: 4 * MIB }));
    }
}
