//! Shapes and memory layouts of the caller's attention tensors, and the reasons for which
//! kernelgate's kernels decline them.

use crate::attention::definition::AttentionParameters;
use kernelgate::backend::BackendError;
use kernelgate::workload::Dtype;
use kernelgate_cuda::TMA_ALIGNMENT_BYTES;

/// Sizes, mask and dtype of one attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of sequences in the batch.
    pub batch: usize,
    /// Number of query heads of each sequence.
    pub query_heads: usize,
    /// Number of key-value heads of each sequence, which must divide `query_heads`.
    pub key_value_heads: usize,
    /// Number of queries of a head.
    pub queries_per_head: usize,
    /// Number of keys of a head.
    pub keys_per_head: usize,
    /// Number of elements of each row of q, k and v: 64 or 128; other head dimensions are declined.
    /// To compute a smaller head dimension, pad rows with zeros and multiply q and its gradient by
    /// `sqrt(padded / head_dim)`, because scores are divided by the root of the padded dimension.
    pub head_dim: usize,
    /// Whether the mask is causal: the last query sees all keys, and each earlier query one key
    /// less than the next.
    pub causal: bool,
    /// Dtype of every tensor except lse: bf16 or f16.
    pub dtype: Dtype,
}

impl From<&AttentionParameters> for AttentionShape {
    fn from(attention: &AttentionParameters) -> Self {
        let AttentionParameters {
            batch_size: batch,
            query_heads,
            key_value_heads,
            queries_per_head,
            keys_per_head,
            head_dim,
            causal,
            dtype,
            ..
        } = *attention;
        Self {
            batch,
            query_heads,
            key_value_heads,
            queries_per_head,
            keys_per_head,
            head_dim,
            causal,
            dtype,
        }
    }
}

impl AttentionShape {
    /// Checks whether kernelgate has attention forward kernels for the shape.
    pub fn check_forward_kernels_exist(&self) -> Result<(), UnsupportedAttention> {
        let Self {
            batch,
            query_heads: heads,
            key_value_heads: key_heads,
            queries_per_head: queries,
            keys_per_head: keys,
            head_dim,
            causal,
            dtype,
        } = *self;
        let extents = [batch * heads, key_heads, queries, keys];
        if extents.iter().any(|&extent| extent == 0 || i32::try_from(extent).is_err()) {
            return Err(UnsupportedAttention::ExtentZeroOrBeyond32Bits {
                batch,
                heads,
                key_heads,
                queries,
                keys,
            });
        }
        if !matches!(dtype, Dtype::Bf16 | Dtype::F16) {
            return Err(UnsupportedAttention::UnsupportedDtype { dtype: dtype.dtype_name() });
        }
        if ![64, 128].contains(&head_dim) {
            return Err(UnsupportedAttention::UnsupportedHeadDim { head_dim });
        }
        if !heads.is_multiple_of(key_heads) {
            return Err(UnsupportedAttention::HeadsNotMultipleOfKeyHeads { heads, key_heads });
        }
        if causal && keys < queries {
            return Err(UnsupportedAttention::CausalWithFewerKeysThanQueries { keys, queries });
        }
        Ok(())
    }

    /// Checks whether kernelgate has attention backward kernels for the shape.
    ///
    /// # Errors
    /// Returns the first unmet requirement: those of [`Self::check_forward_kernels_exist`], then
    /// equal numbers of keys and queries.
    pub fn check_backward_kernels_exist(&self) -> Result<(), UnsupportedAttention> {
        self.check_forward_kernels_exist()?;
        let Self { keys_per_head: keys, queries_per_head: queries, .. } = *self;
        if keys == queries {
            Ok(())
        } else {
            Err(UnsupportedAttention::GradientsNeedEqualKeysAndQueries { keys, queries })
        }
    }

    const fn query_tensor_shape(&self) -> [usize; 4] {
        [self.batch, self.query_heads, self.queries_per_head, self.head_dim]
    }

    const fn key_tensor_shape(&self) -> [usize; 4] {
        [self.batch, self.key_value_heads, self.keys_per_head, self.head_dim]
    }
}

/// Strides of a tensor in elements: distances from a sequence, a head and a row to the next one.
/// The elements of a row are contiguous; a row of the tensor lse has one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionTensorStrides {
    /// Distance in elements from one sequence to the next.
    pub batch_stride_elements: u64,
    /// Distance in elements from a row to the same row of the next head.
    pub head_stride_elements: u64,
    /// Distance in elements from a row to the next row of the head.
    pub row_stride_elements: u64,
}

