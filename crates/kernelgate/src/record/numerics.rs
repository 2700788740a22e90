//! Errors of the outputs relative to the reference, by seed. The errors show whether a change of
//! the code lost accuracy. This module has no thresholds for a loss of accuracy; `gate` has them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::case_run::round_to_digits;
use super::files::file::RecordType;
use super::files::text;
use super::origin::environment::Environment;
use super::origin::provenance::Provenance;
use super::run::VerificationRecord;
use crate::verify::OutputErrors;

/// Name of the data set of a case whose inputs or reference do not depend on the seed.
pub const CONSTANT_DATA_SET: &str = "only";

/// The data sets with which cases were verified: seeds with equal inputs are one data set.
#[derive(Debug, Default)]
pub struct DataSetsByCase(BTreeMap<String, BTreeSet<String>>);

impl DataSetsByCase {
    /// Records a data set of a case and returns whether it differs from all earlier ones. A case
    /// that reports no data set counts as new.
    pub fn is_new_data_set(&mut self, case: &str, data_set: Option<&str>) -> bool {
        let Some(data_set) = data_set else { return true };
        self.0.entry(case.to_owned()).or_default().insert(data_set.to_owned())
    }

    /// Returns whether all seeds of a case gave the same data, such as golden tensors.
    pub fn has_one_data_set(&self, case: &str) -> bool {
        self.0.get(case).is_some_and(|sets| sets.len() == 1)
    }
}

/// Errors of a bench executable's cases for several seeds, recorded without timing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Numerics {
    /// The bench binary.
    pub bench: String,
    /// Time at which the first seed was verified, RFC 3339, UTC.
    pub started: String,
    /// Environment of the process.
    pub environment: Environment,
    /// Revision of the code.
    pub provenance: Provenance,
    /// Hash of the executable's content.
    pub executable: String,
    /// Errors by case.
    pub cases: BTreeMap<String, CaseNumerics>,
}

impl Numerics {
    /// Errors of a case. An implementation is verified once for all cache states, so the errors of
    /// the other cache state are used if this case has none.
    pub fn errors_of_case(&self, id: &str) -> Option<&CaseNumerics> {
        let without_cache = |id: &str| id.rfind('/').map_or(0, |at| at + 1);
        let stem = &id[..without_cache(id)];
        let sibling = |(other, _): &(&String, &CaseNumerics)| {
            !stem.is_empty() && other[..without_cache(other)] == *stem
        };
        self.cases.get(id).or_else(|| Some(self.cases.iter().find(sibling)?.1))
    }
}

/// Errors of a case, one entry a seed in every list.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "CaseNumericsWire", into = "CaseNumericsWire")]
pub struct CaseNumerics {
    /// Seeds with which the inputs were drawn, in ascending order.
    pub seeds: Vec<u64>,
    /// Errors over all outputs.
    pub errors: SeedErrors,
    /// Errors of each output, if several outputs have error bounds and every seed has errors for
    /// them.
    pub by_output: BTreeMap<String, SeedErrors>,
    /// Whether all seeds have equal inputs or an equal reference, so that one set of errors covers
    /// them.
    pub one_data_set: bool,
}

/// [`CaseNumerics`] in a file.
#[derive(Serialize, Deserialize)]
struct CaseNumericsWire {
    seeds: Vec<u64>,
    max_error: Vec<f64>,
    relative_l2: Vec<f64>,
    #[serde(default)]
    rounding: f64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    by_output: BTreeMap<String, SeedErrors>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    one_data_set: bool,
}

impl From<CaseNumerics> for CaseNumericsWire {
    fn from(numerics: CaseNumerics) -> Self {
        let CaseNumerics { seeds, errors, by_output, one_data_set } = numerics;
        let SeedErrors { max_error, relative_l2, rounding } = errors;
        Self { seeds, max_error, relative_l2, rounding, by_output, one_data_set }
    }
}

impl From<CaseNumericsWire> for CaseNumerics {
    fn from(wire: CaseNumericsWire) -> Self {
        let CaseNumericsWire { seeds, max_error, relative_l2, rounding, by_output, one_data_set } =
            wire;
        let errors = SeedErrors { max_error, relative_l2, rounding };
        Self { seeds, errors, by_output, one_data_set }
    }
}

