use super::*;
use crate::attention::cuda::backward::wgmma::{BackwardBlockWork, LastRound};
use crate::attention::cuda::layout::Strides;
use crate::attention::cuda::tests::bf16_attention;
use crate::attention::definition::{Attention, AttentionForward};
use crate::attention::gradients::AttentionBackward;
use crate::gpu_tests::lock_first_gpu;
use kernelgate::verify::compare_outputs;
use kernelgate::workload::{Dtype, Expected, Problem, Tensor, Tensors, Tolerance};
use kernelgate_cuda::DeviceBuffer;
use kernelgate_cuda::driver::graph::ExecutableGraph;

/// Memory orders of a tensor; in each there is memory around the tensors that no kernel may read or
/// write.
#[derive(Debug, Clone, Copy)]
enum MemoryOrder {
    /// `[b, h, s, d]`, dense.
    Bhsd,
    /// Order `[b, s, h + 1, d]`, where each row ends with an unused head.
    Bshd,
    /// q, k and v, or their gradients, packed in one tensor `[b, s, h + 2 h_kv, d]`.
    Packed,
}

/// Position of a tensor in a buffer.
#[derive(Debug, Clone, Copy)]
struct TensorPlace {
    strides: Strides,
    /// Number of elements in the buffer before the tensor.
    first: u64,
    extents: [usize; 4],
}

impl TensorPlace {
    /// Rows of the tensor: for each its index in a dense `[b, h, s, d]` and its start in the
    /// buffer.
    fn row_indices_and_starts(&self) -> impl Iterator<Item = (usize, usize)> {
        let Self { strides, first, extents: [batch, heads, rows, _] } = *self;
        (0..batch * heads * rows).map(move |index| {
            let (head, row) = (index / rows, index % rows);
            let at = first
                + strides.batch * (head / heads) as u64
                + strides.head * (head % heads) as u64
                + strides.row * row as u64;
            (index, at as usize)
        })
    }

    fn copy_dense_to_buffer(&self, dense: &[u8], memory: &mut [u8]) {
        let bytes = 2 * self.extents[3];
        for (index, at) in self.row_indices_and_starts() {
            memory[2 * at..][..bytes].copy_from_slice(&dense[index * bytes..][..bytes]);
        }
    }

    fn read_as_dense_tensor(&self, memory: &[u8], dtype: Dtype) -> Tensor {
        let mut dense = Tensor::zeroed(self.extents.to_vec(), dtype);
        let bytes = 2 * self.extents[3];
        for (index, at) in self.row_indices_and_starts() {
            dense.as_bytes_mut()[index * bytes..][..bytes]
                .copy_from_slice(&memory[2 * at..][..bytes]);
        }
        dense
    }
}

/// Positions of the query tensor and the two key tensors, and the number of elements in each
/// buffer.
fn tensor_places(order: MemoryOrder, attention: &Attention) -> ([TensorPlace; 3], u64) {
    let Attention { b, h, h_kv, s, d, .. } = *attention;
    let row_of_heads = |heads: usize| match order {
        MemoryOrder::Bhsd => Strides::dense_bhsd(heads, s, d),
        MemoryOrder::Bshd => Strides::dense_bshd(heads + 1, s, d),
        MemoryOrder::Packed => Strides::dense_bshd(h + 2 * h_kv, s, d),
    };
    let first = match order {
        MemoryOrder::Packed => [0, h, h + h_kv].map(|head| (head * d) as u64),
        _ => [0; 3],
    };
    let extents = [attention.shape(), attention.key_value_shape(), attention.key_value_shape()];
    let place = |index: usize| TensorPlace {
        strides: row_of_heads(extents[index][1]),
        first: first[index],
        extents: extents[index],
    };
    let elements = b * s * d * (h + 2 * h_kv + 1);
    ([0, 1, 2].map(place), elements as u64)
}

const POISON_BYTE: u8 = 0xff;

