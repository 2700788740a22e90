use super::*;
use crate::attention::cuda::backward::wgmma::{BackwardWorkDivision, LastRoundDivision};
use crate::attention::cuda::layout::AttentionTensorStrides;
use crate::attention::cuda::tests::bf16_attention_without_grouped_heads;
use crate::attention::definition::{AttentionForward, AttentionParameters};
use crate::attention::gradients::AttentionBackward;
use crate::gpu_tests::lock_first_gpu;
use kernelgate::verify::compare_outputs_with_reference;
use kernelgate::workload::{Dtype, Expected, Problem, Tensor, Tensors, Tolerance};
use kernelgate_cuda::DeviceBuffer;
use kernelgate_cuda::driver::graph::ExecutableCudaGraph;

/// Orders of a tensor's axes in memory. In each order the test buffers also have memory around the
/// tensors that no kernel may read or write.
#[derive(Debug, Clone, Copy)]
enum TensorAxisOrder {
    /// Dense tensor `[b, h, s, d]`.
    Bhsd,
    /// Order `[b, s, h + 1, d]`: after the heads of each position there is room for one unused
    /// head.
    BshdWithUnusedHead,
    /// q, k and v, or their gradients, packed in one tensor `[b, s, h + 2 h_kv, d]`.
    PackedQkv,
}

/// Position of a tensor in a test buffer.
#[derive(Debug, Clone, Copy)]
struct TensorPlaceInBuffer {
    strides: AttentionTensorStrides,
    /// Number of elements in the buffer before the tensor's first element.
    elements_before_tensor: u64,
    extents: [usize; 4],
}

impl TensorPlaceInBuffer {
    /// Yields, for each row of the tensor, its index in a dense `[b, h, s, d]` and the position of
    /// its first element in the buffer.
    fn dense_index_and_start_of_each_row(&self) -> impl Iterator<Item = (usize, usize)> {
        let Self { strides, elements_before_tensor: first, extents: [batch, heads, rows, _] } =
            *self;
        (0..batch * heads * rows).map(move |index| {
            let (head, row) = (index / rows, index % rows);
            let at = first
                + strides.batch_stride_elements * (head / heads) as u64
                + strides.head_stride_elements * (head % heads) as u64
                + strides.row_stride_elements * row as u64;
            (index, at as usize)
        })
    }

    fn copy_dense_tensor_into_place(&self, dense: &[u8], memory: &mut [u8]) {
        let bytes = 2 * self.extents[3];
        for (index, at) in self.dense_index_and_start_of_each_row() {
            memory[2 * at..][..bytes].copy_from_slice(&dense[index * bytes..][..bytes]);
        }
    }

    fn read_dense_tensor_from_place(&self, memory: &[u8], dtype: Dtype) -> Tensor {
        let mut dense = Tensor::filled_with_zeros(self.extents.to_vec(), dtype);
        let bytes = 2 * self.extents[3];
        for (index, at) in self.dense_index_and_start_of_each_row() {
            dense.as_bytes_mut()[index * bytes..][..bytes]
                .copy_from_slice(&memory[2 * at..][..bytes]);
        }
        dense
    }
}

/// Returns the positions of q, k and v in their buffers, and the number of elements of each buffer.
fn places_of_q_k_v_in_buffers(
    order: TensorAxisOrder,
    attention: &AttentionParameters,
) -> ([TensorPlaceInBuffer; 3], u64) {
    let AttentionParameters {
        batch_size: b,
        query_heads: h,
        key_value_heads: h_kv,
        queries_per_head: s,
        head_dim: d,
        ..
    } = *attention;
    let row_of_heads = |heads: usize| match order {
        TensorAxisOrder::Bhsd => AttentionTensorStrides::dense_bhsd_strides(heads, s, d),
        TensorAxisOrder::BshdWithUnusedHead => {
            AttentionTensorStrides::dense_bshd_strides(heads + 1, s, d)
        }
        TensorAxisOrder::PackedQkv => {
            AttentionTensorStrides::dense_bshd_strides(h + 2 * h_kv, s, d)
        }
    };
    let first = match order {
        TensorAxisOrder::PackedQkv => [0, h, h + h_kv].map(|head| (head * d) as u64),
        _ => [0; 3],
    };
    let extents = [
        attention.query_and_output_shape(),
        attention.key_value_shape(),
        attention.key_value_shape(),
    ];
    let place = |index: usize| TensorPlaceInBuffer {
        strides: row_of_heads(extents[index][1]),
        elements_before_tensor: first[index],
        extents: extents[index],
    };
    let elements = b * s * d * (h + 2 * h_kv + 1);
    ([0, 1, 2].map(place), elements as u64)
}

