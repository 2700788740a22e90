//! Forward pass of the language model on the CPU in f32, which stores the values that the backward
//! pass reads.

use kernelgate_numerics::gemm::{
    Accum, MatMut, MatRef, matmul_f32_on_all_threads, matmul_f32_on_calling_thread,
    row_major_matrix_view,
};

use super::steps::{
    add_elementwise, apply_rope_to_queries_and_keys, process_rows_in_parallel, rms_norm_of_rows,
    rope_cosines_and_sines, sigmoid_of_f32, softmax_in_place_f32,
};
use crate::parallel;
use crate::transformer::shape::{ArenaRowsOfTensor, LanguageModelShape, ParameterTensor};
use kernelgate::workload::Tensors;

pub struct CpuLayerActivations {
    /// The residual stream before the layer, `[T, d]` for T tokens.
    pub residual_before_layer: Vec<f32>,
    pub qkv_input: Vec<f32>,
    pub qkv: Vec<f32>,
    pub attention_output: Vec<f32>,
    /// The residual stream between the layer's attention and its SwiGLU block.
    pub residual_after_attention: Vec<f32>,
    pub swiglu_input: Vec<f32>,
    pub swiglu_gates_and_ups: Vec<f32>,
    pub swiglu_hidden: Vec<f32>,
}

/// A language model on the CPU: its shape, its RoPE table, and the activations of all layers.
pub struct CpuLanguageModel {
    pub shape: LanguageModelShape,
    pub table: Vec<[f32; 2]>,
    pub layers: Vec<CpuLayerActivations>,
    /// The residual stream after the last layer, which the output head reads.
    pub residual_after_last_layer: Vec<f32>,
    pub output_head_input: Vec<f32>,
    token_losses: Vec<f32>,
}

/// Views a parameter tensor, stored in the input `parameters`, as a matrix.
pub fn view_weight_as_matrix<'a>(
    shape: &LanguageModelShape,
    inputs: &'a Tensors,
    weight: ParameterTensor,
) -> MatRef<'a, f32> {
    let ArenaRowsOfTensor { first_arena_row: first, arena_row_count: rows, .. } =
        shape.arena_rows_of_tensor(weight);
    row_major_matrix_view(
        &inputs.f32_elements("parameters")[first * shape.model_width..][..rows * shape.model_width],
        rows,
        shape.model_width,
    )
}

/// Returns the gain vector of RMSNorm number `norm` from the input `parameters`.
pub fn gain_of_norm<'a>(shape: &LanguageModelShape, inputs: &'a Tensors, norm: usize) -> &'a [f32] {
    let first = shape.arena_rows_of_tensor(ParameterTensor::RmsNormGains).first_arena_row + norm;
    &inputs.f32_elements("parameters")[first * shape.model_width..][..shape.model_width]
}

/// Views one head of one sequence in a tensor `[T, operands·d]`; `operand` selects queries (0),
/// keys (1) or values (2).
pub fn view_head_of_sequence<'a>(
    shape: &LanguageModelShape,
    rows: &'a [f32],
    operands: usize,
    operand: usize,
    number: usize,
) -> MatRef<'a, f32> {
    let (sequence, head) = (number / shape.heads, number % shape.heads);
    let (stride, head_dim) = (operands * shape.model_width, shape.elements_per_head());
    let rows = row_major_matrix_view(rows, shape.tokens_in_batch(), stride);
    let first = sequence * shape.context_tokens;
    rows.submatrix(
        first,
        operand * shape.model_width + head * head_dim,
        shape.context_tokens,
        head_dim,
    )
}

/// Computes the causal softmax probabilities of a head, `[context, context]`; hidden keys get 0.
pub fn causal_probabilities_of_head(
    shape: &LanguageModelShape,
    query: MatRef<'_, f32>,
    key: MatRef<'_, f32>,
) -> Vec<f32> {
    let context = shape.context_tokens;
    let scale = 1.0 / (shape.elements_per_head() as f32).sqrt();
    let mut scores = vec![0.0; context * context];
    let to = MatMut::from_row_major_slice_mut(&mut scores, context, context);
    matmul_f32_on_calling_thread(to, Accum::Replace, query, key.transpose(), scale);
    for (row, scores) in scores.chunks_mut(context).enumerate() {
        let (seen, hidden) = scores.split_at_mut(row + 1);
        softmax_in_place_f32(seen);
        hidden.fill(0.0);
    }
    scores
}

