//! Rows of the ST-BIF backward pass, and launchers of the kernels `kernels/st_bif/backward_*`.

use std::sync::Arc;

use super::forward::FUSED_KERNEL;
use super::row::{
    NULL_POINTER, arguments, element_macro, neuron_and_step_counts, neuron_variants, st_bif_kernel,
};
use crate::st_bif::definition::{NeuronShape, StBifBackward};
use kernelgate::backend::cuda::{self, CudaTask, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};

/// Kernels of the ST-BIF backward pass.
pub const KERNELS: &[KernelSpec<NeuronShape>] = &[SAVED_KERNEL, REPLAY_KERNEL, ANY_REPLAY_KERNEL];

const SAVED_BLOCK_THREADS: usize = 128;
const SAVED_NEURONS_PER_THREAD: usize = 4;
const SAVED_KERNEL: KernelSpec<NeuronShape> = KernelSpec {
    constants: |_| vec![("BLOCK", SAVED_BLOCK_THREADS), ("PER_THREAD", SAVED_NEURONS_PER_THREAD)],
    ..st_bif_kernel(
        "st_bif/backward_saved",
        "st_bif_backward_saved",
        SAVED_BLOCK_THREADS,
        |neurons| [neurons.n.div_ceil(SAVED_BLOCK_THREADS * SAVED_NEURONS_PER_THREAD), 1, 1],
    )
};

/// Maximum number of steps that `backward_replay` unrolls into registers; `backward_replay_any`
/// handles more.
const MAX_UNROLLED_STEPS: usize = 16;

const REPLAY_BLOCK_THREADS: usize = 128;
const REPLAY_KERNEL: KernelSpec<NeuronShape> = KernelSpec {
    defines: |neurons| vec![element_macro(neurons), format!("STEPS={}", neurons.t)],
    constants: |neurons| {
        vec![
            ("BLOCK", REPLAY_BLOCK_THREADS),
            ("PER_THREAD", replay_neurons_per_thread(neurons)),
            ("MAX_STEPS", MAX_UNROLLED_STEPS),
        ]
    },
    variants: || neuron_variants(&[4, 8, 16]),
    ..st_bif_kernel(
        "st_bif/backward_replay",
        "st_bif_backward_replay",
        REPLAY_BLOCK_THREADS,
        |neurons| {
            [neurons.n.div_ceil(REPLAY_BLOCK_THREADS * replay_neurons_per_thread(neurons)), 1, 1]
        },
    )
};

/// Number of neurons of a thread: as many as fit into registers besides the coefficients of all
/// steps.
fn replay_neurons_per_thread(neurons: &NeuronShape) -> usize {
    if neurons.dtype == Dtype::F32 || neurons.t > 8 { 2 } else { 4 }
}

const ANY_REPLAY_THREADS: usize = 64;
const ANY_REPLAY_KERNEL: KernelSpec<NeuronShape> = KernelSpec {
    constants: |neurons| {
        vec![("BLOCK", ANY_REPLAY_THREADS), ("PER_THREAD", any_replay_neurons_per_thread(neurons))]
    },
    ..st_bif_kernel(
        "st_bif/backward_replay_any",
        "st_bif_backward_replay_any",
        ANY_REPLAY_THREADS,
        |neurons| {
            [neurons.n.div_ceil(ANY_REPLAY_THREADS * any_replay_neurons_per_thread(neurons)), 1, 1]
        },
    )
};

/// Number of neurons that a thread simulates: eight bytes of input.
fn any_replay_neurons_per_thread(neurons: &NeuronShape) -> usize {
    8 / neurons.dtype.bytes()
}

/// Ladder of the ST-BIF backward pass.
pub const BACKWARD: &[Implementation<StBifBackward>] = &[
    Implementation {
        name: "cuda/saved",
        about: "reads the membranes and tracers that the forward pass saved",
        supports: |problem| {
            if i8::try_from(problem.neurons.parameters.tracer_max).is_ok() {
                Ok(())
            } else {
                Err("saves tracers as bytes".to_owned())
            }
        },
        prepare: Prepare::Cuda(prepare_saved),
    },
    Implementation {
        name: "cuda/replay",
        about: "loads the input again and replays the forward in registers; nothing is saved",
        supports: |_| Ok(()),
        prepare: Prepare::Cuda(prepare_replay),
    },
];

