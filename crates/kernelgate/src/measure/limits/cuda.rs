//! Measures the GPU's performance ceilings: memory traffic and matrix instructions with
//! kernelgate's kernels, matrix products with cuBLASLt otherwise, and launch overhead.

use std::time::Duration;

use super::{
    DeclaredMemoryTraffic, DeclaredWorkAndCacheState, MEMORY_CEILING_NAME, MeasuredDeviceLimits,
    MeasuredMemoryLimit,
};
use crate::backend::BackendError;
use crate::measure::CacheState;
use crate::measure::events::CudaEventTimer;
use crate::measure::power::TimingPowerMode;
use crate::workload::{FlopUnit, Work, random};
use kernelgate_cuda::instruments::matmul::{ResidentMatmulDtype, ResidentMatmulMeasurement};
use kernelgate_cuda::instruments::memory_traffic::{
    BytesOfMemoryPass, MemoryPassKernelsAndBuffers, MemoryPassVariant,
};
use kernelgate_cuda::libraries::cublaslt::{GemmInputDtype, SquareGemmByCublasLt};

/// Number of memory passes that are measured with several bursts: the fastest in a single burst,
/// for each amount of traffic.
const PASSES_MEASURED_WITH_SEVERAL_BURSTS: usize = 3;
/// A memory pass or GEMM algorithm is dropped if its trial launches take more than this multiple of
/// the fastest candidate's.
const DROPPED_CANDIDATE_TIME_RATIO: f64 = 1.25;
/// If trial launches take longer than this many nanoseconds, their time is as exact as that of a
/// burst.
const MIN_EXACT_TRIAL_LAUNCH_NS: f64 = 2e5;
/// Largest number of bursts of each memory pass that is measured with several bursts, and number of
/// bursts of each matmul in burst mode.
const BURSTS_PER_CEILING: usize = 3;
/// Two bursts of a memory pass agree if their times differ by at most this share.
const MAX_RELATIVE_DIFFERENCE_OF_BURSTS: f64 = 0.005;
/// A memory pass is clearly slower than another if it takes more than this multiple of the other's
/// time.
const SLOWER_PASS_TIME_RATIO: f64 = 1.03;
/// Pause before a burst that shall run at a higher SM clock than the GPU sustains.
const PAUSE_BEFORE_BURST: Duration = Duration::from_millis(200);
/// Offsets of the data of memory passes that nearly fill the L2 cache, bytes: on an H200 the offset
/// changes the time by 3 %.
const DATA_OFFSETS_NEAR_L2_SIZE_BYTES: [u64; 3] = [0, 17 << 20, 47 << 20];
/// Sizes n of the square n x n GEMMs that are timed: large enough to keep every multiprocessor busy
/// to the end.
const SQUARE_GEMM_SIZES: [u64; 2] = [4096, 8192];
/// How often the same random data is repeated in a GEMM operand. Only a part of the operand is
/// generated and then repeated, because generation on the host would take longer than the
/// measurement; repetition does not change the SM clock.
const RANDOM_DATA_REPEATS_PER_OPERAND: usize = 16;

impl MeasuredDeviceLimits {
    /// Adds to the `known` limits those performance ceilings of the GPU that bound any of these
    /// works and are missing, and the launch overhead.
    ///
    /// # Errors
    /// Fails if the device reports an error. The matmul ceiling of a dtype is skipped if neither
    /// kernelgate's kernel nor cuBLASLt is available.
    pub fn measure_missing_gpu_limits(
        events: &mut CudaEventTimer,
        works: &[DeclaredWorkAndCacheState],
        known: Self,
    ) -> Result<MeasuredDeviceLimits, BackendError> {
        let mut limits = known;
        limits.add_missing_ceilings_of_works(events, works, TimingPowerMode::SteadyLoad)?;
        limits.overhead = Some(events.launch_overhead());
        Ok(limits)
    }

