//! GPU implementations of the ST-BIF forward pass, and the launchers of the kernels
//! `kernels/st_bif/forward_*`.

use std::sync::Arc;

use super::row::{
    NULL_POINTER, element_type_macro, kernel_compiled_per_element_type,
    neuron_and_step_count_arguments, neuron_constant_arguments,
};
use crate::parallel;
use crate::st_bif::definition::{NeuronLayerParameters, StBifForward};
use kernelgate::backend::cuda::{self, CudaTask, DeviceOutput};
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};

/// Kernels of the ST-BIF forward pass.
pub const ST_BIF_FORWARD_KERNELS: &[KernelSpec<NeuronLayerParameters>] = &[
    ONE_TIME_STEP_KERNEL,
    ALL_TIME_STEPS_KERNEL,
    SIXTEEN_BYTE_INT8_SPIKES_KERNEL,
    SIXTEEN_BYTE_PACKED_SPIKES_KERNEL,
];

/// Threads of a block of the forward kernels in which each thread computes one neuron.
const ONE_NEURON_PER_THREAD_BLOCK_THREADS: usize = 256;

/// Kernel that computes one time step in each launch and keeps membranes and tracers in device
/// memory.
pub const ONE_TIME_STEP_KERNEL: KernelSpec<NeuronLayerParameters> =
    kernel_compiled_per_element_type(
        "st_bif/forward_per_step",
        "st_bif_forward_per_step",
        ONE_NEURON_PER_THREAD_BLOCK_THREADS,
        |neurons| [neurons.neuron_count.div_ceil(ONE_NEURON_PER_THREAD_BLOCK_THREADS), 1, 1],
    );

/// Kernel that computes all time steps in one launch, with one neuron for each thread. The fused
/// forward kernel saves membranes and tracers if it gets memory for them, as the first backward
/// rung needs.
pub const ALL_TIME_STEPS_KERNEL: KernelSpec<NeuronLayerParameters> =
    kernel_compiled_per_element_type(
        "st_bif/forward_fused",
        "st_bif_forward_fused",
        ONE_NEURON_PER_THREAD_BLOCK_THREADS,
        |neurons| [neurons.neuron_count.div_ceil(ONE_NEURON_PER_THREAD_BLOCK_THREADS), 1, 1],
    );

/// Threads of a block of the forward kernels in which each thread loads 16 bytes of neurons.
const SIXTEEN_BYTE_KERNEL_BLOCK_THREADS: usize = 128;

const SIXTEEN_BYTE_INT8_SPIKES_KERNEL: KernelSpec<NeuronLayerParameters> = KernelSpec {
    macro_definitions: element_and_time_chunk_macros,
    constant_macros: block_and_neurons_per_thread_macros,
    ..kernel_compiled_per_element_type(
        "st_bif/forward_vectorized",
        "st_bif_forward_vectorized",
        SIXTEEN_BYTE_KERNEL_BLOCK_THREADS,
        grid_of_sixteen_byte_kernel,
    )
};

const SIXTEEN_BYTE_PACKED_SPIKES_KERNEL: KernelSpec<NeuronLayerParameters> = KernelSpec {
    macro_definitions: element_and_time_chunk_macros,
    constant_macros: block_and_neurons_per_thread_macros,
    ..kernel_compiled_per_element_type(
        "st_bif/forward_packed",
        "st_bif_forward_packed",
        SIXTEEN_BYTE_KERNEL_BLOCK_THREADS,
        grid_of_sixteen_byte_kernel,
    )
};

fn element_and_time_chunk_macros(neurons: &NeuronLayerParameters) -> Vec<String> {
    // With fewer time steps than the kernel loads ahead, a smaller chunk avoids registers for
    // unused loads.
    let chunk = match neurons.time_steps {
        1 => Some("CHUNK=1"),
        2 | 3 => Some("CHUNK=2"),
        _ => None,
    };
    std::iter::once(element_type_macro(neurons)).chain(chunk.map(str::to_owned)).collect()
}

/// Number of neurons that one thread simulates: 16 bytes of input elements.
fn neurons_in_sixteen_bytes(neurons: &NeuronLayerParameters) -> usize {
    16 / neurons.dtype.bytes_per_element()
}

fn block_and_neurons_per_thread_macros(
    neurons: &NeuronLayerParameters,
) -> Vec<(&'static str, usize)> {
    vec![
        ("BLOCK", SIXTEEN_BYTE_KERNEL_BLOCK_THREADS),
        ("PER_THREAD", neurons_in_sixteen_bytes(neurons)),
    ]
}

