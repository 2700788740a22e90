//! Attention in FlashAttention's configuration: the definitions that forward and backward share,
//! and the forward workload. The backward is in [`crate::attention::gradients`], the three separate
//! steps are in [`crate::attention::components`].
//!
//! All sequence lengths have 16,384 tokens and a hidden size of 2048, so that cases are comparable:
//! b = tokens / s, h = 2048 / d. The source is the benchmark of FlashAttention (arXiv 2205.14135,
//! 2307.08691). The forward also supports fewer key heads than query heads (grouped heads) and a
//! number of keys different from that of queries (decoding over a cache).
//!
//! The techniques by which implementations compute attention are excluded on purpose.

use half::{bf16, f16};
use rayon::prelude::*;

use super::quantised::quantise_to_e4m3;
use super::reference::{BLOCK_ROWS, HeadParameters};
use super::sample::HeadRows;
use crate::draw::draw_tensor;
use crate::e4m3::decode_e4m3;
use kernelgate::suite::ScanAlongAxes;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, Point, Problem, Symmetry, Tensor, TensorData,
    Tensors, Tolerance, Work, Workload, random,
};

/// Number of tokens b·s if the axis `tokens` is not given.
const DEFAULT_TOKENS: usize = 16_384;
/// Hidden size h·d of the model.
const MODEL_WIDTH: usize = 2048;
/// Threshold that |N(0, 1)| exceeds once in a thousand samples.
const ONE_IN_A_THOUSAND_DEVIATION: f32 = 3.290_526_7;