    /// Measures, in a given power state, the performance ceilings of the GPU that bound these
    /// works, without the launch overhead.
    pub fn measure_gpu_limits_in_power_mode(
        events: &mut CudaEventTimer,
        works: &[DeclaredWorkAndCacheState],
        power: TimingPowerMode,
    ) -> Result<Self, BackendError> {
        let mut limits = Self::default();
        limits.add_missing_ceilings_of_works(events, works, power)?;
        Ok(limits)
    }

    fn add_missing_ceilings_of_works(
        &mut self,
        events: &mut CudaEventTimer,
        works: &[DeclaredWorkAndCacheState],
        power: TimingPowerMode,
    ) -> Result<(), BackendError> {
        let is_known =
            |traffic: &DeclaredMemoryTraffic| self.memory.iter().any(|it| it.traffic == *traffic);
        let mut traffic: Vec<DeclaredMemoryTraffic> =
            DeclaredMemoryTraffic::distinct_traffics_of_works(works).into_iter().collect();
        traffic.retain(|traffic| !is_known(traffic));
        self.add_memory_ceilings(events, &traffic, power)?;
        self.memory.sort_by_key(|limit| limit.traffic);
        self.add_link_ceilings(events, works)?;
        let multiplied = |operands: &GemmInputDtype| {
            works.iter().any(|of| work_multiplies_dtypes(*operands, &of.work))
        };
        for operands in GemmInputDtype::DTYPES_FASTEST_FIRST.into_iter().filter(multiplied) {
            self.add_matmul_ceiling_if_missing(events, operands, power)?;
        }
        Ok(())
    }

    /// Measures the performance ceilings of the GPU that bound these works, and the matmul ceilings
    /// of every operand dtype.
    pub fn measure_gpu_limits_with_all_matmuls(
        events: &mut CudaEventTimer,
        works: &[DeclaredWorkAndCacheState],
    ) -> Result<Self, BackendError> {
        let mut limits = Self::measure_missing_gpu_limits(events, works, Self::default())?;
        for operands in GemmInputDtype::DTYPES_FASTEST_FIRST {
            limits.add_matmul_ceiling_if_missing(events, operands, TimingPowerMode::SteadyLoad)?;
        }
        Ok(limits)
    }

    fn add_memory_ceilings(
        &mut self,
        events: &mut CudaEventTimer,
        traffic: &[DeclaredMemoryTraffic],
        power: TimingPowerMode,
    ) -> Result<(), BackendError> {
        let most = |bytes: fn(&DeclaredMemoryTraffic) -> u64| traffic.iter().map(bytes).max();
        let (Some(read_bytes), Some(write_bytes)) =
            (most(|of| of.read_bytes), most(|of| of.write_bytes))
        else {
            return Ok(());
        };
        let pattern = random::normal_values(0, "bandwidth", 1 << 20);
        let pattern = bytemuck::cast_slice(&pattern);
        let room = DATA_OFFSETS_NEAR_L2_SIZE_BYTES[DATA_OFFSETS_NEAR_L2_SIZE_BYTES.len() - 1];
        let room = (read_bytes + room, write_bytes + room);
        let passes = MemoryPassKernelsAndBuffers::compile_memory_passes_and_allocate(
            events.first_gpu(),
            room,
            pattern,
        )?;
        for &traffic in traffic {
            self.memory.push(measure_gpu_memory_limit(events, &passes, traffic, power)?);
        }
        self.add_sm_clock_of_ceiling(MEMORY_CEILING_NAME, events.last_ceiling_sm_clock_mhz());
        Ok(())
    }

    fn add_matmul_ceiling_if_missing(
        &mut self,
        events: &mut CudaEventTimer,
        operands: GemmInputDtype,
        power: TimingPowerMode,
    ) -> Result<(), BackendError> {
        let key =
            format!("{} {}", FlopUnit::Matmul.hardware_unit_name(), operands.name_in_records());
        if self.flops_per_s.contains_key(&key) {
            return Ok(());
        }
        if let Some(rate) = measure_gpu_matmul_rate(events, operands, power)? {
            self.add_sm_clock_of_ceiling(&key, rate.sm_clock_mhz);
            self.flops_per_s.insert(key, rate.matmul_flops_per_s);
        }
        Ok(())
    }

