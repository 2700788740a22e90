//! Gradients of all parameters of the language model on the CPU in f32, from the last layer to the
//! first.

use kernelgate_numerics::gemm::{
    Accum, MatMut, MatRef, matmul_f32_on_all_threads, matmul_f32_on_calling_thread,
    row_major_matrix_view,
};

use super::forward::{
    CpuLanguageModel, causal_probabilities_of_head, copy_heads_into_packed_tensor, gain_of_norm,
    view_head_of_sequence, view_weight_as_matrix,
};
use super::steps::{
    add_rms_norm_gradients, apply_rope_to_queries_and_keys, process_rows_in_parallel,
    sigmoid_of_f32, softmax_in_place_f32,
};
use crate::parallel;
use crate::transformer::shape::{ArenaRowsOfTensor, LanguageModelShape, ParameterTensor};
use kernelgate::workload::Tensors;

/// Returns the rows of a parameter tensor in the gradient arena, which has the layout of the
/// parameter arena.
fn gradient_rows_of_weight<'a>(
    shape: &LanguageModelShape,
    gradient: &'a mut [f32],
    weight: ParameterTensor,
) -> &'a mut [f32] {
    let ArenaRowsOfTensor { first_arena_row: first, arena_row_count: rows, .. } =
        shape.arena_rows_of_tensor(weight);
    &mut gradient[first * shape.model_width..][..rows * shape.model_width]
}

impl CpuLanguageModel {
    /// Computes the gradients of the mean loss over all tokens into the gradient arena, and
    /// overwrites the logits with their gradients.
    pub fn compute_all_parameter_gradients(
        &self,
        inputs: &Tensors,
        logits: &mut [f32],
        gradient: &mut [f32],
    ) {
        let shape = self.shape;
        let LanguageModelShape { model_width: d, layers, vocabulary_size: vocabulary, .. } = shape;
        let (tokens, padded) = (shape.tokens_in_batch(), shape.padded_logit_columns());
        gradient_rows_of_weight(&shape, gradient, ParameterTensor::RmsNormGains).fill(0.0);
        gradient_rows_of_weight(&shape, gradient, ParameterTensor::TokenEmbedding).fill(0.0);
        let targets = inputs.f32_elements("targets");
        process_rows_in_parallel(logits, padded, &|token, row| {
            softmax_in_place_f32(&mut row[..vocabulary]);
            row[targets[token] as usize] -= 1.0;
            row.iter_mut().for_each(|x| *x /= tokens as f32);
        });
        let grad_logits = row_major_matrix_view(logits, tokens, padded).subcols(0, vocabulary);
        let head_input = row_major_matrix_view(&self.output_head_input, tokens, d);
        let to = gradient_rows_of_weight(&shape, gradient, ParameterTensor::LogitProjection);
        matmul_f32_on_all_threads(to, grad_logits.transpose(), head_input);
        let mut grad = vec![0.0; tokens * d];
        matmul_f32_on_all_threads(
            &mut grad,
            grad_logits,
            view_weight_as_matrix(&shape, inputs, ParameterTensor::LogitProjection),
        );
        let mut grad_x = vec![0.0; tokens * d];
        self.backpropagate_rms_norm(
            2 * layers,
            inputs,
            &self.residual_after_last_layer,
            &grad,
            &mut grad_x,
            gradient,
        );
        for layer in (0..layers).rev() {
            self.backpropagate_swiglu_block(layer, inputs, &mut grad_x, gradient);
            self.backpropagate_attention_block(layer, inputs, &mut grad_x, gradient);
        }
        let to = gradient_rows_of_weight(&shape, gradient, ParameterTensor::TokenEmbedding);
        for (token, grad) in inputs.f32_elements("tokens").iter().zip(grad_x.chunks(d)) {
            let row = &mut to[*token as usize * d..][..d];
            row.iter_mut().zip(grad).for_each(|(to, grad)| *to += grad);
        }
    }

    fn backpropagate_rms_norm(
        &self,
        norm: usize,
        inputs: &Tensors,
        x: &[f32],
        grad: &[f32],
        grad_x: &mut [f32],
        gradient: &mut [f32],
    ) {
        let d = self.shape.model_width;
        let grad_gain =
            &mut gradient_rows_of_weight(&self.shape, gradient, ParameterTensor::RmsNormGains)
                [norm * d..][..d];
        add_rms_norm_gradients(x, gain_of_norm(&self.shape, inputs, norm), grad, grad_x, grad_gain);
    }

