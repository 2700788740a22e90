//! The GPU's ceilings: memory traffic and matrix instructions by our own kernels, GEMMs by cuBLASLt
//! if there is no such kernel, and the cost of launching.

use std::time::Duration;

use super::{CaseWork, DeviceLimits, MEMORY_BOUND, MemoryLimit, MemoryTraffic};
use crate::backend::BackendError;
use crate::measure::CacheState;
use crate::measure::events::EventTimer;
use crate::measure::power::PowerMode;
use crate::workload::{FlopUnit, Work, random};
use kernelgate_cuda::instruments::matmul::{ResidentDtype, ResidentMatmul};
use kernelgate_cuda::instruments::memory_traffic::{MemoryPass, TrafficBytes, TrafficPasses};
use kernelgate_cuda::libraries::cublaslt::{OperandDtypes, SquareGemm};

/// Passes of each traffic that are measured at length, the fastest in one burst first.
const LONG_BURST_PASSES: usize = 3;
/// A pass or algorithm is dropped if its first launches take this many times as long as those of
/// another candidate.
const CLEARLY_SLOWER_RATIO: f64 = 1.25;
/// First launches that take longer are as exact as a burst, nanoseconds.
const MIN_EXACT_LAUNCH_NS: f64 = 1e6;
/// Number of bursts of each memory pass that is measured at length.
const BURSTS_PER_PASS: usize = 3;
/// Pause before a burst that shall run above the sustained clock.
const BURST_PAUSE: Duration = Duration::from_millis(200);
/// Offsets of the data of passes that nearly fill L2, bytes: on an H200 their times differ by 3 %.
const L2_PASS_DATA_OFFSETS: [u64; 3] = [0, 17 << 20, 47 << 20];
/// Sides of the square GEMMs: large enough that every multiprocessor is busy to the end.
const MATMUL_SIZES: [u64; 2] = [4096, 8192];
/// Number of times that the random data repeat in an operand. Only a part of the operand is drawn
/// and then repeated: drawing all of it takes the host longer than the measurement, and the bits of
/// neighbours, which affect the clock, are equally random.
const MATMUL_REPEATS: usize = 16;

impl DeviceLimits {
    /// Measures the GPU ceilings that limit any of these works and are not known yet. Takes about
    /// 80 ms for each distinct traffic and half a second for each dtype that is multiplied.
    ///
    /// # Errors
    /// Fails if the device reports an error. A compute unit whose library is missing is skipped.
    pub fn measure_gpu(
        events: &mut EventTimer,
        works: &[CaseWork],
        known: Self,
    ) -> Result<DeviceLimits, BackendError> {
        let mut limits = known;
        limits.add_missing(events, works, PowerMode::Steady)?;
        limits.overhead = Some(events.overhead());
        Ok(limits)
    }

    /// Measures the needed ceilings in a power state, without the cost of launching.
    pub fn measure_cuda_in(
        events: &mut EventTimer,
        works: &[CaseWork],
        power: PowerMode,
    ) -> Result<Self, BackendError> {
        let mut limits = Self::default();
        limits.add_missing(events, works, power)?;
        Ok(limits)
    }

    fn add_missing(
        &mut self,
        events: &mut EventTimer,
        works: &[CaseWork],
        power: PowerMode,
    ) -> Result<(), BackendError> {
        let is_known =
            |traffic: &MemoryTraffic| self.memory.iter().any(|it| it.traffic == *traffic);
        let mut traffic: Vec<MemoryTraffic> =
            MemoryTraffic::distinct_of_works(works).into_iter().collect();
        traffic.retain(|traffic| !is_known(traffic));
        self.add_memory(events, &traffic, power)?;
        self.memory.sort_by_key(|limit| limit.traffic);
        self.add_links(events, works)?;
        let multiplied = |operands: &OperandDtypes| {
            works.iter().any(|of| work_has_operands(*operands, &of.work))
        };
        for operands in OperandDtypes::FASTEST_FIRST.into_iter().filter(multiplied) {
            self.add_matmul(events, operands, power)?;
        }
        Ok(())
    }

