//! Compares the costs of a launch besides device time between base and head; they are judged if the
//! package asks for it (`rules`).
//!
//! Device memory is judged by its measured size, if both sides measured it and it grew by more than
//! `DEVICE_MEMORY_GRANULARITY`, which the driver's pages, graphs and code of kernels may add by
//! themselves. If no run measured it, the memory that the rows declare is judged.

pub mod host_time;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::limits::AskedLimits;
use super::rules::{PackageRules, RulesReport};
use kernelgate::display;
use kernelgate::record::LaunchCosts;
use kernelgate::stats::median;

/// Costs of a launch besides its time that may grow: memory, host time, energy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseCost {
    /// Device memory, measured or as the implementation declares it, bytes.
    DeviceMemory,
    /// Commands of a launch.
    Launches,
    /// Host time to start a launch, nanoseconds.
    HostTime,
    /// Energy of one launch, joules.
    Energy,
}

/// Growth of measured device memory that is not significant, bytes.
const DEVICE_MEMORY_GRANULARITY: f64 = (16 << 20) as f64;

/// A cost that grew by more than the package allows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostGrowth {
    /// The case.
    pub case: String,
    /// The cost that grew.
    pub cost: CaseCost,
    /// Cost of a launch in the base: the median over its runs.
    pub base: f64,
    /// Cost of the head.
    pub head: f64,
    /// Allowed relative growth of the cost.
    pub allowed: f64,
    /// Result of additional pairs of processes, for costs that need them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub further: Option<ConfirmationPairs>,
}

/// Further processes of base and head, in pairs; the [`CostGrowth`] then holds their medians.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfirmationPairs {
    /// Number of pairs.
    pub pairs: usize,
    /// Number of pairs in which the cost grew by more than allowed.
    pub grown: usize,
    /// Whether the additional pairs show the growth; otherwise it stays undecided.
    pub found: bool,
}

impl CostGrowth {
    /// Whether the growth of the cost is a finding, rather than only suspected.
    pub fn is_shown(&self) -> bool {
        self.further.is_none_or(|further| further.found)
    }

    /// The growth in words: "device memory 3.0 GB, was 2.0 GB (+50.0%, 10% are allowed)".
    pub fn words(&self) -> String {
        let (what, show): (_, fn(f64) -> String) = match self.cost {
            CaseCost::DeviceMemory => ("device memory", |bytes| display::byte_text(bytes as u64)),
            CaseCost::Launches => ("commands of a launch", |count| format!("{count}")),
            CaseCost::HostTime => ("host time of a launch", display::time_text),
            CaseCost::Energy => ("energy of a launch", display::joules_text),
        };
        let (head, base, allowed) = (show(self.head), show(self.base), 100.0 * self.allowed);
        let further = match self.further {
            None => String::new(),
            Some(ConfirmationPairs { pairs: 0, .. }) => ", not measured again".to_owned(),
            Some(ConfirmationPairs { pairs, grown, .. }) => {
                format!(" in {grown} of {pairs} further pairs of processes")
            }
        };
        if self.base <= 0.0 {
            return format!("{what} {head}, was 0 ({allowed}% more are allowed){further}");
        }
        let grown = 100.0 * (self.head / self.base - 1.0);
        format!("{what} {head}, was {base} ({grown:+.1}%, {allowed}% are allowed){further}")
    }
}

/// A bound of the package on a cost of a case, and whether it could be judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostBound {
    pub case: String,
    /// The bounded cost.
    pub cost: CaseCost,
    /// The reason why the cost could not be judged; `None` if it was judged.
    pub missing: Option<MissingCostReason>,
}

/// The reason why the memory, commands, host time or energy of a case cannot be judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissingCostReason {
    /// The cost has no meaning, because the case ran on the host.
    OnHost,
    /// A bench that uses Criterion alone records no cost.
    Criterion,
    /// The base build did not record the cost.
    Base,
    /// The head build did not record the cost.
    Head,
    /// Neither build recorded the cost.
    Both,
    /// Both builds recorded the cost, but as different figures, which cannot be compared.
    Figures,
}

