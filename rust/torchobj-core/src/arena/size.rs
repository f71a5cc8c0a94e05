//! How large the file of an arena is, and its budget, under the limits of this process. Makes no file.

use std::fmt;
use std::io;

use rustix::process::{Resource, getrlimit};

use super::layout::DATA;

/// How much larger than its budget an arena's file is: room for extents of every class, and for what is overdrawn.
const SPARSE: u64 = 128;
const LEAST_SPACE: u64 = 64 << 30;
/// The same where the process may not map so much.
const LEAST_SPARSE: u64 = 4;
const LEAST_BUDGET: u64 = 1 << 20;

const MIB: u64 = 1 << 20;

/// What the process may still have, in bytes; `None` where it is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// Of the address space, as `ulimit -v` limits it.
    pub address_space: Option<u64>,
    /// In one file, as `ulimit -f` limits it.
    pub file: Option<u64>,
}

impl Limits {
    /// Those of this process.
    pub(super) fn of_process() -> Self {
        let address_space = getrlimit(Resource::As).current.map(|limit| limit.saturating_sub(mapped_bytes()));
        Self { address_space, file: getrlimit(Resource::Fsize).current }
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.address_space, self.file) {
            (Some(left), _) => write!(f, "{} MiB of address space are left to this process (ulimit -v)", left / MIB),
            (None, Some(most)) => write!(f, "files of this process have at most {most} bytes (ulimit -f)"),
            (None, None) => write!(f, "the system maps no more"),
        }
    }
}

/// What this process has mapped, in bytes.
fn mapped_bytes() -> u64 {
    // proc(5): "VmSize:     123456 kB".
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse().ok());
    size.map_or(0, |kib: u64| kib << 10)
}

/// What segments may take, and what the file has for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub budget: u64,
    pub space: u64,
}

impl Size {
    /// The size for a budget: smaller than that where the limits leave less. Half of the address space that is left is
    /// others'. `None` when they leave too little for any.
    pub(super) fn within(budget: u64, limits: Limits) -> Option<Self> {
        let budget = budget.max(LEAST_BUDGET);
        let most = limits.address_space.map_or(u64::MAX, |left| left / 2).min(limits.file.unwrap_or(u64::MAX));
        let space = budget.saturating_mul(SPARSE).max(LEAST_SPACE).min(most.saturating_sub(DATA));
        Self { budget, space }.fitting()
    }

    /// Half of it, after the system refused it.
    pub(super) fn halved(self) -> Option<Self> {
        Self { space: self.space / 2, ..self }.fitting()
    }

    fn fitting(self) -> Option<Self> {
        let budget = self.budget.min(self.space / LEAST_SPARSE);
        (budget >= LEAST_BUDGET).then_some(Self { budget, ..self })
    }
}

/// The error of a system call for an arena, with what to do about it.
pub(super) fn refused(what: &str, error: io::Error) -> io::Error {
    let way_out = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => "allow it in the seccomp profile of the container",
        Some(libc::EMFILE | libc::ENFILE) => "allow this process more open files (ulimit -n)",
        _ => "allow this process more memory",
    };
    let message = format!("no shared memory for objects that are read ahead (the arena): {what}: {error}; {way_out}");
    // Of no kind: that of memory would be Python's MemoryError, and this is no lack of it.
    io::Error::other(message)
}

/// The error where the limits leave too little.
pub(super) fn too_little(limits: Limits) -> io::Error {
    let message = format!(
        "no shared memory for objects that are read ahead (the arena): {limits}, and it needs {} MiB at least: raise \
         the limit",
        (DATA + LEAST_SPARSE * LEAST_BUDGET).div_ceil(MIB)
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
        assert_eq!(Size::within(MIB, Limits::default()), Some(Size { budget: MIB, space: LEAST_SPACE }));
    }

    #[test]
    fn a_limit_of_the_address_space_leaves_half_of_it_to_others() {
        let limits = Limits { address_space: Some(3 * GIB), file: None };
        let space = 3 * GIB / 2 - DATA;
        assert_eq!(Size::within(2 * GIB, limits), Some(Size { budget: space / 4, space }));
        assert_eq!(Size::within(64 * MIB, limits), Some(Size { budget: 64 * MIB, space }));
    }

    #[test]
    fn a_limit_of_files_limits_the_file() {
        let limits = Limits { address_space: None, file: Some(100 * MIB) };
        assert_eq!(Size::within(2 * GIB, limits), Some(Size { budget: 15 * MIB, space: 60 * MIB }));
        assert_eq!(Size::within(2 * GIB, Limits { file: Some(MIB), ..limits }), None);
        assert!(too_little(limits).to_string().contains("(ulimit -f), and it needs 44 MiB at least"));
    }

    #[test]
    fn what_is_refused_is_halved_until_too_little_is_left() {
        let mut sizes = vec![Size::within(2 * GIB, Limits::default()).unwrap()];
        while let Some(size) = sizes.last().copied().and_then(Size::halved) {
            sizes.push(size);
        }
        assert!(sizes.iter().all(|size| size.budget >= MIB && LEAST_SPARSE * size.budget <= size.space));
        assert_eq!(sizes.last(), Some(&Size { budget: MIB, space: 4 * MIB }));
    }
}