    /// Measures the ceilings of these works, and the matmul ceilings of every dtype.
    pub fn measure_cuda_all(
        events: &mut EventTimer,
        works: &[CaseWork],
    ) -> Result<Self, BackendError> {
        let mut limits = Self::measure_gpu(events, works, Self::default())?;
        for operands in OperandDtypes::FASTEST_FIRST {
            limits.add_matmul(events, operands, PowerMode::Steady)?;
        }
        Ok(limits)
    }

    fn add_memory(
        &mut self,
        events: &mut EventTimer,
        traffic: &[MemoryTraffic],
        power: PowerMode,
    ) -> Result<(), BackendError> {
        let most = |bytes: fn(&MemoryTraffic) -> u64| traffic.iter().map(bytes).max();
        let (Some(read_bytes), Some(write_bytes)) =
            (most(|of| of.read_bytes), most(|of| of.write_bytes))
        else {
            return Ok(());
        };
        let pattern = random::normal_values(0, "bandwidth", 1 << 20);
        let pattern = bytemuck::cast_slice(&pattern);
        let room = L2_PASS_DATA_OFFSETS[L2_PASS_DATA_OFFSETS.len() - 1];
        let room = (read_bytes + room, write_bytes + room);
        let passes = TrafficPasses::new(events.device(), room, pattern)?;
        for &traffic in traffic {
            self.memory.push(gpu_memory_limit(events, &passes, traffic, power)?);
        }
        self.note_clock(MEMORY_BOUND, events.typical_clock_mhz());
        Ok(())
    }

    fn add_matmul(
        &mut self,
        events: &mut EventTimer,
        operands: OperandDtypes,
        power: PowerMode,
    ) -> Result<(), BackendError> {
        let key = format!("{} {}", FlopUnit::Matmul.name(), operands.name());
        if self.flops_per_s.contains_key(&key) {
            return Ok(());
        }
        if let Some(rate) = measure_matmul(events, operands, power)? {
            self.note_clock(&key, rate.clock_mhz);
            self.flops_per_s.insert(key, rate.per_s);
        }
        Ok(())
    }

    fn note_clock(&mut self, by: &str, clock_mhz: Option<f64>) {
        self.clock_mhz.extend(clock_mhz.map(|clock_mhz| (by.to_owned(), clock_mhz)));
    }
}

/// Returns whether a work has GEMMs with these operand dtypes.
fn work_has_operands(operands: OperandDtypes, work: &Work) -> bool {
    work.flops
        .iter()
        .any(|flops| flops.unit == FlopUnit::Matmul && flops.dtype.name() == operands.name())
}

/// Times one burst of each candidate, or only its first launches if they are long; returns the
/// candidates with their times, the fastest first. Candidates whose first launches take
/// [`CLEARLY_SLOWER_RATIO`] times as long as another's are dropped.
fn sort_by_burst<T: Copy>(
    events: &mut EventTimer,
    cache: CacheState,
    candidates: impl IntoIterator<Item = T>,
    launch: impl Fn(T) -> Result<(), BackendError>,
) -> Result<Vec<(f64, T)>, BackendError> {
    let (mut timed, mut first_ns) = (Vec::new(), f64::INFINITY);
    for candidate in candidates {
        let mut launch = || launch(candidate);
        let within = events.ceiling_within(cache, CLEARLY_SLOWER_RATIO * first_ns, &mut launch)?;
        if let Some((candidate_ns, mut ceiling)) = within {
            first_ns = first_ns.min(candidate_ns);
            let is_long = candidate_ns > MIN_EXACT_LAUNCH_NS;
            timed.push((if is_long { candidate_ns } else { ceiling.burst_ns()? }, candidate));
        }
    }
    timed.sort_by(|one, other| one.0.total_cmp(&other.0));
    Ok(timed)
}

