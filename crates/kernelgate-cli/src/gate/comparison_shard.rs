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
use super::costs::LaunchCostGrowthOfCase;
use super::inconclusive_reason::InconclusiveReason;
use super::judgement::CaseJudgement;
use super::limits::CaseTimeAndErrorLimits;
use super::outputs::numerics::OutputErrorReport;
use super::outputs::verification::VerificationLoss;
use super::paired::{
    ComparisonTestPlan, ErrorRateFamily, PairedDecisionsOfRound, TimedTrialBlocksByCase,
    decide_cases_with_own_thresholds,
};
use super::rules::GateRulesEffectReport;
use super::verdicts::{CasesByDifferingField, ComparisonRefusal};
use kernelgate::measure::anchors::ShardAnchorRecord;
use kernelgate::record::file::RecordFileType;
use kernelgate::record::{RunEnvironment, ShardOfWork, text};
use kernelgate_cuda::CaseFailureReason;

/// Record of the comparison of one shard's cases, which `kernelgate merge` reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ComparisonShardRecord {
    /// The shard of the divided work that the record covers.
    pub shard: ShardOfWork,
    /// Hash of the list of all cases of both builds; it is equal in all shards of one comparison.
    #[serde(rename = "plan")]
    pub plan_hash: String,
    /// Number of cases of all shards together, by which each shard divides its error rates.
    #[serde(rename = "planned")]
    pub cases_of_all_shards: usize,
    /// End time of the shard's comparison, RFC 3339, UTC.
    #[serde(rename = "ended")]
    pub shard_end_time: String,
    /// Device and build with which the record was measured.
    pub environment: RunEnvironment,
    /// Anchors: rates of fixed work, measured on the device of this shard.
    pub anchors: Option<ShardAnchorRecord>,
    /// Facts that all shards of one comparison share, by name: settings, limits, executables.
    #[serde(rename = "identity")]
    pub comparison_identity_facts: BTreeMap<String, String>,
    /// Commits of base (first) and head (second), if both were built from a checkout.
    pub sources: Option<[String; 2]>,
    /// Limits by which each case of the shard is judged.
    #[serde(rename = "limits")]
    pub limits_by_case: BTreeMap<String, CaseTimeAndErrorLimits>,
    /// All measured times of the first round, by case.
    #[serde(rename = "first")]
    pub first_round_times: BTreeMap<String, CaseBlocksAsColumns>,
    /// All measured times of the second round, which confirms regressions, by case.
    #[serde(rename = "second")]
    pub second_round_times: BTreeMap<String, CaseBlocksAsColumns>,
    /// Errors because of which cases were not measured to the end, by case.
    #[serde(rename = "errors")]
    pub measurement_errors_by_case: BTreeMap<String, Vec<InconclusiveReason>>,
    /// All results of the shard's comparison except the verdicts, which the merge computes from the
    /// times.
    #[serde(with = "ShardFindings")]
    #[serde(rename = "findings")]
    pub findings_without_verdicts: Comparison,
}

/// Form of [`VerdictsAndFindings`](super::verdicts::VerdictsAndFindings) in a shard's file: equal
/// fields, but without the verdicts.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Comparison")]
struct ShardFindings {
    device: String,
    #[serde(rename = "limits")]
    default_case_limits: CaseTimeAndErrorLimits,
    #[serde(skip)]
    judged_cases: Vec<CaseJudgement>,
    refused: Vec<ComparisonRefusal>,
    #[serde(rename = "new")]
    new_cases: Vec<String>,
    #[serde(rename = "skipped")]
    skipped_in_head: BTreeMap<String, String>,
    #[serde(rename = "failed")]
    failed_in_head: BTreeMap<String, CaseFailureReason>,
    #[serde(rename = "unverified")]
    unverified_cases: Vec<String>,
    #[serde(rename = "verification")]
    verification_losses: Vec<VerificationLoss>,
    numerics: OutputErrorReport,
    #[serde(rename = "costs")]
    grown_costs: Vec<LaunchCostGrowthOfCase>,
    rules: GateRulesEffectReport,
    #[serde(rename = "facts")]
    method_facts: BuildComparisonFacts,
}

