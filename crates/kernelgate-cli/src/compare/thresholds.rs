//! What counts as slower: what was asked for, else what the device was calibrated to, else the
//! default.

use std::fmt::{Debug, Write as _};

use super::CompareError;
use crate::gate::calibration::{Calibration, ComparisonKind};
use crate::gate::paired::TestPlan;
use kernelgate::record::{Environment, Provenance, Store, TrialSampling, file};

/// Parts of a plan that were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AskedThresholds {
    /// [`TestPlan::relative`].
    pub relative: Option<f64>,
    /// [`TestPlan::absolute_ns`].
    pub absolute_ns: Option<f64>,
    /// [`TestPlan::tolerated`].
    pub tolerated: Option<f64>,
    /// [`TestPlan::max_blocks`].
    pub max_blocks: Option<usize>,
}

impl AskedThresholds {
    /// The plan; what was not asked for is as in `otherwise`.
    pub fn or(self, otherwise: TestPlan) -> TestPlan {
        let relative = self.relative.unwrap_or(otherwise.relative);
        TestPlan {
            relative,
            absolute_ns: self.absolute_ns.unwrap_or(otherwise.absolute_ns),
            tolerated: self.tolerated.unwrap_or(otherwise.tolerated).max(relative),
            max_blocks: self.max_blocks.unwrap_or(otherwise.max_blocks),
            ..otherwise
        }
    }
}

/// Where the plan comes from.
#[derive(Debug, Clone)]
pub enum Thresholds {
    /// From here.
    Fixed(TestPlan),
    /// From the flags and the device's calibration in this store.
    Calibrated(AskedThresholds, Store),
}

impl Thresholds {
    /// The plan on a device, and a sentence on the calibration that it comes from.
    ///
    /// # Errors
    /// When the device's calibration cannot be read.
    pub fn on(
        &self,
        environment: &Environment,
        head: &Provenance,
        sampling: TrialSampling,
    ) -> Result<(TestPlan, Option<String>), CompareError> {
        let (asked, store) = match self {
            Self::Fixed(plan) => return Ok((*plan, None)),
            Self::Calibrated(asked, store) => (asked, store),
        };
        let path = store.calibration_path(&environment.slug());
        match file::read::<Calibration>(&path) {
            Ok(calibration) => {
                let (plan, note) = calibrated(&calibration, *asked);
                Ok((
                    plan,
                    Some(format!("{note}{}", elsewhere(&calibration, environment, head, sampling))),
                ))
            }
            Err(error) if error.is_not_found() => Ok((asked.or(TestPlan::default()), None)),
            Err(error) => Err(CompareError::Usage(format!("failed to {error}"))),
        }
    }

    /// Whether the calibrations can be read, before anything is built: which is the device's is known
    /// only once a bench has run.
    ///
    /// # Errors
    /// When one cannot.
    pub fn check(&self) -> Result<(), CompareError> {
        let Self::Calibrated(_, store) = self else { return Ok(()) };
        store.calibrations().iter().try_for_each(|path| {
            let read = file::read::<Calibration>(path).map(drop);
            read.map_err(|error| CompareError::Usage(format!("failed to {error}")))
        })
    }

    /// What identifies it before the device is known.
    ///
    /// # Errors
    /// When a calibration cannot be read.
    pub fn identity(&self) -> Result<String, CompareError> {
        match self {
            Self::Fixed(plan) => Ok(identity_text("Plan", plan)),
            Self::Calibrated(asked, store) => {
                let mut text = identity_text("Asked", asked);
                for path in store.calibrations() {
                    let hash = file::content_hash(&path)
                        .map_err(|error| CompareError::Usage(format!("failed to {error}")))?;
                    let _ = write!(text, " {hash}");
                }
                Ok(text)
            }
        }
    }
}

/// The fields of a value as text that is recorded in files, under a name that is part of their
/// format: the type may be renamed, and `--resume` and merged calibrations compare these texts.
pub(super) fn identity_text(name: &str, value: &impl Debug) -> String {
    let text = format!("{value:?}");
    let fields = text.find(" {").map_or("", |at| &text[at..]);
    format!("{name}{fields}")
}

