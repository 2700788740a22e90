//! Gradients of every parameter in fp64, and the step of AdamW from them.

use super::reference::{F64Matrix, LmReference, NormalizedRows, ReferenceLayer, each_row};
use super::shape::{
    ADAM_EPSILON, ArenaRows, BETA_1, BETA_2, LEARNING_RATE, LmShape, STATE_INPUTS, STATE_OUTPUTS,
    WEIGHT_DECAY, Weight,
};
use crate::math::{sigmoid, softmax};
use crate::parallel;
use kernelgate::workload::{Expected, Tensors};
use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f64};

/// Some rows of the gradient of a tensor.
pub struct WeightGradient {
    /// Rows of the parameter arena that hold the tensor.
    pub tensor: ArenaRows,
    /// Indices of these rows, ascending, counted from the tensor's first row.
    pub rows: Vec<usize>,
    /// Gradients of these rows.
    pub values: Vec<f64>,
}

/// Expected outputs of a training step.
pub fn expected_step(shape: &LmShape, inputs: &Tensors, round: fn(f64) -> f64) -> Vec<Expected> {
    let reference = LmReference::new(shape, inputs, round);
    let mut expected = vec![Expected::all("loss", [shape.batch, 1], reference.sequence_losses())];
    for gradient in reference.loss_gradients() {
        let updated = adamw_update(shape, inputs, &gradient);
        let rows: Vec<usize> =
            gradient.rows.iter().map(|row| gradient.tensor.first + row).collect();
        for (name, values) in STATE_OUTPUTS.into_iter().zip(updated) {
            let shape = [shape.arena_rows(), shape.d];
            expected.push(Expected::sampled_rows(name, shape, rows.clone(), values));
        }
    }
    expected
}

/// Rows of a tensor in each part of the state after a step of AdamW.
pub fn adamw_update(shape: &LmShape, inputs: &Tensors, gradient: &WeightGradient) -> [Vec<f64>; 3] {
    let steps = f64::from(inputs.f32("steps")[0]) + 1.0;
    let corrections = [BETA_1, BETA_2].map(|beta| 1.0 - beta.powf(steps));
    let mut updated: [Vec<f64>; 3] = Default::default();
    for (row, gradient_row) in gradient.rows.iter().zip(gradient.values.chunks(shape.d)) {
        let from = (gradient.tensor.first + row) * shape.d;
        let [p, m, v] = STATE_INPUTS.map(|name| inputs.tensor(name).to_f64(from, shape.d));
        for (column, g) in gradient_row.iter().enumerate() {
            let m = BETA_1 * m[column] + (1.0 - BETA_1) * g;
            let v = BETA_2 * v[column] + (1.0 - BETA_2) * g * g;
            let direction = m / corrections[0] / ((v / corrections[1]).sqrt() + ADAM_EPSILON);
            let p = p[column] - LEARNING_RATE * (WEIGHT_DECAY * p[column] + direction);
            updated.iter_mut().zip([p, m, v]).for_each(|(to, value)| to.push(value));
        }
    }
    updated
}

