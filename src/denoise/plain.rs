//! A second fp64 implementation of the action expert, against which tests compare the reference:
//! plain loops, token by token and head by head, without a library.
//!
//! The plain implementation can round activations as a bf16 implementation does, and it can contain
//! typical faults of implementations. Tests require that the tolerance accepts the plain
//! implementation with rounding and rejects the plain implementation with each planted fault.

use std::collections::BTreeMap;

use half::bf16;
use rayon::prelude::*;

use super::shape::DenoiseParameters;
use kernelgate::workload::Tensors;

/// A deliberate fault that tests plant in the plain implementation of the expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlantedExpertFault {
    /// No fault is planted, so the plain implementation computes correctly.
    NoFault,
    /// Planted fault: queries attend only to the prefix.
    AttentionIgnoresSuffix,
    /// Planted fault: queries attend to the suffix only up to their own position.
    CausalAttentionToSuffix,
    /// Planted fault: attention skips the last token of the prefix.
    LastPrefixTokenSkipped,
    /// Planted fault: the positions of the queries are one too large.
    QueryPositionsOneTooLarge,
    /// Planted fault: the norm computes `x·scale` instead of `x·(1 + scale)`.
    NormScaleWithoutOnePlus,
    /// Planted fault: the attention branch is added to the residual stream without its gate.
    UngatedAttentionBranch,
    /// Planted fault: the attention branch uses the style of the feed-forward branch.
    AttentionWithFeedForwardStyle,
    /// Planted fault: the feed-forward branch uses ReLU instead of GELU.
    ReluInsteadOfGelu,
    /// Planted fault: attention scores are divided by E instead of √E.
    ScoresDividedByHeadDim,
    /// Planted fault: the embedded time is t + 0.1 instead of t.
    TimeOneTenthTooLarge,
}

/// The plain fp64 implementation of the denoising action expert, for tests.
pub struct PlainLoopExpert {
    shape: DenoiseParameters,
    tensors: BTreeMap<String, Vec<f64>>,
    /// Whether activations are rounded to bf16 at the places where openpi's bf16 model rounds them.
    pub rounds_activations_to_bf16: bool,
    /// The fault that a test plants in the computation of the expert, or none.
    pub fault: PlantedExpertFault,
}

impl PlainLoopExpert {
    pub fn without_rounding_or_fault(shape: &DenoiseParameters, inputs: &Tensors) -> Self {
        let tensors = inputs
            .iter()
            .map(|(name, tensor)| (name.to_owned(), tensor.elements_to_f64(0, tensor.len())))
            .collect();
        Self {
            shape: *shape,
            tensors,
            rounds_activations_to_bf16: false,
            fault: PlantedExpertFault::NoFault,
        }
    }

    fn round_to_bf16_if_enabled(&self, x: f64) -> f64 {
        if self.rounds_activations_to_bf16 { bf16::from_f64(x).to_f64() } else { x }
    }

    /// Multiplies one row of activations by a layer's weight matrix in plain loops.
    fn multiply_row_by_layer_matrix(
        &self,
        x: &[f64],
        name: &str,
        layer: usize,
        columns: usize,
    ) -> Vec<f64> {
        let matrix = &self.tensors[name][layer * x.len() * columns..];
        let mut y = vec![0.0; columns];
        for i in 0..x.len() {
            for j in 0..columns {
                y[j] += x[i] * matrix[i * columns + j];
            }
        }
        y.into_iter().map(|y| self.round_to_bf16_if_enabled(y)).collect()
    }

    fn add_layer_bias_and_round(&self, y: Vec<f64>, bias: &str, layer: usize) -> Vec<f64> {
        let bias = &self.tensors[bias][layer * y.len()..];
        y.iter().zip(bias).map(|(y, b)| self.round_to_bf16_if_enabled(y + b)).collect()
    }

    fn silu_and_round(&self, x: Vec<f64>) -> Vec<f64> {
        x.iter().map(|x| self.round_to_bf16_if_enabled(x / (1.0 + (-x).exp()))).collect()
    }

    fn ada_rms_norm_and_round(&self, x: &[f64], style: &[f64]) -> Vec<f64> {
        let w = x.len();
        let mut square = 0.0;
        for x in x {
            square += x * x;
        }
        let one = if self.fault == PlantedExpertFault::NormScaleWithoutOnePlus { 0.0 } else { 1.0 };
        (0..w)
            .map(|i| {
                self.round_to_bf16_if_enabled(
                    x[i] / (square / w as f64 + 1e-6).sqrt() * (one + style[i]) + style[w + i],
                )
            })
            .collect()
    }

