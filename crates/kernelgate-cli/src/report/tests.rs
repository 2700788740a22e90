//! The formats for reviewers and programs, as snapshots of one comparison and one gate with an
//! example of every finding.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use kernelgate::display::{amount_rate_text, byte_text, time_text};
use kernelgate::record::{VerificationExtent, file};

use super::formats::{comment, junit, metrics};
use super::{comparison, verdicts};
use crate::bisect::commits::SuspectCommit;
use crate::bisect::{
    Bisection, BisectionAnswer, CommitTimeRatio, FoundCommits, SearchEnd, SlowdownRange,
};
use crate::gate::baseline::{BaselineFacts, BaselineStaleness, GatePolicy, GateReport};
use crate::gate::calibration::Calibration;
use crate::gate::comparison::{
    BuildFacts, Comparison, ComparisonRound, CriterionOnlyBench, FailedProcess,
};
use crate::gate::costs::{CaseCost, ConfirmationPairs, CostGrowth};
use crate::gate::inconclusive_reason::{BuildFailure, DecidingSide, InconclusiveReason};
use crate::gate::judgement::{Judgement, JudgementEvidence, RunEvidence, SideRunCounts};
use crate::gate::kernels::code::{CodeComparison, ComparedKernels};
use crate::gate::kernels::explanation::{ChangeExplanation, SlowdownCause};
use crate::gate::limits::{CaseLimits, SourcedLimit};
use crate::gate::outputs::numerics::{ErrorFigure, ErrorGrowth, NumericsReport};
use crate::gate::outputs::verification::VerificationLoss;
use crate::gate::paired::{Arm, InconclusiveCause, PairedDecision, TestPlan};
use crate::gate::ratio_interval::{SingleRunSpread, SpreadSource, TimeRatio};
use crate::gate::rules::{AppliedAcceptance, RemovedCasesMeaning, RulesReport};
use crate::gate::verdict::Verdict;
use crate::gate::verdicts::RefusedBench;
use kernelgate_cuda::CaseFailure;

const REPORT_LIMITS: CaseLimits = CaseLimits::default_limit(0.01);
const ASSUMED_SPREAD: SingleRunSpread =
    SingleRunSpread { relative: 0.1, from: SpreadSource::Assumed };

