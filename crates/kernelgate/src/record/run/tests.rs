use super::*;
use crate::measure::CacheState;
use crate::measure::limits::{MemoryLimit, MemoryTraffic};

#[test]
fn file_names_with_separators_and_invalid_errors_are_refused() {
    let run = ProcessRun::start_now("b c", "s1", Environment::cpu(), Provenance::default());
    assert_eq!(run.validate(), Ok(()));
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
        let problem = ProcessRun { bench, session, started, ..run.clone() }.validate().unwrap_err();
        assert_eq!(problem, wanted);
    }
    for bad in [-1.0, f64::INFINITY, f64::NAN] {
        let after = AfterTiming { relative_l2: bad, ..AfterTiming::SAME_BITS_VERIFICATION };
        let validate_with = |verification| {
            let case = CaseRecord { verification, ..CaseRecord::untimed_samples(vec![1.0]) };
            ProcessRun { cases: [("a".to_owned(), case)].into(), ..run.clone() }.validate()
        };
        let default = VerificationRecord::default;
        let expected = Err(format!("case a: an error of {bad}"));
        assert_eq!(validate_with(VerificationRecord { max_error: bad, ..default() }), expected);
        assert_eq!(validate_with(VerificationRecord { after: Some(after), ..default() }), expected);
        assert_eq!(validate_with(default()), Ok(()));
    }
}

#[test]
fn a_run_with_impossible_samples_is_invalid() {
    let samples = |launches: &[u64], elapsed_ns: &[f64]| CaseSamples {
        launches: launches.to_vec(),
        elapsed_ns: elapsed_ns.to_vec(),
        ..CaseSamples::default()
    };
    assert_eq!(samples(&[1, 2], &[5.0, 9.0]).validate(), Ok(()));
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
        let problem = samples(launches, elapsed_ns).validate().unwrap_err();
        assert_eq!(problem, wanted);
    }
    let conditions = SampleConditions { contention: Some(1.5), ..SampleConditions::default() };
    assert!(CaseSamples { conditions, ..samples(&[1], &[1.0]) }.validate().is_err());
}

/// A baseline accepts exactly the runs that are valid themselves.
#[test]
fn a_run_record_refuses_what_its_baseline_would_refuse() {
    let start = ProcessRun::start_now("b", "s1", Environment::cpu(), Provenance::default());
    let valid = |change: &dyn Fn(&mut ProcessRun, &mut CaseRecord)| {
        let mut run = start.clone();
        let mut case = CaseRecord::untimed_samples(vec![100.0, 101.0]);
        change(&mut run, &mut case);
        run.cases.insert("a".to_owned(), case);
        let result = run.validate();
        if result.is_ok() {
            let mut baseline = crate::record::Baseline::new("main");
            baseline.add(&run).unwrap();
            assert_eq!(baseline.validate(), Ok(()));
        }
        result
    };
    assert_eq!(valid(&|_, _| ()), Ok(()));
    let refused = |wanted: &str, change: &dyn Fn(&mut ProcessRun, &mut CaseRecord)| {
        let problem = valid(change).unwrap_err();
        assert_eq!(problem.strip_prefix("case a: ").unwrap_or(&problem), wanted);
    };
    for (bad, shown) in [(-1.0, "-1"), (f64::INFINITY, "inf"), (f64::NAN, "NaN"), (1e300, "1e300")]
    {
        let limit = |time_ns| Some(TimeLimit { time_ns, by: "memory".to_owned() });
        refused(&format!("a limit of {shown} ns a launch"), &|_, case| case.limit = limit(bad));
        refused(&format!("a clock of {shown} MHz"), &|_, case| {
            case.samples.clock_mhz = vec![1700.0, bad];
        });
        refused(&format!("a host launch of {shown} ns"), &|_, case| {
            case.samples.costs.host_launch_ns = Some(bad);
        });
        let traffic = MemoryTraffic { read_bytes: 4, write_bytes: 0, cache: CacheState::Hot };
        let at = |time_ns| MemoryLimit { traffic, time_ns, pass: "a pass".to_owned() };
        refused(&format!("a memory limit of {shown} ns a launch"), &|run, _| {
            run.limits.memory = vec![at(1.0), at(bad)];
        });
        refused(&format!("a ceiling (other f32) of {shown} a second"), &|run, _| {
            run.limits.flops_per_s = [("other f32".to_owned(), bad)].into();
        });
        refused(&format!("a clock of {shown} MHz"), &|run, _| {
            run.limits.clock_mhz = [("memory".to_owned(), bad)].into();
        });
    }
    refused("a limit of 0 ns a launch", &|_, case| {
        case.limit = Some(TimeLimit { time_ns: 0.0, by: "memory".to_owned() });
    });
    refused("3 elements compared of 2", &|_, case| {
        (case.verification.checked, case.verification.total) = (3, 2);
    });
    refused("more launches than can be counted", &|_, case| {
        case.samples.launches = vec![1 << 63, 1 << 63];
        case.samples.elapsed_ns = vec![1e25, 1e25];
    });
    assert_eq!(valid(&|_, case| case.verification.max_error = 1e100), Ok(()));
}
