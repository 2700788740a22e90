//! Resolves the test plan and limits of a comparison: values of flags, else of the device's
//! calibration, else the defaults.

use std::fmt::{Debug, Write as _};

use super::CompareError;
use crate::gate::calibration::{Calibration, ComparisonKind};
use crate::gate::limits::{AskedLimits, CaseLimits, LimitSource};
use crate::gate::paired::TestPlan;
use kernelgate::record::{BaselineStore, Environment, Provenance, TrialSampling, file};

/// A requested plan.
#[derive(Debug, Clone)]
pub struct PlanRequest {
    /// Limits that flags set.
    pub asked: AskedLimits,
    /// Value of [`TestPlan::max_blocks`] that a flag set, if any.
    pub max_blocks: Option<usize>,
    /// Values for everything that no flag sets.
    pub basis: PlanBasis,
}

/// Source of the values that no flag sets.
#[derive(Debug, Clone)]
pub enum PlanBasis {
    /// The values are those of one plan, used on every device.
    Fixed(TestPlan),
    /// The values come from the device's calibration in this store, else the defaults apply.
    Calibration(BaselineStore),
}

/// The test plan for a device, with the source of each limit.
#[derive(Debug, Clone)]
pub struct ResolvedPlan {
    /// Error rates, blocks and limits of the test.
    pub plan: TestPlan,
    /// The limits of the plan, each with its source.
    pub limits: CaseLimits,
    /// A sentence about the device's calibration for the report.
    pub note: Option<String>,
}

impl PlanRequest {
    /// Makes a request for this plan on every device.
    pub fn with_fixed_plan(plan: TestPlan) -> Self {
        Self { asked: AskedLimits::default(), max_blocks: None, basis: PlanBasis::Fixed(plan) }
    }

