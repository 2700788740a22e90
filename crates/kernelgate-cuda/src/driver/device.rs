//! An open GPU: its facts, memory, kernels and the one stream that everything runs on.
//!
//! The result of every driver call is checked; errors name the failed action. Only
//! [`Kernel::launch`] is called inside a timed region.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaModule, CudaSlice, CudaStream, DriverError, result,
};
use cudarc::nvrtc::Ptx;

use super::context_settings::ContextSettings;
use super::driver_error::{describe, failed};
use super::gpu_check::{CodeTarget, device_architecture};
pub use super::gpu_check::{DeviceError, check_gpu, gpu_count, l2_cache_bytes, older_nvrtc_hint};
use super::launch::kernel::Kernel;
use super::launch::shape::Launch;
use super::launch::stage_times::{StageClockedKernel, StageCounters};
use super::launch::used_kernels::LoadedKernels;
use super::memory::buffer::{DeviceBuffer, out_of_memory_error as out_of_memory};
use super::memory::staged_copies::PinnedStagingBuffer;
use super::options::DeviceOptions;
use super::stream::host_wait;
use super::stream::raw_stream::{RawContext, RawStream};
use super::stream::stream_settings::StreamSettings;
use crate::BackendError;
use crate::architecture;
use crate::compiler::cache;
use crate::compiler::nvrtc::CompileError;
use crate::compiler::source::KernelBuild;
use crate::layout;

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Name that the device reports; "NVIDIA H200 as sm_80" if `KERNELGATE_ARCH` limits it, so that
    /// nothing compares it with the full card.
    pub name: String,
    /// Identifier of the GPU in the form "GPU-…".
    pub uuid: String,
    /// Architecture to compile for, such as "sm_90a"; the value of `KERNELGATE_ARCH` if that
    /// variable is set.
    pub arch: String,
    /// NVRTC target for which kernels are compiled: `arch`, or PTX of a named one, "compute_80".
    pub code: String,
    /// Latest CUDA that the driver supports: 13000 is 13.0.
    pub driver_cuda: i32,
    /// Number of multiprocessors (SMs) of the GPU.
    pub multiprocessors: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u64,
    /// Device memory of the GPU, bytes.
    pub memory_bytes: u64,
    /// Highest SM clock, MHz.
    pub max_clock_mhz: u32,
    /// Whether the Multi-Process Service runs contexts of several processes at once.
    pub mps: bool,
    /// Ordinal of the GPU among the machine's GPUs.
    pub ordinal: usize,
}

/// The module of a build, and the code that it was loaded from.
struct LoadedKernelBuild {
    module: Arc<CudaModule>,
    image: Arc<[u8]>,
    /// For each symbol, a token that lives as long as a kernel of it is in use.
    in_use: BTreeMap<String, Weak<()>>,
}

impl LoadedKernelBuild {
    /// Returns the counter of uses held by each loaded kernel with the given symbol, and whether
    /// that kernel is the only holder.
    fn uses_and_if_first_of_symbol(&mut self, symbol: &str) -> (Arc<()>, bool) {
        if let Some(other) = self.in_use.get(symbol).and_then(Weak::upgrade) {
            return (other, false);
        }
        let first = Arc::new(());
        self.in_use.insert(symbol.to_owned(), Arc::downgrade(&first));
        (first, true)
    }
}

/// An open GPU with a stream, or a view of it: all views share everything except their records of
/// loaded kernels.
pub struct Device {
    facts: DeviceFacts,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    marker: Arc<CudaEvent>,
    options: Arc<DeviceOptions>,
    modules: Arc<Mutex<BTreeMap<KernelBuild, LoadedKernelBuild>>>,
    settings: ContextSettings,
    stream_settings: StreamSettings,
    staging: Arc<PinnedStagingBuffer>,
    /// Allocation that moves all later ones, if another layout is requested.
    _padding: Option<Arc<CudaSlice<u8>>>,
    /// Kernels that were loaded through this view; `None` if the view does not record them.
    loaded: Option<LoadedKernels>,
    /// Whether kernels are built with clocks of their stages, where their rows name any.
    clocks_stages: bool,
}

