//! Kernel builds, sizes and limits that all GPU implementations of attention share.

use std::sync::Arc;

use super::layout::{AttentionShape, AttentionTensorStrides, RowStridesOfQkvAndGradient};
use crate::attention::components;
use crate::attention::definition::AttentionParameters;
use crate::kernel_files::source_of_kernel_file;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{self, DeviceInput, DeviceOutput};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{
    Device, DeviceBuffer, KernelArgument, KernelSpec, TensorMapElement, TensorWithTmaBoxes,
};

/// Bytes of a stored query, key or value element in every dtype but fp8.
pub const BYTES_OF_16_BIT_ELEMENT: u64 = 2;

/// Maximum bytes of the fp32 scores of an implementation that keeps them in memory: with more, a
/// launch takes seconds and shows nothing new.
const MAX_BYTES_OF_STORED_SCORES: u64 = 2 << 30;

/// Extents, mask and dtype of an attention call, which determine kernel builds, grids and memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionExtents {
    /// Number of sequences.
    pub batch: usize,
    /// Number of query heads of all sequences.
    pub total_query_heads: usize,
    /// Number of query heads that read the same keys.
    pub query_heads_per_key_head: usize,
    /// Number of queries of each query head.
    pub queries_per_head: usize,
    /// Number of keys of each key head.
    pub keys_per_head: usize,
    /// Number of elements of each query or key vector of a head: 64 or 128.
    pub head_dim: usize,
    /// Whether the mask is causal: the last query sees all keys, and each earlier query one key
    /// less than the next.
    pub causal: bool,
    /// Dtype of inputs and outputs; the output of fp8 inputs is bf16.
    pub dtype: Dtype,
    /// Row strides of q, k, v and the output gradient; `None` if every tensor is dense `[b, h, s,
    /// d]`.
    pub row_strides: Option<RowStridesOfQkvAndGradient>,
}

impl From<&AttentionParameters> for AttentionExtents {
    fn from(attention: &AttentionParameters) -> Self {
        Self::extents_of_attention_shape(&AttentionShape::from(attention), None)
    }
}

impl From<&components::AttentionComponentShape> for AttentionExtents {
    fn from(shape: &components::AttentionComponentShape) -> Self {
        let components::AttentionComponentShape {
            batch: b,
            heads: h,
            seq_len: s,
            head_dim: d,
            dtype,
        } = *shape;
        // The softmax step has no head dimension; d is then 64, because its kernel is built
        // together with kernels that have one.
        Self { head_dim: d.max(64), ..Self::single_sequence_self_attention(b * h, s, dtype) }
    }
}

/// Declares an attention kernel with the macros of `kernels/attention/shape.cuh` and with a build
/// for each combination of their values.
pub const fn attention_kernel_spec_with_build_per_shape(
    file: &'static str,
    symbol: &'static str,
    threads: usize,
    blocks: fn(&AttentionExtents) -> [usize; 3],
) -> KernelSpec<AttentionExtents> {
    KernelSpec {
        macro_definitions: attention_shape_defines,
        listed_build_parameters: dense_attention_build_extents,
        ..KernelSpec::new(source_of_kernel_file(file), symbol, threads, blocks)
    }
}

/// Returns the defines for `kernels/attention/shape.cuh`: element type, head dimension and causal
/// mask.
pub fn attention_shape_defines(extents: &AttentionExtents) -> Vec<String> {
    vec![
        element_type_define(extents),
        format!("HEAD_DIM={}", extents.head_dim),
        format!("CAUSAL={}", u8::from(extents.causal)),
    ]
}

/// Returns the define that selects the 16-bit element type of an attention kernel.
pub fn element_type_define(extents: &AttentionExtents) -> String {
    if extents.dtype == Dtype::F16 { "DTYPE=F16" } else { "DTYPE=Bf16" }.to_owned()
}

/// Lists the extents for which each attention kernel is built: both 16-bit dtypes, both head
/// dimensions, with and without causal mask.
fn dense_attention_build_extents() -> Vec<AttentionExtents> {
    let mut variants = Vec::new();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            variants.push(AttentionExtents {
                head_dim: d,
                causal,
                ..AttentionExtents::single_sequence_self_attention(1, 1, dtype)
            });
        }
    }
    variants
}