fn calibrated(calibration: &Calibration, asked: AskedThresholds) -> (TestPlan, String) {
    let null = || calibration.of(ComparisonKind::Null);
    let fired = null().filter(|known| known.fired()).count();
    let of = format!(
        "calibration of {} ({} A/A comparisons, {fired} failed; commit {}",
        calibration.started.get(..10).unwrap_or(&calibration.started),
        null().count(),
        calibration.provenance.short()
    );
    let recommended = calibration.recommended.as_ref();
    let Some(relative) = recommended.and_then(|recommended| recommended.relative) else {
        let why = recommended
            .and_then(|recommended| recommended.note.clone())
            .unwrap_or_else(|| "not derived".to_owned());
        return (
            asked.or(TestPlan::default()),
            format!("{of}) recommends no threshold: {why}; the default ones are used"),
        );
    };
    let plan = asked.or(TestPlan {
        relative,
        tolerated: calibration.plan.tolerated.max(relative),
        absolute_ns: calibration.plan.absolute_ns,
        settle_blocks: recommended
            .and_then(|recommended| recommended.settle_blocks)
            .unwrap_or(calibration.plan.settle_blocks),
        max_blocks: calibration.plan.max_blocks,
        contention_weight: recommended.map_or(calibration.plan.contention_weight, |recommended| {
            recommended.contention_weight
        }),
        ..TestPlan::default()
    });
    let note = format!(
        "{of}): threshold {:.2} %, settled from {} blocks, at most {}",
        100.0 * plan.relative,
        plan.settle_blocks.min(plan.max_blocks),
        plan.max_blocks
    );
    (plan, note)
}

/// In which respects a calibration is of something else.
fn elsewhere(
    calibration: &Calibration,
    environment: &Environment,
    head: &Provenance,
    sampling: TrialSampling,
) -> String {
    let mut differing: Vec<String> = Vec::new();
    let driver = |environment: &Environment| environment.gpus.values(|gpu| gpu.driver.clone());
    let (then, now) = (driver(&calibration.environment), driver(environment));
    if let Some(mismatch) = environment.mismatches(&calibration.environment).first() {
        differing
            .push(format!("{} was `{}` and is `{}`", mismatch.field, mismatch.base, mismatch.head));
    } else if !then.is_empty() && !now.is_empty() && then != now {
        differing.push(format!("the driver was {then} and is {now}"));
    }
    let built_here = head.commit.as_ref().is_none_or(|commit| !commit.starts_with("prebuilt"));
    if built_here && calibration.provenance.commit != head.commit {
        differing.push("it is of another commit".to_owned());
    }
    if calibration.pace.measurement_s != sampling.measurement_s {
        let (then, now) = (calibration.pace.measurement_s, sampling.measurement_s);
        differing
            .push(format!("a process timed a case for {then:.2} s then and for {now:.2} s now"));
    }
    if differing.is_empty() { String::new() } else { format!("; {}", differing.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_identities_keep_their_text() {
        let plan = "Plan { relative: 0.01, absolute_ns: 100.0, tolerated: 0.05, settle_blocks: \
                    24, false_alarms: 0.01, missed: 0.05, contention: 0.02, contention_weight: \
                    2.0, power: 0.8, max_blocks: 96 }";
        assert_eq!(Thresholds::Fixed(TestPlan::default()).identity().unwrap(), plan);
        let asked =
            "Asked { relative: None, absolute_ns: None, tolerated: None, max_blocks: None }";
        assert_eq!(identity_text("Asked", &AskedThresholds::default()), asked);
        let sampling = "Pace { warm_up_s: 0.1, measurement_s: 0.3, fewest: 2, most: 20 }";
        assert_eq!(identity_text("Pace", &TrialSampling::MEASURED), sampling);
    }

    #[test]
    fn what_is_asked_for_wins_and_the_rest_stays() {
        let plan = AskedThresholds {
            relative: Some(0.1),
            max_blocks: Some(6),
            ..AskedThresholds::default()
        }
        .or(TestPlan::default());
        assert_eq!(
            (plan.relative, plan.tolerated, plan.max_blocks, plan.absolute_ns),
            (0.1, 0.1, 6, 100.0)
        );
        assert_eq!(AskedThresholds::default().or(TestPlan::default()), TestPlan::default());
    }
}
