//! ST-BIF backward: rows and launchers of `kernels/st_bif/backward_*`.

use std::sync::Arc;

use super::forward::FUSED;
use super::row::{NULL, element, kernel, parameters, sizes, variants};
use crate::st_bif::definition::{Neurons, StBifBackward};
use kernelgate::backend::cuda::{self, CudaTask, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::observe::range::within;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};

/// The kernels.
pub const KERNELS: &[KernelSpec<Neurons>] = &[SAVED, REPLAY, REPLAY_ANY];

const SAVED_THREADS: usize = 128;
const SAVED_NEURONS: usize = 4;
const SAVED: KernelSpec<Neurons> = KernelSpec {
    constants: |_| vec![("BLOCK", SAVED_THREADS), ("PER_THREAD", SAVED_NEURONS)],
    ..kernel(
        "st_bif/backward_saved",
        include_str!("../../../kernels/st_bif/backward_saved.cu"),
        "st_bif_backward_saved",
        SAVED_THREADS,
        |neurons| [neurons.n.div_ceil(SAVED_THREADS * SAVED_NEURONS), 1, 1],
    )
};

/// Most steps that `backward_replay` unrolls into registers; more go through its tiled sibling.
const MAX_UNROLLED: usize = 16;

const REPLAY_THREADS: usize = 128;
const REPLAY: KernelSpec<Neurons> = KernelSpec {
    defines: |neurons| vec![element(neurons), format!("STEPS={}", neurons.t)],
    constants: |neurons| {
        vec![
            ("BLOCK", REPLAY_THREADS),
            ("PER_THREAD", replay_neurons(neurons)),
            ("MAX_STEPS", MAX_UNROLLED),
        ]
    },
    variants: || variants(&[4, 8, 16]),
    ..kernel(
        "st_bif/backward_replay",
        include_str!("../../../kernels/st_bif/backward_replay.cu"),
        "st_bif_backward_replay",
        REPLAY_THREADS,
        |neurons| [neurons.n.div_ceil(REPLAY_THREADS * replay_neurons(neurons)), 1, 1],
    )
};

/// Neurons of a thread: as many as fit in registers beside the coefficients of all steps.
fn replay_neurons(neurons: &Neurons) -> usize {
    if neurons.dtype == Dtype::F32 || neurons.t > 8 { 2 } else { 4 }
}

const ANY_THREADS: usize = 64;
const REPLAY_ANY: KernelSpec<Neurons> = KernelSpec {
    constants: |neurons| vec![("BLOCK", ANY_THREADS), ("PER_THREAD", any_neurons(neurons))],
    ..kernel(
        "st_bif/backward_replay_any",
        include_str!("../../../kernels/st_bif/backward_replay_any.cu"),
        "st_bif_backward_replay_any",
        ANY_THREADS,
        |neurons| [neurons.n.div_ceil(ANY_THREADS * any_neurons(neurons)), 1, 1],
    )
};

/// Neurons of a thread: eight bytes of input.
fn any_neurons(neurons: &Neurons) -> usize {
    8 / neurons.dtype.bytes()
}

/// Backward ladder.
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
        prepare: Prepare::Cuda(saved),
    },
    Implementation {
        name: "cuda/replay",
        about: "loads the input again and replays the forward in registers; nothing is saved",
        supports: |_| Ok(()),
        prepare: Prepare::Cuda(replay),
    },
];

fn saved(
    problem: &StBifBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let neurons = &problem.neurons;
    let (sizes, parameters) =
        (sizes::<KernelArgument>(neurons), parameters::<KernelArgument>(neurons));
    let membranes = device.allocate(4 * neurons.n * neurons.t)?;
    let tracers = device.allocate(neurons.n * neurons.t)?;
    {
        // The forward pass that saves is not part of the problem: it runs once, here.
        let forward = FUSED.load(device, neurons)?;
        let x = device.upload(inputs.tensor("x").as_bytes())?;
        let spikes = device.allocate(neurons.n * neurons.t)?;
        let pointers = [&x, &spikes, &membranes, &tracers].map(KernelArgument::from);
        forward.launch(&[&pointers[..], &[NULL], &sizes, &parameters].concat())?;
        device.synchronize()?;
    }
    let kernel = SAVED.load(device, neurons)?;
    let gy = device.upload(inputs.tensor("gy").as_bytes())?;
    // Membranes and tracers follow from x.
    let inputs = cuda::inputs([("gy", &gy)]);
    Ok(CudaTask::new(device, inputs, vec![gradient(device, neurons)?], move |outputs| {
        let pointers = [&gy, &membranes, &tracers].map(KernelArgument::from);
        let outputs = [NULL, outputs[0].argument()];
        let arguments = [&pointers[..], &outputs, &sizes, &parameters].concat();
        within("backward", || kernel.launch(&arguments))
    }))
}

fn replay(
    problem: &StBifBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let neurons = &problem.neurons;
    let (kernel, last) = replay_kernel::<KernelArgument>(neurons);
    let kernel = kernel.load(device, neurons)?;
    let (x, gy) = (
        device.upload(inputs.tensor("x").as_bytes())?,
        device.upload(inputs.tensor("gy").as_bytes())?,
    );
    let inputs = cuda::inputs([("x", &x), ("gy", &gy)]);
    Ok(CudaTask::new(device, inputs, vec![gradient(device, neurons)?], move |outputs| {
        let pointers =
            [KernelArgument::from(&x), KernelArgument::from(&gy), NULL, outputs[0].argument()];
        within("backward", || kernel.launch(&[&pointers[..], &last].concat()))
    }))
}

/// The kernel that replays this many steps, and its arguments after the addresses of x, gy, the
/// final membrane's gradient (null if that is zero) and gx.
pub fn replay_kernel<T: From<i64> + From<i32> + From<f32>>(
    neurons: &Neurons,
) -> (KernelSpec<Neurons>, Vec<T>) {
    let unrolled = neurons.t <= MAX_UNROLLED;
    let sizes = sizes(neurons).into_iter().take(if unrolled { 1 } else { 2 });
    let kernel = if unrolled { REPLAY } else { REPLAY_ANY };
    (kernel, sizes.chain(parameters(neurons)).collect())
}

fn gradient(device: &Device, neurons: &Neurons) -> Result<Output, BackendError> {
    Output::new(device, "gx", [neurons.t, neurons.n], neurons.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neurons_of_a_thread_follow_the_registers() {
        let neurons = |t, dtype| Neurons { n: 5121, t, dtype, ..variants(&[8])[0] };
        let blocks =
            |kernel: KernelSpec<Neurons>, neurons: &Neurons| kernel.shape(neurons).unwrap().grid[0];
        assert_eq!(blocks(REPLAY, &neurons(8, Dtype::F32)), 21);
        assert_eq!(blocks(REPLAY, &neurons(8, Dtype::F16)), 11);
        assert_eq!(blocks(REPLAY, &neurons(9, Dtype::F16)), 21);
        assert_eq!(blocks(REPLAY_ANY, &neurons(17, Dtype::F16)), 21);
        assert_eq!(blocks(SAVED, &neurons(17, Dtype::F16)), 11);
    }
}
