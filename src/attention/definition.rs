//! Attention in FlashAttention's benchmark configuration: the definitions that forward and backward
//! share, and the forward workload. The attention backward workload is in
//! [`crate::attention::gradients`]; the scores, softmax and values workloads are in
//! [`crate::attention::components`].
//!
//! By default, attention cases of all sequence lengths have 16,384 tokens and hidden size 2048, so
//! that they are comparable: b = tokens / s, h = 2048 / d. The attention workload follows
//! FlashAttention's benchmark (arXiv 2205.14135, 2307.08691). Attention forward also supports fewer
//! key heads than query heads (grouped heads), and more keys than queries, as in decoding over a
//! key-value cache.
//!
//! The attention definition does not say how an implementation computes attention.

use half::{bf16, f16};
use rayon::prelude::*;

use super::quantised::quantise_runs_to_e4m3;
use super::reference::{QUERY_ROWS_PER_BLOCK, SingleHeadParameters};
use super::sample::HeadRowsToSample;
use crate::draw::draw_tensor_of_mapped_normals;
use crate::e4m3::decode_e4m3_to_f32;
use kernelgate::suite::ProblemsAlongEachAxis;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, InputSymmetry, Point, Problem, Tensor, TensorData,
    Tensors, Tolerance, Work, Workload, random,
};

/// Number of tokens b·s of an attention case whose axis `tokens` is absent.
const DEFAULT_TOKENS_PER_BATCH: usize = 16_384;
/// Hidden size h·d of the model, which determines the default number of attention heads.
const DEFAULT_HIDDEN_SIZE: usize = 2048;
/// Threshold that |x| of a standard normal x exceeds with probability 0.001; it selects the outlier
/// elements of the inputs.
const OUTLIER_THRESHOLD_OF_NORMAL_SAMPLE: f32 = 3.290_526_7;

pub(super) const ATTENTION_DTYPE_AXIS_WITHOUT_FP8: Axis = Axis::one_of(
    "dtype",
    &["f32", "bf16", "f16"],
    "dtype of inputs and outputs; sums are f32 or better",
);
const ATTENTION_DTYPE_AXIS_WITH_FP8: Axis = Axis::one_of(
    "dtype",
    &["f32", "bf16", "f16", "fp8"],
    "dtype of inputs and outputs, sums are f32 or better; fp8, forward only: inputs are e4m3 with \
     a scale a head, the output is bf16, the reference takes the inputs as they were rounded",
);
/// Axes of attention forward; attention backward has all of them except the last, `keys`.
pub(super) const ATTENTION_FORWARD_AXES: &[Axis] = &[
    Axis::number("s", "sequence length: queries and keys of a head"),
    Axis::one_of("d", &["64", "128"], "elements of a head"),
    Axis::one_of(
        "mask",
        &["full", "causal"],
        "which keys a query sees: all, or those up to its own position; the last query sees all",
    ),
    ATTENTION_DTYPE_AXIS_WITH_FP8,
    Axis::one_of(
        "inputs",
        &["outliers"],
        "N(0, 1); with outliers, N(0, 100) is added to one element in a thousand",
    ),
    Axis::number("tokens", "b * s, 16384 where absent; b = tokens / s, at least 1"),
    Axis::number("b", "batch, in place of tokens"),
    Axis::number("h", "heads of queries, 2048 / d where absent"),
    Axis::number("h_kv", "heads of keys and values, h where absent: h / h_kv heads share one"),
    Axis::number("keys", "keys of a head, s where absent"),
];

