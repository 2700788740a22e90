//! Dimensions of the action expert and, derived from them, every input tensor: its name, shape,
//! dtype and distribution.

use crate::draw::draw_tensor;
use kernelgate::workload::{Dtype, Tensor};

/// Number of columns of an action.
pub const ACTION_COLUMNS: usize = 32;

/// Dimensions of pi0.5's action expert: gemma_300m with adaRMS.
pub const PI05_MODEL: ExpertModel =
    ExpertModel { name: "pi05", width: 1024, depth: 18, mlp: 4096, heads: 8, head_dim: 256 };

/// The action expert of pi0.5 with a single layer. A single layer runs the same kernels in a time
/// that is acceptable for tools which check every memory access.
pub const PI05_LAYER_MODEL: ExpertModel =
    ExpertModel { name: "pi05_layer", depth: 1, ..PI05_MODEL };

/// Dimensions small enough for a reference that is computed element by element.
pub const TINY_MODEL: ExpertModel =
    ExpertModel { name: "tiny", width: 64, depth: 2, mlp: 128, heads: 2, head_dim: 16 };

/// Dimensions of an action expert with one key-value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertModel {
    /// Name of the model, as the axis `model` has it.
    pub name: &'static str,
    /// Number of columns of the residual stream, and of the time embedding.
    pub width: usize,
    /// Number of layers.
    pub depth: usize,
    /// Number of columns in the feed-forward's hidden layer.
    pub mlp: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of columns of a head; it must be even.
    pub head_dim: usize,
}

/// Steps of the loop in which an input tensor must be read from memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadTime {
    /// The tensor must be read in every denoising step.
    EachStep,
    /// One read of the tensor is enough for all steps together.
    Once,
}

/// Specification of one input tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// Name of the tensor in the workload's definition.
    pub name: &'static str,
    /// Extent of each axis, outermost first.
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    /// Steps in which the tensor must be read: once for all steps, or in each of them.
    pub read: ReadTime,
    /// Standard deviation of the tensor's elements; their mean is 0.
    pub deviation: f32,
}

impl TensorSpec {
    /// Size of the tensor in bytes.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.bytes() as u64
    }

    /// Draws the tensor from a seed.
    pub(super) fn draw_tensor(&self, seed: u64) -> Tensor {
        draw_tensor(seed, self.name, self.shape.clone(), self.dtype, |x| self.deviation * x)
    }
}

impl ExpertModel {
    /// Returns the denoise model of that name.
    pub fn from_name(name: &str) -> Option<ExpertModel> {
        [PI05_MODEL, PI05_LAYER_MODEL, TINY_MODEL].into_iter().find(|model| model.name == name)
    }

    /// Number of weights in all layers without their styles, which every step must read.
    pub fn layer_weight_elements(&self) -> u64 {
        let attention = 2 * self.heads * self.head_dim + 2 * self.head_dim;
        (self.depth * self.width * (attention + 3 * self.mlp)) as u64
    }

    /// Number of elements in the style matrices, without biases.
    pub fn style_weight_elements(&self) -> u64 {
        ((2 * self.depth + 1) * 3 * self.width * self.width) as u64
    }

    /// Number of elements in the two matrices of the time embedding, without biases.
    pub fn time_weight_elements(&self) -> u64 {
        (2 * self.width * self.width) as u64
    }

    /// All input tensors but the time, for a horizon `s` and a prefix `p`, in the order of use.
    ///
    /// The standard deviations keep activations of order one through all layers and let every part
    /// matter. A factor 2 on `q_proj` makes attention select some tokens (uniform attention
    /// averages to almost nothing). A factor 2 on the styles gives gates of about 0.4.
    pub fn input_tensors(&self, s: usize, p: usize, dtype: Dtype) -> Vec<TensorSpec> {
        let Self { width, depth, mlp, heads, head_dim, .. } = *self;
        let matrix = |name, shape: &[usize], read, gain: f32| {
            let rows = shape[shape.len() - 2];
            TensorSpec {
                name,
                shape: shape.to_vec(),
                dtype,
                read,
                deviation: gain / (rows as f32).sqrt(),
            }
        };
        let f32_tensor = |name, shape: &[usize], deviation| TensorSpec {
            name,
            shape: shape.to_vec(),
            dtype: Dtype::F32,
            read: ReadTime::Once,
            deviation,
        };
        let bias = |name, shape: &[usize]| f32_tensor(name, shape, 0.1);
        let cache = |name| TensorSpec {
            name,
            shape: vec![depth, p, head_dim],
            dtype,
            read: ReadTime::EachStep,
            deviation: 1.0,
        };
        let layer = |name, rows, columns, gain| {
            matrix(name, &[depth, rows, columns], ReadTime::EachStep, gain)
        };
        vec![
            f32_tensor("x", &[s, ACTION_COLUMNS], 1.0),
            matrix("time_in", &[width, width], ReadTime::Once, 1.0),
            bias("time_in_bias", &[width]),
            matrix("time_out", &[width, width], ReadTime::Once, 1.0),
            bias("time_out_bias", &[width]),
            matrix("action_in", &[ACTION_COLUMNS, width], ReadTime::Once, 1.0),
            bias("action_in_bias", &[width]),
            matrix("style1", &[depth, width, 3 * width], ReadTime::Once, 2.0),
            bias("style1_bias", &[depth, 3 * width]),
            layer("q_proj", width, heads * head_dim, 2.0),
            layer("k_proj", width, head_dim, 1.0),
            layer("v_proj", width, head_dim, 1.0),
            cache("k_cache"),
            cache("v_cache"),
            layer("o_proj", heads * head_dim, width, 1.0),
            matrix("style2", &[depth, width, 3 * width], ReadTime::Once, 2.0),
            bias("style2_bias", &[depth, 3 * width]),
            layer("gate_proj", width, mlp, 1.0),
            layer("up_proj", width, mlp, 1.0),
            layer("down_proj", mlp, width, 1.0),
            matrix("final_style", &[width, 3 * width], ReadTime::Once, 2.0),
            bias("final_style_bias", &[3 * width]),
            matrix("action_out", &[width, ACTION_COLUMNS], ReadTime::Once, 1.0),
            bias("action_out_bias", &[ACTION_COLUMNS]),
        ]
    }
}
