//! Allowance for the difference between runs of a side with a single process run, which one run
//! cannot show.

use std::collections::BTreeMap;

use super::calibration::{BlockSeries, Calibration};
use super::ratio_interval::{SingleRunSpread, SpreadSource};
use kernelgate::record::{BaselineCase, Environment, ProcessRun};
use kernelgate::stats::{median, quantile};

/// Smallest number of processes from which a calibration shows how runs of a case differ.
const MIN_PROCESSES_FOR_SPREAD: usize = 20;
/// Share of the processes whose times lie within the spread.
const SPREAD_COVERED_SHARE: f64 = 0.99;

/// Differences between processes by case, as a calibration measured them on one device.
#[derive(Debug, Clone, Default)]
pub struct CalibratedSpreads {
    environment: Option<Environment>,
    relative: BTreeMap<String, f64>,
}

impl CalibratedSpreads {
    /// Spreads from all processes of the base, which nothing delayed or loaded.
    pub fn from_calibration(calibration: &Calibration) -> CalibratedSpreads {
        let mut times_ns: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
        for known in &calibration.comparisons {
            for (case, BlockSeries { base, .. }) in known.first.iter().chain(&known.second) {
                times_ns.entry(case).or_default().extend(&base.time_ns);
            }
        }
        let spread = |times_ns: &[f64]| {
            let center_ns = median(times_ns);
            let off: Vec<f64> = times_ns.iter().map(|ns| (ns / center_ns - 1.0).abs()).collect();
            quantile(&off, SPREAD_COVERED_SHARE)
        };
        let enough =
            times_ns.into_iter().filter(|(_, times_ns)| times_ns.len() >= MIN_PROCESSES_FOR_SPREAD);
        Self {
            environment: Some(calibration.environment.clone()),
            relative: enough.map(|(case, times_ns)| (case.clone(), spread(&times_ns))).collect(),
        }
    }

    /// The spread of a case, if the environment is the calibrated device.
    fn get(&self, case: &str, environment: &Environment) -> Option<SingleRunSpread> {
        let calibrated = self.environment.as_ref()?;
        let same =
            environment.is_same_device(calibrated) && environment.mismatches(calibrated).is_empty();
        let relative = *self.relative.get(case).filter(|_| same)?;
        Some(SingleRunSpread { relative, from: SpreadSource::Calibration })
    }

    /// The allowance for a single run of the baseline; `assumed` is the policy's.
    pub fn spread_of_baseline_case(
        &self,
        id: &str,
        case: &BaselineCase,
        environment: &Environment,
        assumed: f64,
    ) -> SingleRunSpread {
        let kept = || {
            let relative = case.earlier.as_ref()?.spread();
            Some(SingleRunSpread { relative, from: SpreadSource::EarlierRuns })
        };
        self.get(id, environment).or_else(kept).unwrap_or_else(|| assumed_spread(assumed))
    }

    /// Relative difference between process runs that is assumed for the judged side if it has only
    /// one run.
    pub fn spread_of_head_case(&self, id: &str, run: &ProcessRun, assumed: f64) -> SingleRunSpread {
        self.get(id, &run.environment).unwrap_or_else(|| assumed_spread(assumed))
    }
}

fn assumed_spread(assumed: f64) -> SingleRunSpread {
    SingleRunSpread { relative: assumed, from: SpreadSource::Assumed }
}
