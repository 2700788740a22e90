use proptest::prelude::*;

use super::*;

mod simulation;

/// Makes a test decision with this verdict and default numbers.
pub fn test_decision(case: &str, verdict: VerdictOnCase) -> PairedDecisionOnCase {
    let ratio = TimeRatioWithInterval { estimated_ratio: 1.0, ratio_low: 0.9, ratio_high: 1.1 };
    PairedDecisionOnCase {
        case_id: case.to_owned(),
        verdict,
        reason: None,
        base_median_launch_ns: 1.0,
        head_median_launch_ns: 1.0,
        ratio,
        cycle_ratio: None,
        null_pair_ratio: ratio,
        relative_threshold: 0.01,
        p_value_of_not_slower: 1.0,
        p_value_of_not_faster: 1.0,
        smallest_detectable_slowdown: None,
        usable_pairs: 8,
        pairs_needed: None,
        pairs_at_decision: None,
        base_cpu_contention: None,
        head_cpu_contention: None,
    }
}

/// Makes one test block for each pair of head-to-base ratios, with base times near `time_ns` and
/// alternating leaders.
fn test_blocks_with_ratios(ratios: &[[f64; 2]], time_ns: f64) -> Vec<TimedTrialBlock> {
    let block = |(index, ratios): (usize, &[f64; 2])| {
        let base = [1.0 + 1e-4 * (index % 3) as f64, 1.0 - 1e-4 * (index % 2) as f64]
            .map(|factor| test_timing(time_ns * factor));
        let head = [0, 1].map(|i| test_timing(base[i].median_time_ns * ratios[i]));
        TimedTrialBlock {
            first_and_last_arm: if index % 2 == 0 {
                ComparedArm::BaseBuild
            } else {
                ComparedArm::HeadBuild
            },
            base,
            head,
        }
    };
    ratios.iter().enumerate().map(block).collect()
}

fn test_timing(time_ns: f64) -> CaseTimeInTrial {
    CaseTimeInTrial { median_time_ns: time_ns, ..CaseTimeInTrial::default() }
}

/// Makes test blocks whose head-to-base ratios lie within a few tenths of a per cent of `ratio`.
fn test_blocks_near_ratio(ratio: f64, count: usize) -> Vec<TimedTrialBlock> {
    let ratios: Vec<[f64; 2]> = (0..count)
        .map(|i| [ratio * (1.0 + 1e-3 * (i % 4) as f64), ratio * (1.0 - 1.1e-3 * (i % 5) as f64)])
        .collect();
    test_blocks_with_ratios(&ratios, 1e6)
}

fn decide_one_test_case(
    blocks: Vec<TimedTrialBlock>,
    plan: &ComparisonTestPlan,
    last: bool,
) -> PairedDecisionsOfRound {
    decide_cases_with_one_plan(
        &TimedTrialBlocksByCase::from([("case".to_owned(), blocks)]),
        plan,
        last,
    )
}

#[test]
fn the_absolute_threshold_does_not_apply_to_means_over_iterations() {
    let small = |averaged| {
        change_timings_of_blocks(test_blocks_near_ratio(1.2, 20), |_, timing| {
            timing.median_time_ns /= 1e5;
            timing.time_is_mean = averaged;
        })
    };
    let verdict = |averaged| {
        let outcome = decide_one_test_case(small(averaged), &ComparisonTestPlan::default(), true);
        (outcome.decisions[0].verdict, outcome.decisions[0].relative_threshold)
    };
    let (launch, mean) = (verdict(false), verdict(true));
    assert_eq!(launch.0, VerdictOnCase::Unchanged, "2 ns of 10 are less than 100 ns");
    assert_eq!(mean.0, VerdictOnCase::Regressed);
    assert!(launch.1 > 9.0 && (mean.1 - 0.01).abs() < 1e-9, "{launch:?}, {mean:?}");
}