/// Compares a text with the snapshot of that name in a folder of `snapshots`.
#[track_caller]
fn compare_with_snapshot(folder: &str, name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(format!("snapshots/{folder}"));
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

fn decision_of(case: &str, verdict: Verdict, change: f64, width: f64) -> PairedDecision {
    let ratio = |center: f64| TimeRatio { center, low: center - width, high: center + width };
    PairedDecision {
        case: case.to_owned(),
        verdict,
        reason: None,
        base_ns: 1_254_000.0,
        head_ns: 1_254_000.0 * change,
        ratio: ratio(change),
        cycles: Some(ratio(change * 1.0004)),
        null: ratio(1.0),
        threshold: 0.01,
        p_slower: if verdict == Verdict::Regressed { 0.000_03 } else { 0.7312 },
        p_faster: 1.0,
        detectable: Some(0.01 + 2.0 * width),
        pairs: 12,
        pairs_needed: None,
        decided_at: Some(12),
        base_contention: None,
        head_contention: None,
    }
}

/// A test comparison with one case of each verdict. The function is long because its value sets
/// every field.
#[expect(clippy::too_many_lines)]
fn comparison_of_every_verdict() -> Comparison {
    use Verdict::{Improved, Inconclusive, Regressed, Unchanged};
    let regressed = decision_of(
        "attention/forward/s1024_d64_full_bf16/cuda/flash_mma/hot",
        Regressed,
        1.053,
        0.004,
    );
    let mut wide =
        decision_of("denoise/step/pi05_s50_p968_bf16/cuda/graph/hot", Inconclusive, 1.02, 0.061);
    wide.reason = Some(InconclusiveCause::Wide);
    wide.pairs_needed = Some(44);
    let mut few = decision_of(
        "denoise/loop/pi05_s50_p968_steps10_bf16/cuda/graph/hot",
        Inconclusive,
        1.0,
        0.1,
    );
    few.ratio = TimeRatio { center: 1.0, low: 0.0, high: f64::INFINITY };
    (few.reason, few.detectable, few.pairs) = (Some(InconclusiveCause::TooFewPairs), None, 2);
    let judged = vec![
        Judgement::from_rounds(
            regressed.clone(),
            Some(PairedDecision { pairs: 14, ..regressed }),
            vec![],
            &REPORT_LIMITS,
        ),
        Judgement::from_rounds(few, None, vec![], &REPORT_LIMITS),
        Judgement::from_rounds(wide, None, vec![], &REPORT_LIMITS),
        Judgement::unmeasured(
            "denoise/step/pi05_s50_p968_bf16/cuda/per_op/hot".to_owned(),
            vec![InconclusiveReason::Skipped(BuildFailure::new(
                Arm::Head,
                "needs 201 MB | of 102 MB <free>",
            ))],
            &TestPlan::default(),
            &REPORT_LIMITS,
        ),
        Judgement::from_rounds(
            decision_of(
                "attention/backward/s512_d64_causal_bf16/cuda/flash_mma/hot",
                Improved,
                0.91,
                0.003,
            ),
            None,
            vec![],
            &REPORT_LIMITS,
        ),
        Judgement::from_rounds(
            decision_of("st_bif/forward/n1_f32/cuda/fused/hot", Unchanged, 1.001, 0.002),
            None,
            vec![],
            &REPORT_LIMITS,
        ),
    ];
    Comparison {
        device: "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz".to_owned(),
        limits: REPORT_LIMITS,
        judged,
        refused: vec![RefusedBench {
            field: "revision".to_owned(),
            base: "1".to_owned(),
            head: "2".to_owned(),
            cases: vec!["st_bif/backward/n1_f32/cuda/replay/hot".to_owned()],
        }],
        new: vec!["st_bif/forward/n1_f32/cuda/newer/hot".to_owned()],
        skipped: BTreeMap::from([(
            "attention/forward/x/cuda/cudnn/hot".to_owned(),
            "libcudnn is missing".to_owned(),
        )]),
        failed: BTreeMap::from([(
            "st_bif/forward/n1_f16/cuda/fused/hot".to_owned(),
            "output `spikes`: 3 of 64 elements differ, <first> & \"second\"\u{7}".into(),
        )]),
        unverified: vec![],
        verification: vec![],
        numerics: NumericsReport::default(),
        costs: vec![],
        rules: RulesReport::default(),
        facts: BuildFacts {
            base: "main (1a2b3c4d)".to_owned(),
            head: "HEAD (9f8e7d6c)".to_owned(),
            budget_s: 600.0,
            broken: vec![FailedProcess {
                bench: "denoise".to_owned(),
                side: Arm::Base,
                reason: "signal: 9 (SIGKILL)".to_owned(),
                abandoned: true,
            }],
            identical: vec!["st_bif".to_owned()],
            optimised: true,
            rounds: vec![
                ComparisonRound { blocks: 6, processes: 24, wall_s: 181.3 },
                ComparisonRound { blocks: 7, processes: 28, wall_s: 60.2 },
            ],
            ..BuildFacts::default()
        },
    }
}

fn judgement_of(case: &str, verdict: Verdict, change: f64, runs: (usize, usize)) -> Judgement {
    let side = |runs: usize, spread: f64| SideRunCounts {
        runs,
        spread: (runs > 1).then_some(spread),
        single: (runs == 1).then_some(ASSUMED_SPREAD),
        contention: 0.0,
    };
    let single = InconclusiveReason::SingleRun { assumed: 0.1 };
    Judgement {
        case: case.to_owned(),
        verdict,
        reasons: (verdict == Verdict::Inconclusive).then_some(single).into_iter().collect(),
        threshold: SourcedLimit::from_default(0.281),
        base_ns: 200_000.0,
        head_ns: 200_000.0 * change,
        ratio: TimeRatio { center: change, low: change * 0.98, high: change * 1.02 },
        detectable: Some(0.307),
        evidence: JudgementEvidence::Runs(Box::new(RunEvidence {
            same_device: false,
            card: None,
            base: side(runs.0, 0.011),
            head: SideRunCounts { spread: None, ..side(runs.1, 0.0) },
        })),
    }
}

/// A test case that is inconclusive for a given reason.
fn inconclusive_judgement(
    case: &str,
    change: f64,
    runs: (usize, usize),
    reason: InconclusiveReason,
) -> Judgement {
    Judgement { reasons: vec![reason], ..judgement_of(case, Verdict::Inconclusive, change, runs) }
}

fn gate_report_example() -> GateReport {
    GateReport {
        device: "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz".to_owned(),
        limits: GatePolicy::default().limits,
        judged: vec![
            judgement_of("a/b/n1/cuda/x/hot", Verdict::Regressed, 1.4, (5, 1)),
            judgement_of("a/b/n2/cuda/x/hot", Verdict::Inconclusive, 1.5, (1, 1)),
            inconclusive_judgement(
                "a/b/n5/cuda/x/hot",
                1.29,
                (5, 1),
                InconclusiveReason::Undetectable { detectable: 0.307 },
            ),
            judgement_of("a/b/n3/cuda/x/hot", Verdict::Unchanged, 1.01, (5, 1)),
        ],
        refused: vec![],
        new: vec![],
        skipped: BTreeMap::new(),
        failed: BTreeMap::new(),
        unverified: vec![],
        verification: vec![],
        numerics: NumericsReport::default(),
        costs: vec![],
        rules: RulesReport::default(),
        facts: BaselineFacts {
            baseline: "main".to_owned(),
            base_commits: vec!["1a2b3c4d".to_owned()],
            head_commits: vec!["9f8e7d6c+changes".to_owned()],
            other_device: Some(("GPU-1".to_owned(), "GPU-2".to_owned())),
            unsealed: true,
            staleness: Some(BaselineStaleness {
                recorded: "2026-11-21T12:00:00Z".to_owned(),
                commit: "1a2b3c4d".to_owned(),
                days: Some(1),
                commits: Some(34),
            }),
            policy: GatePolicy::default(),
            not_run: vec!["a/b/n4/cuda/x/hot".to_owned()],
            interrupted: vec!["other".to_owned()],
            missing_shards: vec![],
            own: vec![],
        },
    }
}

#[test]
fn a_slower_case_is_explained_and_skips_are_reported() {
    let case = "attention/forward/s1024_d64_full_bf16/cuda/flash_mma/hot".to_owned();
    let change = "attention/flash_mma D=64: registers 96 -> 128".to_owned();
    let code = CodeComparison { same: 1, code: vec![change.clone()], ..CodeComparison::default() };
    let why = ChangeExplanation {
        causes: vec![SlowdownCause::Code],
        evidence: vec![change.clone()],
        ..ChangeExplanation::default()
    };
    let facts = BuildFacts {
        code: BTreeMap::from([(case.clone(), code)]),
        explanations: BTreeMap::from([(case.clone(), why)]),
        unaffected: vec!["a/b/n1/cuda/x/hot".to_owned()],
        ..comparison_of_every_verdict().facts
    };
    let compared = Comparison { facts, ..comparison_of_every_verdict() };
    let text = verdicts::text(&compared, None);
    for line in [
        format!("{case}: changed: code; {change}"),
        format!("code changed: {change} (in {case})"),
        "machine code: other code or launches in 1 of 7 cases, the same in 0, not known of 6"
            .to_owned(),
        "--affected: 1 case with the same machine code".to_owned(),
    ] {
        assert!(text.contains(&format!("\n{line}")), "`{line}` is not in:\n{text}");
    }
    let comment = comment::markdown(&verdicts::summary(&compared, "kernelgate compare"));
    let line = format!("- {case}: changed: code; {change}");
    assert!(comment.lines().any(|it| it == line), "{comment}");
}

#[test]
fn the_headline_names_what_decides_the_exit_code_and_junit_what_is_accepted() {
    let case = "st_bif/forward/n1_f32/cuda/fused/hot".to_owned();
    let grown = |cost: CaseCost| CostGrowth {
        case: case.clone(),
        cost,
        base: 1.0,
        head: 2.0,
        allowed: 0.0,
        further: None,
    };
    let broken = |side, abandoned| FailedProcess {
        bench: "st_bif".to_owned(),
        side,
        reason: "hung".to_owned(),
        abandoned,
    };
    let accepted = AppliedAcceptance {
        case: case.clone(),
        slower: Some(0.5),
        growth: None,
        less_verified: false,
        removed: false,
        reason: "exact sums".to_owned(),
    };
    let rules = RulesReport {
        file: Some("kernelgate.toml".to_owned()),
        thresholds: vec![("`st`: 3%".to_owned(), 1)],
        accepted: vec![accepted],
        undecided: vec!["launches could not be judged".to_owned()],
        ..RulesReport::default()
    };
    let compared = Comparison {
        costs: vec![grown(CaseCost::Launches), grown(CaseCost::DeviceMemory)],
        rules,
        facts: BuildFacts {
            broken: vec![
                broken(Arm::Head, true),
                broken(Arm::Head, true),
                broken(Arm::Base, false),
            ],
            ..comparison_of_every_verdict().facts
        },
        ..comparison_of_every_verdict()
    };
    let headline = verdicts::verdict_headline(&compared);
    insta::assert_snapshot!(headline, @"1 regressed, 1 improved, 1 unchanged, 3 inconclusive, 1 failed, 1 of higher cost, 1 refused of 6 (threshold 1%); 1 bench broke in the head; 1 skipped; 1 bound of kernelgate.toml not judged");
    let xml = junit::xml(&verdicts::summary(&compared, ""));
    for element in [
        "<system-out>accepted in kernelgate.toml: up to 50% slower: exact sums</system-out>",
        "name=\"kernelgate.toml\" value=\"threshold in kernelgate.toml: `st`: 3% (1 case)\"",
        "<skipped message=\"launches could not be judged\"/>",
    ] {
        assert!(xml.contains(element), "{xml}");
    }
}

#[test]
fn a_comparison_without_compared_kernels_does_not_report_equal_kernels() {
    let with = |not_compared: Option<(&str, &str)>| {
        let owned = |(what, why): (&str, &str)| (what.to_owned(), why.to_owned());
        let compared = ComparedKernels {
            arch: "sm_90a".to_owned(),
            not_compared: not_compared.map(owned).into_iter().collect(),
            ..ComparedKernels::default()
        };
        comparison::kernels(&compared)
    };
    let lines =
        ["kernels for sm_90a: none compared", "sm_90a: spin not compared: NVRTC is missing"];
    assert_eq!(with(Some(("spin", "NVRTC is missing"))), lines);
    assert_eq!(with(None), ["kernels for sm_90a: none compared, as no bench lists one"]);
}

#[test]
fn a_message_with_line_breaks_adds_no_report_line_and_is_escaped_in_xml() {
    fn failing<T: From<&'static str>>(case: &str) -> BTreeMap<String, T> {
        let message = "boom\n\n0 regressed, 0 improved, 3 unchanged\u{202e}\u{9b}31m\u{ffff}";
        BTreeMap::from([(case.to_owned(), message.into())])
    }
    let report =
        GateReport { failed: failing("a/b/x"), skipped: failing("a/b/y"), ..gate_report_example() };
    let compared = Comparison {
        failed: failing("a/b/x"),
        skipped: failing("a/b/z"),
        facts: BuildFacts {
            failed_in_base: failing("a/b/y"),
            ..comparison_of_every_verdict().facts
        },
        ..comparison_of_every_verdict()
    };
    for text in [verdicts::text(&report, None), verdicts::text(&compared, None)] {
        let printed = "boom\n    0 regressed, 0 improved, 3 unchanged\\u{202e}\\u{ffff}\n";
        assert!(text.contains(&format!("a/b/x: {printed}")), "{text}");
        assert!(text.contains(&format!("a/b/y: {printed}")), "{text}");
        assert_eq!(text.matches("\n0 regressed, 0 improved, 3 unchanged").count(), 0, "{text}");
    }
    let xml = junit::xml(&verdicts::summary(&report, "kernelgate gate"));
    assert!(xml.contains("3 unchanged\\u{202e}\\u{ffff}"), "{xml}");
    assert!(!xml.contains(['\u{202e}', '\u{9b}', '\u{ffff}']), "{xml}");
}

