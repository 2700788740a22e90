//! Ring attention is attention forward over several GPUs: copies of keys and values between GPUs,
//! launches of `attention/forward`, and a kernel that merges their results.
//!
//! At each step of ring attention, a GPU's queries attend to the keys that belong to one of the
//! GPUs. During a ring attention step, the GPU's copy engine fetches the keys of the next step from
//! the GPU that owns them, on a separate stream. The copies of keys and values alternate between
//! two destination buffers on each GPU. Each GPU-to-GPU link carries as many bytes as if the keys
//! were passed round a ring, but no GPU waits until its neighbour has forwarded them.

use std::sync::Arc;

use super::call::{AttentionForwardAddresses, AttentionGemmTechnique, AttentionLaunches};
use super::launch::{
    AttentionExtents, BYTES_OF_16_BIT_ELEMENT, allocate_uninitialised_scratch,
    attention_shape_defines, upload_named_inputs,
};
use super::launches::AttentionForwardCall;
use super::layout::{AttentionForwardLayout, AttentionShape, AttentionTensorStrides};
use crate::attention::ring::{
    KEY_NAMES_BY_RANK, OUTPUT_NAMES_BY_RANK, QUERY_NAMES_BY_RANK, RingAttentionProblem,
    RingAttentionStep, VALUE_NAMES_BY_RANK,
};
use crate::kernel_files::source_of_kernel_file;
use kernelgate::backend::cuda::{CudaTask, DeviceInput, DeviceOutput};
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::driver::CudaStream;
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{
    Device, DeviceBuffer, Devices, ForeignStreamJoinedWithDevice, KernelArgument, KernelSpec,
    LoadedKernelWithLaunch,
};

/// Kernels that ring attention needs besides those of attention forward: the barrier between GPUs
/// and the merge of partial results.
pub const RING_BARRIER_AND_MERGE_KERNELS: &[KernelSpec<RingAttentionProblem>] =
    &[RING_BARRIER_KERNEL, RING_MERGE_KERNEL];

/// GPU implementation of attention forward over several GPUs (ring attention).
pub const CUDA_RING_ATTENTION_ROWS: &[Implementation<RingAttentionProblem>] = &[Implementation {
    implementation_name: "cuda/ring",
    description: "the fastest forward on the keys of one GPU after the other, which a copy engine \
            fetches meanwhile; results merged by the rows' sums of exponentials",
    supports: |problem| {
        AttentionExtents::from(&problem.attention).check_dtype_size_and_grid_support(&[])?;
        RING_MERGE_KERNEL.launch_shape_for(problem).map(|_| ()).map_err(|error| error.to_string())
    },
    prepare: PrepareFunction::CudaOnGpuSet {
        device_bytes: ring_device_bytes_per_gpu,
        prepare: prepare_ring_attention_task,
    },
}];

const THREADS_PER_MERGE_BLOCK: usize = 256;
/// Number of elements of an output row that one thread of the merge kernel computes.
const ELEMENTS_PER_MERGE_THREAD: usize = 8;
/// Number of buffer pairs on a GPU for keys and values fetched from other GPUs: one for the current
/// step and one for the next.
const KEY_VALUE_FETCH_BUFFERS: usize = 2;

const RING_BARRIER_KERNEL: KernelSpec<RingAttentionProblem> = KernelSpec {
    macro_definitions: |ring| vec![format!("GPUS={}", ring.gpus)],
    listed_build_parameters: || merge_kernel_example_problems().into_iter().take(1).collect(),
    ..KernelSpec::new(
        source_of_kernel_file("attention/ring_barrier"),
        "attention_ring_barrier",
        32,
        |_| [1, 1, 1],
    )
};

