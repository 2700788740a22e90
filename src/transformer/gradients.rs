//! Gradients of the language model's parameters in fp64, and the AdamW step that follows from them.

use super::reference::{
    F64Matrix, LanguageModelReference, ReferenceLayerActivations, RmsNormalizedRows,
    process_f64_rows_in_parallel,
};
use super::shape::{
    ADAMW_BETA_1, ADAMW_BETA_2, ADAMW_EPSILON, ADAMW_LEARNING_RATE, ADAMW_WEIGHT_DECAY,
    ArenaRowsOfTensor, LanguageModelShape, ParameterTensor, TRAINING_STATE_INPUTS,
    TRAINING_STATE_OUTPUTS,
};
use crate::math::{sigmoid_f64, softmax_in_place_f64};
use crate::parallel;
use kernelgate::workload::{Expected, Tensors};
use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, matmul_f64_on_calling_thread};

/// Gradient of some rows of one parameter tensor in fp64.
pub struct SampledWeightGradient {
    /// Position of the parameter tensor in the arena.
    pub tensor: ArenaRowsOfTensor,
    /// Indices of the sampled rows, ascending, counted from the tensor's first row.
    pub sampled_row_indices: Vec<usize>,
    /// Gradients of the sampled rows in fp64, one row after the other.
    pub sampled_row_gradients: Vec<f64>,
}

/// Computes the expected outputs of a training step: losses, and the sampled rows of the new
/// parameters and moments.
pub fn expected_training_step_outputs(
    shape: &LanguageModelShape,
    inputs: &Tensors,
    round: fn(f64) -> f64,
) -> Vec<Expected> {
    let reference = LanguageModelReference::run_forward_pass(shape, inputs, round);
    let mut expected =
        vec![Expected::all("loss", [shape.batch, 1], reference.mean_losses_of_sequences())];
    for gradient in reference.mean_loss_gradients() {
        let updated = adamw_step_of_gradient_rows(shape, inputs, &gradient);
        let rows: Vec<usize> = gradient
            .sampled_row_indices
            .iter()
            .map(|row| gradient.tensor.first_arena_row + row)
            .collect();
        for (name, values) in TRAINING_STATE_OUTPUTS.into_iter().zip(updated) {
            let shape = [shape.rows_in_parameter_arena(), shape.model_width];
            expected.push(Expected::sampled_rows(name, shape, rows.clone(), values));
        }
    }
    expected
}

/// Computes the AdamW step in fp64 for the rows of a gradient; returns the new parameters, first
/// moments and second moments of these rows.
pub fn adamw_step_of_gradient_rows(
    shape: &LanguageModelShape,
    inputs: &Tensors,
    gradient: &SampledWeightGradient,
) -> [Vec<f64>; 3] {
    let steps = f64::from(inputs.f32_elements("steps")[0]) + 1.0;
    let corrections = [ADAMW_BETA_1, ADAMW_BETA_2].map(|beta| 1.0 - beta.powf(steps));
    let mut updated: [Vec<f64>; 3] = Default::default();
    for (row, gradient_row) in gradient
        .sampled_row_indices
        .iter()
        .zip(gradient.sampled_row_gradients.chunks(shape.model_width))
    {
        let from = (gradient.tensor.first_arena_row + row) * shape.model_width;
        let [p, m, v] = TRAINING_STATE_INPUTS
            .map(|name| inputs.tensor(name).elements_to_f64(from, shape.model_width));
        for (column, g) in gradient_row.iter().enumerate() {
            let m = ADAMW_BETA_1 * m[column] + (1.0 - ADAMW_BETA_1) * g;
            let v = ADAMW_BETA_2 * v[column] + (1.0 - ADAMW_BETA_2) * g * g;
            let direction = m / corrections[0] / ((v / corrections[1]).sqrt() + ADAMW_EPSILON);
            let p = p[column] - ADAMW_LEARNING_RATE * (ADAMW_WEIGHT_DECAY * p[column] + direction);
            updated.iter_mut().zip([p, m, v]).for_each(|(to, value)| to.push(value));
        }
    }
    updated
}

