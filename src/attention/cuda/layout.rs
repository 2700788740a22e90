//! Shapes and memory layouts of the caller's tensors, and the reasons for which kernels decline
//! them.

use crate::attention::definition::Attention;
use kernelgate::backend::BackendError;
use kernelgate::workload::Dtype;
use kernelgate_cuda::COPY_ALIGNMENT;

/// Sizes, mask and dtype of one attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries of a sequence.
    pub heads: usize,
    /// Number of key-value heads of a sequence, which must divide `heads`.
    pub key_heads: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head.
    pub keys: usize,
    /// Elements of a row: 64 or 128; other head dimensions are declined. To compute a smaller head
    /// dimension, pad the rows of q, k and v with zeros and multiply q by `sqrt(padded /
    /// head_dim)`, and the gradient of q by the same factor: scores are divided by the root of the
    /// padded dimension.
    pub head_dim: usize,
    /// Whether the last query sees all keys and each earlier query one key less than the next.
    pub causal: bool,
    /// Dtype of every tensor except lse: bf16 or f16.
    pub dtype: Dtype,
}

impl From<&Attention> for AttentionShape {
    fn from(attention: &Attention) -> Self {
        let Attention { b, h, h_kv, s, keys, d, causal, dtype, .. } = *attention;
        let (batch, heads, key_heads, queries, head_dim) = (b, h, h_kv, s, d);
        Self { batch, heads, key_heads, queries, keys, head_dim, causal, dtype }
    }
}

impl AttentionShape {
    /// Checks whether there are kernels for the shape.
    pub fn check(&self) -> Result<(), UnsupportedAttention> {
        let Self { batch, heads, key_heads, queries, keys, head_dim, causal, dtype } = *self;
        let extents = [batch * heads, key_heads, queries, keys];
        if extents.iter().any(|&extent| extent == 0 || i32::try_from(extent).is_err()) {
            return Err(UnsupportedAttention::Extents { batch, heads, key_heads, queries, keys });
        }
        if !matches!(dtype, Dtype::Bf16 | Dtype::F16) {
            return Err(UnsupportedAttention::Dtype { dtype: dtype.name() });
        }
        if ![64, 128].contains(&head_dim) {
            return Err(UnsupportedAttention::HeadDim { head_dim });
        }
        if !heads.is_multiple_of(key_heads) {
            return Err(UnsupportedAttention::Heads { heads, key_heads });
        }
        if causal && keys < queries {
            return Err(UnsupportedAttention::CausalKeys { keys, queries });
        }
        Ok(())
    }

    /// Checks whether there are kernels for the gradients of the shape.
    ///
    /// # Errors
    /// The first unmet requirement: those of [`Self::check`], then unequal numbers of keys and
    /// queries.
    pub fn check_gradients_supported(&self) -> Result<(), UnsupportedAttention> {
        self.check()?;
        let Self { keys, queries, .. } = *self;
        if keys == queries {
            Ok(())
        } else {
            Err(UnsupportedAttention::CrossGradients { keys, queries })
        }
    }

    const fn query_like_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.head_dim]
    }

    const fn key_like_shape(&self) -> [usize; 4] {
        [self.batch, self.key_heads, self.keys, self.head_dim]
    }
}

/// Distances in elements from one sequence, head and row of a tensor to the next one. Elements of a
/// row are contiguous; lse has one element in each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// Distance in elements from one sequence to the next.
    pub batch: u64,
    /// Distance in elements from a row to the same row of the next head.
    pub head: u64,
    /// Distance in elements from a row to the next row of the head.
    pub row: u64,
}

impl Strides {
    /// Strides of a dense tensor `[b, h, s, d]`, from its numbers of heads, rows of a head and
    /// elements of a row.
    pub const fn dense_bhsd(heads: usize, rows: usize, row: usize) -> Strides {
        let (heads, rows, row) = (heads as u64, rows as u64, row as u64);
        Self { batch: heads * rows * row, head: rows * row, row }
    }

    /// Strides of a dense tensor `[b, s, h, d]`.
    pub const fn dense_bshd(heads: usize, rows: usize, row: usize) -> Strides {
        let (heads, rows, row) = (heads as u64, rows as u64, row as u64);
        Self { batch: rows * heads * row, head: row, row: heads * row }
    }

    /// Strides in the kernels' argument format.
    pub(super) const fn stride_words(&self) -> [u64; 3] {
        [self.batch, self.head, self.row]
    }

    /// Whether the strides are those of a dense tensor `[b, h, s, d]` of that shape.
    fn is_dense(&self, [_, heads, rows, row]: [usize; 4]) -> bool {
        *self == Self::dense_bhsd(heads, rows, row)
    }

