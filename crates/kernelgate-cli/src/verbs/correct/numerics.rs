//! Records output errors for several seeds (`verify --seeds`) by bench executable, so that a
//! baseline can store them for the gate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Context as _;

use super::verified::VerifiedCases;
use crate::verbs::shared::case_selection::{BenchClient, unexpected_response};
use kernelgate::display::counted_noun;
use kernelgate::protocol::{BenchResponseBody, CaseStatus, RequestedAction, VerifiedCase};
use kernelgate::record::numerics::{CONSTANT_DATA_SET, DataSetsByCase};
use kernelgate::record::text::printable_path;
use kernelgate::record::{BaselineStore, FileLock, Numerics, Provenance, file};
use kernelgate::verify::OutputErrors;

/// Verifies with `count` seeds, and records the errors after each seed. Each case is returned with
/// the seed that gave its largest error.
pub fn record_errors(
    client: &BenchClient<'_>,
    store: &BaselineStore,
    count: u64,
) -> anyhow::Result<VerifiedCases> {
    let seeds = client.verification_seeds(count);
    // The records of other benches are neither read nor replaced.
    let mut with_cases = BTreeSet::new();
    client.ask_each(seeds[0], &RequestedAction::List, |bench, _| {
        with_cases.insert(bench.to_owned());
        Ok(())
    })?;
    let mut benches: BTreeMap<String, BenchErrors> = BTreeMap::new();
    client.ask_each(seeds[0], &RequestedAction::Environment, |bench, answer| {
        if with_cases.contains(bench) {
            benches.insert(bench.to_owned(), BenchErrors::new(bench, answer, client, store)?);
        }
        Ok(())
    })?;
    let mut rows: BTreeMap<String, VerifiedCase> = BTreeMap::new();
    let verified = seeds.iter().try_for_each(|&seed| {
        eprintln!("seed {seed}, {count} in all");
        client.ask_each(seed, &RequestedAction::Verify { dump: None }, |bench, answer| {
            let BenchResponseBody::Verify(verified) = answer else {
                return Err(unexpected_response(bench));
            };
            let recorded = benches.get_mut(bench).ok_or_else(|| unexpected_response(bench))?;
            let verified = recorded.keep_cases_with_new_data(verified);
            verified.iter().for_each(|case| keep_largest_errors(&mut rows, seed, case));
            recorded.add(store, seed, &verified)
        })
    });
    benches.values().for_each(|bench| bench.print_saved_errors(store));
    VerifiedCases::new(rows.into_values().collect(), verified)
}

/// Prints that errors of several seeds are now part of a baseline.
pub fn print_saved_errors(record: &Numerics, cases: usize) {
    let seeds = record.cases.values().map(|case| case.seeds.len()).max().unwrap_or_default();
    if cases > 0 {
        let (seeds, cases) = (counted_noun(seeds, "seed"), counted_noun(cases, "case"));
        println!("errors of {seeds} for {cases} of bench `{}`", record.bench);
    }
}

/// A bench executable whose output errors are recorded.
struct BenchErrors {
    /// Record of the bench without the errors of earlier seeds.
    empty: Numerics,
    /// Data sets that each case was verified with.
    data_sets: DataSetsByCase,
    /// Inputs of the seeds, for cases that are one data set whatever the seed.
    golden_inputs: DataSetsByCase,
    /// Cases for which a seed gave the inputs of an earlier seed.
    repeated: BTreeSet<String>,
    /// Whether the bench reported any verified case.
    answered: bool,
    /// Number of seeds and cases that were recorded now.
    seeds: usize,
    cases: BTreeSet<String>,
    /// Largest number of seeds of a case, and number of cases, in its record.
    held: (usize, usize),
}

impl BenchErrors {
    /// Checks that the record of errors can be read and written, before anything is verified.
    fn new(
        bench: &str,
        answer: BenchResponseBody,
        client: &BenchClient<'_>,
        store: &BaselineStore,
    ) -> anyhow::Result<Self> {
        let mut executables = client.found.executables.iter();
        let executable = executables.find(|executable| executable.bench == bench);
        let (Some(executable), BenchResponseBody::Environment(environment)) = (executable, answer)
        else {
            return Err(unexpected_response(bench));
        };
        let empty = Numerics {
            bench: bench.to_owned(),
            started: kernelgate::record::current_timestamp(),
            environment: *environment,
            provenance: Provenance::detect_from_git(&store.root),
            executable: file::content_hash_of_file(&executable.path)?,
            cases: BTreeMap::new(),
        };
        let path = store.seed_errors_path(bench);
        file::check_writable(&path)?;
        if let Some(why) =
            recorded_numerics(&path)?.and_then(|there| incomparable_field(&there, &empty))
        {
            let path = printable_path(&path);
            eprintln!("the errors in {path} are of another {why}: they will be replaced");
        }
        Ok(Self {
            empty,
            data_sets: DataSetsByCase::default(),
            golden_inputs: DataSetsByCase::default(),
            repeated: BTreeSet::new(),
            answered: false,
            seeds: 0,
            cases: BTreeSet::new(),
            held: (0, 0),
        })
    }