fn prepare_saved(
    problem: &StBifBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let neurons = &problem.neurons;
    let (sizes, parameters) =
        (neuron_and_step_counts::<KernelArgument>(neurons), arguments::<KernelArgument>(neurons));
    let membranes = device.allocate(4 * neurons.n * neurons.t)?;
    let tracers = device.allocate(neurons.n * neurons.t)?;
    {
        // The forward pass that saves membranes and tracers is not part of the problem: it runs
        // once, in the preparation.
        let forward = FUSED_KERNEL.compile_and_load(device, neurons)?;
        let x = device.upload(inputs.tensor("x").as_bytes())?;
        let spikes = device.allocate(neurons.n * neurons.t)?;
        let pointers = [&x, &spikes, &membranes, &tracers].map(KernelArgument::from);
        forward.launch_with(&[&pointers[..], &[NULL_POINTER], &sizes, &parameters].concat())?;
        device.synchronize()?;
    }
    let kernel = SAVED_KERNEL.compile_and_load(device, neurons)?;
    let gy = device.upload(inputs.tensor("gy").as_bytes())?;
    // Membranes and tracers are computed from x, so gy is the only input that may change.
    let inputs = cuda::named_inputs([("gy", &gy)]);
    Ok(CudaTask::new(device, inputs, vec![allocate_gradient(device, neurons)?], move |outputs| {
        let pointers = [&gy, &membranes, &tracers].map(KernelArgument::from);
        let outputs = [NULL_POINTER, outputs[0].argument()];
        let arguments = [&pointers[..], &outputs, &sizes, &parameters].concat();
        within_range("backward", || kernel.launch_with(&arguments))
    }))
}

fn prepare_replay(
    problem: &StBifBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let neurons = &problem.neurons;
    let (kernel, last) = replay_kernel::<KernelArgument>(neurons);
    let kernel = kernel.compile_and_load(device, neurons)?;
    let (x, gy) = (
        device.upload(inputs.tensor("x").as_bytes())?,
        device.upload(inputs.tensor("gy").as_bytes())?,
    );
    let inputs = cuda::named_inputs([("x", &x), ("gy", &gy)]);
    Ok(CudaTask::new(device, inputs, vec![allocate_gradient(device, neurons)?], move |outputs| {
        let pointers = [
            KernelArgument::from(&x),
            KernelArgument::from(&gy),
            NULL_POINTER,
            outputs[0].argument(),
        ];
        within_range("backward", || kernel.launch_with(&[&pointers[..], &last].concat()))
    }))
}

/// Loads the kernel that replays this number of time steps. Also returns its arguments after the
/// addresses of x, gy, the final membrane's gradient (null if zero) and gx.
pub fn replay_kernel<T: From<i64> + From<i32> + From<f32>>(
    neurons: &NeuronShape,
) -> (KernelSpec<NeuronShape>, Vec<T>) {
    let unrolled = neurons.t <= MAX_UNROLLED_STEPS;
    let sizes = neuron_and_step_counts(neurons).into_iter().take(if unrolled { 1 } else { 2 });
    let kernel = if unrolled { REPLAY_KERNEL } else { ANY_REPLAY_KERNEL };
    (kernel, sizes.chain(arguments(neurons)).collect())
}

fn allocate_gradient(device: &Device, neurons: &NeuronShape) -> Result<Output, BackendError> {
    Output::new(device, "gx", [neurons.t, neurons.n], neurons.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_neurons_of_a_thread_follow_its_number_of_registers() {
        let neurons = |t, dtype| NeuronShape { n: 5121, t, dtype, ..neuron_variants(&[8])[0] };
        let blocks = |kernel: KernelSpec<NeuronShape>, neurons: &NeuronShape| {
            kernel.launch_for(neurons).unwrap().grid[0]
        };
        assert_eq!(blocks(REPLAY_KERNEL, &neurons(8, Dtype::F32)), 21);
        assert_eq!(blocks(REPLAY_KERNEL, &neurons(8, Dtype::F16)), 11);
        assert_eq!(blocks(REPLAY_KERNEL, &neurons(9, Dtype::F16)), 21);
        assert_eq!(blocks(ANY_REPLAY_KERNEL, &neurons(17, Dtype::F16)), 21);
        assert_eq!(blocks(SAVED_KERNEL, &neurons(17, Dtype::F16)), 11);
    }
}
