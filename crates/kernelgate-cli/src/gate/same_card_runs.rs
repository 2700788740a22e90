//! Chooses which process runs of a case are compared: only runs of one card if baseline and head
//! both have runs of it, otherwise all runs.

use std::collections::BTreeMap;

use kernelgate::record::{
    BaselineFile, CaseInBaseline, CaseInProcessRun, CaseSummaryOfRun, RunEnvironment,
};

/// The process runs of one case that are chosen for comparison, of baseline and head.
pub struct ChosenRunsOfCase<'a> {
    /// The compared process runs of the baseline, at least one.
    pub base: Vec<(&'a RunEnvironment, &'a CaseSummaryOfRun)>,
    /// The compared runs of the judged measurement, at least one.
    pub head: Vec<CaseInProcessRun<'a>>,
    /// Whether all compared runs are known to be from one and the same device.
    pub same_device: bool,
    /// The card whose runs are compared; `None` if no runs were excluded.
    pub compared_card: Option<String>,
}

impl<'a> ChosenRunsOfCase<'a> {
    /// Chooses the runs of a case that are compared between baseline and head. If several cards
    /// have runs on both sides, the card with the most is chosen, because a mean over cards would
    /// depend on the number of runs of each.
    pub fn choose_runs_of_one_card(
        baseline: &'a BaselineFile,
        case: &'a CaseInBaseline,
        head: &[CaseInProcessRun<'a>],
    ) -> Self {
        let base: Vec<(&RunEnvironment, &CaseSummaryOfRun)> =
            case.runs.iter().map(|(key, run)| (&baseline.runs[key].environment, run)).collect();
        let mut pairs = head.iter().flat_map(|head| {
            base.iter().map(|(base, _)| head.run.environment.has_same_gpus_or_host_as(base))
        });
        let all = |same_device| Self {
            base: base.clone(),
            head: head.to_vec(),
            same_device,
            compared_card: None,
        };
        if pairs.all(|same| same) {
            return all(true);
        }
        let mut cards: BTreeMap<String, &RunEnvironment> = BTreeMap::new();
        for head in head.iter().filter(|head| head.run.environment.has_device_id()) {
            cards.entry(head.run.environment.id_of_gpus_or_host()).or_insert(&head.run.environment);
        }
        let on = |card: &RunEnvironment| {
            let base: Vec<_> = base
                .iter()
                .filter(|(base, _)| base.has_same_gpus_or_host_as(card))
                .copied()
                .collect();
            let head =
                head.iter().filter(|it| it.run.environment.has_same_gpus_or_host_as(card)).copied();
            (base, head.collect::<Vec<_>>())
        };
        let mut shared: Option<Self> = None;
        for (id, card) in cards {
            let (base, head) = on(card);
            let count = |runs: &Self| runs.base.len().min(runs.head.len());
            let fewest = base.len().min(head.len());
            if fewest > shared.as_ref().map_or(0, count) {
                shared = Some(Self { base, head, same_device: true, compared_card: Some(id) });
            }
        }
        shared.unwrap_or_else(|| all(false))
    }
}