impl LmReference<'_> {
    /// Gradients of the mean loss over all tokens, for the compared rows of every tensor.
    pub fn loss_gradients(&self) -> Vec<WeightGradient> {
        let LmShape { layers, d, .. } = self.shape;
        let mut gradients = Vec::new();
        let mut gains = vec![vec![0.0; d]; self.shape.norm_count()];
        let grad_logits = self.grad_logits();
        let (normalized, head_input) = self.normalize_rows(2 * layers, self.last_residual_stream());
        gradients.push(self.weight_gradient(Weight::Head, &grad_logits, &head_input));
        let grad = self.mul_weight_columns(&grad_logits, Weight::Head).rounded(self.round);
        let (mut grad_x, gain) = self.norm_backward(2 * layers, &normalized, &grad);
        self.buffers.keep_memory_for_reuse([grad_logits, head_input, grad, normalized.rows]);
        gains[2 * layers] = gain;
        for layer in (0..layers).rev() {
            let activations = self.layer(layer, &self.streams[layer]);
            let (grad_middle, gain) =
                self.mlp_backward(layer, &activations, &grad_x, &mut gradients);
            gains[2 * layer + 1] = gain;
            let (grad, gain) =
                self.attention_backward(layer, &activations, &grad_middle, &mut gradients);
            gains[2 * layer] = gain;
            self.buffers.keep_memory_for_reuse(activations.into_matrices());
            self.buffers.keep_memory_for_reuse([std::mem::replace(&mut grad_x, grad), grad_middle]);
        }
        let tensor = self.shape.arena_rows_of_weight(Weight::Gains);
        let rows = (0..tensor.rows).collect();
        gradients.push(WeightGradient { tensor, rows, values: gains.concat() });
        gradients.push(self.grad_embedding(&grad_x));
        gradients
    }

    fn grad_logits(&self) -> F64Matrix {
        let targets = self.inputs.f32("targets");
        let (vocabulary, tokens) = (self.shape.vocabulary, self.shape.token_count() as f64);
        let mut grad = self.buffers.copy_matrix(&self.logits);
        each_row(&mut grad.values, vocabulary, &|token, row| {
            softmax(row);
            row[targets[token] as usize] -= 1.0;
            row.iter_mut().for_each(|x| *x = (self.round)(*x / tokens));
        });
        grad
    }

    /// Gradient of a matrix whose row r is the sum over tokens t of `left[t, r] · right[t]`.
    pub fn weight_gradient(
        &self,
        weight: Weight,
        left: &F64Matrix,
        right: &F64Matrix,
    ) -> WeightGradient {
        let tensor = self.shape.arena_rows_of_weight(weight);
        let rows = self.shape.compared_rows(weight, self.inputs);
        let tokens = left.row_count();
        let mut picked = self.buffers.take_matrix(rows.len(), tokens);
        each_row(&mut picked.values, tokens, &|number, to| {
            let column = rows[number];
            for (token, to) in to.iter_mut().enumerate() {
                *to = left.values[token * left.columns + column];
            }
        });
        let values =
            self.buffers.multiply_matrices(&picked, right.as_mat_ref()).rounded(self.round).values;
        self.buffers.keep_memory_for_reuse([picked]);
        WeightGradient { tensor, rows, values }
    }

    /// Gradients of the input rows of a norm and of its gain.
    fn norm_backward(
        &self,
        norm: usize,
        normalized: &NormalizedRows,
        grad: &F64Matrix,
    ) -> (F64Matrix, Vec<f64>) {
        /// Number of columns for which one task sums over tokens.
        const COLUMNS_PER_TASK: usize = 32;
        let d = self.shape.d;
        let gains = self.rounded_weight(Weight::Gains);
        let gains = gains.row(norm);
        let mut grad_x = self.buffers.take_matrix(grad.row_count(), d);
        each_row(&mut grad_x.values, d, &|token, to| {
            let (grad, x) = (grad.row(token), normalized.rows.row(token));
            let products = || grad.iter().zip(gains).zip(x);
            let mean = products().map(|((grad, gain), x)| grad * gain * x).sum::<f64>() / d as f64;
            let root = normalized.inverse_roots[token];
            for (to, ((grad, gain), x)) in to.iter_mut().zip(products()) {
                *to = root * (grad * gain - x * mean);
            }
        });
        let mut grad_gain = vec![0.0; d];
        parallel::for_each_chunk(&mut grad_gain, COLUMNS_PER_TASK, &|number, sums| {
            for token in 0..grad.row_count() {
                let [grad, x] =
                    [grad, &normalized.rows].map(|of| &of.row(token)[number * COLUMNS_PER_TASK..]);
                for (sum, (grad, x)) in sums.iter_mut().zip(grad.iter().zip(x)) {
                    *sum += grad * x;
                }
            }
        });
        (grad_x, grad_gain)
    }

    /// Gradient of the residual stream before SwiGLU's norm, and of the norm's gain.
    pub fn mlp_backward(
        &self,
        layer: usize,
        activations: &ReferenceLayer,
        grad_x: &F64Matrix,
        gradients: &mut Vec<WeightGradient>,
    ) -> (F64Matrix, Vec<f64>) {
        let (ff, round) = (self.shape.ff, self.round);
        let grad = self.buffers.copy_matrix(grad_x).rounded(round);
        gradients.push(self.weight_gradient(Weight::Down(layer), &activations.hidden, &grad));
        let grad_hidden = self.mul_weight_rows(&grad, Weight::Down(layer)).rounded(round);
        let mut grad_gate_up = self.buffers.take_matrix(grad.row_count(), 2 * ff);
        each_row(&mut grad_gate_up.values, 2 * ff, &|token, to| {
            let (gate, up) = activations.gate_up.row(token).split_at(ff);
            let (to_gate, to_up) = to.split_at_mut(ff);
            for (column, grad) in grad_hidden.row(token).iter().enumerate() {
                let (x, s) = (gate[column], sigmoid(gate[column]));
                to_gate[column] = round(grad * up[column] * s * (1.0 + x * (1.0 - s)));
                to_up[column] = round(grad * x * s);
            }
        });
        let input = &activations.mlp_input;
        gradients.push(self.weight_gradient(Weight::GateUp(layer), &grad_gate_up, input));
        let grad_input =
            self.mul_weight_columns(&grad_gate_up, Weight::GateUp(layer)).rounded(round);
        let before = &activations.before_mlp;
        let (through_norm, gain) = self.norm_backward(2 * layer + 1, before, &grad_input);
        self.buffers.keep_memory_for_reuse([grad, grad_hidden, grad_gate_up, grad_input]);
        (through_norm.add_matrix(grad_x), gain)
    }

    /// Gradient of the residual stream before attention's norm, and of the norm's gain.
    pub fn attention_backward(
        &self,
        layer: usize,
        activations: &ReferenceLayer,
        grad_x: &F64Matrix,
        gradients: &mut Vec<WeightGradient>,
    ) -> (F64Matrix, Vec<f64>) {
        let round = self.round;
        let grad = self.buffers.copy_matrix(grad_x).rounded(round);
        gradients.push(self.weight_gradient(Weight::Out(layer), &grad, &activations.attended));
        let grad_attended = self.mul_weight_columns(&grad, Weight::Out(layer)).rounded(round);
        let mut grad_qkv = self.grad_qkv(&activations.qkv, &grad_attended).rounded(round);
        self.rotate(&mut grad_qkv, -1.0);
        gradients.push(self.weight_gradient(Weight::Qkv(layer), &grad_qkv, &activations.qkv_input));
        let grad_input = self.mul_weight_columns(&grad_qkv, Weight::Qkv(layer)).rounded(round);
        let before = &activations.before_attention;
        let (through_norm, gain) = self.norm_backward(2 * layer, before, &grad_input);
        self.buffers.keep_memory_for_reuse([grad, grad_attended, grad_qkv, grad_input]);
        (through_norm.add_matrix(grad_x), gain)
    }

    /// Gradient of rotated queries and keys, and of values.
    fn grad_qkv(&self, qkv: &F64Matrix, grad_attended: &F64Matrix) -> F64Matrix {
        let LmShape { d, heads, batch, context, .. } = self.shape;
        let head_dim = self.shape.head_dim();
        let scale = 1.0 / (head_dim as f64).sqrt();
        let product = |a: MatRef<'_, f64>, b: MatRef<'_, f64>, factor| {
            let mut out = F64Matrix::zero_matrix(a.nrows(), b.ncols());
            let to = MatMut::from_row_major_slice_mut(&mut out.values, a.nrows(), b.ncols());
            multiply_f64(to, Accum::Replace, a, b, factor);
            out
        };
        let gradients = parallel::parallel_map(batch * heads, &|number| {
            let [query, key, value] = [0, 1, 2].map(|operand| self.head(qkv, operand, number));
            let grad = self.head(grad_attended, 0, number);
            let p = self.probabilities(&query, &key);
            let mut grad_scores = product(grad.as_mat_ref(), value.as_mat_ref().transpose(), 1.0);
            for (row, p) in grad_scores.values.chunks_mut(context).zip(p.values.chunks(context)) {
                let mean: f64 = row.iter().zip(p).map(|(grad, p)| grad * p).sum();
                row.iter_mut().zip(p).for_each(|(grad, p)| *grad = p * (*grad - mean));
            }
            [
                product(grad_scores.as_mat_ref(), key.as_mat_ref(), scale).values,
                product(grad_scores.as_mat_ref().transpose(), query.as_mat_ref(), scale).values,
                product(p.as_mat_ref().transpose(), grad.as_mat_ref(), 1.0).values,
            ]
        });
        let mut grad_qkv = self.buffers.take_matrix(self.shape.token_count(), 3 * d);
        let mut operands: [Vec<Vec<f64>>; 3] = Default::default();
        for head in gradients {
            operands.iter_mut().zip(head).for_each(|(heads, values)| heads.push(values));
        }
        for (operand, heads) in operands.iter().enumerate() {
            self.scatter(&mut grad_qkv, operand * d, heads);
        }
        grad_qkv
    }

    fn grad_embedding(&self, grad_x: &F64Matrix) -> WeightGradient {
        let d = self.shape.d;
        let tensor = self.shape.arena_rows_of_weight(Weight::Embedding);
        let rows = self.shape.compared_rows(Weight::Embedding, self.inputs);
        let mut values = vec![0.0; rows.len() * d];
        for (token, grad) in self.inputs.f32("tokens").iter().zip(grad_x.values.chunks(d)) {
            if let Ok(row) = rows.binary_search(&(*token as usize)) {
                values[row * d..][..d].iter_mut().zip(grad).for_each(|(to, grad)| *to += grad);
            }
        }
        WeightGradient { tensor, rows, values }
    }
}
