//! Records the errors of outputs relative to the reference, by seed. Recorded output errors show
//! whether a change of the code lost accuracy. This module does not decide whether accuracy was
//! lost; the module `gate` has the thresholds.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::case_run::round_to_significant_digits_of;
use super::files::file::RecordFileType;
use super::files::text;
use super::origin::environment::RunEnvironment;
use super::origin::provenance::CommitAndChanges;
use super::run::OutputVerificationRecord;
use crate::verify::ErrorsRelativeToReference;

/// Name of the data set of a case whose inputs or reference are equal for all seeds.
pub const DATA_SET_EQUAL_FOR_ALL_SEEDS: &str = "only";

/// For each case, the data sets with which it was verified; seeds that give equal inputs count as
/// one data set.
#[derive(Debug, Default)]
pub struct VerifiedDataSetsByCase(BTreeMap<String, BTreeSet<String>>);

impl VerifiedDataSetsByCase {
    /// Records that a case was verified with a data set, and returns whether this data set is new
    /// for the case. A verification that reports no data set always counts as new.
    pub fn record_data_set_and_check_if_new(&mut self, case: &str, data_set: Option<&str>) -> bool {
        let Some(data_set) = data_set else { return true };
        self.0.entry(case.to_owned()).or_default().insert(data_set.to_owned())
    }

    /// Returns whether a case has equal data for all seeds, such as golden tensors.
    pub fn has_equal_data_for_all_seeds(&self, case: &str) -> bool {
        self.0.get(case).is_some_and(|sets| sets.len() == 1)
    }
}

/// Output errors of a bench executable's cases for several seeds, recorded without timing by
/// `kernelgate verify`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutputErrorsOfExecutable {
    /// Name of the bench executable.
    pub bench: String,
    /// Time at which the first seed was verified, RFC 3339, UTC.
    #[serde(rename = "started")]
    pub start_time: String,
    /// Environment of the process.
    pub environment: RunEnvironment,
    /// Commit of the measured code, and whether files differed from it.
    pub provenance: CommitAndChanges,
    /// Hash of the bench executable's content.
    #[serde(rename = "executable")]
    pub executable_hash: String,
    /// Errors by case.
    pub cases: BTreeMap<String, CaseOutputErrorsBySeed>,
}

impl OutputErrorsOfExecutable {
    /// Returns the output errors of a case. An implementation is verified once for all cache
    /// states, so a case without recorded errors gets the errors of the same case in the other
    /// cache state.
    pub fn output_errors_of_case(&self, id: &str) -> Option<&CaseOutputErrorsBySeed> {
        let without_cache = |id: &str| id.rfind('/').map_or(0, |at| at + 1);
        let stem = &id[..without_cache(id)];
        let sibling = |(other, _): &(&String, &CaseOutputErrorsBySeed)| {
            !stem.is_empty() && other[..without_cache(other)] == *stem
        };
        self.cases.get(id).or_else(|| Some(self.cases.iter().find(sibling)?.1))
    }
}

/// Output errors of one case; each list has one entry for each seed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "CaseOutputErrorsInFile", into = "CaseOutputErrorsInFile")]
pub struct CaseOutputErrorsBySeed {
    /// Seeds from which the inputs were generated, in ascending order.
    pub seeds: Vec<u64>,
    /// Errors over all outputs.
    pub errors: OutputErrorListsBySeed,
    /// Errors of each output by name, if several outputs have error bounds and were compared for
    /// every seed.
    pub by_output: BTreeMap<String, OutputErrorListsBySeed>,
    /// Whether all seeds give equal inputs or an equal reference, so that the errors of one seed
    /// stand for all.
    #[serde(rename = "one_data_set")]
    pub seeds_have_equal_data: bool,
}

/// File format of [`CaseOutputErrorsBySeed`].
#[derive(Serialize, Deserialize)]
struct CaseOutputErrorsInFile {
    seeds: Vec<u64>,
    max_error: Vec<f64>,
    relative_l2: Vec<f64>,
    #[serde(default)]
    #[serde(rename = "rounding")]
    rounding_error: f64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    by_output: BTreeMap<String, OutputErrorListsBySeed>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "one_data_set")]
    seeds_have_equal_data: bool,
}

