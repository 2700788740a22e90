//! Kernels that sum messages over GPUs (all-reduce): their compile-time macros, and their launches
//! on all GPUs.

use super::message_buffers::ExchangeMessageBuffers;
use crate::collective::definition::{ExchangeKind, ExchangeProblem};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::Dtype;
use kernelgate_cuda::{
    Device, DeviceBuffer, Devices, KernelArgument, KernelSpec, LoadedKernelWithLaunch,
};

/// Maximum number of blocks of an all-reduce kernel that runs alone: each block waits for its peers
/// on the other GPUs, so all blocks must be resident.
pub const MAX_RESIDENT_SUM_BLOCKS: usize = 128;

/// Compile-time macros of an all-reduce kernel: the element type and the number of GPUs.
pub fn element_and_gpu_count_macros(problem: &ExchangeProblem) -> Vec<String> {
    let element = if problem.dtype == Dtype::Bf16 { "ELEMENT_BF16" } else { "ELEMENT_F32" };
    vec![element.to_owned(), format!("GPUS={}", problem.gpus)]
}

/// Example problems for which the all-reduce kernels are compiled: two GPUs, with f32 and with
/// bf16.
pub fn all_reduce_example_problems() -> Vec<ExchangeProblem> {
    let problem = |dtype| ExchangeProblem {
        kind: ExchangeKind::AllReduce,
        gpus: 2,
        message_elements: 1,
        dtype,
    };
    [Dtype::F32, Dtype::Bf16].map(problem).to_vec()
}

/// Allocates `bytes` bytes of zeroed device memory on each GPU, into which the other GPUs will
/// write.
pub fn allocate_zeroed_on_each_gpu(
    devices: &Devices,
    bytes: usize,
) -> Result<Vec<DeviceBuffer>, BackendError> {
    let mut buffers = Vec::new();
    devices.for_each_with_context_current(|_, device| {
        let buffer = device.allocate(bytes)?;
        buffer.fill_all_bytes(0)?;
        buffers.push(buffer);
        Ok(())
    })?;
    Ok(buffers)
}

/// Arguments of an all-reduce kernel on every GPU, in order: the rank's own arguments, address
/// tables, launch counters of the blocks, the rank, the number of packets.
pub struct AllReduceLaunchArguments {
    /// Function that returns the kernel arguments that only this rank has; they come first.
    pub arguments_of_rank: fn(&ExchangeMessageBuffers, usize) -> Vec<KernelArgument>,
    /// Tables of device addresses, indexed by rank; each table is uploaded to every GPU.
    pub address_tables: Vec<Vec<u64>>,
    /// Number of packets that the all-reduce kernel sums: in the whole message (one-step), or in
    /// one GPU's part (two-step).
    pub packet_count: KernelArgument,
    /// Device buffers that the launches use, so they must stay allocated as long as the task.
    pub buffers_kept_alive: Vec<DeviceBuffer>,
}

struct LoadedKernelOfRank {
    kernel: LoadedKernelWithLaunch,
    arguments: Vec<KernelArgument>,
    _buffers_kept_alive: Vec<DeviceBuffer>,
}

impl AllReduceLaunchArguments {
    /// Loads the all-reduce kernel on every GPU; the returned task launches the kernel on all GPUs.
    pub fn into_all_reduce_task(
        self,
        spec: &KernelSpec<ExchangeProblem>,
        problem: &ExchangeProblem,
        messages: ExchangeMessageBuffers,
        devices: &Devices,
    ) -> Result<CudaTask, BackendError> {
        let mut ranks = Vec::new();
        devices.for_each_with_context_current(|rank, device| {
            ranks.push(self.upload_arguments_of_rank(
                spec.compile_and_load(device, problem)?,
                &messages,
                device,
                rank,
            )?);
            device.synchronize()
        })?;
        let (set, shared) = (devices.clone(), self.buffers_kept_alive);
        Ok(messages.into_task_that_enqueues_exchange(devices, move || {
            let _kept = &shared;
            set.for_each_with_context_current(|rank, _| {
                ranks[rank].kernel.launch_with(&ranks[rank].arguments)
            })
        }))
    }

    fn upload_arguments_of_rank(
        &self,
        kernel: LoadedKernelWithLaunch,
        messages: &ExchangeMessageBuffers,
        device: &Device,
        rank: usize,
    ) -> Result<LoadedKernelOfRank, BackendError> {
        let upload = |table: &Vec<u64>| device.upload(bytemuck::cast_slice(table));
        let mut memory = self.address_tables.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
        memory.push(device.upload(&[0; 4 * MAX_RESIDENT_SUM_BLOCKS])?);
        let mut arguments = (self.arguments_of_rank)(messages, rank);
        arguments.extend(memory.iter().map(KernelArgument::from));
        arguments.extend([KernelArgument::I32(rank as i32), self.packet_count.clone()]);
        Ok(LoadedKernelOfRank { kernel, arguments, _buffers_kept_alive: memory })
    }
}