/// A failure of a test case whose output `<spikes>` differs, with the number of checked elements.
fn outputs_with_differing_bits() -> CaseFailure {
    CaseFailure::new("differs", "1 of 64 elements differ")
        .with_name("output", "<spikes>")
        .with_number("checked", 64.0)
}

/// Lists and findings that [`comparison_of_every_verdict`] lacks. The function is long because its
/// value has every field.
#[expect(clippy::too_many_lines)]
fn comparison_with_every_field() -> Comparison {
    let case = |name: &str| format!("st_bif/forward/{name}_f32/cuda/fused/hot");
    let slower = "attention/forward/s1024_d64_full_bf16/cuda/flash_mma/hot".to_owned();
    let code = CodeComparison {
        same: 1,
        code: vec!["flash: registers 96 -> 128".to_owned()],
        ..Default::default()
    };
    let seeds = ErrorGrowth {
        case: case("n2"),
        output: Some("spikes".to_owned()),
        figure: ErrorFigure::RelativeL2,
        seeds: 8,
        needed: 8,
        base: 3.8e-5,
        head: 1.2e-4,
        ratio: Some(3.2),
        allowed: 1.5,
        one_data_set: false,
    };
    let suspected = ErrorGrowth { case: case("n3"), seeds: 3, ..seeds.clone() };
    let one = ErrorGrowth { case: case("n4"), seeds: 1, one_data_set: true, ..seeds.clone() };
    let cost = |cost: CaseCost, further| CostGrowth {
        case: case("n1"),
        cost,
        base: 2e9,
        head: 3e9,
        allowed: 0.1,
        further,
    };
    let unclear = ConfirmationPairs { pairs: 8, grown: 6, found: false };
    let checked = |checked| VerificationExtent::Verified { checked, total: 1600 };
    let facts = BuildFacts {
        calibration: Some("calibration of 2026-11-20: threshold 1.50 %".to_owned()),
        removed: vec![case("n5")],
        failed_in_base: BTreeMap::from([(case("n7"), outputs_with_differing_bits())]),
        left_alone: BTreeMap::from([("other of the head".to_owned(), "no mark".to_owned())]),
        criterion: vec![CriterionOnlyBench {
            bench: "plain".to_owned(),
            cases: vec!["plain/sum".to_owned()],
            process_s: 1.5,
            overridden: BTreeMap::from([("plain/sum".to_owned(), vec!["10 samples".to_owned()])]),
        }],
        optimised: false,
        delays: Some("x=100".to_owned()),
        code: BTreeMap::from([(slower.clone(), code)]),
        explanations: BTreeMap::from([(
            slower,
            ChangeExplanation {
                causes: vec![SlowdownCause::Code],
                evidence: vec!["flash: registers 96 -> 128".to_owned()],
                ..ChangeExplanation::default()
            },
        )]),
        unaffected: vec!["a/b/n1/cuda/x/hot".to_owned()],
        untimed: vec!["a/b/n2/cuda/x/hot".to_owned()],
        ..comparison_of_every_verdict().facts
    };
    Comparison {
        unverified: vec![case("n6")],
        verification: [VerificationExtent::Unverified, checked(3)]
            .into_iter()
            .filter_map(|head| VerificationLoss::from_extents(&case("n8"), checked(1600), head))
            .collect(),
        numerics: NumericsReport {
            compared: 5,
            changed: 3,
            changed_outputs: 3,
            grown: vec![seeds, suspected, one],
        },
        costs: vec![cost(CaseCost::DeviceMemory, None), cost(CaseCost::HostTime, Some(unclear))],
        rules: RulesReport {
            removed: RemovedCasesMeaning::default(),
            file: Some("kernelgate.toml".to_owned()),
            thresholds: vec![("`^st_bif/`: 3%, 200 ns".to_owned(), 2)],
            accepted: vec![AppliedAcceptance {
                case: case("n1"),
                slower: Some(0.12),
                growth: Some(2.0),
                removed: false,
                less_verified: true,
                reason: "exact sums".to_owned(),
            }],
            notes: vec!["[[accept]] `x` matches no case".to_owned()],
            unmatched: BTreeSet::new(),
            undecided: vec!["launches could not be judged".to_owned()],
        },
        facts,
        ..comparison_of_every_verdict()
    }
}

