//! Compares times by CUDA events with times that CUPTI records on this GPU, to show how accurate
//! event timing is.

use kernelgate_cuda::Devices;
use kernelgate_cuda::library::NvidiaLibrary;
use kernelgate_cuda::observe::telemetry::{CardTelemetryByNvml, GpuCardReading};

use super::per_case::run_once_per_implementation;
use crate::backend::{BackendError, BenchDevices};
use crate::display::time_text;
use crate::harness::running::problem::PreparedProblem;
use crate::harness::selection::cases::{SelectedAndSkippedCases, SelectedCase, SelectedProblem};
use crate::measure::CacheState;
use crate::measure::accuracy::{self, EventAndCuptiTimeRow};
use crate::measure::events::CudaEventTimer;
use crate::measure::limits::{DeclaredWorkAndCacheState, MeasuredDeviceLimits};
use crate::protocol::{TimingAccuracyReport, TimingAccuracyReportPart};
use crate::record::RunEnvironment;
use crate::verify::OutputVerificationError;
use crate::workload::Work;

/// Measures every part of the timing-accuracy report, or only the part `only`.
pub fn measure_timing_accuracy_report(
    devices: &Devices,
    only: Option<TimingAccuracyReportPart>,
) -> Result<TimingAccuracyReport, BackendError> {
    let target = BenchDevices::Cuda(devices.clone());
    let is_requested = |part| only.is_none_or(|only| only == part);
    let telemetry = target.open_card_telemetry();
    let read = || telemetry.iter().map(CardTelemetryByNvml::read_card_sensors);
    let mut readings: Vec<GpuCardReading> = read().collect();
    let mut notes = Vec::new();
    let mut events = CudaEventTimer::new(devices)?;
    let spins = is_requested(TimingAccuracyReportPart::SpinKernels)
        .then(|| accuracy::time_spins_by_events_and_gpu_timer(&mut events))
        .transpose()?;
    let limits = is_requested(TimingAccuracyReportPart::DeviceLimits)
        .then(|| {
            MeasuredDeviceLimits::measure_gpu_limits_with_all_matmuls(
                &mut events,
                &hot_reads_copies_and_writes_by_size(),
            )
        })
        .transpose()?;
    let cold = is_requested(TimingAccuracyReportPart::HotAndColdReads)
        .then(|| accuracy::time_reads_with_hot_and_cold_caches(&mut events))
        .transpose()?;
    readings.extend(read());
    // Last: CUPTI stays attached to the process and slows every later launch, so CUPTI is measured
    // last.
    let cupti = if is_requested(TimingAccuracyReportPart::CopiesAgainstCupti) {
        accuracy::time_copies_by_events_and_cupti(&mut events)?
    } else {
        None
    };
    if cupti.is_none() && is_requested(TimingAccuracyReportPart::CopiesAgainstCupti) {
        notes.push(missing_cupti_note());
    }
    let (environment, overhead) =
        (RunEnvironment::environment_of_target(&target), events.launch_overhead());
    Ok(TimingAccuracyReport {
        environment,
        telemetry: readings,
        overhead,
        limits,
        spins,
        cold,
        cupti,
        unmeasured_part_notes: notes,
    })
}

/// Sizes of working sets that are read, copied and written to measure device limits: within L2,
/// about the size of L2, and far larger than L2.
fn hot_reads_copies_and_writes_by_size() -> Vec<DeclaredWorkAndCacheState> {
    let sets = [2 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20, 2 << 30];
    let hot_cases_of_size = |bytes: u64| {
        let works = [(bytes, 0), (bytes / 2, bytes / 2), (0, bytes)];
        works.map(|(read, write)| DeclaredWorkAndCacheState {
            work: Work::bytes(read, write),
            cache: CacheState::HotCaches,
        })
    };
    sets.into_iter().flat_map(hot_cases_of_size).collect()
}

/// Times one case per implementation both by CUDA events and by CUPTI.
pub fn time_cases_by_events_and_cupti(
    selection: &SelectedAndSkippedCases<'_>,
    seed: u64,
    devices: &Devices,
) -> Result<TimingAccuracyReport, BackendError> {
    let target = BenchDevices::Cuda(devices.clone());
    let mut events = CudaEventTimer::new(devices)?;
    let overhead = events.launch_overhead();
    let one = |group: &SelectedProblem<'_>, case: &SelectedCase, ready: &mut PreparedProblem| {
        let (mut executable, _) = ready.prepare_and_verify_case(group, case, &target)?;
        let row = accuracy::time_case_by_events_and_cupti(
            &mut events,
            &case.case_id,
            executable.as_mut(),
        )
        .map_err(OutputVerificationError::from)?;
        // Each case's times are printed at once, because the complete response comes at the end,
        // and never if the user stops the program.
        if let Some(row) = &row {
            eprintln!("      {}", event_and_cupti_times_line(row));
        }
        Ok(row)
    };
    let (outcomes, lost) = run_once_per_implementation(selection, seed, &target, "timing", one);
    if lost {
        std::mem::forget((events, devices.clone()));
    }
    let (mut rows, mut notes, mut is_missing) = (Vec::new(), Vec::new(), false);
    for (case, outcome) in outcomes {
        match outcome {
            Ok(Some(row)) => rows.push(row),
            Ok(None) => is_missing = true,
            Err(error) => notes.push(format!("{case}: {}", error.reason_text())),
        }
    }
    if is_missing {
        notes.push(missing_cupti_note());
    }
    Ok(TimingAccuracyReport {
        environment: RunEnvironment::environment_of_target(&target),
        telemetry: Vec::new(),
        overhead,
        limits: None,
        spins: None,
        cold: None,
        cupti: Some(rows),
        unmeasured_part_notes: notes,
    })
}

/// Formats the times of a case by events and by CUPTI in one line.
fn event_and_cupti_times_line(row: &EventAndCuptiTimeRow) -> String {
    let times =
        [row.event_ns_without_cupti, row.event_ns_under_cupti, row.cupti_launch_ns].map(time_text);
    let ([events, recorded, cupti], difference) =
        (times, row.event_time_excess_over_cupti_percent());
    format!("by events {events}, recorded {recorded}, by CUPTI {cupti}, {difference:+.2}%")
}

/// Note in the output that CUPTI is missing, so that event times are not compared with CUPTI's.
fn missing_cupti_note() -> String {
    let (name, advice) = (
        NvidiaLibrary::Cupti.library_name_in_messages(),
        NvidiaLibrary::Cupti.advice_to_install_library(),
    );
    format!("not compared with the hardware's record: {name} is missing: {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_and_cupti_times_are_printed_on_one_line() {
        let row = EventAndCuptiTimeRow {
            operation: "loop".to_owned(),
            cache_state: "hot".to_owned(),
            event_ns_without_cupti: 1e6,
            event_ns_under_cupti: 2.01e6,
            cupti_launch_ns: 2e6,
        };
        let words = "by events 1.000 ms, recorded 2.010 ms, by CUPTI 2.000 ms, +0.50%";
        assert_eq!(event_and_cupti_times_line(&row), words);
    }
}