const POISON_BYTE_OF_TEST_BUFFERS: u8 = 0xff;

/// Device buffers of one attention problem in a given memory order.
struct AttentionTestBuffers {
    /// Device buffers of q, k and v in a test; a single buffer if the three are packed in one
    /// tensor.
    qkv_buffers: Vec<DeviceBuffer>,
    qkv_gradient_buffers: Vec<DeviceBuffer>,
    out: DeviceBuffer,
    grad_out: DeviceBuffer,
    lse: DeviceBuffer,
    places: [TensorPlaceInBuffer; 3],
}

impl AttentionTestBuffers {
    fn upload_in_axis_order(
        device: &Device,
        order: TensorAxisOrder,
        attention: &AttentionParameters,
        inputs: &Tensors,
    ) -> Self {
        let (places, elements) = places_of_q_k_v_in_buffers(order, attention);
        let empty = || vec![POISON_BYTE_OF_TEST_BUFFERS; 2 * elements as usize];
        let buffers = if matches!(order, TensorAxisOrder::PackedQkv) { 1 } else { 3 };
        let mut host: Vec<_> = (0..buffers).map(|_| empty()).collect();
        for (index, name) in ["q", "k", "v"].into_iter().enumerate() {
            places[index].copy_dense_tensor_into_place(
                inputs.tensor(name).as_bytes(),
                &mut host[index % buffers],
            );
        }
        let mut grad_out = empty();
        places[0].copy_dense_tensor_into_place(inputs.tensor("grad_out").as_bytes(), &mut grad_out);
        let poisoned = || device.upload(&empty()).unwrap();
        Self {
            qkv_buffers: host.iter().map(|bytes| device.upload(bytes).unwrap()).collect(),
            qkv_gradient_buffers: (0..buffers).map(|_| poisoned()).collect(),
            out: poisoned(),
            grad_out: device.upload(&grad_out).unwrap(),
            lse: device
                .allocate(
                    4 * attention.batch_size * attention.query_heads * attention.queries_per_head,
                )
                .unwrap(),
            places,
        }
    }

    fn address_of_q_k_or_v(&self, buffers: &[DeviceBuffer], index: usize) -> u64 {
        buffers[index % buffers.len()].device_address()
            + 2 * self.places[index].elements_before_tensor
    }

    fn backward_layout_of_buffers(
        &self,
        attention: &AttentionParameters,
    ) -> AttentionBackwardLayout {
        let [q, k, v] = self.places.map(|place| place.strides);
        let lse = AttentionTensorStrides::dense_bhsd_strides(
            attention.query_heads,
            attention.queries_per_head,
            1,
        );
        AttentionBackwardLayout::gradients_like_tensors(AttentionForwardLayout {
            q,
            k,
            v,
            out: q,
            lse,
        })
    }

    fn forward_addresses(&self) -> AttentionForwardAddresses {
        let [q, k, v] = [0, 1, 2].map(|index| self.address_of_q_k_or_v(&self.qkv_buffers, index));
        let out = self.out.device_address() + 2 * self.places[0].elements_before_tensor;
        AttentionForwardAddresses {
            q_address: q,
            k_address: k,
            v_address: v,
            out_address: out,
            lse_address: Some(self.lse.device_address()),
        }
    }

