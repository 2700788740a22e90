//! Forward pass of the denoising action expert on the CPU: seven parallel regions in each layer,
//! each over blocks of weight columns or over rows.

use std::sync::Arc;

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, matmul_f32_on_calling_thread};
use pulp::Arch;

use super::element::{
    AdaptiveNormStyleSlices, ada_rms_norm_of_row, add_bias_and_apply_silu, add_bias_in_place,
    add_gated_branch, apply_rope_to_head, exponentials_and_inverse_sum,
    multiply_gelu_of_gate_by_up,
};
use crate::denoise::definition::DenoiseParameters;
use crate::denoise::model::ExpertDimensions;
use crate::parallel;
use kernelgate::backend::cpu::cpu_backend_thread_count;
use kernelgate::workload::Tensors;

/// Minimum number of rows of an adaRMS norm that one parallel CPU task computes.
const MIN_NORM_ROWS_PER_CPU_TASK: usize = 8;

/// Branch of a transformer layer: attention or feed-forward. The discriminant of a layer branch is
/// the index of its style within the layer.
#[derive(Clone, Copy)]
enum TransformerLayerBranch {
    Attention = 0,
    FeedForward = 1,
}

/// Inputs of the denoising action expert on the CPU, and all the memory that computing a velocity
/// needs.
pub struct CpuActionExpert {
    shape: DenoiseParameters,
    inputs: Arc<Tensors>,
    /// Number of denoising times whose styles are stored.
    denoising_time_count: usize,
    /// Cosines and sines of the RoPE angles `[S, E/2]` of the S action tokens, which follow the
    /// prefix.
    rope_cosines: Vec<f32>,
    rope_sines: Vec<f32>,
    /// Embedding of each denoising time, its hidden layer and the condition vector, `[times, W]`
    /// each.
    time_embeddings: Vec<f32>,
    time_hidden_layer: Vec<f32>,
    time_condition_vectors: Vec<f32>,
    /// Norm styles `[2·depth + 1][times, 3W]` for every denoising time: two for each layer, then
    /// the final norm's.
    norm_styles: Vec<f32>,
    /// The residual stream, then the input or output of the current layer branch, `[S, W]` each.
    residual_stream: Vec<f32>,
    branch_input_or_output: Vec<f32>,
    /// Queries `[S, H·E]`, then keys and values of the S action tokens, `[S, E]` each.
    queries: Vec<f32>,
    action_token_keys: Vec<f32>,
    action_token_values: Vec<f32>,
    /// Attention scores `[S·H, P + S]` of the action tokens.
    attention_scores: Vec<f32>,
    /// Inverse sum of the exponentials of each row of attention scores, `[S·H]`.
    inverse_sums_of_exponentials: Vec<f32>,
    /// Attention output of the action tokens, `[S, H·E]`.
    attention_output: Vec<f32>,
    /// Gate of the feed-forward hidden layer, `[S, M]`.
    feed_forward_gate: Vec<f32>,
    feed_forward_up: Vec<f32>,
}

impl CpuActionExpert {
    /// Allocates an action expert on the CPU that can hold the norm styles of `times` denoising
    /// times.
    pub fn allocate_for_denoising_times(
        shape: &DenoiseParameters,
        inputs: Arc<Tensors>,
        times: usize,
    ) -> Self {
        let DenoiseParameters {
            model:
                ExpertDimensions {
                    model_width: width,
                    layer_count: depth,
                    feed_forward_width: mlp,
                    query_heads: heads,
                    head_dim,
                    ..
                },
            action_tokens: s,
            prefix_tokens: p,
            ..
        } = *shape;
        let half = head_dim / 2;
        // RoPE angles are computed in fp64: at positions near 1000, f32 would lose three decimal
        // digits.
        let angle = |i: usize| (p + i / half) as f64 / 1e4f64.powf((i % half) as f64 / half as f64);
        let zeros = |len: usize| vec![0.0; len];
        Self {
            shape: *shape,
            inputs,
            denoising_time_count: times,
            rope_cosines: (0..s * half).map(|i| angle(i).cos() as f32).collect(),
            rope_sines: (0..s * half).map(|i| angle(i).sin() as f32).collect(),
            time_embeddings: zeros(times * width),
            time_hidden_layer: zeros(times * width),
            time_condition_vectors: zeros(times * width),
            norm_styles: zeros((2 * depth + 1) * times * 3 * width),
            residual_stream: zeros(s * width),
            branch_input_or_output: zeros(s * width),
            queries: zeros(s * heads * head_dim),
            action_token_keys: zeros(s * head_dim),
            action_token_values: zeros(s * head_dim),
            attention_scores: zeros(s * heads * shape.prefix_and_horizon_tokens()),
            inverse_sums_of_exponentials: zeros(s * heads),
            attention_output: zeros(s * heads * head_dim),
            feed_forward_gate: zeros(s * mlp),
            feed_forward_up: zeros(s * mlp),
        }
    }

