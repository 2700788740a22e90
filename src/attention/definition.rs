//! Attention in FlashAttention's configuration, forward and backward; its three components apart
//! are in [`crate::attention::components`].
//!
//! 16,384 tokens and a hidden size of 2048 whatever the sequence length, so that cases compare:
//! b = tokens / s, h = 2048 / d. Source: the benchmark of FlashAttention (arXiv 2205.14135,
//! 2307.08691).
//!
//! Deliberately absent: what an implementation saves between forward and backward, and how. The
//! backward's inputs are q, k, v and the gradient of the output; out and the rows' normalisers are
//! the implementation's own, computed before the timed work.

use half::{bf16, f16};
use rayon::prelude::*;

use super::e4m3;
use super::reference::{HeadConfig, ROWS};
use super::sample::Rows;
use kernelgate::suite::AxisScan;
use kernelgate::workload::{
    Axis, AxisError, Data, Dtype, Expected, Point, Problem, Symmetry, Tensor, Tensors, Tolerance,
    Unit, Work, Workload, random,
};

/// b·s where the axis `tokens` is not given.
const TOKENS: usize = 16_384;
/// h·d.
const HIDDEN: usize = 2048;
/// |N(0, 1)| is above this once in a thousand.
const ONE_IN_A_THOUSAND: f32 = 3.290_526_7;

pub(super) const DTYPE: Axis = Axis::one_of(
    "dtype",
    &["f32", "bf16", "f16"],
    "dtype of inputs and outputs; sums are f32 or better",
);
const DTYPE_OR_FP8: Axis = Axis::one_of(
    "dtype",
    &["f32", "bf16", "f16", "fp8"],
    "dtype of inputs and outputs, sums are f32 or better; fp8, forward only: inputs are e4m3 with \
     a scale a head, the output is bf16, the reference takes the inputs before they were rounded",
);
const AXES: &[Axis] = &[
    Axis::number("s", "sequence length: queries and keys of a head"),
    Axis::one_of("d", &["64", "128"], "elements of a head; h = 2048 / d"),
    Axis::one_of(
        "mask",
        &["full", "causal"],
        "which keys a query sees: all, or those up to its own position",
    ),
    DTYPE_OR_FP8,
    Axis::one_of(
        "inputs",
        &["outliers"],
        "N(0, 1); with outliers, N(0, 100) is added to one element in a thousand",
    ),
    Axis::number("tokens", "b * s, 16384 where absent; b = tokens / s, at least 1"),
];

/// `softmax(q kᵀ / sqrt(d)) v`.
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
        // Small, odd and with outliers: every element is checked, so faults of tails and of
        // numerics are caught.
        "s=200 d=64 mask=causal dtype=bf16 inputs=outliers tokens=1600",
        // The longest sequence whose scores fit the memory that every rung may use.
        "s=1024 d=128 mask=full dtype=bf16",
        "s=4096 d=128 mask=causal dtype=bf16",
    ],
    thorough: &[
        "s=1,7,65,129,200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 tokens=2000",
        "s=200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 inputs=outliers tokens=2000",
        "s=128,256,512,1024,2048,4096,8192,16384 d=64,128 mask=full,causal dtype=bf16",
        "s=128,256,512,1024,2048,4096 d=64,128 mask=full,causal dtype=f32",
        "s=512,4096 d=64,128 mask=full,causal dtype=f16",
        "s=1,129,1000 d=128 mask=full,causal dtype=fp8 tokens=2000",
        "s=1000 d=128 mask=full,causal dtype=fp8 inputs=outliers tokens=2000",
        "s=1024,4096,16384 d=128 mask=full,causal dtype=fp8",
        "s=4096 d=128 mask=full dtype=fp8 inputs=outliers",
    ],
    bind: |point| Ok(AttentionForward { attention: Attention::bind(point)? }),
};

/// Sequence lengths around 4096, and both head dimensions and masks at two of them.
pub const SCAN: AxisScan = AxisScan {
    lines: &[
        "s=512,1024,2048,4096,8192,16384 d=128 mask=causal dtype=bf16",
        "s=4096,16384 d=64,128 mask=full,causal dtype=bf16",
    ],
    // The first one runs on sm_90a only: elsewhere `--axis` shows every row.
    rows: &["cuda/flash_wgmma", "cuda/cudnn"],
};

