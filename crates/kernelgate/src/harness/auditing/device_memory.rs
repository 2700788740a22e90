//! Measures the device memory that a case uses during preparation and launches, whoever allocates
//! it: memory in use then minus memory in use before.
//!
//! Up to [`MAX_UNCHARGED_BYTES_LEFT_IN_USE`], memory that remains in use after the case is not
//! counted: loaded kernel code, memory of libraries, and growth of the context. Without this
//! allowance, the first case that needs such memory would be charged for it, and the selected rows
//! decide which case is first. Memory beyond this limit counts for the case, because a pool or
//! cache of the implementation holds it.
//!
//! Memory that a launch allocates outside the device's pool and frees again is not measured; no
//! result is returned if other processes may use the GPU.

use crate::backend::{BackendError, BenchDevices};
use kernelgate_cuda::driver::memory::persistence;
use kernelgate_cuda::driver::memory::{self, DeviceMemoryInUse};
use kernelgate_cuda::observe::telemetry::CardTelemetryByNvml;
use kernelgate_cuda::{Device, Devices};

/// Maximum memory in bytes outside the device's pool that a case may leave in use without being
/// charged.
const MAX_UNCHARGED_BYTES_LEFT_IN_USE: i64 = 256 << 20;

/// Measures the peak device memory that one prepared implementation uses. The watch measures
/// nothing on the host, on a GPU that does not report other processes, or after the GPU failed.
#[derive(Default)]
pub struct PeakDeviceMemoryWatch(Option<DeviceAndMemoryPeak>);

struct DeviceAndMemoryPeak {
    devices: Devices,
    telemetry: CardTelemetryByNvml,
    peak: PeakMemoryAboveInitialUsage,
}

impl PeakDeviceMemoryWatch {
    /// Starts to measure a case's device memory, before its implementation is prepared.
    pub fn start_watching(target: &BenchDevices) -> PeakDeviceMemoryWatch {
        let BenchDevices::Cuda(devices) = target else { return Self::default() };
        let watched = target.open_card_telemetry().filter(is_only_process).and_then(|telemetry| {
            let before = memory_usage_after_settling(devices.first_device()).ok()?;
            Some(DeviceAndMemoryPeak {
                devices: devices.clone(),
                telemetry,
                peak: PeakMemoryAboveInitialUsage::from(before),
            })
        });
        Self(watched)
    }

    /// Updates the peak with the device memory that is in use now.
    pub fn update_peak_from_memory_in_use(&mut self) {
        self.update_peak_with(PeakMemoryAboveInitialUsage::update_peak_from_usage);
    }

    /// Excludes memory allocated since the last update, because the harness uses it, for the
    /// recorder or for another row as the reference.
    pub fn exclude_memory_of_harness(&mut self) {
        self.update_peak_with(PeakMemoryAboveInitialUsage::exclude_growth_by_harness);
        let forgotten = self
            .0
            .as_ref()
            .map(|watched| memory::restart_peak_of_pool(watched.devices.first_device()));
        if let Some(Err(_)) = forgotten {
            self.0 = None;
        }
    }

    fn update_peak_with(&mut self, note: fn(&mut PeakMemoryAboveInitialUsage, DeviceMemoryInUse)) {
        let Some(watched) = &mut self.0 else { return };
        match memory::read_device_memory_usage(watched.devices.first_device()) {
            Ok(now) => note(&mut watched.peak, now),
            Err(_) => self.0 = None,
        }
    }

    /// Ends the measurement after the case was freed. Returns the peak device memory of the case in
    /// bytes; `None` if it is unknown.
    pub fn finish_and_return_peak_bytes(&mut self) -> Option<u64> {
        let DeviceAndMemoryPeak { devices, telemetry, peak } = self.0.take()?;
        let after = memory_usage_after_settling(devices.first_device()).ok()?;
        is_only_process(&telemetry).then(|| peak.charged_peak_bytes(after)).flatten()
    }
}

/// Whether no other process computes on the GPU, according to NVML.
fn is_only_process(telemetry: &CardTelemetryByNvml) -> bool {
    telemetry.other_processes_with_context_count() == Some(0)
}