/// Times one burst of each memory pass, then several bursts of the fastest ones, and returns the
/// fastest pass.
fn gpu_memory_limit(
    events: &mut EventTimer,
    passes: &TrafficPasses,
    traffic: MemoryTraffic,
    power: PowerMode,
) -> Result<MemoryLimit, BackendError> {
    let MemoryTraffic { read_bytes, write_bytes, cache } = traffic;
    let moved = |offset| TrafficBytes { read_bytes, write_bytes, offset };
    let tried =
        sort_by_burst(events, cache, MemoryPass::ALL, |pass| passes.launch_pass(pass, moved(0)))?;
    let l2_bytes = events.device().facts().l2_bytes;
    let near_l2 = (l2_bytes / 4..2 * l2_bytes).contains(&traffic.total_bytes());
    let places = if cache == CacheState::Hot && near_l2 {
        &L2_PASS_DATA_OFFSETS[..]
    } else {
        &L2_PASS_DATA_OFFSETS[..1]
    };
    let (mut time_ns, mut fastest) = (f64::INFINITY, tried[0].1);
    for &(_, pass) in tried.iter().take(LONG_BURST_PASSES) {
        for &place in places {
            let mut launch = || passes.launch_pass(pass, moved(place));
            let mut ceiling = events.ceiling_launches(cache, &mut launch)?;
            let mut pass_ns = f64::INFINITY;
            for _ in 0..BURSTS_PER_PASS {
                pass_ns = pass_ns.min(ceiling.burst_ns()?);
            }
            if power == PowerMode::Steady && ceiling.may_be_capped() {
                pass_ns = ceiling.settled_ns()?;
            }
            if pass_ns < time_ns {
                (time_ns, fastest) = (pass_ns, pass);
            }
        }
    }
    Ok(MemoryLimit { traffic, time_ns, pass: fastest.to_string() })
}

/// Operations a second and the SM clock in MHz: of instructions whose operands stay in shared
/// memory if this architecture has them, else of the fastest GEMM of cuBLASLt. Measures the matmul
/// rate of a dtype; returns `None` if neither cuBLASLt nor our own kernel is available.
fn measure_matmul(
    events: &mut EventTimer,
    operands: OperandDtypes,
    power: PowerMode,
) -> Result<Option<MatmulRate>, BackendError> {
    let resident = match operands {
        OperandDtypes::Fp8 => Some(ResidentDtype::E4m3),
        OperandDtypes::Bf16 => Some(ResidentDtype::Bf16),
        OperandDtypes::F16 => Some(ResidentDtype::F16),
        OperandDtypes::Tf32 => Some(ResidentDtype::Tf32),
        OperandDtypes::F32 => None,
    };
    if let Some(operand) = resident {
        let elements = ResidentMatmul::OPERAND_BYTES / operands.element_bytes();
        let bytes = random_operand(operands, "resident", elements);
        match ResidentMatmul::new(events.device(), operand, &bytes) {
            Ok(matmul) => {
                let mut launch = || matmul.launch();
                return MatmulRate::measure_matmul_rate(events, matmul.flops(), power, &mut launch)
                    .map(Some);
            }
            Err(BackendError::Unsupported(_)) => {}
            Err(error) => return Err(error),
        }
    }
    let mut fastest: Option<(f64, LibraryGemm)> = None;
    for size in MATMUL_SIZES {
        let found = LibraryGemm::fastest_algorithm(events, operands, size)?;
        let rate = |(launch_ns, gemm): &(f64, LibraryGemm)| gemm.flops() / launch_ns;
        fastest = fastest.into_iter().chain(found).max_by(|a, b| rate(a).total_cmp(&rate(b)));
    }
    let Some((_, gemm)) = fastest else { return Ok(None) };
    MatmulRate::measure_matmul_rate(events, gemm.flops(), power, &mut || gemm.launch()).map(Some)
}