/// In this test the slow-down is 20 %, above the threshold; one accepted bound allows it, a smaller
/// bound does not.
#[test]
fn a_threshold_for_some_cases_does_not_change_the_others() {
    let cases = ["a", "b", "c"].map(|case| (case.to_owned(), test_blocks_near_ratio(1.2, 40)));
    let (cases, plan) = (TimedTrialBlocksByCase::from(cases), ComparisonTestPlan::default());
    let of_case = |case: &str| match case {
        "a" => ComparisonTestPlan { relative_time_change_threshold: 0.3, ..plan },
        "b" => ComparisonTestPlan { relative_time_change_threshold: 0.1, ..plan },
        _ => plan,
    };
    let outcome = decide_cases_with_own_thresholds(
        &cases,
        &plan,
        &of_case,
        ErrorRateFamily::CasesOfThisDecision,
        true,
    );
    let decided = |case: &str| {
        let decision = outcome.decision_on_case(case).unwrap();
        (decision.verdict, (100.0 * decision.relative_threshold).round())
    };
    assert_eq!(decided("a"), (VerdictOnCase::Unchanged, 30.0));
    assert_eq!(decided("b"), (VerdictOnCase::Regressed, 10.0));
    assert_eq!(decided("c"), (VerdictOnCase::Regressed, 1.0));
    let plain = decide_cases_with_one_plan(&cases, &plan, true);
    assert!(plain.decisions.iter().all(|decision| decision.verdict == VerdictOnCase::Regressed));
}

fn change_timings_of_blocks(
    mut blocks: Vec<TimedTrialBlock>,
    edit: impl Fn(ComparedArm, &mut CaseTimeInTrial),
) -> Vec<TimedTrialBlock> {
    for block in &mut blocks {
        block.base.iter_mut().for_each(|observation| edit(ComparedArm::BaseBuild, observation));
        block.head.iter_mut().for_each(|observation| edit(ComparedArm::HeadBuild, observation));
    }
    blocks
}

fn verdict_on_test_blocks(
    blocks: Vec<TimedTrialBlock>,
) -> (VerdictOnCase, Option<CauseOfInconclusiveDecision>) {
    let outcome = decide_one_test_case(blocks, &ComparisonTestPlan::default(), true);
    (outcome.decisions[0].verdict, outcome.decisions[0].reason)
}

#[test]
fn slower_faster_and_unchanged_cases_are_decided_early() {
    let plan = ComparisonTestPlan::default();
    for (ratio, expected, pairs) in [
        (1.05, VerdictOnCase::Regressed, 10),
        (0.95, VerdictOnCase::Improved, 10),
        (1.0, VerdictOnCase::Unchanged, 8),
        (1.003, VerdictOnCase::Unchanged, 8),
    ] {
        let outcome = decide_one_test_case(test_blocks_near_ratio(ratio, pairs / 2), &plan, false);
        let decision = &outcome.decisions[0];
        assert_eq!(
            (decision.verdict, decision.pairs_at_decision),
            (expected, Some(pairs)),
            "{ratio}: {decision:?}"
        );
        assert!(outcome.undecided_cases.is_empty() && outcome.environment_is_stable);
        let before =
            decide_one_test_case(test_blocks_near_ratio(ratio, pairs / 2 - 1), &plan, false);
        assert_eq!(before.undecided_cases, ["case"]);
        assert!(
            (decision.ratio.ratio_low..=decision.ratio.ratio_high).contains(&ratio),
            "{decision:?}"
        );
    }
    assert_eq!(
        decide_one_test_case(test_blocks_near_ratio(1.0, 1), &plan, false)
            .count_cases_with_verdict(VerdictOnCase::Inconclusive),
        1
    );
}

#[test]
fn too_few_pairs_never_show_a_regression() {
    let outcome =
        decide_one_test_case(test_blocks_near_ratio(3.0, 3), &ComparisonTestPlan::default(), true);
    let decision = &outcome.decisions[0];
    assert_eq!(
        (decision.verdict, decision.reason),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::TooFewPairs))
    );
    assert_eq!((decision.smallest_detectable_slowdown, decision.pairs_needed), (None, Some(8)));
    assert!(outcome.undecided_cases.is_empty());
    assert_eq!(
        verdict_on_test_blocks(test_blocks_near_ratio(3.0, 4)),
        (VerdictOnCase::Regressed, None)
    );
}

