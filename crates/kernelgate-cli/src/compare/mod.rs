//! Compares two builds (base and head) by interleaved processes, and decides each case separately.
//!
//! The module `sides` builds base and head, both at one path, inside one comparison folder. Each
//! bench executable verifies its cases; then blocks of four fresh processes (`trials`) run until
//! the gate has decided every case or the budget ends (`engine`). The module `calibrate` repeats
//! comparisons whose correct verdict is known, to measure the gate's error rates. The module
//! `compare` does not decide verdicts (`gate::paired`), time kernels (`harness`) or print results
//! (`report`).

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

pub use engine::kernels::compare_kernels_of_both_builds;
pub use engine::{ComparisonOutcome, build_sides_into_folder, run_comparison};
pub use error::CompareError;
use kernelgate::record::{ShardOfWork, TrialSamplingPlan};
pub use session::ProgressAndChildProcesses;
pub use test_plan::{TestPlanBasis, TestPlanRequest};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ComparedSideSource {
    /// A revision of the git repository, which is built for the comparison.
    GitRevision(String),
    /// The working tree with its uncommitted changes, which is built for the comparison.
    WorkTree,
    /// The compared side is a folder of prebuilt bench executables.
    PrebuiltFolder(PathBuf),
}

/// Artificial changes that a calibration injects into the head, to test whether comparisons detect
/// them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct InjectedHeadChanges {
    /// Delays that are injected, nanoseconds per launch by case; for benches whose launches cannot
    /// be delayed they are added to the measured times.
    pub injected_delays_ns: BTreeMap<String, f64>,
    /// Whether the injected delay is additional work on the device (true) or a wait (false).
    pub delay_is_gpu_work: bool,
    /// Sizes of the injected GPU delays by case, in the unit of the delaying kernel; for a case
    /// without a size, each process determines the size.
    pub gpu_delay_sizes: BTreeMap<String, u64>,
    /// Number of the artificial layout of code and memory addresses; `None` for the normal layout.
    pub code_layout_number: Option<usize>,
}

impl InjectedHeadChanges {
    /// Formats the injected delays as the value of the environment variable that benches read;
    /// `None` without delays.
    fn delay_variable_value(&self) -> Option<String> {
        let how = if self.delay_is_gpu_work { ":work" } else { "" };
        let delay = |(id, delay_ns): (&String, &f64)| {
            let size =
                self.gpu_delay_sizes.get(id).map(|size| format!("@{size}")).unwrap_or_default();
            format!("{id}={delay_ns:.0}{how}{size}")
        };
        let delays: Vec<String> = self.injected_delays_ns.iter().map(delay).collect();
        (!delays.is_empty()).then(|| delays.join(","))
    }
}

/// A requested comparison.
#[derive(Debug, Clone)]
pub struct BuildComparisonRequest {
    pub base: ComparedSideSource,
    pub head: ComparedSideSource,
    /// Names of the bench targets to compare; if the list is empty, all bench targets are compared.
    pub bench_names: Vec<String>,
    /// Workspace package to which the comparison is restricted; `None` for no restriction.
    pub workspace_member: Option<String>,
    /// The shard of the problems that this process compares; `None` if it compares all problems.
    pub shard: Option<ShardOfWork>,
    /// Criterion's filter.
    pub criterion_filter: Option<String>,
    /// Environment variables that kernelgate sets for each bench executable.
    pub bench_variables: BTreeMap<String, String>,
    /// Artificial changes that a calibration injects into the head.
    pub injection: InjectedHeadChanges,
    /// Thresholds for time and accuracy, and error rates of the statistical test.
    pub plan: TestPlanRequest,
    /// How long each process warms up and times a case; `None` for the device's default.
    pub sampling: Option<TrialSamplingPlan>,
    /// Wall time that each round of the comparison may take.
    pub round_time_budget: Duration,
    /// Timeout of each bench process; `None` for the default of each stage (listing, verification,
    /// timing).
    pub process_timeout: Option<Duration>,
    /// Timeout of each cargo build of the comparison.
    pub build_timeout: Duration,
    /// Whether a case is timed even if base and head have a byte-identical executable for it.
    pub times_identical_executables: bool,
    /// Whether only those cases are timed whose machine code or launches changed or cannot be
    /// compared (`--affected`).
    pub only_affected_cases: bool,
    /// Whether both builds are profiled for the cases that regressed.
    pub profiles_slower_cases: bool,
    /// Cargo's profile.
    pub build_profile: String,
    /// Cargo features with which the package is built.
    pub cargo_features: Vec<String>,
    /// Whether an interrupted comparison is continued (`--resume`).
    pub resume_interrupted_comparison: bool,
    /// Root folder of the compared package.
    pub package_root: PathBuf,
    /// Cargo's target folder, which a snapshot of the working tree excludes.
    pub cargo_target_folder: PathBuf,
    /// Untracked files and folders that a snapshot of the working tree excludes (`--leave-out`).
    pub paths_excluded_from_snapshot: Vec<PathBuf>,
    pub comparison_folder: PathBuf,
}

#[cfg(test)]
mod tests {
    use kernelgate::measure::delay::InjectedLaunchDelay;

    use super::*;

    #[test]
    fn injected_delays_are_written_in_the_format_that_benches_parse() {
        assert_eq!(InjectedHeadChanges::default().delay_variable_value(), None);
        let injection = InjectedHeadChanges {
            injected_delays_ns: [("a/b=c".to_owned(), 4_400.0), ("d".to_owned(), 7.0)].into(),
            delay_is_gpu_work: true,
            gpu_delay_sizes: [("a/b=c".to_owned(), 131_072)].into(),
            code_layout_number: None,
        };
        let text = injection.delay_variable_value().unwrap();
        let read: Vec<InjectedLaunchDelay> =
            text.split(',').map(|delay| delay.parse().unwrap()).collect();
        let delay = |case: &str, delay_ns, size| InjectedLaunchDelay {
            case_id_text: case.to_owned(),
            delay_ns,
            delays_by_memory_reads: true,
            fitted_gpu_delay_size: size,
        };
        assert_eq!(read, [delay("a/b=c", 4_400, Some(131_072)), delay("d", 7, None)]);
    }
}
