//! Compares the costs of a launch other than device time (memory, commands, host time, energy)
//! between base and head, if the package's rules limit them.
//!
//! Measured device memory counts only if it grew by more than `INSIGNIFICANT_MEMORY_GROWTH_BYTES`,
//! which driver pages, CUDA graphs and kernel code may add by themselves. If no run measured device
//! memory, the memory that the implementations declare is compared.

pub mod host_time;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::limits::RequestedLimits;
use super::rules::{PackageGateRules, RulesEffectReport};
use kernelgate::display;
use kernelgate::record::LaunchCostsBesidesDeviceTime;
use kernelgate::stats::median;

/// A cost of a launch other than its time: device memory, number of commands, host time or energy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchCostKind {
    /// Device memory of the case, measured or as its implementation declares it, bytes.
    DeviceMemory,
    /// Commands of a launch.
    Launches,
    /// Host time to enqueue one launch, nanoseconds.
    HostTime,
    /// Energy of one launch, joules.
    Energy,
}

/// Growth of measured device memory up to this size is ignored, bytes.
const INSIGNIFICANT_MEMORY_GROWTH_BYTES: f64 = (16 << 20) as f64;

/// A cost of a case that grew by more than the package's rules allow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostGrowthOfCase {
    /// Id of the case: `workload/problem/implementation/cache`.
    pub case: String,
    /// The cost that grew.
    pub cost: LaunchCostKind,
    /// Cost per launch in the base: the median over its runs, or over the further pairs if there
    /// are any.
    pub base: f64,
    /// Cost of the head.
    pub head: f64,
    /// Relative growth of the cost that the package's rules allow: 0.1 allows 10 %.
    pub allowed: f64,
    /// Result of the further process pairs that confirm a growth of the host's launch time; `None`
    /// for other costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub further: Option<GrowthConfirmationPairs>,
}

/// Result of further pairs of base and head processes that confirm a suspected growth;
/// [`CostGrowthOfCase`] then holds their medians.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrowthConfirmationPairs {
    /// Number of pairs.
    pub pairs: usize,
    /// Number of further pairs in which the cost grew by more than allowed.
    pub grown: usize,
    /// Whether the further pairs show the growth; otherwise the growth stays undecided.
    pub found: bool,
}

impl CostGrowthOfCase {
    /// Returns whether the growth of the cost is established and not only suspected.
    pub fn is_growth_established(&self) -> bool {
        self.further.is_none_or(|further| further.found)
    }

    /// Describes the growth of a cost: "device memory 3.0 GB, was 2.0 GB (+50.0%, 10% are
    /// allowed)".
    pub fn describe_growth(&self) -> String {
        let (what, show): (_, fn(f64) -> String) = match self.cost {
            LaunchCostKind::DeviceMemory => {
                ("device memory", |bytes| display::decimal_byte_size_text(bytes as u64))
            }
            LaunchCostKind::Launches => ("commands of a launch", |count| format!("{count}")),
            LaunchCostKind::HostTime => ("host time of a launch", display::time_text),
            LaunchCostKind::Energy => ("energy of a launch", display::energy_text),
        };
        let (head, base, allowed) = (show(self.head), show(self.base), 100.0 * self.allowed);
        let further = match self.further {
            None => String::new(),
            Some(GrowthConfirmationPairs { pairs: 0, .. }) => ", not measured again".to_owned(),
            Some(GrowthConfirmationPairs { pairs, grown, .. }) => {
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

/// A limit that the package's rules set for a cost of a case, with the reason if it could not be
/// judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostLimitOfCase {
    pub case: String,
    /// The bounded cost.
    pub cost: LaunchCostKind,
    /// The reason why this cost could not be judged; `None` if it was judged.
    pub missing: Option<MissingCostReason>,
}

/// The reason why the memory, commands, host time or energy of a case cannot be compared between
/// base and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissingCostReason {
    /// The cost does not exist, because the case runs on the host.
    OnHost,
    /// The bench uses Criterion without kernelgate, which records no costs.
    Criterion,
    /// The base did not record this cost of the case.
    MissingInBase,
    /// The head did not record this cost of the case.
    MissingInHead,
    /// Neither base nor head recorded this cost of the case.
    MissingInBoth,
    /// One build recorded only measured memory and the other only declared memory, which cannot be
    /// compared.
    Figures,
}

impl MissingCostReason {
    pub const fn reason_text(self) -> &'static str {
        match self {
            Self::OnHost => "there is no such cost on the CPU",
            Self::Criterion => "a bench that uses Criterion alone does not record it",
            Self::MissingInBase => "the base did not record it",
            Self::MissingInHead => "the head did not record it",
            Self::MissingInBoth => "neither the base nor the head recorded it",
            Self::Figures => {
                "one side measured it, the other has only what its implementation declares"
            }
        }
    }
}

impl LaunchCostKind {
    const ALL_KINDS: [Self; 4] = [Self::DeviceMemory, Self::Launches, Self::HostTime, Self::Energy];

