//! Measures the highest matmul rate of the tensor cores of sm_90a, with wgmma instructions whose
//! operands stay in shared memory. This module supports only sm_90a; on other architectures, GEMMs
//! of cuBLASLt give the highest rate.

use crate::{
    BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernelWithLaunch,
    RequiredArchitecture, Source,
};

/// The resident-matmul kernel; the parameters of its specification are the dtype and the number of
/// multiprocessors.
pub(super) const RESIDENT_MATMUL_KERNELS: &[KernelSpec<(ResidentMatmulDtype, usize)>] =
    &[RESIDENT_MATMUL_KERNEL];

const RESIDENT_MATMUL_KERNEL: KernelSpec<(ResidentMatmulDtype, usize)> = KernelSpec {
    macro_definitions: |(operand, _)| operand.kernel_macros_of_dtype(),
    required_architecture: RequiredArchitecture::ExactArchitecture("sm_90a"),
    listed_build_parameters: || {
        ResidentMatmulDtype::ALL_DTYPES.map(|operand| (operand, 1)).to_vec()
    },
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

/// Element type of both operands of the resident matmul; the sums are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResidentMatmulDtype {
    /// 8-bit floats with 4 exponent bits and 3 mantissa bits.
    E4m3,
    /// Brain floats.
    Bf16,
    /// IEEE half precision.
    F16,
    /// f32 elements, which the tensor cores round to 10 mantissa bits (TF32).
    Tf32,
}

impl ResidentMatmulDtype {
    const ALL_DTYPES: [Self; 4] = [Self::E4m3, Self::Bf16, Self::F16, Self::Tf32];

    /// Number of elements along k that an instruction takes, which is 32 bytes.
    const fn elements_along_k_per_instruction(self) -> u64 {
        match self {
            Self::E4m3 => 32,
            Self::Bf16 | Self::F16 => 16,
            Self::Tf32 => 8,
        }
    }

    fn kernel_macros_of_dtype(self) -> Vec<String> {
        let name = match self {
            Self::E4m3 => "e4m3",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Tf32 => "tf32",
        };
        vec![format!("TYPE={name}"), format!("STEP={}", self.elements_along_k_per_instruction())]
    }
}

/// Operands in device memory, and a kernel that multiplies them many times in shared memory.
pub struct ResidentMatmulMeasurement {
    kernel: LoadedKernelWithLaunch,
    matmul_operands: DeviceBuffer,
    never_written_output: DeviceBuffer,
    flops_per_launch: f64,
}

impl ResidentMatmulMeasurement {
    /// Bytes of the operands of one thread block.
    pub const OPERAND_BYTES_PER_BLOCK: usize = (256 + 2 * 64) * 128;
    /// Rounds of the multiplication loop in a launch, which takes about a millisecond, so that its
    /// begin and end matter little.
    const ROUNDS_PER_LAUNCH: i32 = 2000;
    /// wgmma instructions of a block in a round: four of each of its two warpgroups.
    const WGMMA_INSTRUCTIONS_PER_ROUND: u64 = 8;

    /// Compiles the kernel and uploads random operands, which every thread block reads; zeros would
    /// draw less power.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if the GPU is not sm_90a; with another error if the
    /// kernel does not compile or too little device memory is free.
    pub fn compile_and_upload_operands(
        device: &Device,
        operand: ResidentMatmulDtype,
        operands: &[u8],
    ) -> Result<Self, BackendError> {
        let multiprocessors = u64::from(device.gpu_properties().multiprocessor_count);
        let kernel = RESIDENT_MATMUL_KERNEL
            .compile_and_load(device, &(operand, multiprocessors as usize))?;
        let instruction = 2 * 64 * 256 * operand.elements_along_k_per_instruction();
        let instructions =
            Self::WGMMA_INSTRUCTIONS_PER_ROUND * Self::ROUNDS_PER_LAUNCH as u64 * multiprocessors;
        Ok(Self {
            kernel,
            matmul_operands: device
                .allocate_with_repeated_pattern(operands, Self::OPERAND_BYTES_PER_BLOCK)?,
            never_written_output: device.upload(&[0; 4])?,
            flops_per_launch: (instruction * instructions) as f64,
        })
    }

    /// Returns the floating-point operations of one launch.
    pub const fn operations_per_launch(&self) -> f64 {
        self.flops_per_launch
    }

    /// Enqueues a launch.
    pub fn enqueue_matmul_launch(&self) -> Result<(), BackendError> {
        self.kernel.launch_with(&[
            KernelArgument::from(&self.matmul_operands),
            KernelArgument::I32(Self::ROUNDS_PER_LAUNCH),
            KernelArgument::F32(f32::MIN_POSITIVE),
            KernelArgument::from(&self.never_written_output),
        ])
    }
}