pub(super) const DTYPE: Axis = Axis::one_of(
    "dtype",
    &["f32", "bf16", "f16"],
    "dtype of inputs and outputs; sums are f32 or better",
);
const DTYPE_OR_FP8_AXIS: Axis = Axis::one_of(
    "dtype",
    &["f32", "bf16", "f16", "fp8"],
    "dtype of inputs and outputs, sums are f32 or better; fp8, forward only: inputs are e4m3 with \
     a scale a head, the output is bf16, the reference takes the inputs as they were rounded",
);
/// Only the forward has the last of these axes.
pub(super) const AXES: &[Axis] = &[
    Axis::number("s", "sequence length: queries and keys of a head"),
    Axis::one_of("d", &["64", "128"], "elements of a head"),
    Axis::one_of(
        "mask",
        &["full", "causal"],
        "which keys a query sees: all, or those up to its own position; the last query sees all",
    ),
    DTYPE_OR_FP8_AXIS,
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

/// Workload of attention forward, `softmax(q kᵀ / sqrt(d)) v`.
pub const FORWARD: Workload<AttentionForward> = Workload {
    name: "attention/forward",
    about: "softmax(q k^T / sqrt(d)) v; 16384 tokens, hidden 2048",
    revision: 1,
    axes: AXES,
    default: &[
        "s=1024 d=64 mask=full,causal dtype=f32",
        // 200 is not a multiple of any tile size, so out-of-bounds tails are caught. Every element
        // is checked.
        "s=200 d=64 mask=causal dtype=f32 tokens=1600",
    ],
    accelerator: &[
        // A small, odd shape with outliers: every element is checked, so that faults in tails and
        // in numerics are caught.
        "s=200 d=64 mask=causal dtype=bf16 inputs=outliers tokens=1600",
        // The longest sequence whose scores fit into the memory that every rung may use.
        "s=1024 d=128 mask=full dtype=bf16",
        "s=4096 d=128 mask=causal dtype=bf16",
    ],
    thorough: &[
        "s=1,7,65,129,200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 tokens=2000",
        "s=200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 inputs=outliers tokens=2000",
        "s=128,256,512,1024,2048,4096,8192,16384 d=64,128 mask=full,causal dtype=bf16",
        "s=128,256,512,1024,2048,4096 d=64,128 mask=full,causal dtype=f32",
        "s=512,4096 d=64,128 mask=full,causal dtype=f16",
        // Selections with grouped heads: odd shapes, then those of NVIDIA's own tables.
        "s=1,63,129 d=64,128 mask=full,causal dtype=f32,bf16,f16 b=2 h=8 h_kv=2 keys=129,1000",
        "s=4096,8192,16384,32768 d=128 mask=full,causal dtype=bf16 b=1 h=64 h_kv=8",
        // Decoding over a cache of keys that is larger than L2.
        "s=1 d=128 mask=full dtype=bf16 b=8,32 h=32 h_kv=8 keys=8192,32768",
        "s=4,16,64 d=128 mask=causal dtype=bf16 b=8 h=32 h_kv=8 keys=8192",
        // The shape of `components`, here with its three steps in one kernel.
        "s=512 d=64 mask=full dtype=f32,bf16 b=4 h=12",
        "s=1,129,1000 d=128 mask=full,causal dtype=fp8 tokens=2000",
        "s=1000 d=128 mask=full,causal dtype=fp8 inputs=outliers tokens=2000",
        "s=1024,4096,16384 d=128 mask=full,causal dtype=fp8",
        "s=4096 d=128 mask=full dtype=fp8 inputs=outliers",
    ],
    bind: |point| Ok(AttentionForward { attention: Attention::bind(point)? }),
};

/// Scan over sequence lengths around 4096, with both head dimensions and masks at two of them, and
/// grouped heads.
pub const FORWARD_SCAN_AXES: ScanAlongAxes = ScanAlongAxes {
    lines: &SCAN_LINES,
    // `flash_wgmma` runs on sm_90a only: on other devices `--axis` shows every row.
    rows: &["cuda/flash_wgmma", "cuda/cudnn"],
};
const SCAN_LINES: [&str; 3] = [
    "s=512,1024,2048,4096,8192,16384 d=128 mask=causal dtype=bf16",
    "s=4096,16384 d=64,128 mask=full,causal dtype=bf16",
    "s=4096 d=128 mask=causal dtype=bf16 b=1 h=64 h_kv=8",
];

/// The scan of [`FORWARD_SCAN_AXES`], with shorter sequences, and with one query a sequence over a
/// long cache of keys.
pub const FORWARD_SCAN: ScanAlongAxes = ScanAlongAxes {
    lines: &[
        "s=256 d=128 mask=full,causal dtype=bf16",
        SCAN_LINES[0],
        SCAN_LINES[1],
        SCAN_LINES[2],
        "s=1 d=128 mask=full dtype=bf16 b=8 h=32 h_kv=8 keys=8192",
    ],
    rows: &["cuda/flash_wgmma", "cuda/flash_decode", "cuda/cudnn"],
};

/// Parameters of attention that forward and backward share. Tensors are `[b, h, s, d]`, keys and
/// values `[b, h_kv, keys, d]`, all contiguous.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Number of sequences (batch size).
    pub b: usize,
    /// Number of query heads in a sequence.
    pub h: usize,
    /// Number of key-value heads in a sequence, which divides h: query head i reads key head i / (h
    /// / h_kv).
    pub h_kv: usize,
    /// Number of queries of a head.
    pub s: usize,
    /// Number of keys of a head; at least as many as queries if causal.
    pub keys: usize,
    /// Number of elements of a head.
    pub d: usize,
    /// Whether the last query sees all keys and each earlier query one key less than the next.
    pub causal: bool,
    /// Dtype of inputs and outputs. With fp8 it is the dtype of the GEMMs' operands: each operand
    /// is drawn in bf16 and rounded to `q_e4m3` with one scale a head, `q_scale`. The rows and the
    /// reference read both the rounded operand and its scale.
    pub dtype: Dtype,
    /// Whether N(0, 100) is added to one input element in a thousand, as in FlashAttention-3's test
    /// of 16-bit numerics.
    pub outliers: bool,
}

impl Attention {
    pub(super) fn bind(point: &Point) -> Result<Self, AxisError> {
        let given = |axis| point.get(axis).map(|_| point.number(axis)).transpose();
        let (s, d) = (point.number("s")?, point.number("d")?);
        let h = given("h")?.unwrap_or(MODEL_WIDTH / d);
        let tokens = given("tokens")?.unwrap_or(DEFAULT_TOKENS);
        let b = given("b")?.unwrap_or((tokens / s).max(1));
        let attention = Self {
            b,
            h,
            h_kv: given("h_kv")?.unwrap_or(h),
            s,
            keys: given("keys")?.unwrap_or(s),
            d,
            causal: point.word("mask")? == "causal",
            dtype: match point.word("dtype")? {
                "fp8" => Dtype::Fp8,
                name => Dtype::parse(name).expect("the axis lists dtypes"),
            },
            outliers: point.get("inputs").is_some(),
        };
        let Self { h_kv, keys, causal, .. } = attention;
        if h % h_kv != 0 {
            let heads = format!("h={h} is no multiple of h_kv={h_kv}");
            return Err(AxisError::Combination(heads));
        }
        if causal && keys < s {
            let keys = format!("mask=causal needs a key for each query: keys={keys}, s={s}");
            return Err(AxisError::Combination(keys));
        }
        check_operation_count([b, h, s.max(keys), d])?;
        Ok(attention)
    }

