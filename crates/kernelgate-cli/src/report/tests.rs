//! Snapshot tests of all report formats, with an example comparison and an example gate that
//! contain every finding.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use kernelgate::display::{amount_rate_text, decimal_byte_size_text, time_text};
use kernelgate::record::{OutputVerificationExtent, file};

use super::formats::{comment, junit, metrics};
use super::{comparison, verdicts};
use crate::bisect::commits::SlowdownSuspectCommit;
use crate::bisect::{
    BisectionAnswer, BisectionEnd, BisectionResult, CommitRangeWithSlowdown, FoundSlowdownCommits,
    HeadToBaseTimeRatio,
};
use crate::gate::baseline::{
    AgeOfBaseline, BaselineComparisonFacts, BaselineJudgementSettings, BaselineVerdicts,
};
use crate::gate::calibration::GateCalibration;
use crate::gate::comparison::{
    BuildComparisonFacts, Comparison, ComparisonRoundCounts, CriterionOnlyBench, FailedBenchProcess,
};
use crate::gate::costs::{GrowthConfirmationPairs, LaunchCostGrowthOfCase, LaunchCostKind};
use crate::gate::inconclusive_reason::{
    InconclusiveReason, MeasurementFailureOnSide, SideThatCausesDoubt,
};
use crate::gate::judgement::{
    BaselineRunEvidence, CaseJudgement, JudgementEvidence, RunCountAndSpreadOfSide,
};
use crate::gate::kernels::code::{ArchitectureKernelComparison, CaseKernelComparison};
use crate::gate::kernels::explanation::{SlowdownCause, SlowdownExplanation};
use crate::gate::limits::{CaseTimeAndErrorLimits, LimitWithSource};
use crate::gate::outputs::numerics::{
    OutputErrorGrowthOfCase, OutputErrorMeasure, OutputErrorReport,
};
use crate::gate::outputs::verification::VerificationLoss;
use crate::gate::paired::{
    CauseOfInconclusiveDecision, ComparedArm, ComparisonTestPlan, PairedDecisionOnCase,
};
use crate::gate::ratio_interval::{
    AssumedSpreadOfSingleRun, SourceOfAssumedSpread, TimeRatioWithInterval,
};
use crate::gate::rules::{AcceptanceAppliedToCase, GateRulesEffectReport, RemovedCasesEffect};
use crate::gate::verdict::VerdictOnCase;
use crate::gate::verdicts::ComparisonRefusal;
use kernelgate_cuda::CaseFailureReason;

const ONE_PERCENT_LIMITS: CaseTimeAndErrorLimits =
    CaseTimeAndErrorLimits::default_with_relative_limit(0.01);
const ASSUMED_TEN_PERCENT_SPREAD: AssumedSpreadOfSingleRun = AssumedSpreadOfSingleRun {
    relative_half_width: 0.1,
    from: SourceOfAssumedSpread::AssumedWithoutMeasurement,
};