impl ComparisonShardRecord {
    /// Prefixes of the names under which [`Self::comparison_identity_facts`] stores the
    /// executables' hashes of base and head.
    const EXECUTABLE_HASH_NAME_PREFIXES: [&str; 2] = ["base ", "head "];

    /// Takes the limits and errors of each judged case from a comparison into this record, and
    /// drops the times of other cases.
    pub fn record_limits_and_errors_of_cases(
        &mut self,
        comparison: &Comparison,
        limits: impl Fn(&str) -> CaseTimeAndErrorLimits,
    ) {
        for judged in &comparison.judged_cases {
            self.limits_by_case.insert(judged.case_id.clone(), limits(&judged.case_id));
            let is_kept = |reason: &&InconclusiveReason| {
                reason.is_measurement_error()
                    && !matches!(reason, InconclusiveReason::LessVerified(_))
            };
            let errors: Vec<InconclusiveReason> =
                judged.reasons.iter().filter(is_kept).cloned().collect();
            if !errors.is_empty() {
                self.measurement_errors_by_case.insert(judged.case_id.clone(), errors);
            }
        }
        self.first_round_times.retain(|case, _| self.limits_by_case.contains_key(case));
        self.second_round_times.retain(|case, _| self.limits_by_case.contains_key(case));
    }

