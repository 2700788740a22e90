//! Tests how runs are judged against a baseline: verdicts, reasons and refusals.

use std::collections::BTreeMap;

use super::baseline::{BaselineJudgementSettings, BaselineVerdicts, judge_against_baseline};
use super::calibration::{self, GateCalibration};
use super::judgement::{BaselineRunEvidence, CaseJudgement};
use super::ratio_interval::{
    AssumedSpreadOfSingleRun, SourceOfAssumedSpread, TimeRatioWithInterval,
};
use super::rules::PackageGateRules;
use super::rules::rules_file;
use super::single_run::CalibratedSpreadsByCase;
use super::verdict::VerdictOnCase;
use kernelgate::exit::ProcessExitReason;
use kernelgate::measure::power::{CasePowerRecord, PowerStateOfSamples};
use kernelgate::record::{
    BaselineFile, BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, MeasurementOfRuns,
    RunEnvironment,
};
use kernelgate_cuda::Launch;
use kernelgate_cuda::observe::telemetry::GpuCardReading;

/// Judges test runs against a baseline, without a calibration of the device.
fn judge_test_runs_against(
    baseline: &BaselineFile,
    runs: &[BenchProcessRun],
    policy: BaselineJudgementSettings,
) -> BaselineVerdicts {
    let (spreads, rules) = (CalibratedSpreadsByCase::default(), PackageGateRules::default());
    judge_against_baseline(baseline, &test_measurement_of_runs(runs), policy, &spreads, &rules)
}

/// Returns the verdict of a judgement and the JSON kind of its first reason.
fn verdict_and_reason(judged: &CaseJudgement) -> (VerdictOnCase, Option<&'static str>) {
    (judged.verdict, judged.reasons.first().map(|reason| reason.json_kind()))
}

fn test_measurement_of_runs(runs: &[BenchProcessRun]) -> MeasurementOfRuns {
    MeasurementOfRuns::from_matching_runs(runs.to_vec()).unwrap()
}

fn make_test_bench_run(session: &str, times: &[(&str, f64)]) -> BenchProcessRun {
    let environment = RunEnvironment {
        machine_hash: Some("here".to_owned()),
        ..RunEnvironment::environment_of_process_on_cpu()
    };
    let samples = |time: f64| (0..11).map(|i| time * (1.0 + 0.001 * f64::from(i - 5))).collect();
    BenchProcessRun {
        ended_normally: true,
        cases: times
            .iter()
            .map(|&(id, time)| {
                (id.to_owned(), CaseRecordWithSamples::example_with_sample_times(samples(time)))
            })
            .collect(),
        ..BenchProcessRun::empty_run_starting_now(
            "b",
            session,
            environment,
            CommitAndChanges::default(),
        )
    }
}

fn test_baseline_of_run(run: &BenchProcessRun) -> BaselineFile {
    let mut baseline = BaselineFile::empty_baseline_with_name("main");
    baseline.merge_run_replacing_other_code(run);
    baseline
}

/// Makes a test baseline from one run, recorded as two process runs.
fn test_baseline_of_run_twice(run: &BenchProcessRun) -> BaselineFile {
    let mut baseline = test_baseline_of_run(run);
    baseline
        .add_comparable_run(&BenchProcessRun {
            session_name: format!("{}-again", run.session_name),
            ..run.clone()
        })
        .unwrap();
    baseline
}

/// Judges a test run with default settings against a baseline of another run, recorded twice.
fn judge_against_run_twice(base: &BenchProcessRun, head: &BenchProcessRun) -> BaselineVerdicts {
    judge_test_runs_against(
        &test_baseline_of_run_twice(base),
        std::slice::from_ref(head),
        BaselineJudgementSettings::default(),
    )
}

#[test]
fn equal_times_are_unchanged_and_exit_with_success() {
    let report = judge_against_run_twice(
        &make_test_bench_run("1", &[("a", 1e6)]),
        &make_test_bench_run("2", &[("a", 1e6)]),
    );
    assert_eq!(report.judged_cases[0].verdict, VerdictOnCase::Unchanged);
    assert_eq!(report.exit_reason(), ProcessExitReason::Success);
    // The test expects the threshold of 5 %, beyond the interval of 10 % for the single judged run.
    assert!((report.judged_cases[0].detectable_change.unwrap() - (1.05 / 0.9 - 1.0)).abs() < 1e-9);
}

#[test]
fn a_slow_down_by_half_is_a_regression_and_is_listed_first() {
    let report = judge_against_run_twice(
        &make_test_bench_run("1", &[("a", 1e6), ("b", 1e6)]),
        &make_test_bench_run("2", &[("a", 1e6), ("b", 1.5e6)]),
    );
    assert_eq!(
        (report.judged_cases[0].case_id.as_str(), report.judged_cases[0].verdict),
        ("b", VerdictOnCase::Regressed)
    );
    assert_eq!(report.exit_reason(), ProcessExitReason::Regression);
}