/// A matmul rate in operations a second, with the SM clock during it.
struct MatmulRate {
    per_s: f64,
    clock_mhz: Option<f64>,
}

impl MatmulRate {
    /// Rate of launches of `operations` operations: of the fastest window in the steady power
    /// state, or of the fastest burst behind a pause.
    fn measure_matmul_rate(
        events: &mut EventTimer,
        flops: f64,
        power: PowerMode,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        let mut ceiling = events.ceiling_launches(CacheState::Hot, launch)?;
        let launch_ns = match power {
            PowerMode::Steady => ceiling.fastest_window_ns()?,
            PowerMode::Burst => {
                let mut fastest_ns = f64::INFINITY;
                for _ in 0..BURSTS_PER_PASS {
                    std::thread::sleep(BURST_PAUSE);
                    fastest_ns = fastest_ns.min(ceiling.burst_ns()?);
                }
                fastest_ns
            }
        };
        drop(ceiling);
        let clock_mhz = events.typical_clock_mhz();
        events.device().synchronize()?;
        Ok(Self { per_s: flops / launch_ns * 1e9, clock_mhz })
    }
}

/// A product of square matrices by one of the algorithms that cuBLASLt proposes.
struct LibraryGemm {
    gemm: SquareGemm,
    size: u64,
    algorithm: usize,
}

impl LibraryGemm {
    /// The fastest algorithm in one burst, with its time in nanoseconds.
    fn fastest_algorithm(
        events: &mut EventTimer,
        operands: OperandDtypes,
        size: u64,
    ) -> Result<Option<(f64, LibraryGemm)>, BackendError> {
        let elements = (size * size) as usize;
        let operand =
            |name| random_operand(operands, name, elements / MATMUL_REPEATS).repeat(MATMUL_REPEATS);
        let (a, b) = (operand("a"), operand("b"));
        let Some(gemm) = SquareGemm::new(events.device(), operands, size, [&a, &b])? else {
            return Ok(None);
        };
        // An algorithm that the library proposes and then rejects does not count.
        let accepted =
            (0..gemm.algorithm_count()).filter(|&algorithm| gemm.launch(algorithm).is_ok());
        let launch = |algorithm| gemm.launch(algorithm);
        let fastest = sort_by_burst(events, CacheState::Hot, accepted, launch)?.first().copied();
        Ok(fastest.map(|(launch_ns, algorithm)| (launch_ns, Self { gemm, size, algorithm })))
    }

    fn flops(&self) -> f64 {
        2.0 * (self.size as f64).powi(3)
    }

    fn launch(&self) -> Result<(), BackendError> {
        self.gemm.launch(self.algorithm)
    }
}

/// Elements of a random operand, never zeros: a bf16 GEMM of zeros runs faster.
fn random_operand(operands: OperandDtypes, name: &str, len: usize) -> Vec<u8> {
    match operands {
        // Random e4m3 codes of numbers with either sign and magnitudes from 2^-3 to 2^1: each of
        // these bit patterns is a number.
        OperandDtypes::Fp8 => random::map_normal_values(0, name, len, |x| {
            let bits = x.to_bits();
            (bits & 0x80) as u8 | (0x20 + (bits >> 8 & 0x1f)) as u8
        }),
        OperandDtypes::Bf16 => {
            bytemuck::cast_slice(&random::map_normal_values(0, name, len, half::bf16::from_f32))
                .to_vec()
        }
        OperandDtypes::F16 => {
            bytemuck::cast_slice(&random::map_normal_values(0, name, len, half::f16::from_f32))
                .to_vec()
        }
        OperandDtypes::Tf32 | OperandDtypes::F32 => {
            bytemuck::cast_slice(&random::normal_values(0, name, len)).to_vec()
        }
    }
}