#[test]
fn blocks_of_a_throttled_gpu_are_excluded() {
    let mut blocks = test_blocks_near_ratio(3.0, 6);
    blocks.iter_mut().take(3).for_each(|block| block.head[1].slowed_by_heat_or_hardware = true);
    let outcome = decide_one_test_case(blocks.clone(), &ComparisonTestPlan::default(), true);
    assert_eq!(
        (outcome.decisions[0].usable_pairs, outcome.decisions[0].reason),
        (6, Some(CauseOfInconclusiveDecision::TooManyThrottledBlocks))
    );
    blocks.extend(test_blocks_near_ratio(3.0, 1));
    assert_eq!(verdict_on_test_blocks(blocks), (VerdictOnCase::Regressed, None));
}

#[test]
fn a_change_below_the_relative_or_absolute_threshold_is_ignored() {
    let short = |ratio: f64| {
        change_timings_of_blocks(test_blocks_near_ratio(ratio, 8), |_, observation| {
            observation.median_time_ns /= 1e3
        })
    };
    assert_eq!(
        verdict_on_test_blocks(short(1.05)),
        (VerdictOnCase::Unchanged, None),
        "50 ns of 1 µs"
    );
    assert_eq!(
        verdict_on_test_blocks(short(1.15)),
        (VerdictOnCase::Regressed, None),
        "150 ns of 1 µs"
    );
    let plan =
        ComparisonTestPlan { relative_time_change_threshold: 0.1, ..ComparisonTestPlan::default() };
    assert_eq!(
        decide_one_test_case(test_blocks_near_ratio(1.05, 8), &plan, true).decisions[0].verdict,
        VerdictOnCase::Unchanged
    );
}

/// Makes test blocks whose head-to-base ratios are spread evenly over this percentage around 1, in
/// an order without a trend.
fn test_blocks_evenly_spread(percent: f64, count: usize) -> Vec<TimedTrialBlock> {
    let at = |i: usize| 1.0 + 0.01 * percent * ((i * 37 % 101) as f64 / 100.0 - 0.5);
    let ratios: Vec<[f64; 2]> = (0..count).map(|i| [at(2 * i), at(2 * i + 1)]).collect();
    test_blocks_with_ratios(&ratios, 1e6)
}

#[test]
fn quiet_cases_are_decided_after_24_blocks_and_noisy_ones_continue() {
    let plan = ComparisonTestPlan::default();
    let after = |percent: f64, count: usize| {
        let outcome = decide_one_test_case(test_blocks_evenly_spread(percent, count), &plan, false);
        (outcome.decisions[0].verdict, outcome.decisions[0].pairs_at_decision)
    };
    let (unchanged, open) = (VerdictOnCase::Unchanged, (VerdictOnCase::Inconclusive, None));
    assert_eq!([after(10.0, 23), after(10.0, 24)], [open, (unchanged, Some(48))]);
    assert_eq!(
        [after(42.0, 24), after(42.0, 47), after(42.0, 48)],
        [open, open, (unchanged, Some(96))]
    );
    // The test checks that the reported number of needed pairs is that of an interim analysis, and
    // not the raw estimate.
    let needed = |percent: f64, count: usize| {
        decide_one_test_case(test_blocks_evenly_spread(percent, count), &plan, false).decisions[0]
            .pairs_needed
    };
    assert_eq!([needed(10.0, 8), needed(42.0, 36)], [Some(48), Some(192)]);
}