impl Device {
    /// Opens a GPU.
    ///
    /// # Errors
    /// Fails if a library is missing or old, there is no such GPU, or the driver fails.
    pub fn open(ordinal: usize, options: &DeviceOptions) -> Result<Arc<Device>, DeviceError> {
        check_gpu(ordinal, options.architecture.as_deref())?;
        let failed = |action| {
            move |error: DriverError| DeviceError::Driver { action, error: describe(&error) }
        };
        let context = CudaContext::new(ordinal).map_err(failed("open the GPU"))?;
        // SAFETY: everything runs on one stream, whose order is all the synchronisation there is;
        // tracking would add waits and events to every launch.
        unsafe { context.disable_event_tracking() };
        let settings = ContextSettings::read_current(&context);
        let stream = context.new_stream().map_err(failed("make a stream"))?;
        let stream_settings = StreamSettings::read_current(&stream);
        let device = context.cu_device();
        let own = device_architecture(device).map_err(failed("query its architecture"))?;
        let facts =
            facts_of(device, CodeTarget::for_architecture(&own, options.architecture.as_deref())?)
                .map_err(failed("describe the GPU"))?;
        let marker = context.new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING));
        let marker = Arc::new(marker.map_err(failed("make an event"))?);
        let staging = Arc::new(PinnedStagingBuffer::new(Arc::clone(&context)));
        let padding = options.variant.layout.map(layout::padding_bytes);
        let padding = padding.map(|bytes| stream.alloc_zeros(bytes)).transpose();
        let padding = padding.map_err(failed("allocate the padding of a layout"))?;
        Ok(Arc::new(Self {
            facts,
            context,
            stream,
            marker,
            options: Arc::new(options.clone()),
            modules: Arc::default(),
            settings,
            stream_settings,
            staging,
            _padding: padding.map(Arc::new),
            loaded: None,
            clocks_stages: false,
        }))
    }

    /// Time after which a kernel is treated as hung.
    pub(super) fn kernel_timeout(&self) -> Duration {
        self.options.timeout
    }

    /// Options that the device was opened with.
    pub fn options(&self) -> &DeviceOptions {
        &self.options
    }

    /// Returns a view of the device, and a record of the kernels that are loaded through it from
    /// now on.
    pub fn recording_view(&self) -> (Arc<Self>, LoadedKernels) {
        let loaded = LoadedKernels::default();
        (self.recording_kernels_into(&loaded), loaded)
    }

    pub(super) fn recording_kernels_into(&self, loaded: &LoadedKernels) -> Arc<Self> {
        Arc::new(Self { loaded: Some(loaded.clone()), ..self.view_of_same_device() })
    }

    /// A view of the same device that builds kernels with clocks of their stages, where their rows
    /// name any.
    pub fn with_stage_clocks(&self) -> Arc<Self> {
        Arc::new(Self { clocks_stages: true, ..self.view_of_same_device() })
    }

    fn view_of_same_device(&self) -> Self {
        Self {
            facts: self.facts.clone(),
            context: Arc::clone(&self.context),
            stream: Arc::clone(&self.stream),
            marker: Arc::clone(&self.marker),
            options: Arc::clone(&self.options),
            modules: Arc::clone(&self.modules),
            settings: self.settings.clone(),
            stream_settings: self.stream_settings.clone(),
            staging: Arc::clone(&self.staging),
            _padding: self._padding.clone(),
            loaded: self.loaded.clone(),
            clocks_stages: self.clocks_stages,
        }
    }

    /// Properties of the GPU.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The CUDA context of the GPU, for events and graphs.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Settings of the whole context when the device was opened.
    pub const fn settings_when_opened(&self) -> &ContextSettings {
        &self.settings
    }

    /// Returns the current settings of the GPU's context.
    pub fn current_settings(&self) -> ContextSettings {
        ContextSettings::read_current(&self.context)
    }

    /// Restores the settings that the context and the stream had when the device was opened.
    pub(super) fn restore_settings(&self) -> Result<(), BackendError> {
        self.settings.restore(&self.context)?;
        self.stream_settings.restore(&self.stream)
    }

    /// The stream on which all work of the device runs.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The handle of the stream that everything runs on, for code with a binding of its own.
    pub fn raw_stream(&self) -> RawStream {
        RawStream::from(self.stream.cu_stream())
    }

    /// The handle of the context, which is current while a row is prepared and launched.
    pub fn raw_context(&self) -> RawContext {
        RawContext::new(self.context.cu_ctx())
    }

    /// Makes the GPU's context current on the calling thread. Drops an error that a destructor of
    /// earlier work left, because a destructor cannot return it and the next call would.
    pub fn make_current(&self) -> Result<(), BackendError> {
        let _left = self.context.check_err();
        let bound = self.context.bind_to_thread();
        bound.map_err(|error| failed("make the context current", &error))
    }

    /// Creates another stream on the GPU, for work that may run concurrently.
    ///
    /// # Errors
    /// Fails if the driver cannot create the stream.
    pub fn create_stream(&self) -> Result<Arc<CudaStream>, BackendError> {
        self.context.new_stream().map_err(|error| failed("make a stream", &error))
    }

    /// Free and total memory of the GPU, bytes.
    pub fn free_and_total(&self) -> Result<(u64, u64), BackendError> {
        let (free, total) =
            self.context.mem_get_info().map_err(|error| failed("query free memory", &error))?;
        Ok((free as u64, total as u64))
    }

    /// Returns the largest amount of shared memory that a block may use on this card and its
    /// architecture, bytes.
    pub fn shared_bytes_a_block(&self) -> Result<u32, BackendError> {
        let most = self
            .context
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
        let most = most.map_err(|error| failed("query the shared memory of a block", &error))?;
        let named = architecture::shared_bytes_a_block(&self.facts.arch).unwrap_or(u32::MAX);
        Ok((most.max(0) as u32).min(named))
    }

    /// Returns whether blocks may be launched in clusters.
    pub fn supports_clusters(&self) -> Result<bool, BackendError> {
        let clusters = self.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH);
        let clusters =
            clusters.map_err(|error| failed("query whether there are clusters", &error))? != 0;
        Ok(clusters && architecture::supports_programmatic_launch(&self.facts.arch))
    }

    /// Waits until all launched work of the GPU has finished.
    pub fn synchronize(&self) -> Result<(), BackendError> {
        host_wait::finish_stream(&self.stream, &self.marker, self.options.timeout)
    }

    /// Waits for the end of all work on the stream, without a timeout.
    pub fn synchronize_stream(&self) -> Result<(), BackendError> {
        self.stream.synchronize().map_err(|error| failed("wait for the GPU", &error))
    }

    /// Returns whether work on the stream has not finished yet.
    pub fn is_busy(&self) -> Result<bool, BackendError> {
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) }.result() {
            Ok(()) => Ok(false),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(true),
            Err(error) => Err(failed("ask whether the GPU works", &error)),
        }
    }

    /// Waits for the end of all work in the context, on all streams.
    pub fn synchronize_context(&self) -> Result<(), BackendError> {
        self.context.synchronize().map_err(|error| failed("wait for the GPU", &error))
    }

    /// Allocates device memory, which is freed when the buffer is dropped. Every byte is 0xff,
    /// which is NaN in every float format, so that a kernel that reads unwritten memory never finds
    /// results of an earlier case. [`DeviceOptions::fills_memory`] decides whether new memory is
    /// filled with a pattern.
    ///
    /// # Errors
    /// Fails if the device has too little free memory.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, BackendError> {
        let buffer = self.allocate_uninitialised(bytes)?;
        if self.options.fills_memory {
            buffer.fill(0xff)?;
        }
        Ok(buffer)
    }

    /// Allocates device memory that the caller writes before anything reads it.
    fn allocate_uninitialised(&self, bytes: usize) -> Result<DeviceBuffer, BackendError> {
        let short =
            || out_of_memory(bytes as u64, self.free_and_total().ok().map(|(free, _)| free));
        // The driver takes minutes to refuse what no card has.
        if bytes as u64 > self.facts.memory_bytes {
            return Err(short());
        }
        // SAFETY: the callers write the memory before anything reads it.
        let slice = unsafe { self.stream.alloc::<u8>(bytes.max(1)) };
        let slice = slice.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => short(),
            error => failed("allocate memory", &error),
        })?;
        Ok(DeviceBuffer::new(slice, Arc::clone(&self.staging)))
    }

    /// Allocates device memory and copies the given bytes there.
    ///
    /// # Errors
    /// Fails if free device memory is too small, or the copy fails.
    pub fn upload(&self, bytes: &[u8]) -> Result<DeviceBuffer, BackendError> {
        let buffer = self.allocate_uninitialised(bytes.len())?;
        buffer.overwrite_from_host(bytes)?;
        Ok(buffer)
    }

    /// Allocates device memory and fills it with repetitions of a pattern; the repetition is copied
    /// on the device.
    pub fn allocate_repeated(
        &self,
        pattern: &[u8],
        bytes: usize,
    ) -> Result<DeviceBuffer, BackendError> {
        let buffer = self.allocate(bytes)?;
        let mut filled = pattern.len().min(bytes);
        buffer.overwrite_from_host(&pattern[..filled])?;
        while filled > 0 && filled < bytes {
            let more = filled.min(bytes - filled);
            let (source, target) = (buffer.address(), buffer.address() + filled as u64);
            // SAFETY: both ranges lie in the buffer and do not overlap.
            unsafe { result::memcpy_dtod_async(target, source, more, self.stream.cu_stream()) }
                .map_err(|error| failed("copy on the GPU", &error))?;
            filled += more;
        }
        Ok(buffer)
    }

    /// A kernel, compiled (or taken from the cache) and loaded. A repeated request returns the same
    /// kernel function of the driver. A carve-out that was set for it is reset when it is requested
    /// while none of it is in use.
    ///
    /// # Errors
    /// Fails if the kernel does not compile or load; the error names the kernel.
    pub fn kernel(&self, build: &KernelBuild, symbol: &str) -> Result<Kernel, BackendError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, build) = (build.name(), self.build_for_device(build));
        let loaded = match modules.entry(build.clone()) {
            Entry::Vacant(entry) => entry.insert(self.load_build(&build)?),
            Entry::Occupied(entry) => entry.into_mut(),
        };
        let function = loaded
            .module
            .load_function(symbol)
            .map_err(|error| failed(&format!("find {symbol} in kernel {name}"), &error))?;
        let launched = match &self.loaded {
            Some(record) => record.add(build.kernel_name(symbol), symbol, &loaded.image),
            None => Arc::default(),
        };
        let (in_use, alone) = loaded.uses_and_if_first_of_symbol(symbol);
        let kernel = Kernel::new(function, &self.stream, symbol, (launched, in_use))?;
        if alone {
            // The carve-out is reset before another thread gets the kernel.
            kernel.reset_shared_carve_out()?;
        }
        drop(modules);
        Ok(kernel)
    }

    /// Records the launch shape and the stages of a loaded kernel.
    pub(crate) fn record_used_kernel(
        &self,
        name: &str,
        shape: Launch,
        stages: Option<StageClockedKernel>,
    ) {
        if let Some(loaded) = &self.loaded {
            loaded.add_launch_shape(name, shape);
            stages.into_iter().for_each(|kernel| loaded.add_stage_clocked(kernel));
        }
    }

    /// Adapts a kernel build to the code target and layout of this device.
    fn build_for_device(&self, build: &KernelBuild) -> KernelBuild {
        let build = build.clone().with_files(self.options.files);
        KernelBuild { variant: self.options.variant, ..build }
    }

    pub(crate) const fn records_stage_clocks(&self) -> bool {
        self.clocks_stages
    }

    /// Counters of a loaded build with clocks.
    ///
    /// # Errors
    /// Fails if the kernel's module has no counters.
    pub(crate) fn stage_counters_of(
        &self,
        build: &KernelBuild,
    ) -> Result<StageCounters, BackendError> {
        let modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded =
            modules.get(&self.build_for_device(build)).map(|loaded| Arc::clone(&loaded.module));
        drop(modules);
        let name = build.name();
        let module =
            loaded.ok_or_else(|| BackendError::Launch(format!("kernel {name} is not loaded")))?;
        StageCounters::in_module(module, &self.stream)
            .map_err(|error| failed(&format!("find the clocks of stages in kernel {name}"), &error))
    }
}

