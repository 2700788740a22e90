//! Checks that a bench process's run record belongs to the request that it answers, because a bench
//! writes its own record, which may be wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::process::TrialProcessToRun;
use kernelgate::measure::power::PowerStateOfSamples;
use kernelgate::record::text::{join_lines_with_spaces, shortened_quotation};
use kernelgate::record::{
    BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, DeclaredWorkRecord,
    OutputVerificationExtent, RunEnvironment,
};

/// Tolerated ratio between the sum of a process's sampled times and its wall time, because GPU and
/// host clocks differ slightly.
const MAX_SAMPLED_TO_WALL_TIME_RATIO: f64 = 1.01;

/// Facts in which every later process of a side must agree with the process that verified the side.
#[derive(Debug, Clone, PartialEq)]
pub struct FactsOfVerifiedRun {
    environment: RunEnvironment,
    input_seed: u64,
    /// The requested power state of the GPU; `None` for Criterion benches, whose records state no
    /// power state.
    power_state: Option<PowerStateOfSamples>,
    definitions: BTreeMap<String, VerifiedCaseDefinition>,
}

#[derive(Debug, Clone, PartialEq)]
struct VerifiedCaseDefinition {
    definition_revision: u32,
    work: DeclaredWorkRecord,
    problem_axes: BTreeMap<String, String>,
    verification: OutputVerificationExtent,
}

impl From<&CaseRecordWithSamples> for VerifiedCaseDefinition {
    fn from(case: &CaseRecordWithSamples) -> Self {
        let CaseRecordWithSamples {
            workload_revision: revision, work, axis_values: problem, ..
        } = case.clone();
        let verification = case.verification.verification_extent();
        Self { definition_revision: revision, work, problem_axes: problem, verification }
    }
}

impl FactsOfVerifiedRun {
    /// Takes the facts that later processes must agree with from the run record of the process that
    /// verified these cases.
    pub fn from_verified_run(
        run: &BenchProcessRun,
        cases: &BTreeSet<String>,
        power: Option<PowerStateOfSamples>,
    ) -> FactsOfVerifiedRun {
        let cases = run.cases.iter().filter(|(id, _)| cases.contains(*id));
        let definitions = cases.map(|(id, case)| (id.clone(), case.into())).collect();
        Self {
            environment: run.environment.clone(),
            input_seed: run.seed,
            power_state: power,
            definitions,
        }
    }

    /// Compares the run record of a later process with the facts of the process that verified the
    /// cases: environment, device, seed, power state, case definitions.
    pub fn check_later_run_agrees(&self, run: &BenchProcessRun) -> Result<(), String> {
        let differs = |field: &str, found: &str, verified: &str| {
            let [field, found, verified] = [field, found, verified].map(shortened_quotation);
            Err(format!("its record has {field} `{found}`, the verified process `{verified}`"))
        };
        if let Some(other) = run.environment.incomparable_facts_with_base(&self.environment).first()
        {
            return differs(other.field_name, &other.head_value, &other.base_value);
        }
        let [found, verified] =
            [&run.environment, &self.environment].map(RunEnvironment::id_of_gpus_or_host);
        if found != verified {
            return differs("device", &found, &verified);
        }
        if run.seed != self.input_seed {
            return differs("seed", &run.seed.to_string(), &self.input_seed.to_string());
        }
        if let Some(asked) = self.power_state.filter(|_| !run.environment.is_cpu_run()) {
            let is_allowed = |state: PowerStateOfSamples| {
                state == PowerStateOfSamples::PowerStateNotApplicable
                    || state.are_times_comparable_with(asked)
            };
            for (id, case) in &run.cases {
                let state = case.samples.power.as_ref().map(|power| power.state);
                match state {
                    None => return Err(format!("its record of {id} has no power state")),
                    Some(state) if !is_allowed(state) => {
                        let (found, asked) =
                            (state.name_in_files_and_tables(), asked.name_in_files_and_tables());
                        return Err(format!(
                            "its record of {id} has power state `{found}`, the request `{asked}`"
                        ));
                    }
                    Some(_) => {}
                }
            }
        }
        for (id, case) in &run.cases {
            let Some(verified) = self.definitions.get(id) else { continue };
            let found = VerifiedCaseDefinition::from(case);
            if found.definition_revision != verified.definition_revision {
                let [a, b] = [found.definition_revision, verified.definition_revision]
                    .map(|it| it.to_string());
                return differs(&format!("revision of {id}"), &a, &b);
            }
            if found.work != verified.work {
                let [a, b] = [&found.work, &verified.work].map(ToString::to_string);
                return differs(&format!("work of {id}"), &a, &b);
            }
            if found.problem_axes != verified.problem_axes {
                let [a, b] =
                    [&found.problem_axes, &verified.problem_axes].map(|it| format!("{it:?}"));
                return differs(&format!("axes of {id}"), &a, &b);
            }
            // A later process of a side may not verify less than the side's first process did,
            // because then outputs that changed would go unnoticed.
            let (found, verified) = (found.verification, verified.verification);
            if verified.is_compared_with_reference() && found.is_weaker_than(verified) {
                let [a, b] = [found, verified].map(|it| it.to_string());
                return differs(&format!("verification of {id}"), &a, &b);
            }
        }
        Ok(())
    }
}

