//! What the compiler makes of the binary's kernels. Needs no GPU.

use kernelgate_cuda::spec::ListedKernel;

use crate::protocol::{ResourcesReport, ResponseBody};
use crate::record::resources::{CompiledKernels, compile};

/// Compiles the kernels for an architecture.
pub fn resources(kernels: &[ListedKernel], arch: &str) -> ResponseBody {
    if kernels.is_empty() {
        return ResponseBody::NoMatch {
            reason: "no bench lists a kernel (`Harness::kernels`)".to_owned(),
            close: Vec::new(),
        };
    }
    match compile(kernels, arch) {
        Ok(CompiledKernels { resources, code }) => {
            let told = |(build, lack): (&String, &String)| format!("{build} {lack}");
            let left_out = resources.left_out.iter().map(told).collect();
            ResponseBody::Resources(ResourcesReport { resources, left_out, code })
        }
        Err(error) => ResponseBody::Refused(error.to_string()),
    }
}
