//! Kernels: a module of PTX, its functions and their parameters.

use std::ffi::{CStr, CString, c_uint, c_void};

use cudarc::driver::{
    result,
    sys::{self, CUjit_option as Jit},
};

use super::{CudaError, Pod, error::explain};

/// A module as it lies in the program.
#[derive(Debug, Clone, Copy)]
pub struct Ptx {
    /// Name of its source in `kernels/cuda`, without `.cu`.
    pub name: &'static str,
    /// The PTX.
    pub text: &'static str,
}

/// A module that the driver has compiled.
pub(super) struct Module(sys::CUmodule);

impl Module {
    /// Has the driver compile a module for the current device.
    pub fn load(ptx: &Ptx) -> Result<Module, CudaError> {
        let text = CString::new(ptx.text).expect("PTX without a zero byte");
        let mut log = vec![0u8; 8192];
        let mut options = [Jit::CU_JIT_ERROR_LOG_BUFFER, Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr() as *mut c_void, log.len() as *mut c_void];
        let mut module = std::ptr::null_mut();
        // SAFETY: a context is current; `text` ends with a zero; the options are two and `log` is as long as they say.
        let status = unsafe {
            sys::cuModuleLoadDataEx(
                &mut module,
                text.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        status.result().map_err(|e| {
            let (name, text) = explain(e);
            log.push(0);
            let log = CStr::from_bytes_until_nul(&log).map_or(String::new(), |l| l.to_string_lossy().trim().into());
            CudaError::Module { module: ptx.name, name, text, log }
        })?;
        Ok(Module(module))
    }

    /// A function; [`Kernel::allow_shared`] may raise its dynamic shared memory up to `shared` bytes.
    pub fn kernel(&self, name: &'static str, shared: usize) -> Result<Kernel, CudaError> {
        let function = CString::new(name).expect("a name");
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.0, function) }
            .map_err(|e| CudaError::call("cuModuleGetFunction", e))?;
        Ok(Kernel { function, name, most: shared })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: kernels of a module are used through the device that owns it.
        let _ = unsafe { result::module::unload(self.0) };
    }
}

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
pub struct Kernel {
    pub(super) function: sys::CUfunction,
    pub(super) name: &'static str,
    most: usize,
}

// SAFETY: a handle of the driver.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Allows launches with up to `bytes` of dynamic shared memory (beyond 48 KiB it must be asked for). Returns
    /// whether the device has that much.
    pub fn allow_shared(&self, bytes: usize) -> Result<bool, CudaError> {
        if bytes > self.most {
            return Ok(false);
        }
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of a loaded module.
        unsafe { result::function::set_function_attribute(self.function, attribute, bytes as i32) }
            .map_err(|e| CudaError::call("cuFuncSetAttribute", e))?;
        Ok(true)
    }
}

/// Parameters of a launch, in order.
#[derive(Default)]
pub struct Args {
    /// Values, each from a multiple of 16 bytes on.
    values: Vec<u128>,
    starts: Vec<usize>,
    pointers: Vec<*mut c_void>,
}

impl Args {
    /// None yet.
    pub fn new() -> Args {
        Args::default()
    }

    /// Adds a value: an address, a number, or a struct that is the same in the kernel.
    #[must_use]
    pub fn with<T: Pod>(mut self, value: T) -> Args {
        const { assert!(align_of::<T>() <= 16, "slots are aligned to 16 bytes") };
        let start = self.values.len();
        self.starts.push(start);
        self.values.resize(start + size_of::<T>().div_ceil(16), 0);
        // SAFETY: that many bytes are there, aligned to 16.
        unsafe { self.values[start..].as_mut_ptr().cast::<T>().write(value) };
        self
    }

    /// One address per value, for the driver.
    pub(super) fn pointers(&mut self) -> &mut [*mut c_void] {
        let base = self.values.as_mut_ptr();
        // SAFETY: starts are within the values.
        self.pointers = self.starts.iter().map(|&s| unsafe { base.add(s) }.cast()).collect();
        &mut self.pointers
    }
}