/// Device buffers of one problem.
struct ProblemBuffers {
    /// Buffers of q, k and v; a single one if they are packed.
    inputs: Vec<DeviceBuffer>,
    gradients: Vec<DeviceBuffer>,
    out: DeviceBuffer,
    grad_out: DeviceBuffer,
    lse: DeviceBuffer,
    places: [TensorPlace; 3],
}

impl ProblemBuffers {
    fn new(device: &Device, order: MemoryOrder, attention: &Attention, inputs: &Tensors) -> Self {
        let (places, elements) = tensor_places(order, attention);
        let empty = || vec![POISON_BYTE; 2 * elements as usize];
        let buffers = if matches!(order, MemoryOrder::Packed) { 1 } else { 3 };
        let mut host: Vec<_> = (0..buffers).map(|_| empty()).collect();
        for (index, name) in ["q", "k", "v"].into_iter().enumerate() {
            places[index]
                .copy_dense_to_buffer(inputs.tensor(name).as_bytes(), &mut host[index % buffers]);
        }
        let mut grad_out = empty();
        places[0].copy_dense_to_buffer(inputs.tensor("grad_out").as_bytes(), &mut grad_out);
        let poisoned = || device.upload(&empty()).unwrap();
        Self {
            inputs: host.iter().map(|bytes| device.upload(bytes).unwrap()).collect(),
            gradients: (0..buffers).map(|_| poisoned()).collect(),
            out: poisoned(),
            grad_out: device.upload(&grad_out).unwrap(),
            lse: device.allocate(4 * attention.b * attention.h * attention.s).unwrap(),
            places,
        }
    }

    fn address_in_buffer(&self, buffers: &[DeviceBuffer], index: usize) -> u64 {
        buffers[index % buffers.len()].address() + 2 * self.places[index].first
    }

    fn layout(&self, attention: &Attention) -> BackwardLayout {
        let [q, k, v] = self.places.map(|place| place.strides);
        let lse = Strides::dense_bhsd(attention.h, attention.s, 1);
        BackwardLayout::gradients_like_tensors(ForwardLayout { q, k, v, out: q, lse })
    }

    fn forward(&self) -> ForwardAddresses {
        let [q, k, v] = [0, 1, 2].map(|index| self.address_in_buffer(&self.inputs, index));
        let out = self.out.address() + 2 * self.places[0].first;
        ForwardAddresses { q, k, v, out, lse: Some(self.lse.address()) }
    }

    fn backward(&self) -> BackwardAddresses {
        let ForwardAddresses { q, k, v, out, .. } = self.forward();
        let [grad_q, grad_k, grad_v] =
            [0, 1, 2].map(|index| self.address_in_buffer(&self.gradients, index));
        let grad_out = self.grad_out.address() + 2 * self.places[0].first;
        let lse = self.lse.address();
        BackwardAddresses { q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v }
    }
}

fn download_bytes(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.download(&mut bytes).unwrap();
    bytes
}

/// Asserts that every byte outside the tensors is unchanged.
fn assert_rest_untouched(memory: &[u8], places: &[TensorPlace], name: &str) {
    let mut memory = memory.to_vec();
    for place in places {
        let bytes = place.extents.iter().product::<usize>() * 2;
        place.copy_dense_to_buffer(&vec![POISON_BYTE; bytes], &mut memory);
    }
    assert!(memory.iter().all(|&byte| byte == POISON_BYTE), "{name}: wrote outside its tensors");
}

fn assert_agrees(outputs: &Tensors, expected: &[Expected], tolerance: Tolerance, name: &str) {
    let result = compare_outputs(outputs, expected, tolerance);
    assert!(result.is_ok(), "{name}: {}", result.unwrap_err());
}