impl MissingCostReason {
    pub const fn words(self) -> &'static str {
        match self {
            Self::OnHost => "there is no such cost on the CPU",
            Self::Criterion => "a bench that uses Criterion alone does not record it",
            Self::Base => "the base did not record it",
            Self::Head => "the head did not record it",
            Self::Both => "neither the base nor the head recorded it",
            Self::Figures => {
                "one side measured it, the other has only what its implementation declares"
            }
        }
    }
}

impl CaseCost {
    const ALL: [Self; 4] = [Self::DeviceMemory, Self::Launches, Self::HostTime, Self::Energy];

    /// The key in `kernelgate.toml`.
    pub const fn key(self) -> &'static str {
        match self {
            Self::DeviceMemory => "device-memory",
            Self::Launches => "launches",
            Self::HostTime => "host-time",
            Self::Energy => "energy",
        }
    }

    /// Growth of the cost that the package allows.
    pub const fn allowed(self, limits: &AskedLimits) -> Option<f64> {
        match self {
            Self::DeviceMemory => limits.device_memory,
            Self::Launches => limits.launches,
            Self::HostTime => limits.host_time,
            Self::Energy => limits.energy,
        }
    }

    /// Whether a run recorded each figure of the cost; a comparison needs a figure that both builds
    /// recorded.
    fn recorded(self, costs: &LaunchCosts) -> Vec<bool> {
        match self {
            Self::DeviceMemory => {
                vec![costs.device_bytes.is_some(), costs.measured_device_bytes.is_some()]
            }
            Self::Launches => vec![costs.commands.is_some()],
            Self::HostTime => vec![costs.host_launch_ns.is_some()],
            Self::Energy => vec![costs.launch_j.is_some()],
        }
    }
}

/// The bounds on the costs of a case, each with the reason if its growth ([`grown_costs`]) could
/// not be judged.
pub fn cost_bounds(
    case: &str,
    sides: [&[LaunchCosts]; 2],
    limits: &AskedLimits,
    on_host: bool,
) -> Vec<CostBound> {
    let missing = |cost: CaseCost| {
        let figures = cost.recorded(&LaunchCosts::default()).len();
        let [base, head] = sides.map(|side| {
            let has_figure = |figure: usize| side.iter().any(|run| cost.recorded(run)[figure]);
            (0..figures).map(has_figure).collect::<Vec<bool>>()
        });
        if base.iter().zip(&head).any(|(base, head)| *base && *head) {
            return None;
        }
        let has_any = |side: &[bool]| side.contains(&true);
        Some(match (has_any(&base), has_any(&head)) {
            (false, false) if on_host => MissingCostReason::OnHost,
            (true, false) => MissingCostReason::Head,
            (false, true) => MissingCostReason::Base,
            (false, false) => MissingCostReason::Both,
            (true, true) => MissingCostReason::Figures,
        })
    };
    cost_bounds_with(case, limits, missing)
}

/// The bounds on the costs of a case of Criterion alone, none of which can be judged.
pub fn criterion_cost_bounds(case: &str, limits: &AskedLimits) -> Vec<CostBound> {
    cost_bounds_with(case, limits, |_| Some(MissingCostReason::Criterion))
}

/// The bounds that are set, each with the reason that `missing` gives for its cost.
fn cost_bounds_with(
    case: &str,
    limits: &AskedLimits,
    missing: impl Fn(CaseCost) -> Option<MissingCostReason>,
) -> Vec<CostBound> {
    let set = CaseCost::ALL.into_iter().filter(|cost| cost.allowed(limits).is_some());
    set.map(|cost| CostBound { case: case.to_owned(), cost, missing: missing(cost) }).collect()
}

