//! Denoising of a robot policy's actions by the action expert of pi0.5: workloads for one Euler
//! step and for the whole loop.
//!
//! The definition of the denoising workloads follows `gemma.py`, `pi0.py` and `pi0_pytorch.py` of
//! openpi. The action expert is a transformer with multi-query attention over a horizon of noisy
//! actions. The denoising time modulates every norm (adaRMS), and attention sees a cached prefix
//! besides the actions.
//!
//! Equations of one denoising step at time t, for actions `x [S, 32]`, with `positions = P..P+S`:
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
//! `steps` steps, with `dt = -1/steps`. The denoising loop never updates the cached keys and values
//! of the prefix. Every denoising implementation computes the time and its embedding in fp64 and
//! keeps the state `x` in fp32.
//!
//! With fp8 weights, inputs and computations are those of bf16, except for the weights `W` of the
//! seven projections of each layer. For fp8, each column of `W` is divided by the least power of
//! two that brings its largest element to 448 or below, rounded to e4m3, and multiplied again. An
//! implementation quantises the weights while a case is prepared, not in timed launches; the
//! reference computes with the quantised weights. The tolerance excludes the error of quantising
//! the weights, because it depends on the weights, not on the implementation. Quantising random
//! weights costs more accuracy than quantising trained weights; docs/results/denoise.md has
//! figures.
//!
//! With int4 weights, each column of `W` has a scale for each group of 128 of k: a seventh of the
//! group's largest element, rounded to five significant bits. For int4, elements of `W` are divided
//! by their group's scale, rounded to integers from -7 to 7, and multiplied by the scale again.
//!
//! Denoising tensors are row-major and matrices are `[in, out]`, so that `y = x·W`; the matrices of
//! all layers are stacked. The letters of the denoising shapes: W width, D depth, M MLP width, H
//! query heads, E head dimension, S horizon, P prefix. Query head h of a row of q is the elements
//! `h·E..(h+1)·E` of the row. Matrices and caches have the dtype of the problem; biases, `x` and
//! `t` are always f32.
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

use super::model::VALUES_PER_ACTION;
use super::reference::{self, ReferenceActionExpert};
pub use super::shape::{DenoiseParameters, LayerWeightFormat};
use kernelgate::suite::ProblemsAlongEachAxis;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, Problem, Tensors, Tolerance, Work, Workload,
};

const EXPERT_MODEL_AXIS: Axis = Axis::one_of(
    "model",
    &["pi05", "pi05_layer", "tiny"],
    "the expert of pi0.5 (430 M weights), one layer of it, or a small one for exact tests",
);
const S: Axis = Axis::number("s", "horizon: actions denoised together");
const P: Axis = Axis::number("p", "prefix: cached tokens, 968 with three images, 712 with two");
const EULER_STEPS_AXIS: Axis = Axis::number("steps", "Euler steps");
const DENOISE_DTYPE_AXIS: Axis = Axis::one_of(
    "dtype",
    &["f32", "bf16", "fp8", "int4"],
    "dtype of weights, activations and caches; fp8, int4: bf16, but the layers' weights in e4m3, or \
     in four bits in groups of 128; the state is always f32",
);

/// Denoising time t of the workload `denoise/step`: three of ten steps into the loop.
const TIME_OF_SINGLE_STEP: f32 = 0.7;
const MAX_DENOISE_LOOP_STEPS: usize = 1 << 10;

/// Workload of one denoising step, which computes a velocity from actions and a time.
pub const DENOISE_STEP_WORKLOAD: Workload<DenoiseStep> = Workload {
    name: "denoise/step",
    about: "one step of the pi0.5 action expert: actions and time to velocity",
    revision: 1,
    axes: &[EXPERT_MODEL_AXIS, S, P, DENOISE_DTYPE_AXIS],
    default_selection_lines: &["model=pi05 s=50 p=968 dtype=f32"],
    accelerator_selection_lines: &["model=pi05 s=50 p=968 dtype=bf16"],
    thorough_selection_lines: &[
        "model=pi05 s=10,15,50 p=712,968 dtype=f32,bf16",
        "model=pi05 s=50 p=968 dtype=fp8,int4",
        "model=tiny s=7,50 p=13,968 dtype=f32,bf16,fp8,int4",
    ],
    bind: |point| Ok(DenoiseStep { expert: DenoiseParameters::bind_denoise_axes(point)? }),
};

/// Workload of the whole denoising loop, which turns noise into actions in Euler steps.
pub const DENOISE_LOOP_WORKLOAD: Workload<DenoiseLoop> = Workload {
    name: "denoise/loop",
    about: "the denoise loop of the pi0.5 action expert: noise to actions in Euler steps",
    revision: 1,
    axes: &[EXPERT_MODEL_AXIS, S, P, EULER_STEPS_AXIS, DENOISE_DTYPE_AXIS],
    // On two CPU cores the full-size denoising loop takes about 3 s and its reference 9 s, so the
    // default selection for the CPU has the tiny model.
    default_selection_lines: &["model=tiny s=50 p=968 steps=10 dtype=f32"],
    accelerator_selection_lines: &["model=pi05 s=50 p=968 steps=10 dtype=bf16"],
    thorough_selection_lines: &[
        "model=pi05 s=10,50 p=712,968 steps=10 dtype=f32,bf16",
        "model=pi05 s=50 p=968 steps=5 dtype=bf16",
        "model=pi05 s=10 p=712 steps=10 dtype=fp8,int4",
        "model=pi05 s=50 p=968 steps=10 dtype=fp8,int4",
        "model=tiny s=7,50 p=13,968 steps=1,10 dtype=f32,bf16,fp8,int4",
    ],
    bind: |point| {
        let steps = point.number("steps")?;
        if steps > MAX_DENOISE_LOOP_STEPS {
            return Err(AxisError::InvalidCombinationOfValues(format!(
                "steps={steps}: up to {MAX_DENOISE_LOOP_STEPS}"
            )));
        }
        Ok(DenoiseLoop { expert: DenoiseParameters::bind_denoise_axes(point)?, euler_steps: steps })
    },
};

