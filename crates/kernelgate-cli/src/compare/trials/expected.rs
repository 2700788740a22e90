//! Checks that the record of a process belongs to the request that it answers: a bench writes its
//! own record, and may write another one.

use std::collections::{BTreeMap, BTreeSet};

use super::process::TrialProcess;
use kernelgate::measure::power::PowerState;
use kernelgate::record::{CaseRecord, Environment, ProcessRun, WorkRecord};

/// Facts that every later process of a side shares with the process that verified it.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    environment: Environment,
    /// Absent for benches of Criterion alone, whose records have no power state.
    power: Option<PowerState>,
    definitions: BTreeMap<String, Definition>,
}

/// What a case computes.
#[derive(Debug, Clone, PartialEq)]
struct Definition {
    revision: u32,
    work: WorkRecord,
    problem: BTreeMap<String, String>,
}

impl From<&CaseRecord> for Definition {
    fn from(case: &CaseRecord) -> Self {
        let CaseRecord { revision, work, problem, .. } = case.clone();
        Self { revision, work, problem }
    }
}

impl Expected {
    /// Facts of the process that verified these cases.
    pub fn from_verified(
        run: &ProcessRun,
        cases: &BTreeSet<String>,
        power: Option<PowerState>,
    ) -> Self {
        let cases = run.cases.iter().filter(|(id, _)| cases.contains(*id));
        let definitions = cases.map(|(id, case)| (id.clone(), case.into())).collect();
        Self { environment: run.environment.clone(), power, definitions }
    }

    /// Compares a later process with the one that verified its cases.
    pub fn check(&self, run: &ProcessRun) -> Result<(), String> {
        let differs = |field: &str, found: &str, verified: &str| {
            Err(format!("its record has {field} `{found}`, the verified process `{verified}`"))
        };
        if let Some(other) = run.environment.mismatches(&self.environment).first() {
            return differs(other.field, &other.head, &other.base);
        }
        let [found, verified] = [&run.environment, &self.environment].map(Environment::device_id);
        if found != verified {
            return differs("device", &found, &verified);
        }
        if let Some(asked) = self.power.filter(|_| !run.environment.on_host()) {
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
            let found = Definition::from(case);
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
        }
        Ok(())
    }
}

