//! Attention forward over several GPUs: copies of keys and values to the GPU that needs them next,
//! the launches of `attention/forward`, and a kernel that merges their results.
//!
//! At each step a GPU attends to the keys of one GPU. During a step, the GPU's copy engine fetches
//! the keys of the next step from the GPU that owns them, on a separate stream. The copies
//! alternate between two destination buffers. Each link carries as much data as if the keys went
//! round a ring, but no GPU waits for its neighbour.

use std::sync::Arc;

use super::call::{AttentionTechnique, ForwardAddresses, OrderedLaunches};
use super::launch::{ELEMENT_BYTES, Extents, allocate_scratch, shape_macros, upload_inputs};
use super::launches::ForwardCall;
use super::layout::{AttentionShape, ForwardLayout, Strides};
use crate::attention::ring::{K, OUT, Q, RingProblem, RingStep, V};
use crate::kernel_files::kernel_file;
use kernelgate::backend::cuda::{CudaTask, Input, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::driver::CudaStream;
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{
    Device, DeviceBuffer, Devices, JoinedStreams, KernelArgument, KernelSpec, LoadedKernel,
};

/// Kernels of the ring besides those of the forward.
pub const KERNELS: &[KernelSpec<RingProblem>] = &[BARRIER_KERNEL, MERGE_KERNEL];

/// Rows of attention forward over several GPUs.
pub const RING_ROWS: &[Implementation<RingProblem>] = &[Implementation {
    name: "cuda/ring",
    about: "the fastest forward on the keys of one GPU after the other, which a copy engine \
            fetches meanwhile; results merged by the rows' sums of exponentials",
    supports: |problem| {
        Extents::from(&problem.attention).check_support(&[])?;
        MERGE_KERNEL.launch_for(problem).map(|_| ()).map_err(|error| error.to_string())
    },
    prepare: Prepare::CudaSet { device_bytes, prepare: prepare_ring_attention },
}];

const MERGE_THREADS: usize = 256;
/// Number of elements of a row that a thread merges.
const ELEMENTS_PER_MERGE_THREAD: usize = 8;
/// Number of buffers for keys and values of other GPUs: one for this step and one for the next.
const FETCH_BUFFERS: usize = 2;

const BARRIER_KERNEL: KernelSpec<RingProblem> = KernelSpec {
    defines: |ring| vec![format!("GPUS={}", ring.gpus)],
    variants: || problems_of_builds().into_iter().take(1).collect(),
    ..KernelSpec::new(kernel_file("attention/ring_barrier"), "attention_ring_barrier", 32, |_| {
        [1, 1, 1]
    })
};

const MERGE_KERNEL: KernelSpec<RingProblem> = KernelSpec {
    defines: |ring| {
        let full = Extents { causal: false, ..Extents::from(&ring.attention) };
        shape_macros(&full).into_iter().chain([format!("GPUS={}", ring.gpus)]).collect()
    },
    constants: |_| vec![("THREADS", MERGE_THREADS)],
    variants: problems_of_builds,
    ..KernelSpec::new(
        kernel_file("attention/ring_merge"),
        "attention_ring_merge",
        MERGE_THREADS,
        |ring| {
            let packets = query_rows_of_gpu(ring) * ring.attention.d / ELEMENTS_PER_MERGE_THREAD;
            [packets.div_ceil(MERGE_THREADS), 1, 1]
        },
    )
};

/// Builds for each head dimension over two GPUs, and for the larger one over eight.
fn problems_of_builds() -> Vec<RingProblem> {
    let ring = |gpus, d| RingProblem::new(gpus, 1, 16 * gpus, d, false, Dtype::Bf16);
    vec![ring(2, 64), ring(2, 128), ring(8, 128)]
}

/// Number of queries of one GPU, of all heads.
const fn query_rows_of_gpu(ring: &RingProblem) -> usize {
    ring.attention.h * ring.gpu_positions()
}

/// Bytes of the queries of one GPU; its keys, its values and its outputs have as many.
const fn queries_bytes_per_gpu(ring: &RingProblem) -> u64 {
    (query_rows_of_gpu(ring) * ring.attention.d) as u64 * ELEMENT_BYTES
}

/// Number of buffers for fetched keys and values; zero on one GPU.
fn fetch_buffer_count(ring: &RingProblem) -> usize {
    FETCH_BUFFERS.min(ring.gpus - 1)
}

/// Bytes of memory on one GPU.
fn device_bytes(ring: &RingProblem) -> u64 {
    let merged = if ring.gpus > 1 { ring.gpus as u64 } else { 0 };
    let vectors = 4 + 2 * fetch_buffer_count(ring) as u64 + merged;
    vectors * queries_bytes_per_gpu(ring) + merged * 4 * query_rows_of_gpu(ring) as u64
}

fn prepare_ring_attention(
    ring: &RingProblem,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access()?;
    let on: Vec<Arc<Device>> = devices.first(ring.gpus).iter().cloned().collect();
    let RingParts { inputs, outputs, ranks } = RingParts::new(ring, inputs, &on)?;
    let barrier = (ring.gpus > 1).then(|| GpuBarrier::new(ring, devices)).transpose()?;
    devices.for_each_device(|_, device| device.synchronize())?;
    let set = devices.clone();
    Ok(CudaTask::new(devices, inputs, outputs, move |_| {
        // All barriers come first: a tool that makes copies synchronous waits behind them.
        let meet = |which| {
            let at = |barrier: &GpuBarrier| {
                set.for_each_device(|rank, _| barrier.enqueue_barrier(rank, which))
            };
            barrier.as_ref().map_or(Ok(()), at)
        };
        meet(0)?;
        set.for_each_device(|rank, _| ranks[rank].enqueue_ring_and_merge())?;
        meet(1)
    }))
}

/// Barrier between the streams of all GPUs, used before the first copy and after the last.
struct GpuBarrier {
    ranks: Vec<(LoadedKernel, DeviceBuffer, DeviceBuffer)>,
    _flags: Vec<DeviceBuffer>,
}

impl GpuBarrier {
    fn new(ring: &RingProblem, devices: &Devices) -> Result<Self, BackendError> {
        let mut flags = Vec::new();
        devices.for_each_device(|_, device| {
            flags.push(device.upload(&vec![0; 4 * 2 * ring.gpus])?);
            Ok(())
        })?;
        let addresses: Vec<u64> = flags.iter().map(DeviceBuffer::address).collect();
        let mut ranks = Vec::new();
        devices.for_each_device(|_, device| {
            let kernel = BARRIER_KERNEL.compile_and_load(device, ring)?;
            let table = device.upload(bytemuck::cast_slice(&addresses))?;
            ranks.push((kernel, table, device.upload(&[0; 4 * 2])?));
            Ok(())
        })?;
        Ok(Self { ranks, _flags: flags })
    }

    fn enqueue_barrier(&self, rank: usize, which: i32) -> Result<(), BackendError> {
        let (kernel, table, epochs) = &self.ranks[rank];
        let arguments = [
            table.into(),
            epochs.into(),
            KernelArgument::I32(rank as i32),
            KernelArgument::I32(which),
        ];
        within_range("barrier", || kernel.launch_with(&arguments))
    }
}

/// The parts of the problem on all GPUs.
struct RingParts {
    inputs: Vec<Input>,
    outputs: Vec<Output>,
    ranks: Vec<RingRank>,
}

impl RingParts {
    /// Uploads the tensors; rank r uses the r-th of the devices.
    fn new(ring: &RingProblem, inputs: &Tensors, on: &[Arc<Device>]) -> Result<Self, BackendError> {
        let (mut named, mut outputs, mut tensors) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, device) in on.iter().enumerate() {
            device.make_current()?;
            let names = [Q[rank], K[rank], V[rank]];
            let [q, k, v] = upload_inputs(device, inputs, names)?;
            named
                .extend(names.into_iter().zip([&q, &k, &v]).map(|(name, it)| Input::new(name, it)));
            outputs.push(Output::new(device, OUT[rank], ring.shape(), ring.attention.dtype)?);
            tensors.push([q, k, v]);
        }
        let mut ranks = Vec::new();
        for (rank, device) in on.iter().enumerate() {
            device.make_current()?;
            ranks.push(RingRank::new(ring, rank, device, &tensors, outputs[rank].address())?);
        }
        on[0].make_current()?;
        Ok(Self { inputs: named, outputs, ranks })
    }
}

