//! ST-BIF on the GPU: the ladder from one launch a time step to vectorised kernels at the memory limit.
//!
//! What each kernel does, its thread mapping and its bound are in its file under `kernels/st_bif`.

use std::sync::Arc;

use rayon::prelude::*;

use crate::kernels::source;
use crate::st_bif::definition::{Backward, Forward, Neurons};
use kernelgate::backend::cuda::{Output, Task};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Data, Dtype, Tensor, Tensors};
use kernelgate_cuda::{Argument, Device, Kernel, LaunchShape};

/// Forward ladder.
pub const FORWARD: &[Implementation<Forward>] = &[
    Implementation {
        name: "cuda/per_step",
        about: "one launch a time step, membrane and tracer in device memory: the starting point",
        supports: int8,
        prepare: Prepare::Cuda(per_step),
    },
    Implementation {
        name: "cuda/fused",
        about: "one launch, a thread a neuron looping over time",
        supports: int8,
        prepare: Prepare::Cuda(|problem, inputs, device| {
            let neurons = &problem.neurons;
            let kernel = kernel(device, "st_bif/forward_fused", neurons, &[])?;
            let x = device.upload(inputs.tensor("x").as_bytes())?;
            let shape = LaunchShape::covering(neurons.n, 256, 1)?;
            let sizes = [Argument::I64(neurons.n as i64), Argument::I64(neurons.t as i64)];
            let parameters = parameters(neurons);
            let null = Argument::Address(0);
            Ok(Task::new(device, vec![spikes(device, neurons, false)?], move |outputs| {
                let pointers = [Argument::from(&x), outputs[0].argument(), null, null, null];
                kernel.launch(shape, &[&pointers[..], &sizes, &parameters].concat())
            }))
        }),
    },
    Implementation {
        name: "cuda/vectorized",
        about: "16-byte loads, several neurons a thread and several loads in flight, int8 spikes",
        supports: int8,
        prepare: Prepare::Cuda(|problem, inputs, device| streaming_forward(problem, inputs, device, "st_bif/forward_vectorized")),
    },
    Implementation {
        name: "cuda/packed",
        about: "as vectorized, two bits a spike",
        supports: |problem| if problem.packed { Ok(()) } else { Err("writes packed spikes only".to_owned()) },
        prepare: Prepare::Cuda(|problem, inputs, device| streaming_forward(problem, inputs, device, "st_bif/forward_packed")),
    },
];

