//! A kernel that is loaded onto a GPU: its attributes and its launches.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaFunction, CudaStream, DriverError, result, sys};

use super::argument::{self, KernelArgument};
use super::shape::{Launch, product_of_extents};
use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// A loaded kernel.
pub struct Kernel {
    function: CudaFunction,
    stream: Arc<CudaStream>,
    kernel_name: String,
    /// Size of each parameter.
    bytes_of_each_parameter: Vec<usize>,
    /// Whether any `Kernel` that shares this flag was launched, for the record of kernels.
    was_launched: Arc<AtomicBool>,
    /// Token that all `Kernel`s of the same symbol share; it lives while any of them is in use.
    use_token: Arc<()>,
}

impl Kernel {
    /// Makes a kernel from a function of a loaded module, for launches on a stream; the kernel
    /// keeps the module loaded. The first launch sets the flag `was_launched`; the kernel holds the
    /// token `use_token` while it lives.
    ///
    /// # Errors
    /// Fails if the driver does not report the kernel's parameters.
    pub(crate) fn for_launches_on_stream(
        function: CudaFunction,
        stream: &Arc<CudaStream>,
        name: &str,
        (launched, in_use): (Arc<AtomicBool>, Arc<()>),
    ) -> Result<Self, BackendError> {
        let parameter_bytes = sizes_of_parameters(&function, name)?;
        let (stream, name) = (Arc::clone(stream), name.to_owned());
        Ok(Self {
            function,
            stream,
            kernel_name: name,
            bytes_of_each_parameter: parameter_bytes,
            was_launched: launched,
            use_token: in_use,
        })
    }

    /// A second `Kernel` of the same function whose launches go to another stream.
    pub fn clone_for_stream(&self, stream: &Arc<CudaStream>) -> Self {
        Self {
            function: self.function.clone(),
            stream: Arc::clone(stream),
            kernel_name: self.kernel_name.clone(),
            bytes_of_each_parameter: self.bytes_of_each_parameter.clone(),
            was_launched: Arc::clone(&self.was_launched),
            use_token: Arc::clone(&self.use_token),
        }
    }

    pub(crate) fn kernel_name(&self) -> &str {
        &self.kernel_name
    }

    pub(crate) const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The driver's function handle is valid as long as `self`, which keeps the module loaded.
    pub(crate) fn driver_function(&self) -> sys::CUfunction {
        self.function.cu_function()
    }

    /// Allows launches of this kernel with at least this many bytes of dynamic shared memory per
    /// block. A larger limit that was set earlier stays, because other launches of the same
    /// function may need it.
    ///
    /// # Errors
    /// Fails if the GPU has less shared memory per block.
    pub fn allow_dynamic_shared_memory(&self, bytes: u32) -> Result<(), BackendError> {
        use sys::CUfunction_attribute_enum as attribute;
        const MAX_DYNAMIC_SHARED_ATTRIBUTE: attribute =
            attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        if u64::from(
            self.read_function_attribute(MAX_DYNAMIC_SHARED_ATTRIBUTE, "dynamic shared memory")?,
        ) >= u64::from(bytes)
        {
            return Ok(());
        }
        // SAFETY: the kernel's function belongs to a module that `self` keeps loaded.
        unsafe {
            result::function::set_function_attribute(
                self.function.cu_function(),
                MAX_DYNAMIC_SHARED_ATTRIBUTE,
                bytes as i32,
            )
        }
        .map_err(|error| {
            error_for_failed_action(
                &format!("give {} {bytes} bytes of shared memory", self.kernel_name),
                &error,
            )
        })
    }

    /// Sets the kernel's shared-memory carve-out to 100 %: on a multiprocessor, only kernels with
    /// the same carve-out can run at the same time.
    pub fn set_full_shared_carve_out(&self) -> Result<(), BackendError> {
        self.set_shared_carve_out_percent(100)
    }

    /// Reads the kernel's preferred shared-memory carve-out in per cent; -1 if the driver chooses
    /// it.
    pub(crate) fn shared_carve_out_percent(&self) -> Result<i32, BackendError> {
        use sys::CUfunction_attribute_enum as attribute;
        const SHARED_CARVE_OUT_ATTRIBUTE: attribute =
            attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the kernel's function belongs to a module that `self` keeps loaded.
        unsafe {
            result::function::get_function_attribute(
                self.function.cu_function(),
                SHARED_CARVE_OUT_ATTRIBUTE,
            )
        }
        .map_err(|error| {
            error_for_failed_action(&format!("query the carve-out of {}", self.kernel_name), &error)
        })
    }

    /// Lets the driver choose the kernel's shared-memory carve-out again.
    pub(crate) fn let_driver_choose_shared_carve_out(&self) -> Result<(), BackendError> {
        if self.shared_carve_out_percent()? == CARVE_OUT_CHOSEN_BY_DRIVER {
            Ok(())
        } else {
            self.set_shared_carve_out_percent(CARVE_OUT_CHOSEN_BY_DRIVER)
        }
    }

    fn set_shared_carve_out_percent(&self, percent: i32) -> Result<(), BackendError> {
        use sys::CUfunction_attribute_enum as attribute;
        const SHARED_CARVE_OUT_ATTRIBUTE: attribute =
            attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the kernel's function belongs to a module that `self` keeps loaded.
        unsafe {
            result::function::set_function_attribute(
                self.function.cu_function(),
                SHARED_CARVE_OUT_ATTRIBUTE,
                percent,
            )
        }
        .map_err(|error| {
            error_for_failed_action(&format!("set the carve-out of {}", self.kernel_name), &error)
        })
    }