/// Errors of several seeds, one entry a seed in both lists, to three significant digits.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SeedErrors {
    /// Largest |out - ref| over the largest |ref|, one entry for each seed.
    pub max_error: Vec<f64>,
    /// Relative L2 error ‖out - ref‖₂ / ‖ref‖₂, one entry for each seed.
    pub relative_l2: Vec<f64>,
    /// Relative error that rounding the outputs to their dtype causes. Errors below this value come
    /// from rounding alone.
    #[serde(default)]
    pub rounding: f64,
}

impl SeedErrors {
    /// The errors for the seed at a position of the list.
    pub fn at(&self, index: usize) -> OutputErrors {
        let [max_error, relative_l2] =
            [&self.max_error, &self.relative_l2].map(|errors| round_error(errors[index]));
        OutputErrors { max_error, relative_l2, rounding: self.rounding }
    }

    /// Stores errors at an index of the lists: replaces the errors there, or inserts the new ones
    /// before them.
    fn put(&mut self, index: usize, in_place: bool, errors: OutputErrors) {
        let lists =
            [(&mut self.max_error, errors.max_error), (&mut self.relative_l2, errors.relative_l2)];
        for (list, error) in lists {
            if in_place {
                list[index] = round_error(error);
            } else {
                list.insert(index, round_error(error));
            }
        }
        self.rounding = errors.rounding;
    }

    fn validate(&self, seeds: usize) -> Result<(), String> {
        let [max, l2] = [self.max_error.len(), self.relative_l2.len()];
        if seeds != max || seeds != l2 {
            return Err(format!("{seeds} seeds against {max} and {l2} errors"));
        }
        // The rounding error is checked even if there is no seed.
        OutputErrors { rounding: self.rounding, ..OutputErrors::default() }.validate()?;
        let each = self.max_error.iter().zip(&self.relative_l2);
        each.map(|(&max_error, &relative_l2)| OutputErrors {
            max_error,
            relative_l2,
            rounding: 0.0,
        })
        .try_for_each(|errors| errors.validate())
    }
}

/// Rounds an error to three significant digits: more are not meaningful, and baselines are
/// committed.
fn round_error(error: f64) -> f64 {
    round_to_digits(error, 3)
}

impl CaseNumerics {
    /// Replaces the errors of a seed: over all outputs and of each output. Errors of single outputs
    /// are kept only if every seed has errors for the same outputs.
    pub fn insert_seed(
        &mut self,
        seed: u64,
        errors: OutputErrors,
        by_output: &BTreeMap<String, OutputErrors>,
    ) {
        let at = self.seeds.partition_point(|there| *there < seed);
        let in_place = self.seeds.get(at) == Some(&seed);
        let only = self.seeds.len() == usize::from(in_place);
        if only {
            *self = Self { one_data_set: self.one_data_set, ..Self::default() };
        } else if !self.by_output.keys().eq(by_output.keys()) {
            self.by_output.clear();
        }
        let in_place = in_place && !only;
        if !in_place {
            self.seeds.insert(at.min(self.seeds.len()), seed);
        }
        self.errors.put(at, in_place, errors);
        for (name, errors) in by_output {
            if only || self.by_output.contains_key(name) {
                self.by_output.entry(name.clone()).or_default().put(at, in_place, *errors);
            }
        }
    }

    /// Takes over the errors of a case that was compared with the reference, and whether other
    /// seeds have other inputs. Nothing of another case: "never compared" is not an error of 0.
    pub fn insert_verified_case(&mut self, seed: u64, verification: &VerificationRecord) {
        if !verification.value().is_verified() {
            return;
        }
        self.one_data_set |= verification.data_set.as_deref() == Some(CONSTANT_DATA_SET);
        self.insert_seed(seed, verification.errors(), &verification.by_output);
    }

    /// Adds the errors of another record; seeds that both records have are replaced.
    pub fn insert_all_seeds(&mut self, other: &Self) {
        self.one_data_set |= other.one_data_set;
        for (index, seed) in other.seeds.iter().enumerate() {
            let each = other.by_output.iter();
            let by_output = each.map(|(name, errors)| (name.clone(), errors.at(index))).collect();
            self.insert_seed(*seed, other.errors.at(index), &by_output);
        }
    }

    /// Returns the position of a seed in the lists of errors.
    pub fn position(&self, seed: u64) -> Option<usize> {
        self.seeds.binary_search(&seed).ok()
    }

    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        let seeds = self.seeds.len();
        self.errors.validate(seeds)?;
        for (name, errors) in &self.by_output {
            errors.validate(seeds).map_err(|why| format!("output {name}: {why}"))?;
        }
        if !self.seeds.is_sorted_by(|a, b| a < b) {
            return Err("seeds that are not in order".to_owned());
        }
        Ok(())
    }
}

