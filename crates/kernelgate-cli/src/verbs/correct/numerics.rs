//! Errors of several seeds, for `verify --seeds`: recorded by bench executable, so that a baseline
//! can hold them and the gate can compare.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::verified::Verified;
use crate::verbs::shared::choice::{Asker, unexpected};
use crate::verbs::shared::lock::locked;
use kernelgate::protocol::{Action, CaseStatus, ResponseBody, VerifiedCase};
use kernelgate::record::numerics::{DataSets, ONE_DATA_SET};
use kernelgate::record::text::printable_path;
use kernelgate::record::{FileError, Numerics, Provenance, Store, file};
use kernelgate::verify::Errors;

/// Verifies with so many seeds and records the errors, after each of them; each case with the worst
/// of its seeds.
pub fn record(asker: &Asker<'_>, store: &Store, count: u64) -> anyhow::Result<Verified> {
    let seeds = asker.seeds(count);
    // Of the others no record is looked at, or will be replaced.
    let mut with_cases = BTreeSet::new();
    asker.each(seeds[0], &Action::List, |bench, _| {
        with_cases.insert(bench.to_owned());
        Ok(())
    })?;
    let mut benches: BTreeMap<String, Bench> = BTreeMap::new();
    asker.each(seeds[0], &Action::Environment, |bench, answer| {
        if with_cases.contains(bench) {
            benches.insert(bench.to_owned(), Bench::new(bench, answer, asker, store)?);
        }
        Ok(())
    })?;
    let mut rows: BTreeMap<String, VerifiedCase> = BTreeMap::new();
    let verified = seeds.iter().try_for_each(|&seed| {
        eprintln!("seed {seed}, {count} in all");
        asker.each(seed, &Action::Verify { dump: None }, |bench, answer| {
            let ResponseBody::Verify(verified) = answer else { return Err(unexpected(bench)) };
            let recorded = benches.get_mut(bench).ok_or_else(|| unexpected(bench))?;
            let verified = recorded.of_new_data(verified);
            verified.iter().for_each(|case| keep_worst(&mut rows, seed, case));
            recorded.add(store, seed, &verified)
        })
    });
    benches.values().for_each(|bench| bench.say(store));
    Verified::of(rows.into_values().collect(), verified)
}

/// Says that errors of several seeds are part of a baseline now.
pub fn say(record: &Numerics, cases: usize) {
    let seeds = record.cases.values().map(|case| case.seeds.len()).max().unwrap_or_default();
    if cases > 0 {
        println!("errors of {seeds} seeds for {cases} cases of bench `{}`", record.bench);
    }
}

/// A bench whose errors are recorded.
struct Bench {
    /// What its record is without those of earlier.
    empty: Numerics,
    /// Inputs of the seeds, by case.
    data_sets: DataSets,
    /// The same of cases that are one data set whatever the seed.
    golden_inputs: DataSets,
    /// Cases that have met inputs of an earlier seed.
    repeated: BTreeSet<String>,
    /// Whether it has answered with a verdict.
    answered: bool,
    /// Seeds and cases of which something was recorded now.
    seeds: usize,
    cases: BTreeSet<String>,
    /// The most seeds of a case, and cases, that its record holds.
    held: (usize, usize),
}

impl Bench {
    /// Looks whether its record can be read and written, before anything is verified.
    fn new(
        bench: &str,
        answer: ResponseBody,
        asker: &Asker<'_>,
        store: &Store,
    ) -> anyhow::Result<Self> {
        let mut executables = asker.found.executables.iter();
        let executable = executables.find(|executable| executable.bench == bench);
        let (Some(executable), ResponseBody::Environment(environment)) = (executable, answer)
        else {
            return Err(unexpected(bench));
        };
        let empty = Numerics {
            bench: bench.to_owned(),
            started: kernelgate::record::timestamp(),
            environment: *environment,
            provenance: Provenance::detect(&store.root),
            executable: file::content_hash(&executable.path).map_err(failed_to)?,
            cases: BTreeMap::new(),
        };
        let path = store.numerics_path(bench);
        file::check_writable(&path).map_err(failed_to)?;
        if let Some(why) = recorded(&path)?.and_then(|there| differs(&there, &empty)) {
            let path = printable_path(&path);
            eprintln!("the errors in {path} are of another {why}: they will be replaced");
        }
        Ok(Self {
            empty,
            data_sets: DataSets::default(),
            golden_inputs: DataSets::default(),
            repeated: BTreeSet::new(),
            answered: false,
            seeds: 0,
            cases: BTreeSet::new(),
            held: (0, 0),
        })
    }