    /// Returns the cases whose inputs no earlier seed had: others give no new information, unless
    /// they fail now. A case with golden tensors should fail for inputs of another seed, but not
    /// for inputs of an earlier seed.
    fn keep_cases_with_new_data(&mut self, verified: Vec<VerifiedCase>) -> Vec<VerifiedCase> {
        let (new, repeated): (Vec<_>, Vec<_>) = verified.into_iter().partition(|it| {
            let golden = it.data_set.as_deref() == Some(CONSTANT_DATA_SET);
            let other_inputs = self.golden_inputs.is_new_data_set(&it.case, it.inputs.as_deref());
            let new = self.data_sets.is_new_data_set(&it.case, it.data_set.as_deref());
            new || (it.status == CaseStatus::Failed && !(golden && other_inputs))
        });
        self.repeated.extend(repeated.into_iter().map(|it| it.case));
        new
    }

    /// Cases with errors that had one data set, whatever the seed.
    fn cases_with_one_data_set(&self) -> impl Iterator<Item = &String> {
        self.repeated.intersection(&self.cases).filter(|case| self.data_sets.has_one_data_set(case))
    }

    /// Adds the errors of a seed to the recorded ones of other seeds and cases.
    fn add(
        &mut self,
        store: &BaselineStore,
        seed: u64,
        verified: &[VerifiedCase],
    ) -> anyhow::Result<()> {
        self.answered = true;
        let right: Vec<_> = verified.iter().filter(|case| case.status == CaseStatus::Ok).collect();
        if right.is_empty() && self.cases.is_empty() {
            // Earlier records stay.
            return Ok(());
        }
        let path = store.seed_errors_path(&self.empty.bench);
        // Another process may record the errors of other cases at the same time.
        let _lock = FileLock::acquire_for_file(&path)?;
        let there = recorded_numerics(&path)?
            .filter(|there| incomparable_field(there, &self.empty).is_none());
        let mut record = self.empty.clone();
        if let Some(there) = there {
            (record.started, record.cases) = (there.started, there.cases);
        }
        let any = !right.is_empty();
        for case in right {
            let VerifiedCase { max_error, relative_l2, rounding, .. } = *case;
            let errors = OutputErrors { max_error, relative_l2, rounding };
            let errors_of_case = record.cases.entry(case.case.clone()).or_default();
            errors_of_case.insert_seed(seed, errors, &case.by_output);
            self.cases.insert(case.case.clone());
        }
        for case in self.repeated.intersection(&self.cases) {
            if let Some(known) = record.cases.get_mut(case) {
                known.one_data_set = self.data_sets.has_one_data_set(case);
            }
        }
        file::write(&path, &record)?;
        self.seeds += usize::from(any);
        let most = record.cases.values().map(|case| case.seeds.len()).max().unwrap_or_default();
        self.held = (most, record.cases.len());
        Ok(())
    }

    fn print_saved_errors(&self, store: &BaselineStore) {
        let path = printable_path(&store.seed_errors_path(&self.empty.bench));
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
            (most, all) => format!(
                "; with earlier errors: {}, up to {}",
                counted_noun(all, "case"),
                counted_noun(most, "seed")
            ),
        };
        let (seeds, cases) = (counted_noun(seeds, "seed"), counted_noun(cases, "case"));
        eprintln!("errors of {seeds} and {cases} are in {path}{more}");
        if let one @ 1.. = self.cases_with_one_data_set().count() {
            eprintln!("with 1 data set, whatever the seed: {}", counted_noun(one, "case"));
        }
    }
}

/// The errors that are recorded in a file.
fn recorded_numerics(path: &Path) -> anyhow::Result<Option<Numerics>> {
    match file::read::<Numerics>(path) {
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error).context("remove it, and verify again"),
        Ok(there) => Ok(Some(there)),
    }
}

/// Returns the difference because of which errors cannot be stored in one record.
fn incomparable_field(one: &Numerics, other: &Numerics) -> Option<&'static str> {
    if one.executable != other.executable {
        return Some("executable");
    }
    one.environment.mismatches(&other.environment).first().map(|mismatch| mismatch.field)
}

/// Keeps the worst result: a case that failed with one seed has failed, and its errors are the
/// largest of all seeds.
fn keep_largest_errors(rows: &mut BTreeMap<String, VerifiedCase>, seed: u64, case: &VerifiedCase) {
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
