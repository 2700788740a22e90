//! An open GPU: its facts, memory, kernels and the one stream that everything runs on.
//!
//! Every driver result is checked and named. Nothing here is called inside a timed region but
//! [`Kernel::launch`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use cudarc::driver::{CudaContext, CudaEvent, CudaModule, CudaStream, DriverError, result};
use cudarc::nvrtc::Ptx;

use super::buffer::{Buffer, short as out_of_memory};
use super::kernel::Kernel;
use super::raw_stream::{RawContext, RawStream};
use super::status::{describe, failed};
use super::wait;
use crate::BackendError;
use crate::compiler::cache;
use crate::compiler::nvrtc::CompileError;
use crate::compiler::source::Build;
use crate::library::{self, Library};

/// Oldest CUDA that the kernels' machine code needs of the driver: 13.0.
const OLDEST_CUDA: i32 = 13_000;

/// Why there is no GPU to run on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// A library was not found.
    #[error("{} is missing: {}", .0.name(), .0.advice())]
    Missing(Library),
    /// The driver is installed and returns an error.
    #[error("the NVIDIA driver failed to {action}: {error}")]
    Driver {
        /// What was asked.
        action: &'static str,
        /// What it answered.
        error: String,
    },
    /// The driver is older than the kernels need.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, 13.0 is needed: update the driver",
        .0 / 1000, .0 % 1000 / 10
    )]
    OldDriver(i32),
    /// No GPU at all.
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
    /// Not that GPU.
    #[error("there is no GPU {wanted}: this machine has {count}, counted from 0")]
    NoSuchDevice {
        /// What was asked for.
        wanted: usize,
        /// How many there are.
        count: usize,
    },
}

/// What a GPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// As the device names itself.
    pub name: String,
    /// "GPU-…", unique to the card.
    pub uuid: String,
    /// Architecture to compile for: "sm_90a".
    pub arch: String,
    /// Latest CUDA that the driver supports: 13000 is 13.0.
    pub driver_cuda: i32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u64,
    /// Device memory, bytes.
    pub memory_bytes: u64,
    /// Highest SM clock, MHz.
    pub max_clock_mhz: u32,
    /// Ordinal among the machine's GPUs.
    pub ordinal: usize,
}

/// An open GPU with a stream.
pub struct Device {
    facts: DeviceFacts,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    marker: CudaEvent,
    timeout: Duration,
    modules: Mutex<BTreeMap<Build, Arc<CudaModule>>>,
}

/// Number of GPUs that the driver finds.
///
/// # Errors
/// When there is no driver, it is too old, or it fails.
pub fn count() -> Result<usize, DeviceError> {
    library::load(Library::Driver).ok_or(DeviceError::Missing(Library::Driver))?;
    let failed =
        |action| move |error: DriverError| DeviceError::Driver { action, error: describe(&error) };
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(DeviceError::NoDevice),
        other => other.map_err(failed("initialise"))?,
    }
    let mut version = 0;
    // SAFETY: the driver is loaded and initialised, and the pointer is valid.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(failed("tell its version"))?;
    if version < OLDEST_CUDA {
        return Err(DeviceError::OldDriver(version));
    }
    Ok(CudaContext::device_count().map_err(failed("count GPUs"))?.max(0) as usize)
}

/// Size of a GPU's L2 cache, bytes, without opening it; 0 where the driver does not tell.
pub fn l2_bytes(ordinal: usize) -> u64 {
    let tell = || {
        let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
        // SAFETY: the driver gave that device.
        unsafe {
            result::device::get_attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        }
        .ok()
    };
    count().ok().and_then(|_| tell()).map_or(0, |bytes| bytes.max(0) as u64)
}

/// Whether there is such a GPU and what running on it needs; opens nothing.
///
/// # Errors
/// The first thing that is missing.
pub fn check(ordinal: usize) -> Result<(), DeviceError> {
    let count = count()?;
    if count == 0 {
        return Err(DeviceError::NoDevice);
    }
    if ordinal >= count {
        return Err(DeviceError::NoSuchDevice { wanted: ordinal, count });
    }
    library::load(Library::Nvrtc).ok_or(DeviceError::Missing(Library::Nvrtc))?;
    Ok(())
}

