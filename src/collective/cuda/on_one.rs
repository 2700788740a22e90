//! Tests of the sums' kernels on one GPU: the host takes the place of the other GPUs, whose packets
//! and flags are in memory before the launch. Tools that check kernels then need only one GPU.

use super::one_shot::{ONE_SHOT_KERNEL, packets_of_message};
use super::sum_kernels::MAX_WAITING_BLOCKS;
use super::two_shot::{FLAG_BYTES, TWO_SHOT_KERNEL, packets_per_gpu};
use crate::collective::definition::{ExchangeKind, ExchangeProblem, INPUT_NAMES, OUTPUT_NAMES};
use crate::gpu_tests::lock_first_gpu;
use kernelgate::workload::{Dtype, Expected, Problem, TensorData, Tensors};
use kernelgate_cuda::{Device, DeviceBuffer, KernelArgument};

/// Messages with an odd number of packets for one block, and with more packets than all blocks have
/// threads.
fn exchange_problems() -> impl Iterator<Item = ExchangeProblem> {
    [(11 * 32, Dtype::F32), (11 * 32, Dtype::Bf16), (600_032, Dtype::Bf16), (600_032, Dtype::F32)]
        .into_iter()
        .map(|(bytes, dtype)| {
            let elements = bytes / dtype.bytes();
            ExchangeProblem { kind: ExchangeKind::AllReduce, gpus: 2, elements, dtype }
        })
}

fn upload_messages(device: &Device, inputs: &Tensors) -> [DeviceBuffer; 2] {
    [0, 1].map(|rank| device.upload(inputs.tensor(INPUT_NAMES[rank]).as_bytes()).unwrap())
}

fn address_table(device: &Device, addresses: [u64; 2]) -> DeviceBuffer {
    device.upload(bytemuck::cast_slice(&addresses)).unwrap()
}

/// Compares an output with the reference of a rank.
fn check(problem: &ExchangeProblem, expected: &[Expected], rank: usize, output: &DeviceBuffer) {
    let mut bytes = vec![0; output.bytes()];
    output.download(&mut bytes).unwrap();
    let found: Vec<f64> = match problem.dtype {
        Dtype::Bf16 => {
            let words = bytemuck::cast_slice::<u8, u16>(&bytes).iter();
            words.map(|bits| half::bf16::from_bits(*bits).to_f64()).collect()
        }
        _ => bytemuck::cast_slice::<u8, f32>(&bytes).iter().map(|x| f64::from(*x)).collect(),
    };
    let expected = expected.iter().find(|expected| expected.name == OUTPUT_NAMES[rank]).unwrap();
    let TensorData::F64(values) = &expected.values else { panic!("a reference is f64") };
    assert_eq!(found.len(), values.len());
    let tolerance = problem.tolerance().max_error;
    for (at, (found, wanted)) in found.iter().zip(values).enumerate() {
        assert!((found - wanted).abs() <= tolerance * wanted.abs().max(1.0), "{problem:?}: {at}");
    }
}

#[test]
fn the_one_shot_kernel_sums_packets_that_have_arrived() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for problem in exchange_problems() {
        let (inputs, count) = (problem.inputs(3), packets_of_message(&problem));
        let expected = problem.reference(&inputs);
        let messages = upload_messages(&device, &inputs);
        for rank in [0, 1] {
            let peer = 1 - rank;
            // The first launch has the number 1 and uses the second half of the buffer.
            let mut staged = vec![0u32; 2 * 2 * count * 4];
            let words: &[u32] = bytemuck::cast_slice(inputs.tensor(INPUT_NAMES[peer]).as_bytes());
            let slot = (2 + peer) * count * 4;
            for (packet, pair) in staged[slot..].chunks_exact_mut(4).zip(words.chunks_exact(2)) {
                packet.copy_from_slice(&[pair[0], 1, pair[1], 1]);
            }
            let staging = device.upload(bytemuck::cast_slice(&staged)).unwrap();
            let output = device.allocate(problem.message_bytes()).unwrap();
            let epochs = device.upload(&[0; 4 * MAX_WAITING_BLOCKS]).unwrap();
            let kernel = ONE_SHOT_KERNEL.compile_and_load(&device, &problem).unwrap();
            let staged = address_table(&device, [staging.address(); 2]);
            let arguments = [
                (&messages[rank]).into(),
                (&output).into(),
                (&staged).into(),
                (&epochs).into(),
                KernelArgument::I32(rank as i32),
                KernelArgument::I32(count as i32),
            ];
            kernel.launch_with(&arguments).unwrap();
            check(&problem, &expected, rank, &output);
        }
    }
}

#[test]
fn the_two_shot_kernel_sums_parts_whose_flags_are_set() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for problem in exchange_problems() {
        let inputs = problem.inputs(4);
        let expected = problem.reference(&inputs);
        let messages = upload_messages(&device, &inputs);
        let outputs = [0, 1].map(|_| device.allocate(problem.message_bytes()).unwrap());
        let [x, y] = [&messages, &outputs]
            .map(|buffers| address_table(&device, [buffers[0].address(), buffers[1].address()]));
        let kernel = TWO_SHOT_KERNEL.compile_and_load(&device, &problem).unwrap();
        for rank in [0, 1] {
            let flags = vec![1u32; FLAG_BYTES / 4 * problem.gpus];
            let flags = device.upload(bytemuck::cast_slice(&flags)).unwrap();
            let flag_table = address_table(&device, [flags.address(); 2]);
            let epochs = device.upload(&[0; 4 * MAX_WAITING_BLOCKS]).unwrap();
            let arguments = [
                (&x).into(),
                (&y).into(),
                (&flag_table).into(),
                (&epochs).into(),
                KernelArgument::I32(rank),
                KernelArgument::I64(packets_per_gpu(&problem) as i64),
            ];
            kernel.launch_with(&arguments).unwrap();
            device.synchronize().unwrap();
        }
        for (rank, output) in outputs.iter().enumerate() {
            check(&problem, &expected, rank, output);
        }
    }
}
