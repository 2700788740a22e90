//! Code that the rows of all ST-BIF kernels share, and the arguments that all of them have.

use crate::kernel_files::kernel_file;
use crate::st_bif::definition::NeuronShape;
use crate::st_bif::neuron::NeuronParameters;
use kernelgate::workload::Dtype;
use kernelgate_cuda::{KernelArgument, KernelSpec};

/// Declares a kernel of the family, with one build for each element type.
pub const fn st_bif_kernel(
    file: &'static str,
    symbol: &'static str,
    threads: usize,
    blocks: fn(&NeuronShape) -> [usize; 3],
) -> KernelSpec<NeuronShape> {
    KernelSpec {
        defines: |neurons| vec![element_macro(neurons)],
        variants: || neuron_variants(&[8]),
        ..KernelSpec::new(kernel_file(file), symbol, threads, blocks)
    }
}

/// Returns problems with every element type, for these numbers of time steps.
pub fn neuron_variants(steps: &[usize]) -> Vec<NeuronShape> {
    let parameters =
        NeuronParameters { threshold: 0.5, tracer_min: 0, tracer_max: 3, prefire: 0.0 };
    let each = |dtype| steps.iter().map(move |&t| NeuronShape { n: 1, t, dtype, parameters });
    [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().flat_map(each).collect()
}

/// Macro of `common/element.cuh` that selects the element type.
pub fn element_macro(neurons: &NeuronShape) -> String {
    let element = match neurons.dtype {
        Dtype::F16 => "ELEMENT_F16",
        Dtype::Bf16 => "ELEMENT_BF16",
        _ => "ELEMENT_F32",
    };
    element.to_owned()
}

pub const NULL_POINTER: KernelArgument = KernelArgument::Address(0);

/// Arguments N and T, which are `long long` in every kernel.
pub fn neuron_and_step_counts<T: From<i64>>(neurons: &NeuronShape) -> [T; 2] {
    [neurons.n, neurons.t].map(|size| T::from(size as i64))
}

/// Arguments θ, Tmin, Tmax and p, the last ones of every kernel, for a launch or for a program.
pub fn arguments<T: From<f32> + From<i32>>(neurons: &NeuronShape) -> [T; 4] {
    let NeuronParameters { threshold, tracer_min, tracer_max, prefire } = neurons.parameters;
    [(threshold as f32).into(), tracer_min.into(), tracer_max.into(), (prefire as f32).into()]
}
