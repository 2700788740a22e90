//! A loaded kernel, its attributes and its launch.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaFunction, CudaStream, DriverError, result, sys};

use super::argument::{self, KernelArgument};
use super::shape::{Launch, product_of_extents};
use crate::BackendError;
use crate::driver::driver_error::failed;

/// A loaded kernel.
pub struct Kernel {
    function: CudaFunction,
    stream: Arc<CudaStream>,
    name: String,
    /// Size of each parameter.
    parameter_bytes: Vec<usize>,
    /// Whether a kernel with this name was launched at least once.
    launched: Arc<AtomicBool>,
    /// Token that lives while a kernel with this name is in use.
    in_use: Arc<()>,
}

impl Kernel {
    /// Takes a function of a module, which it keeps loaded, for launches on that stream. The first
    /// launch sets `launched`; the kernel holds `in_use` while it lives.
    ///
    /// # Errors
    /// Fails if the driver does not report the kernel's parameters, or there are too many.
    pub(crate) fn new(
        function: CudaFunction,
        stream: &Arc<CudaStream>,
        name: &str,
        (launched, in_use): (Arc<AtomicBool>, Arc<()>),
    ) -> Result<Self, BackendError> {
        let parameter_bytes = parameter_bytes(&function, name)?;
        let (stream, name) = (Arc::clone(stream), name.to_owned());
        Ok(Self { function, stream, name, parameter_bytes, launched, in_use })
    }

    /// A handle of the kernel that launches on another stream.
    pub fn on_stream(&self, stream: &Arc<CudaStream>) -> Self {
        Self {
            function: self.function.clone(),
            stream: Arc::clone(stream),
            name: self.name.clone(),
            parameter_bytes: self.parameter_bytes.clone(),
            launched: Arc::clone(&self.launched),
            in_use: Arc::clone(&self.in_use),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The function handle is valid as long as `self`, which keeps its module loaded.
    pub(crate) fn function(&self) -> sys::CUfunction {
        self.function.cu_function()
    }

    /// Allows launches with this amount of dynamic shared memory. A larger limit set earlier is
    /// kept, because other launches of the same function may rely on it.
    ///
    /// # Errors
    /// Fails if the device has less shared memory.
    pub fn allow_dynamic_shared(&self, bytes: u32) -> Result<(), BackendError> {
        use sys::CUfunction_attribute_enum as attribute;
        const MAX_DYNAMIC_SHARED_ATTRIBUTE: attribute =
            attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        if u64::from(
            self.function_attribute(MAX_DYNAMIC_SHARED_ATTRIBUTE, "dynamic shared memory")?,
        ) >= u64::from(bytes)
        {
            return Ok(());
        }
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe {
            result::function::set_function_attribute(
                self.function.cu_function(),
                MAX_DYNAMIC_SHARED_ATTRIBUTE,
                bytes as i32,
            )
        }
        .map_err(|error| {
            failed(&format!("give {} {bytes} bytes of shared memory", self.name), &error)
        })
    }

    /// Sets the kernel's shared-memory carve-out to 100 %, so that it can be co-resident with other
    /// kernels set to 100 %: a kernel with another carve-out waits until a multiprocessor is empty.
    pub fn prefer_shared_memory(&self) -> Result<(), BackendError> {
        self.set_shared_carve_out(100)
    }

    /// The shared-memory carve-out that is set, percent; -1 if the driver chooses.
    pub(crate) fn shared_carve_out(&self) -> Result<i32, BackendError> {
        use sys::CUfunction_attribute_enum as attribute;
        const SHARED_CARVE_OUT_ATTRIBUTE: attribute =
            attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe {
            result::function::get_function_attribute(
                self.function.cu_function(),
                SHARED_CARVE_OUT_ATTRIBUTE,
            )
        }
        .map_err(|error| failed(&format!("query the carve-out of {}", self.name), &error))
    }

    /// Lets the driver choose the shared-memory carve-out again.
    pub(crate) fn reset_shared_carve_out(&self) -> Result<(), BackendError> {
        if self.shared_carve_out()? == CARVE_OUT_CHOSEN_BY_DRIVER {
            Ok(())
        } else {
            self.set_shared_carve_out(CARVE_OUT_CHOSEN_BY_DRIVER)
        }
    }

    fn set_shared_carve_out(&self, percent: i32) -> Result<(), BackendError> {
        use sys::CUfunction_attribute_enum as attribute;
        const SHARED_CARVE_OUT_ATTRIBUTE: attribute =
            attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe {
            result::function::set_function_attribute(
                self.function.cu_function(),
                SHARED_CARVE_OUT_ATTRIBUTE,
                percent,
            )
        }
        .map_err(|error| failed(&format!("set the carve-out of {}", self.name), &error))
    }

    /// Shared memory that the kernel declares itself, bytes a block.
    pub(crate) fn static_shared_bytes(&self) -> Result<u32, BackendError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as SHARED;
        self.function_attribute(SHARED, "shared memory")
    }

    /// Reads an attribute of the kernel function.
    pub(crate) fn function_attribute(
        &self,
        attribute: sys::CUfunction_attribute,
        what: &str,
    ) -> Result<u32, BackendError> {
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe { result::function::get_function_attribute(self.function.cu_function(), attribute) }
            .map(|value| value.max(0) as u32)
            .map_err(|error| failed(&format!("query the {what} of {}", self.name), &error))
    }

    /// Returns how many blocks of a launch without clusters an idle multiprocessor runs at once.
    pub(crate) fn resident_blocks_per_multiprocessor(
        &self,
        launch: &Launch,
    ) -> Result<usize, BackendError> {
        let mut blocks = 0;
        // SAFETY: the pointer is valid; the function belongs to a module that `self` keeps loaded.
        unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.function.cu_function(),
                product_of_extents(launch.block) as i32,
                launch.shared_bytes as usize,
            )
        }
        .result()
        .map_err(|error| failed(&format!("count the blocks of {}", self.name), &error))?;
        Ok(blocks.max(0) as usize)
    }

    /// Checks the number and the sizes of the kernel's arguments.
    pub(crate) fn check(&self, arguments: &[KernelArgument]) -> Result<(), BackendError> {
        argument::check(arguments, &self.parameter_bytes)
            .map_err(|problem| BackendError::Launch(format!("{}: {problem}", self.name)))
    }

    /// Launches the kernel on the device's stream; the call may return before the kernel has run.
    ///
    /// A kernel launched with PDL must wait for earlier work on the stream before it accesses
    /// anything that this work writes.
    ///
    /// Number and sizes of the arguments are checked against the compiled kernel. The caller must
    /// pass arguments in the right order and meaning, and keep device addresses alive until the
    /// launch has finished: mistakes are errors on the device, which verification or the driver
    /// finds.
    ///
    /// # Errors
    /// Fails if the arguments are not the kernel's, or the launch is refused; the error names the
    /// kernel.
    pub fn launch(&self, launch: Launch, arguments: &[KernelArgument]) -> Result<(), BackendError> {
        self.check(arguments)?;
        self.launched.store(true, Ordering::Relaxed);
        let (mut few, mut many) =
            ([std::ptr::null_mut::<c_void>(); MAX_INLINE_PARAMETERS], Vec::new());
        let pointers = match few.get_mut(..arguments.len()) {
            Some(few) => few,
            None => {
                many.resize(arguments.len(), std::ptr::null_mut());
                &mut many[..]
            }
        };
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = argument.pointer();
        }
        let mut attributes = launch.driver_attributes();
        let config = launch.driver_launch_config(&self.stream, &mut attributes);
        // SAFETY: the pointers are to values that outlive the call, which copies them; the check
        // found one of the right size for each parameter; accesses through the kernel's pointers
        // happen on the device. The attributes live longer than the driver call that reads them.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error| failed(&format!("launch {}", self.name), &error))
    }
}

