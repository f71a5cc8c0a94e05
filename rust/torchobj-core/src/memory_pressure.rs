//! Tells whether the container, or the machine, is short of memory. Frees nothing.
//!
//! Sources: cgroup v2 (`memory.current`, `memory.max`, `memory.high`), cgroup v1 (`memory.usage_in_bytes`,
//! `memory.limit_in_bytes`), and pressure stall information (PSI). The page cache that is not in use, `inactive_file`, does
//! not count as used: the kernel drops it first.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Share of a limit, in percent, from which memory is short.
const USED_PERCENT: u128 = 90;
/// Share of the last ten seconds, in percent, in which a task waited for memory.
const STALLED_PERCENT: f64 = 10.0;

/// Returns whether memory is short; `None` if the system has neither a limit nor pressure stall information.
pub(crate) fn is_memory_short() -> Option<bool> {
    let groups = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut found = read_to_string("/proc/pressure/memory").ok().and_then(|text| stalled(&text));
    for folder in folders(Path::new("/sys/fs/cgroup"), &groups) {
        found = either(found, is_group_short(&folder));
    }
    found
}

fn either(one: Option<bool>, other: Option<bool>) -> Option<bool> {
    [one, other].into_iter().flatten().reduce(|one, other| one || other)
}

/// Folders of the memory controller of this process: its group and the parents of it.
fn folders(root: &Path, groups: &str) -> Vec<PathBuf> {
    // cgroups(7): "0::/path" for version 2, "5:memory:/path" for version 1. A container may show its own group as the root.
    let mut folders = vec![root.to_path_buf(), root.join("memory")];
    let mut add = |root: &Path, path: &str| {
        let group = root.join(path.trim_start_matches('/'));
        folders.extend(group.ancestors().take_while(|folder| *folder != root).map(Path::to_path_buf));
    };
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let Some((controllers, path)) = fields.next().zip(fields.next()) else { continue };
        if controllers.is_empty() {
            add(root, path);
        } else if controllers.split(',').any(|controller| controller == "memory") {
            add(&root.join("memory"), path);
        }
    }
    folders
}

fn is_group_short(folder: &Path) -> Option<bool> {
    let number = |name: &str| read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let limits = [number("memory.max"), number("memory.high"), number("memory.limit_in_bytes")];
    // Version 1 shows a limit near 2^63 for none.
    let limit = limits.into_iter().flatten().filter(|limit| *limit < 1 << 60).min();
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"));
    let unused_cache = read_to_string(folder.join("memory.stat")).map_or(0, |text| inactive_file(&text));
    let used = used.map(|used| used.saturating_sub(unused_cache));
    let is_full = limit.zip(used).map(|(limit, used)| u128::from(used) * 100 >= u128::from(limit) * USED_PERCENT);
    either(is_full, read_to_string(folder.join("memory.pressure")).ok().and_then(|text| stalled(&text)))
}

/// Parses `memory.stat`: bytes of files that are cached and were not used recently, in this group and those below it.
fn inactive_file(text: &str) -> u64 {
    // Version 1 has the number of the group itself as `inactive_file`.
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value("total_inactive_file ").or_else(|| value("inactive_file ")).unwrap_or(0)
}

/// Parses pressure stall information: "some avg10=0.00 avg60=0.00 avg300=0.00 total=0".
fn stalled(text: &str) -> Option<bool> {
    let some = text.lines().find(|line| line.starts_with("some "))?;
    let share = some.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?.parse::<f64>().ok()?;
    Some(share >= STALLED_PERCENT)
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use super::*;
    use crate::test_folder::TestFolder;

    #[test]
    fn a_group_near_its_limit_is_under_pressure() {
        let folder = TestFolder::new();
        assert_eq!(is_group_short(&folder.0), None);
        write(folder.0.join("memory.max"), "1000\n").unwrap();
        write(folder.0.join("memory.current"), "899\n").unwrap();
        assert_eq!(is_group_short(&folder.0), Some(false));
        write(folder.0.join("memory.current"), "900\n").unwrap();
        assert_eq!(is_group_short(&folder.0), Some(true));
        write(folder.0.join("memory.stat"), "anon 700\ninactive_file 1\nactive_file 199\n").unwrap();
        assert_eq!(is_group_short(&folder.0), Some(false));
        write(folder.0.join("memory.max"), "max\n").unwrap();
        assert_eq!(is_group_short(&folder.0), None);
        write(folder.0.join("memory.high"), "950\n").unwrap();
        assert_eq!(is_group_short(&folder.0), Some(true));
    }

    #[test]
    fn the_cache_of_all_groups_below_is_subtracted() {
        assert_eq!(inactive_file("inactive_file 5\ntotal_inactive_file 7\n"), 7);
        assert_eq!(inactive_file("inactive_file 5\n"), 5);
        assert_eq!(inactive_file("unreadable"), 0);
    }

    #[test]
    fn the_limit_of_version_1_counts_unless_it_is_none() {
        let folder = TestFolder::new();
        write(folder.0.join("memory.usage_in_bytes"), "950").unwrap();
        write(folder.0.join("memory.limit_in_bytes"), "9223372036854771712").unwrap();
        assert_eq!(is_group_short(&folder.0), None);
        write(folder.0.join("memory.limit_in_bytes"), "1000").unwrap();
        assert_eq!(is_group_short(&folder.0), Some(true));
    }

    #[test]
    fn stalls_are_pressure() {
        let text = |share: &str| format!("some avg10={share} avg60=0.00 avg300=0.00 total=0\nfull avg10=99.00\n");
        assert_eq!(stalled(&text("12.50")), Some(true));
        assert_eq!(stalled(&text("9.99")), Some(false));
        assert_eq!(stalled("unreadable"), None);
    }

    #[test]
    fn both_versions_name_the_folders_of_the_process() {
        let found = folders(Path::new("/r"), "0::/a/b\n5:memory,cpu:/c\n6:pids:/d\n");
        assert_eq!(found, ["/r", "/r/memory", "/r/a/b", "/r/a", "/r/memory/c"].map(PathBuf::from));
        assert_eq!(folders(Path::new("/r"), "0::/\n"), ["/r", "/r/memory"].map(PathBuf::from));
    }
}