impl AttentionTensorStrides {
    /// Strides of a dense tensor `[b, h, s, d]` with `heads` heads, `rows` rows in a head, and
    /// `row` elements in a row.
    pub const fn dense_bhsd_strides(
        heads: usize,
        rows: usize,
        row: usize,
    ) -> AttentionTensorStrides {
        let (heads, rows, row) = (heads as u64, rows as u64, row as u64);
        Self {
            batch_stride_elements: heads * rows * row,
            head_stride_elements: rows * row,
            row_stride_elements: row,
        }
    }

    /// Strides of a dense tensor with axes `[b, h, s, d]` that lies in memory as `[b, s, h, d]`.
    pub const fn dense_bshd_strides(
        heads: usize,
        rows: usize,
        row: usize,
    ) -> AttentionTensorStrides {
        let (heads, rows, row) = (heads as u64, rows as u64, row as u64);
        Self {
            batch_stride_elements: rows * heads * row,
            head_stride_elements: row,
            row_stride_elements: heads * row,
        }
    }

    /// The strides of batch, head and row in the order of the attention kernels' argument struct
    /// `Strides`.
    pub(super) const fn batch_head_row_stride_argument(&self) -> [u64; 3] {
        [self.batch_stride_elements, self.head_stride_elements, self.row_stride_elements]
    }

    /// Returns whether the strides are those of a dense tensor `[b, h, s, d]` with the given
    /// extents.
    fn are_dense_bhsd(&self, [_, heads, rows, row]: [usize; 4]) -> bool {
        *self == Self::dense_bhsd_strides(heads, rows, row)
    }

    /// Checks that 16-byte copies can read the rows of a 16-bit tensor with these strides, and that
    /// its rows do not overlap.
    fn check_16_byte_rows_without_overlap(
        &self,
        tensor: &'static str,
        [batch, heads, rows, row]: [usize; 4],
    ) -> Result<(), UnsupportedAttention> {
        for (dimension, extent, stride) in [
            ("batch", batch, self.batch_stride_elements),
            ("head", heads, self.head_stride_elements),
            ("row", rows, self.row_stride_elements),
        ] {
            if extent > 1 && stride < row as u64 {
                return Err(UnsupportedAttention::OverlappingRows {
                    tensor_name: tensor,
                    axis_of_stride: dimension,
                    stride_elements: stride,
                    row_elements: row,
                });
            }
            let bytes = stride.saturating_mul(BYTES_OF_16_BIT_TENSOR_ELEMENT);
            let copied =
                bytes.is_multiple_of(TMA_ALIGNMENT_BYTES) && bytes < TENSOR_MAP_STRIDE_LIMIT_BYTES;
            if extent > 1 && row > 1 && !copied {
                return Err(UnsupportedAttention::UnalignedOrTooLargeStride {
                    tensor_name: tensor,
                    axis_of_stride: dimension,
                    stride_bytes: bytes,
                });
            }
        }
        Ok(())
    }
}

const BYTES_OF_16_BIT_TENSOR_ELEMENT: u64 = 2;
/// Limit of a stride in bytes that a CUDA tensor map can describe.
const TENSOR_MAP_STRIDE_LIMIT_BYTES: u64 = 1 << 40;

/// Distance in elements from one row to the next within a head, for each tensor whose kernels have
/// it as a macro.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowStridesOfQkvAndGradient {
    /// Memory strides of the attention queries, in elements.
    pub q_row_stride_elements: u64,
    /// Memory strides of the attention keys, in elements.
    pub k_row_stride_elements: u64,
    /// Memory strides of the attention values, in elements.
    pub v_row_stride_elements: u64,
    /// Memory strides of the gradient of the attention output, in elements.
    pub grad_out_row_stride_elements: u64,
}

/// Strides of all tensors of an attention forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionForwardLayout {
    /// Queries of the attention.
    pub q: AttentionTensorStrides,
    /// Keys of the attention.
    pub k: AttentionTensorStrides,
    /// Values of the attention.
    pub v: AttentionTensorStrides,
    /// Memory strides of the attention output, in elements.
    pub out: AttentionTensorStrides,
    /// Strides of the log-sum-exp: fp32, the natural logarithm of each query row's sum of
    /// exponentials.
    pub lse: AttentionTensorStrides,
}

impl AttentionForwardLayout {
    /// Layout with every tensor dense as `[b, h, s, d]` and lse as `[b, h, s]`.
    pub fn forward_layout_dense_bhsd(shape: &AttentionShape) -> Self {
        Self::layout_with_stride_function(shape, AttentionTensorStrides::dense_bhsd_strides)
    }

    /// Layout with every tensor dense as `[b, s, h, d]` and lse as `[b, h, s]`.
    pub fn forward_layout_dense_bshd(shape: &AttentionShape) -> Self {
        Self {
            lse: Self::forward_layout_dense_bhsd(shape).lse,
            ..Self::layout_with_stride_function(shape, AttentionTensorStrides::dense_bshd_strides)
        }
    }

