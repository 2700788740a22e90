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
use super::rules::{GateRulesEffectReport, PackageGateRules};
use kernelgate::display;
use kernelgate::record::LaunchCostsBesidesDeviceTime;
use kernelgate::stats::median;

/// A cost of a launch other than its time: device memory, number of commands, host time or energy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchCostKind {
    /// Device memory of the case, measured or as its implementation declares it, bytes.
    #[serde(rename = "device_memory")]
    DeviceMemoryBytes,
    /// Number of commands, such as kernels and copies, that one launch enqueues.
    #[serde(rename = "launches")]
    CommandsPerLaunch,
    /// Host time to enqueue one launch, nanoseconds.
    #[serde(rename = "host_time")]
    HostEnqueueTime,
    /// Energy of one launch, joules.
    #[serde(rename = "energy")]
    EnergyPerLaunch,
}

/// Growth of measured device memory up to this size is ignored, bytes.
const INSIGNIFICANT_MEMORY_GROWTH_BYTES: f64 = (16 << 20) as f64;

/// A cost of a case that grew by more than the package's rules allow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaunchCostGrowthOfCase {
    /// Id of the case, in the form `workload/problem/implementation/cache`.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Kind of launch cost that grew: device memory, number of commands, host time or energy.
    pub cost: LaunchCostKind,
    /// Cost per launch in the base: the median over its runs, or over the further pairs if there
    /// are any.
    #[serde(rename = "base")]
    pub base_cost: f64,
    /// Cost of the case per launch in the head.
    #[serde(rename = "head")]
    pub head_cost: f64,
    /// Relative growth of the cost that the package's rules allow: 0.1 allows 10 %.
    #[serde(rename = "allowed")]
    pub allowed_relative_growth: f64,
    /// Result of the further process pairs that confirm a growth of the host's launch time; `None`
    /// for other costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "further")]
    pub growth_confirmation: Option<GrowthConfirmationPairs>,
}

/// Result of further pairs of base and head processes that confirm a suspected growth;
/// [`LaunchCostGrowthOfCase`] then holds their medians.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrowthConfirmationPairs {
    /// Number of pairs.
    #[serde(rename = "pairs")]
    pub pair_count: usize,
    /// Number of further pairs of processes in which the cost grew by more than the rules allow.
    #[serde(rename = "grown")]
    pub pairs_with_growth: usize,
    /// Whether the further pairs show the growth; otherwise the growth stays undecided.
    #[serde(rename = "found")]
    pub growth_confirmed: bool,
}

impl LaunchCostGrowthOfCase {
    /// Returns whether the growth of the cost is established and not only suspected.
    pub fn is_growth_established(&self) -> bool {
        self.growth_confirmation.is_none_or(|further| further.growth_confirmed)
    }

    /// Describes the growth of a cost: "device memory 3.0 GB, was 2.0 GB (+50.0%, 10% are
    /// allowed)".
    pub fn describe_growth(&self) -> String {
        let (what, show): (_, fn(f64) -> String) = match self.cost {
            LaunchCostKind::DeviceMemoryBytes => {
                ("device memory", |bytes| display::decimal_byte_size_text(bytes as u64))
            }
            LaunchCostKind::CommandsPerLaunch => {
                ("commands of a launch", |count| format!("{count}"))
            }
            LaunchCostKind::HostEnqueueTime => ("host time of a launch", display::time_text),
            LaunchCostKind::EnergyPerLaunch => ("energy of a launch", display::energy_text),
        };
        let (head, base, allowed) =
            (show(self.head_cost), show(self.base_cost), 100.0 * self.allowed_relative_growth);
        let further = match self.growth_confirmation {
            None => String::new(),
            Some(GrowthConfirmationPairs { pair_count: 0, .. }) => {
                ", not measured again".to_owned()
            }
            Some(GrowthConfirmationPairs {
                pair_count: pairs, pairs_with_growth: grown, ..
            }) => {
                format!(" in {grown} of {pairs} further pairs of processes")
            }
        };
        if self.base_cost <= 0.0 {
            return format!("{what} {head}, was 0 ({allowed}% more are allowed){further}");
        }
        let grown = 100.0 * (self.head_cost / self.base_cost - 1.0);
        format!("{what} {head}, was {base} ({grown:+.1}%, {allowed}% are allowed){further}")
    }
}

/// A limit that the package's rules set for a cost of a case, with the reason if it could not be
/// judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchCostLimitOfCase {
    pub case_id: String,
    /// The bounded cost.
    pub cost: LaunchCostKind,
    /// The reason why growth of the bounded cost could not be judged; `None` if it was judged.
    pub missing: Option<MissingCostReason>,
}

