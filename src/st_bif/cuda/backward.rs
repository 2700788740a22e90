//! GPU implementations of the ST-BIF backward pass, and the launchers of the kernels
//! `kernels/st_bif/backward_*`.

use std::sync::Arc;

use super::forward::ALL_TIME_STEPS_KERNEL;
use super::row::{
    NULL_POINTER, element_type_macro, example_shapes_for_compilation,
    kernel_compiled_per_element_type, neuron_and_step_count_arguments, neuron_constant_arguments,
};
use crate::st_bif::definition::{NeuronLayerParameters, StBifBackward};
use kernelgate::backend::cuda::{self, CudaTask, DeviceOutput};
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};

/// Kernels of the ST-BIF backward pass.
pub const ST_BIF_BACKWARD_KERNELS: &[KernelSpec<NeuronLayerParameters>] =
    &[SAVED_STATE_BACKWARD_KERNEL, UNROLLED_REPLAY_BACKWARD_KERNEL, LOOPED_REPLAY_BACKWARD_KERNEL];

const SAVED_STATE_BLOCK_THREADS: usize = 128;
const SAVED_STATE_NEURONS_PER_THREAD: usize = 4;
const SAVED_STATE_BACKWARD_KERNEL: KernelSpec<NeuronLayerParameters> = KernelSpec {
    constant_macros: |_| {
        vec![("BLOCK", SAVED_STATE_BLOCK_THREADS), ("PER_THREAD", SAVED_STATE_NEURONS_PER_THREAD)]
    },
    ..kernel_compiled_per_element_type(
        "st_bif/backward_saved",
        "st_bif_backward_saved",
        SAVED_STATE_BLOCK_THREADS,
        |neurons| {
            [
                neurons
                    .neuron_count
                    .div_ceil(SAVED_STATE_BLOCK_THREADS * SAVED_STATE_NEURONS_PER_THREAD),
                1,
                1,
            ]
        },
    )
};

/// Maximum number of time steps that the kernel `backward_replay` unrolls into registers; the
/// kernel `backward_replay_any` handles more.
const MAX_UNROLLED_TIME_STEPS: usize = 16;

const UNROLLED_REPLAY_BLOCK_THREADS: usize = 128;
const UNROLLED_REPLAY_BACKWARD_KERNEL: KernelSpec<NeuronLayerParameters> = KernelSpec {
    macro_definitions: |neurons| {
        vec![element_type_macro(neurons), format!("STEPS={}", neurons.time_steps)]
    },
    constant_macros: |neurons| {
        vec![
            ("BLOCK", UNROLLED_REPLAY_BLOCK_THREADS),
            ("PER_THREAD", unrolled_replay_neurons_per_thread(neurons)),
            ("MAX_STEPS", MAX_UNROLLED_TIME_STEPS),
        ]
    },
    listed_build_parameters: || example_shapes_for_compilation(&[4, 8, 16]),
    ..kernel_compiled_per_element_type(
        "st_bif/backward_replay",
        "st_bif_backward_replay",
        UNROLLED_REPLAY_BLOCK_THREADS,
        |neurons| {
            [
                neurons.neuron_count.div_ceil(
                    UNROLLED_REPLAY_BLOCK_THREADS * unrolled_replay_neurons_per_thread(neurons),
                ),
                1,
                1,
            ]
        },
    )
};

/// Number of neurons of a thread of the unrolled replay kernel: as many as fit into registers
/// besides the coefficients of all time steps.
fn unrolled_replay_neurons_per_thread(neurons: &NeuronLayerParameters) -> usize {
    if neurons.dtype == Dtype::F32 || neurons.time_steps > 8 { 2 } else { 4 }
}

const LOOPED_REPLAY_BLOCK_THREADS: usize = 64;
const LOOPED_REPLAY_BACKWARD_KERNEL: KernelSpec<NeuronLayerParameters> = KernelSpec {
    constant_macros: |neurons| {
        vec![
            ("BLOCK", LOOPED_REPLAY_BLOCK_THREADS),
            ("PER_THREAD", looped_replay_neurons_per_thread(neurons)),
        ]
    },
    ..kernel_compiled_per_element_type(
        "st_bif/backward_replay_any",
        "st_bif_backward_replay_any",
        LOOPED_REPLAY_BLOCK_THREADS,
        |neurons| {
            [
                neurons.neuron_count.div_ceil(
                    LOOPED_REPLAY_BLOCK_THREADS * looped_replay_neurons_per_thread(neurons),
                ),
                1,
                1,
            ]
        },
    )
};

/// Number of neurons that a thread of the looped replay kernel simulates: eight bytes of input
/// elements.
fn looped_replay_neurons_per_thread(neurons: &NeuronLayerParameters) -> usize {
    8 / neurons.dtype.bytes_per_element()
}

/// GPU implementations (rungs) of the ST-BIF backward pass.
pub const CUDA_ST_BIF_BACKWARD_LADDER: &[Implementation<StBifBackward>] = &[
    Implementation {
        implementation_name: "cuda/saved",
        description: "reads the membranes and tracers that the forward pass saved",
        supports: |problem| {
            if i8::try_from(problem.neurons.neuron_parameters.tracer_max).is_ok() {
                Ok(())
            } else {
                Err("saves tracers as bytes".to_owned())
            }
        },
        prepare: PrepareFunction::Cuda(prepare_backward_from_saved_state),
    },
    Implementation {
        implementation_name: "cuda/replay",
        description: "loads the input again and replays the forward in registers; nothing is saved",
        supports: |_| Ok(()),
        prepare: PrepareFunction::Cuda(prepare_backward_by_replay),
    },
];

