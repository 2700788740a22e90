//! Rows of the ST-BIF forward pass, and launchers of the kernels `kernels/st_bif/forward_*`.

use std::sync::Arc;

use super::row::{NULL_POINTER, arguments, element_macro, neuron_and_step_counts, st_bif_kernel};
use crate::parallel;
use crate::st_bif::definition::{NeuronShape, StBifForward};
use kernelgate::backend::cuda::{self, CudaTask, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};

/// Kernels of the ST-BIF forward pass.
pub const KERNELS: &[KernelSpec<NeuronShape>] =
    &[PER_STEP_KERNEL, FUSED_KERNEL, VECTORIZED_KERNEL, PACKED_KERNEL];

/// Threads of a block, for kernels in which a thread computes one neuron.
const THREADS: usize = 256;

/// Kernel with one launch for each time step, and membranes and tracers in memory.
pub const PER_STEP_KERNEL: KernelSpec<NeuronShape> =
    st_bif_kernel("st_bif/forward_per_step", "st_bif_forward_per_step", THREADS, |neurons| {
        [neurons.n.div_ceil(THREADS), 1, 1]
    });

/// Kernel that computes all time steps in one launch. The kernel saves membranes and tracers if it
/// gets memory for them, for the first rung of the backward pass.
pub const FUSED_KERNEL: KernelSpec<NeuronShape> =
    st_bif_kernel("st_bif/forward_fused", "st_bif_forward_fused", THREADS, |neurons| {
        [neurons.n.div_ceil(THREADS), 1, 1]
    });

/// Threads of a block, for kernels in which a thread computes 16 bytes of neurons.
const STREAMING_BLOCK_THREADS: usize = 128;

const VECTORIZED_KERNEL: KernelSpec<NeuronShape> = KernelSpec {
    defines: streaming_defines,
    constants: streaming_constants,
    ..st_bif_kernel(
        "st_bif/forward_vectorized",
        "st_bif_forward_vectorized",
        STREAMING_BLOCK_THREADS,
        streaming_blocks,
    )
};

const PACKED_KERNEL: KernelSpec<NeuronShape> = KernelSpec {
    defines: streaming_defines,
    constants: streaming_constants,
    ..st_bif_kernel(
        "st_bif/forward_packed",
        "st_bif_forward_packed",
        STREAMING_BLOCK_THREADS,
        streaming_blocks,
    )
};

fn streaming_defines(neurons: &NeuronShape) -> Vec<String> {
    // With fewer steps than a chunk, a smaller chunk avoids registers for unused loads.
    let chunk = match neurons.t {
        1 => Some("CHUNK=1"),
        2 | 3 => Some("CHUNK=2"),
        _ => None,
    };
    std::iter::once(element_macro(neurons)).chain(chunk.map(str::to_owned)).collect()
}

/// Number of neurons that a thread simulates: 16 bytes of input.
fn streaming_neurons_per_thread(neurons: &NeuronShape) -> usize {
    16 / neurons.dtype.bytes()
}

fn streaming_constants(neurons: &NeuronShape) -> Vec<(&'static str, usize)> {
    vec![("BLOCK", STREAMING_BLOCK_THREADS), ("PER_THREAD", streaming_neurons_per_thread(neurons))]
}

fn streaming_blocks(neurons: &NeuronShape) -> [usize; 3] {
    [neurons.n.div_ceil(STREAMING_BLOCK_THREADS * streaming_neurons_per_thread(neurons)), 1, 1]
}

/// Ladder of the ST-BIF forward pass.
pub const FORWARD: &[Implementation<StBifForward>] = &[
    Implementation {
        name: "cuda/per_step",
        about: "one launch a time step, membrane and tracer in device memory: the starting point",
        supports: requires_int8_spikes,
        prepare: Prepare::Cuda(prepare_per_step),
    },
    Implementation {
        name: "cuda/fused",
        about: "one launch, a thread a neuron looping over time",
        supports: requires_int8_spikes,
        prepare: Prepare::Cuda(|problem, inputs, device| {
            prepare_one_launch(problem, inputs, device, FUSED_KERNEL, &[NULL_POINTER; 3])
        }),
    },
    Implementation {
        name: "cuda/vectorized",
        about: "16-byte loads, several neurons a thread and several loads in flight, int8 spikes",
        supports: requires_int8_spikes,
        prepare: Prepare::Cuda(|problem, inputs, device| {
            prepare_one_launch(problem, inputs, device, VECTORIZED_KERNEL, &[NULL_POINTER])
        }),
    },
    Implementation {
        name: "cuda/packed",
        about: "as vectorized, two bits a spike",
        supports: |problem| {
            if problem.packed { Ok(()) } else { Err("writes packed spikes only".to_owned()) }
        },
        prepare: Prepare::Cuda(|problem, inputs, device| {
            prepare_one_launch(problem, inputs, device, PACKED_KERNEL, &[NULL_POINTER])
        }),
    },
];

fn requires_int8_spikes(problem: &StBifForward) -> Result<(), String> {
    if problem.packed { Err("writes one byte a spike".to_owned()) } else { Ok(()) }
}

