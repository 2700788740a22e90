//! Perceptron implementation with one launch for each operation; all faster implementations are
//! compared with it.

use crate::kernel_files::source_of_kernel_file;
use crate::mlp::shape::PerceptronSizes;
use kernelgate::backend::program::{
    LaunchProgram, MemoryPurpose, ProgramLane, int_operand, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmMatrixDtype, GemmSpec};

/// All kernels of the perceptron implementation with one launch for each operation, besides
/// cuBLASLt's GEMMs.
pub const PER_OP_MLP_KERNELS: &[KernelSpec<PerceptronSizes>] =
    &[SILU_KERNEL, SILU_BACKWARD_KERNEL, CLASS_SOFTMAX_KERNEL, CLASS_SOFTMAX_BACKWARD_KERNEL];

const MLP_BLOCK_THREADS: usize = 256;

/// Kernel of the SiLU activation: each thread computes one element of the hidden layer.
const SILU_KERNEL: KernelSpec<PerceptronSizes> = KernelSpec {
    macro_definitions: |_| vec!["ELEMENT_BF16".to_owned()],
    constant_macros: |_| vec![("THREADS", MLP_BLOCK_THREADS)],
    listed_build_parameters: || {
        vec![PerceptronSizes {
            batch_rows: 1,
            input_elements: 1,
            hidden_elements: 1,
            classes: 1,
            dtype: Dtype::Bf16,
        }]
    },
    ..KernelSpec::new(
        source_of_kernel_file("mlp/per_op"),
        "mlp_per_op_activate",
        MLP_BLOCK_THREADS,
        |shape| [(shape.batch_rows * shape.hidden_elements).div_ceil(MLP_BLOCK_THREADS), 1, 1],
    )
};
const SILU_BACKWARD_KERNEL: KernelSpec<PerceptronSizes> =
    KernelSpec { kernel_symbol: "mlp_per_op_activate_backward", ..SILU_KERNEL };

/// Kernel of the softmax over the classes: each block computes one row of logits.
const CLASS_SOFTMAX_KERNEL: KernelSpec<PerceptronSizes> = KernelSpec {
    kernel_symbol: "mlp_per_op_softmax",
    blocks: |shape| [shape.batch_rows, 1, 1],
    ..SILU_KERNEL
};
const CLASS_SOFTMAX_BACKWARD_KERNEL: KernelSpec<PerceptronSizes> =
    KernelSpec { kernel_symbol: "mlp_per_op_softmax_backward", ..CLASS_SOFTMAX_KERNEL };

/// Program of the perceptron's forward pass: computes the class probabilities `p` from x and the
/// weights.
pub fn mlp_forward_program(shape: &PerceptronSizes) -> LaunchProgram {
    let mut program = LaunchProgram::new();
    program.add_output("p", [shape.batch_rows, shape.classes], Dtype::F32);
    add_mlp_forward_pass(&mut program, shape);
    program
}

