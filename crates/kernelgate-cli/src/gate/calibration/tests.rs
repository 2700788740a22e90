use super::*;
use crate::gate::paired::decide_cases_with_one_plan;

/// Makes test blocks in which the head takes `ratio` times as long as the base, with relative noise
/// `noise` that depends only on `seed`.
fn noisy_test_blocks(ratio: f64, noise: f64, count: usize, seed: usize) -> Vec<TimedTrialBlock> {
    let mut at = seed;
    let mut observe = |time_ns: f64| {
        at = (at * 1_103_515_245 + 12_345) % (1 << 31);
        let unit = at as f64 / (1u64 << 31) as f64 - 0.5;
        CaseTimeInTrial {
            median_time_ns: time_ns * (1.0 + noise * unit),
            contention_share: Some(0.01),
            ..CaseTimeInTrial::default()
        }
    };
    let block = |index: usize| TimedTrialBlock {
        first_and_last_arm: if index.is_multiple_of(2) {
            ComparedArm::BaseBuild
        } else {
            ComparedArm::HeadBuild
        },
        base: [observe(1e6), observe(1e6)],
        head: [observe(ratio * 1e6), observe(ratio * 1e6)],
    };
    (0..count).map(block).collect()
}

fn test_calibration_comparison(
    kind: CalibrationComparisonKind,
    number: usize,
    ratio: f64,
    plan: &ComparisonTestPlan,
) -> CalibrationComparisonRecord {
    let first = TimedTrialBlocksByCase::from([(
        "w/f/a/cpu/hot".to_owned(),
        noisy_test_blocks(ratio, 0.01, plan.max_trial_blocks, number + 1),
    )]);
    let second = TimedTrialBlocksByCase::from([(
        "w/f/a/cpu/hot".to_owned(),
        noisy_test_blocks(ratio, 0.01, plan.max_trial_blocks, number + 1000),
    )]);
    let outcome = decide_cases_with_one_plan(&first, plan, true);
    let slower = outcome.count_cases_with_verdict(VerdictOnCase::Regressed) > 0;
    let series = |observed: &TimedTrialBlocksByCase| {
        observed
            .iter()
            .map(|(case, blocks)| (case.clone(), CaseBlocksAsColumns::from_trial_blocks(blocks)))
            .collect()
    };
    let delay =
        kind.injected_slowdown_percent().map(|_| ("w/f/a/cpu/hot".to_owned(), (ratio - 1.0) * 1e6));
    CalibrationComparisonRecord {
        kind,
        number_within_kind: number,
        comparison_start_time: format!("2026-11-21T10:{number:02}:00Z"),
        comparison_wall_s: 10.0,
        process_count: 4 * plan.max_trial_blocks,
        injected_delays_ns: delay.into_iter().collect(),
        verdicts: outcome
            .decisions
            .iter()
            .map(|decision| (decision.case_id.clone(), decision.verdict))
            .collect(),
        inconclusive_reasons_by_case: BTreeMap::new(),
        failed_cases_with_reason: BTreeMap::new(),
        failed_bench_processes: vec![],
        first_round_times: series(&first),
        second_round_times: if slower { series(&second) } else { BTreeMap::new() },
        card_or_host_id: String::new(),
        anchors: None,
    }
}

pub fn test_calibration(null: usize, injected: &[(f64, usize)]) -> GateCalibration {
    let plan = ComparisonTestPlan { max_trial_blocks: 10, ..ComparisonTestPlan::default() };
    let mut comparisons: Vec<CalibrationComparisonRecord> = (0..null)
        .map(|number| {
            test_calibration_comparison(
                CalibrationComparisonKind::IdenticalBuilds,
                number,
                1.0,
                &plan,
            )
        })
        .collect();
    for (percent, count) in injected {
        comparisons.extend((0..*count).map(|number| {
            test_calibration_comparison(
                CalibrationComparisonKind::SlowdownByWaitPercent(*percent),
                number,
                1.0 + percent / 100.0,
                &plan,
            )
        }));
    }
    GateCalibration {
        first_comparison_start_time: "2026-11-21T10:00:00Z".to_owned(),
        environment: RunEnvironment::environment_of_process_on_cpu(),
        provenance: CommitAndChanges::default(),
        calibration_identity_facts: BTreeMap::from([("base b".to_owned(), "hash".to_owned())]),
        calibration_command_lines: BTreeSet::from(["kernelgate calibrate".to_owned()]),
        plan,
        round_budget_s: 180.0,
        sampling: TrialSamplingPlan::SAMPLING_ON_HOST,
        launch_ns_by_case: BTreeMap::from([("w/f/a/cpu/hot".to_owned(), 1e6)]),
        unmeasured_cases_with_reason: BTreeSet::new(),
        cases_with_simulated_slowdowns: BTreeSet::new(),
        shard_identity: None,
        anchor_rate_tolerance: None,
        recommended: None,
        comparisons,
    }
}

