//! Memory of the host that can be had.

/// What the system calls available, or what is left to this process's group if that is less. Pages of files count as
/// available: they are given back when others need them, mapped weights among them. `None` if the system does not say.
pub fn available() -> Option<u64> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let info = std::fs::read_to_string("/proc/meminfo").ok();
    let system = info.as_deref().and_then(meminfo);
    let stat = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let files: u64 = ["inactive_file ", "active_file "].iter().filter_map(|field| stat_of(&stat, field)).sum();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(most, used)| most.saturating_sub(used.saturating_sub(files)));
    [system, group].into_iter().flatten().min()
}

/// A field of memory.stat, bytes.
fn stat_of(text: &str, field: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(field))?.trim().parse().ok()
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_read() {
        assert_eq!(meminfo("MemTotal: 5 kB\nMemAvailable:   2048 kB\nBuffers: 1 kB\n"), Some(2048 << 10));
        assert_eq!(meminfo("MemTotal: 5 kB\n"), None);
        assert_eq!(stat_of("anon 7\nactive_file 12\ninactive_file 5\n", "active_file "), Some(12));
        if cfg!(target_os = "linux") {
            assert!(available().is_some_and(|bytes| bytes > 1 << 20));
        }
    }
}
