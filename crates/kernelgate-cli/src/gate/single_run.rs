//! Determines the spread between runs for a side with a single process run, which cannot show that
//! spread itself.

use std::collections::BTreeMap;

use super::calibration::{CaseBlocksAsColumns, GateCalibration};
use super::ratio_interval::{AssumedSpreadOfSingleRun, SourceOfAssumedSpread};
use kernelgate::record::{BenchProcessRun, CaseInBaseline, RunEnvironment};
use kernelgate::stats::{median, quantile_by_interpolation};

/// Smallest number of processes of a calibration from which the spread between runs of a case is
/// determined.
const MIN_CALIBRATION_PROCESSES_FOR_SPREAD: usize = 20;
/// Share of a calibration's processes whose times lie within the spread.
const SHARE_OF_PROCESSES_WITHIN_SPREAD: f64 = 0.99;

/// Spread of the time between processes for each case, as a calibration measured it on one device.
#[derive(Debug, Clone, Default)]
pub struct CalibratedSpreadsByCase {
    calibration_environment: Option<RunEnvironment>,
    relative_spread_by_case: BTreeMap<String, f64>,
}

impl CalibratedSpreadsByCase {
    /// Computes the spreads from the base's processes of all comparisons, which were neither
    /// delayed nor loaded.
    pub fn from_calibration(calibration: &GateCalibration) -> CalibratedSpreadsByCase {
        let mut times_ns: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
        for known in &calibration.comparisons {
            for (case, CaseBlocksAsColumns { base, .. }) in
                known.first_round_times.iter().chain(&known.second_round_times)
            {
                times_ns.entry(case).or_default().extend(&base.process_times_ns);
            }
        }
        let spread = |times_ns: &[f64]| {
            let center_ns = median(times_ns);
            let off: Vec<f64> = times_ns.iter().map(|ns| (ns / center_ns - 1.0).abs()).collect();
            quantile_by_interpolation(&off, SHARE_OF_PROCESSES_WITHIN_SPREAD)
        };
        let enough = times_ns
            .into_iter()
            .filter(|(_, times_ns)| times_ns.len() >= MIN_CALIBRATION_PROCESSES_FOR_SPREAD);
        Self {
            calibration_environment: Some(calibration.environment.clone()),
            relative_spread_by_case: enough
                .map(|(case, times_ns)| (case.clone(), spread(&times_ns)))
                .collect(),
        }
    }

    /// Returns the calibrated spread of a case; `None` unless the environment is the calibrated
    /// device.
    fn spread_on_calibrated_device(
        &self,
        case: &str,
        environment: &RunEnvironment,
    ) -> Option<AssumedSpreadOfSingleRun> {
        let calibrated = self.calibration_environment.as_ref()?;
        let same = environment.has_same_gpus_or_host_as(calibrated)
            && environment.incomparable_facts_with_base(calibrated).is_empty();
        let relative = *self.relative_spread_by_case.get(case).filter(|_| same)?;
        Some(AssumedSpreadOfSingleRun {
            relative_half_width: relative,
            from: SourceOfAssumedSpread::DeviceCalibration,
        })
    }

    /// Returns the spread for a single run of the baseline: from the calibration, else from earlier
    /// runs, else `assumed`.
    pub fn spread_for_single_baseline_run(
        &self,
        id: &str,
        case: &CaseInBaseline,
        environment: &RunEnvironment,
        assumed: f64,
    ) -> AssumedSpreadOfSingleRun {
        let kept = || {
            let relative = case.earlier.as_ref()?.relative_half_range_of_medians();
            Some(AssumedSpreadOfSingleRun {
                relative_half_width: relative,
                from: SourceOfAssumedSpread::EarlierCodeRuns,
            })
        };
        self.spread_on_calibrated_device(id, environment)
            .or_else(kept)
            .unwrap_or_else(|| spread_from_assumption(assumed))
    }

    /// Returns the spread for a single judged run: from the calibration, else `assumed`.
    pub fn spread_for_single_judged_run(
        &self,
        id: &str,
        run: &BenchProcessRun,
        assumed: f64,
    ) -> AssumedSpreadOfSingleRun {
        self.spread_on_calibrated_device(id, &run.environment)
            .unwrap_or_else(|| spread_from_assumption(assumed))
    }
}

fn spread_from_assumption(assumed: f64) -> AssumedSpreadOfSingleRun {
    AssumedSpreadOfSingleRun {
        relative_half_width: assumed,
        from: SourceOfAssumedSpread::AssumedWithoutMeasurement,
    }
}
