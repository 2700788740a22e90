//! Families of workloads, and helpers that implementations of several families share.

use kernelgate::backend::program::{LaunchProgram, ProgramLaunchMode};
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::harness::EmbeddedPeerProgram;
use kernelgate::suite::WorkloadSuite;
use kernelgate::workload::Dtype;
use kernelgate_cuda::spec::ListedKernelBuild;

/// A family of workloads: a folder in `src/`, a folder in `kernels/`, and a bench executable, all
/// of the same name.
pub struct WorkloadFamily {
    /// Name of the family, which is the name of its folders and of its bench executable.
    pub family_name: &'static str,
    /// Function that returns the family's workloads, each with its implementations.
    pub suites: fn() -> Vec<WorkloadSuite>,
    pub kernels: fn() -> Vec<ListedKernelBuild>,
    /// Python program that runs other projects' kernels on the family's problems, for comparison.
    pub peer_program: Option<EmbeddedPeerProgram>,
}

/// Implementations `cuda/per_op` and `cuda/graph`: one launch for each operation, enqueued one by
/// one or replayed from a captured CUDA graph.
pub const fn per_op_and_graph_rows<P>(
    about: &'static str,
    supports: fn(&P) -> Result<(), String>,
    program: fn(&P) -> LaunchProgram,
) -> [Implementation<P>; 2] {
    let stream = PrepareFunction::Program(program, ProgramLaunchMode::StepByStep);
    let graph = PrepareFunction::Program(program, ProgramLaunchMode::CapturedGraph);
    let replayed = "per_op captured once and replayed";
    [
        Implementation {
            implementation_name: "cuda/per_op",
            description: about,
            supports,
            prepare: stream,
        },
        Implementation {
            implementation_name: "cuda/graph",
            description: replayed,
            supports,
            prepare: graph,
        },
    ]
}

/// Checks that an implementation that computes only the dtype `computed` supports the problem's
/// `dtype`.
pub fn check_problem_dtype_is_computed(dtype: Dtype, computed: Dtype) -> Result<(), String> {
    if dtype == computed { Ok(()) } else { Err(format!("computes {} only", computed.dtype_name())) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// `kernelgate peers` writes only the embedded files into the folder of the peer program, so
    /// each imported file must be embedded.
    #[test]
    fn peer_programs_embed_each_local_file_that_they_import() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let mut imports = 0;
        for peers in crate::WORKLOAD_FAMILIES.iter().filter_map(|family| family.peer_program) {
            for line in peers.file_names_and_texts.iter().flat_map(|(_, text)| text.lines()) {
                let mut words = line.split_whitespace();
                if !matches!(words.next(), Some("import" | "from")) {
                    continue;
                }
                let file = format!("{}.py", words.next().unwrap_or_default());
                if folder.join(&file).exists() {
                    let embedded = peers.file_names_and_texts.iter().any(|(name, _)| *name == file);
                    assert!(embedded, "{} imports {file}", peers.main_file_name);
                    imports += 1;
                }
            }
        }
        assert!(imports >= 8, "{imports}");
    }
}