fn grid_of_sixteen_byte_kernel(neurons: &NeuronLayerParameters) -> [usize; 3] {
    [
        neurons
            .neuron_count
            .div_ceil(SIXTEEN_BYTE_KERNEL_BLOCK_THREADS * neurons_in_sixteen_bytes(neurons)),
        1,
        1,
    ]
}

/// GPU implementations (rungs) of the ST-BIF forward pass.
pub const CUDA_ST_BIF_FORWARD_LADDER: &[Implementation<StBifForward>] = &[
    Implementation {
        implementation_name: "cuda/per_step",
        description: "one launch a time step, membrane and tracer in device memory: the starting point",
        supports: check_spikes_are_not_packed,
        prepare: PrepareFunction::Cuda(prepare_forward_with_launch_per_step),
    },
    Implementation {
        implementation_name: "cuda/fused",
        description: "one launch, a thread a neuron looping over time",
        supports: check_spikes_are_not_packed,
        prepare: PrepareFunction::Cuda(|problem, inputs, device| {
            prepare_forward_in_one_launch(
                problem,
                inputs,
                device,
                ALL_TIME_STEPS_KERNEL,
                &[NULL_POINTER; 3],
            )
        }),
    },
    Implementation {
        implementation_name: "cuda/vectorized",
        description: "16-byte loads, several neurons a thread and several loads in flight, int8 spikes",
        supports: check_spikes_are_not_packed,
        prepare: PrepareFunction::Cuda(|problem, inputs, device| {
            prepare_forward_in_one_launch(
                problem,
                inputs,
                device,
                SIXTEEN_BYTE_INT8_SPIKES_KERNEL,
                &[NULL_POINTER],
            )
        }),
    },
    Implementation {
        implementation_name: "cuda/packed",
        description: "as vectorized, two bits a spike",
        supports: |problem| {
            if problem.packs_spikes_in_two_bits {
                Ok(())
            } else {
                Err("writes packed spikes only".to_owned())
            }
        },
        prepare: PrepareFunction::Cuda(|problem, inputs, device| {
            prepare_forward_in_one_launch(
                problem,
                inputs,
                device,
                SIXTEEN_BYTE_PACKED_SPIKES_KERNEL,
                &[NULL_POINTER],
            )
        }),
    },
];

fn check_spikes_are_not_packed(problem: &StBifForward) -> Result<(), String> {
    if problem.packs_spikes_in_two_bits {
        Err("writes one byte a spike".to_owned())
    } else {
        Ok(())
    }
}

fn prepare_forward_with_launch_per_step(
    problem: &StBifForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let neurons = problem.neurons;
    let kernel = ONE_TIME_STEP_KERNEL.compile_and_load(device, &neurons)?;
    let x = device.upload(inputs.tensor("x").as_bytes())?;
    let membrane = device.allocate(4 * neurons.neuron_count)?;
    let tracer = device.allocate(4 * neurons.neuron_count)?;
    let parameters = neuron_constant_arguments::<KernelArgument>(&neurons);
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("x", &x)]),
        vec![allocate_spike_output(device, &neurons, false)?],
        move |outputs| {
            for t in 0..neurons.time_steps {
                let [x, membrane, tracer] = [&x, &membrane, &tracer].map(KernelArgument::from);
                let [n, step] =
                    [neurons.neuron_count, t].map(|extent| KernelArgument::I64(extent as i64));
                let own = [x, outputs[0].argument(), membrane, tracer, n, step];
                run_within_named_range("time_step", || {
                    kernel.launch_with(&[&own[..], &parameters].concat())
                })?;
            }
            Ok(())
        },
    ))
}

/// Prepares a task that computes all time steps by one launch of `kernel`. The pointers in
/// `unsaved` are null addresses of the memory to which the kernel could save values for a backward
/// pass.
fn prepare_forward_in_one_launch(
    problem: &StBifForward,
    inputs: &Tensors,
    device: &Arc<Device>,
    kernel: KernelSpec<NeuronLayerParameters>,
    unsaved: &'static [KernelArgument],
) -> Result<CudaTask, BackendError> {
    let neurons = &problem.neurons;
    let kernel = kernel.compile_and_load(device, neurons)?;
    let x = device.upload(inputs.tensor("x").as_bytes())?;
    let (sizes, parameters) = (
        neuron_and_step_count_arguments::<KernelArgument>(neurons),
        neuron_constant_arguments::<KernelArgument>(neurons),
    );
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("x", &x)]),
        vec![allocate_spike_output(device, neurons, problem.packs_spikes_in_two_bits)?],
        move |outputs| {
            let pointers = [KernelArgument::from(&x), outputs[0].argument()];
            let arguments = [&pointers[..], unsaved, &sizes, &parameters].concat();
            run_within_named_range("forward", || kernel.launch_with(&arguments))
        },
    ))
}

