//! Checks that the record of a process belongs to the request that it answers: a bench writes its
//! own record, and may write a wrong one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::process::TrialProcess;
use kernelgate::measure::power::PowerState;
use kernelgate::record::text::{on_one_line, start_of_quotation};
use kernelgate::record::{
    CaseRecord, Environment, ProcessRun, Provenance, VerificationExtent, WorkRecord,
};

/// Largest ratio between the speeds of two clocks, such as those of a GPU and of the host.
const MAX_CLOCK_RATIO: f64 = 1.01;

/// Facts that every later process of a side must share with the process that verified it.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedRun {
    environment: Environment,
    seed: u64,
    /// The expected power state; absent for benches of Criterion alone, whose records have none.
    power: Option<PowerState>,
    definitions: BTreeMap<String, CaseDefinition>,
}

#[derive(Debug, Clone, PartialEq)]
struct CaseDefinition {
    revision: u32,
    work: WorkRecord,
    problem: BTreeMap<String, String>,
    verification: VerificationExtent,
}

impl From<&CaseRecord> for CaseDefinition {
    fn from(case: &CaseRecord) -> Self {
        let CaseRecord { revision, work, problem, .. } = case.clone();
        let verification = case.verification.value();
        Self { revision, work, problem, verification }
    }
}

impl ExpectedRun {
    /// Collects the facts that runs must agree with from the process that verified these cases.
    pub fn from_verified(
        run: &ProcessRun,
        cases: &BTreeSet<String>,
        power: Option<PowerState>,
    ) -> ExpectedRun {
        let cases = run.cases.iter().filter(|(id, _)| cases.contains(*id));
        let definitions = cases.map(|(id, case)| (id.clone(), case.into())).collect();
        Self { environment: run.environment.clone(), seed: run.seed, power, definitions }
    }