/// Program that computes the perceptron's gradients of x and of the weights, after the forward pass
/// in the same program.
pub fn mlp_backward_program(shape: &PerceptronSizes) -> LaunchProgram {
    let PerceptronSizes {
        batch_rows: b, input_elements: i, hidden_elements: h, classes: c, ..
    } = *shape;
    let mut program = LaunchProgram::new();
    program.add_scratch("p", MemoryPurpose::Activations, b * c * Dtype::F32.bytes_per_element());
    add_mlp_forward_pass(&mut program, shape);
    program.add_input("grad_p", MemoryPurpose::Inputs, b * c * Dtype::F32.bytes_per_element());
    program.add_scratch(
        "grad_logits",
        MemoryPurpose::Gradients,
        b * c * Dtype::Bf16.bytes_per_element(),
    );
    program.add_scratch("grad_a", MemoryPurpose::Gradients, b * h * Dtype::F32.bytes_per_element());
    program.add_scratch(
        "grad_z",
        MemoryPurpose::Gradients,
        b * h * Dtype::Bf16.bytes_per_element(),
    );
    for (name, extents) in [("grad_x", [b, i]), ("grad_w1", [i, h]), ("grad_w2", [h, c])] {
        program.add_output(name, extents, Dtype::F32);
    }
    program.add_steps_in_named_range("Softmax_Backward", |program| {
        program.add_launch(
            &CLASS_SOFTMAX_BACKWARD_KERNEL,
            shape,
            ("p", "grad_p", "grad_logits", int_operand(c)),
        );
    });
    program.add_steps_in_named_range("Layer_2_Backward", |program| {
        let spec = GemmSpec { a_transposed: true, ..gemm_spec_bf16_to_f32(h, c, b) };
        add_gemm_of_named_regions(program, spec, ["a", "grad_logits", "grad_w2"]);
        let spec = GemmSpec { b_transposed: true, ..gemm_spec_bf16_to_f32(b, h, c) };
        add_gemm_of_named_regions(program, spec, ["grad_logits", "w2", "grad_a"]);
    });
    program.add_steps_in_named_range("Activation_Backward", |program| {
        program.add_launch(
            &SILU_BACKWARD_KERNEL,
            shape,
            ("z", "grad_a", "grad_z", long_operand(b * h)),
        );
    });
    program.add_steps_in_named_range("Layer_1_Backward", |program| {
        let spec = GemmSpec { a_transposed: true, ..gemm_spec_bf16_to_f32(i, h, b) };
        add_gemm_of_named_regions(program, spec, ["x", "grad_z", "grad_w1"]);
        let spec = GemmSpec { b_transposed: true, ..gemm_spec_bf16_to_f32(b, i, h) };
        add_gemm_of_named_regions(program, spec, ["grad_z", "w1", "grad_x"]);
    });
    program
}

/// Adds the regions and launches of the perceptron's forward pass, which writes the probabilities
/// to the region `p`.
fn add_mlp_forward_pass(program: &mut LaunchProgram, shape: &PerceptronSizes) {
    let PerceptronSizes {
        batch_rows: b, input_elements: i, hidden_elements: h, classes: c, ..
    } = *shape;
    for (name, [rows, columns]) in shape.names_and_extents_of_operands() {
        let purpose = if name == "x" { MemoryPurpose::Inputs } else { MemoryPurpose::Weights };
        program.add_input(name, purpose, rows * columns * Dtype::Bf16.bytes_per_element());
    }
    program.add_scratch("z", MemoryPurpose::Activations, b * h * Dtype::F32.bytes_per_element());
    program.add_scratch("a", MemoryPurpose::Activations, b * h * Dtype::Bf16.bytes_per_element());
    program.add_scratch(
        "logits",
        MemoryPurpose::Activations,
        b * c * Dtype::F32.bytes_per_element(),
    );
    program.add_steps_in_named_range("Layer_1", |program| {
        add_gemm_of_named_regions(program, gemm_spec_bf16_to_f32(b, h, i), ["x", "w1", "z"])
    });
    program.add_steps_in_named_range("Activation", |program| {
        program.add_launch(&SILU_KERNEL, shape, ("z", "a", long_operand(b * h)));
    });
    program.add_steps_in_named_range("Layer_2", |program| {
        add_gemm_of_named_regions(program, gemm_spec_bf16_to_f32(b, c, h), ["a", "w2", "logits"])
    });
    program.add_steps_in_named_range("Softmax", |program| {
        program.add_launch(&CLASS_SOFTMAX_KERNEL, shape, ("logits", "p", int_operand(c)));
    });
}

/// Specification of a GEMM of bf16 matrices with the result `[m, n]` in f32.
const fn gemm_spec_bf16_to_f32(m: usize, n: usize, k: usize) -> GemmSpec {
    GemmSpec::new(m, n, k, GemmMatrixDtype::Bf16, GemmMatrixDtype::F32)
}

fn add_gemm_of_named_regions(program: &mut LaunchProgram, spec: GemmSpec, regions: [&str; 3]) {
    let operands = regions.map(|name| program.pointer_to(name));
    program.add_gemm(ProgramLane::MAIN_LANE, spec, operands);
}