/// Workload of attention forward, which computes `softmax(q kᵀ / sqrt(d)) v` for every head.
pub const FORWARD: Workload<AttentionForward> = Workload {
    name: "attention/forward",
    about: "softmax(q k^T / sqrt(d)) v; 16384 tokens, hidden 2048",
    revision: 1,
    axes: ATTENTION_FORWARD_AXES,
    default_selection_lines: &[
        "s=1024 d=64 mask=full,causal dtype=f32",
        // The sequence length 200 is not a multiple of any tile size, so faults in the tails of
        // tiles are caught. In this small case the reference computes and checks every output
        // element.
        "s=200 d=64 mask=causal dtype=f32 tokens=1600",
    ],
    accelerator_selection_lines: &[
        // A small problem with an odd sequence length and outliers: every output element is
        // checked, so that faults in tails and in numerics are caught.
        "s=200 d=64 mask=causal dtype=bf16 inputs=outliers tokens=1600",
        // The longest sequence whose stored scores fit into the device memory that every attention
        // rung may use.
        "s=1024 d=128 mask=full dtype=bf16",
        "s=4096 d=128 mask=causal dtype=bf16",
    ],
    thorough_selection_lines: &[
        "s=1,7,65,129,200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 tokens=2000",
        "s=200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 inputs=outliers tokens=2000",
        "s=128,256,512,1024,2048,4096,8192,16384 d=64,128 mask=full,causal dtype=bf16",
        "s=128,256,512,1024,2048,4096 d=64,128 mask=full,causal dtype=f32",
        "s=512,4096 d=64,128 mask=full,causal dtype=f16",
        // Attention cases with grouped heads: first odd shapes, then the shapes of NVIDIA's own
        // tables.
        "s=1,63,129 d=64,128 mask=full,causal dtype=f32,bf16,f16 b=2 h=8 h_kv=2 keys=129,1000",
        "s=4096,8192,16384,32768 d=128 mask=full,causal dtype=bf16 b=1 h=64 h_kv=8",
        // Attention cases of decoding: few queries over a key-value cache that is larger than the
        // L2 cache.
        "s=1 d=128 mask=full dtype=bf16 b=8,32 h=32 h_kv=8 keys=8192,32768",
        "s=4,16,64 d=128 mask=causal dtype=bf16 b=8 h=32 h_kv=8 keys=8192",
        // This selection has the shape of the workloads `attention/scores`, `softmax` and `values`,
        // whose three steps attention forward computes in one kernel.
        "s=512 d=64 mask=full dtype=f32,bf16 b=4 h=12",
        "s=1,129,1000 d=128 mask=full,causal dtype=fp8 tokens=2000",
        "s=1000 d=128 mask=full,causal dtype=fp8 inputs=outliers tokens=2000",
        "s=1024,4096,16384 d=128 mask=full,causal dtype=fp8",
        "s=4096 d=128 mask=full dtype=fp8 inputs=outliers",
    ],
    bind: |point| {
        Ok(AttentionForward { attention: AttentionParameters::bind_attention_axes(point)? })
    },
};

/// Scan of attention forward over sequence lengths, with head dimensions 64 and 128 and both masks
/// at two of the lengths, and one case of grouped heads.
pub const FORWARD_SCAN_AXES: ProblemsAlongEachAxis = ProblemsAlongEachAxis {
    selection_lines: &FORWARD_AXIS_SCAN_SELECTIONS,
    // The row `cuda/flash_wgmma` runs on sm_90a only; on other devices, a scan with `--axis` shows
    // every row.
    default_implementations: &["cuda/flash_wgmma", "cuda/cudnn"],
};
const FORWARD_AXIS_SCAN_SELECTIONS: [&str; 3] = [
    "s=512,1024,2048,4096,8192,16384 d=128 mask=causal dtype=bf16",
    "s=4096,16384 d=64,128 mask=full,causal dtype=bf16",
    "s=4096 d=128 mask=causal dtype=bf16 b=1 h=64 h_kv=8",
];

