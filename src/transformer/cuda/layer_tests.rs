//! Compares each layer of a GPU training step at a published model size with the fp64 reference,
//! which gets the GPU's own inputs of that layer. Because each layer starts from the GPU's own
//! inputs, rounding in earlier layers does not hide an error in one kernel.

use std::sync::Arc;

use super::rung_choices::{AttentionOfRung, WeightGradientSchedule};
use super::training::training_step_program;
use super::{FUSED_ATTENTION_IN_ANY_SUM_ORDER, FUSED_ATTENTION_IN_FIXED_SUM_ORDER};
use crate::gpu_tests::lock_first_gpu;
use crate::transformer::definition::LanguageModelTrainingStep;
use crate::transformer::gradients::{SampledWeightGradient, adamw_step_of_gradient_rows};
use crate::transformer::reference::{F64Matrix, LanguageModelReference};
use crate::transformer::shape::{LanguageModelShape, ParameterTensor, TRAINING_STATE_INPUTS};
use kernelgate::backend::program::LoadedProgram;
use kernelgate::workload::{Dtype, Problem, Tensor, TensorData, Tensors};
use kernelgate_cuda::Device;

const PUBLISHED_SMALL_MODEL: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 10_000,
    model_width: 768,
    swiglu_hidden_width: 3072,
    layers: 12,
    heads: 12,
    context_tokens: 512,
    batch: 4,
    dtype: Dtype::Bf16,
};

/// Allowed relative L2 error of a layer: about that of a few bf16 roundings.
const MAX_RELATIVE_L2_ERROR_OF_LAYER: f64 = 1e-2;

/// Reads memory regions of a GPU program after it has run.
struct RegionsAfterLaunch<'a> {
    program: &'a LoadedProgram,
    shape: LanguageModelShape,
}

impl RegionsAfterLaunch<'_> {
    fn download_region(&self, name: &str, dtype: Dtype) -> Tensor {
        let buffer =
            self.program.buffer_of_region(name).unwrap_or_else(|| panic!("no region {name}"));
        let mut tensor =
            Tensor::filled_with_zeros([buffer.size_in_bytes() / dtype.bytes_per_element()], dtype);
        buffer.download_first_bytes(tensor.as_bytes_mut()).unwrap();
        tensor
    }

    /// Tensor of one layer in fp64, from a region that holds the tensors of all layers one after
    /// the other.
    fn download_tensor_of_layer(
        &self,
        name: &str,
        layer: usize,
        columns: usize,
        dtype: Dtype,
    ) -> F64Matrix {
        let len = self.shape.tokens_in_batch() * columns;
        let values = self.download_region(name, dtype).elements_to_f64(layer * len, len);
        F64Matrix { values, columns }
    }

    /// Rows of a parameter, gradient or moment arena in fp64.
    fn download_arena_rows(&self, name: &str, rows: &[usize], dtype: Dtype) -> Vec<f64> {
        let (tensor, d) = (self.download_region(name, dtype), self.shape.model_width);
        rows.iter().flat_map(|row| tensor.elements_to_f64(row * d, d)).collect()
    }

    fn rows_of_one_sequence(&self, matrix: &F64Matrix, number: usize) -> F64Matrix {
        let len = self.shape.context_tokens * matrix.columns;
        F64Matrix { values: matrix.values[number * len..][..len].to_vec(), columns: matrix.columns }
    }

    /// Activation of a layer, stored in bf16, as an fp64 matrix.
    fn download_bf16_activation(&self, name: &str, layer: usize, columns: usize) -> F64Matrix {
        self.download_tensor_of_layer(name, layer, columns, Dtype::Bf16)
    }

    fn download_f32_residual_stream(&self, name: &str, layer: usize) -> F64Matrix {
        self.download_tensor_of_layer(name, layer, self.shape.model_width, Dtype::F32)
    }
}