/// The reason why the memory, commands, host time or energy of a case cannot be compared between
/// base and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissingCostReason {
    /// The cost does not exist, because the case runs on the host.
    CaseRunsOnHost,
    /// The bench uses Criterion without kernelgate, which records no costs.
    CriterionRecordsNoCosts,
    /// The base did not record this cost of the case.
    CostMissingInBase,
    /// The head did not record this cost of the case.
    CostMissingInHead,
    /// Neither base nor head recorded this cost of the case.
    CostMissingInBoth,
    /// One build recorded only measured memory and the other only declared memory, which cannot be
    /// compared.
    MeasuredAgainstDeclaredMemory,
}

impl MissingCostReason {
    pub const fn reason_text(self) -> &'static str {
        match self {
            Self::CaseRunsOnHost => "there is no such cost on the CPU",
            Self::CriterionRecordsNoCosts => "a bench that uses Criterion alone does not record it",
            Self::CostMissingInBase => "the base did not record it",
            Self::CostMissingInHead => "the head did not record it",
            Self::CostMissingInBoth => "neither the base nor the head recorded it",
            Self::MeasuredAgainstDeclaredMemory => {
                "one side measured it, the other has only what its implementation declares"
            }
        }
    }
}

impl LaunchCostKind {
    const ALL_KINDS: [Self; 4] = [
        Self::DeviceMemoryBytes,
        Self::CommandsPerLaunch,
        Self::HostEnqueueTime,
        Self::EnergyPerLaunch,
    ];

    /// Returns the key of this cost's limit in `kernelgate.toml`.
    pub const fn kernelgate_toml_key(self) -> &'static str {
        match self {
            Self::DeviceMemoryBytes => "device-memory",
            Self::CommandsPerLaunch => "launches",
            Self::HostEnqueueTime => "host-time",
            Self::EnergyPerLaunch => "energy",
        }
    }

    /// Returns the relative growth of this cost that the limits allow; `None` without a limit.
    pub const fn allowed_growth(self, limits: &RequestedLimits) -> Option<f64> {
        match self {
            Self::DeviceMemoryBytes => limits.device_memory_growth_threshold,
            Self::CommandsPerLaunch => limits.command_growth_threshold,
            Self::HostEnqueueTime => limits.host_time_growth_threshold,
            Self::EnergyPerLaunch => limits.energy_growth_threshold,
        }
    }

    /// Returns, for each figure of this cost (memory has two), whether a run recorded it; a
    /// comparison needs one figure that both builds recorded.
    fn recorded_figures(self, costs: &LaunchCostsBesidesDeviceTime) -> Vec<bool> {
        match self {
            Self::DeviceMemoryBytes => {
                vec![costs.declared_device_bytes.is_some(), costs.measured_device_bytes.is_some()]
            }
            Self::CommandsPerLaunch => vec![costs.gpu_commands.is_some()],
            Self::HostEnqueueTime => vec![costs.host_launch_ns.is_some()],
            Self::EnergyPerLaunch => vec![costs.launch_energy_j.is_some()],
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
) -> Vec<LaunchCostLimitOfCase> {
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
            (false, false) if on_host => MissingCostReason::CaseRunsOnHost,
            (true, false) => MissingCostReason::CostMissingInHead,
            (false, true) => MissingCostReason::CostMissingInBase,
            (false, false) => MissingCostReason::CostMissingInBoth,
            (true, true) => MissingCostReason::MeasuredAgainstDeclaredMemory,
        })
    };
    cost_limits_with_reasons(case, limits, missing)
}

/// Returns the limits that are set for the costs of a Criterion case, none of which can be judged.
pub fn cost_limits_of_criterion_case(
    case: &str,
    limits: &RequestedLimits,
) -> Vec<LaunchCostLimitOfCase> {
    cost_limits_with_reasons(case, limits, |_| Some(MissingCostReason::CriterionRecordsNoCosts))
}

/// Returns the limits that are set for the costs of a case, with the reason that `missing` gives
/// for each cost.
fn cost_limits_with_reasons(
    case: &str,
    limits: &RequestedLimits,
    missing: impl Fn(LaunchCostKind) -> Option<MissingCostReason>,
) -> Vec<LaunchCostLimitOfCase> {
    let set =
        LaunchCostKind::ALL_KINDS.into_iter().filter(|cost| cost.allowed_growth(limits).is_some());
    set.map(|cost| LaunchCostLimitOfCase { case_id: case.to_owned(), cost, missing: missing(cost) })
        .collect()
}

