//! The two-layer perceptron on the CPU in f32: GEMMs run on all threads, and elementwise steps run
//! between the GEMMs.

use crate::family::check_problem_dtype_is_computed;
use kernelgate_numerics::gemm::{MatRef, matmul_f32_on_all_threads, row_major_matrix_view};

use super::definition::{MlpBackward, MlpForward};
use super::shape::PerceptronSizes;
use crate::math::vectorisable_exp;
use crate::parallel;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};

/// CPU implementations of the perceptron's forward pass.
pub const CPU_MLP_FORWARD_ROWS: &[Implementation<MlpForward>] = &[Implementation {
    implementation_name: "cpu",
    description: "GEMMs on all threads, SiLU and softmax between them",
    supports: |problem| check_problem_dtype_is_computed(problem.shape.dtype, Dtype::F32),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let mut layers = MlpLayerBuffers::allocate_for_shape(&problem.shape);
        let outputs = Tensors::new().with_output(
            "p",
            [problem.shape.batch_rows, problem.shape.classes],
            Dtype::F32,
        );
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            layers.compute_class_probabilities(inputs, outputs.f32_mut("p"));
        })
    }),
}];

/// CPU implementations of the perceptron's backward pass.
pub const CPU_MLP_BACKWARD_ROWS: &[Implementation<MlpBackward>] = &[Implementation {
    implementation_name: "cpu",
    description: "the forward pass, then GEMMs with transposed operands on all threads",
    supports: |problem| check_problem_dtype_is_computed(problem.shape.dtype, Dtype::F32),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let mut layers = MlpLayerBuffers::allocate_for_shape(&problem.shape);
        let mut p = vec![0.0; problem.shape.batch_rows * problem.shape.classes];
        let outputs = problem.shape.names_and_extents_of_operands().into_iter().fold(
            Tensors::new(),
            |outputs, (name, shape)| {
                outputs.with_output(&format!("grad_{name}"), shape, Dtype::F32)
            },
        );
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            layers.compute_class_probabilities(inputs, &mut p);
            layers.compute_input_and_weight_gradients(inputs, &p, outputs);
        })
    }),
}];

/// Number of elements that one parallel CPU task computes in a step between two GEMMs.
const ELEMENTS_PER_ELEMENTWISE_TASK: usize = 1 << 12;

/// Buffers of the perceptron's values between the GEMMs: hidden layer before and after SiLU, and
/// gradients.
struct MlpLayerBuffers {
    shape: PerceptronSizes,
    hidden_before_silu: Vec<f32>,
    hidden_after_silu: Vec<f32>,
    grad_hidden_before_silu: Vec<f32>,
    grad_logits: Vec<f32>,
}

impl MlpLayerBuffers {
    fn allocate_for_shape(shape: &PerceptronSizes) -> Self {
        let hidden = || vec![0.0; shape.batch_rows * shape.hidden_elements];
        Self {
            shape: *shape,
            hidden_before_silu: hidden(),
            hidden_after_silu: hidden(),
            grad_hidden_before_silu: hidden(),
            grad_logits: vec![0.0; shape.batch_rows * shape.classes],
        }
    }

    /// Computes the class probabilities `p` `[b, c]` of the perceptron on the CPU.
    fn compute_class_probabilities(&mut self, inputs: &Tensors, p: &mut [f32]) {
        let PerceptronSizes { batch_rows: b, hidden_elements: h, classes: c, .. } = self.shape;
        let [x, w1, w2] = view_x_and_weights_as_matrices(&self.shape, inputs);
        matmul_f32_on_all_threads(&mut self.hidden_before_silu, x, w1);
        parallel::process_chunks_in_parallel(
            &mut self.hidden_after_silu,
            ELEMENTS_PER_ELEMENTWISE_TASK,
            &|number, a| {
                a.iter_mut()
                    .zip(&self.hidden_before_silu[number * ELEMENTS_PER_ELEMENTWISE_TASK..])
                    .for_each(|(a, z)| *a = z * sigmoid_f32(*z));
            },
        );
        matmul_f32_on_all_threads(p, row_major_matrix_view(&self.hidden_after_silu, b, h), w2);
        parallel::process_chunks_in_parallel(
            p,
            c * ELEMENTS_PER_ELEMENTWISE_TASK.div_ceil(c),
            &|_, rows| {
                for row in rows.chunks_mut(c) {
                    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    row.iter_mut().for_each(|x| *x = vectorisable_exp(*x - largest));
                    let sum: f32 = row.iter().sum();
                    row.iter_mut().for_each(|x| *x /= sum);
                }
            },
        );
    }