#[test]
fn the_verdict_changes_at_the_detectable_effect() {
    let base = make_test_bench_run("1", &[("a", 1e6)]);
    let detectable =
        judge_against_run_twice(&base, &base).judged_cases[0].detectable_change.unwrap();
    let at = |slowdown: f64| {
        judge_against_run_twice(&base, &make_test_bench_run("2", &[("a", 1e6 * (1.0 + slowdown))]))
            .judged_cases[0]
            .verdict
    };
    assert_eq!(at(detectable * 1.01), VerdictOnCase::Regressed);
    // A change below the detectable one is not shown, and a case counts as unchanged only if the
    // change is below the threshold.
    assert_eq!([at(detectable * 0.99), at(0.051)], [VerdictOnCase::Inconclusive; 2]);
    assert_eq!([at(0.049), at(-0.049)], [VerdictOnCase::Unchanged; 2]);
}

#[test]
fn a_relevant_change_that_cannot_be_detected_is_not_called_unchanged() {
    let mut base = test_baseline_of_run(&make_test_bench_run("1", &[("a", 1e6)]));
    for (session, time) in [("2", 0.95e6), ("3", 1.05e6), ("4", 0.98e6), ("5", 1.02e6)] {
        base.add_comparable_run(&make_test_bench_run(session, &[("a", time)])).unwrap();
    }
    let at = |times: &[f64]| {
        let heads: Vec<BenchProcessRun> = times
            .iter()
            .enumerate()
            .map(|(i, time)| make_test_bench_run(&format!("h{i}"), &[("a", *time)]))
            .collect();
        let report = judge_test_runs_against(&base, &heads, BaselineJudgementSettings::default());
        (report.judged_cases[0].clone(), report.exit_reason())
    };
    let (judged, exit) = at(&[1.2e6]);
    let percent = |ratio: f64| (1e3 * (ratio - 1.0)).round() / 10.0;
    let TimeRatioWithInterval { estimated_ratio: center, ratio_low: low, ratio_high: high } =
        judged.ratio;
    assert_eq!([center, low, high].map(percent), [20.0, 2.9, 38.9]);
    assert_eq!(
        (judged.verdict, exit),
        (VerdictOnCase::Inconclusive, ProcessExitReason::Inconclusive)
    );
    let why = judged.joined_inconclusive_reasons().unwrap();
    insta::assert_snapshot!(why, @"beyond the threshold, less than these runs can detect");
    // The test shows that more runs can decide a case, that faster cases are judged like slower
    // ones, and that changes within the threshold are ignored.
    assert_eq!(at(&[1.2e6, 1.19e6, 1.21e6]).1, ProcessExitReason::Regression);
    assert_eq!(at(&[0.9e6]).0.verdict, VerdictOnCase::Inconclusive);
    for time in [0.951e6, 1e6, 1.049e6] {
        assert_eq!(
            (at(&[time]).0.verdict, at(&[time]).1),
            (VerdictOnCase::Unchanged, ProcessExitReason::Success)
        );
    }
}

#[test]
fn a_faster_case_is_improved_and_a_tiny_absolute_change_is_ignored() {
    let improved = judge_against_run_twice(
        &make_test_bench_run("1", &[("a", 1e6)]),
        &make_test_bench_run("2", &[("a", 5e5)]),
    );
    assert_eq!(
        (improved.judged_cases[0].verdict, improved.exit_reason()),
        (VerdictOnCase::Improved, ProcessExitReason::Success)
    );
    let tiny = judge_against_run_twice(
        &make_test_bench_run("1", &[("a", 50.0)]),
        &make_test_bench_run("2", &[("a", 100.0)]),
    );
    assert_eq!(
        tiny.judged_cases[0].verdict,
        VerdictOnCase::Unchanged,
        "{:?}",
        tiny.judged_cases[0]
    );
}

#[test]
fn noise_above_the_limit_of_the_policy_makes_a_case_inconclusive() {
    let mut noisy = make_test_bench_run("2", &[("a", 1e6)]);
    let samples = &mut noisy.cases.get_mut("a").unwrap().samples;
    samples.elapsed_per_sample_ns = (1..=11).map(|i| 2e5 * f64::from(i)).collect();
    let report = judge_against_run_twice(&make_test_bench_run("1", &[("a", 1e6)]), &noisy);
    assert_eq!(
        (report.judged_cases[0].verdict, report.exit_reason()),
        (VerdictOnCase::Inconclusive, ProcessExitReason::Inconclusive)
    );
}