const RING_MERGE_KERNEL: KernelSpec<RingAttentionProblem> = KernelSpec {
    macro_definitions: |ring| {
        let full = AttentionExtents { causal: false, ..AttentionExtents::from(&ring.attention) };
        attention_shape_defines(&full).into_iter().chain([format!("GPUS={}", ring.gpus)]).collect()
    },
    constant_macros: |_| vec![("THREADS", THREADS_PER_MERGE_BLOCK)],
    listed_build_parameters: merge_kernel_example_problems,
    ..KernelSpec::new(
        source_of_kernel_file("attention/ring_merge"),
        "attention_ring_merge",
        THREADS_PER_MERGE_BLOCK,
        |ring| {
            let packets =
                query_rows_of_gpu(ring) * ring.attention.head_dim / ELEMENTS_PER_MERGE_THREAD;
            [packets.div_ceil(THREADS_PER_MERGE_BLOCK), 1, 1]
        },
    )
};

/// Example problems for which the merge kernel is compiled: head dimensions 64 and 128 over two
/// GPUs, and 128 over eight.
fn merge_kernel_example_problems() -> Vec<RingAttentionProblem> {
    let ring = |gpus, d| {
        RingAttentionProblem::ring_problem_of_one_sequence(
            gpus,
            1,
            16 * gpus,
            d,
            false,
            Dtype::Bf16,
        )
    };
    vec![ring(2, 64), ring(2, 128), ring(8, 128)]
}

/// Number of query rows on one GPU, summed over all heads.
const fn query_rows_of_gpu(ring: &RingAttentionProblem) -> usize {
    ring.attention.query_heads * ring.positions_per_gpu()
}

/// Bytes of the query tensor on one GPU; its key, value and output tensors have the same size.
const fn queries_bytes_per_gpu(ring: &RingAttentionProblem) -> u64 {
    (query_rows_of_gpu(ring) * ring.attention.head_dim) as u64 * BYTES_OF_16_BIT_ELEMENT
}

/// Number of buffer pairs for keys and values fetched from other GPUs: none on one GPU, one on two
/// GPUs, else two.
fn fetch_buffer_count(ring: &RingAttentionProblem) -> usize {
    KEY_VALUE_FETCH_BUFFERS.min(ring.gpus - 1)
}

/// Bytes of device memory that ring attention allocates on one GPU.
fn ring_device_bytes_per_gpu(ring: &RingAttentionProblem) -> u64 {
    let merged = if ring.gpus > 1 { ring.gpus as u64 } else { 0 };
    let vectors = 4 + 2 * fetch_buffer_count(ring) as u64 + merged;
    vectors * queries_bytes_per_gpu(ring) + merged * 4 * query_rows_of_gpu(ring) as u64
}

fn prepare_ring_attention_task(
    ring: &RingAttentionProblem,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access_between_all()?;
    let on: Vec<Arc<Device>> = devices.first_devices(ring.gpus).iter().cloned().collect();
    let RingPartsOfAllGpus { inputs, outputs, launches_by_rank: ranks } =
        RingPartsOfAllGpus::upload_and_prepare_ring_parts(ring, inputs, &on)?;
    let barrier =
        (ring.gpus > 1).then(|| GpuBarrier::allocate_gpu_barrier(ring, devices)).transpose()?;
    devices.for_each_with_context_current(|_, device| device.synchronize())?;
    let set = devices.clone();
    Ok(CudaTask::new(devices, inputs, outputs, move |_| {
        // The barriers of all GPUs are enqueued before any copy: under a tool that makes copies
        // synchronous, a copy would otherwise block the host first.
        let meet = |which| {
            let at = |barrier: &GpuBarrier| {
                set.for_each_with_context_current(|rank, _| {
                    barrier.enqueue_barrier_on_gpu(rank, which)
                })
            };
            barrier.as_ref().map_or(Ok(()), at)
        };
        meet(0)?;
        set.for_each_with_context_current(|rank, _| {
            ranks[rank].enqueue_attention_steps_and_merge()
        })?;
        meet(1)
    }))
}

/// Barrier kernels that make the streams of all GPUs wait for each other, before the first copy of
/// keys and after the last.
struct GpuBarrier {
    ranks: Vec<(LoadedKernelWithLaunch, DeviceBuffer, DeviceBuffer)>,
    _barrier_flags_kept_alive: Vec<DeviceBuffer>,
}

