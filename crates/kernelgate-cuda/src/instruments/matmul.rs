//! The ceiling of the tensor cores of sm_90a: warpgroup MMAs whose operands stay in shared memory.
//! This module supports only sm_90; on other architectures a library's GEMMs give the ceiling.

use crate::{
    BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernel,
    RequiredArchitecture, Source,
};

/// The rows.
pub(super) const MATMUL_KERNELS: &[KernelSpec<(ResidentDtype, usize)>] = &[RESIDENT_MATMUL_KERNEL];

const RESIDENT_MATMUL_KERNEL: KernelSpec<(ResidentDtype, usize)> = KernelSpec {
    defines: |(operand, _)| operand.kernel_macros(),
    requires: RequiredArchitecture::Exactly("sm_90a"),
    variants: || ResidentDtype::ALL_DTYPES.map(|operand| (operand, 1)).to_vec(),
    ..KernelSpec::new(
        Source::new(
            "measure/resident_matmul",
            include_str!("../../kernels/measure/resident_matmul.cu"),
        ),
        "measure_resident_matmul",
        256,
        |&(_, multiprocessors)| [multiprocessors, 1, 1],
    )
};

/// Element type of both operands; sums are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResidentDtype {
    /// 8-bit floats of 4 exponent and 3 mantissa bits.
    E4m3,
    /// Brain floats.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Matrix elements are f32 rounded to 10 mantissa bits.
    Tf32,
}

impl ResidentDtype {
    const ALL_DTYPES: [Self; 4] = [Self::E4m3, Self::Bf16, Self::F16, Self::Tf32];

    /// Elements of 32 bytes, which an instruction has along k.
    const fn elements_per_k_step(self) -> u64 {
        match self {
            Self::E4m3 => 32,
            Self::Bf16 | Self::F16 => 16,
            Self::Tf32 => 8,
        }
    }

    fn kernel_macros(self) -> Vec<String> {
        let name = match self {
            Self::E4m3 => "e4m3",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Tf32 => "tf32",
        };
        vec![format!("TYPE={name}"), format!("STEP={}", self.elements_per_k_step())]
    }
}

/// Operands in device memory, and a kernel that multiplies them many times.
pub struct ResidentMatmul {
    kernel: LoadedKernel,
    operands: DeviceBuffer,
    guard: DeviceBuffer,
    flops: f64,
}

impl ResidentMatmul {
    /// Bytes of the operands of a block.
    pub const OPERAND_BYTES: usize = (256 + 2 * 64) * 128;
    /// Rounds of a launch: about a millisecond, of which beginning and end are little.
    const RESIDENT_ROUNDS: i32 = 2000;
    /// Instructions of a round: four of each of the two warpgroups.
    const INSTRUCTIONS_PER_ROUND: u64 = 8;

    /// Compiles the kernel and uploads the operands, which every block reads: random numbers, as
    /// zeros draw less power.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if the GPU is not sm_90a; others when the kernel
    /// does not compile, or memory is short.
    pub fn new(
        device: &Device,
        operand: ResidentDtype,
        operands: &[u8],
    ) -> Result<Self, BackendError> {
        let multiprocessors = u64::from(device.facts().multiprocessors);
        let kernel = RESIDENT_MATMUL_KERNEL
            .compile_and_load(device, &(operand, multiprocessors as usize))?;
        let instruction = 2 * 64 * 256 * operand.elements_per_k_step();
        let instructions =
            Self::INSTRUCTIONS_PER_ROUND * Self::RESIDENT_ROUNDS as u64 * multiprocessors;
        Ok(Self {
            kernel,
            operands: device.allocate_repeated(operands, Self::OPERAND_BYTES)?,
            guard: device.upload(&[0; 4])?,
            flops: (instruction * instructions) as f64,
        })
    }

    /// Operations of a launch.
    pub const fn flops(&self) -> f64 {
        self.flops
    }

    /// Enqueues a launch.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.kernel.launch_with(&[
            KernelArgument::from(&self.operands),
            KernelArgument::I32(Self::RESIDENT_ROUNDS),
            KernelArgument::F32(f32::MIN_POSITIVE),
            KernelArgument::from(&self.guard),
        ])
    }
}