#[test]
fn a_difference_in_clocks_is_not_attributed_to_the_head() {
    let with = |cycles_ratio: f64| {
        change_timings_of_blocks(test_blocks_near_ratio(1.05, 8), |arm, observation| {
            let ratio = if arm == ComparedArm::HeadBuild { cycles_ratio / 1.05 } else { 1.0 };
            observation.median_cycles_per_launch = Some(observation.median_time_ns * 1.98 * ratio);
        })
    };
    assert_eq!(
        verdict_on_test_blocks(with(1.0)),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::ClockFrequencyChanged))
    );
    assert_eq!(verdict_on_test_blocks(with(1.05)), (VerdictOnCase::Regressed, None));
    let outcome = decide_one_test_case(with(1.0), &ComparisonTestPlan::default(), false);
    assert!(outcome.undecided_cases.is_empty(), "the cycles are shown to be the same");
    let near = decide_one_test_case(with(1.009), &ComparisonTestPlan::default(), false);
    assert_eq!(near.undecided_cases, ["case"], "more blocks may still show it in cycles");
    let cycles = outcome.decisions[0].cycle_ratio.unwrap();
    assert!((cycles.estimated_ratio - 1.0).abs() < 2e-3, "{cycles:?}");
    // In this part of the test, one process has no clock reading, so clock cycles are not used.
    let mut gap = with(1.0);
    gap[3].base[1].median_cycles_per_launch = None;
    assert_eq!(verdict_on_test_blocks(gap), (VerdictOnCase::Regressed, None));
}

#[test]
fn load_beside_only_one_build_makes_a_case_inconclusive() {
    let with = |ratio: f64, base: f64, head: f64| {
        change_timings_of_blocks(test_blocks_near_ratio(ratio, 8), |arm, observation| {
            observation.contention_share =
                Some(if arm == ComparedArm::HeadBuild { head } else { base })
        })
    };
    assert_eq!(
        verdict_on_test_blocks(with(1.5, 0.01, 0.30)),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::DifferentCpuContention))
    );
    assert_eq!(
        verdict_on_test_blocks(with(1.03, 0.0, 0.015)),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::DifferentCpuContention)),
        "3 % are explained"
    );
    assert_eq!(
        verdict_on_test_blocks(with(1.08, 0.0, 0.015)),
        (VerdictOnCase::Regressed, None),
        "5 % are left"
    );
    assert_eq!(verdict_on_test_blocks(with(1.05, 0.3, 0.3)), (VerdictOnCase::Regressed, None));
    assert_eq!(
        verdict_on_test_blocks(with(0.7, 0.3, 0.0)),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::DifferentCpuContention))
    );
    assert_eq!(
        verdict_on_test_blocks(with(1.0, 0.3, 0.0)),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::DifferentCpuContention)),
        "hides a slow-down"
    );
    assert_eq!(
        verdict_on_test_blocks(with(1.0, 0.0, 0.3)),
        (VerdictOnCase::Unchanged, None),
        "as fast under load"
    );
    // In this part of the test, two processes of sixteen ran under load: their pairs are excluded,
    // and the others decide.
    let mut some = with(1.5, 0.0, 0.0);
    some[2].head[0].contention_share = Some(1.0);
    some[5].head[1].contention_share = Some(1.0);
    assert_eq!(verdict_on_test_blocks(some), (VerdictOnCase::Regressed, None));
}

/// Under load a process may be too short to record its contention, so unknown contention must not
/// count as no contention.
#[test]
fn pairs_without_recorded_contention_are_not_evidence() {
    let loaded = |hidden: usize, unknown: Option<f64>| {
        let mut blocks =
            change_timings_of_blocks(test_blocks_near_ratio(1.8, 48), |arm, observation| {
                observation.contention_share =
                    Some(if arm == ComparedArm::HeadBuild { 0.9 } else { 0.0 })
            });
        blocks.iter_mut().take(hidden).for_each(|block| block.head[0].contention_share = unknown);
        verdict_on_test_blocks(blocks)
    };
    assert_eq!(
        loaded(10, None),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::DifferentCpuContention)),
        "unknown"
    );
    assert_eq!(
        loaded(10, Some(0.0)),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::DifferentCpuContention)),
        "a tenth of the pairs"
    );
    assert_eq!(loaded(48, Some(0.0)), (VerdictOnCase::Regressed, None), "half of the pairs");
    let nobody_tells =
        change_timings_of_blocks(test_blocks_near_ratio(1.8, 48), |_, observation| {
            observation.contention_share = None
        });
    assert_eq!(verdict_on_test_blocks(nobody_tells), (VerdictOnCase::Regressed, None));
}

