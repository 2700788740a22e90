//! An open GPU: its properties, memory, kernels and the one CUDA stream on which all its work runs.
//!
//! The result of every driver call is checked; an error names the action that failed. Timed regions
//! call only one function of this module, [`Kernel::launch`].

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaModule, CudaSlice, CudaStream, DriverError, result,
};
use cudarc::nvrtc::Ptx;

use super::context_settings::CudaContextSettings;
use super::driver_error::{driver_error_text, error_for_failed_action};
use super::gpu_check::{CompilationTarget, architecture_of_gpu};
pub use super::gpu_check::{
    GpuUnusableError, advice_on_fitting_nvrtc, check_gpu_and_compiler, count_gpus,
    l2_cache_bytes_of_gpu,
};
use super::launch::kernel::Kernel;
use super::launch::shape::Launch;
use super::launch::stage_times::{KernelWithStages, StageCountersInModule};
use super::launch::used_kernels::LoadedKernelsRecord;
use super::memory::buffer::{DeviceBuffer, error_for_too_little_memory as out_of_memory};
use super::memory::staged_copies::PinnedStagingBlocks;
use super::options::DeviceOptions;
use super::stream::host_wait;
use super::stream::raw_stream::{RawContextHandle, RawStreamHandle};
use super::stream::stream_settings::CudaStreamSettings;
use crate::BackendError;
use crate::architecture;
use crate::compiler::cache;
use crate::compiler::nvrtc::KernelCompileError;
use crate::compiler::source::KernelBuild;
use crate::layout;

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProperties {
    /// Name of the GPU's model; if `KERNELGATE_ARCH` restricts the GPU, such as "NVIDIA H200 as
    /// sm_80", so that its times are not compared with those of the full GPU.
    pub gpu_name: String,
    /// Identifier of the GPU in the form "GPU-…".
    pub gpu_uuid: String,
    /// Architecture for which kernels are compiled, such as "sm_90a": the GPU's own, or the one in
    /// `KERNELGATE_ARCH`.
    pub kernel_architecture: String,
    /// NVRTC target for which kernels are compiled, which is `arch` itself, or a virtual
    /// architecture such as "compute_80" (PTX) if the user named another architecture.
    pub nvrtc_target: String,
    /// Latest CUDA version that the driver supports: 13000 is 13.0.
    pub driver_cuda_version: i32,
    /// Number of multiprocessors (SMs) of the GPU.
    pub multiprocessor_count: u32,
    /// L2 cache, bytes.
    pub l2_cache_bytes: u64,
    /// Size of the GPU's device memory in bytes.
    pub device_memory_bytes: u64,
    /// Highest SM clock, MHz.
    pub max_sm_clock_mhz: u32,
    /// Whether the Multi-Process Service (MPS) is enabled, which runs contexts of several processes
    /// at once.
    pub mps_enabled: bool,
    /// Ordinal of the GPU among the visible GPUs, from 0.
    pub gpu_ordinal: usize,
}

/// The loaded module of a kernel build, and the machine code from which it was loaded.
struct LoadedModuleOfBuild {
    module: Arc<CudaModule>,
    machine_code_image: Arc<[u8]>,
    /// For each symbol, a token that lives as long as any `Kernel` of this symbol is in use.
    use_token_of_symbol: BTreeMap<String, Weak<()>>,
}

impl LoadedModuleOfBuild {
    /// Returns the token that all `Kernel`s of a symbol share, and whether no other `Kernel` of the
    /// symbol is in use.
    fn use_token_and_if_unused_before(&mut self, symbol: &str) -> (Arc<()>, bool) {
        if let Some(other) = self.use_token_of_symbol.get(symbol).and_then(Weak::upgrade) {
            return (other, false);
        }
        let first = Arc::new(());
        self.use_token_of_symbol.insert(symbol.to_owned(), Arc::downgrade(&first));
        (first, true)
    }
}

/// An open GPU with its stream, or a view of it; all views share everything except the records of
/// kernels and the choice of stage clocks.
pub struct Device {
    properties: GpuProperties,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    stream_end_event: Arc<CudaEvent>,
    options: Arc<DeviceOptions>,
    modules: Arc<Mutex<BTreeMap<KernelBuild, LoadedModuleOfBuild>>>,
    context_settings: CudaContextSettings,
    stream_settings: CudaStreamSettings,
    staging_blocks: Arc<PinnedStagingBlocks>,
    /// An allocation made first, which moves the addresses of all later allocations, if another
    /// memory layout is requested.
    _layout_padding: Option<Arc<CudaSlice<u8>>>,
    /// Record of the kernels that were loaded through this view; `None` if the view does not record
    /// them.
    record_of_loaded_kernels: Option<LoadedKernelsRecord>,
    /// Whether kernels that name stages are compiled with clocks that measure the stages.
    compiles_stage_clocks: bool,
}

