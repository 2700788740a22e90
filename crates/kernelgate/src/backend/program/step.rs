//! The steps of a program: kernel launches, GEMMs, copies, fills, waits and ranges.

use std::sync::Arc;

use kernelgate_cuda::compiler::source::KernelBuild;
use kernelgate_cuda::driver::CudaStream;
use kernelgate_cuda::libraries::gemm::{GemmOperandAddresses, GemmSpec};
use kernelgate_cuda::{BackendError, Device, KernelSpec, Launch, LoadedKernelWithLaunch};

use super::lanes::ProgramLane;
use super::operand::{LaunchArgument, RegionPointer};

type CompileAndLoadKernel = Box<dyn Fn(&Device) -> Result<LoadedKernelWithLaunch, BackendError>>;

/// A kernel with everything on which its build and its grid depend.
pub struct KernelWithParameters {
    /// The `extern "C"` symbol of the kernel in its source.
    pub kernel_symbol: &'static str,
    /// Source and macros.
    pub build: KernelBuild,
    /// Grid, block and shared memory of the launch, or the error that the grid is too large.
    pub launch_shape: Result<Launch, BackendError>,
    /// Function that compiles and loads the kernel.
    pub(super) load: CompileAndLoadKernel,
}

impl KernelWithParameters {
    fn for_spec_and_parameters<P: Clone + 'static>(spec: &KernelSpec<P>, p: &P) -> Self {
        let (symbol, build, shape) =
            (spec.kernel_symbol, spec.build_for_parameters(p), spec.launch_shape_for(p));
        let (spec, p) = (*spec, p.clone());
        Self {
            kernel_symbol: symbol,
            build,
            launch_shape: shape,
            load: Box::new(move |device| spec.compile_and_load(device, &p)),
        }
    }
}

/// Effect of a launch on the L2 lines that it reads in the range that the program keeps in L2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepOrReleaseL2Lines {
    /// The lines are marked as persisting, so that they stay in L2 for later launches.
    MarkL2LinesPersisting,
    /// The lines get normal priority in L2 again.
    MarkL2LinesNormal,
}

/// Decides on the device whether the alternative kernel is launched instead.
pub(super) type AlternativeBuildCondition = Box<dyn Fn(&Device) -> Result<bool, BackendError>>;

/// A kernel launch; unless changed, it is in the first lane and begins after the previous step of
/// the lane has ended.
pub struct KernelLaunchStep {
    kernel: KernelWithParameters,
    pub(super) alternative_kernel: Option<(KernelWithParameters, AlternativeBuildCondition)>,
    pub(super) arguments: Vec<LaunchArgument>,
    pub(super) lane: ProgramLane,
    pub(super) uses_programmatic_dependent_launch: bool,
    pub(super) l2_line_policy: Option<KeepOrReleaseL2Lines>,
}

impl KernelLaunchStep {
    /// Makes a launch of a kernel with parameters `p`; `arguments` are in the order of the kernel's
    /// parameters.
    pub(super) fn for_kernel_with_arguments<P: Clone + 'static>(
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: Vec<LaunchArgument>,
    ) -> Self {
        Self {
            kernel: KernelWithParameters::for_spec_and_parameters(kernel, p),
            alternative_kernel: None,
            arguments,
            lane: ProgramLane::MAIN_LANE,
            uses_programmatic_dependent_launch: false,
            l2_line_policy: None,
        }
    }

    /// Launches another kernel with the same arguments on devices for which `condition` returns
    /// true.
    pub fn with_alternative_kernel_on_devices<P: Clone + 'static>(
        self,
        kernel: &KernelSpec<P>,
        p: &P,
        condition: impl Fn(&Device) -> Result<bool, BackendError> + 'static,
    ) -> KernelLaunchStep {
        Self {
            alternative_kernel: Some((
                KernelWithParameters::for_spec_and_parameters(kernel, p),
                Box::new(condition),
            )),
            ..self
        }
    }

    /// Returns the launch, moved to another lane of the program.
    pub fn moved_to_lane(self, lane: ProgramLane) -> Self {
        Self { lane, ..self }
    }

    /// Makes the launch a programmatic dependent launch (PDL) on devices from sm_90 on. The kernel
    /// itself must wait for the previous kernel of the stream.
    pub fn with_programmatic_dependent_launch(self) -> Self {
        Self { uses_programmatic_dependent_launch: true, ..self }
    }

    /// Marks the lines that the launch reads in the program's L2 range as persisting, or releases
    /// them.
    pub fn with_kept_or_released_l2_lines(self, lines: KeepOrReleaseL2Lines) -> Self {
        Self { l2_line_policy: Some(lines), ..self }
    }

    /// The kernel of the launch; if the device decides between two, the default one.
    pub const fn default_kernel(&self) -> &KernelWithParameters {
        &self.kernel
    }

    /// Arguments of the launch.
    pub fn arguments(&self) -> &[LaunchArgument] {
        &self.arguments
    }

    /// Whether the launch keeps or releases lines of L2.
    pub const fn kept_or_released_l2_lines(&self) -> Option<KeepOrReleaseL2Lines> {
        self.l2_line_policy
    }

    /// The program lane in which the launch runs.
    pub const fn lane_of_launch(&self) -> ProgramLane {
        self.lane
    }

    /// Whether the kernel is launched with PDL.
    pub const fn is_programmatic_dependent_launch(&self) -> bool {
        self.uses_programmatic_dependent_launch
    }
}