/// Compares a bench's run record with the request that it answers: session, bench, executable,
/// seed, commit, cases, delays and number of samples.
pub fn check_record_answers_request(
    run: &BenchProcessRun,
    trial: &TrialProcessToRun<'_>,
    settings: &BTreeMap<String, String>,
) -> Result<(), String> {
    let differs = |field: &str, found: &str, asked: &str| {
        check_field_equals_request("record", field, found, asked)
    };
    differs("session", &run.session_name, &trial.request.session_name)?;
    differs("bench", &run.bench, trial.bench_name())?;
    differs("executable", run.executable_hash.as_deref().unwrap_or("none"), trial.executable_hash)?;
    let seed = settings.get("KERNELGATE_SEED").map_or("1", String::as_str);
    differs("seed", &run.seed.to_string(), seed)?;
    let CommitAndChanges { commit, dirty } = &run.provenance;
    let changes = if *dirty { "+changes" } else { "" };
    let commit = format!("{}{changes}", commit.as_deref().unwrap_or("none"));
    differs("commit", &commit, &join_lines_with_spaces(&trial.source_commit))?;
    let backend = settings.get("KERNELGATE_BACKEND").filter(|backend| *backend != "auto");
    let device_kind = &run.environment.device_kind;
    differs("backend", device_kind, backend.unwrap_or(device_kind))?;
    // A request that names its cases holds only cases of the shard already, so its record need not
    // state the shard.
    let shard =
        settings.get("KERNELGATE_SHARD").filter(|_| trial.request.case_ids_to_run.is_none());
    let recorded = run.shard.map(|shard| shard.to_string());
    let none = || "none".to_owned();
    differs("shard", &recorded.unwrap_or_else(none), &shard.cloned().unwrap_or_else(none))?;
    let requested = &trial.injection.injected_delays_ns;
    let of_case = |id: &String| {
        (run.injected_delays_ns.get(id).copied(), requested.get(id).map(|ns| ns.round()))
    };
    for id in run.injected_delays_ns.keys().chain(run.cases.keys()) {
        let (found, requested) = of_case(id);
        let text = |ns: Option<f64>| ns.map_or_else(none, |ns| format!("{ns} ns"));
        let [found, requested] = [text(found.map(|ns| ns as f64)), text(requested)];
        differs(&format!("delay of {id}"), &found, &requested)?;
    }
    if let Some(cases) = &trial.request.case_ids_to_run
        && let Some(other) = run.cases.keys().find(|id| !cases.contains(*id))
    {
        let other = shortened_quotation(other);
        return Err(format!("its record has case `{other}`, which the request does not name"));
    }
    let sampling = &trial.request.sampling;
    let allowed = sampling.fewest_samples..=sampling.most_samples;
    let count = |case: &CaseRecordWithSamples| case.samples.elapsed_per_sample_ns.len();
    let mut cases = run.cases.iter().filter(|_| sampling.measurement_s > 0.0);
    match cases.find(|(_, case)| !allowed.contains(&count(case))) {
        Some((id, case)) => differs(
            &format!("samples of {id}"),
            &count(case).to_string(),
            &format!("{} to {}", sampling.fewest_samples, sampling.most_samples),
        ),
        None => Ok(()),
    }
}