/// Copies of keys and values from another GPU: source and destination of each.
struct FetchCopies([(DeviceBuffer, DeviceBuffer); 2]);

impl FetchCopies {
    fn enqueue_barrier(&self, stream: &CudaStream) -> Result<(), BackendError> {
        let copy =
            |(from, to): &(DeviceBuffer, DeviceBuffer)| to.copy_from(stream, from, from.bytes());
        within_range("fetch", || self.0.iter().try_for_each(copy))
    }
}

/// The part of the problem on one GPU.
struct RingRank {
    steps: Vec<OrderedLaunches>,
    /// Copies of keys and values for each step but the first.
    fetches: Vec<FetchCopies>,
    copies: Arc<CudaStream>,
    joined: JoinedStreams,
    merge: Option<MergeStep>,
    _tensors: [DeviceBuffer; 3],
}

impl RingRank {
    fn new(
        ring: &RingProblem,
        rank: usize,
        device: &Arc<Device>,
        tensors: &[[DeviceBuffer; 3]],
        out: u64,
    ) -> Result<Self, BackendError> {
        let [q, own_k, own_v] = &tensors[rank];
        let merge = (ring.gpus > 1).then(|| MergeStep::new(ring, rank, device, out)).transpose()?;
        let place = |_| {
            Ok([
                allocate_scratch(device, queries_bytes_per_gpu(ring))?,
                allocate_scratch(device, queries_bytes_per_gpu(ring))?,
            ])
        };
        let places: Vec<[DeviceBuffer; 2]> =
            (0..fetch_buffer_count(ring)).map(place).collect::<Result<_, BackendError>>()?;
        let (mut steps, mut fetches) = (Vec::new(), Vec::new());
        for (number, step) in ring.ring_steps(rank).iter().enumerate() {
            let [k, v] = match number {
                0 => [own_k, own_v],
                later => {
                    let [k, v] = &places[(later - 1) % FETCH_BUFFERS];
                    let [_, from_k, from_v] = &tensors[step.keys_of];
                    let copies = [(from_k.clone(), k.clone()), (from_v.clone(), v.clone())];
                    fetches.push(FetchCopies(copies));
                    [k, v]
                }
            };
            let (out, lse) = match &merge {
                Some(merge) => merge.partial_result_addresses(ring, number),
                None => (out, None),
            };
            let [q, k, v] = [q, k, v].map(DeviceBuffer::address);
            let whole = ForwardAddresses { q, k, v, out, lse };
            steps.push(prepare_step_launch(ring, step, device, &whole)?);
        }
        let copies = device.create_stream()?;
        let joined = JoinedStreams::new(device, copies.cu_stream())?;
        Ok(Self { steps, fetches, copies, joined, merge, _tensors: tensors[rank].clone() })
    }