/// The attention forward scan of [`FORWARD_SCAN_AXES`], plus a shorter sequence, plus one query for
/// each sequence over a long key-value cache.
pub const FORWARD_SCAN_WITH_DECODE: ProblemsAlongEachAxis = ProblemsAlongEachAxis {
    selection_lines: &[
        "s=256 d=128 mask=full,causal dtype=bf16",
        FORWARD_AXIS_SCAN_SELECTIONS[0],
        FORWARD_AXIS_SCAN_SELECTIONS[1],
        FORWARD_AXIS_SCAN_SELECTIONS[2],
        "s=1 d=128 mask=full dtype=bf16 b=8 h=32 h_kv=8 keys=8192",
    ],
    default_implementations: &["cuda/flash_wgmma", "cuda/flash_decode", "cuda/cudnn"],
};

/// Parameters of an attention problem, shared by forward and backward. Attention queries and
/// outputs are `[b, h, s, d]`, keys and values `[b, h_kv, keys, d]`, all contiguous.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionParameters {
    /// Number of sequences in the batch.
    pub batch_size: usize,
    /// Number of query heads h in each sequence.
    pub query_heads: usize,
    /// Number of key-value heads in a sequence, which divides h: query head i reads key head i / (h
    /// / h_kv).
    pub key_value_heads: usize,
    /// Number of queries in each head (sequence length of the queries).
    pub queries_per_head: usize,
    /// Number of keys in each head; under the causal mask at least the number of queries.
    pub keys_per_head: usize,
    /// Number of elements of a query or key vector (head dimension).
    pub head_dim: usize,
    /// Whether attention is causal: the last query sees all keys, and each earlier query sees one
    /// key less than the next query.
    pub causal: bool,
    /// Dtype of the attention inputs and outputs. With fp8, inputs are drawn in bf16 and quantised
    /// to e4m3 with one scale a head (tensors `q_e4m3` and `q_scale`); the output is bf16.
    /// Implementations and the reference of fp8 attention both read the quantised operand and its
    /// scale, not the unquantised bf16 values.
    pub dtype: Dtype,
    /// Whether samples of N(0, 100) are added to one input element in a thousand, as in
    /// FlashAttention-3's test of 16-bit numerics.
    pub adds_input_outliers: bool,
}

impl AttentionParameters {
    pub(super) fn bind_attention_axes(point: &Point) -> Result<Self, AxisError> {
        let given = |axis| point.get(axis).map(|_| point.number(axis)).transpose();
        let (s, d) = (point.number("s")?, point.number("d")?);
        let h = given("h")?.unwrap_or(DEFAULT_HIDDEN_SIZE / d);
        let tokens = given("tokens")?.unwrap_or(DEFAULT_TOKENS_PER_BATCH);
        let b = given("b")?.unwrap_or((tokens / s).max(1));
        let attention = Self {
            batch_size: b,
            query_heads: h,
            key_value_heads: given("h_kv")?.unwrap_or(h),
            queries_per_head: s,
            keys_per_head: given("keys")?.unwrap_or(s),
            head_dim: d,
            causal: point.word("mask")? == "causal",
            dtype: match point.word("dtype")? {
                "fp8" => Dtype::Fp8,
                name => Dtype::parse_dtype_name(name).expect("the axis lists dtypes"),
            },
            adds_input_outliers: point.get("inputs").is_some(),
        };
        let Self { key_value_heads: h_kv, keys_per_head: keys, causal, .. } = attention;
        if h % h_kv != 0 {
            let heads = format!("h={h} is no multiple of h_kv={h_kv}");
            return Err(AxisError::InvalidCombinationOfValues(heads));
        }
        if causal && keys < s {
            let keys = format!("mask=causal needs a key for each query: keys={keys}, s={s}");
            return Err(AxisError::InvalidCombinationOfValues(keys));
        }
        reject_operation_counts_beyond_64_bits([b, h, s.max(keys), d])?;
        Ok(attention)
    }

    /// Shape `[b, h, s, d]` of the attention queries and outputs.
    pub fn query_and_output_shape(&self) -> [usize; 4] {
        [self.batch_size, self.query_heads, self.queries_per_head, self.head_dim]
    }

    /// Shape `[b, h_kv, keys, d]` of the attention keys and values.
    pub fn key_value_shape(&self) -> [usize; 4] {
        [self.batch_size, self.key_value_heads, self.keys_per_head, self.head_dim]
    }