impl From<CaseOutputErrorsBySeed> for CaseOutputErrorsInFile {
    fn from(numerics: CaseOutputErrorsBySeed) -> Self {
        let CaseOutputErrorsBySeed { seeds, errors, by_output, seeds_have_equal_data } = numerics;
        let OutputErrorListsBySeed { max_error, relative_l2, rounding_error } = errors;
        Self { seeds, max_error, relative_l2, rounding_error, by_output, seeds_have_equal_data }
    }
}

impl From<CaseOutputErrorsInFile> for CaseOutputErrorsBySeed {
    fn from(wire: CaseOutputErrorsInFile) -> Self {
        let CaseOutputErrorsInFile {
            seeds,
            max_error,
            relative_l2,
            rounding_error,
            by_output,
            seeds_have_equal_data,
        } = wire;
        let errors = OutputErrorListsBySeed { max_error, relative_l2, rounding_error };
        Self { seeds, errors, by_output, seeds_have_equal_data }
    }
}

/// Output errors for several seeds, rounded to three significant digits; both lists have one entry
/// per seed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OutputErrorListsBySeed {
    /// Largest |out - ref| divided by the largest |ref|, one entry for each seed.
    pub max_error: Vec<f64>,
    /// Relative L2 error ‖out - ref‖₂ / ‖ref‖₂, one entry for each seed.
    pub relative_l2: Vec<f64>,
    /// Relative error that only rounding the reference to the outputs' dtype causes. Output errors
    /// below this value can come from rounding alone.
    #[serde(default)]
    #[serde(rename = "rounding")]
    pub rounding_error: f64,
}

impl OutputErrorListsBySeed {
    /// Returns the output errors of the seed at this position of the lists.
    pub fn errors_at(&self, index: usize) -> ErrorsRelativeToReference {
        let [max_error, relative_l2] =
            [&self.max_error, &self.relative_l2].map(|errors| round_output_error(errors[index]));
        ErrorsRelativeToReference { max_error, relative_l2, rounding_error: self.rounding_error }
    }

    /// Stores output errors at this position of the lists: replaces those of the seed, or inserts
    /// new ones.
    fn replace_or_insert_errors_at(
        &mut self,
        index: usize,
        in_place: bool,
        errors: ErrorsRelativeToReference,
    ) {
        let lists =
            [(&mut self.max_error, errors.max_error), (&mut self.relative_l2, errors.relative_l2)];
        for (list, error) in lists {
            if in_place {
                list[index] = round_output_error(error);
            } else {
                list.insert(index, round_output_error(error));
            }
        }
        self.rounding_error = errors.rounding_error;
    }

    fn check_error_lists_plausible(&self, seeds: usize) -> Result<(), String> {
        let [max, l2] = [self.max_error.len(), self.relative_l2.len()];
        if seeds != max || seeds != l2 {
            return Err(format!("{seeds} seeds against {max} and {l2} errors"));
        }
        // The rounding error is checked even if the lists are empty.
        ErrorsRelativeToReference {
            rounding_error: self.rounding_error,
            ..ErrorsRelativeToReference::default()
        }
        .check_errors_plausible()?;
        let each = self.max_error.iter().zip(&self.relative_l2);
        each.map(|(&max_error, &relative_l2)| ErrorsRelativeToReference {
            max_error,
            relative_l2,
            rounding_error: 0.0,
        })
        .try_for_each(|errors| errors.check_errors_plausible())
    }
}

/// Rounds an error to three significant digits, because further digits mean nothing and baselines
/// are committed.
fn round_output_error(error: f64) -> f64 {
    round_to_significant_digits_of(error, 3)
}