/// The bounds that could not be judged for some cases, with the number of cases and the reason. A
/// bound that could be judged for none of its cases is undecided, unless some ran on the host and
/// none on a device: the same file serves machines without a GPU.
pub fn unjudged_cost_bounds(rules: &PackageRules, bounds: &[CostBound]) -> RulesReport {
    let mut report = RulesReport::default();
    for rule in &rules.thresholds {
        for cost in CaseCost::ALL.into_iter().filter(|cost| cost.allowed(&rule.limits).is_some()) {
            let named = |it: &&CostBound| it.cost == cost && rule.cases.is_match(&it.case);
            let named: Vec<&CostBound> = bounds.iter().filter(named).collect();
            let mut reasons: BTreeMap<MissingCostReason, usize> = BTreeMap::new();
            for missing in named.iter().filter_map(|it| it.missing) {
                *reasons.entry(missing).or_default() += 1;
            }
            let (count, all) = (reasons.values().sum::<usize>(), named.len());
            if count == 0 {
                continue;
            }
            let why: Vec<String> = reasons
                .iter()
                .map(|(missing, of)| match reasons.len() {
                    1 => missing.words().to_owned(),
                    _ => format!("{} ({of})", missing.words()),
                })
                .collect();
            let line = format!(
                "{}: {} could not be judged for {count} of {all} cases: {}",
                rule.name(),
                cost.key(),
                why.join(", ")
            );
            let on_device = |it: &MissingCostReason| {
                !matches!(it, MissingCostReason::OnHost | MissingCostReason::Criterion)
            };
            let on_host =
                reasons.contains_key(&MissingCostReason::OnHost) && !reasons.keys().any(on_device);
            match count == all && !on_host {
                true => report.undecided.push(line),
                false => report.notes.push(line),
            }
        }
    }
    report
}

/// Returns the costs of a case that grew by more than allowed; a cost that one side did not record
/// does not count as grown.
pub fn grown_costs(
    case: &str,
    [base, head]: [&[LaunchCosts]; 2],
    limits: &AskedLimits,
) -> Vec<CostGrowth> {
    let both = |value: fn(&LaunchCosts) -> Option<f64>| {
        let middle = |side: &[LaunchCosts]| {
            let values: Vec<f64> = side.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| median(&values))
        };
        middle(base).zip(middle(head))
    };
    let growth_of = |cost: CaseCost, sides: Option<(f64, f64)>, allowed: Option<f64>| {
        let ((base, head), allowed) = (sides?, allowed?);
        let growth = CostGrowth { case: case.to_owned(), cost, base, head, allowed, further: None };
        (head > base * (1.0 + allowed)).then_some(growth)
    };
    let measured = both(|costs| costs.measured_device_bytes.map(|bytes| bytes as f64));
    let declared = both(|costs| costs.device_bytes.map(|bytes| bytes as f64));
    let commands = both(|costs| costs.commands.map(|count| count as f64));
    let host = both(|costs| costs.host_launch_ns);
    let energy = both(|costs| costs.launch_j);
    let costs = [
        growth_of(CaseCost::DeviceMemory, judged_memory(measured, declared), limits.device_memory),
        growth_of(CaseCost::Launches, commands, limits.launches),
        growth_of(CaseCost::HostTime, host, limits.host_time),
        growth_of(CaseCost::Energy, energy, limits.energy),
    ];
    costs.into_iter().flatten().collect()
}

/// Device memory of base and head that is judged: measured or declared.
fn judged_memory(measured: Option<(f64, f64)>, declared: Option<(f64, f64)>) -> Option<(f64, f64)> {
    let coarse = |(base, head): &(f64, f64)| (head - base).abs() <= DEVICE_MEMORY_GRANULARITY;
    match measured {
        None => declared,
        // The rows declare more growth than was measured, so the measurement counts.
        Some(both) if coarse(&both) => declared.filter(coarse),
        fine => fine,
    }
}

#[cfg(test)]
mod tests {
    use super::super::rules::rules_file;
    use super::*;