fn check_forward(
    device: &Arc<Device>,
    memory: &ProblemBuffers,
    attention: &Attention,
    technique: AttentionTechnique,
    (expected, tolerance): (&[Expected], Tolerance),
    name: &str,
) {
    let (shape, layout) = (AttentionShape::from(attention), memory.layout(attention).forward);
    let forward = ForwardCall::new(device, &shape, &layout, technique).unwrap();
    let launches = forward.prepare_launches(&memory.forward()).unwrap();
    memory.out.fill(POISON_BYTE).unwrap();
    launches.launch().unwrap();
    device.synchronize().unwrap();
    let (place, bytes) = (memory.places[0], download_bytes(&memory.out));
    let mut outputs = Tensors::new();
    outputs.insert("out", place.read_as_dense_tensor(&bytes, attention.dtype));
    assert_agrees(&outputs, expected, tolerance, name);
    assert_rest_untouched(&bytes, &[place], name);
}

/// Launches run twice: they must not depend on earlier launches, and must leave the scratch memory
/// as they found it.
fn check_backward(
    device: &Arc<Device>,
    memory: &ProblemBuffers,
    attention: &Attention,
    (technique, order): (AttentionTechnique, QueryGradientSumOrder),
    (expected, tolerance): (&[Expected], Tolerance),
    name: &str,
) {
    let (shape, layout) = (AttentionShape::from(attention), memory.layout(attention));
    let backward = BackwardCall::new(device, &shape, &layout, technique, order).unwrap();
    let bytes = backward.scratch_bytes();
    let any = device.allocate(bytes.any as usize).unwrap();
    let zeroed = device.upload(&vec![0; bytes.zeroed as usize]).unwrap();
    let scratch = ScratchAddresses { any: any.address(), zeroed: zeroed.address() };
    let launches = backward.prepare_launches(&memory.backward(), &scratch).unwrap();
    let mut first: Option<Vec<Vec<u8>>> = None;
    for _ in 0..2 {
        memory.gradients.iter().try_for_each(|buffer| buffer.fill(POISON_BYTE)).unwrap();
        launches.launch().unwrap();
        device.synchronize().unwrap();
        let found: Vec<_> = memory.gradients.iter().map(download_bytes).collect();
        let mut outputs = Tensors::new();
        for (index, name) in ["grad_q", "grad_k", "grad_v"].into_iter().enumerate() {
            let bytes = &found[index % found.len()];
            outputs.insert(name, memory.places[index].read_as_dense_tensor(bytes, attention.dtype));
        }
        assert_agrees(&outputs, expected, tolerance, name);
        for (index, bytes) in found.iter().enumerate() {
            let packed = found.len() == 1;
            let places = if packed { &memory.places[..] } else { &memory.places[index..=index] };
            assert_rest_untouched(bytes, places, name);
        }
        if order == QueryGradientSumOrder::Fixed {
            assert_eq!(*first.get_or_insert(found.clone()), found, "{name}: other bits");
        }
    }
    // An empty buffer is allocated with one byte.
    let left = &download_bytes(&zeroed)[..bytes.zeroed as usize];
    assert!(left.iter().all(|&byte| byte == 0), "{name}: scratch is not zero");
}

#[test]
fn scratch_memory_is_declared_without_a_gpu() {
    let attention = bf16_attention(2, 4, 100, 128, true);
    // Eight heads of 100 queries are padded to steps of 80.
    let any = 8 * 160 * (2 * 4 + 4 * 128);
    let turns = 8 * 2 * 4;
    assert_eq!(
        BackwardCall::max_scratch_bytes(&AttentionShape::from(&attention)),
        AttentionScratchBytes { any, zeroed: turns }
    );
    let grouped = AttentionShape::from(&Attention { h_kv: 2, ..attention });
    // A block of 128 keys for each of four key heads.
    let sums = 2 * (4 * 128 * 128 * 4);
    assert_eq!(
        BackwardCall::max_scratch_bytes(&grouped),
        AttentionScratchBytes { any, zeroed: sums + turns }
    );
}

