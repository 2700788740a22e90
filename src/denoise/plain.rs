//! A second implementation of the action expert, against which the reference is tested: token by
//! token and head by head, without any library.
//!
//! The plain implementation can round as a bf16 implementation does, and it can contain typical
//! faults of implementations. The tolerance must accept the first and reject the second.

use std::collections::BTreeMap;

use half::bf16;
use rayon::prelude::*;

use super::shape::ActionExpertShape;
use kernelgate::workload::Tensors;

/// A deliberate fault in the plain implementation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlantedFault {
    /// The plain implementation has no deliberate fault.
    None,
    /// Fault: queries see only the prefix.
    NoSuffix,
    /// Queries see the suffix only up to their own position.
    Causal,
    /// Attention skips the last token of the prefix.
    ShortPrefix,
    /// Fault: positions of the queries start one too late.
    QueryPosition,
    /// The norm computes `x·scale` instead of `x·(1 + scale)`.
    ScaleWithoutOne,
    /// The attention branch has no gate.
    NoGate,
    /// The attention branch uses the style of the feed-forward.
    WrongStyle,
    /// The feed-forward uses ReLU instead of GELU.
    Relu,
    /// Fault: scores are divided by E instead of √E.
    ScoreScale,
    /// Fault: the embedded time is a tenth too early.
    WrongTime,
}

/// The plain implementation of the expert, with its tensors in f64.
pub struct PlainExpert {
    shape: ActionExpertShape,
    tensors: BTreeMap<String, Vec<f64>>,
    /// Whether activations are rounded to bf16 wherever openpi's bf16 model rounds them.
    pub rounded: bool,
    /// The deliberate fault in the computation.
    pub fault: PlantedFault,
}

impl PlainExpert {
    pub fn new(shape: &ActionExpertShape, inputs: &Tensors) -> Self {
        let tensors = inputs
            .iter()
            .map(|(name, tensor)| (name.to_owned(), tensor.to_f64(0, tensor.len())))
            .collect();
        Self { shape: *shape, tensors, rounded: false, fault: PlantedFault::None }
    }

    fn round(&self, x: f64) -> f64 {
        if self.rounded { bf16::from_f64(x).to_f64() } else { x }
    }

    /// Multiplies one row of activations by a weight matrix.
    fn matmul(&self, x: &[f64], name: &str, layer: usize, columns: usize) -> Vec<f64> {
        let matrix = &self.tensors[name][layer * x.len() * columns..];
        let mut y = vec![0.0; columns];
        for i in 0..x.len() {
            for j in 0..columns {
                y[j] += x[i] * matrix[i * columns + j];
            }
        }
        y.into_iter().map(|y| self.round(y)).collect()
    }

    fn add_bias(&self, y: Vec<f64>, bias: &str, layer: usize) -> Vec<f64> {
        let bias = &self.tensors[bias][layer * y.len()..];
        y.iter().zip(bias).map(|(y, b)| self.round(y + b)).collect()
    }

    fn silu(&self, x: Vec<f64>) -> Vec<f64> {
        x.iter().map(|x| self.round(x / (1.0 + (-x).exp()))).collect()
    }

    fn ada_rms_norm(&self, x: &[f64], style: &[f64]) -> Vec<f64> {
        let w = x.len();
        let mut square = 0.0;
        for x in x {
            square += x * x;
        }
        let one = if self.fault == PlantedFault::ScaleWithoutOne { 0.0 } else { 1.0 };
        (0..w)
            .map(|i| {
                self.round(
                    x[i] / (square / w as f64 + 1e-6).sqrt() * (one + style[i]) + style[w + i],
                )
            })
            .collect()
    }

    fn rotate_by_position(&self, x: &[f64], position: usize) -> Vec<f64> {
        let e = x.len();
        let angle =
            |i: usize| position as f64 * (1e4f64).powf(-2.0 * (i % (e / 2)) as f64 / e as f64);
        let other = |i: usize| if i < e / 2 { -x[i + e / 2] } else { x[i - e / 2] };
        (0..e).map(|i| self.round(x[i] * angle(i).cos() + other(i) * angle(i).sin())).collect()
    }