    #[test]
    fn growth_of_the_energy_of_a_launch_is_judged() {
        let limits = AskedLimits { energy: Some(0.1), ..AskedLimits::default() };
        let launch_costs =
            |joules| [LaunchCosts { launch_j: Some(joules), ..LaunchCosts::default() }];
        let (base, same, more) = (launch_costs(0.5), launch_costs(0.54), launch_costs(0.6));
        assert_eq!(grown_costs("x", [&base, &same], &limits), []);
        let found = grown_costs("x", [&base, &more], &limits);
        let words = "energy of a launch 600.0 mJ, was 500.0 mJ (+20.0%, 10% are allowed)";
        assert_eq!(found[0].words(), words);
        let unknown = cost_bounds("x", [&[LaunchCosts::default()], &more], &limits, false);
        assert_eq!(unknown[0].missing, Some(MissingCostReason::Base));
    }

    #[test]
    fn costs_are_judged_if_both_sides_know_them_and_the_package_asks() {
        let costs = |bytes, commands, host| LaunchCosts {
            device_bytes: Some(bytes),
            measured_device_bytes: None,
            commands: Some(commands),
            host_launch_ns: Some(host),
            ..LaunchCosts::default()
        };
        let (base, head) = ([costs(1000, 7, 4e3)], [costs(1500, 8, 5e3)]);
        let limits = AskedLimits {
            device_memory: Some(0.4),
            launches: Some(0.0),
            host_time: Some(0.3),
            ..AskedLimits::default()
        };
        let words = |base: &[LaunchCosts], head: &[LaunchCosts], limits: &AskedLimits| {
            grown_costs("x", [base, head], limits).iter().map(CostGrowth::words).collect::<Vec<_>>()
        };
        assert_eq!(
            words(&base, &head, &limits),
            [
                "device memory 1.50 kB, was 1.00 kB (+50.0%, 40% are allowed)",
                "commands of a launch 8, was 7 (+14.3%, 0% are allowed)"
            ]
        );
        assert!(words(&base, &head, &AskedLimits::default()).is_empty());
        assert!(words(&[LaunchCosts::default()], &head, &limits).is_empty());
        assert!(words(&base, &base, &limits).is_empty());
        let memory = words(&[costs(0, 7, 4e3)], &head, &limits).remove(0);
        assert_eq!(memory, "device memory 1.50 kB, was 0 (40% more are allowed)");
    }

    #[test]
    fn a_cost_that_one_side_did_not_record_is_missing_with_the_reason() {
        use MissingCostReason::{Base, Both, Head, OnHost};
        let limits =
            AskedLimits { device_memory: Some(0.1), launches: Some(0.0), ..AskedLimits::default() };
        let recorded = LaunchCosts { commands: Some(7), ..LaunchCosts::default() };
        let nothing = LaunchCosts::default();
        let missing = |base: LaunchCosts, head: LaunchCosts, on_host: bool| {
            let bounds = cost_bounds("x", [&[base], &[head]], &limits, on_host);
            bounds.iter().map(|it| (it.cost, it.missing)).collect::<Vec<_>>()
        };
        let both = |memory, launches| {
            vec![(CaseCost::DeviceMemory, memory), (CaseCost::Launches, launches)]
        };
        assert_eq!(missing(recorded, recorded, false), both(Some(Both), None));
        assert_eq!(missing(nothing, recorded, false), both(Some(Both), Some(Base)));
        assert_eq!(missing(recorded, nothing, true), both(Some(OnHost), Some(Head)));
        assert_eq!(missing(nothing, nothing, true), both(Some(OnHost), Some(OnHost)));
        let declared = LaunchCosts { device_bytes: Some(1), ..recorded };
        let measured = LaunchCosts { measured_device_bytes: Some(1), ..recorded };
        assert_eq!(
            missing(declared, measured, false),
            both(Some(MissingCostReason::Figures), None)
        );
        assert_eq!(
            cost_bounds("x", [&[recorded], &[recorded]], &AskedLimits::default(), false),
            []
        );
    }

