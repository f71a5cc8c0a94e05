//! Identifiers that are unique across processes and machines.

use std::hash::{BuildHasher, RandomState};

/// Returns 128 bits in hexadecimal, from the random keys of the operating system. Called on threads of the runtime only: a
/// forked process starts its own threads, and does not inherit their keys.
pub fn unique_id() -> String {
    let half = || RandomState::new().hash_one(());
    format!("{:016x}{:016x}", half(), half())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_ids_are_equal() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| unique_id()).collect();
        assert!(ids.len() == 1000 && ids.iter().all(|id| id.len() == 32));
    }
}