#[test]
fn attention_in_every_memory_layout_agrees_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let wgmma = device.facts().arch == "sm_90a";
    // Numbers of batches, query heads, key heads and rows: single rows, edges of tiles, several
    // tiles.
    for (b, h, h_kv, s) in [(1, 1, 1, 1), (2, 3, 3, 63), (3, 4, 4, 129), (2, 6, 2, 333)] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            let dtype = if causal { Dtype::F16 } else { Dtype::Bf16 };
            let attention = Attention { h_kv, dtype, ..bf16_attention(b, h, s, d, causal) };
            let (forward, backward) =
                (AttentionForward { attention }, AttentionBackward { attention });
            let inputs = backward.inputs(26);
            let (out, gradients) = (forward.reference(&inputs), backward.reference(&inputs));
            let forward = (&out[..], forward.tolerance());
            let backward = (&gradients[..], backward.tolerance());
            for order in [MemoryOrder::Bhsd, MemoryOrder::Bshd, MemoryOrder::Packed] {
                let memory = ProblemBuffers::new(&device, order, &attention, &inputs);
                let run = |technique, sums: &[QueryGradientSumOrder]| {
                    let name = format!("{technique:?}, {order:?}, {attention:?}");
                    check_forward(&device, &memory, &attention, technique, forward, &name);
                    for &sums in sums {
                        let how = (technique, sums);
                        check_backward(&device, &memory, &attention, how, backward, &name);
                    }
                };
                run(
                    AttentionTechnique::FlashMma,
                    if h == h_kv { &[QueryGradientSumOrder::Any] } else { &[] },
                );
                if wgmma {
                    run(
                        AttentionTechnique::FlashWgmma,
                        &[QueryGradientSumOrder::Any, QueryGradientSumOrder::Fixed],
                    );
                }
            }
        }
    }
}

#[test]
fn heads_taken_from_a_counter_give_equal_bits_in_every_launch_of_a_graph() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    if device.facts().arch != "sm_90a" {
        return;
    }
    // Two heads for each block, one head more, and many heads; one, two and four parts.
    for (b, h, s) in [(1, 264, 256), (5, 53, 100), (4, 150, 37)] {
        for (d, causal) in [(64, true), (128, false), (128, true)] {
            let attention = bf16_attention(b, h, s, d, causal);
            let problem = AttentionForward { attention };
            let inputs = AttentionBackward { attention }.inputs(28);
            let memory = ProblemBuffers::new(&device, MemoryOrder::Bshd, &attention, &inputs);
            let name = format!("{attention:?}");
            let (shape, layout) =
                (AttentionShape::from(&attention), memory.layout(&attention).forward);
            let forward =
                ForwardCall::new(&device, &shape, &layout, AttentionTechnique::FlashWgmma).unwrap();
            let launches = forward.prepare_launches(&memory.forward()).unwrap();
            let poison = || memory.out.fill(POISON_BYTE);
            let found = |run: &dyn Fn() -> Result<(), BackendError>| {
                poison().and_then(|()| run()).unwrap();
                device.synchronize().unwrap();
                download_bytes(&memory.out)
            };
            let first = found(&|| launches.launch());
            let mut outputs = Tensors::new();
            outputs.insert("out", memory.places[0].read_as_dense_tensor(&first, attention.dtype));
            assert_agrees(&outputs, &problem.reference(&inputs), problem.tolerance(), &name);
            // The last graph launch must write all outputs again, although nothing resets the
            // counter between launches.
            let graph = ExecutableGraph::capture_graph(&device, || {
                (0..3).try_for_each(|_| launches.launch())?;
                poison()?;
                launches.launch()
            })
            .unwrap();
            for _ in 0..2 {
                assert!(found(&|| graph.launch()) == first, "{name}: other bits in a graph");
            }
            for launch in 0..20 {
                let again = found(&|| launches.launch());
                assert!(again == first, "{name}: other bits in launch {launch}");
            }
        }
    }
}