/// Device, stream and addresses that a launch of other code gets when the program is loaded.
pub struct DeviceStreamAndAddresses<'a> {
    /// The device.
    pub device: &'a Arc<Device>,
    /// The CUDA stream of the lane in which the launch is enqueued.
    pub stream: &'a Arc<CudaStream>,
    /// Device addresses of the pointers that were passed to the program with the launch, in their
    /// order.
    pub device_addresses: &'a [u64],
}

/// Enqueues a prepared launch.
pub type EnqueueStep = Box<dyn Fn() -> Result<(), BackendError>>;

/// Closure that prepares a launch of other code when the program is loaded, and returns a closure
/// that enqueues the launch.
pub(super) type PrepareLaunchOfOtherCode =
    Box<dyn FnOnce(DeviceStreamAndAddresses<'_>) -> Result<EnqueueStep, BackendError>>;

/// One step of a program: a kernel launch, a GEMM, a copy, a fill, a launch of other code, a wait,
/// or the beginning or end of a range.
pub enum ProgramStep {
    /// A kernel.
    Launch(KernelLaunchStep),
    /// A GEMM that cuBLASLt computes.
    Gemm {
        /// Program lane in which the step runs.
        lane: ProgramLane,
        /// Shape, dtypes, layout and epilogue of the GEMM.
        spec: GemmSpec,
        /// Pointers to A, B and D, and the operands of the GEMM's epilogue and scales.
        operands: GemmOperandAddresses<RegionPointer>,
    },
    /// Copies bytes between two regions of device memory.
    DeviceCopy {
        /// Program lane in which the step runs.
        lane: ProgramLane,
        /// The source.
        source: RegionPointer,
        /// The target.
        destination: RegionPointer,
        /// Number of bytes copied or set.
        copied_bytes: usize,
    },
    /// Sets the bytes of a memory range to one value.
    ByteFill {
        /// Program lane in which the step runs.
        lane: ProgramLane,
        /// The target.
        destination: RegionPointer,
        /// Number of bytes copied or set.
        filled_bytes: usize,
        /// The byte.
        fill_byte: u8,
    },
    /// A launch that other code, such as a library, enqueues.
    LaunchOfOtherCode {
        /// Program lane in which the step runs.
        lane: ProgramLane,
        /// Pointers that the launch gets as device addresses.
        pointers: Vec<RegionPointer>,
        /// Closure that prepares the launch and returns a closure that enqueues it.
        prepare: PrepareLaunchOfOtherCode,
    },
    /// Later steps of lane `waiting_lane` wait for all earlier steps of lane `awaited_lane`.
    LaneWait {
        /// The lane whose later steps wait.
        waiting_lane: ProgramLane,
        /// The lane whose earlier steps must finish first.
        awaited_lane: ProgramLane,
    },
    /// A named range begins.
    BeginNamedRange(String),
    /// Ends the innermost open named range.
    EndNamedRange,
}

impl ProgramStep {
    /// Whether the step enqueues work on the GPU: a launch, a GEMM, a copy or a fill, but not a
    /// wait or a range.
    pub const fn enqueues_gpu_work(&self) -> bool {
        !matches!(self, Self::LaneWait { .. } | Self::BeginNamedRange(_) | Self::EndNamedRange)
    }
}