#[test]
fn another_device_or_definition_is_refused_with_the_field() {
    let base = make_test_bench_run("1", &[("a", 1e6), ("b", 1e6)]);
    let mut elsewhere = base.clone();
    elsewhere.environment.device_name = "other".to_owned();
    let report = judge_test_runs_against(
        &test_baseline_of_run(&elsewhere),
        std::slice::from_ref(&base),
        BaselineJudgementSettings::default(),
    );
    assert_eq!(
        (report.refused[0].differing_field.as_str(), report.refused[0].base_value.as_str()),
        ("device_name", "other")
    );
    assert_eq!(
        (report.refused[0].affected_cases.len(), report.exit_reason()),
        (2, ProcessExitReason::ResultsNotComparable)
    );
    let mut redefined = base.clone();
    redefined.cases.get_mut("b").unwrap().workload_revision = 2;
    let report = judge_against_run_twice(&base, &redefined);
    assert_eq!(
        (report.refused[0].differing_field.as_str(), report.refused[0].affected_cases.as_slice()),
        ("revision", &["b".to_owned()][..])
    );
    assert_eq!(
        (report.judged_cases.len(), report.exit_reason()),
        (1, ProcessExitReason::ResultsNotComparable)
    );
    let mut more = base.clone();
    more.cases.get_mut("b").unwrap().work.min_read_bytes = 16;
    let report = judge_against_run_twice(&base, &more);
    let refusal = &report.refused[0];
    assert_eq!(
        (refusal.differing_field.as_str(), refusal.base_value.as_str()),
        ("work", "read 8 B, write 8 B")
    );
    let reseeded = BenchProcessRun { seed: 2, ..base.clone() };
    assert_eq!(judge_against_run_twice(&base, &reseeded).refused[0].differing_field, "seed");
}

#[test]
fn a_baseline_case_that_is_now_skipped_does_not_pass() {
    let mut head = make_test_bench_run("2", &[("a", 1e6)]);
    head.skipped.insert("gone".to_owned(), "no GPU".to_owned());
    head.skipped.insert("never measured".to_owned(), "no GPU".to_owned());
    let report =
        judge_against_run_twice(&make_test_bench_run("1", &[("a", 1e6), ("gone", 1e6)]), &head);
    assert_eq!(report.skipped_in_head, BTreeMap::from([("gone".to_owned(), "no GPU".to_owned())]));
    assert!(report.method_facts.baseline_cases_not_run.is_empty());
    assert_eq!(report.exit_reason(), ProcessExitReason::Inconclusive);
}

#[test]
fn contention_on_the_host_excuses_a_slow_side_on_the_cpu_only() {
    let mut busy = make_test_bench_run("2", &[("a", 1e6)]);
    busy.cases.get_mut("a").unwrap().samples.conditions.other_processes_cpu_share = Some(0.07);
    assert_eq!(
        judge_against_run_twice(&busy, &busy).judged_cases[0].verdict,
        VerdictOnCase::Unchanged
    );
    let base = make_test_bench_run("1", &[("a", 1e6)]);
    let mut head = make_test_bench_run("2", &[("a", 1.5e6)]);
    head.cases.get_mut("a").unwrap().samples.conditions.other_processes_cpu_share = Some(0.5);
    let report = judge_against_run_twice(&base, &head);
    assert_eq!(
        (
            report.judged_cases[0].verdict,
            report.judged_cases[0].baseline_run_evidence().unwrap().head.cpu_contention_share
        ),
        (VerdictOnCase::Inconclusive, 0.5)
    );
    let verdict = judge_against_run_twice(&as_if_on_test_gpu(base), &as_if_on_test_gpu(head))
        .judged_cases[0]
        .verdict;
    assert_eq!(verdict, VerdictOnCase::Regressed);
}

/// Returns a copy of a test run as if measured on a GPU in the steady power state.
fn as_if_on_test_gpu(run: BenchProcessRun) -> BenchProcessRun {
    with_power_record(
        run,
        Some(CasePowerRecord::from_nvml_reading(
            PowerStateOfSamples::SteadyUnderLoad,
            GpuCardReading::default(),
        )),
    )
}

fn with_power_record(mut run: BenchProcessRun, power: Option<CasePowerRecord>) -> BenchProcessRun {
    run.environment.device_kind = "cuda".to_owned();
    run.cases.values_mut().for_each(|case| case.samples.power.clone_from(&power));
    run
}

#[test]
fn different_power_states_are_refused() {
    let run = |session, state: Option<PowerStateOfSamples>| {
        let power =
            state.map(|state| CasePowerRecord::from_nvml_reading(state, GpuCardReading::default()));
        with_power_record(make_test_bench_run(session, &[("a", 1e6)]), power)
    };
    let refused = |base, head| {
        let report = judge_test_runs_against(
            &test_baseline_of_run(&run("1", base)),
            &[run("2", head)],
            BaselineJudgementSettings::default(),
        );
        report.refused.first().map(|refusal| {
            assert_eq!(
                (refusal.differing_field.as_str(), report.exit_reason()),
                ("power_state", ProcessExitReason::ResultsNotComparable)
            );
            (refusal.base_value.clone(), refusal.head_value.clone())
        })
    };
    let (steady, burst) =
        (Some(PowerStateOfSamples::SteadyUnderLoad), Some(PowerStateOfSamples::BurstsAfterPauses));
    assert_eq!(refused(steady, steady), None);
    assert_eq!(refused(steady, Some(PowerStateOfSamples::UnsettledUnderLoad)), None);
    assert_eq!(refused(burst, steady), Some(("burst".to_owned(), "steady".to_owned())));
    let (old, new) = refused(None, steady).unwrap();
    assert!(old.contains("--save-baseline NAME") && new == "steady", "{old}");
    // Runs on the host's CPU have no power state, so they are comparable.
    assert!(
        judge_against_run_twice(
            &make_test_bench_run("1", &[("a", 1e6)]),
            &make_test_bench_run("2", &[("a", 1e6)])
        )
        .refused
        .is_empty()
    );
}

