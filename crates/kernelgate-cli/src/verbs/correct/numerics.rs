//! Records the output errors of each bench executable for several seeds (`kernelgate verify
//! --seeds`); a baseline can later store these errors for the gate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Context as _;

use super::verified::PartialVerification;
use crate::verbs::shared::case_selection::{BenchClient, error_for_unexpected_response};
use kernelgate::display::counted_noun;
use kernelgate::protocol::{
    BenchCaseStatus, CaseVerificationResponse, RequestedBenchAction, ResponseToBenchAction,
};
use kernelgate::record::numerics::{DATA_SET_EQUAL_FOR_ALL_SEEDS, VerifiedDataSetsByCase};
use kernelgate::record::text::path_for_terminal;
use kernelgate::record::{
    CommitAndChanges, ExclusiveFileLock, OutputErrorsOfExecutable, RecordFoldersOfPackage, file,
};
use kernelgate::verify::ErrorsRelativeToReference;

/// Verifies all selected cases with `count` seeds of input data, and writes the output errors to a
/// file after each seed. Returns each case once, with the largest errors over all seeds, or with
/// the first seed that made the case fail.
pub fn verify_and_record_errors_of_seeds(
    client: &BenchClient<'_>,
    store: &RecordFoldersOfPackage,
    count: u64,
) -> anyhow::Result<PartialVerification> {
    let seeds = client.seeds_for_verification(count);
    // The error records of benches without selected cases are neither read nor replaced.
    let mut with_cases = BTreeSet::new();
    client.send_request_with_seed_to_each_bench(
        seeds[0],
        &RequestedBenchAction::ListCases,
        |bench, _| {
            with_cases.insert(bench.to_owned());
            Ok(())
        },
    )?;
    let mut benches: BTreeMap<String, BenchErrorRecorder> = BTreeMap::new();
    client.send_request_with_seed_to_each_bench(
        seeds[0],
        &RequestedBenchAction::ReportEnvironment,
        |bench, answer| {
            if with_cases.contains(bench) {
                benches.insert(
                    bench.to_owned(),
                    BenchErrorRecorder::new_with_checked_record_file(bench, answer, client, store)?,
                );
            }
            Ok(())
        },
    )?;
    let mut rows: BTreeMap<String, CaseVerificationResponse> = BTreeMap::new();
    let verified = seeds.iter().try_for_each(|&seed| {
        eprintln!("seed {seed}, {count} in all");
        client.send_request_with_seed_to_each_bench(
            seed,
            &RequestedBenchAction::VerifyCases { dump_folder: None },
            |bench, answer| {
                let ResponseToBenchAction::Verify(verified) = answer else {
                    return Err(error_for_unexpected_response(bench));
                };
                let recorded =
                    benches.get_mut(bench).ok_or_else(|| error_for_unexpected_response(bench))?;
                let verified = recorded.cases_with_new_inputs_or_failure(verified);
                verified.iter().for_each(|case| merge_worst_result_of_case(&mut rows, seed, case));
                recorded.add_errors_of_seed(store, seed, &verified)
            },
        )
    });
    benches.values().for_each(|bench| bench.print_recorded_seeds_and_cases(store));
    PartialVerification::from_rows_and_outcome(rows.into_values().collect(), verified)
}

/// Prints for how many seeds and cases the output errors of a bench are now part of a baseline.
pub fn print_errors_saved_in_baseline(record: &OutputErrorsOfExecutable, cases: usize) {
    let seeds = record.cases.values().map(|case| case.seeds.len()).max().unwrap_or_default();
    if cases > 0 {
        let (seeds, cases) = (counted_noun(seeds, "seed"), counted_noun(cases, "case"));
        println!("errors of {seeds} for {cases} of bench `{}`", record.bench);
    }
}

/// The output errors of one bench executable while its cases are verified with several seeds.
struct BenchErrorRecorder {
    /// Record of the bench executable without any case's errors.
    record_without_errors: OutputErrorsOfExecutable,
    /// For each case, the input data sets with which the case was verified.
    data_sets: VerifiedDataSetsByCase,
    /// For cases whose expected output is a constant data set whatever the seed, the hashes of the
    /// inputs that the seeds gave.
    inputs_of_cases_with_constant_output: VerifiedDataSetsByCase,
    /// Cases for which a seed gave the inputs of an earlier seed.
    cases_with_repeated_inputs: BTreeSet<String>,
    /// Whether the bench has answered a verification request.
    bench_has_answered: bool,
    /// Number of seeds whose errors this call has recorded.
    recorded_seed_count: usize,
    recorded_case_ids: BTreeSet<String>,
    /// Largest number of seeds of a case in the record file, and number of cases in the record
    /// file.
    max_recorded_seeds_and_cases: (usize, usize),
}

