//! The three steps of attention as separate kernels, with the scores in memory: q kᵀ, softmax, p v.
//! Their times show the gain of a fused kernel, and how softmax compares with the GEMMs around it.
//! The steps have no causal mask; the default shape is b = 4, h = 12, s = 512, d = 64.
//!
//! This module times the three steps of attention one by one and does not chain them. Each step
//! gets its own inputs, drawn with the distribution that a chain of steps would give.

use super::definition::{DTYPE, check_operation_count, tolerance};
use super::reference::{BLOCK_ROWS, HeadParameters};
use crate::draw::draw_tensor;
use crate::math::softmax;
use crate::parallel;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, Point, Problem, Symmetry, Tensors, Tolerance, Work,
    Workload,
};

const B: Axis = Axis::number("b", "batch");
const H: Axis = Axis::number("h", "heads");
const S: Axis = Axis::number("s", "queries and keys of a head");
const D: Axis = Axis::one_of("d", &["64", "128"], "elements of a head");

/// Workload of the first step of attention: scores `q kᵀ / sqrt(d)` in f32.
pub const SCORES: Workload<ScoresProblem> = Workload {
    name: "attention/scores",
    about: "q k^T / sqrt(d), f32 scores in memory",
    revision: 1,
    axes: &[B, H, S, D, DTYPE],
    default: &["b=4 h=12 s=512 d=64 dtype=f32"],
    accelerator: &["b=4 h=12 s=512 d=64 dtype=bf16"],
    thorough: &["b=4 h=12 s=65,200,1024 d=64,128 dtype=f32,bf16,f16"],
    bind: |point| Ok(ScoresProblem { shape: ComponentShape::bind(point, point.number("d")?)? }),
};

/// Workload of the second step of attention: softmax of f32 scores.
pub const SOFTMAX: Workload<SoftmaxProblem> = Workload {
    name: "attention/softmax",
    about: "softmax over keys of f32 scores in memory",
    revision: 1,
    axes: &[B, H, S, DTYPE],
    default: &["b=4 h=12 s=512 dtype=f32"],
    accelerator: &["b=4 h=12 s=512 dtype=bf16"],
    thorough: &["b=4 h=12 s=65,200,1024 dtype=f32,bf16,f16"],
    bind: |point| Ok(SoftmaxProblem { shape: ComponentShape::bind(point, 1)? }),
};

/// Workload of the third step of attention: the output `p v`.
pub const VALUES: Workload<ValuesProblem> = Workload {
    name: "attention/values",
    about: "p v, probabilities from memory",
    revision: 1,
    axes: &[B, H, S, D, DTYPE],
    default: &["b=4 h=12 s=512 d=64 dtype=f32"],
    accelerator: &["b=4 h=12 s=512 d=64 dtype=bf16"],
    thorough: &["b=4 h=12 s=65,200,1024 d=64,128 dtype=f32,bf16,f16"],
    bind: |point| Ok(ValuesProblem { shape: ComponentShape::bind(point, point.number("d")?)? }),
};

/// Extents and dtype of one step of attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ComponentShape {
    /// Batch.
    pub b: usize,
    /// Heads.
    pub h: usize,
    /// Number of queries and of keys of a head.
    pub s: usize,
    /// Number of elements of a head; 1 for the softmax step, which has no such axis.
    pub d: usize,
    /// Dtype of q, k, v, probabilities and output; scores are always f32.
    pub dtype: Dtype,
}

impl ComponentShape {
    fn bind(point: &Point, d: usize) -> Result<Self, AxisError> {
        let [b, h, s] = [point.number("b")?, point.number("h")?, point.number("s")?];
        check_operation_count([b, h, s, d])?;
        Ok(Self {
            b,
            h,
            s,
            d,
            dtype: Dtype::parse(point.word("dtype")?).expect("the axis lists dtypes"),
        })
    }