    /// Returns the name and both values of the first fact that prevents merging two comparison
    /// shards; `None` if they belong together.
    pub fn first_fact_that_prevents_merging(&self, other: &Self) -> Option<(String, [String; 2])> {
        let facts = |shard: &Self| {
            [
                ("number of shards", shard.shard.shard_count.to_string()),
                ("plan", shard.plan_hash.clone()),
                ("cases of the plan", shard.cases_of_all_shards.to_string()),
                ("power state", shard.power_state_of_anchor_measurement().to_owned()),
            ]
        };
        let of_facts = facts(self).into_iter().zip(facts(other)).find(|(one, other)| one != other);
        if let Some(((field, left), (_, right))) = of_facts {
            return Some((field.to_owned(), [left, right]));
        }
        let (plan, others) = (
            &self.findings_without_verdicts.method_facts.plan,
            &other.findings_without_verdicts.method_facts.plan,
        );
        if let Some(differing) = first_differing_field("plan", plan, others) {
            return Some(differing);
        }
        if let Some(mismatch) =
            other.environment.incomparable_facts_with_base(&self.environment).into_iter().next()
        {
            return Some((
                mismatch.field_name.to_owned(),
                [mismatch.base_value, mismatch.head_value],
            ));
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
    fn power_state_of_anchor_measurement(&self) -> &'static str {
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
        let shared = self.comparison_identity_facts.iter().filter(|(name, _)| is_shared(name));
        shared.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// Decides the cases of a finished round from their recorded blocks.
    fn decide_finished_round(
        &self,
        round: &BTreeMap<String, CaseBlocksAsColumns>,
    ) -> PairedDecisionsOfRound {
        let plan = self.findings_without_verdicts.method_facts.plan;
        let blocks = |(case, series): (&String, &CaseBlocksAsColumns)| {
            (case.clone(), series.to_trial_blocks())
        };
        let observed: TimedTrialBlocksByCase = round.iter().map(blocks).collect();
        let limits = |case: &str| {
            self.limits_by_case
                .get(case)
                .map_or(plan, |limits| plan.with_thresholds_of_case(limits))
        };
        decide_cases_with_own_thresholds(
            &observed,
            &plan,
            &limits,
            ErrorRateFamily::CasesOfAllShards(self.cases_of_all_shards),
            true,
        )
    }

    /// Judges the cases of this shard from its recorded times.
    fn judge_cases_of_shard(&self) -> Vec<CaseJudgement> {
        let [first, second] = [&self.first_round_times, &self.second_round_times]
            .map(|round| self.decide_finished_round(round));
        let plan: ComparisonTestPlan = self.findings_without_verdicts.method_facts.plan;
        let errors =
            |case: &str| self.measurement_errors_by_case.get(case).cloned().unwrap_or_default();
        let losses: BTreeMap<&str, &VerificationLoss> = self
            .findings_without_verdicts
            .verification_losses
            .iter()
            .map(|loss| (&*loss.case_id, loss))
            .collect();
        let again: BTreeMap<&str, _> =
            second.decisions.iter().map(|decision| (&*decision.case_id, decision)).collect();
        let mut judged = Vec::new();
        for decision in first.decisions {
            let Some(limits) = self.limits_by_case.get(&decision.case_id) else { continue };
            let confirmation = again.get(&*decision.case_id).map(|decision| (*decision).clone());
            let errors = errors(&decision.case_id);
            judged.push(CaseJudgement::from_both_rounds(decision, confirmation, errors, limits));
        }
        let unmeasured = self
            .limits_by_case
            .iter()
            .filter(|(case, _)| !self.first_round_times.contains_key(*case));
        judged.extend(unmeasured.map(|(case, limits)| {
            CaseJudgement::judge_case_without_blocks(case.clone(), errors(case), &plan, limits)
        }));
        let with_loss = |judged: CaseJudgement| match losses.get(&*judged.case_id) {
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
    let mut findings = shards.into_iter().map(|shard| shard.findings_without_verdicts);
    let mut all = findings.next()?;
    findings.for_each(|more| all.add_findings_of_shard(more));
    all.judged_cases = judged;
    let unmatched = std::mem::take(&mut all.rules.notes_on_unmatched_patterns);
    if missing.is_empty() {
        all.rules.notes_on_rules_without_effect.extend(unmatched);
    }
    all.method_facts.missing_shards = missing;
    all.sort_and_deduplicate_lists();
    Some(all)
}

impl Comparison {
    fn add_findings_of_shard(&mut self, other: Self) {
        self.refused.extend(other.refused);
        self.new_cases.extend(other.new_cases);
        self.skipped_in_head.extend(other.skipped_in_head);
        self.failed_in_head.extend(other.failed_in_head);
        self.unverified_cases.extend(other.unverified_cases);
        self.verification_losses.extend(other.verification_losses);
        self.grown_costs.extend(other.grown_costs);
        let (numerics, more) = (&mut self.numerics, other.numerics);
        numerics.compared_cases += more.compared_cases;
        numerics.cases_with_changed_errors += more.cases_with_changed_errors;
        numerics.outputs_with_changed_errors += more.outputs_with_changed_errors;
        numerics.error_growths.extend(more.error_growths);
        let (rules, more) = (&mut self.rules, other.rules);
        for ((_, cases), (_, added)) in rules
            .threshold_rules_with_case_counts
            .iter_mut()
            .zip(more.threshold_rules_with_case_counts)
        {
            *cases += added;
        }
        rules.accepted.extend(more.accepted);
        rules.notes_on_rules_without_effect.extend(more.notes_on_rules_without_effect);
        rules
            .notes_on_unmatched_patterns
            .retain(|pattern| more.notes_on_unmatched_patterns.contains(pattern));
        rules.notes_on_unjudged_limits.extend(more.notes_on_unjudged_limits);
        add_facts_of_shard(&mut self.method_facts, other.method_facts);
    }

    /// Sorts the lists that the merged shards contributed to, and removes duplicates.
    fn sort_and_deduplicate_lists(&mut self) {
        self.sort_judgements();
        let mut refused = CasesByDifferingField::new();
        for ComparisonRefusal {
            differing_field: field,
            base_value: base,
            head_value: head,
            affected_cases: cases,
        } in std::mem::take(&mut self.refused)
        {
            refused.entry((field, base, head)).or_default().extend(cases);
        }
        self.refused = ComparisonRefusal::from_differing_fields(refused);
        let facts = &mut self.method_facts;
        for list in [
            &mut self.new_cases,
            &mut self.unverified_cases,
            &mut self.rules.notes_on_rules_without_effect,
            &mut self.rules.notes_on_unjudged_limits,
            &mut facts.removed_cases,
            &mut facts.benches_with_identical_executables,
            &mut facts.cases_with_identical_executable,
            &mut facts.unaffected_cases,
        ] {
            list.sort();
            list.dedup();
        }
        self.verification_losses.sort_by(|one, other| one.case_id.cmp(&other.case_id));
        self.numerics.error_growths.sort_by(|one, other| one.case_id.cmp(&other.case_id));
        self.rules.accepted.sort_by(|one, other| one.case_id.cmp(&other.case_id));
    }
}

fn add_facts_of_shard(facts: &mut BuildComparisonFacts, more: BuildComparisonFacts) {
    facts.removed_cases.extend(more.removed_cases);
    facts.failed_in_base.extend(more.failed_in_base);
    let broken =
        more.failed_processes.into_iter().filter(|broken| !facts.failed_processes.contains(broken));
    let broken: Vec<_> = broken.collect();
    facts.failed_processes.extend(broken);
    facts.unusable_benches.extend(more.unusable_benches);
    for bench in more.criterion_benches {
        match facts.criterion_benches.iter_mut().find(|it| it.bench_name == bench.bench_name) {
            Some(there) => add_cases_of_criterion_bench(there, bench),
            None => facts.criterion_benches.push(bench),
        }
    }
    facts.benches_with_identical_executables.extend(more.benches_with_identical_executables);
    facts.cases_with_identical_executable.extend(more.cases_with_identical_executable);
    facts.optimised_build &= more.optimised_build;
    for (index, round) in more.rounds.into_iter().enumerate() {
        match facts.rounds.get_mut(index) {
            Some(there) => {
                let ComparisonRoundCounts {
                    most_trial_blocks: blocks,
                    process_count: processes,
                    total_process_wall_s: wall_s,
                } = *there;
                *there = ComparisonRoundCounts {
                    most_trial_blocks: blocks.max(round.most_trial_blocks),
                    process_count: processes + round.process_count,
                    total_process_wall_s: wall_s + round.total_process_wall_s,
                };
            }
            None => facts.rounds.push(round),
        }
    }
    facts.kernel_comparisons_by_case.extend(more.kernel_comparisons_by_case);
    facts.explanations.extend(more.explanations);
    facts.unaffected_cases.extend(more.unaffected_cases);
}

fn add_cases_of_criterion_bench(there: &mut CriterionOnlyBench, more: CriterionOnlyBench) {
    there.compared_cases.extend(more.compared_cases);
    there.compared_cases.sort();
    there.process_wall_s = there.process_wall_s.max(more.process_wall_s);
    there.overridden_sampling_by_case.extend(more.overridden_sampling_by_case);
}

impl RecordFileType for ComparisonShardRecord {
    const SCHEMA: &'static str = "kernelgate-comparison-shard";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_READABLE_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "shard of a comparison";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] =
        &["identity", "findings", "errors", "anchors"];

    fn check_record_plausible(&self) -> Result<(), String> {
        self.shard.check_shard_index_and_count()?;
        text::check_is_rfc3339_time(&self.shard_end_time)
            .map_err(|problem| format!("ended: {problem}"))?;
        self.environment.check_environment_plausible()?;
        self.anchors.as_ref().map_or(Ok(()), ShardAnchorRecord::check_anchor_rates_plausible)?;
        for (round, series) in
            [("first", &self.first_round_times), ("second", &self.second_round_times)]
        {
            for (case, series) in series {
                series
                    .check_column_lengths_and_values()
                    .map_err(|why| format!("{round}: case {case}: {why}"))?;
                if !self.limits_by_case.contains_key(case) {
                    return Err(format!("{round}: case {case} has no limits"));
                }
            }
        }
        self.limits_by_case.keys().try_for_each(|case| text::check_case_id_text(case))?;
        self.limits_by_case
            .values()
            .chain([&self.findings_without_verdicts.default_case_limits])
            .try_for_each(CaseTimeAndErrorLimits::check_limit_ranges)?;
        if self.cases_of_all_shards < self.limits_by_case.len() {
            let (cases, planned) = (self.limits_by_case.len(), self.cases_of_all_shards);
            return Err(format!("{cases} cases of a plan of {planned}"));
        }
        super::calibration::check_test_plan_ranges(
            &self.findings_without_verdicts.method_facts.plan,
        )
    }
}
