//! The comparison of one shard, as a file, and the verdicts of all shards together.
//!
//! A shard keeps all its times, and the verdicts are computed from the times of all shards. Each
//! shard divides its error rates among the cases of the whole plan, so that all shards together
//! have the false-alarm rate of one comparison. Deliberately absent: which files of a shard count,
//! and whether the cards of the shards are equally fast (`fleet`).

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::calibration::{BlockSeries, first_differing_field, first_differing_name};
use super::comparison::{BuildFacts, Comparison, ComparisonRound, CriterionOnlyBench};
use super::costs::CostGrowth;
use super::inconclusive_reason::InconclusiveReason;
use super::judgement::Judgement;
use super::limits::CaseLimits;
use super::outputs::numerics::NumericsReport;
use super::outputs::verification::VerificationLoss;
use super::paired::{BlocksByCase, ErrorRateFamily, PairedOutcome, TestPlan, decide_cases};
use super::rules::RulesReport;
use super::verdicts::{RefusedBench, RefusedFields};
use kernelgate::measure::anchors::AnchorRecord;
use kernelgate::record::file::RecordType;
use kernelgate::record::{Environment, Shard, text};
use kernelgate_cuda::CaseFailure;

/// Record of the comparison of one shard's cases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ComparisonShard {
    /// The shard.
    pub shard: Shard,
    /// Hash of all cases of both builds: equal in all shards of one plan.
    pub plan: String,
    /// Number of cases of all shards together, by which each shard divides its error rates.
    pub planned: usize,
    /// End time of the comparison, RFC 3339, UTC.
    pub ended: String,
    /// Device and build.
    pub environment: Environment,
    /// Anchors: rates of fixed work on the device of the shard.
    pub anchors: Option<AnchorRecord>,
    /// Facts that shards of one comparison share, by name: settings, limits, executables.
    pub identity: BTreeMap<String, String>,
    /// Commits of base and head, if both were built from a checkout.
    pub sources: Option<[String; 2]>,
    /// Limits of each case.
    pub limits: BTreeMap<String, CaseLimits>,
    /// All times of the first round, by case.
    pub first: BTreeMap<String, BlockSeries>,
    /// Every time of the round that confirms, by case.
    pub second: BTreeMap<String, BlockSeries>,
    /// Errors that kept a case from being measured to the end.
    pub errors: BTreeMap<String, Vec<InconclusiveReason>>,
    /// All results except the verdicts, which are computed from the times.
    #[serde(with = "ShardFindings")]
    pub findings: Comparison,
}

/// Form of a comparison in the file, without verdicts; fields as in
/// [`Verdicts`](super::verdicts::Verdicts).
#[derive(Serialize, Deserialize)]
#[serde(remote = "Comparison")]
struct ShardFindings {
    device: String,
    limits: CaseLimits,
    #[serde(skip)]
    judged: Vec<Judgement>,
    refused: Vec<RefusedBench>,
    new: Vec<String>,
    skipped: BTreeMap<String, String>,
    failed: BTreeMap<String, CaseFailure>,
    unverified: Vec<String>,
    verification: Vec<VerificationLoss>,
    numerics: NumericsReport,
    costs: Vec<CostGrowth>,
    rules: RulesReport,
    facts: BuildFacts,
}

impl ComparisonShard {
    /// Prefixes of the executables' hashes in [`Self::identity`], for base and head.
    const SIDE_PREFIXES: [&str; 2] = ["base ", "head "];

    /// Stores the limits, the errors and the findings of a comparison.
    pub fn keep(&mut self, comparison: &Comparison, limits: impl Fn(&str) -> CaseLimits) {
        for judged in &comparison.judged {
            self.limits.insert(judged.case.clone(), limits(&judged.case));
            let is_kept = |reason: &&InconclusiveReason| {
                reason.is_case_error() && !matches!(reason, InconclusiveReason::LessVerified(_))
            };
            let errors: Vec<InconclusiveReason> =
                judged.reasons.iter().filter(is_kept).cloned().collect();
            if !errors.is_empty() {
                self.errors.insert(judged.case.clone(), errors);
            }
        }
        self.first.retain(|case, _| self.limits.contains_key(case));
        self.second.retain(|case, _| self.limits.contains_key(case));
    }

