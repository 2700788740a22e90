//! The two-layer perceptron in fp64: the reference against which every implementation is verified.

use kernelgate_numerics::gemm::{row_major_matrix_view, row_major_product_f64};

use super::shape::PerceptronSizes;
use crate::math::{sigmoid_f64, softmax_in_place_f64};
use kernelgate::workload::Tensors;

/// Results of the perceptron's fp64 forward pass, with the intermediate values that the gradients
/// need.
pub struct MlpForwardReference {
    shape: PerceptronSizes,
    rounding_to_dtype: fn(f64) -> f64,
    input_rows: Vec<f64>,
    first_layer_weights: Vec<f64>,
    second_layer_weights: Vec<f64>,
    /// Hidden layer before the SiLU activation, `x·w1`, `[b, h]`.
    hidden_before_silu: Vec<f64>,
    /// Hidden layer after the SiLU activation, `silu(z)`, passed through the rounding function.
    hidden_after_silu: Vec<f64>,
    /// Class probabilities, `[b, c]`.
    pub class_probabilities: Vec<f64>,
}

impl MlpForwardReference {
    /// Computes `p`. The function `round` is applied to values that an implementation stores in the
    /// dtype of the inputs; the reference itself rounds nothing.
    pub fn compute_forward_with_rounding(
        shape: &PerceptronSizes,
        inputs: &Tensors,
        round: fn(f64) -> f64,
    ) -> Self {
        let PerceptronSizes {
            batch_rows: b,
            input_elements: i,
            hidden_elements: h,
            classes: c,
            ..
        } = *shape;
        let [x, w1, w2] = shape
            .names_and_extents_of_operands()
            .map(|(name, [rows, columns])| inputs.tensor(name).elements_to_f64(0, rows * columns));
        let z = row_major_product_f64(
            row_major_matrix_view(&x, b, i),
            row_major_matrix_view(&w1, i, h),
        );
        let a: Vec<f64> = z.iter().map(|&z| round(z * sigmoid_f64(z))).collect();
        let mut p = row_major_product_f64(
            row_major_matrix_view(&a, b, h),
            row_major_matrix_view(&w2, h, c),
        );
        p.chunks_mut(c).for_each(softmax_in_place_f64);
        Self {
            shape: *shape,
            rounding_to_dtype: round,
            input_rows: x,
            first_layer_weights: w1,
            second_layer_weights: w2,
            hidden_before_silu: z,
            hidden_after_silu: a,
            class_probabilities: p,
        }
    }

    /// Computes the fp64 gradients of x, w1 and w2 from the input `grad_p`.
    pub fn gradients_of_x_and_weights(&self, inputs: &Tensors) -> [Vec<f64>; 3] {
        let PerceptronSizes {
            batch_rows: b,
            input_elements: i,
            hidden_elements: h,
            classes: c,
            ..
        } = self.shape;
        let mut grad_logits = inputs.tensor("grad_p").elements_to_f64(0, b * c);
        for (grad, p) in grad_logits.chunks_mut(c).zip(self.class_probabilities.chunks(c)) {
            let mean: f64 = grad.iter().zip(p).map(|(grad, p)| grad * p).sum();
            grad.iter_mut()
                .zip(p)
                .for_each(|(grad, p)| *grad = (self.rounding_to_dtype)(p * (*grad - mean)));
        }
        let grad_logits = row_major_matrix_view(&grad_logits, b, c);
        let mut grad_z = row_major_product_f64(
            grad_logits,
            row_major_matrix_view(&self.second_layer_weights, h, c).transpose(),
        );
        for (grad, &z) in grad_z.iter_mut().zip(&self.hidden_before_silu) {
            let s = sigmoid_f64(z);
            *grad = (self.rounding_to_dtype)(*grad * s * (1.0 + z * (1.0 - s)));
        }
        let grad_z = row_major_matrix_view(&grad_z, b, h);
        [
            row_major_product_f64(
                grad_z,
                row_major_matrix_view(&self.first_layer_weights, i, h).transpose(),
            ),
            row_major_product_f64(
                row_major_matrix_view(&self.input_rows, b, i).transpose(),
                grad_z,
            ),
            row_major_product_f64(
                row_major_matrix_view(&self.hidden_after_silu, b, h).transpose(),
                grad_logits,
            ),
        ]
    }
}