    fn rope_and_round(&self, x: &[f64], position: usize) -> Vec<f64> {
        let e = x.len();
        let angle =
            |i: usize| position as f64 * (1e4f64).powf(-2.0 * (i % (e / 2)) as f64 / e as f64);
        let other = |i: usize| if i < e / 2 { -x[i + e / 2] } else { x[i - e / 2] };
        (0..e)
            .map(|i| {
                self.round_to_bf16_if_enabled(x[i] * angle(i).cos() + other(i) * angle(i).sin())
            })
            .collect()
    }

    /// Computes the vector `[width]` that conditions the style layers on time `t`: a sinusoidal
    /// embedding of `t` and two linear layers with SiLU.
    fn time_condition_vector(&self, t: f64) -> Vec<f64> {
        let w = self.shape.model.model_width;
        let t = if self.fault == PlantedExpertFault::TimeOneTenthTooLarge { t + 0.1 } else { t };
        let mut embedding = vec![0.0; w];
        for i in 0..w / 2 {
            let period = 4e-3 * (4.0f64 / 4e-3).powf(i as f64 / (w as f64 / 2.0 - 1.0));
            embedding[i] =
                self.round_to_bf16_if_enabled((2.0 * std::f64::consts::PI * t / period).sin());
            embedding[w / 2 + i] =
                self.round_to_bf16_if_enabled((2.0 * std::f64::consts::PI * t / period).cos());
        }
        let hidden = self.silu_and_round(self.add_layer_bias_and_round(
            self.multiply_row_by_layer_matrix(&embedding, "time_in", 0, w),
            "time_in_bias",
            0,
        ));
        self.silu_and_round(self.add_layer_bias_and_round(
            self.multiply_row_by_layer_matrix(&hidden, "time_out", 0, w),
            "time_out_bias",
            0,
        ))
    }

    /// Computes the hidden row `[width]` after the MLP of a layer, which is the row `h` plus the
    /// gated MLP branch of the normalised `h`. The slice `style` holds scale, shift and gate of the
    /// layer's second norm.
    fn add_gated_mlp_branch(&self, layer: usize, h: &[f64], style: &[f64]) -> Vec<f64> {
        let (w, m) = (self.shape.model.model_width, self.shape.model.feed_forward_width);
        let y = self.ada_rms_norm_and_round(h, style);
        let (gates, ups) = (
            self.multiply_row_by_layer_matrix(&y, "gate_proj", layer, m),
            self.multiply_row_by_layer_matrix(&y, "up_proj", layer, m),
        );
        let inner: Vec<f64> = (0..m)
            .map(|j| {
                self.round_to_bf16_if_enabled(
                    self.round_to_bf16_if_enabled(self.gelu_or_planted_relu(gates[j])) * ups[j],
                )
            })
            .collect();
        let branch = self.multiply_row_by_layer_matrix(&inner, "down_proj", layer, w);
        (0..w).map(|j| self.round_to_bf16_if_enabled(h[j] + style[2 * w + j] * branch[j])).collect()
    }