    /// The first fact because of which two shards do not belong to one comparison: its name and
    /// both values.
    pub fn mismatch(&self, other: &Self) -> Option<(String, [String; 2])> {
        let facts = |shard: &Self| {
            [
                ("number of shards", shard.shard.count.to_string()),
                ("plan", shard.plan.clone()),
                ("cases of the plan", shard.planned.to_string()),
                ("power state", shard.power().to_owned()),
            ]
        };
        let of_facts = facts(self).into_iter().zip(facts(other)).find(|(one, other)| one != other);
        if let Some(((field, left), (_, right))) = of_facts {
            return Some((field.to_owned(), [left, right]));
        }
        let (plan, others) = (&self.findings.facts.plan, &other.findings.facts.plan);
        if let Some(differing) = first_differing_field("plan", plan, others) {
            return Some(differing);
        }
        if let Some(mismatch) = other.environment.mismatches(&self.environment).into_iter().next() {
            return Some((mismatch.field.to_owned(), [mismatch.base, mismatch.head]));
        }
        let (left, right) = (self.shared_identity(other), other.shared_identity(self));
        let name = first_differing_name(&left, &right)?;
        let value = |of: &BTreeMap<String, String>| of.get(&name).cloned().unwrap_or_default();
        let field = Self::SIDE_PREFIXES.iter().find_map(|side| {
            Some(format!("executable of bench {} in the {side}", name.strip_prefix(side)?))
        });
        let values = [value(&left), value(&right)];
        Some((field.map_or(name, |field| field.trim_end().to_owned()), values))
    }

    /// The power state in which an anchor was measured, "steady" or "burst", if it is recorded.
    fn power(&self) -> &'static str {
        match &self.anchors {
            Some(AnchorRecord::Measured(anchors)) => anchors.power.name(),
            _ => "unknown",
        }
    }

    /// The part of the identity that two shards must share. Executables of two shards may differ if
    /// two machines built them from the same commits.
    fn shared_identity(&self, other: &Self) -> BTreeMap<String, String> {
        let one_code = self.sources.is_some() && self.sources == other.sources;
        let is_shared = |name: &str| {
            name != "KERNELGATE_SHARD"
                && name != "KERNELGATE_DEVICE"
                && !(one_code && Self::SIDE_PREFIXES.iter().any(|side| name.starts_with(side)))
        };
        let shared = self.identity.iter().filter(|(name, _)| is_shared(name));
        shared.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// Decides a round as if it were at its end.
    fn decide(&self, round: &BTreeMap<String, BlockSeries>) -> PairedOutcome {
        let plan = self.findings.facts.plan;
        let blocks = |(case, series): (&String, &BlockSeries)| (case.clone(), series.blocks());
        let observed: BlocksByCase = round.iter().map(blocks).collect();
        let limits = |case: &str| self.limits.get(case).map_or(plan, |limits| plan.within(limits));
        decide_cases(&observed, &plan, &limits, ErrorRateFamily::Plan(self.planned), true)
    }

    /// Judges the cases of all shards.
    fn judge(&self) -> Vec<Judgement> {
        let [first, second] = [&self.first, &self.second].map(|round| self.decide(round));
        let plan: TestPlan = self.findings.facts.plan;
        let errors = |case: &str| self.errors.get(case).cloned().unwrap_or_default();
        let losses: BTreeMap<&str, &VerificationLoss> =
            self.findings.verification.iter().map(|loss| (&*loss.case, loss)).collect();
        let again: BTreeMap<&str, _> =
            second.decisions.iter().map(|decision| (&*decision.case, decision)).collect();
        let mut judged = Vec::new();
        for decision in first.decisions {
            let Some(limits) = self.limits.get(&decision.case) else { continue };
            let confirmation = again.get(&*decision.case).map(|decision| (*decision).clone());
            let errors = errors(&decision.case);
            judged.push(Judgement::from_rounds(decision, confirmation, errors, limits));
        }
        let unmeasured = self.limits.iter().filter(|(case, _)| !self.first.contains_key(*case));
        judged.extend(unmeasured.map(|(case, limits)| {
            Judgement::unmeasured(case.clone(), errors(case), &plan, limits)
        }));
        let with_loss = |judged: Judgement| match losses.get(&*judged.case) {
            Some(loss) => judged.less_verified((*loss).clone()),
            None => judged,
        };
        judged.into_iter().map(with_loss).collect()
    }
}

/// Merges the shards of a comparison in any order; `None` without a shard. All shards must belong
/// to one plan ([`ComparisonShard::mismatch`]), and each shard is given once; `missing` names the
/// absent shards.
pub fn merge(mut shards: Vec<ComparisonShard>, missing: Vec<String>) -> Option<Comparison> {
    shards.sort_by_key(|shard| shard.shard);
    let judged = shards.par_iter().flat_map_iter(ComparisonShard::judge).collect();
    let mut findings = shards.into_iter().map(|shard| shard.findings);
    let mut all = findings.next()?;
    findings.for_each(|more| all.add(more));
    all.judged = judged;
    let unmatched = std::mem::take(&mut all.rules.unmatched);
    if missing.is_empty() {
        all.rules.notes.extend(unmatched);
    }
    all.facts.missing_shards = missing;
    all.sort_and_deduplicate();
    Some(all)
}

