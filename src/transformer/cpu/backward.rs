//! Gradients of every parameter on the CPU, from the last layer to the first.

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply, multiply_f32, view};

use super::forward::{CpuModel, gain, head_matrix, probabilities, scatter, weight_matrix};
use super::steps::{each_row, norm_backward, rotate, sigmoid, softmax};
use crate::parallel;
use crate::transformer::shape::{ArenaRows, LmShape, Weight};
use kernelgate::workload::Tensors;

/// Rows of a tensor in the arena of gradients.
fn gradient_rows<'a>(shape: &LmShape, gradient: &'a mut [f32], weight: Weight) -> &'a mut [f32] {
    let ArenaRows { first, rows, .. } = shape.arena_rows_of_weight(weight);
    &mut gradient[first * shape.d..][..rows * shape.d]
}

impl CpuModel {
    /// Computes the gradients of the mean loss over all tokens into the arena; overwrites the
    /// logits.
    pub fn compute_gradients(&self, inputs: &Tensors, logits: &mut [f32], gradient: &mut [f32]) {
        let shape = self.shape;
        let LmShape { d, layers, vocabulary, .. } = shape;
        let (tokens, padded) = (shape.token_count(), shape.padded_vocabulary());
        gradient_rows(&shape, gradient, Weight::Gains).fill(0.0);
        gradient_rows(&shape, gradient, Weight::Embedding).fill(0.0);
        let targets = inputs.f32("targets");
        each_row(logits, padded, &|token, row| {
            softmax(&mut row[..vocabulary]);
            row[targets[token] as usize] -= 1.0;
            row.iter_mut().for_each(|x| *x /= tokens as f32);
        });
        let grad_logits = view(logits, tokens, padded).subcols(0, vocabulary);
        let head_input = view(&self.head_input, tokens, d);
        let to = gradient_rows(&shape, gradient, Weight::Head);
        multiply(to, grad_logits.transpose(), head_input);
        let mut grad = vec![0.0; tokens * d];
        multiply(&mut grad, grad_logits, weight_matrix(&shape, inputs, Weight::Head));
        let mut grad_x = vec![0.0; tokens * d];
        self.norm_backward(2 * layers, inputs, &self.x, &grad, &mut grad_x, gradient);
        for layer in (0..layers).rev() {
            self.mlp_backward(layer, inputs, &mut grad_x, gradient);
            self.attention_backward(layer, inputs, &mut grad_x, gradient);
        }
        let to = gradient_rows(&shape, gradient, Weight::Embedding);
        for (token, grad) in inputs.f32("tokens").iter().zip(grad_x.chunks(d)) {
            let row = &mut to[*token as usize * d..][..d];
            row.iter_mut().zip(grad).for_each(|(to, grad)| *to += grad);
        }
    }

    fn norm_backward(
        &self,
        norm: usize,
        inputs: &Tensors,
        x: &[f32],
        grad: &[f32],
        grad_x: &mut [f32],
        gradient: &mut [f32],
    ) {
        let d = self.shape.d;
        let grad_gain = &mut gradient_rows(&self.shape, gradient, Weight::Gains)[norm * d..][..d];
        norm_backward(x, gain(&self.shape, inputs, norm), grad, grad_x, grad_gain);
    }

    fn mlp_backward(
        &self,
        number: usize,
        inputs: &Tensors,
        grad_x: &mut [f32],
        gradient: &mut [f32],
    ) {
        let (shape, layer) = (self.shape, &self.layers[number]);
        let (LmShape { d, ff, .. }, tokens) = (shape, shape.token_count());
        let hidden = view(&layer.hidden, tokens, ff);
        let to = gradient_rows(&shape, gradient, Weight::Down(number));
        multiply(to, hidden.transpose(), view(grad_x, tokens, d));
        let down = weight_matrix(&shape, inputs, Weight::Down(number));
        let mut grad_hidden = vec![0.0; tokens * ff];
        multiply(&mut grad_hidden, view(grad_x, tokens, d), down.transpose());
        let mut grad_gate_up = vec![0.0; tokens * 2 * ff];
        each_row(&mut grad_gate_up, 2 * ff, &|token, to| {
            let (gate, up) = layer.gate_up[token * 2 * ff..][..2 * ff].split_at(ff);
            let (to_gate, to_up) = to.split_at_mut(ff);
            for (column, grad) in grad_hidden[token * ff..][..ff].iter().enumerate() {
                let (x, s) = (gate[column], sigmoid(gate[column]));
                to_gate[column] = grad * up[column] * s * (1.0 + x * (1.0 - s));
                to_up[column] = grad * x * s;
            }
        });
        let grad_gate_up = view(&grad_gate_up, tokens, 2 * ff);
        let to = gradient_rows(&shape, gradient, Weight::GateUp(number));
        multiply(to, grad_gate_up.transpose(), view(&layer.mlp_input, tokens, d));
        let mut grad = vec![0.0; tokens * d];
        multiply(&mut grad, grad_gate_up, weight_matrix(&shape, inputs, Weight::GateUp(number)));
        self.norm_backward(2 * number + 1, inputs, &layer.middle, &grad, grad_x, gradient);
    }