impl LanguageModelReference<'_> {
    /// Computes the gradients of the mean loss over all tokens, for the compared rows of every
    /// parameter tensor.
    pub fn mean_loss_gradients(&self) -> Vec<SampledWeightGradient> {
        let LanguageModelShape { layers, model_width: d, .. } = self.shape;
        let mut gradients = Vec::new();
        let mut gains = vec![vec![0.0; d]; self.shape.number_of_norms()];
        let grad_logits = self.gradient_of_logits();
        let (normalized, head_input) =
            self.rms_norm_without_and_with_gain(2 * layers, self.residual_stream_before_head());
        gradients.push(self.compared_rows_of_weight_gradient(
            ParameterTensor::LogitProjection,
            &grad_logits,
            &head_input,
        ));
        let grad = self
            .multiply_by_weight(&grad_logits, ParameterTensor::LogitProjection)
            .with_rounded_elements(self.round_to_dtype);
        let (mut grad_x, gain) =
            self.gradients_of_norm_input_and_gain(2 * layers, &normalized, &grad);
        self.memory_pool.return_memory_to_pool([
            grad_logits,
            head_input,
            grad,
            normalized.normalized_rows,
        ]);
        gains[2 * layers] = gain;
        for layer in (0..layers).rev() {
            let activations = self.activations_of_layer(layer, &self.residual_streams[layer]);
            let (grad_middle, gain) = self.backpropagate_through_swiglu_block(
                layer,
                &activations,
                &grad_x,
                &mut gradients,
            );
            gains[2 * layer + 1] = gain;
            let (grad, gain) = self.backpropagate_through_attention_block(
                layer,
                &activations,
                &grad_middle,
                &mut gradients,
            );
            gains[2 * layer] = gain;
            self.memory_pool.return_memory_to_pool(activations.into_matrices_for_reuse());
            self.memory_pool
                .return_memory_to_pool([std::mem::replace(&mut grad_x, grad), grad_middle]);
        }
        let tensor = self.shape.arena_rows_of_tensor(ParameterTensor::RmsNormGains);
        let rows = (0..tensor.arena_row_count).collect();
        gradients.push(SampledWeightGradient {
            tensor,
            sampled_row_indices: rows,
            sampled_row_gradients: gains.concat(),
        });
        gradients.push(self.compared_rows_of_embedding_gradient(&grad_x));
        gradients
    }

    fn gradient_of_logits(&self) -> F64Matrix {
        let targets = self.inputs.f32_elements("targets");
        let (vocabulary, tokens) =
            (self.shape.vocabulary_size, self.shape.tokens_in_batch() as f64);
        let mut grad = self.memory_pool.copy_into_pooled_matrix(&self.logits);
        process_f64_rows_in_parallel(&mut grad.values, vocabulary, &|token, row| {
            softmax_in_place_f64(row);
            row[targets[token] as usize] -= 1.0;
            row.iter_mut().for_each(|x| *x = (self.round_to_dtype)(*x / tokens));
        });
        grad
    }

    /// Computes the compared rows of a weight's gradient; row r is the sum over tokens t of
    /// `left[t, r] · right[t]`.
    pub fn compared_rows_of_weight_gradient(
        &self,
        weight: ParameterTensor,
        left: &F64Matrix,
        right: &F64Matrix,
    ) -> SampledWeightGradient {
        let tensor = self.shape.arena_rows_of_tensor(weight);
        let rows = self.shape.rows_compared_with_reference(weight, self.inputs);
        let tokens = left.number_of_rows();
        let mut picked = self.memory_pool.take_uninitialised_matrix(rows.len(), tokens);
        process_f64_rows_in_parallel(&mut picked.values, tokens, &|number, to| {
            let column = rows[number];
            for (token, to) in to.iter_mut().enumerate() {
                *to = left.values[token * left.columns + column];
            }
        });
        let values = self
            .memory_pool
            .multiply_in_parallel_tiles(&picked, right.as_faer_matrix())
            .with_rounded_elements(self.round_to_dtype)
            .values;
        self.memory_pool.return_memory_to_pool([picked]);
        SampledWeightGradient { tensor, sampled_row_indices: rows, sampled_row_gradients: values }
    }

    /// Computes the gradients of the input rows of an RMSNorm and of its gain.
    fn gradients_of_norm_input_and_gain(
        &self,
        norm: usize,
        normalized: &RmsNormalizedRows,
        grad: &F64Matrix,
    ) -> (F64Matrix, Vec<f64>) {
        /// Number of columns for which one parallel CPU task sums over all tokens.
        const GAIN_COLUMNS_PER_TASK: usize = 32;
        let d = self.shape.model_width;
        let gains = self.weight_as_network_uses_it(ParameterTensor::RmsNormGains);
        let gains = gains.row_slice(norm);
        let mut grad_x = self.memory_pool.take_uninitialised_matrix(grad.number_of_rows(), d);
        process_f64_rows_in_parallel(&mut grad_x.values, d, &|token, to| {
            let (grad, x) = (grad.row_slice(token), normalized.normalized_rows.row_slice(token));
            let products = || grad.iter().zip(gains).zip(x);
            let mean = products().map(|((grad, gain), x)| grad * gain * x).sum::<f64>() / d as f64;
            let root = normalized.inverse_root_mean_squares[token];
            for (to, ((grad, gain), x)) in to.iter_mut().zip(products()) {
                *to = root * (grad * gain - x * mean);
            }
        });
        let mut grad_gain = vec![0.0; d];
        parallel::process_chunks_in_parallel(
            &mut grad_gain,
            GAIN_COLUMNS_PER_TASK,
            &|number, sums| {
                for token in 0..grad.number_of_rows() {
                    let [grad, x] = [grad, &normalized.normalized_rows]
                        .map(|of| &of.row_slice(token)[number * GAIN_COLUMNS_PER_TASK..]);
                    for (sum, (grad, x)) in sums.iter_mut().zip(grad.iter().zip(x)) {
                        *sum += grad * x;
                    }
                }
            },
        );
        (grad_x, grad_gain)
    }

    /// Computes the gradients through a layer's SwiGLU block: of the residual stream before the
    /// block's norm, and of the norm's gain.
    pub fn backpropagate_through_swiglu_block(
        &self,
        layer: usize,
        activations: &ReferenceLayerActivations,
        grad_x: &F64Matrix,
        gradients: &mut Vec<SampledWeightGradient>,
    ) -> (F64Matrix, Vec<f64>) {
        let (ff, round) = (self.shape.swiglu_hidden_width, self.round_to_dtype);
        let grad = self.memory_pool.copy_into_pooled_matrix(grad_x).with_rounded_elements(round);
        gradients.push(self.compared_rows_of_weight_gradient(
            ParameterTensor::DownProjectionOfLayer(layer),
            &activations.swiglu_hidden,
            &grad,
        ));
        let grad_hidden = self
            .multiply_by_transposed_weight(&grad, ParameterTensor::DownProjectionOfLayer(layer))
            .with_rounded_elements(round);
        let mut grad_gate_up =
            self.memory_pool.take_uninitialised_matrix(grad.number_of_rows(), 2 * ff);
        process_f64_rows_in_parallel(&mut grad_gate_up.values, 2 * ff, &|token, to| {
            let (gate, up) = activations.swiglu_gates_and_ups.row_slice(token).split_at(ff);
            let (to_gate, to_up) = to.split_at_mut(ff);
            for (column, grad) in grad_hidden.row_slice(token).iter().enumerate() {
                let (x, s) = (gate[column], sigmoid_f64(gate[column]));
                to_gate[column] = round(grad * up[column] * s * (1.0 + x * (1.0 - s)));
                to_up[column] = round(grad * x * s);
            }
        });
        let input = &activations.swiglu_input;
        gradients.push(self.compared_rows_of_weight_gradient(
            ParameterTensor::GateUpProjectionOfLayer(layer),
            &grad_gate_up,
            input,
        ));
        let grad_input = self
            .multiply_by_weight(&grad_gate_up, ParameterTensor::GateUpProjectionOfLayer(layer))
            .with_rounded_elements(round);
        let before = &activations.before_mlp;
        let (through_norm, gain) =
            self.gradients_of_norm_input_and_gain(2 * layer + 1, before, &grad_input);
        self.memory_pool.return_memory_to_pool([grad, grad_hidden, grad_gate_up, grad_input]);
        (through_norm.plus_matrix(grad_x), gain)
    }

    /// Computes the gradients through a layer's attention block: of the residual stream before the
    /// block's norm, and of the norm's gain.
    pub fn backpropagate_through_attention_block(
        &self,
        layer: usize,
        activations: &ReferenceLayerActivations,
        grad_x: &F64Matrix,
        gradients: &mut Vec<SampledWeightGradient>,
    ) -> (F64Matrix, Vec<f64>) {
        let round = self.round_to_dtype;
        let grad = self.memory_pool.copy_into_pooled_matrix(grad_x).with_rounded_elements(round);
        gradients.push(self.compared_rows_of_weight_gradient(
            ParameterTensor::AttentionOutputProjectionOfLayer(layer),
            &grad,
            &activations.attention_output,
        ));
        let grad_attended = self
            .multiply_by_weight(&grad, ParameterTensor::AttentionOutputProjectionOfLayer(layer))
            .with_rounded_elements(round);
        let mut grad_qkv = self
            .gradients_of_rotated_qkv(&activations.qkv, &grad_attended)
            .with_rounded_elements(round);
        self.apply_rope_in_place(&mut grad_qkv, -1.0);
        gradients.push(self.compared_rows_of_weight_gradient(
            ParameterTensor::QkvProjectionOfLayer(layer),
            &grad_qkv,
            &activations.qkv_input,
        ));
        let grad_input = self
            .multiply_by_weight(&grad_qkv, ParameterTensor::QkvProjectionOfLayer(layer))
            .with_rounded_elements(round);
        let before = &activations.before_attention;
        let (through_norm, gain) =
            self.gradients_of_norm_input_and_gain(2 * layer, before, &grad_input);
        self.memory_pool.return_memory_to_pool([grad, grad_attended, grad_qkv, grad_input]);
        (through_norm.plus_matrix(grad_x), gain)
    }

    /// Computes the gradients of rotated queries, rotated keys and values from the gradient of the
    /// attention output.
    fn gradients_of_rotated_qkv(&self, qkv: &F64Matrix, grad_attended: &F64Matrix) -> F64Matrix {
        let LanguageModelShape { model_width: d, heads, batch, context_tokens: context, .. } =
            self.shape;
        let head_dim = self.shape.elements_per_head();
        let scale = 1.0 / (head_dim as f64).sqrt();
        let product = |a: MatRef<'_, f64>, b: MatRef<'_, f64>, factor| {
            let mut out = F64Matrix::zeroed_with_extents(a.nrows(), b.ncols());
            let to = MatMut::from_row_major_slice_mut(&mut out.values, a.nrows(), b.ncols());
            matmul_f64_on_calling_thread(to, Accum::Replace, a, b, factor);
            out
        };
        let gradients = parallel::map_numbers_in_parallel(batch * heads, &|number| {
            let [query, key, value] =
                [0, 1, 2].map(|operand| self.copy_head_of_sequence(qkv, operand, number));
            let grad = self.copy_head_of_sequence(grad_attended, 0, number);
            let p = self.causal_probabilities(&query, &key);
            let mut grad_scores =
                product(grad.as_faer_matrix(), value.as_faer_matrix().transpose(), 1.0);
            for (row, p) in grad_scores.values.chunks_mut(context).zip(p.values.chunks(context)) {
                let mean: f64 = row.iter().zip(p).map(|(grad, p)| grad * p).sum();
                row.iter_mut().zip(p).for_each(|(grad, p)| *grad = p * (*grad - mean));
            }
            [
                product(grad_scores.as_faer_matrix(), key.as_faer_matrix(), scale).values,
                product(grad_scores.as_faer_matrix().transpose(), query.as_faer_matrix(), scale)
                    .values,
                product(p.as_faer_matrix().transpose(), grad.as_faer_matrix(), 1.0).values,
            ]
        });
        let mut grad_qkv =
            self.memory_pool.take_uninitialised_matrix(self.shape.tokens_in_batch(), 3 * d);
        let mut operands: [Vec<Vec<f64>>; 3] = Default::default();
        for head in gradients {
            operands.iter_mut().zip(head).for_each(|(heads, values)| heads.push(values));
        }
        for (operand, heads) in operands.iter().enumerate() {
            self.copy_heads_into_columns(&mut grad_qkv, operand * d, heads);
        }
        grad_qkv
    }

    fn compared_rows_of_embedding_gradient(&self, grad_x: &F64Matrix) -> SampledWeightGradient {
        let d = self.shape.model_width;
        let tensor = self.shape.arena_rows_of_tensor(ParameterTensor::TokenEmbedding);
        let rows =
            self.shape.rows_compared_with_reference(ParameterTensor::TokenEmbedding, self.inputs);
        let mut values = vec![0.0; rows.len() * d];
        for (token, grad) in self.inputs.f32_elements("tokens").iter().zip(grad_x.values.chunks(d))
        {
            if let Ok(row) = rows.binary_search(&(*token as usize)) {
                values[row * d..][..d].iter_mut().zip(grad).for_each(|(to, grad)| *to += grad);
            }
        }
        SampledWeightGradient { tensor, sampled_row_indices: rows, sampled_row_gradients: values }
    }
}