fn allocate_spike_output(
    device: &Device,
    neurons: &NeuronLayerParameters,
    packed: bool,
) -> Result<DeviceOutput, BackendError> {
    let shape = [neurons.time_steps, neurons.neuron_count];
    if packed {
        DeviceOutput::allocate_encoded_i8(
            device,
            "spikes",
            shape,
            neurons.time_steps * neurons.neuron_count.div_ceil(4),
            unpack_two_bit_spikes,
        )
    } else {
        DeviceOutput::new(device, "spikes", shape, Dtype::I8)
    }
}

/// Unpacks spikes of two bits each, four in a byte, lowest bits first, with rows padded to whole
/// bytes: 00 is 0, 01 is 1, 11 is -1.
fn unpack_two_bit_spikes(bytes: &[u8], shape: &[usize]) -> Tensor {
    let row_bytes = shape[1].div_ceil(4).max(1);
    let spike = |row: &[u8], neuron: usize| match row[neuron / 4] >> (2 * (neuron % 4)) & 3 {
        0b00 => 0,
        0b01 => 1,
        0b11 => -1,
        // The bit pattern 10 encodes no spike, so it comes from poisoned memory or from a fault of
        // the kernel. The value 0x7f never equals a spike of the reference, so verification fails
        // on it.
        _ => 0x7f,
    };
    let mut spikes = vec![0i8; shape.iter().product()];
    let rows = spikes.chunks_mut(shape[1].max(1)).zip(bytes.chunks(row_bytes));
    let parts = rows.flat_map(|(spikes, row)| {
        spikes.chunks_mut(1 << 16).enumerate().map(move |(part, spikes)| (row, part << 16, spikes))
    });
    parallel::run_tasks_in_parallel(parts.collect(), &|_,
                                                       (row, first, spikes): (
        &[u8],
        usize,
        &mut [i8],
    )| {
        spikes.iter_mut().enumerate().for_each(|(i, out)| *out = spike(row, first + i));
    });
    Tensor::new(shape.to_vec(), TensorData::I8(spikes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bit_spikes_are_unpacked_row_by_row() {
        // The packed spikes of a row are 0, 1, -1, poison in the first byte and 1, 0, padding in
        // the second.
        let row = [0b10_11_01_00, 0b00_00_00_01];
        let tensor = unpack_two_bit_spikes(&[row, row].concat(), &[2, 6]);
        assert_eq!(
            tensor.tensor_data(),
            &TensorData::I8([[0, 1, -1, 0x7f, 1, 0], [0, 1, -1, 0x7f, 1, 0]].concat())
        );
    }

    #[test]
    fn each_forward_thread_computes_sixteen_bytes_of_neurons() {
        let neurons = |n, t, dtype| NeuronLayerParameters {
            neuron_count: n,
            time_steps: t,
            dtype,
            ..super::super::row::example_shapes_for_compilation(&[8])[0]
        };
        let blocks = |kernel: KernelSpec<NeuronLayerParameters>,
                      neurons: &NeuronLayerParameters| {
            kernel.launch_shape_for(neurons).unwrap().grid[0]
        };
        assert_eq!(blocks(SIXTEEN_BYTE_INT8_SPIKES_KERNEL, &neurons(5121, 8, Dtype::F32)), 11);
        assert_eq!(blocks(SIXTEEN_BYTE_PACKED_SPIKES_KERNEL, &neurons(5121, 8, Dtype::F16)), 6);
        assert_eq!(blocks(ONE_TIME_STEP_KERNEL, &neurons(5121, 8, Dtype::F32)), 21);
        let name = |t| {
            SIXTEEN_BYTE_INT8_SPIKES_KERNEL
                .build_for_parameters(&neurons(1, t, Dtype::Bf16))
                .kernel_build_name()
        };
        assert_eq!(name(3), "st_bif/forward_vectorized ELEMENT_BF16 CHUNK=2");
        assert_eq!(name(4), "st_bif/forward_vectorized ELEMENT_BF16");
    }
}
