//! Workload of attention backward: the gradients of q, k and v.
//!
//! The data that an implementation saves between forward and backward is excluded on purpose. The
//! inputs of the backward are q, k, v and the gradient of the output. An implementation computes
//! the output and the rows' normalisers itself, before the timed work.

use super::definition::{AXES, Attention, HeadTensors};
use super::reference::BLOCK_ROWS;
use crate::parallel;
use kernelgate::workload::{
    AxisError, Dtype, Expected, Problem, Symmetry, Tensors, Tolerance, Work, Workload,
};

/// Workload of attention backward, with the gradients of q, k and v as outputs.
pub const BACKWARD: Workload<AttentionBackward> = Workload {
    name: "attention/backward",
    about: "gradients of q, k and v from the gradient of the output; the forward is not timed",
    revision: 1,
    axes: AXES.split_at(AXES.len() - 1).0,
    default: &["s=512 d=64 mask=causal dtype=f32", "s=200 d=64 mask=causal dtype=f32 tokens=1600"],
    accelerator: &[
        "s=200 d=64 mask=causal dtype=bf16 inputs=outliers tokens=1600",
        // With twice this length, the slowest rung alone would take an eighth of the time of the
        // family's quick run.
        "s=512 d=128 mask=full dtype=bf16",
        "s=4096 d=128 mask=causal dtype=bf16",
    ],
    thorough: &[
        "s=1,7,65,129,200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 tokens=2000",
        "s=200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 inputs=outliers tokens=2000",
        "s=128,256,512,1024,2048,4096,8192,16384 d=64,128 mask=full,causal dtype=bf16",
        "s=128,256,512,1024,2048 d=64,128 mask=full,causal dtype=f32",
        "s=512,4096 d=64,128 mask=full,causal dtype=f16",
        // Selections with grouped heads: odd shapes, then those of NVIDIA's own tables.
        "s=1,63,129 d=64,128 mask=full,causal dtype=f32,bf16,f16 b=2 h=8 h_kv=2",
        "s=4096,8192,16384,32768 d=128 mask=full,causal dtype=bf16 b=1 h=64 h_kv=8",
    ],
    bind: |point| match Attention::bind(point)? {
        Attention { dtype: Dtype::Fp8, .. } => {
            Err(AxisError::Combination("fp8 has no gradients".to_owned()))
        }
        attention => Ok(AttentionBackward { attention }),
    },
};

/// Tolerance of attention gradients. Gradients have larger errors than the forward pass, because
/// the gradient of the scores and the saved output are rounded too. The rounding errors of
/// gradients are 5e-3 and 3e-3 in bf16. With outliers, whose gradients are differences of larger
/// numbers, five kernels reached a maximum error of 2.61e-2 in eight seeds on an H100.
pub(super) fn gradient_tolerance(dtype: Dtype, outliers: bool) -> Tolerance {
    match (dtype, outliers) {
        (Dtype::Bf16, false) => Tolerance { max_error: 1.5e-2, relative_l2: 9e-3 },
        (Dtype::Bf16, true) => Tolerance { max_error: 3.2e-2, relative_l2: 1.4e-2 },
        (Dtype::F16, false) => Tolerance { max_error: 1.9e-3, relative_l2: 1.1e-3 },
        (Dtype::F16, true) => Tolerance { max_error: 3.3e-3, relative_l2: 1.8e-3 },
        _ => Tolerance { max_error: 1e-5, relative_l2: 4e-6 },
    }
}

/// Problem `attention/backward`: computes `grad_q`, `grad_k` and `grad_v` from `q`, `k`, `v` and
/// `grad_out`. Keys, values and their gradients are `[b, h_kv, s, d]`, the other tensors `[b, h, s,
/// d]`. Query heads that share keys add up in the gradients of these keys and values.
///
/// The counted work is the backward alone: five GEMMs where the forward has two (2.5 times),
/// because scores are recomputed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionBackward {
    /// Shape, mask and dtype.
    pub attention: Attention,
}

impl Problem for AttentionBackward {
    fn inputs(&self, seed: u64) -> Tensors {
        self.attention.inputs(seed, &["q", "k", "v", "grad_out"])
    }

