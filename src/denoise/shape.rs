//! The sizes of a problem of the family, with the inputs, work and memory that follow from them.

use std::sync::{Mutex, PoisonError};

use kernelgate::workload::{AxisError, Dtype, Point, Tensor, Tensors, Unit, Work};

use super::fp8;
use super::int4;
use super::model::{ACTION_COLUMNS, Model, ReadTime, TensorSpec};

/// The most tokens of horizon or prefix, and the most steps: far more than any policy has, and few
/// enough that no count overflows 64 bits.
pub(super) const MAX_TOKENS_AND_STEPS: usize = 1 << 16;

/// The inputs that were drawn last: their seed, their specifications and their tensors.
static LAST: Mutex<Option<(u64, Vec<TensorSpec>, Tensors)>> = Mutex::new(None);

/// Format in which an implementation gets the matrices that each step reads. The inputs are not
/// quantised: an implementation quantises them once, while it prepares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightFormat {
    /// The dtype of the activations.
    Same,
    /// Codes of e4m3 and a power of two for each column.
    Fp8,
    /// Numbers of four bits and a scale for each 128 of k of a column.
    Int4,
}

impl WeightFormat {
    /// The weights that a quantised matrix stands for.
    fn dequantized(self) -> Option<fn(&Tensor) -> Tensor> {
        match self {
            Self::Same => None,
            Self::Fp8 => Some(fp8::dequantized),
            Self::Int4 => Some(int4::dequantized),
        }
    }
}

/// Parameters that the step and the loop share: a model on a horizon and a prefix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertShape {
    /// The expert.
    pub model: Model,
    /// Horizon: rows of `x`.
    pub s: usize,
    /// Prefix: rows of the caches of a layer.
    pub p: usize,
    /// Dtype of activations, caches, and of all matrices but those of `weights`.
    pub dtype: Dtype,
    /// Format of the weights of the layers' projections.
    pub weights: WeightFormat,
}

impl ExpertShape {
    pub(super) fn bind(point: &Point) -> Result<Self, AxisError> {
        let model = Model::model_of_name(point.word("model")?).expect("the axis lists the models");
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

    /// Tokens that a query sees.
    pub fn visible_tokens(&self) -> usize {
        self.p + self.s
    }

    pub(super) fn input_specs(&self) -> Vec<TensorSpec> {
        self.model.tensors(self.s, self.p, self.dtype)
    }

    /// Inputs as the mathematics takes them: quantised weights as the numbers that they stand for.
    pub(super) fn effective_inputs(&self, inputs: &Tensors) -> Tensors {
        let mut inputs = inputs.clone();
        let Some(dequantized) = self.weights.dequantized() else { return inputs };
        for spec in self.input_specs().iter().filter(|spec| fp8::is_quantized(spec)) {
            let tensor = dequantized(inputs.tensor(spec.name));
            inputs.insert(spec.name, tensor);
        }
        inputs
    }

    /// Bytes of an input that have to be read.
    fn input_bytes_to_read(&self, spec: &TensorSpec) -> u64 {
        match self.weights {
            WeightFormat::Fp8 if fp8::is_quantized(spec) => fp8::bytes(spec),
            WeightFormat::Int4 if fp8::is_quantized(spec) => int4::bytes(spec),
            _ => spec.bytes(),
        }
    }

    /// Seeded inputs without `t`. Problems share tensors with the one before, because the half
    /// billion weights are the same for every horizon, prefix and number of steps.
    pub(super) fn inputs(&self, seed: u64) -> Tensors {
        let specs = self.input_specs();
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Some of the inputs, of another seed: of half a billion elements only those that are asked
    /// for are drawn.
    pub(super) fn redraw_selected_inputs(&self, names: &[&str], seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for spec in self.input_specs().iter().filter(|spec| names.contains(&spec.name)) {
            inputs.insert(spec.name, spec.draw_tensor(seed));
        }
        inputs
    }

    /// Operations of the layers' projections in one step.
    pub fn projection_flops(&self) -> u64 {
        2 * self.s as u64 * self.model.layer_weight_elements()
    }

    /// Operations of both attention GEMMs in one step.
    pub fn attention_flops(&self) -> u64 {
        let Model { depth, heads, head_dim, .. } = self.model;
        4 * (self.s * heads) as u64 * self.visible_tokens() as u64 * (head_dim * depth) as u64
    }

    /// Work of `steps` velocities at different times.
    pub(super) fn work(&self, steps: usize) -> Work {
        let Model { width, depth, mlp, heads, head_dim, .. } = self.model;
        let (steps, s) = (steps as u64, self.s as u64);
        // The styles depend on the time only, one row a step; the actions pass 32 columns twice.
        let styles = 2 * (self.model.style_weight_elements() + self.model.time_weight_elements());
        let actions = 4 * s * (ACTION_COLUMNS * width) as u64;
        let matmul = steps * (self.projection_flops() + self.attention_flops() + styles + actions);
        // An element of a norm: square, sum, 1/rms, 1 + scale, product, shift. An element of rope:
        // two products, one sum.
        let norms = 6 * s * width as u64 * (2 * depth + 1) as u64;
        let rope = 3 * s * ((heads + 1) * head_dim * depth) as u64;
        // Softmax: scale, maximum, difference, exponential, sum, quotient. GELU by its formula,
        // times `up`. Gated residuals.
        let softmax = 6 * s * heads as u64 * self.visible_tokens() as u64 * depth as u64;
        let gelu = 10 * s * (mlp * depth) as u64;
        let residuals = 4 * s * (width * depth) as u64;
        let euler = 2 * s * ACTION_COLUMNS as u64;
        let vector = steps * (norms + rope + softmax + gelu + residuals + euler);
        // 623 MB of layer weights in bf16 fit on no chip: they pass once a step, and the caches
        // with them. Everything else is used at once for all steps (styles) or small enough
        // to stay.
        let read = self
            .input_specs()
            .iter()
            .map(|spec| {
                self.input_bytes_to_read(spec)
                    * if spec.read == ReadTime::EachStep { steps } else { 1 }
            })
            .sum();
        let write = s * (ACTION_COLUMNS * Dtype::F32.bytes()) as u64;
        Work::bytes(read, write).with_flops(Unit::Matmul, self.dtype, matmul).with_flops(
            Unit::Vector,
            Dtype::F32,
            vector,
        )
    }

    /// Inputs, outputs, the reference at its peak, and the scores of a layer, which an
    /// implementation may hold.
    pub(super) fn host_bytes(&self, steps: usize) -> u64 {
        let Model { width, depth, mlp, heads, head_dim, .. } = self.model;
        let inputs: u64 = self.input_specs().iter().map(TensorSpec::bytes).sum();
        // Dequantised weights besides the given ones, and their f32 copies for a computation in
        // f32.
        let quantized = match self.weights {
            WeightFormat::Same => 0,
            WeightFormat::Fp8 | WeightFormat::Int4 => 3 * inputs,
        };
        // The reference, in f64: the styles of all steps and the activations of a layer; its blocks
        // of weights and scores are a few MB.
        let styles = steps * (2 * depth + 1) * 3 * width;
        let rows = self.s * (4 * width + 2 * heads * head_dim + 3 * mlp)
            + 4 * self.visible_tokens() * head_dim;
        let scores = self.s * heads * self.visible_tokens() * Dtype::F32.bytes();
        let outputs = 2 * self.s * ACTION_COLUMNS * Dtype::F64.bytes();
        inputs + quantized + (Dtype::F64.bytes() * (styles + rows) + scores + outputs) as u64
    }
}
