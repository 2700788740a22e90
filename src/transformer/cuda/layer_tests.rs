//! Compares each layer of a training step at a published model size with fp64, on the row's own
//! inputs of that layer. Rounding in earlier layers therefore does not hide an error of one kernel.

use std::sync::Arc;

use super::rung_choices::{GradientSchedule, RungAttention};
use super::training::step_program;
use super::{DETERMINISTIC, FUSED};
use crate::gpu_tests::lock_first_gpu;
use crate::transformer::definition::TrainStep;
use crate::transformer::gradients::{WeightGradient, adamw_update};
use crate::transformer::reference::{F64Matrix, LmReference};
use crate::transformer::shape::{LmShape, STATE_INPUTS, Weight};
use kernelgate::backend::program::LoadedProgram;
use kernelgate::workload::{Dtype, Problem, Tensor, TensorData, Tensors};
use kernelgate_cuda::Device;

const SMALL: LmShape = LmShape {
    vocabulary: 10_000,
    d: 768,
    ff: 3072,
    layers: 12,
    heads: 12,
    context: 512,
    batch: 4,
    dtype: Dtype::Bf16,
};

/// Relative L2 error that a few roundings to bf16 within a layer cause.
const MAX_RELATIVE_L2: f64 = 1e-2;

/// Memory regions of a program that has run.
struct DeviceRegions<'a> {
    program: &'a LoadedProgram,
    shape: LmShape,
}

impl DeviceRegions<'_> {
    fn region_tensor(&self, name: &str, dtype: Dtype) -> Tensor {
        let buffer =
            self.program.buffer_of_pointer(name).unwrap_or_else(|| panic!("no region {name}"));
        let mut tensor = Tensor::zeroed([buffer.bytes() / dtype.bytes()], dtype);
        buffer.download(tensor.as_bytes_mut()).unwrap();
        tensor
    }

    /// Tensor of a layer from a region that holds the tensors of all layers, one after the other.
    fn layer_tensor(&self, name: &str, layer: usize, columns: usize, dtype: Dtype) -> F64Matrix {
        let len = self.shape.token_count() * columns;
        let values = self.region_tensor(name, dtype).to_f64(layer * len, len);
        F64Matrix { values, columns }
    }

    /// Rows of an arena in fp64.
    fn arena_rows_in_f64(&self, name: &str, rows: &[usize], dtype: Dtype) -> Vec<f64> {
        let (tensor, d) = (self.region_tensor(name, dtype), self.shape.d);
        rows.iter().flat_map(|row| tensor.to_f64(row * d, d)).collect()
    }

    fn rows_of_sequence(&self, matrix: &F64Matrix, number: usize) -> F64Matrix {
        let len = self.shape.context * matrix.columns;
        F64Matrix { values: matrix.values[number * len..][..len].to_vec(), columns: matrix.columns }
    }

    /// Activation of a layer, as a bf16 matrix in the workspace.
    fn activation(&self, name: &str, layer: usize, columns: usize) -> F64Matrix {
        self.layer_tensor(name, layer, columns, Dtype::Bf16)
    }

    fn residual_stream(&self, name: &str, layer: usize) -> F64Matrix {
        self.layer_tensor(name, layer, self.shape.d, Dtype::F32)
    }
}

fn assert_relative_l2(what: &str, found: &[f64], expected: &[f64], allowed: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut found.iter().zip(expected).map(|(x, y)| x - y));
    let error = apart / norm(&mut expected.iter().copied());
    eprintln!("{what}: {error:.1e}");
    assert!(error <= allowed, "{what}: {error:.1e}");
}

/// Compares the activations of a layer for one sequence.
fn check_forward(
    regions: &DeviceRegions<'_>,
    reference: &LmReference<'_>,
    layer: usize,
    number: usize,
) {
    let LmShape { d, ff, .. } = regions.shape;
    let expected = reference
        .layer(layer, &regions.rows_of_sequence(&regions.residual_stream("x", layer), number));
    for (name, columns, expected) in [
        ("qkv_input", d, &expected.qkv_input),
        ("qkv", 3 * d, &expected.qkv),
        ("attended", d, &expected.attended),
        ("mlp_input", d, &expected.mlp_input),
        ("gate_up", 2 * ff, &expected.gate_up),
        ("hidden", ff, &expected.hidden),
    ] {
        let found = regions.rows_of_sequence(&regions.activation(name, layer, columns), number);
        assert_relative_l2(
            &format!("{name} {layer}"),
            &found.values,
            &expected.values,
            MAX_RELATIVE_L2,
        );
    }
    let found = regions.rows_of_sequence(&regions.residual_stream("x", layer + 1), number);
    let behind = reference.stream_after_layer(layer, &expected);
    assert_relative_l2(&format!("x {}", layer + 1), &found.values, &behind.values, MAX_RELATIVE_L2);
}