    fn backward_addresses(&self) -> AttentionBackwardAddresses {
        let AttentionForwardAddresses {
            q_address: q,
            k_address: k,
            v_address: v,
            out_address: out,
            ..
        } = self.forward_addresses();
        let [grad_q, grad_k, grad_v] =
            [0, 1, 2].map(|index| self.address_of_q_k_or_v(&self.qkv_gradient_buffers, index));
        let grad_out = self.grad_out.device_address() + 2 * self.places[0].elements_before_tensor;
        let lse = self.lse.device_address();
        AttentionBackwardAddresses {
            q_address: q,
            k_address: k,
            v_address: v,
            out_address: out,
            lse_address: lse,
            grad_out_address: grad_out,
            grad_q_address: grad_q,
            grad_k_address: grad_k,
            grad_v_address: grad_v,
        }
    }
}

fn download_bytes(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.size_in_bytes()];
    buffer.download_first_bytes(&mut bytes).unwrap();
    bytes
}

/// Asserts that every byte of the buffer outside the tensors still has the poison value.
fn assert_bytes_outside_tensors_are_poison(
    memory: &[u8],
    places: &[TensorPlaceInBuffer],
    name: &str,
) {
    let mut memory = memory.to_vec();
    for place in places {
        let bytes = place.extents.iter().product::<usize>() * 2;
        place.copy_dense_tensor_into_place(&vec![POISON_BYTE_OF_TEST_BUFFERS; bytes], &mut memory);
    }
    assert!(
        memory.iter().all(|&byte| byte == POISON_BYTE_OF_TEST_BUFFERS),
        "{name}: wrote outside its tensors"
    );
}

fn assert_outputs_within_tolerance(
    outputs: &Tensors,
    expected: &[Expected],
    tolerance: Tolerance,
    name: &str,
) {
    let result = compare_outputs_with_reference(outputs, expected, tolerance);
    assert!(result.is_ok(), "{name}: {}", result.unwrap_err());
}

fn launch_and_check_forward(
    device: &Arc<Device>,
    memory: &AttentionTestBuffers,
    attention: &AttentionParameters,
    technique: AttentionGemmTechnique,
    (expected, tolerance): (&[Expected], Tolerance),
    name: &str,
) {
    let (shape, layout) =
        (AttentionShape::from(attention), memory.backward_layout_of_buffers(attention).forward);
    let forward = AttentionForwardCall::compile_and_load_attention_forward(
        device, &shape, &layout, technique,
    )
    .unwrap();
    let launches =
        forward.prepare_forward_launch_at_addresses(&memory.forward_addresses()).unwrap();
    memory.out.fill_all_bytes(POISON_BYTE_OF_TEST_BUFFERS).unwrap();
    launches.enqueue_all_launches().unwrap();
    device.synchronize().unwrap();
    let (place, bytes) = (memory.places[0], download_bytes(&memory.out));
    let mut outputs = Tensors::new();
    outputs.insert("out", place.read_dense_tensor_from_place(&bytes, attention.dtype));
    assert_outputs_within_tolerance(&outputs, expected, tolerance, name);
    assert_bytes_outside_tensors_are_poison(&bytes, &[place], name);
}