/// A test report with the lists and findings that [`gate_report_example`] lacks.
fn gate_report_with_every_field() -> GateReport {
    let Comparison { verification, numerics, costs, rules, .. } = comparison_with_every_field();
    let case = |name: &str| format!("st_bif/forward/{name}_f32/cuda/fused/hot");
    let inconclusive = |name: &str, reason: InconclusiveReason| {
        let mut judged = inconclusive_judgement(&case(name), 1.1, (5, 2), reason);
        if let JudgementEvidence::Runs(runs) = &mut judged.evidence {
            runs.head.contention = 0.4;
        }
        judged
    };
    let single = |judged: &mut Judgement, single: SingleRunSpread| {
        if let JudgementEvidence::Runs(runs) = &mut judged.evidence {
            runs.base.single = Some(single);
        }
    };
    let mut all = gate_report_example().judged;
    all.extend([
        inconclusive(
            "wide",
            InconclusiveReason::Wide(TimeRatio { center: 1.1, low: 1.078, high: 1.122 }),
        ),
        inconclusive("throttled", InconclusiveReason::Throttled(DecidingSide { side: Arm::Head })),
        inconclusive("shared", InconclusiveReason::SharedGpu(DecidingSide { side: Arm::Head })),
        inconclusive("clock", InconclusiveReason::Clock { ratio: 0.8 }),
        inconclusive("unsettled", InconclusiveReason::Unsettled { width: 0.3 }),
        inconclusive("host", InconclusiveReason::HostBound(DecidingSide { side: Arm::Base })),
        inconclusive("less", InconclusiveReason::LessVerified(verification[1].clone())),
    ]);
    single(&mut all[0], SingleRunSpread { relative: 0.02, from: SpreadSource::EarlierRuns });
    single(&mut all[2], SingleRunSpread { relative: 0.03, from: SpreadSource::Calibration });
    let facts = BaselineFacts {
        missing_shards: vec!["st_bif 2/4".to_owned()],
        own: vec!["s1/st_bif".to_owned()],
        ..gate_report_example().facts
    };
    GateReport {
        judged: all,
        new: vec![case("n5")],
        skipped: BTreeMap::from([(case("n6"), "needs 201 MB | of 102 MB <free>".to_owned())]),
        failed: BTreeMap::from([(case("n7"), outputs_with_differing_bits())]),
        unverified: vec![case("n9")],
        verification,
        numerics,
        costs,
        rules,
        facts,
        ..gate_report_example()
    }
}

