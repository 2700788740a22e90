//! What the operations one by one keep in device memory: inputs, quantised weights, activations.

use crate::denoise::cuda::buffers::{self, Region};
use crate::denoise::cuda::run::ExpertRun;
use crate::denoise::definition::WeightFormat;
use crate::denoise::model::{ACTION, Model};
use kernelgate::workload::Dtype;

/// Keys that the GEMMs run over: a multiple of eight, so that rows of probabilities are whole
/// packets.
pub const fn padded(context: usize) -> usize {
    context.next_multiple_of(8)
}

/// A quantised matrix: the input, which is held as codes, its columns' exponents, and a layer of it
/// as bf16.
pub struct Coded {
    /// The input.
    pub name: &'static str,
    /// Exponents of its columns.
    pub exponents: &'static str,
    /// The layer in bf16.
    pub values: &'static str,
}

const CODED: [Coded; 7] = {
    const fn coded(name: &'static str, exponents: &'static str, values: &'static str) -> Coded {
        Coded { name, exponents, values }
    }
    [
        coded("q_proj", "q_exponents", "q_values"),
        coded("k_proj", "k_exponents", "k_values"),
        coded("v_proj", "v_exponents", "v_values"),
        coded("o_proj", "o_exponents", "o_values"),
        coded("gate_proj", "gate_exponents", "gate_values"),
        coded("up_proj", "up_exponents", "up_values"),
        coded("down_proj", "down_exponents", "down_values"),
    ]
};

/// The matrices that this run holds as codes.
pub fn coded(run: &ExpertRun) -> &'static [Coded] {
    match run.shape.weights {
        WeightFormat::Same => &[],
        WeightFormat::Fp8 => &CODED,
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

/// Codes and exponents.
pub fn packed(run: &ExpertRun) -> Vec<Region> {
    let depth = run.shape.model.depth;
    let regions = |matrix: &Coded| {
        let [rows, columns] = extents(run, matrix.name);
        [(matrix.name, depth * rows * columns), (matrix.exponents, depth * columns)]
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
