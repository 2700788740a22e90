//! Families of workloads, and parts that rows of several families share.

use kernelgate::backend::program::{Capture, Program};
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::harness::PeerProgramSource;
use kernelgate::suite::Suite;
use kernelgate::workload::Dtype;
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

/// The first two rungs of a network: a launch an operation, and the same launches in a graph.
pub const fn per_op_and_graph<P>(
    about: &'static str,
    supports: fn(&P) -> Result<(), String>,
    program: fn(&P) -> Program,
) -> [Implementation<P>; 2] {
    let stream = Prepare::Program(program, Capture::Stream);
    let graph = Prepare::Program(program, Capture::Graph);
    let replayed = "per_op captured once and replayed";
    [
        Implementation { name: "cuda/per_op", about, supports, prepare: stream },
        Implementation { name: "cuda/graph", about: replayed, supports, prepare: graph },
    ]
}

/// Whether a row that computes one dtype supports another.
pub fn check_dtype(dtype: Dtype, computed: Dtype) -> Result<(), String> {
    if dtype == computed { Ok(()) } else { Err(format!("computes {} only", computed.name())) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// `kernelgate peers` writes these files, and no others, into the folder of the program.
    #[test]
    fn peer_programs_embed_each_file_that_they_import() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let mut imports = 0;
        for peers in crate::WORKLOAD_FAMILIES.iter().filter_map(|family| family.peers) {
            for line in peers.files.iter().flat_map(|(_, text)| text.lines()) {
                let mut words = line.split_whitespace();
                if !matches!(words.next(), Some("import" | "from")) {
                    continue;
                }
                let file = format!("{}.py", words.next().unwrap_or_default());
                if folder.join(&file).exists() {
                    let embedded = peers.files.iter().any(|(name, _)| *name == file);
                    assert!(embedded, "{} imports {file}", peers.main);
                    imports += 1;
                }
            }
        }
        assert!(imports >= 8, "{imports}");
    }
}