impl RecordType for Numerics {
    const SCHEMA: &'static str = "kernelgate-errors";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "record of errors";

    fn validate(&self) -> Result<(), String> {
        // The bench's name becomes a file name.
        text::check_plain_name(&self.bench).map_err(|problem| format!("bench {problem}"))?;
        text::check_rfc3339_time(&self.started).map_err(|problem| format!("started: {problem}"))?;
        self.environment.validate()?;
        self.cases
            .iter()
            .try_for_each(|(id, case)| case.validate().map_err(|why| format!("case {id}: {why}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_with_equal_inputs_count_as_one_data_set() {
        let mut sets = DataSetsByCase::default();
        let mut is_new = |case: &str, set| sets.is_new_data_set(case, set);
        assert!(is_new("a", Some("1")) && is_new("b", Some("1")) && is_new("c", None));
        assert!(!is_new("a", Some("1")) && is_new("b", Some("2")) && is_new("c", None));
        assert!(!is_new("b", Some("1")));
        assert_eq!(["a", "b", "c"].map(|case| sets.has_one_data_set(case)), [true, false, false]);
        let mut numerics = CaseNumerics::default();
        let compared = || VerificationRecord { checked: 1, total: 1, ..Default::default() };
        numerics.insert_verified_case(1, &compared());
        assert!(!numerics.one_data_set);
        let data_set = Some(CONSTANT_DATA_SET.to_owned());
        numerics.insert_verified_case(1, &VerificationRecord { data_set, ..compared() });
        assert!(numerics.one_data_set && numerics.seeds == [1]);
    }

    #[test]
    fn outputs_that_were_not_compared_have_no_recorded_errors() {
        let mut numerics = CaseNumerics::default();
        numerics.insert_verified_case(1, &VerificationRecord { total: 4, ..Default::default() });
        let with_base =
            VerificationRecord { checked: 4, total: 4, with_base: true, ..Default::default() };
        numerics.insert_verified_case(1, &with_base);
        assert_eq!(numerics, CaseNumerics::default());
    }

    #[test]
    fn errors_of_single_outputs_are_kept_only_if_every_seed_has_them() {
        let errors =
            |relative_l2: f64| OutputErrors { max_error: 1e-3, relative_l2, rounding: 0.0 };
        let both = |a: f64, b: f64| {
            [("a", a), ("b", b)].map(|(name, error)| (name.to_owned(), errors(error))).into()
        };
        let mut numerics = CaseNumerics::default();
        numerics.insert_seed(2, errors(0.123_456), &both(0.123_456, 1e-9));
        numerics.insert_seed(1, errors(0.2), &both(0.2, 0.1));
        // Errors for a repeated seed replace the earlier errors.
        numerics.insert_seed(1, errors(0.3), &both(0.3, 0.2));
        assert_eq!(numerics.seeds, [1, 2]);
        assert_eq!(numerics.errors.relative_l2, [0.3, 0.123]);
        assert_eq!(numerics.by_output["b"].relative_l2, [0.2, 1e-9]);
        assert_eq!(numerics.validate(), Ok(()));
        let text = serde_json::to_string(&numerics).unwrap();
        assert_eq!(serde_json::from_str::<CaseNumerics>(&text).unwrap(), numerics);
        let mut short = numerics.clone();
        short.by_output.get_mut("b").unwrap().max_error.pop();
        let why = "output b: 2 seeds against 1 and 2 errors".to_owned();
        assert_eq!(short.validate(), Err(why));
        let mut copied = CaseNumerics::default();
        copied.insert_all_seeds(&numerics);
        assert_eq!(copied, numerics);
        // A build with one output reports only the errors over all outputs.
        numerics.insert_seed(3, errors(0.4), &BTreeMap::new());
        numerics.insert_seed(4, errors(0.4), &both(0.4, 0.2));
        assert_eq!((numerics.seeds.len(), numerics.by_output.len()), (4, 0));
        assert_eq!(numerics.validate(), Ok(()));
        // Another build measures the only seed again and reports errors of each output.
        let mut only = CaseNumerics::default();
        only.insert_seed(1, errors(0.2), &BTreeMap::new());
        only.insert_seed(1, errors(0.3), &both(0.3, 0.2));
        assert_eq!((only.seeds.len(), only.by_output.len()), (1, 2));
        assert_eq!(only.validate(), Ok(()));
    }
}