    /// Bytes of static shared memory per block that the kernel's code declares.
    pub(crate) fn static_shared_bytes_per_block(&self) -> Result<u32, BackendError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as SHARED;
        self.read_function_attribute(SHARED, "shared memory")
    }

    /// Reads an attribute of the kernel's function from the driver; `what` names the attribute in
    /// messages.
    pub(crate) fn read_function_attribute(
        &self,
        attribute: sys::CUfunction_attribute,
        what: &str,
    ) -> Result<u32, BackendError> {
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe { result::function::get_function_attribute(self.function.cu_function(), attribute) }
            .map(|value| value.max(0) as u32)
            .map_err(|error| {
                error_for_failed_action(
                    &format!("query the {what} of {}", self.kernel_name),
                    &error,
                )
            })
    }

    /// Number of blocks of this launch, which has no clusters, that an idle multiprocessor runs at
    /// the same time.
    pub(crate) fn max_resident_blocks_per_multiprocessor(
        &self,
        launch: &Launch,
    ) -> Result<usize, BackendError> {
        let mut blocks = 0;
        // SAFETY: the pointer is valid; the kernel's function belongs to a module that `self` keeps
        // loaded.
        unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.function.cu_function(),
                product_of_extents(launch.block) as i32,
                launch.dynamic_shared_bytes as usize,
            )
        }
        .result()
        .map_err(|error| {
            error_for_failed_action(&format!("count the blocks of {}", self.kernel_name), &error)
        })?;
        Ok(blocks.max(0) as usize)
    }

    /// Checks that the number and sizes of the arguments are those of the kernel's parameters.
    pub(crate) fn check_arguments(&self, arguments: &[KernelArgument]) -> Result<(), BackendError> {
        argument::check_argument_sizes(arguments, &self.bytes_of_each_parameter).map_err(
            |problem| BackendError::ComputationFailed(format!("{}: {problem}", self.kernel_name)),
        )
    }

    /// Launches the kernel on its stream; the call may return before the kernel has run.
    ///
    /// A kernel launched with programmatic dependent launch must itself wait (griddepcontrol.wait)
    /// before it accesses memory that earlier work on the stream writes.
    ///
    /// The number and sizes of the arguments are checked against the parameters of the compiled
    /// kernel. The caller must pass the arguments in the right order and keep device addresses
    /// valid until the launch has finished; verification or the driver finds mistakes.
    ///
    /// # Errors
    /// Fails if the arguments do not match the kernel's parameters, or the driver refuses the
    /// launch; the error names the kernel.
    pub fn launch(&self, launch: Launch, arguments: &[KernelArgument]) -> Result<(), BackendError> {
        self.check_arguments(arguments)?;
        self.was_launched.store(true, Ordering::Relaxed);
        let (mut few, mut many) =
            ([std::ptr::null_mut::<c_void>(); MAX_PARAMETERS_WITHOUT_ALLOCATION], Vec::new());
        let pointers = match few.get_mut(..arguments.len()) {
            Some(few) => few,
            None => {
                many.resize(arguments.len(), std::ptr::null_mut());
                &mut many[..]
            }
        };
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = argument.pointer_to_value();
        }
        let mut attributes = launch.launch_attributes_for_driver();
        let config = launch.launch_config_for_driver(&self.stream, &mut attributes);
        // SAFETY: each pointer refers to an argument of the right size that outlives the call,
        // which copies all arguments. The launch attributes live longer than the driver call that
        // reads them.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error| error_for_failed_action(&format!("launch {}", self.kernel_name), &error))
    }
}

/// Carve-out value of a kernel whose carve-out the driver chooses.
const CARVE_OUT_CHOSEN_BY_DRIVER: i32 = -1;

/// Largest number of kernel parameters for which a launch needs no heap allocation.
const MAX_PARAMETERS_WITHOUT_ALLOCATION: usize = 64;

/// Size in bytes of each parameter of a kernel function, as the driver reports it.
fn sizes_of_parameters(function: &CudaFunction, name: &str) -> Result<Vec<usize>, BackendError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the kernel's function belongs to a loaded module, and both pointers are valid.
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
            // By its documentation, the driver returns this error for an index beyond the last
            // parameter.
            Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)) => return Ok(sizes),
            other => other.map_err(|error| {
                error_for_failed_action(&format!("query the parameters of {name}"), &error)
            })?,
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
    fn a_kernel_requested_again_after_use_has_the_default_carve_out() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let build =
            Source::new("carved", r#"extern "C" __global__ void carved() {}"#).with_macros(&[]);
        let kernel = device.load_kernel(&build, "carved").unwrap();
        assert_eq!(kernel.shared_carve_out_percent(), Ok(CARVE_OUT_CHOSEN_BY_DRIVER));
        kernel.set_full_shared_carve_out().unwrap();
        assert_eq!(kernel.shared_carve_out_percent(), Ok(100));
        // The carve-out stays as long as a `Kernel` of the symbol is in use, so a reference
        // implementation that requests the same kernel does not reset it.
        let beside = device.load_kernel(&build, "carved").unwrap();
        assert_eq!(beside.shared_carve_out_percent(), Ok(100));
        drop(kernel);
        let on_another_stream = beside.clone_for_stream(device.stream());
        drop(beside);
        drop(device.load_kernel(&build, "carved").unwrap());
        assert_eq!(on_another_stream.shared_carve_out_percent(), Ok(100));
        drop(on_another_stream);
        let again = device.load_kernel(&build, "carved").unwrap();
        assert_eq!(again.shared_carve_out_percent(), Ok(CARVE_OUT_CHOSEN_BY_DRIVER));
    }
}
