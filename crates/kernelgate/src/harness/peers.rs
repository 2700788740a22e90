//! Programs in other languages that a bench binary brings along, for `kernelgate peers`.

use crate::protocol::PeerProgram;

/// A Python program that times other people's kernels for the problems of a family. A peer program
/// reads a JSON list of problems and prints a line of JSON for each result.
#[derive(Debug, Clone, Copy)]
pub struct PeerProgramSource {
    /// Family of the workloads: the first part of their names.
    pub family: &'static str,
    /// Name of the Python file in the peer program that is run.
    pub main: &'static str,
    /// Source files of the peer program, each with name and text.
    pub files: &'static [(&'static str, &'static str)],
}

impl PeerProgramSource {
    /// The peer program in the form that `kernelgate peers` receives.
    pub(super) fn program(&self) -> PeerProgram {
        let files = self
            .files
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect();
        PeerProgram { family: self.family.to_owned(), main: self.main.to_owned(), files }
    }
}