#[test]
fn averaged_times_are_stored_in_columns_with_all_digits() {
    let mut blocks = noisy_test_blocks(1.0, 0.0, 1, 1);
    for timing in blocks.iter_mut().flat_map(|block| block.base.iter_mut().chain(&mut block.head)) {
        *timing = CaseTimeInTrial { median_time_ns: 1.234_567_8, time_is_mean: true, ..*timing };
    }
    let back = CaseBlocksAsColumns::from_trial_blocks(&blocks).to_trial_blocks();
    assert_eq!((back[0].base[0].median_time_ns, back[0].head[1].time_is_mean), (1.23457, true));
    let json = serde_json::to_value(CaseBlocksAsColumns::from_trial_blocks(&blocks)).unwrap();
    assert_eq!(json["averaged"], true);
}

#[test]
fn trial_blocks_survive_columns_and_a_file() {
    let mut original = noisy_test_blocks(1.02, 0.01, 5, 3);
    original[2].head[0].contention_share = None;
    let back = CaseBlocksAsColumns::from_trial_blocks(&original).to_trial_blocks();
    assert_eq!(back.len(), 5);
    for (a, b) in original.iter().zip(&back) {
        assert_eq!(
            (a.first_and_last_arm, a.head.map(|at| at.contention_share)),
            (b.first_and_last_arm, b.head.map(|at| at.contention_share))
        );
        // Six digits.
        assert!((a.base[0].median_time_ns - b.base[0].median_time_ns).abs() <= 5.0);
        assert!(b.base[0].median_cycles_per_launch.is_none());
    }
    let calibration = test_calibration(2, &[(5.0, 1)]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calibration.json");
    kernelgate::record::write_record_atomically(&path, &calibration).unwrap();
    assert_eq!(kernelgate::record::read_record::<GateCalibration>(&path).unwrap(), calibration);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("\"keys\": [\"#0\"]"), "{text}");
    std::fs::write(&path, text.replace("bhbhbhbhbh", "bhbh")).unwrap();
    let error = kernelgate::record::read_record::<GateCalibration>(&path).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(path.to_str().unwrap(), "FILE"), @"failed to read FILE: invalid calibration: case w/f/a/cpu/hot: columns of different length");
}

#[test]
fn impossible_recommendations_are_refused_with_file_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calibration.json");
    let mut calibration = test_calibration(20, &[(5.0, 20)]);
    let recommended = recommend_thresholds(&calibration);
    assert!(
        recommended.recommended_relative_threshold.is_some()
            && recommended.min_blocks_for_unchanged.is_some()
    );
    calibration.recommended = Some(recommended);
    kernelgate::record::write_record_atomically(&path, &calibration).unwrap();
    assert_eq!(kernelgate::record::read_record::<GateCalibration>(&path).unwrap(), calibration);
    let whole: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let mut errors = String::new();
    for (of, field, value) in [
        ("recommended", "relative", -1.0),
        ("recommended", "relative", 5.0),
        ("recommended", "contention_weight", -1e9),
        ("recommended", "contention_weight", 0.5),
        ("recommended", "budget_s", -1.0),
        ("plan", "tolerated", -0.1),
        ("plan", "power", 1.0),
        ("plan", "false_alarms", 2.0),
    ] {
        let mut edited = whole.clone();
        edited[of][field] = value.into();
        std::fs::write(&path, edited.to_string()).unwrap();
        let error =
            kernelgate::record::read_record::<GateCalibration>(&path).unwrap_err().to_string();
        errors.push_str(&error.replace(path.to_str().unwrap(), "FILE"));
        errors.push('\n');
    }
    for (of, field, blocks) in [("recommended", "settle_blocks", 0), ("plan", "max_blocks", 10_001)]
    {
        let mut edited = whole.clone();
        edited[of][field] = blocks.into();
        std::fs::write(&path, edited.to_string()).unwrap();
        let error =
            kernelgate::record::read_record::<GateCalibration>(&path).unwrap_err().to_string();
        errors.push_str(&error.replace(path.to_str().unwrap(), "FILE"));
        errors.push('\n');
    }
    insta::assert_snapshot!(errors, @r"
    failed to read FILE: invalid calibration: recommended.relative is -1
    failed to read FILE: invalid calibration: recommended.relative is 5, which was not tried
    failed to read FILE: invalid calibration: recommended.contention_weight is -1000000000
    failed to read FILE: invalid calibration: recommended.contention_weight is 0.5, less than the plan's 2
    failed to read FILE: invalid calibration: recommended.budget_s is -1
    failed to read FILE: invalid calibration: plan.tolerated is -0.1
    failed to read FILE: invalid calibration: plan.power is 1
    failed to read FILE: invalid calibration: plan.false_alarms is 2
    failed to read FILE: invalid calibration: recommended.settle_blocks is 0
    failed to read FILE: invalid calibration: plan.max_blocks is 10001
    ");
}