#[test]
fn a_comparison_report_with_every_kind_of_finding_matches_its_snapshot() {
    let compared = comparison_with_every_field();
    let summary = verdicts::summary(&compared, "kernelgate compare --base main");
    compare_with_snapshot("compare", "everything_compared.txt", &verdicts::text(&compared, None));
    compare_with_snapshot("compare", "everything_compared.md", &comment::markdown(&summary));
    compare_with_snapshot("compare", "everything_compared.xml", &junit::xml(&summary));
    compare_with_snapshot(
        "compare",
        "everything_compared.json",
        &serde_json::to_string_pretty(&compared).unwrap(),
    );
}

#[test]
fn a_gate_report_with_every_kind_of_finding_matches_its_snapshot() {
    let gated = gate_report_with_every_field();
    let summary = verdicts::summary(&gated, "kernelgate gate --baseline main");
    compare_with_snapshot("gate", "everything_gated.txt", &verdicts::text(&gated, None));
    compare_with_snapshot("gate", "everything_gated.md", &comment::markdown(&summary));
    compare_with_snapshot("gate", "everything_gated.xml", &junit::xml(&summary));
    compare_with_snapshot(
        "gate",
        "everything_gated.json",
        &serde_json::to_string_pretty(&gated).unwrap(),
    );
}