    /// Computes the velocity `[S, 32]` of actions `x [S, 32]` at time `t` in plain loops.
    pub fn velocity_by_plain_loops(&self, x: &[f64], t: f64) -> Vec<f64> {
        let DenoiseParameters { model, action_tokens: s, prefix_tokens: p, .. } = self.shape;
        let (w, e) = (model.model_width, model.head_dim);
        let cond = self.time_condition_vector(t);
        let style = |name: &str, layer: usize| {
            self.add_layer_bias_and_round(
                self.multiply_row_by_layer_matrix(&cond, name, layer, 3 * w),
                &format!("{name}_bias"),
                layer,
            )
        };

        let mut h: Vec<Vec<f64>> = x
            .chunks(32)
            .map(|x| {
                self.add_layer_bias_and_round(
                    self.multiply_row_by_layer_matrix(x, "action_in", 0, w),
                    "action_in_bias",
                    0,
                )
            })
            .collect();
        for layer in 0..model.layer_count {
            let first = style(
                if self.fault == PlantedExpertFault::AttentionWithFeedForwardStyle {
                    "style2"
                } else {
                    "style1"
                },
                layer,
            );
            let second = style("style2", layer);
            let y: Vec<Vec<f64>> =
                h.par_iter().map(|h| self.ada_rms_norm_and_round(h, &first)).collect();
            let keys: Vec<Vec<f64>> = y
                .par_iter()
                .enumerate()
                .map(|(i, y)| {
                    self.rope_and_round(
                        &self.multiply_row_by_layer_matrix(y, "k_proj", layer, e),
                        p + i,
                    )
                })
                .collect();
            let values: Vec<Vec<f64>> = y
                .par_iter()
                .map(|y| self.multiply_row_by_layer_matrix(y, "v_proj", layer, e))
                .collect();
            h = (0..s)
                .into_par_iter()
                .map(|i| {
                    let attended = self.attention_of_suffix_token(layer, i, &y[i], &keys, &values);
                    let branch = self.multiply_row_by_layer_matrix(&attended, "o_proj", layer, w);
                    let gate = |j: usize| {
                        if self.fault == PlantedExpertFault::UngatedAttentionBranch {
                            1.0
                        } else {
                            first[2 * w + j]
                        }
                    };
                    let h: Vec<f64> = (0..w)
                        .map(|j| self.round_to_bf16_if_enabled(h[i][j] + gate(j) * branch[j]))
                        .collect();
                    self.add_gated_mlp_branch(layer, &h, &second)
                })
                .collect();
        }
        let last = style("final_style", 0);
        let exact = Self { rounds_activations_to_bf16: false, tensors: BTreeMap::new(), ..*self };
        let bias = &self.tensors["action_out_bias"];
        let out = &self.tensors["action_out"];
        h.iter()
            .flat_map(|h| {
                let y = exact.ada_rms_norm_and_round(h, &last);
                (0..32).map(move |j| (0..w).map(|i| y[i] * out[i * 32 + j]).sum::<f64>() + bias[j])
            })
            .collect()
    }

    fn gelu_or_planted_relu(&self, x: f64) -> f64 {
        if self.fault == PlantedExpertFault::ReluInsteadOfGelu {
            return x.max(0.0);
        }
        0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x.powi(3))).tanh())
    }

    /// Computes the attention of all heads of the suffix token `i` over prefix and suffix, in plain
    /// loops.
    fn attention_of_suffix_token(
        &self,
        layer: usize,
        i: usize,
        y: &[f64],
        keys: &[Vec<f64>],
        values: &[Vec<f64>],
    ) -> Vec<f64> {
        let DenoiseParameters { model, action_tokens: s, prefix_tokens: p, .. } = self.shape;
        let e = model.head_dim;
        let q = self.multiply_row_by_layer_matrix(y, "q_proj", layer, model.query_heads * e);
        let late = usize::from(self.fault == PlantedExpertFault::QueryPositionsOneTooLarge);
        let cache = |name: &str, j: usize| {
            &self.tensors[name][(layer * p + j) * e..(layer * p + j + 1) * e]
        };
        let mut out = Vec::new();
        for head in 0..model.query_heads {
            let q = self.rope_and_round(&q[head * e..(head + 1) * e], p + i + late);
            let mut weights = vec![0.0; p + s];
            for (j, weight) in weights.iter_mut().enumerate() {
                let hidden = match self.fault {
                    PlantedExpertFault::AttentionIgnoresSuffix => j >= p,
                    PlantedExpertFault::CausalAttentionToSuffix => j > p + i,
                    PlantedExpertFault::LastPrefixTokenSkipped => j + 1 == p,
                    _ => false,
                };
                let key = if j < p { cache("k_cache", j) } else { &keys[j - p] };
                let dot: f64 = q.iter().zip(key).map(|(q, k)| q * k).sum();
                let divisor = if self.fault == PlantedExpertFault::ScoresDividedByHeadDim {
                    e as f64
                } else {
                    (e as f64).sqrt()
                };
                *weight = if hidden { f64::NEG_INFINITY } else { dot / divisor };
            }
            let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = weights.iter().map(|x| (x - largest).exp()).sum();
            let weights: Vec<f64> = weights
                .iter()
                .map(|x| self.round_to_bf16_if_enabled((x - largest).exp() / sum))
                .collect();
            let value = |j: usize| if j < p { cache("v_cache", j) } else { &values[j - p] };
            out.extend((0..e).map(|column| {
                self.round_to_bf16_if_enabled(
                    (0..p + s).map(|j| weights[j] * value(j)[column]).sum(),
                )
            }));
        }
        out
    }
}