impl GpuBarrier {
    fn allocate_gpu_barrier(
        ring: &RingAttentionProblem,
        devices: &Devices,
    ) -> Result<Self, BackendError> {
        let mut flags = Vec::new();
        devices.for_each_with_context_current(|_, device| {
            flags.push(device.upload(&vec![0; 4 * 2 * ring.gpus])?);
            Ok(())
        })?;
        let addresses: Vec<u64> = flags.iter().map(DeviceBuffer::device_address).collect();
        let mut ranks = Vec::new();
        devices.for_each_with_context_current(|_, device| {
            let kernel = RING_BARRIER_KERNEL.compile_and_load(device, ring)?;
            let table = device.upload(bytemuck::cast_slice(&addresses))?;
            ranks.push((kernel, table, device.upload(&[0; 4 * 2])?));
            Ok(())
        })?;
        Ok(Self { ranks, _barrier_flags_kept_alive: flags })
    }

    fn enqueue_barrier_on_gpu(&self, rank: usize, barrier_index: i32) -> Result<(), BackendError> {
        let (kernel, table, epochs) = &self.ranks[rank];
        let arguments = [
            table.into(),
            epochs.into(),
            KernelArgument::I32(rank as i32),
            KernelArgument::I32(barrier_index),
        ];
        run_within_named_range("barrier", || kernel.launch_with(&arguments))
    }
}

/// Tensors and prepared launches of ring attention on all GPUs.
struct RingPartsOfAllGpus {
    inputs: Vec<DeviceInput>,
    outputs: Vec<DeviceOutput>,
    launches_by_rank: Vec<RingLaunchesOfGpu>,
}

impl RingPartsOfAllGpus {
    /// Uploads each GPU's q, k and v, allocates its output and prepares its launches; rank r uses
    /// the r-th device of the slice.
    fn upload_and_prepare_ring_parts(
        ring: &RingAttentionProblem,
        inputs: &Tensors,
        on: &[Arc<Device>],
    ) -> Result<Self, BackendError> {
        let (mut named, mut outputs, mut tensors) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, device) in on.iter().enumerate() {
            device.make_context_current()?;
            let names =
                [QUERY_NAMES_BY_RANK[rank], KEY_NAMES_BY_RANK[rank], VALUE_NAMES_BY_RANK[rank]];
            let [q, k, v] = upload_named_inputs(device, inputs, names)?;
            named.extend(
                names.into_iter().zip([&q, &k, &v]).map(|(name, it)| DeviceInput::new(name, it)),
            );
            outputs.push(DeviceOutput::new(
                device,
                OUTPUT_NAMES_BY_RANK[rank],
                ring.tensor_shape_per_gpu(),
                ring.attention.dtype,
            )?);
            tensors.push([q, k, v]);
        }
        let mut ranks = Vec::new();
        for (rank, device) in on.iter().enumerate() {
            device.make_context_current()?;
            ranks.push(RingLaunchesOfGpu::prepare_ring_launches_of_gpu(
                ring,
                rank,
                device,
                &tensors,
                outputs[rank].address(),
            )?);
        }
        on[0].make_context_current()?;
        Ok(Self { inputs: named, outputs, launches_by_rank: ranks })
    }
}

/// Source and destination buffers of two copies: the keys and the values that a GPU fetches from
/// another GPU for one step.
struct KeyValueFetch([(DeviceBuffer, DeviceBuffer); 2]);

impl KeyValueFetch {
    fn enqueue_key_and_value_copies(&self, stream: &CudaStream) -> Result<(), BackendError> {
        let copy = |(from, to): &(DeviceBuffer, DeviceBuffer)| {
            to.copy_first_bytes_from(stream, from, from.size_in_bytes())
        };
        run_within_named_range("fetch", || self.0.iter().try_for_each(copy))
    }
}