/// Compares a text with the stored snapshot `name` in the given folder below `snapshots`.
#[track_caller]
fn assert_matches_snapshot(folder: &str, name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(format!("snapshots/{folder}"));
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

fn example_paired_decision(
    case: &str,
    verdict: VerdictOnCase,
    change: f64,
    width: f64,
) -> PairedDecisionOnCase {
    let ratio = |center: f64| TimeRatioWithInterval {
        estimated_ratio: center,
        ratio_low: center - width,
        ratio_high: center + width,
    };
    PairedDecisionOnCase {
        case_id: case.to_owned(),
        verdict,
        reason: None,
        base_median_launch_ns: 1_254_000.0,
        head_median_launch_ns: 1_254_000.0 * change,
        ratio: ratio(change),
        cycle_ratio: Some(ratio(change * 1.0004)),
        null_pair_ratio: ratio(1.0),
        relative_threshold: 0.01,
        p_value_of_not_slower: if verdict == VerdictOnCase::Regressed { 0.000_03 } else { 0.7312 },
        p_value_of_not_faster: 1.0,
        smallest_detectable_slowdown: Some(0.01 + 2.0 * width),
        usable_pairs: 12,
        pairs_needed: None,
        pairs_at_decision: Some(12),
        base_cpu_contention: None,
        head_cpu_contention: None,
    }
}

/// An example comparison with one case of each verdict. This function is long because it sets every
/// field of the comparison.
#[expect(clippy::too_many_lines)]
fn comparison_with_every_verdict() -> Comparison {
    use VerdictOnCase::{Improved, Inconclusive, Regressed, Unchanged};
    let regressed = example_paired_decision(
        "attention/forward/s1024_d64_full_bf16/cuda/flash_mma/hot",
        Regressed,
        1.053,
        0.004,
    );
    let mut wide = example_paired_decision(
        "denoise/step/pi05_s50_p968_bf16/cuda/graph/hot",
        Inconclusive,
        1.02,
        0.061,
    );
    wide.reason = Some(CauseOfInconclusiveDecision::IntervalTooWide);
    wide.pairs_needed = Some(44);
    let mut few = example_paired_decision(
        "denoise/loop/pi05_s50_p968_steps10_bf16/cuda/graph/hot",
        Inconclusive,
        1.0,
        0.1,
    );
    few.ratio =
        TimeRatioWithInterval { estimated_ratio: 1.0, ratio_low: 0.0, ratio_high: f64::INFINITY };
    (few.reason, few.smallest_detectable_slowdown, few.usable_pairs) =
        (Some(CauseOfInconclusiveDecision::TooFewPairs), None, 2);
    let judged = vec![
        CaseJudgement::from_both_rounds(
            regressed.clone(),
            Some(PairedDecisionOnCase { usable_pairs: 14, ..regressed }),
            vec![],
            &ONE_PERCENT_LIMITS,
        ),
        CaseJudgement::from_both_rounds(few, None, vec![], &ONE_PERCENT_LIMITS),
        CaseJudgement::from_both_rounds(wide, None, vec![], &ONE_PERCENT_LIMITS),
        CaseJudgement::judge_case_without_blocks(
            "denoise/step/pi05_s50_p968_bf16/cuda/per_op/hot".to_owned(),
            vec![InconclusiveReason::CaseSkipped(MeasurementFailureOnSide::in_side_with_reason(
                ComparedArm::HeadBuild,
                "needs 201 MB | of 102 MB <free>",
            ))],
            &ComparisonTestPlan::default(),
            &ONE_PERCENT_LIMITS,
        ),
        CaseJudgement::from_both_rounds(
            example_paired_decision(
                "attention/backward/s512_d64_causal_bf16/cuda/flash_mma/hot",
                Improved,
                0.91,
                0.003,
            ),
            None,
            vec![],
            &ONE_PERCENT_LIMITS,
        ),
        CaseJudgement::from_both_rounds(
            example_paired_decision(
                "st_bif/forward/n1_f32/cuda/fused/hot",
                Unchanged,
                1.001,
                0.002,
            ),
            None,
            vec![],
            &ONE_PERCENT_LIMITS,
        ),
    ];
    Comparison {
        device: "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz".to_owned(),
        default_case_limits: ONE_PERCENT_LIMITS,
        judged_cases: judged,
        refused: vec![ComparisonRefusal {
            differing_field: "revision".to_owned(),
            base_value: "1".to_owned(),
            head_value: "2".to_owned(),
            affected_cases: vec!["st_bif/backward/n1_f32/cuda/replay/hot".to_owned()],
        }],
        new_cases: vec!["st_bif/forward/n1_f32/cuda/newer/hot".to_owned()],
        skipped_in_head: BTreeMap::from([(
            "attention/forward/x/cuda/cudnn/hot".to_owned(),
            "libcudnn is missing".to_owned(),
        )]),
        failed_in_head: BTreeMap::from([(
            "st_bif/forward/n1_f16/cuda/fused/hot".to_owned(),
            "output `spikes`: 3 of 64 elements differ, <first> & \"second\"\u{7}".into(),
        )]),
        unverified_cases: vec![],
        verification_losses: vec![],
        numerics: OutputErrorReport::default(),
        grown_costs: vec![],
        rules: GateRulesEffectReport::default(),
        method_facts: BuildComparisonFacts {
            base_revision: "main (1a2b3c4d)".to_owned(),
            head_revision: "HEAD (9f8e7d6c)".to_owned(),
            round_budget_s: 600.0,
            failed_processes: vec![FailedBenchProcess {
                bench_name: "denoise".to_owned(),
                side: ComparedArm::BaseBuild,
                failure_reason: "signal: 9 (SIGKILL)".to_owned(),
                bench_abandoned: true,
            }],
            benches_with_identical_executables: vec!["st_bif".to_owned()],
            optimised_build: true,
            rounds: vec![
                ComparisonRoundCounts {
                    most_trial_blocks: 6,
                    process_count: 24,
                    total_process_wall_s: 181.3,
                },
                ComparisonRoundCounts {
                    most_trial_blocks: 7,
                    process_count: 28,
                    total_process_wall_s: 60.2,
                },
            ],
            ..BuildComparisonFacts::default()
        },
    }
}

fn judgement_from_process_runs(
    case: &str,
    verdict: VerdictOnCase,
    change: f64,
    runs: (usize, usize),
) -> CaseJudgement {
    let side = |runs: usize, spread: f64| RunCountAndSpreadOfSide {
        run_count: runs,
        relative_half_range: (runs > 1).then_some(spread),
        single_run_spread: (runs == 1).then_some(ASSUMED_TEN_PERCENT_SPREAD),
        cpu_contention_share: 0.0,
    };
    let single = InconclusiveReason::BaselineHasSingleRun { assumed_interval_half_width: 0.1 };
    CaseJudgement {
        case_id: case.to_owned(),
        verdict,
        reasons: (verdict == VerdictOnCase::Inconclusive).then_some(single).into_iter().collect(),
        regression_threshold: LimitWithSource::from_program_default(0.281),
        base_launch_ns: 200_000.0,
        head_launch_ns: 200_000.0 * change,
        ratio: TimeRatioWithInterval {
            estimated_ratio: change,
            ratio_low: change * 0.98,
            ratio_high: change * 1.02,
        },
        detectable_change: Some(0.307),
        evidence: JudgementEvidence::Runs(Box::new(BaselineRunEvidence {
            same_device: false,
            compared_card: None,
            base: side(runs.0, 0.011),
            head: RunCountAndSpreadOfSide { relative_half_range: None, ..side(runs.1, 0.0) },
        })),
    }
}

/// An example case that is inconclusive for the given reason.
fn inconclusive_judgement(
    case: &str,
    change: f64,
    runs: (usize, usize),
    reason: InconclusiveReason,
) -> CaseJudgement {
    CaseJudgement {
        reasons: vec![reason],
        ..judgement_from_process_runs(case, VerdictOnCase::Inconclusive, change, runs)
    }
}

fn example_gate_report() -> BaselineVerdicts {
    BaselineVerdicts {
        device: "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz".to_owned(),
        default_case_limits: BaselineJudgementSettings::default().limits,
        judged_cases: vec![
            judgement_from_process_runs("a/b/n1/cuda/x/hot", VerdictOnCase::Regressed, 1.4, (5, 1)),
            judgement_from_process_runs(
                "a/b/n2/cuda/x/hot",
                VerdictOnCase::Inconclusive,
                1.5,
                (1, 1),
            ),
            inconclusive_judgement(
                "a/b/n5/cuda/x/hot",
                1.29,
                (5, 1),
                InconclusiveReason::ChangeBelowDetectable { smallest_detectable_slowdown: 0.307 },
            ),
            judgement_from_process_runs(
                "a/b/n3/cuda/x/hot",
                VerdictOnCase::Unchanged,
                1.01,
                (5, 1),
            ),
        ],
        refused: vec![],
        new_cases: vec![],
        skipped_in_head: BTreeMap::new(),
        failed_in_head: BTreeMap::new(),
        unverified_cases: vec![],
        verification_losses: vec![],
        numerics: OutputErrorReport::default(),
        grown_costs: vec![],
        rules: GateRulesEffectReport::default(),
        method_facts: BaselineComparisonFacts {
            baseline_name: "main".to_owned(),
            baseline_commits: vec!["1a2b3c4d".to_owned()],
            judged_commits: vec!["9f8e7d6c+changes".to_owned()],
            baseline_and_run_device: Some(("GPU-1".to_owned(), "GPU-2".to_owned())),
            baseline_lacks_checksum: true,
            staleness: Some(AgeOfBaseline {
                oldest_run_start_time: "2026-11-21T12:00:00Z".to_owned(),
                oldest_run_commit: "1a2b3c4d".to_owned(),
                days_since_oldest_run: Some(1),
                commits_since_oldest_run: Some(34),
            }),
            policy: BaselineJudgementSettings::default(),
            baseline_cases_not_run: vec!["a/b/n4/cuda/x/hot".to_owned()],
            interrupted_benches: vec!["other".to_owned()],
            missing_shards: vec![],
            runs_compared_with_themselves: vec![],
        },
    }
}

#[test]
fn a_report_explains_a_slower_case_and_lists_skipped_cases() {
    let case = "attention/forward/s1024_d64_full_bf16/cuda/flash_mma/hot".to_owned();
    let change = "attention/flash_mma D=64: registers 96 -> 128".to_owned();
    let code = CaseKernelComparison {
        identical_kernels: 1,
        code_difference_lines: vec![change.clone()],
        ..CaseKernelComparison::default()
    };
    let why = SlowdownExplanation {
        causes: vec![SlowdownCause::CodeChanged],
        evidence_of_causes: vec![change.clone()],
        ..SlowdownExplanation::default()
    };
    let facts = BuildComparisonFacts {
        kernel_comparisons_by_case: BTreeMap::from([(case.clone(), code)]),
        explanations: BTreeMap::from([(case.clone(), why)]),
        unaffected_cases: vec!["a/b/n1/cuda/x/hot".to_owned()],
        ..comparison_with_every_verdict().method_facts
    };
    let compared = Comparison { method_facts: facts, ..comparison_with_every_verdict() };
    let text = verdicts::verdict_report_text(&compared, None);
    for line in [
        format!("{case}: changed: code; {change}"),
        format!("code changed: {change} (in {case})"),
        "machine code: other code or launches in 1 of 7 cases, the same in 0, not known of 6"
            .to_owned(),
        "--affected: 1 case with the same machine code".to_owned(),
    ] {
        assert!(text.contains(&format!("\n{line}")), "`{line}` is not in:\n{text}");
    }
    let comment = comment::pull_request_comment_markdown(&verdicts::verdict_report_summary(
        &compared,
        "kernelgate compare",
    ));
    let line = format!("- {case}: changed: code; {change}");
    assert!(comment.lines().any(|it| it == line), "{comment}");
}

#[test]
fn the_headline_shows_what_fails_and_junit_shows_accepted_bounds() {
    let case = "st_bif/forward/n1_f32/cuda/fused/hot".to_owned();
    let grown = |cost: LaunchCostKind| LaunchCostGrowthOfCase {
        case_id: case.clone(),
        cost,
        base_cost: 1.0,
        head_cost: 2.0,
        allowed_relative_growth: 0.0,
        growth_confirmation: None,
    };
    let broken = |side, abandoned| FailedBenchProcess {
        bench_name: "st_bif".to_owned(),
        side,
        failure_reason: "hung".to_owned(),
        bench_abandoned: abandoned,
    };
    let accepted = AcceptanceAppliedToCase {
        case_id: case.clone(),
        max_accepted_relative_slowdown: Some(0.5),
        max_accepted_error_ratio: None,
        allows_less_verification: false,
        allows_removal: false,
        acceptance_reason: "exact sums".to_owned(),
    };
    let rules = GateRulesEffectReport {
        rules_file_name: Some("kernelgate.toml".to_owned()),
        threshold_rules_with_case_counts: vec![("`st`: 3%".to_owned(), 1)],
        accepted: vec![accepted],
        notes_on_unjudged_limits: vec!["launches could not be judged".to_owned()],
        ..GateRulesEffectReport::default()
    };
    let compared = Comparison {
        grown_costs: vec![
            grown(LaunchCostKind::CommandsPerLaunch),
            grown(LaunchCostKind::DeviceMemoryBytes),
        ],
        rules,
        method_facts: BuildComparisonFacts {
            failed_processes: vec![
                broken(ComparedArm::HeadBuild, true),
                broken(ComparedArm::HeadBuild, true),
                broken(ComparedArm::BaseBuild, false),
            ],
            ..comparison_with_every_verdict().method_facts
        },
        ..comparison_with_every_verdict()
    };
    let headline = verdicts::verdict_headline(&compared);
    insta::assert_snapshot!(headline, @"1 regressed, 1 improved, 1 unchanged, 3 inconclusive, 1 failed, 1 of higher cost, 1 refused of 6 (threshold 1%); 1 bench broke in the head; 1 skipped; 1 bound of kernelgate.toml not judged");
    let xml = junit::junit_xml_of_verdicts(&verdicts::verdict_report_summary(&compared, ""));
    for element in [
        "<system-out>accepted in kernelgate.toml: up to 50% slower: exact sums</system-out>",
        "name=\"kernelgate.toml\" value=\"threshold in kernelgate.toml: `st`: 3% (1 case)\"",
        "<skipped message=\"launches could not be judged\"/>",
    ] {
        assert!(xml.contains(element), "{xml}");
    }
}

#[test]
fn a_report_without_compared_kernels_does_not_call_kernels_equal() {
    let with = |not_compared: Option<(&str, &str)>| {
        let owned = |(what, why): (&str, &str)| (what.to_owned(), why.to_owned());
        let compared = ArchitectureKernelComparison {
            gpu_architecture: "sm_90a".to_owned(),
            benches_not_compared: not_compared.map(owned).into_iter().collect(),
            ..ArchitectureKernelComparison::default()
        };
        comparison::changed_kernel_lines(&compared)
    };
    let lines =
        ["kernels for sm_90a: none compared", "sm_90a: spin not compared: NVRTC is missing"];
    assert_eq!(with(Some(("spin", "NVRTC is missing"))), lines);
    assert_eq!(with(None), ["kernels for sm_90a: none compared, as no bench lists one"]);
}

#[test]
fn line_breaks_in_a_failure_message_add_no_report_line() {
    fn one_case_with_failure_message<T: From<&'static str>>(case: &str) -> BTreeMap<String, T> {
        let message = "boom\n\n0 regressed, 0 improved, 3 unchanged\u{202e}\u{9b}31m\u{ffff}";
        BTreeMap::from([(case.to_owned(), message.into())])
    }
    let report = BaselineVerdicts {
        failed_in_head: one_case_with_failure_message("a/b/x"),
        skipped_in_head: one_case_with_failure_message("a/b/y"),
        ..example_gate_report()
    };
    let compared = Comparison {
        failed_in_head: one_case_with_failure_message("a/b/x"),
        skipped_in_head: one_case_with_failure_message("a/b/z"),
        method_facts: BuildComparisonFacts {
            failed_in_base: one_case_with_failure_message("a/b/y"),
            ..comparison_with_every_verdict().method_facts
        },
        ..comparison_with_every_verdict()
    };
    for text in [
        verdicts::verdict_report_text(&report, None),
        verdicts::verdict_report_text(&compared, None),
    ] {
        let printed = "boom\n    0 regressed, 0 improved, 3 unchanged\\u{202e}\\u{ffff}\n";
        assert!(text.contains(&format!("a/b/x: {printed}")), "{text}");
        assert!(text.contains(&format!("a/b/y: {printed}")), "{text}");
        assert_eq!(text.matches("\n0 regressed, 0 improved, 3 unchanged").count(), 0, "{text}");
    }
    let xml =
        junit::junit_xml_of_verdicts(&verdicts::verdict_report_summary(&report, "kernelgate gate"));
    assert!(xml.contains("3 unchanged\\u{202e}\\u{ffff}"), "{xml}");
    assert!(!xml.contains(['\u{202e}', '\u{9b}', '\u{ffff}']), "{xml}");
}