    /// For `grad_q`, rows are drawn from all heads. For `grad_k` and `grad_v`, whole heads are
    /// drawn, because each of their rows needs every query of its head.
    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let (attention, rows) = (&self.attention, self.attention.query_head_rows());
        let Attention { s, d, .. } = *attention;
        let heads = HeadTensors { attention, inputs };
        let (share, key_rows) = (attention.heads_per_key_head(), attention.selected_key_rows());
        let mut expected = Vec::new();
        for band in rows.position_bands() {
            expected.push(rows.expected_output_rows(
                "grad_q",
                &attention.shape(),
                rows.drawn_rows_of_band("grad_q", &band),
                |head, positions| {
                    let [k, v] = heads.visible_keys_and_values(head, positions);
                    let some = |positions| {
                        let [q, grad_out] = ["q", "grad_out"]
                            .map(|name| heads.selected_queries(name, head, positions));
                        attention.head().query_gradients(&q, &grad_out, positions, &k, &v)
                    };
                    positions.chunks(BLOCK_ROWS).flat_map(some).collect()
                },
            ));
        }
        let drawn = key_rows.drawn_head_indices("grad_k and grad_v", share);
        let gradients = parallel::parallel_map(drawn.len(), &|number| {
            let head = drawn[number];
            let of_query_head = |head| {
                let [q, grad_out, k, v] =
                    ["q", "grad_out", "k", "v"].map(|name| heads.first_positions(name, head, s));
                attention.head().key_value_gradients(&q, &grad_out, &k, &v)
            };
            (head * share..(head + 1) * share)
                .map(of_query_head)
                .reduce(|sum, next| {
                    (sum_of_vectors(sum.0, &next.0), sum_of_vectors(sum.1, &next.1))
                })
                .expect("a head of keys has queries")
        });
        let (grad_k, grad_v): (Vec<_>, Vec<_>) = gradients.into_iter().unzip();
        for (name, gradients) in [("grad_k", grad_k), ("grad_v", grad_v)] {
            for band in key_rows.position_bands() {
                let drawn_rows = drawn
                    .iter()
                    .flat_map(|head| band.clone().map(move |position| head * s + position))
                    .collect();
                let shape = attention.key_value_shape();
                expected.push(key_rows.expected_output_rows(
                    name,
                    &shape,
                    drawn_rows,
                    |head, positions| {
                        let of_head = &gradients
                            [drawn.binary_search(&head).expect("rows are of drawn heads")];
                        positions
                            .iter()
                            .flat_map(|position| &of_head[position * d..][..d])
                            .copied()
                            .collect()
                    },
                ));
            }
        }
        expected
    }

    /// The heads are independent of each other; with grouped heads, the sequences of the batch are.
    /// The gradients are linear in the gradient of the output.
    fn symmetries(&self) -> Vec<Symmetry> {
        let roll = if self.attention.heads_per_key_head() == 1 {
            Symmetry::Roll {
                inputs: &[("q", 1), ("k", 1), ("v", 1), ("grad_out", 1)],
                outputs: &[("grad_q", 1), ("grad_k", 1), ("grad_v", 1)],
            }
        } else {
            Symmetry::Roll {
                inputs: &[("q", 0), ("k", 0), ("v", 0), ("grad_out", 0)],
                outputs: &[("grad_q", 0), ("grad_k", 0), ("grad_v", 0)],
            }
        };
        vec![
            roll,
            Symmetry::Negate { inputs: &["grad_out"], outputs: &["grad_q", "grad_k", "grad_v"] },
        ]
    }

    fn work(&self) -> Work {
        let bytes = |queries, keys| self.attention.bytes(self.attention.dtype, queries, keys);
        self.attention.work(5, bytes(2, 2), bytes(1, 2))
    }

    fn tolerance(&self) -> Tolerance {
        gradient_tolerance(self.attention.dtype, self.attention.outliers)
    }

    fn host_bytes(&self) -> u64 {
        let rows = self.attention.query_head_rows();
        let keys = self.attention.selected_key_rows();
        let whole_heads = (keys.drawn_head_indices("", self.attention.heads_per_key_head()).len()
            * keys.s) as u64;
        // The gradients of the drawn heads are in memory twice while they are divided into bands.
        let tensors = self.attention.bytes(self.attention.dtype, 3, 4);
        self.attention.host_bytes(tensors, rows.max_drawn_elements() + 4 * whole_heads, 6)
    }
}

fn sum_of_vectors(mut sum: Vec<f64>, next: &[f64]) -> Vec<f64> {
    sum.iter_mut().zip(next).for_each(|(sum, next)| *sum += next);
    sum
}