/// Prepared ring attention launches of one GPU: its steps, its copies of keys and values, and its
/// merge.
struct RingLaunchesOfGpu {
    attention_of_ring_steps: Vec<AttentionLaunches>,
    /// Copies of keys and values from other GPUs, one pair for each step after the first.
    key_value_copies: Vec<KeyValueFetch>,
    copy_stream: Arc<CudaStream>,
    joined_copy_stream: ForeignStreamJoinedWithDevice,
    merge: Option<PartialOutputMerge>,
    _tensors: [DeviceBuffer; 3],
}

impl RingLaunchesOfGpu {
    fn prepare_ring_launches_of_gpu(
        ring: &RingAttentionProblem,
        rank: usize,
        device: &Arc<Device>,
        tensors: &[[DeviceBuffer; 3]],
        out: u64,
    ) -> Result<Self, BackendError> {
        let [q, own_k, own_v] = &tensors[rank];
        let merge = (ring.gpus > 1)
            .then(|| PartialOutputMerge::allocate_partial_output_merge(ring, rank, device, out))
            .transpose()?;
        let place = |_| {
            Ok([
                allocate_uninitialised_scratch(device, queries_bytes_per_gpu(ring))?,
                allocate_uninitialised_scratch(device, queries_bytes_per_gpu(ring))?,
            ])
        };
        let places: Vec<[DeviceBuffer; 2]> =
            (0..fetch_buffer_count(ring)).map(place).collect::<Result<_, BackendError>>()?;
        let (mut steps, mut fetches) = (Vec::new(), Vec::new());
        for (number, step) in ring.ring_steps_of_gpu(rank).iter().enumerate() {
            let [k, v] = match number {
                0 => [own_k, own_v],
                later => {
                    let [k, v] = &places[(later - 1) % KEY_VALUE_FETCH_BUFFERS];
                    let [_, from_k, from_v] = &tensors[step.rank_of_keys];
                    let copies = [(from_k.clone(), k.clone()), (from_v.clone(), v.clone())];
                    fetches.push(KeyValueFetch(copies));
                    [k, v]
                }
            };
            let (out, lse) = match &merge {
                Some(merge) => merge.partial_result_addresses(ring, number),
                None => (out, None),
            };
            let [q, k, v] = [q, k, v].map(DeviceBuffer::device_address);
            let whole = AttentionForwardAddresses {
                q_address: q,
                k_address: k,
                v_address: v,
                out_address: out,
                lse_address: lse,
            };
            steps.push(prepare_ring_step_launch(ring, step, device, &whole)?);
        }
        let copies = device.create_another_stream()?;
        let joined =
            ForeignStreamJoinedWithDevice::join_with_device_stream(device, copies.cu_stream())?;
        Ok(Self {
            attention_of_ring_steps: steps,
            key_value_copies: fetches,
            copy_stream: copies,
            joined_copy_stream: joined,
            merge,
            _tensors: tensors[rank].clone(),
        })
    }

    /// Enqueues a GPU's attention steps, each concurrently with the copies for the next step, and
    /// then the merge of their results.
    fn enqueue_attention_steps_and_merge(&self) -> Result<(), BackendError> {
        for (number, step) in self.attention_of_ring_steps.iter().enumerate() {
            match self.key_value_copies.get(number) {
                Some(next) => self.joined_copy_stream.enqueue_on_foreign_stream_in_order(|| {
                    next.enqueue_key_and_value_copies(&self.copy_stream)?;
                    step.enqueue_all_launches()
                })?,
                None => step.enqueue_all_launches()?,
            }
        }
        self.merge.as_ref().map_or(Ok(()), PartialOutputMerge::enqueue_merge_of_partial_outputs)
    }
}