/// Reports the cost limits of the package's rules that could not be judged for some cases, with the
/// number of cases and the reasons. A limit that could be judged for no case is undecided, unless
/// the reason is that cases ran on the CPU, because machines without a GPU use the same rules.
pub fn report_unjudged_cost_limits(
    rules: &PackageGateRules,
    bounds: &[LaunchCostLimitOfCase],
) -> GateRulesEffectReport {
    let mut report = GateRulesEffectReport::default();
    for rule in &rules.thresholds {
        for cost in LaunchCostKind::ALL_KINDS
            .into_iter()
            .filter(|cost| cost.allowed_growth(&rule.limits).is_some())
        {
            let named = |it: &&LaunchCostLimitOfCase| {
                it.cost == cost && rule.case_pattern.is_match(&it.case_id)
            };
            let named: Vec<&LaunchCostLimitOfCase> = bounds.iter().filter(named).collect();
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
                !matches!(
                    it,
                    MissingCostReason::CaseRunsOnHost | MissingCostReason::CriterionRecordsNoCosts
                )
            };
            let on_host = reasons.contains_key(&MissingCostReason::CaseRunsOnHost)
                && !reasons.keys().any(on_device);
            match count == all && !on_host {
                true => report.notes_on_unjudged_limits.push(line),
                false => report.notes_on_rules_without_effect.push(line),
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
) -> Vec<LaunchCostGrowthOfCase> {
    let both = |value: fn(&LaunchCostsBesidesDeviceTime) -> Option<f64>| {
        let middle = |side: &[LaunchCostsBesidesDeviceTime]| {
            let values: Vec<f64> = side.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| median(&values))
        };
        middle(base).zip(middle(head))
    };
    let growth_of = |cost: LaunchCostKind, sides: Option<(f64, f64)>, allowed: Option<f64>| {
        let ((base, head), allowed) = (sides?, allowed?);
        let growth = LaunchCostGrowthOfCase {
            case_id: case.to_owned(),
            cost,
            base_cost: base,
            head_cost: head,
            allowed_relative_growth: allowed,
            growth_confirmation: None,
        };
        (head > base * (1.0 + allowed)).then_some(growth)
    };
    let measured = both(|costs| costs.measured_device_bytes.map(|bytes| bytes as f64));
    let declared = both(|costs| costs.declared_device_bytes.map(|bytes| bytes as f64));
    let commands = both(|costs| costs.gpu_commands.map(|count| count as f64));
    let host = both(|costs| costs.host_launch_ns);
    let energy = both(|costs| costs.launch_energy_j);
    let costs = [
        growth_of(
            LaunchCostKind::DeviceMemoryBytes,
            device_memory_to_judge(measured, declared),
            limits.device_memory_growth_threshold,
        ),
        growth_of(LaunchCostKind::CommandsPerLaunch, commands, limits.command_growth_threshold),
        growth_of(LaunchCostKind::HostEnqueueTime, host, limits.host_time_growth_threshold),
        growth_of(LaunchCostKind::EnergyPerLaunch, energy, limits.energy_growth_threshold),
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
        let limits =
            RequestedLimits { energy_growth_threshold: Some(0.1), ..RequestedLimits::default() };
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
        assert_eq!(unknown[0].missing, Some(MissingCostReason::CostMissingInBase));
    }

    #[test]
    fn costs_recorded_by_both_sides_are_judged_if_rules_ask() {
        let costs = |bytes, commands, host| LaunchCostsBesidesDeviceTime {
            declared_device_bytes: Some(bytes),
            measured_device_bytes: None,
            gpu_commands: Some(commands),
            host_launch_ns: Some(host),
            ..LaunchCostsBesidesDeviceTime::default()
        };
        let (base, head) = ([costs(1000, 7, 4e3)], [costs(1500, 8, 5e3)]);
        let limits = RequestedLimits {
            device_memory_growth_threshold: Some(0.4),
            command_growth_threshold: Some(0.0),
            host_time_growth_threshold: Some(0.3),
            ..RequestedLimits::default()
        };
        let words = |base: &[LaunchCostsBesidesDeviceTime],
                     head: &[LaunchCostsBesidesDeviceTime],
                     limits: &RequestedLimits| {
            costs_grown_beyond_limits("x", [base, head], limits)
                .iter()
                .map(LaunchCostGrowthOfCase::describe_growth)
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
        use MissingCostReason::{
            CaseRunsOnHost, CostMissingInBase, CostMissingInBoth, CostMissingInHead,
        };
        let limits = RequestedLimits {
            device_memory_growth_threshold: Some(0.1),
            command_growth_threshold: Some(0.0),
            ..RequestedLimits::default()
        };
        let recorded = LaunchCostsBesidesDeviceTime {
            gpu_commands: Some(7),
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
            vec![
                (LaunchCostKind::DeviceMemoryBytes, memory),
                (LaunchCostKind::CommandsPerLaunch, launches),
            ]
        };
        assert_eq!(missing(recorded, recorded, false), both(Some(CostMissingInBoth), None));
        assert_eq!(
            missing(nothing, recorded, false),
            both(Some(CostMissingInBoth), Some(CostMissingInBase))
        );
        assert_eq!(
            missing(recorded, nothing, true),
            both(Some(CaseRunsOnHost), Some(CostMissingInHead))
        );
        assert_eq!(
            missing(nothing, nothing, true),
            both(Some(CaseRunsOnHost), Some(CaseRunsOnHost))
        );
        let declared = LaunchCostsBesidesDeviceTime { declared_device_bytes: Some(1), ..recorded };
        let measured = LaunchCostsBesidesDeviceTime { measured_device_bytes: Some(1), ..recorded };
        assert_eq!(
            missing(declared, measured, false),
            both(Some(MissingCostReason::MeasuredAgainstDeclaredMemory), None)
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
        let bound = |case: &str, cost, missing| LaunchCostLimitOfCase {
            case_id: case.to_owned(),
            cost,
            missing,
        };
        let report = report_unjudged_cost_limits(
            &rules,
            &[
                bound("a", LaunchCostKind::DeviceMemoryBytes, None),
                bound(
                    "b",
                    LaunchCostKind::DeviceMemoryBytes,
                    Some(MissingCostReason::CostMissingInHead),
                ),
                bound(
                    "a",
                    LaunchCostKind::CommandsPerLaunch,
                    Some(MissingCostReason::CaseRunsOnHost),
                ),
                bound(
                    "b",
                    LaunchCostKind::CommandsPerLaunch,
                    Some(MissingCostReason::CaseRunsOnHost),
                ),
                bound(
                    "b",
                    LaunchCostKind::HostEnqueueTime,
                    Some(MissingCostReason::CostMissingInBase),
                ),
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
        assert_eq!(report.notes_on_unjudged_limits.len(), 1);
        // The test combines Criterion benches with benches without a GPU and with benches that
        // recorded nothing, and then has Criterion benches alone.
        let beside = |missing| {
            let launches =
                |case, missing| bound(case, LaunchCostKind::CommandsPerLaunch, Some(missing));
            let rest = [MissingCostReason::CriterionRecordsNoCosts, missing]
                .map(|missing| launches("x", missing));
            let report = report_unjudged_cost_limits(&rules, &rest);
            (report.notes_on_rules_without_effect.len(), report.notes_on_unjudged_limits.len())
        };
        assert_eq!(beside(MissingCostReason::CaseRunsOnHost), (1, 0));
        assert_eq!(beside(MissingCostReason::CostMissingInBoth), (0, 1));
        assert_eq!(beside(MissingCostReason::CriterionRecordsNoCosts), (0, 1));
    }

    #[test]
    fn measured_memory_is_preferred_to_declared_and_small_growth_is_ignored() {
        const MIB: u64 = 1 << 20;
        let limits = RequestedLimits {
            device_memory_growth_threshold: Some(0.1),
            ..RequestedLimits::default()
        };
        let costs = |measured: Option<u64>, declared: Option<u64>| LaunchCostsBesidesDeviceTime {
            declared_device_bytes: declared.map(|it| it * MIB),
            measured_device_bytes: measured.map(|it| it * MIB),
            ..LaunchCostsBesidesDeviceTime::default()
        };
        let grew = |base: LaunchCostsBesidesDeviceTime, head: LaunchCostsBesidesDeviceTime| {
            let found = costs_grown_beyond_limits("x", [&[base], &[head]], &limits);
            found.first().map(|it| (it.base_cost as u64 / MIB, it.head_cost as u64 / MIB))
        };
        // In this test, the head has two more gigabytes of scratch memory that its implementation
        // does not declare.
        let same = Some(64);
        assert_eq!(grew(costs(Some(70), same), costs(Some(2118), same)), Some((70, 2118)));
        assert_eq!(grew(costs(Some(70), None), costs(Some(2118), None)), Some((70, 2118)));
        // In this part of the test, device memory grew by a few pages only.
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
