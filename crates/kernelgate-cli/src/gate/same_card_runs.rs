//! Chooses which process runs of a case are compared: runs of one card if both sides have such
//! runs, else all runs.

use std::collections::BTreeMap;

use kernelgate::record::{Baseline, BaselineCase, CaseInRun, CaseRun, Environment};

/// The process runs of a case that are compared with each other.
pub struct ComparedCaseRuns<'a> {
    /// Runs of the baseline that are compared, at least one.
    pub base: Vec<(&'a Environment, &'a CaseRun)>,
    /// Runs that are judged, at least one.
    pub head: Vec<CaseInRun<'a>>,
    /// Whether all runs are known to be of the same device.
    pub same_device: bool,
    /// The card that base and head share, if runs of other cards are excluded.
    pub card: Option<String>,
}

impl<'a> ComparedCaseRuns<'a> {
    /// Chooses the runs of a case that are compared. If both sides have runs of several cards, the
    /// card with the most runs is chosen: a mean over cards would depend on how many runs each card
    /// has.
    pub fn choose(baseline: &'a Baseline, case: &'a BaselineCase, head: &[CaseInRun<'a>]) -> Self {
        let base: Vec<(&Environment, &CaseRun)> =
            case.runs.iter().map(|(key, run)| (&baseline.runs[key].environment, run)).collect();
        let mut pairs = head.iter().flat_map(|head| {
            base.iter().map(|(base, _)| head.run.environment.is_same_device(base))
        });
        let all =
            |same_device| Self { base: base.clone(), head: head.to_vec(), same_device, card: None };
        if pairs.all(|same| same) {
            return all(true);
        }
        let mut cards: BTreeMap<String, &Environment> = BTreeMap::new();
        for head in head.iter().filter(|head| head.run.environment.is_device_identified()) {
            cards.entry(head.run.environment.device_identifier()).or_insert(&head.run.environment);
        }
        let on = |card: &Environment| {
            let base: Vec<_> =
                base.iter().filter(|(base, _)| base.is_same_device(card)).copied().collect();
            let head = head.iter().filter(|it| it.run.environment.is_same_device(card)).copied();
            (base, head.collect::<Vec<_>>())
        };
        let mut shared: Option<Self> = None;
        for (id, card) in cards {
            let (base, head) = on(card);
            let count = |runs: &Self| runs.base.len().min(runs.head.len());
            let fewest = base.len().min(head.len());
            if fewest > shared.as_ref().map_or(0, count) {
                shared = Some(Self { base, head, same_device: true, card: Some(id) });
            }
        }
        shared.unwrap_or_else(|| all(false))
    }
}
