//! Device memory of the denoising rung with one launch for each operation: quantised weights,
//! dequantised layers and activations.

use crate::denoise::cuda::run::DenoiseStepOrLoop;
use crate::denoise::cuda::writer::{DenoiseProgramBuilder, RegionNameAndBytes};
use crate::denoise::definition::LayerWeightFormat;
use crate::denoise::fp8::{self, Fp8MatrixStack};
use crate::denoise::int4::{self, Int4MatrixStack};
use crate::denoise::model::{ExpertDimensions, VALUES_PER_ACTION};
use kernelgate::backend::program::{MemoryPurpose, RegionPointer};
use kernelgate::workload::{Dtype, Tensors};

/// Number of keys in the attention GEMMs: `context` padded to a multiple of eight, so that rows of
/// probabilities are whole packets.
pub const fn keys_padded_to_eight(context: usize) -> usize {
    context.next_multiple_of(8)
}

/// Names of the memory regions of one weight matrix that is stored quantised.
pub struct QuantisedMatrixRegions {
    /// Name of the weight input and of the region with its codes, followed by fp8 column exponents
    /// or int4 group scales.
    pub weight_and_code_region_name: &'static str,
    /// Name of the memory region that holds one layer's dequantised matrix in bf16.
    pub dequantised_region_name: &'static str,
}

const QUANTISED_LAYER_MATRICES: [QuantisedMatrixRegions; 7] = {
    const fn regions_of_quantised_matrix(
        name: &'static str,
        values: &'static str,
    ) -> QuantisedMatrixRegions {
        QuantisedMatrixRegions {
            weight_and_code_region_name: name,
            dequantised_region_name: values,
        }
    }
    [
        regions_of_quantised_matrix("q_proj", "q_values"),
        regions_of_quantised_matrix("k_proj", "k_values"),
        regions_of_quantised_matrix("v_proj", "v_values"),
        regions_of_quantised_matrix("o_proj", "o_values"),
        regions_of_quantised_matrix("gate_proj", "gate_values"),
        regions_of_quantised_matrix("up_proj", "up_values"),
        regions_of_quantised_matrix("down_proj", "down_values"),
    ]
};

/// Weight matrices of each layer that this run stores as fp8 or int4 codes; none for bf16 weights.
pub fn matrices_stored_quantised(run: &DenoiseStepOrLoop) -> &'static [QuantisedMatrixRegions] {
    match run.shape.weights {
        LayerWeightFormat::SameDtypeAsActivations => &[],
        LayerWeightFormat::Fp8 | LayerWeightFormat::Int4 => &QUANTISED_LAYER_MATRICES,
    }
}

/// Creates the per-operation program of a run with all its memory regions, but without launches.
pub fn create_per_op_program_with_regions(run: &DenoiseStepOrLoop) -> DenoiseProgramBuilder<'_> {
    let names: Vec<_> = matrices_stored_quantised(run)
        .iter()
        .map(|coded| coded.weight_and_code_region_name)
        .collect();
    let mut writer = DenoiseProgramBuilder::create_with_unpacked_inputs(run, &names);
    for matrix in matrices_stored_quantised(run) {
        let (codes, scales) = code_and_scale_bytes_per_layer(run, matrix);
        let (bytes, run) = (run.shape.model.layer_count * (codes + scales), *run);
        let pack = move |inputs: &Tensors| quantise_and_encode_matrix(&run, inputs, matrix);
        writer.program.add_packed_from_inputs(
            matrix.weight_and_code_region_name,
            MemoryPurpose::Weights,
            bytes,
            pack,
        );
    }
    let values = matrices_stored_quantised(run).iter().map(|matrix| {
        let [rows, columns] = matrix_extents_of_one_layer(run, matrix.weight_and_code_region_name);
        (matrix.dequantised_region_name, rows * columns * Dtype::Bf16.bytes_per_element())
    });
    writer.add_scratch_regions(MemoryPurpose::Activations, per_op_activation_regions(run));
    writer.add_scratch_regions(MemoryPurpose::Workspace, values);
    writer
}