#[test]
fn a_build_that_differs_from_itself_makes_its_case_or_all_cases_inconclusive() {
    let odd = || {
        let mut blocks = test_blocks_near_ratio(1.05, 8);
        for block in &mut blocks {
            // In this test, the later process of the base and the earlier one of the head are slow
            // in each block, whichever build leads.
            block.base[1].median_time_ns *= 1.1;
            block.head[0].median_time_ns *= 1.1;
        }
        blocks
    };
    let fine = || test_blocks_near_ratio(1.0, 8);
    let cases = |odd_ones: usize| -> TimedTrialBlocksByCase {
        (0..12).map(|i| (format!("{i:02}"), if i < odd_ones { odd() } else { fine() })).collect()
    };
    let plan = ComparisonTestPlan { max_trial_blocks: 8, ..ComparisonTestPlan::default() };
    let outcome = decide_cases_with_one_plan(&cases(1), &plan, true);
    assert_eq!(
        (
            outcome.decision_on_case("00").unwrap().verdict,
            outcome.decision_on_case("00").unwrap().reason
        ),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::IdenticalBuildsDiffer))
    );
    assert_eq!(
        (outcome.cases_with_differing_null_pairs.as_slice(), outcome.environment_is_stable),
        (&["00".to_owned()][..], true)
    );
    assert_eq!(
        (
            outcome.count_cases_with_verdict(VerdictOnCase::Unchanged),
            outcome.count_cases_with_verdict(VerdictOnCase::Regressed)
        ),
        (11, 0)
    );
    let outcome = decide_cases_with_one_plan(&cases(2), &plan, true);
    assert!(!outcome.environment_is_stable && outcome.undecided_cases.is_empty());
    assert!(
        outcome
            .decisions
            .iter()
            .all(|decision| decision.reason
                == Some(CauseOfInconclusiveDecision::UnstableEnvironment))
    );
}

/// In this test, every process that runs after a process of the head is 4 % slower, with noise of
/// 0.3 %.
#[test]
fn an_after_effect_of_the_head_makes_all_cases_inconclusive() {
    let lingering = |case: usize| -> Vec<TimedTrialBlock> {
        let mut before = ComparedArm::BaseBuild;
        (0..16)
            .map(|index| {
                let leader =
                    if index % 2 == 0 { ComparedArm::BaseBuild } else { ComparedArm::HeadBuild };
                let other =
                    if index % 2 == 0 { ComparedArm::HeadBuild } else { ComparedArm::BaseBuild };
                let times = [leader, other, other, leader].map(|arm| {
                    let slowed = if before == ComparedArm::HeadBuild { 1.04 } else { 1.0 };
                    before = arm;
                    test_timing(1e6 * slowed * (1.0 + 3e-4 * ((7 * index + 3 * case) % 10) as f64))
                });
                let (outer, inner) = ([times[0], times[3]], [times[1], times[2]]);
                let (base, head) =
                    if leader == ComparedArm::BaseBuild { (outer, inner) } else { (inner, outer) };
                TimedTrialBlock { first_and_last_arm: leader, base, head }
            })
            .collect()
    };
    let cases: TimedTrialBlocksByCase = (0..20)
        .map(lingering)
        .enumerate()
        .map(|(case, blocks)| (case.to_string(), blocks))
        .collect();
    let outcome = decide_cases_with_one_plan(&cases, &ComparisonTestPlan::default(), true);
    assert!(
        !outcome.environment_is_stable
            && outcome.count_cases_with_verdict(VerdictOnCase::Inconclusive) == cases.len(),
        "{:?}",
        outcome.decisions[0]
    );
}

