//! An all-reduce that overwrites its input, as a launch inside each GPU's program, concurrent with
//! the program's other kernels.

use std::cell::RefCell;
use std::rc::Rc;

use super::sum_kernels::MAX_RESIDENT_SUM_BLOCKS;
use super::two_shot::{
    FLAG_BYTES_PER_GPU, TWO_SHOT_ALL_REDUCE_KERNEL, TWO_SHOT_PACKET_BYTES, two_shot_packets_per_gpu,
};
use crate::collective::definition::{ExchangeKind, ExchangeProblem};
use kernelgate::backend::BackendError;
use kernelgate::backend::program::{DeviceStreamAndAddresses, EnqueueStep};
use kernelgate::workload::Dtype;
use kernelgate_cuda::{DeviceBuffer, KernelArgument, KernelSpec};

/// Number of thread blocks of an all-reduce that runs concurrently with other kernels; each block
/// occupies a multiprocessor while it waits for its peers. On two H100, a ResNet-18 training step
/// for 64 images takes 481 µs with 8 all-reduce blocks, 485 with 16, 491 with 32 and 510 with 128.
const CONCURRENT_ALL_REDUCE_BLOCKS: usize = 8;

/// The kernel of the two-step all-reduce (`two_shot`), launched with at most
/// [`CONCURRENT_ALL_REDUCE_BLOCKS`] blocks.
const TWO_SHOT_KERNEL_WITH_FEWER_BLOCKS: KernelSpec<ExchangeProblem> = KernelSpec {
    blocks: |problem| {
        [
            two_shot_packets_per_gpu(problem).div_ceil(512).clamp(1, CONCURRENT_ALL_REDUCE_BLOCKS),
            1,
            1,
        ]
    },
    ..TWO_SHOT_ALL_REDUCE_KERNEL
};

/// Buffers of one GPU (one rank) for the all-reduce that overwrites its input.
struct InPlaceSumBuffersOfRank {
    summed_buffer_address: u64,
    synchronisation_flags: DeviceBuffer,
    /// Tables of device addresses on this GPU: each GPU's summed memory, and each GPU's flags.
    tables: [DeviceBuffer; 2],
}

/// An all-reduce (sum over GPUs) that overwrites its input on every GPU.
pub struct InPlaceAllReduce {
    problem: ExchangeProblem,
    buffers_by_rank: RefCell<Vec<InPlaceSumBuffersOfRank>>,
}

impl InPlaceAllReduce {
    /// Describes an in-place all-reduce of f32 messages of `bytes` bytes over `gpus` GPUs; no GPU
    /// has joined yet.
    pub fn f32_sum_over_gpus(gpus: usize, bytes: usize) -> Rc<Self> {
        let elements =
            Self::message_bytes_in_whole_packets(gpus, bytes) / Dtype::F32.bytes_per_element();
        let problem = ExchangeProblem {
            kind: ExchangeKind::AllReduce,
            gpus,
            message_elements: elements,
            dtype: Dtype::F32,
        };
        Rc::new(Self { problem, buffers_by_rank: RefCell::default() })
    }

    /// Bytes of a message buffer for `bytes` bytes, rounded up so that each GPU's part is whole
    /// 16-byte packets.
    pub const fn message_bytes_in_whole_packets(gpus: usize, bytes: usize) -> usize {
        bytes.next_multiple_of(TWO_SHOT_PACKET_BYTES * gpus)
    }

    /// Returns a function that loads the all-reduce kernel for the next rank, over the message at
    /// the launch site's address, and returns its enqueue function. The functions that
    /// `prepare_launch_on_next_rank` returns must be called once for each GPU, in the order of
    /// ranks.
    pub fn prepare_launch_on_next_rank(
        self: &Rc<Self>,
    ) -> impl FnOnce(DeviceStreamAndAddresses<'_>) -> Result<EnqueueStep, BackendError> + 'static
    {
        let sum = Rc::clone(self);
        move |at| {
            let rank = sum.buffers_by_rank.borrow().len();
            let (gpus, count) = (sum.problem.gpus, two_shot_packets_per_gpu(&sum.problem));
            let kernel = TWO_SHOT_KERNEL_WITH_FEWER_BLOCKS
                .compile_and_load(at.device, &sum.problem)?
                .clone_launching_on_stream(at.stream);
            let flags = at.device.upload(&vec![0; FLAG_BYTES_PER_GPU * gpus])?;
            let alone = |address: u64| at.device.upload(bytemuck::cast_slice(&vec![address; gpus]));
            let (summed, tables) = (
                at.device_addresses[0],
                [alone(at.device_addresses[0])?, alone(flags.device_address())?],
            );
            // The counters start at 2^32 - 1, so the first launch of each block has number 0 and
            // waits for no peer.
            let epochs = at.device.upload(&[0xff; 4 * MAX_RESIDENT_SUM_BLOCKS])?;
            let [memory, peers] = tables.clone();
            sum.buffers_by_rank.borrow_mut().push(InPlaceSumBuffersOfRank {
                summed_buffer_address: summed,
                synchronisation_flags: flags,
                tables,
            });
            Ok(Box::new(move || {
                // Peers write flags into the memory of all ranks, so the launch keeps the buffers
                // of all ranks allocated.
                let _kept = &sum;
                kernel.launch_with(&[
                    (&memory).into(),
                    (&memory).into(),
                    (&peers).into(),
                    (&epochs).into(),
                    KernelArgument::I32(rank as i32),
                    KernelArgument::I64(count as i64),
                ])
            }))
        }
    }

    /// Connects the GPUs. Each GPU must have launched its all-reduce once alone before the GPUs are
    /// connected.
    ///
    /// # Errors
    /// Fails if copying the address tables fails.
    pub fn connect_gpus_by_address_tables(&self) -> Result<(), BackendError> {
        let ranks = self.buffers_by_rank.borrow();
        let summed: Vec<u64> = ranks.iter().map(|rank| rank.summed_buffer_address).collect();
        let flags: Vec<u64> =
            ranks.iter().map(|rank| rank.synchronisation_flags.device_address()).collect();
        for InPlaceSumBuffersOfRank { tables: [memory, peers], .. } in ranks.iter() {
            memory.overwrite_first_bytes_from_host(bytemuck::cast_slice(&summed))?;
            peers.overwrite_first_bytes_from_host(bytemuck::cast_slice(&flags))?;
        }
        Ok(())
    }
}