/// Prepares the attention launch of one ring step; the addresses are those of the GPU's whole q, k,
/// v and output.
fn prepare_ring_step_launch(
    ring: &RingAttentionProblem,
    step: &RingAttentionStep,
    device: &Arc<Device>,
    whole: &AttentionForwardAddresses,
) -> Result<AttentionLaunches, BackendError> {
    let (h, d, all) =
        (ring.attention.query_heads, ring.attention.head_dim, ring.positions_per_gpu());
    let shape = AttentionShape {
        queries_per_head: step.query_range.len(),
        keys_per_head: step.key_range.len(),
        causal: step.causal,
        ..AttentionShape::from(&ring.attention)
    };
    let vectors = AttentionTensorStrides::dense_bhsd_strides(h, all, d);
    let lse = AttentionTensorStrides::dense_bhsd_strides(h, all, 1);
    let layout = AttentionForwardLayout { q: vectors, k: vectors, v: vectors, out: vectors, lse };
    let forward = AttentionForwardCall::compile_and_load_attention_forward(
        device,
        &shape,
        &layout,
        AttentionGemmTechnique::fastest_technique_on_device(device, &shape)?,
    )?;
    let row = d as u64 * BYTES_OF_16_BIT_ELEMENT;
    let (query, key) = (step.query_range.start as u64, step.key_range.start as u64);
    forward.prepare_forward_launch_at_addresses(&AttentionForwardAddresses {
        q_address: whole.q_address + query * row,
        k_address: whole.k_address + key * row,
        v_address: whole.v_address + key * row,
        out_address: whole.out_address + query * row,
        lse_address: whole.lse_address.map(|lse| lse + query * 4),
    })
}

/// Kernel launch that merges the partial attention outputs of a GPU's ring steps into the final
/// output.
struct PartialOutputMerge {
    kernel: LoadedKernelWithLaunch,
    partial_outputs: DeviceBuffer,
    partial_lse: DeviceBuffer,
    output_address: u64,
    query_rows_of_gpu: i32,
    positions_per_gpu: i32,
    ring_steps_with_first_query_half: i32,
}

impl PartialOutputMerge {
    fn allocate_partial_output_merge(
        ring: &RingAttentionProblem,
        rank: usize,
        device: &Device,
        out: u64,
    ) -> Result<Self, BackendError> {
        let gpus = ring.gpus as u64;
        Ok(Self {
            kernel: RING_MERGE_KERNEL.compile_and_load(device, ring)?,
            partial_outputs: allocate_uninitialised_scratch(
                device,
                gpus * queries_bytes_per_gpu(ring),
            )?,
            partial_lse: allocate_uninitialised_scratch(
                device,
                gpus * 4 * query_rows_of_gpu(ring) as u64,
            )?,
            output_address: out,
            query_rows_of_gpu: query_rows_of_gpu(ring) as i32,
            positions_per_gpu: ring.positions_per_gpu() as i32,
            ring_steps_with_first_query_half: ring.ring_steps_with_first_query_half(rank) as i32,
        })
    }

    /// Device addresses to which ring step `number` writes its partial output and its log-sum-exp.
    fn partial_result_addresses(
        &self,
        ring: &RingAttentionProblem,
        number: usize,
    ) -> (u64, Option<u64>) {
        let number = number as u64;
        let lse = self.partial_lse.device_address() + number * 4 * query_rows_of_gpu(ring) as u64;
        (self.partial_outputs.device_address() + number * queries_bytes_per_gpu(ring), Some(lse))
    }