    #[test]
    fn an_unused_cost_limit_is_reported_and_one_that_no_case_decides_is_inconclusive() {
        let text = "[[threshold]]\ncases = \".\"\ndevice-memory = 0.1\nlaunches = 0\n\
                    [[threshold]]\ncases = \"^b\"\nhost-time = 0.1\n";
        let rules = rules_file::parse("kernelgate.toml", text).unwrap();
        let bound = |case: &str, cost, missing| CostBound { case: case.to_owned(), cost, missing };
        let report = unjudged_cost_bounds(
            &rules,
            &[
                bound("a", CaseCost::DeviceMemory, None),
                bound("b", CaseCost::DeviceMemory, Some(MissingCostReason::Head)),
                bound("a", CaseCost::Launches, Some(MissingCostReason::OnHost)),
                bound("b", CaseCost::Launches, Some(MissingCostReason::OnHost)),
                bound("b", CaseCost::HostTime, Some(MissingCostReason::Base)),
            ],
        );
        let lines = [
            "inconclusive: kernelgate.toml: [[threshold]] `^b`: host-time could not be judged for \
             1 of 1 cases: the base did not record it",
            "kernelgate.toml: [[threshold]] `.`: device-memory could not be judged for 1 of 2 \
             cases: the head did not record it",
            "kernelgate.toml: [[threshold]] `.`: launches could not be judged for 2 of 2 cases: \
             there is no such cost on the CPU",
        ];
        assert_eq!(report.lines(), lines);
        assert_eq!(report.undecided.len(), 1);
        // The test has benches of Criterion beside other benches without a GPU, beside benches of a
        // side that recorded nothing, and alone.
        let beside = |missing| {
            let launches = |case, missing| bound(case, CaseCost::Launches, Some(missing));
            let rest =
                [MissingCostReason::Criterion, missing].map(|missing| launches("x", missing));
            let report = unjudged_cost_bounds(&rules, &rest);
            (report.notes.len(), report.undecided.len())
        };
        assert_eq!(beside(MissingCostReason::OnHost), (1, 0));
        assert_eq!(beside(MissingCostReason::Both), (0, 1));
        assert_eq!(beside(MissingCostReason::Criterion), (0, 1));
    }

    #[test]
    fn measured_memory_is_preferred_to_declared_and_small_growth_is_ignored() {
        const MIB: u64 = 1 << 20;
        let limits = AskedLimits { device_memory: Some(0.1), ..AskedLimits::default() };
        let costs = |measured: Option<u64>, declared: Option<u64>| LaunchCosts {
            device_bytes: declared.map(|it| it * MIB),
            measured_device_bytes: measured.map(|it| it * MIB),
            ..LaunchCosts::default()
        };
        let grew = |base: LaunchCosts, head: LaunchCosts| {
            let found = grown_costs("x", [&[base], &[head]], &limits);
            found.first().map(|it| (it.base as u64 / MIB, it.head as u64 / MIB))
        };
        // In this test the head has two more gigabytes of scratch memory, which the row does not
        // declare.
        let same = Some(64);
        assert_eq!(grew(costs(Some(70), same), costs(Some(2118), same)), Some((70, 2118)));
        assert_eq!(grew(costs(Some(70), None), costs(Some(2118), None)), Some((70, 2118)));
        // A few more pages.
        assert_eq!(grew(costs(Some(70), same), costs(Some(84), same)), None);
        assert_eq!(grew(costs(Some(70), None), costs(Some(84), None)), None);
        // In this test the declared growth is too small to be measured.
        assert_eq!(grew(costs(Some(4), Some(2)), costs(Some(6), Some(4))), Some((2, 4)));
        // In this test the growth is declared, but was not measured.
        assert_eq!(grew(costs(Some(70), same), costs(Some(70), Some(640))), None);
        // If only one side measured its memory, as with an older baseline, the declared sizes
        // count.
        assert_eq!(grew(costs(None, same), costs(Some(2118), same)), None);
        assert_eq!(grew(costs(None, same), costs(Some(2118), Some(128))), Some((64, 128)));
    }
}