/// Gradients of q, k and v.
pub const BACKWARD: Workload<AttentionBackward> = Workload {
    name: "attention/backward",
    about: "gradients of q, k and v from the gradient of the output; the forward is not timed",
    revision: 1,
    axes: AXES,
    default: &["s=512 d=64 mask=causal dtype=f32", "s=200 d=64 mask=causal dtype=f32 tokens=1600"],
    accelerator: &[
        "s=200 d=64 mask=causal dtype=bf16 inputs=outliers tokens=1600",
        "s=1024 d=128 mask=full dtype=bf16",
        "s=4096 d=128 mask=causal dtype=bf16",
    ],
    thorough: &[
        "s=1,7,65,129,200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 tokens=2000",
        "s=200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 inputs=outliers tokens=2000",
        "s=128,256,512,1024,2048,4096,8192,16384 d=64,128 mask=full,causal dtype=bf16",
        "s=128,256,512,1024,2048 d=64,128 mask=full,causal dtype=f32",
        "s=512,4096 d=64,128 mask=full,causal dtype=f16",
    ],
    bind: |point| match Attention::bind(point)? {
        Attention { dtype: Dtype::Fp8, .. } => {
            Err(AxisError::Combination("fp8 has no gradients".to_owned()))
        }
        attention => Ok(AttentionBackward { attention }),
    },
};

/// What inputs and references follow from.
const DEFINITION: &[&str] =
    &[include_str!("definition.rs"), include_str!("reference.rs"), include_str!("sample.rs")];

/// What both directions share. Tensors are `[b, h, s, d]`, contiguous.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Batch.
    pub b: usize,
    /// Heads.
    pub h: usize,
    /// Queries and keys of a head.
    pub s: usize,
    /// Elements of a head.
    pub d: usize,
    /// Whether query i sees keys 0..=i only.
    pub causal: bool,
    /// Dtype of inputs and outputs. Fp8: of the GEMMs' operands; there are the inputs of bf16 that
    /// the reference takes, and of each the operand, `q_e4m3`, with a scale a head, `q_scale`.
    pub dtype: Dtype,
    /// Whether N(0, 100) is added to one input element in a thousand: FlashAttention-3's test of
    /// 16-bit numerics.
    pub outliers: bool,
}

impl Attention {
    fn bind(point: &Point) -> Result<Self, AxisError> {
        let (s, d) = (point.number("s")?, point.number("d")?);
        let tokens = if point.get("tokens").is_some() { point.number("tokens")? } else { TOKENS };
        let attention = Self {
            b: (tokens / s).max(1),
            h: HIDDEN / d,
            s,
            d,
            causal: point.word("mask")? == "causal",
            dtype: match point.word("dtype")? {
                "fp8" => Dtype::Fp8,
                name => Dtype::parse(name).expect("the axis lists dtypes"),
            },
            outliers: point.get("inputs").is_some(),
        };
        check_size([attention.b, attention.h, s, d])?;
        Ok(attention)
    }

    /// `[b, h, s, d]`.
    pub fn shape(&self) -> [usize; 4] {
        [self.b, self.h, self.s, self.d]
    }

    /// Dtype of outputs.
    pub fn output_dtype(&self) -> Dtype {
        if self.dtype == Dtype::Fp8 { Dtype::Bf16 } else { self.dtype }
    }

    /// The mathematics of one head.
    pub fn head(&self) -> HeadConfig {
        HeadConfig { d: self.d, causal: self.causal }
    }

    fn rows(&self) -> Rows {
        Rows { heads: self.b * self.h, s: self.s, causal: self.causal }
    }

    fn elements(&self) -> u64 {
        (self.b * self.h * self.s * self.d) as u64
    }

    /// Query-key pairs that count: half of them under the causal mask, by FlashAttention's
    /// convention.
    fn pairs(&self) -> u64 {
        let pairs = (self.b * self.h) as u64 * (self.s as u64).pow(2);
        if self.causal { pairs / 2 } else { pairs }
    }

    fn inputs(&self, seed: u64, names: &[&str]) -> Tensors {
        let mut inputs = Tensors::new();
        for name in names {
            let tensor = if self.outliers {
                self.with_outliers(seed, name)
            } else {
                draw(seed, name, &self.shape(), self.output_dtype(), |x| x)
            };
            if let (Dtype::Fp8, Data::Bf16(values)) = (self.dtype, tensor.data()) {
                let (operand, scales) = e4m3::quantised(values, self.s * self.d);
                inputs = inputs.with(&format!("{name}_e4m3"), self.shape(), operand).with(
                    &format!("{name}_scale"),
                    [self.b, self.h],
                    scales,
                );
            }
            inputs.insert(name, tensor);
        }
        inputs
    }

