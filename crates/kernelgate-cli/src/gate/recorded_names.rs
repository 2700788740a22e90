//! Texts that identify requests in recorded files. The flag `--resume` and merges compare these
//! texts, so they keep the names of the first version if fields or variants are renamed.

/// Names of fields and variants in today's code, each with its name in recorded files.
pub type RecordedNames = [(&'static str, &'static str)];

/// Fields of [`RequestedLimits`](super::limits::RequestedLimits) and
/// [`ComparisonTestPlan`](super::paired::ComparisonTestPlan).
pub const RECORDED_LIMIT_NAMES: &RecordedNames = &[
    ("relative_time_change_threshold", "relative"),
    ("absolute_time_change_threshold_ns", "absolute_ns"),
    ("max_unchanged_relative_change", "tolerated"),
    ("output_error_growth_threshold", "growth"),
    ("device_memory_growth_threshold", "device_memory"),
    ("command_growth_threshold", "launches"),
    ("host_time_growth_threshold", "host_time"),
    ("energy_growth_threshold", "energy"),
    ("min_blocks_for_unchanged", "settle_blocks"),
    ("max_false_alarm_probability", "false_alarms"),
    ("max_missed_change_probability", "missed"),
    ("max_contention_difference_of_pair", "contention"),
    ("slowdown_per_contention", "contention_weight"),
    ("statistical_power", "power"),
    ("max_trial_blocks", "max_blocks"),
];

/// Fields of the number of samples that a trial process takes.
pub const RECORDED_SAMPLING_NAMES: &RecordedNames =
    &[("fewest_samples", "fewest"), ("most_samples", "most")];

/// Kinds of comparisons that a calibration makes.
pub const RECORDED_CALIBRATION_NAMES: &RecordedNames = &[
    ("IdenticalBuilds", "Null"),
    ("ShamLoad", "Sham"),
    ("OtherCodeLayout", "Layout"),
    ("SlowdownByWaitPercent", "Injected"),
    ("SlowdownByWorkPercent", "Work"),
    ("OneCaseSlowdownPercent", "Single"),
];

/// Fields of an acceptance rule, and effects of removed cases.
pub const RECORDED_ACCEPTANCE_RULE_NAMES: &RecordedNames = &[
    ("case_pattern", "cases"),
    ("max_accepted_relative_slowdown", "slower"),
    ("max_accepted_error_ratio", "growth"),
    ("allows_less_verification", "less_verified"),
    ("allows_removal", "removed"),
    ("acceptance_reason", "reason"),
    ("baseline_commit_prefix", "baseline"),
    ("MakeInconclusive", "Inconclusive"),
    ("FailComparison", "Fail"),
    ("ListOnly", "Ignore"),
];

/// Formats a value with the names that recorded files have for its fields and variants.
pub fn debug_text_with_recorded_names(
    value: &impl std::fmt::Debug,
    names: &RecordedNames,
) -> String {
    let text = format!("{value:?}");
    names.iter().fold(text, |text, (name, recorded)| text.replace(name, recorded))
}