    fn add_sm_clock_of_ceiling(&mut self, by: &str, clock_mhz: Option<f64>) {
        self.sm_clock_mhz_by_ceiling.extend(clock_mhz.map(|clock_mhz| (by.to_owned(), clock_mhz)));
    }
}

/// Returns whether a work contains matrix products with these operand dtypes.
fn work_multiplies_dtypes(operands: GemmInputDtype, work: &Work) -> bool {
    work.flops.iter().any(|flops| {
        flops.unit == FlopUnit::Matmul && flops.dtype.dtype_name() == operands.name_in_records()
    })
}

/// Times one burst of each candidate, or only its trial launches if they are long; returns the
/// candidates with their times in nanoseconds, the fastest first. A candidate is dropped if its
/// trial launches take more than [`DROPPED_CANDIDATE_TIME_RATIO`] times as long as the fastest
/// earlier candidate's.
fn time_candidates_fastest_first<T: Copy>(
    events: &mut CudaEventTimer,
    cache: CacheState,
    candidates: impl IntoIterator<Item = T>,
    launch: impl Fn(T) -> Result<(), BackendError>,
) -> Result<Vec<(f64, T)>, BackendError> {
    let (mut timed, mut first_ns) = (Vec::new(), f64::INFINITY);
    for candidate in candidates {
        let mut launch = || launch(candidate);
        let within = events.prepare_ceiling_launches_if_short(
            cache,
            (first_ns, DROPPED_CANDIDATE_TIME_RATIO),
            &mut launch,
        )?;
        if let Some((candidate_ns, mut ceiling)) = within {
            first_ns = first_ns.min(candidate_ns);
            let is_long = candidate_ns > MIN_EXACT_TRIAL_LAUNCH_NS;
            timed.push((
                if is_long {
                    candidate_ns
                } else {
                    ceiling.median_launch_time_of_brief_burst_ns()?
                },
                candidate,
            ));
        }
    }
    timed.sort_by(|one, other| one.0.total_cmp(&other.0));
    Ok(timed)
}

/// Repeats a burst until two successive bursts agree, at most [`BURSTS_PER_CEILING`] times, and
/// returns the fastest time, nanoseconds. The burst of a memory pass that is clearly slower than
/// another, which takes `fastest_ns`, is not repeated.
fn fastest_of_repeated_bursts_ns(
    fastest_ns: f64,
    mut burst: impl FnMut() -> Result<f64, BackendError>,
) -> Result<f64, BackendError> {
    let (mut least_ns, mut last_ns) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..BURSTS_PER_CEILING {
        let burst_ns = burst()?;
        least_ns = least_ns.min(burst_ns);
        let agree = (burst_ns - last_ns).abs() <= MAX_RELATIVE_DIFFERENCE_OF_BURSTS * burst_ns;
        if agree || least_ns > SLOWER_PASS_TIME_RATIO * fastest_ns {
            break;
        }
        last_ns = burst_ns;
    }
    Ok(least_ns)
}

/// Measures the fastest of these memory passes, fastest first, after a load by it, and then one
/// burst of each other pass, for which the GPU stays at its power cap. Returns the fastest pass
/// with its time in nanoseconds.
fn measure_passes_at_power_cap<T: Copy>(
    events: &mut CudaEventTimer,
    cache: CacheState,
    passes: &[(f64, T)],
    launch: impl Fn(T) -> Result<(), BackendError>,
) -> Result<(f64, T), BackendError> {
    let mut timed = Vec::new();
    for &(_, pass) in passes.iter().take(PASSES_MEASURED_WITH_SEVERAL_BURSTS) {
        let mut launch = || launch(pass);
        let mut ceiling = events.prepare_ceiling_launches(cache, &mut launch)?;
        let pass_ns = match timed.is_empty() {
            true => ceiling.settled_median_launch_time_ns()?,
            false => ceiling.median_launch_time_of_burst_ns()?,
        };
        timed.push((pass_ns, pass));
    }
    timed.sort_by(|one, other| one.0.total_cmp(&other.0));
    Ok(timed[0])
}