    /// Returns the layout in which `strides(heads, rows, elements)` computes the strides of each
    /// tensor.
    fn layout_with_stride_function(
        shape: &AttentionShape,
        strides: fn(usize, usize, usize) -> AttentionTensorStrides,
    ) -> Self {
        let AttentionShape {
            query_heads: heads,
            key_value_heads: key_heads,
            queries_per_head: queries,
            keys_per_head: keys,
            head_dim,
            ..
        } = *shape;
        let like_queries = strides(heads, queries, head_dim);
        let like_keys = strides(key_heads, keys, head_dim);
        let lse = strides(heads, queries, 1);
        Self { q: like_queries, k: like_keys, v: like_keys, out: like_queries, lse }
    }

    pub(super) fn check_forward_shape_and_strides(
        &self,
        shape: &AttentionShape,
    ) -> Result<(), UnsupportedAttention> {
        shape.check_forward_kernels_exist()?;
        let (queries, keys) = (shape.query_tensor_shape(), shape.key_tensor_shape());
        self.q.check_16_byte_rows_without_overlap("q", queries)?;
        self.k.check_16_byte_rows_without_overlap("k", keys)?;
        self.v.check_16_byte_rows_without_overlap("v", keys)?;
        self.out.check_16_byte_rows_without_overlap("out", queries)?;
        self.lse.check_16_byte_rows_without_overlap("lse", shape_with_one_element_per_row(queries))
    }

    /// Returns the row strides of q, k, v and the output, or `None` if every tensor of the forward
    /// is dense `[b, h, s, d]`.
    pub(super) fn forward_row_strides_unless_dense(
        &self,
        shape: &AttentionShape,
    ) -> Option<RowStridesOfQkvAndGradient> {
        let (queries, keys) = (shape.query_tensor_shape(), shape.key_tensor_shape());
        let dense = self.q.are_dense_bhsd(queries)
            && self.k.are_dense_bhsd(keys)
            && self.v.are_dense_bhsd(keys)
            && self.out.are_dense_bhsd(queries)
            && self.lse.are_dense_bhsd(shape_with_one_element_per_row(queries));
        let rows = RowStridesOfQkvAndGradient {
            q_row_stride_elements: self.q.row_stride_elements,
            k_row_stride_elements: self.k.row_stride_elements,
            v_row_stride_elements: self.v.row_stride_elements,
            grad_out_row_stride_elements: self.out.row_stride_elements,
        };
        (!dense).then_some(rows)
    }
}

/// Strides of all tensors of an attention backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionBackwardLayout {
    /// Strides of the tensors of the attention forward, which the backward also reads.
    pub forward: AttentionForwardLayout,
    /// Gradient of the output.
    pub grad_out: AttentionTensorStrides,
    /// Memory strides of the gradient of the attention queries, in elements.
    pub grad_q: AttentionTensorStrides,
    /// Memory strides of the gradient of the attention keys, in elements.
    pub grad_k: AttentionTensorStrides,
    /// Memory strides of the gradient of the attention values, in elements.
    pub grad_v: AttentionTensorStrides,
}

impl AttentionBackwardLayout {
    /// Returns the layout in which each gradient has the strides of the tensor whose gradient it
    /// is.
    pub const fn gradients_like_tensors(forward: AttentionForwardLayout) -> Self {
        let AttentionForwardLayout { q, k, v, out, .. } = forward;
        Self { forward, grad_out: out, grad_q: q, grad_k: k, grad_v: v }
    }

    pub(super) fn check_backward_shape_and_strides(
        &self,
        shape: &AttentionShape,
    ) -> Result<(), UnsupportedAttention> {
        shape.check_backward_kernels_exist()?;
        self.forward.check_forward_shape_and_strides(shape)?;
        let (queries, keys) = (shape.query_tensor_shape(), shape.key_tensor_shape());
        self.grad_out.check_16_byte_rows_without_overlap("grad_out", queries)?;
        self.grad_q.check_16_byte_rows_without_overlap("grad_q", queries)?;
        self.grad_k.check_16_byte_rows_without_overlap("grad_k", keys)?;
        self.grad_v.check_16_byte_rows_without_overlap("grad_v", keys)
    }

    /// Returns the row strides of q, k, v and grad_out, or `None` if every tensor of the backward
    /// is dense `[b, h, s, d]`.
    pub(super) fn backward_row_strides_unless_dense(
        &self,
        shape: &AttentionShape,
    ) -> Option<RowStridesOfQkvAndGradient> {
        let (queries, keys) = (shape.query_tensor_shape(), shape.key_tensor_shape());
        let dense = self.forward.forward_row_strides_unless_dense(shape).is_none()
            && self.grad_out.are_dense_bhsd(queries)
            && self.grad_q.are_dense_bhsd(queries)
            && self.grad_k.are_dense_bhsd(keys)
            && self.grad_v.are_dense_bhsd(keys);
        let AttentionForwardLayout { q, k, v, .. } = self.forward;
        let rows = RowStridesOfQkvAndGradient {
            q_row_stride_elements: q.row_stride_elements,
            k_row_stride_elements: k.row_stride_elements,
            v_row_stride_elements: v.row_stride_elements,
            grad_out_row_stride_elements: self.grad_out.row_stride_elements,
        };
        (!dense).then_some(rows)
    }
}