    pub(super) fn shape_of_named_input(&self, input: &str) -> [usize; 4] {
        if ["k", "v"].contains(&input) {
            self.key_value_shape()
        } else {
            self.query_and_output_shape()
        }
    }

    /// Number of query heads that share one key head, h / h_kv.
    pub fn query_heads_per_key_head(&self) -> usize {
        self.query_heads / self.key_value_heads
    }

    /// Number of keys before the key at the first query's own position; 0 without a causal mask.
    pub fn causal_keys_before_first_query(&self) -> usize {
        if self.causal { self.keys_per_head - self.queries_per_head } else { 0 }
    }

    pub fn attention_output_dtype(&self) -> Dtype {
        if self.dtype == Dtype::Fp8 { Dtype::Bf16 } else { self.dtype }
    }

    /// Head dimension and mask, as the fp64 reference of one head needs them.
    pub fn single_head_parameters(&self) -> SingleHeadParameters {
        SingleHeadParameters { head_dim: self.head_dim, causal: self.causal }
    }

    pub(super) fn query_rows_of_all_heads(&self) -> HeadRowsToSample {
        HeadRowsToSample {
            total_heads: self.batch_size * self.query_heads,
            rows_per_head: self.queries_per_head,
            keys_per_head: self.keys_per_head,
            causal: self.causal,
        }
    }

    /// Key rows of all heads, from which the backward reference draws the rows of `grad_k` and
    /// `grad_v` that it computes.
    pub(super) fn key_rows_of_all_heads(&self) -> HeadRowsToSample {
        HeadRowsToSample {
            total_heads: self.batch_size * self.key_value_heads,
            rows_per_head: self.keys_per_head,
            ..self.query_rows_of_all_heads()
        }
    }

    fn query_tensor_elements(&self) -> u64 {
        self.query_and_output_shape().iter().product::<usize>() as u64
    }

    /// Total bytes of `like_queries` tensors that have the queries' shape and `like_keys` tensors
    /// that have the keys' shape.
    pub(super) fn bytes_of_tensors_like_queries_and_keys(
        &self,
        dtype: Dtype,
        like_queries: u64,
        like_keys: u64,
    ) -> u64 {
        let key_elements = self.key_value_shape().iter().product::<usize>() as u64;
        (like_queries * self.query_tensor_elements() + like_keys * key_elements)
            * dtype.bytes_per_element() as u64
    }

    /// Number of query-key pairs, over all heads and sequences, that count as work; masked pairs do
    /// not count. By FlashAttention's convention, the causal pairs of queries with keys at their
    /// own positions count half.
    fn counted_query_key_pairs(&self) -> u64 {
        let (heads, s, keys) = (
            (self.batch_size * self.query_heads) as u64,
            self.queries_per_head as u64,
            self.keys_per_head as u64,
        );
        if self.causal { heads * s * (2 * keys - s) / 2 } else { heads * s * keys }
    }

    pub(super) fn draw_named_inputs(&self, seed: u64, names: &[&str]) -> Tensors {
        let mut inputs = Tensors::new();
        for name in names {
            let tensor = if self.adds_input_outliers {
                self.draw_normal_with_outliers(seed, name)
            } else {
                draw_tensor_of_mapped_normals(
                    seed,
                    name,
                    self.shape_of_named_input(name),
                    self.attention_output_dtype(),
                    |x| x,
                )
            };
            if let (Dtype::Fp8, TensorData::Bf16(values)) = (self.dtype, tensor.tensor_data()) {
                let [b, heads, rows, d] = self.shape_of_named_input(name);
                let (operand, scales) = quantise_runs_to_e4m3(values, rows * d);
                inputs = inputs
                    .with_tensor(&format!("{name}_e4m3"), [b, heads, rows, d], operand)
                    .with_tensor(&format!("{name}_scale"), [b, heads], scales);
            } else {
                inputs.insert(name, tensor);
            }
        }
        inputs
    }

