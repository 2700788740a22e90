//! Tests one training step of a network of two layers: GEMMs with transposed operands, an
//! accumulating GEMM, bias and ReLU with its gradient, and a weight update in a side lane. All
//! values of this test are small integers, so that every sum is exact.

use half::bf16;

use super::*;
use crate::backend::Executable;
use crate::workload::{Dtype, Tensor, TensorData, Tensors};
use kernelgate_cuda::libraries::gemm::{
    DEFAULT_GEMM_WORKSPACE_BYTES, GemmEpilogue, GemmEpilogueActivation, GemmMatrixDtype,
    GemmOperandAddresses, GemmSpec,
};
use kernelgate_cuda::testing::lock_first_gpu;
use kernelgate_cuda::{BackendError, KernelSpec, Source};

/// Rows of the batch, and columns of the input, the hidden layer and the output.
const M: usize = 16;
const K: usize = 16;
const H: usize = 128;
const N: usize = 32;

/// The test kernel halves the gradient and subtracts it from the weights: `new[i] = old[i] -
/// gradient[i]/2`.
const HALF_GRADIENT_SGD_KERNEL: KernelSpec<usize> = KernelSpec::new(
    Source::new(
        "program_sgd",
        r#"
extern "C" __global__ void program_sgd(const float* old, const float* gradient, float* updated,
                                       long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) updated[i] = old[i] - 0.5f * gradient[i];
}"#,
    ),
    "program_sgd",
    128,
    |n| [n.div_ceil(128), 1, 1],
);

/// h = relu(x·w1 + b1); y = h·w2; dw2 = 2·hᵀ·dy as two accumulated GEMMs; dh = dy·w2ᵀ masked by h >
/// 0; dw1 = xᵀ·dh; a step of w2 in parallel with those of the first layer.
fn two_layer_training_step() -> Program {
    use GemmMatrixDtype::{Bf16, F32};
    use MemoryPurpose::{Activations, Gradients, Inputs, Weights};
    let mut program = Program::new();
    let bf16s = |count: usize| count * Dtype::Bf16.bytes_per_element();
    let f32s = |count: usize| count * Dtype::F32.bytes_per_element();
    let x = program.add_input("x", Inputs, bf16s(M * K));
    let dy = program.add_input("dy", Inputs, bf16s(M * N));
    let w1 = program.add_input("w1", Weights, bf16s(K * H));
    let b1 = program.add_input("b1", Weights, bf16s(H));
    let w2 = program.add_packed_from_inputs("w2", Weights, bf16s(H * N), |inputs| {
        let rounded = inputs.f32("w2").iter().map(|value| bf16::from_f32(*value));
        bytemuck::cast_slice(&rounded.collect::<Vec<_>>()).to_vec()
    });
    let master = program.add_input("w2 in fp32", Weights, f32s(H * N));
    let relu = GemmEpilogueActivation::Relu;
    let first = GemmSpec {
        epilogue: GemmEpilogue::Activation { function: relu, bias: true, aux: true },
        ..GemmSpec::new(M, H, K, Bf16, Bf16)
    };
    let h = program.add_scratch("h", Activations, bf16s(M * H));
    let mask =
        program.add_scratch("mask", Activations, first.aux_matrix_bytes_of_whole_batch().unwrap());
    let dh = program.add_scratch("dh", Gradients, bf16s(M * H));
    let dw2 = program.add_scratch("dw2", Gradients, f32s(H * N));
    let y = program.add_output("y", [M, N], Dtype::F32);
    let dw1 = program.add_output("dw1", [K, H], Dtype::F32);
    let updated = program.add_output("updated", [H, N], Dtype::F32);
    let side = program.add_lane();

    program.in_range("Forward", |program| {
        let biased = GemmOperandAddresses::gemm_operands_from_a_b_d(x, w1, h);
        let operands = GemmOperandAddresses { bias: Some(b1), aux: Some(mask), ..biased };
        program.add_gemm(ProgramLane::MAIN_LANE, first, operands);
        program.add_gemm(ProgramLane::MAIN_LANE, GemmSpec::new(M, N, H, Bf16, F32), [h, w2, y]);
    });
    program.in_range("Backward", |program| {
        program.make_lane_wait_for_lane(side, ProgramLane::MAIN_LANE);
        program.add_byte_fill(side, dw2, f32s(H * N), 0);
        let outer = GemmSpec { a_transposed: true, ..GemmSpec::new(H, N, M, Bf16, F32) };
        let accumulated = GemmSpec { beta: 1.0, ..outer };
        program.add_gemm(side, accumulated, [h, dy, dw2]);
        program.add_gemm(side, accumulated, [h, dy, dw2]);
        program.in_range("Optimizer", |program| {
            let n = H * N;
            let update = program.make_kernel_launch(
                &HALF_GRADIENT_SGD_KERNEL,
                &n,
                (master, dw2, updated, long_operand(n)),
            );
            program.add_prepared_launch(update.moved_to_lane(side));
        });
        let inner = GemmSpec {
            b_transposed: true,
            epilogue: GemmEpilogue::ActivationGradient { function: relu, bias_gradient: false },
            ..GemmSpec::new(M, H, N, Bf16, Bf16)
        };
        let operands = GemmOperandAddresses {
            aux: Some(mask),
            ..GemmOperandAddresses::gemm_operands_from_a_b_d(dy, w2, dh)
        };
        program.add_gemm(ProgramLane::MAIN_LANE, inner, operands);
        let outer = GemmSpec { a_transposed: true, ..GemmSpec::new(K, H, M, Bf16, F32) };
        program.add_gemm(ProgramLane::MAIN_LANE, outer, [x, dh, dw1]);
        program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, side);
    });
    program
}