    /// Shape of queries and outputs: `[b, h, s, d]`.
    pub fn shape(&self) -> [usize; 4] {
        [self.b, self.h, self.s, self.d]
    }

    /// Shape of keys and values: `[b, h_kv, keys, d]`.
    pub fn key_value_shape(&self) -> [usize; 4] {
        [self.b, self.h_kv, self.keys, self.d]
    }

    pub(super) fn shape_of_input(&self, input: &str) -> [usize; 4] {
        if ["k", "v"].contains(&input) { self.key_value_shape() } else { self.shape() }
    }

    /// Number of query heads that read the same keys.
    pub fn heads_per_key_head(&self) -> usize {
        self.h / self.h_kv
    }

    /// With a causal mask, number of keys before the own key of the first query.
    pub fn keys_before_first_query(&self) -> usize {
        if self.causal { self.keys - self.s } else { 0 }
    }

    pub fn output_dtype_of(&self) -> Dtype {
        if self.dtype == Dtype::Fp8 { Dtype::Bf16 } else { self.dtype }
    }

    /// Parameters of the fp64 reference of one head.
    pub fn head(&self) -> HeadParameters {
        HeadParameters { d: self.d, causal: self.causal }
    }

    pub(super) fn query_head_rows(&self) -> HeadRows {
        HeadRows { heads: self.b * self.h, s: self.s, keys: self.keys, causal: self.causal }
    }

    /// Rows of keys and values among which some are drawn for the reference, as
    /// [`Self::query_head_rows`] for queries.
    pub(super) fn selected_key_rows(&self) -> HeadRows {
        HeadRows { heads: self.b * self.h_kv, s: self.keys, ..self.query_head_rows() }
    }

    fn query_elements(&self) -> u64 {
        self.shape().iter().product::<usize>() as u64
    }

    /// Bytes of `like_queries` tensors of the queries' shape and `like_keys` of the keys' shape.
    pub(super) fn bytes(&self, dtype: Dtype, like_queries: u64, like_keys: u64) -> u64 {
        let key_elements = self.key_value_shape().iter().product::<usize>() as u64;
        (like_queries * self.query_elements() + like_keys * key_elements) * dtype.bytes() as u64
    }

    /// Number of query-key pairs that count as work; hidden pairs do not. Under the causal mask,
    /// half of the pairs of queries with keys at their own positions are hidden, by
    /// FlashAttention's convention.
    fn visible_pairs(&self) -> u64 {
        let (heads, s, keys) = ((self.b * self.h) as u64, self.s as u64, self.keys as u64);
        if self.causal { heads * s * (2 * keys - s) / 2 } else { heads * s * keys }
    }

    pub(super) fn inputs(&self, seed: u64, names: &[&str]) -> Tensors {
        let mut inputs = Tensors::new();
        for name in names {
            let tensor = if self.outliers {
                self.normal_with_outliers(seed, name)
            } else {
                draw_tensor(seed, name, self.shape_of_input(name), self.output_dtype_of(), |x| x)
            };
            if let (Dtype::Fp8, TensorData::Bf16(values)) = (self.dtype, tensor.tensor_data()) {
                let [b, heads, rows, d] = self.shape_of_input(name);
                let (operand, scales) = quantise_to_e4m3(values, rows * d);
                inputs = inputs.with(&format!("{name}_e4m3"), [b, heads, rows, d], operand).with(
                    &format!("{name}_scale"),
                    [b, heads],
                    scales,
                );
            } else {
                inputs.insert(name, tensor);
            }
        }
        inputs
    }