#[test]
fn a_steady_drift_changes_no_verdict() {
    // In this test, the time drifts by 3 % from each process to the next.
    let drifting: Vec<TimedTrialBlock> = (0..12)
        .map(|index| {
            let at =
                |position: i32| test_timing(1e6 * (1.0 + 0.03 * f64::from(4 * index + position)));
            let (outer, inner) = ([at(0), at(3)], [at(1), at(2)]);
            let base_leads = index % 2 == 0;
            let (base, head) = if base_leads { (outer, inner) } else { (inner, outer) };
            TimedTrialBlock {
                first_and_last_arm: if base_leads {
                    ComparedArm::BaseBuild
                } else {
                    ComparedArm::HeadBuild
                },
                base,
                head,
            }
        })
        .collect();
    let outcome = decide_one_test_case(drifting, &ComparisonTestPlan::default(), true);
    assert!(
        outcome.cases_with_differing_null_pairs.is_empty()
            && [VerdictOnCase::Unchanged, VerdictOnCase::Inconclusive]
                .contains(&outcome.decisions[0].verdict)
    );
}

#[test]
fn empty_or_invalid_times_are_inconclusive() {
    let outcome = decide_cases_with_one_plan(
        &TimedTrialBlocksByCase::new(),
        &ComparisonTestPlan::default(),
        true,
    );
    assert!(outcome.decisions.is_empty() && outcome.environment_is_stable);
    assert_eq!(
        verdict_on_test_blocks(Vec::new()),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::TooFewPairs))
    );
    for time_ns in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let outcome = decide_one_test_case(
            change_timings_of_blocks(test_blocks_near_ratio(1.05, 8), |_, observation| {
                observation.median_time_ns = time_ns
            }),
            &ComparisonTestPlan::default(),
            true,
        );
        assert_eq!(
            (outcome.decisions[0].usable_pairs, outcome.decisions[0].reason),
            (0, Some(CauseOfInconclusiveDecision::TooFewPairs))
        );
    }
    let none = ComparisonTestPlan {
        max_trial_blocks: 0,
        max_false_alarm_probability: 0.0,
        max_missed_change_probability: 0.0,
        ..ComparisonTestPlan::default()
    };
    assert_eq!(
        decide_one_test_case(test_blocks_near_ratio(1.05, 8), &none, true).decisions[0].verdict,
        VerdictOnCase::Inconclusive
    );
    let mut one_bad = test_blocks_near_ratio(1.05, 8);
    one_bad[0].head[0].median_time_ns = f64::NAN;
    assert_eq!(
        decide_one_test_case(one_bad, &ComparisonTestPlan::default(), true).decisions[0]
            .usable_pairs,
        14
    );
}

#[test]
fn json_fields_of_plan_and_decision_are_stable() {
    let plan = serde_json::to_string(&ComparisonTestPlan::default()).unwrap();
    assert_eq!(
        serde_json::from_str::<ComparisonTestPlan>(&plan).unwrap(),
        ComparisonTestPlan::default()
    );
    let decision = serde_json::to_value(
        &decide_one_test_case(
            test_blocks_near_ratio(1.05, 8),
            &ComparisonTestPlan::default(),
            true,
        )
        .decisions[0],
    )
    .unwrap();
    assert_eq!(
        (decision["verdict"].as_str(), decision["case"].as_str()),
        (Some("regressed"), Some("case"))
    );
    assert_eq!(
        serde_json::to_value(CauseOfInconclusiveDecision::TooFewPairs).unwrap(),
        "too_few_pairs"
    );
}

