//! The multilayer perceptron on the CPU in f32: the GEMMs run on all threads, with elementwise
//! steps between the GEMMs.

use crate::family::check_dtype;
use kernelgate_numerics::gemm::{MatRef, multiply, view};

use super::definition::{MlpBackward, MlpForward};
use super::shape::MlpShape;
use crate::math::exp;
use crate::parallel;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};

/// CPU rows of the perceptron's forward pass.
pub const FORWARD: &[Implementation<MlpForward>] = &[Implementation {
    name: "cpu",
    about: "GEMMs on all threads, SiLU and softmax between them",
    supports: |problem| check_dtype(problem.shape.dtype, Dtype::F32),
    prepare: Prepare::Cpu(|problem, inputs| {
        let mut layers = LayerActivations::new(&problem.shape);
        let outputs =
            Tensors::new().with_output("p", [problem.shape.b, problem.shape.c], Dtype::F32);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            layers.compute_probabilities(inputs, outputs.f32_mut("p"));
        })
    }),
}];

/// CPU rows of the perceptron's backward pass.
pub const BACKWARD: &[Implementation<MlpBackward>] = &[Implementation {
    name: "cpu",
    about: "the forward pass, then GEMMs with transposed operands on all threads",
    supports: |problem| check_dtype(problem.shape.dtype, Dtype::F32),
    prepare: Prepare::Cpu(|problem, inputs| {
        let mut layers = LayerActivations::new(&problem.shape);
        let mut p = vec![0.0; problem.shape.b * problem.shape.c];
        let outputs = problem.shape.named_operands().into_iter().fold(
            Tensors::new(),
            |outputs, (name, shape)| {
                outputs.with_output(&format!("grad_{name}"), shape, Dtype::F32)
            },
        );
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            layers.compute_probabilities(inputs, &mut p);
            layers.compute_gradients(inputs, &p, outputs);
        })
    }),
}];

/// Number of elements that a task computes between two GEMMs.
const ELEMENTS_PER_TASK: usize = 1 << 12;

/// Activations of the layers between the GEMMs.
struct LayerActivations {
    shape: MlpShape,
    z: Vec<f32>,
    a: Vec<f32>,
    grad_z: Vec<f32>,
    grad_logits: Vec<f32>,
}

impl LayerActivations {
    fn new(shape: &MlpShape) -> Self {
        let hidden = || vec![0.0; shape.b * shape.h];
        Self {
            shape: *shape,
            z: hidden(),
            a: hidden(),
            grad_z: hidden(),
            grad_logits: vec![0.0; shape.b * shape.c],
        }
    }

    /// Computes the probabilities `p` `[b, c]`.
    fn compute_probabilities(&mut self, inputs: &Tensors, p: &mut [f32]) {
        let MlpShape { b, h, c, .. } = self.shape;
        let [x, w1, w2] = view_operands(&self.shape, inputs);
        multiply(&mut self.z, x, w1);
        parallel::for_each_chunk(&mut self.a, ELEMENTS_PER_TASK, &|number, a| {
            a.iter_mut()
                .zip(&self.z[number * ELEMENTS_PER_TASK..])
                .for_each(|(a, z)| *a = z * sigmoid(*z));
        });
        multiply(p, view(&self.a, b, h), w2);
        parallel::for_each_chunk(p, c * ELEMENTS_PER_TASK.div_ceil(c), &|_, rows| {
            for row in rows.chunks_mut(c) {
                let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                row.iter_mut().for_each(|x| *x = exp(*x - largest));
                let sum: f32 = row.iter().sum();
                row.iter_mut().for_each(|x| *x /= sum);
            }
        });
    }

    /// Computes the gradients; [`Self::compute_probabilities`] must have computed `p` before.
    fn compute_gradients(&mut self, inputs: &Tensors, p: &[f32], outputs: &mut Tensors) {
        let MlpShape { b, h, c, .. } = self.shape;
        let [x, w1, w2] = view_operands(&self.shape, inputs);
        let rows = c * ELEMENTS_PER_TASK.div_ceil(c);
        let grad_p = inputs.f32("grad_p");
        parallel::for_each_chunk(&mut self.grad_logits, rows, &|number, grad| {
            let before = p[number * rows..].chunks(c).zip(grad_p[number * rows..].chunks(c));
            for (grad, (p, grad_p)) in grad.chunks_mut(c).zip(before) {
                let mean: f32 = p.iter().zip(grad_p).map(|(p, grad)| p * grad).sum();
                let pairs = p.iter().zip(grad_p);
                grad.iter_mut().zip(pairs).for_each(|(to, (p, grad))| *to = p * (grad - mean));
            }
        });
        let grad_logits = view(&self.grad_logits, b, c);
        multiply(&mut self.grad_z, grad_logits, w2.transpose());
        parallel::for_each_chunk(&mut self.grad_z, ELEMENTS_PER_TASK, &|number, grad| {
            for (grad, &z) in grad.iter_mut().zip(&self.z[number * ELEMENTS_PER_TASK..]) {
                let s = sigmoid(z);
                *grad *= s * (1.0 + z * (1.0 - s));
            }
        });
        let grad_z = view(&self.grad_z, b, h);
        multiply(outputs.f32_mut("grad_x"), grad_z, w1.transpose());
        multiply(outputs.f32_mut("grad_w1"), x.transpose(), grad_z);
        multiply(outputs.f32_mut("grad_w2"), view(&self.a, b, h).transpose(), grad_logits);
    }
}

fn sigmoid(z: f32) -> f32 {
    1.0 / (1.0 + exp(-z))
}

fn view_operands<'a>(shape: &MlpShape, inputs: &'a Tensors) -> [MatRef<'a, f32>; 3] {
    shape.named_operands().map(|(name, [rows, columns])| view(inputs.f32(name), rows, columns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tests::check_row_against_reference;

    #[test]
    fn mlp_cpu_rows_agree_with_the_reference_at_odd_shapes() {
        for [b, i, h, c] in [[1, 1, 1, 1], [3, 5, 7, 11], [65, 33, 129, 10]] {
            let shape = MlpShape { b, i, h, c, dtype: Dtype::F32 };
            check_row_against_reference(&FORWARD[0], &MlpForward { shape });
            check_row_against_reference(&BACKWARD[0], &MlpBackward { shape });
        }
    }
}
