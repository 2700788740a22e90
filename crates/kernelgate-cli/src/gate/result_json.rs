//! Writes judgements as JSON: the field names of `result.json` and `--format json` are all in the
//! module `result_json`. Field names of `result.json` never change, but new fields may be added.

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::baseline::BaselineComparisonFacts;
use super::comparison::BuildComparisonFacts;
use super::judgement::{
    BaselineRunEvidence, CaseJudgement, JudgementEvidence, PairedRoundsEvidence,
};
use super::verdicts::VerdictsAndFindings;

/// Writes the facts that only `gate` or only `compare` has into the result's JSON.
pub trait JsonFactsOfGateOrCompare {
    /// Writes each fact of `gate` or `compare` as a JSON field with its fixed name.
    fn write_json_fields<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
}

impl<F: JsonFactsOfGateOrCompare> Serialize for VerdictsAndFindings<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.method_facts.write_json_fields(&mut map)?;
        map.serialize_entry("device", &self.device)?;
        map.serialize_entry("limits", &self.default_case_limits)?;
        map.serialize_entry("judged", &self.judged_cases)?;
        map.serialize_entry("refused", &self.refused)?;
        map.serialize_entry("new", &self.new_cases)?;
        map.serialize_entry("skipped", &self.skipped_in_head)?;
        map.serialize_entry("failed", &self.failed_in_head)?;
        map.serialize_entry("unverified", &self.unverified_cases)?;
        map.serialize_entry("verification", &self.verification_losses)?;
        map.serialize_entry("numerics", &self.numerics)?;
        map.serialize_entry("costs", &self.grown_costs)?;
        map.serialize_entry("rules", &self.rules)?;
        map.end()
    }
}

impl Serialize for CaseJudgement {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("case", &self.case_id)?;
        map.serialize_entry("verdict", &self.verdict)?;
        map.serialize_entry("reason", &self.reasons.first().map(|reason| reason.json_kind()))?;
        map.serialize_entry("reasons", &self.reasons)?;
        map.serialize_entry("threshold", &self.regression_threshold.limit_value)?;
        map.serialize_entry("threshold_source", &self.regression_threshold.source)?;
        map.serialize_entry("base_ns", &self.base_launch_ns)?;
        map.serialize_entry("head_ns", &self.head_launch_ns)?;
        map.serialize_entry("ratio", &self.ratio)?;
        map.serialize_entry("detectable", &self.detectable_change)?;
        match &self.evidence {
            JudgementEvidence::Runs(runs) => {
                let BaselineRunEvidence { same_device, compared_card: card, base, head } = &**runs;
                map.serialize_entry("same_device", same_device)?;
                if let Some(card) = card {
                    map.serialize_entry("card", card)?;
                }
                map.serialize_entry("base_spread", &base.relative_half_range)?;
                map.serialize_entry("head_spread", &head.relative_half_range)?;
                map.serialize_entry("base_runs", &base.run_count)?;
                map.serialize_entry("head_runs", &head.run_count)?;
                map.serialize_entry("base_single", &base.single_run_spread)?;
                map.serialize_entry("head_single", &head.single_run_spread)?;
                map.serialize_entry("base_contention", &base.cpu_contention_share)?;
                map.serialize_entry("head_contention", &head.cpu_contention_share)?;
            }
            JudgementEvidence::Pairs(pairs) => {
                let PairedRoundsEvidence {
                    first_round_decision: decision,
                    second_round_decision: confirmation,
                } = &**pairs;
                map.serialize_entry("decision", decision)?;
                map.serialize_entry("confirmation", confirmation)?;
                map.serialize_entry("case_error", &self.joined_measurement_errors())?;
            }
        }
        map.end()
    }
}

impl JsonFactsOfGateOrCompare for BaselineComparisonFacts {
    fn write_json_fields<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("baseline", &self.baseline_name)?;
        map.serialize_entry("base_commits", &self.baseline_commits)?;
        map.serialize_entry("head_commits", &self.judged_commits)?;
        map.serialize_entry("other_device", &self.baseline_and_run_device)?;
        map.serialize_entry("unsealed", &self.baseline_lacks_checksum)?;
        map.serialize_entry("staleness", &self.staleness)?;
        map.serialize_entry("policy", &self.policy)?;
        map.serialize_entry("not_run", &self.baseline_cases_not_run)?;
        map.serialize_entry("interrupted", &self.interrupted_benches)?;
        map.serialize_entry("missing_shards", &self.missing_shards)?;
        map.serialize_entry("own", &self.runs_compared_with_themselves)
    }
}

impl JsonFactsOfGateOrCompare for BuildComparisonFacts {
    fn write_json_fields<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        let foreign: Vec<&String> = self.unusable_benches.keys().collect();
        map.serialize_entry("base", &self.base_revision)?;
        map.serialize_entry("head", &self.head_revision)?;
        map.serialize_entry("plan", &self.plan)?;
        map.serialize_entry("budget_s", &self.round_budget_s)?;
        map.serialize_entry("calibration", &self.calibration_description)?;
        map.serialize_entry("removed", &self.removed_cases)?;
        map.serialize_entry("failed_in_base", &self.failed_in_base)?;
        map.serialize_entry("broken", &self.failed_processes)?;
        map.serialize_entry("foreign", &foreign)?;
        map.serialize_entry("left_alone", &self.unusable_benches)?;
        map.serialize_entry("criterion", &self.criterion_benches)?;
        map.serialize_entry("identical", &self.benches_with_identical_executables)?;
        map.serialize_entry("untimed", &self.cases_with_identical_executable)?;
        map.serialize_entry("optimised", &self.optimised_build)?;
        map.serialize_entry("delays", &self.injected_delays_text)?;
        map.serialize_entry("rounds", &self.rounds)?;
        map.serialize_entry("code", &self.kernel_comparisons_by_case)?;
        map.serialize_entry("explanations", &self.explanations)?;
        map.serialize_entry("unaffected", &self.unaffected_cases)?;
        map.serialize_entry("missing_shards", &self.missing_shards)
    }
}
