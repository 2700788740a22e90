use super::*;

#[test]
fn what_names_files_is_a_name_and_errors_are_numbers_from_0() {
    let run = Run::start("b c", "s1", Environment::cpu(), Provenance::default());
    assert_eq!(run.validate(), Ok(()));
    for (bench, session, started, wanted) in [
        ("../x", "s", "2026-01-01T00:00:00Z", "bench `../x` holds `/`"),
        ("", "s", "2026-01-01T00:00:00Z", "bench `` is empty"),
        ("b", "../../q", "2026-01-01T00:00:00Z", "session `../../q` is no plain name"),
        ("b", "", "2026-01-01T00:00:00Z", "session `` is no plain name"),
        ("b", "s", "yesterday", "started: `yesterday` is no time"),
    ] {
        let [bench, session, started] = [bench, session, started].map(str::to_owned);
        let problem = Run { bench, session, started, ..run.clone() }.validate().unwrap_err();
        assert!(problem.starts_with(wanted), "{problem}");
    }
    for bad in [-1.0, f64::INFINITY, f64::NAN] {
        let after = AfterTiming { relative_l2: bad, ..AfterTiming::SAME_BITS };
        let of = |verification| {
            let case = CaseRecord { verification, ..CaseRecord::of_samples(vec![1.0]) };
            Run { cases: [("a".to_owned(), case)].into(), ..run.clone() }.validate()
        };
        let default = VerificationRecord::default;
        let wanted = Err(format!("case a: an error of {bad}"));
        assert_eq!(of(VerificationRecord { max_error: bad, ..default() }), wanted);
        assert_eq!(of(VerificationRecord { after: Some(after), ..default() }), wanted);
        assert_eq!(of(default()), Ok(()));
    }
}

#[test]
fn impossible_samples_are_invalid() {
    let samples = |launches: &[u64], elapsed_ns: &[f64]| Samples {
        launches: launches.to_vec(),
        elapsed_ns: elapsed_ns.to_vec(),
        ..Samples::default()
    };
    assert_eq!(samples(&[1, 2], &[5.0, 9.0]).validate(), Ok(()));
    for (launches, elapsed_ns, wanted) in [
        (&[][..], &[][..], "no samples"),
        (&[1], &[], "1 launch counts against 0 times"),
        (&[0], &[1.0], "a sample of no launches"),
        (&[1], &[-1.0], "a sample of -1 ns a launch"),
        (&[1], &[f64::NAN], "a sample of NaN ns a launch"),
        (&[1], &[1e-300], "ns a launch"),
        (&[u64::MAX], &[1.0], "ns a launch"),
    ] {
        let problem = samples(launches, elapsed_ns).validate().unwrap_err();
        assert!(problem.ends_with(wanted), "{problem}");
    }
    assert!(Samples { contention: Some(1.5), ..samples(&[1], &[1.0]) }.validate().is_err());
}