    /// Computes and stores the norm styles of all denoising times; their number must be that of the
    /// allocation.
    pub fn compute_styles_of_times(&mut self, times: &[f64]) {
        let (inputs, width, n) =
            (&*self.inputs, self.shape.model.model_width, self.denoising_time_count);
        assert_eq!(times.len(), n, "as many times as allocated");
        for (row, &t) in self.time_embeddings.chunks_mut(width).zip(times) {
            write_sinusoidal_time_embedding(row, t);
        }
        compute_linear_layer(
            &mut self.time_hidden_layer,
            &self.time_embeddings,
            n,
            inputs,
            ["time_in", "time_in_bias"],
            add_bias_and_apply_silu,
        );
        compute_linear_layer(
            &mut self.time_condition_vectors,
            &self.time_hidden_layer,
            n,
            inputs,
            ["time_out", "time_out_bias"],
            add_bias_and_apply_silu,
        );
        let cond = view_as_row_major_matrix(&self.time_condition_vectors, n);
        let depth = self.shape.model.layer_count;
        parallel::process_chunks_in_parallel(
            &mut self.norm_styles,
            n * 3 * width,
            &|site, styles| {
                let (name, bias, layer) = match (site / 2 < depth, site % 2) {
                    (false, _) => ("final_style", "final_style_bias", 0),
                    (true, 0) => ("style1", "style1_bias", site / 2),
                    (true, _) => ("style2", "style2_bias", site / 2),
                };
                let bias = &inputs.f32_elements(bias)[layer * 3 * width..][..3 * width];
                matmul_f32_on_calling_thread(
                    view_as_mutable_row_major_matrix(styles, n),
                    Accum::Replace,
                    cond,
                    weight_matrix_of_layer(inputs, name, layer),
                    1.0,
                );
                Arch::new().dispatch(|| {
                    styles.chunks_mut(3 * width).for_each(|row| add_bias_in_place(row, bias))
                });
            },
        );
    }

    /// Computes the velocity `v [S, 32]` of actions `x [S, 32]` with the stored styles of denoising
    /// time number `time`.
    pub fn compute_velocity(&mut self, time: usize, x: &[f32], v: &mut [f32]) {
        let (depth, s) = (self.shape.model.layer_count, self.shape.action_tokens);
        compute_linear_layer(
            &mut self.residual_stream,
            x,
            s,
            &self.inputs,
            ["action_in", "action_in_bias"],
            add_bias_in_place,
        );
        for layer in 0..depth {
            self.compute_ada_rms_of_residual(2 * layer, time);
            self.project_queries_keys_and_values_of_layer(layer);
            self.compute_attention_of_layer(layer);
            self.add_projected_branch_to_residual(TransformerLayerBranch::Attention, layer, time);
            self.compute_ada_rms_of_residual(2 * layer + 1, time);
            self.compute_gelu_gate_times_up(layer);
            self.add_projected_branch_to_residual(TransformerLayerBranch::FeedForward, layer, time);
        }
        self.compute_ada_rms_of_residual(2 * depth, time);
        compute_linear_layer(
            v,
            &self.branch_input_or_output,
            s,
            &self.inputs,
            ["action_out", "action_out_bias"],
            add_bias_in_place,
        );
    }

    /// Computes `y = adaRMS(h)` with the stored style of norm number `norm_index` at denoising time
    /// number `time_index`.
    fn compute_ada_rms_of_residual(&mut self, norm_index: usize, time_index: usize) {
        let width = self.shape.model.model_width;
        let style = AdaptiveNormStyleSlices::split_style_row(style_row_of_norm_and_time(
            &self.norm_styles,
            norm_index,
            time_index,
            self.denoising_time_count,
            width,
        ));
        let h = &self.residual_stream;
        parallel::process_chunks_in_parallel(
            &mut self.branch_input_or_output,
            MIN_NORM_ROWS_PER_CPU_TASK * width,
            &|piece, y| {
                let rows = y
                    .chunks_mut(width)
                    .zip(h[piece * MIN_NORM_ROWS_PER_CPU_TASK * width..].chunks(width));
                rows.for_each(|(y, h)| Arch::new().dispatch(|| ada_rms_norm_of_row(y, h, &style)));
            },
        );
    }

