//! Tests the judgement of runs against a baseline: verdicts, reasons and refusals.

use std::collections::BTreeMap;

use super::baseline::{GatePolicy, GateReport, judge_against_baseline};
use super::calibration::{self, Calibration};
use super::judgement::{Judgement, RunEvidence};
use super::ratio_interval::{SingleRunSpread, SpreadSource, TimeRatio};
use super::rules::PackageRules;
use super::rules::rules_file;
use super::single_run::CalibratedSpreads;
use super::verdict::Verdict;
use kernelgate::exit::ExitReason;
use kernelgate::measure::power::{PowerRecord, PowerState};
use kernelgate::record::{Baseline, CaseRecord, Environment, Measurement, ProcessRun, Provenance};
use kernelgate_cuda::Launch;
use kernelgate_cuda::observe::telemetry::CardReading;

/// Judges runs against a baseline without a calibration of the device.
fn judge_runs_against(baseline: &Baseline, runs: &[ProcessRun], policy: GatePolicy) -> GateReport {
    let (spreads, rules) = (CalibratedSpreads::default(), PackageRules::default());
    judge_against_baseline(baseline, &measured_together(runs), policy, &spreads, &rules)
}

/// The verdict of a judgement, and the name of its first reason.
fn verdict_and_reason(judged: &Judgement) -> (Verdict, Option<&'static str>) {
    (judged.verdict, judged.reasons.first().map(|reason| reason.name()))
}

fn measured_together(runs: &[ProcessRun]) -> Measurement {
    Measurement::from_runs(runs.to_vec()).unwrap()
}

fn run(session: &str, times: &[(&str, f64)]) -> ProcessRun {
    let environment = Environment { machine: Some("here".to_owned()), ..Environment::cpu() };
    let samples = |time: f64| (0..11).map(|i| time * (1.0 + 0.001 * f64::from(i - 5))).collect();
    ProcessRun {
        complete: true,
        cases: times
            .iter()
            .map(|&(id, time)| (id.to_owned(), CaseRecord::untimed_samples(samples(time))))
            .collect(),
        ..ProcessRun::start_now("b", session, environment, Provenance::default())
    }
}

fn baseline_of_run(run: &ProcessRun) -> Baseline {
    let mut baseline = Baseline::new("main");
    baseline.merge_run(run);
    baseline
}

/// A baseline of one run, recorded as two process runs.
fn baseline_of_two_runs(run: &ProcessRun) -> Baseline {
    let mut baseline = baseline_of_run(run);
    baseline.add(&ProcessRun { session: format!("{}-again", run.session), ..run.clone() }).unwrap();
    baseline
}

/// Compares a run with a baseline of two runs.
fn gate_with_defaults(base: &ProcessRun, head: &ProcessRun) -> GateReport {
    judge_runs_against(
        &baseline_of_two_runs(base),
        std::slice::from_ref(head),
        GatePolicy::default(),
    )
}

#[test]
fn equal_times_are_unchanged_and_exit_with_success() {
    let report = gate_with_defaults(&run("1", &[("a", 1e6)]), &run("2", &[("a", 1e6)]));
    assert_eq!(report.judged[0].verdict, Verdict::Unchanged);
    assert_eq!(report.exit(), ExitReason::Fine);
    // The threshold of 5 % beyond an interval of 10 % for the single run.
    assert!((report.judged[0].detectable.unwrap() - (1.05 / 0.9 - 1.0)).abs() < 1e-9);
}

#[test]
fn a_slow_down_by_half_is_a_regression_and_is_listed_first() {
    let report = gate_with_defaults(
        &run("1", &[("a", 1e6), ("b", 1e6)]),
        &run("2", &[("a", 1e6), ("b", 1.5e6)]),
    );
    assert_eq!(
        (report.judged[0].case.as_str(), report.judged[0].verdict),
        ("b", Verdict::Regressed)
    );
    assert_eq!(report.exit(), ExitReason::Regression);
}