/// Number of rows and columns of one layer's matrix of a weight input.
pub fn matrix_extents_of_one_layer(run: &DenoiseStepOrLoop, name: &str) -> [usize; 2] {
    let specs = run.shape.model.input_tensor_specs(
        run.shape.action_tokens,
        run.shape.prefix_tokens,
        run.shape.dtype,
    );
    let spec = specs.iter().find(|spec| spec.input_name == name).expect("an input of the model");
    let [.., rows, columns] = spec.shape[..] else { unreachable!("`{name}` is a matrix") };
    [rows, columns]
}

/// Quantises a weight matrix and encodes it as `kernels/denoise/per_op.cu` reads it: the codes of
/// all layers, then the exponents or scales. An int4 byte holds the codes of two neighbouring
/// columns, each the quantised integer plus 8.
fn quantise_and_encode_matrix(
    run: &DenoiseStepOrLoop,
    inputs: &Tensors,
    matrix: &QuantisedMatrixRegions,
) -> Vec<u8> {
    let tensor = inputs.tensor(matrix.weight_and_code_region_name);
    if run.shape.weights == LayerWeightFormat::Int4 {
        let Int4MatrixStack { int4_codes: codes, group_scales: scales } =
            int4::quantise_stack_to_int4(tensor);
        let pairs = codes.chunks_exact(2);
        let packed = pairs.map(|two| (two[0] + 8) as u8 | ((two[1] + 8) as u8) << 4);
        packed.chain(bytemuck::cast_slice(&scales).iter().copied()).collect()
    } else {
        let Fp8MatrixStack { e4m3_codes: codes, column_exponents: exponents } =
            fp8::quantise_stack_to_fp8(tensor);
        [codes, bytemuck::cast_vec(exponents)].concat()
    }
}

/// Bytes of one layer's codes, and bytes of its fp8 exponents or int4 scales.
fn code_and_scale_bytes_per_layer(
    run: &DenoiseStepOrLoop,
    matrix: &QuantisedMatrixRegions,
) -> (usize, usize) {
    let [rows, columns] = matrix_extents_of_one_layer(run, matrix.weight_and_code_region_name);
    match run.shape.weights {
        LayerWeightFormat::Int4 => (
            rows * columns / 2,
            int4::int4_groups_per_column(rows) * columns * Dtype::Bf16.bytes_per_element(),
        ),
        _ => (rows * columns, columns),
    }
}

/// Pointers to one layer's codes and to its fp8 exponents or int4 scales.
pub fn pointers_to_layer_codes_and_scales(
    writer: &DenoiseProgramBuilder,
    matrix: &QuantisedMatrixRegions,
    layer: usize,
) -> [RegionPointer; 2] {
    let (codes, scales) = code_and_scale_bytes_per_layer(writer.run, matrix);
    let (first, depth) = (
        writer.program.pointer_to(matrix.weight_and_code_region_name),
        writer.run.shape.model.layer_count,
    );
    [first.offset_by(layer * codes), first.offset_by(depth * codes + layer * scales)]
}

fn per_op_activation_regions(run: &DenoiseStepOrLoop) -> Vec<RegionNameAndBytes> {
    let ExpertDimensions {
        model_width: width,
        layer_count: depth,
        feed_forward_width: mlp,
        query_heads: heads,
        head_dim,
        ..
    } = run.shape.model;
    let (s, keys) =
        (run.shape.action_tokens, keys_padded_to_eight(run.shape.prefix_and_horizon_tokens()));
    let (bf16, f32) = (Dtype::Bf16.bytes_per_element(), Dtype::F32.bytes_per_element());
    vec![
        ("embedding", width * bf16),
        ("time_hidden", width * bf16),
        ("cond", width * bf16),
        ("styles", (2 * depth + 1) * 3 * width * f32),
        ("x16", s * VALUES_PER_ACTION * bf16),
        ("angles", s * head_dim * f32),
        ("h", s * width * bf16),
        ("normed", s * width * f32),
        ("y", s * width * bf16),
        ("exact", s * width * f32),
        ("q", s * heads * head_dim * bf16),
        ("k", s * head_dim * bf16),
        ("v", s * head_dim * bf16),
        ("keys", keys * head_dim * bf16),
        ("values", keys * head_dim * bf16),
        ("scores", s * heads * keys * f32),
        ("probabilities", s * heads * keys * bf16),
        ("attended", s * heads * head_dim * bf16),
        ("branch", s * width * bf16),
        ("gates", s * mlp * bf16),
        ("ups", s * mlp * bf16),
        ("velocities", s * VALUES_PER_ACTION * f32),
    ]
}