    /// Compares a later process with the process that verified its cases.
    pub fn check(&self, run: &ProcessRun) -> Result<(), String> {
        let differs = |field: &str, found: &str, verified: &str| {
            let [field, found, verified] = [field, found, verified].map(start_of_quotation);
            Err(format!("its record has {field} `{found}`, the verified process `{verified}`"))
        };
        if let Some(other) = run.environment.mismatches(&self.environment).first() {
            return differs(other.field, &other.head, &other.base);
        }
        let [found, verified] =
            [&run.environment, &self.environment].map(Environment::device_identifier);
        if found != verified {
            return differs("device", &found, &verified);
        }
        if run.seed != self.seed {
            return differs("seed", &run.seed.to_string(), &self.seed.to_string());
        }
        if let Some(asked) = self.power.filter(|_| !run.environment.is_on_host()) {
            let is_allowed =
                |state: PowerState| state == PowerState::NotApplicable || state.comparable(asked);
            for (id, case) in &run.cases {
                let state = case.samples.power.as_ref().map(|power| power.state);
                match state {
                    None => return Err(format!("its record of {id} has no power state")),
                    Some(state) if !is_allowed(state) => {
                        let (found, asked) = (state.name(), asked.name());
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
            let found = CaseDefinition::from(case);
            if found.revision != verified.revision {
                let [a, b] = [found.revision, verified.revision].map(|it| it.to_string());
                return differs(&format!("revision of {id}"), &a, &b);
            }
            if found.work != verified.work {
                let [a, b] = [&found.work, &verified.work].map(ToString::to_string);
                return differs(&format!("work of {id}"), &a, &b);
            }
            if found.problem != verified.problem {
                let [a, b] = [&found.problem, &verified.problem].map(|it| format!("{it:?}"));
                return differs(&format!("axes of {id}"), &a, &b);
            }
            // Without a reference, outputs with other bits cannot be verified again.
            let (found, verified) = (found.verification, verified.verification);
            if verified.is_verified() && found.compares_less_than(verified) {
                let [a, b] = [found, verified].map(|it| it.to_string());
                return differs(&format!("verification of {id}"), &a, &b);
            }
        }
        Ok(())
    }
}

/// Compares a run record with the request that it answers.
pub fn check_record_matches_request(
    run: &ProcessRun,
    trial: &TrialProcess<'_>,
    settings: &BTreeMap<String, String>,
) -> Result<(), String> {
    let differs = |field: &str, found: &str, asked: &str| {
        check_requested_field("record", field, found, asked)
    };
    differs("session", &run.session, &trial.request.session)?;
    differs("bench", &run.bench, trial.bench())?;
    differs("executable", run.executable.as_deref().unwrap_or("none"), trial.hash)?;
    let seed = settings.get("KERNELGATE_SEED").map_or("1", String::as_str);
    differs("seed", &run.seed.to_string(), seed)?;
    let Provenance { commit, dirty } = &run.provenance;
    let changes = if *dirty { "+changes" } else { "" };
    let commit = format!("{}{changes}", commit.as_deref().unwrap_or("none"));
    differs("commit", &commit, &on_one_line(&trial.commit))?;
    let backend = settings.get("KERNELGATE_BACKEND").filter(|backend| *backend != "auto");
    let device_kind = &run.environment.device_kind;
    differs("backend", device_kind, backend.unwrap_or(device_kind))?;
    // A process that measures has the cases of a shard already.
    let shard = settings.get("KERNELGATE_SHARD").filter(|_| trial.request.cases.is_none());
    let recorded = run.shard.map(|shard| shard.to_string());
    let none = || "none".to_owned();
    differs("shard", &recorded.unwrap_or_else(none), &shard.cloned().unwrap_or_else(none))?;
    let requested = &trial.injection.delays_ns;
    let of_case =
        |id: &String| (run.delays.get(id).copied(), requested.get(id).map(|ns| ns.round()));
    for id in run.delays.keys().chain(run.cases.keys()) {
        let (found, requested) = of_case(id);
        let text = |ns: Option<f64>| ns.map_or_else(none, |ns| format!("{ns} ns"));
        let [found, requested] = [text(found.map(|ns| ns as f64)), text(requested)];
        differs(&format!("delay of {id}"), &found, &requested)?;
    }
    if let Some(cases) = &trial.request.cases
        && let Some(other) = run.cases.keys().find(|id| !cases.contains(*id))
    {
        let other = start_of_quotation(other);
        return Err(format!("its record has case `{other}`, which the request does not name"));
    }
    let sampling = &trial.request.sampling;
    let allowed = sampling.fewest..=sampling.most;
    let count = |case: &CaseRecord| case.samples.elapsed_ns.len();
    let mut cases = run.cases.iter().filter(|_| sampling.measurement_s > 0.0);
    match cases.find(|(_, case)| !allowed.contains(&count(case))) {
        Some((id, case)) => differs(
            &format!("samples of {id}"),
            &count(case).to_string(),
            &format!("{} to {}", sampling.fewest, sampling.most),
        ),
        None => Ok(()),
    }
}

/// Compares a record with the time that its process took and with the machine on which it ran.
pub fn check_plausible_times(
    run: &ProcessRun,
    took: Duration,
    host: &Environment,
) -> Result<(), String> {
    let times_ns = run.cases.values().flat_map(|case| &case.samples.elapsed_ns);
    let (sampled_s, took_s) = (times_ns.sum::<f64>() * 1e-9, took.as_secs_f64());
    if sampled_s > took_s * MAX_CLOCK_RATIO {
        return Err(format!(
            "its record has {sampled_s:.3} s of samples, and the process took {took_s:.3} s"
        ));
    }
    let environment = &run.environment;
    if environment.is_on_host() {
        let here = |environment: &Environment| {
            let Environment { device_name, machine, .. } = environment;
            format!("{device_name} ({})", machine.as_deref().unwrap_or("no name"))
        };
        let [found, host] = [environment, host].map(here);
        if found != host {
            let [found, host] = [&found, &host].map(|it| start_of_quotation(it));
            return Err(format!("its record has device `{found}`, the machine is `{host}`"));
        }
    }
    match environment.gpus.unlisted_gpu_uuid() {
        Some(uuid) => Err(format!(
            "its record has GPU `{}`, which NVML does not list",
            start_of_quotation(uuid)
        )),
        None => Ok(()),
    }
}

/// Compares a field of a file that a bench wrote with the request.
pub fn check_requested_field(
    file: &str,
    field: &str,
    found: &str,
    asked: &str,
) -> Result<(), String> {
    if found == asked {
        return Ok(());
    }
    let [field, found, asked] = [field, found, asked].map(start_of_quotation);
    Err(format!("its {file} has {field} `{found}`, the request `{asked}`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::SideInjection;
    use crate::compare::sides::copy_benches::BenchDriver;
    use kernelgate::measure::power::PowerRecord;
    use kernelgate::record::{Shard, TrialRequest, TrialSampling};
    use std::path::PathBuf;

    fn run() -> ProcessRun {
        ProcessRun {
            cases: [("x".to_owned(), CaseRecord::untimed_samples(vec![1.0]))].into(),
            ..ProcessRun::start_now("b", "r1-b0-p0", Environment::cpu(), Provenance::default())
        }
    }

    fn refusal_of_changed_run(change: impl FnOnce(&mut ProcessRun)) -> String {
        let expected =
            ExpectedRun::from_verified(&run(), &["x".to_owned()].into(), Some(PowerState::Steady));
        assert_eq!(expected.check(&run()), Ok(()));
        let mut other = run();
        change(&mut other);
        expected.check(&other).unwrap_err()
    }

    #[test]
    fn a_record_with_another_case_definition_or_device_is_refused() {
        let work =
            refusal_of_changed_run(|run| run.cases.get_mut("x").unwrap().work.read_bytes = 9);
        insta::assert_snapshot!(work, @"its record has work of x `read 9 B, write 8 B`, the verified process `read 8 B, write 8 B`");
        let revision = refusal_of_changed_run(|run| run.cases.get_mut("x").unwrap().revision = 7);
        insta::assert_snapshot!(revision, @"its record has revision of x `7`, the verified process `1`");
        let device =
            refusal_of_changed_run(|run| run.environment.machine = Some("feed".to_owned()));
        let machine = run().environment.machine.unwrap_or_default();
        insta::assert_snapshot!(device.replace(&machine, "MACHINE"), @"its record has device `host feed`, the verified process `host MACHINE`");
        let seed = refusal_of_changed_run(|run| run.seed = 7);
        insta::assert_snapshot!(seed, @"its record has seed `7`, the verified process `1`");
        let less =
            refusal_of_changed_run(|run| run.cases.get_mut("x").unwrap().verification.checked = 0);
        insta::assert_snapshot!(less, @"its record has verification of x `unverified`, the verified process `every element verified`");
        let threads = refusal_of_changed_run(|run| run.environment.threads += 1);
        assert!(threads.contains("threads"), "{threads}");
    }

    #[test]
    fn only_benches_of_criterion_alone_may_lack_a_power_state_on_a_gpu() {
        let mut on_gpu = run();
        on_gpu.environment.device_kind = "cuda".to_owned();
        let check = |power| {
            ExpectedRun::from_verified(&on_gpu, &["x".to_owned()].into(), power).check(&on_gpu)
        };
        let why = "its record of x has no power state".to_owned();
        assert_eq!(check(Some(PowerState::Steady)), Err(why));
        assert_eq!(check(None), Ok(()));
    }

    #[test]
    fn a_record_with_another_power_state_than_requested_is_refused() {
        let in_state = |state| {
            let mut run = run();
            run.environment.device_kind = "cuda".to_owned();
            let power = PowerRecord { state, ..PowerRecord::not_applicable("why") };
            run.cases.get_mut("x").unwrap().samples.power = Some(power);
            run
        };
        let check = |requested, found| {
            let run = in_state(found);
            ExpectedRun::from_verified(&run, &["x".to_owned()].into(), Some(requested)).check(&run)
        };
        use PowerState::{Burst, NotApplicable, Steady, Unsettled};
        for fits in [(Steady, Steady), (Steady, Unsettled), (Burst, Burst), (Burst, NotApplicable)]
        {
            assert_eq!(check(fits.0, fits.1), Ok(()), "{fits:?}");
        }
        let reasons = [(Steady, Burst), (Burst, Steady), (Burst, Unsettled)]
            .map(|(requested, found)| check(requested, found).unwrap_err());
        insta::assert_snapshot!(reasons.join("\n"), @r"
        its record of x has power state `burst`, the request `steady`
        its record of x has power state `steady`, the request `burst`
        its record of x has power state `unsettled`, the request `burst`
        ");
    }

    #[test]
    fn samples_that_exceed_the_process_time_are_refused() {
        let mut run = run();
        run.cases.insert("y".to_owned(), CaseRecord::untimed_samples(vec![6e8, 4e8]));
        let check = |ms| check_plausible_times(&run, Duration::from_millis(ms), &run.environment);
        assert_eq!(check(1000), Ok(()));
        assert_eq!(check(995), Ok(()), "clocks differ a little");
        let why = "its record has 1.000 s of samples, and the process took 0.900 s";
        assert_eq!(check(900), Err(why.to_owned()));
    }

    #[test]
    fn a_record_of_another_machine_is_refused() {
        let check =
            |host: &Environment| check_plausible_times(&run(), Duration::from_secs(1), host);
        let here = run().environment;
        assert_eq!(check(&here), Ok(()));
        let why = check(&Environment { device_name: "other".to_owned(), ..here.clone() });
        let text = |why: Result<(), String>| {
            let why = why.unwrap_err().replace(&here.device_name, "DEVICE");
            here.machine.as_ref().map_or(why.clone(), |machine| why.replace(machine, "MACHINE"))
        };
        insta::assert_snapshot!(text(why), @"its record has device `DEVICE (MACHINE)`, the machine is `other (MACHINE)`");
        let why = check(&Environment { machine: Some("feed".to_owned()), ..here.clone() });
        insta::assert_snapshot!(text(why), @"its record has device `DEVICE (MACHINE)`, the machine is `DEVICE (feed)`");
    }

    #[test]
    fn a_record_that_answers_another_request_is_refused() {
        let request = TrialRequest {
            cases: Some(["x".to_owned()].into()),
            ..TrialRequest::new("r1-b0-p0", PathBuf::new(), TrialSampling::HOST_SAMPLING)
        };
        let case = || CaseRecord::untimed_samples(vec![1.0, 1.0]);
        let run = || ProcessRun {
            executable: Some("feed".to_owned()),
            cases: [("x".to_owned(), case())].into(),
            ..run()
        };
        let settings = BTreeMap::new();
        let trial = |delays_ns| TrialProcess {
            program: PathBuf::from("bin/b"),
            hash: "feed",
            package: PathBuf::new(),
            commit: "none".to_owned(),
            injection: SideInjection { delays_ns, ..SideInjection::default() },
            driver: BenchDriver::Protocol(1),
            request: &request,
            timeout: Duration::ZERO,
        };
        let plain = trial(BTreeMap::new());
        assert_eq!(check_record_matches_request(&run(), &plain, &settings), Ok(()));
        let answer =
            |run: &ProcessRun| check_record_matches_request(run, &plain, &settings).unwrap_err();
        insta::assert_snapshot!(answer(&ProcessRun { session: "other".to_owned(), ..run() }), @"its record has session `other`, the request `r1-b0-p0`");
        insta::assert_snapshot!(answer(&ProcessRun { bench: "c".to_owned(), ..run() }), @"its record has bench `c`, the request `b`");
        let delays = [("x".to_owned(), 5)].into();
        insta::assert_snapshot!(answer(&ProcessRun { delays, ..run() }), @"its record has delay of x `5 ns`, the request `none`");
        insta::assert_snapshot!(answer(&ProcessRun { seed: 7, ..run() }), @"its record has seed `7`, the request `1`");
        let on_gpu = [("KERNELGATE_BACKEND".to_owned(), "cuda".to_owned())].into();
        let why = check_record_matches_request(&run(), &plain, &on_gpu).unwrap_err();
        assert_eq!(why, "its record has backend `cpu`, the request `cuda`");
        let provenance = Provenance { commit: Some("951c294".to_owned()), dirty: true };
        let why = answer(&ProcessRun { provenance, ..run() });
        assert_eq!(why, "its record has commit `951c294+changes`, the request `none`");
        let executable = Some("other".to_owned());
        insta::assert_snapshot!(answer(&ProcessRun { executable, ..run() }), @"its record has executable `other`, the request `feed`");
        insta::assert_snapshot!(answer(&ProcessRun { executable: None, ..run() }), @"its record has executable `none`, the request `feed`");
        let shard = Some(Shard { index: 1, count: 2 });
        insta::assert_snapshot!(answer(&ProcessRun { shard, ..run() }), @"its record has shard `1/2`, the request `none`");
        for count in [1, 21] {
            let case = CaseRecord::untimed_samples(vec![1.0; count]);
            let why = answer(&ProcessRun { cases: [("x".to_owned(), case)].into(), ..run() });
            let words = format!("its record has samples of x `{count}`, the request `2 to 20`");
            assert_eq!(why, words);
        }
        let more = [("y".to_owned(), case())].into();
        insta::assert_snapshot!(answer(&ProcessRun { cases: more, ..run() }), @"its record has case `y`, which the request does not name");
        let delayed = trial([("x".to_owned(), 5.2)].into());
        let why = check_record_matches_request(&run(), &delayed, &settings).unwrap_err();
        assert_eq!(why, "its record has delay of x `none`, the request `5 ns`");
        let delays = [("x".to_owned(), 5)].into();
        assert_eq!(
            check_record_matches_request(&ProcessRun { delays, ..run() }, &delayed, &settings),
            Ok(())
        );
    }
}