/// Times one burst of each memory pass, then several bursts of the fastest passes, and returns the
/// fastest pass with its time.
fn measure_gpu_memory_limit(
    events: &mut CudaEventTimer,
    passes: &MemoryPassKernelsAndBuffers,
    traffic: DeclaredMemoryTraffic,
    power: TimingPowerMode,
) -> Result<MeasuredMemoryLimit, BackendError> {
    let DeclaredMemoryTraffic { read_bytes, write_bytes, cache } = traffic;
    let launch = |(pass, offset): (MemoryPassVariant, u64)| {
        passes.enqueue_memory_pass(
            pass,
            BytesOfMemoryPass { read_bytes, write_bytes, offset_bytes: offset },
        )
    };
    let all = MemoryPassVariant::ALL_TRIED_PASSES.map(|pass| (pass, 0));
    let tried = time_candidates_fastest_first(events, cache, all, launch)?;
    let l2_bytes = events.first_gpu().gpu_properties().l2_cache_bytes;
    let near_l2 = (l2_bytes / 4..2 * l2_bytes).contains(&traffic.bytes_read_and_written());
    let places = if cache == CacheState::HotCaches && near_l2 {
        &DATA_OFFSETS_NEAR_L2_SIZE_BYTES[..]
    } else {
        &DATA_OFFSETS_NEAR_L2_SIZE_BYTES[..1]
    };
    let (mut timed, mut fastest_ns) = (Vec::new(), f64::INFINITY);
    for &(_, (pass, _)) in tried.iter().take(PASSES_MEASURED_WITH_SEVERAL_BURSTS) {
        for &place in places {
            let mut launch = || launch((pass, place));
            let mut ceiling = events.prepare_ceiling_launches(cache, &mut launch)?;
            let burst = || ceiling.median_launch_time_of_burst_ns();
            let pass_ns = fastest_of_repeated_bursts_ns(fastest_ns, burst)?;
            fastest_ns = fastest_ns.min(pass_ns);
            timed.push((pass_ns, (pass, place)));
        }
    }
    timed.sort_by(|one, other| one.0.total_cmp(&other.0));
    // One reading of the power cap suffices, because all passes of a traffic run back to back.
    let at_cap =
        power == TimingPowerMode::SteadyLoad && events.may_power_cap_lower_clock_of_last_ceiling();
    let (time_ns, (pass, _)) = match at_cap {
        true => measure_passes_at_power_cap(events, cache, &timed, launch)?,
        false => timed[0],
    };
    Ok(MeasuredMemoryLimit { traffic, fastest_pass_ns: time_ns, fastest_pass: pass.to_string() })
}

