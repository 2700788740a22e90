//! Builds, sizes and limits that all rows of the attention family share.

use std::sync::Arc;

use super::layout::{AttentionShape, RowStrides, Strides};
use crate::attention::components;
use crate::attention::definition::Attention;
use crate::kernel_files::kernel_file;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{self, Input, Output};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{
    Device, DeviceBuffer, KernelArgument, KernelSpec, TensorBoxes, TensorMapElement,
};

/// Bytes of a stored query, key or value element in every dtype but fp8.
pub const ELEMENT_BYTES: u64 = 2;

/// Maximum bytes of fp32 scores for a rung that keeps them in memory: above that, a launch takes
/// seconds and shows nothing new.
const MAX_SCORE_MATRIX_BYTES: u64 = 2 << 30;

/// Extents, mask and dtype of an attention call, on which builds, grids and memory depend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extents {
    /// Number of sequences.
    pub batch: usize,
    /// Number of query heads of all sequences.
    pub heads: usize,
    /// Number of query heads that read the same keys.
    pub share: usize,
    /// Number of queries of a head.
    pub s: usize,
    /// Number of keys of a head.
    pub keys: usize,
    /// Number of elements of a head, 64 or 128.
    pub d: usize,
    /// Whether the last query sees all keys and each earlier query one key less than the next.
    pub causal: bool,
    /// Dtype of inputs and outputs; the output of fp8 inputs is bf16.
    pub dtype: Dtype,
    /// Strides of rows, if any tensor is not dense `[b, h, s, d]`.
    pub rows: Option<RowStrides>,
}

impl From<&Attention> for Extents {
    fn from(attention: &Attention) -> Self {
        Self::new(&AttentionShape::from(attention), None)
    }
}

impl From<&components::ComponentShape> for Extents {
    fn from(shape: &components::ComponentShape) -> Self {
        let components::ComponentShape { b, h, s, d, dtype } = *shape;
        // The softmax has no head dimension; its kernel comes with kernels that have one.
        Self { d: d.max(64), ..Self::self_attention_extents(b * h, s, dtype) }
    }
}

/// Declares a kernel of the family, with the macros of `kernels/attention/shape.cuh` and a build
/// for each of their values.
pub const fn attention_kernel(
    file: &'static str,
    symbol: &'static str,
    threads: usize,
    blocks: fn(&Extents) -> [usize; 3],
) -> KernelSpec<Extents> {
    KernelSpec {
        defines: shape_macros,
        variants: extents_of_builds,
        ..KernelSpec::new(kernel_file(file), symbol, threads, blocks)
    }
}

/// Values of the macros of `kernels/attention/shape.cuh`.
pub fn shape_macros(extents: &Extents) -> Vec<String> {
    vec![
        element_macro(extents),
        format!("HEAD_DIM={}", extents.d),
        format!("CAUSAL={}", u8::from(extents.causal)),
    ]
}

/// The macro that selects the element type.
pub fn element_macro(extents: &Extents) -> String {
    if extents.dtype == Dtype::F16 { "DTYPE=F16" } else { "DTYPE=Bf16" }.to_owned()
}

/// Lists the extents for which a kernel is built.
fn extents_of_builds() -> Vec<Extents> {
    let mut variants = Vec::new();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            variants.push(Extents { d, causal, ..Extents::self_attention_extents(1, 1, dtype) });
        }
    }
    variants
}