    /// The key in `kernelgate.toml`.
    pub const fn kernelgate_toml_key(self) -> &'static str {
        match self {
            Self::DeviceMemory => "device-memory",
            Self::Launches => "launches",
            Self::HostTime => "host-time",
            Self::Energy => "energy",
        }
    }

    /// Returns the relative growth of this cost that the limits allow; `None` without a limit.
    pub const fn allowed_growth(self, limits: &RequestedLimits) -> Option<f64> {
        match self {
            Self::DeviceMemory => limits.device_memory,
            Self::Launches => limits.launches,
            Self::HostTime => limits.host_time,
            Self::Energy => limits.energy,
        }
    }

    /// Returns, for each figure of this cost (memory has two), whether a run recorded it; a
    /// comparison needs one figure that both builds recorded.
    fn recorded_figures(self, costs: &LaunchCostsBesidesDeviceTime) -> Vec<bool> {
        match self {
            Self::DeviceMemory => {
                vec![costs.device_bytes.is_some(), costs.measured_device_bytes.is_some()]
            }
            Self::Launches => vec![costs.commands.is_some()],
            Self::HostTime => vec![costs.host_launch_ns.is_some()],
            Self::Energy => vec![costs.launch_energy_j.is_some()],
        }
    }
}

/// Returns the limits that are set for the costs of a case, each with the reason if its growth
/// ([`costs_grown_beyond_limits`]) cannot be judged.
pub fn cost_limits_of_case(
    case: &str,
    sides: [&[LaunchCostsBesidesDeviceTime]; 2],
    limits: &RequestedLimits,
    on_host: bool,
) -> Vec<CostLimitOfCase> {
    let missing = |cost: LaunchCostKind| {
        let figures = cost.recorded_figures(&LaunchCostsBesidesDeviceTime::default()).len();
        let [base, head] = sides.map(|side| {
            let has_figure =
                |figure: usize| side.iter().any(|run| cost.recorded_figures(run)[figure]);
            (0..figures).map(has_figure).collect::<Vec<bool>>()
        });
        if base.iter().zip(&head).any(|(base, head)| *base && *head) {
            return None;
        }
        let has_any = |side: &[bool]| side.contains(&true);
        Some(match (has_any(&base), has_any(&head)) {
            (false, false) if on_host => MissingCostReason::OnHost,
            (true, false) => MissingCostReason::MissingInHead,
            (false, true) => MissingCostReason::MissingInBase,
            (false, false) => MissingCostReason::MissingInBoth,
            (true, true) => MissingCostReason::Figures,
        })
    };
    cost_limits_with_reasons(case, limits, missing)
}

/// Returns the limits that are set for the costs of a Criterion case, none of which can be judged.
pub fn cost_limits_of_criterion_case(case: &str, limits: &RequestedLimits) -> Vec<CostLimitOfCase> {
    cost_limits_with_reasons(case, limits, |_| Some(MissingCostReason::Criterion))
}