fn assert_relative_l2_error_within(what: &str, found: &[f64], expected: &[f64], allowed: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut found.iter().zip(expected).map(|(x, y)| x - y));
    let error = apart / norm(&mut expected.iter().copied());
    eprintln!("{what}: {error:.1e}");
    assert!(error <= allowed, "{what}: {error:.1e}");
}

/// Compares the activations of one layer for one sequence with the fp64 reference.
fn compare_activations_of_layer(
    regions: &RegionsAfterLaunch<'_>,
    reference: &LanguageModelReference<'_>,
    layer: usize,
    number: usize,
) {
    let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = regions.shape;
    let expected = reference.activations_of_layer(
        layer,
        &regions.rows_of_one_sequence(&regions.download_f32_residual_stream("x", layer), number),
    );
    for (name, columns, expected) in [
        ("qkv_input", d, &expected.qkv_input),
        ("qkv", 3 * d, &expected.qkv),
        ("attended", d, &expected.attention_output),
        ("mlp_input", d, &expected.swiglu_input),
        ("gate_up", 2 * ff, &expected.swiglu_gates_and_ups),
        ("hidden", ff, &expected.swiglu_hidden),
    ] {
        let found = regions
            .rows_of_one_sequence(&regions.download_bf16_activation(name, layer, columns), number);
        assert_relative_l2_error_within(
            &format!("{name} {layer}"),
            &found.values,
            &expected.values,
            MAX_RELATIVE_L2_ERROR_OF_LAYER,
        );
    }
    let found =
        regions.rows_of_one_sequence(&regions.download_f32_residual_stream("x", layer + 1), number);
    let behind = reference.residual_stream_after_layer(layer, &expected);
    assert_relative_l2_error_within(
        &format!("x {}", layer + 1),
        &found.values,
        &behind.values,
        MAX_RELATIVE_L2_ERROR_OF_LAYER,
    );
}

/// Compares the gradients of one layer's activations for one sequence, and sampled rows of its
/// weight gradients, with the fp64 reference.
fn compare_gradients_of_layer(
    regions: &RegionsAfterLaunch<'_>,
    reference: &LanguageModelReference<'_>,
    layer: usize,
    number: usize,
) {
    let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = regions.shape;
    let activations = reference.activations_of_layer(
        layer,
        &regions.rows_of_one_sequence(&regions.download_f32_residual_stream("x", layer), number),
    );
    let whole = |name: &str, columns| regions.download_bf16_activation(name, layer, columns);
    let part = |name: &str, columns| regions.rows_of_one_sequence(&whole(name, columns), number);
    let (middle, _) = reference.backpropagate_through_swiglu_block(
        layer,
        &activations,
        &part("grad_mlp", d),
        &mut vec![],
    );
    let found = part("grad_middle", d);
    assert_relative_l2_error_within(
        &format!("grad_middle {layer}"),
        &found.values,
        &middle.values,
        MAX_RELATIVE_L2_ERROR_OF_LAYER,
    );
    if layer > 0 {
        let (before, _) = reference.backpropagate_through_attention_block(
            layer,
            &activations,
            &found,
            &mut vec![],
        );
        let found = regions.rows_of_one_sequence(
            &regions.download_bf16_activation("grad_mlp", layer - 1, d),
            number,
        );
        assert_relative_l2_error_within(
            &format!("grad_mlp {}", layer - 1),
            &found.values,
            &before.values,
            MAX_RELATIVE_L2_ERROR_OF_LAYER,
        );
    }
    let whole_reference =
        LanguageModelReference::without_forward_pass(&regions.shape, reference.inputs, |x| x);
    for (weight, left, right) in [
        (
            ParameterTensor::QkvProjectionOfLayer(layer),
            whole("grad_qkv", 3 * d),
            whole("qkv_input", d),
        ),
        (
            ParameterTensor::AttentionOutputProjectionOfLayer(layer),
            whole("grad_middle", d),
            whole("attended", d),
        ),
        (
            ParameterTensor::GateUpProjectionOfLayer(layer),
            whole("grad_gate_up", 2 * ff),
            whole("mlp_input", d),
        ),
        (ParameterTensor::DownProjectionOfLayer(layer), whole("hidden", ff), whole("grad_mlp", d)),
    ] {
        let expected = whole_reference.compared_rows_of_weight_gradient(weight, &left, &right);
        let first = expected.tensor.first_arena_row - regions.shape.first_arena_row_of_matrices();
        let rows: Vec<usize> = expected.sampled_row_indices.iter().map(|row| first + row).collect();
        let found = regions.download_arena_rows("grad_matrices", &rows, Dtype::Bf16);
        assert_relative_l2_error_within(
            &format!("gradient of {weight:?}"),
            &found,
            &expected.sampled_row_gradients,
            3e-3,
        );
        if weight == ParameterTensor::DownProjectionOfLayer(0) {
            compare_adamw_update(
                regions,
                reference.inputs,
                &SampledWeightGradient { sampled_row_gradients: found, ..expected },
            );
        }
    }
}