/// Returns the shape of a tensor that has one element for each row, such as lse.
const fn shape_with_one_element_per_row([batch, heads, rows, _]: [usize; 4]) -> [usize; 4] {
    [batch, heads, rows, 1]
}

/// Checks that the device address of each tensor is a multiple of 16 bytes, as 16-byte copies
/// require.
pub(super) fn check_addresses_for_16_byte_copies(
    tensors: &[(&'static str, u64)],
) -> Result<(), UnsupportedAttention> {
    let unaligned = |(_, address): &&(&str, u64)| !address.is_multiple_of(TMA_ALIGNMENT_BYTES);
    match tensors.iter().find(unaligned) {
        Some(&(tensor, address)) => {
            Err(UnsupportedAttention::UnalignedTensorAddress { tensor, address })
        }
        None => Ok(()),
    }
}

/// Reason why no attention kernel of kernelgate computes a problem. The harness skips a case that
/// an implementation declines, and reports this reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedAttention {
    /// An extent of the attention shape is zero or does not fit into 32 bits.
    #[error(
        "{batch} sequences of {heads} heads of {queries} queries and {key_heads} heads of {keys} \
         keys: each number, and the heads of all sequences, is 1 to 2^31 - 1"
    )]
    ExtentZeroOrBeyond32Bits {
        batch: usize,
        heads: usize,
        key_heads: usize,
        queries: usize,
        keys: usize,
    },
    /// The dtype of the attention tensors is neither bf16 nor f16.
    #[error("dtype {dtype}: computes bf16 and f16 only")]
    UnsupportedDtype { dtype: &'static str },
    /// The head dimension of the attention shape is neither 64 nor 128.
    #[error("head dimension {head_dim}: computes 64 and 128 only; pad smaller ones with zeros")]
    UnsupportedHeadDim { head_dim: usize },
    /// The number of key heads does not divide the number of query heads.
    #[error("{heads} heads of queries are no multiple of {key_heads} heads of keys")]
    HeadsNotMultipleOfKeyHeads { heads: usize, key_heads: usize },
    /// With a causal mask and fewer keys than queries, some query would see no key.
    #[error("a causal mask needs a key for each query: {keys} keys, {queries} queries")]
    CausalWithFewerKeysThanQueries { keys: usize, queries: usize },
    /// Gradients were requested for a problem whose numbers of keys and queries differ.
    #[error("gradients need as many keys as queries: {keys} keys, {queries} queries")]
    GradientsNeedEqualKeysAndQueries { keys: usize, queries: usize },
    /// Gradients were requested for heads that share keys, from kernels that do not support shared
    /// keys.
    #[error(
        "the backward of flash_mma needs as many heads of keys as of queries: {key_heads} and \
         {heads}"
    )]
    NoGradientsOfSharedKeyHeads { heads: usize, key_heads: usize },
    /// Gradient sums in a fixed order were requested from kernels that do not support this order.
    #[error("flash_mma adds to the gradient of the queries in any order")]
    NoFixedGradientSumOrder,
    /// The device address of a tensor is not aligned for 16-byte copies.
    #[error("{tensor}: address {address:#x} is no multiple of 16")]
    UnalignedTensorAddress { tensor: &'static str, address: u64 },
    /// A stride of a tensor is not a multiple of 16 bytes, or too large for a tensor map.
    #[error(
        "{tensor_name}: {axis_of_stride} stride of {stride_bytes} bytes is no multiple of 16 below 2^40"
    )]
    UnalignedOrTooLargeStride {
        tensor_name: &'static str,
        /// Axis of the rejected tensor stride, one of `batch`, `head` and `row`.
        axis_of_stride: &'static str,
        stride_bytes: u64,
    },
    /// A stride of a tensor is shorter than a row, so that rows overlap.
    #[error(
        "{tensor_name}: rows of {row_elements} elements overlap: {axis_of_stride} stride of {stride_elements} elements"
    )]
    OverlappingRows {
        tensor_name: &'static str,
        /// `batch`, `head` or `row`.
        axis_of_stride: &'static str,
        stride_elements: u64,
        row_elements: usize,
    },
}

impl From<UnsupportedAttention> for BackendError {
    fn from(reason: UnsupportedAttention) -> Self {
        Self::Unsupported(reason.to_string())
    }
}

#[cfg(test)]
mod tests;