    /// Resolves the request to a plan for a device.
    pub fn on(
        &self,
        environment: &Environment,
        head: &Provenance,
        sampling: TrialSampling,
    ) -> Result<ResolvedPlan, CompareError> {
        let store = match &self.basis {
            PlanBasis::Fixed(plan) => return Ok(self.overriding(*plan, LimitSource::Default)),
            PlanBasis::Calibration(store) => store,
        };
        match file::read::<Calibration>(
            &store.calibration_path(&environment.baseline_folder_name()),
        ) {
            Ok(calibration) => {
                let (resolved, note) = self.calibrated_plan(&calibration);
                let note =
                    note + &calibration_mismatches(&calibration, environment, head, sampling);
                Ok(ResolvedPlan { note: Some(note), ..resolved })
            }
            Err(error) if error.is_not_found() => {
                Ok(self.overriding(TestPlan::default(), LimitSource::Default))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A plan in which flags replace the values of `basis`.
    fn overriding(&self, basis: TestPlan, source: LimitSource) -> ResolvedPlan {
        ResolvedPlan {
            plan: basis.overridden_by(&self.asked, self.max_blocks),
            limits: basis.limits(source).overridden_by(&self.asked, LimitSource::Flag),
            note: None,
        }
    }

    fn calibrated_plan(&self, calibration: &Calibration) -> (ResolvedPlan, String) {
        let null = || calibration.comparisons_of(ComparisonKind::Null);
        let fired = null().filter(|comparison| comparison.has_regressed_case()).count();
        let source = format!(
            "calibration of {} ({} A/A comparisons, {fired} failed; commit {}",
            calibration.started.get(..10).unwrap_or(&calibration.started),
            null().count(),
            calibration.provenance.short_commit()
        );
        let recommended = calibration.recommended.as_ref();
        let Some((recommended, relative)) = recommended.and_then(|it| Some((it, it.relative?)))
        else {
            let why = recommended.and_then(|it| it.note.clone());
            let why = why.unwrap_or_else(|| "not derived".to_owned());
            return (
                self.overriding(TestPlan::default(), LimitSource::Default),
                format!("{source}) recommends no threshold: {why}; the default ones are used"),
            );
        };
        let measured = calibration.plan;
        let basis = TestPlan {
            relative,
            tolerated: measured.tolerated.max(relative),
            absolute_ns: measured.absolute_ns,
            settle_blocks: recommended.settle_blocks.unwrap_or(measured.settle_blocks),
            max_blocks: measured.max_blocks,
            contention_weight: recommended.contention_weight,
            ..TestPlan::default()
        };
        let resolved = self.overriding(basis, LimitSource::Calibration);
        let plan = &resolved.plan;
        let note = format!(
            "{source}): threshold {:.2} %, settled from {} blocks, at most {}",
            100.0 * plan.relative,
            plan.settle_blocks.min(plan.max_blocks),
            plan.max_blocks
        );
        (resolved, note)
    }

    /// Checks that all calibrations can be read, before anything is built: the device's own is
    /// known only after a bench has run.
    pub fn check(&self) -> Result<(), CompareError> {
        let PlanBasis::Calibration(store) = &self.basis else { return Ok(()) };
        let calibrations = store.calibration_files();
        calibrations.iter().try_for_each(|path| file::read::<Calibration>(path).map(drop))?;
        Ok(())
    }

    /// Text that identifies the plan before the device is known.
    pub fn identity(&self) -> Result<String, CompareError> {
        let store = match &self.basis {
            PlanBasis::Fixed(plan) => {
                return Ok(identity_text(
                    "Plan",
                    &plan.overridden_by(&self.asked, self.max_blocks),
                ));
            }
            PlanBasis::Calibration(store) => store,
        };
        let AskedLimits { relative, absolute_ns, tolerated, .. } = self.asked;
        let mut text = format!(
            "Asked {{ relative: {relative:?}, absolute_ns: {absolute_ns:?}, tolerated: \
             {tolerated:?}, max_blocks: {:?} }}",
            self.max_blocks
        );
        for path in store.calibration_files() {
            let _ = write!(text, " {}", file::content_hash_of_file(&path)?);
        }
        Ok(text)
    }
}

/// The fields of a value as text that is recorded in files, under a name that is part of their
/// format: the type may be renamed, and `--resume` and merged calibrations compare these texts.
pub(super) fn identity_text(name: &str, value: &impl Debug) -> String {
    let text = format!("{value:?}");
    let fields = text.find(" {").map_or("", |at| &text[at..]);
    format!("{name}{fields}")
}

/// The respects in which a calibration is for another setup.
fn calibration_mismatches(
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
    if calibration.sampling.measurement_s != sampling.measurement_s {
        let (then, now) = (calibration.sampling.measurement_s, sampling.measurement_s);
        differing
            .push(format!("a process timed a case for {then:.2} s then and for {now:.2} s now"));
    }
    if differing.is_empty() { String::new() } else { format!("; {}", differing.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan_request() -> PlanRequest {
        let limits = AskedLimits { relative: Some(0.1), ..AskedLimits::default() };
        PlanRequest {
            asked: limits,
            max_blocks: Some(6),
            ..PlanRequest::with_fixed_plan(TestPlan::default())
        }
    }

    #[test]
    fn the_recorded_identity_of_a_plan_keeps_its_text() {
        let plan = "Plan { relative: 0.01, absolute_ns: 100.0, tolerated: 0.05, settle_blocks: \
                    24, false_alarms: 0.01, missed: 0.05, contention: 0.02, contention_weight: \
                    2.0, power: 0.8, max_blocks: 96 }";
        assert_eq!(PlanRequest::with_fixed_plan(TestPlan::default()).identity().unwrap(), plan);
        let folder = tempfile::tempdir().unwrap();
        let basis = PlanBasis::Calibration(BaselineStore::around_folder(folder.path()));
        let text = "Asked { relative: Some(0.1), absolute_ns: None, tolerated: None, max_blocks: \
                    Some(6) }";
        assert_eq!(PlanRequest { basis, ..plan_request() }.identity().unwrap(), text);
        let sampling = "TrialSampling { warm_up_s: 0.1, measurement_s: 0.3, fewest: 2, most: 20 }";
        assert_eq!(identity_text("TrialSampling", &TrialSampling::HOST_SAMPLING), sampling);
    }

    #[test]
    fn a_flag_overrides_the_plan_and_is_named_as_the_source() {
        let ResolvedPlan { plan, limits, .. } =
            plan_request().overriding(TestPlan::default(), LimitSource::Default);
        assert_eq!(
            (plan.relative, plan.tolerated, plan.max_blocks, plan.absolute_ns),
            (0.1, 0.1, 6, 100.0)
        );
        assert_eq!((limits.relative.value, limits.relative.source), (0.1, LimitSource::Flag));
        assert_eq!(limits.absolute_ns.source, LimitSource::Default);
    }
}
