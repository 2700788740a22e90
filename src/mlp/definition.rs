//! A two-layer perceptron `p = softmax(silu(x·w1)·w2)`, and the gradients of both weights and of
//! `x`.
//!
//! The perceptron has no biases and no loss function. The gradient of the class probabilities `p`
//! is an input of the perceptron's backward workload.

use super::reference::MlpForwardReference;
use super::shape::PerceptronSizes;
use kernelgate::workload::{
    Axis, Dtype, Expected, FlopUnit, InputSymmetry, Problem, Tensors, Tolerance, Work, Workload,
    random,
};

const MLP_AXES: &[Axis] = &[
    Axis::number("b", "batch"),
    Axis::number("i", "elements of a row of x"),
    Axis::number("h", "elements of the hidden layer"),
    Axis::number("c", "classes"),
    Axis::one_of("dtype", &["f32", "bf16"], "dtype of x and of the weights; sums are f32"),
];

/// Workload of the perceptron's forward pass, which computes class probabilities.
pub const MLP_FORWARD_WORKLOAD: Workload<MlpForward> = Workload {
    name: "mlp/forward",
    about: "two-layer perceptron: GEMM, SiLU, GEMM, softmax",
    revision: 1,
    axes: MLP_AXES,
    default_selection_lines: &["b=256 i=512 h=1024 c=64 dtype=f32"],
    accelerator_selection_lines: &["b=8192 i=1024 h=4096 c=128 dtype=bf16"],
    thorough_selection_lines: &["b=64,1024 i=512 h=2048 c=16 dtype=f32,bf16"],
    bind: |point| Ok(MlpForward { shape: PerceptronSizes::bind_mlp_axes(point)? }),
};

/// Workload of the perceptron's backward pass: gradients of the weights and of the input x; the
/// timed work includes the forward pass.
pub const MLP_BACKWARD_WORKLOAD: Workload<MlpBackward> = Workload {
    name: "mlp/backward",
    about: "gradients of x and of both weights of the perceptron, forward pass included",
    revision: 1,
    axes: MLP_AXES,
    default_selection_lines: MLP_FORWARD_WORKLOAD.default_selection_lines,
    accelerator_selection_lines: MLP_FORWARD_WORKLOAD.accelerator_selection_lines,
    thorough_selection_lines: MLP_FORWARD_WORKLOAD.thorough_selection_lines,
    bind: |point| Ok(MlpBackward { shape: PerceptronSizes::bind_mlp_axes(point)? }),
};

/// Problem `mlp/forward`: computes `p [b, c]` in f32 from `x [b, i]`, `w1 [i, h]` and `w2 [h, c]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlpForward {
    /// Sizes and dtype of the perceptron.
    pub shape: PerceptronSizes,
}

impl Problem for MlpForward {
    fn inputs(&self, seed: u64) -> Tensors {
        self.shape.draw_x_and_weights(seed)
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let p = MlpForwardReference::compute_forward_with_rounding(&self.shape, inputs, |x| x)
            .class_probabilities;
        vec![Expected::all("p", [self.shape.batch_rows, self.shape.classes], p)]
    }

    /// Each input row x of the perceptron gives one row of class probabilities p, so permuting the
    /// rows of x permutes those of p.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![InputSymmetry::RotateAlongAxis {
            inputs_with_axes: &[("x", 0)],
            outputs_with_axes: &[("p", 0)],
        }]
    }

    fn work(&self) -> Work {
        let PerceptronSizes { batch_rows: b, hidden_elements: h, classes: c, dtype, .. } =
            self.shape;
        // The perceptron's SiLU counts as four vector FLOPs for each hidden element, its softmax as
        // five for each logit.
        Work::bytes(self.shape.bytes_of_x_and_weights(), 4 * (b * c) as u64)
            .with_flops(FlopUnit::Matmul, dtype, self.shape.flops_of_both_forward_gemms())
            .with_flops(FlopUnit::VectorArithmetic, Dtype::F32, (4 * b * h + 5 * b * c) as u64)
    }

    fn tolerance(&self) -> Tolerance {
        self.shape.mlp_tolerance()
    }

    fn host_memory_bytes(&self) -> u64 {
        self.shape.estimate_mlp_host_bytes()
    }
}

/// Problem `mlp/backward`: computes `grad_x`, `grad_w1` and `grad_w2` in f32, with the shapes of x
/// and of the weights, from the inputs of `mlp/forward` and `grad_p [b, c]` in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlpBackward {
    /// Sizes and dtype of the perceptron.
    pub shape: PerceptronSizes,
}

impl Problem for MlpBackward {
    fn inputs(&self, seed: u64) -> Tensors {
        let PerceptronSizes { batch_rows: b, classes: c, .. } = self.shape;
        self.shape.draw_x_and_weights(seed).with_tensor(
            "grad_p",
            [b, c],
            random::normal_values(seed, "grad_p", b * c),
        )
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let gradients =
            MlpForwardReference::compute_forward_with_rounding(&self.shape, inputs, |x| x)
                .gradients_of_x_and_weights(inputs);
        let outputs = gradients.into_iter().zip(self.shape.names_and_extents_of_operands());
        outputs
            .map(|(values, (name, shape))| Expected::all(&format!("grad_{name}"), shape, values))
            .collect()
    }