/// Returns the limits that are set for the costs of a case, with the reason that `missing` gives
/// for each cost.
fn cost_limits_with_reasons(
    case: &str,
    limits: &RequestedLimits,
    missing: impl Fn(LaunchCostKind) -> Option<MissingCostReason>,
) -> Vec<CostLimitOfCase> {
    let set =
        LaunchCostKind::ALL_KINDS.into_iter().filter(|cost| cost.allowed_growth(limits).is_some());
    set.map(|cost| CostLimitOfCase { case: case.to_owned(), cost, missing: missing(cost) })
        .collect()
}

/// Reports the cost limits of the package's rules that could not be judged for some cases, with the
/// number of cases and the reasons. A limit that could be judged for no case is undecided, unless
/// the reason is that cases ran on the CPU, because machines without a GPU use the same rules.
pub fn report_unjudged_cost_limits(
    rules: &PackageGateRules,
    bounds: &[CostLimitOfCase],
) -> RulesEffectReport {
    let mut report = RulesEffectReport::default();
    for rule in &rules.thresholds {
        for cost in LaunchCostKind::ALL_KINDS
            .into_iter()
            .filter(|cost| cost.allowed_growth(&rule.limits).is_some())
        {
            let named =
                |it: &&CostLimitOfCase| it.cost == cost && rule.case_pattern.is_match(&it.case);
            let named: Vec<&CostLimitOfCase> = bounds.iter().filter(named).collect();
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
                    1 => missing.reason_text().to_owned(),
                    _ => format!("{} ({of})", missing.reason_text()),
                })
                .collect();
            let line = format!(
                "{}: {} could not be judged for {count} of {all} cases: {}",
                rule.threshold_entry_name(),
                cost.kernelgate_toml_key(),
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

/// Returns the costs of a case that grew by more than the limits allow; a cost that base or head
/// did not record does not count.
pub fn costs_grown_beyond_limits(
    case: &str,
    [base, head]: [&[LaunchCostsBesidesDeviceTime]; 2],
    limits: &RequestedLimits,
) -> Vec<CostGrowthOfCase> {
    let both = |value: fn(&LaunchCostsBesidesDeviceTime) -> Option<f64>| {
        let middle = |side: &[LaunchCostsBesidesDeviceTime]| {
            let values: Vec<f64> = side.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| median(&values))
        };
        middle(base).zip(middle(head))
    };
    let growth_of = |cost: LaunchCostKind, sides: Option<(f64, f64)>, allowed: Option<f64>| {
        let ((base, head), allowed) = (sides?, allowed?);
        let growth =
            CostGrowthOfCase { case: case.to_owned(), cost, base, head, allowed, further: None };
        (head > base * (1.0 + allowed)).then_some(growth)
    };
    let measured = both(|costs| costs.measured_device_bytes.map(|bytes| bytes as f64));
    let declared = both(|costs| costs.device_bytes.map(|bytes| bytes as f64));
    let commands = both(|costs| costs.commands.map(|count| count as f64));
    let host = both(|costs| costs.host_launch_ns);
    let energy = both(|costs| costs.launch_energy_j);
    let costs = [
        growth_of(
            LaunchCostKind::DeviceMemory,
            device_memory_to_judge(measured, declared),
            limits.device_memory,
        ),
        growth_of(LaunchCostKind::Launches, commands, limits.launches),
        growth_of(LaunchCostKind::HostTime, host, limits.host_time),
        growth_of(LaunchCostKind::Energy, energy, limits.energy),
    ];
    costs.into_iter().flatten().collect()
}

/// Returns the device memory of base and head that is judged: the measured one, or the declared one
/// without a significant measured growth.
fn device_memory_to_judge(
    measured: Option<(f64, f64)>,
    declared: Option<(f64, f64)>,
) -> Option<(f64, f64)> {
    let coarse =
        |(base, head): &(f64, f64)| (head - base).abs() <= INSIGNIFICANT_MEMORY_GROWTH_BYTES;
    match measured {
        None => declared,
        // If the measured growth is insignificant, a larger declared growth does not count.
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
        let limits = RequestedLimits { energy: Some(0.1), ..RequestedLimits::default() };
        let launch_costs = |joules| {
            [LaunchCostsBesidesDeviceTime {
                launch_energy_j: Some(joules),
                ..LaunchCostsBesidesDeviceTime::default()
            }]
        };
        let (base, same, more) = (launch_costs(0.5), launch_costs(0.54), launch_costs(0.6));
        assert_eq!(costs_grown_beyond_limits("x", [&base, &same], &limits), []);
        let found = costs_grown_beyond_limits("x", [&base, &more], &limits);
        let words = "energy of a launch 600.0 mJ, was 500.0 mJ (+20.0%, 10% are allowed)";
        assert_eq!(found[0].describe_growth(), words);
        let unknown = cost_limits_of_case(
            "x",
            [&[LaunchCostsBesidesDeviceTime::default()], &more],
            &limits,
            false,
        );
        assert_eq!(unknown[0].missing, Some(MissingCostReason::MissingInBase));
    }

    #[test]
    fn costs_recorded_by_both_sides_are_judged_if_rules_ask() {
        let costs = |bytes, commands, host| LaunchCostsBesidesDeviceTime {
            device_bytes: Some(bytes),
            measured_device_bytes: None,
            commands: Some(commands),
            host_launch_ns: Some(host),
            ..LaunchCostsBesidesDeviceTime::default()
        };
        let (base, head) = ([costs(1000, 7, 4e3)], [costs(1500, 8, 5e3)]);
        let limits = RequestedLimits {
            device_memory: Some(0.4),
            launches: Some(0.0),
            host_time: Some(0.3),
            ..RequestedLimits::default()
        };
        let words = |base: &[LaunchCostsBesidesDeviceTime],
                     head: &[LaunchCostsBesidesDeviceTime],
                     limits: &RequestedLimits| {
            costs_grown_beyond_limits("x", [base, head], limits)
                .iter()
                .map(CostGrowthOfCase::describe_growth)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            words(&base, &head, &limits),
            [
                "device memory 1.50 kB, was 1.00 kB (+50.0%, 40% are allowed)",
                "commands of a launch 8, was 7 (+14.3%, 0% are allowed)"
            ]
        );
        assert!(words(&base, &head, &RequestedLimits::default()).is_empty());
        assert!(words(&[LaunchCostsBesidesDeviceTime::default()], &head, &limits).is_empty());
        assert!(words(&base, &base, &limits).is_empty());
        let memory = words(&[costs(0, 7, 4e3)], &head, &limits).remove(0);
        assert_eq!(memory, "device memory 1.50 kB, was 0 (40% more are allowed)");
    }

    #[test]
    fn a_cost_that_one_side_did_not_record_is_missing_with_the_reason() {
        use MissingCostReason::{MissingInBase, MissingInBoth, MissingInHead, OnHost};
        let limits = RequestedLimits {
            device_memory: Some(0.1),
            launches: Some(0.0),
            ..RequestedLimits::default()
        };
        let recorded = LaunchCostsBesidesDeviceTime {
            commands: Some(7),
            ..LaunchCostsBesidesDeviceTime::default()
        };
        let nothing = LaunchCostsBesidesDeviceTime::default();
        let missing = |base: LaunchCostsBesidesDeviceTime,
                       head: LaunchCostsBesidesDeviceTime,
                       on_host: bool| {
            let bounds = cost_limits_of_case("x", [&[base], &[head]], &limits, on_host);
            bounds.iter().map(|it| (it.cost, it.missing)).collect::<Vec<_>>()
        };
        let both = |memory, launches| {
            vec![(LaunchCostKind::DeviceMemory, memory), (LaunchCostKind::Launches, launches)]
        };
        assert_eq!(missing(recorded, recorded, false), both(Some(MissingInBoth), None));
        assert_eq!(
            missing(nothing, recorded, false),
            both(Some(MissingInBoth), Some(MissingInBase))
        );
        assert_eq!(missing(recorded, nothing, true), both(Some(OnHost), Some(MissingInHead)));
        assert_eq!(missing(nothing, nothing, true), both(Some(OnHost), Some(OnHost)));
        let declared = LaunchCostsBesidesDeviceTime { device_bytes: Some(1), ..recorded };
        let measured = LaunchCostsBesidesDeviceTime { measured_device_bytes: Some(1), ..recorded };
        assert_eq!(
            missing(declared, measured, false),
            both(Some(MissingCostReason::Figures), None)
        );
        assert_eq!(
            cost_limits_of_case(
                "x",
                [&[recorded], &[recorded]],
                &RequestedLimits::default(),
                false
            ),
            []
        );
    }

    #[test]
    fn an_unused_cost_limit_is_reported_and_one_that_no_case_decides_is_inconclusive() {
        let text = "[[threshold]]\ncases = \".\"\ndevice-memory = 0.1\nlaunches = 0\n\
                    [[threshold]]\ncases = \"^b\"\nhost-time = 0.1\n";
        let rules = rules_file::parse_rules("kernelgate.toml", text).unwrap();
        let bound =
            |case: &str, cost, missing| CostLimitOfCase { case: case.to_owned(), cost, missing };
        let report = report_unjudged_cost_limits(
            &rules,
            &[
                bound("a", LaunchCostKind::DeviceMemory, None),
                bound("b", LaunchCostKind::DeviceMemory, Some(MissingCostReason::MissingInHead)),
                bound("a", LaunchCostKind::Launches, Some(MissingCostReason::OnHost)),
                bound("b", LaunchCostKind::Launches, Some(MissingCostReason::OnHost)),
                bound("b", LaunchCostKind::HostTime, Some(MissingCostReason::MissingInBase)),
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
        assert_eq!(report.report_lines(), lines);
        assert_eq!(report.undecided.len(), 1);
        // The test has Criterion benches beside other benches without a GPU, beside benches that
        // recorded nothing, and by themselves.
        let beside = |missing| {
            let launches = |case, missing| bound(case, LaunchCostKind::Launches, Some(missing));
            let rest =
                [MissingCostReason::Criterion, missing].map(|missing| launches("x", missing));
            let report = report_unjudged_cost_limits(&rules, &rest);
            (report.notes.len(), report.undecided.len())
        };
        assert_eq!(beside(MissingCostReason::OnHost), (1, 0));
        assert_eq!(beside(MissingCostReason::MissingInBoth), (0, 1));
        assert_eq!(beside(MissingCostReason::Criterion), (0, 1));
    }

    #[test]
    fn measured_memory_is_preferred_to_declared_and_small_growth_is_ignored() {
        const MIB: u64 = 1 << 20;
        let limits = RequestedLimits { device_memory: Some(0.1), ..RequestedLimits::default() };
        let costs = |measured: Option<u64>, declared: Option<u64>| LaunchCostsBesidesDeviceTime {
            device_bytes: declared.map(|it| it * MIB),
            measured_device_bytes: measured.map(|it| it * MIB),
            ..LaunchCostsBesidesDeviceTime::default()
        };
        let grew = |base: LaunchCostsBesidesDeviceTime, head: LaunchCostsBesidesDeviceTime| {
            let found = costs_grown_beyond_limits("x", [&[base], &[head]], &limits);
            found.first().map(|it| (it.base as u64 / MIB, it.head as u64 / MIB))
        };
        // In this test, the head has two more gigabytes of scratch memory that its implementation
        // does not declare.
        let same = Some(64);
        assert_eq!(grew(costs(Some(70), same), costs(Some(2118), same)), Some((70, 2118)));
        assert_eq!(grew(costs(Some(70), None), costs(Some(2118), None)), Some((70, 2118)));
        // A few more pages.
        assert_eq!(grew(costs(Some(70), same), costs(Some(84), same)), None);
        assert_eq!(grew(costs(Some(70), None), costs(Some(84), None)), None);
        // In this test, the declared growth of memory is too small to be measured.
        assert_eq!(grew(costs(Some(4), Some(2)), costs(Some(6), Some(4))), Some((2, 4)));
        // In this test, the implementation declares a growth of memory that was not measured.
        assert_eq!(grew(costs(Some(70), same), costs(Some(70), Some(640))), None);
        // If only one build measured its memory, as with an older baseline, the declared sizes are
        // compared.
        assert_eq!(grew(costs(None, same), costs(Some(2118), same)), None);
        assert_eq!(grew(costs(None, same), costs(Some(2118), Some(128))), Some((64, 128)));
    }
}