    fn attention_backward(
        &self,
        number: usize,
        inputs: &Tensors,
        grad_x: &mut [f32],
        gradient: &mut [f32],
    ) {
        let (shape, layer) = (self.shape, &self.layers[number]);
        let (d, tokens) = (shape.d, shape.token_count());
        let to = gradient_rows(&shape, gradient, Weight::Out(number));
        let grad = view(grad_x, tokens, d);
        multiply(to, grad.transpose(), view(&layer.attended, tokens, d));
        let mut grad_attended = vec![0.0; tokens * d];
        multiply(&mut grad_attended, grad, weight_matrix(&shape, inputs, Weight::Out(number)));
        let mut grad_qkv = self.grad_qkv(&layer.qkv, &grad_attended);
        rotate(&shape, &self.table, &mut grad_qkv, -1.0);
        let grad_qkv = view(&grad_qkv, tokens, 3 * d);
        let to = gradient_rows(&shape, gradient, Weight::Qkv(number));
        multiply(to, grad_qkv.transpose(), view(&layer.qkv_input, tokens, d));
        let mut grad = vec![0.0; tokens * d];
        multiply(&mut grad, grad_qkv, weight_matrix(&shape, inputs, Weight::Qkv(number)));
        self.norm_backward(2 * number, inputs, &layer.x, &grad, grad_x, gradient);
    }

    /// Computes the gradient of rotated queries and keys, and of values.
    fn grad_qkv(&self, qkv: &[f32], grad_attended: &[f32]) -> Vec<f32> {
        let shape = self.shape;
        let LmShape { d, heads, batch, context, .. } = shape;
        let scale = 1.0 / (shape.head_dim() as f32).sqrt();
        let product = |a: MatRef<'_, f32>, b: MatRef<'_, f32>, factor| {
            let mut out = vec![0.0; a.nrows() * b.ncols()];
            let to = MatMut::from_row_major_slice_mut(&mut out, a.nrows(), b.ncols());
            multiply_f32(to, Accum::Replace, a, b, factor);
            out
        };
        let gradients = parallel::parallel_map(batch * heads, &|number| {
            let [query, key, value] =
                [0, 1, 2].map(|operand| head_matrix(&shape, qkv, 3, operand, number));
            let grad = head_matrix(&shape, grad_attended, 1, 0, number);
            let p = probabilities(&shape, query, key);
            let mut grad_scores = product(grad, value.transpose(), 1.0);
            for (row, p) in grad_scores.chunks_mut(context).zip(p.chunks(context)) {
                let mean: f32 = row.iter().zip(p).map(|(grad, p)| grad * p).sum();
                row.iter_mut().zip(p).for_each(|(grad, p)| *grad = p * (*grad - mean));
            }
            let grad_scores = view(&grad_scores, context, context);
            [
                product(grad_scores, key, scale),
                product(grad_scores.transpose(), query, scale),
                product(view(&p, context, context).transpose(), grad, 1.0),
            ]
        });
        let mut grad_qkv = vec![0.0; shape.token_count() * 3 * d];
        let mut operands: [Vec<Vec<f32>>; 3] = Default::default();
        for head in gradients {
            operands.iter_mut().zip(head).for_each(|(heads, values)| heads.push(values));
        }
        for (operand, heads) in operands.iter().enumerate() {
            scatter(&shape, &mut grad_qkv, 3, operand, heads);
        }
        grad_qkv
    }
}
