//! Parts of a family of workloads that its bench executable needs.

use kernelgate::harness::PeerProgramSource;
use kernelgate::suite::Suite;
use kernelgate_cuda::spec::ListedKernel;

/// A family of workloads: a folder in `src/` and one in `kernels/`, and a bench of that name.
pub struct WorkloadFamily {
    /// Name of the family's folders and of its bench.
    pub name: &'static str,
    /// Workloads of the family, each with its rows.
    pub suites: fn() -> Vec<Suite>,
    pub kernels: fn() -> Vec<ListedKernel>,
    /// Program that runs other people's kernels on the same problems.
    pub peers: Option<PeerProgramSource>,
}