/// Copies the matrices `[context, head_dim]` of all sequences' heads into the columns of one
/// operand (q, k or v) of a tensor `[T, operands·d]`.
pub fn copy_heads_into_packed_tensor(
    shape: &LanguageModelShape,
    to: &mut [f32],
    operands: usize,
    operand: usize,
    heads: &[Vec<f32>],
) {
    let (d, head_dim, context) =
        (shape.model_width, shape.elements_per_head(), shape.context_tokens);
    process_rows_in_parallel(to, operands * d, &|token, row| {
        let (sequence, position) = (token / context, token % context);
        for (head, to) in row[operand * d..][..d].chunks_mut(head_dim).enumerate() {
            let values = &heads[sequence * shape.heads + head];
            to.copy_from_slice(&values[position * head_dim..][..head_dim]);
        }
    });
}

impl CpuLanguageModel {
    pub fn allocate_for_model_shape(shape: &LanguageModelShape) -> Self {
        let tokens = |columns: usize| vec![0.0; shape.tokens_in_batch() * columns];
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, layers, .. } = *shape;
        let layer = |_| CpuLayerActivations {
            residual_before_layer: tokens(d),
            qkv_input: tokens(d),
            qkv: tokens(3 * d),
            attention_output: tokens(d),
            residual_after_attention: tokens(d),
            swiglu_input: tokens(d),
            swiglu_gates_and_ups: tokens(2 * ff),
            swiglu_hidden: tokens(ff),
        };
        Self {
            shape: *shape,
            table: rope_cosines_and_sines(shape),
            layers: (0..layers).map(layer).collect(),
            residual_after_last_layer: tokens(d),
            output_head_input: tokens(d),
            token_losses: tokens(1),
        }
    }

    /// Runs the forward pass: computes the padded logits `[T, padded]` and the loss of each token.
    pub fn run_forward_pass_with_token_losses(&mut self, inputs: &Tensors, logits: &mut [f32]) {
        let shape = self.shape;
        let LanguageModelShape { model_width: d, layers, vocabulary_size: vocabulary, .. } = shape;
        let embedding = view_weight_as_matrix(&shape, inputs, ParameterTensor::TokenEmbedding);
        let tokens = inputs.f32_elements("tokens");
        process_rows_in_parallel(&mut self.residual_after_last_layer, d, &|token, row| {
            let from = embedding.row(tokens[token] as usize);
            row.iter_mut().zip(from.iter()).for_each(|(to, from)| *to = *from);
        });
        for layer in 0..layers {
            self.layers[layer]
                .residual_before_layer
                .copy_from_slice(&self.residual_after_last_layer);
            self.compute_attention_block_of_layer(layer, inputs);
            self.compute_swiglu_block_of_layer(layer, inputs);
        }
        rms_norm_of_rows(
            &self.residual_after_last_layer,
            gain_of_norm(&shape, inputs, 2 * layers),
            &mut self.output_head_input,
        );
        let head = view_weight_as_matrix(&shape, inputs, ParameterTensor::LogitProjection);
        let mut unpadded = vec![0.0; shape.tokens_in_batch() * vocabulary];
        matmul_f32_on_all_threads(
            &mut unpadded,
            row_major_matrix_view(&self.output_head_input, shape.tokens_in_batch(), d),
            head.transpose(),
        );
        process_rows_in_parallel(logits, shape.padded_logit_columns(), &|token, row| {
            row[..vocabulary].copy_from_slice(&unpadded[token * vocabulary..][..vocabulary]);
            row[vocabulary..].fill(0.0);
        });
        let targets = inputs.f32_elements("targets");
        process_rows_in_parallel(&mut self.token_losses, 1, &|token, loss| {
            let mut row = unpadded[token * vocabulary..][..vocabulary].to_vec();
            softmax_in_place_f32(&mut row);
            loss[0] = -row[targets[token] as usize].ln();
        });
    }

    /// Averages the losses of the tokens of each sequence.
    pub fn average_losses_of_sequences(&self, inputs: &Tensors, losses: &mut [f32]) {
        let context = inputs.tensor("tokens").shape()[1];
        for (loss, tokens) in losses.iter_mut().zip(self.token_losses.chunks(context)) {
            *loss = tokens.iter().sum::<f32>() / context as f32;
        }
    }

    fn compute_attention_block_of_layer(&mut self, number: usize, inputs: &Tensors) {
        let (shape, layer) = (self.shape, &mut self.layers[number]);
        let LanguageModelShape { model_width: d, heads, batch, context_tokens: context, .. } =
            shape;
        rms_norm_of_rows(
            &layer.residual_before_layer,
            gain_of_norm(&shape, inputs, 2 * number),
            &mut layer.qkv_input,
        );
        let weights =
            view_weight_as_matrix(&shape, inputs, ParameterTensor::QkvProjectionOfLayer(number));
        let input = row_major_matrix_view(&layer.qkv_input, shape.tokens_in_batch(), d);
        matmul_f32_on_all_threads(&mut layer.qkv, input, weights.transpose());
        apply_rope_to_queries_and_keys(&shape, &self.table, &mut layer.qkv, 1.0);
        let qkv = &layer.qkv;
        let outputs = parallel::map_numbers_in_parallel(batch * heads, &|number| {
            let [query, key, value] =
                [0, 1, 2].map(|operand| view_head_of_sequence(&shape, qkv, 3, operand, number));
            let p = causal_probabilities_of_head(&shape, query, key);
            let mut out = vec![0.0; context * shape.elements_per_head()];
            let to = MatMut::from_row_major_slice_mut(&mut out, context, shape.elements_per_head());
            matmul_f32_on_calling_thread(
                to,
                Accum::Replace,
                row_major_matrix_view(&p, context, context),
                value,
                1.0,
            );
            out
        });
        copy_heads_into_packed_tensor(&shape, &mut layer.attention_output, 1, 0, &outputs);
        let out = view_weight_as_matrix(
            &shape,
            inputs,
            ParameterTensor::AttentionOutputProjectionOfLayer(number),
        );
        let attended = row_major_matrix_view(&layer.attention_output, shape.tokens_in_batch(), d);
        matmul_f32_on_all_threads(&mut layer.residual_after_attention, attended, out.transpose());
        add_elementwise(&mut layer.residual_after_attention, &layer.residual_before_layer);
    }

    fn compute_swiglu_block_of_layer(&mut self, number: usize, inputs: &Tensors) {
        let (shape, layer) = (self.shape, &mut self.layers[number]);
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = shape;
        rms_norm_of_rows(
            &layer.residual_after_attention,
            gain_of_norm(&shape, inputs, 2 * number + 1),
            &mut layer.swiglu_input,
        );
        let weights =
            view_weight_as_matrix(&shape, inputs, ParameterTensor::GateUpProjectionOfLayer(number));
        let input = row_major_matrix_view(&layer.swiglu_input, shape.tokens_in_batch(), d);
        matmul_f32_on_all_threads(&mut layer.swiglu_gates_and_ups, input, weights.transpose());
        let gate_up = &layer.swiglu_gates_and_ups;
        process_rows_in_parallel(&mut layer.swiglu_hidden, ff, &|token, hidden| {
            let (gate, up) = gate_up[token * 2 * ff..][..2 * ff].split_at(ff);
            for (hidden, (gate, up)) in hidden.iter_mut().zip(gate.iter().zip(up)) {
                *hidden = gate * sigmoid_of_f32(*gate) * up;
            }
        });
        let down =
            view_weight_as_matrix(&shape, inputs, ParameterTensor::DownProjectionOfLayer(number));
        matmul_f32_on_all_threads(
            &mut self.residual_after_last_layer,
            row_major_matrix_view(&layer.swiglu_hidden, shape.tokens_in_batch(), ff),
            down,
        );
        add_elementwise(&mut self.residual_after_last_layer, &layer.residual_after_attention);
    }
}