#[test]
fn the_verdict_changes_at_the_detectable_effect() {
    let base = run("1", &[("a", 1e6)]);
    let detectable = gate_with_defaults(&base, &base).judged[0].detectable.unwrap();
    let at = |slowdown: f64| {
        gate_with_defaults(&base, &run("2", &[("a", 1e6 * (1.0 + slowdown))])).judged[0].verdict
    };
    assert_eq!(at(detectable * 1.01), Verdict::Regressed);
    // A change below the detectable one is not shown, and only a change that does not matter counts
    // as unchanged.
    assert_eq!([at(detectable * 0.99), at(0.051)], [Verdict::Inconclusive; 2]);
    assert_eq!([at(0.049), at(-0.049)], [Verdict::Unchanged; 2]);
}

#[test]
fn a_relevant_change_that_cannot_be_detected_is_not_called_unchanged() {
    let mut base = baseline_of_run(&run("1", &[("a", 1e6)]));
    for (session, time) in [("2", 0.95e6), ("3", 1.05e6), ("4", 0.98e6), ("5", 1.02e6)] {
        base.add(&run(session, &[("a", time)])).unwrap();
    }
    let at = |times: &[f64]| {
        let heads: Vec<ProcessRun> = times
            .iter()
            .enumerate()
            .map(|(i, time)| run(&format!("h{i}"), &[("a", *time)]))
            .collect();
        let report = judge_runs_against(&base, &heads, GatePolicy::default());
        (report.judged[0].clone(), report.exit())
    };
    let (judged, exit) = at(&[1.2e6]);
    let percent = |ratio: f64| (1e3 * (ratio - 1.0)).round() / 10.0;
    let TimeRatio { center, low, high } = judged.ratio;
    assert_eq!([center, low, high].map(percent), [20.0, 2.9, 38.9]);
    assert_eq!((judged.verdict, exit), (Verdict::Inconclusive, ExitReason::Inconclusive));
    let why = judged.reason().unwrap();
    insta::assert_snapshot!(why, @"beyond the threshold, less than these runs can detect");
    // More runs decide; faster is judged like slower; within the threshold nothing matters.
    assert_eq!(at(&[1.2e6, 1.19e6, 1.21e6]).1, ExitReason::Regression);
    assert_eq!(at(&[0.9e6]).0.verdict, Verdict::Inconclusive);
    for time in [0.951e6, 1e6, 1.049e6] {
        assert_eq!((at(&[time]).0.verdict, at(&[time]).1), (Verdict::Unchanged, ExitReason::Fine));
    }
}

#[test]
fn a_faster_case_is_improved_and_a_tiny_absolute_change_is_ignored() {
    let improved = gate_with_defaults(&run("1", &[("a", 1e6)]), &run("2", &[("a", 5e5)]));
    assert_eq!(
        (improved.judged[0].verdict, improved.exit()),
        (Verdict::Improved, ExitReason::Fine)
    );
    let tiny = gate_with_defaults(&run("1", &[("a", 50.0)]), &run("2", &[("a", 100.0)]));
    assert_eq!(tiny.judged[0].verdict, Verdict::Unchanged, "{:?}", tiny.judged[0]);
}

#[test]
fn noise_above_the_limit_of_the_policy_makes_a_case_inconclusive() {
    let mut noisy = run("2", &[("a", 1e6)]);
    let samples = &mut noisy.cases.get_mut("a").unwrap().samples;
    samples.elapsed_ns = (1..=11).map(|i| 2e5 * f64::from(i)).collect();
    let report = gate_with_defaults(&run("1", &[("a", 1e6)]), &noisy);
    assert_eq!(
        (report.judged[0].verdict, report.exit()),
        (Verdict::Inconclusive, ExitReason::Inconclusive)
    );
}