/// Compares a record with the request that it answers.
pub fn check_answers(run: &ProcessRun, trial: &TrialProcess<'_>) -> Result<(), String> {
    let bench = trial.program.file_name().unwrap_or_default().to_string_lossy();
    let differs = |field: &str, found: &str, asked: &str| {
        Err(format!("its record has {field} `{found}`, the request `{asked}`"))
    };
    if run.session != trial.request.session {
        return differs("session", &run.session, &trial.request.session);
    }
    if run.bench != bench {
        return differs("bench", &run.bench, &bench);
    }
    let asked = &trial.planted.delays_ns;
    let of_case = |id: &String| (run.delays.get(id).copied(), asked.get(id).map(|ns| ns.round()));
    for id in run.delays.keys().chain(run.cases.keys()) {
        let (found, asked) = of_case(id);
        if found.map(|ns| ns as f64) != asked {
            let text = |ns: Option<f64>| ns.map_or("none".to_owned(), |ns| format!("{ns} ns"));
            let found = text(found.map(|ns| ns as f64));
            return differs(&format!("delay of {id}"), &found, &text(asked));
        }
    }
    if let Some(cases) = &trial.request.cases
        && let Some(other) = run.cases.keys().find(|id| !cases.contains(*id))
    {
        return Err(format!("its record has case `{other}`, which the request does not name"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Planted;
    use crate::compare::sides::install::Driver;
    use kernelgate::measure::power::PowerRecord;
    use kernelgate::record::{Provenance, TrialRequest, TrialSampling};
    use std::path::PathBuf;
    use std::time::Duration;

    fn run() -> ProcessRun {
        ProcessRun {
            cases: [("x".to_owned(), CaseRecord::of_samples(vec![1.0]))].into(),
            ..ProcessRun::start("b", "r1-b0-p0", Environment::cpu(), Provenance::default())
        }
    }

    fn refusal(change: impl FnOnce(&mut ProcessRun)) -> String {
        let expected =
            Expected::from_verified(&run(), &["x".to_owned()].into(), Some(PowerState::Steady));
        assert_eq!(expected.check(&run()), Ok(()));
        let mut other = run();
        change(&mut other);
        expected.check(&other).unwrap_err()
    }

    #[test]
    fn a_record_of_another_definition_or_device_is_refused() {
        let work = refusal(|run| run.cases.get_mut("x").unwrap().work.read_bytes = 9);
        assert!(work.contains("work of x"), "{work}");
        let revision = refusal(|run| run.cases.get_mut("x").unwrap().revision = 7);
        assert!(revision.contains("revision of x `7`"), "{revision}");
        let device = refusal(|run| run.environment.machine = Some("feed".to_owned()));
        assert!(device.contains("device `host feed`"), "{device}");
        let threads = refusal(|run| run.environment.threads += 1);
        assert!(threads.contains("threads"), "{threads}");
    }

    #[test]
    fn only_benches_of_criterion_alone_may_lack_a_power_state_on_a_gpu() {
        let mut on_gpu = run();
        on_gpu.environment.device_kind = "cuda".to_owned();
        let check = |power| {
            Expected::from_verified(&on_gpu, &["x".to_owned()].into(), power).check(&on_gpu)
        };
        let why = "its record of x has no power state".to_owned();
        assert_eq!(check(Some(PowerState::Steady)), Err(why));
        assert_eq!(check(None), Ok(()));
    }

    #[test]
    fn a_record_in_another_power_state_than_the_requested_is_refused() {
        let in_state = |state| {
            let mut run = run();
            run.environment.device_kind = "cuda".to_owned();
            let power = PowerRecord { state, ..PowerRecord::not_applicable("why") };
            run.cases.get_mut("x").unwrap().samples.power = Some(power);
            run
        };
        let check = |requested, found| {
            let run = in_state(found);
            Expected::from_verified(&run, &["x".to_owned()].into(), Some(requested)).check(&run)
        };
        use PowerState::{Burst, NotApplicable, Steady, Unsettled};
        for fits in [(Steady, Steady), (Steady, Unsettled), (Burst, Burst), (Burst, NotApplicable)]
        {
            assert_eq!(check(fits.0, fits.1), Ok(()), "{fits:?}");
        }
        for (requested, found) in [(Steady, Burst), (Burst, Steady), (Burst, Unsettled)] {
            let why = check(requested, found).unwrap_err();
            let words =
                format!("power state `{}`, the request `{}`", found.name(), requested.name());
            assert!(why.contains(&words), "{why}");
        }
    }

    #[test]
    fn a_record_that_answers_another_request_is_refused() {
        let request = TrialRequest {
            session: "r1-b0-p0".to_owned(),
            record: PathBuf::new(),
            first: BTreeSet::new(),
            cases: Some(["x".to_owned()].into()),
            verified: None,
            inputs: None,
            keep_outputs: None,
            keep_verified: false,
            base_outputs: None,
            anchors: false,
            sampling: TrialSampling::MEASURED,
        };
        let trial = |delays_ns| TrialProcess {
            program: PathBuf::from("bin/b"),
            hash: "",
            package: PathBuf::new(),
            commit: String::new(),
            planted: Planted { delays_ns, ..Planted::default() },
            driver: Driver::Protocol(1),
            request: &request,
            timeout: Duration::ZERO,
        };
        let plain = trial(BTreeMap::new());
        assert_eq!(check_answers(&run(), &plain), Ok(()));
        let answer = |run: &ProcessRun| check_answers(run, &plain).unwrap_err();
        assert!(
            answer(&ProcessRun { session: "other".to_owned(), ..run() })
                .contains("session `other`")
        );
        assert!(answer(&ProcessRun { bench: "c".to_owned(), ..run() }).contains("bench `c`"));
        let delays = [("x".to_owned(), 5)].into();
        assert!(answer(&ProcessRun { delays, ..run() }).contains("delay of x `5 ns`"));
        let more = [("y".to_owned(), CaseRecord::of_samples(vec![1.0]))].into();
        assert!(answer(&ProcessRun { cases: more, ..run() }).contains("case `y`"));
        let delayed = trial([("x".to_owned(), 5.2)].into());
        assert!(check_answers(&run(), &delayed).unwrap_err().contains("delay of x `none`"));
        let delays = [("x".to_owned(), 5)].into();
        assert_eq!(check_answers(&ProcessRun { delays, ..run() }, &delayed), Ok(()));
    }
}
