//! How the outputs of a case compared with the reference, as stored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::verify::{self, Bounds, Errors, OutputComparison};
use crate::workload::Tolerance;

/// How an output compared, as stored.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VerificationRecord {
    /// Largest |out - ref| over the largest |ref|.
    pub max_error: f64,
    /// ‖out - ref‖₂ / ‖ref‖₂.
    pub relative_l2: f64,
    /// Elements compared with the reference.
    pub checked: u64,
    /// Elements of the outputs.
    pub total: u64,
    /// What rounding the outputs to their dtypes may cost by itself, relative; 0 where it costs
    /// nothing, and in records from before it was told.
    #[serde(default, skip_serializing_if = "verify::is_nothing")]
    pub rounding: f64,
    /// The errors of each output, by its name, where several are compared within bounds; absent in
    /// records from before it was told.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_output: BTreeMap<String, Errors>,
    /// The errors that were allowed, of the output that is allowed the most; absent in records from
    /// before it was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<Allowed>,
    /// Hash of the outputs' bits; only in trials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// What tells the inputs from those of another seed: a hash, or [`ONE_DATA_SET`]; the hash only
    /// in trials. Absent in records from before it was told.
    ///
    /// [`ONE_DATA_SET`]: super::numerics::ONE_DATA_SET
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_set: Option<String>,
    /// The comparison after timing; absent in records of versions that made none, and where nothing
    /// was timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<AfterTiming>,
    /// The run whose comparison with the reference holds here, because the outputs have the same
    /// bits; absent where this run compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl VerificationRecord {
    /// What deserialising does not enforce.
    ///
    /// # Errors
    /// A fragment that says what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        let Self { checked, total, .. } = *self;
        if checked > total {
            return Err(format!("{checked} elements compared of {total}"));
        }
        let after = self.after.map(|after| [after.max_error, after.relative_l2]);
        let [max_error, relative_l2] = after.unwrap_or_default();
        let after = Errors { max_error, relative_l2, rounding: 0.0 };
        let mut all = self.by_output.values().copied().chain([self.errors(), after]);
        all.try_for_each(|errors| errors.validate())
    }

    /// The errors of all outputs.
    pub const fn errors(&self) -> Errors {
        let Self { max_error, relative_l2, rounding, .. } = *self;
        Errors { max_error, relative_l2, rounding }
    }
}

/// The errors that were allowed: of the workload's tolerance, and of the precision that it
/// declares.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Allowed {
    /// Largest |out - ref| over the largest |ref|.
    pub max_error: f64,
    /// ‖out - ref‖₂ / ‖ref‖₂.
    pub relative_l2: f64,
}

impl From<&Bounds> for Allowed {
    fn from(bounds: &Bounds) -> Self {
        let Tolerance { max_error, relative_l2 } = bounds.allowed();
        Self { max_error, relative_l2 }
    }
}

/// The outputs of what was timed, run once more after timing, against the reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AfterTiming {
    /// What was done to the inputs before.
    pub inputs: InputChange,
    /// Largest |out - ref| over the largest |ref|; 0 where the bits of verified outputs came again.
    pub max_error: f64,
    /// ‖out - ref‖₂ / ‖ref‖₂; 0 likewise.
    pub relative_l2: f64,
}

impl AfterTiming {
    /// The bits of verified outputs of the same inputs.
    pub const SAME_BITS: Self =
        Self { inputs: InputChange::Same, max_error: 0.0, relative_l2: 0.0 };
}

/// What was done to the inputs between timing and the comparison after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputChange {
    /// Rolled along an axis on which the computation does not depend.
    Rolled,
    /// Negated where the computation is linear.
    Negated,
    /// Drawn anew.
    Redrawn,
    /// Nothing: a remembered result would pass.
    Same,
}

impl InputChange {
    /// "with inputs rolled".
    pub const fn words(self) -> &'static str {
        match self {
            Self::Rolled => "with inputs rolled",
            Self::Negated => "with inputs negated",
            Self::Redrawn => "with inputs drawn anew",
            Self::Same => "with the same inputs",
        }
    }
}

impl From<OutputComparison> for VerificationRecord {
    fn from(comparison: OutputComparison) -> Self {
        let OutputComparison { errors, by_output, checked, total } = comparison;
        let Errors { max_error, relative_l2, rounding } = errors;
        Self { max_error, relative_l2, rounding, by_output, checked, total, ..Self::default() }
    }
}