#[test]
fn gradients_summed_over_grouped_heads_are_stored_with_strides() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    if device.facts().arch != "sm_90a" {
        return;
    }
    let attention = Attention { h_kv: 2, ..bf16_attention(2, 8, 200, 128, true) };
    let problem = AttentionBackward { attention };
    let inputs = problem.inputs(27);
    let expected = problem.reference(&inputs);
    let memory = ProblemBuffers::new(&device, MemoryOrder::Packed, &attention, &inputs);
    let (shape, layout) = (AttentionShape::from(&attention), memory.layout(&attention));
    let forward =
        ForwardCall::new(&device, &shape, &layout.forward, AttentionTechnique::FlashWgmma).unwrap();
    let forward = forward.prepare_launches(&memory.forward()).unwrap();
    forward.launch().unwrap();
    let blocks = BackwardBlockWork::OfKeys {
        heads: 1,
        order: QueryGradientSumOrder::Any,
        wide: false,
        last: LastRound::UNSHARED,
    };
    let backward = BackwardCall::flash_wgmma_with_blocks(&device, &shape, &layout, blocks).unwrap();
    let bytes = backward.scratch_bytes();
    let any = device.allocate(bytes.any as usize).unwrap();
    let zeroed = device.upload(&vec![0; bytes.zeroed as usize]).unwrap();
    let scratch = ScratchAddresses { any: any.address(), zeroed: zeroed.address() };
    let launches = backward.prepare_launches(&memory.backward(), &scratch).unwrap();
    assert_eq!(launches.steps().len(), 3);
    launches.launch().unwrap();
    device.synchronize().unwrap();
    let found = download_bytes(&memory.gradients[0]);
    let mut outputs = Tensors::new();
    for (index, name) in ["grad_q", "grad_k", "grad_v"].into_iter().enumerate() {
        outputs.insert(name, memory.places[index].read_as_dense_tensor(&found, attention.dtype));
    }
    assert_agrees(&outputs, &expected, problem.tolerance(), "one head a block");
}

#[test]
fn a_problem_that_kernels_decline_skips_the_case() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let shape = AttentionShape::from(&bf16_attention(1, 4, 64, 64, false));
    let layout = ForwardLayout::strides_of_bshd(&shape);
    let declined = |result: Result<(), BackendError>| match result {
        Err(BackendError::Unsupported(reason)) => reason,
        other => panic!("{other:?}"),
    };
    let narrow = AttentionShape { head_dim: 80, ..shape };
    let technique = AttentionTechnique::FlashMma;
    let result =
        ForwardCall::new(&device, &narrow, &ForwardLayout::strides_of_bshd(&narrow), technique);
    let narrow = UnsupportedAttention::HeadDim { head_dim: 80 };
    assert_eq!(declined(result.map(drop)), narrow.to_string());
    let forward = ForwardCall::new(&device, &shape, &layout, technique).unwrap();
    let addresses = ForwardAddresses { q: 0x100, k: 0x108, v: 0x200, out: 0x300, lse: None };
    let result = forward.prepare_launches(&addresses).map(drop);
    assert_eq!(declined(result), "k: address 0x108 is no multiple of 16");
    let layout = BackwardLayout::gradients_like_tensors(layout);
    let grouped = AttentionShape { key_heads: 2, ..shape };
    let result =
        BackwardCall::new(&device, &grouped, &layout, technique, QueryGradientSumOrder::Any);
    let grouped = UnsupportedAttention::GroupedGradients { heads: 4, key_heads: 2 };
    assert_eq!(declined(result.map(drop)), grouped.to_string());
    let result =
        BackwardCall::new(&device, &shape, &layout, technique, QueryGradientSumOrder::Fixed);
    assert_eq!(declined(result.map(drop)), UnsupportedAttention::FixedOrder.to_string());
}