    /// Those whose inputs no earlier seed had: others say nothing new, unless they fail now. What is
    /// compared with golden tensors is to fail with inputs that were drawn for another seed, but not
    /// with those that an earlier one had.
    fn of_new_data(&mut self, verified: Vec<VerifiedCase>) -> Vec<VerifiedCase> {
        let (new, repeated): (Vec<_>, Vec<_>) = verified.into_iter().partition(|it| {
            let golden = it.data_set.as_deref() == Some(ONE_DATA_SET);
            let other_inputs = self.golden_inputs.is_new(&it.case, it.inputs.as_deref());
            let new = self.data_sets.is_new(&it.case, it.data_set.as_deref());
            new || (it.status == CaseStatus::Failed && !(golden && other_inputs))
        });
        self.repeated.extend(repeated.into_iter().map(|it| it.case));
        new
    }

    /// Cases with errors that had one data set, whatever the seed.
    fn with_one_data_set(&self) -> impl Iterator<Item = &String> {
        self.repeated.intersection(&self.cases).filter(|case| self.data_sets.has_one(case))
    }

    /// Writes the errors of a seed beside those of others, and of other cases, that are there.
    fn add(&mut self, store: &Store, seed: u64, verified: &[VerifiedCase]) -> anyhow::Result<()> {
        self.answered = true;
        let right: Vec<_> = verified.iter().filter(|case| case.status == CaseStatus::Ok).collect();
        if right.is_empty() && self.cases.is_empty() {
            // What is known of earlier stays.
            return Ok(());
        }
        let path = store.numerics_path(&self.empty.bench);
        // Another process may record other cases.
        let _lock = locked(&path)?;
        let there = recorded(&path)?.filter(|there| differs(there, &self.empty).is_none());
        let mut record = self.empty.clone();
        if let Some(there) = there {
            (record.started, record.cases) = (there.started, there.cases);
        }
        let any = !right.is_empty();
        for case in right {
            let VerifiedCase { max_error, relative_l2, rounding, .. } = *case;
            let errors = Errors { max_error, relative_l2, rounding };
            let known = record.cases.entry(case.case.clone()).or_default();
            known.insert(seed, errors, &case.by_output);
            self.cases.insert(case.case.clone());
        }
        for case in self.repeated.intersection(&self.cases) {
            if let Some(known) = record.cases.get_mut(case) {
                known.one_data_set = self.data_sets.has_one(case);
            }
        }
        file::write(&path, &record).map_err(failed_to)?;
        self.seeds += usize::from(any);
        let most = record.cases.values().map(|case| case.seeds.len()).max().unwrap_or_default();
        self.held = (most, record.cases.len());
        Ok(())
    }

    fn say(&self, store: &Store) {
        let path = printable_path(&store.numerics_path(&self.empty.bench));
        let (seeds, cases) = (self.seeds, self.cases.len());
        if !self.answered {
            return;
        }
        if seeds == 0 {
            eprintln!("no case was right: nothing is recorded in {path}");
            return;
        }
        let more = match self.held {
            held if held == (seeds, cases) => String::new(),
            (most, all) => format!("; with those of earlier: {all} cases, up to {most} seeds"),
        };
        eprintln!("errors of {seeds} seeds and {cases} cases are in {path}{more}");
        if let one @ 1.. = self.with_one_data_set().count() {
            eprintln!("of these, {one} cases have 1 data set, whatever the seed");
        }
    }
}

/// What is recorded there.
fn recorded(path: &Path) -> anyhow::Result<Option<Numerics>> {
    match file::read::<Numerics>(path) {
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(failed_to(error).context("remove it, and verify again")),
        Ok(there) => Ok(Some(there)),
    }
}

/// What keeps errors from being one record, as they say nothing of each other.
fn differs(one: &Numerics, other: &Numerics) -> Option<&'static str> {
    if one.executable != other.executable {
        return Some("executable");
    }
    one.environment.mismatches(&other.environment).first().map(|mismatch| mismatch.field)
}

fn failed_to(error: FileError) -> anyhow::Error {
    anyhow::anyhow!("failed to {error}")
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
