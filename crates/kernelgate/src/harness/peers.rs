//! Peer programs in other languages that a bench executable embeds for `kernelgate peers`.

use crate::protocol::PythonPeerProgram;

/// A Python program that times kernels of other projects for the problems of one workload family.
/// The peer program reads a JSON list of problems and prints one line of JSON per result.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddedPeerProgram {
    /// Workload family of the peer program: the first part of workload names.
    pub workload_family: &'static str,
    /// Name of the Python file to run.
    pub main_file_name: &'static str,
    /// Names and texts of the peer program's source files.
    pub file_names_and_texts: &'static [(&'static str, &'static str)],
}

impl EmbeddedPeerProgram {
    /// Converts the embedded peer program to the form in which `kernelgate peers` receives it.
    pub(super) fn peer_program_response(&self) -> PythonPeerProgram {
        let files = self
            .file_names_and_texts
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect();
        PythonPeerProgram {
            workload_family: self.workload_family.to_owned(),
            main_file_name: self.main_file_name.to_owned(),
            file_contents_by_name: files,
        }
    }
}