impl Device {
    /// Opens a GPU. A kernel that runs longer than `timeout` is treated as hung.
    ///
    /// # Errors
    /// When a library is missing or old, there is no such GPU, or the driver fails.
    pub fn open(ordinal: usize, timeout: Duration) -> Result<Arc<Self>, DeviceError> {
        check(ordinal)?;
        let failed = |action| {
            move |error: DriverError| DeviceError::Driver { action, error: describe(&error) }
        };
        let context = CudaContext::new(ordinal).map_err(failed("open the GPU"))?;
        // SAFETY: everything runs on one stream, whose order is all the synchronisation there is;
        // tracking would add waits and events to every launch.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("make a stream"))?;
        let facts = facts_of(context.cu_device()).map_err(failed("describe the GPU"))?;
        let marker = context
            .new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING))
            .map_err(failed("make an event"))?;
        Ok(Arc::new(Self { facts, context, stream, marker, timeout, modules: Mutex::default() }))
    }

    /// What the GPU is.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The context, for events and graphs.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The stream that everything runs on.
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

    /// Another stream, for work that may run concurrently.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn another_stream(&self) -> Result<Arc<CudaStream>, BackendError> {
        self.context.new_stream().map_err(|error| failed("make a stream", &error))
    }

    /// Free and total device memory, bytes.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn memory(&self) -> Result<(u64, u64), BackendError> {
        let (free, total) =
            self.context.mem_get_info().map_err(|error| failed("tell free memory", &error))?;
        Ok((free as u64, total as u64))
    }

    /// Most shared memory that a block may ask for, bytes.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn shared_bytes_a_block(&self) -> Result<u32, BackendError> {
        let most = self
            .context
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
        Ok(most.map_err(|error| failed("tell the shared memory of a block", &error))?.max(0) as u32)
    }

    /// Waits for everything that was launched.
    ///
    /// # Errors
    /// When something that was launched failed or hangs.
    pub fn synchronize(&self) -> Result<(), BackendError> {
        wait::finish(&self.stream, &self.marker, self.timeout)
    }

    /// Waits for everything on the stream, however long it takes: for what has finished.
    ///
    /// # Errors
    /// When something that was launched failed.
    pub fn synchronize_stream(&self) -> Result<(), BackendError> {
        self.stream.synchronize().map_err(|error| failed("wait for the GPU", &error))
    }

    /// Waits for everything in the context, on whatever stream it runs.
    ///
    /// # Errors
    /// When something that was launched failed.
    pub fn synchronize_context(&self) -> Result<(), BackendError> {
        self.context.synchronize().map_err(|error| failed("wait for the GPU", &error))
    }

    /// Device memory, freed with the buffer. Every byte is 0xff, which is NaN in every float
    /// format: what a kernel reads there before it was written is never what an earlier case left.
    ///
    /// # Errors
    /// When there is not enough.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, BackendError> {
        let buffer = self.uninitialised(bytes)?;
        buffer.fill(0xff)?;
        Ok(buffer)
    }

    /// Device memory that the caller writes before anything reads it.
    fn uninitialised(&self, bytes: usize) -> Result<Buffer, BackendError> {
        let short = || out_of_memory(bytes as u64, self.memory().ok().map(|(free, _)| free));
        // The driver takes minutes to refuse what no card has.
        if bytes as u64 > self.facts.memory_bytes {
            return Err(short());
        }
        // SAFETY: the callers write it before it is read.
        let slice = unsafe { self.stream.alloc::<u8>(bytes.max(1)) };
        let slice = slice.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => short(),
            error => failed("allocate memory", &error),
        })?;
        Ok(Buffer::new(slice))
    }

    /// Device memory with these bytes.
    ///
    /// # Errors
    /// When there is not enough, or the copy fails.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer, BackendError> {
        let buffer = self.uninitialised(bytes.len())?;
        buffer.overwrite(bytes)?;
        Ok(buffer)
    }

    /// Device memory of so many bytes with these over and over; what lies there is copied on the
    /// device.
    ///
    /// # Errors
    /// As [`Self::upload`].
    pub fn repeat(&self, pattern: &[u8], bytes: usize) -> Result<Buffer, BackendError> {
        let buffer = self.allocate(bytes)?;
        let mut filled = pattern.len().min(bytes);
        buffer.overwrite(&pattern[..filled])?;
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

    /// A kernel, compiled (or taken from the cache) and loaded.
    ///
    /// # Errors
    /// When it does not compile or load; the error names it.
    pub fn kernel(&self, build: &Build, symbol: &str) -> Result<Kernel, BackendError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let name = build.name();
        let module = match modules.get(build) {
            Some(module) => Arc::clone(module),
            None => {
                let module = self.load(build)?;
                modules.insert(build.clone(), Arc::clone(&module));
                module
            }
        };
        let function = module
            .load_function(symbol)
            .map_err(|error| failed(&format!("find {symbol} in kernel {name}"), &error))?;
        Kernel::new(function, &self.stream, symbol)
    }
}

impl Device {
    /// The module of a build. What the cache holds and the driver does not load is compiled anew.
    fn load(&self, build: &Build) -> Result<Arc<CudaModule>, BackendError> {
        let failed_to_compile = |error: CompileError| BackendError::Compile(error.to_string());
        let load = |cubin| self.context.load_module(Ptx::from_binary(cubin));
        let arch = &self.facts.arch;
        let module = match load(cache::compile(build, arch).map_err(failed_to_compile)?) {
            Ok(module) => Ok(module),
            Err(_) => load(cache::compile_anew(build, arch).map_err(failed_to_compile)?),
        };
        module.map_err(|error| failed(&format!("load kernel {}", build.name()), &error))
    }
}

/// The facts of a device, which need no context.
pub(super) fn facts_of(device: sys::CUdevice) -> Result<DeviceFacts, DriverError> {
    let number = |attribute| {
        // SAFETY: the driver gave that device.
        unsafe { result::device::get_attribute(device, attribute) }
    };
    let attribute = |attribute| number(attribute).map(|value| value.max(0) as u64);
    let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let mut driver_cuda = 0;
    // SAFETY: the driver is loaded and initialised, and the pointer is valid.
    unsafe { sys::cuDriverGetVersion(&raw mut driver_cuda) }.result()?;
    let bytes = result::device::get_uuid(device)?.bytes.map(|byte| byte as u8);
    let hex = |range: std::ops::Range<usize>| {
        bytes[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    Ok(DeviceFacts {
        name: result::device::get_name(device)?,
        uuid: format!(
            "GPU-{}-{}-{}-{}-{}",
            hex(0..4),
            hex(4..6),
            hex(6..8),
            hex(8..10),
            hex(10..16)
        ),
        // Architecture-specific instructions exist from Hopper on, under a name of their own.
        arch: format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" }),
        driver_cuda,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        // SAFETY: the driver gave that device.
        memory_bytes: unsafe { result::device::total_mem(device) }? as u64,
        max_clock_mhz: (attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? / 1000) as u32,
        // The driver's devices are their ordinals.
        ordinal: device.max(0) as usize,
    })
}
