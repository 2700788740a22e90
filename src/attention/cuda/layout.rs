//! Shapes and memory layouts of tensors that are the caller's, and the reasons to decline them.

use crate::attention::definition::Attention;
use kernelgate::backend::BackendError;
use kernelgate::workload::Dtype;
use kernelgate_cuda::COPY_ALIGNMENT;

/// Sizes, mask and dtype of one attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries of a sequence.
    pub heads: usize,
    /// Heads of keys and values of a sequence, of which `heads` is a multiple.
    pub key_heads: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head.
    pub keys: usize,
    /// Elements of a row: 64 or 128. Other dimensions are declined. To compute a smaller one, pad the
    /// rows of q, k and v with zeros and multiply q by `sqrt(padded / head_dim)`, and the gradient of q
    /// by the same factor: scores are divided by the root of the padded dimension.
    pub head_dim: usize,
    /// Whether the last query sees all keys, and each before it one less than the next.
    pub causal: bool,
    /// Dtype of every tensor but lse: bf16 or f16.
    pub dtype: Dtype,
}

impl From<&Attention> for Shape {
    fn from(attention: &Attention) -> Self {
        let Attention { b, h, h_kv, s, keys, d, causal, dtype, .. } = *attention;
        let (batch, heads, key_heads, queries, head_dim) = (b, h, h_kv, s, d);
        Self { batch, heads, key_heads, queries, keys, head_dim, causal, dtype }
    }
}

impl Shape {
    /// Whether there are kernels for the shape.
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

    /// Whether there are kernels for the gradients of the shape.
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

/// Elements from a sequence, a head and a row of a tensor to the next one. Elements of a row are
/// contiguous; lse has one element a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// Distance to the next sequence.
    pub batch: u64,
    /// Distance to the same row of the next head.
    pub head: u64,
    /// Distance to the next row of the head.
    pub row: u64,
}

impl Strides {
    /// Strides of a dense tensor `[b, h, s, d]` with these numbers of heads, rows of a head and
    /// elements of a row.
    pub const fn strides_of_bhsd(heads: usize, rows: usize, row: usize) -> Self {
        let (heads, rows, row) = (heads as u64, rows as u64, row as u64);
        Self { batch: heads * rows * row, head: rows * row, row }
    }

    /// A dense tensor `[b, s, h, d]`.
    pub const fn strides_of_bshd(heads: usize, rows: usize, row: usize) -> Self {
        let (heads, rows, row) = (heads as u64, rows as u64, row as u64);
        Self { batch: rows * heads * row, head: row, row: heads * row }
    }

    /// The strides in the kernels' format.
    pub(super) const fn stride_words(&self) -> [u64; 3] {
        [self.batch, self.head, self.row]
    }

    /// Whether the strides are those of a tensor `[b, h, s, d]` of that shape.
    fn is_dense(&self, [_, heads, rows, row]: [usize; 4]) -> bool {
        *self == Self::strides_of_bhsd(heads, rows, row)
    }

    /// Whether copies of 16 bytes find the rows of a tensor of 16-bit elements, each after the end of
    /// the one before.
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
/// Tensor maps have smaller strides.
const MAX_TENSOR_MAP_STRIDE: u64 = 1 << 40;

/// Elements from a row to the next one, by tensor.
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

/// Layouts of the forward's tensors.
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
    /// Natural logarithms of the rows' sums of exponentials, fp32.
    pub lse: Strides,
}

impl ForwardLayout {
    /// Every tensor dense as `[b, h, s, d]`, lse as `[b, h, s]`.
    pub fn strides_of_bhsd(shape: &Shape) -> Self {
        Self::layout_from_axis_order(shape, Strides::strides_of_bhsd)
    }

    /// Every tensor dense as `[b, s, h, d]`, lse as `[b, h, s]`.
    pub fn strides_of_bshd(shape: &Shape) -> Self {
        Self {
            lse: Self::strides_of_bhsd(shape).lse,
            ..Self::layout_from_axis_order(shape, Strides::strides_of_bshd)
        }
    }

    /// Applies `strides` to the heads, rows and elements of each tensor.
    fn layout_from_axis_order(shape: &Shape, strides: fn(usize, usize, usize) -> Strides) -> Self {
        let Shape { heads, key_heads, queries, keys, head_dim, .. } = *shape;
        let like_queries = strides(heads, queries, head_dim);
        let like_keys = strides(key_heads, keys, head_dim);
        let lse = strides(heads, queries, 1);
        Self { q: like_queries, k: like_keys, v: like_keys, out: like_queries, lse }
    }

    pub(super) fn check(&self, shape: &Shape) -> Result<(), UnsupportedAttention> {
        shape.check()?;
        let (queries, keys) = (shape.query_like_shape(), shape.key_like_shape());
        self.q.check("q", queries)?;
        self.k.check("k", keys)?;
        self.v.check("v", keys)?;
        self.out.check("out", queries)?;
        self.lse.check("lse", one_element_per_row(queries))
    }