/// [`shape_macros`] and, if tensors have strides, the macros of the row strides that the kernels'
/// loops read.
pub fn strided_defines(
    extents: &Extents,
    rows: fn(&RowStrides) -> [(&'static str, u64); 2],
) -> Vec<String> {
    let mut all = shape_macros(extents);
    if let Some(strides) = &extents.rows {
        all.push("STRIDED=1".to_owned());
        all.extend(rows(strides).map(|(name, stride)| format!("{name}={stride}")));
    }
    all
}

/// Lists the extents of every dense build, and one build with strides: `[b, s, h, d]` with 16
/// heads.
pub fn strided_variants() -> Vec<Extents> {
    let row = 16 * 128;
    let rows = Some(RowStrides { q: row, k: row, v: row, grad_out: row });
    let strided = Extents {
        d: 128,
        causal: true,
        rows,
        ..Extents::self_attention_extents(16, 1, Dtype::Bf16)
    };
    extents_of_builds().into_iter().chain([strided]).collect()
}

impl Extents {
    /// Extents of a shape, with the row strides if any tensor is not dense `[b, h, s, d]`.
    pub fn new(shape: &AttentionShape, rows: Option<RowStrides>) -> Self {
        let AttentionShape { batch, heads, key_heads, queries, keys, head_dim, causal, dtype } =
            *shape;
        Self {
            batch,
            heads: batch * heads,
            share: heads / key_heads,
            s: queries,
            keys,
            d: head_dim,
            causal,
            dtype,
            rows,
        }
    }

    /// Extents of heads with 64 elements, as many keys as queries, and no mask.
    pub const fn self_attention_extents(heads: usize, s: usize, dtype: Dtype) -> Self {
        Self { batch: 1, heads, share: 1, s, keys: s, d: 64, causal: false, dtype, rows: None }
    }

    /// Number of query heads in one sequence.
    pub const fn query_heads_per_sequence(&self) -> usize {
        self.heads / self.batch
    }

    /// Number of key-value heads in one sequence.
    pub const fn key_heads_a_batch(&self) -> usize {
        self.key_heads() / self.batch
    }

    /// Bytes of the queries, or of any tensor of their shape.
    pub const fn vector_bytes(&self) -> u64 {
        self.query_rows() * self.d as u64 * ELEMENT_BYTES
    }

    /// Number of key-value heads of all sequences.
    pub const fn key_heads(&self) -> usize {
        self.heads / self.share
    }

    /// Bytes of the keys, or of the values.
    pub const fn key_bytes(&self) -> u64 {
        (self.key_heads() * self.keys) as u64 * self.d as u64 * ELEMENT_BYTES
    }

    /// Number of queries of all heads.
    pub const fn query_rows(&self) -> u64 {
        (self.heads * self.s) as u64
    }

    /// Number of query-key pairs of all heads, with those that the mask hides.
    pub const fn query_key_pairs(&self) -> u64 {
        self.query_rows() * self.keys as u64
    }

    /// Checks whether the kernels support these extents.
    pub fn check_support(&self, kernels: &[KernelSpec<Self>]) -> Result<(), String> {
        if !matches!(self.dtype, Dtype::Bf16 | Dtype::F16) {
            return Err("computes bf16 and f16 only".to_owned());
        }
        self.fits_index_and_grid_limits(kernels)
    }

    /// Checks that sizes fit into 32 bits and that the kernels' grids are within the limits.
    pub fn fits_index_and_grid_limits(&self, kernels: &[KernelSpec<Self>]) -> Result<(), String> {
        let counted =
            [self.heads, self.s, self.keys].iter().all(|&extent| i32::try_from(extent).is_ok());
        if counted && kernels.iter().all(|kernel| kernel.launch_for(self).is_ok()) {
            Ok(())
        } else {
            Err("needs more blocks than a grid holds".to_owned())
        }
    }

    /// [`Self::check_support`] for kernels that need equal numbers of query and key heads, and of
    /// queries and keys.
    pub fn check_ungrouped_support(&self, kernels: &[KernelSpec<Self>]) -> Result<(), String> {
        self.check_support(kernels)?;
        self.check_equal_rows_and_heads()
    }

    /// Checks that keys and queries have equal numbers of rows and heads.
    pub fn check_equal_rows_and_heads(&self) -> Result<(), String> {
        if self.share == 1 && self.keys == self.s {
            Ok(())
        } else {
            Err("takes as many keys as queries, and as many heads of them".to_owned())
        }
    }

    /// [`Self::check_ungrouped_support`] for kernels that keep the scores in device memory.
    pub fn supported_with_scores(&self, kernels: &[KernelSpec<Self>]) -> Result<(), String> {
        self.check_ungrouped_support(kernels)?;
        let bytes = 4 * self.query_key_pairs();
        if bytes <= MAX_SCORE_MATRIX_BYTES {
            return Ok(());
        }
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        Err(format!(
            "keeps {:.1} GB of scores in memory, {:.1} GB at most",
            gigabytes(bytes),
            gigabytes(MAX_SCORE_MATRIX_BYTES)
        ))
    }

    /// The argument `seqlen`, as every kernel expects it.
    pub const fn sequence_length_argument(&self) -> KernelArgument {
        KernelArgument::I32(self.s as i32)
    }

    /// The argument `batch_heads`, as some kernels expect it.
    pub const fn batch_heads_argument(&self) -> KernelArgument {
        KernelArgument::I32(self.heads as i32)
    }
}

/// Copies inputs to the device, in the order of their names.
pub fn upload_inputs<const N: usize>(
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

/// Inputs of an attention forward, all of which every launch reads.
pub fn qkv([q, k, v]: [&DeviceBuffer; 3]) -> [Input; 3] {
    cuda::named_inputs([("q", q), ("k", k), ("v", v)])
}

/// Tensor boxes of the queries, each of `box_rows` rows, for a kernel with tensor copies.
pub fn query_boxes(extents: &Extents, strides: &Strides, box_rows: usize) -> TensorBoxes {
    tensor_boxes_of(extents, [extents.query_heads_per_sequence(), extents.s], strides, box_rows)
}

/// Tensor boxes of the keys or values, for a kernel with tensor copies.
pub fn key_boxes(extents: &Extents, strides: &Strides, box_rows: usize) -> TensorBoxes {
    tensor_boxes_of(extents, [extents.key_heads_a_batch(), extents.keys], strides, box_rows)
}

fn tensor_boxes_of(
    extents: &Extents,
    [heads, positions]: [usize; 2],
    strides: &Strides,
    box_rows: usize,
) -> TensorBoxes {
    TensorBoxes {
        element: match extents.dtype {
            Dtype::F16 => TensorMapElement::F16,
            Dtype::Fp8 => TensorMapElement::Byte,
            _ => TensorMapElement::Bf16,
        },
        extents: [extents.batch, heads, positions, extents.d].map(|extent| extent as u64),
        strides: strides.stride_words(),
        box_rows: box_rows as u32,
    }
}

/// Allocates scratch memory of `bytes` bytes.
pub fn allocate_scratch(device: &Device, bytes: u64) -> Result<DeviceBuffer, BackendError> {
    device.allocate(usize::try_from(bytes).expect("more memory than a process addresses"))
}

/// Allocates an output of the problem's shape.
pub fn allocate_output(
    device: &Device,
    name: &'static str,
    attention: &Attention,
) -> Result<Output, BackendError> {
    Output::new(device, name, attention.shape(), attention.output_dtype_of())
}