/// Waits for all work, returns freed memory to the driver, restores context settings, and then
/// reads the device memory in use.
fn memory_usage_after_settling(device: &Device) -> Result<DeviceMemoryInUse, BackendError> {
    persistence::restore_l2_to_state_when_opened(device)?;
    memory::free_and_total_after_launches(device)?;
    memory::restart_peak_of_pool(device)?;
    memory::read_device_memory_usage(device)
}

/// Peak device memory of a case relative to the memory in use before the case, in bytes.
#[derive(Debug, Clone, Copy)]
struct PeakMemoryAboveInitialUsage {
    initial_usage: DeviceMemoryInUse,
    /// Peak use of the device's pool and of memory outside the pool; `None` before the first
    /// update.
    peak_bytes_in_and_outside_pool: Option<(i64, i64)>,
    /// Device memory in use outside the pool at the last update, in bytes.
    last_bytes_outside_pool: i64,
    /// Memory outside the pool that the harness itself uses, in bytes.
    harness_bytes_outside_pool: i64,
}

impl From<DeviceMemoryInUse> for PeakMemoryAboveInitialUsage {
    fn from(before: DeviceMemoryInUse) -> Self {
        Self {
            initial_usage: before,
            peak_bytes_in_and_outside_pool: None,
            last_bytes_outside_pool: 0,
            harness_bytes_outside_pool: 0,
        }
    }
}

impl PeakMemoryAboveInitialUsage {
    fn bytes_outside_pool_since_start(&self, now: DeviceMemoryInUse) -> i64 {
        now.bytes_outside_pool as i64
            - self.initial_usage.bytes_outside_pool as i64
            - self.harness_bytes_outside_pool
    }

    fn update_peak_from_usage(&mut self, now: DeviceMemoryInUse) {
        self.last_bytes_outside_pool = self.bytes_outside_pool_since_start(now);
        let seen = (
            now.peak_pool_bytes as i64 - self.initial_usage.allocated_pool_bytes as i64,
            self.last_bytes_outside_pool,
        );
        let (pool, outside) = self.peak_bytes_in_and_outside_pool.unwrap_or(seen);
        self.peak_bytes_in_and_outside_pool = Some((pool.max(seen.0), outside.max(seen.1)));
    }

    fn exclude_growth_by_harness(&mut self, now: DeviceMemoryInUse) {
        self.harness_bytes_outside_pool +=
            self.bytes_outside_pool_since_start(now) - self.last_bytes_outside_pool;
    }