    /// Draws samples of N(0, 1) + N(0, 100) · Bernoulli(0.001), rounded to the problem's dtype.
    fn draw_normal_with_outliers(&self, seed: u64, name: &str) -> Tensor {
        let shape = self.shape_of_named_input(name);
        let len = shape.iter().product();
        let mut values = random::normal_values(seed, name, len);
        let chosen = random::normal_values(seed, &format!("{name} chosen"), len);
        let added = random::normal_values(seed, &format!("{name} added"), len);
        let outliers = chosen.par_iter().zip(&added);
        values.par_iter_mut().zip(outliers).for_each(|(value, (chosen, added))| {
            if chosen.abs() > OUTLIER_THRESHOLD_OF_NORMAL_SAMPLE {
                *value += 10.0 * added;
            }
        });
        let data = match self.dtype {
            Dtype::F16 => TensorData::F16(values.into_par_iter().map(f16::from_f32).collect()),
            Dtype::Bf16 | Dtype::Fp8 => {
                TensorData::Bf16(values.into_par_iter().map(bf16::from_f32).collect())
            }
            _ => TensorData::F32(values),
        };
        Tensor::new(shape, data)
    }

    /// Work of an attention case, which has `gemms` GEMMs of 2·d FLOPs and a softmax of five FLOPs
    /// for each query-key pair, and the bytes read and written.
    pub(super) fn work_of_gemms_and_softmax(&self, gemms: u64, read: u64, written: u64) -> Work {
        Work::bytes(read, written)
            .with_flops(
                FlopUnit::Matmul,
                self.dtype,
                gemms * 2 * self.head_dim as u64 * self.counted_query_key_pairs(),
            )
            // The five vector operations of a query-key pair: forward: scale, subtract,
            // exponential, sum, divide; backward: scale, subtract, exponential, subtract, multiply.
            .with_flops(FlopUnit::VectorArithmetic, Dtype::F32, 5 * self.counted_query_key_pairs())
    }

    /// Bytes of host memory: the tensors, the reference's drawn rows in fp64, and, for each CPU
    /// thread, the fp64 matrices of one head.
    pub(super) fn estimate_host_bytes(
        &self,
        tensors: u64,
        expected_rows: u64,
        head_matrices: u64,
    ) -> u64 {
        let (s, keys, d) =
            (self.queries_per_head as u64, self.keys_per_head as u64, self.head_dim as u64);
        let a_thread =
            8 * (head_matrices * s.max(keys) * d + 2 * (QUERY_ROWS_PER_BLOCK as u64).min(s) * keys);
        // Inputs with outliers need three f32 arrays while they are drawn: the normal samples, the
        // choice of outliers, and the added values.
        let largest = |dtype| {
            self.bytes_of_tensors_like_queries_and_keys(dtype, 1, 0)
                .max(self.bytes_of_tensors_like_queries_and_keys(dtype, 0, 1))
        };
        let drawing = if self.adds_input_outliers { 3 * largest(Dtype::F32) } else { 0 };
        // For fp8 attention problems, the bf16 tensor is in host memory until it is quantised.
        let drawn = if self.dtype == Dtype::Fp8 { largest(Dtype::Bf16) } else { 0 };
        drawing
            + drawn
            + tensors
            + expected_rows * d * 8
            + rayon::current_num_threads() as u64 * a_thread
    }
}

/// Rejects attention shapes whose number of operations overflows 64 bits, so that all later
/// products of extents are exact.
pub(super) fn reject_operation_counts_beyond_64_bits(
    [b, h, s, d]: [usize; 4],
) -> Result<(), AxisError> {
    let operations = [b, h, s, s, d, 64]
        .into_iter()
        .try_fold(1u64, |product, extent| product.checked_mul(extent as u64));
    operations.map(|_| ()).ok_or_else(|| {
        AxisError::InvalidCombinationOfValues(
            "more operations than a 64-bit count holds".to_owned(),
        )
    })
}