    fn enqueue_merge_of_partial_outputs(&self) -> Result<(), BackendError> {
        let Self {
            query_rows_of_gpu: rows,
            positions_per_gpu: positions,
            ring_steps_with_first_query_half: first,
            ..
        } = *self;
        let arguments = [
            (&self.partial_outputs).into(),
            (&self.partial_lse).into(),
            KernelArgument::DeviceAddress(self.output_address),
            KernelArgument::I32(rows),
            KernelArgument::I32(positions),
            KernelArgument::I32(first),
        ];
        run_within_named_range("merge", || self.kernel.launch_with(&arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::verify::launch_twice_and_compare_with_reference;
    use kernelgate::workload::Problem;
    use kernelgate_cuda::DeviceOptions;
    use kernelgate_cuda::testing::open_second_gpu_or_print_skip;

    fn ring_test_problems() -> impl Iterator<Item = RingAttentionProblem> {
        [2, 4, 8].into_iter().flat_map(|gpus| {
            [(64, false), (64, true), (128, false), (128, true)].into_iter().flat_map(
                move |(d, causal)| {
                    // The test's sequence lengths are not multiples of a kernel's tile size.
                    [208, 1040].map(|s| {
                        RingAttentionProblem::ring_problem_of_one_sequence(
                            gpus,
                            3,
                            s,
                            d,
                            causal,
                            Dtype::Bf16,
                        )
                    })
                },
            )
        })
    }

    /// Verifies the outputs of two consecutive ring launches, because a launch must not depend on
    /// the outputs of the previous one.
    fn assert_two_ring_launches_agree_with_reference(
        task: &mut CudaTask,
        ring: &RingAttentionProblem,
        inputs: &Tensors,
    ) {
        let expected = ring.reference(inputs);
        for _ in 0..2 {
            let found = launch_twice_and_compare_with_reference(task, &expected, ring.tolerance());
            assert!(found.is_ok(), "{ring:?}: {found:?}");
        }
    }

    #[test]
    fn the_declared_device_memory_of_a_ring_gpu_equals_that_of_its_tensors() {
        let ring = |gpus| {
            RingAttentionProblem::ring_problem_of_one_sequence(
                gpus,
                16,
                1024,
                128,
                true,
                Dtype::Bf16,
            )
        };
        let vector = |gpus: u64| 16 * 1024 / gpus * 128 * 2;
        assert_eq!(ring_device_bytes_per_gpu(&ring(1)), 4 * vector(1));
        assert_eq!(ring_device_bytes_per_gpu(&ring(2)), (4 + 2 + 2) * vector(2) + 2 * 4 * 16 * 512);
        assert_eq!(ring_device_bytes_per_gpu(&ring(4)), (4 + 4 + 4) * vector(4) + 4 * 4 * 16 * 256);
    }

    /// The test computes the ring parts of all GPUs one after the other on one GPU; it covers
    /// everything except the waits between GPUs.
    #[test]
    fn ring_parts_of_up_to_eight_gpus_agree_with_the_reference_on_one_gpu() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        for ring in
            ring_test_problems().chain([RingAttentionProblem::ring_problem_of_one_sequence(
                1,
                3,
                208,
                64,
                true,
                Dtype::Bf16,
            )])
        {
            let inputs = ring.inputs(9);
            let on = vec![Arc::clone(&device); ring.gpus];
            let RingPartsOfAllGpus { inputs: named, outputs, launches_by_rank: ranks } =
                RingPartsOfAllGpus::upload_and_prepare_ring_parts(&ring, &inputs, &on).unwrap();
            let mut task = CudaTask::new(&device, named, outputs, move |_| {
                ranks.iter().try_for_each(RingLaunchesOfGpu::enqueue_attention_steps_and_merge)
            });
            assert_two_ring_launches_agree_with_reference(&mut task, &ring, &inputs);
        }
    }

    #[test]
    fn the_ring_row_agrees_with_the_reference_on_all_gpus_of_the_machine() {
        let Some((_first, _alone)) = lock_first_gpu() else { return };
        if open_second_gpu_or_print_skip().is_none() {
            return;
        }
        let options = DeviceOptions::from_environment();
        for gpus in [2, 4, 8] {
            let ordinals = Devices::from_distinct_in_order(0..gpus).unwrap();
            let Ok(devices) = ordinals.open(&options) else {
                eprintln!("skipped: fewer than {gpus} GPUs");
                continue;
            };
            for ring in ring_test_problems().filter(|ring| ring.gpus == gpus) {
                let inputs = ring.inputs(9);
                match CUDA_RING_ATTENTION_ROWS[0].prepare_on_gpus(&ring, &inputs, &devices) {
                    Ok(mut task) => {
                        assert_two_ring_launches_agree_with_reference(&mut task, &ring, &inputs)
                    }
                    Err(BackendError::Unsupported(why)) => eprintln!("skipped: {why}"),
                    Err(error) => panic!("{ring:?}: {error}"),
                }
            }
        }
    }
}