/// Backward ladder.
pub const BACKWARD: &[Implementation<Backward>] = &[
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

/// Longest T that `backward_replay` unrolls into registers; longer ones go through its tiled sibling.
const LONGEST_UNROLLED: usize = 16;

fn int8(problem: &Forward) -> Result<(), String> {
    if problem.packed { Err("writes one byte a spike".to_owned()) } else { Ok(()) }
}

fn per_step(problem: &Forward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let neurons = problem.neurons;
    let kernel = kernel(device, "st_bif/forward_per_step", &neurons, &[])?;
    let x = device.upload(inputs.tensor("x").as_bytes())?;
    let membrane = device.allocate(4 * neurons.n)?;
    let tracer = device.allocate(4 * neurons.n)?;
    let shape = LaunchShape::covering(neurons.n, 256, 1)?;
    let parameters = parameters(&neurons);
    Ok(Task::new(device, vec![spikes(device, &neurons, false)?], move |outputs| {
        for t in 0..neurons.t {
            let own = [
                Argument::from(&x),
                outputs[0].argument(),
                Argument::from(&membrane),
                Argument::from(&tracer),
                Argument::I64(neurons.n as i64),
                Argument::I64(t as i64),
            ];
            kernel.launch(shape, &[&own[..], &parameters].concat())?;
        }
        Ok(())
    }))
}

/// `forward_vectorized` and `forward_packed`: the same arguments and shape.
fn streaming_forward(problem: &Forward, inputs: &Tensors, device: &Arc<Device>, name: &'static str) -> Result<Task, BackendError> {
    let neurons = &problem.neurons;
    // Fewer steps than a chunk: a smaller chunk keeps the unused loads out of the registers.
    let chunk: &[&str] = match neurons.t {
        1 => &["CHUNK=1"],
        2 | 3 => &["CHUNK=2"],
        _ => &[],
    };
    let kernel = kernel(device, name, neurons, chunk)?;
    let x = device.upload(inputs.tensor("x").as_bytes())?;
    let shape = LaunchShape::covering(neurons.n, 128, 16 / neurons.dtype.bytes())?;
    let sizes = [Argument::Address(0), Argument::I64(neurons.n as i64), Argument::I64(neurons.t as i64)];
    let parameters = parameters(neurons);
    Ok(Task::new(device, vec![spikes(device, neurons, problem.packed)?], move |outputs| {
        let pointers = [Argument::from(&x), outputs[0].argument()];
        kernel.launch(shape, &[&pointers[..], &sizes, &parameters].concat())
    }))
}

fn saved(problem: &Backward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let neurons = &problem.neurons;
    let (n, t) = (Argument::I64(neurons.n as i64), Argument::I64(neurons.t as i64));
    let parameters = parameters(neurons);
    let membranes = device.allocate(4 * neurons.n * neurons.t)?;
    let tracers = device.allocate(neurons.n * neurons.t)?;
    {
        // The forward pass that saves is not part of the problem: it runs once, here.
        let forward = kernel(device, "st_bif/forward_fused", neurons, &[])?;
        let x = device.upload(inputs.tensor("x").as_bytes())?;
        let spikes = device.allocate(neurons.n * neurons.t)?;
        let pointers = [&x, &spikes, &membranes, &tracers].map(Argument::from);
        let rest = [Argument::Address(0), n, t];
        forward.launch(LaunchShape::covering(neurons.n, 256, 1)?, &[&pointers[..], &rest, &parameters].concat())?;
        device.synchronize()?;
    }
    let kernel = kernel(device, "st_bif/backward_saved", neurons, &[])?;
    let gy = device.upload(inputs.tensor("gy").as_bytes())?;
    let shape = LaunchShape::covering(neurons.n, 128, 4)?;
    Ok(Task::new(device, vec![gradient(device, neurons)?], move |outputs| {
        let pointers = [&gy, &membranes, &tracers].map(Argument::from);
        let rest = [Argument::Address(0), outputs[0].argument(), n, t];
        kernel.launch(shape, &[&pointers[..], &rest, &parameters].concat())
    }))
}

fn replay(problem: &Backward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let neurons = &problem.neurons;
    let steps = format!("STEPS={}", neurons.t);
    let unrolled = neurons.t <= LONGEST_UNROLLED;
    let (kernel, shape) = if unrolled {
        let per_thread = if neurons.dtype == Dtype::F32 || neurons.t > 8 { 2 } else { 4 };
        (kernel(device, "st_bif/backward_replay", neurons, &[&steps])?, LaunchShape::covering(neurons.n, 128, per_thread)?)
    } else {
        (
            kernel(device, "st_bif/backward_replay_any", neurons, &[])?,
            LaunchShape::covering(neurons.n, 64, 8 / neurons.dtype.bytes())?,
        )
    };
    let (x, gy) = (device.upload(inputs.tensor("x").as_bytes())?, device.upload(inputs.tensor("gy").as_bytes())?);
    let mut sizes = vec![Argument::I64(neurons.n as i64)];
    if !unrolled {
        sizes.push(Argument::I64(neurons.t as i64));
    }
    let parameters = parameters(neurons);
    Ok(Task::new(device, vec![gradient(device, neurons)?], move |outputs| {
        let pointers = [Argument::from(&x), Argument::from(&gy), Argument::Address(0), outputs[0].argument()];
        kernel.launch(shape, &[&pointers[..], &sizes, &parameters].concat())
    }))
}

fn kernel(device: &Device, name: &'static str, neurons: &Neurons, defines: &[&str]) -> Result<Kernel, BackendError> {
    let element = match neurons.dtype {
        Dtype::F16 => "ELEMENT_F16",
        Dtype::Bf16 => "ELEMENT_BF16",
        _ => "ELEMENT_F32",
    };
    let defines: Vec<&str> = std::iter::once(element).chain(defines.iter().copied()).collect();
    device.kernel(&source(name).build(&defines), &name.replace('/', "_"))
}

/// θ, Tmin, Tmax, p: the last arguments of every kernel.
fn parameters(neurons: &Neurons) -> [Argument; 4] {
    let parameters = neurons.parameters;
    [
        Argument::F32(parameters.threshold as f32),
        Argument::I32(parameters.tracer_min),
        Argument::I32(parameters.tracer_max),
        Argument::F32(parameters.prefire as f32),
    ]
}

fn spikes(device: &Device, neurons: &Neurons, packed: bool) -> Result<Output, BackendError> {
    let shape = [neurons.t, neurons.n];
    if packed {
        Output::encoded(device, "spikes", shape, neurons.t * neurons.n.div_ceil(4), unpack)
    } else {
        Output::new(device, "spikes", shape, Dtype::I8)
    }
}

fn gradient(device: &Device, neurons: &Neurons) -> Result<Output, BackendError> {
    Output::new(device, "gx", [neurons.t, neurons.n], neurons.dtype)
}

/// Two bits a spike, four to a byte, lowest bits first, rows padded to whole bytes: 00 is 0, 01 is 1, 11 is -1.
fn unpack(bytes: &[u8], shape: &[usize]) -> Tensor {
    let row_bytes = shape[1].div_ceil(4).max(1);
    let spike = |row: &[u8], neuron: usize| match row[neuron / 4] >> (2 * (neuron % 4)) & 3 {
        0b00 => 0,
        0b01 => 1,
        0b11 => -1,
        // Not a spike: poison, or a fault of the kernel. Never equal to a reference.
        _ => 0x7f,
    };
    let mut spikes = vec![0i8; shape.iter().product()];
    spikes.par_chunks_mut(shape[1].max(1)).zip(bytes.par_chunks(row_bytes)).for_each(|(spikes, row)| {
        let parts = spikes.par_chunks_mut(1 << 16).enumerate();
        parts.for_each(|(part, spikes)| {
            spikes.iter_mut().enumerate().for_each(|(i, out)| *out = spike(row, (part << 16) + i));
        });
    });
    Tensor::new(shape.to_vec(), Data::I8(spikes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_spikes_unpack_row_by_row() {
        // 0, 1, -1, poison | 1, 0 and padding.
        let row = [0b10_11_01_00, 0b00_00_00_01];
        let tensor = unpack(&[row, row].concat(), &[2, 6]);
        assert_eq!(tensor.data(), &Data::I8([[0, 1, -1, 0x7f, 1, 0], [0, 1, -1, 0x7f, 1, 0]].concat()));
    }
}