    /// The perceptron's gradients are linear in `grad_p`, so negating `grad_p` negates all
    /// gradients.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![InputSymmetry::NegateInputsAndOutputs {
            inputs: &["grad_p"],
            outputs: &["grad_x", "grad_w1", "grad_w2"],
        }]
    }

    fn work(&self) -> Work {
        let PerceptronSizes { batch_rows: b, hidden_elements: h, classes: c, dtype, .. } =
            self.shape;
        let elements = self
            .shape
            .names_and_extents_of_operands()
            .map(|(_, [rows, columns])| (rows * columns) as u64);
        let read = self.shape.bytes_of_x_and_weights() + 4 * (b * c) as u64;
        Work::bytes(read, 4 * elements.iter().sum::<u64>())
            .with_flops(FlopUnit::Matmul, dtype, 3 * self.shape.flops_of_both_forward_gemms())
            .with_flops(FlopUnit::VectorArithmetic, Dtype::F32, (12 * b * h + 10 * b * c) as u64)
    }

    fn tolerance(&self) -> Tolerance {
        self.shape.mlp_tolerance()
    }

    fn host_memory_bytes(&self) -> u64 {
        self.shape.estimate_mlp_host_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use kernelgate::workload::{BenchEffort, SizeOfDefaultProblems};

    const SMALL_F32_MLP_SHAPE: PerceptronSizes = PerceptronSizes {
        batch_rows: 37,
        input_elements: 48,
        hidden_elements: 96,
        classes: 11,
        dtype: Dtype::F32,
    };

    /// Maximum error and relative L2 error of values compared with exact values.
    fn max_and_relative_l2_error(values: &[f64], exact: &[f64]) -> [f64; 2] {
        let largest =
            |values: &mut dyn Iterator<Item = f64>| values.map(f64::abs).fold(0.0, f64::max);
        let norm =
            |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let differences = || values.iter().zip(exact).map(|(x, y)| x - y);
        let all = || exact.iter().copied();
        [
            largest(&mut differences()) / largest(&mut all()),
            norm(&mut differences()) / norm(&mut all()),
        ]
    }

    #[test]
    fn bf16_rounding_errors_stay_well_within_the_mlp_tolerance() {
        let problem = MlpBackward {
            shape: PerceptronSizes {
                batch_rows: 128,
                input_elements: 256,
                hidden_elements: 512,
                classes: 64,
                dtype: Dtype::Bf16,
            },
        };
        let inputs = problem.inputs(1);
        let round = |x: f64| bf16::from_f64(x).to_f64();
        let [exact, rounded] = [(|x| x) as fn(f64) -> f64, round].map(|round| {
            MlpForwardReference::compute_forward_with_rounding(&problem.shape, &inputs, round)
        });
        let mut pairs =
            vec![(rounded.class_probabilities.clone(), exact.class_probabilities.clone())];
        pairs.extend(
            rounded
                .gradients_of_x_and_weights(&inputs)
                .into_iter()
                .zip(exact.gradients_of_x_and_weights(&inputs)),
        );
        let Tolerance { max_error, relative_l2 } = problem.tolerance();
        for (values, exact) in pairs {
            let [max, l2] = max_and_relative_l2_error(&values, &exact);
            assert!(max < max_error / 2.0 && l2 < relative_l2 / 2.0, "{max} {l2}");
            assert!(max > max_error / 40.0 || l2 > relative_l2 / 40.0, "{max} {l2}");
        }
    }

    #[test]
    fn mlp_reference_gradients_equal_finite_differences_of_the_loss() {
        let problem = MlpBackward { shape: SMALL_F32_MLP_SHAPE };
        let inputs = problem.inputs(2);
        let loss = |inputs: &Tensors| {
            let p = MlpForwardReference::compute_forward_with_rounding(
                &SMALL_F32_MLP_SHAPE,
                inputs,
                |x| x,
            )
            .class_probabilities;
            p.iter().zip(inputs.f32_elements("grad_p")).map(|(p, g)| p * f64::from(*g)).sum::<f64>()
        };
        let gradients = MlpForwardReference::compute_forward_with_rounding(
            &SMALL_F32_MLP_SHAPE,
            &inputs,
            |x| x,
        )
        .gradients_of_x_and_weights(&inputs);
        for ((name, _), gradient) in
            SMALL_F32_MLP_SHAPE.names_and_extents_of_operands().into_iter().zip(gradients)
        {
            for element in [0, gradient.len() / 2, gradient.len() - 1] {
                let at = |step: f32| {
                    let mut moved = inputs.clone();
                    moved.f32_mut(name)[element] += step;
                    (f64::from(moved.f32_elements(name)[element]), loss(&moved))
                };
                let ((low, below), (high, above)) = (at(-1e-2), at(1e-2));
                let difference = (above - below) / (high - low);
                let allowed = 1e-3 * (gradient[element].abs() + 1e-2);
                assert!((difference - gradient[element]).abs() < allowed, "{name} {element}");
            }
        }
    }

    #[test]
    fn every_mlp_point_binds_and_declares_nonzero_work() {
        for point in MLP_FORWARD_WORKLOAD
            .points_selected_by_effort(
                BenchEffort::Thorough,
                SizeOfDefaultProblems::HostAndAcceleratorSizes,
                &[],
            )
            .unwrap()
        {
            assert!((MLP_FORWARD_WORKLOAD.bind)(&point).is_ok());
        }
        let shape = PerceptronSizes {
            batch_rows: 2,
            input_elements: 3,
            hidden_elements: 5,
            classes: 7,
            dtype: Dtype::Bf16,
        };
        let work = MlpForward { shape }.work();
        assert_eq!((work.min_read_bytes, work.min_write_bytes), (2 * (6 + 15 + 35), 4 * 14));
        assert_eq!(work.matmul_flops(), 2 * 2 * 5 * (3 + 7));
        assert_eq!(MlpBackward { shape }.work().matmul_flops(), 3 * work.matmul_flops());
    }
}