    /// Computes the gradients of x, w1 and w2; [`Self::compute_class_probabilities`] must have
    /// computed `p` before.
    fn compute_input_and_weight_gradients(
        &mut self,
        inputs: &Tensors,
        p: &[f32],
        outputs: &mut Tensors,
    ) {
        let PerceptronSizes { batch_rows: b, hidden_elements: h, classes: c, .. } = self.shape;
        let [x, w1, w2] = view_x_and_weights_as_matrices(&self.shape, inputs);
        let rows = c * ELEMENTS_PER_ELEMENTWISE_TASK.div_ceil(c);
        let grad_p = inputs.f32_elements("grad_p");
        parallel::process_chunks_in_parallel(&mut self.grad_logits, rows, &|number, grad| {
            let before = p[number * rows..].chunks(c).zip(grad_p[number * rows..].chunks(c));
            for (grad, (p, grad_p)) in grad.chunks_mut(c).zip(before) {
                let mean: f32 = p.iter().zip(grad_p).map(|(p, grad)| p * grad).sum();
                let pairs = p.iter().zip(grad_p);
                grad.iter_mut().zip(pairs).for_each(|(to, (p, grad))| *to = p * (grad - mean));
            }
        });
        let grad_logits = row_major_matrix_view(&self.grad_logits, b, c);
        matmul_f32_on_all_threads(&mut self.grad_hidden_before_silu, grad_logits, w2.transpose());
        parallel::process_chunks_in_parallel(
            &mut self.grad_hidden_before_silu,
            ELEMENTS_PER_ELEMENTWISE_TASK,
            &|number, grad| {
                for (grad, &z) in grad
                    .iter_mut()
                    .zip(&self.hidden_before_silu[number * ELEMENTS_PER_ELEMENTWISE_TASK..])
                {
                    let s = sigmoid_f32(z);
                    *grad *= s * (1.0 + z * (1.0 - s));
                }
            },
        );
        let grad_z = row_major_matrix_view(&self.grad_hidden_before_silu, b, h);
        matmul_f32_on_all_threads(outputs.f32_mut("grad_x"), grad_z, w1.transpose());
        matmul_f32_on_all_threads(outputs.f32_mut("grad_w1"), x.transpose(), grad_z);
        matmul_f32_on_all_threads(
            outputs.f32_mut("grad_w2"),
            row_major_matrix_view(&self.hidden_after_silu, b, h).transpose(),
            grad_logits,
        );
    }
}

fn sigmoid_f32(z: f32) -> f32 {
    1.0 / (1.0 + vectorisable_exp(-z))
}

fn view_x_and_weights_as_matrices<'a>(
    shape: &PerceptronSizes,
    inputs: &'a Tensors,
) -> [MatRef<'a, f32>; 3] {
    shape.names_and_extents_of_operands().map(|(name, [rows, columns])| {
        row_major_matrix_view(inputs.f32_elements(name), rows, columns)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tests::assert_cpu_row_agrees_with_reference;

    #[test]
    fn mlp_cpu_rows_agree_with_the_reference_at_odd_sizes() {
        for [b, i, h, c] in [[1, 1, 1, 1], [3, 5, 7, 11], [65, 33, 129, 10]] {
            let shape = PerceptronSizes {
                batch_rows: b,
                input_elements: i,
                hidden_elements: h,
                classes: c,
                dtype: Dtype::F32,
            };
            assert_cpu_row_agrees_with_reference(&CPU_MLP_FORWARD_ROWS[0], &MlpForward { shape });
            assert_cpu_row_agrees_with_reference(&CPU_MLP_BACKWARD_ROWS[0], &MlpBackward { shape });
        }
    }
}
