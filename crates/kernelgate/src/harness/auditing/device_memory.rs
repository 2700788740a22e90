//! Device memory that a case uses while it is prepared and launched, whoever allocates it: the
//! memory in use then, less the memory in use before.
//!
//! Memory that stays in use after the case is freed is not charged to the case, up to
//! [`MAX_MEMORY_LEFT_BEHIND`]: code of kernels, which stays loaded after the first launch, memory
//! of a library, and growth of the context. Without this, the first case that needs such memory
//! would be charged with it, and in a run with other rows another case would be charged. Memory
//! beyond that is a pool or a cache of the row.
//!
//! Deliberately absent: memory that one launch allocates outside of the device's pool and frees
//! again, and a result if other processes may use the card.

use crate::backend::{BackendError, BenchTarget};
use kernelgate_cuda::driver::memory::persistence;
use kernelgate_cuda::driver::memory::{self, DeviceMemoryUsage};
use kernelgate_cuda::observe::telemetry::CardTelemetry;
use kernelgate_cuda::{Device, Devices};

/// Memory that a case may leave in use outside of the device's pool, bytes.
const MAX_MEMORY_LEFT_BEHIND: i64 = 256 << 20;

/// Measures the peak device memory that one implementation uses. The watch measures nothing on the
/// host, on a card that does not report other processes, or after the device failed.
#[derive(Default)]
pub struct CaseMemoryWatch(Option<WatchedDeviceMemory>);

struct WatchedDeviceMemory {
    devices: Devices,
    telemetry: CardTelemetry,
    peak: MemoryPeak,
}

impl CaseMemoryWatch {
    /// Starts to watch a case's device memory, before its implementation is prepared.
    pub fn start_watching(target: &BenchTarget) -> CaseMemoryWatch {
        let BenchTarget::Cuda(devices) = target else { return Self::default() };
        let watched = target.telemetry().filter(is_only_process).and_then(|telemetry| {
            let before = settled_memory_usage(devices.first_device()).ok()?;
            Some(WatchedDeviceMemory {
                devices: devices.clone(),
                telemetry,
                peak: MemoryPeak::from(before),
            })
        });
        Self(watched)
    }

    /// Notes how much device memory is in use now.
    pub fn observe_memory(&mut self) {
        self.update_peak(MemoryPeak::observe_memory);
    }

    /// Excludes the memory allocated since the last observation, because the harness itself uses
    /// it: for the recorder of launches, or for another row as the reference.
    pub fn exclude_own_memory(&mut self) {
        self.update_peak(MemoryPeak::exclude_own_memory);
        let forgotten =
            self.0.as_ref().map(|watched| memory::reset_peak_usage(watched.devices.first_device()));
        if let Some(Err(_)) = forgotten {
            self.0 = None;
        }
    }

    fn update_peak(&mut self, note: fn(&mut MemoryPeak, DeviceMemoryUsage)) {
        let Some(watched) = &mut self.0 else { return };
        match memory::device_memory_usage(watched.devices.first_device()) {
            Ok(now) => note(&mut watched.peak, now),
            Err(_) => self.0 = None,
        }
    }

    /// Ends the measurement after the case is freed. Returns the largest memory use of the case,
    /// bytes, or `None` if it is unknown.
    pub fn peak_bytes_of_case(&mut self) -> Option<u64> {
        let WatchedDeviceMemory { devices, telemetry, peak } = self.0.take()?;
        let after = settled_memory_usage(devices.first_device()).ok()?;
        is_only_process(&telemetry).then(|| peak.peak_bytes(after)).flatten()
    }
}

/// Whether no other process computes on the card.
fn is_only_process(telemetry: &CardTelemetry) -> bool {
    telemetry.other_computing_processes() == Some(0)
}

/// Memory in use after all work has ended, freed memory has been returned to the driver, and
/// context settings have been restored.
fn settled_memory_usage(device: &Device) -> Result<DeviceMemoryUsage, BackendError> {
    persistence::restore_l2_state(device)?;
    memory::memory_after_launches(device)?;
    memory::reset_peak_usage(device)?;
    memory::device_memory_usage(device)
}

/// Largest memory use of a case relative to the use before it, bytes.
#[derive(Debug, Clone, Copy)]
struct MemoryPeak {
    before: DeviceMemoryUsage,
    /// Largest use of the device's pool and of memory outside of it; `None` before the first
    /// observation.
    most: Option<(i64, i64)>,
    /// Device memory in use outside of the pool at the last observation, bytes.
    last: i64,
    /// Memory outside of the pool that the harness itself uses.
    aside: i64,
}

impl From<DeviceMemoryUsage> for MemoryPeak {
    fn from(before: DeviceMemoryUsage) -> Self {
        Self { before, most: None, last: 0, aside: 0 }
    }
}