impl BenchErrorRecorder {
    /// Checks that the file of recorded errors can be read and written, before any case is
    /// verified.
    fn new_with_checked_record_file(
        bench: &str,
        answer: ResponseToBenchAction,
        client: &BenchClient<'_>,
        store: &RecordFoldersOfPackage,
    ) -> anyhow::Result<Self> {
        let mut executables = client.found_benches.usable_executables.iter();
        let executable = executables.find(|executable| executable.bench_name == bench);
        let (Some(executable), ResponseToBenchAction::Environment(environment)) =
            (executable, answer)
        else {
            return Err(error_for_unexpected_response(bench));
        };
        let empty = OutputErrorsOfExecutable {
            bench: bench.to_owned(),
            start_time: kernelgate::record::current_time_for_records(),
            environment: *environment,
            provenance: CommitAndChanges::from_git_or_variable(&store.package_root),
            executable_hash: file::file_content_hash_hex(&executable.executable_path)?,
            cases: BTreeMap::new(),
        };
        let path = store.path_of_output_errors(bench);
        file::check_file_is_writable(&path)?;
        if let Some(why) =
            read_recorded_errors(&path)?.and_then(|there| first_incomparable_field(&there, &empty))
        {
            let path = path_for_terminal(&path);
            eprintln!("the errors in {path} are of another {why}: they will be replaced");
        }
        Ok(Self {
            record_without_errors: empty,
            data_sets: VerifiedDataSetsByCase::default(),
            inputs_of_cases_with_constant_output: VerifiedDataSetsByCase::default(),
            cases_with_repeated_inputs: BTreeSet::new(),
            bench_has_answered: false,
            recorded_seed_count: 0,
            recorded_case_ids: BTreeSet::new(),
            max_recorded_seeds_and_cases: (0, 0),
        })
    }

    /// Returns the verified cases whose input data no earlier seed had; a case with repeated inputs
    /// is returned only if it has failed now. A case with golden tensors is expected to fail for
    /// inputs of another seed, so such a failure is dropped; its failure for inputs of an earlier
    /// seed is kept.
    fn cases_with_new_inputs_or_failure(
        &mut self,
        verified: Vec<CaseVerificationResponse>,
    ) -> Vec<CaseVerificationResponse> {
        let (new, repeated): (Vec<_>, Vec<_>) = verified.into_iter().partition(|it| {
            let golden = it.input_data_set_hash.as_deref() == Some(DATA_SET_EQUAL_FOR_ALL_SEEDS);
            let other_inputs =
                self.inputs_of_cases_with_constant_output.record_data_set_and_check_if_new(
                    &it.case_id,
                    it.single_seed_inputs_hash.as_deref(),
                );
            let new = self
                .data_sets
                .record_data_set_and_check_if_new(&it.case_id, it.input_data_set_hash.as_deref());
            new || (it.status == BenchCaseStatus::Failed && !(golden && other_inputs))
        });
        self.cases_with_repeated_inputs.extend(repeated.into_iter().map(|it| it.case_id));
        new
    }

    /// Cases with recorded errors whose input data are the same for every seed.
    fn cases_with_same_inputs_for_every_seed(&self) -> impl Iterator<Item = &String> {
        self.cases_with_repeated_inputs
            .intersection(&self.recorded_case_ids)
            .filter(|case| self.data_sets.has_equal_data_for_all_seeds(case))
    }