    /// Projects `q, k, v = y·W` of one layer in one parallel region, then applies RoPE to k.
    fn project_queries_keys_and_values_of_layer(&mut self, layer: usize) {
        let (inputs, s, y) = (
            &*self.inputs,
            self.shape.action_tokens,
            view_as_row_major_matrix(&self.branch_input_or_output, self.shape.action_tokens),
        );
        let outputs = [
            ("q_proj", &mut self.queries),
            ("k_proj", &mut self.action_token_keys),
            ("v_proj", &mut self.action_token_values),
        ];
        let [q, k, v] = outputs.map(|(name, output)| {
            split_output_and_weight_columns(
                view_as_mutable_row_major_matrix(output, s),
                weight_matrix_of_layer(inputs, name, layer),
            )
        });
        parallel::run_tasks_in_parallel(q.chain(k).chain(v).collect(), &|_, (output, w)| {
            matmul_f32_on_calling_thread(output, Accum::Replace, y, w, 1.0);
        });
        let ExpertDimensions { head_dim, .. } = self.shape.model;
        let half = head_dim / 2;
        let rows = self
            .action_token_keys
            .chunks_mut(head_dim)
            .zip(self.rope_cosines.chunks(half))
            .zip(self.rope_sines.chunks(half));
        Arch::new().dispatch(|| rows.for_each(|((k, cos), sin)| apply_rope_to_head(k, cos, sin)));
    }

    /// Computes a layer's `attended = softmax(q·kᵀ/√E)·v` over the cached prefix and the action
    /// tokens; all query heads share one GEMM, because they share one key-value head.
    fn compute_attention_of_layer(&mut self, layer: usize) {
        let DenoiseParameters { model, action_tokens: s, prefix_tokens: p, .. } = self.shape;
        let (heads, head_dim) = (model.query_heads, model.head_dim);
        let (context, half) = (self.shape.prefix_and_horizon_tokens(), head_dim / 2);
        let cached = |name| {
            let rows = &self.inputs.f32_elements(name)[layer * p * head_dim..][..p * head_dim];
            MatRef::from_row_major_slice(rows, p, head_dim)
        };
        let (k_prefix, v_prefix) = (cached("k_cache").transpose(), cached("v_cache"));
        let (k_suffix, v_suffix) = (
            view_as_row_major_matrix(&self.action_token_keys, s).transpose(),
            view_as_row_major_matrix(&self.action_token_values, s),
        );
        let scale = 1.0 / (head_dim as f32).sqrt();
        let (cos, sin) = (&self.rope_cosines, &self.rope_sines);

        let block = (s * heads).div_ceil(4 * cpu_backend_thread_count()).clamp(16, 128);
        let q = self.queries.chunks_mut(block * head_dim);
        let scores = self.attention_scores.chunks_mut(block * context);
        let attended = self.attention_output.chunks_mut(block * head_dim);
        let inverse_sums = self.inverse_sums_of_exponentials.chunks_mut(block);
        let tasks = q.zip(scores).zip(inverse_sums).zip(attended);
        let tasks = tasks
            .map(|(((q, scores), inverse_sums), attended)| [q, scores, inverse_sums, attended]);
        parallel::run_tasks_in_parallel(
            tasks.collect(),
            &|number, [q, scores, inverse_sums, attended]| {
                let rows = q.len() / head_dim;
                let angles = |row: usize| (number * block + row) / heads * half;
                Arch::new().dispatch(|| {
                    for (row, q) in q.chunks_mut(head_dim).enumerate() {
                        let from = angles(row);
                        apply_rope_to_head(q, &cos[from..from + half], &sin[from..from + half]);
                    }
                });
                let (prefix, suffix) =
                    view_as_mutable_row_major_matrix(scores, rows).split_at_col_mut(p);
                matmul_f32_on_calling_thread(
                    prefix,
                    Accum::Replace,
                    view_as_row_major_matrix(q, rows),
                    k_prefix,
                    scale,
                );
                matmul_f32_on_calling_thread(
                    suffix,
                    Accum::Replace,
                    view_as_row_major_matrix(q, rows),
                    k_suffix,
                    scale,
                );
                // The division by the softmax sum is applied to the 256 attention outputs of a row,
                // not to its thousand scores.
                Arch::new().dispatch(|| {
                    for (row, inverse_sum) in scores.chunks_mut(context).zip(&mut *inverse_sums) {
                        *inverse_sum = exponentials_and_inverse_sum(row);
                    }
                });
                let (prefix, suffix) = view_as_row_major_matrix(scores, rows).split_at_col(p);
                matmul_f32_on_calling_thread(
                    view_as_mutable_row_major_matrix(attended, rows),
                    Accum::Replace,
                    prefix,
                    v_prefix,
                    1.0,
                );
                matmul_f32_on_calling_thread(
                    view_as_mutable_row_major_matrix(attended, rows),
                    Accum::Add,
                    suffix,
                    v_suffix,
                    1.0,
                );
                let rows = attended.chunks_mut(head_dim).zip(inverse_sums);
                Arch::new().dispatch(|| {
                    rows.for_each(|(row, inverse_sum)| {
                        row.iter_mut().for_each(|x| *x *= *inverse_sum)
                    })
                });
            },
        );
    }