#[test]
fn a_training_step_is_planned_without_a_gpu() {
    let program = two_layer_training_step();
    assert_eq!(program.check(), Ok(()));
    let bf16s = M * K + M * N + K * H + H + H * N + 2 * M * H;
    let f32s = 3 * H * N + M * N + K * H;
    let mask = M * H / 8;
    let bytes = 2 * bf16s + 4 * f32s + mask + 2 * DEFAULT_GEMM_WORKSPACE_BYTES;
    assert_eq!(program.device_bytes(), bytes as u64);
    assert_eq!(program.steps().iter().filter(|step| step.enqueues_gpu_work()).count(), 8);
}

fn pseudo_random_small_integers(count: usize, factor: usize, most: usize) -> Vec<f32> {
    (0..count).map(|i| (i * factor % (2 * most + 1)) as f32 - most as f32).collect()
}

/// Multiplies op(a) `[m, k]` and op(b) `[k, n]` on the host; row and column strides express
/// transposition.
fn strided_matrix_product_on_host(
    [m, n, k]: [usize; 3],
    (a, [a_row, a_column]): (&[f32], [usize; 2]),
    (b, [b_row, b_column]): (&[f32], [usize; 2]),
) -> Vec<f32> {
    let element = |i: usize, j: usize| {
        (0..k).map(|l| a[i * a_row + l * a_column] * b[l * b_row + j * b_column]).sum()
    };
    (0..m * n).map(|index| element(index / n, index % n)).collect()
}

#[test]
fn a_training_step_equals_the_host_computation() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let [x, w1, mut b1] = [(M * K, 7, 2), (K * H, 4, 1), (H, 6, 2)]
        .map(|(count, factor, most)| pseudo_random_small_integers(count, factor, most));
    // The test avoids hidden values of zero, because the gradient of ReLU is undefined there.
    b1.iter_mut().for_each(|value| *value += 0.5);
    let [w2, dy] = [(H * N, 11, 1), (M * N, 13, 1)]
        .map(|(count, factor, most)| pseudo_random_small_integers(count, factor, most));
    let biased = strided_matrix_product_on_host([M, H, K], (&x, [K, 1]), (&w1, [H, 1]));
    let h: Vec<f32> =
        biased.iter().enumerate().map(|(i, value)| (value + b1[i % H]).max(0.0)).collect();
    let y = strided_matrix_product_on_host([M, N, H], (&h, [H, 1]), (&w2, [N, 1]));
    let dw2 = strided_matrix_product_on_host([H, N, M], (&h, [1, H]), (&dy, [N, 1]));
    let through = strided_matrix_product_on_host([M, H, N], (&dy, [N, 1]), (&w2, [1, N]));
    let dh: Vec<f32> =
        through.iter().zip(&h).map(|(dh, h)| if *h > 0.0 { *dh } else { 0.0 }).collect();
    let dw1 = strided_matrix_product_on_host([K, H, M], (&x, [1, K]), (&dh, [H, 1]));
    let updated: Vec<f32> = w2.iter().zip(&dw2).map(|(w, gradient)| w - gradient).collect();

    let rounded = |values: &[f32]| -> Vec<bf16> {
        values.iter().map(|value| bf16::from_f32(*value)).collect()
    };
    let mut inputs = Tensors::new();
    for (name, values) in [("x", &x), ("dy", &dy), ("w1", &w1), ("b1", &b1)] {
        inputs.insert(name, Tensor::new([values.len()], TensorData::Bf16(rounded(values))));
    }
    let inputs = inputs.with("w2", [H * N], w2.clone()).with("w2 in fp32", [H * N], w2);
    for capture in [Capture::Stream, Capture::Graph] {
        let mut task = match two_layer_training_step().into_task(&device, &inputs, capture) {
            Err(BackendError::Unsupported(reason)) => return eprintln!("skipped: {reason}"),
            task => task.unwrap(),
        };
        for _ in 0..2 {
            task.poison_outputs().unwrap();
            task.launch_once().unwrap();
            task.wait_for_launches().unwrap();
            let outputs = task.outputs_on_host().unwrap();
            assert_eq!(outputs.f32("y"), y, "{capture:?}");
            assert_eq!(outputs.f32("dw1"), dw1, "{capture:?}");
            assert_eq!(outputs.f32("updated"), updated, "{capture:?}");
        }
    }
}