    /// N(0, 1) + N(0, 100) · Bernoulli(0.001) in the dtype.
    fn with_outliers(&self, seed: u64, name: &str) -> Tensor {
        let len = self.elements() as usize;
        let mut values = random::normal(seed, name, len);
        let chosen = random::normal(seed, &format!("{name} chosen"), len);
        let added = random::normal(seed, &format!("{name} added"), len);
        for ((value, chosen), added) in values.iter_mut().zip(chosen).zip(added) {
            if chosen.abs() > ONE_IN_A_THOUSAND {
                *value += 10.0 * added;
            }
        }
        let data = match self.dtype {
            Dtype::F16 => Data::F16(values.into_iter().map(f16::from_f32).collect()),
            Dtype::Bf16 | Dtype::Fp8 => {
                Data::Bf16(values.into_iter().map(bf16::from_f32).collect())
            }
            _ => Data::F32(values),
        };
        Tensor::new(self.shape(), data)
    }

    /// `gemms` GEMMs of 2·d operations a pair each, softmax of five a pair, `tensors` read and
    /// written.
    fn work(&self, gemms: u64, read: u64, written: u64) -> Work {
        let bytes = |dtype: Dtype| self.elements() * dtype.bytes() as u64;
        Work::bytes(read * bytes(self.dtype), written * bytes(self.output_dtype()))
            .with_flops(Unit::Matmul, self.dtype, gemms * 2 * self.d as u64 * self.pairs())
            // Scale, subtract, exponential, sum and divide; backward: scale, subtract, exponential,
            // subtract and multiply.
            .with_flops(Unit::Vector, Dtype::F32, 5 * self.pairs())
    }

    /// Memory of `tensors` in the dtype, of the drawn rows in fp64, and of one head a thread while
    /// they are computed.
    fn host_bytes(&self, tensors: u64, expected_rows: u64, head_matrices: u64) -> u64 {
        let (s, d) = (self.s as u64, self.d as u64);
        let a_thread = 8 * (head_matrices * s * d + 2 * (ROWS as u64).min(s) * s);
        let drawing = if self.outliers { 3 * 4 * self.elements() } else { 0 };
        let operands = if self.dtype == Dtype::Fp8 { self.dtype.bytes() } else { 0 };
        drawing
            + tensors * self.elements() * (self.output_dtype().bytes() + operands) as u64
            + expected_rows * d * 8
            + rayon::current_num_threads() as u64 * a_thread
    }
}

/// Rejects shapes whose operations no 64-bit count holds: then every product of extents below is
/// exact.
pub(super) fn check_size([b, h, s, d]: [usize; 4]) -> Result<(), AxisError> {
    let operations = [b, h, s, s, d, 64]
        .into_iter()
        .try_fold(1u64, |product, extent| product.checked_mul(extent as u64));
    operations.map(|_| ()).ok_or_else(|| {
        AxisError::Combination("more operations than a 64-bit count holds".to_owned())
    })
}

/// `f(N(0, 1))` in the dtype.
pub(super) fn draw(
    seed: u64,
    name: &str,
    shape: &[usize],
    dtype: Dtype,
    f: impl Fn(f32) -> f32 + Sync,
) -> Tensor {
    let len = shape.iter().product();
    let data = match dtype {
        Dtype::F16 => Data::F16(random::map_normal(seed, name, len, |x| f16::from_f32(f(x)))),
        Dtype::Bf16 => Data::Bf16(random::map_normal(seed, name, len, |x| bf16::from_f32(f(x)))),
        _ => Data::F32(random::map_normal(seed, name, len, f)),
    };
    Tensor::new(shape, data)
}

/// Tolerance of outputs. 16 bits: about three times the error of rounding alone, of the
/// probabilities as operands and of the output (a test emulates it: 4e-3 and 2e-3 in bf16, an
/// eighth in f16). f32: about seven times the error of the CPU backend (1e-6 and 4e-7). All are far
/// below the error of a wrong scale, a missed key or TF32 GEMMs.
pub(super) fn tolerance(dtype: Dtype) -> Tolerance {
    match dtype {
        Dtype::Bf16 => Tolerance { max_error: 1.2e-2, relative_l2: 7e-3 },
        Dtype::F16 => Tolerance { max_error: 1.5e-3, relative_l2: 9e-4 },
        _ => Tolerance { max_error: 8e-6, relative_l2: 3e-6 },
    }
}

