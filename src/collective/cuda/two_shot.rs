//! A sum in two steps: every GPU sums its part of all messages, and stores it into all outputs.

use super::memory::Messages;
use super::sums;
use crate::collective::definition::Exchange;
use crate::kernel_files::kernel_file;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::Tensors;
use kernelgate_cuda::{Argument, Buffer, Devices, KernelSpec, LoadedKernel};

/// Every kernel of this file.
pub const KERNELS: &[KernelSpec<Exchange>] = &[TWO_SHOT];

const THREADS: usize = 512;
/// Most blocks: each waits for its peers, so all of them must be resident.
pub const MOST_BLOCKS: usize = 128;
/// Bytes of a packet, and packets that a thread sums at a time.
pub const PACKET: usize = 16;
const AT_ONCE: usize = 2;
/// Bytes of the flags of a GPU.
pub const FLAGS: usize = 4 * 2 * MOST_BLOCKS;

/// The kernel. Every part is summed by so many blocks as it has work for.
pub const TWO_SHOT: KernelSpec<Exchange> = KernelSpec {
    defines: sums::defines,
    constants: |_| vec![("THREADS", THREADS), ("AT_ONCE", AT_ONCE)],
    variants: sums::variants,
    ..KernelSpec::new(
        kernel_file(
            "collective/all_reduce_two_shot",
            include_str!("../../../kernels/collective/all_reduce_two_shot.cu"),
        ),
        "collective_all_reduce_two_shot",
        THREADS,
        |problem| [part(problem).div_ceil(THREADS * AT_ONCE).clamp(1, MOST_BLOCKS), 1, 1],
    )
};

/// Packets that a GPU sums.
pub const fn part(problem: &Exchange) -> usize {
    problem.bytes() / (PACKET * problem.gpus)
}

/// Messages of whole packets for each GPU.
pub fn supports(problem: &Exchange) -> Result<(), String> {
    let unit = PACKET * problem.gpus;
    match problem.bytes().is_multiple_of(unit) {
        true => Ok(()),
        false => Err(format!("sums messages of a multiple of {unit} bytes")),
    }
}

struct Rank {
    kernel: LoadedKernel,
    /// Addresses of all inputs, outputs and flags.
    tables: [Buffer; 3],
    epochs: Buffer,
}

/// Places the messages, and the flags by which blocks wait for their peers.
pub fn prepare(
    problem: &Exchange,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access()?;
    let messages = Messages::new(problem, inputs, devices)?;
    let mut flags = Vec::new();
    devices.for_each(|_, device| {
        flags.push(device.upload(&vec![0; FLAGS * problem.gpus])?);
        Ok(())
    })?;
    let flag_addresses: Vec<u64> = flags.iter().map(Buffer::address).collect();
    let addresses = [messages.input_addresses(), messages.output_addresses(), flag_addresses];
    let mut ranks = Vec::new();
    devices.for_each(|_, device| {
        let kernel = TWO_SHOT.load(device, problem)?;
        let upload = |of: &Vec<u64>| device.upload(bytemuck::cast_slice(of));
        let [x, y, flags] = &addresses;
        let tables = [upload(x)?, upload(y)?, upload(flags)?];
        let epochs = device.upload(&[0; 4 * MOST_BLOCKS])?;
        ranks.push(Rank { kernel, tables, epochs });
        device.synchronize()
    })?;
    let (count, set) = (part(problem) as i64, devices.clone());
    Ok(messages.task(devices, move || {
        let _kept = &flags;
        set.for_each(|rank, _| {
            let Rank { kernel, tables: [x, y, flags], epochs } = &ranks[rank];
            kernel.launch(&[
                x.into(),
                y.into(),
                flags.into(),
                epochs.into(),
                Argument::I32(rank as i32),
                Argument::I64(count),
            ])
        })
    }))
}