/// Compares the gradients of a layer's activations for one sequence, and sampled rows of the
/// gradients of its matrices.
fn check_backward(
    regions: &DeviceRegions<'_>,
    reference: &LmReference<'_>,
    layer: usize,
    number: usize,
) {
    let LmShape { d, ff, .. } = regions.shape;
    let activations = reference
        .layer(layer, &regions.rows_of_sequence(&regions.residual_stream("x", layer), number));
    let whole = |name: &str, columns| regions.activation(name, layer, columns);
    let part = |name: &str, columns| regions.rows_of_sequence(&whole(name, columns), number);
    let (middle, _) =
        reference.mlp_backward(layer, &activations, &part("grad_mlp", d), &mut vec![]);
    let found = part("grad_middle", d);
    assert_relative_l2(
        &format!("grad_middle {layer}"),
        &found.values,
        &middle.values,
        MAX_RELATIVE_L2,
    );
    if layer > 0 {
        let (before, _) = reference.attention_backward(layer, &activations, &found, &mut vec![]);
        let found = regions.rows_of_sequence(&regions.activation("grad_mlp", layer - 1, d), number);
        assert_relative_l2(
            &format!("grad_mlp {}", layer - 1),
            &found.values,
            &before.values,
            MAX_RELATIVE_L2,
        );
    }
    let whole_reference = LmReference::for_single_layers(&regions.shape, reference.inputs, |x| x);
    for (weight, left, right) in [
        (Weight::Qkv(layer), whole("grad_qkv", 3 * d), whole("qkv_input", d)),
        (Weight::Out(layer), whole("grad_middle", d), whole("attended", d)),
        (Weight::GateUp(layer), whole("grad_gate_up", 2 * ff), whole("mlp_input", d)),
        (Weight::Down(layer), whole("hidden", ff), whole("grad_mlp", d)),
    ] {
        let expected = whole_reference.weight_gradient(weight, &left, &right);
        let first = expected.tensor.first - regions.shape.first_matrix_row();
        let rows: Vec<usize> = expected.rows.iter().map(|row| first + row).collect();
        let found = regions.arena_rows_in_f64("grad_matrices", &rows, Dtype::Bf16);
        assert_relative_l2(&format!("gradient of {weight:?}"), &found, &expected.values, 3e-3);
        if weight == Weight::Down(0) {
            check_update(regions, reference.inputs, &WeightGradient { values: found, ..expected });
        }
    }
}

/// Compares the state after the step, computed from the row's own gradient.
fn check_update(regions: &DeviceRegions<'_>, inputs: &Tensors, gradient: &WeightGradient) {
    for (name, expected) in
        STATE_INPUTS.into_iter().zip(adamw_update(&regions.shape, inputs, gradient))
    {
        let rows: Vec<usize> =
            gradient.rows.iter().map(|row| gradient.tensor.first + row).collect();
        let found = regions.arena_rows_in_f64(name, &rows, Dtype::F32);
        assert_relative_l2(
            &format!("{name} of {:?}", gradient.tensor.weight),
            &found,
            &expected,
            1e-5,
        );
    }
}

/// Checks the first layer, the middle one and the last one, each for a different sequence.
fn check_layers(device: &Arc<Device>, shape: LmShape, attention: RungAttention, inputs: &Tensors) {
    let text = ["tokens", "targets"].into_iter().fold(Tensors::new(), |text, name| {
        text.with(name, [1, shape.context], TensorData::F32(vec![0.0; shape.context]))
    });
    let one = inputs.replaced_by(&text);
    let single = LmShape { batch: 1, ..shape };
    let reference = LmReference::for_single_layers(&single, &one, |x| x);
    // With a single group, the gradients of every layer's activations are kept.
    let program = step_program(
        &shape,
        attention.on(device, &shape),
        GradientSchedule::Overlapped { group: shape.layers },
    );
    let program = program.load_program(device, inputs).unwrap();
    program.enqueue_program().unwrap();
    device.synchronize().unwrap();
    let regions = DeviceRegions { program: &program, shape };
    for (layer, number) in [(0, 3), (shape.layers / 2, 1), (shape.layers - 1, 0)] {
        check_forward(&regions, &reference, layer, number);
        check_backward(&regions, &reference, layer, number);
    }
}

#[test]
fn layers_agree_with_the_reference_at_a_published_model_size() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let inputs = TrainStep { shape: SMALL }.inputs(11);
    for attention in [FUSED, DETERMINISTIC] {
        if attention == DETERMINISTIC && device.facts().arch != "sm_90a" {
            continue;
        }
        check_layers(&device, SMALL, attention, &inputs);
    }
}