impl MemoryPeak {
    fn bytes_outside_pool(&self, now: DeviceMemoryUsage) -> i64 {
        now.outside as i64 - self.before.outside as i64 - self.aside
    }

    fn observe_memory(&mut self, now: DeviceMemoryUsage) {
        self.last = self.bytes_outside_pool(now);
        let seen = (now.pool_peak as i64 - self.before.pool as i64, self.last);
        let (pool, outside) = self.most.unwrap_or(seen);
        self.most = Some((pool.max(seen.0), outside.max(seen.1)));
    }

    fn exclude_own_memory(&mut self, now: DeviceMemoryUsage) {
        self.aside += self.bytes_outside_pool(now) - self.last;
    }

    fn peak_bytes(&self, after: DeviceMemoryUsage) -> Option<u64> {
        let (pool, outside) = self.most?;
        let kept = self.bytes_outside_pool(after);
        let own = (outside - kept).max(0) + (kept - MAX_MEMORY_LEFT_BEHIND).max(0);
        Some((pool.max(0) + own) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::{
        Arguments, At, Attached, Launch, OutputReference, PreparedLaunch, ProblemDefinition,
        RowLaunches, TensorSpec, Tolerances,
    };
    use crate::backend::BackendKind;
    use crate::harness::recording::recorder::{RecordSaving, RunRecorder};
    use crate::harness::running::execution::{CaseExecution, SampleTimer};
    use crate::harness::running::progress::BenchProgress;
    use crate::harness::running::trial::BuildOutputs;
    use crate::harness::running::trial_run::TrialSession;
    use crate::harness::selection::backend_choice::BenchPlace;
    use crate::harness::selection::cases::select_cases;
    use crate::harness::selection::filter::CaseFilter;
    use crate::harness::settings::BenchSettings;
    use crate::record::{Environment, ProcessRun, Provenance, TrialSampling};
    use crate::suite::Suite;
    use crate::workload::{Dtype, Effort, Point};
    use kernelgate_cuda::testing::lock_first_gpu;

    const MIB: u64 = 1 << 20;

    fn memory_usage_mib(pool: u64, pool_peak: u64, outside: u64) -> DeviceMemoryUsage {
        DeviceMemoryUsage { pool: pool * MIB, pool_peak: pool_peak * MIB, outside: outside * MIB }
    }

    fn peak_of_usages(
        before: DeviceMemoryUsage,
        seen: &[DeviceMemoryUsage],
        after: DeviceMemoryUsage,
    ) -> Option<u64> {
        let mut peak = MemoryPeak::from(before);
        seen.iter().for_each(|now| peak.observe_memory(*now));
        peak.peak_bytes(after).map(|bytes| bytes / MIB)
    }

    #[test]
    fn a_case_is_charged_for_freed_memory_and_not_for_what_earlier_cases_left() {
        let before = memory_usage_mib(100, 100, 500);
        // Inputs and outputs take 64 MiB of the pool, packing takes 24 more, and 10 come from
        // elsewhere.
        let seen = [
            memory_usage_mib(188, 188, 500),
            memory_usage_mib(164, 188, 510),
            memory_usage_mib(164, 188, 510),
        ];
        assert_eq!(peak_of_usages(before, &seen, before), Some(98));
        // The first case also loads 40 MiB of modules and libraries, which stay.
        let first = seen.map(|now| DeviceMemoryUsage { outside: now.outside + 40 * MIB, ..now });
        assert_eq!(peak_of_usages(before, &first, memory_usage_mib(100, 100, 540)), Some(98));
        // The memory that an earlier case left in use is freed meanwhile.
        let less = seen.map(|now| DeviceMemoryUsage { outside: now.outside - 30 * MIB, ..now });
        assert_eq!(peak_of_usages(before, &less, memory_usage_mib(100, 100, 470)), Some(98));
        // Simulated case: a pool of the row's own keeps 2 GiB; one of the device's pool keeps them
        // to the byte.
        let own = seen.map(|now| DeviceMemoryUsage { outside: now.outside + 2048 * MIB, ..now });
        assert_eq!(
            peak_of_usages(before, &own, memory_usage_mib(100, 100, 2548)),
            Some(98 + 2048 - 256)
        );
        let kept =
            seen.map(|now| DeviceMemoryUsage { pool_peak: now.pool_peak + 2048 * MIB, ..now });
        assert_eq!(
            peak_of_usages(before, &kept, memory_usage_mib(2148, 2148, 500)),
            Some(98 + 2048)
        );
        assert_eq!(peak_of_usages(before, &[], before), None, "never observed");
    }

    #[test]
    fn memory_of_the_harness_is_not_charged_to_the_case() {
        let mut peak = MemoryPeak::from(memory_usage_mib(0, 0, 500));
        peak.observe_memory(memory_usage_mib(64, 64, 510));
        // The recorder takes 20 MiB and keeps 8, a row as the reference leaves 4 of modules.
        peak.exclude_own_memory(memory_usage_mib(64, 900, 522));
        peak.observe_memory(memory_usage_mib(64, 64, 522));
        assert_eq!(peak.peak_bytes(memory_usage_mib(0, 0, 512)), Some(74 * MIB));
    }

    #[test]
    fn nothing_is_measured_on_the_host() {
        let mut watch = CaseMemoryWatch::start_watching(&BenchTarget::Cpu);
        watch.observe_memory();
        watch.exclude_own_memory();
        assert_eq!(watch.peak_bytes_of_case(), None);
    }

    const SCRATCH_COPY_KERNEL: &str = r#"
extern "C" __global__ void copy(const float* x, float* y, long long n) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i];
}
"#;

