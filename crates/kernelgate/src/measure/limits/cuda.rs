//! The GPU's ceilings: bandwidths by our own passes, GEMMs by cuBLASLt, and what launching costs.

use super::{Bandwidth, Limits};
use crate::backend::BackendError;
use crate::measure::events::EventTimer;
use crate::workload::{Unit, Work, random};
use kernelgate_cuda::instruments::bandwidth::Passes;
use kernelgate_cuda::libraries::cublaslt::{Operands, SquareGemm};

/// Working sets measured: far inside L2, about L2, and far beyond it.
const WORKING_SETS: [u64; 6] = [2 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20, 2 << 30];
/// Side of the square GEMMs: large enough that every multiprocessor is busy to the end.
const MATMUL_SIZE: u64 = 8192;
/// How often an operand repeats what was drawn for it. Drawing all of it takes the host longer than
/// the measurement; bits of neighbours, which the clock depends on, are as random.
const REPEATS: usize = 16;

impl Limits {
    /// Measures those ceilings of the GPU that bound any of the works. Takes about a second.
    ///
    /// # Errors
    /// When the device fails; a unit whose library is missing is left out.
    pub fn measure_cuda(events: &mut EventTimer, works: &[Work]) -> Result<Self, BackendError> {
        let mut limits = Self::default();
        let pattern = random::normal(0, "bandwidth", 1 << 20);
        let (free, _) = events.device().memory()?;
        let sets: Vec<u64> = WORKING_SETS.into_iter().filter(|&bytes| 2 * bytes < free).collect();
        let largest = sets.last().copied().unwrap_or(WORKING_SETS[0]);
        let passes =
            Passes::new(events.device(), largest as usize, bytemuck::cast_slice(&pattern))?;
        if works.iter().any(|work| work.total_bytes() > 0) {
            limits.bandwidth = sets
                .into_iter()
                .map(|bytes| bandwidth(events, &passes, bytes))
                .collect::<Result<_, _>>()?;
            limits.note_clock("memory", events.typical_clock_mhz());
        }
        drop(passes);
        let wanted = |operands: &Operands| works.iter().any(|work| bounds(*operands, work));
        for operands in Operands::ALL.into_iter().filter(wanted) {
            limits.add_matmul(events, operands)?;
        }
        limits.overhead = Some(events.overhead());
        Ok(limits)
    }

    /// Measures all of them: bandwidths, and GEMMs of every dtype. Takes some seconds.
    ///
    /// # Errors
    /// As [`Self::measure_cuda`].
    pub fn measure_cuda_all(events: &mut EventTimer) -> Result<Self, BackendError> {
        let mut limits = Self::measure_cuda(events, &[Work::bytes(1, 1)])?;
        for operands in Operands::ALL {
            limits.add_matmul(events, operands)?;
        }
        Ok(limits)
    }

    fn add_matmul(
        &mut self,
        events: &mut EventTimer,
        operands: Operands,
    ) -> Result<(), BackendError> {
        if let Some((rate, clock_mhz)) = matmul(events, operands)? {
            let key = format!("{} {}", Unit::Matmul.name(), operands.name());
            self.note_clock(&key, clock_mhz);
            self.flops_per_s.insert(key, rate);
        }
        Ok(())
    }

    fn note_clock(&mut self, by: &str, clock_mhz: Option<f64>) {
        self.clock_mhz.extend(clock_mhz.map(|clock_mhz| (by.to_owned(), clock_mhz)));
    }
}

/// Whether a work has GEMMs of that kind.
fn bounds(operands: Operands, work: &Work) -> bool {
    work.flops
        .iter()
        .any(|flops| flops.unit == Unit::Matmul && flops.dtype.name() == operands.name())
}

fn bandwidth(
    events: &mut EventTimer,
    passes: &Passes,
    bytes: u64,
) -> Result<Bandwidth, BackendError> {
    let mut rate = |pass: &dyn Fn() -> Result<(), BackendError>| -> Result<f64, BackendError> {
        Ok(bytes as f64 / events.typical_ns(&mut || pass())? * 1e9)
    };
    Ok(Bandwidth {
        working_set_bytes: bytes,
        read: rate(&|| passes.read(bytes))?,
        copy: rate(&|| passes.copy(bytes))?,
        write: rate(&|| passes.write(bytes))?,
    })
}

/// The fastest of the algorithms that cuBLASLt proposes, operations a second, and the SM clock,
/// MHz; `None` where the library is missing.
fn matmul(
    events: &mut EventTimer,
    operands: Operands,
) -> Result<Option<(f64, Option<f64>)>, BackendError> {
    let elements = (MATMUL_SIZE * MATMUL_SIZE) as usize;
    let operand = |name| random_operand(operands, name, elements / REPEATS).repeat(REPEATS);
    let (a, b) = (operand("a"), operand("b"));
    let Some(gemm) = SquareGemm::new(events.device(), operands, MATMUL_SIZE, [&a, &b])? else {
        return Ok(None);
    };
    let (mut fastest_ns, mut clock_mhz) = (f64::INFINITY, None);
    for algorithm in 0..gemm.algorithms() {
        // One that the library proposes and then refuses is no ceiling.
        if gemm.launch(algorithm).is_ok() {
            let typical_ns = events.typical_ns(&mut || gemm.launch(algorithm))?;
            if typical_ns < fastest_ns {
                (fastest_ns, clock_mhz) = (typical_ns, events.typical_clock_mhz());
            }
        }
    }
    events.device().synchronize()?;
    let rate = || 2.0 * (MATMUL_SIZE as f64).powi(3) / fastest_ns * 1e9;
    Ok(fastest_ns.is_finite().then(|| (rate(), clock_mhz)))
}

/// Elements of a random operand, never zeros: a bf16 GEMM of zeros runs faster.
fn random_operand(operands: Operands, name: &str, len: usize) -> Vec<u8> {
    match operands {
        // Sign and magnitudes from 2^-3 to 2^1: every bit pattern of these is a number.
        Operands::Fp8 => random::map_normal(0, name, len, |x| {
            let bits = x.to_bits();
            (bits & 0x80) as u8 | (0x20 + (bits >> 8 & 0x1f)) as u8
        }),
        Operands::Bf16 => {
            bytemuck::cast_slice(&random::map_normal(0, name, len, half::bf16::from_f32)).to_vec()
        }
        Operands::F16 => {
            bytemuck::cast_slice(&random::map_normal(0, name, len, half::f16::from_f32)).to_vec()
        }
        Operands::Tf32 | Operands::F32 => {
            bytemuck::cast_slice(&random::normal(0, name, len)).to_vec()
        }
    }
}
