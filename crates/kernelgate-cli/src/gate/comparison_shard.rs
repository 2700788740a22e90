//! The record of a comparison's shard in a file, and the merge of all shards' records into the
//! verdicts of the whole comparison.
//!
//! A comparison shard's record keeps all measured times, from which the merge computes the
//! verdicts. Each shard divides its error rates by the number of cases of all shards, so that the
//! merged comparison has the false-alarm rate of an undivided one. The module `fleet` decides which
//! shard records are merged and whether the shards' cards are equally fast.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::calibration::{CaseBlocksAsColumns, first_differing_field, first_differing_name};
use super::comparison::{
    BuildComparisonFacts, Comparison, ComparisonRoundCounts, CriterionOnlyBench,
};
use super::costs::CostGrowthOfCase;
use super::inconclusive_reason::InconclusiveReason;
use super::judgement::CaseJudgement;
use super::limits::CaseLimits;
use super::outputs::numerics::OutputErrorReport;
use super::outputs::verification::VerificationLoss;
use super::paired::{
    ComparisonTestPlan, ErrorRateFamily, PairedDecisionsOfRound, TimedBlocksByCase,
    decide_cases_with_own_thresholds,
};
use super::rules::RulesEffectReport;
use super::verdicts::{CasesByDifferingField, ComparisonRefusal};
use kernelgate::measure::anchors::ShardAnchorRecord;
use kernelgate::record::file::RecordFileType;
use kernelgate::record::{RunEnvironment, ShardOfWork, text};
use kernelgate_cuda::CaseFailureReason;

/// Record of the comparison of one shard's cases, which `kernelgate merge` reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ComparisonShardRecord {
    /// The shard of the work that this record covers.
    pub shard: ShardOfWork,
    /// Hash of the list of all cases of both builds; it is equal in all shards of one comparison.
    pub plan: String,
    /// Number of cases of all shards together, by which each shard divides its error rates.
    pub planned: usize,
    /// End time of the shard's comparison, RFC 3339, UTC.
    pub ended: String,
    /// Device and build with which the record was measured.
    pub environment: RunEnvironment,
    /// Anchors: rates of fixed work, measured on the device of this shard.
    pub anchors: Option<ShardAnchorRecord>,
    /// Facts that all shards of one comparison share, by name: settings, limits, executables.
    pub identity: BTreeMap<String, String>,
    /// Commits of base (first) and head (second), if both were built from a checkout.
    pub sources: Option<[String; 2]>,
    /// Limits of each case.
    pub limits: BTreeMap<String, CaseLimits>,
    /// All measured times of the first round, by case.
    pub first: BTreeMap<String, CaseBlocksAsColumns>,
    /// All measured times of the second round, which confirms regressions, by case.
    pub second: BTreeMap<String, CaseBlocksAsColumns>,
    /// Errors because of which a case was not measured to the end, by case.
    pub errors: BTreeMap<String, Vec<InconclusiveReason>>,
    /// All results of the shard's comparison except the verdicts, which the merge computes from the
    /// times.
    #[serde(with = "ShardFindings")]
    pub findings: Comparison,
}

/// Form of [`VerdictsAndFindings`](super::verdicts::VerdictsAndFindings) in a shard's file: equal
/// fields, but without the verdicts.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Comparison")]
struct ShardFindings {
    device: String,
    limits: CaseLimits,
    #[serde(skip)]
    judged_cases: Vec<CaseJudgement>,
    refused: Vec<ComparisonRefusal>,
    #[serde(rename = "new")]
    new_cases: Vec<String>,
    skipped: BTreeMap<String, String>,
    failed: BTreeMap<String, CaseFailureReason>,
    #[serde(rename = "unverified")]
    unverified_cases: Vec<String>,
    verification: Vec<VerificationLoss>,
    numerics: OutputErrorReport,
    costs: Vec<CostGrowthOfCase>,
    rules: RulesEffectReport,
    facts: BuildComparisonFacts,
}

impl ComparisonShardRecord {
    /// Prefixes of the names under which [`Self::identity`] stores the executables' hashes of base
    /// and head.
    const EXECUTABLE_HASH_NAME_PREFIXES: [&str; 2] = ["base ", "head "];

