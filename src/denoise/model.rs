//! Dimensions of the denoising action expert and, derived from them, every input tensor: its name,
//! shape, dtype and standard deviation.

use crate::draw::draw_tensor_of_mapped_normals;
use kernelgate::workload::{Dtype, Tensor};

/// Number of values of one robot action.
pub const VALUES_PER_ACTION: usize = 32;

/// Dimensions of pi0.5's denoising action expert: gemma_300m with adaptive RMS norms.
pub const PI05_EXPERT_MODEL: ExpertDimensions = ExpertDimensions {
    model_name: "pi05",
    model_width: 1024,
    layer_count: 18,
    feed_forward_width: 4096,
    query_heads: 8,
    head_dim: 256,
};

/// Pi0.5's action expert with one layer instead of 18. The one-layer model runs the same kernels in
/// a time that is acceptable under tools which check every memory access.
pub const PI05_ONE_LAYER_MODEL: ExpertDimensions =
    ExpertDimensions { model_name: "pi05_layer", layer_count: 1, ..PI05_EXPERT_MODEL };

/// Dimensions of a test model that is small enough for a reference that is computed element by
/// element.
pub const TINY_TEST_MODEL: ExpertDimensions = ExpertDimensions {
    model_name: "tiny",
    model_width: 64,
    layer_count: 2,
    feed_forward_width: 128,
    query_heads: 2,
    head_dim: 16,
};

/// Dimensions of a denoising action expert whose query heads share one key-value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertDimensions {
    /// Name of the model as a value of the axis `model`.
    pub model_name: &'static str,
    /// Number of elements of a token in the residual stream, and of the time embedding.
    pub model_width: usize,
    /// Number of layers.
    pub layer_count: usize,
    /// Number of elements of a token in the feed-forward's hidden layer.
    pub feed_forward_width: usize,
    /// Number of query heads.
    pub query_heads: usize,
    /// Number of elements of a query, key or value head; it must be even.
    pub head_dim: usize,
}

/// How often a denoising loop must read an input tensor from memory: in every step or once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputReadFrequency {
    /// The denoising loop must read the tensor in every step.
    ReadInEachDenoisingStep,
    /// The denoising loop may read the tensor once for all steps.
    ReadOncePerDenoisingLoop,
}

/// Specification of one input tensor of the denoising expert.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertInputSpec {
    /// Name of the input tensor in the workload's definition.
    pub input_name: &'static str,
    /// Extent of each dimension of the tensor, outermost first.
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    /// How often the denoising loop must read the tensor: once for all steps, or in each step.
    pub read_frequency: InputReadFrequency,
    /// Standard deviation of the tensor's normally distributed elements, whose mean is 0.
    pub standard_deviation: f32,
}

impl ExpertInputSpec {
    /// Size of the input tensor in bytes, in its unquantised dtype.
    pub fn unquantised_bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.bytes_per_element() as u64
    }

    /// Draws the tensor's normally distributed elements from a seed.
    pub(super) fn draw_tensor_from_seed(&self, seed: u64) -> Tensor {
        draw_tensor_of_mapped_normals(seed, self.input_name, self.shape.clone(), self.dtype, |x| {
            self.standard_deviation * x
        })
    }
}

impl ExpertDimensions {
    /// Returns the dimensions of the denoising model with this name, `None` for an unknown name.
    pub fn dimensions_of_named_model(name: &str) -> Option<ExpertDimensions> {
        [PI05_EXPERT_MODEL, PI05_ONE_LAYER_MODEL, TINY_TEST_MODEL]
            .into_iter()
            .find(|model| model.model_name == name)
    }

    /// Number of projection weights in all layers, without the norm styles; every denoising step
    /// must read them.
    pub fn projection_weights_of_all_layers(&self) -> u64 {
        let attention = 2 * self.query_heads * self.head_dim + 2 * self.head_dim;
        (self.layer_count * self.model_width * (attention + 3 * self.feed_forward_width)) as u64
    }

