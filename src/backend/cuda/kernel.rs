//! A loaded kernel and how it is launched.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, result, sys};

use super::argument::Argument;
use super::device::failed;
use super::persistence::Window;
use crate::backend::BackendError;

/// Blocks, threads a block, and dynamic shared bytes a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Blocks in x, y, z.
    pub grid: (u32, u32, u32),
    /// Threads a block.
    pub block: u32,
    /// Dynamic shared memory a block, bytes.
    pub shared_bytes: u32,
}

impl Shape {
    /// As many blocks of `block` threads as `items` need with `per_thread` items a thread.
    ///
    /// # Errors
    /// When that is more blocks than a grid holds.
    pub fn covering(items: usize, block: u32, per_thread: usize) -> Result<Self, BackendError> {
        let blocks = items.div_ceil(block as usize * per_thread);
        let blocks = u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32);
        let blocks = blocks.ok_or_else(|| BackendError::Launch("more blocks than a grid holds".to_owned()))?;
        Ok(Self { grid: (blocks, 1, 1), block, shared_bytes: 0 })
    }
}

/// How a launch runs, whatever it computes; by default it waits for the one before it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Manner {
    /// Its blocks may start while the kernel before it on the stream still runs (programmatic dependent launch).
    pub overlapping: bool,
    /// Memory whose lines L2 keeps or releases.
    pub window: Option<Window>,
}

/// A loaded kernel.
pub struct Kernel {
    function: CudaFunction,
    stream: Arc<CudaStream>,
    name: String,
}

impl Kernel {
    /// A function of a module that it keeps loaded, for launches on that stream.
    pub(super) fn new(function: CudaFunction, stream: &Arc<CudaStream>, name: &str) -> Self {
        Self { function, stream: Arc::clone(stream), name: name.to_owned() }
    }

    /// Allows launches with that much dynamic shared memory.
    ///
    /// # Errors
    /// When the device has less.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), BackendError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe { result::function::set_function_attribute(self.function.cu_function(), SHARED, bytes as i32) }
            .map_err(|error| failed(&format!("give {} {bytes} bytes of shared memory", self.name), &error))
    }

    /// Makes its multiprocessors keep their whole shared memory, so that it can run beside kernels that do: one that wants another share
    /// waits until a multiprocessor is empty.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn prefer_shared(&self) -> Result<(), BackendError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT as CARVEOUT;
        const PERCENT: i32 = 100;
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe { result::function::set_function_attribute(self.function.cu_function(), CARVEOUT, PERCENT) }
            .map_err(|error| failed(&format!("give {} the most shared memory", self.name), &error))
    }

    /// How many of its clusters of so many blocks run at once where nothing else does.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn clusters_at_once(&self, shape: Shape, cluster: u32) -> Result<usize, BackendError> {
        let mut dimension = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 },
            },
        };
        let config = self.config(shape, std::slice::from_mut(&mut dimension));
        let mut clusters = 0;
        // SAFETY: the configuration points to an attribute that outlives the call; the function belongs to a module that `self` keeps loaded.
        unsafe { sys::cuOccupancyMaxActiveClusters(&raw mut clusters, self.function.cu_function(), &raw const config) }
            .result()
            .map_err(|error| failed(&format!("count the clusters of {}", self.name), &error))?;
        Ok(clusters as usize)
    }

    /// A launch of that shape on the device's stream.
    fn config(&self, shape: Shape, attributes: &mut [sys::CUlaunchAttribute]) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: shape.grid.0,
            gridDimY: shape.grid.1,
            gridDimZ: shape.grid.2,
            blockDimX: shape.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }

    /// Launches it on the device's stream; returns before it has run.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters in number, order and type, every address is alive until the launch has
    /// finished, and the shape is one that the kernel was written for.
    ///
    /// # Errors
    /// When the launch is refused; the error names the kernel.
    pub unsafe fn launch(&self, shape: Shape, arguments: &[Argument]) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(shape, arguments, &mut []) }
    }

    /// The same, in another manner.
    ///
    /// # Safety
    /// As [`Self::launch`]; besides, what a kernel does that is launched to overlap: it touches nothing that is written before it on the
    /// stream until it has waited for that.
    ///
    /// # Errors
    /// As [`Self::launch`].
    pub unsafe fn launch_as(&self, manner: Manner, shape: Shape, arguments: &[Argument]) -> Result<(), BackendError> {
        let overlapping = manner.overlapping.then_some(sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        });
        let mut attributes: Vec<_> = overlapping.into_iter().chain(manner.window.map(Window::attribute)).collect();
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(shape, arguments, &mut attributes) }
    }

    /// Launches, with attributes where there are any.
    ///
    /// # Safety
    /// As the attributes ask.
    unsafe fn launch_with(
        &self,
        shape: Shape,
        arguments: &[Argument],
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> Result<(), BackendError> {
        let mut pointers = [std::ptr::null_mut::<c_void>(); MOST_ARGUMENTS];
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = match argument {
                Argument::Address(value) | Argument::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::I64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            };
        }
        let count = arguments.len();
        debug_assert!(count <= MOST_ARGUMENTS);
        if attributes.is_empty() {
            // SAFETY: the pointers are to values that outlive the call, which copies them; the rest is the caller's promise.
            let launched = unsafe {
                result::launch_kernel(
                    self.function.cu_function(),
                    shape.grid,
                    (shape.block, 1, 1),
                    shape.shared_bytes,
                    self.stream.cu_stream(),
                    &mut pointers[..count],
                )
            };
            return launched.map_err(|error| failed(&format!("launch {}", self.name), &error));
        }
        let config = self.config(shape, attributes);
        // SAFETY: pointers and attributes are to values that outlive the call, which copies them; the rest is the caller's promise.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                pointers[..count].as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error| failed(&format!("launch {}", self.name), &error))
    }
}

/// Most arguments of a kernel here.
const MOST_ARGUMENTS: usize = 32;