impl CaseOutputErrorsBySeed {
    /// Replaces or adds the output errors of a seed: over all outputs, and of each output. The
    /// errors of single outputs are kept only if every seed has errors for the same outputs.
    pub fn set_errors_of_seed(
        &mut self,
        seed: u64,
        errors: ErrorsRelativeToReference,
        by_output: &BTreeMap<String, ErrorsRelativeToReference>,
    ) {
        let at = self.seeds.partition_point(|there| *there < seed);
        let in_place = self.seeds.get(at) == Some(&seed);
        let only = self.seeds.len() == usize::from(in_place);
        if only {
            *self = Self { seeds_have_equal_data: self.seeds_have_equal_data, ..Self::default() };
        } else if !self.by_output.keys().eq(by_output.keys()) {
            self.by_output.clear();
        }
        let in_place = in_place && !only;
        if !in_place {
            self.seeds.insert(at.min(self.seeds.len()), seed);
        }
        self.errors.replace_or_insert_errors_at(at, in_place, errors);
        for (name, errors) in by_output {
            if only || self.by_output.contains_key(name) {
                self.by_output
                    .entry(name.clone())
                    .or_default()
                    .replace_or_insert_errors_at(at, in_place, *errors);
            }
        }
    }

    /// Adds the output errors of a case that was compared with the reference, and notes whether the
    /// inputs depend on the seed. A case that was never compared adds nothing, because its error is
    /// not 0.
    pub fn add_errors_of_verified_case(
        &mut self,
        seed: u64,
        verification: &OutputVerificationRecord,
    ) {
        if !verification.verification_extent().is_compared_with_reference() {
            return;
        }
        self.seeds_have_equal_data |=
            verification.verified_data_set.as_deref() == Some(DATA_SET_EQUAL_FOR_ALL_SEEDS);
        self.set_errors_of_seed(
            seed,
            verification.errors_of_all_outputs(),
            &verification.by_output,
        );
    }

    /// Adds the output errors of all seeds of another record; the errors of seeds in both records
    /// are replaced.
    pub fn add_errors_of_all_seeds(&mut self, other: &Self) {
        self.seeds_have_equal_data |= other.seeds_have_equal_data;
        for (index, seed) in other.seeds.iter().enumerate() {
            let each = other.by_output.iter();
            let by_output =
                each.map(|(name, errors)| (name.clone(), errors.errors_at(index))).collect();
            self.set_errors_of_seed(*seed, other.errors.errors_at(index), &by_output);
        }
    }

    /// Returns the position of a seed in the lists of output errors.
    pub fn position_of_seed(&self, seed: u64) -> Option<usize> {
        self.seeds.binary_search(&seed).ok()
    }

    /// Fails if an output error is implausible, or the lists do not have one entry for each seed.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_output_errors_plausible(&self) -> Result<(), String> {
        let seeds = self.seeds.len();
        self.errors.check_error_lists_plausible(seeds)?;
        for (name, errors) in &self.by_output {
            errors
                .check_error_lists_plausible(seeds)
                .map_err(|why| format!("output {name}: {why}"))?;
        }
        if !self.seeds.is_sorted_by(|a, b| a < b) {
            return Err("seeds that are not in order".to_owned());
        }
        Ok(())
    }
}

impl RecordFileType for OutputErrorsOfExecutable {
    const SCHEMA: &'static str = "kernelgate-errors";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "record of errors";

