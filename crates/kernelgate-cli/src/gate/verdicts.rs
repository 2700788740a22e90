//! The outcome of `gate` or `compare`: a judgement for each case, other findings, and the exit
//! reason. The methods `gate` (baseline) and `compare` (two builds) each add facts of their own.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::costs::LaunchCostGrowthOfCase;
use super::judgement::CaseJudgement;
use super::limits::CaseTimeAndErrorLimits;
use super::outputs::numerics::OutputErrorReport;
use super::outputs::verification::VerificationLoss;
use super::rules::GateRulesEffectReport;
use super::verdict::VerdictOnCase;
use kernelgate::exit::ProcessExitReason;
use kernelgate_cuda::CaseFailureReason;

/// The judged cases and all other findings of `gate` or `compare`, with the facts that only that
/// method has.
#[derive(Debug, Clone, PartialEq)]
pub struct VerdictsAndFindings<F> {
    pub device: String,
    /// Limits of all cases that have no limits of their own.
    pub default_case_limits: CaseTimeAndErrorLimits,
    /// Judgements of the requested cases, from the worst verdict to the best, then by case id.
    pub judged_cases: Vec<CaseJudgement>,
    /// Facts that differ between base and head and forbid a comparison, each with the affected
    /// cases.
    pub refused: Vec<ComparisonRefusal>,
    /// Ids of the cases that only the head has.
    pub new_cases: Vec<String>,
    /// Cases that the base timed but the head skipped, each with the head's reason.
    pub skipped_in_head: BTreeMap<String, String>,
    /// Cases that failed in the head, each with the error.
    pub failed_in_head: BTreeMap<String, CaseFailureReason>,
    /// Ids of the judged cases whose outputs neither base nor head compared with a reference.
    pub unverified_cases: Vec<String>,
    /// Cases whose outputs the head verified less completely than the base.
    pub verification_losses: Vec<VerificationLoss>,
    /// Comparison of the output errors of base and head against the reference.
    pub numerics: OutputErrorReport,
    /// Costs of a launch other than time that grew by more than the package's rules allow.
    pub grown_costs: Vec<LaunchCostGrowthOfCase>,
    /// Effects of the package's `kernelgate.toml` on the outcome of `gate` or `compare`.
    pub rules: GateRulesEffectReport,
    /// Facts of the outcome that only `gate` or only `compare` has.
    pub method_facts: F,
}

/// How the facts that only `gate` or only `compare` has affect the exit reason.
pub trait ExitFactsOfGateOrCompare: Sized {
    /// Returns whether a fact other than the judged cases counts as a regression.
    fn has_regression_beside_cases(_: &VerdictsAndFindings<Self>) -> bool {
        false
    }

    /// Returns whether something that the user requested was not measured.
    fn lacks_requested_measurement(verdicts: &VerdictsAndFindings<Self>) -> bool;

    /// Returns the number of cases that are known to be unchanged without being timed.
    fn number_of_cases_unchanged_without_timing(&self) -> usize {
        0
    }
}

/// A fact that differs between base and head, because of which the comparison of some cases was
/// refused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ComparisonRefusal {
    /// Name of the differing field, as in the record files.
    #[serde(rename = "field")]
    pub differing_field: String,
    /// The base's value of the differing field.
    #[serde(rename = "base")]
    pub base_value: String,
    /// The head's value of the differing field.
    #[serde(rename = "head")]
    pub head_value: String,
    /// Ids of the cases whose comparison was refused because of the differing field.
    #[serde(rename = "cases")]
    pub affected_cases: Vec<String>,
}

/// Differing fields that forbid a comparison, with the values of base and head, and the affected
/// cases.
pub type CasesByDifferingField = BTreeMap<(String, String, String), BTreeSet<String>>;

impl ComparisonRefusal {
    /// Makes one refusal for each differing field, with the affected cases.
    pub fn from_differing_fields(fields: CasesByDifferingField) -> Vec<ComparisonRefusal> {
        let refusal = |((field, base, head), cases): (_, BTreeSet<String>)| ComparisonRefusal {
            differing_field: field,
            base_value: base,
            head_value: head,
            affected_cases: cases.into_iter().collect(),
        };
        fields.into_iter().map(refusal).collect()
    }
}

impl<F> VerdictsAndFindings<F> {
    /// Returns the number of judged cases with the given verdict.
    pub fn count_cases_with_verdict(&self, verdict: VerdictOnCase) -> usize {
        self.judged_cases.iter().filter(|judged| judged.verdict == verdict).count()
    }

    /// The judged cases.
    pub fn judged_case_ids(&self) -> Vec<&str> {
        self.judged_cases.iter().map(|judged| judged.case_id.as_str()).collect()
    }

    /// Sorts the judgements: the worst verdict first, then by case id.
    pub fn sort_judgements(&mut self) {
        self.judged_cases
            .sort_by(|a, b| a.verdict.cmp(&b.verdict).then_with(|| a.case_id.cmp(&b.case_id)));
    }
}

impl<F: ExitFactsOfGateOrCompare> VerdictsAndFindings<F> {
    /// Returns whether no case was judged, and no case is known to be unchanged without timing.
    pub fn has_no_case_judged_or_unchanged(&self) -> bool {
        self.judged_cases.is_empty()
            && self.method_facts.number_of_cases_unchanged_without_timing() == 0
    }

    /// Returns the exit reason: a refusal takes precedence over a regression, and a regression over
    /// an inconclusive outcome. If no case was judged, the exit reason is inconclusive.
    pub fn exit_reason(&self) -> ProcessExitReason {
        if !self.refused.is_empty() {
            ProcessExitReason::ResultsNotComparable
        } else if self.count_cases_with_verdict(VerdictOnCase::Regressed) > 0
            || !self.failed_in_head.is_empty()
            || F::has_regression_beside_cases(self)
            || self.numerics.shown_accuracy_losses().next().is_some()
            || self.grown_costs.iter().any(LaunchCostGrowthOfCase::is_growth_established)
            || self.verification_losses.iter().any(VerificationLoss::is_complete_loss)
        {
            ProcessExitReason::Regression
        } else if self.count_cases_with_verdict(VerdictOnCase::Inconclusive) > 0
            || self.has_no_case_judged_or_unchanged()
            || F::lacks_requested_measurement(self)
            || self.numerics.suspected_accuracy_losses().next().is_some()
            || !self.grown_costs.is_empty()
            || !self.verification_losses.is_empty()
            || !self.skipped_in_head.is_empty()
            || !self.rules.notes_on_unjudged_limits.is_empty()
        {
            ProcessExitReason::Inconclusive
        } else {
            ProcessExitReason::Success
        }
    }
}