    /// Computes `gate = gelu_tanh(y·gate_proj)·(y·up_proj)`.
    fn compute_gelu_gate_times_up(&mut self, layer: usize) {
        let (inputs, s, y) = (
            &*self.inputs,
            self.shape.action_tokens,
            view_as_row_major_matrix(&self.branch_input_or_output, self.shape.action_tokens),
        );
        let gate = split_output_and_weight_columns(
            view_as_mutable_row_major_matrix(&mut self.feed_forward_gate, s),
            weight_matrix_of_layer(inputs, "gate_proj", layer),
        );
        let up = split_output_and_weight_columns(
            view_as_mutable_row_major_matrix(&mut self.feed_forward_up, s),
            weight_matrix_of_layer(inputs, "up_proj", layer),
        );
        parallel::run_tasks_in_parallel(gate.zip(up).collect(), &|_,
                                                                  (
            (mut gate, gate_w),
            (mut up, up_w),
        ): (
            OutputAndWeightColumns,
            OutputAndWeightColumns,
        )| {
            matmul_f32_on_calling_thread(gate.as_mut(), Accum::Replace, y, gate_w, 1.0);
            matmul_f32_on_calling_thread(up.as_mut(), Accum::Replace, y, up_w, 1.0);
            Arch::new().dispatch(|| {
                (0..s).for_each(|row| {
                    multiply_gelu_of_gate_by_up(
                        mutable_row_of_block(&mut gate, row),
                        mutable_row_of_block(&mut up, row),
                    )
                })
            });
        });
    }

    /// Projects a layer branch and adds it to the residual stream, `h += gate·(branch·W)`, with the
    /// gate of the branch's style.
    fn add_projected_branch_to_residual(
        &mut self,
        branch: TransformerLayerBranch,
        layer: usize,
        time: usize,
    ) {
        let (s, width) = (self.shape.action_tokens, self.shape.model.model_width);
        let style = AdaptiveNormStyleSlices::split_style_row(style_row_of_norm_and_time(
            &self.norm_styles,
            2 * layer + branch as usize,
            time,
            self.denoising_time_count,
            width,
        ));
        let (name, input) = match branch {
            TransformerLayerBranch::Attention => ("o_proj", &self.attention_output),
            TransformerLayerBranch::FeedForward => ("down_proj", &self.feed_forward_gate),
        };
        let input = view_as_row_major_matrix(input, s);
        let w = weight_matrix_of_layer(&self.inputs, name, layer);
        let block = weight_columns_per_task(width);
        let h = split_into_column_blocks(
            view_as_mutable_row_major_matrix(&mut self.residual_stream, s),
            block,
        );
        let tasks = split_output_and_weight_columns(
            view_as_mutable_row_major_matrix(&mut self.branch_input_or_output, s),
            w,
        )
        .zip(h)
        .collect();
        parallel::run_tasks_in_parallel(tasks, &|number,
                                                 ((mut y, w), mut h): (
            OutputAndWeightColumns,
            MatMut<f32>,
        )| {
            matmul_f32_on_calling_thread(y.as_mut(), Accum::Replace, input, w, 1.0);
            let gate = &style.branch_gate[number * block..][..y.ncols()];
            Arch::new().dispatch(|| {
                (0..s).for_each(|row| {
                    add_gated_branch(
                        mutable_row_of_block(&mut h, row),
                        gate,
                        mutable_row_of_block(&mut y, row),
                    )
                })
            });
        });
    }
}

/// Computes the sinusoidal embedding of a denoising time t, `[sin(2πt/period), cos(2πt/period)]`,
/// with periods from 4e-3 to 4. The angles of the time embedding reach 1600, so they are computed
/// in fp64 and rounded to f32 once.
fn write_sinusoidal_time_embedding(row: &mut [f32], t: f64) {
    let (sines, cosines) = row.split_at_mut(row.len() / 2);
    let last = (sines.len() - 1).max(1) as f64;
    for (i, (sine, cosine)) in sines.iter_mut().zip(cosines).enumerate() {
        let period = 4e-3 * 1e3f64.powf(i as f64 / last);
        let (sin, cos) = (std::f64::consts::TAU * t / period).sin_cos();
        (*sine, *cosine) = (sin as f32, cos as f32);
    }
}