impl Comparison {
    fn add(&mut self, other: Self) {
        self.refused.extend(other.refused);
        self.new.extend(other.new);
        self.skipped.extend(other.skipped);
        self.failed.extend(other.failed);
        self.unverified.extend(other.unverified);
        self.verification.extend(other.verification);
        self.costs.extend(other.costs);
        let (numerics, more) = (&mut self.numerics, other.numerics);
        numerics.compared += more.compared;
        numerics.changed += more.changed;
        numerics.changed_outputs += more.changed_outputs;
        numerics.grown.extend(more.grown);
        let (rules, more) = (&mut self.rules, other.rules);
        for ((_, cases), (_, added)) in rules.thresholds.iter_mut().zip(more.thresholds) {
            *cases += added;
        }
        rules.accepted.extend(more.accepted);
        rules.notes.extend(more.notes);
        rules.unmatched.retain(|pattern| more.unmatched.contains(pattern));
        rules.undecided.extend(more.undecided);
        add_facts(&mut self.facts, other.facts);
    }

    /// Sorts lists that come from several shards, and removes duplicates.
    fn sort_and_deduplicate(&mut self) {
        self.sort();
        let mut refused = RefusedFields::new();
        for RefusedBench { field, base, head, cases } in std::mem::take(&mut self.refused) {
            refused.entry((field, base, head)).or_default().extend(cases);
        }
        self.refused = RefusedBench::from_fields(refused);
        let facts = &mut self.facts;
        for list in [
            &mut self.new,
            &mut self.unverified,
            &mut self.rules.notes,
            &mut self.rules.undecided,
            &mut facts.removed,
            &mut facts.identical,
            &mut facts.untimed,
            &mut facts.unaffected,
        ] {
            list.sort();
            list.dedup();
        }
        self.verification.sort_by(|one, other| one.case.cmp(&other.case));
        self.numerics.grown.sort_by(|one, other| one.case.cmp(&other.case));
        self.rules.accepted.sort_by(|one, other| one.case.cmp(&other.case));
    }
}

fn add_facts(facts: &mut BuildFacts, more: BuildFacts) {
    facts.removed.extend(more.removed);
    facts.failed_in_base.extend(more.failed_in_base);
    let broken = more.broken.into_iter().filter(|broken| !facts.broken.contains(broken));
    let broken: Vec<_> = broken.collect();
    facts.broken.extend(broken);
    facts.left_alone.extend(more.left_alone);
    for bench in more.criterion {
        match facts.criterion.iter_mut().find(|it| it.bench == bench.bench) {
            Some(there) => add_bench_reasons(there, bench),
            None => facts.criterion.push(bench),
        }
    }
    facts.identical.extend(more.identical);
    facts.untimed.extend(more.untimed);
    facts.optimised &= more.optimised;
    for (index, round) in more.rounds.into_iter().enumerate() {
        match facts.rounds.get_mut(index) {
            Some(there) => {
                let ComparisonRound { blocks, processes, wall_s } = *there;
                *there = ComparisonRound {
                    blocks: blocks.max(round.blocks),
                    processes: processes + round.processes,
                    wall_s: wall_s + round.wall_s,
                };
            }
            None => facts.rounds.push(round),
        }
    }
    facts.code.extend(more.code);
    facts.explanations.extend(more.explanations);
    facts.unaffected.extend(more.unaffected);
}

fn add_bench_reasons(there: &mut CriterionOnlyBench, more: CriterionOnlyBench) {
    there.cases.extend(more.cases);
    there.cases.sort();
    there.process_s = there.process_s.max(more.process_s);
    there.overridden.extend(more.overridden);
}

impl RecordType for ComparisonShard {
    const SCHEMA: &'static str = "kernelgate-comparison-shard";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "shard of a comparison";
    const FREE_TEXT_FIELDS: &'static [&'static str] =
        &["identity", "findings", "errors", "anchors"];

    fn validate(&self) -> Result<(), String> {
        self.shard.validate()?;
        text::check_rfc3339_time(&self.ended).map_err(|problem| format!("ended: {problem}"))?;
        self.environment.validate()?;
        self.anchors.as_ref().map_or(Ok(()), AnchorRecord::validate)?;
        for (round, series) in [("first", &self.first), ("second", &self.second)] {
            for (case, series) in series {
                series.validate().map_err(|why| format!("{round}: case {case}: {why}"))?;
                if !self.limits.contains_key(case) {
                    return Err(format!("{round}: case {case} has no limits"));
                }
            }
        }
        self.limits.keys().try_for_each(|case| text::check_case_id(case))?;
        self.limits.values().chain([&self.findings.limits]).try_for_each(CaseLimits::validate)?;
        if self.planned < self.limits.len() {
            let (cases, planned) = (self.limits.len(), self.planned);
            return Err(format!("{cases} cases of a plan of {planned}"));
        }
        super::calibration::check_plan(&self.findings.facts.plan)
    }
}
