use super::*;
use crate::measure::CacheState;
use crate::measure::limits::{DeclaredMemoryTraffic, MeasuredMemoryLimit};

#[test]
fn file_separators_in_names_and_invalid_errors_are_refused() {
    let run = BenchProcessRun::empty_run_starting_now(
        "b c",
        "s1",
        RunEnvironment::environment_of_process_on_cpu(),
        CommitAndChanges::default(),
    );
    assert_eq!(run.check_record_plausible(), Ok(()));
    for (bench, session, started, wanted) in [
        (
            "../x",
            "s",
            "2026-01-01T00:00:00Z",
            "bench `../x` holds `/`, which separates the parts of an id",
        ),
        ("", "s", "2026-01-01T00:00:00Z", "bench `` is empty"),
        ("b", "../../q", "2026-01-01T00:00:00Z", "session `../../q` is no plain name"),
        ("b", "", "2026-01-01T00:00:00Z", "session `` is no plain name"),
        ("b", "s", "yesterday", "started: `yesterday` is no time"),
    ] {
        let [bench, session, started] = [bench, session, started].map(str::to_owned);
        let problem =
            BenchProcessRun { bench, session_name: session, start_time: started, ..run.clone() }
                .check_record_plausible()
                .unwrap_err();
        assert_eq!(problem, wanted);
    }
    for bad in [-1.0, f64::INFINITY, f64::NAN] {
        let after = VerificationAfterTiming {
            relative_l2: bad,
            ..VerificationAfterTiming::EQUAL_BITS_FOR_UNCHANGED_INPUTS
        };
        let validate_with = |verification| {
            let case = CaseRecordWithSamples {
                verification,
                ..CaseRecordWithSamples::example_with_sample_times(vec![1.0])
            };
            BenchProcessRun { cases: [("a".to_owned(), case)].into(), ..run.clone() }
                .check_record_plausible()
        };
        let default = OutputVerificationRecord::default;
        let expected = Err(format!("case a: an error of {bad}"));
        assert_eq!(
            validate_with(OutputVerificationRecord { max_error: bad, ..default() }),
            expected
        );
        assert_eq!(
            validate_with(OutputVerificationRecord { after_timing: Some(after), ..default() }),
            expected
        );
        assert_eq!(validate_with(default()), Ok(()));
    }
}

#[test]
fn a_run_record_with_impossible_samples_is_refused() {
    let samples = |launches: &[u64], elapsed_ns: &[f64]| SamplesOfCase {
        launches_per_sample: launches.to_vec(),
        elapsed_per_sample_ns: elapsed_ns.to_vec(),
        ..SamplesOfCase::default()
    };
    assert_eq!(samples(&[1, 2], &[5.0, 9.0]).check_samples_plausible(), Ok(()));
    for (launches, elapsed_ns, wanted) in [
        (&[][..], &[][..], "no samples"),
        (&[1], &[], "1 launch counts against 0 times"),
        (&[0], &[1.0], "a sample of no launches"),
        (&[1], &[-1.0], "a sample of -1 ns a launch"),
        (&[1], &[f64::NAN], "a sample of NaN ns a launch"),
        (&[1], &[1e-300], "a sample of 1e-300 ns a launch"),
        (&[1 << 60], &[1e21], "launches of 1152921504606846976"),
        (&[u64::MAX], &[1.0], "a sample of 5.421010862427522e-20 ns a launch"),
    ] {
        let problem = samples(launches, elapsed_ns).check_samples_plausible().unwrap_err();
        assert_eq!(problem, wanted);
    }
    let conditions = CaseSampleConditions {
        other_processes_cpu_share: Some(1.5),
        ..CaseSampleConditions::default()
    };
    assert!(
        SamplesOfCase { conditions, ..samples(&[1], &[1.0]) }.check_samples_plausible().is_err()
    );
}

/// A baseline accepts exactly the run records that are valid themselves.
#[test]
fn a_run_record_refuses_what_its_baseline_would_refuse() {
    let start = BenchProcessRun::empty_run_starting_now(
        "b",
        "s1",
        RunEnvironment::environment_of_process_on_cpu(),
        CommitAndChanges::default(),
    );
    let valid = |change: &dyn Fn(&mut BenchProcessRun, &mut CaseRecordWithSamples)| {
        let mut run = start.clone();
        let mut case = CaseRecordWithSamples::example_with_sample_times(vec![100.0, 101.0]);
        change(&mut run, &mut case);
        run.cases.insert("a".to_owned(), case);
        let result = run.check_record_plausible();
        if result.is_ok() {
            let mut baseline = crate::record::BaselineFile::empty_baseline_with_name("main");
            baseline.add_comparable_run(&run).unwrap();
            assert_eq!(baseline.check_record_plausible(), Ok(()));
        }
        result
    };
    assert_eq!(valid(&|_, _| ()), Ok(()));
    let refused =
        |wanted: &str, change: &dyn Fn(&mut BenchProcessRun, &mut CaseRecordWithSamples)| {
            let problem = valid(change).unwrap_err();
            assert_eq!(problem.strip_prefix("case a: ").unwrap_or(&problem), wanted);
        };
    for (bad, shown) in [(-1.0, "-1"), (f64::INFINITY, "inf"), (f64::NAN, "NaN"), (1e300, "1e300")]
    {
        let limit = |time_ns| {
            Some(ShortestLaunchTime {
                shortest_launch_ns: time_ns,
                deciding_ceiling: "memory".to_owned(),
            })
        };
        refused(&format!("a limit of {shown} ns a launch"), &|_, case| case.limit = limit(bad));
        refused(&format!("a clock of {shown} MHz"), &|_, case| {
            case.samples.sm_clock_per_sample_mhz = vec![1700.0, bad];
        });
        refused(&format!("a host launch of {shown} ns"), &|_, case| {
            case.samples.costs.host_launch_ns = Some(bad);
        });
        let traffic =
            DeclaredMemoryTraffic { read_bytes: 4, write_bytes: 0, cache: CacheState::HotCaches };
        let at = |time_ns| MeasuredMemoryLimit {
            traffic,
            fastest_pass_ns: time_ns,
            fastest_pass: "a pass".to_owned(),
        };
        refused(&format!("a memory limit of {shown} ns a launch"), &|run, _| {
            run.limits.memory = vec![at(1.0), at(bad)];
        });
        refused(&format!("a ceiling (other f32) of {shown} a second"), &|run, _| {
            run.limits.flops_per_s = [("other f32".to_owned(), bad)].into();
        });
        refused(&format!("a clock of {shown} MHz"), &|run, _| {
            run.limits.sm_clock_mhz_by_ceiling = [("memory".to_owned(), bad)].into();
        });
    }
    refused("a limit of 0 ns a launch", &|_, case| {
        case.limit = Some(ShortestLaunchTime {
            shortest_launch_ns: 0.0,
            deciding_ceiling: "memory".to_owned(),
        });
    });
    refused("3 elements compared of 2", &|_, case| {
        (case.verification.compared_elements, case.verification.total_elements) = (3, 2);
    });
    refused("more launches than can be counted", &|_, case| {
        case.samples.launches_per_sample = vec![1 << 63, 1 << 63];
        case.samples.elapsed_per_sample_ns = vec![1e25, 1e25];
    });
    assert_eq!(valid(&|_, case| case.verification.max_error = 1e100), Ok(()));
}