    /// Enqueues the steps, each concurrently with the copies for the next one, and the merge.
    fn enqueue_ring_and_merge(&self) -> Result<(), BackendError> {
        for (number, step) in self.steps.iter().enumerate() {
            match self.fetches.get(number) {
                Some(next) => self.joined.enqueue_between(|| {
                    next.enqueue_barrier(&self.copies)?;
                    step.launch()
                })?,
                None => step.launch()?,
            }
        }
        self.merge.as_ref().map_or(Ok(()), MergeStep::enqueue_merge)
    }
}

/// Prepares the launch of a step over the tensors of a GPU's positions at these addresses.
fn prepare_step_launch(
    ring: &RingProblem,
    step: &RingStep,
    device: &Arc<Device>,
    whole: &ForwardAddresses,
) -> Result<OrderedLaunches, BackendError> {
    let (h, d, all) = (ring.attention.h, ring.attention.d, ring.gpu_positions());
    let shape = AttentionShape {
        queries: step.queries.len(),
        keys: step.keys.len(),
        causal: step.causal,
        ..AttentionShape::from(&ring.attention)
    };
    let vectors = Strides::dense_bhsd(h, all, d);
    let lse = Strides::dense_bhsd(h, all, 1);
    let layout = ForwardLayout { q: vectors, k: vectors, v: vectors, out: vectors, lse };
    let forward = ForwardCall::new(
        device,
        &shape,
        &layout,
        AttentionTechnique::fastest_on_device(device, &shape)?,
    )?;
    let row = d as u64 * ELEMENT_BYTES;
    let (query, key) = (step.queries.start as u64, step.keys.start as u64);
    forward.prepare_launches(&ForwardAddresses {
        q: whole.q + query * row,
        k: whole.k + key * row,
        v: whole.v + key * row,
        out: whole.out + query * row,
        lse: whole.lse.map(|lse| lse + query * 4),
    })
}

/// Launch that merges the results of a GPU's steps.
struct MergeStep {
    kernel: LoadedKernel,
    parts: DeviceBuffer,
    lse: DeviceBuffer,
    out: u64,
    rows: i32,
    positions: i32,
    first: i32,
}

impl MergeStep {
    fn new(
        ring: &RingProblem,
        rank: usize,
        device: &Device,
        out: u64,
    ) -> Result<Self, BackendError> {
        let gpus = ring.gpus as u64;
        Ok(Self {
            kernel: MERGE_KERNEL.compile_and_load(device, ring)?,
            parts: allocate_scratch(device, gpus * queries_bytes_per_gpu(ring))?,
            lse: allocate_scratch(device, gpus * 4 * query_rows_of_gpu(ring) as u64)?,
            out,
            rows: query_rows_of_gpu(ring) as i32,
            positions: ring.gpu_positions() as i32,
            first: ring.steps_of_first_half(rank) as i32,
        })
    }