    /// Checks that 16-byte copies can read the rows of a tensor of 16-bit elements, and that rows
    /// do not overlap.
    fn check(
        &self,
        tensor: &'static str,
        [batch, heads, rows, row]: [usize; 4],
    ) -> Result<(), UnsupportedAttention> {
        for (dimension, extent, stride) in
            [("batch", batch, self.batch), ("head", heads, self.head), ("row", rows, self.row)]
        {
            if extent > 1 && stride < row as u64 {
                return Err(UnsupportedAttention::Overlap { tensor, dimension, stride, row });
            }
            let bytes = stride.saturating_mul(ELEMENT_BYTES);
            let copied = bytes.is_multiple_of(COPY_ALIGNMENT) && bytes < MAX_TENSOR_MAP_STRIDE;
            if extent > 1 && row > 1 && !copied {
                return Err(UnsupportedAttention::Stride { tensor, dimension, bytes });
            }
        }
        Ok(())
    }
}

const ELEMENT_BYTES: u64 = 2;
/// Maximum stride in bytes of a tensor map.
const MAX_TENSOR_MAP_STRIDE: u64 = 1 << 40;

/// Row strides in elements of each tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowStrides {
    /// Queries.
    pub q: u64,
    /// Keys.
    pub k: u64,
    /// Values.
    pub v: u64,
    /// Gradient of the output.
    pub grad_out: u64,
}

/// Memory layouts of the tensors of an attention forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardLayout {
    /// Queries.
    pub q: Strides,
    /// Keys.
    pub k: Strides,
    /// Values.
    pub v: Strides,
    /// Output.
    pub out: Strides,
    /// Layout of the natural logarithm of each row's sum of exponentials, fp32.
    pub lse: Strides,
}

impl ForwardLayout {
    /// Layout with every tensor dense as `[b, h, s, d]` and lse as `[b, h, s]`.
    pub fn strides_of_bhsd(shape: &AttentionShape) -> Self {
        Self::layout_from_axis_order(shape, Strides::dense_bhsd)
    }

    /// Layout with every tensor dense as `[b, s, h, d]` and lse as `[b, h, s]`.
    pub fn strides_of_bshd(shape: &AttentionShape) -> Self {
        Self {
            lse: Self::strides_of_bhsd(shape).lse,
            ..Self::layout_from_axis_order(shape, Strides::dense_bshd)
        }
    }

    /// Builds a layout by applying `strides` to the heads, rows and elements of each tensor.
    fn layout_from_axis_order(
        shape: &AttentionShape,
        strides: fn(usize, usize, usize) -> Strides,
    ) -> Self {
        let AttentionShape { heads, key_heads, queries, keys, head_dim, .. } = *shape;
        let like_queries = strides(heads, queries, head_dim);
        let like_keys = strides(key_heads, keys, head_dim);
        let lse = strides(heads, queries, 1);
        Self { q: like_queries, k: like_keys, v: like_keys, out: like_queries, lse }
    }

    pub(super) fn check(&self, shape: &AttentionShape) -> Result<(), UnsupportedAttention> {
        shape.check()?;
        let (queries, keys) = (shape.query_like_shape(), shape.key_like_shape());
        self.q.check("q", queries)?;
        self.k.check("k", keys)?;
        self.v.check("v", keys)?;
        self.out.check("out", queries)?;
        self.lse.check("lse", one_element_per_row(queries))
    }

    /// Row strides of the tensors; `None` if every tensor is dense `[b, h, s, d]`.
    pub(super) fn rows(&self, shape: &AttentionShape) -> Option<RowStrides> {
        let (queries, keys) = (shape.query_like_shape(), shape.key_like_shape());
        let dense = self.q.is_dense(queries)
            && self.k.is_dense(keys)
            && self.v.is_dense(keys)
            && self.out.is_dense(queries)
            && self.lse.is_dense(one_element_per_row(queries));
        let rows =
            RowStrides { q: self.q.row, k: self.k.row, v: self.v.row, grad_out: self.out.row };
        (!dense).then_some(rows)
    }
}

/// Memory layouts of the tensors of an attention backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardLayout {
    /// Layouts of the tensors of the forward pass.
    pub forward: ForwardLayout,
    /// Gradient of the output.
    pub grad_out: Strides,
    /// Gradient of the queries.
    pub grad_q: Strides,
    /// Gradient of the keys.
    pub grad_k: Strides,
    /// Gradient of the values.
    pub grad_v: Strides,
}

impl BackwardLayout {
    /// Layout in which each gradient has the strides of its tensor.
    pub const fn gradients_like_tensors(forward: ForwardLayout) -> Self {
        let ForwardLayout { q, k, v, out, .. } = forward;
        Self { forward, grad_out: out, grad_q: q, grad_k: k, grad_v: v }
    }

