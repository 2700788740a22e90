//! Sizes of a problem of the denoise family, and the inputs, work and memory derived from them.

use std::sync::{Mutex, PoisonError};

use kernelgate::workload::{AxisError, Dtype, FlopUnit, Point, Tensor, Tensors, Work};

use super::fp8;
use super::int4;
use super::model::{ACTION_COLUMNS, ExpertModel, ReadTime, TensorSpec};

/// Maximum number of tokens in a horizon or prefix, and of steps: far more than any policy has, and
/// few enough that no count overflows 64 bits.
pub(super) const MAX_TOKENS_AND_STEPS: usize = 1 << 16;

/// Cache of the inputs that were drawn last: their seed, their specifications and their tensors.
static LAST_DRAWN_INPUTS: Mutex<Option<(u64, Vec<TensorSpec>, Tensors)>> = Mutex::new(None);

/// Format of the layers' projection matrices, which each step reads. The inputs are not quantised:
/// an implementation quantises them once, while it prepares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightFormat {
    /// The weights have the dtype of the activations.
    Same,
    /// Weights are codes of e4m3 with a power of two for each column.
    Fp8,
    /// Weights are four-bit numbers with a scale for each 128 of k of a column.
    Int4,
}

impl WeightFormat {
    /// Function that dequantises a matrix of this format.
    fn dequantize_function(self) -> Option<fn(&Tensor) -> Tensor> {
        match self {
            Self::Same => None,
            Self::Fp8 => Some(fp8::dequantized_tensor),
            Self::Int4 => Some(int4::dequantized_tensor),
        }
    }
}

/// Parameters that the step and the loop share: a model with a horizon and a prefix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActionExpertShape {
    pub model: ExpertModel,
    /// Horizon: number of rows of `x`.
    pub s: usize,
    /// Prefix: number of rows of the caches of a layer.
    pub p: usize,
    /// Dtype of activations, caches, and of all matrices except those with the format `weights`.
    pub dtype: Dtype,
    /// Format of the weights of the layers' projections.
    pub weights: WeightFormat,
}

impl ActionExpertShape {
    pub(super) fn bind(point: &Point) -> Result<Self, AxisError> {
        let model =
            ExpertModel::from_name(point.word("model")?).expect("the axis lists the models");
        let (dtype, weights) = match point.word("dtype")? {
            "fp8" => (Dtype::Bf16, WeightFormat::Fp8),
            "int4" => (Dtype::Bf16, WeightFormat::Int4),
            name => (Dtype::parse(name).expect("the axis lists dtypes"), WeightFormat::Same),
        };
        let (s, p) = (point.number("s")?, point.number("p")?);
        if s.max(p) > MAX_TOKENS_AND_STEPS {
            return Err(AxisError::Combination(format!(
                "s={s}, p={p}: up to {MAX_TOKENS_AND_STEPS} tokens each"
            )));
        }
        Ok(Self { model, s, p, dtype, weights })
    }

    /// Number of tokens that a query sees.
    pub fn visible_tokens(&self) -> usize {
        self.p + self.s
    }

    pub(super) fn input_specs(&self) -> Vec<TensorSpec> {
        self.model.input_tensors(self.s, self.p, self.dtype)
    }

    /// Inputs as the equations use them: quantised weights are replaced by the numbers that they
    /// represent.
    pub(super) fn dequantised_inputs(&self, inputs: &Tensors) -> Tensors {
        let mut inputs = inputs.clone();
        let Some(dequantized) = self.weights.dequantize_function() else { return inputs };
        for spec in self.input_specs().iter().filter(|spec| fp8::is_quantized(spec)) {
            let tensor = dequantized(inputs.tensor(spec.name));
            inputs.insert(spec.name, tensor);
        }
        inputs
    }

    /// Bytes of an input that must be read from memory.
    fn input_bytes_to_read(&self, spec: &TensorSpec) -> u64 {
        match self.weights {
            WeightFormat::Fp8 if fp8::is_quantized(spec) => fp8::fp8_tensor_bytes(spec),
            WeightFormat::Int4 if fp8::is_quantized(spec) => int4::int4_tensor_bytes(spec),
            _ => spec.bytes(),
        }
    }

    /// Seeded inputs without `t`. Consecutive problems share tensors, because the half billion
    /// weights are the same for every horizon, prefix and number of steps.
    pub(super) fn inputs(&self, seed: u64) -> Tensors {
        let specs = self.input_specs();
        let mut last = LAST_DRAWN_INPUTS.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inputs = match last.take() {
            Some((of, known, tensors)) if of == seed => {
                let both = specs.iter().filter(|spec| known.contains(spec));
                tensors.select_named(&both.map(|spec| spec.name).collect::<Vec<_>>())
            }
            _ => Tensors::new(),
        };
        for spec in &specs {
            if inputs.get(spec.name).is_none() {
                inputs.insert(spec.name, spec.draw_tensor(seed));
            }
        }
        *last = Some((seed, specs, inputs.clone()));
        inputs
    }

