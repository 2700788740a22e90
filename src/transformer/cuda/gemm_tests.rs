//! On a GPU, GEMMs with epilogues are compared with fp64 at odd shapes; without one, their launches
//! are checked.

use std::sync::Arc;

use super::kernels::gemm::{
    EpilogueGemm, ROPE_GEMM, SWIGLU_BACKWARD_GEMM, SWIGLU_GEMM, WGMMA_ARCHITECTURE,
};
use super::kernels::rope;
use super::rung_choices::{GemmEpilogues, GradientSchedule, RungKernels};
use super::{FUSED, network, training};
use crate::gpu_tests::lock_first_gpu;
use crate::kernel_tests::check_program_launches;
use crate::math::sigmoid;
use crate::transformer::shape::{LmShape, ROPE_BASE};
use kernelgate::backend::Executable;
use kernelgate::backend::program::{Capture, MemoryPurpose, Program};
use kernelgate::verify::launch_on_poisoned_outputs;
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors, random};
use kernelgate_cuda::Device;

/// A shape with fewer tokens than a tile has rows, more columns than a tile has, and a partial
/// tile.
const ODD: LmShape = LmShape {
    vocabulary: 333,
    d: 256,
    ff: 200,
    layers: 2,
    heads: 2,
    context: 37,
    batch: 1,
    dtype: Dtype::Bf16,
};
const ONE_TOKEN: LmShape = LmShape { context: 1, ff: 8, d: 64, heads: 1, ..ODD };
/// A shape with several tiles for each block.
const SHAPE_OF_MANY_TILES: LmShape =
    LmShape { context: 130, batch: 5, d: 192, ff: 1096, heads: 3, ..ODD };
const WIDE_HEADS: LmShape = LmShape { context: 300, d: 384, heads: 3, ..ODD };
const TEST_SHAPES: [LmShape; 4] = [ODD, ONE_TOKEN, SHAPE_OF_MANY_TILES, WIDE_HEADS];

/// Numbers of multiprocessors, which determine the tiles: one block gets all tiles, or each block
/// gets one.
const MULTIPROCESSOR_COUNTS: [usize; 2] = [1, 132];

/// Draws normal elements with a spread, rounded to bf16; returns the tensor and the values.
fn normal_bf16_matrix(name: &str, rows: usize, d: usize, spread: f64) -> (Tensor, Vec<f64>) {
    let values = random::map_normal_values(3, name, rows * d, |x| {
        half::bf16::from_f64(f64::from(x) * spread)
    });
    let exact = values.iter().map(|x| x.to_f64()).collect();
    (Tensor::new([rows, d], TensorData::Bf16(values)), exact)
}

/// Computes x w^T without rounding.
fn multiply_transposed(x: &[f64], w: &[f64], d: usize) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> {
        w.chunks(d).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()).collect()
    };
    x.chunks(d).flat_map(row).collect()
}

/// Runs a program with the inputs `x` and `w` and returns its outputs.
fn run_program(program: Program, inputs: &Tensors, device: &Arc<Device>) -> Tensors {
    let mut task = program.into_task(device, inputs, Capture::Stream).unwrap();
    launch_on_poisoned_outputs(&mut task).unwrap();
    task.outputs().unwrap().clone()
}

/// Asserts that each element is within two roundings to bf16 of the expected one.
fn assert_close(what: &str, found: &Tensor, expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let found = found.to_f64(0, expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let apart = (found - expected).abs();
        assert!(apart <= expected.abs() / 128.0 + 1e-4, "{what} {at}: {found}, not {expected}");
    }
}

