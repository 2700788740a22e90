//! The CUDA code that `before.rs` and `after.rs` time: it calls the driver API by its C names,
//! loaded at first use, without a Rust binding. In a user's program, the user's own GPU code takes
//! the place of this module.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Calls a CUDA driver function, given by its name, with arguments and their C types.
macro_rules! cu {
    ($name:literal($($argument:expr => $type:ty),* $(,)?)) => {{
        let function = driver_function($name);
        let function: unsafe extern "C" fn($($type),*) -> c_int = std::mem::transmute(function);
        assert_eq!(function($($argument),*), 0, "{:?} failed", $name);
    }};
}

/// A CUDA context, a stream and a kernel that was loaded from PTX.
pub struct Gpu {
    stream: *mut c_void,
    kernel: *mut c_void,
}

impl Gpu {
    /// Returns the GPU state of the calling thread, which is opened at the first call.
    pub fn get() -> &'static Self {
        thread_local!(static GPU: &'static Gpu = Box::leak(Box::new(Gpu::open())));
        GPU.with(|gpu| *gpu)
    }

    fn open() -> Self {
        let (mut context, mut stream) = (null_mut(), null_mut());
        let (mut module, mut kernel) = (null_mut(), null_mut());
        unsafe {
            cu!(c"cuInit"(0 => c_uint));
            cu!(c"cuDevicePrimaryCtxRetain"(&raw mut context => *mut *mut c_void, 0 => c_int));
            cu!(c"cuCtxSetCurrent"(context => *mut c_void));
            cu!(c"cuStreamCreate"(&raw mut stream => *mut *mut c_void, 1 => c_uint));
            let ptx = concat!(include_str!("scale.ptx"), "\0").as_ptr();
            cu!(c"cuModuleLoadData"(&raw mut module => *mut *mut c_void, ptx => *const u8));
            cu!(c"cuModuleGetFunction"(
                &raw mut kernel => *mut *mut c_void,
                module => *mut c_void,
                c"scale".as_ptr() => *const c_char,
            ));
        }
        Self { stream, kernel }
    }

    /// Returns the stream on which this module enqueues all its work, as a `CUstream`.
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }

    pub fn allocate(&self, bytes: usize) -> u64 {
        let mut address = 0;
        unsafe { cu!(c"cuMemAlloc_v2"(&raw mut address => *mut u64, bytes => usize)) };
        address
    }

    pub fn fill(&self, address: u64, bytes: usize) {
        unsafe {
            cu!(c"cuMemsetD8Async"(
                address => u64, 7 => u8, bytes => usize, self.stream => *mut c_void,
            ));
        }
    }

    pub fn copy(&self, target: u64, source: u64, bytes: usize) {
        unsafe {
            cu!(c"cuMemcpyDtoDAsync_v2"(
                target => u64, source => u64, bytes => usize, self.stream => *mut c_void,
            ));
        }
    }

    pub fn scale(&self, mut address: u64, bytes: usize) {
        let mut count = (bytes / 4) as c_uint;
        let mut arguments = [(&raw mut address).cast(), (&raw mut count).cast::<c_void>()];
        unsafe {
            cu!(c"cuLaunchKernel"(
                self.kernel => *mut c_void,
                count.div_ceil(256) => c_uint, 1 => c_uint, 1 => c_uint,
                256 => c_uint, 1 => c_uint, 1 => c_uint,
                0 => c_uint, self.stream => *mut c_void,
                arguments.as_mut_ptr() => *mut *mut c_void, null_mut() => *mut *mut c_void,
            ));
        }
    }

    pub fn wait(&self) {
        unsafe { cu!(c"cuStreamSynchronize"(self.stream => *mut c_void)) };
    }
}

unsafe fn driver_function(name: &CStr) -> *mut c_void {
    const RTLD_NOW: c_int = 2;
    unsafe {
        let library = dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW);
        assert!(!library.is_null(), "no NVIDIA driver");
        let function = dlsym(library, name.as_ptr());
        assert!(!function.is_null(), "the driver has no {name:?}");
        function
    }
}