/// An example failure of a case: its output `<spikes>` differs from the expected bits in some of
/// the checked elements.
fn failure_with_differing_output_bits() -> CaseFailureReason {
    CaseFailureReason::failure_with_kind_and_sentence("differs", "1 of 64 elements differ")
        .with_name_fact("output", "<spikes>")
        .with_number_fact("checked", 64.0)
}

/// An example comparison with the lists and findings that [`comparison_with_every_verdict`] lacks.
/// This function is long because it sets every field of the comparison.
#[expect(clippy::too_many_lines)]
fn comparison_with_every_field() -> Comparison {
    let case = |name: &str| format!("st_bif/forward/{name}_f32/cuda/fused/hot");
    let slower = "attention/forward/s1024_d64_full_bf16/cuda/flash_mma/hot".to_owned();
    let code = CaseKernelComparison {
        identical_kernels: 1,
        code_difference_lines: vec!["flash: registers 96 -> 128".to_owned()],
        ..Default::default()
    };
    let seeds = OutputErrorGrowthOfCase {
        case_id: case("n2"),
        output_with_largest_growth: Some("spikes".to_owned()),
        error_measure: OutputErrorMeasure::RelativeL2Error,
        seed_count: 8,
        seeds_needed: 8,
        base_median_error: 3.8e-5,
        head_median_error: 1.2e-4,
        median_error_ratio: Some(3.2),
        allowed_error_ratio: 1.5,
        seeds_share_one_data_set: false,
    };
    let suspected = OutputErrorGrowthOfCase { case_id: case("n3"), seed_count: 3, ..seeds.clone() };
    let one = OutputErrorGrowthOfCase {
        case_id: case("n4"),
        seed_count: 1,
        seeds_share_one_data_set: true,
        ..seeds.clone()
    };
    let cost = |cost: LaunchCostKind, further| LaunchCostGrowthOfCase {
        case_id: case("n1"),
        cost,
        base_cost: 2e9,
        head_cost: 3e9,
        allowed_relative_growth: 0.1,
        growth_confirmation: further,
    };
    let unclear =
        GrowthConfirmationPairs { pair_count: 8, pairs_with_growth: 6, growth_confirmed: false };
    let checked = |checked| OutputVerificationExtent::Verified {
        compared_elements: checked,
        total_elements: 1600,
    };
    let facts = BuildComparisonFacts {
        calibration_description: Some("calibration of 2026-11-20: threshold 1.50 %".to_owned()),
        removed_cases: vec![case("n5")],
        failed_in_base: BTreeMap::from([(case("n7"), failure_with_differing_output_bits())]),
        unusable_benches: BTreeMap::from([("other of the head".to_owned(), "no mark".to_owned())]),
        criterion_benches: vec![CriterionOnlyBench {
            bench_name: "plain".to_owned(),
            compared_cases: vec!["plain/sum".to_owned()],
            process_wall_s: 1.5,
            overridden_sampling_by_case: BTreeMap::from([(
                "plain/sum".to_owned(),
                vec!["10 samples".to_owned()],
            )]),
        }],
        optimised_build: false,
        injected_delays_text: Some("x=100".to_owned()),
        kernel_comparisons_by_case: BTreeMap::from([(slower.clone(), code)]),
        explanations: BTreeMap::from([(
            slower,
            SlowdownExplanation {
                causes: vec![SlowdownCause::CodeChanged],
                evidence_of_causes: vec!["flash: registers 96 -> 128".to_owned()],
                ..SlowdownExplanation::default()
            },
        )]),
        unaffected_cases: vec!["a/b/n1/cuda/x/hot".to_owned()],
        cases_with_identical_executable: vec!["a/b/n2/cuda/x/hot".to_owned()],
        ..comparison_with_every_verdict().method_facts
    };
    Comparison {
        unverified_cases: vec![case("n6")],
        verification_losses: [OutputVerificationExtent::Unverified, checked(3)]
            .into_iter()
            .filter_map(|head| VerificationLoss::from_extents(&case("n8"), checked(1600), head))
            .collect(),
        numerics: OutputErrorReport {
            compared_cases: 5,
            cases_with_changed_errors: 3,
            outputs_with_changed_errors: 3,
            error_growths: vec![seeds, suspected, one],
        },
        grown_costs: vec![
            cost(LaunchCostKind::DeviceMemoryBytes, None),
            cost(LaunchCostKind::HostEnqueueTime, Some(unclear)),
        ],
        rules: GateRulesEffectReport {
            removed: RemovedCasesEffect::default(),
            rules_file_name: Some("kernelgate.toml".to_owned()),
            threshold_rules_with_case_counts: vec![("`^st_bif/`: 3%, 200 ns".to_owned(), 2)],
            accepted: vec![AcceptanceAppliedToCase {
                case_id: case("n1"),
                max_accepted_relative_slowdown: Some(0.12),
                max_accepted_error_ratio: Some(2.0),
                allows_removal: false,
                allows_less_verification: true,
                acceptance_reason: "exact sums".to_owned(),
            }],
            notes_on_rules_without_effect: vec!["[[accept]] `x` matches no case".to_owned()],
            notes_on_unmatched_patterns: BTreeSet::new(),
            notes_on_unjudged_limits: vec!["launches could not be judged".to_owned()],
        },
        method_facts: facts,
        ..comparison_with_every_verdict()
    }
}

