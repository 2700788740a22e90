//! Workloads that time the three steps of attention (q kᵀ, softmax, p v) as separate kernels, with
//! the scores in memory. The times of the three separate steps show the gain of a fused attention
//! kernel, and how softmax compares with the GEMMs around it. The workloads of the three attention
//! steps have no causal mask; their default shape is b = 4, h = 12, s = 512, d = 64.
//!
//! This module times the three steps of attention one by one; no step reads the output of another
//! step. Each attention step gets random inputs of its own, with about the distribution that the
//! previous step would output.

use super::definition::{
    ATTENTION_DTYPE_AXIS_WITHOUT_FP8, attention_output_tolerance,
    reject_operation_counts_beyond_64_bits,
};
use super::reference::{QUERY_ROWS_PER_BLOCK, SingleHeadParameters};
use crate::draw::draw_tensor_of_mapped_normals;
use crate::math::softmax_in_place_f64;
use crate::parallel;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, InputSymmetry, Point, Problem, Tensors, Tolerance,
    Work, Workload,
};

const B: Axis = Axis::number("b", "batch");
const H: Axis = Axis::number("h", "heads");
const S: Axis = Axis::number("s", "queries and keys of a head");
const D: Axis = Axis::one_of("d", &["64", "128"], "elements of a head");

/// Workload of the first step of attention: scores `q kᵀ / sqrt(d)` in f32.
pub const SCORES_STEP_WORKLOAD: Workload<AttentionScoresProblem> = Workload {
    name: "attention/scores",
    about: "q k^T / sqrt(d), f32 scores in memory",
    revision: 1,
    axes: &[B, H, S, D, ATTENTION_DTYPE_AXIS_WITHOUT_FP8],
    default_selection_lines: &["b=4 h=12 s=512 d=64 dtype=f32"],
    accelerator_selection_lines: &["b=4 h=12 s=512 d=64 dtype=bf16"],
    thorough_selection_lines: &["b=4 h=12 s=65,200,1024 d=64,128 dtype=f32,bf16,f16"],
    bind: |point| {
        Ok(AttentionScoresProblem {
            shape: AttentionComponentShape::attention_step_shape_from_point(
                point,
                point.number("d")?,
            )?,
        })
    },
};

/// Workload of the second step of attention: softmax of f32 scores.
pub const SOFTMAX_STEP_WORKLOAD: Workload<AttentionSoftmaxProblem> = Workload {
    name: "attention/softmax",
    about: "softmax over keys of f32 scores in memory",
    revision: 1,
    axes: &[B, H, S, ATTENTION_DTYPE_AXIS_WITHOUT_FP8],
    default_selection_lines: &["b=4 h=12 s=512 dtype=f32"],
    accelerator_selection_lines: &["b=4 h=12 s=512 dtype=bf16"],
    thorough_selection_lines: &["b=4 h=12 s=65,200,1024 dtype=f32,bf16,f16"],
    bind: |point| {
        Ok(AttentionSoftmaxProblem {
            shape: AttentionComponentShape::attention_step_shape_from_point(point, 1)?,
        })
    },
};

/// Workload of the third step of attention: the output `p v`.
pub const VALUES_STEP_WORKLOAD: Workload<AttentionValuesProblem> = Workload {
    name: "attention/values",
    about: "p v, probabilities from memory",
    revision: 1,
    axes: &[B, H, S, D, ATTENTION_DTYPE_AXIS_WITHOUT_FP8],
    default_selection_lines: &["b=4 h=12 s=512 d=64 dtype=f32"],
    accelerator_selection_lines: &["b=4 h=12 s=512 d=64 dtype=bf16"],
    thorough_selection_lines: &["b=4 h=12 s=65,200,1024 d=64,128 dtype=f32,bf16,f16"],
    bind: |point| {
        Ok(AttentionValuesProblem {
            shape: AttentionComponentShape::attention_step_shape_from_point(
                point,
                point.number("d")?,
            )?,
        })
    },
};

/// Extents and dtype of a problem that is one of the three steps of attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionComponentShape {
    /// Batch.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Number of queries of a head, and also of its keys.
    pub seq_len: usize,
    /// Number of elements in each query, key or value vector of a head; 1 for the softmax step,
    /// which has no such axis.
    pub head_dim: usize,
    /// Dtype of q, k, v, probabilities and output; scores are always f32.
    pub dtype: Dtype,
}

impl AttentionComponentShape {
    fn attention_step_shape_from_point(point: &Point, d: usize) -> Result<Self, AxisError> {
        let [b, h, s] = [point.number("b")?, point.number("h")?, point.number("s")?];
        reject_operation_counts_beyond_64_bits([b, h, s, d])?;
        Ok(Self {
            batch: b,
            heads: h,
            seq_len: s,
            head_dim: d,
            dtype: Dtype::parse_dtype_name(point.word("dtype")?).expect("the axis lists dtypes"),
        })
    }