/// Checks that the sampled times of a run record fit into the process's wall time, and that the
/// record names this machine and listed GPUs.
pub fn check_times_and_machine_of_record(
    run: &BenchProcessRun,
    took: Duration,
    host: &RunEnvironment,
) -> Result<(), String> {
    let times_ns = run.cases.values().flat_map(|case| &case.samples.elapsed_per_sample_ns);
    let (sampled_s, took_s) = (times_ns.sum::<f64>() * 1e-9, took.as_secs_f64());
    if sampled_s > took_s * MAX_SAMPLED_TO_WALL_TIME_RATIO {
        return Err(format!(
            "its record has {sampled_s:.3} s of samples, and the process took {took_s:.3} s"
        ));
    }
    let environment = &run.environment;
    if environment.is_cpu_run() {
        let here = |environment: &RunEnvironment| {
            let RunEnvironment { device_name, machine_hash: machine, .. } = environment;
            format!("{device_name} ({})", machine.as_deref().unwrap_or("no name"))
        };
        let [found, host] = [environment, host].map(here);
        if found != host {
            let [found, host] = [&found, &host].map(|it| shortened_quotation(it));
            return Err(format!("its record has device `{found}`, the machine is `{host}`"));
        }
    }
    match environment.gpus.uuid_missing_on_this_machine() {
        Some(uuid) => Err(format!(
            "its record has GPU `{}`, which NVML does not list",
            shortened_quotation(uuid)
        )),
        None => Ok(()),
    }
}

