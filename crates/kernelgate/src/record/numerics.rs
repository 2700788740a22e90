//! How far outputs are from the reference, seed by seed: what tells whether a change of the code
//! lost accuracy. Deliberately absent: what counts as lost (`gate`).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::environment::Environment;
use super::file::Record;
use super::provenance::Provenance;
use super::run::VerificationRecord;
use super::text;

/// Name of the data set of a case whose inputs, or what they are compared with, do not follow the
/// seed.
pub const ONE_DATA_SET: &str = "only";

/// The data sets that cases were verified with: seeds with the same inputs are one.
#[derive(Debug, Default)]
pub struct DataSets(BTreeMap<String, BTreeSet<String>>);

impl DataSets {
    /// Notes one; whether it is another than those before. One that is not told is.
    pub fn is_new(&mut self, case: &str, data_set: Option<&str>) -> bool {
        let Some(data_set) = data_set else { return true };
        self.0.entry(case.to_owned()).or_default().insert(data_set.to_owned())
    }

    /// Whether a case had one data set in all.
    pub fn has_one(&self, case: &str) -> bool {
        self.0.get(case).is_some_and(|sets| sets.len() == 1)
    }
}

/// Errors of a bench executable's cases for several seeds, recorded without timing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Numerics {
    /// The bench binary.
    pub bench: String,
    /// When the first seed was verified, RFC 3339, UTC.
    pub started: String,
    /// Where.
    pub environment: Environment,
    /// Of which code.
    pub provenance: Provenance,
    /// Content hash of the executable.
    pub executable: String,
    /// Errors by case.
    pub cases: BTreeMap<String, CaseNumerics>,
}

impl Numerics {
    /// The errors of a case. One an implementation is verified: what is right with hot caches is
    /// right with cold ones.
    pub fn of_case(&self, id: &str) -> Option<&CaseNumerics> {
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
pub struct CaseNumerics {
    /// Seeds of the inputs, ascending.
    pub seeds: Vec<u64>,
    /// Largest |out - ref| over the largest |ref|.
    pub max_error: Vec<f64>,
    /// ‖out - ref‖₂ / ‖ref‖₂.
    pub relative_l2: Vec<f64>,
    /// What rounding the outputs to their dtype may cost by itself, relative: errors below say
    /// nothing of the computation.
    #[serde(default)]
    pub rounding: f64,
    /// Whether other seeds have the same inputs, or none that what they are compared with is of:
    /// one entry is all there can be.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub one_data_set: bool,
}

/// Errors of one seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SeedErrors {
    /// Largest |out - ref| over the largest |ref|.
    pub max_error: f64,
    /// ‖out - ref‖₂ / ‖ref‖₂.
    pub relative_l2: f64,
    /// As [`CaseNumerics::rounding`].
    pub rounding: f64,
}

impl From<&VerificationRecord> for SeedErrors {
    fn from(verification: &VerificationRecord) -> Self {
        Self {
            max_error: verification.max_error,
            relative_l2: verification.relative_l2,
            rounding: verification.rounding,
        }
    }
}

impl CaseNumerics {
    /// Takes over the errors of a seed, in place of what there was of it.
    pub fn insert(&mut self, seed: u64, errors: SeedErrors) {
        let SeedErrors { max_error, relative_l2, rounding } = errors;
        let at = self.seeds.partition_point(|there| *there < seed);
        if self.seeds.get(at) == Some(&seed) {
            (self.max_error[at], self.relative_l2[at]) = (max_error, relative_l2);
        } else {
            self.seeds.insert(at, seed);
            self.max_error.insert(at, max_error);
            self.relative_l2.insert(at, relative_l2);
        }
        self.rounding = rounding;
    }

    /// The same of a case that was verified, and whether there is more to know.
    pub fn insert_verified(&mut self, seed: u64, verification: &VerificationRecord) {
        self.one_data_set |= verification.data_set.as_deref() == Some(ONE_DATA_SET);
        self.insert(seed, verification.into());
    }

    /// The errors of each seed.
    pub fn iter(&self) -> impl Iterator<Item = (u64, SeedErrors)> {
        let errors = self.max_error.iter().zip(&self.relative_l2);
        self.seeds.iter().zip(errors).map(|(&seed, (&max_error, &relative_l2))| {
            (seed, SeedErrors { max_error, relative_l2, rounding: self.rounding })
        })
    }

    /// The errors of a seed.
    pub fn of(&self, seed: u64) -> Option<SeedErrors> {
        self.iter().find(|(there, _)| *there == seed).map(|(_, errors)| errors)
    }

    /// What deserialising does not enforce.
    ///
    /// # Errors
    /// A fragment that says what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        let [seeds, max, l2] = [self.seeds.len(), self.max_error.len(), self.relative_l2.len()];
        if seeds != max || seeds != l2 {
            return Err(format!("{seeds} seeds against {max} and {l2} errors"));
        }
        if !self.seeds.is_sorted_by(|a, b| a < b) {
            return Err("seeds that are not in order".to_owned());
        }
        let all = self.max_error.iter().chain(&self.relative_l2).chain([&self.rounding]);
        match all.into_iter().find(|error| !(error.is_finite() && **error >= 0.0)) {
            Some(error) => Err(format!("an error of {error}")),
            None => Ok(()),
        }
    }
}

impl Record for Numerics {
    const SCHEMA: &'static str = "kernelgate.numerics";
    const VERSION: u64 = 1;
    const KIND: &'static str = "record of errors";

    fn validate(&self) -> Result<(), String> {
        // It names a file.
        text::check_name(&self.bench).map_err(|problem| format!("bench {problem}"))?;
        text::check_time(&self.started).map_err(|problem| format!("started: {problem}"))?;
        self.cases
            .iter()
            .try_for_each(|(id, case)| case.validate().map_err(|why| format!("case {id}: {why}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_with_the_same_inputs_are_one_data_set() {
        let mut sets = DataSets::default();
        let mut is_new = |case: &str, set| sets.is_new(case, set);
        assert!(is_new("a", Some("1")) && is_new("b", Some("1")) && is_new("c", None));
        assert!(!is_new("a", Some("1")) && is_new("b", Some("2")) && is_new("c", None));
        assert!(!is_new("b", Some("1")));
        assert_eq!(["a", "b", "c"].map(|case| sets.has_one(case)), [true, false, false]);
        let mut numerics = CaseNumerics::default();
        numerics.insert_verified(1, &VerificationRecord::default());
        assert!(!numerics.one_data_set);
        let data_set = Some(ONE_DATA_SET.to_owned());
        numerics.insert_verified(1, &VerificationRecord { data_set, ..Default::default() });
        assert!(numerics.one_data_set && numerics.seeds == [1]);
        // Files from before.
        let older = r#"{"seeds":[1],"max_error":[0.0],"relative_l2":[0.0]}"#;
        assert!(!serde_json::from_str::<CaseNumerics>(older).unwrap().one_data_set);
    }
}
