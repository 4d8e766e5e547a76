//! The side of a test: finds the library, loads it, and talks to the one copy of it.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *mut c_char;
}

const NOW_AND_GLOBAL: c_int = 2 | 0x100;

/// The shared library of this build: it lies next to the test that runs, or one folder above.
///
/// # Panics
/// If it is not there, which means that the package was not built.
pub fn library() -> PathBuf {
    let here = std::env::current_exe().expect("a running program has a path");
    let folders = here.ancestors().skip(1).take(3);
    let mut candidates = folders.flat_map(|folder| [folder.join("deps"), folder.to_path_buf()]);
    candidates
        .find_map(|folder| Some(folder.join("libquern_vgpu.so")).filter(|path| path.exists()))
        .unwrap_or_else(|| panic!("no libquern_vgpu.so near {}: build the package quern-vgpu", here.display()))
}

/// Loads the library, so that every later `dlopen("libcuda.so")` of this process finds it. To be called before the
/// first use of the driver. Calling it again gives the same one.
///
/// # Panics
/// If the library cannot be loaded.
pub fn load() -> &'static VirtualGpu {
    static LOADED: OnceLock<VirtualGpu> = OnceLock::new();
    LOADED.get_or_init(|| {
        let path = library();
        let name = CString::new(path.as_os_str().as_encoded_bytes()).expect("paths have no zeros");
        // SAFETY: a string that ends with zero; the library runs no code when it is loaded.
        let handle = unsafe { dlopen(name.as_ptr(), NOW_AND_GLOBAL) };
        if handle.is_null() {
            // SAFETY: after a failure it gives a string.
            let why = unsafe { CStr::from_ptr(dlerror()) };
            panic!("{}: {}", path.display(), why.to_string_lossy());
        }
        let find = |name: &CStr| {
            // SAFETY: the handle is one of dlopen, the name ends with zero.
            let found = unsafe { dlsym(handle, name.as_ptr()) };
            assert!(!found.is_null(), "{} has no {}", path.display(), name.to_string_lossy());
            found
        };
        // SAFETY: these are the functions of `control`, with these types.
        unsafe {
            VirtualGpu {
                set: std::mem::transmute::<*mut c_void, Set>(find(c"vgpu_set")),
                take: std::mem::transmute::<*mut c_void, Take>(find(c"vgpu_take")),
                free: std::mem::transmute::<*mut c_void, Free>(find(c"vgpu_free")),
                handle: handle as usize,
            }
        }
    })
}

type Set = unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
type Take = unsafe extern "C" fn(*const c_char) -> *mut c_char;
type Free = unsafe extern "C" fn(*mut c_char);

/// The loaded library.
pub struct VirtualGpu {
    set: Set,
    take: Take,
    free: Free,
    handle: usize,
}

impl VirtualGpu {
    /// Sets what the device is or looks for: `memory` (bytes, or `512M`), `sms`, `cc` (`8.6`), `driver` (`12080`),
    /// `integrated`, `threads`, `check` (`on`, `off`, `fatal`), `sharing` (whether `check` looks for races between
    /// CTAs), `traffic`, `log`, `lost` (error code of every call from now on, `0` to find the device again), `fail`
    /// (`function:n:code`: the n-th call from now on fails; empty: none does). Memory that was allocated before checks
    /// were on counts as written.
    ///
    /// # Panics
    /// If name or value are not understood.
    pub fn set(&self, name: &str, value: &str) {
        let both = [name, value].map(|text| CString::new(text).expect("settings have no zeros"));
        // SAFETY: strings that end with zero.
        let known = unsafe { (self.set)(both[0].as_ptr(), both[1].as_ptr()) };
        assert!(known == 1, "the virtual GPU does not understand {name}={value}");
    }

    fn text(&self, what: &CStr) -> String {
        // SAFETY: a string that ends with zero; what comes back is freed once.
        unsafe {
            let found = (self.take)(what.as_ptr());
            assert!(!found.is_null(), "the virtual GPU has no {}", what.to_string_lossy());
            let text = CStr::from_ptr(found).to_string_lossy().into_owned();
            (self.free)(found);
            text
        }
    }

    /// The mistakes that were found since the last call, in any thread of the process.
    pub fn reports(&self) -> Vec<String> {
        self.text(c"reports").lines().map(str::to_string).collect()
    }

    /// What was counted of each kernel since the last call.
    pub fn stats(&self) -> BTreeMap<String, KernelReport> {
        self.text(c"stats").lines().filter_map(KernelReport::parse).collect()
    }

    /// Calls of each driver function since the process began.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        let text = self.text(c"calls");
        text.lines()
            .filter_map(|line| line.split_once('='))
            .map(|(name, n)| (name.into(), n.parse().unwrap_or(0)))
            .collect()
    }

    /// Bytes of device memory in use.
    pub fn used(&self) -> u64 {
        self.text(c"used").parse().unwrap_or(0)
    }

    /// The address of a function of the driver, for tests without cudarc.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is one of dlopen and stays open, the name ends with zero.
        unsafe { dlsym(self.handle as *mut c_void, name.as_ptr()) }
    }
}

/// What was counted of a kernel's launches. Traffic is counted only with `traffic` or `check` on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KernelReport {
    /// `launches`, `ctas`, `thread_instructions`, `warp_instructions`; of global memory `requests` (by warps),
    /// `sectors` of 32 bytes that they touched, `ideal_sectors` that would have held their bytes, `read` and
    /// `written` (bytes asked for), `unique_read` and `unique_written` (bytes of the different sectors of each
    /// launch); of shared memory `shared_requests`, `shared_waves` (passes over the banks) and `shared_ideal`;
    /// `nanoseconds` of the host.
    pub counts: BTreeMap<String, u64>,
    /// Warp instructions by class: `mma`, `ldmatrix`, `cp.async`, `ld.global`, `st.global`, `ld.shared`,
    /// `st.shared`, `ld.other`, `st.other`, `atom`, `bar`, `shfl`, `float`, `half`, `special`, `int`, `cvt`, `mov`,
    /// `setp`, `bra`, `other`.
    pub classes: BTreeMap<String, u64>,
}

impl KernelReport {
    fn parse(line: &str) -> Option<(String, KernelReport)> {
        let mut fields = line.split('\t');
        let name = fields.next()?.strip_prefix("kernel=")?.to_string();
        let mut report = KernelReport::default();
        for (key, value) in fields.filter_map(|field| field.split_once('=')) {
            let value = value.parse().ok()?;
            match key.strip_prefix("class:") {
                Some(class) => report.classes.insert(class.to_string(), value),
                None => report.counts.insert(key.to_string(), value),
            };
        }
        Some((name, report))
    }

    /// A count by name; 0 if there is none.
    pub fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    /// Warp instructions of a class; 0 if there are none.
    pub fn class(&self, name: &str) -> u64 {
        self.classes.get(name).copied().unwrap_or(0)
    }

    /// One count by another: `ratio("sectors", "ideal_sectors")` is 1 where every access is coalesced.
    pub fn ratio(&self, part: &str, whole: &str) -> f64 {
        self.count(part) as f64 / self.count(whole).max(1) as f64
    }
}