/// Tolerance of attention outputs. For bf16 and f16 outputs, the tolerance is about three times the
/// error of rounding the softmax probabilities and the output. A test emulates the rounding of
/// probabilities and output: the error is at most 4e-3 (maximum) and 2e-3 (relative L2) in bf16,
/// and an eighth of that in f16. For f32 outputs, the attention tolerance is about seven times the
/// error of the CPU implementation (maximum 1e-6, relative L2 4e-7). All attention tolerances are
/// far below the error of a wrong softmax scale, a missed key or TF32 GEMMs.
pub(super) fn attention_output_tolerance(dtype: Dtype) -> Tolerance {
    match dtype {
        Dtype::Bf16 => Tolerance { max_error: 1.2e-2, relative_l2: 7e-3 },
        Dtype::F16 => Tolerance { max_error: 1.5e-3, relative_l2: 9e-4 },
        _ => Tolerance { max_error: 8e-6, relative_l2: 3e-6 },
    }
}

/// Tolerance of attention with fp8 inputs against the reference of the quantised operands: two to
/// three times the error of e4m3 probabilities, which a test emulates. The error of quantising the
/// operands to fp8 depends on the format and the inputs, not on the implementation, so it is not
/// counted. With outliers, the fp8 quantisation error grows with the number of keys, and two scores
/// may change their order.
const FP8_OUTPUT_TOLERANCE: Tolerance = Tolerance { max_error: 1.2e-1, relative_l2: 6e-2 };

/// Input tensors of one attention problem, read as fp64 values by head and position.
pub(super) struct AttentionInputsByHead<'a> {
    pub attention: &'a AttentionParameters,
    pub inputs: &'a Tensors,
}

impl AttentionInputsByHead<'_> {
    /// Reads the rows of the first `positions` positions of query head `head`, or of the key-value
    /// head that this query head uses.
    pub(super) fn read_first_positions_of_head(
        &self,
        name: &str,
        head: usize,
        positions: usize,
    ) -> Vec<f64> {
        let [_, heads, rows, d] = self.attention.shape_of_named_input(name);
        let head = head / (self.attention.query_heads / heads);
        self.read_head_elements_as_f64(name, head, head * rows * d, positions * d)
    }

    /// Reads the rows of a query-shaped tensor (q or grad_out) at the given positions of a head.
    pub(super) fn read_query_rows_at_positions(
        &self,
        name: &str,
        head: usize,
        positions: &[usize],
    ) -> Vec<f64> {
        let AttentionParameters { queries_per_head: s, head_dim: d, .. } = *self.attention;
        let read =
            |position| self.read_head_elements_as_f64(name, head, (head * s + position) * d, d);
        positions.iter().flat_map(read).collect()
    }

    /// Reads `count` elements of a head from flat element index `from` on; fp8 elements are
    /// multiplied by the head's scale.
    fn read_head_elements_as_f64(
        &self,
        name: &str,
        head: usize,
        from: usize,
        count: usize,
    ) -> Vec<f64> {
        if self.attention.dtype != Dtype::Fp8 {
            return self.inputs.tensor(name).elements_to_f64(from, count);
        }
        let scale = self.inputs.tensor(&format!("{name}_scale")).elements_to_f64(head, 1)[0];
        let codes = self.inputs.tensor(&format!("{name}_e4m3")).elements_to_f64(from, count);
        codes
            .into_iter()
            .map(|code| f64::from(decode_e4m3_to_f32(code as i8 as u8)) * scale)
            .collect()
    }

    /// Reads the keys and values of a head that queries at the given ascending positions see.
    pub(super) fn read_visible_keys_and_values(
        &self,
        head: usize,
        positions: &[usize],
    ) -> [Vec<f64>; 2] {
        let AttentionParameters { keys_per_head: keys, causal, .. } = *self.attention;
        let last = positions
            .last()
            .map_or(0, |last| last + 1 + self.attention.causal_keys_before_first_query());
        let seen = if causal { last } else { keys };
        ["k", "v"].map(|name| self.read_first_positions_of_head(name, head, seen))
    }
}

