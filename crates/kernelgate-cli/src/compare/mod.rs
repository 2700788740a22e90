//! Compares two builds: their processes are interleaved, and each case is decided by itself.
//!
//! The module `sides` builds both sides in one folder. Each executable verifies its cases, then
//! blocks of four fresh processes (`trials`) run until the gate has decided every case or the
//! budget ends (`engine`). The module `calibrate` repeats comparisons whose correct answer is
//! known. Deliberately absent: how to decide (`gate::paired`), how to time (`harness`), printing
//! results (`report`).

pub mod calibrate;
mod engine;
mod error;
mod matched_cases;
pub mod one_case;
pub mod progress;
mod session;
pub(crate) mod sides;
pub mod test_plan;
mod trials;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

pub use engine::kernels::list_kernels;
pub use engine::{ComparisonOutcome, build_sides_once, run};
pub use error::CompareError;
use kernelgate::record::{Shard, TrialSampling};
pub use session::SessionTools;
pub use test_plan::{PlanBasis, PlanRequest};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SideSource {
    /// A revision of the git repository, built for the comparison.
    Revision(String),
    /// The working tree with its uncommitted changes, built for the comparison.
    WorkTree,
    /// A folder that contains bench executables.
    Folder(PathBuf),
}

/// Changes that a calibration makes to the head on purpose, to test whether comparisons find them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SideInjection {
    /// Delays that are added to launches, or to measured times if launches cannot be delayed:
    /// nanoseconds by case.
    pub delays_ns: BTreeMap<String, f64>,
    /// Whether extra work delays launches, instead of a wait.
    pub by_work: bool,
    /// Sizes of the injected delays by case; a process determines the size itself for a case
    /// without one.
    pub delay_sizes: BTreeMap<String, u64>,
    /// Number of the artificial layout of code and memory; `None` for the usual layout.
    pub layout: Option<usize>,
}

impl SideInjection {
    /// The delays in the format of a bench's variable; `None` without delays.
    fn delays(&self) -> Option<String> {
        let how = if self.by_work { ":work" } else { "" };
        let delay = |(id, delay_ns): (&String, &f64)| {
            let size = self.delay_sizes.get(id).map(|size| format!("@{size}")).unwrap_or_default();
            format!("{id}={delay_ns:.0}{how}{size}")
        };
        let delays: Vec<String> = self.delays_ns.iter().map(delay).collect();
        (!delays.is_empty()).then(|| delays.join(","))
    }
}

/// A requested comparison.
#[derive(Debug, Clone)]
pub struct ComparisonRequest {
    pub base: SideSource,
    pub head: SideSource,
    /// Names of the bench targets to compare; all targets if it is empty.
    pub benches: Vec<String>,
    /// Package of the workspace to which the comparison is restricted.
    pub member: Option<String>,
    /// The shard of the problems that is compared.
    pub shard: Option<Shard>,
    /// Criterion's filter.
    pub filter: Option<String>,
    /// Settings of the bench executables, as environment variables.
    pub settings: BTreeMap<String, String>,
    /// Changes that are made to the head on purpose.
    pub injection: SideInjection,
    /// Thresholds for time and accuracy, and error rates of the test.
    pub plan: PlanRequest,
    /// Time for which a process times a case; `None` for the usual time on the device.
    pub sampling: Option<TrialSampling>,
    /// Wall time that a round may take.
    pub budget: Duration,
    /// Timeout of every bench process; `None` for the usual one at each stage.
    pub wait: Option<Duration>,
    /// Timeout of each build.
    pub build_wait: Duration,
    /// Whether cases are timed even if both sides have an identical executable for them.
    pub time_identical: bool,
    /// Whether only cases are timed whose machine code or launches changed, or cannot be compared.
    pub affected: bool,
    /// Whether both builds are profiled if a case has regressed.
    pub profile_slower: bool,
    /// Cargo's profile.
    pub profile: String,
    /// Cargo features of the package.
    pub features: Vec<String>,
    /// Whether an interrupted comparison is continued.
    pub resume: bool,
    /// Root of the package.
    pub package: PathBuf,
    /// The target folder of cargo, which is not part of the compared sources.
    pub target: PathBuf,
    /// Untracked files and folders that do not belong to the work tree's side.
    pub leave_out: Vec<PathBuf>,
    pub folder: PathBuf,
}

#[cfg(test)]
mod tests {
    use kernelgate::measure::delay::InjectedDelay;

    use super::*;

    #[test]
    fn injected_delays_are_written_in_the_format_that_benches_parse() {
        assert_eq!(SideInjection::default().delays(), None);
        let injection = SideInjection {
            delays_ns: [("a/b=c".to_owned(), 4_400.0), ("d".to_owned(), 7.0)].into(),
            by_work: true,
            delay_sizes: [("a/b=c".to_owned(), 131_072)].into(),
            layout: None,
        };
        let text = injection.delays().unwrap();
        let read: Vec<InjectedDelay> =
            text.split(',').map(|delay| delay.parse().unwrap()).collect();
        let delay = |case: &str, delay_ns, size| InjectedDelay {
            case: case.to_owned(),
            delay_ns,
            by_work: true,
            size,
        };
        assert_eq!(read, [delay("a/b=c", 4_400, Some(131_072)), delay("d", 7, None)]);
    }
}