#[test]
fn another_device_or_definition_is_refused_with_the_field() {
    let base = run("1", &[("a", 1e6), ("b", 1e6)]);
    let mut elsewhere = base.clone();
    elsewhere.environment.device_name = "other".to_owned();
    let report = judge_runs_against(
        &baseline_of_run(&elsewhere),
        std::slice::from_ref(&base),
        GatePolicy::default(),
    );
    assert_eq!(
        (report.refused[0].field.as_str(), report.refused[0].base.as_str()),
        ("device_name", "other")
    );
    assert_eq!((report.refused[0].cases.len(), report.exit()), (2, ExitReason::Refused));
    let mut redefined = base.clone();
    redefined.cases.get_mut("b").unwrap().revision = 2;
    let report = gate_with_defaults(&base, &redefined);
    assert_eq!(
        (report.refused[0].field.as_str(), report.refused[0].cases.as_slice()),
        ("revision", &["b".to_owned()][..])
    );
    assert_eq!((report.judged.len(), report.exit()), (1, ExitReason::Refused));
    let mut more = base.clone();
    more.cases.get_mut("b").unwrap().work.read_bytes = 16;
    let report = gate_with_defaults(&base, &more);
    let refusal = &report.refused[0];
    assert_eq!((refusal.field.as_str(), refusal.base.as_str()), ("work", "read 8 B, write 8 B"));
    let reseeded = ProcessRun { seed: 2, ..base.clone() };
    assert_eq!(gate_with_defaults(&base, &reseeded).refused[0].field, "seed");
}

#[test]
fn a_baseline_case_that_is_now_skipped_does_not_pass() {
    let mut head = run("2", &[("a", 1e6)]);
    head.skipped.insert("gone".to_owned(), "no GPU".to_owned());
    head.skipped.insert("never measured".to_owned(), "no GPU".to_owned());
    let report = gate_with_defaults(&run("1", &[("a", 1e6), ("gone", 1e6)]), &head);
    assert_eq!(report.skipped, BTreeMap::from([("gone".to_owned(), "no GPU".to_owned())]));
    assert!(report.facts.not_run.is_empty());
    assert_eq!(report.exit(), ExitReason::Inconclusive);
}

#[test]
fn contention_on_the_host_excuses_a_slow_side_on_the_cpu_only() {
    let mut busy = run("2", &[("a", 1e6)]);
    busy.cases.get_mut("a").unwrap().samples.conditions.contention = Some(0.07);
    assert_eq!(gate_with_defaults(&busy, &busy).judged[0].verdict, Verdict::Unchanged);
    let base = run("1", &[("a", 1e6)]);
    let mut head = run("2", &[("a", 1.5e6)]);
    head.cases.get_mut("a").unwrap().samples.conditions.contention = Some(0.5);
    let report = gate_with_defaults(&base, &head);
    assert_eq!(
        (report.judged[0].verdict, report.judged[0].runs().unwrap().head.contention),
        (Verdict::Inconclusive, 0.5)
    );
    let verdict = gate_with_defaults(&on_test_gpu(base), &on_test_gpu(head)).judged[0].verdict;
    assert_eq!(verdict, Verdict::Regressed);
}

/// A copy of a run as on a GPU in the steady state.
fn on_test_gpu(run: ProcessRun) -> ProcessRun {
    in_power_state(run, Some(PowerRecord::from_reading(PowerState::Steady, CardReading::default())))
}

fn in_power_state(mut run: ProcessRun, power: Option<PowerRecord>) -> ProcessRun {
    run.environment.device_kind = "cuda".to_owned();
    run.cases.values_mut().for_each(|case| case.samples.power.clone_from(&power));
    run
}

#[test]
fn different_power_states_are_refused() {
    let run = |session, state: Option<PowerState>| {
        let power = state.map(|state| PowerRecord::from_reading(state, CardReading::default()));
        in_power_state(run(session, &[("a", 1e6)]), power)
    };
    let refused = |base, head| {
        let report = judge_runs_against(
            &baseline_of_run(&run("1", base)),
            &[run("2", head)],
            GatePolicy::default(),
        );
        report.refused.first().map(|refusal| {
            assert_eq!(
                (refusal.field.as_str(), report.exit()),
                ("power_state", ExitReason::Refused)
            );
            (refusal.base.clone(), refusal.head.clone())
        })
    };
    let (steady, burst) = (Some(PowerState::Steady), Some(PowerState::Burst));
    assert_eq!(refused(steady, steady), None);
    assert_eq!(refused(steady, Some(PowerState::Unsettled)), None);
    assert_eq!(refused(burst, steady), Some(("burst".to_owned(), "steady".to_owned())));
    let (old, new) = refused(None, steady).unwrap();
    assert!(old.contains("--save-baseline NAME") && new == "steady", "{old}");
    // Runs on the host have no power state.
    assert!(
        gate_with_defaults(&self::run("1", &[("a", 1e6)]), &self::run("2", &[("a", 1e6)]))
            .refused
            .is_empty()
    );
}

