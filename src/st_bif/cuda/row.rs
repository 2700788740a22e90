//! Declarations that all ST-BIF kernels share, and the launch arguments that all of them have.

use crate::kernel_files::source_of_kernel_file;
use crate::st_bif::definition::NeuronLayerParameters;
use crate::st_bif::neuron::StBifNeuronParameters;
use kernelgate::workload::Dtype;
use kernelgate_cuda::{KernelArgument, KernelSpec};

/// Declares an ST-BIF kernel that is compiled for each element type (f32, f16, bf16).
pub const fn kernel_compiled_per_element_type(
    file: &'static str,
    symbol: &'static str,
    threads: usize,
    blocks: fn(&NeuronLayerParameters) -> [usize; 3],
) -> KernelSpec<NeuronLayerParameters> {
    KernelSpec {
        macro_definitions: |neurons| vec![element_type_macro(neurons)],
        listed_build_parameters: || example_shapes_for_compilation(&[8]),
        ..KernelSpec::new(source_of_kernel_file(file), symbol, threads, blocks)
    }
}

/// Returns example problems with every element type for each of these numbers of time steps, for
/// which kernels are compiled.
pub fn example_shapes_for_compilation(steps: &[usize]) -> Vec<NeuronLayerParameters> {
    let parameters = StBifNeuronParameters {
        firing_threshold: 0.5,
        tracer_min: 0,
        tracer_max: 3,
        prefire_fraction_of_threshold: 0.0,
    };
    let each = |dtype| {
        steps.iter().map(move |&t| NeuronLayerParameters {
            neuron_count: 1,
            time_steps: t,
            dtype,
            neuron_parameters: parameters,
        })
    };
    [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().flat_map(each).collect()
}

/// Macro of `common/element.cuh` that selects the element type of the problem's dtype.
pub fn element_type_macro(neurons: &NeuronLayerParameters) -> String {
    let element = match neurons.dtype {
        Dtype::F16 => "ELEMENT_F16",
        Dtype::Bf16 => "ELEMENT_BF16",
        _ => "ELEMENT_F32",
    };
    element.to_owned()
}

pub const NULL_POINTER: KernelArgument = KernelArgument::DeviceAddress(0);

/// Kernel arguments N and T (neurons and time steps), which are `long long` in every ST-BIF kernel.
pub fn neuron_and_step_count_arguments<T: From<i64>>(neurons: &NeuronLayerParameters) -> [T; 2] {
    [neurons.neuron_count, neurons.time_steps].map(|size| T::from(size as i64))
}

/// Kernel arguments θ, Tmin, Tmax and p (the neuron's constants), the last arguments of every
/// ST-BIF kernel, for a direct launch or a program.
pub fn neuron_constant_arguments<T: From<f32> + From<i32>>(
    neurons: &NeuronLayerParameters,
) -> [T; 4] {
    let StBifNeuronParameters {
        firing_threshold: threshold,
        tracer_min,
        tracer_max,
        prefire_fraction_of_threshold: prefire,
    } = neurons.neuron_parameters;
    [(threshold as f32).into(), tracer_min.into(), tracer_max.into(), (prefire as f32).into()]
}