#[test]
fn another_power_limit_is_refused_for_cases_at_the_power_cap() {
    let run = |session, limit_mw, at_cap| {
        let reading =
            GpuCardReading { power_limit_mw: Some(limit_mw), ..GpuCardReading::default() };
        let power = CasePowerRecord {
            at_power_cap: at_cap,
            ..CasePowerRecord::from_nvml_reading(PowerStateOfSamples::SteadyUnderLoad, reading)
        };
        with_power_record(make_test_bench_run(session, &[("a", 1e6)]), Some(power))
    };
    let refused = |base, head| {
        let report = judge_test_runs_against(
            &test_baseline_of_run(&base),
            &[head],
            BaselineJudgementSettings::default(),
        );
        report
            .refused
            .first()
            .map(|refusal| (refusal.base_value.clone(), refusal.head_value.clone()))
    };
    let capped = |session, limit_mw| run(session, limit_mw, true);
    assert_eq!(refused(capped("1", 700_000), capped("2", 700_000)), None);
    let words = ("steady at 700 W".to_owned(), "steady at 500 W".to_owned());
    assert_eq!(refused(capped("1", 700_000), capped("2", 500_000)), Some(words));
    // Below the power cap, a different power limit has no effect on times.
    assert_eq!(refused(run("1", 700_000, false), run("2", 500_000, false)), None);
}

#[test]
fn times_of_a_card_that_idled_between_samples_are_refused_at_the_cap() {
    let run = |session, at_cap, busy| {
        let steady = CasePowerRecord::from_nvml_reading(
            PowerStateOfSamples::SteadyUnderLoad,
            GpuCardReading::default(),
        );
        with_power_record(
            make_test_bench_run(session, &[("a", 1e6)]),
            Some(CasePowerRecord { at_power_cap: at_cap, gpu_busy_share: busy, ..steady }),
        )
    };
    let refused = |base, head| {
        let report = judge_test_runs_against(
            &test_baseline_of_run(&base),
            &[head],
            BaselineJudgementSettings::default(),
        );
        report
            .refused
            .first()
            .map(|refusal| (refusal.base_value.clone(), refusal.head_value.clone()))
    };
    assert_eq!(refused(run("1", true, Some(0.97)), run("2", true, Some(0.7))), None);
    assert_eq!(refused(run("1", false, None), run("2", false, Some(0.97))), None);
    let (old, new) = refused(run("1", true, None), run("2", true, Some(0.97))).unwrap();
    insta::assert_snapshot!(old, @"steady, by a version that let the card idle between samples: `cargo bench -- --save-baseline NAME` measures it anew");
    assert_eq!(new, "steady");
}

#[test]
fn a_lower_clock_at_the_power_cap_is_attributed_to_the_kernel() {
    let run = |session, time, clock_mhz: f64, at_cap| {
        let mut run = as_if_on_test_gpu(make_test_bench_run(session, &[("a", time)]));
        let samples = &mut run.cases.get_mut("a").unwrap().samples;
        samples.sm_clock_per_sample_mhz = vec![clock_mhz; samples.elapsed_per_sample_ns.len()];
        samples.power.as_mut().unwrap().at_power_cap = at_cap;
        run
    };
    let verdict = |at_cap| {
        let judged = &judge_against_run_twice(
            &run("1", 1e6, 1600.0, at_cap),
            &run("2", 1.3e6, 1300.0, at_cap),
        )
        .judged_cases[0];
        verdict_and_reason(judged)
    };
    assert_eq!(verdict(true), (VerdictOnCase::Regressed, None));
    assert_eq!(verdict(false), (VerdictOnCase::Inconclusive, Some("clock")));
}

#[test]
fn a_change_within_the_range_of_an_unsettled_power_state_is_inconclusive() {
    let base = as_if_on_test_gpu(make_test_bench_run("1", &[("a", 1e6)]));
    let verdict = |time| {
        let mut head = as_if_on_test_gpu(make_test_bench_run("2", &[("a", time)]));
        let power = head.cases.get_mut("a").unwrap().samples.power.as_mut().unwrap();
        (power.state, power.range) = (PowerStateOfSamples::UnsettledUnderLoad, Some([0.95, 1.15]));
        let judged = &judge_against_run_twice(&base, &head).judged_cases[0];
        verdict_and_reason(judged)
    };
    let unclear = (VerdictOnCase::Inconclusive, Some("unsettled"));
    assert_eq!(verdict(1e6), unclear);
    assert_eq!(verdict(1.15e6).0, VerdictOnCase::Inconclusive);
    assert_eq!(verdict(1.5e6), (VerdictOnCase::Regressed, None));
}