    fn charged_peak_bytes(&self, after: DeviceMemoryInUse) -> Option<u64> {
        let (pool, outside) = self.peak_bytes_in_and_outside_pool?;
        let kept = self.bytes_outside_pool_since_start(after);
        let own = (outside - kept).max(0) + (kept - MAX_UNCHARGED_BYTES_LEFT_IN_USE).max(0);
        Some((pool.max(0) + own) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::{
        AttachedWorkload, KernelArgumentList, Launch, OutputReference, PreparedLaunch,
        ProblemDefinition, RowContext, RowLaunchClosures, TensorSpec, Tolerances,
    };
    use crate::backend::BackendKind;
    use crate::harness::recording::recorder::{SharedRunRecord, WhenRecordIsSaved};
    use crate::harness::running::execution::{CaseTimer, SelectedCasesRunner};
    use crate::harness::running::progress::BenchProgressPrinter;
    use crate::harness::running::trial::OutputsExchangedBetweenBuilds;
    use crate::harness::running::trial_run::StateInsideTrialProcess;
    use crate::harness::selection::backend_choice::ChosenBackend;
    use crate::harness::selection::cases::select_cases;
    use crate::harness::selection::filter::CaseIdFilter;
    use crate::harness::settings::BenchSettings;
    use crate::record::{BenchProcessRun, CommitAndChanges, RunEnvironment, TrialSamplingPlan};
    use crate::suite::WorkloadSuite;
    use crate::workload::{BenchEffort, Dtype, Point};
    use kernelgate_cuda::testing::lock_first_gpu;

    const MIB: u64 = 1 << 20;

    fn memory_usage_mib(pool: u64, pool_peak: u64, outside: u64) -> DeviceMemoryInUse {
        DeviceMemoryInUse {
            allocated_pool_bytes: pool * MIB,
            peak_pool_bytes: pool_peak * MIB,
            bytes_outside_pool: outside * MIB,
        }
    }

    fn peak_after_simulated_usages(
        before: DeviceMemoryInUse,
        seen: &[DeviceMemoryInUse],
        after: DeviceMemoryInUse,
    ) -> Option<u64> {
        let mut peak = PeakMemoryAboveInitialUsage::from(before);
        seen.iter().for_each(|now| peak.update_peak_from_usage(*now));
        peak.charged_peak_bytes(after).map(|bytes| bytes / MIB)
    }

    #[test]
    fn a_case_is_charged_for_freed_memory_but_not_for_leftovers() {
        let before = memory_usage_mib(100, 100, 500);
        // In this simulated case, inputs and outputs use 64 MiB of the pool, packing uses another
        // 24 MiB, and 10 MiB are outside the pool.
        let seen = [
            memory_usage_mib(188, 188, 500),
            memory_usage_mib(164, 188, 510),
            memory_usage_mib(164, 188, 510),
        ];
        assert_eq!(peak_after_simulated_usages(before, &seen, before), Some(98));
        // The first simulated case also loads 40 MiB of modules and libraries, which stay loaded.
        let first = seen.map(|now| DeviceMemoryInUse {
            bytes_outside_pool: now.bytes_outside_pool + 40 * MIB,
            ..now
        });
        assert_eq!(
            peak_after_simulated_usages(before, &first, memory_usage_mib(100, 100, 540)),
            Some(98)
        );
        // Memory that an earlier simulated case left in use is freed during this case.
        let less = seen.map(|now| DeviceMemoryInUse {
            bytes_outside_pool: now.bytes_outside_pool - 30 * MIB,
            ..now
        });
        assert_eq!(
            peak_after_simulated_usages(before, &less, memory_usage_mib(100, 100, 470)),
            Some(98)
        );
        // In this simulated case, a pool of the row's own keeps 2 GiB; memory in the device's pool
        // is counted to the byte.
        let own = seen.map(|now| DeviceMemoryInUse {
            bytes_outside_pool: now.bytes_outside_pool + 2048 * MIB,
            ..now
        });
        assert_eq!(
            peak_after_simulated_usages(before, &own, memory_usage_mib(100, 100, 2548)),
            Some(98 + 2048 - 256)
        );
        let kept = seen.map(|now| DeviceMemoryInUse {
            peak_pool_bytes: now.peak_pool_bytes + 2048 * MIB,
            ..now
        });
        assert_eq!(
            peak_after_simulated_usages(before, &kept, memory_usage_mib(2148, 2148, 500)),
            Some(98 + 2048)
        );
        assert_eq!(peak_after_simulated_usages(before, &[], before), None, "never observed");
    }

    #[test]
    fn memory_of_the_harness_is_not_charged_to_the_case() {
        let mut peak = PeakMemoryAboveInitialUsage::from(memory_usage_mib(0, 0, 500));
        peak.update_peak_from_usage(memory_usage_mib(64, 64, 510));
        // The simulated recorder uses 20 MiB and keeps 8 MiB; another row as the reference leaves 4
        // MiB of modules.
        peak.exclude_growth_by_harness(memory_usage_mib(64, 900, 522));
        peak.update_peak_from_usage(memory_usage_mib(64, 64, 522));
        assert_eq!(peak.charged_peak_bytes(memory_usage_mib(0, 0, 512)), Some(74 * MIB));
    }

    #[test]
    fn no_device_memory_is_measured_on_the_host() {
        let mut watch = PeakDeviceMemoryWatch::start_watching(&BenchDevices::Cpu);
        watch.update_peak_from_memory_in_use();
        watch.exclude_memory_of_harness();
        assert_eq!(watch.finish_and_return_peak_bytes(), None);
    }

    const SCRATCH_COPY_KERNEL: &str = r#"
extern "C" __global__ void copy(const float* x, float* y, long long n) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i];
}
"#;

    /// Number of elements per tensor, so that input and output together use 32 MiB.
    const ELEMENTS_PER_TENSOR: usize = 1 << 22;