/// An example gate report with the lists and findings that [`example_gate_report`] lacks.
fn gate_report_with_every_field() -> BaselineVerdicts {
    let Comparison {
        verification_losses: verification, numerics, grown_costs: costs, rules, ..
    } = comparison_with_every_field();
    let case = |name: &str| format!("st_bif/forward/{name}_f32/cuda/fused/hot");
    let inconclusive = |name: &str, reason: InconclusiveReason| {
        let mut judged = inconclusive_judgement(&case(name), 1.1, (5, 2), reason);
        if let JudgementEvidence::Runs(runs) = &mut judged.evidence {
            runs.head.cpu_contention_share = 0.4;
        }
        judged
    };
    let single = |judged: &mut CaseJudgement, single: AssumedSpreadOfSingleRun| {
        if let JudgementEvidence::Runs(runs) = &mut judged.evidence {
            runs.base.single_run_spread = Some(single);
        }
    };
    let mut all = example_gate_report().judged_cases;
    let head = SideThatCausesDoubt { side: ComparedArm::HeadBuild };
    all.extend([
        inconclusive(
            "wide",
            InconclusiveReason::IntervalTooWide(TimeRatioWithInterval {
                estimated_ratio: 1.1,
                ratio_low: 1.078,
                ratio_high: 1.122,
            }),
        ),
        inconclusive("throttled", InconclusiveReason::GpuThrottled(head)),
        inconclusive("shared", InconclusiveReason::SharedGpu(head)),
        inconclusive(
            "clock",
            InconclusiveReason::DifferentSmClocks { head_to_base_clock_ratio: 0.8 },
        ),
        inconclusive(
            "unsettled",
            InconclusiveReason::PowerStateUnsettled { relative_time_range_width: 0.3 },
        ),
        inconclusive(
            "host",
            InconclusiveReason::HostBound(SideThatCausesDoubt { side: ComparedArm::BaseBuild }),
        ),
        inconclusive("less", InconclusiveReason::LessVerified(verification[1].clone())),
    ]);
    single(
        &mut all[0],
        AssumedSpreadOfSingleRun {
            relative_half_width: 0.02,
            from: SourceOfAssumedSpread::EarlierCodeRuns,
        },
    );
    single(
        &mut all[2],
        AssumedSpreadOfSingleRun {
            relative_half_width: 0.03,
            from: SourceOfAssumedSpread::DeviceCalibration,
        },
    );
    let facts = BaselineComparisonFacts {
        missing_shards: vec!["st_bif 2/4".to_owned()],
        runs_compared_with_themselves: vec!["s1/st_bif".to_owned()],
        ..example_gate_report().method_facts
    };
    BaselineVerdicts {
        judged_cases: all,
        new_cases: vec![case("n5")],
        skipped_in_head: BTreeMap::from([(
            case("n6"),
            "needs 201 MB | of 102 MB <free>".to_owned(),
        )]),
        failed_in_head: BTreeMap::from([(case("n7"), failure_with_differing_output_bits())]),
        unverified_cases: vec![case("n9")],
        verification_losses: verification,
        numerics,
        grown_costs: costs,
        rules,
        method_facts: facts,
        ..example_gate_report()
    }
}

