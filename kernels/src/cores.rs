//! How many threads a machine is good for.
//!
//! Threads that share a core's arithmetic units or wait for a slower core gain nothing here, so one thread per
//! physical core is right; of cores of several kinds only the fast ones. What counts is what this process may use:
//! its affinity and the quota of its control group.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    thread,
};

/// Threads to take if nobody says: fast physical cores that this process may use, at least 1.
pub fn default_threads() -> usize {
    let available = thread::available_parallelism().map_or(1, |n| n.get());
    if cfg!(target_os = "linux") { from(Path::new("/"), available) } else { available }
}

/// As [`default_threads`], with `/proc` and `/sys` below `root`.
///
/// `available` is what the standard library counts: it knows affinity and quotas too, but no cores, and it rounds a
/// quota of 1.5 down. It stands in for what cannot be read.
fn from(root: &Path, available: usize) -> usize {
    let Some(allowed) = allowed(root) else { return available.max(1) };
    let cores = physical(root, &fast(root, allowed));
    let most = match quota(root) {
        Some(quota) => quota,
        None => available,
    };
    cores.min(most).max(1)
}

/// Processors that the affinity of this process allows.
fn allowed(root: &Path) -> Option<BTreeSet<usize>> {
    let status = read(root.join("proc/self/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    list(line).filter(|cpus| !cpus.is_empty())
}

/// Those of the processors that are fast, where the system tells kinds of cores apart; else all.
///
/// Hybrid x86 lists its performance cores; ARM gives each processor a capacity, up to 1024 for the fastest. Big and
/// prime cores count as one kind, cores with less than half of the best capacity as little ones.
fn fast(root: &Path, cpus: BTreeSet<usize>) -> BTreeSet<usize> {
    if let Some(performance) = read(root.join("sys/devices/cpu_core/cpus")).and_then(|text| list(&text)) {
        let both: BTreeSet<usize> = cpus.intersection(&performance).copied().collect();
        return if both.is_empty() { cpus } else { both };
    }
    let capacity = |cpu: usize| number(cpu_folder(root, cpu).join("cpu_capacity"));
    let capacities: Option<Vec<(usize, usize)>> = cpus.iter().map(|&cpu| Some((cpu, capacity(cpu)?))).collect();
    let Some(capacities) = capacities else { return cpus };
    let best = capacities.iter().map(|&(_, c)| c).max().unwrap_or(0);
    capacities.into_iter().filter(|&(_, c)| c >= best.div_ceil(2)).map(|(cpu, _)| cpu).collect()
}

/// Physical cores that the processors belong to; a processor of which nothing is known is a core of its own.
fn physical(root: &Path, cpus: &BTreeSet<usize>) -> usize {
    // The lowest of the processors of a core names it. (`core_id` is unique within a cluster or die only.)
    let core = |cpu: usize| {
        let siblings = read(cpu_folder(root, cpu).join("topology/thread_siblings_list")).and_then(|text| list(&text));
        siblings.and_then(|s| s.first().copied()).unwrap_or(cpu)
    };
    cpus.iter().map(|&cpu| core(cpu)).collect::<BTreeSet<usize>>().len()
}

/// The strictest quota of the control groups (version 2) that this process is in, in processors, rounded up; `None`
/// without one.
fn quota(root: &Path) -> Option<usize> {
    let groups = read(root.join("proc/self/cgroup"))?;
    let path = groups.lines().find_map(|l| l.strip_prefix("0::/"))?;
    let mount = root.join("sys/fs/cgroup");
    let mut group = mount.join(path);
    let mut least: Option<usize> = None;
    loop {
        if let Some(here) = read(group.join("cpu.max")).and_then(|text| cpus_of_quota(&text)) {
            least = Some(least.map_or(here, |l| l.min(here)));
        }
        if group == mount || !group.pop() {
            return least;
        }
    }
}

/// Processors that a line `quota period` in microseconds stands for, rounded up; `None` for `max period`.
fn cpus_of_quota(text: &str) -> Option<usize> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (usize, usize) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0).then(|| quota.div_ceil(period).max(1))
}

fn cpu_folder(root: &Path, cpu: usize) -> PathBuf {
    root.join(format!("sys/devices/system/cpu/cpu{cpu}"))
}