    /// Number of elements, so that inputs and outputs take 32 MiB.
    const N: usize = 1 << 22;

    /// Suite of copies with different amounts of scratch memory.
    fn scratch_memory_suite() -> Suite {
        let row = |scratch: u64| {
            move |at: &At<'_>, [x, y]: [u64; 2]| {
                let kernel = at.compile(SCRATCH_COPY_KERNEL, "copy")?;
                let dims = Launch::new([(N as u32).div_ceil(256), 1, 1], [256, 1, 1]);
                let parameters = Arguments::new().address(x).address(y).value(N as i64);
                let copy = PreparedLaunch::new(at.device(), kernel, dims, parameters)?;
                let scratch = at.device().allocate(scratch as usize)?;
                Ok(RowLaunches::new(move || {
                    let _kept = &scratch;
                    copy.launch()
                }))
            }
        };
        let define = |_: &Point| {
            let inputs = vec![TensorSpec::new("x", [N], Dtype::F32)];
            let outputs = vec![TensorSpec::new("y", [N], Dtype::F32)];
            let work = ProblemDefinition::traffic_work(&inputs, &outputs);
            let (reference, tolerance) = (OutputReference::None, Tolerances::by_dtype());
            Ok(ProblemDefinition { inputs, outputs, reference, work, tolerance })
        };
        Attached::new("memory/copy", &["n=1"], define)
            .row("cuda/first", ["x", "y"], row(0))
            .row("cuda/scratch", ["x", "y"], row(512 * MIB))
            .row("cuda/last", ["x", "y"], row(0))
            .into()
    }

    #[test]
    fn scratch_memory_is_measured_for_any_declaration_and_after_any_case() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let target = BenchTarget::Cuda(device.into());
        let others = target.telemetry().and_then(|telemetry| telemetry.other_computing_processes());
        let settings = BenchSettings::default_settings();
        let place =
            BenchPlace { kind: BackendKind::Cuda, otherwise: String::new(), l2_bytes: 0, gpus: 1 };
        let suites = [scratch_memory_suite()];
        let own = suites.iter();
        let selection = select_cases(own, Effort::Default, &place, &[], &CaseFilter::All).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let run = ProcessRun::start_now("b", "s", Environment::on(&target), Provenance::default());
        let path = folder.path().join("run.json");
        let recorder =
            RunRecorder::start_recording(run, path, RecordSaving::WhenComplete, None).unwrap();
        let session = TrialSession {
            settings: &settings,
            sampling: TrialSampling::VERIFICATION_SAMPLING,
            verified: None,
            inputs: None,
            outputs: BuildOutputs::default(),
            references: None,
            recorder: recorder.clone(),
        };
        let (timer, progress) = (SampleTimer::new(&target).unwrap(), BenchProgress::new(true, 6));
        let execution = CaseExecution::new(&session, &settings, target.clone(), timer, progress);
        execution.run(&selection).unwrap();
        let run = recorder.run();
        assert!(run.failed.is_empty() && run.skipped.is_empty(), "{run:?}");
        let measured_bytes = |row: &str, cache: &str| {
            run.cases[&format!("memory/copy/n1/cuda/{row}/{cache}")]
                .samples
                .costs
                .measured_device_bytes
        };
        let rows = ["first", "scratch", "last"]
            .map(|row| (measured_bytes(row, "hot"), measured_bytes(row, "cold")));
        eprintln!("{others:?} other processes: {rows:?}");
        if others != Some(0) {
            // Unknown rather than wrong.
            assert!(rows.iter().all(|row| *row == (None, None)));
            return;
        }
        let [first, scratch, last] = rows.map(|(hot, cold)| {
            assert_eq!(hot, cold);
            hot.unwrap()
        });
        // Bytes that launch graphs and concurrent tests on the device may add to a measurement.
        let few = 48 * MIB;
        assert!((32 * MIB..32 * MIB + few).contains(&first), "{first}");
        assert!(scratch.abs_diff(first + 512 * MIB) < few, "{scratch} against {first}");
        assert!(last.abs_diff(first) < few, "{last} against {first}");
        assert!(run.cases.values().all(|case| case.samples.costs.device_bytes == Some(32 * MIB)));
    }
}