/// Tolerance of outputs in fp8: about twice to three times the error of rounding alone, of inputs
/// and probabilities (a test emulates it: 8e-2 and 5e-2; with outliers, which the largest of a head
/// leave fewer bits to the others, more, and the more keys there are: 4e-2 and 9e-2 of 4096).
fn fp8_tolerance(outliers: bool) -> Tolerance {
    if outliers {
        Tolerance { max_error: 3e-1, relative_l2: 2e-1 }
    } else {
        Tolerance { max_error: 2e-1, relative_l2: 1.2e-1 }
    }
}

/// Tolerance of gradients: as [`tolerance`], where the gradient of the scores and the saved output
/// are rounded too (5e-3 and 3e-3 in bf16; with outliers, whose gradients are differences of larger
/// numbers, 9e-3 and 5e-3).
fn gradient_tolerance(dtype: Dtype, outliers: bool) -> Tolerance {
    match (dtype, outliers) {
        (Dtype::Bf16, false) => Tolerance { max_error: 1.5e-2, relative_l2: 9e-3 },
        (Dtype::Bf16, true) => Tolerance { max_error: 2.6e-2, relative_l2: 1.4e-2 },
        (Dtype::F16, false) => Tolerance { max_error: 1.9e-3, relative_l2: 1.1e-3 },
        (Dtype::F16, true) => Tolerance { max_error: 3.3e-3, relative_l2: 1.8e-3 },
        _ => Tolerance { max_error: 1e-5, relative_l2: 4e-6 },
    }
}

/// Tensors of one problem, read in fp64 by head and position.
struct Heads<'a> {
    attention: &'a Attention,
    inputs: &'a Tensors,
}

impl Heads<'_> {
    /// The first `positions` of a head.
    fn first(&self, name: &str, head: usize, positions: usize) -> Vec<f64> {
        let Attention { s, d, .. } = *self.attention;
        self.inputs.tensor(name).to_f64(head * s * d, positions * d)
    }

    /// Some positions of a head.
    fn some(&self, name: &str, head: usize, positions: &[usize]) -> Vec<f64> {
        let (tensor, Attention { s, d, .. }) = (self.inputs.tensor(name), *self.attention);
        positions.iter().flat_map(|position| tensor.to_f64((head * s + position) * d, d)).collect()
    }

    /// The keys and values that ascending positions of a head see.
    fn seen(&self, head: usize, positions: &[usize]) -> [Vec<f64>; 2] {
        let Attention { s, causal, .. } = *self.attention;
        let seen = if causal { positions.last().map_or(0, |last| last + 1) } else { s };
        ["k", "v"].map(|name| self.first(name, head, seen))
    }
}

/// `attention/forward`: `q`, `k`, `v` to `out`, all `[b, h, s, d]`; inputs N(0, 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionForward {
    /// Shape, mask and dtype.
    pub attention: Attention,
}

impl Problem for AttentionForward {
    fn definition(&self) -> &'static [&'static str] {
        DEFINITION
    }

    fn inputs(&self, seed: u64) -> Tensors {
        self.attention.inputs(seed, &["q", "k", "v"])
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let (attention, rows) = (&self.attention, self.attention.rows());
        let heads = Heads { attention, inputs };
        let expect = |band| {
            rows.expect("out", &attention.shape(), rows.drawn("out", &band), |head, positions| {
                let [k, v] = heads.seen(head, positions);
                let some = |positions| {
                    attention.head().forward(&heads.some("q", head, positions), positions, &k, &v)
                };
                positions.chunks(ROWS).flat_map(some).collect()
            })
        };
        rows.bands().into_iter().map(expect).collect()
    }

    /// Heads are independent.
    fn symmetries(&self) -> Vec<Symmetry> {
        let inputs: &[(&str, usize)] = match self.attention.dtype {
            Dtype::Fp8 => &[
                ("q_e4m3", 1),
                ("k_e4m3", 1),
                ("v_e4m3", 1),
                ("q_scale", 1),
                ("k_scale", 1),
                ("v_scale", 1),
            ],
            _ => &[("q", 1), ("k", 1), ("v", 1)],
        };
        vec![Symmetry::Roll { inputs, outputs: &[("out", 1)] }]
    }

    fn work(&self) -> Work {
        self.attention.work(2, 3, 1)
    }

    fn tolerance(&self) -> Tolerance {
        match self.attention.dtype {
            Dtype::Fp8 => fp8_tolerance(self.attention.outliers),
            dtype => tolerance(dtype),
        }
    }

    fn host_bytes(&self) -> u64 {
        self.attention.host_bytes(4, self.attention.rows().drawn_at_most(), 2)
    }
}