/// Returns an error if a field of a file that a bench wrote differs from the request.
pub fn check_field_equals_request(
    file: &str,
    field: &str,
    found: &str,
    asked: &str,
) -> Result<(), String> {
    if found == asked {
        return Ok(());
    }
    let [field, found, asked] = [field, found, asked].map(shortened_quotation);
    Err(format!("its {file} has {field} `{found}`, the request `{asked}`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::InjectedHeadChanges;
    use crate::compare::sides::copy_benches::BenchControlMethod;
    use kernelgate::measure::power::CasePowerRecord;
    use kernelgate::record::{ShardOfWork, TrialRequestToBench, TrialSamplingPlan};
    use std::path::PathBuf;

    fn make_test_bench_run() -> BenchProcessRun {
        BenchProcessRun {
            cases: [("x".to_owned(), CaseRecordWithSamples::example_with_sample_times(vec![1.0]))]
                .into(),
            ..BenchProcessRun::empty_run_starting_now(
                "b",
                "r1-b0-p0",
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            )
        }
    }

    fn refusal_of_changed_test_run(change: impl FnOnce(&mut BenchProcessRun)) -> String {
        let expected = FactsOfVerifiedRun::from_verified_run(
            &make_test_bench_run(),
            &["x".to_owned()].into(),
            Some(PowerStateOfSamples::SteadyUnderLoad),
        );
        assert_eq!(expected.check_later_run_agrees(&make_test_bench_run()), Ok(()));
        let mut other = make_test_bench_run();
        change(&mut other);
        expected.check_later_run_agrees(&other).unwrap_err()
    }

    #[test]
    fn a_record_with_another_case_definition_or_device_is_refused() {
        let work = refusal_of_changed_test_run(|run| {
            run.cases.get_mut("x").unwrap().work.min_read_bytes = 9
        });
        insta::assert_snapshot!(work, @"its record has work of x `read 9 B, write 8 B`, the verified process `read 8 B, write 8 B`");
        let revision = refusal_of_changed_test_run(|run| {
            run.cases.get_mut("x").unwrap().workload_revision = 7
        });
        insta::assert_snapshot!(revision, @"its record has revision of x `7`, the verified process `1`");
        let device = refusal_of_changed_test_run(|run| {
            run.environment.machine_hash = Some("feed".to_owned())
        });
        let machine = make_test_bench_run().environment.machine_hash.unwrap_or_default();
        insta::assert_snapshot!(device.replace(&machine, "MACHINE"), @"its record has device `host feed`, the verified process `host MACHINE`");
        let seed = refusal_of_changed_test_run(|run| run.seed = 7);
        insta::assert_snapshot!(seed, @"its record has seed `7`, the verified process `1`");
        let less = refusal_of_changed_test_run(|run| {
            run.cases.get_mut("x").unwrap().verification.compared_elements = 0
        });
        insta::assert_snapshot!(less, @"its record has verification of x `unverified`, the verified process `every element verified`");
        let threads = refusal_of_changed_test_run(|run| run.environment.cpu_backend_threads += 1);
        assert!(threads.contains("threads"), "{threads}");
    }

    #[test]
    fn only_criterion_benches_may_lack_a_power_state_on_a_gpu() {
        let mut on_gpu = make_test_bench_run();
        on_gpu.environment.device_kind = "cuda".to_owned();
        let check = |power| {
            FactsOfVerifiedRun::from_verified_run(&on_gpu, &["x".to_owned()].into(), power)
                .check_later_run_agrees(&on_gpu)
        };
        let why = "its record of x has no power state".to_owned();
        assert_eq!(check(Some(PowerStateOfSamples::SteadyUnderLoad)), Err(why));
        assert_eq!(check(None), Ok(()));
    }

    #[test]
    fn a_record_with_another_power_state_than_requested_is_refused() {
        let in_state = |state| {
            let mut run = make_test_bench_run();
            run.environment.device_kind = "cuda".to_owned();
            let power = CasePowerRecord {
                state,
                ..CasePowerRecord::with_power_state_not_applicable("why")
            };
            run.cases.get_mut("x").unwrap().samples.power = Some(power);
            run
        };
        let check = |requested, found| {
            let run = in_state(found);
            FactsOfVerifiedRun::from_verified_run(&run, &["x".to_owned()].into(), Some(requested))
                .check_later_run_agrees(&run)
        };
        use PowerStateOfSamples::{
            BurstsAfterPauses, PowerStateNotApplicable, SteadyUnderLoad, UnsettledUnderLoad,
        };
        for fits in [
            (SteadyUnderLoad, SteadyUnderLoad),
            (SteadyUnderLoad, UnsettledUnderLoad),
            (BurstsAfterPauses, BurstsAfterPauses),
            (BurstsAfterPauses, PowerStateNotApplicable),
        ] {
            assert_eq!(check(fits.0, fits.1), Ok(()), "{fits:?}");
        }
        let reasons = [
            (SteadyUnderLoad, BurstsAfterPauses),
            (BurstsAfterPauses, SteadyUnderLoad),
            (BurstsAfterPauses, UnsettledUnderLoad),
        ]
        .map(|(requested, found)| check(requested, found).unwrap_err());
        insta::assert_snapshot!(reasons.join("\n"), @r"
        its record of x has power state `burst`, the request `steady`
        its record of x has power state `steady`, the request `burst`
        its record of x has power state `unsettled`, the request `burst`
        ");
    }

    #[test]
    fn samples_that_exceed_the_process_time_are_refused() {
        let mut run = make_test_bench_run();
        run.cases.insert(
            "y".to_owned(),
            CaseRecordWithSamples::example_with_sample_times(vec![6e8, 4e8]),
        );
        let check = |ms| {
            check_times_and_machine_of_record(&run, Duration::from_millis(ms), &run.environment)
        };
        assert_eq!(check(1000), Ok(()));
        assert_eq!(check(995), Ok(()), "clocks differ a little");
        let why = "its record has 1.000 s of samples, and the process took 0.900 s";
        assert_eq!(check(900), Err(why.to_owned()));
    }

    #[test]
    fn a_record_of_another_machine_is_refused() {
        let check = |host: &RunEnvironment| {
            check_times_and_machine_of_record(&make_test_bench_run(), Duration::from_secs(1), host)
        };
        let here = make_test_bench_run().environment;
        assert_eq!(check(&here), Ok(()));
        let why = check(&RunEnvironment { device_name: "other".to_owned(), ..here.clone() });
        let text = |why: Result<(), String>| {
            let why = why.unwrap_err().replace(&here.device_name, "DEVICE");
            here.machine_hash
                .as_ref()
                .map_or(why.clone(), |machine| why.replace(machine, "MACHINE"))
        };
        insta::assert_snapshot!(text(why), @"its record has device `DEVICE (MACHINE)`, the machine is `other (MACHINE)`");
        let why = check(&RunEnvironment { machine_hash: Some("feed".to_owned()), ..here.clone() });
        insta::assert_snapshot!(text(why), @"its record has device `DEVICE (MACHINE)`, the machine is `DEVICE (feed)`");
    }

    #[test]
    fn a_record_that_answers_another_request_is_refused() {
        let request = TrialRequestToBench {
            case_ids_to_run: Some(["x".to_owned()].into()),
            ..TrialRequestToBench::for_all_selected_cases(
                "r1-b0-p0",
                PathBuf::new(),
                TrialSamplingPlan::SAMPLING_ON_HOST,
            )
        };
        let case = || CaseRecordWithSamples::example_with_sample_times(vec![1.0, 1.0]);
        let run = || BenchProcessRun {
            executable_hash: Some("feed".to_owned()),
            cases: [("x".to_owned(), case())].into(),
            ..make_test_bench_run()
        };
        let settings = BTreeMap::new();
        let trial = |delays_ns| TrialProcessToRun {
            bench_executable: PathBuf::from("bin/b"),
            executable_hash: "feed",
            package_folder: PathBuf::new(),
            source_commit: "none".to_owned(),
            injection: InjectedHeadChanges {
                injected_delays_ns: delays_ns,
                ..InjectedHeadChanges::default()
            },
            control_method: BenchControlMethod::ProtocolVersion(1),
            request: &request,
            process_timeout: Duration::ZERO,
        };
        let plain = trial(BTreeMap::new());
        assert_eq!(check_record_answers_request(&run(), &plain, &settings), Ok(()));
        let answer = |run: &BenchProcessRun| {
            check_record_answers_request(run, &plain, &settings).unwrap_err()
        };
        insta::assert_snapshot!(answer(&BenchProcessRun { session_name: "other".to_owned(), ..run() }), @"its record has session `other`, the request `r1-b0-p0`");
        insta::assert_snapshot!(answer(&BenchProcessRun { bench: "c".to_owned(), ..run() }), @"its record has bench `c`, the request `b`");
        let delays = [("x".to_owned(), 5)].into();
        insta::assert_snapshot!(answer(&BenchProcessRun { injected_delays_ns: delays, ..run() }), @"its record has delay of x `5 ns`, the request `none`");
        insta::assert_snapshot!(answer(&BenchProcessRun { seed: 7, ..run() }), @"its record has seed `7`, the request `1`");
        let on_gpu = [("KERNELGATE_BACKEND".to_owned(), "cuda".to_owned())].into();
        let why = check_record_answers_request(&run(), &plain, &on_gpu).unwrap_err();
        assert_eq!(why, "its record has backend `cpu`, the request `cuda`");
        let provenance = CommitAndChanges { commit: Some("951c294".to_owned()), dirty: true };
        let why = answer(&BenchProcessRun { provenance, ..run() });
        assert_eq!(why, "its record has commit `951c294+changes`, the request `none`");
        let executable = Some("other".to_owned());
        insta::assert_snapshot!(answer(&BenchProcessRun { executable_hash: executable, ..run() }), @"its record has executable `other`, the request `feed`");
        insta::assert_snapshot!(answer(&BenchProcessRun { executable_hash: None, ..run() }), @"its record has executable `none`, the request `feed`");
        let shard = Some(ShardOfWork { index_from_one: 1, shard_count: 2 });
        insta::assert_snapshot!(answer(&BenchProcessRun { shard, ..run() }), @"its record has shard `1/2`, the request `none`");
        for count in [1, 21] {
            let case = CaseRecordWithSamples::example_with_sample_times(vec![1.0; count]);
            let why = answer(&BenchProcessRun { cases: [("x".to_owned(), case)].into(), ..run() });
            let words = format!("its record has samples of x `{count}`, the request `2 to 20`");
            assert_eq!(why, words);
        }
        let more = [("y".to_owned(), case())].into();
        insta::assert_snapshot!(answer(&BenchProcessRun { cases: more, ..run() }), @"its record has case `y`, which the request does not name");
        let delayed = trial([("x".to_owned(), 5.2)].into());
        let why = check_record_answers_request(&run(), &delayed, &settings).unwrap_err();
        assert_eq!(why, "its record has delay of x `none`, the request `5 ns`");
        let delays = [("x".to_owned(), 5)].into();
        assert_eq!(
            check_record_answers_request(
                &BenchProcessRun { injected_delays_ns: delays, ..run() },
                &delayed,
                &settings
            ),
            Ok(())
        );
    }
}
