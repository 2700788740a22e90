use super::*;

const CAUSAL_GROUPED_HEADS_SHAPE: AttentionShape = AttentionShape {
    batch: 2,
    query_heads: 6,
    key_value_heads: 2,
    queries_per_head: 77,
    keys_per_head: 77,
    head_dim: 64,
    causal: true,
    dtype: Dtype::Bf16,
};

#[test]
fn strides_follow_the_order_of_a_tensors_dimensions_in_memory() {
    assert_eq!(
        AttentionTensorStrides::dense_bhsd_strides(6, 77, 64),
        AttentionTensorStrides {
            batch_stride_elements: 29_568,
            head_stride_elements: 4928,
            row_stride_elements: 64
        }
    );
    assert_eq!(
        AttentionTensorStrides::dense_bshd_strides(6, 77, 64),
        AttentionTensorStrides {
            batch_stride_elements: 29_568,
            head_stride_elements: 64,
            row_stride_elements: 384
        }
    );
    let layout = AttentionForwardLayout::forward_layout_dense_bshd(&CAUSAL_GROUPED_HEADS_SHAPE);
    assert_eq!(
        layout.lse,
        AttentionTensorStrides {
            batch_stride_elements: 462,
            head_stride_elements: 77,
            row_stride_elements: 1
        }
    );
    assert_eq!((layout.k.row_stride_elements, layout.out.row_stride_elements), (128, 384));
}

#[test]
fn dense_bhsd_and_bshd_layouts_and_packed_qkv_are_supported() {
    assert_eq!(
        AttentionForwardLayout::forward_layout_dense_bhsd(&CAUSAL_GROUPED_HEADS_SHAPE)
            .check_forward_shape_and_strides(&CAUSAL_GROUPED_HEADS_SHAPE),
        Ok(())
    );
    let rows_first = AttentionForwardLayout::forward_layout_dense_bshd(&CAUSAL_GROUPED_HEADS_SHAPE);
    assert_eq!(rows_first.check_forward_shape_and_strides(&CAUSAL_GROUPED_HEADS_SHAPE), Ok(()));
    assert_eq!(
        AttentionBackwardLayout::gradients_like_tensors(rows_first)
            .check_backward_shape_and_strides(&CAUSAL_GROUPED_HEADS_SHAPE),
        Ok(())
    );
    // The attention inputs q, k and v are interleaved by heads in one packed tensor [b, s, h + 2
    // h_kv, d].
    let packed = AttentionTensorStrides {
        batch_stride_elements: 77 * 10 * 64,
        head_stride_elements: 64,
        row_stride_elements: 10 * 64,
    };
    let packed = AttentionForwardLayout { q: packed, k: packed, v: packed, ..rows_first };
    assert_eq!(packed.check_forward_shape_and_strides(&CAUSAL_GROUPED_HEADS_SHAPE), Ok(()));
}

#[test]
fn only_tensors_that_are_not_dense_need_a_kernel_build_with_strides() {
    let (dense, rows_first) = (
        AttentionForwardLayout::forward_layout_dense_bhsd(&CAUSAL_GROUPED_HEADS_SHAPE),
        AttentionForwardLayout::forward_layout_dense_bshd(&CAUSAL_GROUPED_HEADS_SHAPE),
    );
    assert_eq!(dense.forward_row_strides_unless_dense(&CAUSAL_GROUPED_HEADS_SHAPE), None);
    let rows = RowStridesOfQkvAndGradient {
        q_row_stride_elements: 384,
        k_row_stride_elements: 128,
        v_row_stride_elements: 128,
        grad_out_row_stride_elements: 384,
    };
    assert_eq!(
        rows_first.forward_row_strides_unless_dense(&CAUSAL_GROUPED_HEADS_SHAPE),
        Some(rows)
    );
    let backward = AttentionBackwardLayout::gradients_like_tensors(dense);
    assert_eq!(backward.backward_row_strides_unless_dense(&CAUSAL_GROUPED_HEADS_SHAPE), None);
    let one = AttentionBackwardLayout { grad_k: rows_first.k, ..backward };
    assert_eq!(
        one.backward_row_strides_unless_dense(&CAUSAL_GROUPED_HEADS_SHAPE),
        Some(RowStridesOfQkvAndGradient {
            q_row_stride_elements: 64,
            k_row_stride_elements: 64,
            v_row_stride_elements: 64,
            grad_out_row_stride_elements: 64
        })
    );
}