prop_compose! {
    fn arbitrary_blocks()(
        ratio in 0.9f64..1.1,
        noise in prop::collection::vec(prop::array::uniform2(-0.03f64..0.03), 1..20),
    ) -> Vec<TimedTrialBlock> {
        test_blocks_with_ratios(
            &noise.iter().map(|pair| pair.map(|noise| ratio * (1.0 + noise))).collect::<Vec<_>>(),
            1e6,
        )
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn exchanging_the_builds_mirrors_the_verdict(blocks in arbitrary_blocks(), last: bool) {
        let swapped = blocks
            .iter()
            .map(|block| TimedTrialBlock { first_and_last_arm: block.first_and_last_arm, base: block.head, head: block.base })
            .collect();
        let (there, back) =
            (decide_one_test_case(blocks, &ComparisonTestPlan::default(), last), decide_one_test_case(swapped, &ComparisonTestPlan::default(), last));
        let (there, back) = (&there.decisions[0], &back.decisions[0]);
        let mirrored = match there.verdict {
            VerdictOnCase::Regressed => VerdictOnCase::Improved,
            VerdictOnCase::Improved => VerdictOnCase::Regressed,
            other => other,
        };
        prop_assert_eq!(back.verdict, mirrored);
        prop_assert!((back.p_value_of_not_slower - there.p_value_of_not_faster).abs() < 1e-9);
        prop_assert!(
            (back.ratio.estimated_ratio * there.ratio.estimated_ratio - 1.0).abs() < 1e-9
                && (back.ratio.ratio_low * there.ratio.ratio_high - 1.0).abs() < 1e-9
        );
    }

    #[test]
    fn a_factor_common_to_all_times_changes_no_verdict(blocks in arbitrary_blocks(), factor in 1.0f64..1e4) {
        let plan = ComparisonTestPlan { absolute_time_change_threshold_ns: 0.0, ..ComparisonTestPlan::default() };
        let scaled = change_timings_of_blocks(blocks.clone(), |_, observation| observation.median_time_ns *= factor);
        let (a, b) = (decide_one_test_case(blocks, &plan, true), decide_one_test_case(scaled, &plan, true));
        prop_assert_eq!(a.decisions[0].verdict, b.decisions[0].verdict);
        prop_assert!((a.decisions[0].ratio.ratio_low - b.decisions[0].ratio.ratio_low).abs() < 1e-9);
    }

    #[test]
    fn a_decision_is_kept_while_further_blocks_come(blocks in arbitrary_blocks(), settle_blocks in 0usize..12) {
        let plan = ComparisonTestPlan { min_blocks_for_unchanged: settle_blocks, ..ComparisonTestPlan::default() };
        let mut decided: Option<VerdictOnCase> = None;
        for count in 1..=blocks.len() {
            let outcome = decide_one_test_case(blocks[..count].to_vec(), &plan, false);
            if let Some(before) = decided {
                prop_assert!(outcome.undecided_cases.is_empty(), "{before:?} at {count}");
            } else if outcome.undecided_cases.is_empty() {
                decided = Some(outcome.decisions[0].verdict);
            }
            prop_assert!(
                outcome.decisions[0].p_value_of_not_slower >= 0.0 && outcome.decisions[0].p_value_of_not_slower <= 1.0
            );
        }
    }

    #[test]
    fn contention_beside_the_head_alone_is_no_regression(
        blocks in arbitrary_blocks(),
        shares in prop::collection::vec(0.0f64..0.2, 20),
    ) {
        let mut loaded = blocks.clone();
        for (block, share) in loaded.iter_mut().zip(shares) {
            block.head[0].contention_share = Some(share);
        }
        // The test compares verdicts and not p values: a case that is decided at an earlier
        // analysis ignores all later blocks in its p values.
        let regressed = |blocks| {
            decide_one_test_case(blocks, &ComparisonTestPlan::default(), true).decisions[0].verdict == VerdictOnCase::Regressed
        };
        prop_assert!(!regressed(loaded) || regressed(blocks));
    }
}

#[test]
fn clock_cycles_do_not_decide_at_the_power_cap() {
    // In this test, the head is 5 % slower with equal cycles, so the clock is the cause, unless the
    // power cap sets the clock.
    let with = |capped: fn(usize) -> bool| {
        let mut blocks =
            change_timings_of_blocks(test_blocks_near_ratio(1.05, 8), |arm, observation| {
                let ratio = if arm == ComparedArm::HeadBuild { 1.0 / 1.05 } else { 1.0 };
                observation.median_cycles_per_launch =
                    Some(observation.median_time_ns * 1.98 * ratio);
            });
        for (number, block) in blocks.iter_mut().enumerate() {
            block
                .base
                .iter_mut()
                .chain(&mut block.head)
                .for_each(|it| it.at_power_cap = capped(number));
        }
        verdict_on_test_blocks(blocks)
    };
    assert_eq!(with(|_| true), (VerdictOnCase::Regressed, None));
    assert_eq!(
        with(|number| number == 0),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::ClockFrequencyChanged))
    );
    assert_eq!(
        with(|_| false),
        (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::ClockFrequencyChanged))
    );
}