impl Device {
    /// Opens a GPU: creates its context and one stream.
    ///
    /// # Errors
    /// Fails if the driver or NVRTC is missing or too old, no GPU has this ordinal, or the driver
    /// returns an error.
    pub fn open(ordinal: usize, options: &DeviceOptions) -> Result<Arc<Device>, GpuUnusableError> {
        check_gpu_and_compiler(ordinal, options.kernel_architecture_override.as_deref())?;
        let failed = |action| {
            move |error: DriverError| GpuUnusableError::DriverCallFailed {
                failed_action: action,
                driver_error_text: driver_error_text(&error),
            }
        };
        let context = CudaContext::new(ordinal).map_err(failed("open the GPU"))?;
        // SAFETY: all work runs on one stream, whose order is all the synchronisation that is
        // needed; event tracking would add waits and events to every launch.
        unsafe { context.disable_event_tracking() };
        let settings = CudaContextSettings::read_from_context(&context);
        let stream = context.new_stream().map_err(failed("make a stream"))?;
        let stream_settings = CudaStreamSettings::read_from_stream(&stream);
        let device = context.cu_device();
        let own = architecture_of_gpu(device).map_err(failed("query its architecture"))?;
        let facts = read_gpu_properties(
            device,
            CompilationTarget::for_own_or_named_architecture(
                &own,
                options.kernel_architecture_override.as_deref(),
            )?,
        )
        .map_err(failed("describe the GPU"))?;
        let marker = context.new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING));
        let marker = Arc::new(marker.map_err(failed("make an event"))?);
        let staging = Arc::new(PinnedStagingBlocks::for_context(Arc::clone(&context)));
        let padding = options.variant.layout_number.map(layout::device_padding_bytes);
        let padding = padding.map(|bytes| stream.alloc_zeros(bytes)).transpose();
        let padding = padding.map_err(failed("allocate the padding of a layout"))?;
        Ok(Arc::new(Self {
            properties: facts,
            context,
            stream,
            stream_end_event: marker,
            options: Arc::new(options.clone()),
            modules: Arc::default(),
            context_settings: settings,
            stream_settings,
            staging_blocks: staging,
            _layout_padding: padding.map(Arc::new),
            record_of_loaded_kernels: None,
            compiles_stage_clocks: false,
        }))
    }

    /// Time after which a kernel that has not finished is treated as hung.
    pub(super) fn timeout_of_kernels(&self) -> Duration {
        self.options.hung_kernel_timeout
    }

    /// The options with which this device was opened.
    pub fn options(&self) -> &DeviceOptions {
        &self.options
    }

    /// Returns a view of this device, and the record of the kernels that will be loaded through the
    /// view.
    pub fn view_recording_kernels(&self) -> (Arc<Self>, LoadedKernelsRecord) {
        let loaded = LoadedKernelsRecord::default();
        (self.view_recording_kernels_into(&loaded), loaded)
    }

    pub(super) fn view_recording_kernels_into(&self, loaded: &LoadedKernelsRecord) -> Arc<Self> {
        Arc::new(Self { record_of_loaded_kernels: Some(loaded.clone()), ..self.clone_as_view() })
    }

    /// A view of the same device that compiles kernels which name stages with clocks that measure
    /// these stages.
    pub fn view_with_stage_clocks(&self) -> Arc<Self> {
        Arc::new(Self { compiles_stage_clocks: true, ..self.clone_as_view() })
    }

    fn clone_as_view(&self) -> Self {
        Self {
            properties: self.properties.clone(),
            context: Arc::clone(&self.context),
            stream: Arc::clone(&self.stream),
            stream_end_event: Arc::clone(&self.stream_end_event),
            options: Arc::clone(&self.options),
            modules: Arc::clone(&self.modules),
            context_settings: self.context_settings.clone(),
            stream_settings: self.stream_settings.clone(),
            staging_blocks: Arc::clone(&self.staging_blocks),
            _layout_padding: self._layout_padding.clone(),
            record_of_loaded_kernels: self.record_of_loaded_kernels.clone(),
            compiles_stage_clocks: self.compiles_stage_clocks,
        }
    }

    /// Properties of the GPU.
    pub fn gpu_properties(&self) -> &GpuProperties {
        &self.properties
    }

    /// The CUDA context of the GPU.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Settings of the CUDA context at the time the device was opened.
    pub const fn context_settings_when_opened(&self) -> &CudaContextSettings {
        &self.context_settings
    }

    /// Reads the current settings of the GPU's CUDA context.
    pub fn read_context_settings(&self) -> CudaContextSettings {
        CudaContextSettings::read_from_context(&self.context)
    }

    /// Restores the settings that the CUDA context and the stream had when the device was opened.
    pub(super) fn restore_context_and_stream_settings(&self) -> Result<(), BackendError> {
        self.context_settings.restore_settings_in_context(&self.context)?;
        self.stream_settings.restore_on_stream(&self.stream)
    }

    /// The CUDA stream on which all work of this device runs.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The driver's handle of the device's stream, for code that calls CUDA through bindings of its
    /// own.
    pub fn raw_stream_handle(&self) -> RawStreamHandle {
        RawStreamHandle::from(self.stream.cu_stream())
    }

    /// The driver's handle of the CUDA context, which is current on the thread that prepares and
    /// launches an implementation.
    pub fn raw_context_handle(&self) -> RawContextHandle {
        RawContextHandle::from_driver_handle(self.context.cu_ctx())
    }

    /// Makes the GPU's context current on the calling thread. Also discards an error that a
    /// destructor of earlier work stored in the context, because otherwise the next call would
    /// return it.
    pub fn make_context_current(&self) -> Result<(), BackendError> {
        let _left = self.context.check_err();
        let bound = self.context.bind_to_thread();
        bound.map_err(|error| error_for_failed_action("make the context current", &error))
    }

    /// Creates another stream on the GPU, for work that may run concurrently with the device's
    /// stream.
    ///
    /// # Errors
    /// Fails if the driver cannot create the stream.
    pub fn create_another_stream(&self) -> Result<Arc<CudaStream>, BackendError> {
        self.context.new_stream().map_err(|error| error_for_failed_action("make a stream", &error))
    }

    /// Free and total device memory of the GPU, bytes.
    pub fn free_and_total_bytes(&self) -> Result<(u64, u64), BackendError> {
        let (free, total) = self
            .context
            .mem_get_info()
            .map_err(|error| error_for_failed_action("query free memory", &error))?;
        Ok((free as u64, total as u64))
    }

    /// Largest number of bytes of shared memory that a thread block may use on this GPU and for the
    /// chosen architecture.
    pub fn max_shared_bytes_per_block(&self) -> Result<u32, BackendError> {
        let most = self
            .context
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
        let most = most.map_err(|error| {
            error_for_failed_action("query the shared memory of a block", &error)
        })?;
        let named = architecture::max_shared_bytes_per_block(&self.properties.kernel_architecture)
            .unwrap_or(u32::MAX);
        Ok((most.max(0) as u32).min(named))
    }

    /// Whether kernels can be launched with thread-block clusters on this GPU and for the chosen
    /// architecture.
    pub fn supports_thread_block_clusters(&self) -> Result<bool, BackendError> {
        let clusters = self.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH);
        let clusters = clusters
            .map_err(|error| error_for_failed_action("query whether there are clusters", &error))?
            != 0;
        Ok(clusters
            && architecture::supports_programmatic_dependent_launch(
                &self.properties.kernel_architecture,
            ))
    }

    /// Waits until all work on the device's stream has finished, or returns an error after the
    /// timeout.
    pub fn synchronize(&self) -> Result<(), BackendError> {
        host_wait::wait_for_stream_with_timeout(
            &self.stream,
            &self.stream_end_event,
            self.options.hung_kernel_timeout,
        )
    }

    /// Waits without a timeout until all work on the device's stream has finished.
    pub fn synchronize_without_timeout(&self) -> Result<(), BackendError> {
        self.stream
            .synchronize()
            .map_err(|error| error_for_failed_action("wait for the GPU", &error))
    }

    /// Whether work on the device's stream has not finished yet.
    pub fn is_stream_busy(&self) -> Result<bool, BackendError> {
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) }.result() {
            Ok(()) => Ok(false),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(true),
            Err(error) => Err(error_for_failed_action("ask whether the GPU works", &error)),
        }
    }

    /// Waits until all work in the CUDA context has finished, on all streams.
    pub fn synchronize_all_streams(&self) -> Result<(), BackendError> {
        self.context
            .synchronize()
            .map_err(|error| error_for_failed_action("wait for the GPU", &error))
    }

    /// Allocates device memory, which is freed when the buffer is dropped. Every byte of new memory
    /// is 0xff, which is NaN in every float format, so that a kernel that reads unwritten memory
    /// finds no results of an earlier case.
    ///
    /// # Errors
    /// Fails if the device has too little free memory.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, BackendError> {
        let buffer = self.allocate_uninitialised_memory(bytes)?;
        if self.options.fills_new_device_memory {
            buffer.fill_all_bytes(0xff)?;
        }
        Ok(buffer)
    }

    /// Allocates device memory without filling it; the caller must write the memory before anything
    /// reads it.
    fn allocate_uninitialised_memory(&self, bytes: usize) -> Result<DeviceBuffer, BackendError> {
        let short =
            || out_of_memory(bytes as u64, self.free_and_total_bytes().ok().map(|(free, _)| free));
        // A size above the device's whole memory is refused here, because the driver takes minutes
        // to refuse it.
        if bytes as u64 > self.properties.device_memory_bytes {
            return Err(short());
        }
        // SAFETY: the callers of this function write the memory before anything reads it.
        let slice = unsafe { self.stream.alloc::<u8>(bytes.max(1)) };
        let slice = slice.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => short(),
            error => error_for_failed_action("allocate memory", &error),
        })?;
        Ok(DeviceBuffer::from_device_slice(slice, Arc::clone(&self.staging_blocks)))
    }

    /// Allocates device memory and copies the given bytes of the host into it.
    ///
    /// # Errors
    /// Fails if too little device memory is free, or the copy fails.
    pub fn upload(&self, bytes: &[u8]) -> Result<DeviceBuffer, BackendError> {
        let buffer = self.allocate_uninitialised_memory(bytes.len())?;
        buffer.overwrite_first_bytes_from_host(bytes)?;
        Ok(buffer)
    }

    /// Allocates device memory and fills it with repetitions of a pattern, which the GPU copies
    /// within the buffer.
    pub fn allocate_with_repeated_pattern(
        &self,
        pattern: &[u8],
        bytes: usize,
    ) -> Result<DeviceBuffer, BackendError> {
        let buffer = self.allocate(bytes)?;
        let mut filled = pattern.len().min(bytes);
        buffer.overwrite_first_bytes_from_host(&pattern[..filled])?;
        while filled > 0 && filled < bytes {
            let more = filled.min(bytes - filled);
            let (source, target) =
                (buffer.device_address(), buffer.device_address() + filled as u64);
            // SAFETY: source and target range lie in the same buffer and do not overlap.
            unsafe { result::memcpy_dtod_async(target, source, more, self.stream.cu_stream()) }
                .map_err(|error| error_for_failed_action("copy on the GPU", &error))?;
            filled += more;
        }
        Ok(buffer)
    }

    /// Returns a kernel that is compiled, or taken from the cache, and loaded onto the GPU.
    /// Repeated requests for the same kernel return the same function of the driver. A
    /// shared-memory carve-out that was set for the kernel is reset if no other `Kernel` of it is
    /// in use.
    ///
    /// # Errors
    /// Fails if the kernel does not compile or load; the error names the kernel.
    pub fn load_kernel(&self, build: &KernelBuild, symbol: &str) -> Result<Kernel, BackendError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, build) = (build.kernel_build_name(), self.build_with_device_options(build));
        let loaded = match modules.entry(build.clone()) {
            Entry::Vacant(entry) => entry.insert(self.load_module_of_build(&build)?),
            Entry::Occupied(entry) => entry.into_mut(),
        };
        let function = loaded.module.load_function(symbol).map_err(|error| {
            error_for_failed_action(&format!("find {symbol} in kernel {name}"), &error)
        })?;
        let launched = match &self.record_of_loaded_kernels {
            Some(record) => record.add_loaded_kernel(
                build.record_name_of_kernel(symbol),
                symbol,
                &loaded.machine_code_image,
            ),
            None => Arc::default(),
        };
        let (in_use, alone) = loaded.use_token_and_if_unused_before(symbol);
        let kernel =
            Kernel::for_launches_on_stream(function, &self.stream, symbol, (launched, in_use))?;
        if alone {
            // The carve-out is reset while the modules are locked, before another thread can get
            // the same kernel.
            kernel.let_driver_choose_shared_carve_out()?;
        }
        drop(modules);
        Ok(kernel)
    }

    /// Adds the launch shape of a loaded kernel, and its stages if any, to the view's record of
    /// kernels.
    pub(crate) fn record_shape_and_stages_of_kernel(
        &self,
        name: &str,
        shape: Launch,
        stages: Option<KernelWithStages>,
    ) {
        if let Some(loaded) = &self.record_of_loaded_kernels {
            loaded.add_shape_of_kernel(name, shape);
            stages.into_iter().for_each(|kernel| loaded.add_kernel_with_stages(kernel));
        }
    }

    /// The kernel build with the device's default files and its variant (code layout, line
    /// numbers).
    fn build_with_device_options(&self, build: &KernelBuild) -> KernelBuild {
        let build = build.clone().with_default_files(self.options.embedded_kernel_files);
        KernelBuild { variant: self.options.variant, ..build }
    }

    pub(crate) const fn compiles_stage_clocks(&self) -> bool {
        self.compiles_stage_clocks
    }

    /// The cycle counters of a loaded kernel that was compiled with clocks of its stages.
    ///
    /// # Errors
    /// Fails if the kernel is not loaded, or its module has no stage counters.
    pub(crate) fn stage_counters_of_loaded_build(
        &self,
        build: &KernelBuild,
    ) -> Result<StageCountersInModule, BackendError> {
        let modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = modules
            .get(&self.build_with_device_options(build))
            .map(|loaded| Arc::clone(&loaded.module));
        drop(modules);
        let name = build.kernel_build_name();
        let module = loaded.ok_or_else(|| {
            BackendError::ComputationFailed(format!("kernel {name} is not loaded"))
        })?;
        StageCountersInModule::find_stage_counters_in_module(module, &self.stream).map_err(
            |error| {
                error_for_failed_action(
                    &format!("find the clocks of stages in kernel {name}"),
                    &error,
                )
            },
        )
    }
}