    /// The shape of q, k, v and the output is `[b, h, s, d]`.
    pub fn query_key_value_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_len, self.head_dim]
    }

    /// The shape of the attention scores and of the probabilities is `[b, h, s, s]`.
    pub fn score_matrix_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_len, self.seq_len]
    }

    fn query_key_pairs_of_all_heads(&self) -> u64 {
        self.score_matrix_shape().iter().map(|&extent| extent as u64).product()
    }

    fn elements_of_q_or_k_or_v(&self) -> u64 {
        self.query_key_value_shape().iter().map(|&extent| extent as u64).product()
    }

    fn head_parameters_without_mask(&self) -> SingleHeadParameters {
        SingleHeadParameters { head_dim: self.head_dim, causal: false }
    }

    /// Concatenates, in row order, the results of `f(head, first_row, rows)` for blocks of rows of
    /// every head, computed in parallel.
    fn concatenate_row_blocks_of_heads(
        &self,
        f: impl Fn(usize, usize, usize) -> Vec<f64> + Sync,
    ) -> Vec<f64> {
        let a_head = self.seq_len.div_ceil(QUERY_ROWS_PER_BLOCK);
        let pieces =
            parallel::map_numbers_in_parallel(self.batch * self.heads * a_head, &|piece| {
                let from = piece % a_head * QUERY_ROWS_PER_BLOCK;
                f(piece / a_head, from, QUERY_ROWS_PER_BLOCK.min(self.seq_len - from))
            });
        pieces.concat()
    }
}

/// Problem `attention/scores`: computes `scores` `[b, h, s, s]` in f32 from `q` and `k` `[b, h, s,
/// d]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionScoresProblem {
    /// Extents and element type of the problem.
    pub shape: AttentionComponentShape,
}

impl Problem for AttentionScoresProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for name in ["q", "k"] {
            inputs.insert(
                name,
                draw_tensor_of_mapped_normals(
                    seed,
                    name,
                    self.shape.query_key_value_shape(),
                    self.shape.dtype,
                    |x| x,
                ),
            );
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let AttentionComponentShape { seq_len: s, head_dim: d, .. } = self.shape;
        let (q, k) = (inputs.tensor("q"), inputs.tensor("k"));
        let scores = self.shape.concatenate_row_blocks_of_heads(|head, from, rows| {
            self.shape.head_parameters_without_mask().scaled_attention_scores(
                &q.elements_to_f64((head * s + from) * d, rows * d),
                &k.elements_to_f64(head * s * d, s * d),
            )
        });
        vec![Expected::all("scores", self.shape.score_matrix_shape(), scores)]
    }

    /// In the scores step of attention, the scores of a head depend only on the inputs of this
    /// head.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![InputSymmetry::RotateAlongAxis {
            inputs_with_axes: &[("q", 1), ("k", 1)],
            outputs_with_axes: &[("scores", 1)],
        }]
    }

    fn work(&self) -> Work {
        let AttentionComponentShape { head_dim: d, dtype, .. } = self.shape;
        Work::bytes(
            2 * self.shape.elements_of_q_or_k_or_v() * dtype.bytes_per_element() as u64,
            4 * self.shape.query_key_pairs_of_all_heads(),
        )
        .with_flops(
            FlopUnit::Matmul,
            dtype,
            2 * self.shape.query_key_pairs_of_all_heads() * d as u64,
        )
    }

    fn tolerance(&self) -> Tolerance {
        // For 16-bit inputs the products of a score are exact; its sum is f32 for every dtype. The
        // error bounds of the scores step are ten times the error measured for the CPU backend.
        Tolerance { max_error: 4e-6, relative_l2: 1.5e-6 }
    }

    fn host_memory_bytes(&self) -> u64 {
        // While the reference's pieces are concatenated, host memory holds the fp64 reference
        // scores twice.
        2 * self.shape.elements_of_q_or_k_or_v() * self.shape.dtype.bytes_per_element() as u64
            + (4 + 2 * 8) * self.shape.query_key_pairs_of_all_heads()
    }
}

/// Problem `attention/softmax`: computes `probabilities` in the dtype from `scores` `[b, h, s, s]`
/// in f32, drawn from N(0, 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSoftmaxProblem {
    /// Extents and element type of the problem.
    pub shape: AttentionComponentShape,
}

