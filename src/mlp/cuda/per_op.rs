//! Rung with one launch for each operation, with which all other rungs are compared.

use crate::kernel_files::kernel_file;
use crate::mlp::shape::MlpShape;
use kernelgate::backend::program::{Lane, MemoryPurpose, Program, int, long_operand};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype};

/// All kernels of the row with one launch for each operation.
pub const KERNELS: &[KernelSpec<MlpShape>] =
    &[ACTIVATE_KERNEL, ACTIVATE_BACKWARD_KERNEL, SOFTMAX_KERNEL, SOFTMAX_BACKWARD_KERNEL];

const THREADS: usize = 256;

/// Kernel of the activation: each thread computes one element of the hidden layer.
const ACTIVATE_KERNEL: KernelSpec<MlpShape> = KernelSpec {
    defines: |_| vec!["ELEMENT_BF16".to_owned()],
    constants: |_| vec![("THREADS", THREADS)],
    variants: || vec![MlpShape { b: 1, i: 1, h: 1, c: 1, dtype: Dtype::Bf16 }],
    ..KernelSpec::new(kernel_file("mlp/per_op"), "mlp_per_op_activate", THREADS, |shape| {
        [(shape.b * shape.h).div_ceil(THREADS), 1, 1]
    })
};
const ACTIVATE_BACKWARD_KERNEL: KernelSpec<MlpShape> =
    KernelSpec { symbol: "mlp_per_op_activate_backward", ..ACTIVATE_KERNEL };

/// Kernel of the softmax: each block computes one row.
const SOFTMAX_KERNEL: KernelSpec<MlpShape> =
    KernelSpec { symbol: "mlp_per_op_softmax", blocks: |shape| [shape.b, 1, 1], ..ACTIVATE_KERNEL };
const SOFTMAX_BACKWARD_KERNEL: KernelSpec<MlpShape> =
    KernelSpec { symbol: "mlp_per_op_softmax_backward", ..SOFTMAX_KERNEL };

/// Program that computes `p` from x and the weights.
pub fn forward_program(shape: &MlpShape) -> Program {
    let mut program = Program::new();
    program.add_output("p", [shape.b, shape.c], Dtype::F32);
    write_forward(&mut program, shape);
    program
}

/// Program that computes the gradients of x and of the weights, after the forward pass.
pub fn backward_program(shape: &MlpShape) -> Program {
    let MlpShape { b, i, h, c, .. } = *shape;
    let mut program = Program::new();
    program.add_scratch("p", MemoryPurpose::Activations, b * c * Dtype::F32.bytes());
    write_forward(&mut program, shape);
    program.add_input("grad_p", MemoryPurpose::Inputs, b * c * Dtype::F32.bytes());
    program.add_scratch("grad_logits", MemoryPurpose::Gradients, b * c * Dtype::Bf16.bytes());
    program.add_scratch("grad_a", MemoryPurpose::Gradients, b * h * Dtype::F32.bytes());
    program.add_scratch("grad_z", MemoryPurpose::Gradients, b * h * Dtype::Bf16.bytes());
    for (name, extents) in [("grad_x", [b, i]), ("grad_w1", [i, h]), ("grad_w2", [h, c])] {
        program.add_output(name, extents, Dtype::F32);
    }
    program.in_range("Softmax_Backward", |program| {
        program.add_launch(&SOFTMAX_BACKWARD_KERNEL, shape, ("p", "grad_p", "grad_logits", int(c)));
    });
    program.in_range("Layer_2_Backward", |program| {
        let spec = GemmSpec { a_transposed: true, ..bf16_gemm_with_f32_result(h, c, b) };
        add_gemm_to_program(program, spec, ["a", "grad_logits", "grad_w2"]);
        let spec = GemmSpec { b_transposed: true, ..bf16_gemm_with_f32_result(b, h, c) };
        add_gemm_to_program(program, spec, ["grad_logits", "w2", "grad_a"]);
    });
    program.in_range("Activation_Backward", |program| {
        program.add_launch(
            &ACTIVATE_BACKWARD_KERNEL,
            shape,
            ("z", "grad_a", "grad_z", long_operand(b * h)),
        );
    });
    program.in_range("Layer_1_Backward", |program| {
        let spec = GemmSpec { a_transposed: true, ..bf16_gemm_with_f32_result(i, h, b) };
        add_gemm_to_program(program, spec, ["x", "grad_z", "grad_w1"]);
        let spec = GemmSpec { b_transposed: true, ..bf16_gemm_with_f32_result(b, i, h) };
        add_gemm_to_program(program, spec, ["grad_z", "w1", "grad_x"]);
    });
    program
}

/// Adds the forward pass, which writes the region `p`.
fn write_forward(program: &mut Program, shape: &MlpShape) {
    let MlpShape { b, i, h, c, .. } = *shape;
    for (name, [rows, columns]) in shape.named_operands() {
        let purpose = if name == "x" { MemoryPurpose::Inputs } else { MemoryPurpose::Weights };
        program.add_input(name, purpose, rows * columns * Dtype::Bf16.bytes());
    }
    program.add_scratch("z", MemoryPurpose::Activations, b * h * Dtype::F32.bytes());
    program.add_scratch("a", MemoryPurpose::Activations, b * h * Dtype::Bf16.bytes());
    program.add_scratch("logits", MemoryPurpose::Activations, b * c * Dtype::F32.bytes());
    program.in_range("Layer_1", |program| {
        add_gemm_to_program(program, bf16_gemm_with_f32_result(b, h, i), ["x", "w1", "z"])
    });
    program.in_range("Activation", |program| {
        program.add_launch(&ACTIVATE_KERNEL, shape, ("z", "a", long_operand(b * h)));
    });
    program.in_range("Layer_2", |program| {
        add_gemm_to_program(program, bf16_gemm_with_f32_result(b, c, h), ["a", "w2", "logits"])
    });
    program.in_range("Softmax", |program| {
        program.add_launch(&SOFTMAX_KERNEL, shape, ("logits", "p", int(c)));
    });
}

/// GEMM of bf16 matrices with the result D `[m, n]` in f32.
const fn bf16_gemm_with_f32_result(m: usize, n: usize, k: usize) -> GemmSpec {
    GemmSpec::new(m, n, k, MatrixDtype::Bf16, MatrixDtype::F32)
}

fn add_gemm_to_program(program: &mut Program, spec: GemmSpec, regions: [&str; 3]) {
    let operands = regions.map(|name| program.at(name));
    program.gemm(Lane::MAIN_LANE, spec, operands);
}