    /// Shape of q, k, v and the output: `[b, h, s, d]`.
    pub fn vector_shape(&self) -> [usize; 4] {
        [self.b, self.h, self.s, self.d]
    }

    /// Shape of the scores and probabilities: `[b, h, s, s]`.
    pub fn score_shape(&self) -> [usize; 4] {
        [self.b, self.h, self.s, self.s]
    }

    fn query_key_pairs(&self) -> u64 {
        self.score_shape().iter().map(|&extent| extent as u64).product()
    }

    fn vector_elements(&self) -> u64 {
        self.vector_shape().iter().map(|&extent| extent as u64).product()
    }

    fn head(&self) -> HeadParameters {
        HeadParameters { d: self.d, causal: false }
    }

    /// Concatenates the results of `f(head, from, rows)` over pieces of every head, in order.
    fn join_pieces_of_heads(&self, f: impl Fn(usize, usize, usize) -> Vec<f64> + Sync) -> Vec<f64> {
        let a_head = self.s.div_ceil(BLOCK_ROWS);
        let pieces = parallel::parallel_map(self.b * self.h * a_head, &|piece| {
            let from = piece % a_head * BLOCK_ROWS;
            f(piece / a_head, from, BLOCK_ROWS.min(self.s - from))
        });
        pieces.concat()
    }
}

/// Problem `attention/scores`: computes `scores` `[b, h, s, s]` in f32 from `q` and `k` `[b, h, s,
/// d]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoresProblem {
    /// Extents and dtype.
    pub shape: ComponentShape,
}

impl Problem for ScoresProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for name in ["q", "k"] {
            inputs.insert(
                name,
                draw_tensor(seed, name, self.shape.vector_shape(), self.shape.dtype, |x| x),
            );
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let ComponentShape { s, d, .. } = self.shape;
        let (q, k) = (inputs.tensor("q"), inputs.tensor("k"));
        let scores = self.shape.join_pieces_of_heads(|head, from, rows| {
            self.shape.head().scaled_scores(
                &q.to_f64((head * s + from) * d, rows * d),
                &k.to_f64(head * s * d, s * d),
            )
        });
        vec![Expected::all("scores", self.shape.score_shape(), scores)]
    }

    /// The heads are independent of each other.
    fn symmetries(&self) -> Vec<Symmetry> {
        vec![Symmetry::Roll { inputs: &[("q", 1), ("k", 1)], outputs: &[("scores", 1)] }]
    }

    fn work(&self) -> Work {
        let ComponentShape { d, dtype, .. } = self.shape;
        Work::bytes(
            2 * self.shape.vector_elements() * dtype.bytes() as u64,
            4 * self.shape.query_key_pairs(),
        )
        .with_flops(FlopUnit::Matmul, dtype, 2 * self.shape.query_key_pairs() * d as u64)
    }

    fn tolerance(&self) -> Tolerance {
        // For every input dtype, products are exact and sums are f32. The bounds are ten times the
        // error measured for the CPU backend.
        Tolerance { max_error: 4e-6, relative_l2: 1.5e-6 }
    }

    fn host_bytes(&self) -> u64 {
        // The reference is in memory twice while its pieces are concatenated.
        2 * self.shape.vector_elements() * self.shape.dtype.bytes() as u64
            + (4 + 2 * 8) * self.shape.query_key_pairs()
    }
}

/// Problem `attention/softmax`: computes `probabilities` in the dtype from `scores` `[b, h, s, s]`
/// in f32, drawn from N(0, 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftmaxProblem {
    /// Extents and dtype.
    pub shape: ComponentShape,
}