/// A throttled head is not judged as a regression, and a throttled baseline could hide a
/// regression. Another process on the GPU, or host time within a case's time, also makes the
/// measured time too long.
#[test]
fn times_that_something_else_made_too_long_do_not_count_against_the_code() {
    type ChangeOfTestSamples = fn(&mut kernelgate::record::SamplesOfCase);
    let with = |time: f64, change: ChangeOfTestSamples| {
        let mut run = make_test_bench_run("1", &[("a", time)]);
        change(&mut run.cases.get_mut("a").unwrap().samples);
        run
    };
    let verdict = |base: &BenchProcessRun, head: &BenchProcessRun| {
        let head = BenchProcessRun { session_name: "2".to_owned(), ..head.clone() };
        verdict_and_reason(&judge_against_run_twice(base, &head).judged_cases[0])
    };
    let plain = |time| with(time, |_| {});
    let long: [(ChangeOfTestSamples, &'static str); 3] = [
        (|samples| samples.conditions.throttled_samples = 1, "throttled"),
        (|samples| samples.conditions.other_gpu_processes = Some(1), "shared_gpu"),
        (|samples| samples.conditions.includes_host_launch_time = true, "host_bound"),
    ];
    for (change, doubt) in long {
        let unclear = (VerdictOnCase::Inconclusive, Some(doubt));
        assert_eq!(verdict(&plain(1e6), &with(1.5e6, change)), unclear);
        assert_eq!(verdict(&with(1e6, change), &plain(1e6)), unclear);
        assert_eq!(verdict(&with(1e6, change), &plain(1.5e6)), (VerdictOnCase::Regressed, None));
        assert_eq!(verdict(&plain(1e6), &with(1e6, change)), (VerdictOnCase::Unchanged, None));
    }
    // A fixed or lower clock limit does not count as throttling.
    let at = |time, clock_mhz: f64| {
        let mut run = with(time, |_| {});
        let samples = &mut run.cases.get_mut("a").unwrap().samples;
        samples.sm_clock_per_sample_mhz = vec![clock_mhz; samples.elapsed_per_sample_ns.len()];
        run
    };
    let unclear = (VerdictOnCase::Inconclusive, Some("clock"));
    assert_eq!(verdict(&at(1e6, 1980.0), &at(1.65e6, 1200.0)), unclear);
    assert_eq!(verdict(&at(1e6, 1200.0), &at(1e6, 1980.0)), unclear);
    assert_eq!(verdict(&at(1e6, 1980.0), &at(1.65e6, 1900.0)), (VerdictOnCase::Regressed, None));
    assert_eq!(verdict(&at(1e6, 1980.0), &at(1e6, 1200.0)), (VerdictOnCase::Unchanged, None));
    let host: ChangeOfTestSamples = |samples| samples.conditions.includes_host_launch_time = true;
    assert_eq!(verdict(&with(1e6, host), &with(1.5e6, host)), (VerdictOnCase::Regressed, None));
}

#[test]
fn several_runs_narrow_the_interval_and_runs_of_other_code_are_not_added() {
    let mut baseline = test_baseline_of_run(&make_test_bench_run("1", &[("a", 1e6)]));
    for (session, time) in [("2", 1.01e6), ("3", 0.99e6)] {
        baseline.add_comparable_run(&make_test_bench_run(session, &[("a", time)])).unwrap();
    }
    let heads: Vec<BenchProcessRun> =
        ["4", "5"].map(|session| make_test_bench_run(session, &[("a", 1.1e6)])).to_vec();
    let report = judge_test_runs_against(&baseline, &heads, BaselineJudgementSettings::default());
    let judged = &report.judged_cases[0];
    assert_eq!(
        (
            judged.verdict,
            judged.baseline_run_evidence().unwrap().base.run_count,
            judged.baseline_run_evidence().unwrap().head.run_count
        ),
        (VerdictOnCase::Regressed, 3, 2)
    );
    let mut other = make_test_bench_run("6", &[("a", 1e6)]);
    other.environment.cpu_backend_threads += 1;
    assert_eq!(baseline.add_comparable_run(&other).unwrap_err()[0].field_name, "threads");
    assert_eq!(baseline.runs.len(), 3);
}

#[test]
fn a_run_that_is_compared_with_itself_is_reported() {
    let one = make_test_bench_run("1", &[("a", 1e6)]);
    assert_eq!(
        judge_against_run_twice(&one, &one).method_facts.runs_compared_with_themselves,
        ["1/b"]
    );
    assert!(
        judge_against_run_twice(&one, &make_test_bench_run("2", &[("a", 1e6)]))
            .method_facts
            .runs_compared_with_themselves
            .is_empty()
    );
}

#[test]
fn new_missing_failed_and_interrupted_cases_are_reported() {
    let mut head = make_test_bench_run("2", &[("a", 1e6), ("new", 1e6)]);
    let report =
        judge_against_run_twice(&make_test_bench_run("1", &[("a", 1e6), ("gone", 1e6)]), &head);
    assert_eq!(
        (report.new_cases.as_slice(), report.method_facts.baseline_cases_not_run.as_slice()),
        (&["new".to_owned()][..], &["gone".to_owned()][..])
    );
    assert_eq!(report.exit_reason(), ProcessExitReason::Success);
    head.ended_normally = false;
    assert_eq!(
        judge_against_run_twice(&make_test_bench_run("1", &[("a", 1e6)]), &head).exit_reason(),
        ProcessExitReason::Inconclusive
    );
    head.failed.insert("x".to_owned(), "wrong".into());
    assert_eq!(
        judge_against_run_twice(&make_test_bench_run("1", &[("a", 1e6)]), &head).exit_reason(),
        ProcessExitReason::Regression
    );
    assert_eq!(
        judge_against_run_twice(
            &make_test_bench_run("1", &[("z", 1e6)]),
            &make_test_bench_run("2", &[("a", 1e6)])
        )
        .exit_reason(),
        ProcessExitReason::Inconclusive
    );
}

#[test]
fn a_baseline_keeps_cases_that_a_later_run_did_not_measure() {
    let mut baseline = test_baseline_of_run(&make_test_bench_run("1", &[("a", 1e6), ("b", 1e6)]));
    baseline.merge_run_replacing_other_code(&make_test_bench_run("2", &[("b", 2e6)]));
    assert_eq!(baseline.cases.len(), 2);
    assert_eq!(baseline.cases["a"].runs.keys().collect::<Vec<_>>(), ["1/b"]);
    assert_eq!(baseline.cases["b"].runs.keys().collect::<Vec<_>>(), ["2/b"]);
    assert_eq!(baseline.runs.len(), 2);
    baseline.merge_run_replacing_other_code(&make_test_bench_run("3", &[("a", 1e6), ("b", 1e6)]));
    assert_eq!(baseline.runs.keys().collect::<Vec<_>>(), ["3/b"]);
}

#[test]
fn with_a_baseline_of_one_run_the_usual_spread_of_runs_is_no_regression() {
    let base = test_baseline_of_run(&make_test_bench_run("1", &[("a", 1e6)]));
    let at = |time: f64| {
        let report = judge_test_runs_against(
            &base,
            &[make_test_bench_run("2", &[("a", time)])],
            BaselineJudgementSettings::default(),
        );
        let (verdict, reason) = verdict_and_reason(&report.judged_cases[0]);
        (verdict, reason, report.exit_reason())
    };
    let doubt = (VerdictOnCase::Inconclusive, Some("single_run"), ProcessExitReason::Inconclusive);
    let fine = (VerdictOnCase::Unchanged, None, ProcessExitReason::Success);
    // In this test, the changes of the times are within the threshold of 5 %.
    assert_eq!([at(1.049e6), at(0.951e6)], [fine, fine]);
    assert_eq!([at(1.06e6), at(1e6 / 1.06), at(1.28e6), at(1e6 / 1.28)], [doubt; 4]);
    // The test expects the threshold, and the allowance of 10 % for a single run on either side:
    // 1.05 x 1.1 / 0.9.
    assert_eq!(at(1.29e6), (VerdictOnCase::Regressed, None, ProcessExitReason::Regression));
    assert_eq!(at(1e6 / 1.29), (VerdictOnCase::Improved, None, ProcessExitReason::Success));
}

/// Returns a copy of a test run as if its executable had been built from this commit.
fn as_if_built_from_commit(commit: &str, run: BenchProcessRun) -> BenchProcessRun {
    let provenance = CommitAndChanges { commit: Some(commit.to_owned()), dirty: false };
    BenchProcessRun { provenance, executable_hash: Some(format!("built from {commit}")), ..run }
}

/// Makes a test baseline with five runs of one commit, whose times lie within ±1 %.
fn test_baseline_of_five_runs() -> BaselineFile {
    let mut baseline = BaselineFile::empty_baseline_with_name("main");
    for (session, time) in
        [("1", 0.99e6), ("2", 1.01e6), ("3", 1e6), ("4", 0.995e6), ("5", 1.005e6)]
    {
        baseline.merge_run_replacing_other_code(&as_if_built_from_commit(
            "aaaa",
            make_test_bench_run(session, &[("a", time)]),
        ));
    }
    baseline
}

#[test]
fn a_run_that_replaces_several_keeps_their_spread() {
    let mut base = test_baseline_of_five_runs();
    assert_eq!(base.cases["a"].runs.len(), 5, "runs of one build add");
    let at = |base: &BaselineFile, time: f64| {
        let head = as_if_built_from_commit("cccc", make_test_bench_run("h", &[("a", time)]));
        let judged = judge_test_runs_against(base, &[head], BaselineJudgementSettings::default())
            .judged_cases
            .remove(0);
        (
            judged.verdict,
            judged
                .baseline_run_evidence()
                .unwrap()
                .base
                .single_run_spread
                .map(|single| single.from),
        )
    };
    // The test expects 1.05 x 1.01 / 0.9: the threshold, the spread of the five earlier runs, and
    // the allowance of the single judged run.
    assert_eq!(at(&base, 1.19e6), (VerdictOnCase::Regressed, None));
    base.merge_run_replacing_other_code(&as_if_built_from_commit(
        "bbbb",
        make_test_bench_run("6", &[("a", 1e6)]),
    ));
    assert_eq!(base.cases["a"].runs.len(), 1, "no case mixes commits");
    let earlier = Some(SourceOfAssumedSpread::EarlierCodeRuns);
    assert_eq!(at(&base, 1.19e6), (VerdictOnCase::Regressed, earlier));
    assert_eq!(at(&base, 1.17e6), (VerdictOnCase::Inconclusive, earlier));
    // The baseline keeps the recorded spread when another single run replaces this run.
    base.merge_run_replacing_other_code(&as_if_built_from_commit(
        "dddd",
        make_test_bench_run("7", &[("a", 1e6)]),
    ));
    assert_eq!(at(&base, 1.19e6), (VerdictOnCase::Regressed, earlier));
    // If the definition of the case changes, earlier times are not comparable, so their spread is
    // dropped.
    let mut redefined = as_if_built_from_commit("eeee", make_test_bench_run("8", &[("a", 1e6)]));
    redefined.cases.get_mut("a").unwrap().workload_revision = 2;
    base.merge_run_replacing_other_code(&redefined);
    assert_eq!(base.cases["a"].earlier, None);
}

#[test]
fn on_a_calibrated_device_a_single_run_has_the_calibrated_spread() {
    let here = make_test_bench_run("1", &[("a", 1e6)]).environment;
    let case = "w/f/a/cpu/hot";
    // The test's calibration has sixty processes, whose times lie within ±0.5 %.
    let calibration = GateCalibration {
        environment: here.clone(),
        ..calibration::tests::test_calibration(3, &[])
    };
    let spreads = CalibratedSpreadsByCase::from_calibration(&calibration);
    let base = test_baseline_of_run(&make_test_bench_run("1", &[(case, 1e6), ("b", 1e6)]));
    let judged = |spreads: &CalibratedSpreadsByCase, case: &str, time: f64| {
        let head = make_test_bench_run("2", &[(case, time)]);
        let report = judge_against_baseline(
            &base,
            &test_measurement_of_runs(&[head]),
            BaselineJudgementSettings::default(),
            spreads,
            &PackageGateRules::default(),
        );
        let judged = report.judged_cases[0].clone();
        let source = |side: fn(&BaselineRunEvidence) -> Option<AssumedSpreadOfSingleRun>| {
            side(judged.baseline_run_evidence().unwrap()).unwrap().from
        };
        (
            judged.verdict,
            source(|runs| runs.base.single_run_spread),
            source(|runs| runs.head.single_run_spread),
        )
    };
    let (measured, assumed) = (
        SourceOfAssumedSpread::DeviceCalibration,
        SourceOfAssumedSpread::AssumedWithoutMeasurement,
    );
    assert_eq!(judged(&spreads, case, 1.07e6), (VerdictOnCase::Regressed, measured, measured));
    assert_eq!(judged(&spreads, case, 1.055e6), (VerdictOnCase::Inconclusive, measured, measured));
    // The calibrated spread of a case does not apply to other cases or to other devices.
    assert_eq!(judged(&spreads, "b", 1.07e6), (VerdictOnCase::Inconclusive, assumed, assumed));
    let elsewhere = RunEnvironment { machine_hash: Some("there".to_owned()), ..here };
    let spreads = CalibratedSpreadsByCase::from_calibration(&GateCalibration {
        environment: elsewhere,
        ..calibration
    });
    assert_eq!(judged(&spreads, case, 1.07e6), (VerdictOnCase::Inconclusive, assumed, assumed));
}

#[test]
fn another_device_of_the_same_model_gets_a_larger_tolerance() {
    let base = test_baseline_of_run_twice(&make_test_bench_run("1", &[("a", 1e6)]));
    let on = |machine: Option<&str>, time: f64| {
        let mut head = make_test_bench_run("2", &[("a", time)]);
        head.environment.machine_hash = machine.map(str::to_owned);
        let report = judge_test_runs_against(
            &base,
            &[head],
            BaselineJudgementSettings {
                assumed_single_run_spread: 0.0,
                ..BaselineJudgementSettings::default()
            },
        );
        (
            report.judged_cases[0].verdict,
            report.method_facts.baseline_and_run_device.is_some(),
            (1e3 * report.judged_cases[0].regression_threshold.limit_value).round() / 1e3,
        )
    };
    assert_eq!(on(Some("here"), 1.25e6), (VerdictOnCase::Regressed, false, 0.05));
    for elsewhere in [Some("there"), None] {
        assert_eq!(on(elsewhere, 1.25e6), (VerdictOnCase::Unchanged, true, 0.281));
        assert_eq!(on(elsewhere, 1.29e6), (VerdictOnCase::Regressed, true, 0.281));
    }
}

#[test]
fn a_case_is_compared_on_the_card_that_both_sides_share() {
    let on = |session: &str, machine: &str, time: f64| {
        let mut run = make_test_bench_run(session, &[("a", time)]);
        run.environment.machine_hash = Some(machine.to_owned());
        run
    };
    let mut base = test_baseline_of_run(&on("1", "slow", 1.2e6));
    base.add_comparable_run(&on("2", "fast", 1e6)).unwrap();
    base.add_comparable_run(&on("3", "slow", 1.2e6)).unwrap();
    let judge = |head: &[BenchProcessRun]| {
        let report = judge_test_runs_against(
            &base,
            head,
            BaselineJudgementSettings {
                assumed_single_run_spread: 0.0,
                ..BaselineJudgementSettings::default()
            },
        );
        let judged = &report.judged_cases[0];
        let card = judged.baseline_run_evidence().unwrap().compared_card.clone();
        (judged.verdict, card, report.method_facts.baseline_and_run_device.is_some())
    };
    let slow = [on("4", "slow", 1.3e6), on("5", "slow", 1.3e6)];
    assert_eq!(judge(&slow), (VerdictOnCase::Regressed, Some("host slow".to_owned()), false));
    // In this test, a run on the fast card does not hide the slow-down of the run on the slow card.
    let mixed = [slow[0].clone(), slow[1].clone(), on("6", "fast", 1e6)];
    assert_eq!(judge(&mixed), (VerdictOnCase::Regressed, Some("host slow".to_owned()), false));
    let elsewhere = [on("7", "third", 1.3e6), on("8", "third", 1.3e6)];
    assert_eq!(judge(&elsewhere), (VerdictOnCase::Unchanged, None, true));
}

/// Judges a test head against a baseline of equal times, each verified to the given extent.
fn judge_with_verification_extents(
    before: (u64, u64),
    now: (u64, u64),
    rules: &PackageGateRules,
) -> BaselineVerdicts {
    let verified = |session: &str, (checked, total): (u64, u64)| {
        let mut run = make_test_bench_run(session, &[("a", 1e6)]);
        let verification = &mut run.cases.get_mut("a").unwrap().verification;
        (verification.compared_elements, verification.total_elements) = (checked, total);
        run
    };
    let base = test_baseline_of_run_twice(&verified("1", before));
    let head = test_measurement_of_runs(&[verified("2", now)]);
    judge_against_baseline(
        &base,
        &head,
        BaselineJudgementSettings::default(),
        &CalibratedSpreadsByCase::default(),
        rules,
    )
}

#[test]
fn a_case_that_lost_its_verification_fails_whatever_its_time() {
    let report =
        judge_with_verification_extents((1600, 1600), (0, 1600), &PackageGateRules::default());
    let judged = &report.judged_cases[0];
    assert_eq!(verdict_and_reason(judged), (VerdictOnCase::Inconclusive, Some("less_verified")));
    assert_eq!(
        report.verification_losses[0].describe_verification_loss(),
        "no longer verified (before: every element verified)"
    );
    assert_eq!(report.exit_reason(), ProcessExitReason::Regression);
}

#[test]
fn a_case_with_fewer_compared_elements_is_inconclusive() {
    let report =
        judge_with_verification_extents((1600, 1600), (1, 1600), &PackageGateRules::default());
    assert_eq!(
        (report.judged_cases[0].verdict, report.exit_reason()),
        (VerdictOnCase::Inconclusive, ProcessExitReason::Inconclusive)
    );
    assert_eq!(report.verification_losses.len(), 1);
}

#[test]
fn a_case_that_is_newly_verified_is_judged_by_its_time() {
    let report =
        judge_with_verification_extents((0, 1600), (1600, 1600), &PackageGateRules::default());
    assert_eq!(
        (report.judged_cases[0].verdict, report.exit_reason()),
        (VerdictOnCase::Unchanged, ProcessExitReason::Success)
    );
    assert!(report.verification_losses.is_empty() && report.numerics.error_growths.is_empty());
}

#[test]
fn a_case_that_was_never_verified_is_listed_and_judged_by_its_time() {
    let report =
        judge_with_verification_extents((0, 1600), (0, 1600), &PackageGateRules::default());
    assert_eq!(
        (report.judged_cases[0].verdict, report.exit_reason()),
        (VerdictOnCase::Unchanged, ProcessExitReason::Success)
    );
    assert_eq!(report.unverified_cases, ["a"]);
}

#[test]
fn a_lost_verification_may_be_accepted_with_a_reason() {
    let text = "[[accept]]\ncases = \"a\"\nless-verified = true\nreason = \"too large\"";
    let rules = rules_file::parse_rules("kernelgate.toml", text).unwrap();
    let report = judge_with_verification_extents((1600, 1600), (1, 1600), &rules);
    assert_eq!(
        (report.judged_cases[0].verdict, report.exit_reason()),
        (VerdictOnCase::Unchanged, ProcessExitReason::Success)
    );
    assert!(report.verification_losses.is_empty());
    assert_eq!(rules.acceptances_of_case("a")[0].acceptance_text(), "less verified: too large");
}

#[test]
fn launch_shapes_keep_grid_threads_and_shared_memory_in_json() {
    let shape = Launch { dynamic_shared_bytes: 512, ..Launch::new([8, 2, 1], [128, 1, 1]) };
    let text = serde_json::to_string(&Launch { cooperative: true, ..shape }).unwrap();
    assert_eq!(text, r#"{"grid":[8,2,1],"block":128,"shared_bytes":512}"#);
    assert_eq!(serde_json::from_str::<Launch>(&text).unwrap(), shape);
}
