//! The steps of a program: kernel launches, GEMMs, copies, fills, waits and ranges.

use std::sync::Arc;

use kernelgate_cuda::compiler::source::KernelBuild;
use kernelgate_cuda::driver::CudaStream;
use kernelgate_cuda::libraries::gemm::{GemmOperands, GemmSpec};
use kernelgate_cuda::{BackendError, Device, KernelSpec, Launch, LoadedKernel};

use super::lanes::Lane;
use super::operand::{Operand, Pointer};

type LoadKernel = Box<dyn Fn(&Device) -> Result<LoadedKernel, BackendError>>;

/// A kernel with everything that its build and its grid depend on.
pub struct PlannedKernel {
    /// The `extern "C"` symbol of the kernel in its source.
    pub symbol: &'static str,
    /// Source and macros.
    pub build: KernelBuild,
    /// Grid, block and shared memory; an error when a grid does not hold the blocks.
    pub shape: Result<Launch, BackendError>,
    /// Function that compiles and loads the kernel.
    pub(super) load: LoadKernel,
}

impl PlannedKernel {
    fn new<P: Clone + 'static>(spec: &KernelSpec<P>, p: &P) -> Self {
        let (symbol, build, shape) =
            (spec.symbol, spec.build_for_parameters(p), spec.launch_for(p));
        let (spec, p) = (*spec, p.clone());
        Self {
            symbol,
            build,
            shape,
            load: Box::new(move |device| spec.compile_and_load(device, &p)),
        }
    }
}

/// The treatment of lines that a launch reads in the range that a program keeps in L2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptL2Lines {
    /// The lines stay in L2 for later launches.
    Keep,
    /// The lines have normal priority in L2 again.
    Release,
}

/// Decides on a device whether another build of a kernel is launched.
pub(super) type AlternativeBuildCondition = Box<dyn Fn(&Device) -> Result<bool, BackendError>>;

/// A launch of a kernel; by default in the first lane, beginning when the step before it has ended.
pub struct KernelLaunch {
    kernel: PlannedKernel,
    pub(super) other: Option<(PlannedKernel, AlternativeBuildCondition)>,
    pub(super) arguments: Vec<Operand>,
    pub(super) lane: Lane,
    pub(super) programmatic: bool,
    pub(super) lines: Option<KeptL2Lines>,
}

impl KernelLaunch {
    /// A kernel for `p`, with arguments in the order of its parameters.
    pub(super) fn new<P: Clone + 'static>(
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: Vec<Operand>,
    ) -> Self {
        Self {
            kernel: PlannedKernel::new(kernel, p),
            other: None,
            arguments,
            lane: Lane::MAIN_LANE,
            programmatic: false,
            lines: None,
        }
    }

    /// Launches another kernel with the same arguments on devices where `condition` holds.
    pub fn or<P: Clone + 'static>(
        self,
        kernel: &KernelSpec<P>,
        p: &P,
        condition: impl Fn(&Device) -> Result<bool, BackendError> + 'static,
    ) -> KernelLaunch {
        Self { other: Some((PlannedKernel::new(kernel, p), Box::new(condition))), ..self }
    }

    /// Moves the launch to another lane of the program.
    pub fn in_lane(self, lane: Lane) -> Self {
        Self { lane, ..self }
    }

    /// Makes this a programmatic dependent launch (PDL) if the device has PDL, from sm_90 on. The
    /// kernel itself waits for the kernel before it in the stream.
    pub fn programmatic(self) -> Self {
        Self { programmatic: true, ..self }
    }

    /// Keeps or releases lines of the range that the program keeps in L2.
    pub fn with_kept_lines(self, lines: KeptL2Lines) -> Self {
        Self { lines: Some(lines), ..self }
    }

    /// The kernel; the first one if the device chooses between two.
    pub const fn kernel(&self) -> &PlannedKernel {
        &self.kernel
    }

    /// Arguments of the launch.
    pub fn arguments(&self) -> &[Operand] {
        &self.arguments
    }

    /// Whether the launch keeps or releases lines of L2.
    pub const fn lines(&self) -> Option<KeptL2Lines> {
        self.lines
    }

    /// The lane of the launch.
    pub const fn lane(&self) -> Lane {
        self.lane
    }

    /// Whether the kernel is launched with PDL.
    pub const fn is_programmatic_launch(&self) -> bool {
        self.programmatic
    }
}

/// The device, stream and addresses that a launch of other code gets when the program is loaded.
pub struct ForeignLaunchSite<'a> {
    /// The device.
    pub device: &'a Arc<Device>,
    /// The stream of the lane in which the call is launched.
    pub stream: &'a Arc<CudaStream>,
    /// Addresses of the pointers with which the call was added to the program, in their order.
    pub addresses: &'a [u64],
}

/// Enqueues a prepared launch.
pub type EnqueueFunction = Box<dyn Fn() -> Result<(), BackendError>>;

/// Prepares a launch that other code enqueues.
pub(super) type PrepareForeignLaunch =
    Box<dyn FnOnce(ForeignLaunchSite<'_>) -> Result<EnqueueFunction, BackendError>>;

/// One step of a program: a launch, a GEMM, a copy, a fill, a wait or a range.
pub enum ProgramStep {
    /// A kernel.
    Launch(KernelLaunch),
    /// A GEMM that cuBLASLt computes.
    Gemm {
        /// Lane of the step.
        lane: Lane,
        /// Description of the step.
        spec: GemmSpec,
        /// Matrices of the step, and the operands of its epilogue and scales.
        operands: GemmOperands<Pointer>,
    },
    /// A copy between two regions of device memory.
    Copy {
        /// Lane of the step.
        lane: Lane,
        /// The source.
        from: Pointer,
        /// The target.
        to: Pointer,
        /// Bytes.
        bytes: usize,
    },
    /// A fill of a memory range with one byte value.
    Fill {
        /// Lane of the step.
        lane: Lane,
        /// The target.
        to: Pointer,
        /// Bytes.
        bytes: usize,
        /// The byte.
        value: u8,
    },
    /// A launch that other code, such as a library, enqueues.
    Call {
        /// Lane of the step.
        lane: Lane,
        /// Pointers that the call gets as addresses.
        pointers: Vec<Pointer>,
        /// Makes the step ready.
        prepare: PrepareForeignLaunch,
    },
    /// Later steps of one lane wait for all earlier steps of another lane.
    Wait {
        /// The lane that waits.
        waiting: Lane,
        /// The lane whose steps are waited for.
        on: Lane,
    },
    /// A named range begins.
    Begin(String),
    /// End of the named range that was opened last.
    End,
}

impl ProgramStep {
    /// Whether the step is a command of the GPU: a launch, a GEMM, a copy, a fill.
    pub const fn is_gpu_command(&self) -> bool {
        !matches!(self, Self::Wait { .. } | Self::Begin(_) | Self::End)
    }
}