/// Creates a program with x, `rows` rows of w, and these outputs.
fn with_operands(shape: &LmShape, rows: usize, outputs: &[(&'static str, usize)]) -> Program {
    let mut program = Program::new();
    let tokens = shape.token_count();
    for (name, rows) in [("x", tokens), ("w", rows)] {
        program.add_input(name, MemoryPurpose::Inputs, 2 * rows * shape.d);
    }
    for (name, columns) in outputs {
        program.add_output(name, [tokens, *columns], Dtype::Bf16);
    }
    program
}

fn swiglu_gemm_program(product: &EpilogueGemm) -> Program {
    let ff = product.shape.ff;
    let both = [("h", ff), ("gate_up", 2 * ff)];
    let mut program =
        with_operands(&product.shape, 2 * ff, if product.saved { &both } else { &both[..1] });
    if !product.saved {
        program.add_scratch("gate_up", MemoryPurpose::Activations, 4 * ff);
    }
    let operands =
        product.swiglu_arguments(["x", "w", "h", "gate_up"].map(|name| program.at(name)));
    program.add_launch(&SWIGLU_GEMM, product, operands);
    program
}

fn swiglu_backward(product: &EpilogueGemm) -> Program {
    let LmShape { ff, .. } = product.shape;
    let mut program = with_operands(&product.shape, ff, &[("grad_gate_up", 2 * ff)]);
    program.add_input("gate_up", MemoryPurpose::Inputs, 4 * ff * product.shape.token_count());
    let names = ["x", "w", "gate_up", "grad_gate_up"];
    let operands = product.swiglu_backward(names.map(|name| program.at(name)));
    program.add_launch(&SWIGLU_BACKWARD_GEMM, product, operands);
    program
}

fn rope_gemm_program(product: &EpilogueGemm) -> Program {
    let shape = product.shape;
    let LmShape { d, context, .. } = shape;
    let mut program = with_operands(&shape, 3 * d, &[("qkv", 3 * d)]);
    program.add_packed(
        "table",
        MemoryPurpose::Weights,
        4 * context * shape.head_dim(),
        move |_| rope::rotary_table(&shape).into_iter().flat_map(f32::to_ne_bytes).collect(),
    );
    let operands = product.rope_arguments(["x", "w", "qkv", "table"].map(|name| program.at(name)));
    program.add_launch(&ROPE_GEMM, product, operands);
    program
}

fn epilogue_gemms(shape: LmShape) -> impl Iterator<Item = EpilogueGemm> {
    let each = move |multiprocessors| {
        [false, true].map(move |saved| EpilogueGemm { shape, multiprocessors, saved })
    };
    MULTIPROCESSOR_COUNTS.into_iter().flat_map(each)
}

#[test]
fn gemm_launches_have_the_arguments_of_their_kernels() {
    for product in TEST_SHAPES.into_iter().flat_map(epilogue_gemms) {
        assert!(EpilogueGemm::supports_shape(&product.shape));
        for program in
            [swiglu_gemm_program(&product), swiglu_backward(&product), rope_gemm_program(&product)]
        {
            assert_eq!(program.check(), Ok(()));
            check_program_launches(&program);
        }
    }
    let products = GemmEpilogues::WithEpilogues { multiprocessors: 132 };
    let kernels = RungKernels { attention: FUSED, products };
    for program in [
        network::forward_program(&ODD, kernels),
        training::step_program(&ODD, kernels, GradientSchedule::Serial),
    ] {
        assert_eq!(program.check(), Ok(()));
        check_program_launches(&program);
    }
}

#[test]
fn other_dtypes_and_odd_widths_use_cublaslt() {
    for shape in [
        LmShape { dtype: Dtype::F32, ..ODD },
        LmShape { d: 160, ..ODD },
        LmShape { ff: 204, ..ODD },
    ] {
        assert!(!EpilogueGemm::supports_shape(&shape), "{shape:?}");
    }
}

/// Returns a GPU on which the kernels run.
fn gpu_for_gemm_kernels() -> Option<(Arc<Device>, impl Sized)> {
    let (device, alone) = lock_first_gpu()?;
    if device.facts().arch != WGMMA_ARCHITECTURE {
        eprintln!("skipped: needs {WGMMA_ARCHITECTURE}");
        return None;
    }
    Some((device, alone))
}

#[test]
fn swiglu_in_the_epilogue_agrees_with_fp64_on_a_gpu() {
    let Some((device, _alone)) = gpu_for_gemm_kernels() else { return };
    for shape in TEST_SHAPES {
        let LmShape { d, ff, .. } = shape;
        let (x, exact_x) = normal_bf16_matrix("x", shape.token_count(), d, 1.0);
        let (w, exact_w) = normal_bf16_matrix("w", 2 * ff, d, 2.0 / (d as f64).sqrt());
        let inputs = [("x", x), ("w", w)].into_iter().fold(Tensors::new(), with_tensor);
        let gate_up = multiply_transposed(&exact_x, &exact_w, d);
        let hidden = |row: &[f64]| -> Vec<f64> {
            row[..ff].iter().zip(&row[ff..]).map(|(gate, up)| gate * sigmoid(*gate) * up).collect()
        };
        let h: Vec<f64> = gate_up.chunks(2 * ff).flat_map(hidden).collect();
        for product in epilogue_gemms(shape) {
            let found = run_program(swiglu_gemm_program(&product), &inputs, &device);
            assert_close(&format!("h of {product:?}"), found.tensor("h"), &h);
            if product.saved {
                let found = found.tensor("gate_up");
                assert_close(&format!("gate_up of {product:?}"), found, &gate_up);
            }
        }
    }
}

#[test]
fn gradient_of_swiglu_in_the_epilogue_agrees_with_fp64_on_a_gpu() {
    let Some((device, _alone)) = gpu_for_gemm_kernels() else { return };
    for shape in TEST_SHAPES {
        let LmShape { d, ff, .. } = shape;
        let (x, exact_x) = normal_bf16_matrix("x", shape.token_count(), d, 1.0);
        let (w, exact_w) = normal_bf16_matrix("w", ff, d, 1.0 / (d as f64).sqrt());
        let (gate_up, exact_gate_up) =
            normal_bf16_matrix("gate_up", shape.token_count(), 2 * ff, 1.0);
        let inputs = [("x", x), ("w", w), ("gate_up", gate_up)];
        let inputs = inputs.into_iter().fold(Tensors::new(), with_tensor);
        let grad_h = multiply_transposed(&exact_x, &exact_w, d);
        let gradient = |(grad_h, row): (&[f64], &[f64])| -> Vec<f64> {
            let (gate, up) = row.split_at(ff);
            let of_gate = gate.iter().zip(up).zip(grad_h).map(|((gate, up), grad)| {
                let s = sigmoid(*gate);
                grad * up * s * (1.0 + gate * (1.0 - s))
            });
            let of_up = gate.iter().zip(grad_h).map(|(gate, grad)| grad * gate * sigmoid(*gate));
            of_gate.chain(of_up).collect()
        };
        let rows = grad_h.chunks(ff).zip(exact_gate_up.chunks(2 * ff));
        let expected: Vec<f64> = rows.flat_map(gradient).collect();
        for product in epilogue_gemms(shape).filter(|product| product.saved) {
            let found = run_program(swiglu_backward(&product), &inputs, &device);
            let found = found.tensor("grad_gate_up");
            assert_close(&format!("grad_gate_up of {product:?}"), found, &expected);
        }
    }
}

#[test]
fn rotation_in_the_epilogue_agrees_with_fp64_on_a_gpu() {
    let Some((device, _alone)) = gpu_for_gemm_kernels() else { return };
    for shape in TEST_SHAPES {
        let (d, width) = (shape.d, shape.head_dim());
        let (x, exact_x) = normal_bf16_matrix("x", shape.token_count(), d, 1.0);
        let (w, exact_w) = normal_bf16_matrix("w", 3 * d, d, 1.0 / (d as f64).sqrt());
        let inputs = [("x", x), ("w", w)].into_iter().fold(Tensors::new(), with_tensor);
        let mut expected = multiply_transposed(&exact_x, &exact_w, d);
        for (token, row) in expected.chunks_mut(3 * d).enumerate() {
            for (at, pair) in row[..2 * d].chunks_mut(2).enumerate() {
                let frequency = ROPE_BASE.powf(-((2 * at % width) as f64) / width as f64);
                let (sine, cosine) = ((token % shape.context) as f64 * frequency).sin_cos();
                let (a, b) = (pair[0], pair[1]);
                pair.copy_from_slice(&[a * cosine - b * sine, a * sine + b * cosine]);
            }
        }
        for product in epilogue_gemms(shape).filter(|product| !product.saved) {
            let found = run_program(rope_gemm_program(&product), &inputs, &device);
            assert_close(&format!("qkv of {product:?}"), found.tensor("qkv"), &expected);
        }
    }
}

fn with_tensor(mut tensors: Tensors, (name, tensor): (&'static str, Tensor)) -> Tensors {
    tensors.insert(name, tensor);
    tensors
}
