//! Tests one training step of a network of two layers: GEMMs with transposed operands, an
//! accumulating GEMM, bias and ReLU with its gradient, and a weight update in a side lane. All
//! values of this test are small integers, so that every sum is exact.

use half::bf16;

use super::*;
use crate::backend::LaunchableProblem;
use crate::workload::{Dtype, Tensor, TensorData, Tensors};
use kernelgate_cuda::libraries::gemm::{
    DEFAULT_GEMM_WORKSPACE_BYTES, GemmEpilogue, GemmEpilogueActivation, GemmMatrixDtype,
    GemmOperandAddresses, GemmSpec,
};
use kernelgate_cuda::testing::lock_first_gpu;
use kernelgate_cuda::{BackendError, KernelSpec, Source};

/// Sizes of the test network: rows of the batch, and columns of input, hidden layer and output.
const BATCH_ROWS: usize = 16;
const INPUT_COLUMNS: usize = 16;
const HIDDEN_COLUMNS: usize = 128;
const OUTPUT_COLUMNS: usize = 32;

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
fn two_layer_training_step() -> LaunchProgram {
    use GemmMatrixDtype::{Bf16, F32};
    use MemoryPurpose::{Activations, Gradients, Inputs, Weights};
    let mut program = LaunchProgram::new();
    let bf16s = |count: usize| count * Dtype::Bf16.bytes_per_element();
    let f32s = |count: usize| count * Dtype::F32.bytes_per_element();
    let x = program.add_input("x", Inputs, bf16s(BATCH_ROWS * INPUT_COLUMNS));
    let dy = program.add_input("dy", Inputs, bf16s(BATCH_ROWS * OUTPUT_COLUMNS));
    let w1 = program.add_input("w1", Weights, bf16s(INPUT_COLUMNS * HIDDEN_COLUMNS));
    let b1 = program.add_input("b1", Weights, bf16s(HIDDEN_COLUMNS));
    let w2_bytes = bf16s(HIDDEN_COLUMNS * OUTPUT_COLUMNS);
    let w2 = program.add_packed_from_inputs("w2", Weights, w2_bytes, |inputs| {
        let rounded = inputs.f32_elements("w2").iter().map(|value| bf16::from_f32(*value));
        bytemuck::cast_slice(&rounded.collect::<Vec<_>>()).to_vec()
    });
    let master = program.add_input("w2 in fp32", Weights, f32s(HIDDEN_COLUMNS * OUTPUT_COLUMNS));
    let relu = GemmEpilogueActivation::Relu;
    let first = GemmSpec {
        epilogue: GemmEpilogue::Activation {
            function: relu,
            adds_bias: true,
            stores_auxiliary_matrix: true,
        },
        ..GemmSpec::new(BATCH_ROWS, HIDDEN_COLUMNS, INPUT_COLUMNS, Bf16, Bf16)
    };
    let h = program.add_scratch("h", Activations, bf16s(BATCH_ROWS * HIDDEN_COLUMNS));
    let mask =
        program.add_scratch("mask", Activations, first.aux_matrix_bytes_of_whole_batch().unwrap());
    let dh = program.add_scratch("dh", Gradients, bf16s(BATCH_ROWS * HIDDEN_COLUMNS));
    let dw2 = program.add_scratch("dw2", Gradients, f32s(HIDDEN_COLUMNS * OUTPUT_COLUMNS));
    let y = program.add_output("y", [BATCH_ROWS, OUTPUT_COLUMNS], Dtype::F32);
    let dw1 = program.add_output("dw1", [INPUT_COLUMNS, HIDDEN_COLUMNS], Dtype::F32);
    let updated = program.add_output("updated", [HIDDEN_COLUMNS, OUTPUT_COLUMNS], Dtype::F32);
    let side = program.add_lane();

    program.add_steps_in_named_range("Forward", |program| {
        let biased = GemmOperandAddresses::gemm_operands_from_a_b_d(x, w1, h);
        let operands = GemmOperandAddresses { bias: Some(b1), aux_matrix: Some(mask), ..biased };
        program.add_gemm(ProgramLane::MAIN_LANE, first, operands);
        let second = GemmSpec::new(BATCH_ROWS, OUTPUT_COLUMNS, HIDDEN_COLUMNS, Bf16, F32);
        program.add_gemm(ProgramLane::MAIN_LANE, second, [h, w2, y]);
    });
    program.add_steps_in_named_range("Backward", |program| {
        program.make_lane_wait_for_lane(side, ProgramLane::MAIN_LANE);
        program.add_byte_fill(side, dw2, f32s(HIDDEN_COLUMNS * OUTPUT_COLUMNS), 0);
        let outer = GemmSpec::new(HIDDEN_COLUMNS, OUTPUT_COLUMNS, BATCH_ROWS, Bf16, F32);
        let outer = GemmSpec { a_transposed: true, ..outer };
        let accumulated = GemmSpec { beta: 1.0, ..outer };
        program.add_gemm(side, accumulated, [h, dy, dw2]);
        program.add_gemm(side, accumulated, [h, dy, dw2]);
        program.add_steps_in_named_range("Optimizer", |program| {
            let n = HIDDEN_COLUMNS * OUTPUT_COLUMNS;
            let update = program.make_kernel_launch(
                &HALF_GRADIENT_SGD_KERNEL,
                &n,
                (master, dw2, updated, long_operand(n)),
            );
            program.add_prepared_launch(update.moved_to_lane(side));
        });
        let inner = GemmSpec {
            b_transposed: true,
            epilogue: GemmEpilogue::ActivationGradient {
                function: relu,
                stores_bias_gradient: false,
            },
            ..GemmSpec::new(BATCH_ROWS, HIDDEN_COLUMNS, OUTPUT_COLUMNS, Bf16, Bf16)
        };
        let operands = GemmOperandAddresses {
            aux_matrix: Some(mask),
            ..GemmOperandAddresses::gemm_operands_from_a_b_d(dy, w2, dh)
        };
        program.add_gemm(ProgramLane::MAIN_LANE, inner, operands);
        let outer = GemmSpec::new(INPUT_COLUMNS, HIDDEN_COLUMNS, BATCH_ROWS, Bf16, F32);
        let outer = GemmSpec { a_transposed: true, ..outer };
        program.add_gemm(ProgramLane::MAIN_LANE, outer, [x, dh, dw1]);
        program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, side);
    });
    program
}