#[test]
fn another_power_limit_is_refused_for_cases_at_the_power_cap() {
    let run = |session, limit_mw, at_cap| {
        let reading = CardReading { power_limit_mw: Some(limit_mw), ..CardReading::default() };
        let power =
            PowerRecord { at_cap, ..PowerRecord::from_reading(PowerState::Steady, reading) };
        in_power_state(run(session, &[("a", 1e6)]), Some(power))
    };
    let refused = |base, head| {
        let report = judge_runs_against(&baseline_of_run(&base), &[head], GatePolicy::default());
        report.refused.first().map(|refusal| (refusal.base.clone(), refusal.head.clone()))
    };
    let capped = |session, limit_mw| run(session, limit_mw, true);
    assert_eq!(refused(capped("1", 700_000), capped("2", 700_000)), None);
    let words = ("steady at 700 W".to_owned(), "steady at 500 W".to_owned());
    assert_eq!(refused(capped("1", 700_000), capped("2", 500_000)), Some(words));
    // Below the cap a power limit has no effect.
    assert_eq!(refused(run("1", 700_000, false), run("2", 500_000, false)), None);
}

#[test]
fn times_of_a_card_that_idled_between_samples_are_refused_at_the_cap() {
    let run = |session, at_cap, busy| {
        let steady = PowerRecord::from_reading(PowerState::Steady, CardReading::default());
        in_power_state(run(session, &[("a", 1e6)]), Some(PowerRecord { at_cap, busy, ..steady }))
    };
    let refused = |base, head| {
        let report = judge_runs_against(&baseline_of_run(&base), &[head], GatePolicy::default());
        report.refused.first().map(|refusal| (refusal.base.clone(), refusal.head.clone()))
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
        let mut run = on_test_gpu(run(session, &[("a", time)]));
        let samples = &mut run.cases.get_mut("a").unwrap().samples;
        samples.clock_mhz = vec![clock_mhz; samples.elapsed_ns.len()];
        samples.power.as_mut().unwrap().at_cap = at_cap;
        run
    };
    let verdict = |at_cap| {
        let judged =
            &gate_with_defaults(&run("1", 1e6, 1600.0, at_cap), &run("2", 1.3e6, 1300.0, at_cap))
                .judged[0];
        verdict_and_reason(judged)
    };
    assert_eq!(verdict(true), (Verdict::Regressed, None));
    assert_eq!(verdict(false), (Verdict::Inconclusive, Some("clock")));
}

#[test]
fn a_change_within_the_range_of_an_unsettled_power_state_is_inconclusive() {
    let base = on_test_gpu(run("1", &[("a", 1e6)]));
    let verdict = |time| {
        let mut head = on_test_gpu(run("2", &[("a", time)]));
        let power = head.cases.get_mut("a").unwrap().samples.power.as_mut().unwrap();
        (power.state, power.range) = (PowerState::Unsettled, Some([0.95, 1.15]));
        let judged = &gate_with_defaults(&base, &head).judged[0];
        verdict_and_reason(judged)
    };
    let unclear = (Verdict::Inconclusive, Some("unsettled"));
    assert_eq!(verdict(1e6), unclear);
    assert_eq!(verdict(1.15e6).0, Verdict::Inconclusive);
    assert_eq!(verdict(1.5e6), (Verdict::Regressed, None));
}