#[test]
fn a_comparison_report_with_every_kind_of_finding_matches_its_snapshot() {
    let compared = comparison_with_every_field();
    let summary = verdicts::verdict_report_summary(&compared, "kernelgate compare --base main");
    assert_matches_snapshot(
        "compare",
        "everything_compared.txt",
        &verdicts::verdict_report_text(&compared, None),
    );
    assert_matches_snapshot(
        "compare",
        "everything_compared.md",
        &comment::pull_request_comment_markdown(&summary),
    );
    assert_matches_snapshot(
        "compare",
        "everything_compared.xml",
        &junit::junit_xml_of_verdicts(&summary),
    );
    assert_matches_snapshot(
        "compare",
        "everything_compared.json",
        &serde_json::to_string_pretty(&compared).unwrap(),
    );
}

#[test]
fn a_gate_report_with_every_kind_of_finding_matches_its_snapshot() {
    let gated = gate_report_with_every_field();
    let summary = verdicts::verdict_report_summary(&gated, "kernelgate gate --baseline main");
    assert_matches_snapshot(
        "gate",
        "everything_gated.txt",
        &verdicts::verdict_report_text(&gated, None),
    );
    assert_matches_snapshot(
        "gate",
        "everything_gated.md",
        &comment::pull_request_comment_markdown(&summary),
    );
    assert_matches_snapshot(
        "gate",
        "everything_gated.xml",
        &junit::junit_xml_of_verdicts(&summary),
    );
    assert_matches_snapshot(
        "gate",
        "everything_gated.json",
        &serde_json::to_string_pretty(&gated).unwrap(),
    );
}

