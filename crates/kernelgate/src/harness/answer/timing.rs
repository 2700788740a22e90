//! Compares event timing with CUPTI's record on this GPU, to show how far event timing can be
//! trusted.

use kernelgate_cuda::Devices;
use kernelgate_cuda::library::RequiredLibrary;
use kernelgate_cuda::observe::telemetry::{CardReading, CardTelemetry};

use super::per_case::for_each_implementation;
use crate::backend::{BackendError, BenchTarget};
use crate::display::time_text;
use crate::harness::running::problem::PreparedProblem;
use crate::harness::selection::cases::{CaseSelectionResult, ProblemGroup, SelectedCase};
use crate::measure::CacheState;
use crate::measure::accuracy::{self, EventAndCuptiTimeRow};
use crate::measure::events::EventTimer;
use crate::measure::limits::{CaseWork, DeviceLimits};
use crate::protocol::{TimingMethodReport, TimingReportPart};
use crate::record::Environment;
use crate::verify::VerifyError;
use crate::workload::Work;

/// Measures every part of the timing report, or only one part.
pub fn timing_report(
    devices: &Devices,
    only: Option<TimingReportPart>,
) -> Result<TimingMethodReport, BackendError> {
    let target = BenchTarget::Cuda(devices.clone());
    let is_requested = |part| only.is_none_or(|only| only == part);
    let telemetry = target.telemetry();
    let read = || telemetry.iter().map(CardTelemetry::read_card);
    let mut readings: Vec<CardReading> = read().collect();
    let mut notes = Vec::new();
    let mut events = EventTimer::new(devices)?;
    let spins = is_requested(TimingReportPart::Spins)
        .then(|| accuracy::time_spins(&mut events))
        .transpose()?;
    let limits = is_requested(TimingReportPart::Limits)
        .then(|| DeviceLimits::measure_cuda_all(&mut events, &working_set_sizes()))
        .transpose()?;
    let cold = is_requested(TimingReportPart::Cold)
        .then(|| accuracy::time_hot_and_cold_reads(&mut events))
        .transpose()?;
    readings.extend(read());
    // Last: CUPTI stays attached to the process and slows every later launch.
    let cupti = if is_requested(TimingReportPart::Cupti) {
        accuracy::time_copies_by_events_and_cupti(&mut events)?
    } else {
        None
    };
    if cupti.is_none() && is_requested(TimingReportPart::Cupti) {
        notes.push(missing_cupti_note());
    }
    let (environment, overhead) = (Environment::on(&target), events.overhead());
    Ok(TimingMethodReport {
        environment,
        telemetry: readings,
        overhead,
        limits,
        spins,
        cold,
        cupti,
        notes,
    })
}

/// Sizes of working sets that are read, copied and written: inside L2, about the size of L2, and
/// far beyond L2.
fn working_set_sizes() -> Vec<CaseWork> {
    let sets = [2 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20, 2 << 30];
    let hot_cases_of_size = |bytes: u64| {
        let works = [(bytes, 0), (bytes / 2, bytes / 2), (0, bytes)];
        works.map(|(read, write)| CaseWork {
            work: Work::bytes(read, write),
            cache: CacheState::Hot,
        })
    };
    sets.into_iter().flat_map(hot_cases_of_size).collect()
}

/// Times cases by events and by CUPTI, one an implementation.
pub fn time_cases_by_events_and_cupti(
    selection: &CaseSelectionResult<'_>,
    seed: u64,
    devices: &Devices,
) -> Result<TimingMethodReport, BackendError> {
    let target = BenchTarget::Cuda(devices.clone());
    let mut events = EventTimer::new(devices)?;
    let overhead = events.overhead();
    let one = |group: &ProblemGroup<'_>, case: &SelectedCase, ready: &mut PreparedProblem| {
        let (mut executable, _) = ready.prepare_and_verify(group, case, &target)?;
        let row =
            accuracy::time_case_by_events_and_cupti(&mut events, &case.id, executable.as_mut())
                .map_err(VerifyError::from)?;
        // The times are printed now, because the response comes at the end, and not at all if the
        // user stops before.
        if let Some(row) = &row {
            eprintln!("      {}", event_and_cupti_times(row));
        }
        Ok(row)
    };
    let (outcomes, lost) = for_each_implementation(selection, seed, &target, "timing", one);
    if lost {
        std::mem::forget((events, devices.clone()));
    }
    let (mut rows, mut notes, mut is_missing) = (Vec::new(), Vec::new(), false);
    for (case, outcome) in outcomes {
        match outcome {
            Ok(Some(row)) => rows.push(row),
            Ok(None) => is_missing = true,
            Err(error) => notes.push(format!("{case}: {}", error.text())),
        }
    }
    if is_missing {
        notes.push(missing_cupti_note());
    }
    Ok(TimingMethodReport {
        environment: Environment::on(&target),
        telemetry: Vec::new(),
        overhead,
        limits: None,
        spins: None,
        cold: None,
        cupti: Some(rows),
        notes,
    })
}

/// The times of a case, by events and by CUPTI, in one line.
fn event_and_cupti_times(row: &EventAndCuptiTimeRow) -> String {
    let times = [row.events_ns, row.events_recorded_ns, row.cupti_ns].map(time_text);
    let ([events, recorded, cupti], difference) = (times, row.event_excess_percent());
    format!("by events {events}, recorded {recorded}, by CUPTI {cupti}, {difference:+.2}%")
}

/// Note about missing CUPTI.
fn missing_cupti_note() -> String {
    let (name, advice) = (RequiredLibrary::Cupti.name(), RequiredLibrary::Cupti.install_advice());
    format!("not compared with the hardware's record: {name} is missing: {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_a_row_are_printed_on_one_line() {
        let row = EventAndCuptiTimeRow {
            what: "loop".to_owned(),
            cache: "hot".to_owned(),
            events_ns: 1e6,
            events_recorded_ns: 2.01e6,
            cupti_ns: 2e6,
        };
        let words = "by events 1.000 ms, recorded 2.010 ms, by CUPTI 2.000 ms, +0.50%";
        assert_eq!(event_and_cupti_times(&row), words);
    }
}