    /// Samples N(0, 1) + N(0, 100) · Bernoulli(0.001) in the dtype.
    fn normal_with_outliers(&self, seed: u64, name: &str) -> Tensor {
        let shape = self.shape_of_input(name);
        let len = shape.iter().product();
        let mut values = random::normal_values(seed, name, len);
        let chosen = random::normal_values(seed, &format!("{name} chosen"), len);
        let added = random::normal_values(seed, &format!("{name} added"), len);
        let outliers = chosen.par_iter().zip(&added);
        values.par_iter_mut().zip(outliers).for_each(|(value, (chosen, added))| {
            if chosen.abs() > ONE_IN_A_THOUSAND_DEVIATION {
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

    /// Work of a case: `gemms` GEMMs of 2·d operations for each pair, a softmax of five operations
    /// for each pair, and the bytes read and written.
    pub(super) fn work(&self, gemms: u64, read: u64, written: u64) -> Work {
        Work::bytes(read, written)
            .with_flops(
                FlopUnit::Matmul,
                self.dtype,
                gemms * 2 * self.d as u64 * self.visible_pairs(),
            )
            // Vector operations of a pair in the forward: scale, subtract, exponential, sum and
            // divide; in the backward: scale, subtract, exponential, subtract and multiply.
            .with_flops(FlopUnit::Vector, Dtype::F32, 5 * self.visible_pairs())
    }

    /// Bytes of host memory: tensors in the dtype, the drawn rows in fp64, and one head's matrices
    /// for each thread during the computation.
    pub(super) fn host_bytes(&self, tensors: u64, expected_rows: u64, head_matrices: u64) -> u64 {
        let (s, keys, d) = (self.s as u64, self.keys as u64, self.d as u64);
        let a_thread =
            8 * (head_matrices * s.max(keys) * d + 2 * (BLOCK_ROWS as u64).min(s) * keys);
        // Samples of N(0, 1) in f32, with the choice of outliers and their addends.
        let largest = |dtype| self.bytes(dtype, 1, 0).max(self.bytes(dtype, 0, 1));
        let drawing = if self.outliers { 3 * largest(Dtype::F32) } else { 0 };
        // Operands in fp8 are rounded from the drawn bf16 values.
        let drawn = if self.dtype == Dtype::Fp8 { largest(Dtype::Bf16) } else { 0 };
        drawing
            + drawn
            + tensors
            + expected_rows * d * 8
            + rayon::current_num_threads() as u64 * a_thread
    }
}

/// Rejects shapes whose number of operations overflows 64 bits, so that all later products of
/// extents are exact.
pub(super) fn check_operation_count([b, h, s, d]: [usize; 4]) -> Result<(), AxisError> {
    let operations = [b, h, s, s, d, 64]
        .into_iter()
        .try_fold(1u64, |product, extent| product.checked_mul(extent as u64));
    operations.map(|_| ()).ok_or_else(|| {
        AxisError::Combination("more operations than a 64-bit count holds".to_owned())
    })
}

/// Tolerance of attention outputs. With 16 bits it is about three times the error of rounding the
/// probabilities and the output. This rounding error, which a test emulates, is at most 4e-3 and
/// 2e-3 in bf16, and an eighth of that in f16. In f32 it is about seven times the error of the CPU
/// backend (1e-6 and 4e-7). All tolerances are far below the error of a wrong scale, a missed key
/// or TF32 GEMMs.
pub(super) fn tolerance(dtype: Dtype) -> Tolerance {
    match dtype {
        Dtype::Bf16 => Tolerance { max_error: 1.2e-2, relative_l2: 7e-3 },
        Dtype::F16 => Tolerance { max_error: 1.5e-3, relative_l2: 9e-4 },
        _ => Tolerance { max_error: 8e-6, relative_l2: 3e-6 },
    }
}

/// Tolerance of attention outputs in fp8, relative to rounded operands: two to three times the
/// error of rounding the probabilities, which a test emulates. The error of rounding the operands
/// is a property of the format and of the inputs, not of a row. With outliers this error grows with
/// the number of keys, and the order of two scores may change.
const FP8_OUTPUT_TOLERANCE: Tolerance = Tolerance { max_error: 1.2e-1, relative_l2: 6e-2 };

/// Tensors of one problem, read in fp64 by head and position.
pub(super) struct HeadTensors<'a> {
    pub attention: &'a Attention,
    pub inputs: &'a Tensors,
}

impl HeadTensors<'_> {
    /// Reads the first `positions` of a query head, or of the key-value head that it reads.
    pub(super) fn first_positions(&self, name: &str, head: usize, positions: usize) -> Vec<f64> {
        let [_, heads, rows, d] = self.attention.shape_of_input(name);
        let head = head / (self.attention.h / heads);
        self.read_elements(name, head, head * rows * d, positions * d)
    }

    /// Reads the queries at some positions of a head.
    pub(super) fn selected_queries(
        &self,
        name: &str,
        head: usize,
        positions: &[usize],
    ) -> Vec<f64> {
        let Attention { s, d, .. } = *self.attention;
        let read = |position| self.read_elements(name, head, (head * s + position) * d, d);
        positions.iter().flat_map(read).collect()
    }

    /// Reads `count` elements of a head from element `from` on; fp8 operands are multiplied by
    /// their scale.
    fn read_elements(&self, name: &str, head: usize, from: usize, count: usize) -> Vec<f64> {
        if self.attention.dtype != Dtype::Fp8 {
            return self.inputs.tensor(name).to_f64(from, count);
        }
        let scale = self.inputs.tensor(&format!("{name}_scale")).to_f64(head, 1)[0];
        let codes = self.inputs.tensor(&format!("{name}_e4m3")).to_f64(from, count);
        codes.into_iter().map(|code| f64::from(decode_e4m3(code as i8 as u8)) * scale).collect()
    }

    /// Reads the keys and values that queries at these ascending positions of a head see.
    pub(super) fn visible_keys_and_values(
        &self,
        head: usize,
        positions: &[usize],
    ) -> [Vec<f64>; 2] {
        let Attention { keys, causal, .. } = *self.attention;
        let last =
            positions.last().map_or(0, |last| last + 1 + self.attention.keys_before_first_query());
        let seen = if causal { last } else { keys };
        ["k", "v"].map(|name| self.first_positions(name, head, seen))
    }
}

/// Problem `attention/forward`: computes `out` `[b, h, s, d]` from `q` `[b, h, s, d]`, `k` and `v`
/// `[b, h_kv, keys, d]`; inputs are N(0, 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionForward {
    /// Shape, mask and dtype.
    pub attention: Attention,
}

impl Problem for AttentionForward {
    fn inputs(&self, seed: u64) -> Tensors {
        self.attention.inputs(seed, &["q", "k", "v"])
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let (attention, rows) = (&self.attention, self.attention.query_head_rows());
        let heads = HeadTensors { attention, inputs };
        let expect = |band| {
            rows.expected_output_rows(
                "out",
                &attention.shape(),
                rows.drawn_rows_of_band("out", &band),
                |head, positions| {
                    let [k, v] = heads.visible_keys_and_values(head, positions);
                    let some = |queries: &[usize]| {
                        let positions: Vec<_> = queries
                            .iter()
                            .map(|query| query + attention.keys_before_first_query())
                            .collect();
                        attention.head().attention_output(
                            &heads.selected_queries("q", head, queries),
                            &positions,
                            &k,
                            &v,
                        )
                    };
                    positions.chunks(BLOCK_ROWS).flat_map(some).collect()
                },
            )
        };
        rows.position_bands().into_iter().map(expect).collect()
    }