/// A throttled head is not judged a regression, and a throttled baseline hides one. Another process
/// on the GPU, or host time in a case's time, also makes the time too long.
#[test]
fn times_that_something_else_made_too_long_do_not_count_against_the_code() {
    type ChangeSamples = fn(&mut kernelgate::record::CaseSamples);
    let with = |time: f64, change: ChangeSamples| {
        let mut run = run("1", &[("a", time)]);
        change(&mut run.cases.get_mut("a").unwrap().samples);
        run
    };
    let verdict = |base: &ProcessRun, head: &ProcessRun| {
        let head = ProcessRun { session: "2".to_owned(), ..head.clone() };
        verdict_and_reason(&gate_with_defaults(base, &head).judged[0])
    };
    let plain = |time| with(time, |_| {});
    let long: [(ChangeSamples, &'static str); 3] = [
        (|samples| samples.conditions.throttled = 1, "throttled"),
        (|samples| samples.conditions.other_processes = Some(1), "shared_gpu"),
        (|samples| samples.conditions.host_bound = true, "host_bound"),
    ];
    for (change, doubt) in long {
        let unclear = (Verdict::Inconclusive, Some(doubt));
        assert_eq!(verdict(&plain(1e6), &with(1.5e6, change)), unclear);
        assert_eq!(verdict(&with(1e6, change), &plain(1e6)), unclear);
        assert_eq!(verdict(&with(1e6, change), &plain(1.5e6)), (Verdict::Regressed, None));
        assert_eq!(verdict(&plain(1e6), &with(1e6, change)), (Verdict::Unchanged, None));
    }
    // A fixed clock, or a lower power limit, does not count as throttled.
    let at = |time, clock_mhz: f64| {
        let mut run = with(time, |_| {});
        let samples = &mut run.cases.get_mut("a").unwrap().samples;
        samples.clock_mhz = vec![clock_mhz; samples.elapsed_ns.len()];
        run
    };
    let unclear = (Verdict::Inconclusive, Some("clock"));
    assert_eq!(verdict(&at(1e6, 1980.0), &at(1.65e6, 1200.0)), unclear);
    assert_eq!(verdict(&at(1e6, 1200.0), &at(1e6, 1980.0)), unclear);
    assert_eq!(verdict(&at(1e6, 1980.0), &at(1.65e6, 1900.0)), (Verdict::Regressed, None));
    assert_eq!(verdict(&at(1e6, 1980.0), &at(1e6, 1200.0)), (Verdict::Unchanged, None));
    let host: ChangeSamples = |samples| samples.conditions.host_bound = true;
    assert_eq!(verdict(&with(1e6, host), &with(1.5e6, host)), (Verdict::Regressed, None));
}

#[test]
fn several_runs_narrow_the_interval_and_runs_of_other_code_are_not_added() {
    let mut baseline = baseline_of_run(&run("1", &[("a", 1e6)]));
    for (session, time) in [("2", 1.01e6), ("3", 0.99e6)] {
        baseline.add(&run(session, &[("a", time)])).unwrap();
    }
    let heads: Vec<ProcessRun> = ["4", "5"].map(|session| run(session, &[("a", 1.1e6)])).to_vec();
    let report = judge_runs_against(&baseline, &heads, GatePolicy::default());
    let judged = &report.judged[0];
    assert_eq!(
        (judged.verdict, judged.runs().unwrap().base.runs, judged.runs().unwrap().head.runs),
        (Verdict::Regressed, 3, 2)
    );
    let mut other = run("6", &[("a", 1e6)]);
    other.environment.threads += 1;
    assert_eq!(baseline.add(&other).unwrap_err()[0].field, "threads");
    assert_eq!(baseline.runs.len(), 3);
}

#[test]
fn a_run_that_is_compared_with_itself_is_reported() {
    let one = run("1", &[("a", 1e6)]);
    assert_eq!(gate_with_defaults(&one, &one).facts.own, ["1/b"]);
    assert!(gate_with_defaults(&one, &run("2", &[("a", 1e6)])).facts.own.is_empty());
}

#[test]
fn new_missing_failed_and_interrupted_cases_are_reported() {
    let mut head = run("2", &[("a", 1e6), ("new", 1e6)]);
    let report = gate_with_defaults(&run("1", &[("a", 1e6), ("gone", 1e6)]), &head);
    assert_eq!(
        (report.new.as_slice(), report.facts.not_run.as_slice()),
        (&["new".to_owned()][..], &["gone".to_owned()][..])
    );
    assert_eq!(report.exit(), ExitReason::Fine);
    head.complete = false;
    assert_eq!(
        gate_with_defaults(&run("1", &[("a", 1e6)]), &head).exit(),
        ExitReason::Inconclusive
    );
    head.failed.insert("x".to_owned(), "wrong".into());
    assert_eq!(gate_with_defaults(&run("1", &[("a", 1e6)]), &head).exit(), ExitReason::Regression);
    assert_eq!(
        gate_with_defaults(&run("1", &[("z", 1e6)]), &run("2", &[("a", 1e6)])).exit(),
        ExitReason::Inconclusive
    );
}

#[test]
fn a_baseline_keeps_cases_that_a_later_run_did_not_measure() {
    let mut baseline = baseline_of_run(&run("1", &[("a", 1e6), ("b", 1e6)]));
    baseline.merge_run(&run("2", &[("b", 2e6)]));
    assert_eq!(baseline.cases.len(), 2);
    assert_eq!(baseline.cases["a"].runs.keys().collect::<Vec<_>>(), ["1/b"]);
    assert_eq!(baseline.cases["b"].runs.keys().collect::<Vec<_>>(), ["2/b"]);
    assert_eq!(baseline.runs.len(), 2);
    baseline.merge_run(&run("3", &[("a", 1e6), ("b", 1e6)]));
    assert_eq!(baseline.runs.keys().collect::<Vec<_>>(), ["3/b"]);
}

#[test]
fn with_a_baseline_of_one_run_the_usual_spread_of_runs_is_no_regression() {
    let base = baseline_of_run(&run("1", &[("a", 1e6)]));
    let at = |time: f64| {
        let report = judge_runs_against(&base, &[run("2", &[("a", time)])], GatePolicy::default());
        let (verdict, reason) = verdict_and_reason(&report.judged[0]);
        (verdict, reason, report.exit())
    };
    let doubt = (Verdict::Inconclusive, Some("single_run"), ExitReason::Inconclusive);
    let fine = (Verdict::Unchanged, None, ExitReason::Fine);
    // In this test the changes are within the threshold of 5 %.
    assert_eq!([at(1.049e6), at(0.951e6)], [fine, fine]);
    assert_eq!([at(1.06e6), at(1e6 / 1.06), at(1.28e6), at(1e6 / 1.28)], [doubt; 4]);
    // The threshold, and 10 % on either side as the allowance for a single run: 1.05 x 1.1 / 0.9.
    assert_eq!(at(1.29e6), (Verdict::Regressed, None, ExitReason::Regression));
    assert_eq!(at(1e6 / 1.29), (Verdict::Improved, None, ExitReason::Fine));
}

/// A copy of a run as measured by an executable that was built from that commit.
fn with_commit(commit: &str, run: ProcessRun) -> ProcessRun {
    let provenance = Provenance { commit: Some(commit.to_owned()), dirty: false };
    ProcessRun { provenance, executable: Some(format!("built from {commit}")), ..run }
}

/// Adds five runs of one commit with times within ±1 %.
fn baseline_of_five_runs() -> Baseline {
    let mut baseline = Baseline::new("main");
    for (session, time) in
        [("1", 0.99e6), ("2", 1.01e6), ("3", 1e6), ("4", 0.995e6), ("5", 1.005e6)]
    {
        baseline.merge_run(&with_commit("aaaa", run(session, &[("a", time)])));
    }
    baseline
}

#[test]
fn a_run_that_replaces_several_keeps_their_spread() {
    let mut base = baseline_of_five_runs();
    assert_eq!(base.cases["a"].runs.len(), 5, "runs of one build add");
    let at = |base: &Baseline, time: f64| {
        let head = with_commit("cccc", run("h", &[("a", time)]));
        let judged = judge_runs_against(base, &[head], GatePolicy::default()).judged.remove(0);
        (judged.verdict, judged.runs().unwrap().base.single.map(|single| single.from))
    };
    // 1.05 x 1.01 / 0.9, with the spread of the five runs.
    assert_eq!(at(&base, 1.19e6), (Verdict::Regressed, None));
    base.merge_run(&with_commit("bbbb", run("6", &[("a", 1e6)])));
    assert_eq!(base.cases["a"].runs.len(), 1, "no case mixes commits");
    let earlier = Some(SpreadSource::EarlierRuns);
    assert_eq!(at(&base, 1.19e6), (Verdict::Regressed, earlier));
    assert_eq!(at(&base, 1.17e6), (Verdict::Inconclusive, earlier));
    // The recorded spread remains when another single run replaces this run.
    base.merge_run(&with_commit("dddd", run("7", &[("a", 1e6)])));
    assert_eq!(at(&base, 1.19e6), (Verdict::Regressed, earlier));
    // With another definition the times are not comparable.
    let mut redefined = with_commit("eeee", run("8", &[("a", 1e6)]));
    redefined.cases.get_mut("a").unwrap().revision = 2;
    base.merge_run(&redefined);
    assert_eq!(base.cases["a"].earlier, None);
}

#[test]
fn on_a_calibrated_device_a_single_run_has_the_calibrated_spread() {
    let here = run("1", &[("a", 1e6)]).environment;
    let case = "w/f/a/cpu/hot";
    // A calibration with sixty processes whose times lie within ±0.5 %.
    let calibration =
        Calibration { environment: here.clone(), ..calibration::tests::calibration(3, &[]) };
    let spreads = CalibratedSpreads::from_calibration(&calibration);
    let base = baseline_of_run(&run("1", &[(case, 1e6), ("b", 1e6)]));
    let judged = |spreads: &CalibratedSpreads, case: &str, time: f64| {
        let head = run("2", &[(case, time)]);
        let report = judge_against_baseline(
            &base,
            &measured_together(&[head]),
            GatePolicy::default(),
            spreads,
            &PackageRules::default(),
        );
        let judged = report.judged[0].clone();
        let source = |side: fn(&RunEvidence) -> Option<SingleRunSpread>| {
            side(judged.runs().unwrap()).unwrap().from
        };
        (judged.verdict, source(|runs| runs.base.single), source(|runs| runs.head.single))
    };
    let (measured, assumed) = (SpreadSource::Calibration, SpreadSource::Assumed);
    assert_eq!(judged(&spreads, case, 1.07e6), (Verdict::Regressed, measured, measured));
    assert_eq!(judged(&spreads, case, 1.055e6), (Verdict::Inconclusive, measured, measured));
    // The calibration does not apply to other cases and to other devices.
    assert_eq!(judged(&spreads, "b", 1.07e6), (Verdict::Inconclusive, assumed, assumed));
    let elsewhere = Environment { machine: Some("there".to_owned()), ..here };
    let spreads =
        CalibratedSpreads::from_calibration(&Calibration { environment: elsewhere, ..calibration });
    assert_eq!(judged(&spreads, case, 1.07e6), (Verdict::Inconclusive, assumed, assumed));
}

#[test]
fn another_device_of_the_same_model_gets_a_larger_tolerance() {
    let base = baseline_of_two_runs(&run("1", &[("a", 1e6)]));
    let on = |machine: Option<&str>, time: f64| {
        let mut head = run("2", &[("a", time)]);
        head.environment.machine = machine.map(str::to_owned);
        let report = judge_runs_against(
            &base,
            &[head],
            GatePolicy { single_run: 0.0, ..GatePolicy::default() },
        );
        (
            report.judged[0].verdict,
            report.facts.other_device.is_some(),
            (1e3 * report.judged[0].threshold.value).round() / 1e3,
        )
    };
    assert_eq!(on(Some("here"), 1.25e6), (Verdict::Regressed, false, 0.05));
    for elsewhere in [Some("there"), None] {
        assert_eq!(on(elsewhere, 1.25e6), (Verdict::Unchanged, true, 0.281));
        assert_eq!(on(elsewhere, 1.29e6), (Verdict::Regressed, true, 0.281));
    }
}

#[test]
fn a_case_is_compared_on_the_card_that_both_sides_share() {
    let on = |session: &str, machine: &str, time: f64| {
        let mut run = run(session, &[("a", time)]);
        run.environment.machine = Some(machine.to_owned());
        run
    };
    let mut base = baseline_of_run(&on("1", "slow", 1.2e6));
    base.add(&on("2", "fast", 1e6)).unwrap();
    base.add(&on("3", "slow", 1.2e6)).unwrap();
    let judge = |head: &[ProcessRun]| {
        let report = judge_runs_against(
            &base,
            head,
            GatePolicy { single_run: 0.0, ..GatePolicy::default() },
        );
        let judged = &report.judged[0];
        let card = judged.runs().unwrap().card.clone();
        (judged.verdict, card, report.facts.other_device.is_some())
    };
    let slow = [on("4", "slow", 1.3e6), on("5", "slow", 1.3e6)];
    assert_eq!(judge(&slow), (Verdict::Regressed, Some("host slow".to_owned()), false));
    // A run on the fast card does not hide a run on the slow card.
    let mixed = [slow[0].clone(), slow[1].clone(), on("6", "fast", 1e6)];
    assert_eq!(judge(&mixed), (Verdict::Regressed, Some("host slow".to_owned()), false));
    let elsewhere = [on("7", "third", 1.3e6), on("8", "third", 1.3e6)];
    assert_eq!(judge(&elsewhere), (Verdict::Unchanged, None, true));
}

/// Compares a head with a baseline of equal times, where both were verified as far as given.
fn verified_before_and_now(
    before: (u64, u64),
    now: (u64, u64),
    rules: &PackageRules,
) -> GateReport {
    let verified = |session: &str, (checked, total): (u64, u64)| {
        let mut run = run(session, &[("a", 1e6)]);
        let verification = &mut run.cases.get_mut("a").unwrap().verification;
        (verification.checked, verification.total) = (checked, total);
        run
    };
    let base = baseline_of_two_runs(&verified("1", before));
    let head = measured_together(&[verified("2", now)]);
    judge_against_baseline(
        &base,
        &head,
        GatePolicy::default(),
        &CalibratedSpreads::default(),
        rules,
    )
}

#[test]
fn a_case_that_lost_its_verification_fails_whatever_its_time() {
    let report = verified_before_and_now((1600, 1600), (0, 1600), &PackageRules::default());
    let judged = &report.judged[0];
    assert_eq!(verdict_and_reason(judged), (Verdict::Inconclusive, Some("less_verified")));
    assert_eq!(
        report.verification[0].words(),
        "no longer verified (before: every element verified)"
    );
    assert_eq!(report.exit(), ExitReason::Regression);
}

#[test]
fn a_case_with_fewer_compared_elements_is_inconclusive() {
    let report = verified_before_and_now((1600, 1600), (1, 1600), &PackageRules::default());
    assert_eq!(
        (report.judged[0].verdict, report.exit()),
        (Verdict::Inconclusive, ExitReason::Inconclusive)
    );
    assert_eq!(report.verification.len(), 1);
}

#[test]
fn a_case_that_is_newly_verified_is_judged_by_its_time() {
    let report = verified_before_and_now((0, 1600), (1600, 1600), &PackageRules::default());
    assert_eq!((report.judged[0].verdict, report.exit()), (Verdict::Unchanged, ExitReason::Fine));
    assert!(report.verification.is_empty() && report.numerics.grown.is_empty());
}

#[test]
fn a_case_that_was_never_verified_is_listed_and_judged_by_its_time() {
    let report = verified_before_and_now((0, 1600), (0, 1600), &PackageRules::default());
    assert_eq!((report.judged[0].verdict, report.exit()), (Verdict::Unchanged, ExitReason::Fine));
    assert_eq!(report.unverified, ["a"]);
}

#[test]
fn a_lost_verification_may_be_accepted_with_a_reason() {
    let text = "[[accept]]\ncases = \"a\"\nless-verified = true\nreason = \"too large\"";
    let rules = rules_file::parse("kernelgate.toml", text).unwrap();
    let report = verified_before_and_now((1600, 1600), (1, 1600), &rules);
    assert_eq!((report.judged[0].verdict, report.exit()), (Verdict::Unchanged, ExitReason::Fine));
    assert!(report.verification.is_empty());
    assert_eq!(rules.acceptances_for("a")[0].words(), "less verified: too large");
}

#[test]
fn a_judgement_keeps_the_grid_the_threads_and_the_shared_memory() {
    let shape = Launch { shared_bytes: 512, ..Launch::new([8, 2, 1], [128, 1, 1]) };
    let text = serde_json::to_string(&Launch { cooperative: true, ..shape }).unwrap();
    assert_eq!(text, r#"{"grid":[8,2,1],"block":128,"shared_bytes":512}"#);
    assert_eq!(serde_json::from_str::<Launch>(&text).unwrap(), shape);
}
