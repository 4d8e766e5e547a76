//! What the device pretends to be, and what is looked at. From the environment first; tests change it by `control`.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard};

/// All that can be set.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Bytes of device memory.
    pub memory: u64,
    pub multiprocessors: u32,
    /// Compute capability: major * 10 + minor.
    pub capability: u32,
    /// As `cuDriverGetVersion` gives it: 12080 is 12.8.
    pub driver: u32,
    /// Whether it shares the host's memory.
    pub integrated: bool,
    /// Host threads of a launch.
    pub threads: usize,
    /// Whether mistakes are looked for, and whether one ends the kernel.
    pub checks: bool,
    pub fatal: bool,
    /// Whether CTAs that touch the same bytes are looked for (with `checks`; it costs the most).
    pub sharing: bool,
    /// Whether memory traffic is counted.
    pub traffic: bool,
    /// A line on stderr for each launch.
    pub log: bool,
    /// Whether work is done as late as it may.
    pub lazy: bool,
    /// Calls that fail: function, which call from now on (1: the next), error code.
    pub failures: Vec<(String, u64, u32)>,
    /// The error of every call from now on, or 0.
    pub lost: u32,
    /// Calls of each function so far.
    pub calls: HashMap<&'static str, u64>,
}

static SETTINGS: LazyLock<Mutex<Settings>> = LazyLock::new(|| Mutex::new(Settings::from_environment()));

/// The settings, for as long as the guard lives.
pub fn settings() -> MutexGuard<'static, Settings> {
    SETTINGS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Settings {
    fn from_environment() -> Settings {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let mut settings = Settings {
            memory: 8 << 30,
            multiprocessors: 8,
            capability: 80,
            driver: 12_080,
            integrated: false,
            threads: cores.min(2),
            checks: false,
            fatal: false,
            sharing: true,
            traffic: false,
            log: false,
            lazy: false,
            failures: Vec::new(),
            lost: 0,
            calls: HashMap::new(),
        };
        let names = [
            ("VGPU_MEMORY", "memory"),
            ("VGPU_SMS", "sms"),
            ("VGPU_CC", "cc"),
            ("VGPU_DRIVER_VERSION", "driver"),
            ("VGPU_INTEGRATED", "integrated"),
            ("VGPU_THREADS", "threads"),
            ("VGPU_CHECK", "check"),
            ("VGPU_TRAFFIC", "traffic"),
            ("VGPU_LOG", "log"),
            ("VGPU_LAZY", "lazy"),
            ("VGPU_FAIL", "fail"),
        ];
        for (variable, name) in names {
            if let Ok(value) = std::env::var(variable)
                && !settings.set(name, &value)
            {
                eprintln!("vgpu: {variable}={value} is not understood");
            }
        }
        settings
    }

    /// Sets one thing by name; false if name or value are not understood.
    pub fn set(&mut self, name: &str, value: &str) -> bool {
        let number = value.parse::<u64>();
        let on = |value: &str| match value {
            "" | "0" | "off" => Some(false),
            "1" | "on" | "fatal" => Some(true),
            _ => None,
        };
        match (name, number) {
            ("memory", _) => match bytes(value) {
                Some(bytes) => self.memory = bytes,
                None => return false,
            },
            ("sms", Ok(n @ 1..=1024)) => self.multiprocessors = n as u32,
            ("cc", _) => match value.replace('.', "").parse() {
                Ok(cc @ 50..=130) => self.capability = cc,
                _ => return false,
            },
            ("driver", Ok(n @ 9000..=99_999)) => self.driver = n as u32,
            ("threads", Ok(n @ 1..=256)) => self.threads = n as usize,
            ("lost", Ok(code)) => self.lost = code as u32,
            ("fail", _) => {
                for one in value.split(',').filter(|one| !one.is_empty()) {
                    let parts: Vec<&str> = one.split(':').collect();
                    let [function, nth, code] = parts[..] else { return false };
                    let (Ok(nth), Ok(code)) = (nth.parse::<u64>(), code.parse()) else { return false };
                    let so_far = self.calls.get(function).copied().unwrap_or(0);
                    self.failures.push((function.to_string(), so_far + nth, code));
                }
                if value.is_empty() {
                    self.failures.clear();
                }
            }
            ("check" | "integrated" | "sharing" | "traffic" | "log" | "lazy", _) => {
                let Some(on) = on(value) else { return false };
                match name {
                    "check" => {
                        self.checks = on;
                        self.fatal = value == "fatal";
                    }
                    "integrated" => self.integrated = on,
                    "sharing" => self.sharing = on,
                    "traffic" => self.traffic = on,
                    "lazy" => self.lazy = on,
                    _ => self.log = on,
                }
            }
            _ => return false,
        }
        true
    }

    /// Counts a call; its error, if it is to fail.
    pub fn call(&mut self, function: &'static str) -> Option<u32> {
        let calls = self.calls.entry(function).or_default();
        *calls += 1;
        let now = *calls;
        let at = self.failures.iter().position(|(name, nth, _)| name == function && *nth == now);
        let failed = at.map(|at| self.failures.swap_remove(at).2);
        failed.or((self.lost != 0).then_some(self.lost))
    }

    /// The newest PTX version (major * 10 + minor) that the driver reads.
    pub fn ptx_version(&self) -> u32 {
        let (major, minor) = (self.driver / 1000, self.driver % 1000 / 10);
        match (major, minor) {
            (..=10, _) => 60 + minor.min(5),
            (11, minor) => 70 + minor.min(8),
            (12, ..=5) => 80 + minor,
            (12, 6) => 85,
            (12, minor) => 79 + minor.min(9),
            (_, minor) => 90 + minor.min(9),
        }
    }
}

/// `512M`, `8G`, `1000000`.
fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_by_name() {
        let mut settings = Settings::from_environment();
        assert!(settings.set("memory", "3M") && settings.memory == 3 << 20);
        assert!(settings.set("cc", "8.9") && settings.capability == 89);
        assert!(settings.set("check", "fatal") && settings.checks && settings.fatal);
        assert!(settings.set("check", "on") && settings.checks && !settings.fatal);
        assert!(!settings.set("cc", "x") && !settings.set("what", "1") && !settings.set("fail", "cuInit:1"));
        assert!(settings.set("driver", "12000") && settings.ptx_version() == 80);
        assert!(settings.set("driver", "11040") && settings.ptx_version() == 74);
        assert!(settings.set("driver", "12060") && settings.ptx_version() == 85);
        assert!(settings.set("driver", "12080") && settings.ptx_version() == 87);
        assert!(settings.set("driver", "13050") && settings.ptx_version() == 95);
    }

    #[test]
    fn the_nth_call_fails_once() {
        let mut settings = Settings::from_environment();
        settings.call("cuInit");
        assert!(settings.set("fail", "cuInit:2:999,cuMemAlloc_v2:1:2"));
        assert_eq!(settings.call("cuMemAlloc_v2"), Some(2));
        assert_eq!(settings.call("cuMemAlloc_v2"), None);
        assert_eq!(settings.call("cuInit"), None);
        assert_eq!(settings.call("cuInit"), Some(999));
        assert_eq!(settings.call("cuInit"), None);
        assert!(settings.set("lost", "999"));
        assert_eq!(settings.call("cuCtxSynchronize"), Some(999));
        assert_eq!(settings.call("cuCtxSynchronize"), Some(999));
    }
}