fn prepare_per_step(
    problem: &StBifForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let neurons = problem.neurons;
    let kernel = PER_STEP_KERNEL.compile_and_load(device, &neurons)?;
    let x = device.upload(inputs.tensor("x").as_bytes())?;
    let membrane = device.allocate(4 * neurons.n)?;
    let tracer = device.allocate(4 * neurons.n)?;
    let parameters = arguments::<KernelArgument>(&neurons);
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("x", &x)]),
        vec![spike_output(device, &neurons, false)?],
        move |outputs| {
            for t in 0..neurons.t {
                let [x, membrane, tracer] = [&x, &membrane, &tracer].map(KernelArgument::from);
                let [n, step] = [neurons.n, t].map(|extent| KernelArgument::I64(extent as i64));
                let own = [x, outputs[0].argument(), membrane, tracer, n, step];
                within_range("time_step", || {
                    kernel.launch_with(&[&own[..], &parameters].concat())
                })?;
            }
            Ok(())
        },
    ))
}

/// Prepares a kernel that computes all time steps in one launch. Its pointers are the input, the
/// spikes, and those of `unsaved`, to memory for values that it need not save.
fn prepare_one_launch(
    problem: &StBifForward,
    inputs: &Tensors,
    device: &Arc<Device>,
    kernel: KernelSpec<NeuronShape>,
    unsaved: &'static [KernelArgument],
) -> Result<CudaTask, BackendError> {
    let neurons = &problem.neurons;
    let kernel = kernel.compile_and_load(device, neurons)?;
    let x = device.upload(inputs.tensor("x").as_bytes())?;
    let (sizes, parameters) =
        (neuron_and_step_counts::<KernelArgument>(neurons), arguments::<KernelArgument>(neurons));
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("x", &x)]),
        vec![spike_output(device, neurons, problem.packed)?],
        move |outputs| {
            let pointers = [KernelArgument::from(&x), outputs[0].argument()];
            let arguments = [&pointers[..], unsaved, &sizes, &parameters].concat();
            within_range("forward", || kernel.launch_with(&arguments))
        },
    ))
}

fn spike_output(
    device: &Device,
    neurons: &NeuronShape,
    packed: bool,
) -> Result<Output, BackendError> {
    let shape = [neurons.t, neurons.n];
    if packed {
        Output::new_encoded(
            device,
            "spikes",
            shape,
            neurons.t * neurons.n.div_ceil(4),
            unpack_spikes,
        )
    } else {
        Output::new(device, "spikes", shape, Dtype::I8)
    }
}

/// Unpacks spikes of two bits each, four in a byte, lowest bits first, with rows padded to whole
/// bytes: 00 is 0, 01 is 1, 11 is -1.
fn unpack_spikes(bytes: &[u8], shape: &[usize]) -> Tensor {
    let row_bytes = shape[1].div_ceil(4).max(1);
    let spike = |row: &[u8], neuron: usize| match row[neuron / 4] >> (2 * (neuron % 4)) & 3 {
        0b00 => 0,
        0b01 => 1,
        0b11 => -1,
        // All other byte values do not encode a spike: poison, or a fault of the kernel. The value
        // 0x7f never equals a spike of the reference.
        _ => 0x7f,
    };
    let mut spikes = vec![0i8; shape.iter().product()];
    let rows = spikes.chunks_mut(shape[1].max(1)).zip(bytes.chunks(row_bytes));
    let parts = rows.flat_map(|(spikes, row)| {
        spikes.chunks_mut(1 << 16).enumerate().map(move |(part, spikes)| (row, part << 16, spikes))
    });
    parallel::for_each_task(
        parts.collect(),
        &|_, (row, first, spikes): (&[u8], usize, &mut [i8])| {
            spikes.iter_mut().enumerate().for_each(|(i, out)| *out = spike(row, first + i));
        },
    );
    Tensor::new(shape.to_vec(), TensorData::I8(spikes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_spikes_are_unpacked_row_by_row() {
        // The packed spikes are 0, 1, -1, poison | 1, 0 and padding.
        let row = [0b10_11_01_00, 0b00_00_00_01];
        let tensor = unpack_spikes(&[row, row].concat(), &[2, 6]);
        assert_eq!(
            tensor.tensor_data(),
            &TensorData::I8([[0, 1, -1, 0x7f, 1, 0], [0, 1, -1, 0x7f, 1, 0]].concat())
        );
    }

    #[test]
    fn each_thread_has_sixteen_bytes_of_neurons() {
        let neurons = |n, t, dtype| NeuronShape {
            n,
            t,
            dtype,
            ..super::super::row::neuron_variants(&[8])[0]
        };
        let blocks = |kernel: KernelSpec<NeuronShape>, neurons: &NeuronShape| {
            kernel.launch_for(neurons).unwrap().grid[0]
        };
        assert_eq!(blocks(VECTORIZED_KERNEL, &neurons(5121, 8, Dtype::F32)), 11);
        assert_eq!(blocks(PACKED_KERNEL, &neurons(5121, 8, Dtype::F16)), 6);
        assert_eq!(blocks(PER_STEP_KERNEL, &neurons(5121, 8, Dtype::F32)), 21);
        let name = |t| VECTORIZED_KERNEL.build_for_parameters(&neurons(1, t, Dtype::Bf16)).name();
        assert_eq!(name(3), "st_bif/forward_vectorized ELEMENT_BF16 CHUNK=2");
        assert_eq!(name(4), "st_bif/forward_vectorized ELEMENT_BF16");
    }
}