/// Launches the backward twice: it must not depend on earlier launches, and must leave the zeroed
/// scratch memory zero.
fn launch_and_check_backward_twice(
    device: &Arc<Device>,
    memory: &AttentionTestBuffers,
    attention: &AttentionParameters,
    (technique, order): (AttentionGemmTechnique, QueryGradientSumOrder),
    (expected, tolerance): (&[Expected], Tolerance),
    name: &str,
) {
    let (shape, layout) =
        (AttentionShape::from(attention), memory.backward_layout_of_buffers(attention));
    let backward = AttentionBackwardCall::compile_and_load_attention_backward(
        device, &shape, &layout, technique, order,
    )
    .unwrap();
    let bytes = backward.backward_scratch_bytes();
    let any = device.allocate(bytes.uninitialised_scratch_bytes as usize).unwrap();
    let zeroed = device.upload(&vec![0; bytes.zeroed_scratch_bytes as usize]).unwrap();
    let scratch = AttentionScratchAddresses {
        uninitialised_scratch_address: any.device_address(),
        zeroed_scratch_address: zeroed.device_address(),
    };
    let launches = backward
        .prepare_backward_launches_at_addresses(&memory.backward_addresses(), &scratch)
        .unwrap();
    let mut first: Option<Vec<Vec<u8>>> = None;
    for _ in 0..2 {
        memory
            .qkv_gradient_buffers
            .iter()
            .try_for_each(|buffer| buffer.fill_all_bytes(POISON_BYTE_OF_TEST_BUFFERS))
            .unwrap();
        launches.enqueue_all_launches().unwrap();
        device.synchronize().unwrap();
        let found: Vec<_> = memory.qkv_gradient_buffers.iter().map(download_bytes).collect();
        let mut outputs = Tensors::new();
        for (index, name) in ["grad_q", "grad_k", "grad_v"].into_iter().enumerate() {
            let bytes = &found[index % found.len()];
            outputs.insert(
                name,
                memory.places[index].read_dense_tensor_from_place(bytes, attention.dtype),
            );
        }
        assert_outputs_within_tolerance(&outputs, expected, tolerance, name);
        for (index, bytes) in found.iter().enumerate() {
            let packed = found.len() == 1;
            let places = if packed { &memory.places[..] } else { &memory.places[index..=index] };
            assert_bytes_outside_tensors_are_poison(bytes, places, name);
        }
        if order == QueryGradientSumOrder::FixedKeyBlockOrder {
            assert_eq!(*first.get_or_insert(found.clone()), found, "{name}: other bits");
        }
    }
    // A device buffer of zero bytes is allocated with one byte, so only the requested bytes are
    // compared.
    let left = &download_bytes(&zeroed)[..bytes.zeroed_scratch_bytes as usize];
    assert!(left.iter().all(|&byte| byte == 0), "{name}: scratch is not zero");
}

#[test]
fn max_backward_scratch_bytes_are_known_without_a_gpu() {
    let attention = bf16_attention_without_grouped_heads(2, 4, 100, 128, true);
    // In this test, eight heads of 100 queries are padded to two steps of 80 queries each.
    let any = 8 * 160 * (2 * 4 + 4 * 128);
    let turns = 8 * 2 * 4;
    assert_eq!(
        AttentionBackwardCall::max_backward_scratch_bytes(&AttentionShape::from(&attention)),
        AttentionScratchBytes { uninitialised_scratch_bytes: any, zeroed_scratch_bytes: turns }
    );
    let grouped = AttentionShape::from(&AttentionParameters { key_value_heads: 2, ..attention });
    // Each of the four key heads of both sequences has one block of 128 keys.
    let sums = 2 * (4 * 128 * 128 * 4);
    assert_eq!(
        AttentionBackwardCall::max_backward_scratch_bytes(&grouped),
        AttentionScratchBytes {
            uninitialised_scratch_bytes: any,
            zeroed_scratch_bytes: sums + turns
        }
    );
}

#[test]
fn attention_agrees_with_the_reference_in_every_axis_order() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let wgmma = device.gpu_properties().kernel_architecture == "sm_90a";
    // Each case has numbers of batches, query heads, key heads and queries: single rows, edges of
    // tiles, several tiles.
    for (b, h, h_kv, s) in [(1, 1, 1, 1), (2, 3, 3, 63), (3, 4, 4, 129), (2, 6, 2, 333)] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            let dtype = if causal { Dtype::F16 } else { Dtype::Bf16 };
            let attention = AttentionParameters {
                key_value_heads: h_kv,
                dtype,
                ..bf16_attention_without_grouped_heads(b, h, s, d, causal)
            };
            let (forward, backward) =
                (AttentionForward { attention }, AttentionBackward { attention });
            let inputs = backward.inputs(26);
            let (out, gradients) = (forward.reference(&inputs), backward.reference(&inputs));
            let forward = (&out[..], forward.tolerance());
            let backward = (&gradients[..], backward.tolerance());
            for order in [
                TensorAxisOrder::Bhsd,
                TensorAxisOrder::BshdWithUnusedHead,
                TensorAxisOrder::PackedQkv,
            ] {
                let memory =
                    AttentionTestBuffers::upload_in_axis_order(&device, order, &attention, &inputs);
                let run = |technique, sums: &[QueryGradientSumOrder]| {
                    let name = format!("{technique:?}, {order:?}, {attention:?}");
                    launch_and_check_forward(
                        &device, &memory, &attention, technique, forward, &name,
                    );
                    for &sums in sums {
                        let how = (technique, sums);
                        launch_and_check_backward_twice(
                            &device, &memory, &attention, how, backward, &name,
                        );
                    }
                };
                run(
                    AttentionGemmTechnique::FlashMma,
                    if h == h_kv { &[QueryGradientSumOrder::AnyKeyBlockOrder] } else { &[] },
                );
                if wgmma {
                    run(
                        AttentionGemmTechnique::FlashWgmma,
                        &[
                            QueryGradientSumOrder::AnyKeyBlockOrder,
                            QueryGradientSumOrder::FixedKeyBlockOrder,
                        ],
                    );
                }
            }
        }
    }
}