fn prepare_backward_from_saved_state(
    problem: &StBifBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let neurons = &problem.neurons;
    let (sizes, parameters) = (
        neuron_and_step_count_arguments::<KernelArgument>(neurons),
        neuron_constant_arguments::<KernelArgument>(neurons),
    );
    let membranes = device.allocate(4 * neurons.neuron_count * neurons.time_steps)?;
    let tracers = device.allocate(neurons.neuron_count * neurons.time_steps)?;
    {
        // The forward pass that saves membranes and tracers is not timed: it runs once, while the
        // case is prepared.
        let forward = ALL_TIME_STEPS_KERNEL.compile_and_load(device, neurons)?;
        let x = device.upload(inputs.tensor("x").as_bytes())?;
        let spikes = device.allocate(neurons.neuron_count * neurons.time_steps)?;
        let pointers = [&x, &spikes, &membranes, &tracers].map(KernelArgument::from);
        forward.launch_with(&[&pointers[..], &[NULL_POINTER], &sizes, &parameters].concat())?;
        device.synchronize()?;
    }
    let kernel = SAVED_STATE_BACKWARD_KERNEL.compile_and_load(device, neurons)?;
    let gy = device.upload(inputs.tensor("gy").as_bytes())?;
    // The saved membranes and tracers follow from x, so kernelgate may replace only the input gy
    // between launches.
    let inputs = cuda::named_inputs([("gy", &gy)]);
    Ok(CudaTask::new(
        device,
        inputs,
        vec![allocate_current_gradient_output(device, neurons)?],
        move |outputs| {
            let pointers = [&gy, &membranes, &tracers].map(KernelArgument::from);
            let outputs = [NULL_POINTER, outputs[0].argument()];
            let arguments = [&pointers[..], &outputs, &sizes, &parameters].concat();
            run_within_named_range("backward", || kernel.launch_with(&arguments))
        },
    ))
}

fn prepare_backward_by_replay(
    problem: &StBifBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let neurons = &problem.neurons;
    let (kernel, last) = select_replay_kernel_and_arguments::<KernelArgument>(neurons);
    let kernel = kernel.compile_and_load(device, neurons)?;
    let (x, gy) = (
        device.upload(inputs.tensor("x").as_bytes())?,
        device.upload(inputs.tensor("gy").as_bytes())?,
    );
    let inputs = cuda::named_inputs([("x", &x), ("gy", &gy)]);
    Ok(CudaTask::new(
        device,
        inputs,
        vec![allocate_current_gradient_output(device, neurons)?],
        move |outputs| {
            let pointers = [
                KernelArgument::from(&x),
                KernelArgument::from(&gy),
                NULL_POINTER,
                outputs[0].argument(),
            ];
            run_within_named_range("backward", || {
                kernel.launch_with(&[&pointers[..], &last].concat())
            })
        },
    ))
}

/// Returns the backward kernel that replays this number of time steps: the unrolled one, or the
/// looped one for many steps. The second result is the kernel's arguments after the addresses of x,
/// gy, the final membrane's gradient (null if zero) and gx.
pub fn select_replay_kernel_and_arguments<T: From<i64> + From<i32> + From<f32>>(
    neurons: &NeuronLayerParameters,
) -> (KernelSpec<NeuronLayerParameters>, Vec<T>) {
    let unrolled = neurons.time_steps <= MAX_UNROLLED_TIME_STEPS;
    let sizes =
        neuron_and_step_count_arguments(neurons).into_iter().take(if unrolled { 1 } else { 2 });
    let kernel =
        if unrolled { UNROLLED_REPLAY_BACKWARD_KERNEL } else { LOOPED_REPLAY_BACKWARD_KERNEL };
    (kernel, sizes.chain(neuron_constant_arguments(neurons)).collect())
}

fn allocate_current_gradient_output(
    device: &Device,
    neurons: &NeuronLayerParameters,
) -> Result<DeviceOutput, BackendError> {
    DeviceOutput::new(device, "gx", [neurons.time_steps, neurons.neuron_count], neurons.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neurons_per_replay_thread_follow_from_dtype_and_time_steps() {
        let neurons = |t, dtype| NeuronLayerParameters {
            neuron_count: 5121,
            time_steps: t,
            dtype,
            ..example_shapes_for_compilation(&[8])[0]
        };
        let blocks = |kernel: KernelSpec<NeuronLayerParameters>,
                      neurons: &NeuronLayerParameters| {
            kernel.launch_shape_for(neurons).unwrap().grid[0]
        };
        assert_eq!(blocks(UNROLLED_REPLAY_BACKWARD_KERNEL, &neurons(8, Dtype::F32)), 21);
        assert_eq!(blocks(UNROLLED_REPLAY_BACKWARD_KERNEL, &neurons(8, Dtype::F16)), 11);
        assert_eq!(blocks(UNROLLED_REPLAY_BACKWARD_KERNEL, &neurons(9, Dtype::F16)), 21);
        assert_eq!(blocks(LOOPED_REPLAY_BACKWARD_KERNEL, &neurons(17, Dtype::F16)), 21);
        assert_eq!(blocks(SAVED_STATE_BACKWARD_KERNEL, &neurons(17, Dtype::F16)), 11);
    }
}
