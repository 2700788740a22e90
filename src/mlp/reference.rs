//! The perceptron in fp64: the reference against which every implementation is verified.

use kernelgate_numerics::gemm::{product, view};

use super::shape::MlpShape;
use crate::math::{sigmoid, softmax};
use kernelgate::workload::Tensors;

/// Results of the forward pass, with the values that the gradients need.
pub struct MlpReference {
    shape: MlpShape,
    round: fn(f64) -> f64,
    x: Vec<f64>,
    w1: Vec<f64>,
    w2: Vec<f64>,
    /// Hidden layer before the activation, `x·w1`, `[b, h]`.
    z: Vec<f64>,
    /// Hidden layer after the activation, `silu(z)`, rounded.
    a: Vec<f64>,
    /// Probabilities of the classes, `[b, c]`.
    pub p: Vec<f64>,
}

impl MlpReference {
    /// Computes `p`. `round` is applied to values that a row stores in the dtype of the inputs; the
    /// reference rounds nothing.
    pub fn new(shape: &MlpShape, inputs: &Tensors, round: fn(f64) -> f64) -> Self {
        let MlpShape { b, i, h, c, .. } = *shape;
        let [x, w1, w2] = shape
            .named_operands()
            .map(|(name, [rows, columns])| inputs.tensor(name).to_f64(0, rows * columns));
        let z = product(view(&x, b, i), view(&w1, i, h));
        let a: Vec<f64> = z.iter().map(|&z| round(z * sigmoid(z))).collect();
        let mut p = product(view(&a, b, h), view(&w2, h, c));
        p.chunks_mut(c).for_each(softmax);
        Self { shape: *shape, round, x, w1, w2, z, a, p }
    }

    /// Computes the gradients of x, w1 and w2 from `grad_p`.
    pub fn compute_gradients(&self, inputs: &Tensors) -> [Vec<f64>; 3] {
        let MlpShape { b, i, h, c, .. } = self.shape;
        let mut grad_logits = inputs.tensor("grad_p").to_f64(0, b * c);
        for (grad, p) in grad_logits.chunks_mut(c).zip(self.p.chunks(c)) {
            let mean: f64 = grad.iter().zip(p).map(|(grad, p)| grad * p).sum();
            grad.iter_mut().zip(p).for_each(|(grad, p)| *grad = (self.round)(p * (*grad - mean)));
        }
        let grad_logits = view(&grad_logits, b, c);
        let mut grad_z = product(grad_logits, view(&self.w2, h, c).transpose());
        for (grad, &z) in grad_z.iter_mut().zip(&self.z) {
            let s = sigmoid(z);
            *grad = (self.round)(*grad * s * (1.0 + z * (1.0 - s)));
        }
        let grad_z = view(&grad_z, b, h);
        [
            product(grad_z, view(&self.w1, i, h).transpose()),
            product(view(&self.x, b, i).transpose(), grad_z),
            product(view(&self.a, b, h).transpose(), grad_logits),
        ]
    }
}
