//! What a launch takes besides the device's time, before and after: judged where the package asks
//! for it (`rules`).

use serde::Serialize;

use super::rules::CaseLimits;
use kernelgate::display;
use kernelgate::record::LaunchCosts;
use kernelgate::stats::median;

/// What grew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cost {
    /// Device memory that the implementation declares, bytes.
    DeviceMemory,
    /// Commands of a launch.
    Launches,
    /// Time of the host to start a launch, nanoseconds.
    HostTime,
}

/// A cost that grew by more than the package allows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CostGrowth {
    /// The case.
    pub case: String,
    /// What grew.
    pub cost: Cost,
    /// What it was: the median over the runs.
    pub base: f64,
    /// What it is.
    pub head: f64,
    /// Relative growth that is allowed.
    pub allowed: f64,
}

impl CostGrowth {
    /// "device memory 3.0 GB, was 2.0 GB (+50.0%, 10% are allowed)".
    pub fn words(&self) -> String {
        let (what, show): (_, fn(f64) -> String) = match self.cost {
            Cost::DeviceMemory => ("device memory", |bytes| display::bytes(bytes as u64)),
            Cost::Launches => ("commands of a launch", |count| format!("{count}")),
            Cost::HostTime => ("host time of a launch", display::time),
        };
        let grown = 100.0 * (self.head / self.base - 1.0);
        let (head, base, allowed) = (show(self.head), show(self.base), 100.0 * self.allowed);
        format!("{what} {head}, was {base} ({grown:+.1}%, {allowed}% are allowed)")
    }
}

/// The costs of a case that grew by more than allowed; those that a side does not tell did not.
pub fn grown(
    case: &str,
    [base, head]: [&[LaunchCosts]; 2],
    limits: &CaseLimits,
) -> Vec<CostGrowth> {
    let of = |cost: Cost, allowed: Option<f64>| {
        let allowed = allowed?;
        let middle = |side: &[LaunchCosts]| {
            let told: Vec<f64> = side.iter().filter_map(|it| value(it, cost)).collect();
            (!told.is_empty()).then(|| median(&told))
        };
        let (base, head) = (middle(base)?, middle(head)?);
        let growth = CostGrowth { case: case.to_owned(), cost, base, head, allowed };
        (head > base * (1.0 + allowed)).then_some(growth)
    };
    let costs = [
        of(Cost::DeviceMemory, limits.device_memory),
        of(Cost::Launches, limits.launches),
        of(Cost::HostTime, limits.host_time),
    ];
    costs.into_iter().flatten().collect()
}

fn value(costs: &LaunchCosts, cost: Cost) -> Option<f64> {
    match cost {
        Cost::DeviceMemory => costs.device_bytes.map(|bytes| bytes as f64),
        Cost::Launches => costs.commands.map(|count| count as f64),
        Cost::HostTime => costs.host_launch_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_judged_where_they_are_known_and_asked_for() {
        let costs = |bytes, commands, host| LaunchCosts {
            device_bytes: Some(bytes),
            commands: Some(commands),
            host_launch_ns: Some(host),
        };
        let (base, head) = ([costs(1000, 7, 4e3)], [costs(1500, 8, 5e3)]);
        let limits = CaseLimits {
            device_memory: Some(0.4),
            launches: Some(0.0),
            host_time: Some(0.3),
            ..CaseLimits::default()
        };
        let words = |base: &[LaunchCosts], head: &[LaunchCosts], limits: &CaseLimits| {
            grown("x", [base, head], limits).iter().map(CostGrowth::words).collect::<Vec<_>>()
        };
        assert_eq!(
            words(&base, &head, &limits),
            [
                "device memory 1.50 kB, was 1.00 kB (+50.0%, 40% are allowed)",
                "commands of a launch 8, was 7 (+14.3%, 0% are allowed)"
            ]
        );
        assert!(words(&base, &head, &CaseLimits::default()).is_empty());
        assert!(words(&[LaunchCosts::default()], &head, &limits).is_empty());
        assert!(words(&base, &base, &limits).is_empty());
    }
}
