use super::*;

const SHAPE: AttentionShape = AttentionShape {
    batch: 2,
    heads: 6,
    key_heads: 2,
    queries: 77,
    keys: 77,
    head_dim: 64,
    causal: true,
    dtype: Dtype::Bf16,
};

#[test]
fn strides_follow_the_order_of_a_tensors_dimensions() {
    assert_eq!(Strides::dense_bhsd(6, 77, 64), Strides { batch: 29_568, head: 4928, row: 64 });
    assert_eq!(Strides::dense_bshd(6, 77, 64), Strides { batch: 29_568, head: 64, row: 384 });
    let layout = ForwardLayout::strides_of_bshd(&SHAPE);
    assert_eq!(layout.lse, Strides { batch: 462, head: 77, row: 1 });
    assert_eq!((layout.k.row, layout.out.row), (128, 384));
}

#[test]
fn both_dense_layouts_and_packed_tensors_are_supported() {
    assert_eq!(ForwardLayout::strides_of_bhsd(&SHAPE).check(&SHAPE), Ok(()));
    let rows_first = ForwardLayout::strides_of_bshd(&SHAPE);
    assert_eq!(rows_first.check(&SHAPE), Ok(()));
    assert_eq!(BackwardLayout::gradients_like_tensors(rows_first).check(&SHAPE), Ok(()));
    // The tensors q, k and v are packed in one tensor [b, s, h + 2 h_kv, d].
    let packed = Strides { batch: 77 * 10 * 64, head: 64, row: 10 * 64 };
    let packed = ForwardLayout { q: packed, k: packed, v: packed, ..rows_first };
    assert_eq!(packed.check(&SHAPE), Ok(()));
}

#[test]
fn only_a_tensor_that_is_not_dense_needs_a_build_with_strides() {
    let (dense, rows_first) =
        (ForwardLayout::strides_of_bhsd(&SHAPE), ForwardLayout::strides_of_bshd(&SHAPE));
    assert_eq!(dense.rows(&SHAPE), None);
    let rows = RowStrides { q: 384, k: 128, v: 128, grad_out: 384 };
    assert_eq!(rows_first.rows(&SHAPE), Some(rows));
    let backward = BackwardLayout::gradients_like_tensors(dense);
    assert_eq!(backward.rows(&SHAPE), None);
    let one = BackwardLayout { grad_k: rows_first.k, ..backward };
    assert_eq!(one.rows(&SHAPE), Some(RowStrides { q: 64, k: 64, v: 64, grad_out: 64 }));
}

#[test]
fn shapes_that_no_kernel_supports_are_declined_with_a_reason() {
    let reason = |shape: AttentionShape| shape.check().unwrap_err();
    assert_eq!(
        reason(AttentionShape { head_dim: 80, ..SHAPE }),
        UnsupportedAttention::HeadDim { head_dim: 80 }
    );
    assert_eq!(
        reason(AttentionShape { dtype: Dtype::F32, ..SHAPE }),
        UnsupportedAttention::Dtype { dtype: "f32" }
    );
    assert_eq!(
        reason(AttentionShape { key_heads: 4, ..SHAPE }),
        UnsupportedAttention::Heads { heads: 6, key_heads: 4 }
    );
    assert_eq!(
        reason(AttentionShape { keys: 76, ..SHAPE }),
        UnsupportedAttention::CausalKeys { keys: 76, queries: 77 }
    );
    assert!(matches!(
        reason(AttentionShape { keys: 0, ..SHAPE }),
        UnsupportedAttention::Extents { .. }
    ));
    let more = AttentionShape { keys: 78, ..SHAPE };
    assert_eq!(more.check(), Ok(()));
    assert_eq!(
        more.check_gradients_supported(),
        Err(UnsupportedAttention::CrossGradients { keys: 78, queries: 77 })
    );
}

#[test]
fn tensors_that_tensor_copies_cannot_address_are_declined_with_a_reason() {
    let layout = ForwardLayout::strides_of_bshd(&SHAPE);
    let row = Strides { row: 388, ..layout.q };
    assert_eq!(
        ForwardLayout { q: row, ..layout }.check(&SHAPE),
        Err(UnsupportedAttention::Stride { tensor: "q", dimension: "row", bytes: 776 })
    );
    let head = Strides { head: 32, ..layout.k };
    assert_eq!(
        ForwardLayout { k: head, ..layout }.check(&SHAPE),
        Err(UnsupportedAttention::Overlap { tensor: "k", dimension: "head", stride: 32, row: 64 })
    );
    let far = Strides { batch: 1 << 39, ..layout.v };
    assert_eq!(
        ForwardLayout { v: far, ..layout }.check(&SHAPE),
        Err(UnsupportedAttention::Stride { tensor: "v", dimension: "batch", bytes: 1 << 40 })
    );
    // A batch of one sequence may have any batch stride.
    let single = AttentionShape { batch: 1, ..SHAPE };
    assert_eq!(ForwardLayout { v: far, ..layout }.check(&single), Ok(()));
    // Tensors with one element in each row need no alignment: lse as [b, s, h].
    let lse = Strides::dense_bshd(6, 77, 1);
    assert_eq!(ForwardLayout { lse, ..layout }.check(&SHAPE), Ok(()));
    assert_eq!(
        check_addresses(&[("q", 0x1000), ("k", 0x1008)]),
        Err(UnsupportedAttention::Address { tensor: "k", address: 0x1008 })
    );
}

#[test]
fn a_declined_problem_is_skipped_with_the_reason() {
    let error = BackendError::from(UnsupportedAttention::HeadDim { head_dim: 80 });
    assert_eq!(
        error,
        BackendError::Unsupported(
            "head dimension 80: computes 64 and 128 only; pad smaller ones with zeros".to_owned()
        )
    );
}
