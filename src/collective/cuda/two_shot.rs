//! An all-reduce in two steps: every GPU sums its part of all messages, and stores the sum into the
//! outputs of all GPUs.

use super::message_buffers::ExchangeMessageBuffers;
use super::sum_kernels::{self, AllReduceLaunchArguments, MAX_RESIDENT_SUM_BLOCKS};
use crate::collective::definition::ExchangeProblem;
use crate::kernel_files::source_of_kernel_file;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::Tensors;
use kernelgate_cuda::{DeviceBuffer, Devices, KernelArgument, KernelSpec};

/// List of kernels of the two-step all-reduce, which has one entry.
pub const TWO_SHOT_KERNELS: &[KernelSpec<ExchangeProblem>] = &[TWO_SHOT_ALL_REDUCE_KERNEL];

const THREADS_PER_TWO_SHOT_BLOCK: usize = 512;
/// Number of bytes in a packet, which a thread of the two-step all-reduce loads by one instruction.
pub const TWO_SHOT_PACKET_BYTES: usize = 16;
const PACKETS_LOADED_PER_THREAD_STEP: usize = 2;
/// Bytes of the flags of one GPU in the two-step all-reduce: two 32-bit flags for each block.
pub const FLAG_BYTES_PER_GPU: usize = 4 * 2 * MAX_RESIDENT_SUM_BLOCKS;

/// Kernel of the two-step all-reduce. The number of blocks of the two-step all-reduce grows with
/// each GPU's part of the message, up to [`MAX_RESIDENT_SUM_BLOCKS`].
pub const TWO_SHOT_ALL_REDUCE_KERNEL: KernelSpec<ExchangeProblem> = KernelSpec {
    macro_definitions: sum_kernels::element_and_gpu_count_macros,
    constant_macros: |_| {
        vec![("THREADS", THREADS_PER_TWO_SHOT_BLOCK), ("AT_ONCE", PACKETS_LOADED_PER_THREAD_STEP)]
    },
    listed_build_parameters: sum_kernels::all_reduce_example_problems,
    ..KernelSpec::new(
        source_of_kernel_file("collective/all_reduce_two_shot"),
        "collective_all_reduce_two_shot",
        THREADS_PER_TWO_SHOT_BLOCK,
        |problem| {
            [
                two_shot_packets_per_gpu(problem)
                    .div_ceil(THREADS_PER_TWO_SHOT_BLOCK * PACKETS_LOADED_PER_THREAD_STEP)
                    .clamp(1, MAX_RESIDENT_SUM_BLOCKS),
                1,
                1,
            ]
        },
    )
};

/// Number of packets in the part of the message that one GPU sums in the two-step all-reduce.
pub const fn two_shot_packets_per_gpu(problem: &ExchangeProblem) -> usize {
    problem.longer_message_bytes() / (TWO_SHOT_PACKET_BYTES * problem.gpus)
}

/// Checks that the two-step all-reduce supports the message: its size must be whole packets for
/// each GPU.
pub fn check_two_shot_message_size(problem: &ExchangeProblem) -> Result<(), String> {
    let unit = TWO_SHOT_PACKET_BYTES * problem.gpus;
    match problem.longer_message_bytes().is_multiple_of(unit) {
        true => Ok(()),
        false => Err(format!("sums messages of a multiple of {unit} bytes")),
    }
}

/// Allocates the messages and the flags by which blocks wait for their peers; the returned task
/// launches the two-step all-reduce on all GPUs.
pub fn prepare_two_shot_all_reduce(
    problem: &ExchangeProblem,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access_between_all()?;
    let messages =
        ExchangeMessageBuffers::upload_inputs_and_allocate_outputs(problem, inputs, devices)?;
    let flags =
        sum_kernels::allocate_zeroed_on_each_gpu(devices, FLAG_BYTES_PER_GPU * problem.gpus)?;
    let flag_addresses = flags.iter().map(DeviceBuffer::device_address).collect();
    let tables = vec![
        messages.input_addresses_by_rank(),
        messages.output_addresses_by_rank(),
        flag_addresses,
    ];
    let packets = KernelArgument::I64(two_shot_packets_per_gpu(problem) as i64);
    let sum = AllReduceLaunchArguments {
        arguments_of_rank: |_, _| Vec::new(),
        address_tables: tables,
        packet_count: packets,
        buffers_kept_alive: flags,
    };
    sum.into_all_reduce_task(&TWO_SHOT_ALL_REDUCE_KERNEL, problem, messages, devices)
}
