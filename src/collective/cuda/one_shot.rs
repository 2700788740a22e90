//! A sum in one step: every GPU stores its whole message into the memory of all others.

use super::memory::{Messages, messages_bytes};
use super::sums;
use crate::collective::definition::Exchange;
use crate::kernel_files::kernel_file;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::Tensors;
use kernelgate_cuda::{Argument, Buffer, Devices, KernelSpec, LoadedKernel};

/// Every kernel of this file.
pub const KERNELS: &[KernelSpec<Exchange>] = &[ONE_SHOT];

const THREADS: usize = 256;
/// Most blocks: each waits for its peers, so all of them must be resident.
const MOST_BLOCKS: usize = 128;
/// Bytes of a message in a packet, and of the packet with its flags.
const CARRIED: usize = 8;
const PACKET: usize = 16;
/// Longest message, bytes.
const MOST_BYTES: usize = 1 << 20;

const ONE_SHOT: KernelSpec<Exchange> = KernelSpec {
    defines: sums::defines,
    constants: |_| vec![("THREADS", THREADS)],
    variants: sums::variants,
    ..KernelSpec::new(
        kernel_file(
            "collective/all_reduce_one_shot",
            include_str!("../../../kernels/collective/all_reduce_one_shot.cu"),
        ),
        "collective_all_reduce_one_shot",
        THREADS,
        |problem| [packets(problem).div_ceil(THREADS).clamp(1, MOST_BLOCKS), 1, 1],
    )
};

const fn packets(problem: &Exchange) -> usize {
    problem.bytes() / CARRIED
}

/// Both halves of the packets of every GPU, bytes.
const fn staging_bytes(problem: &Exchange) -> usize {
    2 * problem.gpus * packets(problem) * PACKET
}

/// Memory on one GPU, bytes.
pub fn device_bytes(problem: &Exchange) -> u64 {
    messages_bytes(problem) + staging_bytes(problem) as u64
}

/// Short messages of whole packets.
pub fn supports(problem: &Exchange) -> Result<(), String> {
    if problem.bytes() > MOST_BYTES {
        return Err(format!("sums messages of at most {MOST_BYTES} bytes"));
    }
    if !problem.bytes().is_multiple_of(CARRIED) {
        return Err(format!("sums messages of a multiple of {CARRIED} bytes"));
    }
    Ok(())
}

struct Rank {
    kernel: LoadedKernel,
    table: Buffer,
    epochs: Buffer,
}

/// Places the messages, the packets and the counters of launches.
pub fn prepare(
    problem: &Exchange,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access()?;
    let messages = Messages::new(problem, inputs, devices)?;
    let mut staging = Vec::new();
    devices.for_each(|_, device| {
        // No launch has the number 0.
        let packets = device.allocate(staging_bytes(problem))?;
        packets.fill(0)?;
        staging.push(packets);
        Ok(())
    })?;
    let addresses: Vec<u64> = staging.iter().map(Buffer::address).collect();
    let mut ranks = Vec::new();
    devices.for_each(|_, device| {
        let kernel = ONE_SHOT.load(device, problem)?;
        let table = device.upload(bytemuck::cast_slice(&addresses))?;
        let epochs = device.upload(&[0; 4 * MOST_BLOCKS])?;
        ranks.push(Rank { kernel, table, epochs });
        device.synchronize()
    })?;
    let (x, y) = (messages.input_addresses(), messages.output_addresses());
    let (count, set) = (packets(problem) as i32, devices.clone());
    Ok(messages.task(devices, move || {
        let _kept = &staging;
        set.for_each(|rank, _| {
            let Rank { kernel, table, epochs } = &ranks[rank];
            kernel.launch(&[
                Argument::Address(x[rank]),
                Argument::Address(y[rank]),
                table.into(),
                epochs.into(),
                Argument::I32(rank as i32),
                Argument::I32(count),
            ])
        })
    }))
}
