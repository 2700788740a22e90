//! Writes judgements as JSON: the field names of `result.json` and `--format json` are all in this
//! module. Field names of `result.json` never change, but new fields may be added.

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::baseline::BaselineComparisonFacts;
use super::comparison::BuildComparisonFacts;
use super::judgement::{
    BaselineRunEvidence, CaseJudgement, JudgementEvidence, PairedRoundsEvidence,
};
use super::verdicts::VerdictsAndFindings;

/// Writes the facts that only `gate` or only `compare` has into the result's JSON.
pub trait JsonFactsOfMethod {
    /// Writes each fact of `gate` or `compare` as a JSON field with its fixed name.
    fn write_json_fields<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
}

impl<F: JsonFactsOfMethod> Serialize for VerdictsAndFindings<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.facts.write_json_fields(&mut map)?;
        map.serialize_entry("device", &self.device)?;
        map.serialize_entry("limits", &self.limits)?;
        map.serialize_entry("judged", &self.judged_cases)?;
        map.serialize_entry("refused", &self.refused)?;
        map.serialize_entry("new", &self.new_cases)?;
        map.serialize_entry("skipped", &self.skipped)?;
        map.serialize_entry("failed", &self.failed)?;
        map.serialize_entry("unverified", &self.unverified_cases)?;
        map.serialize_entry("verification", &self.verification)?;
        map.serialize_entry("numerics", &self.numerics)?;
        map.serialize_entry("costs", &self.costs)?;
        map.serialize_entry("rules", &self.rules)?;
        map.end()
    }
}

impl Serialize for CaseJudgement {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("case", &self.case)?;
        map.serialize_entry("verdict", &self.verdict)?;
        map.serialize_entry("reason", &self.reasons.first().map(|reason| reason.json_kind()))?;
        map.serialize_entry("reasons", &self.reasons)?;
        map.serialize_entry("threshold", &self.threshold.value)?;
        map.serialize_entry("threshold_source", &self.threshold.source)?;
        map.serialize_entry("base_ns", &self.base_ns)?;
        map.serialize_entry("head_ns", &self.head_ns)?;
        map.serialize_entry("ratio", &self.ratio)?;
        map.serialize_entry("detectable", &self.detectable_change)?;
        match &self.evidence {
            JudgementEvidence::Runs(runs) => {
                let BaselineRunEvidence { same_device, card, base, head } = &**runs;
                map.serialize_entry("same_device", same_device)?;
                if let Some(card) = card {
                    map.serialize_entry("card", card)?;
                }
                map.serialize_entry("base_spread", &base.spread)?;
                map.serialize_entry("head_spread", &head.spread)?;
                map.serialize_entry("base_runs", &base.runs)?;
                map.serialize_entry("head_runs", &head.runs)?;
                map.serialize_entry("base_single", &base.single_run_spread)?;
                map.serialize_entry("head_single", &head.single_run_spread)?;
                map.serialize_entry("base_contention", &base.contention)?;
                map.serialize_entry("head_contention", &head.contention)?;
            }
            JudgementEvidence::Pairs(pairs) => {
                let PairedRoundsEvidence { decision, confirmation } = &**pairs;
                map.serialize_entry("decision", decision)?;
                map.serialize_entry("confirmation", confirmation)?;
                map.serialize_entry("case_error", &self.joined_measurement_errors())?;
            }
        }
        map.end()
    }
}

impl JsonFactsOfMethod for BaselineComparisonFacts {
    fn write_json_fields<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("baseline", &self.baseline)?;
        map.serialize_entry("base_commits", &self.base_commits)?;
        map.serialize_entry("head_commits", &self.head_commits)?;
        map.serialize_entry("other_device", &self.other_device)?;
        map.serialize_entry("unsealed", &self.unsealed)?;
        map.serialize_entry("staleness", &self.staleness)?;
        map.serialize_entry("policy", &self.policy)?;
        map.serialize_entry("not_run", &self.not_run)?;
        map.serialize_entry("interrupted", &self.interrupted)?;
        map.serialize_entry("missing_shards", &self.missing_shards)?;
        map.serialize_entry("own", &self.own)
    }
}

impl JsonFactsOfMethod for BuildComparisonFacts {
    fn write_json_fields<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        let foreign: Vec<&String> = self.left_alone.keys().collect();
        map.serialize_entry("base", &self.base)?;
        map.serialize_entry("head", &self.head)?;
        map.serialize_entry("plan", &self.plan)?;
        map.serialize_entry("budget_s", &self.budget_s)?;
        map.serialize_entry("calibration", &self.calibration)?;
        map.serialize_entry("removed", &self.removed)?;
        map.serialize_entry("failed_in_base", &self.failed_in_base)?;
        map.serialize_entry("broken", &self.broken)?;
        map.serialize_entry("foreign", &foreign)?;
        map.serialize_entry("left_alone", &self.left_alone)?;
        map.serialize_entry("criterion", &self.criterion)?;
        map.serialize_entry("identical", &self.identical)?;
        map.serialize_entry("untimed", &self.untimed)?;
        map.serialize_entry("optimised", &self.optimised)?;
        map.serialize_entry("delays", &self.delays)?;
        map.serialize_entry("rounds", &self.rounds)?;
        map.serialize_entry("code", &self.code)?;
        map.serialize_entry("explanations", &self.explanations)?;
        map.serialize_entry("unaffected", &self.unaffected)?;
        map.serialize_entry("missing_shards", &self.missing_shards)
    }
}