/// Returns the style row `[3W]` of norm number `site` at denoising time number `time`.
fn style_row_of_norm_and_time(
    styles: &[f32],
    site: usize,
    time: usize,
    times: usize,
    width: usize,
) -> &[f32] {
    &styles[(site * times + time) * 3 * width..][..3 * width]
}

/// Computes `y = finish(x·W, bias)` over `rows` rows in parallel; `finish` gets the columns of one
/// task's block in one row, and their biases.
fn compute_linear_layer(
    y: &mut [f32],
    x: &[f32],
    rows: usize,
    inputs: &Tensors,
    [w, bias]: [&str; 2],
    finish: impl Fn(&mut [f32], &[f32]) + Sync,
) {
    let (w, bias) = (weight_matrix_of_layer(inputs, w, 0), inputs.f32_elements(bias));
    let bias = bias.chunks(weight_columns_per_task(bias.len()));
    let tasks = split_output_and_weight_columns(view_as_mutable_row_major_matrix(y, rows), w)
        .zip(bias)
        .collect();
    parallel::run_tasks_in_parallel(tasks, &|_,
                                             ((mut y, w), bias): (
        OutputAndWeightColumns,
        &[f32],
    )| {
        matmul_f32_on_calling_thread(
            y.as_mut(),
            Accum::Replace,
            view_as_row_major_matrix(x, rows),
            w,
            1.0,
        );
        Arch::new()
            .dispatch(|| (0..rows).for_each(|row| finish(mutable_row_of_block(&mut y, row), bias)));
    });
}

/// Returns the weight matrix of layer number `layer` from a stack `[layers, in, out]`; a single
/// matrix `[in, out]` is layer 0.
fn weight_matrix_of_layer<'a>(inputs: &'a Tensors, name: &str, layer: usize) -> MatRef<'a, f32> {
    let &[.., rows, columns] = inputs.tensor(name).shape() else {
        unreachable!("`{name}` is a matrix")
    };
    MatRef::from_row_major_slice(
        &inputs.f32_elements(name)[layer * rows * columns..][..rows * columns],
        rows,
        columns,
    )
}

/// Number of weight columns in the block of one parallel CPU task. A block of weight columns is
/// small enough for several tasks a thread, and a multiple of the tile of `faer`'s AVX-512 kernel.
fn weight_columns_per_task(columns: usize) -> usize {
    const FAER_TILE_COLUMNS: usize = 96;
    columns
        .div_ceil(4 * cpu_backend_thread_count())
        .next_multiple_of(FAER_TILE_COLUMNS)
        .min(3 * FAER_TILE_COLUMNS)
}

/// A block of output columns, and the weight columns from which a CPU task computes them.
type OutputAndWeightColumns<'a> = (MatMut<'a, f32>, MatRef<'a, f32>);

/// Splits an output matrix into blocks of columns for CPU tasks, each with its weight columns.
fn split_output_and_weight_columns<'a>(
    output: MatMut<'a, f32>,
    weights: MatRef<'a, f32>,
) -> impl Iterator<Item = OutputAndWeightColumns<'a>> {
    let width = weight_columns_per_task(weights.ncols());
    split_into_column_blocks(output, width).scan(0, move |from, output| {
        let weights = weights.subcols(*from, output.ncols());
        *from += output.ncols();
        Some((output, weights))
    })
}

/// Splits a matrix into blocks of `width` columns each; the last block may be narrower.
fn split_into_column_blocks(
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

/// Views a slice as a row-major matrix of `rows` rows, without a copy.
fn view_as_row_major_matrix(values: &[f32], rows: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(values, rows, values.len() / rows)
}

/// Views a mutable slice as a row-major matrix of `rows` rows, without a copy.
fn view_as_mutable_row_major_matrix(values: &mut [f32], rows: usize) -> MatMut<'_, f32> {
    let columns = values.len() / rows;
    MatMut::from_row_major_slice_mut(values, rows, columns)
}

/// Returns row `row` of a block of columns of a row-major matrix, as a mutable slice.
fn mutable_row_of_block<'a>(block: &'a mut MatMut<'_, f32>, row: usize) -> &'a mut [f32] {
    block.as_mut().row_mut(row).try_as_row_major_mut().expect("blocks are row-major").as_slice_mut()
}
