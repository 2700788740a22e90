use super::*;
use crate::gate::paired::decide_cases_with_one_plan;

/// Makes test blocks in which the head takes `ratio` times as long as the base, with relative noise
/// `noise` that depends only on `seed`.
fn noisy_test_blocks(ratio: f64, noise: f64, count: usize, seed: usize) -> Vec<TimedBlock> {
    let mut at = seed;
    let mut observe = |time_ns: f64| {
        at = (at * 1_103_515_245 + 12_345) % (1 << 31);
        let unit = at as f64 / (1u64 << 31) as f64 - 0.5;
        CaseTimeInTrial {
            time_ns: time_ns * (1.0 + noise * unit),
            contention: Some(0.01),
            ..CaseTimeInTrial::default()
        }
    };
    let block = |index: usize| TimedBlock {
        leader: if index.is_multiple_of(2) { ComparedArm::Base } else { ComparedArm::Head },
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
    let first = TimedBlocksByCase::from([(
        "w/f/a/cpu/hot".to_owned(),
        noisy_test_blocks(ratio, 0.01, plan.max_blocks, number + 1),
    )]);
    let second = TimedBlocksByCase::from([(
        "w/f/a/cpu/hot".to_owned(),
        noisy_test_blocks(ratio, 0.01, plan.max_blocks, number + 1000),
    )]);
    let outcome = decide_cases_with_one_plan(&first, plan, true);
    let slower = outcome.count_cases_with_verdict(VerdictOnCase::Regressed) > 0;
    let series = |observed: &TimedBlocksByCase| {
        observed
            .iter()
            .map(|(case, blocks)| (case.clone(), CaseBlocksAsColumns::from_trial_blocks(blocks)))
            .collect()
    };
    let delay =
        kind.injected_slowdown_percent().map(|_| ("w/f/a/cpu/hot".to_owned(), (ratio - 1.0) * 1e6));
    CalibrationComparisonRecord {
        kind,
        number,
        started: format!("2026-11-21T10:{number:02}:00Z"),
        wall_s: 10.0,
        processes: 4 * plan.max_blocks,
        delays_ns: delay.into_iter().collect(),
        verdicts: outcome
            .decisions
            .iter()
            .map(|decision| (decision.case.clone(), decision.verdict))
            .collect(),
        reasons: BTreeMap::new(),
        failed: BTreeMap::new(),
        broken: vec![],
        first: series(&first),
        second: if slower { series(&second) } else { BTreeMap::new() },
        card: String::new(),
        anchors: None,
    }
}

pub fn test_calibration(null: usize, injected: &[(f64, usize)]) -> GateCalibration {
    let plan = ComparisonTestPlan { max_blocks: 10, ..ComparisonTestPlan::default() };
    let mut comparisons: Vec<CalibrationComparisonRecord> = (0..null)
        .map(|number| {
            test_calibration_comparison(CalibrationComparisonKind::Null, number, 1.0, &plan)
        })
        .collect();
    for (percent, count) in injected {
        comparisons.extend((0..*count).map(|number| {
            test_calibration_comparison(
                CalibrationComparisonKind::Injected(*percent),
                number,
                1.0 + percent / 100.0,
                &plan,
            )
        }));
    }
    GateCalibration {
        started: "2026-11-21T10:00:00Z".to_owned(),
        environment: RunEnvironment::environment_of_process_on_cpu(),
        provenance: CommitAndChanges::default(),
        identity: BTreeMap::from([("base b".to_owned(), "hash".to_owned())]),
        commands: BTreeSet::from(["kernelgate calibrate".to_owned()]),
        plan,
        budget_s: 180.0,
        sampling: TrialSamplingPlan::SAMPLING_ON_HOST,
        cases: BTreeMap::from([("w/f/a/cpu/hot".to_owned(), 1e6)]),
        left_out: BTreeSet::new(),
        simulated: BTreeSet::new(),
        part: None,
        anchor_tolerance: None,
        recommended: None,
        comparisons,
    }
}

#[test]
fn averaged_times_are_stored_in_columns_with_all_digits() {
    let mut blocks = noisy_test_blocks(1.0, 0.0, 1, 1);
    for timing in blocks.iter_mut().flat_map(|block| block.base.iter_mut().chain(&mut block.head)) {
        *timing = CaseTimeInTrial { time_ns: 1.234_567_8, averaged: true, ..*timing };
    }
    let back = CaseBlocksAsColumns::from_trial_blocks(&blocks).to_trial_blocks();
    assert_eq!((back[0].base[0].time_ns, back[0].head[1].averaged), (1.23457, true));
    let json = serde_json::to_value(CaseBlocksAsColumns::from_trial_blocks(&blocks)).unwrap();
    assert_eq!(json["averaged"], true);
}

#[test]
fn blocks_are_restored_from_columns_and_from_a_file() {
    let mut original = noisy_test_blocks(1.02, 0.01, 5, 3);
    original[2].head[0].contention = None;
    let back = CaseBlocksAsColumns::from_trial_blocks(&original).to_trial_blocks();
    assert_eq!(back.len(), 5);
    for (a, b) in original.iter().zip(&back) {
        assert_eq!(
            (a.leader, a.head.map(|at| at.contention)),
            (b.leader, b.head.map(|at| at.contention))
        );
        // Six digits.
        assert!((a.base[0].time_ns - b.base[0].time_ns).abs() <= 5.0);
        assert!(b.base[0].cycles.is_none());
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
    assert!(recommended.relative.is_some() && recommended.settle_blocks.is_some());
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
    let null = &summary.kinds[0];
    assert_eq!(
        (null.kind.as_str(), null.fired.hits, null.fired.of, null.inconclusive.hits),
        ("A/A", 0, 20, 0)
    );
    assert!((null.fired_bound.unwrap() - (1.0 - 0.05f64.powf(0.05))).abs() < 1e-9);
    assert_eq!(summary.kinds[1].fired_bound, None);
    let power = &summary.power[0];
    assert_eq!((power.found.hits, power.found.of, power.missed), (20, 20, 0));
    assert!((power.added - 5.0).abs() < 0.1 && (power.measured - 5.0).abs() < 0.2, "{power:?}");
    assert!((power.found.low - 0.831_566).abs() < 1e-5);
    let noise = &summary.noise[0];
    // The test expects a standard deviation of 0.29 %, which is that of uniform noise of ±0.5 %.
    assert!((0.2..0.4).contains(&noise.process) && noise.pairs == 400, "{noise:?}");
}

#[test]
fn the_smallest_threshold_that_meets_both_error_rates_is_recommended() {
    let recommended = recommend_thresholds(&test_calibration(20, &[(2.0, 20), (5.0, 20)]));
    assert_eq!(
        (recommended.relative, recommended.note.as_deref()),
        (Some(0.01), None),
        "{recommended:#?}"
    );
    let blocks = recommended.settle_blocks.unwrap();
    assert!((4..=10).contains(&blocks) && recommended.budget_s > 0.0);
    // In this test, no injected slow-down is as large as twice 3 %, so the larger thresholds cannot
    // be evaluated.
    assert_eq!(
        recommended.tried.iter().find(|tried| tried.relative == 0.03).unwrap().percent,
        None
    );
    assert_eq!(recommended.tried[1].percent, Some(5.0));
    // In this test, slow-downs of 2 % are missed, so a higher threshold is recommended.
    let mut few = test_calibration(20, &[(2.0, 20), (5.0, 20)]);
    for weak in
        few.comparisons.iter_mut().filter(|it| it.kind == CalibrationComparisonKind::Injected(2.0))
    {
        weak.first =
            test_calibration_comparison(CalibrationComparisonKind::Null, 1, 1.002, &few.plan).first;
        weak.second.clear();
    }
    assert_eq!(recommend_thresholds(&few).relative, Some(0.015));
}

#[test]
fn judging_recorded_comparisons_again_gives_the_same_verdicts() {
    let calibration = test_calibration(3, &[(1.0, 3), (5.0, 3)]);
    for known in &calibration.comparisons {
        let again = recommend::judge_recorded_times_again(known, &calibration.plan);
        assert_eq!(again, known.verdicts, "{:?} {}", known.kind, known.number);
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
            let about = format!("{}: {} {}", path.display(), known.kind.kind_name(), known.number);
            match known.kind {
                CalibrationComparisonKind::Injected(_)
                | CalibrationComparisonKind::Work(_)
                | CalibrationComparisonKind::Single(_) => {
                    for (case, _) in known
                        .verdicts_by_case()
                        .filter(|(_, verdict)| *verdict == VerdictOnCase::Regressed)
                    {
                        assert_eq!(verdicts[case], VerdictOnCase::Regressed, "{about}: {case}");
                    }
                }
                CalibrationComparisonKind::Null
                | CalibrationComparisonKind::Sham
                | CalibrationComparisonKind::Layout => {
                    assert!(
                        verdicts.values().all(|verdict| *verdict != VerdictOnCase::Regressed),
                        "{about}"
                    )
                }
            }
            if known.kind == CalibrationComparisonKind::Null {
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
    assert_eq!(few.relative, None);
    insta::assert_snapshot!(few.note.unwrap(), @"19 A/A comparisons: too few to recommend anything, 20 are needed");
    let no_power = recommend_thresholds(&test_calibration(20, &[(2.0, 19)]));
    assert_eq!(no_power.relative, None);
    let mut alarms = test_calibration(20, &[(20.0, 20)]);
    alarms.comparisons[0] = CalibrationComparisonRecord {
        kind: CalibrationComparisonKind::Layout,
        ..test_calibration_comparison(CalibrationComparisonKind::Null, 0, 1.3, &alarms.plan)
    };
    assert!(alarms.comparisons[0].has_false_alarm());
    assert!(
        !test_calibration_comparison(CalibrationComparisonKind::Single(30.0), 0, 1.3, &alarms.plan)
            .has_false_alarm()
    );
    let recommended = recommend_thresholds(&alarms);
    assert!(
        recommended.relative.is_none() && recommended.tried[0].false_alarms == 1,
        "{recommended:#?}"
    );
}

#[test]
fn parts_of_one_calibration_are_merged_and_others_are_refused() {
    let (mut a, b) = (test_calibration(4, &[]), test_calibration(6, &[(5.0, 1)]));
    a.check_and_merge(b.clone()).unwrap();
    // In this test, the two parts of the calibration have four comparisons in common.
    assert_eq!(
        (
            a.comparisons_of_kind(CalibrationComparisonKind::Null).count(),
            a.injected_slowdown_percents()
        ),
        (6, vec![5.0])
    );
    let strangers = [
        GateCalibration {
            identity: BTreeMap::from([("base b".to_owned(), "other".to_owned())]),
            ..b.clone()
        },
        GateCalibration { plan: ComparisonTestPlan { relative: 0.5, ..b.plan }, ..b.clone() },
        GateCalibration {
            environment: RunEnvironment {
                threads: 99,
                ..RunEnvironment::environment_of_process_on_cpu()
            },
            ..b.clone()
        },
    ];
    let threads = format!("`{}`", RunEnvironment::environment_of_process_on_cpu().threads);
    let errors =
        strangers.map(|stranger| a.clone().check_and_merge(stranger).unwrap_err().to_string());
    insta::assert_snapshot!(errors.join("\n").replace(&threads, "`THREADS`"), @r"
    base b is `hash` and `other`
    plan.relative is `0.01` and `0.5`
    threads is `THREADS` and `99`
    ");
}