/// Returns [`attention_shape_defines`] and, if the tensors are not dense, the row strides that the
/// kernel's inner loops read.
pub fn attention_defines_with_row_strides(
    extents: &AttentionExtents,
    rows: fn(&RowStridesOfQkvAndGradient) -> [(&'static str, u64); 2],
) -> Vec<String> {
    let mut all = attention_shape_defines(extents);
    if let Some(strides) = &extents.row_strides {
        all.push("STRIDED=1".to_owned());
        all.extend(rows(strides).map(|(name, stride)| format!("{name}={stride}")));
    }
    all
}

/// Lists the extents of every dense build of an attention kernel, and of one build with the row
/// strides of a tensor `[b, s, h, d]` with 16 heads.
pub fn dense_and_one_strided_build_extents() -> Vec<AttentionExtents> {
    let row = 16 * 128;
    let rows = Some(RowStridesOfQkvAndGradient {
        q_row_stride_elements: row,
        k_row_stride_elements: row,
        v_row_stride_elements: row,
        grad_out_row_stride_elements: row,
    });
    let strided = AttentionExtents {
        head_dim: 128,
        causal: true,
        row_strides: rows,
        ..AttentionExtents::single_sequence_self_attention(16, 1, Dtype::Bf16)
    };
    dense_attention_build_extents().into_iter().chain([strided]).collect()
}

impl AttentionExtents {
    /// Returns the extents of a shape, with the row strides `rows` unless every tensor is dense
    /// `[b, h, s, d]`.
    pub fn extents_of_attention_shape(
        shape: &AttentionShape,
        rows: Option<RowStridesOfQkvAndGradient>,
    ) -> Self {
        let AttentionShape {
            batch,
            query_heads: heads,
            key_value_heads: key_heads,
            queries_per_head,
            keys_per_head,
            head_dim,
            causal,
            dtype,
        } = *shape;
        Self {
            batch,
            total_query_heads: batch * heads,
            query_heads_per_key_head: heads / key_heads,
            queries_per_head,
            keys_per_head,
            head_dim,
            causal,
            dtype,
            row_strides: rows,
        }
    }

    /// Extents of self-attention in one sequence: heads with 64 elements, as many keys as queries,
    /// no mask.
    pub const fn single_sequence_self_attention(heads: usize, s: usize, dtype: Dtype) -> Self {
        Self {
            batch: 1,
            total_query_heads: heads,
            query_heads_per_key_head: 1,
            queries_per_head: s,
            keys_per_head: s,
            head_dim: 64,
            causal: false,
            dtype,
            row_strides: None,
        }
    }

    /// Number of query heads in one sequence.
    pub const fn query_heads_per_sequence(&self) -> usize {
        self.total_query_heads / self.batch
    }

    /// Number of key-value heads in one sequence.
    pub const fn key_heads_per_sequence(&self) -> usize {
        self.key_heads_of_all_sequences() / self.batch
    }

    /// Bytes of the query tensor, and of any other 16-bit tensor of its shape.
    pub const fn query_tensor_bytes(&self) -> u64 {
        self.queries_of_all_heads() * self.head_dim as u64 * BYTES_OF_16_BIT_ELEMENT
    }

    /// Number of key-value heads of all sequences.
    pub const fn key_heads_of_all_sequences(&self) -> usize {
        self.total_query_heads / self.query_heads_per_key_head
    }

    /// Bytes of the key tensor, and equally of the value tensor.
    pub const fn key_tensor_bytes(&self) -> u64 {
        (self.key_heads_of_all_sequences() * self.keys_per_head) as u64
            * self.head_dim as u64
            * BYTES_OF_16_BIT_ELEMENT
    }

    /// Number of queries of all heads of all sequences.
    pub const fn queries_of_all_heads(&self) -> u64 {
        (self.total_query_heads * self.queries_per_head) as u64
    }

    /// Number of query-key pairs of all heads, including the pairs that the mask hides.
    pub const fn query_key_pairs_of_all_heads(&self) -> u64 {
        self.queries_of_all_heads() * self.keys_per_head as u64
    }

    /// Checks whether attention kernels support these extents: a 16-bit dtype, sizes within 32
    /// bits, grids within the limits.
    pub fn check_dtype_size_and_grid_support(
        &self,
        kernels: &[KernelSpec<Self>],
    ) -> Result<(), String> {
        if !matches!(self.dtype, Dtype::Bf16 | Dtype::F16) {
            return Err("computes bf16 and f16 only".to_owned());
        }
        self.check_index_and_grid_limits(kernels)
    }

    /// Checks that the extents fit into 32-bit integers and that each kernel's grid is within the
    /// limits of CUDA.
    pub fn check_index_and_grid_limits(&self, kernels: &[KernelSpec<Self>]) -> Result<(), String> {
        let counted = [self.total_query_heads, self.queries_per_head, self.keys_per_head]
            .iter()
            .all(|&extent| i32::try_from(extent).is_ok());
        if counted && kernels.iter().all(|kernel| kernel.launch_shape_for(self).is_ok()) {
            Ok(())
        } else {
            Err("needs more blocks than a grid holds".to_owned())
        }
    }

    /// Like [`Self::check_dtype_size_and_grid_support`], for kernels that need as many key heads as
    /// query heads, and as many keys as queries.
    pub fn check_support_without_grouped_heads(
        &self,
        kernels: &[KernelSpec<Self>],
    ) -> Result<(), String> {
        self.check_dtype_size_and_grid_support(kernels)?;
        self.check_equal_key_and_query_counts()
    }

    /// Checks that there are as many keys as queries, and as many key heads as query heads.
    pub fn check_equal_key_and_query_counts(&self) -> Result<(), String> {
        if self.query_heads_per_key_head == 1 && self.keys_per_head == self.queries_per_head {
            Ok(())
        } else {
            Err("takes as many keys as queries, and as many heads of them".to_owned())
        }
    }

    /// Like [`Self::check_support_without_grouped_heads`], for kernels that keep all fp32 scores in
    /// device memory.
    pub fn check_support_with_scores_in_memory(
        &self,
        kernels: &[KernelSpec<Self>],
    ) -> Result<(), String> {
        self.check_support_without_grouped_heads(kernels)?;
        let bytes = 4 * self.query_key_pairs_of_all_heads();
        if bytes <= MAX_BYTES_OF_STORED_SCORES {
            return Ok(());
        }
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        Err(format!(
            "keeps {:.1} GB of scores in memory, {:.1} GB at most",
            gigabytes(bytes),
            gigabytes(MAX_BYTES_OF_STORED_SCORES)
        ))
    }

    /// The kernel argument `seqlen`, which every attention kernel expects: the number of queries of
    /// a head.
    pub const fn sequence_length_argument(&self) -> KernelArgument {
        KernelArgument::I32(self.queries_per_head as i32)
    }

    /// The kernel argument `batch_heads`, which some attention kernels expect: the number of query
    /// heads of all sequences.
    pub const fn total_query_heads_argument(&self) -> KernelArgument {
        KernelArgument::I32(self.total_query_heads as i32)
    }
}

/// Copies the named input tensors to the device, and returns their buffers in the order of `names`.
pub fn upload_named_inputs<const N: usize>(
    device: &Arc<Device>,
    inputs: &Tensors,
    names: [&str; N],
) -> Result<[DeviceBuffer; N], BackendError> {
    let buffers = names
        .iter()
        .map(|name| device.upload(inputs.tensor(name).as_bytes()))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(buffers.try_into().ok().expect("a buffer a name"))
}

/// Names the inputs of an attention forward for the harness, which may replace all three between
/// launches.
pub fn name_q_k_v_inputs([q, k, v]: [&DeviceBuffer; 3]) -> [DeviceInput; 3] {
    cuda::named_inputs([("q", q), ("k", k), ("v", v)])
}

/// Describes the query tensor as boxes of `box_rows` rows for tensor copies (TMA).
pub fn tma_boxes_of_query_tensor(
    extents: &AttentionExtents,
    strides: &AttentionTensorStrides,
    box_rows: usize,
) -> TensorWithTmaBoxes {
    tma_boxes_of_heads_and_positions(
        extents,
        [extents.query_heads_per_sequence(), extents.queries_per_head],
        strides,
        box_rows,
    )
}

/// Describes the key or value tensor as boxes of `box_rows` rows for tensor copies (TMA).
pub fn tma_boxes_of_key_or_value_tensor(
    extents: &AttentionExtents,
    strides: &AttentionTensorStrides,
    box_rows: usize,
) -> TensorWithTmaBoxes {
    tma_boxes_of_heads_and_positions(
        extents,
        [extents.key_heads_per_sequence(), extents.keys_per_head],
        strides,
        box_rows,
    )
}

fn tma_boxes_of_heads_and_positions(
    extents: &AttentionExtents,
    [heads, positions]: [usize; 2],
    strides: &AttentionTensorStrides,
    box_rows: usize,
) -> TensorWithTmaBoxes {
    TensorWithTmaBoxes {
        element: match extents.dtype {
            Dtype::F16 => TensorMapElement::F16,
            Dtype::Fp8 => TensorMapElement::AnyEightBitType,
            _ => TensorMapElement::Bf16,
        },
        extents: [extents.batch, heads, positions, extents.head_dim].map(|extent| extent as u64),
        strides: strides.batch_head_row_stride_argument(),
        rows_per_box: box_rows as u32,
    }
}

/// Allocates uninitialised device memory of `bytes` bytes for scratch.
pub fn allocate_uninitialised_scratch(
    device: &Device,
    bytes: u64,
) -> Result<DeviceBuffer, BackendError> {
    device.allocate(usize::try_from(bytes).expect("more memory than a process addresses"))
}

/// Allocates a device buffer for an output with the shape of the attention output.
pub fn allocate_attention_output(
    device: &Device,
    name: &'static str,
    attention: &AttentionParameters,
) -> Result<DeviceOutput, BackendError> {
    DeviceOutput::new(
        device,
        name,
        attention.query_and_output_shape(),
        attention.attention_output_dtype(),
    )
}