/// Names of the rows that the denoising scans time: the fastest own kernel, and cuBLASLt launches
/// in a CUDA graph.
const DENOISE_AXIS_SCAN_ROWS: &[&str] = &["cuda/graph", "cuda/persistent"];

/// Scan of one denoising step with a short horizon, after the prefix of two images instead of
/// three.
pub const DENOISE_STEP_SCAN: ProblemsAlongEachAxis = ProblemsAlongEachAxis {
    selection_lines: &["model=pi05 s=10 p=712 dtype=bf16"],
    default_implementations: DENOISE_AXIS_SCAN_ROWS,
};

/// Scan of the denoising loop over 1, 5 and 10 Euler steps, and with a short horizon.
pub const DENOISE_LOOP_SCAN: ProblemsAlongEachAxis = ProblemsAlongEachAxis {
    selection_lines: &[
        "model=pi05 s=50 p=968 steps=1,5,10 dtype=bf16",
        "model=pi05 s=10 p=712 steps=10 dtype=bf16",
    ],
    default_implementations: DENOISE_AXIS_SCAN_ROWS,
};

/// Problem `denoise/step`: computes `velocity [S, 32]` from `x [S, 32]` at time `t`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseStep {
    /// Model and shape.
    pub expert: DenoiseParameters,
}

impl Problem for DenoiseStep {
    fn inputs(&self, seed: u64) -> Tensors {
        self.expert.draw_or_reuse_inputs(seed).with_tensor("t", [1], vec![TIME_OF_SINGLE_STEP])
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let x =
            inputs.tensor("x").elements_to_f64(0, self.expert.action_tokens * VALUES_PER_ACTION);
        let times = inputs.tensor("t").elements_to_f64(0, 1);
        let inputs = self.expert.inputs_rounded_to_weight_format(inputs);
        let expert = ReferenceActionExpert::with_styles_of_times(&self.expert, &inputs, &times);
        vec![Expected::all(
            "velocity",
            [self.expert.action_tokens, VALUES_PER_ACTION],
            expert.reference_velocity(&x, 0),
        )]
    }

    fn redraw_inputs(&self, names: &[&str], seed: u64) -> Tensors {
        self.expert.draw_named_inputs_only(names, seed)
    }

    fn work(&self) -> Work {
        let mut work = self.expert.work_of_denoising_steps(1);
        work.min_read_bytes += Dtype::F32.bytes_per_element() as u64;
        work
    }

    fn tolerance(&self) -> Tolerance {
        match self.expert.dtype {
            // The measured f32 errors of a denoising step are 3.0e-6 for the full model and 9e-7
            // for the tiny one.
            Dtype::F32 => Tolerance { max_error: 2e-5, relative_l2: 2e-5 },
            // Rounding every activation of a denoising step to bf16 gives an error of 1.9e-2 for
            // the full model and up to 1.4e-2 for the tiny one. The smallest error of a denoising
            // step with a planted fault is 6e-2.
            _ => Tolerance { max_error: 6e-2, relative_l2: 5e-2 },
        }
    }

    fn host_memory_bytes(&self) -> u64 {
        self.expert.estimate_denoise_host_bytes(1)
    }
}

/// Problem `denoise/loop`: computes `actions [S, 32]` from noise `x [S, 32]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseLoop {
    /// Model and shape.
    pub expert: DenoiseParameters,
    /// Number of Euler steps.
    pub euler_steps: usize,
}

impl Problem for DenoiseLoop {
    fn inputs(&self, seed: u64) -> Tensors {
        self.expert.draw_or_reuse_inputs(seed)
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let x =
            inputs.tensor("x").elements_to_f64(0, self.expert.action_tokens * VALUES_PER_ACTION);
        let inputs = self.expert.inputs_rounded_to_weight_format(inputs);
        let expert = ReferenceActionExpert::with_styles_of_times(
            &self.expert,
            &inputs,
            &reference::times_of_denoising_steps_in_f64(self.euler_steps),
        );
        let actions = reference::integrate_by_euler_steps(self.euler_steps, x, |x, step| {
            expert.reference_velocity(x, step)
        });
        vec![Expected::all("actions", [self.expert.action_tokens, VALUES_PER_ACTION], actions)]
    }

    fn redraw_inputs(&self, names: &[&str], seed: u64) -> Tensors {
        self.expert.draw_named_inputs_only(names, seed)
    }

    fn work(&self) -> Work {
        self.expert.work_of_denoising_steps(self.euler_steps)
    }

    fn tolerance(&self) -> Tolerance {
        match self.expert.dtype {
            // The measured f32 errors of the denoising loop are 7.6e-7 for the full model and 7e-7
            // for the tiny one.
            Dtype::F32 => Tolerance { max_error: 5e-6, relative_l2: 5e-6 },
            // Rounding errors of the loop's steps average out: with every activation rounded to
            // bf16, they are 6.8e-3 for the full model and up to 4.8e-3 for the tiny one.
            _ => Tolerance { max_error: 2.5e-2, relative_l2: 2e-2 },
        }
    }

    fn host_memory_bytes(&self) -> u64 {
        self.expert.estimate_denoise_host_bytes(self.euler_steps)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
