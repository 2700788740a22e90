//! Sizes of a denoising problem, and the inputs, work and host memory that follow from them.

use std::sync::{Mutex, PoisonError};

use kernelgate::workload::{AxisError, Dtype, FlopUnit, Point, Tensor, Tensors, Work};

use super::fp8;
use super::int4;
use super::model::{ExpertDimensions, ExpertInputSpec, InputReadFrequency, VALUES_PER_ACTION};

/// Maximum number of tokens in a horizon or prefix: far more than any policy has, and few enough
/// that no count overflows 64 bits.
pub(super) const MAX_HORIZON_OR_PREFIX_TOKENS: usize = 1 << 16;

/// Cache of the denoising inputs that were drawn last: their seed, their specifications and their
/// tensors.
static LAST_DRAWN_INPUTS: Mutex<Option<(u64, Vec<ExpertInputSpec>, Tensors)>> = Mutex::new(None);

/// Format in which an implementation stores the projection matrices of the layers, which each
/// denoising step reads. The problem's weight inputs are not quantised: an implementation quantises
/// them once, while a case is prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerWeightFormat {
    /// The layer weights have the dtype of the activations.
    SameDtypeAsActivations,
    /// The layer weights are e4m3 codes with a power-of-two scale for each column.
    Fp8,
    /// The layer weights are four-bit integers with a scale for each 128 of k of a column.
    Int4,
}

impl LayerWeightFormat {
    /// Function that quantises a bf16 matrix to this format and dequantises it again; `None` if the
    /// format keeps the dtype.
    fn rounding_function_of_format(self) -> Option<fn(&Tensor) -> Tensor> {
        match self {
            Self::SameDtypeAsActivations => None,
            Self::Fp8 => Some(fp8::round_tensor_through_fp8),
            Self::Int4 => Some(int4::round_tensor_through_int4),
        }
    }
}

/// Parameters that the denoising step and the denoising loop share: a model, a horizon and a
/// prefix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseParameters {
    pub model: ExpertDimensions,
    /// Horizon: number of action tokens, the rows of `x`.
    pub action_tokens: usize,
    /// Prefix: number of cached tokens, the rows of each layer's key and value caches.
    pub prefix_tokens: usize,
    /// Dtype of activations, caches, and all matrices except the layer projections, whose format is
    /// `weights`.
    pub dtype: Dtype,
    /// Format in which the projection matrices of the layers are stored.
    pub weights: LayerWeightFormat,
}

impl DenoiseParameters {
    pub(super) fn bind_denoise_axes(point: &Point) -> Result<Self, AxisError> {
        let model = ExpertDimensions::dimensions_of_named_model(point.word("model")?)
            .expect("the axis lists the models");
        let (dtype, weights) = match point.word("dtype")? {
            "fp8" => (Dtype::Bf16, LayerWeightFormat::Fp8),
            "int4" => (Dtype::Bf16, LayerWeightFormat::Int4),
            name => (
                Dtype::parse_dtype_name(name).expect("the axis lists dtypes"),
                LayerWeightFormat::SameDtypeAsActivations,
            ),
        };
        let (s, p) = (point.number("s")?, point.number("p")?);
        if s.max(p) > MAX_HORIZON_OR_PREFIX_TOKENS {
            return Err(AxisError::InvalidCombinationOfValues(format!(
                "s={s}, p={p}: up to {MAX_HORIZON_OR_PREFIX_TOKENS} tokens each"
            )));
        }
        Ok(Self { model, action_tokens: s, prefix_tokens: p, dtype, weights })
    }

    /// Number of tokens that each query of the expert sees: the prefix and the horizon.
    pub fn prefix_and_horizon_tokens(&self) -> usize {
        self.prefix_tokens + self.action_tokens
    }

    pub(super) fn denoise_input_specs(&self) -> Vec<ExpertInputSpec> {
        self.model.input_tensor_specs(self.action_tokens, self.prefix_tokens, self.dtype)
    }

    /// Inputs as the denoising equations use them: weights that the format quantises are replaced
    /// by their quantised and dequantised values.
    pub(super) fn inputs_rounded_to_weight_format(&self, inputs: &Tensors) -> Tensors {
        let mut inputs = inputs.clone();
        let Some(dequantized) = self.weights.rounding_function_of_format() else { return inputs };
        for spec in self
            .denoise_input_specs()
            .iter()
            .filter(|spec| fp8::is_layer_projection_to_quantise(spec))
        {
            let tensor = dequantized(inputs.tensor(spec.input_name));
            inputs.insert(spec.input_name, tensor);
        }
        inputs
    }

    /// Bytes of an input tensor in the format in which an implementation must read it from memory.
    fn bytes_read_in_weight_format(&self, spec: &ExpertInputSpec) -> u64 {
        match self.weights {
            LayerWeightFormat::Fp8 if fp8::is_layer_projection_to_quantise(spec) => {
                fp8::bytes_as_fp8_with_exponents(spec)
            }
            LayerWeightFormat::Int4 if fp8::is_layer_projection_to_quantise(spec) => {
                int4::bytes_as_int4_with_scales(spec)
            }
            _ => spec.unquantised_bytes(),
        }
    }

    /// Seeded inputs of the denoising problem without the time `t`. Consecutive problems with the
    /// same seed share tensors, because the half billion weights are the same for every horizon,
    /// prefix and number of steps.
    pub(super) fn draw_or_reuse_inputs(&self, seed: u64) -> Tensors {
        let specs = self.denoise_input_specs();
        let mut last = LAST_DRAWN_INPUTS.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inputs = match last.take() {
            Some((of, known, tensors)) if of == seed => {
                let both = specs.iter().filter(|spec| known.contains(spec));
                tensors
                    .select_tensors_by_name(&both.map(|spec| spec.input_name).collect::<Vec<_>>())
            }
            _ => Tensors::new(),
        };
        for spec in &specs {
            if inputs.get(spec.input_name).is_none() {
                inputs.insert(spec.input_name, spec.draw_tensor_from_seed(seed));
            }
        }
        *last = Some((seed, specs, inputs.clone()));
        inputs
    }

