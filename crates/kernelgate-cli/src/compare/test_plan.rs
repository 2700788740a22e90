//! Determines the test plan and limits of a comparison: values from flags first, then from the
//! device's calibration, then the defaults.

use crate::gate::recorded_names::{
    RECORDED_LIMIT_NAMES, RecordedNames, debug_text_with_recorded_names,
};
use std::fmt::{Debug, Write as _};

use super::CompareError;
use crate::gate::calibration::{CalibrationComparisonKind, GateCalibration};
use crate::gate::limits::{CaseTimeAndErrorLimits, LimitSource, RequestedLimits};
use crate::gate::paired::ComparisonTestPlan;
use kernelgate::record::{
    CommitAndChanges, RecordFoldersOfPackage, RunEnvironment, TrialSamplingPlan, file,
};

/// A requested test plan: limits from flags and the plan that they change.
#[derive(Debug, Clone)]
pub struct TestPlanRequest {
    /// Limits of time, accuracy and costs that command-line flags set.
    pub requested_limits: RequestedLimits,
    /// Maximum number of blocks ([`ComparisonTestPlan::max_trial_blocks`]) that a flag sets; `None`
    /// if no flag sets it.
    pub max_trial_blocks: Option<usize>,
    /// Source of all test plan values that no flag sets.
    pub plan_basis: TestPlanBasis,
}

/// Source of the test plan's values that no flag sets: a fixed plan or the device's calibration.
#[derive(Debug, Clone)]
pub enum TestPlanBasis {
    /// All values of the test plan come from one fixed plan, whatever the device.
    Fixed(ComparisonTestPlan),
    /// The test plan's values come from the device's calibration in the given store; without a
    /// calibration, from the defaults.
    CalibrationOfDevice(RecordFoldersOfPackage),
}

/// The test plan that applies on a device, with the source of each limit (flag, calibration or
/// default).
#[derive(Debug, Clone)]
pub struct TestPlanForDevice {
    /// Error rates, maximum blocks and thresholds of the statistical test.
    pub plan: ComparisonTestPlan,
    /// Thresholds of the plan, each with its source (flag, calibration or default).
    pub limits: CaseTimeAndErrorLimits,
    /// A sentence for the report about the device's calibration; `None` without a calibration.
    pub calibration_note: Option<String>,
}

impl TestPlanRequest {
    /// Requests this test plan for every device, without flags or calibration.
    pub fn with_fixed_plan(plan: ComparisonTestPlan) -> Self {
        Self {
            requested_limits: RequestedLimits::default(),
            max_trial_blocks: None,
            plan_basis: TestPlanBasis::Fixed(plan),
        }
    }