#[test]
fn a_training_step_is_planned_without_a_gpu() {
    let program = two_layer_training_step();
    assert_eq!(program.check(), Ok(()));
    let bf16s = BATCH_ROWS * INPUT_COLUMNS
        + BATCH_ROWS * OUTPUT_COLUMNS
        + INPUT_COLUMNS * HIDDEN_COLUMNS
        + HIDDEN_COLUMNS
        + HIDDEN_COLUMNS * OUTPUT_COLUMNS
        + 2 * BATCH_ROWS * HIDDEN_COLUMNS;
    let f32s = 3 * HIDDEN_COLUMNS * OUTPUT_COLUMNS
        + BATCH_ROWS * OUTPUT_COLUMNS
        + INPUT_COLUMNS * HIDDEN_COLUMNS;
    let mask = BATCH_ROWS * HIDDEN_COLUMNS / 8;
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
    let [x, w1, mut b1] = [
        (BATCH_ROWS * INPUT_COLUMNS, 7, 2),
        (INPUT_COLUMNS * HIDDEN_COLUMNS, 4, 1),
        (HIDDEN_COLUMNS, 6, 2),
    ]
    .map(|(count, factor, most)| pseudo_random_small_integers(count, factor, most));
    // The test avoids hidden values of zero, because the gradient of ReLU is undefined there.
    b1.iter_mut().for_each(|value| *value += 0.5);
    let [w2, dy] = [(HIDDEN_COLUMNS * OUTPUT_COLUMNS, 11, 1), (BATCH_ROWS * OUTPUT_COLUMNS, 13, 1)]
        .map(|(count, factor, most)| pseudo_random_small_integers(count, factor, most));
    let biased = strided_matrix_product_on_host(
        [BATCH_ROWS, HIDDEN_COLUMNS, INPUT_COLUMNS],
        (&x, [INPUT_COLUMNS, 1]),
        (&w1, [HIDDEN_COLUMNS, 1]),
    );
    let h: Vec<f32> = biased
        .iter()
        .enumerate()
        .map(|(i, value)| (value + b1[i % HIDDEN_COLUMNS]).max(0.0))
        .collect();
    let y = strided_matrix_product_on_host(
        [BATCH_ROWS, OUTPUT_COLUMNS, HIDDEN_COLUMNS],
        (&h, [HIDDEN_COLUMNS, 1]),
        (&w2, [OUTPUT_COLUMNS, 1]),
    );
    let dw2 = strided_matrix_product_on_host(
        [HIDDEN_COLUMNS, OUTPUT_COLUMNS, BATCH_ROWS],
        (&h, [1, HIDDEN_COLUMNS]),
        (&dy, [OUTPUT_COLUMNS, 1]),
    );
    let through = strided_matrix_product_on_host(
        [BATCH_ROWS, HIDDEN_COLUMNS, OUTPUT_COLUMNS],
        (&dy, [OUTPUT_COLUMNS, 1]),
        (&w2, [1, OUTPUT_COLUMNS]),
    );
    let dh: Vec<f32> =
        through.iter().zip(&h).map(|(dh, h)| if *h > 0.0 { *dh } else { 0.0 }).collect();
    let dw1 = strided_matrix_product_on_host(
        [INPUT_COLUMNS, HIDDEN_COLUMNS, BATCH_ROWS],
        (&x, [1, INPUT_COLUMNS]),
        (&dh, [HIDDEN_COLUMNS, 1]),
    );
    let updated: Vec<f32> = w2.iter().zip(&dw2).map(|(w, gradient)| w - gradient).collect();

    let rounded = |values: &[f32]| -> Vec<bf16> {
        values.iter().map(|value| bf16::from_f32(*value)).collect()
    };
    let mut inputs = Tensors::new();
    for (name, values) in [("x", &x), ("dy", &dy), ("w1", &w1), ("b1", &b1)] {
        inputs.insert(name, Tensor::new([values.len()], TensorData::Bf16(rounded(values))));
    }
    let inputs = inputs
        .with_tensor("w2", [HIDDEN_COLUMNS * OUTPUT_COLUMNS], w2.clone())
        .with_tensor("w2 in fp32", [HIDDEN_COLUMNS * OUTPUT_COLUMNS], w2);
    for capture in [ProgramLaunchMode::StepByStep, ProgramLaunchMode::CapturedGraph] {
        let mut task = match two_layer_training_step().into_task(&device, &inputs, capture) {
            Err(BackendError::Unsupported(reason)) => return eprintln!("skipped: {reason}"),
            task => task.unwrap(),
        };
        for _ in 0..2 {
            task.poison_outputs().unwrap();
            task.launch_once().unwrap();
            task.wait_for_launches().unwrap();
            let outputs = task.outputs_on_host().unwrap();
            assert_eq!(outputs.f32_elements("y"), y, "{capture:?}");
            assert_eq!(outputs.f32_elements("dw1"), dw1, "{capture:?}");
            assert_eq!(outputs.f32_elements("updated"), updated, "{capture:?}");
        }
    }
}