    /// Writes the errors of one seed into the bench's record file, beside the recorded errors of
    /// other seeds and cases.
    fn add_errors_of_seed(
        &mut self,
        store: &RecordFoldersOfPackage,
        seed: u64,
        verified: &[CaseVerificationResponse],
    ) -> anyhow::Result<()> {
        self.bench_has_answered = true;
        let right: Vec<_> =
            verified.iter().filter(|case| case.status == BenchCaseStatus::Ok).collect();
        if right.is_empty() && self.recorded_case_ids.is_empty() {
            // Earlier records stay.
            return Ok(());
        }
        let path = store.path_of_output_errors(&self.record_without_errors.bench);
        // The lock is needed because another process may record errors of other cases in the file
        // at the same time.
        let _lock = ExclusiveFileLock::acquire_lock_for_file(&path)?;
        let there = read_recorded_errors(&path)?
            .filter(|there| first_incomparable_field(there, &self.record_without_errors).is_none());
        let mut record = self.record_without_errors.clone();
        if let Some(there) = there {
            (record.start_time, record.cases) = (there.start_time, there.cases);
        }
        let any = !right.is_empty();
        for case in right {
            let CaseVerificationResponse {
                max_error_over_max_reference: max_error,
                relative_l2_error: relative_l2,
                rounding_relative_l2_error: rounding,
                ..
            } = *case;
            let errors =
                ErrorsRelativeToReference { max_error, relative_l2, rounding_error: rounding };
            let errors_of_case = record.cases.entry(case.case_id.clone()).or_default();
            errors_of_case.set_errors_of_seed(seed, errors, &case.errors_by_output);
            self.recorded_case_ids.insert(case.case_id.clone());
        }
        for case in self.cases_with_repeated_inputs.intersection(&self.recorded_case_ids) {
            if let Some(known) = record.cases.get_mut(case) {
                known.seeds_have_equal_data = self.data_sets.has_equal_data_for_all_seeds(case);
            }
        }
        file::write_record_atomically(&path, &record)?;
        self.recorded_seed_count += usize::from(any);
        let most = record.cases.values().map(|case| case.seeds.len()).max().unwrap_or_default();
        self.max_recorded_seeds_and_cases = (most, record.cases.len());
        Ok(())
    }

    fn print_recorded_seeds_and_cases(&self, store: &RecordFoldersOfPackage) {
        let path =
            path_for_terminal(&store.path_of_output_errors(&self.record_without_errors.bench));
        let (seeds, cases) = (self.recorded_seed_count, self.recorded_case_ids.len());
        if !self.bench_has_answered {
            return;
        }
        if seeds == 0 {
            eprintln!("no case was right: nothing is recorded in {path}");
            return;
        }
        let more = match self.max_recorded_seeds_and_cases {
            held if held == (seeds, cases) => String::new(),
            (most, all) => format!(
                "; with earlier errors: {}, up to {}",
                counted_noun(all, "case"),
                counted_noun(most, "seed")
            ),
        };
        let (seeds, cases) = (counted_noun(seeds, "seed"), counted_noun(cases, "case"));
        eprintln!("errors of {seeds} and {cases} are in {path}{more}");
        if let one @ 1.. = self.cases_with_same_inputs_for_every_seed().count() {
            eprintln!("with 1 data set, whatever the seed: {}", counted_noun(one, "case"));
        }
    }
}

/// Reads the output errors in a record file; `None` if the file does not exist.
fn read_recorded_errors(path: &Path) -> anyhow::Result<Option<OutputErrorsOfExecutable>> {
    match file::read_record::<OutputErrorsOfExecutable>(path) {
        Err(error) if error.is_because_file_is_missing() => Ok(None),
        Err(error) => Err(error).context("remove it, and verify again"),
        Ok(there) => Ok(Some(there)),
    }
}

/// Name of the first field (executable or environment) that differs between two error records,
/// which then cannot share a file; `None` if nothing differs.
fn first_incomparable_field(
    one: &OutputErrorsOfExecutable,
    other: &OutputErrorsOfExecutable,
) -> Option<&'static str> {
    if one.executable_hash != other.executable_hash {
        return Some("executable");
    }
    one.environment
        .incomparable_facts_with_base(&other.environment)
        .first()
        .map(|mismatch| mismatch.field_name)
}

/// Keeps the worst result of a case over all seeds: failed if any seed failed, else the largest
/// errors of any seed.
fn merge_worst_result_of_case(
    rows: &mut BTreeMap<String, CaseVerificationResponse>,
    seed: u64,
    case: &CaseVerificationResponse,
) {
    let mut case = case.clone();
    if case.status == BenchCaseStatus::Failed {
        case.failure_or_skip_reason =
            case.failure_or_skip_reason.map(|reason| format!("with seed {seed}: {reason}"));
    }
    let Some(worst) = rows.get_mut(&case.case_id) else {
        rows.insert(case.case_id.clone(), case);
        return;
    };
    match (worst.status, case.status) {
        (BenchCaseStatus::Failed, _) => {}
        (_, BenchCaseStatus::Failed) => *worst = case,
        _ => {
            worst.max_error_over_max_reference =
                worst.max_error_over_max_reference.max(case.max_error_over_max_reference);
            worst.relative_l2_error = worst.relative_l2_error.max(case.relative_l2_error);
            worst.repeated_launch_is_bit_equal = worst
                .repeated_launch_is_bit_equal
                .zip(case.repeated_launch_is_bit_equal)
                .map(|(a, b)| a && b);
        }
    }
}