    /// Number of elements of all style matrices of the norms, without biases.
    pub fn style_matrix_elements(&self) -> u64 {
        ((2 * self.layer_count + 1) * 3 * self.model_width * self.model_width) as u64
    }

    /// Number of elements of the two matrices of the time embedding, without biases.
    pub fn time_matrix_elements(&self) -> u64 {
        (2 * self.model_width * self.model_width) as u64
    }

    /// Specifications of all input tensors except the time, for a horizon `s` and a prefix `p`, in
    /// the order of use.
    ///
    /// The standard deviations of the inputs keep activations of order one through all layers and
    /// let every part of the expert affect the output. A factor of 2 on the deviation of `q_proj`
    /// makes attention select some tokens; with uniform attention, the values would average to
    /// almost nothing. A factor of 2 on the deviation of the style matrices gives gates of about
    /// 0.4.
    pub fn input_tensor_specs(&self, s: usize, p: usize, dtype: Dtype) -> Vec<ExpertInputSpec> {
        use InputReadFrequency::{ReadInEachDenoisingStep, ReadOncePerDenoisingLoop};
        let (width, depth, mlp) = (self.model_width, self.layer_count, self.feed_forward_width);
        let (heads, head_dim) = (self.query_heads, self.head_dim);
        let once = ReadOncePerDenoisingLoop;
        let matrix = |name, shape: &[usize], read, gain: f32| {
            let rows = shape[shape.len() - 2];
            ExpertInputSpec {
                input_name: name,
                shape: shape.to_vec(),
                dtype,
                read_frequency: read,
                standard_deviation: gain / (rows as f32).sqrt(),
            }
        };
        let f32_tensor = |name, shape: &[usize], deviation| ExpertInputSpec {
            input_name: name,
            shape: shape.to_vec(),
            dtype: Dtype::F32,
            read_frequency: once,
            standard_deviation: deviation,
        };
        let bias = |name, shape: &[usize]| f32_tensor(name, shape, 0.1);
        let cache = |name| ExpertInputSpec {
            input_name: name,
            shape: vec![depth, p, head_dim],
            dtype,
            read_frequency: ReadInEachDenoisingStep,
            standard_deviation: 1.0,
        };
        let layer = |name, rows, columns, gain| {
            matrix(name, &[depth, rows, columns], ReadInEachDenoisingStep, gain)
        };
        vec![
            f32_tensor("x", &[s, VALUES_PER_ACTION], 1.0),
            matrix("time_in", &[width, width], once, 1.0),
            bias("time_in_bias", &[width]),
            matrix("time_out", &[width, width], once, 1.0),
            bias("time_out_bias", &[width]),
            matrix("action_in", &[VALUES_PER_ACTION, width], once, 1.0),
            bias("action_in_bias", &[width]),
            matrix("style1", &[depth, width, 3 * width], once, 2.0),
            bias("style1_bias", &[depth, 3 * width]),
            layer("q_proj", width, heads * head_dim, 2.0),
            layer("k_proj", width, head_dim, 1.0),
            layer("v_proj", width, head_dim, 1.0),
            cache("k_cache"),
            cache("v_cache"),
            layer("o_proj", heads * head_dim, width, 1.0),
            matrix("style2", &[depth, width, 3 * width], once, 2.0),
            bias("style2_bias", &[depth, 3 * width]),
            layer("gate_proj", width, mlp, 1.0),
            layer("up_proj", width, mlp, 1.0),
            layer("down_proj", mlp, width, 1.0),
            matrix("final_style", &[width, 3 * width], once, 2.0),
            bias("final_style_bias", &[3 * width]),
            matrix("action_out", &[width, VALUES_PER_ACTION], once, 1.0),
            bias("action_out_bias", &[VALUES_PER_ACTION]),
        ]
    }
}
