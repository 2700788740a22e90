//! Denoising of a robot policy's actions, as the action expert of pi0.5 does it: one Euler step and
//! the whole loop.
//!
//! The source is openpi: `gemma.py`, `pi0.py` and `pi0_pytorch.py`. The expert is a transformer
//! with multi-query attention over a horizon of noisy actions. Every norm is modulated by the time
//! (adaRMS), and attention sees a cached prefix besides the actions.
//!
//! Equations of one step at time t, for actions `x [S, 32]`, with `positions = P..P+S`:
//!
//! ```text
//! cond = silu(silu(embedding(t)·time_in + b)·time_out + b)
//! (scale, shift, gate) = cond·style + b
//! norm(h) = h·rsqrt(mean h² + 1e-6)·(1 + scale) + shift
//!
//! h = x·action_in + b
//! each layer:  y = norm1(h);  q, k, v = y·{q,k,v}_proj;  q, k = rope(q, k; positions)
//!              h += gate1·(softmax(q·[k_cache; k]ᵀ/√E)·[v_cache; v])·o_proj
//!              y = norm2(h);  h += gate2·(gelu_tanh(y·gate_proj)·(y·up_proj))·down_proj
//! velocity = final_norm(h)·action_out + b
//! ```
//!
//! The loop starts from the noise `x` at t = 1 and repeats `x += dt·velocity(x, t); t += dt` for
//! `steps` steps, with `dt = -1/steps`. The cached keys and values are not updated. In every
//! implementation the time and its embedding are fp64, the state `x` is fp32.
//!
//! With fp8 weights the inputs and all computations are those of bf16, except for the weights `W`
//! of the seven projections of each layer. Each column of these is divided by the least power of
//! two that brings its largest element to 448 or below, rounded to e4m3 (to nearest, ties to even),
//! and multiplied again. An implementation quantises while it prepares, as a deployment does once;
//! the reference computes with the quantised weights. The error of quantising itself is a property
//! of the weights, not of an implementation. The quantising error is larger for random weights than
//! for trained ones, because random weights have no structure that survives.
//! docs/results/denoise.md has figures.
//!
//! With int4 weights, `W` is quantised in groups: a group is 128 of k of a column (the last group
//! may be shorter), and its scale is a seventh of its largest element, rounded to five significant
//! bits. Elements are divided by the scale, rounded to whole numbers from -7 to 7, and multiplied
//! again.
//!
//! Tensors are row-major and matrices `[in, out]`, so that `y = x·W`; layers are stacked. The
//! letters are W width, D depth, M mlp width, H query heads, E head dimension, S horizon, P prefix.
//! Head h of a row of q is its elements `h·E..(h+1)·E`. Matrices and caches have the dtype of the
//! problem; biases, `x` and `t` are always f32.
//!
//! | input | shape | |
//! |---|---|---|
//! | `x` | [S, 32] | actions; the noise, in the loop |
//! | `t` | \[1\] | time, step only |
//! | `time_in`, `time_out` | [W, W] | with `time_in_bias`, `time_out_bias` \[W\] |
//! | `action_in` | [32, W] | with `action_in_bias` \[W\] |
//! | `style1`, `style2` | [D, W, 3W] | columns: scale, shift, gate |
//! | `style1_bias`, `style2_bias` | [D, 3W] | |
//! | `q_proj` | [D, W, H·E] | |
//! | `k_proj`, `v_proj` | [D, W, E] | |
//! | `o_proj` | [D, H·E, W] | |
//! | `gate_proj`, `up_proj` | [D, W, M] | |
//! | `down_proj` | [D, M, W] | |
//! | `k_cache`, `v_cache` | [D, P, E] | keys carry their rotation already |
//! | `final_style` | [W, 3W] | as the styles; the gate is not used |
//! | `final_style_bias` | \[3W\] | |
//! | `action_out` | [W, 32] | with `action_out_bias` \[32\] |
//!
//! | output | shape | |
//! |---|---|---|
//! | `velocity` | [S, 32], f32 | of the step |
//! | `actions` | [S, 32], f32 | of the loop |
//!
//! Some parts of the policy are excluded on purpose: images, language and the computation of the
//! prefix; the state token of pi0; a mask, because the suffix sees all of the prefix and all of
//! itself.

