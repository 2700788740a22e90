//! An all-reduce in one step: every GPU stores its whole message into the memory of all other GPUs.

use super::message_buffers::{MessageBuffers, message_bytes_per_gpu};
use super::sum_kernels::{self, MAX_WAITING_BLOCKS, SumExchange};
use crate::collective::definition::ExchangeProblem;
use crate::kernel_files::kernel_file;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::Tensors;
use kernelgate_cuda::{DeviceBuffer, Devices, KernelArgument, KernelSpec};

/// All kernels of the one-step sum.
pub const KERNELS: &[KernelSpec<ExchangeProblem>] = &[ONE_SHOT_KERNEL];

const THREADS: usize = 256;
/// Bytes of the message in a packet.
const PACKET_PAYLOAD_BYTES: usize = 8;
const PACKET_BYTES: usize = 16;
/// Maximum number of bytes of a message.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// Kernel of the one-step sum.
pub const ONE_SHOT_KERNEL: KernelSpec<ExchangeProblem> = KernelSpec {
    defines: sum_kernels::sum_macros,
    constants: |_| vec![("THREADS", THREADS)],
    variants: sum_kernels::problems_of_builds,
    ..KernelSpec::new(
        kernel_file("collective/all_reduce_one_shot"),
        "collective_all_reduce_one_shot",
        THREADS,
        |problem| {
            [packets_of_message(problem).div_ceil(THREADS).clamp(1, MAX_WAITING_BLOCKS), 1, 1]
        },
    )
};

/// Number of packets of a message.
pub const fn packets_of_message(problem: &ExchangeProblem) -> usize {
    problem.message_bytes() / PACKET_PAYLOAD_BYTES
}

/// Bytes of both halves of the buffer for the packets of every GPU.
const fn staging_bytes(problem: &ExchangeProblem) -> usize {
    2 * problem.gpus * packets_of_message(problem) * PACKET_BYTES
}

/// Bytes of device memory that the exchange needs on one GPU.
pub fn device_bytes(problem: &ExchangeProblem) -> u64 {
    message_bytes_per_gpu(problem) + staging_bytes(problem) as u64
}

/// Checks that messages are short and consist of whole packets.
pub fn check_message_size(problem: &ExchangeProblem) -> Result<(), String> {
    if problem.message_bytes() > MAX_MESSAGE_BYTES {
        return Err(format!("sums messages of at most {MAX_MESSAGE_BYTES} bytes"));
    }
    if !problem.message_bytes().is_multiple_of(PACKET_PAYLOAD_BYTES) {
        return Err(format!("sums messages of a multiple of {PACKET_PAYLOAD_BYTES} bytes"));
    }
    Ok(())
}

/// Allocates the messages and the packet buffers on the GPUs.
pub fn prepare_one_shot_sum(
    problem: &ExchangeProblem,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access()?;
    let messages = MessageBuffers::new(problem, inputs, devices)?;
    // Launch numbers begin at 1, so that the flag value 0 means "no launch".
    let staging = sum_kernels::zeroed_on_each(devices, staging_bytes(problem))?;
    let own = |messages: &MessageBuffers, rank: usize| {
        let addresses = [messages.input_addresses()[rank], messages.output_addresses()[rank]];
        addresses.map(KernelArgument::Address).to_vec()
    };
    let tables = vec![staging.iter().map(DeviceBuffer::address).collect()];
    let packets = KernelArgument::I32(packets_of_message(problem) as i32);
    SumExchange { own, tables, packets, shared: staging }.into_sum_task(
        &ONE_SHOT_KERNEL,
        problem,
        messages,
        devices,
    )
}