    /// Draws only the inputs `names` from another seed; the half billion other elements are not
    /// drawn again.
    pub(super) fn draw_named_inputs_only(&self, names: &[&str], seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for spec in
            self.denoise_input_specs().iter().filter(|spec| names.contains(&spec.input_name))
        {
            inputs.insert(spec.input_name, spec.draw_tensor_from_seed(seed));
        }
        inputs
    }

    /// Number of FLOPs of all layer projections in one denoising step.
    pub fn projection_flops_per_step(&self) -> u64 {
        2 * self.action_tokens as u64 * self.model.projection_weights_of_all_layers()
    }

    /// Number of FLOPs of both attention GEMMs of all layers in one denoising step.
    pub fn attention_flops_per_step(&self) -> u64 {
        let ExpertDimensions { layer_count: depth, query_heads: heads, head_dim, .. } = self.model;
        4 * (self.action_tokens * heads) as u64
            * self.prefix_and_horizon_tokens() as u64
            * (head_dim * depth) as u64
    }

    /// Work (FLOPs and bytes) of computing `steps` velocities at different denoising times.
    pub(super) fn work_of_denoising_steps(&self, steps: usize) -> Work {
        let ExpertDimensions {
            model_width: width,
            layer_count: depth,
            feed_forward_width: mlp,
            query_heads: heads,
            head_dim,
            ..
        } = self.model;
        let (steps, s) = (steps as u64, self.action_tokens as u64);
        // The style GEMMs depend on the time only and multiply one row a denoising step; the
        // actions pass through two GEMMs with 32 columns.
        let styles = 2 * (self.model.style_matrix_elements() + self.model.time_matrix_elements());
        let actions = 4 * s * (VALUES_PER_ACTION * width) as u64;
        let matmul = steps
            * (self.projection_flops_per_step()
                + self.attention_flops_per_step()
                + styles
                + actions);
        // A norm counts 6 operations an element: square, sum, 1/rms, 1 + scale, product, shift.
        // RoPE counts two products and one sum for each element.
        let norms = 6 * s * width as u64 * (2 * depth + 1) as u64;
        let rope = 3 * s * ((heads + 1) * head_dim * depth) as u64;
        // Softmax counts six operations a score: scale, maximum, difference, exponential, sum,
        // quotient. GELU times `up` counts ten operations an element, by its tanh formula; each
        // gated residual counts two.
        let softmax = 6 * s * heads as u64 * self.prefix_and_horizon_tokens() as u64 * depth as u64;
        let gelu = 10 * s * (mlp * depth) as u64;
        let residuals = 4 * s * (width * depth) as u64;
        let euler = 2 * s * VALUES_PER_ACTION as u64;
        let vector = steps * (norms + rope + softmax + gelu + residuals + euler);
        // The 623 MB of bf16 layer weights fit in no cache, so a denoising step reads them and the
        // key-value caches from memory once. All inputs except layer weights and key-value caches
        // are read once for all denoising steps: styles are computed for all steps at once, and the
        // rest stays in cache.
        let read = self
            .denoise_input_specs()
            .iter()
            .map(|spec| {
                self.bytes_read_in_weight_format(spec)
                    * if spec.read_frequency == InputReadFrequency::ReadInEachDenoisingStep {
                        steps
                    } else {
                        1
                    }
            })
            .sum();
        let write = s * (VALUES_PER_ACTION * Dtype::F32.bytes_per_element()) as u64;
        Work::bytes(read, write).with_flops(FlopUnit::Matmul, self.dtype, matmul).with_flops(
            FlopUnit::VectorArithmetic,
            Dtype::F32,
            vector,
        )
    }

    /// Bytes of host memory: inputs, outputs, the reference at its peak, and one layer's attention
    /// scores, which an implementation may store.
    pub(super) fn estimate_denoise_host_bytes(&self, steps: usize) -> u64 {
        let ExpertDimensions {
            model_width: width,
            layer_count: depth,
            feed_forward_width: mlp,
            query_heads: heads,
            head_dim,
            ..
        } = self.model;
        let inputs: u64 =
            self.denoise_input_specs().iter().map(ExpertInputSpec::unquantised_bytes).sum();
        // Quantised formats need host memory for dequantised weights besides the inputs, and for
        // f32 copies if an implementation computes in f32.
        let quantized = match self.weights {
            LayerWeightFormat::SameDtypeAsActivations => 0,
            LayerWeightFormat::Fp8 | LayerWeightFormat::Int4 => 3 * inputs,
        };
        // The fp64 reference holds the styles of all denoising steps and the activations of one
        // layer; its blocks of weights and scores take only a few MB.
        let styles = steps * (2 * depth + 1) * 3 * width;
        let rows = self.action_tokens * (4 * width + 2 * heads * head_dim + 3 * mlp)
            + 4 * self.prefix_and_horizon_tokens() * head_dim;
        let scores = self.action_tokens
            * heads
            * self.prefix_and_horizon_tokens()
            * Dtype::F32.bytes_per_element();
        let outputs = 2 * self.action_tokens * VALUES_PER_ACTION * Dtype::F64.bytes_per_element();
        inputs
            + quantized
            + (Dtype::F64.bytes_per_element() * (styles + rows) + scores + outputs) as u64
    }
}
