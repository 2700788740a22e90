//! An all-reduce in two steps: every GPU sums its part of all messages, and stores the sum into all
//! outputs.

use super::message_buffers::MessageBuffers;
use super::sum_kernels::{self, MAX_WAITING_BLOCKS, SumExchange};
use crate::collective::definition::ExchangeProblem;
use crate::kernel_files::kernel_file;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::Tensors;
use kernelgate_cuda::{DeviceBuffer, Devices, KernelArgument, KernelSpec};

/// All kernels of the two-step sum.
pub const KERNELS: &[KernelSpec<ExchangeProblem>] = &[TWO_SHOT_KERNEL];

const THREADS: usize = 512;
/// Number of bytes in a packet.
pub const PACKET_BYTES: usize = 16;
const PACKETS_AT_ONCE: usize = 2;
/// Bytes of the flags of one GPU.
pub const FLAG_BYTES: usize = 4 * 2 * MAX_WAITING_BLOCKS;

/// Kernel of the two-step sum. Each GPU's part of the message is summed by as many blocks as its
/// size needs.
pub const TWO_SHOT_KERNEL: KernelSpec<ExchangeProblem> = KernelSpec {
    defines: sum_kernels::sum_macros,
    constants: |_| vec![("THREADS", THREADS), ("AT_ONCE", PACKETS_AT_ONCE)],
    variants: sum_kernels::problems_of_builds,
    ..KernelSpec::new(
        kernel_file("collective/all_reduce_two_shot"),
        "collective_all_reduce_two_shot",
        THREADS,
        |problem| {
            [
                packets_per_gpu(problem)
                    .div_ceil(THREADS * PACKETS_AT_ONCE)
                    .clamp(1, MAX_WAITING_BLOCKS),
                1,
                1,
            ]
        },
    )
};

/// Number of packets that one GPU sums in the two-step sum.
pub const fn packets_per_gpu(problem: &ExchangeProblem) -> usize {
    problem.message_bytes() / (PACKET_BYTES * problem.gpus)
}

/// Checks that messages have whole packets for each GPU.
pub fn check_message_size(problem: &ExchangeProblem) -> Result<(), String> {
    let unit = PACKET_BYTES * problem.gpus;
    match problem.message_bytes().is_multiple_of(unit) {
        true => Ok(()),
        false => Err(format!("sums messages of a multiple of {unit} bytes")),
    }
}

/// Allocates the messages, and the flags by which blocks wait for their peers.
pub fn prepare_two_shot_sum(
    problem: &ExchangeProblem,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access()?;
    let messages = MessageBuffers::new(problem, inputs, devices)?;
    let flags = sum_kernels::zeroed_on_each(devices, FLAG_BYTES * problem.gpus)?;
    let flag_addresses = flags.iter().map(DeviceBuffer::address).collect();
    let tables = vec![messages.input_addresses(), messages.output_addresses(), flag_addresses];
    let packets = KernelArgument::I64(packets_per_gpu(problem) as i64);
    let sum = SumExchange { own: |_, _| Vec::new(), tables, packets, shared: flags };
    sum.into_sum_task(&TWO_SHOT_KERNEL, problem, messages, devices)
}