impl Problem for SoftmaxProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        inputs.insert(
            "scores",
            draw_tensor(seed, "scores", self.shape.score_shape(), Dtype::F32, |x| x),
        );
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let s = self.shape.s;
        let probabilities = self.shape.join_pieces_of_heads(|head, from, rows| {
            let mut piece = inputs.tensor("scores").to_f64((head * s + from) * s, rows * s);
            piece.chunks_mut(s).for_each(softmax);
            piece
        });
        vec![Expected::all("probabilities", self.shape.score_shape(), probabilities)]
    }

    /// The rows of the softmax are independent of each other.
    fn symmetries(&self) -> Vec<Symmetry> {
        vec![Symmetry::Roll { inputs: &[("scores", 2)], outputs: &[("probabilities", 2)] }]
    }

    fn work(&self) -> Work {
        // Operations of a score: maximum, subtract, exponential, sum and divide.
        let pairs = self.shape.query_key_pairs();
        Work::bytes(4 * pairs, pairs * self.shape.dtype.bytes() as u64).with_flops(
            FlopUnit::Vector,
            Dtype::F32,
            5 * pairs,
        )
    }

    fn tolerance(&self) -> Tolerance {
        match self.shape.dtype {
            // The softmax has one exponential, one sum and one division a score: the bounds are ten
            // times the error measured for the CPU backend.
            Dtype::F32 => Tolerance { max_error: 1.5e-6, relative_l2: 8e-7 },
            dtype => tolerance(dtype),
        }
    }

    fn host_bytes(&self) -> u64 {
        (4 + self.shape.dtype.bytes() as u64 + 2 * 8) * self.shape.query_key_pairs()
    }
}

/// Problem `attention/values`: computes `out` `[b, h, s, d]` from `probabilities` `[b, h, s, s]`
/// and `v` `[b, h, s, d]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValuesProblem {
    /// Extents and dtype.
    pub shape: ComponentShape,
}

impl Problem for ValuesProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let ComponentShape { s, dtype, .. } = self.shape;
        // Probabilities are drawn as x² / s with x from N(0, 1). The probabilities are positive and
        // unequal, each row sums to about 1, and no exponential that depends on the platform is
        // needed.
        let probability = |x: f32| x * x / s as f32;
        let mut inputs = Tensors::new();
        inputs.insert(
            "probabilities",
            draw_tensor(seed, "probabilities", self.shape.score_shape(), dtype, probability),
        );
        inputs.insert("v", draw_tensor(seed, "v", self.shape.vector_shape(), dtype, |x| x));
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let ComponentShape { s, d, .. } = self.shape;
        let (p, v) = (inputs.tensor("probabilities"), inputs.tensor("v"));
        let out = self.shape.join_pieces_of_heads(|head, from, rows| {
            self.shape.head().weighted_values(
                &p.to_f64((head * s + from) * s, rows * s),
                &v.to_f64(head * s * d, s * d),
            )
        });
        vec![Expected::all("out", self.shape.vector_shape(), out)]
    }

    /// The heads are independent of each other, and so are the rows of a head.
    fn symmetries(&self) -> Vec<Symmetry> {
        vec![
            Symmetry::Roll { inputs: &[("probabilities", 1), ("v", 1)], outputs: &[("out", 1)] },
            Symmetry::Roll { inputs: &[("probabilities", 2)], outputs: &[("out", 2)] },
        ]
    }

    fn work(&self) -> Work {
        let ComponentShape { d, dtype, .. } = self.shape;
        let (pairs, vectors, bytes) =
            (self.shape.query_key_pairs(), self.shape.vector_elements(), dtype.bytes() as u64);
        Work::bytes((pairs + vectors) * bytes, vectors * bytes).with_flops(
            FlopUnit::Matmul,
            dtype,
            2 * pairs * d as u64,
        )
    }

    fn tolerance(&self) -> Tolerance {
        tolerance(self.shape.dtype)
    }

    fn host_bytes(&self) -> u64 {
        let (pairs, vectors, bytes) = (
            self.shape.query_key_pairs(),
            self.shape.vector_elements(),
            self.shape.dtype.bytes() as u64,
        );
        (pairs + 2 * vectors) * bytes + 2 * 8 * vectors
    }
}
