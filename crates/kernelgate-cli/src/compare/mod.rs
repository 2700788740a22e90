//! Did it get slower? Two builds, their processes interleaved, decided case by case.
//!
//! `sides` builds both sides in one folder. Each executable verifies its cases, then blocks of four
//! fresh processes (`trials`) run until the gate has decided every case or the budget ends
//! (`engine`). `calibrate` repeats that where the answer is known. Deliberately absent: how to
//! decide (`gate::paired`), how to time (`harness`), printing results (`report`).

pub mod calibrate;
mod engine;
mod error;
mod matched;
pub mod one_case;
pub mod plan;
pub mod progress;
mod session;
pub(crate) mod sides;
mod trials;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

pub use engine::kernels::list_kernels;
pub use engine::{Compared, build, run};
pub use error::CompareError;
use kernelgate::record::{Shard, TrialSampling};
pub use plan::{PlanBasis, PlanRequest};
pub use session::Tools;

/// Where a side comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SideSource {
    /// A revision of the repository, built here.
    Revision(String),
    /// The work tree with its uncommitted changes, built here.
    WorkTree,
    /// A folder of bench executables.
    Folder(PathBuf),
}

/// What a calibration does to the head on purpose, to see what is made of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Planted {
    /// Delays that are added to launches, or to the times of iterations where nothing can delay
    /// them: nanoseconds by case.
    pub delays_ns: BTreeMap<String, f64>,
    /// Whether launches are delayed by work in place of a wait.
    pub by_work: bool,
    /// Sizes that were found to add those delays, by case: a process without one finds its own.
    pub delay_sizes: BTreeMap<String, u64>,
    /// The number of a layout of code and memory; none for the usual one.
    pub layout: Option<usize>,
}

impl Planted {
    /// The delays as a bench reads them; none where there are none.
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

/// A comparison that was asked for.
#[derive(Debug, Clone)]
pub struct ComparisonRequest {
    /// What to compare with.
    pub base: SideSource,
    /// What to judge.
    pub head: SideSource,
    /// Only these bench targets; all where there are none.
    pub benches: Vec<String>,
    /// Only the benches of this package of the workspace.
    pub member: Option<String>,
    /// The part of the problems that is compared.
    pub shard: Option<Shard>,
    /// Criterion's filter.
    pub filter: Option<String>,
    /// Our flags of a bench binary, as environment variables.
    pub settings: BTreeMap<String, String>,
    /// What is done to the head on purpose.
    pub planted: Planted,
    /// What counts as slower, or less accurate, and the error rates.
    pub plan: PlanRequest,
    /// How long a process times a case; none for what is usual on the device.
    pub sampling: Option<TrialSampling>,
    /// Wall time of a round.
    pub budget: Duration,
    /// Timeout of every bench process; none for what is usual at each stage.
    pub wait: Option<Duration>,
    /// Timeout of each build.
    pub build_wait: Duration,
    /// Time cases too whose executable is the same file on both sides.
    pub time_identical: bool,
    /// Time only cases whose machine code or launches changed, or are not known.
    pub affected: bool,
    /// Profile both builds where a case regressed.
    pub profile_slower: bool,
    /// Cargo's profile.
    pub profile: String,
    /// Go on where the last comparison was interrupted.
    pub resume: bool,
    /// Root of the package.
    pub package: PathBuf,
    /// The target folder, which is no part of the sources.
    pub target: PathBuf,
    /// Untracked files and folders that are no part of the work tree's side.
    pub leave_out: Vec<PathBuf>,
    /// Where comparisons are made.
    pub folder: PathBuf,
}

#[cfg(test)]
mod tests {
    use kernelgate::measure::delay::Delay;

    use super::*;

    #[test]
    fn delays_are_written_as_a_bench_reads_them() {
        assert_eq!(Planted::default().delays(), None);
        let planted = Planted {
            delays_ns: [("a/b=c".to_owned(), 4_400.0), ("d".to_owned(), 7.0)].into(),
            by_work: true,
            delay_sizes: [("a/b=c".to_owned(), 131_072)].into(),
            layout: None,
        };
        let text = planted.delays().unwrap();
        let read: Vec<Delay> = text.split(',').map(|delay| delay.parse().unwrap()).collect();
        let delay = |case: &str, delay_ns, size| Delay {
            case: case.to_owned(),
            delay_ns,
            by_work: true,
            size,
        };
        assert_eq!(read, [delay("a/b=c", 4_400, Some(131_072)), delay("d", 7, None)]);
    }
}