    /// Computes `velocity [S, 32]` of actions `x [S, 32]` at time `t`.
    pub fn velocity(&self, x: &[f64], t: f64) -> Vec<f64> {
        let ActionExpertShape { model, s, p, .. } = self.shape;
        let (w, e, m) = (model.width, model.head_dim, model.mlp);
        let t = if self.fault == PlantedFault::WrongTime { t + 0.1 } else { t };
        let mut embedding = vec![0.0; w];
        for i in 0..w / 2 {
            let period = 4e-3 * (4.0f64 / 4e-3).powf(i as f64 / (w as f64 / 2.0 - 1.0));
            embedding[i] = self.round((2.0 * std::f64::consts::PI * t / period).sin());
            embedding[w / 2 + i] = self.round((2.0 * std::f64::consts::PI * t / period).cos());
        }
        let hidden =
            self.silu(self.add_bias(self.matmul(&embedding, "time_in", 0, w), "time_in_bias", 0));
        let cond =
            self.silu(self.add_bias(self.matmul(&hidden, "time_out", 0, w), "time_out_bias", 0));
        let style = |name: &str, layer: usize| {
            self.add_bias(self.matmul(&cond, name, layer, 3 * w), &format!("{name}_bias"), layer)
        };

        let mut h: Vec<Vec<f64>> = x
            .chunks(32)
            .map(|x| self.add_bias(self.matmul(x, "action_in", 0, w), "action_in_bias", 0))
            .collect();
        for layer in 0..model.depth {
            let first = style(
                if self.fault == PlantedFault::WrongStyle { "style2" } else { "style1" },
                layer,
            );
            let second = style("style2", layer);
            let y: Vec<Vec<f64>> = h.par_iter().map(|h| self.ada_rms_norm(h, &first)).collect();
            let keys: Vec<Vec<f64>> = y
                .par_iter()
                .enumerate()
                .map(|(i, y)| self.rotate_by_position(&self.matmul(y, "k_proj", layer, e), p + i))
                .collect();
            let values: Vec<Vec<f64>> =
                y.par_iter().map(|y| self.matmul(y, "v_proj", layer, e)).collect();
            h = (0..s)
                .into_par_iter()
                .map(|i| {
                    let attended = self.attention_of_query(layer, i, &y[i], &keys, &values);
                    let branch = self.matmul(&attended, "o_proj", layer, w);
                    let gate = |j: usize| {
                        if self.fault == PlantedFault::NoGate { 1.0 } else { first[2 * w + j] }
                    };
                    let h: Vec<f64> =
                        (0..w).map(|j| self.round(h[i][j] + gate(j) * branch[j])).collect();
                    let y = self.ada_rms_norm(&h, &second);
                    let (gates, ups) = (
                        self.matmul(&y, "gate_proj", layer, m),
                        self.matmul(&y, "up_proj", layer, m),
                    );
                    let inner: Vec<f64> = (0..m)
                        .map(|j| self.round(self.round(self.mlp_activation(gates[j])) * ups[j]))
                        .collect();
                    let branch = self.matmul(&inner, "down_proj", layer, w);
                    (0..w).map(|j| self.round(h[j] + second[2 * w + j] * branch[j])).collect()
                })
                .collect();
        }
        let last = style("final_style", 0);
        let exact = Self { rounded: false, tensors: BTreeMap::new(), ..*self };
        let bias = &self.tensors["action_out_bias"];
        let out = &self.tensors["action_out"];
        h.iter()
            .flat_map(|h| {
                let y = exact.ada_rms_norm(h, &last);
                (0..32).map(move |j| (0..w).map(|i| y[i] * out[i * 32 + j]).sum::<f64>() + bias[j])
            })
            .collect()
    }

    fn mlp_activation(&self, x: f64) -> f64 {
        if self.fault == PlantedFault::Relu {
            return x.max(0.0);
        }
        0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x.powi(3))).tanh())
    }

    /// Computes the attention of all heads of query `i` over prefix and suffix.
    fn attention_of_query(
        &self,
        layer: usize,
        i: usize,
        y: &[f64],
        keys: &[Vec<f64>],
        values: &[Vec<f64>],
    ) -> Vec<f64> {
        let ActionExpertShape { model, s, p, .. } = self.shape;
        let e = model.head_dim;
        let q = self.matmul(y, "q_proj", layer, model.heads * e);
        let late = usize::from(self.fault == PlantedFault::QueryPosition);
        let cache = |name: &str, j: usize| {
            &self.tensors[name][(layer * p + j) * e..(layer * p + j + 1) * e]
        };
        let mut out = Vec::new();
        for head in 0..model.heads {
            let q = self.rotate_by_position(&q[head * e..(head + 1) * e], p + i + late);
            let mut weights = vec![0.0; p + s];
            for (j, weight) in weights.iter_mut().enumerate() {
                let hidden = match self.fault {
                    PlantedFault::NoSuffix => j >= p,
                    PlantedFault::Causal => j > p + i,
                    PlantedFault::ShortPrefix => j + 1 == p,
                    _ => false,
                };
                let key = if j < p { cache("k_cache", j) } else { &keys[j - p] };
                let dot: f64 = q.iter().zip(key).map(|(q, k)| q * k).sum();
                let divisor = if self.fault == PlantedFault::ScoreScale {
                    e as f64
                } else {
                    (e as f64).sqrt()
                };
                *weight = if hidden { f64::NEG_INFINITY } else { dot / divisor };
            }
            let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = weights.iter().map(|x| (x - largest).exp()).sum();
            let weights: Vec<f64> =
                weights.iter().map(|x| self.round((x - largest).exp() / sum)).collect();
            let value = |j: usize| if j < p { cache("v_cache", j) } else { &values[j - p] };
            out.extend(
                (0..e).map(|column| {
                    self.round((0..p + s).map(|j| weights[j] * value(j)[column]).sum())
                }),
            );
        }
        out
    }
}