use super::model::ACTION_COLUMNS;
use super::reference::{self, ReferenceExpert};
pub use super::shape::{ActionExpertShape, WeightFormat};
use kernelgate::suite::ScanAlongAxes;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, Problem, Tensors, Tolerance, Work, Workload,
};

const MODEL_AXIS: Axis = Axis::one_of(
    "model",
    &["pi05", "pi05_layer", "tiny"],
    "the expert of pi0.5 (430 M weights), one layer of it, or a small one for exact tests",
);
const S: Axis = Axis::number("s", "horizon: actions denoised together");
const P: Axis = Axis::number("p", "prefix: cached tokens, 968 with three images, 712 with two");
const STEPS_AXIS: Axis = Axis::number("steps", "Euler steps");
const DTYPE_AXIS: Axis = Axis::one_of(
    "dtype",
    &["f32", "bf16", "fp8", "int4"],
    "dtype of weights, activations and caches; fp8, int4: bf16, but the layers' weights in e4m3, or \
     in four bits in groups of 128; the state is always f32",
);

/// Time of the single step in [`STEP_WORKLOAD`]: three of ten steps into the loop.
const SINGLE_STEP_TIME: f32 = 0.7;
const MAX_LOOP_STEPS: usize = 1 << 10;

/// Workload of one denoising step, which computes a velocity.
pub const STEP_WORKLOAD: Workload<DenoiseStep> = Workload {
    name: "denoise/step",
    about: "one step of the pi0.5 action expert: actions and time to velocity",
    revision: 1,
    axes: &[MODEL_AXIS, S, P, DTYPE_AXIS],
    default: &["model=pi05 s=50 p=968 dtype=f32"],
    accelerator: &["model=pi05 s=50 p=968 dtype=bf16"],
    thorough: &[
        "model=pi05 s=10,15,50 p=712,968 dtype=f32,bf16",
        "model=pi05 s=50 p=968 dtype=fp8,int4",
        "model=tiny s=7,50 p=13,968 dtype=f32,bf16,fp8,int4",
    ],
    bind: |point| Ok(DenoiseStep { expert: ActionExpertShape::bind(point)? }),
};

/// Workload of the whole denoising loop.
pub const LOOP_WORKLOAD: Workload<DenoiseLoop> = Workload {
    name: "denoise/loop",
    about: "the denoise loop of the pi0.5 action expert: noise to actions in Euler steps",
    revision: 1,
    axes: &[MODEL_AXIS, S, P, STEPS_AXIS, DTYPE_AXIS],
    // On two cores the full loop takes about 3 s and its reference 9 s, so the CPU runs it only in
    // the thorough selection.
    default: &["model=tiny s=50 p=968 steps=10 dtype=f32"],
    accelerator: &["model=pi05 s=50 p=968 steps=10 dtype=bf16"],
    thorough: &[
        "model=pi05 s=10,50 p=712,968 steps=10 dtype=f32,bf16",
        "model=pi05 s=50 p=968 steps=5 dtype=bf16",
        "model=pi05 s=10 p=712 steps=10 dtype=fp8,int4",
        "model=pi05 s=50 p=968 steps=10 dtype=fp8,int4",
        "model=tiny s=7,50 p=13,968 steps=1,10 dtype=f32,bf16,fp8,int4",
    ],
    bind: |point| {
        let steps = point.number("steps")?;
        if steps > MAX_LOOP_STEPS {
            return Err(AxisError::Combination(format!("steps={steps}: up to {MAX_LOOP_STEPS}")));
        }
        Ok(DenoiseLoop { expert: ActionExpertShape::bind(point)?, steps })
    },
};

/// Rows that the scan times: the fastest one and its competitor.
const SCAN_ROWS: &[&str] = &["cuda/graph", "cuda/persistent"];