    /// Takes the limits and errors of each judged case from a comparison into this record, and
    /// drops the times of other cases.
    pub fn take_limits_and_errors(
        &mut self,
        comparison: &Comparison,
        limits: impl Fn(&str) -> CaseLimits,
    ) {
        for judged in &comparison.judged_cases {
            self.limits.insert(judged.case.clone(), limits(&judged.case));
            let is_kept = |reason: &&InconclusiveReason| {
                reason.is_measurement_error()
                    && !matches!(reason, InconclusiveReason::LessVerified(_))
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

    /// Returns the name and both values of the first fact that prevents merging two comparison
    /// shards; `None` if they belong together.
    pub fn first_fact_that_prevents_merging(&self, other: &Self) -> Option<(String, [String; 2])> {
        let facts = |shard: &Self| {
            [
                ("number of shards", shard.shard.count.to_string()),
                ("plan", shard.plan.clone()),
                ("cases of the plan", shard.planned.to_string()),
                ("power state", shard.power_state_of_anchors().to_owned()),
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
        if let Some(mismatch) =
            other.environment.incomparable_facts_with_base(&self.environment).into_iter().next()
        {
            return Some((mismatch.field.to_owned(), [mismatch.base, mismatch.head]));
        }
        let (left, right) =
            (self.identity_facts_to_share(other), other.identity_facts_to_share(self));
        let name = first_differing_name(&left, &right)?;
        let value = |of: &BTreeMap<String, String>| of.get(&name).cloned().unwrap_or_default();
        let field = Self::EXECUTABLE_HASH_NAME_PREFIXES.iter().find_map(|side| {
            Some(format!("executable of bench {} in the {side}", name.strip_prefix(side)?))
        });
        let values = [value(&left), value(&right)];
        Some((field.map_or(name, |field| field.trim_end().to_owned()), values))
    }

    /// Returns the power state in which the shard's anchors were measured: "steady", "burst", or
    /// "unknown" without measured anchors.
    fn power_state_of_anchors(&self) -> &'static str {
        match &self.anchors {
            Some(ShardAnchorRecord::Measured(anchors)) => anchors.power.name_in_files(),
            _ => "unknown",
        }
    }

    /// Returns the facts of the identity that must be equal in two shards of one comparison.
    /// Executable hashes are excluded if both shards have the same commits, because two machines
    /// may build different executables from them.
    fn identity_facts_to_share(&self, other: &Self) -> BTreeMap<String, String> {
        let one_code = self.sources.is_some() && self.sources == other.sources;
        let is_shared = |name: &str| {
            name != "KERNELGATE_SHARD"
                && name != "KERNELGATE_DEVICE"
                && !(one_code
                    && Self::EXECUTABLE_HASH_NAME_PREFIXES
                        .iter()
                        .any(|side| name.starts_with(side)))
        };
        let shared = self.identity.iter().filter(|(name, _)| is_shared(name));
        shared.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// Decides the cases of a finished round from their recorded blocks.
    fn decide_finished_round(
        &self,
        round: &BTreeMap<String, CaseBlocksAsColumns>,
    ) -> PairedDecisionsOfRound {
        let plan = self.findings.facts.plan;
        let blocks = |(case, series): (&String, &CaseBlocksAsColumns)| {
            (case.clone(), series.to_trial_blocks())
        };
        let observed: TimedBlocksByCase = round.iter().map(blocks).collect();
        let limits = |case: &str| {
            self.limits.get(case).map_or(plan, |limits| plan.with_thresholds_of_case(limits))
        };
        decide_cases_with_own_thresholds(
            &observed,
            &plan,
            &limits,
            ErrorRateFamily::Plan(self.planned),
            true,
        )
    }

    /// Judges the cases of this shard from its recorded times.
    fn judge_cases_of_shard(&self) -> Vec<CaseJudgement> {
        let [first, second] =
            [&self.first, &self.second].map(|round| self.decide_finished_round(round));
        let plan: ComparisonTestPlan = self.findings.facts.plan;
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
            judged.push(CaseJudgement::from_both_rounds(decision, confirmation, errors, limits));
        }
        let unmeasured = self.limits.iter().filter(|(case, _)| !self.first.contains_key(*case));
        judged.extend(unmeasured.map(|(case, limits)| {
            CaseJudgement::for_case_without_blocks(case.clone(), errors(case), &plan, limits)
        }));
        let with_loss = |judged: CaseJudgement| match losses.get(&*judged.case) {
            Some(loss) => judged.with_verification_loss((*loss).clone()),
            None => judged,
        };
        judged.into_iter().map(with_loss).collect()
    }
}

/// Merges comparison shards, given in any order, into one comparison with verdicts; `None` if
/// `shards` is empty. The shards must belong together
/// ([`ComparisonShardRecord::first_fact_that_prevents_merging`]) and differ in number; `missing`
/// names the shards that are not given.
pub fn merge_comparison_shard_records(
    mut shards: Vec<ComparisonShardRecord>,
    missing: Vec<String>,
) -> Option<Comparison> {
    shards.sort_by_key(|shard| shard.shard);
    let judged =
        shards.par_iter().flat_map_iter(ComparisonShardRecord::judge_cases_of_shard).collect();
    let mut findings = shards.into_iter().map(|shard| shard.findings);
    let mut all = findings.next()?;
    findings.for_each(|more| all.add_findings_of_shard(more));
    all.judged_cases = judged;
    let unmatched = std::mem::take(&mut all.rules.unmatched);
    if missing.is_empty() {
        all.rules.notes.extend(unmatched);
    }
    all.facts.missing_shards = missing;
    all.sort_and_deduplicate_lists();
    Some(all)
}

impl Comparison {
    fn add_findings_of_shard(&mut self, other: Self) {
        self.refused.extend(other.refused);
        self.new_cases.extend(other.new_cases);
        self.skipped.extend(other.skipped);
        self.failed.extend(other.failed);
        self.unverified_cases.extend(other.unverified_cases);
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
        add_facts_of_shard(&mut self.facts, other.facts);
    }

    /// Sorts the lists that the merged shards contributed to, and removes duplicates.
    fn sort_and_deduplicate_lists(&mut self) {
        self.sort_judgements();
        let mut refused = CasesByDifferingField::new();
        for ComparisonRefusal { field, base, head, cases } in std::mem::take(&mut self.refused) {
            refused.entry((field, base, head)).or_default().extend(cases);
        }
        self.refused = ComparisonRefusal::from_differing_fields(refused);
        let facts = &mut self.facts;
        for list in [
            &mut self.new_cases,
            &mut self.unverified_cases,
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

fn add_facts_of_shard(facts: &mut BuildComparisonFacts, more: BuildComparisonFacts) {
    facts.removed.extend(more.removed);
    facts.failed_in_base.extend(more.failed_in_base);
    let broken = more.broken.into_iter().filter(|broken| !facts.broken.contains(broken));
    let broken: Vec<_> = broken.collect();
    facts.broken.extend(broken);
    facts.left_alone.extend(more.left_alone);
    for bench in more.criterion {
        match facts.criterion.iter_mut().find(|it| it.bench == bench.bench) {
            Some(there) => add_cases_of_criterion_bench(there, bench),
            None => facts.criterion.push(bench),
        }
    }
    facts.identical.extend(more.identical);
    facts.untimed.extend(more.untimed);
    facts.optimised &= more.optimised;
    for (index, round) in more.rounds.into_iter().enumerate() {
        match facts.rounds.get_mut(index) {
            Some(there) => {
                let ComparisonRoundCounts { blocks, processes, wall_s } = *there;
                *there = ComparisonRoundCounts {
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

fn add_cases_of_criterion_bench(there: &mut CriterionOnlyBench, more: CriterionOnlyBench) {
    there.cases.extend(more.cases);
    there.cases.sort();
    there.process_s = there.process_s.max(more.process_s);
    there.overridden.extend(more.overridden);
}

impl RecordFileType for ComparisonShardRecord {
    const SCHEMA: &'static str = "kernelgate-comparison-shard";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "shard of a comparison";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] =
        &["identity", "findings", "errors", "anchors"];

    fn check_record_plausible(&self) -> Result<(), String> {
        self.shard.check_shard_index_and_count()?;
        text::check_is_rfc3339_time(&self.ended).map_err(|problem| format!("ended: {problem}"))?;
        self.environment.check_environment_plausible()?;
        self.anchors.as_ref().map_or(Ok(()), ShardAnchorRecord::check_anchor_rates_plausible)?;
        for (round, series) in [("first", &self.first), ("second", &self.second)] {
            for (case, series) in series {
                series
                    .check_column_lengths_and_values()
                    .map_err(|why| format!("{round}: case {case}: {why}"))?;
                if !self.limits.contains_key(case) {
                    return Err(format!("{round}: case {case} has no limits"));
                }
            }
        }
        self.limits.keys().try_for_each(|case| text::check_case_id_text(case))?;
        self.limits
            .values()
            .chain([&self.findings.limits])
            .try_for_each(CaseLimits::check_ranges)?;
        if self.planned < self.limits.len() {
            let (cases, planned) = (self.limits.len(), self.planned);
            return Err(format!("{cases} cases of a plan of {planned}"));
        }
        super::calibration::check_test_plan_ranges(&self.findings.facts.plan)
    }
}
