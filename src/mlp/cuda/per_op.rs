//! Rung with one launch for each operation, with which all other rungs are compared.

use crate::kernel_files::kernel_file;
use crate::mlp::shape::Shape;
use kernelgate::backend::program::{Lane, MemoryPurpose, Program, int, long_operand};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype};

/// All kernels of the row with one launch for each operation.
pub const KERNELS: &[KernelSpec<Shape>] =
    &[ACTIVATE_KERNEL, ACTIVATE_BACKWARD_KERNEL, SOFTMAX_KERNEL, SOFTMAX_BACKWARD_KERNEL];

const THREADS: usize = 256;

/// Kernel of the activation: each thread computes one element of the hidden layer.
const ACTIVATE_KERNEL: KernelSpec<Shape> = KernelSpec {
    defines: |_| vec!["ELEMENT_BF16".to_owned()],
    constants: |_| vec![("THREADS", THREADS)],
    variants: || vec![Shape { b: 1, i: 1, h: 1, c: 1, dtype: Dtype::Bf16 }],
    ..KernelSpec::new(kernel_file("mlp/per_op"), "mlp_per_op_activate", THREADS, |shape| {
        [(shape.b * shape.h).div_ceil(THREADS), 1, 1]
    })
};
const ACTIVATE_BACKWARD_KERNEL: KernelSpec<Shape> =
    KernelSpec { symbol: "mlp_per_op_activate_backward", ..ACTIVATE_KERNEL };

/// Kernel of the softmax: each block computes one row.
const SOFTMAX_KERNEL: KernelSpec<Shape> =
    KernelSpec { symbol: "mlp_per_op_softmax", blocks: |shape| [shape.b, 1, 1], ..ACTIVATE_KERNEL };
const SOFTMAX_BACKWARD_KERNEL: KernelSpec<Shape> =
    KernelSpec { symbol: "mlp_per_op_softmax_backward", ..SOFTMAX_KERNEL };

/// Program that computes `p` from x and the weights.
pub fn forward_program(shape: &Shape) -> Program {
    let mut program = Program::new();
    program.output("p", [shape.b, shape.c], Dtype::F32);
    write_forward(&mut program, shape);
    program
}

/// Program that computes the gradients of x and of the weights, after the forward pass.
pub fn backward_program(shape: &Shape) -> Program {
    let Shape { b, i, h, c, .. } = *shape;
    let mut program = Program::new();
    program.scratch("p", MemoryPurpose::Activations, b * c * Dtype::F32.bytes());
    write_forward(&mut program, shape);
    program.input("grad_p", MemoryPurpose::Inputs, b * c * Dtype::F32.bytes());
    program.scratch("grad_logits", MemoryPurpose::Gradients, b * c * Dtype::Bf16.bytes());
    program.scratch("grad_a", MemoryPurpose::Gradients, b * h * Dtype::F32.bytes());
    program.scratch("grad_z", MemoryPurpose::Gradients, b * h * Dtype::Bf16.bytes());
    for (name, extents) in [("grad_x", [b, i]), ("grad_w1", [i, h]), ("grad_w2", [h, c])] {
        program.output(name, extents, Dtype::F32);
    }
    program.in_range("Softmax_Backward", |program| {
        program.launch(&SOFTMAX_BACKWARD_KERNEL, shape, ("p", "grad_p", "grad_logits", int(c)));
    });
    program.in_range("Layer_2_Backward", |program| {
        let spec = GemmSpec { a_transposed: true, ..gemm(h, c, b) };
        multiply(program, spec, ["a", "grad_logits", "grad_w2"]);
        let spec = GemmSpec { b_transposed: true, ..gemm(b, h, c) };
        multiply(program, spec, ["grad_logits", "w2", "grad_a"]);
    });
    program.in_range("Activation_Backward", |program| {
        program.launch(
            &ACTIVATE_BACKWARD_KERNEL,
            shape,
            ("z", "grad_a", "grad_z", long_operand(b * h)),
        );
    });
    program.in_range("Layer_1_Backward", |program| {
        let spec = GemmSpec { a_transposed: true, ..gemm(i, h, b) };
        multiply(program, spec, ["x", "grad_z", "grad_w1"]);
        let spec = GemmSpec { b_transposed: true, ..gemm(b, i, h) };
        multiply(program, spec, ["grad_z", "w1", "grad_x"]);
    });
    program
}

/// Adds the forward pass, which writes the region `p`.
fn write_forward(program: &mut Program, shape: &Shape) {
    let Shape { b, i, h, c, .. } = *shape;
    for (name, [rows, columns]) in shape.operands() {
        let purpose = if name == "x" { MemoryPurpose::Inputs } else { MemoryPurpose::Weights };
        program.input(name, purpose, rows * columns * Dtype::Bf16.bytes());
    }
    program.scratch("z", MemoryPurpose::Activations, b * h * Dtype::F32.bytes());
    program.scratch("a", MemoryPurpose::Activations, b * h * Dtype::Bf16.bytes());
    program.scratch("logits", MemoryPurpose::Activations, b * c * Dtype::F32.bytes());
    program.in_range("Layer_1", |program| multiply(program, gemm(b, h, i), ["x", "w1", "z"]));
    program.in_range("Activation", |program| {
        program.launch(&ACTIVATE_KERNEL, shape, ("z", "a", long_operand(b * h)));
    });
    program.in_range("Layer_2", |program| multiply(program, gemm(b, c, h), ["a", "w2", "logits"]));
    program.in_range("Softmax", |program| {
        program.launch(&SOFTMAX_KERNEL, shape, ("logits", "p", int(c)));
    });
}

/// GEMM of bf16 matrices with the result D `[m, n]` in f32.
const fn gemm(m: usize, n: usize, k: usize) -> GemmSpec {
    GemmSpec::new(m, n, k, MatrixDtype::Bf16, MatrixDtype::F32)
}

fn multiply(program: &mut Program, spec: GemmSpec, regions: [&str; 3]) {
    let operands = regions.map(|name| program.at(name));
    program.gemm(Lane::MAIN_LANE, spec, operands);
}