#[test]
fn forward_heads_taken_from_a_counter_give_equal_bits_in_every_launch() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    if device.gpu_properties().kernel_architecture != "sm_90a" {
        return;
    }
    // Cases with two heads for each multiprocessor, one head more, and many heads; each head has
    // four, two or one parts of 64 queries.
    for (b, h, s) in [(1, 264, 256), (5, 53, 100), (4, 150, 37)] {
        for (d, causal) in [(64, true), (128, false), (128, true)] {
            let attention = bf16_attention_without_grouped_heads(b, h, s, d, causal);
            let problem = AttentionForward { attention };
            let inputs = AttentionBackward { attention }.inputs(28);
            let memory = AttentionTestBuffers::upload_in_axis_order(
                &device,
                TensorAxisOrder::BshdWithUnusedHead,
                &attention,
                &inputs,
            );
            let name = format!("{attention:?}");
            let (shape, layout) = (
                AttentionShape::from(&attention),
                memory.backward_layout_of_buffers(&attention).forward,
            );
            let forward = AttentionForwardCall::compile_and_load_attention_forward(
                &device,
                &shape,
                &layout,
                AttentionGemmTechnique::FlashWgmma,
            )
            .unwrap();
            let launches =
                forward.prepare_forward_launch_at_addresses(&memory.forward_addresses()).unwrap();
            let poison = || memory.out.fill_all_bytes(POISON_BYTE_OF_TEST_BUFFERS);
            let found = |run: &dyn Fn() -> Result<(), BackendError>| {
                poison().and_then(|()| run()).unwrap();
                device.synchronize().unwrap();
                download_bytes(&memory.out)
            };
            let first = found(&|| launches.enqueue_all_launches());
            let mut outputs = Tensors::new();
            outputs.insert(
                "out",
                memory.places[0].read_dense_tensor_from_place(&first, attention.dtype),
            );
            assert_outputs_within_tolerance(
                &outputs,
                &problem.reference(&inputs),
                problem.tolerance(),
                &name,
            );
            // The graph poisons the output before its last launch, which must write all outputs
            // again although nothing resets the counter of heads.
            let graph = ExecutableCudaGraph::capture_from_device_stream(&device, || {
                (0..3).try_for_each(|_| launches.enqueue_all_launches())?;
                poison()?;
                launches.enqueue_all_launches()
            })
            .unwrap();
            for _ in 0..2 {
                assert!(
                    found(&|| graph.launch_graph_on_stream()) == first,
                    "{name}: other bits in a graph"
                );
            }
            for launch in 0..20 {
                let again = found(&|| launches.enqueue_all_launches());
                assert!(again == first, "{name}: other bits in launch {launch}");
            }
        }
    }
}