impl Device {
    /// Compiles a kernel build, or takes it from the cache, and loads its module onto the GPU. If
    /// the driver cannot load the cached machine code, the kernel is compiled again.
    fn load_module_of_build(
        &self,
        build: &KernelBuild,
    ) -> Result<LoadedModuleOfBuild, BackendError> {
        let failed_to_compile =
            |error: KernelCompileError| BackendError::CompilationFailed(error.to_string());
        let load = |cubin: Vec<u8>| {
            let image = Arc::from(cubin.as_slice());
            let module = self.context.load_module(Ptx::from_binary(cubin))?;
            Ok(LoadedModuleOfBuild {
                module,
                machine_code_image: image,
                use_token_of_symbol: BTreeMap::new(),
            })
        };
        let arch = &self.properties.nvrtc_target;
        let loaded =
            match load(cache::cached_or_compiled_cubin(build, arch).map_err(failed_to_compile)?) {
                Ok(loaded) => Ok(loaded),
                Err(_) => load(
                    cache::compile_and_replace_cached(build, arch).map_err(failed_to_compile)?,
                ),
            };
        loaded.map_err(|error: DriverError| {
            error_for_failed_action(&format!("load kernel {}", build.kernel_build_name()), &error)
        })
    }
}

/// Reads the properties of a GPU, which needs no CUDA context, and stores the target for which
/// kernels are compiled.
pub(super) fn read_gpu_properties(
    device: sys::CUdevice,
    code: CompilationTarget,
) -> Result<GpuProperties, DriverError> {
    let number = |attribute| {
        // SAFETY: the device handle came from the driver.
        unsafe { result::device::get_attribute(device, attribute) }
    };
    let attribute = |attribute| number(attribute).map(|value| value.max(0) as u64);
    let name = result::device::get_name(device)?;
    let mut driver_cuda = 0;
    // SAFETY: the driver is loaded and initialised, and the pointer is valid.
    unsafe { sys::cuDriverGetVersion(&raw mut driver_cuda) }.result()?;
    let bytes = result::device::get_uuid(device)?.bytes.map(|byte| byte as u8);
    let hex = |range: std::ops::Range<usize>| {
        bytes[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    Ok(GpuProperties {
        gpu_name: if code.named_by_user {
            format!("{name} as {}", code.compilation_architecture)
        } else {
            name
        },
        gpu_uuid: format!(
            "GPU-{}-{}-{}-{}-{}",
            hex(0..4),
            hex(4..6),
            hex(6..8),
            hex(8..10),
            hex(10..16)
        ),
        kernel_architecture: code.compilation_architecture,
        nvrtc_target: code.nvrtc_target,
        driver_cuda_version: driver_cuda,
        multiprocessor_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?
            as u32,
        l2_cache_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        // SAFETY: the device handle came from the driver.
        device_memory_bytes: unsafe { result::device::total_mem(device) }? as u64,
        max_sm_clock_mhz: (attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? / 1000) as u32,
        // Drivers that do not know the MPS attribute count as drivers without MPS.
        mps_enabled: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED)
            .is_ok_and(|enabled| enabled != 0),
        // The driver's device handles are the ordinals of the GPUs.
        gpu_ordinal: device.max(0) as usize,
    })
}
