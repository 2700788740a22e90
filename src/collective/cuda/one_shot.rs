//! An all-reduce in one step: every GPU stores its whole message into the memory of all other GPUs,
//! and each GPU adds up all messages.

use super::message_buffers::{ExchangeMessageBuffers, input_and_output_bytes_per_gpu};
use super::sum_kernels::{self, AllReduceLaunchArguments, MAX_RESIDENT_SUM_BLOCKS};
use crate::collective::definition::ExchangeProblem;
use crate::kernel_files::source_of_kernel_file;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::Tensors;
use kernelgate_cuda::{DeviceBuffer, Devices, KernelArgument, KernelSpec};

/// List of kernels of the one-step all-reduce, which has one entry.
pub const ONE_SHOT_KERNELS: &[KernelSpec<ExchangeProblem>] = &[ONE_SHOT_ALL_REDUCE_KERNEL];

const THREADS_PER_ONE_SHOT_BLOCK: usize = 256;
/// Number of message bytes in a packet of the one-step all-reduce; the rest of the packet is flags.
const MESSAGE_BYTES_PER_PACKET: usize = 8;
const ONE_SHOT_PACKET_BYTES: usize = 16;
/// Maximum number of bytes of a message of the one-step all-reduce.
const MAX_ONE_SHOT_MESSAGE_BYTES: usize = 1 << 20;

/// Kernel of the one-step all-reduce, with at most [`MAX_RESIDENT_SUM_BLOCKS`] blocks.
pub const ONE_SHOT_ALL_REDUCE_KERNEL: KernelSpec<ExchangeProblem> = KernelSpec {
    macro_definitions: sum_kernels::element_and_gpu_count_macros,
    constant_macros: |_| vec![("THREADS", THREADS_PER_ONE_SHOT_BLOCK)],
    listed_build_parameters: sum_kernels::all_reduce_example_problems,
    ..KernelSpec::new(
        source_of_kernel_file("collective/all_reduce_one_shot"),
        "collective_all_reduce_one_shot",
        THREADS_PER_ONE_SHOT_BLOCK,
        |problem| {
            [
                one_shot_packets_per_message(problem)
                    .div_ceil(THREADS_PER_ONE_SHOT_BLOCK)
                    .clamp(1, MAX_RESIDENT_SUM_BLOCKS),
                1,
                1,
            ]
        },
    )
};

/// Number of packets into which the one-step all-reduce splits a message.
pub const fn one_shot_packets_per_message(problem: &ExchangeProblem) -> usize {
    problem.longer_message_bytes() / MESSAGE_BYTES_PER_PACKET
}

/// Bytes of both halves of the packet buffer on one GPU, with space for the packets of every GPU.
const fn packet_buffer_bytes_per_gpu(problem: &ExchangeProblem) -> usize {
    2 * problem.gpus * one_shot_packets_per_message(problem) * ONE_SHOT_PACKET_BYTES
}

/// Bytes of device memory that the one-step all-reduce needs on one GPU: its messages and the
/// packet buffer.
pub fn one_shot_device_bytes_per_gpu(problem: &ExchangeProblem) -> u64 {
    input_and_output_bytes_per_gpu(problem) + packet_buffer_bytes_per_gpu(problem) as u64
}

/// Checks that the one-step all-reduce supports the message: at most 1 MiB, and whole packets.
pub fn check_one_shot_message_size(problem: &ExchangeProblem) -> Result<(), String> {
    if problem.longer_message_bytes() > MAX_ONE_SHOT_MESSAGE_BYTES {
        return Err(format!("sums messages of at most {MAX_ONE_SHOT_MESSAGE_BYTES} bytes"));
    }
    if !problem.longer_message_bytes().is_multiple_of(MESSAGE_BYTES_PER_PACKET) {
        return Err(format!("sums messages of a multiple of {MESSAGE_BYTES_PER_PACKET} bytes"));
    }
    Ok(())
}

/// Allocates the messages and the packet buffers on all GPUs; the returned task launches the
/// one-step all-reduce.
pub fn prepare_one_shot_all_reduce(
    problem: &ExchangeProblem,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access_between_all()?;
    let messages =
        ExchangeMessageBuffers::upload_inputs_and_allocate_outputs(problem, inputs, devices)?;
    // Launch numbers of the one-step all-reduce begin at 1, so that a zeroed flag in the packet
    // buffer means "no launch".
    let staging =
        sum_kernels::allocate_zeroed_on_each_gpu(devices, packet_buffer_bytes_per_gpu(problem))?;
    let own = |messages: &ExchangeMessageBuffers, rank: usize| {
        let addresses =
            [messages.input_addresses_by_rank()[rank], messages.output_addresses_by_rank()[rank]];
        addresses.map(KernelArgument::DeviceAddress).to_vec()
    };
    let tables = vec![staging.iter().map(DeviceBuffer::device_address).collect()];
    let packets = KernelArgument::I32(one_shot_packets_per_message(problem) as i32);
    AllReduceLaunchArguments {
        arguments_of_rank: own,
        address_tables: tables,
        packet_count: packets,
        buffers_kept_alive: staging,
    }
    .into_all_reduce_task(&ONE_SHOT_ALL_REDUCE_KERNEL, problem, messages, devices)
}
