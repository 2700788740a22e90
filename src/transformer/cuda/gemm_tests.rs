//! On a GPU, GEMMs with fused epilogues are compared with fp64 at odd sizes; without a GPU, their
//! launch arguments are checked.

use std::sync::Arc;

use super::kernels::gemm::{
    EpilogueGemmParameters, ROPE_EPILOGUE_GEMM, SWIGLU_BACKWARD_EPILOGUE_GEMM,
    SWIGLU_EPILOGUE_GEMM, WGMMA_GPU_ARCHITECTURE,
};
use super::kernels::rope;
use super::rung_choices::{EpilogueGemmChoice, RungKernelChoice, WeightGradientSchedule};
use super::{FUSED_ATTENTION_IN_ANY_SUM_ORDER, network, training};
use crate::gpu_tests::lock_first_gpu;
use crate::kernel_tests::assert_launches_match_kernel_parameters;
use crate::math::sigmoid_f64;
use crate::transformer::shape::{LanguageModelShape, ROPE_WAVELENGTH_BASE};
use kernelgate::backend::LaunchableProblem;
use kernelgate::backend::program::{LaunchProgram, MemoryPurpose, ProgramLaunchMode};
use kernelgate::verify::launch_again_on_poisoned_outputs;
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors, random};
use kernelgate_cuda::Device;

/// A model shape with fewer tokens than a GEMM tile has rows, more columns than a tile has, and a
/// partial tile.
const FEWER_TOKENS_THAN_TILE_ROWS: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 333,
    model_width: 256,
    swiglu_hidden_width: 200,
    layers: 2,
    heads: 2,
    context_tokens: 37,
    batch: 1,
    dtype: Dtype::Bf16,
};
const ONE_TOKEN_PER_SEQUENCE: LanguageModelShape = LanguageModelShape {
    context_tokens: 1,
    swiglu_hidden_width: 8,
    model_width: 64,
    heads: 1,
    ..FEWER_TOKENS_THAN_TILE_ROWS
};
/// A model shape whose GEMM has several tiles for each block.
const SEVERAL_TILES_PER_BLOCK: LanguageModelShape = LanguageModelShape {
    context_tokens: 130,
    batch: 5,
    model_width: 192,
    swiglu_hidden_width: 1096,
    heads: 3,
    ..FEWER_TOKENS_THAN_TILE_ROWS
};
const HEADS_OF_128_ELEMENTS: LanguageModelShape = LanguageModelShape {
    context_tokens: 300,
    model_width: 384,
    heads: 3,
    ..FEWER_TOKENS_THAN_TILE_ROWS
};
const EPILOGUE_GEMM_TEST_SHAPES: [LanguageModelShape; 4] = [
    FEWER_TOKENS_THAN_TILE_ROWS,
    ONE_TOKEN_PER_SEQUENCE,
    SEVERAL_TILES_PER_BLOCK,
    HEADS_OF_128_ELEMENTS,
];

/// Numbers of multiprocessors, which determine how tiles are divided: one block gets all tiles, or
/// each block gets at most a few.
const TESTED_MULTIPROCESSOR_COUNTS: [usize; 2] = [1, 132];

/// Draws a normally distributed matrix with this standard deviation, rounded to bf16; returns it as
/// a tensor and as fp64 values.
fn draw_bf16_matrix_and_its_values(
    name: &str,
    rows: usize,
    d: usize,
    spread: f64,
) -> (Tensor, Vec<f64>) {
    let values = random::map_standard_normal_values(3, name, rows * d, |x| {
        half::bf16::from_f64(f64::from(x) * spread)
    });
    let exact = values.iter().map(|x| x.to_f64()).collect();
    (Tensor::new([rows, d], TensorData::Bf16(values)), exact)
}

/// Computes the matrix product x wᵀ in fp64.
fn product_with_transpose_in_f64(x: &[f64], w: &[f64], d: usize) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> {
        w.chunks(d).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()).collect()
    };
    x.chunks(d).flat_map(row).collect()
}