#[test]
fn the_summary_counts_the_outcomes_of_the_calibrations_comparisons() {
    let summary = summarise_calibration(&test_calibration(20, &[(5.0, 20)]));
    let null = &summary.tallies_by_kind[0];
    assert_eq!(
        (
            null.comparison_kind_name.as_str(),
            null.comparisons_with_alarm.event_count,
            null.comparisons_with_alarm.trial_count,
            null.inconclusive_cases.event_count
        ),
        ("A/A", 0, 20, 0)
    );
    assert!(
        (null.false_alarm_probability_bound.unwrap() - (1.0 - 0.05f64.powf(0.05))).abs() < 1e-9
    );
    assert_eq!(summary.tallies_by_kind[1].false_alarm_probability_bound, None);
    let power = &summary.slowdown_detections[0];
    assert_eq!(
        (
            power.slowdowns_found.event_count,
            power.slowdowns_found.trial_count,
            power.slowdowns_missed
        ),
        (20, 20, 0)
    );
    assert!(
        (power.mean_injected_delay_percent - 5.0).abs() < 0.1
            && (power.mean_measured_slowdown_percent - 5.0).abs() < 0.2,
        "{power:?}"
    );
    assert!((power.slowdowns_found.probability_low - 0.831_566).abs() < 1e-5);
    let noise = &summary.noise_by_case[0];
    // The test expects a standard deviation of 0.29 %, which is that of uniform noise of ±0.5 %.
    assert!(
        (0.2..0.4).contains(&noise.process_standard_deviation_percent) && noise.pair_count == 400,
        "{noise:?}"
    );
}

#[test]
fn the_smallest_threshold_that_meets_both_error_rates_is_recommended() {
    let recommended = recommend_thresholds(&test_calibration(20, &[(2.0, 20), (5.0, 20)]));
    assert_eq!(
        (recommended.recommended_relative_threshold, recommended.why_not_recommended.as_deref()),
        (Some(0.01), None),
        "{recommended:#?}"
    );
    let blocks = recommended.min_blocks_for_unchanged.unwrap();
    assert!((4..=10).contains(&blocks) && recommended.recommended_round_budget_s > 0.0);
    // In this test, no injected slow-down is as large as twice 3 %, so the larger thresholds cannot
    // be evaluated.
    assert_eq!(
        recommended
            .tried_thresholds
            .iter()
            .find(|tried| tried.relative_threshold == 0.03)
            .unwrap()
            .injected_slowdown_percent,
        None
    );
    assert_eq!(recommended.tried_thresholds[1].injected_slowdown_percent, Some(5.0));
    // In this test, slow-downs of 2 % are missed, so a higher threshold is recommended.
    let mut few = test_calibration(20, &[(2.0, 20), (5.0, 20)]);
    for weak in few
        .comparisons
        .iter_mut()
        .filter(|it| it.kind == CalibrationComparisonKind::SlowdownByWaitPercent(2.0))
    {
        weak.first_round_times = test_calibration_comparison(
            CalibrationComparisonKind::IdenticalBuilds,
            1,
            1.002,
            &few.plan,
        )
        .first_round_times;
        weak.second_round_times.clear();
    }
    assert_eq!(recommend_thresholds(&few).recommended_relative_threshold, Some(0.015));
}

#[test]
fn judging_recorded_comparisons_again_gives_the_same_verdicts() {
    let calibration = test_calibration(3, &[(1.0, 3), (5.0, 3)]);
    for known in &calibration.comparisons {
        let again = recommend::judge_recorded_times_again(known, &calibration.plan);
        assert_eq!(again, known.verdicts, "{:?} {}", known.kind, known.number_within_kind);
    }
}

