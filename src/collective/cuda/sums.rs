//! The builds of the kernels that sum messages.

use crate::collective::definition::{Exchange, Kind};
use kernelgate::workload::Dtype;

/// Macros of the element and of the number of GPUs.
pub fn defines(problem: &Exchange) -> Vec<String> {
    let element = if problem.dtype == Dtype::Bf16 { "ELEMENT_BF16" } else { "ELEMENT_F32" };
    vec![element.to_owned(), format!("GPUS={}", problem.gpus)]
}

/// A problem for two GPUs of each dtype: a build each.
pub fn variants() -> Vec<Exchange> {
    let problem = |dtype| Exchange { kind: Kind::AllReduce, gpus: 2, elements: 1, dtype };
    [Dtype::F32, Dtype::Bf16].map(problem).to_vec()
}
