//! The two-layer perceptron in fp64: the reference against which every implementation is verified.

use kernelgate_numerics::gemm::{row_major_matrix_view, row_major_product_f64};

use super::shape::PerceptronSizes;
use crate::math::{sigmoid_f64, softmax_in_place_f64};
use kernelgate::workload::Tensors;

/// Results of the perceptron's fp64 forward pass, with the intermediate values that the gradients
/// need.
pub struct MlpForwardReference {
    shape: PerceptronSizes,
    round: fn(f64) -> f64,
    x: Vec<f64>,
    w1: Vec<f64>,
    w2: Vec<f64>,
    /// Hidden layer before the SiLU activation, `x·w1`, `[b, h]`.
    z: Vec<f64>,
    /// Hidden layer after the SiLU activation, `silu(z)`, passed through the rounding function.
    a: Vec<f64>,
    /// Class probabilities, `[b, c]`.
    pub p: Vec<f64>,
}

impl MlpForwardReference {
    /// Computes `p`. The function `round` is applied to values that an implementation stores in the
    /// dtype of the inputs; the reference itself rounds nothing.
    pub fn compute_forward_with_rounding(
        shape: &PerceptronSizes,
        inputs: &Tensors,
        round: fn(f64) -> f64,
    ) -> Self {
        let PerceptronSizes { b, i, h, c, .. } = *shape;
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
        Self { shape: *shape, round, x, w1, w2, z, a, p }
    }

    /// Computes the fp64 gradients of x, w1 and w2 from the input `grad_p`.
    pub fn gradients_of_x_and_weights(&self, inputs: &Tensors) -> [Vec<f64>; 3] {
        let PerceptronSizes { b, i, h, c, .. } = self.shape;
        let mut grad_logits = inputs.tensor("grad_p").elements_to_f64(0, b * c);
        for (grad, p) in grad_logits.chunks_mut(c).zip(self.p.chunks(c)) {
            let mean: f64 = grad.iter().zip(p).map(|(grad, p)| grad * p).sum();
            grad.iter_mut().zip(p).for_each(|(grad, p)| *grad = (self.round)(p * (*grad - mean)));
        }
        let grad_logits = row_major_matrix_view(&grad_logits, b, c);
        let mut grad_z =
            row_major_product_f64(grad_logits, row_major_matrix_view(&self.w2, h, c).transpose());
        for (grad, &z) in grad_z.iter_mut().zip(&self.z) {
            let s = sigmoid_f64(z);
            *grad = (self.round)(*grad * s * (1.0 + z * (1.0 - s)));
        }
        let grad_z = row_major_matrix_view(&grad_z, b, h);
        [
            row_major_product_f64(grad_z, row_major_matrix_view(&self.w1, i, h).transpose()),
            row_major_product_f64(row_major_matrix_view(&self.x, b, i).transpose(), grad_z),
            row_major_product_f64(row_major_matrix_view(&self.a, b, h).transpose(), grad_logits),
        ]
    }
}