#[test]
fn a_lost_verification_is_shown_in_comment_junit_and_page() {
    let mut lines = Vec::new();
    for summary in [
        verdicts::summary(&comparison_with_every_field(), ""),
        verdicts::summary(&gate_report_with_every_field(), ""),
    ] {
        let page = crate::pages::verdict::page(&summary).unwrap();
        for text in [comment::markdown(&summary), junit::xml(&summary), page] {
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
fn a_refusal_is_reported_before_every_verdict() {
    let refusal = RefusedBench {
        field: "driver".to_owned(),
        base: "580".to_owned(),
        head: "570".to_owned(),
        cases: ["a", "b", "c"].map(str::to_owned).to_vec(),
    };
    let gated = GateReport { judged: vec![], refused: vec![refusal], ..gate_report_example() };
    compare_with_snapshot("gate", "refused_gate.txt", &verdicts::text(&gated, None));
    let summary = verdicts::summary(&gated, "kernelgate gate --baseline main");
    compare_with_snapshot("gate", "refused_gate.md", &comment::markdown(&summary));
}

#[test]
fn comparison_report_matches_snapshot() {
    let compared = comparison_of_every_verdict();
    let summary = verdicts::summary(&compared, "kernelgate compare --base main --budget 600s");
    compare_with_snapshot("compare", "comparison.txt", &verdicts::text(&compared, None));
    compare_with_snapshot("compare", "comparison.md", &comment::markdown(&summary));
    compare_with_snapshot("compare", "comparison.xml", &junit::xml(&summary));
    let metrics = metrics::metrics_of_comparison(&compared);
    compare_with_snapshot(
        "compare",
        "comparison.bmf",
        &serde_json::to_string_pretty(&metrics::bencher_metric_format(&metrics)).unwrap(),
    );
    compare_with_snapshot(
        "compare",
        "comparison.smaller",
        &serde_json::to_string_pretty(&metrics::smaller_is_better_format(&metrics)).unwrap(),
    );
}

#[test]
fn gate_report_matches_snapshot() {
    let gated = gate_report_example();
    let summary = verdicts::summary(&gated, "kernelgate gate --baseline main --last 3");
    compare_with_snapshot("gate", "gate.txt", &verdicts::text(&gated, None));
    compare_with_snapshot("gate", "gate.md", &comment::markdown(&summary));
    compare_with_snapshot("gate", "gate.xml", &junit::xml(&summary));
}

#[test]
fn quantities_are_formatted_readably() {
    assert_eq!(byte_text(12), "12 B");
    assert_eq!(byte_text(134_217_728), "134 MB");
    assert_eq!(byte_text(1_720_000_000), "1.72 GB");
    assert_eq!(time_text(1_234_567.0), "1.235 ms");
    assert_eq!(time_text(12.0), "12.00 ns");
    assert_eq!(time_text(2.5e9), "2.500 s");
    assert_eq!(amount_rate_text(137_438_953_472, "FLOP", 0.9e9), "152.7 GFLOP/s");
    assert_eq!(amount_rate_text(1000, "B", 1000.0), "1.000 GB/s");
}

#[test]
fn calibration_report_matches_snapshot() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../kernelgate-fuzz/tests/corpus/calibration/calibration.json");
    let calibration = file::read::<Calibration>(&path).unwrap();
    compare_with_snapshot(
        "search",
        "calibration.txt",
        &super::calibration::text(&calibration, None),
    );
    compare_with_snapshot("search", "calibration.md", &super::calibration::markdown(&calibration));
}

#[test]
fn every_outcome_of_a_bisection_is_reported() {
    let ends = CommitTimeRatio { ratio: 1.2, low: 1.18, high: 1.22 };
    let suspect = |commit: &str, merged| SuspectCommit {
        commit: commit.repeat(10),
        subject: format!("change {commit}"),
        merged,
    };
    let found = |confirmation| SlowdownRange {
        last_good: 2,
        first_bad: 4,
        left_out: vec![(3, "does not build".to_owned())],
        ends,
        confirmation,
        asked: 7,
        confidence: 0.96,
    };
    let commits = FoundCommits {
        suspects: vec![suspect("cccc", 0), suspect("dddd", 3)],
        last_good: "bbbb".repeat(10),
        left_out: BTreeMap::from([("cccc".repeat(10), "does not build".to_owned())]),
        diff_stat: " 2 files changed".to_owned(),
        executables: None,
    };
    let texts = [
        (SearchEnd::Found(found(BisectionAnswer::Slower(ends))), Some(commits.clone())),
        (SearchEnd::Found(found(BisectionAnswer::Undecided("noise".to_owned()))), Some(commits)),
        (SearchEnd::NoDifference(CommitTimeRatio { ratio: 1.0, low: 0.99, high: 1.01 }), None),
        (SearchEnd::EndsUndecided("interval too wide".to_owned()), None),
        (SearchEnd::EndUnusable("the head does not build".to_owned()), None),
    ]
    .map(|(ended, found)| {
        let (good, bad) = ("v1 (aaaaaaaa)".to_owned(), "HEAD (eeeeeeee)".to_owned());
        super::bisection::text(&Bisection {
            case: "st_bif/forward/n1_f32/cuda/fused/hot".to_owned(),
            good,
            bad,
            commits: 5,
            ended,
            found,
        })
    });
    compare_with_snapshot("search", "bisection.txt", &texts.join("\n\n"));
}
