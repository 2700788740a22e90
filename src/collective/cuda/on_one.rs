//! Tests of the all-reduce kernels on one GPU: the host writes the packets and flags of the missing
//! GPU into device memory before the launch. Because these tests need one GPU only, tools that
//! check kernels, such as compute-sanitizer, can run them.

use super::one_shot::{ONE_SHOT_ALL_REDUCE_KERNEL, one_shot_packets_per_message};
use super::sum_kernels::MAX_RESIDENT_SUM_BLOCKS;
use super::two_shot::{FLAG_BYTES_PER_GPU, TWO_SHOT_ALL_REDUCE_KERNEL, two_shot_packets_per_gpu};
use crate::collective::definition::{ExchangeKind, ExchangeProblem, INPUT_NAMES, OUTPUT_NAMES};
use crate::gpu_tests::lock_first_gpu;
use kernelgate::workload::{Dtype, Expected, Problem, TensorData, Tensors};
use kernelgate_cuda::{Device, DeviceBuffer, KernelArgument};

/// Test messages: an odd number of packets that one block sums, and more packets than all blocks
/// together have threads.
fn two_gpu_all_reduce_problems() -> impl Iterator<Item = ExchangeProblem> {
    [(11 * 32, Dtype::F32), (11 * 32, Dtype::Bf16), (600_032, Dtype::Bf16), (600_032, Dtype::F32)]
        .into_iter()
        .map(|(bytes, dtype)| {
            let elements = bytes / dtype.bytes_per_element();
            ExchangeProblem {
                kind: ExchangeKind::AllReduce,
                gpus: 2,
                message_elements: elements,
                dtype,
            }
        })
}

fn upload_input_messages_of_two_ranks(device: &Device, inputs: &Tensors) -> [DeviceBuffer; 2] {
    [0, 1].map(|rank| device.upload(inputs.tensor(INPUT_NAMES[rank]).as_bytes()).unwrap())
}

fn upload_table_of_two_addresses(device: &Device, addresses: [u64; 2]) -> DeviceBuffer {
    device.upload(bytemuck::cast_slice(&addresses)).unwrap()
}

/// Asserts that an output buffer on the GPU agrees with the reference of rank `rank`.
fn assert_output_agrees_with_reference_of_rank(
    problem: &ExchangeProblem,
    expected: &[Expected],
    rank: usize,
    output: &DeviceBuffer,
) {
    let mut bytes = vec![0; output.size_in_bytes()];
    output.download_first_bytes(&mut bytes).unwrap();
    let found: Vec<f64> = match problem.dtype {
        Dtype::Bf16 => {
            let words = bytemuck::cast_slice::<u8, u16>(&bytes).iter();
            words.map(|bits| half::bf16::from_bits(*bits).to_f64()).collect()
        }
        _ => bytemuck::cast_slice::<u8, f32>(&bytes).iter().map(|x| f64::from(*x)).collect(),
    };
    let expected =
        expected.iter().find(|expected| expected.output_name == OUTPUT_NAMES[rank]).unwrap();
    let TensorData::F64(values) = &expected.expected_values else { panic!("a reference is f64") };
    assert_eq!(found.len(), values.len());
    let tolerance = problem.tolerance().max_error;
    for (at, (found, wanted)) in found.iter().zip(values).enumerate() {
        assert!((found - wanted).abs() <= tolerance * wanted.abs().max(1.0), "{problem:?}: {at}");
    }
}

#[test]
fn the_one_shot_kernel_sums_packets_that_are_in_memory_already() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for problem in two_gpu_all_reduce_problems() {
        let (inputs, count) = (problem.inputs(3), one_shot_packets_per_message(&problem));
        let expected = problem.reference(&inputs);
        let messages = upload_input_messages_of_two_ranks(&device, &inputs);
        for rank in [0, 1] {
            let peer = 1 - rank;
            // The first launch of the one-step all-reduce has number 1 and uses the second half of
            // the packet buffer.
            let mut staged = vec![0u32; 2 * 2 * count * 4];
            let words: &[u32] = bytemuck::cast_slice(inputs.tensor(INPUT_NAMES[peer]).as_bytes());
            let slot = (2 + peer) * count * 4;
            for (packet, pair) in staged[slot..].chunks_exact_mut(4).zip(words.chunks_exact(2)) {
                packet.copy_from_slice(&[pair[0], 1, pair[1], 1]);
            }
            let staging = device.upload(bytemuck::cast_slice(&staged)).unwrap();
            let output = device.allocate(problem.longer_message_bytes()).unwrap();
            let epochs = device.upload(&[0; 4 * MAX_RESIDENT_SUM_BLOCKS]).unwrap();
            let kernel = ONE_SHOT_ALL_REDUCE_KERNEL.compile_and_load(&device, &problem).unwrap();
            let staged = upload_table_of_two_addresses(&device, [staging.device_address(); 2]);
            let arguments = [
                (&messages[rank]).into(),
                (&output).into(),
                (&staged).into(),
                (&epochs).into(),
                KernelArgument::I32(rank as i32),
                KernelArgument::I32(count as i32),
            ];
            kernel.launch_with(&arguments).unwrap();
            assert_output_agrees_with_reference_of_rank(&problem, &expected, rank, &output);
        }
    }
}

#[test]
fn the_two_shot_kernel_sums_parts_whose_flags_are_set_already() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for problem in two_gpu_all_reduce_problems() {
        let inputs = problem.inputs(4);
        let expected = problem.reference(&inputs);
        let messages = upload_input_messages_of_two_ranks(&device, &inputs);
        let outputs = [0, 1].map(|_| device.allocate(problem.longer_message_bytes()).unwrap());
        let [x, y] = [&messages, &outputs].map(|buffers| {
            upload_table_of_two_addresses(
                &device,
                [buffers[0].device_address(), buffers[1].device_address()],
            )
        });
        let kernel = TWO_SHOT_ALL_REDUCE_KERNEL.compile_and_load(&device, &problem).unwrap();
        for rank in [0, 1] {
            let flags = vec![1u32; FLAG_BYTES_PER_GPU / 4 * problem.gpus];
            let flags = device.upload(bytemuck::cast_slice(&flags)).unwrap();
            let flag_table = upload_table_of_two_addresses(&device, [flags.device_address(); 2]);
            let epochs = device.upload(&[0; 4 * MAX_RESIDENT_SUM_BLOCKS]).unwrap();
            let arguments = [
                (&x).into(),
                (&y).into(),
                (&flag_table).into(),
                (&epochs).into(),
                KernelArgument::I32(rank),
                KernelArgument::I64(two_shot_packets_per_gpu(&problem) as i64),
            ];
            kernel.launch_with(&arguments).unwrap();
            device.synchronize().unwrap();
        }
        for (rank, output) in outputs.iter().enumerate() {
            assert_output_agrees_with_reference_of_rank(&problem, &expected, rank, output);
        }
    }
}