/// Loads a program with the inputs `x` and `w`, launches it once and returns its outputs.
fn launch_program_and_read_outputs(
    program: LaunchProgram,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Tensors {
    let mut task = program.into_task(device, inputs, ProgramLaunchMode::StepByStep).unwrap();
    launch_again_on_poisoned_outputs(&mut task).unwrap();
    task.outputs_on_host().unwrap().clone()
}

/// Asserts that each element is within the error of two bf16 roundings of the expected value.
fn assert_within_two_bf16_roundings(what: &str, found: &Tensor, expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let found = found.elements_to_f64(0, expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let apart = (found - expected).abs();
        assert!(apart <= expected.abs() / 128.0 + 1e-4, "{what} {at}: {found}, not {expected}");
    }
}

/// Creates a program with inputs x and w (`rows` rows) and the given outputs, without launches.
fn program_with_gemm_operands(
    shape: &LanguageModelShape,
    rows: usize,
    outputs: &[(&'static str, usize)],
) -> LaunchProgram {
    let mut program = LaunchProgram::new();
    let tokens = shape.tokens_in_batch();
    for (name, rows) in [("x", tokens), ("w", rows)] {
        program.add_input(name, MemoryPurpose::Inputs, 2 * rows * shape.model_width);
    }
    for (name, columns) in outputs {
        program.add_output(name, [tokens, *columns], Dtype::Bf16);
    }
    program
}

fn swiglu_epilogue_test_program(product: &EpilogueGemmParameters) -> LaunchProgram {
    let ff = product.shape.swiglu_hidden_width;
    let both = [("h", ff), ("gate_up", 2 * ff)];
    let mut program = program_with_gemm_operands(
        &product.shape,
        2 * ff,
        if product.stores_gates_and_ups { &both } else { &both[..1] },
    );
    if !product.stores_gates_and_ups {
        program.add_scratch("gate_up", MemoryPurpose::Activations, 4 * ff);
    }
    let operands = product
        .swiglu_kernel_arguments(["x", "w", "h", "gate_up"].map(|name| program.pointer_to(name)));
    program.add_launch(&SWIGLU_EPILOGUE_GEMM, product, operands);
    program
}

fn swiglu_gradient_epilogue_test_program(product: &EpilogueGemmParameters) -> LaunchProgram {
    let LanguageModelShape { swiglu_hidden_width: ff, .. } = product.shape;
    let mut program = program_with_gemm_operands(&product.shape, ff, &[("grad_gate_up", 2 * ff)]);
    program.add_input("gate_up", MemoryPurpose::Inputs, 4 * ff * product.shape.tokens_in_batch());
    let names = ["x", "w", "gate_up", "grad_gate_up"];
    let operands =
        product.swiglu_backward_kernel_arguments(names.map(|name| program.pointer_to(name)));
    program.add_launch(&SWIGLU_BACKWARD_EPILOGUE_GEMM, product, operands);
    program
}

fn rope_epilogue_test_program(product: &EpilogueGemmParameters) -> LaunchProgram {
    let shape = product.shape;
    let LanguageModelShape { model_width: d, context_tokens: context, .. } = shape;
    let mut program = program_with_gemm_operands(&shape, 3 * d, &[("qkv", 3 * d)]);
    program.add_packed_from_inputs(
        "table",
        MemoryPurpose::Weights,
        4 * context * shape.elements_per_head(),
        move |_| {
            rope::rope_cosine_and_sine_table(&shape)
                .into_iter()
                .flat_map(f32::to_ne_bytes)
                .collect()
        },
    );
    let operands = product
        .rope_kernel_arguments(["x", "w", "qkv", "table"].map(|name| program.pointer_to(name)));
    program.add_launch(&ROPE_EPILOGUE_GEMM, product, operands);
    program
}

fn epilogue_gemm_variants_of_shape(
    shape: LanguageModelShape,
) -> impl Iterator<Item = EpilogueGemmParameters> {
    let each = move |multiprocessors| {
        [false, true].map(move |saved| EpilogueGemmParameters {
            shape,
            multiprocessors,
            stores_gates_and_ups: saved,
        })
    };
    TESTED_MULTIPROCESSOR_COUNTS.into_iter().flat_map(each)
}

#[test]
fn epilogue_gemm_launches_have_the_arguments_of_their_kernels() {
    for product in EPILOGUE_GEMM_TEST_SHAPES.into_iter().flat_map(epilogue_gemm_variants_of_shape) {
        assert!(EpilogueGemmParameters::supports_model_shape(&product.shape));
        for program in [
            swiglu_epilogue_test_program(&product),
            swiglu_gradient_epilogue_test_program(&product),
            rope_epilogue_test_program(&product),
        ] {
            assert_eq!(program.check(), Ok(()));
            assert_launches_match_kernel_parameters(&program);
        }
    }
    let products = EpilogueGemmChoice::OwnGemmsWithEpilogues { multiprocessors: 132 };
    let kernels =
        RungKernelChoice { attention: FUSED_ATTENTION_IN_ANY_SUM_ORDER, epilogue_gemms: products };
    for program in [
        network::language_model_forward_program(&FEWER_TOKENS_THAN_TILE_ROWS, kernels),
        training::training_step_program(
            &FEWER_TOKENS_THAN_TILE_ROWS,
            kernels,
            WeightGradientSchedule::SerialLaunches,
        ),
    ] {
        assert_eq!(program.check(), Ok(()));
        assert_launches_match_kernel_parameters(&program);
    }
}

#[test]
fn f32_and_odd_widths_use_cublaslt_instead_of_epilogue_gemms() {
    for shape in [
        LanguageModelShape { dtype: Dtype::F32, ..FEWER_TOKENS_THAN_TILE_ROWS },
        LanguageModelShape { model_width: 160, ..FEWER_TOKENS_THAN_TILE_ROWS },
        LanguageModelShape { swiglu_hidden_width: 204, ..FEWER_TOKENS_THAN_TILE_ROWS },
    ] {
        assert!(!EpilogueGemmParameters::supports_model_shape(&shape), "{shape:?}");
    }
}

/// Locks and returns a GPU on which the epilogue GEMM kernels run (sm_90a), if there is one.
fn lock_gpu_for_epilogue_gemms() -> Option<(Arc<Device>, impl Sized)> {
    let (device, alone) = lock_first_gpu()?;
    if device.gpu_properties().kernel_architecture != WGMMA_GPU_ARCHITECTURE {
        eprintln!("skipped: needs {WGMMA_GPU_ARCHITECTURE}");
        return None;
    }
    Some((device, alone))
}

#[test]
fn a_swiglu_epilogue_agrees_with_fp64_on_a_gpu() {
    let Some((device, _alone)) = lock_gpu_for_epilogue_gemms() else { return };
    for shape in EPILOGUE_GEMM_TEST_SHAPES {
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = shape;
        let (x, exact_x) = draw_bf16_matrix_and_its_values("x", shape.tokens_in_batch(), d, 1.0);
        let (w, exact_w) = draw_bf16_matrix_and_its_values("w", 2 * ff, d, 2.0 / (d as f64).sqrt());
        let inputs = [("x", x), ("w", w)].into_iter().fold(Tensors::new(), insert_named_tensor);
        let gate_up = product_with_transpose_in_f64(&exact_x, &exact_w, d);
        let hidden = |row: &[f64]| -> Vec<f64> {
            row[..ff]
                .iter()
                .zip(&row[ff..])
                .map(|(gate, up)| gate * sigmoid_f64(*gate) * up)
                .collect()
        };
        let h: Vec<f64> = gate_up.chunks(2 * ff).flat_map(hidden).collect();
        for product in epilogue_gemm_variants_of_shape(shape) {
            let found = launch_program_and_read_outputs(
                swiglu_epilogue_test_program(&product),
                &inputs,
                &device,
            );
            assert_within_two_bf16_roundings(&format!("h of {product:?}"), found.tensor("h"), &h);
            if product.stores_gates_and_ups {
                let found = found.tensor("gate_up");
                assert_within_two_bf16_roundings(
                    &format!("gate_up of {product:?}"),
                    found,
                    &gate_up,
                );
            }
        }
    }
}

#[test]
fn a_swiglu_gradient_epilogue_agrees_with_fp64_on_a_gpu() {
    let Some((device, _alone)) = lock_gpu_for_epilogue_gemms() else { return };
    for shape in EPILOGUE_GEMM_TEST_SHAPES {
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = shape;
        let (x, exact_x) = draw_bf16_matrix_and_its_values("x", shape.tokens_in_batch(), d, 1.0);
        let (w, exact_w) = draw_bf16_matrix_and_its_values("w", ff, d, 1.0 / (d as f64).sqrt());
        let (gate_up, exact_gate_up) =
            draw_bf16_matrix_and_its_values("gate_up", shape.tokens_in_batch(), 2 * ff, 1.0);
        let inputs = [("x", x), ("w", w), ("gate_up", gate_up)];
        let inputs = inputs.into_iter().fold(Tensors::new(), insert_named_tensor);
        let grad_h = product_with_transpose_in_f64(&exact_x, &exact_w, d);
        let gradient = |(grad_h, row): (&[f64], &[f64])| -> Vec<f64> {
            let (gate, up) = row.split_at(ff);
            let of_gate = gate.iter().zip(up).zip(grad_h).map(|((gate, up), grad)| {
                let s = sigmoid_f64(*gate);
                grad * up * s * (1.0 + gate * (1.0 - s))
            });
            let of_up =
                gate.iter().zip(grad_h).map(|(gate, grad)| grad * gate * sigmoid_f64(*gate));
            of_gate.chain(of_up).collect()
        };
        let rows = grad_h.chunks(ff).zip(exact_gate_up.chunks(2 * ff));
        let expected: Vec<f64> = rows.flat_map(gradient).collect();
        for product in
            epilogue_gemm_variants_of_shape(shape).filter(|product| product.stores_gates_and_ups)
        {
            let found = launch_program_and_read_outputs(
                swiglu_gradient_epilogue_test_program(&product),
                &inputs,
                &device,
            );
            let found = found.tensor("grad_gate_up");
            assert_within_two_bf16_roundings(
                &format!("grad_gate_up of {product:?}"),
                found,
                &expected,
            );
        }
    }
}

#[test]
fn a_rope_epilogue_agrees_with_fp64_on_a_gpu() {
    let Some((device, _alone)) = lock_gpu_for_epilogue_gemms() else { return };
    for shape in EPILOGUE_GEMM_TEST_SHAPES {
        let (d, width) = (shape.model_width, shape.elements_per_head());
        let (x, exact_x) = draw_bf16_matrix_and_its_values("x", shape.tokens_in_batch(), d, 1.0);
        let (w, exact_w) = draw_bf16_matrix_and_its_values("w", 3 * d, d, 1.0 / (d as f64).sqrt());
        let inputs = [("x", x), ("w", w)].into_iter().fold(Tensors::new(), insert_named_tensor);
        let mut expected = product_with_transpose_in_f64(&exact_x, &exact_w, d);
        for (token, row) in expected.chunks_mut(3 * d).enumerate() {
            for (at, pair) in row[..2 * d].chunks_mut(2).enumerate() {
                let frequency =
                    ROPE_WAVELENGTH_BASE.powf(-((2 * at % width) as f64) / width as f64);
                let (sine, cosine) = ((token % shape.context_tokens) as f64 * frequency).sin_cos();
                let (a, b) = (pair[0], pair[1]);
                pair.copy_from_slice(&[a * cosine - b * sine, a * sine + b * cosine]);
            }
        }
        for product in
            epilogue_gemm_variants_of_shape(shape).filter(|product| !product.stores_gates_and_ups)
        {
            let found = launch_program_and_read_outputs(
                rope_epilogue_test_program(&product),
                &inputs,
                &device,
            );
            assert_within_two_bf16_roundings(
                &format!("qkv of {product:?}"),
                found.tensor("qkv"),
                &expected,
            );
        }
    }
}

fn insert_named_tensor(mut tensors: Tensors, (name, tensor): (&'static str, Tensor)) -> Tensors {
    tensors.insert(name, tensor);
    tensors
}