fn number(path: PathBuf) -> Option<usize> {
    read(path)?.trim().parse().ok()
}

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Numbers as the kernel lists them: `0-3,8,10-11`. `None` for anything else.
fn list(text: &str) -> Option<BTreeSet<usize>> {
    let mut all = BTreeSet::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MOST_CPUS {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

/// More than any kernel counts: a list beyond it is not one.
const MOST_CPUS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of `/proc` and `/sys` that goes away.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let root = std::env::temp_dir().join(format!("quern-cores-{}-{name}", std::process::id()));
            let tree = Tree(root);
            for (path, text) in files {
                tree.put(path, text);
            }
            tree
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().expect("in a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }

        fn cpu(&self, cpu: usize, file: &str, text: &str) {
            self.put(&format!("sys/devices/system/cpu/cpu{cpu}/{file}"), text);
        }

        /// Affinity to `cpus`, and `siblings` of each processor of the machine.
        fn machine(name: &str, cpus: &str, siblings: &[&str]) -> Tree {
            let status = format!("Name:\tquern\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\nMems_allowed:\t1\n");
            let tree = Tree::new(name, &[("proc/self/status", &status)]);
            for (cpu, siblings) in siblings.iter().enumerate() {
                tree.cpu(cpu, "topology/thread_siblings_list", &format!("{siblings}\n"));
            }
            tree
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn siblings_count_once() {
        // Two threads a core, numbered as servers do and as desktops do.
        let far = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"];
        assert_eq!(from(&Tree::machine("far", "0-7", &far).0, 8), 4);
        let near = ["0-1", "0-1", "2-3", "2-3"];
        assert_eq!(from(&Tree::machine("near", "0-3", &near).0, 4), 2);
    }

    #[test]
    fn affinity_counts() {
        let siblings = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"];
        for (cpus, threads) in [("0-2", 3), ("0,4", 1), ("4", 1), ("1,3-4,7", 3)] {
            assert_eq!(from(&Tree::machine("affinity", cpus, &siblings).0, 8), threads, "{cpus}");
        }
    }

    #[test]
    fn only_performance_cores_of_a_hybrid() {
        let tree = Tree::machine("hybrid", "0-7", &["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]);
        tree.put("sys/devices/cpu_core/cpus", "0-3\n");
        tree.put("sys/devices/cpu_atom/cpus", "4-7\n");
        assert_eq!(from(&tree.0, 8), 2);
        // Unless others are all there are.
        tree.put("proc/self/status", "Cpus_allowed_list:\t5-7\n");
        assert_eq!(from(&tree.0, 3), 3);
    }

    #[test]
    fn little_cores_are_left_out() {
        let tree = Tree::machine("little", "0-7", &["0", "1", "2", "3", "4", "5", "6", "7"]);
        for (cpu, capacity) in [325, 325, 325, 325, 870, 870, 870, 1024].iter().enumerate() {
            tree.cpu(cpu, "cpu_capacity", &format!("{capacity}\n"));
        }
        assert_eq!(from(&tree.0, 8), 4);
        tree.put("proc/self/status", "Cpus_allowed_list:\t0-3\n");
        assert_eq!(from(&tree.0, 4), 4);
    }

    #[test]
    fn quotas_round_up_and_the_strictest_counts() {
        let tree = Tree::machine("quota", "0-7", &["0", "1", "2", "3", "4", "5", "6", "7"]);
        tree.put("proc/self/cgroup", "0::/pod/box\n");
        tree.put("sys/fs/cgroup/pod/box/cpu.max", "max 100000\n");
        assert_eq!(from(&tree.0, 8), 8);
        tree.put("sys/fs/cgroup/pod/cpu.max", "350000 100000\n");
        assert_eq!(from(&tree.0, 3), 4);
        tree.put("sys/fs/cgroup/pod/box/cpu.max", "150000 100000\n");
        assert_eq!(from(&tree.0, 1), 2);
        tree.put("sys/fs/cgroup/pod/box/cpu.max", "1000 100000\n");
        assert_eq!(from(&tree.0, 1), 1);
        tree.put("sys/fs/cgroup/cpu.max", "9 0\n");
        assert_eq!(from(&tree.0, 1), 1);
    }

    #[test]
    fn quotas_of_version_1_come_from_the_standard_library() {
        let tree = Tree::machine("quota1", "0-3", &["0", "1", "2", "3"]);
        tree.put("proc/self/cgroup", "2:cpuset:/\n1:cpu:/box\n0::/\n");
        assert_eq!(from(&tree.0, 2), 2);
    }

    #[test]
    fn what_cannot_be_read_is_not_needed() {
        assert_eq!(from(&Tree::new("nothing", &[]).0, 6), 6);
        assert_eq!(from(&Tree::new("nothing0", &[]).0, 0), 1);
        // Processors without a topology are cores.
        assert_eq!(from(&Tree::machine("plain", "0-3", &[]).0, 4), 4);
        for nonsense in ["", "x", "3-", "0-99999999999", "-1", "5-2"] {
            let tree = Tree::machine("nonsense", nonsense, &["0", "1"]);
            assert_eq!(from(&tree.0, 2), 2, "{nonsense}");
        }
    }

    #[test]
    fn this_machine_has_threads() {
        let all = thread::available_parallelism().map_or(1, |n| n.get());
        assert!((1..=2 * all).contains(&default_threads()));
    }
}