/// This test judges the recorded times of the committed calibrations again; this gate must give the
/// same verdicts as the gate that recorded them.
#[test]
fn committed_calibrations_give_the_recorded_verdicts_again() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = |folder: &str| std::fs::read_dir(root.join(folder)).unwrap().map(Result::unwrap);
    // Calibrations of `ci/measure/calibrate` use another threshold than the default and are stored
    // beside the evidence, not in `docs/calibrations`.
    let of_ci = files("docs/calibrations").map(|entry| entry.path());
    let of_devices = files("baselines").map(|entry| entry.path().join("calibration.json"));
    let paths: Vec<_> = of_ci.chain(of_devices.filter(|path| path.exists())).collect();
    assert!(paths.contains(&root.join("docs/calibrations/h200.json")), "{paths:?}");
    for path in paths {
        let calibration = kernelgate::record::read_record::<GateCalibration>(&path).unwrap();
        let (mut inconclusive, mut unchanged) = (0, 0);
        for known in &calibration.comparisons {
            let verdicts = recommend::judge_recorded_times_again(known, &calibration.plan);
            let about = format!(
                "{}: {} {}",
                path.display(),
                known.kind.kind_name(),
                known.number_within_kind
            );
            match known.kind {
                CalibrationComparisonKind::SlowdownByWaitPercent(_)
                | CalibrationComparisonKind::SlowdownByWorkPercent(_)
                | CalibrationComparisonKind::OneCaseSlowdownPercent(_) => {
                    for (case, _) in known
                        .verdicts_by_case()
                        .filter(|(_, verdict)| *verdict == VerdictOnCase::Regressed)
                    {
                        assert_eq!(verdicts[case], VerdictOnCase::Regressed, "{about}: {case}");
                    }
                }
                CalibrationComparisonKind::IdenticalBuilds
                | CalibrationComparisonKind::ShamLoad
                | CalibrationComparisonKind::OtherCodeLayout => {
                    assert!(
                        verdicts.values().all(|verdict| *verdict != VerdictOnCase::Regressed),
                        "{about}"
                    )
                }
            }
            if known.kind == CalibrationComparisonKind::IdenticalBuilds {
                inconclusive += verdicts
                    .values()
                    .filter(|verdict| **verdict == VerdictOnCase::Inconclusive)
                    .count();
                unchanged += verdicts
                    .values()
                    .filter(|verdict| **verdict == VerdictOnCase::Unchanged)
                    .count();
            }
        }
        assert!(
            inconclusive * 20 <= inconclusive + unchanged,
            "{}: {inconclusive} beside {unchanged}",
            path.display()
        );
        assert_eq!(
            calibration.recommended,
            Some(recommend_thresholds(&calibration)),
            "{}: recommended otherwise",
            path.display()
        );
    }
}

#[test]
fn few_comparisons_or_false_alarms_give_no_recommendation() {
    let few = recommend_thresholds(&test_calibration(19, &[(2.0, 20)]));
    assert_eq!(few.recommended_relative_threshold, None);
    insta::assert_snapshot!(few.why_not_recommended.unwrap(), @"19 A/A comparisons: too few to recommend anything, 20 are needed");
    let no_power = recommend_thresholds(&test_calibration(20, &[(2.0, 19)]));
    assert_eq!(no_power.recommended_relative_threshold, None);
    let mut alarms = test_calibration(20, &[(20.0, 20)]);
    alarms.comparisons[0] = CalibrationComparisonRecord {
        kind: CalibrationComparisonKind::OtherCodeLayout,
        ..test_calibration_comparison(
            CalibrationComparisonKind::IdenticalBuilds,
            0,
            1.3,
            &alarms.plan,
        )
    };
    assert!(alarms.comparisons[0].has_false_alarm());
    assert!(
        !test_calibration_comparison(
            CalibrationComparisonKind::OneCaseSlowdownPercent(30.0),
            0,
            1.3,
            &alarms.plan
        )
        .has_false_alarm()
    );
    let recommended = recommend_thresholds(&alarms);
    assert!(
        recommended.recommended_relative_threshold.is_none()
            && recommended.tried_thresholds[0].comparisons_with_false_alarm == 1,
        "{recommended:#?}"
    );
}

#[test]
fn parts_of_one_calibration_are_merged_and_others_are_refused() {
    let (mut a, b) = (test_calibration(4, &[]), test_calibration(6, &[(5.0, 1)]));
    a.check_and_merge_calibration(b.clone()).unwrap();
    // In this test, the two parts of the calibration have four comparisons in common.
    assert_eq!(
        (
            a.comparisons_of_kind(CalibrationComparisonKind::IdenticalBuilds).count(),
            a.injected_slowdown_percents()
        ),
        (6, vec![5.0])
    );
    let strangers = [
        GateCalibration {
            calibration_identity_facts: BTreeMap::from([("base b".to_owned(), "other".to_owned())]),
            ..b.clone()
        },
        GateCalibration {
            plan: ComparisonTestPlan { relative_time_change_threshold: 0.5, ..b.plan },
            ..b.clone()
        },
        GateCalibration {
            environment: RunEnvironment {
                cpu_backend_threads: 99,
                ..RunEnvironment::environment_of_process_on_cpu()
            },
            ..b.clone()
        },
    ];
    let threads =
        format!("`{}`", RunEnvironment::environment_of_process_on_cpu().cpu_backend_threads);
    let errors = strangers
        .map(|stranger| a.clone().check_and_merge_calibration(stranger).unwrap_err().to_string());
    insta::assert_snapshot!(errors.join("\n").replace(&threads, "`THREADS`"), @r"
    base b is `hash` and `other`
    plan.relative is `0.01` and `0.5`
    threads is `THREADS` and `99`
    ");
}