#[test]
fn attention_shapes_that_no_kernel_supports_are_declined_with_a_reason() {
    let reason = |shape: AttentionShape| shape.check_forward_kernels_exist().unwrap_err();
    assert_eq!(
        reason(AttentionShape { head_dim: 80, ..CAUSAL_GROUPED_HEADS_SHAPE }),
        UnsupportedAttention::UnsupportedHeadDim { head_dim: 80 }
    );
    assert_eq!(
        reason(AttentionShape { dtype: Dtype::F32, ..CAUSAL_GROUPED_HEADS_SHAPE }),
        UnsupportedAttention::UnsupportedDtype { dtype: "f32" }
    );
    assert_eq!(
        reason(AttentionShape { key_value_heads: 4, ..CAUSAL_GROUPED_HEADS_SHAPE }),
        UnsupportedAttention::HeadsNotMultipleOfKeyHeads { heads: 6, key_heads: 4 }
    );
    assert_eq!(
        reason(AttentionShape { keys_per_head: 76, ..CAUSAL_GROUPED_HEADS_SHAPE }),
        UnsupportedAttention::CausalWithFewerKeysThanQueries { keys: 76, queries: 77 }
    );
    assert!(matches!(
        reason(AttentionShape { keys_per_head: 0, ..CAUSAL_GROUPED_HEADS_SHAPE }),
        UnsupportedAttention::ExtentZeroOrBeyond32Bits { .. }
    ));
    let more = AttentionShape { keys_per_head: 78, ..CAUSAL_GROUPED_HEADS_SHAPE };
    assert_eq!(more.check_forward_kernels_exist(), Ok(()));
    assert_eq!(
        more.check_backward_kernels_exist(),
        Err(UnsupportedAttention::GradientsNeedEqualKeysAndQueries { keys: 78, queries: 77 })
    );
}

#[test]
fn attention_tensors_that_tma_cannot_address_are_declined_with_a_reason() {
    let layout = AttentionForwardLayout::forward_layout_dense_bshd(&CAUSAL_GROUPED_HEADS_SHAPE);
    let row = AttentionTensorStrides { row_stride_elements: 388, ..layout.q };
    assert_eq!(
        AttentionForwardLayout { q: row, ..layout }
            .check_forward_shape_and_strides(&CAUSAL_GROUPED_HEADS_SHAPE),
        Err(UnsupportedAttention::UnalignedOrTooLargeStride {
            tensor_name: "q",
            axis_of_stride: "row",
            stride_bytes: 776
        })
    );
    let head = AttentionTensorStrides { head_stride_elements: 32, ..layout.k };
    assert_eq!(
        AttentionForwardLayout { k: head, ..layout }
            .check_forward_shape_and_strides(&CAUSAL_GROUPED_HEADS_SHAPE),
        Err(UnsupportedAttention::OverlappingRows {
            tensor_name: "k",
            axis_of_stride: "head",
            stride_elements: 32,
            row_elements: 64
        })
    );
    let far = AttentionTensorStrides { batch_stride_elements: 1 << 39, ..layout.v };
    assert_eq!(
        AttentionForwardLayout { v: far, ..layout }
            .check_forward_shape_and_strides(&CAUSAL_GROUPED_HEADS_SHAPE),
        Err(UnsupportedAttention::UnalignedOrTooLargeStride {
            tensor_name: "v",
            axis_of_stride: "batch",
            stride_bytes: 1 << 40
        })
    );
    // If the batch has only one sequence, the attention layout check accepts any batch stride.
    let single = AttentionShape { batch: 1, ..CAUSAL_GROUPED_HEADS_SHAPE };
    assert_eq!(
        AttentionForwardLayout { v: far, ..layout }.check_forward_shape_and_strides(&single),
        Ok(())
    );
    // A tensor with one element in each row, such as lse `[b, s, h]`, needs no alignment of its
    // rows or base address.
    let lse = AttentionTensorStrides::dense_bshd_strides(6, 77, 1);
    assert_eq!(
        AttentionForwardLayout { lse, ..layout }
            .check_forward_shape_and_strides(&CAUSAL_GROUPED_HEADS_SHAPE),
        Ok(())
    );
    assert_eq!(
        check_addresses_for_16_byte_copies(&[("q", 0x1000), ("k", 0x1008)]),
        Err(UnsupportedAttention::UnalignedTensorAddress { tensor: "k", address: 0x1008 })
    );
}

#[test]
fn an_attention_problem_that_a_kernel_declines_is_skipped_with_the_reason() {
    let error = BackendError::from(UnsupportedAttention::UnsupportedHeadDim { head_dim: 80 });
    assert_eq!(
        error,
        BackendError::Unsupported(
            "head dimension 80: computes 64 and 128 only; pad smaller ones with zeros".to_owned()
        )
    );
}