    fn check_record_plausible(&self) -> Result<(), String> {
        // The bench's name is checked, because it becomes a file name.
        text::check_is_plain_name(&self.bench).map_err(|problem| format!("bench {problem}"))?;
        text::check_is_rfc3339_time(&self.start_time)
            .map_err(|problem| format!("started: {problem}"))?;
        self.environment.check_environment_plausible()?;
        self.cases.iter().try_for_each(|(id, case)| {
            case.check_output_errors_plausible().map_err(|why| format!("case {id}: {why}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_with_equal_inputs_count_as_one_data_set() {
        let mut sets = VerifiedDataSetsByCase::default();
        let mut is_new = |case: &str, set| sets.record_data_set_and_check_if_new(case, set);
        assert!(is_new("a", Some("1")) && is_new("b", Some("1")) && is_new("c", None));
        assert!(!is_new("a", Some("1")) && is_new("b", Some("2")) && is_new("c", None));
        assert!(!is_new("b", Some("1")));
        assert_eq!(
            ["a", "b", "c"].map(|case| sets.has_equal_data_for_all_seeds(case)),
            [true, false, false]
        );
        let mut numerics = CaseOutputErrorsBySeed::default();
        let compared = || OutputVerificationRecord {
            compared_elements: 1,
            total_elements: 1,
            ..Default::default()
        };
        numerics.add_errors_of_verified_case(1, &compared());
        assert!(!numerics.seeds_have_equal_data);
        let data_set = Some(DATA_SET_EQUAL_FOR_ALL_SEEDS.to_owned());
        numerics.add_errors_of_verified_case(
            1,
            &OutputVerificationRecord { verified_data_set: data_set, ..compared() },
        );
        assert!(numerics.seeds_have_equal_data && numerics.seeds == [1]);
    }

    #[test]
    fn outputs_that_were_not_compared_get_no_recorded_errors() {
        let mut numerics = CaseOutputErrorsBySeed::default();
        numerics.add_errors_of_verified_case(
            1,
            &OutputVerificationRecord { total_elements: 4, ..Default::default() },
        );
        let with_base = OutputVerificationRecord {
            compared_elements: 4,
            total_elements: 4,
            compared_with_base: true,
            ..Default::default()
        };
        numerics.add_errors_of_verified_case(1, &with_base);
        assert_eq!(numerics, CaseOutputErrorsBySeed::default());
    }

    #[test]
    fn errors_of_single_outputs_need_errors_for_every_seed() {
        let errors = |relative_l2: f64| ErrorsRelativeToReference {
            max_error: 1e-3,
            relative_l2,
            rounding_error: 0.0,
        };
        let both = |a: f64, b: f64| {
            [("a", a), ("b", b)].map(|(name, error)| (name.to_owned(), errors(error))).into()
        };
        let mut numerics = CaseOutputErrorsBySeed::default();
        numerics.set_errors_of_seed(2, errors(0.123_456), &both(0.123_456, 1e-9));
        numerics.set_errors_of_seed(1, errors(0.2), &both(0.2, 0.1));
        // New errors for a recorded seed replace the earlier errors.
        numerics.set_errors_of_seed(1, errors(0.3), &both(0.3, 0.2));
        assert_eq!(numerics.seeds, [1, 2]);
        assert_eq!(numerics.errors.relative_l2, [0.3, 0.123]);
        assert_eq!(numerics.by_output["b"].relative_l2, [0.2, 1e-9]);
        assert_eq!(numerics.check_output_errors_plausible(), Ok(()));
        let text = serde_json::to_string(&numerics).unwrap();
        assert_eq!(serde_json::from_str::<CaseOutputErrorsBySeed>(&text).unwrap(), numerics);
        let mut short = numerics.clone();
        short.by_output.get_mut("b").unwrap().max_error.pop();
        let why = "output b: 2 seeds against 1 and 2 errors".to_owned();
        assert_eq!(short.check_output_errors_plausible(), Err(why));
        let mut copied = CaseOutputErrorsBySeed::default();
        copied.add_errors_of_all_seeds(&numerics);
        assert_eq!(copied, numerics);
        // A build with one output reports only the errors over all outputs.
        numerics.set_errors_of_seed(3, errors(0.4), &BTreeMap::new());
        numerics.set_errors_of_seed(4, errors(0.4), &both(0.4, 0.2));
        assert_eq!((numerics.seeds.len(), numerics.by_output.len()), (4, 0));
        assert_eq!(numerics.check_output_errors_plausible(), Ok(()));
        // Another build verifies the only seed again and reports the errors of each output.
        let mut only = CaseOutputErrorsBySeed::default();
        only.set_errors_of_seed(1, errors(0.2), &BTreeMap::new());
        only.set_errors_of_seed(1, errors(0.3), &both(0.3, 0.2));
        assert_eq!((only.seeds.len(), only.by_output.len()), (1, 2));
        assert_eq!(only.check_output_errors_plausible(), Ok(()));
    }
}
