//! Forward pass of the action expert on the CPU: seven parallel regions in each layer, each over
//! blocks of weight columns or of rows.

use std::sync::Arc;

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f32};
use pulp::Arch;

use super::element::{
    CpuStyle, ada_rms, add, add_gated, apply_rope_to_head, gelu_times, silu_biased,
    softmax_unscaled,
};
use crate::denoise::definition::ActionExpertShape;
use crate::denoise::model::ExpertModel;
use crate::parallel;
use kernelgate::backend::cpu::available_threads;
use kernelgate::workload::Tensors;

/// Minimum number of rows of a norm for one task.
const NORM_ROWS_PER_TASK: usize = 8;

/// Branch of a layer: attention or feed-forward. The number of a branch is the index of its style.
#[derive(Clone, Copy)]
enum LayerBranch {
    Attention = 0,
    FeedForward = 1,
}

/// Inputs of the expert, and all the memory that computing a velocity needs.
pub struct CpuExpert {
    shape: ActionExpertShape,
    inputs: Arc<Tensors>,
    /// Number of times whose styles are stored.
    times: usize,
    /// Rotation angles `[S, E/2]` of the suffix positions.
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Time embedding, its hidden layer and the condition, `[times, W]` each.
    embedding: Vec<f32>,
    hidden: Vec<f32>,
    cond: Vec<f32>,
    /// Styles `[2·depth + 1][times, 3W]`: both styles of each layer, then the final one.
    styles: Vec<f32>,
    /// The residual stream, and the input or output of a branch, `[S, W]`.
    h: Vec<f32>,
    y: Vec<f32>,
    /// Queries `[S, H·E]`, then keys and values, each `[S, E]`.
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[S·H, P + S]`.
    scores: Vec<f32>,
    /// Inverse sum of the exponentials of each row of scores, `[S·H]`.
    inverse_sums: Vec<f32>,
    /// `[S, H·E]`.
    attended: Vec<f32>,
    /// `[S, M]`.
    gate: Vec<f32>,
    up: Vec<f32>,
}

impl CpuExpert {
    /// Allocates the memory for velocities at `times` different times.
    pub fn new(shape: &ActionExpertShape, inputs: Arc<Tensors>, times: usize) -> Self {
        let ActionExpertShape {
            model: ExpertModel { width, depth, mlp, heads, head_dim, .. },
            s,
            p,
            ..
        } = *shape;
        let half = head_dim / 2;
        // Angles are computed in fp64: at positions near 1000, f32 would lose three digits.
        let angle = |i: usize| (p + i / half) as f64 / 1e4f64.powf((i % half) as f64 / half as f64);
        let zeros = |len: usize| vec![0.0; len];
        Self {
            shape: *shape,
            inputs,
            times,
            cos: (0..s * half).map(|i| angle(i).cos() as f32).collect(),
            sin: (0..s * half).map(|i| angle(i).sin() as f32).collect(),
            embedding: zeros(times * width),
            hidden: zeros(times * width),
            cond: zeros(times * width),
            styles: zeros((2 * depth + 1) * times * 3 * width),
            h: zeros(s * width),
            y: zeros(s * width),
            q: zeros(s * heads * head_dim),
            k: zeros(s * head_dim),
            v: zeros(s * head_dim),
            scores: zeros(s * heads * shape.visible_tokens()),
            inverse_sums: zeros(s * heads),
            attended: zeros(s * heads * head_dim),
            gate: zeros(s * mlp),
            up: zeros(s * mlp),
        }
    }

    /// Computes the styles for the times of a loop, whose number was given to `new`.
    pub fn set_loop_times(&mut self, times: &[f64]) {
        let (inputs, width, n) = (&*self.inputs, self.shape.model.width, self.times);
        assert_eq!(times.len(), n, "as many times as allocated");
        for (row, &t) in self.embedding.chunks_mut(width).zip(times) {
            write_time_embedding(row, t);
        }
        linear_layer(
            &mut self.hidden,
            &self.embedding,
            n,
            inputs,
            ["time_in", "time_in_bias"],
            silu_biased,
        );
        linear_layer(
            &mut self.cond,
            &self.hidden,
            n,
            inputs,
            ["time_out", "time_out_bias"],
            silu_biased,
        );
        let cond = matrix_of_rows(&self.cond, n);
        let depth = self.shape.model.depth;
        parallel::for_each_chunk(&mut self.styles, n * 3 * width, &|site, styles| {
            let (name, bias, layer) = match (site / 2 < depth, site % 2) {
                (false, _) => ("final_style", "final_style_bias", 0),
                (true, 0) => ("style1", "style1_bias", site / 2),
                (true, _) => ("style2", "style2_bias", site / 2),
            };
            let bias = &inputs.f32(bias)[layer * 3 * width..][..3 * width];
            multiply_f32(
                mutable_matrix_rows(styles, n),
                Accum::Replace,
                cond,
                weight_matrix(inputs, name, layer),
                1.0,
            );
            Arch::new().dispatch(|| styles.chunks_mut(3 * width).for_each(|row| add(row, bias)));
        });
    }

    /// Computes the velocity `v [S, 32]` of actions `x [S, 32]` at time number `time`.
    pub fn velocity(&mut self, time: usize, x: &[f32], v: &mut [f32]) {
        let (depth, s) = (self.shape.model.depth, self.shape.s);
        linear_layer(&mut self.h, x, s, &self.inputs, ["action_in", "action_in_bias"], add);
        for layer in 0..depth {
            self.normalize_hidden_state(2 * layer, time);
            self.project_queries_keys_values(layer);
            self.compute_layer_attention(layer);
            self.add_branch_to_residual(LayerBranch::Attention, layer, time);
            self.normalize_hidden_state(2 * layer + 1, time);
            self.compute_gated_activation(layer);
            self.add_branch_to_residual(LayerBranch::FeedForward, layer, time);
        }
        self.normalize_hidden_state(2 * depth, time);
        linear_layer(v, &self.y, s, &self.inputs, ["action_out", "action_out_bias"], add);
    }

    /// Computes `y = adaRMS(h)` with style number `site`.
    fn normalize_hidden_state(&mut self, site: usize, time: usize) {
        let width = self.shape.model.width;
        let style =
            CpuStyle::from_row(style_row_of_site(&self.styles, site, time, self.times, width));
        let h = &self.h;
        parallel::for_each_chunk(&mut self.y, NORM_ROWS_PER_TASK * width, &|piece, y| {
            let rows =
                y.chunks_mut(width).zip(h[piece * NORM_ROWS_PER_TASK * width..].chunks(width));
            rows.for_each(|(y, h)| Arch::new().dispatch(|| ada_rms(y, h, &style)));
        });
    }

    /// Computes `q, k, v = y·W` in one parallel region and rotates k.
    fn project_queries_keys_values(&mut self, layer: usize) {
        let (inputs, s, y) = (&*self.inputs, self.shape.s, matrix_of_rows(&self.y, self.shape.s));
        let outputs = [("q_proj", &mut self.q), ("k_proj", &mut self.k), ("v_proj", &mut self.v)];
        let [q, k, v] = outputs.map(|(name, output)| {
            column_blocks(mutable_matrix_rows(output, s), weight_matrix(inputs, name, layer))
        });
        parallel::for_each_task(q.chain(k).chain(v).collect(), &|_, (output, w)| {
            multiply_f32(output, Accum::Replace, y, w, 1.0);
        });
        let ExpertModel { head_dim, .. } = self.shape.model;
        let half = head_dim / 2;
        let rows =
            self.k.chunks_mut(head_dim).zip(self.cos.chunks(half)).zip(self.sin.chunks(half));
        Arch::new().dispatch(|| rows.for_each(|((k, cos), sin)| apply_rope_to_head(k, cos, sin)));
    }

    /// Computes `attended = softmax(q·kᵀ/√E)·v`, with the query rows of all heads in one GEMM,
    /// because all heads share one set of keys and values.
    fn compute_layer_attention(&mut self, layer: usize) {
        let ActionExpertShape { model: ExpertModel { heads, head_dim, .. }, s, p, .. } = self.shape;
        let (context, half) = (self.shape.visible_tokens(), head_dim / 2);
        let cached = |name| {
            let rows = &self.inputs.f32(name)[layer * p * head_dim..][..p * head_dim];
            MatRef::from_row_major_slice(rows, p, head_dim)
        };
        let (k_prefix, v_prefix) = (cached("k_cache").transpose(), cached("v_cache"));
        let (k_suffix, v_suffix) =
            (matrix_of_rows(&self.k, s).transpose(), matrix_of_rows(&self.v, s));
        let scale = 1.0 / (head_dim as f32).sqrt();
        let (cos, sin) = (&self.cos, &self.sin);

        let block = (s * heads).div_ceil(4 * available_threads()).clamp(16, 128);
        let q = self.q.chunks_mut(block * head_dim);
        let scores = self.scores.chunks_mut(block * context);
        let attended = self.attended.chunks_mut(block * head_dim);
        let inverse_sums = self.inverse_sums.chunks_mut(block);
        let tasks = q.zip(scores).zip(inverse_sums).zip(attended);
        let tasks = tasks
            .map(|(((q, scores), inverse_sums), attended)| [q, scores, inverse_sums, attended]);
        parallel::for_each_task(tasks.collect(), &|number, [q, scores, inverse_sums, attended]| {
            let rows = q.len() / head_dim;
            let angles = |row: usize| (number * block + row) / heads * half;
            Arch::new().dispatch(|| {
                for (row, q) in q.chunks_mut(head_dim).enumerate() {
                    let from = angles(row);
                    apply_rope_to_head(q, &cos[from..from + half], &sin[from..from + half]);
                }
            });
            let (prefix, suffix) = mutable_matrix_rows(scores, rows).split_at_col_mut(p);
            multiply_f32(prefix, Accum::Replace, matrix_of_rows(q, rows), k_prefix, scale);
            multiply_f32(suffix, Accum::Replace, matrix_of_rows(q, rows), k_suffix, scale);
            // The division by the sum is applied to the 256 outputs of a row, not to its thousand
            // scores.
            Arch::new().dispatch(|| {
                for (row, inverse_sum) in scores.chunks_mut(context).zip(&mut *inverse_sums) {
                    *inverse_sum = softmax_unscaled(row);
                }
            });
            let (prefix, suffix) = matrix_of_rows(scores, rows).split_at_col(p);
            multiply_f32(
                mutable_matrix_rows(attended, rows),
                Accum::Replace,
                prefix,
                v_prefix,
                1.0,
            );
            multiply_f32(mutable_matrix_rows(attended, rows), Accum::Add, suffix, v_suffix, 1.0);
            let rows = attended.chunks_mut(head_dim).zip(inverse_sums);
            Arch::new().dispatch(|| {
                rows.for_each(|(row, inverse_sum)| row.iter_mut().for_each(|x| *x *= *inverse_sum))
            });
        });
    }

    /// Computes `gate = gelu_tanh(y·gate_proj)·(y·up_proj)`.
    fn compute_gated_activation(&mut self, layer: usize) {
        let (inputs, s, y) = (&*self.inputs, self.shape.s, matrix_of_rows(&self.y, self.shape.s));
        let gate = column_blocks(
            mutable_matrix_rows(&mut self.gate, s),
            weight_matrix(inputs, "gate_proj", layer),
        );
        let up = column_blocks(
            mutable_matrix_rows(&mut self.up, s),
            weight_matrix(inputs, "up_proj", layer),
        );
        parallel::for_each_task(
            gate.zip(up).collect(),
            &|_, ((mut gate, gate_w), (mut up, up_w)): (ColumnBlock, ColumnBlock)| {
                multiply_f32(gate.as_mut(), Accum::Replace, y, gate_w, 1.0);
                multiply_f32(up.as_mut(), Accum::Replace, y, up_w, 1.0);
                Arch::new().dispatch(|| {
                    (0..s).for_each(|row| {
                        gelu_times(
                            mutable_block_row(&mut gate, row),
                            mutable_block_row(&mut up, row),
                        )
                    })
                });
            },
        );
    }

    /// Adds a branch to the residual stream, `h += gate·(branch·W)`, with the gate of the branch's
    /// style.
    fn add_branch_to_residual(&mut self, branch: LayerBranch, layer: usize, time: usize) {
        let (s, width) = (self.shape.s, self.shape.model.width);
        let style = CpuStyle::from_row(style_row_of_site(
            &self.styles,
            2 * layer + branch as usize,
            time,
            self.times,
            width,
        ));
        let (name, input) = match branch {
            LayerBranch::Attention => ("o_proj", &self.attended),
            LayerBranch::FeedForward => ("down_proj", &self.gate),
        };
        let input = matrix_of_rows(input, s);
        let w = weight_matrix(&self.inputs, name, layer);
        let block = columns_per_task_block(width);
        let h = blocks_of_columns(mutable_matrix_rows(&mut self.h, s), block);
        let tasks = column_blocks(mutable_matrix_rows(&mut self.y, s), w).zip(h).collect();
        parallel::for_each_task(
            tasks,
            &|number, ((mut y, w), mut h): (ColumnBlock, MatMut<f32>)| {
                multiply_f32(y.as_mut(), Accum::Replace, input, w, 1.0);
                let gate = &style.gate[number * block..][..y.ncols()];
                Arch::new().dispatch(|| {
                    (0..s).for_each(|row| {
                        add_gated(
                            mutable_block_row(&mut h, row),
                            gate,
                            mutable_block_row(&mut y, row),
                        )
                    })
                });
            },
        );
    }
}

/// Computes the time embedding `[sin(2πt/period), cos(2πt/period)]` with periods from 4e-3 to 4.
/// Angles reach 1600, so they are fp64 and rounded once.
fn write_time_embedding(row: &mut [f32], t: f64) {
    let (sines, cosines) = row.split_at_mut(row.len() / 2);
    let last = (sines.len() - 1).max(1) as f64;
    for (i, (sine, cosine)) in sines.iter_mut().zip(cosines).enumerate() {
        let period = 4e-3 * 1e3f64.powf(i as f64 / last);
        let (sin, cos) = (std::f64::consts::TAU * t / period).sin_cos();
        (*sine, *cosine) = (sin as f32, cos as f32);
    }
}

/// Returns row `time` of style number `site` in `[sites][times, 3W]`.
fn style_row_of_site(
    styles: &[f32],
    site: usize,
    time: usize,
    times: usize,
    width: usize,
) -> &[f32] {
    &styles[(site * times + time) * 3 * width..][..3 * width]
}

/// Computes `y = finish(x·W, bias)` over `rows` rows; `finish` receives pieces of rows.
fn linear_layer(
    y: &mut [f32],
    x: &[f32],
    rows: usize,
    inputs: &Tensors,
    [w, bias]: [&str; 2],
    finish: impl Fn(&mut [f32], &[f32]) + Sync,
) {
    let (w, bias) = (weight_matrix(inputs, w, 0), inputs.f32(bias));
    let bias = bias.chunks(columns_per_task_block(bias.len()));
    let tasks = column_blocks(mutable_matrix_rows(y, rows), w).zip(bias).collect();
    parallel::for_each_task(tasks, &|_, ((mut y, w), bias): (ColumnBlock, &[f32])| {
        multiply_f32(y.as_mut(), Accum::Replace, matrix_of_rows(x, rows), w, 1.0);
        Arch::new()
            .dispatch(|| (0..rows).for_each(|row| finish(mutable_block_row(&mut y, row), bias)));
    });
}

/// Returns matrix number `layer` of a stack `[layers, in, out]`, or the single matrix `[in, out]`.
fn weight_matrix<'a>(inputs: &'a Tensors, name: &str, layer: usize) -> MatRef<'a, f32> {
    let &[.., rows, columns] = inputs.tensor(name).shape() else {
        unreachable!("`{name}` is a matrix")
    };
    MatRef::from_row_major_slice(
        &inputs.f32(name)[layer * rows * columns..][..rows * columns],
        rows,
        columns,
    )
}

/// Number of weight columns in the block of one CPU task. Each thread gets several tasks, a task
/// has whole tiles of `faer`'s AVX-512 kernel, and a block's rows stay close together in memory.
fn columns_per_task_block(columns: usize) -> usize {
    const TILE_COLUMNS: usize = 96;
    columns.div_ceil(4 * available_threads()).next_multiple_of(TILE_COLUMNS).min(3 * TILE_COLUMNS)
}

/// Columns of an output, and the weight columns from which they are computed.
type ColumnBlock<'a> = (MatMut<'a, f32>, MatRef<'a, f32>);

/// Splits an output into column blocks, each with its weight columns.
fn column_blocks<'a>(
    output: MatMut<'a, f32>,
    weights: MatRef<'a, f32>,
) -> impl Iterator<Item = ColumnBlock<'a>> {
    let width = columns_per_task_block(weights.ncols());
    blocks_of_columns(output, width).scan(0, move |from, output| {
        let weights = weights.subcols(*from, output.ncols());
        *from += output.ncols();
        Some((output, weights))
    })
}

/// Splits a matrix into blocks of `width` columns; the last block may be narrower.
fn blocks_of_columns(
    matrix: MatMut<'_, f32>,
    width: usize,
) -> impl Iterator<Item = MatMut<'_, f32>> {
    let mut rest = Some(matrix).filter(|matrix| matrix.ncols() > 0);
    std::iter::from_fn(move || {
        let matrix = rest.take()?;
        if matrix.ncols() <= width {
            return Some(matrix);
        }
        let (block, after) = matrix.split_at_col_mut(width);
        rest = Some(after);
        Some(block)
    })
}

/// Views a slice as a row-major matrix of `rows` rows.
fn matrix_of_rows(values: &[f32], rows: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(values, rows, values.len() / rows)
}

/// Views a mutable slice as a row-major matrix of `rows` rows.
fn mutable_matrix_rows(values: &mut [f32], rows: usize) -> MatMut<'_, f32> {
    let columns = values.len() / rows;
    MatMut::from_row_major_slice_mut(values, rows, columns)
}

/// Returns one row of a block of a row-major matrix.
fn mutable_block_row<'a>(block: &'a mut MatMut<'_, f32>, row: usize) -> &'a mut [f32] {
    block.as_mut().row_mut(row).try_as_row_major_mut().expect("blocks are row-major").as_slice_mut()
}