/// Compares the state after AdamW with the fp64 reference, which gets the GPU's own gradient.
fn compare_adamw_update(
    regions: &RegionsAfterLaunch<'_>,
    inputs: &Tensors,
    gradient: &SampledWeightGradient,
) {
    for (name, expected) in TRAINING_STATE_INPUTS.into_iter().zip(adamw_step_of_gradient_rows(
        &regions.shape,
        inputs,
        gradient,
    )) {
        let rows: Vec<usize> = gradient
            .sampled_row_indices
            .iter()
            .map(|row| gradient.tensor.first_arena_row + row)
            .collect();
        let found = regions.download_arena_rows(name, &rows, Dtype::F32);
        assert_relative_l2_error_within(
            &format!("{name} of {:?}", gradient.tensor.weight),
            &found,
            &expected,
            1e-5,
        );
    }
}

/// Compares the first, the middle and the last layer with the fp64 reference, each for a different
/// sequence.
fn compare_three_layers_with_reference(
    device: &Arc<Device>,
    shape: LanguageModelShape,
    attention: AttentionOfRung,
    inputs: &Tensors,
) {
    let text = ["tokens", "targets"].into_iter().fold(Tensors::new(), |text, name| {
        text.with_tensor(
            name,
            [1, shape.context_tokens],
            TensorData::F32(vec![0.0; shape.context_tokens]),
        )
    });
    let one = inputs.with_tensors_replaced_by(&text);
    let single = LanguageModelShape { batch: 1, ..shape };
    let reference = LanguageModelReference::without_forward_pass(&single, &one, |x| x);
    // With a single group of layers, the gradients of every layer's activations are still in memory
    // after the launch.
    let program = training_step_program(
        &shape,
        attention.kernel_choice_for_device(device, &shape),
        WeightGradientSchedule::OverlapsActivationGradients {
            layers_per_gradient_group: shape.layers,
        },
    );
    let program = program.load_on_device(device, inputs).unwrap();
    program.enqueue_all_steps().unwrap();
    device.synchronize().unwrap();
    let regions = RegionsAfterLaunch { program: &program, shape };
    for (layer, number) in [(0, 3), (shape.layers / 2, 1), (shape.layers - 1, 0)] {
        compare_activations_of_layer(&regions, &reference, layer, number);
        compare_gradients_of_layer(&regions, &reference, layer, number);
    }
}

#[test]
fn layers_of_a_published_model_size_agree_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let inputs = LanguageModelTrainingStep { shape: PUBLISHED_SMALL_MODEL }.inputs(11);
    for attention in [FUSED_ATTENTION_IN_ANY_SUM_ORDER, FUSED_ATTENTION_IN_FIXED_SUM_ORDER] {
        if attention == FUSED_ATTENTION_IN_FIXED_SUM_ORDER
            && device.gpu_properties().kernel_architecture != "sm_90a"
        {
            continue;
        }
        compare_three_layers_with_reference(&device, PUBLISHED_SMALL_MODEL, attention, &inputs);
    }
}