impl Problem for AttentionSoftmaxProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        inputs.insert(
            "scores",
            draw_tensor_of_mapped_normals(
                seed,
                "scores",
                self.shape.score_matrix_shape(),
                Dtype::F32,
                |x| x,
            ),
        );
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let s = self.shape.seq_len;
        let probabilities = self.shape.concatenate_row_blocks_of_heads(|head, from, rows| {
            let mut piece =
                inputs.tensor("scores").elements_to_f64((head * s + from) * s, rows * s);
            piece.chunks_mut(s).for_each(softmax_in_place_f64);
            piece
        });
        vec![Expected::all("probabilities", self.shape.score_matrix_shape(), probabilities)]
    }

    /// In the softmax step of attention, each row of probabilities depends only on its own row of
    /// scores.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![InputSymmetry::RotateAlongAxis {
            inputs_with_axes: &[("scores", 2)],
            outputs_with_axes: &[("probabilities", 2)],
        }]
    }

    fn work(&self) -> Work {
        // The softmax step counts five operations for each score: maximum, subtract, exponential,
        // sum and divide.
        let pairs = self.shape.query_key_pairs_of_all_heads();
        Work::bytes(4 * pairs, pairs * self.shape.dtype.bytes_per_element() as u64).with_flops(
            FlopUnit::VectorArithmetic,
            Dtype::F32,
            5 * pairs,
        )
    }

    fn tolerance(&self) -> Tolerance {
        match self.shape.dtype {
            // The softmax has one exponential, one sum and one division for each score; its f32
            // error bounds are ten times the error measured for the CPU backend.
            Dtype::F32 => Tolerance { max_error: 1.5e-6, relative_l2: 8e-7 },
            dtype => attention_output_tolerance(dtype),
        }
    }

    fn host_memory_bytes(&self) -> u64 {
        (4 + self.shape.dtype.bytes_per_element() as u64 + 2 * 8)
            * self.shape.query_key_pairs_of_all_heads()
    }
}

/// Problem `attention/values`: computes `out` `[b, h, s, d]` from `probabilities` `[b, h, s, s]`
/// and `v` `[b, h, s, d]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionValuesProblem {
    /// Extents and element type of the problem.
    pub shape: AttentionComponentShape,
}

impl Problem for AttentionValuesProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let AttentionComponentShape { seq_len: s, dtype, .. } = self.shape;
        // The inputs of the values step draw each probability as x² / s with x from N(0, 1), where
        // s is the number of keys. Probabilities drawn as x² / s are positive and unequal, each row
        // sums to about 1, and no platform-dependent exponential is needed.
        let probability = |x: f32| x * x / s as f32;
        let mut inputs = Tensors::new();
        inputs.insert(
            "probabilities",
            draw_tensor_of_mapped_normals(
                seed,
                "probabilities",
                self.shape.score_matrix_shape(),
                dtype,
                probability,
            ),
        );
        inputs.insert(
            "v",
            draw_tensor_of_mapped_normals(
                seed,
                "v",
                self.shape.query_key_value_shape(),
                dtype,
                |x| x,
            ),
        );
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let AttentionComponentShape { seq_len: s, head_dim: d, .. } = self.shape;
        let (p, v) = (inputs.tensor("probabilities"), inputs.tensor("v"));
        let out = self.shape.concatenate_row_blocks_of_heads(|head, from, rows| {
            self.shape.head_parameters_without_mask().probabilities_times_values(
                &p.elements_to_f64((head * s + from) * s, rows * s),
                &v.elements_to_f64(head * s * d, s * d),
            )
        });
        vec![Expected::all("out", self.shape.query_key_value_shape(), out)]
    }

    /// In the values step of attention, the heads are independent of each other, and so are the
    /// output rows of a head.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![
            InputSymmetry::RotateAlongAxis {
                inputs_with_axes: &[("probabilities", 1), ("v", 1)],
                outputs_with_axes: &[("out", 1)],
            },
            InputSymmetry::RotateAlongAxis {
                inputs_with_axes: &[("probabilities", 2)],
                outputs_with_axes: &[("out", 2)],
            },
        ]
    }

    fn work(&self) -> Work {
        let AttentionComponentShape { head_dim: d, dtype, .. } = self.shape;
        let (pairs, vectors, bytes) = (
            self.shape.query_key_pairs_of_all_heads(),
            self.shape.elements_of_q_or_k_or_v(),
            dtype.bytes_per_element() as u64,
        );
        Work::bytes((pairs + vectors) * bytes, vectors * bytes).with_flops(
            FlopUnit::Matmul,
            dtype,
            2 * pairs * d as u64,
        )
    }

    fn tolerance(&self) -> Tolerance {
        attention_output_tolerance(self.shape.dtype)
    }

    fn host_memory_bytes(&self) -> u64 {
        let (pairs, vectors, bytes) = (
            self.shape.query_key_pairs_of_all_heads(),
            self.shape.elements_of_q_or_k_or_v(),
            self.shape.dtype.bytes_per_element() as u64,
        );
        (pairs + 2 * vectors) * bytes + 2 * 8 * vectors
    }
}