    pub(super) fn check(&self, shape: &AttentionShape) -> Result<(), UnsupportedAttention> {
        shape.check_gradients_supported()?;
        self.forward.check(shape)?;
        let (queries, keys) = (shape.query_like_shape(), shape.key_like_shape());
        self.grad_out.check("grad_out", queries)?;
        self.grad_q.check("grad_q", queries)?;
        self.grad_k.check("grad_k", keys)?;
        self.grad_v.check("grad_v", keys)
    }

    /// Row strides of the tensors; `None` if every tensor is dense `[b, h, s, d]`.
    pub(super) fn rows(&self, shape: &AttentionShape) -> Option<RowStrides> {
        let (queries, keys) = (shape.query_like_shape(), shape.key_like_shape());
        let dense = self.forward.rows(shape).is_none()
            && self.grad_out.is_dense(queries)
            && self.grad_q.is_dense(queries)
            && self.grad_k.is_dense(keys)
            && self.grad_v.is_dense(keys);
        let ForwardLayout { q, k, v, .. } = self.forward;
        let rows = RowStrides { q: q.row, k: k.row, v: v.row, grad_out: self.grad_out.row };
        (!dense).then_some(rows)
    }
}

/// The shape of a tensor with one element in each row.
const fn one_element_per_row([batch, heads, rows, _]: [usize; 4]) -> [usize; 4] {
    [batch, heads, rows, 1]
}

/// Checks that 16-byte copies can begin at the addresses of the tensors.
pub(super) fn check_addresses(tensors: &[(&'static str, u64)]) -> Result<(), UnsupportedAttention> {
    let unaligned = |(_, address): &&(&str, u64)| !address.is_multiple_of(COPY_ALIGNMENT);
    match tensors.iter().find(unaligned) {
        Some(&(tensor, address)) => Err(UnsupportedAttention::Address { tensor, address }),
        None => Ok(()),
    }
}

/// Reason why no kernel of this module computes a problem. A row that declines a problem is skipped
/// with this reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedAttention {
    /// An extent is zero or does not fit into 32 bits.
    #[error(
        "{batch} sequences of {heads} heads of {queries} queries and {key_heads} heads of {keys} \
         keys: each number, and the heads of all sequences, is 1 to 2^31 - 1"
    )]
    Extents { batch: usize, heads: usize, key_heads: usize, queries: usize, keys: usize },
    /// The dtype of the tensors is neither bf16 nor f16.
    #[error("dtype {dtype}: computes bf16 and f16 only")]
    Dtype { dtype: &'static str },
    /// The head dimension is neither 64 nor 128.
    #[error("head dimension {head_dim}: computes 64 and 128 only; pad smaller ones with zeros")]
    HeadDim { head_dim: usize },
    /// The number of key heads does not divide the number of query heads.
    #[error("{heads} heads of queries are no multiple of {key_heads} heads of keys")]
    Heads { heads: usize, key_heads: usize },
    /// With a causal mask, some query would see no key.
    #[error("a causal mask needs a key for each query: {keys} keys, {queries} queries")]
    CausalKeys { keys: usize, queries: usize },
    /// Gradients were asked for a problem with different numbers of keys and queries.
    #[error("gradients need as many keys as queries: {keys} keys, {queries} queries")]
    CrossGradients { keys: usize, queries: usize },
    /// Gradients of grouped heads were asked from kernels that do not support grouping.
    #[error(
        "the backward of flash_mma needs as many heads of keys as of queries: {key_heads} and \
         {heads}"
    )]
    GroupedGradients { heads: usize, key_heads: usize },
    /// Sums in a fixed order were asked from kernels that do not support it.
    #[error("flash_mma adds to the gradient of the queries in any order")]
    FixedOrder,
    /// The address of a tensor is not aligned for 16-byte copies.
    #[error("{tensor}: address {address:#x} is no multiple of 16")]
    Address { tensor: &'static str, address: u64 },
    /// A stride of a tensor is not usable by 16-byte copies.
    #[error("{tensor}: {dimension} stride of {bytes} bytes is no multiple of 16 below 2^40")]
    Stride {
        tensor: &'static str,
        /// `batch`, `head` or `row`.
        dimension: &'static str,
        bytes: u64,
    },
    /// A stride of a tensor is shorter than a row.
    #[error("{tensor}: rows of {row} elements overlap: {dimension} stride of {stride} elements")]
    Overlap {
        tensor: &'static str,
        /// `batch`, `head` or `row`.
        dimension: &'static str,
        stride: u64,
        row: usize,
    },
}

impl From<UnsupportedAttention> for BackendError {
    fn from(reason: UnsupportedAttention) -> Self {
        Self::Unsupported(reason.to_string())
    }
}

#[cfg(test)]
mod tests;