#[test]
fn key_gradients_summed_in_memory_are_stored_with_packed_strides() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    if device.gpu_properties().kernel_architecture != "sm_90a" {
        return;
    }
    let attention = AttentionParameters {
        key_value_heads: 2,
        ..bf16_attention_without_grouped_heads(2, 8, 200, 128, true)
    };
    let problem = AttentionBackward { attention };
    let inputs = problem.inputs(27);
    let expected = problem.reference(&inputs);
    let memory = AttentionTestBuffers::upload_in_axis_order(
        &device,
        TensorAxisOrder::PackedQkv,
        &attention,
        &inputs,
    );
    let (shape, layout) =
        (AttentionShape::from(&attention), memory.backward_layout_of_buffers(&attention));
    let forward = AttentionForwardCall::compile_and_load_attention_forward(
        &device,
        &shape,
        &layout.forward,
        AttentionGemmTechnique::FlashWgmma,
    )
    .unwrap();
    let forward = forward.prepare_forward_launch_at_addresses(&memory.forward_addresses()).unwrap();
    forward.enqueue_all_launches().unwrap();
    let blocks = BackwardWorkDivision::KeyBlockPerThreadBlock {
        heads: 1,
        order: QueryGradientSumOrder::AnyKeyBlockOrder,
        steps_of_80_queries: false,
        last_round: LastRoundDivision::NO_SHARED_KEY_BLOCKS,
    };
    let backward = AttentionBackwardCall::compile_wgmma_backward_with_work_division(
        &device, &shape, &layout, blocks,
    )
    .unwrap();
    let bytes = backward.backward_scratch_bytes();
    let any = device.allocate(bytes.uninitialised_scratch_bytes as usize).unwrap();
    let zeroed = device.upload(&vec![0; bytes.zeroed_scratch_bytes as usize]).unwrap();
    let scratch = AttentionScratchAddresses {
        uninitialised_scratch_address: any.device_address(),
        zeroed_scratch_address: zeroed.device_address(),
    };
    let launches = backward
        .prepare_backward_launches_at_addresses(&memory.backward_addresses(), &scratch)
        .unwrap();
    assert_eq!(launches.launches_in_order().len(), 3);
    launches.enqueue_all_launches().unwrap();
    device.synchronize().unwrap();
    let found = download_bytes(&memory.qkv_gradient_buffers[0]);
    let mut outputs = Tensors::new();
    for (index, name) in ["grad_q", "grad_k", "grad_v"].into_iter().enumerate() {
        outputs.insert(
            name,
            memory.places[index].read_dense_tensor_from_place(&found, attention.dtype),
        );
    }
    assert_outputs_within_tolerance(&outputs, &expected, problem.tolerance(), "one head a block");
}

#[test]
fn unsupported_attention_gives_the_unsupported_error_with_its_reason() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let shape = AttentionShape::from(&bf16_attention_without_grouped_heads(1, 4, 64, 64, false));
    let layout = AttentionForwardLayout::forward_layout_dense_bshd(&shape);
    let declined = |result: Result<(), BackendError>| match result {
        Err(BackendError::Unsupported(reason)) => reason,
        other => panic!("{other:?}"),
    };
    let narrow = AttentionShape { head_dim: 80, ..shape };
    let technique = AttentionGemmTechnique::FlashMma;
    let result = AttentionForwardCall::compile_and_load_attention_forward(
        &device,
        &narrow,
        &AttentionForwardLayout::forward_layout_dense_bshd(&narrow),
        technique,
    );
    let narrow = UnsupportedAttention::UnsupportedHeadDim { head_dim: 80 };
    assert_eq!(declined(result.map(drop)), narrow.to_string());
    let forward = AttentionForwardCall::compile_and_load_attention_forward(
        &device, &shape, &layout, technique,
    )
    .unwrap();
    let addresses = AttentionForwardAddresses {
        q_address: 0x100,
        k_address: 0x108,
        v_address: 0x200,
        out_address: 0x300,
        lse_address: None,
    };
    let result = forward.prepare_forward_launch_at_addresses(&addresses).map(drop);
    assert_eq!(declined(result), "k: address 0x108 is no multiple of 16");
    let layout = AttentionBackwardLayout::gradients_like_tensors(layout);
    let grouped = AttentionShape { key_value_heads: 2, ..shape };
    let result = AttentionBackwardCall::compile_and_load_attention_backward(
        &device,
        &grouped,
        &layout,
        technique,
        QueryGradientSumOrder::AnyKeyBlockOrder,
    );
    let grouped = UnsupportedAttention::NoGradientsOfSharedKeyHeads { heads: 4, key_heads: 2 };
    assert_eq!(declined(result.map(drop)), grouped.to_string());
    let result = AttentionBackwardCall::compile_and_load_attention_backward(
        &device,
        &shape,
        &layout,
        technique,
        QueryGradientSumOrder::FixedKeyBlockOrder,
    );
    assert_eq!(
        declined(result.map(drop)),
        UnsupportedAttention::NoFixedGradientSumOrder.to_string()
    );
}