/// Uses a kernel of matrix instructions on operands in shared memory if the GPU's architecture has
/// one, otherwise the fastest GEMM algorithm of cuBLASLt. Measures the matmul operations a second
/// of a dtype on the GPU; returns `None` if neither kernelgate's kernel nor cuBLASLt is available.
fn measure_gpu_matmul_rate(
    events: &mut CudaEventTimer,
    operands: GemmInputDtype,
    power: TimingPowerMode,
) -> Result<Option<MatmulRateAndClock>, BackendError> {
    let resident = match operands {
        GemmInputDtype::Fp8 => Some(ResidentMatmulDtype::E4m3),
        GemmInputDtype::Bf16 => Some(ResidentMatmulDtype::Bf16),
        GemmInputDtype::F16 => Some(ResidentMatmulDtype::F16),
        GemmInputDtype::Tf32 => Some(ResidentMatmulDtype::Tf32),
        GemmInputDtype::F32 => None,
    };
    if let Some(operand) = resident {
        let elements =
            ResidentMatmulMeasurement::OPERAND_BYTES_PER_BLOCK / operands.bytes_of_input_element();
        let bytes = random_gemm_operand(operands, "resident", elements);
        match ResidentMatmulMeasurement::compile_and_upload_operands(
            events.first_gpu(),
            operand,
            &bytes,
        ) {
            Ok(matmul) => {
                let mut launch = || matmul.enqueue_matmul_launch();
                return MatmulRateAndClock::matmul_rate_from_timed_launches(
                    events,
                    matmul.operations_per_launch(),
                    power,
                    &mut launch,
                )
                .map(Some);
            }
            Err(BackendError::Unsupported(_)) => {}
            Err(error) => return Err(error),
        }
    }
    let mut fastest: Option<(f64, CublasltGemmWithAlgorithm)> = None;
    for size in SQUARE_GEMM_SIZES {
        let found =
            CublasltGemmWithAlgorithm::find_fastest_cublaslt_algorithm(events, operands, size)?;
        let rate = |(launch_ns, gemm): &(f64, CublasltGemmWithAlgorithm)| {
            gemm.flops_of_product() / launch_ns
        };
        fastest = fastest.into_iter().chain(found).max_by(|a, b| rate(a).total_cmp(&rate(b)));
    }
    let Some((_, gemm)) = fastest else { return Ok(None) };
    MatmulRateAndClock::matmul_rate_from_timed_launches(
        events,
        gemm.flops_of_product(),
        power,
        &mut || gemm.launch_product(),
    )
    .map(Some)
}

/// Matmul operations a second, with the SM clock in MHz during the measurement.
struct MatmulRateAndClock {
    matmul_flops_per_s: f64,
    sm_clock_mhz: Option<f64>,
}

impl MatmulRateAndClock {
    /// Measures the rate of a launch of `flops` operations: in steady mode its fastest window, in
    /// burst mode its fastest burst after a pause.
    fn matmul_rate_from_timed_launches(
        events: &mut CudaEventTimer,
        flops: f64,
        power: TimingPowerMode,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        let mut ceiling = events.prepare_ceiling_launches(CacheState::HotCaches, launch)?;
        let launch_ns = match power {
            TimingPowerMode::SteadyLoad => ceiling.fastest_window_mean_launch_time_ns()?,
            TimingPowerMode::BurstsAfterPauses => {
                let mut fastest_ns = f64::INFINITY;
                for _ in 0..BURSTS_PER_CEILING {
                    std::thread::sleep(PAUSE_BEFORE_BURST);
                    fastest_ns = fastest_ns.min(ceiling.median_launch_time_of_burst_ns()?);
                }
                fastest_ns
            }
        };
        drop(ceiling);
        let clock_mhz = events.last_ceiling_sm_clock_mhz();
        events.first_gpu().synchronize()?;
        Ok(Self { matmul_flops_per_s: flops / launch_ns * 1e9, sm_clock_mhz: clock_mhz })
    }
}

/// A product of square matrices by one of the algorithms that cuBLASLt proposes.
struct CublasltGemmWithAlgorithm {
    gemm: SquareGemmByCublasLt,
    matrix_size: u64,
    algorithm_index: usize,
}

