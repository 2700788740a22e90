//! Kernels that sum messages over GPUs: their builds, and their launches on all GPUs.

use super::message_buffers::MessageBuffers;
use crate::collective::definition::{ExchangeKind, ExchangeProblem};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::Dtype;
use kernelgate_cuda::{Device, DeviceBuffer, Devices, KernelArgument, KernelSpec, LoadedKernel};

/// Maximum number of blocks of a sum that runs alone: each block waits for its peers, so all of
/// them must be resident.
pub const MAX_WAITING_BLOCKS: usize = 128;

/// Macros of the element type and of the number of GPUs.
pub fn sum_macros(problem: &ExchangeProblem) -> Vec<String> {
    let element = if problem.dtype == Dtype::Bf16 { "ELEMENT_BF16" } else { "ELEMENT_F32" };
    vec![element.to_owned(), format!("GPUS={}", problem.gpus)]
}

/// Problems of all builds: one for two GPUs of each dtype.
pub fn problems_of_builds() -> Vec<ExchangeProblem> {
    let problem =
        |dtype| ExchangeProblem { kind: ExchangeKind::AllReduce, gpus: 2, elements: 1, dtype };
    [Dtype::F32, Dtype::Bf16].map(problem).to_vec()
}

/// Allocates zeroed memory on each GPU, to which the other GPUs write.
pub fn zeroed_on_each(devices: &Devices, bytes: usize) -> Result<Vec<DeviceBuffer>, BackendError> {
    let mut buffers = Vec::new();
    devices.for_each_device(|_, device| {
        let buffer = device.allocate(bytes)?;
        buffer.fill(0)?;
        buffers.push(buffer);
        Ok(())
    })?;
    Ok(buffers)
}

/// Arguments of a sum's launch on every GPU: its own arguments, tables of addresses, counters of
/// launches by block, the rank, and the number of packets.
pub struct SumExchange {
    /// Function that returns the first kernel arguments of a rank.
    pub own: fn(&MessageBuffers, usize) -> Vec<KernelArgument>,
    /// Tables of addresses by rank, in the memory of each GPU.
    pub tables: Vec<Vec<u64>>,
    /// Number of packets in a message, or in the part of a GPU.
    pub packets: KernelArgument,
    /// Device memory that the launches use and that must stay allocated.
    pub shared: Vec<DeviceBuffer>,
}

struct RankKernel {
    kernel: LoadedKernel,
    arguments: Vec<KernelArgument>,
    _memory: Vec<DeviceBuffer>,
}

impl SumExchange {
    /// Loads the kernel of the sum on every GPU.
    pub fn into_sum_task(
        self,
        spec: &KernelSpec<ExchangeProblem>,
        problem: &ExchangeProblem,
        messages: MessageBuffers,
        devices: &Devices,
    ) -> Result<CudaTask, BackendError> {
        let mut ranks = Vec::new();
        devices.for_each_device(|rank, device| {
            ranks.push(self.kernel_of_rank(
                spec.compile_and_load(device, problem)?,
                &messages,
                device,
                rank,
            )?);
            device.synchronize()
        })?;
        let (set, shared) = (devices.clone(), self.shared);
        Ok(messages.into_exchange_task(devices, move || {
            let _kept = &shared;
            set.for_each_device(|rank, _| ranks[rank].kernel.launch_with(&ranks[rank].arguments))
        }))
    }

    fn kernel_of_rank(
        &self,
        kernel: LoadedKernel,
        messages: &MessageBuffers,
        device: &Device,
        rank: usize,
    ) -> Result<RankKernel, BackendError> {
        let upload = |table: &Vec<u64>| device.upload(bytemuck::cast_slice(table));
        let mut memory = self.tables.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
        memory.push(device.upload(&[0; 4 * MAX_WAITING_BLOCKS])?);
        let mut arguments = (self.own)(messages, rank);
        arguments.extend(memory.iter().map(KernelArgument::from));
        arguments.extend([KernelArgument::I32(rank as i32), self.packets.clone()]);
        Ok(RankKernel { kernel, arguments, _memory: memory })
    }
}
