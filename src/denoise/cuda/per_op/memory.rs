//! What the operations one by one keep in device memory: inputs, quantised weights, activations.

use crate::denoise::cuda::buffers::{self, Region};
use crate::denoise::cuda::run::ExpertRun;
use crate::denoise::definition::WeightFormat;
use crate::denoise::fp8::{self, Fp8};
use crate::denoise::int4::{self, Int4};
use crate::denoise::model::{ACTION, Model};
use kernelgate::workload::{Dtype, Tensors};

/// Keys that the GEMMs run over: a multiple of eight, so that rows of probabilities are whole
/// packets.
pub const fn padded(context: usize) -> usize {
    context.next_multiple_of(8)
}

/// A quantised matrix: the input, which is held as codes, its exponents or scales, and a layer of
/// it as bf16.
pub struct Coded {
    /// The input.
    pub name: &'static str,
    /// Exponents of its columns; of int4, scales of its groups.
    pub scales: &'static str,
    /// The layer in bf16.
    pub values: &'static str,
}

const CODED: [Coded; 7] = {
    const fn coded(name: &'static str, scales: &'static str, values: &'static str) -> Coded {
        Coded { name, scales, values }
    }
    [
        coded("q_proj", "q_scales", "q_values"),
        coded("k_proj", "k_scales", "k_values"),
        coded("v_proj", "v_scales", "v_values"),
        coded("o_proj", "o_scales", "o_values"),
        coded("gate_proj", "gate_scales", "gate_values"),
        coded("up_proj", "up_scales", "up_values"),
        coded("down_proj", "down_scales", "down_values"),
    ]
};

/// The matrices that this run holds as codes.
pub fn coded(run: &ExpertRun) -> &'static [Coded] {
    match run.shape.weights {
        WeightFormat::Same => &[],
        WeightFormat::Fp8 | WeightFormat::Int4 => &CODED,
    }
}

/// Inputs that are held as they lie.
pub fn inputs(run: &ExpertRun) -> Vec<Region> {
    buffers::inputs(run, &coded(run).iter().map(|coded| coded.name).collect::<Vec<_>>())
}

/// Rows and columns of a layer of an input.
pub fn extents(run: &ExpertRun, name: &str) -> [usize; 2] {
    let specs = run.shape.model.tensors(run.shape.s, run.shape.p, run.shape.dtype);
    let spec = specs.iter().find(|spec| spec.name == name).expect("an input of the model");
    let [.., rows, columns] = spec.shape[..] else { unreachable!("`{name}` is a matrix") };
    [rows, columns]
}

/// A matrix's codes and its exponents or scales, as `kernels/denoise/per_op.cu` takes them: of int4
/// two columns a byte, the numbers plus 8.
pub fn encoded(run: &ExpertRun, inputs: &Tensors, matrix: &Coded) -> [Vec<u8>; 2] {
    let tensor = inputs.tensor(matrix.name);
    if run.shape.weights == WeightFormat::Int4 {
        let Int4 { codes, scales } = int4::quantize(tensor);
        let pairs = codes.chunks_exact(2);
        let packed = pairs.map(|two| (two[0] + 8) as u8 | ((two[1] + 8) as u8) << 4).collect();
        [packed, bytemuck::cast_slice(&scales).to_vec()]
    } else {
        let Fp8 { codes, exponents } = fp8::quantize(tensor);
        [codes, bytemuck::cast_vec(exponents)]
    }
}

/// Codes, and exponents or scales.
pub fn packed(run: &ExpertRun) -> Vec<Region> {
    let depth = run.shape.model.depth;
    let regions = |matrix: &Coded| {
        let [rows, columns] = extents(run, matrix.name);
        let [codes, scales] = match run.shape.weights {
            WeightFormat::Int4 => {
                [rows * columns / 2, int4::groups(rows) * columns * Dtype::Bf16.bytes()]
            }
            _ => [rows * columns, columns],
        };
        [(matrix.name, depth * codes), (matrix.scales, depth * scales)]
    };
    coded(run).iter().flat_map(regions).collect()
}

/// Everything but inputs and output.
pub fn scratch(run: &ExpertRun) -> Vec<Region> {
    let values = coded(run).iter().map(|matrix| {
        let [rows, columns] = extents(run, matrix.name);
        (matrix.values, rows * columns * Dtype::Bf16.bytes())
    });
    activations(run).into_iter().chain(values).collect()
}

fn activations(run: &ExpertRun) -> Vec<Region> {
    let Model { width, depth, mlp, heads, head_dim, .. } = run.shape.model;
    let (s, keys) = (run.shape.s, padded(run.shape.context()));
    let (bf16, f32) = (Dtype::Bf16.bytes(), Dtype::F32.bytes());
    vec![
        ("embedding", width * bf16),
        ("time_hidden", width * bf16),
        ("cond", width * bf16),
        ("styles", (2 * depth + 1) * 3 * width * f32),
        ("x16", s * ACTION * bf16),
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
        ("velocities", s * ACTION * f32),
    ]
}
