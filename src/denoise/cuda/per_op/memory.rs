//! Device memory of the rung with one launch for each operation: inputs, quantised weights,
//! activations.

use crate::denoise::cuda::run::ExpertRun;
use crate::denoise::cuda::writer::{ExpertWriter, NamedRegion};
use crate::denoise::definition::WeightFormat;
use crate::denoise::fp8::{self, Fp8Matrix};
use crate::denoise::int4::{self, Int4Matrix};
use crate::denoise::model::{ACTION_COLUMNS, ExpertModel};
use kernelgate::backend::program::{MemoryPurpose, Pointer};
use kernelgate::workload::{Dtype, Tensors};

/// Number of keys in the GEMMs: a multiple of eight, so that rows of probabilities are whole
/// packets.
pub const fn padded_key_count(context: usize) -> usize {
    context.next_multiple_of(8)
}

/// A quantised matrix and its buffers.
pub struct QuantisedMatrix {
    /// Name of the input, and of the region with its codes and the exponents of its columns (for
    /// int4, the scales of its groups).
    pub name: &'static str,
    /// Name of the region that holds one dequantised layer in bf16.
    pub values: &'static str,
}

const QUANTISED_MATRICES: [QuantisedMatrix; 7] = {
    const fn quantised_matrix(name: &'static str, values: &'static str) -> QuantisedMatrix {
        QuantisedMatrix { name, values }
    }
    [
        quantised_matrix("q_proj", "q_values"),
        quantised_matrix("k_proj", "k_values"),
        quantised_matrix("v_proj", "v_values"),
        quantised_matrix("o_proj", "o_values"),
        quantised_matrix("gate_proj", "gate_values"),
        quantised_matrix("up_proj", "up_values"),
        quantised_matrix("down_proj", "down_values"),
    ]
};

/// Weight matrices that this run stores as fp8 or int4 codes.
pub fn quantised_matrix(run: &ExpertRun) -> &'static [QuantisedMatrix] {
    match run.shape.weights {
        WeightFormat::Same => &[],
        WeightFormat::Fp8 | WeightFormat::Int4 => &QUANTISED_MATRICES,
    }
}

/// Creates a program with every memory region of this run.
pub fn program_with_regions(run: &ExpertRun) -> ExpertWriter<'_> {
    let names: Vec<_> = quantised_matrix(run).iter().map(|coded| coded.name).collect();
    let mut writer = ExpertWriter::new(run, &names);
    for matrix in quantised_matrix(run) {
        let (codes, scales) = encoded_bytes(run, matrix);
        let (bytes, run) = (run.shape.model.depth * (codes + scales), *run);
        let pack = move |inputs: &Tensors| encode_matrix(&run, inputs, matrix);
        writer.program.add_packed(matrix.name, MemoryPurpose::Weights, bytes, pack);
    }
    let values = quantised_matrix(run).iter().map(|matrix| {
        let [rows, columns] = layer_rows_and_columns(run, matrix.name);
        (matrix.values, rows * columns * Dtype::Bf16.bytes())
    });
    writer.declare_scratch_regions(MemoryPurpose::Activations, activation_regions(run));
    writer.declare_scratch_regions(MemoryPurpose::Workspace, values);
    writer
}

/// Number of rows and columns of one layer of an input.
pub fn layer_rows_and_columns(run: &ExpertRun, name: &str) -> [usize; 2] {
    let specs = run.shape.model.input_tensors(run.shape.s, run.shape.p, run.shape.dtype);
    let spec = specs.iter().find(|spec| spec.name == name).expect("an input of the model");
    let [.., rows, columns] = spec.shape[..] else { unreachable!("`{name}` is a matrix") };
    [rows, columns]
}

/// Encodes a matrix in the layout of `kernels/denoise/per_op.cu`: the codes, then the exponents or
/// scales. For int4 a byte has two columns, each as the number plus 8.
fn encode_matrix(run: &ExpertRun, inputs: &Tensors, matrix: &QuantisedMatrix) -> Vec<u8> {
    let tensor = inputs.tensor(matrix.name);
    if run.shape.weights == WeightFormat::Int4 {
        let Int4Matrix { codes, scales } = int4::quantize_to_int4(tensor);
        let pairs = codes.chunks_exact(2);
        let packed = pairs.map(|two| (two[0] + 8) as u8 | ((two[1] + 8) as u8) << 4);
        packed.chain(bytemuck::cast_slice(&scales).iter().copied()).collect()
    } else {
        let Fp8Matrix { codes, exponents } = fp8::quantize_to_fp8(tensor);
        [codes, bytemuck::cast_vec(exponents)].concat()
    }
}

/// Bytes of one layer's codes, and of its exponents or scales.
fn encoded_bytes(run: &ExpertRun, matrix: &QuantisedMatrix) -> (usize, usize) {
    let [rows, columns] = layer_rows_and_columns(run, matrix.name);
    match run.shape.weights {
        WeightFormat::Int4 => {
            (rows * columns / 2, int4::groups_per_column(rows) * columns * Dtype::Bf16.bytes())
        }
        _ => (rows * columns, columns),
    }
}

/// Pointers to the codes of a layer, and to its exponents or scales.
pub fn codes_and_scales_of_layer(
    writer: &ExpertWriter,
    matrix: &QuantisedMatrix,
    layer: usize,
) -> [Pointer; 2] {
    let (codes, scales) = encoded_bytes(writer.run, matrix);
    let (first, depth) = (writer.program.at(matrix.name), writer.run.shape.model.depth);
    [first.offset_by(layer * codes), first.offset_by(depth * codes + layer * scales)]
}

fn activation_regions(run: &ExpertRun) -> Vec<NamedRegion> {
    let ExpertModel { width, depth, mlp, heads, head_dim, .. } = run.shape.model;
    let (s, keys) = (run.shape.s, padded_key_count(run.shape.visible_tokens()));
    let (bf16, f32) = (Dtype::Bf16.bytes(), Dtype::F32.bytes());
    vec![
        ("embedding", width * bf16),
        ("time_hidden", width * bf16),
        ("cond", width * bf16),
        ("styles", (2 * depth + 1) * 3 * width * f32),
        ("x16", s * ACTION_COLUMNS * bf16),
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
        ("velocities", s * ACTION_COLUMNS * f32),
    ]
}
