//! A two-layer perceptron `p = softmax(silu(x·w1)·w2)`, and the gradients of both weights and of
//! `x`.
//!
//! The perceptron has no biases and no loss function. The gradient of the probabilities `p` is an
//! input of the backward workload.

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
    default: &["b=256 i=512 h=1024 c=64 dtype=f32"],
    accelerator: &["b=8192 i=1024 h=4096 c=128 dtype=bf16"],
    thorough: &["b=64,1024 i=512 h=2048 c=16 dtype=f32,bf16"],
    bind: |point| Ok(MlpForward { shape: PerceptronSizes::bind_mlp_axes(point)? }),
};

/// Workload of the perceptron's backward pass: gradients of the weights and of the input x; the
/// timed work includes the forward pass.
pub const MLP_BACKWARD_WORKLOAD: Workload<MlpBackward> = Workload {
    name: "mlp/backward",
    about: "gradients of x and of both weights of the perceptron, forward pass included",
    revision: 1,
    axes: MLP_AXES,
    default: MLP_FORWARD_WORKLOAD.default,
    accelerator: MLP_FORWARD_WORKLOAD.accelerator,
    thorough: MLP_FORWARD_WORKLOAD.thorough,
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
        let p = MlpForwardReference::compute_forward_with_rounding(&self.shape, inputs, |x| x).p;
        vec![Expected::all("p", [self.shape.b, self.shape.c], p)]
    }

    /// The rows of x are independent of each other, so permuting the rows of x permutes the rows of
    /// p.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![InputSymmetry::Roll { inputs: &[("x", 0)], outputs: &[("p", 0)] }]
    }

    fn work(&self) -> Work {
        let PerceptronSizes { b, h, c, dtype, .. } = self.shape;
        // Vector FLOPs of the perceptron: SiLU counts as four for each hidden element, softmax as
        // five for each logit.
        Work::bytes(self.shape.bytes_of_x_and_weights(), 4 * (b * c) as u64)
            .with_flops(FlopUnit::Matmul, dtype, self.shape.flops_of_both_forward_gemms())
            .with_flops(FlopUnit::Vector, Dtype::F32, (4 * b * h + 5 * b * c) as u64)
    }

    fn tolerance(&self) -> Tolerance {
        self.shape.mlp_tolerance()
    }

    fn host_bytes(&self) -> u64 {
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
        let PerceptronSizes { b, c, .. } = self.shape;
        self.shape.draw_x_and_weights(seed).with(
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
        vec![InputSymmetry::Negate {
            inputs: &["grad_p"],
            outputs: &["grad_x", "grad_w1", "grad_w2"],
        }]
    }

    fn work(&self) -> Work {
        let PerceptronSizes { b, h, c, dtype, .. } = self.shape;
        let elements = self
            .shape
            .names_and_extents_of_operands()
            .map(|(_, [rows, columns])| (rows * columns) as u64);
        let read = self.shape.bytes_of_x_and_weights() + 4 * (b * c) as u64;
        Work::bytes(read, 4 * elements.iter().sum::<u64>())
            .with_flops(FlopUnit::Matmul, dtype, 3 * self.shape.flops_of_both_forward_gemms())
            .with_flops(FlopUnit::Vector, Dtype::F32, (12 * b * h + 10 * b * c) as u64)
    }

    fn tolerance(&self) -> Tolerance {
        self.shape.mlp_tolerance()
    }

    fn host_bytes(&self) -> u64 {
        self.shape.estimate_mlp_host_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use kernelgate::workload::{BenchEffort, SizeOfDefaultProblems};

    const SMALL_F32_MLP_SHAPE: PerceptronSizes =
        PerceptronSizes { b: 37, i: 48, h: 96, c: 11, dtype: Dtype::F32 };

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
            shape: PerceptronSizes { b: 128, i: 256, h: 512, c: 64, dtype: Dtype::Bf16 },
        };
        let inputs = problem.inputs(1);
        let round = |x: f64| bf16::from_f64(x).to_f64();
        let [exact, rounded] = [(|x| x) as fn(f64) -> f64, round].map(|round| {
            MlpForwardReference::compute_forward_with_rounding(&problem.shape, &inputs, round)
        });
        let mut pairs = vec![(rounded.p.clone(), exact.p.clone())];
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
            .p;
            p.iter().zip(inputs.f32("grad_p")).map(|(p, g)| p * f64::from(*g)).sum::<f64>()
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
                    (f64::from(moved.f32(name)[element]), loss(&moved))
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
        let shape = PerceptronSizes { b: 2, i: 3, h: 5, c: 7, dtype: Dtype::Bf16 };
        let work = MlpForward { shape }.work();
        assert_eq!((work.read_bytes, work.write_bytes), (2 * (6 + 15 + 35), 4 * 14));
        assert_eq!(work.matmul_flops(), 2 * 2 * 5 * (3 + 7));
        assert_eq!(MlpBackward { shape }.work().matmul_flops(), 3 * work.matmul_flops());
    }
}
