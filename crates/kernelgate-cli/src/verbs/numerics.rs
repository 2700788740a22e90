//! Errors of several seeds, for `verify --seeds`: recorded by bench executable, so that a baseline
//! can hold them and the gate can compare.

use std::collections::BTreeMap;

use super::choice::{Answers, Choice, unexpected};
use crate::benches::find::FoundBenches;
use kernelgate::protocol::{Action, CaseStatus, ResponseBody, VerifiedCase};
use kernelgate::record::numerics::{DataSets, SeedErrors};
use kernelgate::record::{CaseNumerics, Numerics, Provenance, Store, file};

/// Verifies with so many seeds and records the errors; each case with the worst of its seeds.
///
/// # Errors
/// When a bench cannot be asked, or the record cannot be written.
pub fn record(choice: &Choice, store: &Store, seeds: u64) -> anyhow::Result<Vec<VerifiedCase>> {
    let actions = [Action::Environment, Action::Verify { dump: None }];
    choice.ask_each(store, &actions, seeds, |found, seeds, answers| {
        let started = kernelgate::record::timestamp();
        let mut rows: BTreeMap<String, VerifiedCase> = BTreeMap::new();
        let mut records: BTreeMap<String, Numerics> = BTreeMap::new();
        let mut data_sets = DataSets::default();
        for (seed, pair) in seeds.iter().zip(answers.chunks(2)) {
            let [environments, verified] = pair else { continue };
            for (bench, answer) in verified {
                let ResponseBody::Verify(verified) = answer else {
                    return Err(unexpected(bench));
                };
                let record = match records.remove(bench) {
                    Some(record) => record,
                    None => new_record(bench, &started, found, environments, store)?,
                };
                let record = records.entry(bench.clone()).or_insert(record);
                for case in verified {
                    let of = format!("{bench} {}", case.case);
                    if data_sets.is_new(&of, case.data_set.as_deref()) {
                        add(record, *seed, case);
                        keep_worst(&mut rows, *seed, case);
                    } else if let Some(known) = record.cases.get_mut(&case.case) {
                        known.one_data_set = data_sets.has_one(&of);
                    }
                }
            }
        }
        for (bench, record) in &records {
            let path = store.numerics_path(bench);
            file::write(&path, record).map_err(|error| anyhow::anyhow!("failed to {error}"))?;
            let (cases, path) = (record.cases.len(), path.display());
            eprintln!("errors of {} seeds and {cases} cases are in {path}", seeds.len());
            let one = record.cases.values().filter(|case| case.one_data_set).count();
            if one > 0 {
                eprintln!("of these, {one} cases have 1 data set, whatever the seed");
            }
        }
        Ok(rows.into_values().collect())
    })
}

/// Says that errors of several seeds are part of a baseline now.
pub fn say(record: &Numerics, cases: usize) {
    let seeds = record.cases.values().map(|case| case.seeds.len()).max().unwrap_or_default();
    if cases > 0 {
        println!("errors of {seeds} seeds for {cases} cases of bench `{}`", record.bench);
    }
}

fn new_record(
    bench: &str,
    started: &str,
    found: &FoundBenches,
    environments: &Answers,
    store: &Store,
) -> anyhow::Result<Numerics> {
    let executable = found.executables.iter().find(|executable| executable.bench == bench);
    let environment = environments.iter().find(|(other, _)| other == bench);
    let (Some(executable), Some((_, ResponseBody::Environment(environment)))) =
        (executable, environment)
    else {
        return Err(unexpected(bench));
    };
    let hash = file::content_hash(&executable.path);
    Ok(Numerics {
        bench: bench.to_owned(),
        started: started.to_owned(),
        environment: (**environment).clone(),
        provenance: Provenance::of(&store.root),
        executable: hash.map_err(|error| anyhow::anyhow!("failed to {error}"))?,
        cases: BTreeMap::new(),
    })
}

fn add(record: &mut Numerics, seed: u64, case: &VerifiedCase) {
    if case.status == CaseStatus::Ok {
        let VerifiedCase { max_error, relative_l2, rounding, .. } = *case;
        let errors = SeedErrors { max_error, relative_l2, rounding };
        let known: &mut CaseNumerics = record.cases.entry(case.case.clone()).or_default();
        known.insert(seed, errors);
    }
}

/// A case that failed with a seed has failed; the errors are the largest of all seeds.
fn keep_worst(rows: &mut BTreeMap<String, VerifiedCase>, seed: u64, case: &VerifiedCase) {
    let mut case = case.clone();
    if case.status == CaseStatus::Failed {
        case.reason = case.reason.map(|reason| format!("with seed {seed}: {reason}"));
    }
    let Some(worst) = rows.get_mut(&case.case) else {
        rows.insert(case.case.clone(), case);
        return;
    };
    match (worst.status, case.status) {
        (CaseStatus::Failed, _) => {}
        (_, CaseStatus::Failed) => *worst = case,
        _ => {
            worst.max_error = worst.max_error.max(case.max_error);
            worst.relative_l2 = worst.relative_l2.max(case.relative_l2);
            worst.repeatable = worst.repeatable.zip(case.repeatable).map(|(a, b)| a && b);
        }
    }
}