impl Device {
    /// Loads the compiled module of a kernel build. If the driver does not load the cached code,
    /// the kernel is compiled again.
    fn load_build(&self, build: &KernelBuild) -> Result<LoadedKernelBuild, BackendError> {
        let failed_to_compile = |error: CompileError| BackendError::Compile(error.to_string());
        let load = |cubin: Vec<u8>| {
            let image = Arc::from(cubin.as_slice());
            let module = self.context.load_module(Ptx::from_binary(cubin))?;
            Ok(LoadedKernelBuild { module, image, in_use: BTreeMap::new() })
        };
        let arch = &self.facts.code;
        let loaded = match load(cache::cached_or_compiled(build, arch).map_err(failed_to_compile)?)
        {
            Ok(loaded) => Ok(loaded),
            Err(_) => load(cache::compile_without_cache(build, arch).map_err(failed_to_compile)?),
        };
        loaded
            .map_err(|error: DriverError| failed(&format!("load kernel {}", build.name()), &error))
    }
}

/// The facts of a device, which need no context, with the code that kernels are compiled to.
pub(super) fn facts_of(
    device: sys::CUdevice,
    code: CodeTarget,
) -> Result<DeviceFacts, DriverError> {
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
    Ok(DeviceFacts {
        name: if code.named { format!("{name} as {}", code.arch) } else { name },
        uuid: format!(
            "GPU-{}-{}-{}-{}-{}",
            hex(0..4),
            hex(4..6),
            hex(6..8),
            hex(8..10),
            hex(10..16)
        ),
        arch: code.arch,
        code: code.code,
        driver_cuda,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        // SAFETY: the driver gave that device.
        memory_bytes: unsafe { result::device::total_mem(device) }? as u64,
        max_clock_mhz: (attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? / 1000) as u32,
        // Drivers that do not know the attribute have no answer.
        mps: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED)
            .is_ok_and(|enabled| enabled != 0),
        // The driver's device handles are equal to the ordinals.
        ordinal: device.max(0) as usize,
    })
}