    /// A test suite of copies that use different amounts of scratch memory.
    fn test_suite_of_scratch_sizes() -> WorkloadSuite {
        let row = |scratch: u64| {
            move |at: &RowContext<'_>, [x, y]: [u64; 2]| {
                let kernel = at.compile_kernel(SCRATCH_COPY_KERNEL, "copy")?;
                let dims =
                    Launch::new([(ELEMENTS_PER_TENSOR as u32).div_ceil(256), 1, 1], [256, 1, 1]);
                let parameters = KernelArgumentList::new()
                    .with_address(x)
                    .with_address(y)
                    .with_value(ELEMENTS_PER_TENSOR as i64);
                let copy =
                    PreparedLaunch::check_and_prepare(at.device(), kernel, dims, parameters)?;
                let scratch = at.device().allocate(scratch as usize)?;
                Ok(RowLaunchClosures::new(move || {
                    let _kept = &scratch;
                    copy.enqueue()
                }))
            }
        };
        let define = |_: &Point| {
            let inputs = vec![TensorSpec::new("x", [ELEMENTS_PER_TENSOR], Dtype::F32)];
            let outputs = vec![TensorSpec::new("y", [ELEMENTS_PER_TENSOR], Dtype::F32)];
            let work = ProblemDefinition::traffic_work(&inputs, &outputs);
            let (reference, tolerance) = (OutputReference::NoReference, Tolerances::by_dtype());
            Ok(ProblemDefinition { inputs, outputs, reference, work, tolerance })
        };
        AttachedWorkload::new("memory/copy", &["n=1"], define)
            .add_stream_row("cuda/first", ["x", "y"], row(0))
            .add_stream_row("cuda/scratch", ["x", "y"], row(512 * MIB))
            .add_stream_row("cuda/last", ["x", "y"], row(0))
            .into()
    }

    #[test]
    fn scratch_memory_is_measured_regardless_of_order_and_declaration() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let target = BenchDevices::Cuda(device.into());
        let others = target
            .open_card_telemetry()
            .and_then(|telemetry| telemetry.other_processes_with_context_count());
        let settings = BenchSettings::settings_of_plain_bench_run();
        let place = ChosenBackend {
            kind: BackendKind::Cuda,
            reason_against_other_backend: String::new(),
            l2_bytes: 0,
            gpu_count: 1,
        };
        let suites = [test_suite_of_scratch_sizes()];
        let own = suites.iter();
        let selection =
            select_cases(own, BenchEffort::Default, &place, &[], &CaseIdFilter::AllCases).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            RunEnvironment::environment_of_target(&target),
            CommitAndChanges::default(),
        );
        let path = folder.path().join("run.json");
        let recorder = SharedRunRecord::begin_run_record(
            run,
            path,
            WhenRecordIsSaved::SavedWhenComplete,
            None,
        )
        .unwrap();
        let session = StateInsideTrialProcess {
            settings: &settings,
            sampling: TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION,
            earlier_verified_run: None,
            stored_inputs_folder: None,
            outputs: OutputsExchangedBetweenBuilds::default(),
            references: None,
            recorder: recorder.clone(),
        };
        let (timer, progress) =
            (CaseTimer::for_target(&target).unwrap(), BenchProgressPrinter::new(true, 6));
        let execution = SelectedCasesRunner::for_session_and_target(
            &session,
            &settings,
            target.clone(),
            timer,
            progress,
        );
        execution.run_selected_cases(&selection).unwrap();
        let run = recorder.copy_of_run();
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
            // If other processes use the GPU, the device memory must be unknown instead of wrong.
            assert!(rows.iter().all(|row| *row == (None, None)));
            return;
        }
        let [first, scratch, last] = rows.map(|(hot, cold)| {
            assert_eq!(hot, cold);
            hot.unwrap()
        });
        // Number of bytes by which CUDA graphs and concurrent tests on the GPU may increase a
        // measurement.
        let few = 48 * MIB;
        assert!((32 * MIB..32 * MIB + few).contains(&first), "{first}");
        assert!(scratch.abs_diff(first + 512 * MIB) < few, "{scratch} against {first}");
        assert!(last.abs_diff(first) < few, "{last} against {first}");
        assert!(
            run.cases
                .values()
                .all(|case| case.samples.costs.declared_device_bytes == Some(32 * MIB))
        );
    }
}
