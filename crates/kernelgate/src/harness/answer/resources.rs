//! What the compiler makes of the binary's kernels. Needs no GPU.

use kernelgate_cuda::spec::ListedKernel;

use crate::protocol::{Answer, ResourcesReport};
use crate::record::resources::compile;

/// Compiles the kernels for an architecture.
pub fn resources(kernels: &[ListedKernel], arch: &str) -> Answer {
    if kernels.is_empty() {
        return Answer::NoMatch { reason: "no bench lists a kernel (`Harness::kernels`)".to_owned(), close: Vec::new() };
    }
    match compile(kernels, arch) {
        Ok(compiled) => Answer::Resources(ResourcesReport { resources: compiled.resources, left_out: compiled.left_out }),
        Err(error) => Answer::Refused(error.to_string()),
    }
}