/// Scan of a step with a short horizon after two images instead of three.
pub const STEP_SCAN: ScanAlongAxes =
    ScanAlongAxes { lines: &["model=pi05 s=10 p=712 dtype=bf16"], rows: SCAN_ROWS };

/// Scan of the loop over numbers of steps around ten, and with the short horizon.
pub const LOOP_SCAN: ScanAlongAxes = ScanAlongAxes {
    lines: &[
        "model=pi05 s=50 p=968 steps=1,5,10 dtype=bf16",
        "model=pi05 s=10 p=712 steps=10 dtype=bf16",
    ],
    rows: SCAN_ROWS,
};

/// Problem `denoise/step`: computes `velocity [S, 32]` from `x [S, 32]` at time `t`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseStep {
    /// Model and shape.
    pub expert: ActionExpertShape,
}

impl Problem for DenoiseStep {
    fn inputs(&self, seed: u64) -> Tensors {
        self.expert.inputs(seed).with("t", [1], vec![SINGLE_STEP_TIME])
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let x = inputs.tensor("x").to_f64(0, self.expert.s * ACTION_COLUMNS);
        let times = inputs.tensor("t").to_f64(0, 1);
        let inputs = self.expert.dequantised_inputs(inputs);
        let expert = ReferenceExpert::new(&self.expert, &inputs, &times);
        vec![Expected::all("velocity", [self.expert.s, ACTION_COLUMNS], expert.velocity(&x, 0))]
    }

    fn redraw(&self, names: &[&str], seed: u64) -> Tensors {
        self.expert.redraw_selected_inputs(names, seed)
    }

    fn work(&self) -> Work {
        let mut work = self.expert.work(1);
        work.read_bytes += Dtype::F32.bytes() as u64;
        work
    }

    fn tolerance(&self) -> Tolerance {
        match self.expert.dtype {
            // The measured errors are 3.0e-6 for the full model and 9e-7 for the small one.
            Dtype::F32 => Tolerance { max_error: 2e-5, relative_l2: 2e-5 },
            // Rounding every activation to bf16, with the residual stream, gives an error of 1.9e-2
            // for the full model and up to 1.4e-2 for the small one (by both measures). The
            // smallest error of the tested faults is 6e-2.
            _ => Tolerance { max_error: 6e-2, relative_l2: 5e-2 },
        }
    }

    fn host_bytes(&self) -> u64 {
        self.expert.host_bytes(1)
    }
}

/// Problem `denoise/loop`: computes `actions [S, 32]` from noise `x [S, 32]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseLoop {
    /// Model and shape.
    pub expert: ActionExpertShape,
    /// Number of Euler steps.
    pub steps: usize,
}

impl Problem for DenoiseLoop {
    fn inputs(&self, seed: u64) -> Tensors {
        self.expert.inputs(seed)
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let x = inputs.tensor("x").to_f64(0, self.expert.s * ACTION_COLUMNS);
        let inputs = self.expert.dequantised_inputs(inputs);
        let expert =
            ReferenceExpert::new(&self.expert, &inputs, &reference::denoising_times(self.steps));
        let actions = reference::euler_steps(self.steps, x, |x, step| expert.velocity(x, step));
        vec![Expected::all("actions", [self.expert.s, ACTION_COLUMNS], actions)]
    }

    fn redraw(&self, names: &[&str], seed: u64) -> Tensors {
        self.expert.redraw_selected_inputs(names, seed)
    }

    fn work(&self) -> Work {
        self.expert.work(self.steps)
    }

    fn tolerance(&self) -> Tolerance {
        match self.expert.dtype {
            // The measured errors are 7.6e-7 for the full model and 7e-7 for the small one.
            Dtype::F32 => Tolerance { max_error: 5e-6, relative_l2: 5e-6 },
            // Errors of the steps average out: with every activation rounded to bf16, 6.8e-3 for
            // the full model and up to 4.8e-3 for the small one.
            _ => Tolerance { max_error: 2.5e-2, relative_l2: 2e-2 },
        }
    }

    fn host_bytes(&self) -> u64 {
        self.expert.host_bytes(self.steps)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