    /// The heads are independent of each other; with grouped heads, the sequences of the batch are.
    fn symmetries(&self) -> Vec<Symmetry> {
        let [in_heads, in_batch]: [&[(&str, usize)]; 2] = [&[("out", 1)], &[("out", 0)]];
        let (inputs, outputs): (&[(&str, usize)], _) =
            match (self.attention.dtype, self.attention.heads_per_key_head()) {
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
        vec![Symmetry::Roll { inputs, outputs }]
    }

    fn work(&self) -> Work {
        let Attention { dtype, .. } = self.attention;
        let written = self.attention.bytes(self.attention.output_dtype_of(), 1, 0);
        self.attention.work(2, self.attention.bytes(dtype, 1, 2), written)
    }

    fn tolerance(&self) -> Tolerance {
        match self.attention.dtype {
            Dtype::Fp8 => FP8_OUTPUT_TOLERANCE,
            dtype => tolerance(dtype),
        }
    }

    fn host_bytes(&self) -> u64 {
        let Attention { dtype, .. } = self.attention;
        let written = self.attention.bytes(self.attention.output_dtype_of(), 1, 0);
        let tensors = self.attention.bytes(dtype, 1, 2) + written;
        self.attention.host_bytes(tensors, self.attention.query_head_rows().max_drawn_elements(), 2)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