    /// Determines the test plan for a device, from the flags, the device's calibration or the
    /// defaults.
    pub fn plan_for_device(
        &self,
        environment: &RunEnvironment,
        head: &CommitAndChanges,
        sampling: TrialSamplingPlan,
    ) -> Result<TestPlanForDevice, CompareError> {
        let store = match &self.plan_basis {
            TestPlanBasis::Fixed(plan) => {
                return Ok(self.plan_overridden_by_flags(*plan, LimitSource::ProgramDefault));
            }
            TestPlanBasis::CalibrationOfDevice(store) => store,
        };
        match file::read_record::<GateCalibration>(
            &store.path_of_calibration(&environment.baseline_folder_of_device_and_count()),
        ) {
            Ok(calibration) => {
                let (resolved, note) = self.plan_from_calibration(&calibration);
                let note = note
                    + &describe_calibration_mismatches(&calibration, environment, head, sampling);
                Ok(TestPlanForDevice { calibration_note: Some(note), ..resolved })
            }
            Err(error) if error.is_because_file_is_missing() => Ok(self.plan_overridden_by_flags(
                ComparisonTestPlan::default(),
                LimitSource::ProgramDefault,
            )),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the test plan `basis` with the values that flags set replaced.
    fn plan_overridden_by_flags(
        &self,
        basis: ComparisonTestPlan,
        source: LimitSource,
    ) -> TestPlanForDevice {
        TestPlanForDevice {
            plan: basis.with_requested_limits(&self.requested_limits, self.max_trial_blocks),
            limits: basis
                .limits_with_source(source)
                .overridden_by(&self.requested_limits, LimitSource::CommandLineFlag),
            calibration_note: None,
        }
    }

    fn plan_from_calibration(&self, calibration: &GateCalibration) -> (TestPlanForDevice, String) {
        let null = || calibration.comparisons_of_kind(CalibrationComparisonKind::IdenticalBuilds);
        let fired = null().filter(|comparison| comparison.has_regressed_case()).count();
        let source = format!(
            "calibration of {} ({} A/A comparisons, {fired} failed; commit {}",
            calibration
                .first_comparison_start_time
                .get(..10)
                .unwrap_or(&calibration.first_comparison_start_time),
            null().count(),
            calibration.provenance.short_commit_with_changes_mark()
        );
        let recommended = calibration.recommended.as_ref();
        let Some((recommended, relative)) =
            recommended.and_then(|it| Some((it, it.recommended_relative_threshold?)))
        else {
            let why = recommended.and_then(|it| it.why_not_recommended.clone());
            let why = why.unwrap_or_else(|| "not derived".to_owned());
            return (
                self.plan_overridden_by_flags(
                    ComparisonTestPlan::default(),
                    LimitSource::ProgramDefault,
                ),
                format!("{source}) recommends no threshold: {why}; the default ones are used"),
            );
        };
        let measured = calibration.plan;
        let basis = ComparisonTestPlan {
            relative_time_change_threshold: relative,
            max_unchanged_relative_change: measured.max_unchanged_relative_change.max(relative),
            absolute_time_change_threshold_ns: measured.absolute_time_change_threshold_ns,
            min_blocks_for_unchanged: recommended
                .min_blocks_for_unchanged
                .unwrap_or(measured.min_blocks_for_unchanged),
            max_trial_blocks: measured.max_trial_blocks,
            slowdown_per_contention: recommended.slowdown_per_contention,
            ..ComparisonTestPlan::default()
        };
        let resolved = self.plan_overridden_by_flags(basis, LimitSource::DeviceCalibration);
        let plan = &resolved.plan;
        let note = format!(
            "{source}): threshold {:.2} %, settled from {} blocks, at most {}",
            100.0 * plan.relative_time_change_threshold,
            plan.min_blocks_for_unchanged.min(plan.max_trial_blocks),
            plan.max_trial_blocks
        );
        (resolved, note)
    }

    /// Checks before anything is built that all stored calibrations can be read, because the device
    /// is known only after a bench has run.
    pub fn check_calibrations_are_readable(&self) -> Result<(), CompareError> {
        let TestPlanBasis::CalibrationOfDevice(store) = &self.plan_basis else { return Ok(()) };
        let calibrations = store.list_calibration_files();
        calibrations
            .iter()
            .try_for_each(|path| file::read_record::<GateCalibration>(path).map(drop))?;
        Ok(())
    }

    /// Returns a text that identifies the requested test plan before the device is known: the flags
    /// and the hashes of all calibrations.
    pub fn test_plan_identity(&self) -> Result<String, CompareError> {
        let store = match &self.plan_basis {
            TestPlanBasis::Fixed(plan) => {
                return Ok(recorded_identity_text(
                    "Plan",
                    RECORDED_LIMIT_NAMES,
                    &plan.with_requested_limits(&self.requested_limits, self.max_trial_blocks),
                ));
            }
            TestPlanBasis::CalibrationOfDevice(store) => store,
        };
        let RequestedLimits {
            relative_time_change_threshold: relative,
            absolute_time_change_threshold_ns: absolute_ns,
            max_unchanged_relative_change: tolerated,
            ..
        } = self.requested_limits;
        let mut text = format!(
            "Asked {{ relative: {relative:?}, absolute_ns: {absolute_ns:?}, tolerated: \
             {tolerated:?}, max_blocks: {:?} }}",
            self.max_trial_blocks
        );
        for path in store.list_calibration_files() {
            let _ = write!(text, " {}", file::file_content_hash_hex(&path)?);
        }
        Ok(text)
    }
}

/// Formats the fields of a value under a fixed name for recorded files. The flag `--resume` and
/// merges compare the recorded texts, which must survive a renaming of the Rust type or its fields.
pub(super) fn recorded_identity_text(
    name: &str,
    recorded_names: &RecordedNames,
    value: &impl Debug,
) -> String {
    let text = debug_text_with_recorded_names(value, recorded_names);
    let fields = text.find(" {").map_or("", |at| &text[at..]);
    format!("{name}{fields}")
}

/// Describes in what respects a device's calibration does not fit this comparison (GPU, driver,
/// commit or time per case).
fn describe_calibration_mismatches(
    calibration: &GateCalibration,
    environment: &RunEnvironment,
    head: &CommitAndChanges,
    sampling: TrialSamplingPlan,
) -> String {
    let mut differing: Vec<String> = Vec::new();
    let driver = |environment: &RunEnvironment| {
        environment.gpus.join_distinct_values_of_gpus(|gpu| gpu.driver_version.clone())
    };
    let (then, now) = (driver(&calibration.environment), driver(environment));
    if let Some(mismatch) =
        environment.incomparable_facts_with_base(&calibration.environment).first()
    {
        differing.push(format!(
            "{} was `{}` and is `{}`",
            mismatch.field_name, mismatch.base_value, mismatch.head_value
        ));
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
    use crate::gate::recorded_names::RECORDED_SAMPLING_NAMES;

    fn test_plan_request() -> TestPlanRequest {
        let limits = RequestedLimits {
            relative_time_change_threshold: Some(0.1),
            ..RequestedLimits::default()
        };
        TestPlanRequest {
            requested_limits: limits,
            max_trial_blocks: Some(6),
            ..TestPlanRequest::with_fixed_plan(ComparisonTestPlan::default())
        }
    }

    #[test]
    fn the_recorded_identity_text_of_a_test_plan_is_stable() {
        let plan = "Plan { relative: 0.01, absolute_ns: 100.0, tolerated: 0.05, settle_blocks: \
                    24, false_alarms: 0.01, missed: 0.05, contention: 0.02, contention_weight: \
                    2.0, power: 0.8, max_blocks: 96 }";
        assert_eq!(
            TestPlanRequest::with_fixed_plan(ComparisonTestPlan::default())
                .test_plan_identity()
                .unwrap(),
            plan
        );
        let folder = tempfile::tempdir().unwrap();
        let basis = TestPlanBasis::CalibrationOfDevice(
            RecordFoldersOfPackage::record_folders_of_package_around_folder(folder.path()),
        );
        let text = "Asked { relative: Some(0.1), absolute_ns: None, tolerated: None, max_blocks: \
                    Some(6) }";
        assert_eq!(
            TestPlanRequest { plan_basis: basis, ..test_plan_request() }
                .test_plan_identity()
                .unwrap(),
            text
        );
        let sampling = "TrialSampling { warm_up_s: 0.1, measurement_s: 0.3, fewest: 2, most: 20 }";
        assert_eq!(
            recorded_identity_text(
                "TrialSampling",
                RECORDED_SAMPLING_NAMES,
                &TrialSamplingPlan::SAMPLING_ON_HOST
            ),
            sampling
        );
    }

    #[test]
    fn a_flag_overrides_the_test_plan_and_is_named_as_the_source() {
        let TestPlanForDevice { plan, limits, .. } = test_plan_request()
            .plan_overridden_by_flags(ComparisonTestPlan::default(), LimitSource::ProgramDefault);
        assert_eq!(
            (
                plan.relative_time_change_threshold,
                plan.max_unchanged_relative_change,
                plan.max_trial_blocks,
                plan.absolute_time_change_threshold_ns
            ),
            (0.1, 0.1, 6, 100.0)
        );
        assert_eq!(
            (
                limits.relative_time_change_threshold.limit_value,
                limits.relative_time_change_threshold.source
            ),
            (0.1, LimitSource::CommandLineFlag)
        );
        assert_eq!(limits.absolute_time_change_threshold_ns.source, LimitSource::ProgramDefault);
    }
}