#[test]
fn a_lost_verification_is_shown_in_comment_junit_and_html() {
    let mut lines = Vec::new();
    for summary in [
        verdicts::verdict_report_summary(&comparison_with_every_field(), ""),
        verdicts::verdict_report_summary(&gate_report_with_every_field(), ""),
    ] {
        let page = crate::pages::verdict::verdict_page(&summary).unwrap();
        for text in [
            comment::pull_request_comment_markdown(&summary),
            junit::junit_xml_of_verdicts(&summary),
            page,
        ] {
            let pieces = text.split(['\n', '<', '>']).map(str::trim);
            let lost = pieces.filter(|piece| piece.contains("(before: "));
            lines.extend(lost.map(str::to_owned));
        }
    }
    insta::assert_debug_snapshot!(lines, @r#"
    [
        "- st_bif/forward/n8_f32/cuda/fused/hot: no longer verified (before: every element verified)",
        "- inconclusive: st_bif/forward/n8_f32/cuda/fused/hot: less verified: 3 of 1600 elements verified (before: every element verified)",
        "error message=\"no longer verified (before: every element verified)\" type=\"failed\"/",
        "skipped message=\"less verified: 3 of 1600 elements verified (before: every element verified)\"/",
        "st_bif/forward/n8_f32/cuda/fused/hot: no longer verified (before: every element verified)",
        "inconclusive: st_bif/forward/n8_f32/cuda/fused/hot: less verified: 3 of 1600 elements verified (before: every element verified)",
        "st_bif/forward/n8_f32/cuda/fused/hot: no longer verified (before: every element verified)",
        "st_bif/forward/n8_f32/cuda/fused/hot: less verified: 3 of 1600 elements verified (before: every element verified)",
        "- st_bif/forward/n8_f32/cuda/fused/hot: no longer verified (before: every element verified)",
        "- inconclusive: st_bif/forward/n8_f32/cuda/fused/hot: less verified: 3 of 1600 elements verified (before: every element verified)",
        "| st_bif/forward/less_f32/cuda/fused/hot      | +10.0% |  +7.8% … +12.2% |      30.7% | 200.0 µs | 220.0 µs |  5:2 | inconclusive: less verified: 3 of 1600 elements verified (before: every element verified) |",
        "skipped message=\"inconclusive: less verified: 3 of 1600 elements verified (before: every element verified): +10.0% (+7.8% … +12.2%), 200.0 µs to 220.0 µs, detectable 30.7%, 5:2 runs\"/",
        "error message=\"no longer verified (before: every element verified)\" type=\"failed\"/",
        "skipped message=\"less verified: 3 of 1600 elements verified (before: every element verified)\"/",
        "st_bif/forward/n8_f32/cuda/fused/hot: no longer verified (before: every element verified)",
        "inconclusive: st_bif/forward/n8_f32/cuda/fused/hot: less verified: 3 of 1600 elements verified (before: every element verified)",
        "st_bif/forward/n8_f32/cuda/fused/hot: no longer verified (before: every element verified)",
        "st_bif/forward/n8_f32/cuda/fused/hot: less verified: 3 of 1600 elements verified (before: every element verified)",
    ]
    "#);
}

#[test]
fn a_refused_comparison_is_reported_before_every_verdict() {
    let refusal = ComparisonRefusal {
        differing_field: "driver".to_owned(),
        base_value: "580".to_owned(),
        head_value: "570".to_owned(),
        affected_cases: ["a", "b", "c"].map(str::to_owned).to_vec(),
    };
    let gated =
        BaselineVerdicts { judged_cases: vec![], refused: vec![refusal], ..example_gate_report() };
    assert_matches_snapshot(
        "gate",
        "refused_gate.txt",
        &verdicts::verdict_report_text(&gated, None),
    );
    let summary = verdicts::verdict_report_summary(&gated, "kernelgate gate --baseline main");
    assert_matches_snapshot(
        "gate",
        "refused_gate.md",
        &comment::pull_request_comment_markdown(&summary),
    );
}

#[test]
fn a_comparison_report_matches_its_snapshot() {
    let compared = comparison_with_every_verdict();
    let summary =
        verdicts::verdict_report_summary(&compared, "kernelgate compare --base main --budget 600s");
    assert_matches_snapshot(
        "compare",
        "comparison.txt",
        &verdicts::verdict_report_text(&compared, None),
    );
    assert_matches_snapshot(
        "compare",
        "comparison.md",
        &comment::pull_request_comment_markdown(&summary),
    );
    assert_matches_snapshot("compare", "comparison.xml", &junit::junit_xml_of_verdicts(&summary));
    let metrics = metrics::head_metrics_of_comparison(&compared);
    assert_matches_snapshot(
        "compare",
        "comparison.bmf",
        &serde_json::to_string_pretty(&metrics::bencher_metric_format(&metrics)).unwrap(),
    );
    assert_matches_snapshot(
        "compare",
        "comparison.smaller",
        &serde_json::to_string_pretty(&metrics::github_action_benchmark_format(&metrics)).unwrap(),
    );
}

#[test]
fn a_gate_report_matches_its_snapshot() {
    let gated = example_gate_report();
    let summary =
        verdicts::verdict_report_summary(&gated, "kernelgate gate --baseline main --last 3");
    assert_matches_snapshot("gate", "gate.txt", &verdicts::verdict_report_text(&gated, None));
    assert_matches_snapshot("gate", "gate.md", &comment::pull_request_comment_markdown(&summary));
    assert_matches_snapshot("gate", "gate.xml", &junit::junit_xml_of_verdicts(&summary));
}

#[test]
fn times_bytes_and_ratios_are_formatted_readably() {
    assert_eq!(decimal_byte_size_text(12), "12 B");
    assert_eq!(decimal_byte_size_text(134_217_728), "134 MB");
    assert_eq!(decimal_byte_size_text(1_720_000_000), "1.72 GB");
    assert_eq!(time_text(1_234_567.0), "1.235 ms");
    assert_eq!(time_text(12.0), "12.00 ns");
    assert_eq!(time_text(2.5e9), "2.500 s");
    assert_eq!(amount_rate_text(137_438_953_472, "FLOP", 0.9e9), "152.7 GFLOP/s");
    assert_eq!(amount_rate_text(1000, "B", 1000.0), "1.000 GB/s");
}

#[test]
fn a_calibration_report_matches_its_snapshot() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../kernelgate-fuzz/tests/corpus/calibration/calibration.json");
    let calibration = file::read_record::<GateCalibration>(&path).unwrap();
    assert_matches_snapshot(
        "search",
        "calibration.txt",
        &super::calibration::calibration_report_text(&calibration, None),
    );
    assert_matches_snapshot(
        "search",
        "calibration.md",
        &super::calibration::calibration_report_markdown(&calibration),
    );
}