    fn backpropagate_swiglu_block(
        &self,
        number: usize,
        inputs: &Tensors,
        grad_x: &mut [f32],
        gradient: &mut [f32],
    ) {
        let (shape, layer) = (self.shape, &self.layers[number]);
        let (LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. }, tokens) =
            (shape, shape.tokens_in_batch());
        let hidden = row_major_matrix_view(&layer.swiglu_hidden, tokens, ff);
        let to = gradient_rows_of_weight(
            &shape,
            gradient,
            ParameterTensor::DownProjectionOfLayer(number),
        );
        matmul_f32_on_all_threads(to, hidden.transpose(), row_major_matrix_view(grad_x, tokens, d));
        let down =
            view_weight_as_matrix(&shape, inputs, ParameterTensor::DownProjectionOfLayer(number));
        let mut grad_hidden = vec![0.0; tokens * ff];
        matmul_f32_on_all_threads(
            &mut grad_hidden,
            row_major_matrix_view(grad_x, tokens, d),
            down.transpose(),
        );
        let mut grad_gate_up = vec![0.0; tokens * 2 * ff];
        process_rows_in_parallel(&mut grad_gate_up, 2 * ff, &|token, to| {
            let (gate, up) = layer.swiglu_gates_and_ups[token * 2 * ff..][..2 * ff].split_at(ff);
            let (to_gate, to_up) = to.split_at_mut(ff);
            for (column, grad) in grad_hidden[token * ff..][..ff].iter().enumerate() {
                let (x, s) = (gate[column], sigmoid_of_f32(gate[column]));
                to_gate[column] = grad * up[column] * s * (1.0 + x * (1.0 - s));
                to_up[column] = grad * x * s;
            }
        });
        let grad_gate_up = row_major_matrix_view(&grad_gate_up, tokens, 2 * ff);
        let to = gradient_rows_of_weight(
            &shape,
            gradient,
            ParameterTensor::GateUpProjectionOfLayer(number),
        );
        matmul_f32_on_all_threads(
            to,
            grad_gate_up.transpose(),
            row_major_matrix_view(&layer.swiglu_input, tokens, d),
        );
        let mut grad = vec![0.0; tokens * d];
        matmul_f32_on_all_threads(
            &mut grad,
            grad_gate_up,
            view_weight_as_matrix(&shape, inputs, ParameterTensor::GateUpProjectionOfLayer(number)),
        );
        self.backpropagate_rms_norm(
            2 * number + 1,
            inputs,
            &layer.residual_after_attention,
            &grad,
            grad_x,
            gradient,
        );
    }

    fn backpropagate_attention_block(
        &self,
        number: usize,
        inputs: &Tensors,
        grad_x: &mut [f32],
        gradient: &mut [f32],
    ) {
        let (shape, layer) = (self.shape, &self.layers[number]);
        let (d, tokens) = (shape.model_width, shape.tokens_in_batch());
        let to = gradient_rows_of_weight(
            &shape,
            gradient,
            ParameterTensor::AttentionOutputProjectionOfLayer(number),
        );
        let grad = row_major_matrix_view(grad_x, tokens, d);
        matmul_f32_on_all_threads(
            to,
            grad.transpose(),
            row_major_matrix_view(&layer.attention_output, tokens, d),
        );
        let mut grad_attended = vec![0.0; tokens * d];
        matmul_f32_on_all_threads(
            &mut grad_attended,
            grad,
            view_weight_as_matrix(
                &shape,
                inputs,
                ParameterTensor::AttentionOutputProjectionOfLayer(number),
            ),
        );
        let mut grad_qkv = self.gradient_of_rotated_qkv(&layer.qkv, &grad_attended);
        apply_rope_to_queries_and_keys(&shape, &self.table, &mut grad_qkv, -1.0);
        let grad_qkv = row_major_matrix_view(&grad_qkv, tokens, 3 * d);
        let to = gradient_rows_of_weight(
            &shape,
            gradient,
            ParameterTensor::QkvProjectionOfLayer(number),
        );
        matmul_f32_on_all_threads(
            to,
            grad_qkv.transpose(),
            row_major_matrix_view(&layer.qkv_input, tokens, d),
        );
        let mut grad = vec![0.0; tokens * d];
        matmul_f32_on_all_threads(
            &mut grad,
            grad_qkv,
            view_weight_as_matrix(&shape, inputs, ParameterTensor::QkvProjectionOfLayer(number)),
        );
        self.backpropagate_rms_norm(
            2 * number,
            inputs,
            &layer.residual_before_layer,
            &grad,
            grad_x,
            gradient,
        );
    }

    /// Computes the gradients of rotated queries, rotated keys, and values from the gradient of the
    /// attention output.
    fn gradient_of_rotated_qkv(&self, qkv: &[f32], grad_attended: &[f32]) -> Vec<f32> {
        let shape = self.shape;
        let LanguageModelShape { model_width: d, heads, batch, context_tokens: context, .. } =
            shape;
        let scale = 1.0 / (shape.elements_per_head() as f32).sqrt();
        let product = |a: MatRef<'_, f32>, b: MatRef<'_, f32>, factor| {
            let mut out = vec![0.0; a.nrows() * b.ncols()];
            let to = MatMut::from_row_major_slice_mut(&mut out, a.nrows(), b.ncols());
            matmul_f32_on_calling_thread(to, Accum::Replace, a, b, factor);
            out
        };
        let gradients = parallel::map_numbers_in_parallel(batch * heads, &|number| {
            let [query, key, value] =
                [0, 1, 2].map(|operand| view_head_of_sequence(&shape, qkv, 3, operand, number));
            let grad = view_head_of_sequence(&shape, grad_attended, 1, 0, number);
            let p = causal_probabilities_of_head(&shape, query, key);
            let mut grad_scores = product(grad, value.transpose(), 1.0);
            for (row, p) in grad_scores.chunks_mut(context).zip(p.chunks(context)) {
                let mean: f32 = row.iter().zip(p).map(|(grad, p)| grad * p).sum();
                row.iter_mut().zip(p).for_each(|(grad, p)| *grad = p * (*grad - mean));
            }
            let grad_scores = row_major_matrix_view(&grad_scores, context, context);
            [
                product(grad_scores, key, scale),
                product(grad_scores.transpose(), query, scale),
                product(row_major_matrix_view(&p, context, context).transpose(), grad, 1.0),
            ]
        });
        let mut grad_qkv = vec![0.0; shape.tokens_in_batch() * 3 * d];
        let mut operands: [Vec<Vec<f32>>; 3] = Default::default();
        for head in gradients {
            operands.iter_mut().zip(head).for_each(|(heads, values)| heads.push(values));
        }
        for (operand, heads) in operands.iter().enumerate() {
            copy_heads_into_packed_tensor(&shape, &mut grad_qkv, 3, operand, heads);
        }
        grad_qkv
    }
}
