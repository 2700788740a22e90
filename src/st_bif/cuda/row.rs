//! What the rows of the family's kernels share, and the arguments that all of them take.

use crate::kernel_files::kernel_file;
use crate::st_bif::definition::Neurons;
use crate::st_bif::neuron::Parameters;
use kernelgate::workload::Dtype;
use kernelgate_cuda::{Argument, KernelSpec};

/// A kernel of the family, one build an element type.
pub const fn kernel(
    file: &'static str,
    text: &'static str,
    symbol: &'static str,
    threads: usize,
    blocks: fn(&Neurons) -> [usize; 3],
) -> KernelSpec<Neurons> {
    KernelSpec {
        defines: |neurons| vec![element(neurons)],
        variants: || variants(&[8]),
        ..KernelSpec::new(kernel_file(file, text), symbol, threads, blocks)
    }
}

/// Neurons of every element type, for those numbers of steps.
pub fn variants(steps: &[usize]) -> Vec<Neurons> {
    let parameters = Parameters { threshold: 0.5, tracer_min: 0, tracer_max: 3, prefire: 0.0 };
    let each = |dtype| steps.iter().map(move |&t| Neurons { n: 1, t, dtype, parameters });
    [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().flat_map(each).collect()
}

/// The macro of `common/element.cuh`.
pub fn element(neurons: &Neurons) -> String {
    let element = match neurons.dtype {
        Dtype::F16 => "ELEMENT_F16",
        Dtype::Bf16 => "ELEMENT_BF16",
        _ => "ELEMENT_F32",
    };
    element.to_owned()
}

/// N, T: `long long` in every kernel.
pub const fn sizes(neurons: &Neurons) -> [Argument; 2] {
    [Argument::I64(neurons.n as i64), Argument::I64(neurons.t as i64)]
}

/// θ, Tmin, Tmax, p: the last arguments of every kernel.
pub fn parameters(neurons: &Neurons) -> [Argument; 4] {
    let parameters = neurons.parameters;
    [
        Argument::F32(parameters.threshold as f32),
        Argument::I32(parameters.tracer_min),
        Argument::I32(parameters.tracer_max),
        Argument::F32(parameters.prefire as f32),
    ]
}