/// The carve-out of a kernel for which none was set.
const CARVE_OUT_CHOSEN_BY_DRIVER: i32 = -1;

/// Largest number of kernel parameters whose addresses are collected without an allocation.
const MAX_INLINE_PARAMETERS: usize = 64;

/// Size of each kernel parameter in bytes, as the driver reports it.
fn parameter_bytes(function: &CudaFunction, name: &str) -> Result<Vec<usize>, BackendError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function belongs to a loaded module; both pointers are valid.
        let queried = unsafe {
            sys::cuFuncGetParamInfo(
                function.cu_function(),
                sizes.len(),
                &raw mut offset,
                &raw mut bytes,
            )
        }
        .result();
        match queried {
            // The documented answer to an index beyond the last parameter.
            Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)) => return Ok(sizes),
            other => {
                other.map_err(|error| failed(&format!("query the parameters of {name}"), &error))?
            }
        }
        sizes.push(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;
    use crate::testing::lock_first_gpu;

    #[test]
    fn a_kernel_requested_again_has_the_drivers_carve_out() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let build = Source::new("carved", r#"extern "C" __global__ void carved() {}"#).build(&[]);
        let kernel = device.kernel(&build, "carved").unwrap();
        assert_eq!(kernel.shared_carve_out(), Ok(CARVE_OUT_CHOSEN_BY_DRIVER));
        kernel.prefer_shared_memory().unwrap();
        assert_eq!(kernel.shared_carve_out(), Ok(100));
        // The carve-out lasts as long as a kernel of the name is in use: a request by a reference
        // row does not reset the carve-out of the case that it verifies.
        let beside = device.kernel(&build, "carved").unwrap();
        assert_eq!(beside.shared_carve_out(), Ok(100));
        drop(kernel);
        let on_another_stream = beside.on_stream(device.stream());
        drop(beside);
        drop(device.kernel(&build, "carved").unwrap());
        assert_eq!(on_another_stream.shared_carve_out(), Ok(100));
        drop(on_another_stream);
        let again = device.kernel(&build, "carved").unwrap();
        assert_eq!(again.shared_carve_out(), Ok(CARVE_OUT_CHOSEN_BY_DRIVER));
    }
}