    /// Draws only the inputs `names` from another seed, which avoids drawing half a billion
    /// elements.
    pub(super) fn redraw_selected_inputs(&self, names: &[&str], seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for spec in self.input_specs().iter().filter(|spec| names.contains(&spec.name)) {
            inputs.insert(spec.name, spec.draw_tensor(seed));
        }
        inputs
    }

    /// Number of operations of the layers' projections in one step.
    pub fn projection_flops(&self) -> u64 {
        2 * self.s as u64 * self.model.layer_weight_elements()
    }

    /// Number of operations of both attention GEMMs in one step.
    pub fn attention_flops(&self) -> u64 {
        let ExpertModel { depth, heads, head_dim, .. } = self.model;
        4 * (self.s * heads) as u64 * self.visible_tokens() as u64 * (head_dim * depth) as u64
    }

    /// Work of computing `steps` velocities at different times.
    pub(super) fn work(&self, steps: usize) -> Work {
        let ExpertModel { width, depth, mlp, heads, head_dim, .. } = self.model;
        let (steps, s) = (steps as u64, self.s as u64);
        // The styles depend on the time only and take one row a step; the actions pass twice
        // through 32 columns.
        let styles = 2 * (self.model.style_weight_elements() + self.model.time_weight_elements());
        let actions = 4 * s * (ACTION_COLUMNS * width) as u64;
        let matmul = steps * (self.projection_flops() + self.attention_flops() + styles + actions);
        // A norm has 6 operations an element: square, sum, 1/rms, 1 + scale, product, shift. RoPE
        // has two products and one sum.
        let norms = 6 * s * width as u64 * (2 * depth + 1) as u64;
        let rope = 3 * s * ((heads + 1) * head_dim * depth) as u64;
        // Softmax has scale, maximum, difference, exponential, sum, quotient. GELU is counted by
        // its formula, times `up`; gated residuals are counted too.
        let softmax = 6 * s * heads as u64 * self.visible_tokens() as u64 * depth as u64;
        let gelu = 10 * s * (mlp * depth) as u64;
        let residuals = 4 * s * (width * depth) as u64;
        let euler = 2 * s * ACTION_COLUMNS as u64;
        let vector = steps * (norms + rope + softmax + gelu + residuals + euler);
        // The 623 MB of layer weights in bf16 fit on no chip: they are read once a step, as are the
        // caches. All other inputs are used at once for all steps (styles) or are small enough to
        // stay.
        let read = self
            .input_specs()
            .iter()
            .map(|spec| {
                self.input_bytes_to_read(spec)
                    * if spec.read == ReadTime::EachStep { steps } else { 1 }
            })
            .sum();
        let write = s * (ACTION_COLUMNS * Dtype::F32.bytes()) as u64;
        Work::bytes(read, write).with_flops(FlopUnit::Matmul, self.dtype, matmul).with_flops(
            FlopUnit::Vector,
            Dtype::F32,
            vector,
        )
    }

    /// Bytes of inputs, outputs, the reference at its peak, and the scores of a layer, which an
    /// implementation may store.
    pub(super) fn host_bytes(&self, steps: usize) -> u64 {
        let ExpertModel { width, depth, mlp, heads, head_dim, .. } = self.model;
        let inputs: u64 = self.input_specs().iter().map(TensorSpec::bytes).sum();
        // Dequantised weights exist besides the inputs, and have f32 copies for a computation in
        // f32.
        let quantized = match self.weights {
            WeightFormat::Same => 0,
            WeightFormat::Fp8 | WeightFormat::Int4 => 3 * inputs,
        };
        // The reference in f64 has the styles of all steps and the activations of a layer; its
        // blocks of weights and scores are a few MB.
        let styles = steps * (2 * depth + 1) * 3 * width;
        let rows = self.s * (4 * width + 2 * heads * head_dim + 3 * mlp)
            + 4 * self.visible_tokens() * head_dim;
        let scores = self.s * heads * self.visible_tokens() * Dtype::F32.bytes();
        let outputs = 2 * self.s * ACTION_COLUMNS * Dtype::F64.bytes();
        inputs + quantized + (Dtype::F64.bytes() * (styles + rows) + scores + outputs) as u64
    }
}