impl CublasltGemmWithAlgorithm {
    /// Returns the cuBLASLt algorithm that is fastest in one burst for matrices of this size, with
    /// its time in nanoseconds.
    fn find_fastest_cublaslt_algorithm(
        events: &mut CudaEventTimer,
        operands: GemmInputDtype,
        size: u64,
    ) -> Result<Option<(f64, CublasltGemmWithAlgorithm)>, BackendError> {
        let elements = (size * size) as usize;
        let operand =
            |name| random_gemm_operand(operands, name, elements / RANDOM_DATA_REPEATS_PER_OPERAND);
        let (a, b) = (operand("a"), operand("b"));
        let Some(gemm) = SquareGemmByCublasLt::prepare_gemm_if_supported(
            events.first_gpu(),
            operands,
            size,
            [&a, &b],
        )?
        else {
            return Ok(None);
        };
        // An algorithm that cuBLASLt proposes but then refuses to launch is skipped.
        let accepted = (0..gemm.proposed_algorithm_count())
            .filter(|&algorithm| gemm.enqueue_gemm_with_algorithm(algorithm).is_ok());
        let launch = |algorithm| gemm.enqueue_gemm_with_algorithm(algorithm);
        let fastest =
            time_candidates_fastest_first(events, CacheState::HotCaches, accepted, launch)?
                .first()
                .copied();
        Ok(fastest.map(|(launch_ns, algorithm)| {
            (launch_ns, Self { gemm, matrix_size: size, algorithm_index: algorithm })
        }))
    }

    fn flops_of_product(&self) -> f64 {
        2.0 * (self.matrix_size as f64).powi(3)
    }

    fn launch_product(&self) -> Result<(), BackendError> {
        self.gemm.enqueue_gemm_with_algorithm(self.algorithm_index)
    }
}

/// Returns the bytes of a random GEMM operand without zeros, because a bf16 GEMM of zeros runs
/// faster.
fn random_gemm_operand(operands: GemmInputDtype, name: &str, len: usize) -> Vec<u8> {
    match operands {
        // Random e4m3 numbers of either sign with magnitudes from 2^-3 to 2^1; no bit pattern in
        // this range is NaN.
        GemmInputDtype::Fp8 => random::map_standard_normal_values(0, name, len, |x| {
            let bits = x.to_bits();
            (bits & 0x80) as u8 | (0x20 + (bits >> 8 & 0x1f)) as u8
        }),
        GemmInputDtype::Bf16 => bytemuck::cast_slice(&random::map_standard_normal_values(
            0,
            name,
            len,
            half::bf16::from_f32,
        ))
        .to_vec(),
        GemmInputDtype::F16 => bytemuck::cast_slice(&random::map_standard_normal_values(
            0,
            name,
            len,
            half::f16::from_f32,
        ))
        .to_vec(),
        GemmInputDtype::Tf32 | GemmInputDtype::F32 => {
            bytemuck::cast_slice(&random::normal_values(0, name, len)).to_vec()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a memory pass with these burst times; returns the number of bursts that were run,
    /// and the fastest time in nanoseconds.
    fn repeated_bursts(fastest_ns: f64, bursts_ns: [f64; BURSTS_PER_CEILING]) -> (usize, f64) {
        let mut done = 0;
        let least_ns = fastest_of_repeated_bursts_ns(fastest_ns, || {
            done += 1;
            Ok(bursts_ns[done - 1])
        });
        (done, least_ns.unwrap())
    }

    #[test]
    fn bursts_of_a_pass_are_repeated_until_two_agree() {
        let first = f64::INFINITY;
        assert_eq!(repeated_bursts(first, [100.0, 99.6, 90.0]), (2, 99.6));
        assert_eq!(repeated_bursts(first, [100.0, 99.0, 98.0]), (3, 98.0));
        assert_eq!(repeated_bursts(first, [100.0, 103.0, 101.0]), (3, 100.0));
        // A pass that another one beats by less than 3 % may still turn out to be the fastest.
        assert_eq!(repeated_bursts(98.0, [100.0, 97.0, 96.9]), (3, 96.9));
    }

    #[test]
    fn a_clearly_slower_pass_has_one_burst() {
        assert_eq!(repeated_bursts(96.0, [100.0, 90.0, 90.0]), (1, 100.0));
        assert_eq!(repeated_bursts(90.0, [100.0, 80.0, 80.0]), (1, 100.0));
    }

    #[test]
    fn a_failed_burst_ends_a_ceiling() {
        let failed =
            fastest_of_repeated_bursts_ns(1.0, || Err(BackendError::DeviceLost("gone".to_owned())));
        assert!(matches!(failed, Err(BackendError::DeviceLost(_))));
    }
}