#[test]
fn every_outcome_of_a_bisection_is_reported() {
    let ends = HeadToBaseTimeRatio { time_ratio: 1.2, time_ratio_low: 1.18, time_ratio_high: 1.22 };
    let suspect = |commit: &str, merged| SlowdownSuspectCommit {
        suspect_commit: commit.repeat(10),
        commit_subject: format!("change {commit}"),
        merged_commit_count: merged,
    };
    let found = |confirmation| CommitRangeWithSlowdown {
        last_good_position: 2,
        first_bad_position: 4,
        skipped_positions: vec![(3, "does not build".to_owned())],
        bad_to_good_time_ratio: ends,
        confirmation,
        comparisons_made: 7,
        bisection_confidence: 0.96,
    };
    let commits = FoundSlowdownCommits {
        suspects: vec![suspect("cccc", 0), suspect("dddd", 3)],
        last_good_commit: "bbbb".repeat(10),
        skipped_commits: BTreeMap::from([("cccc".repeat(10), "does not build".to_owned())]),
        git_diff_stat: " 2 files changed".to_owned(),
        executables: None,
    };
    let texts = [
        (BisectionEnd::SlowdownFound(found(BisectionAnswer::Slower(ends))), Some(commits.clone())),
        (
            BisectionEnd::SlowdownFound(found(BisectionAnswer::UndecidedWithReason(
                "noise".to_owned(),
            ))),
            Some(commits),
        ),
        (
            BisectionEnd::BadEndNotSlower(HeadToBaseTimeRatio {
                time_ratio: 1.0,
                time_ratio_low: 0.99,
                time_ratio_high: 1.01,
            }),
            None,
        ),
        (BisectionEnd::GoodAndBadEndUndecided("interval too wide".to_owned()), None),
        (BisectionEnd::BadEndUnmeasurable("the head does not build".to_owned()), None),
    ]
    .map(|(ended, found)| {
        let (good, bad) = ("v1 (aaaaaaaa)".to_owned(), "HEAD (eeeeeeee)".to_owned());
        super::bisection::bisection_report_text(&BisectionResult {
            case_id: "st_bif/forward/n1_f32/cuda/fused/hot".to_owned(),
            good_revision: good,
            bad_revision: bad,
            bisected_commit_count: 5,
            bisection_end: ended,
            found,
        })
    });
    assert_matches_snapshot("search", "bisection.txt", &texts.join("\n\n"));
}