    /// `None` where every tensor is dense `[b, h, s, d]`.
    pub(super) fn rows(&self, shape: &Shape) -> Option<RowStrides> {
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

/// Layouts of the backward's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardLayout {
    /// Tensors of the forward.
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
    /// Each gradient as its tensor.
    pub const fn gradients_like_tensors(forward: ForwardLayout) -> Self {
        let ForwardLayout { q, k, v, out, .. } = forward;
        Self { forward, grad_out: out, grad_q: q, grad_k: k, grad_v: v }
    }

    pub(super) fn check(&self, shape: &Shape) -> Result<(), UnsupportedAttention> {
        shape.check_gradients_supported()?;
        self.forward.check(shape)?;
        let (queries, keys) = (shape.query_like_shape(), shape.key_like_shape());
        self.grad_out.check("grad_out", queries)?;
        self.grad_q.check("grad_q", queries)?;
        self.grad_k.check("grad_k", keys)?;
        self.grad_v.check("grad_v", keys)
    }

    /// `None` where every tensor is dense `[b, h, s, d]`.
    pub(super) fn rows(&self, shape: &Shape) -> Option<RowStrides> {
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

/// A shape of one element a row.
const fn one_element_per_row([batch, heads, rows, _]: [usize; 4]) -> [usize; 4] {
    [batch, heads, rows, 1]
}

/// Whether copies of 16 bytes can begin at the tensors.
pub(super) fn check_addresses(tensors: &[(&'static str, u64)]) -> Result<(), UnsupportedAttention> {
    let unaligned = |(_, address): &&(&str, u64)| !address.is_multiple_of(COPY_ALIGNMENT);
    match tensors.iter().find(unaligned) {
        Some(&(tensor, address)) => Err(UnsupportedAttention::Address { tensor, address }),
        None => Ok(()),
    }
}

/// Reason why no kernel of this module computes a problem. A row that gets one of these is skipped
/// with the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedAttention {
    /// An extent is zero or does not fit 32 bits.
    #[error(
        "{batch} sequences of {heads} heads of {queries} queries and {key_heads} heads of {keys} \
         keys: each number, and the heads of all sequences, is 1 to 2^31 - 1"
    )]
    Extents {
        /// Sequences.
        batch: usize,
        /// Heads of queries.
        heads: usize,
        /// Heads of keys.
        key_heads: usize,
        /// Queries of a head.
        queries: usize,
        /// Keys of a head.
        keys: usize,
    },
    /// The dtype is neither bf16 nor f16.
    #[error("dtype {dtype}: computes bf16 and f16 only")]
    Dtype {
        /// Name of the dtype.
        dtype: &'static str,
    },
    /// The head dimension is neither 64 nor 128.
    #[error("head dimension {head_dim}: computes 64 and 128 only; pad smaller ones with zeros")]
    HeadDim {
        /// Elements of a row.
        head_dim: usize,
    },
    /// Heads of queries cannot be shared out.
    #[error("{heads} heads of queries are no multiple of {key_heads} heads of keys")]
    Heads {
        /// Heads of queries.
        heads: usize,
        /// Heads of keys.
        key_heads: usize,
    },
    /// A causal query without a key.
    #[error("a causal mask needs a key for each query: {keys} keys, {queries} queries")]
    CausalKeys {
        /// Keys of a head.
        keys: usize,
        /// Queries of a head.
        queries: usize,
    },
    /// Gradients where keys and queries differ in number.
    #[error("gradients need as many keys as queries: {keys} keys, {queries} queries")]
    CrossGradients {
        /// Keys of a head.
        keys: usize,
        /// Queries of a head.
        queries: usize,
    },
    /// Gradients of grouped heads by kernels that have none.
    #[error(
        "the backward of flash_mma needs as many heads of keys as of queries: {key_heads} and \
         {heads}"
    )]
    GroupedGradients {
        /// Heads of queries.
        heads: usize,
        /// Heads of keys.
        key_heads: usize,
    },
    /// Sums in a fixed order by kernels that have none.
    #[error("flash_mma adds to the gradient of the queries in any order")]
    FixedOrder,
    /// A tensor that copies of 16 bytes cannot begin at.
    #[error("{tensor}: address {address:#x} is no multiple of 16")]
    Address {
        /// The tensor.
        tensor: &'static str,
        /// Address of the tensor.
        address: u64,
    },
    /// A stride that copies of 16 bytes cannot follow.
    #[error("{tensor}: {dimension} stride of {bytes} bytes is no multiple of 16 below 2^40")]
    Stride {
        /// The tensor.
        tensor: &'static str,
        /// `batch`, `head` or `row`.
        dimension: &'static str,
        /// The stride.
        bytes: u64,
    },
    /// A stride shorter than a row.
    #[error("{tensor}: rows of {row} elements overlap: {dimension} stride of {stride} elements")]
    Overlap {
        /// The tensor.
        tensor: &'static str,
        /// `batch`, `head` or `row`.
        dimension: &'static str,
        /// Elements of the stride.
        stride: u64,
        /// Elements of a row.
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
