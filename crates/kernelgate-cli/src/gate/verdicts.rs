//! The outcome of `gate` or `compare`: a judgement for each case, other findings, and the exit
//! code. Each method of judgement (gate, compare) adds its own facts.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::costs::CostGrowth;
use super::judgement::Judgement;
use super::limits::CaseLimits;
use super::outputs::numerics::NumericsReport;
use super::outputs::verification::VerificationLoss;
use super::rules::RulesReport;
use super::verdict::Verdict;
use kernelgate::exit::ExitReason;
use kernelgate_cuda::CaseFailure;

/// The judged cases, with facts of the method that judged them.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdicts<F> {
    pub device: String,
    /// Limits of the cases that have no limits of their own.
    pub limits: CaseLimits,
    /// Requested cases that could be judged, worst verdict first, then by id.
    pub judged: Vec<Judgement>,
    /// Differences that prevent a comparison, each with its cases.
    pub refused: Vec<RefusedBench>,
    /// Cases that only the head has.
    pub new: Vec<String>,
    /// Cases that the base timed and the head skipped, with the reason.
    pub skipped: BTreeMap<String, String>,
    /// Cases that failed in the head, with the error.
    pub failed: BTreeMap<String, CaseFailure>,
    /// Judged cases whose outputs are compared with nothing on either side.
    pub unverified: Vec<String>,
    /// Cases whose outputs the head verifies less completely.
    pub verification: Vec<VerificationLoss>,
    /// Output errors of base and head against the reference.
    pub numerics: NumericsReport,
    /// Costs of a launch besides time that grew by more than the package allows.
    pub costs: Vec<CostGrowth>,
    /// Effects of the package's rules on the verdicts.
    pub rules: RulesReport,
    /// Facts that only this method of judgement has.
    pub facts: F,
}

/// Effect of a method's own facts on the exit code.
pub trait ExitFacts: Sized {
    /// Whether something besides the cases is a regression.
    fn is_regression(_: &Verdicts<Self>) -> bool {
        false
    }

    /// Whether something that was requested was not measured.
    fn is_incomplete(verdicts: &Verdicts<Self>) -> bool;

    /// Cases that are known to be as fast as before without being timed.
    fn identical_case_count(&self) -> usize {
        0
    }
}

/// The reason why a case or the whole comparison was refused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RefusedBench {
    /// Field that differs, as named in the files.
    pub field: String,
    /// Value of the base.
    pub base: String,
    /// Value of the head.
    pub head: String,
    /// Cases concerned.
    pub cases: Vec<String>,
}

/// Field that forbids a comparison, its values in base and head, and the cases concerned.
pub type RefusedFields = BTreeMap<(String, String, String), BTreeSet<String>>;

impl RefusedBench {
    /// One refusal for each differing field, with its cases.
    pub fn from_fields(fields: RefusedFields) -> Vec<RefusedBench> {
        let refusal = |((field, base, head), cases): (_, BTreeSet<String>)| RefusedBench {
            field,
            base,
            head,
            cases: cases.into_iter().collect(),
        };
        fields.into_iter().map(refusal).collect()
    }
}

impl<F> Verdicts<F> {
    /// Cases with that verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.judged.iter().filter(|judged| judged.verdict == verdict).count()
    }

    /// The judged cases.
    pub fn cases(&self) -> Vec<&str> {
        self.judged.iter().map(|judged| judged.case.as_str()).collect()
    }

    /// Sorts judgements: the worst verdict first, then by id.
    pub fn sort(&mut self) {
        self.judged.sort_by(|a, b| a.verdict.cmp(&b.verdict).then_with(|| a.case.cmp(&b.case)));
    }
}

impl<F: ExitFacts> Verdicts<F> {
    /// Returns whether no case could be judged, and no case is known to be unchanged without
    /// timing.
    pub fn judged_nothing(&self) -> bool {
        self.judged.is_empty() && self.facts.identical_case_count() == 0
    }

    /// The exit code: refusal comes before regression, regression before inconclusive. Without a
    /// judged case the outcome of the comparison is inconclusive.
    pub fn exit(&self) -> ExitReason {
        if !self.refused.is_empty() {
            ExitReason::Refused
        } else if self.count(Verdict::Regressed) > 0
            || !self.failed.is_empty()
            || F::is_regression(self)
            || self.numerics.losses().next().is_some()
            || self.costs.iter().any(CostGrowth::is_shown)
            || self.verification.iter().any(VerificationLoss::is_failure)
        {
            ExitReason::Regression
        } else if self.count(Verdict::Inconclusive) > 0
            || self.judged_nothing()
            || F::is_incomplete(self)
            || self.numerics.suspected_growth().next().is_some()
            || !self.costs.is_empty()
            || !self.verification.is_empty()
            || !self.skipped.is_empty()
            || !self.rules.undecided.is_empty()
        {
            ExitReason::Inconclusive
        } else {
            ExitReason::Fine
        }
    }
}