/// `attention/backward`: `q`, `k`, `v` and `grad_out` to `grad_q`, `grad_k` and `grad_v`, all
/// `[b, h, s, d]`.
///
/// The work is the backward alone: five GEMMs for the forward's two (2.5 times), the scores
/// recomputed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionBackward {
    /// Shape, mask and dtype.
    pub attention: Attention,
}

impl Problem for AttentionBackward {
    fn definition(&self) -> &'static [&'static str] {
        DEFINITION
    }

    fn inputs(&self, seed: u64) -> Tensors {
        self.attention.inputs(seed, &["q", "k", "v", "grad_out"])
    }

    /// Rows of `grad_q` are drawn from all heads. A row of `grad_k` or `grad_v` needs every query
    /// of its head: whole heads are drawn for those.
    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let (attention, rows) = (&self.attention, self.attention.rows());
        let Attention { s, d, .. } = *attention;
        let heads = Heads { attention, inputs };
        let shape = attention.shape();
        let mut expected = Vec::new();
        for band in rows.bands() {
            expected.push(rows.expect(
                "grad_q",
                &shape,
                rows.drawn("grad_q", &band),
                |head, positions| {
                    let [k, v] = heads.seen(head, positions);
                    let some = |positions| {
                        let [q, grad_out] =
                            ["q", "grad_out"].map(|name| heads.some(name, head, positions));
                        attention.head().query_gradients(&q, &grad_out, positions, &k, &v)
                    };
                    positions.chunks(ROWS).flat_map(some).collect()
                },
            ));
        }
        let drawn = rows.drawn_heads("grad_k and grad_v");
        let gradients: Vec<(Vec<f64>, Vec<f64>)> = drawn
            .par_iter()
            .map(|&head| {
                let [q, grad_out, k, v] =
                    ["q", "grad_out", "k", "v"].map(|name| heads.first(name, head, s));
                attention.head().key_value_gradients(&q, &grad_out, &k, &v)
            })
            .collect();
        let (grad_k, grad_v): (Vec<_>, Vec<_>) = gradients.into_iter().unzip();
        for (name, gradients) in [("grad_k", grad_k), ("grad_v", grad_v)] {
            for band in rows.bands() {
                let drawn_rows = drawn
                    .iter()
                    .flat_map(|head| band.clone().map(move |position| head * s + position))
                    .collect();
                expected.push(rows.expect(name, &shape, drawn_rows, |head, positions| {
                    let of_head =
                        &gradients[drawn.binary_search(&head).expect("rows are of drawn heads")];
                    positions
                        .iter()
                        .flat_map(|position| &of_head[position * d..][..d])
                        .copied()
                        .collect()
                }));
            }
        }
        expected
    }

    /// Heads are independent, and gradients linear in the gradient of the output.
    fn symmetries(&self) -> Vec<Symmetry> {
        vec![
            Symmetry::Roll {
                inputs: &[("q", 1), ("k", 1), ("v", 1), ("grad_out", 1)],
                outputs: &[("grad_q", 1), ("grad_k", 1), ("grad_v", 1)],
            },
            Symmetry::Negate { inputs: &["grad_out"], outputs: &["grad_q", "grad_k", "grad_v"] },
        ]
    }

    fn work(&self) -> Work {
        self.attention.work(5, 4, 3)
    }

    fn tolerance(&self) -> Tolerance {
        gradient_tolerance(self.attention.dtype, self.attention.outliers)
    }

    fn host_bytes(&self) -> u64 {
        let rows = self.attention.rows();
        let whole_heads = (rows.drawn_heads("").len() * rows.s) as u64;
        // The gradients of the drawn heads are held twice while they are cut into bands.
        self.attention.host_bytes(7, rows.drawn_at_most() + 4 * whole_heads, 6)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