/// Problem `attention/forward`: computes `out` `[b, h, s, d]` from `q` `[b, h, s, d]`, `k` and `v`
/// `[b, h_kv, keys, d]`; inputs are N(0, 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionForward {
    /// Shape, mask and element type of the attention.
    pub attention: AttentionParameters,
}

impl Problem for AttentionForward {
    fn inputs(&self, seed: u64) -> Tensors {
        self.attention.draw_named_inputs(seed, &["q", "k", "v"])
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let (attention, rows) = (&self.attention, self.attention.query_rows_of_all_heads());
        let heads = AttentionInputsByHead { attention, inputs };
        let expect = |band| {
            rows.expected_values_of_drawn_rows(
                "out",
                &attention.query_and_output_shape(),
                rows.draw_rows_of_position_band("out", &band),
                |head, positions| {
                    let [k, v] = heads.read_visible_keys_and_values(head, positions);
                    let some = |queries: &[usize]| {
                        let positions: Vec<_> = queries
                            .iter()
                            .map(|query| query + attention.causal_keys_before_first_query())
                            .collect();
                        attention.single_head_parameters().attention_output_of_queries(
                            &heads.read_query_rows_at_positions("q", head, queries),
                            &positions,
                            &k,
                            &v,
                        )
                    };
                    positions.chunks(QUERY_ROWS_PER_BLOCK).flat_map(some).collect()
                },
            )
        };
        rows.position_ranges_sampled_together().into_iter().map(expect).collect()
    }

    /// Permuting the heads of the inputs permutes the heads of the output; with grouped heads, this
    /// holds for the sequences of the batch.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        let [in_heads, in_batch]: [&[(&str, usize)]; 2] = [&[("out", 1)], &[("out", 0)]];
        let (inputs, outputs): (&[(&str, usize)], _) =
            match (self.attention.dtype, self.attention.query_heads_per_key_head()) {
                (Dtype::Fp8, _) => (
                    &[
                        ("q_e4m3", 1),
                        ("k_e4m3", 1),
                        ("v_e4m3", 1),
                        ("q_scale", 1),
                        ("k_scale", 1),
                        ("v_scale", 1),
                    ],
                    in_heads,
                ),
                (_, 1) => (&[("q", 1), ("k", 1), ("v", 1)], in_heads),
                _ => (&[("q", 0), ("k", 0), ("v", 0)], in_batch),
            };
        vec![InputSymmetry::RotateAlongAxis {
            inputs_with_axes: inputs,
            outputs_with_axes: outputs,
        }]
    }

    fn work(&self) -> Work {
        let AttentionParameters { dtype, .. } = self.attention;
        let written = self.attention.bytes_of_tensors_like_queries_and_keys(
            self.attention.attention_output_dtype(),
            1,
            0,
        );
        self.attention.work_of_gemms_and_softmax(
            2,
            self.attention.bytes_of_tensors_like_queries_and_keys(dtype, 1, 2),
            written,
        )
    }

    fn tolerance(&self) -> Tolerance {
        match self.attention.dtype {
            Dtype::Fp8 => FP8_OUTPUT_TOLERANCE,
            dtype => attention_output_tolerance(dtype),
        }
    }

    fn host_memory_bytes(&self) -> u64 {
        let AttentionParameters { dtype, .. } = self.attention;
        let written = self.attention.bytes_of_tensors_like_queries_and_keys(
            self.attention.attention_output_dtype(),
            1,
            0,
        );
        let tensors = self.attention.bytes_of_tensors_like_queries_and_keys(dtype, 1, 2) + written;
        self.attention.estimate_host_bytes(
            tensors,
            self.attention.query_rows_of_all_heads().max_drawn_rows(),
            2,
        )
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