    /// Addresses of the output and lse of step `number`.
    fn partial_result_addresses(&self, ring: &RingProblem, number: usize) -> (u64, Option<u64>) {
        let number = number as u64;
        let lse = self.lse.address() + number * 4 * query_rows_of_gpu(ring) as u64;
        (self.parts.address() + number * queries_bytes_per_gpu(ring), Some(lse))
    }

    fn enqueue_merge(&self) -> Result<(), BackendError> {
        let Self { rows, positions, first, .. } = *self;
        let arguments = [
            (&self.parts).into(),
            (&self.lse).into(),
            KernelArgument::Address(self.out),
            KernelArgument::I32(rows),
            KernelArgument::I32(positions),
            KernelArgument::I32(first),
        ];
        within_range("merge", || self.kernel.launch_with(&arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::verify::launch_and_verify;
    use kernelgate::workload::Problem;
    use kernelgate_cuda::DeviceOptions;
    use kernelgate_cuda::testing::second_gpu_for_test;

    fn ring_problems() -> impl Iterator<Item = RingProblem> {
        [2, 4, 8].into_iter().flat_map(|gpus| {
            [(64, false), (64, true), (128, false), (128, true)].into_iter().flat_map(
                move |(d, causal)| {
                    // The lengths are not multiples of a kernel's tile.
                    [208, 1040].map(|s| RingProblem::new(gpus, 3, s, d, causal, Dtype::Bf16))
                },
            )
        })
    }

    /// Verifies two launches, because a launch must not depend on the outputs of the previous one.
    fn check(task: &mut CudaTask, ring: &RingProblem, inputs: &Tensors) {
        let expected = ring.reference(inputs);
        for _ in 0..2 {
            let found = launch_and_verify(task, &expected, ring.tolerance());
            assert!(found.is_ok(), "{ring:?}: {found:?}");
        }
    }

    #[test]
    fn the_declared_memory_of_a_ring_rank_is_that_of_its_tensors() {
        let ring = |gpus| RingProblem::new(gpus, 16, 1024, 128, true, Dtype::Bf16);
        let vector = |gpus: u64| 16 * 1024 / gpus * 128 * 2;
        assert_eq!(device_bytes(&ring(1)), 4 * vector(1));
        assert_eq!(device_bytes(&ring(2)), (4 + 2 + 2) * vector(2) + 2 * 4 * 16 * 512);
        assert_eq!(device_bytes(&ring(4)), (4 + 4 + 4) * vector(4) + 4 * 4 * 16 * 256);
    }

    /// The test computes the parts of all GPUs one after the other on one GPU: everything but the
    /// waits.
    #[test]
    fn ring_parts_of_up_to_eight_gpus_agree_with_the_reference_on_one_gpu() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        for ring in ring_problems().chain([RingProblem::new(1, 3, 208, 64, true, Dtype::Bf16)]) {
            let inputs = ring.inputs(9);
            let on = vec![Arc::clone(&device); ring.gpus];
            let RingParts { inputs: named, outputs, ranks } =
                RingParts::new(&ring, &inputs, &on).unwrap();
            let mut task = CudaTask::new(&device, named, outputs, move |_| {
                ranks.iter().try_for_each(RingRank::enqueue_ring_and_merge)
            });
            check(&mut task, &ring, &inputs);
        }
    }

    #[test]
    fn the_ring_row_agrees_with_the_reference_on_all_gpus_of_the_machine() {
        let Some((_first, _alone)) = lock_first_gpu() else { return };
        if second_gpu_for_test().is_none() {
            return;
        }
        let options = DeviceOptions::from_environment();
        for gpus in [2, 4, 8] {
            let ordinals = Devices::in_launch_order(0..gpus).unwrap();
            let Ok(devices) = ordinals.open(&options) else {
                eprintln!("skipped: fewer than {gpus} GPUs");
                continue;
            };
            for ring in ring_problems().filter(|ring| ring.gpus == gpus) {
                let inputs = ring.inputs(9);
                match RING_ROWS[0].prepare_on(&ring, &inputs, &devices) {
                    Ok(mut task) => check(&mut task, &ring, &inputs),
                    Err(BackendError::Unsupported(why)) => eprintln!("skipped: {why}"),
                    Err(error) => panic!("{ring:?}: {error}"),
                }
            }
        }
    }
}
