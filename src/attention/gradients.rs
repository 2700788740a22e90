//! Workload of attention backward: the gradients of q, k and v from the gradient of the attention
//! output.
//!
//! The workload does not prescribe which data an implementation saves between attention forward and
//! backward. The inputs of attention backward are q, k, v and the gradient of the attention output.
//! An implementation of attention backward computes the forward output and the softmax normaliser
//! of each row itself, before the timed work.

use super::definition::{ATTENTION_FORWARD_AXES, AttentionInputsByHead, AttentionParameters};
use super::reference::QUERY_ROWS_PER_BLOCK;
use crate::parallel;
use kernelgate::workload::{
    AxisError, Dtype, Expected, InputSymmetry, Problem, Tensors, Tolerance, Work, Workload,
};

/// Workload of attention backward, whose outputs are the gradients of q, k and v.
pub const BACKWARD: Workload<AttentionBackward> = Workload {
    name: "attention/backward",
    about: "gradients of q, k and v from the gradient of the output; the forward is not timed",
    revision: 1,
    axes: ATTENTION_FORWARD_AXES.split_at(ATTENTION_FORWARD_AXES.len() - 1).0,
    default_selection_lines: &[
        "s=512 d=64 mask=causal dtype=f32",
        "s=200 d=64 mask=causal dtype=f32 tokens=1600",
    ],
    accelerator_selection_lines: &[
        "s=200 d=64 mask=causal dtype=bf16 inputs=outliers tokens=1600",
        // At twice this sequence length, the slowest attention rung alone would take an eighth of
        // the time of the family's quick run.
        "s=512 d=128 mask=full dtype=bf16",
        "s=4096 d=128 mask=causal dtype=bf16",
    ],
    thorough_selection_lines: &[
        "s=1,7,65,129,200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 tokens=2000",
        "s=200,1000 d=64,128 mask=full,causal dtype=f32,bf16,f16 inputs=outliers tokens=2000",
        "s=128,256,512,1024,2048,4096,8192,16384 d=64,128 mask=full,causal dtype=bf16",
        "s=128,256,512,1024,2048 d=64,128 mask=full,causal dtype=f32",
        "s=512,4096 d=64,128 mask=full,causal dtype=f16",
        // Attention backward cases with grouped heads: first odd shapes, then the shapes of
        // NVIDIA's own tables.
        "s=1,63,129 d=64,128 mask=full,causal dtype=f32,bf16,f16 b=2 h=8 h_kv=2",
        "s=4096,8192,16384,32768 d=128 mask=full,causal dtype=bf16 b=1 h=64 h_kv=8",
    ],
    bind: |point| match AttentionParameters::bind_attention_axes(point)? {
        AttentionParameters { dtype: Dtype::Fp8, .. } => {
            Err(AxisError::InvalidCombinationOfValues("fp8 has no gradients".to_owned()))
        }
        attention => Ok(AttentionBackward { attention }),
    },
};

/// Tolerance of attention gradients. Attention gradients have larger rounding errors than the
/// forward output, because the gradient of the scores and the saved output are rounded too. In
/// bf16, the rounding errors of attention gradients are 5e-3 (maximum) and 3e-3 (relative L2),
/// measured by an emulation in a test. With outliers, gradients are differences of larger numbers:
/// on an H100, five kernels reached a maximum bf16 error of 2.61e-2 over eight seeds.
pub(super) fn attention_gradient_tolerance(dtype: Dtype, outliers: bool) -> Tolerance {
    match (dtype, outliers) {
        (Dtype::Bf16, false) => Tolerance { max_error: 1.5e-2, relative_l2: 9e-3 },
        (Dtype::Bf16, true) => Tolerance { max_error: 3.2e-2, relative_l2: 1.4e-2 },
        (Dtype::F16, false) => Tolerance { max_error: 1.9e-3, relative_l2: 1.1e-3 },
        (Dtype::F16, true) => Tolerance { max_error: 3.3e-3, relative_l2: 1.8e-3 },
        _ => Tolerance { max_error: 1e-5, relative_l2: 4e-6 },
    }
}

/// Problem `attention/backward`: computes `grad_q`, `grad_k` and `grad_v` from `q`, `k`, `v` and
/// `grad_out`. In attention backward, keys, values and their gradients are `[b, h_kv, s, d]`; all
/// other tensors are `[b, h, s, d]`. The gradients of a key head and value head are the sums of the
/// contributions of all query heads that share them.
///
/// The counted work of attention backward excludes the forward: five GEMMs where the forward has
/// two (2.5 times), because the scores are recomputed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionBackward {
    /// Shape, mask and element type of the attention.
    pub attention: AttentionParameters,
}

impl Problem for AttentionBackward {
    fn inputs(&self, seed: u64) -> Tensors {
        self.attention.draw_named_inputs(seed, &["q", "k", "v", "grad_out"])
    }

    /// For `grad_q`, the reference draws single rows from all heads. For `grad_k` and `grad_v`, the
    /// reference draws whole heads, because each row of these gradients depends on every query of
    /// its head.
    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let (attention, rows) = (&self.attention, self.attention.query_rows_of_all_heads());
        let AttentionParameters { queries_per_head: s, head_dim: d, .. } = *attention;
        let heads = AttentionInputsByHead { attention, inputs };
        let (share, key_rows) =
            (attention.query_heads_per_key_head(), attention.key_rows_of_all_heads());
        let mut expected = Vec::new();
        for band in rows.position_ranges_sampled_together() {
            expected.push(rows.expected_values_of_drawn_rows(
                "grad_q",
                &attention.query_and_output_shape(),
                rows.draw_rows_of_position_band("grad_q", &band),
                |head, positions| {
                    let [k, v] = heads.read_visible_keys_and_values(head, positions);
                    let some = |positions| {
                        let [q, grad_out] = ["q", "grad_out"]
                            .map(|name| heads.read_query_rows_at_positions(name, head, positions));
                        attention
                            .single_head_parameters()
                            .gradients_of_queries(&q, &grad_out, positions, &k, &v)
                    };
                    positions.chunks(QUERY_ROWS_PER_BLOCK).flat_map(some).collect()
                },
            ));
        }
        let drawn = key_rows.draw_whole_heads("grad_k and grad_v", share);
        let gradients = parallel::map_numbers_in_parallel(drawn.len(), &|number| {
            let head = drawn[number];
            let of_query_head = |head| {
                let [q, grad_out, k, v] = ["q", "grad_out", "k", "v"]
                    .map(|name| heads.read_first_positions_of_head(name, head, s));
                attention
                    .single_head_parameters()
                    .gradients_of_keys_and_values(&q, &grad_out, &k, &v)
            };
            (head * share..(head + 1) * share)
                .map(of_query_head)
                .reduce(|sum, next| {
                    (
                        add_vectors_elementwise(sum.0, &next.0),
                        add_vectors_elementwise(sum.1, &next.1),
                    )
                })
                .expect("a head of keys has queries")
        });
        let (grad_k, grad_v): (Vec<_>, Vec<_>) = gradients.into_iter().unzip();
        for (name, gradients) in [("grad_k", grad_k), ("grad_v", grad_v)] {
            for band in key_rows.position_ranges_sampled_together() {
                let drawn_rows = drawn
                    .iter()
                    .flat_map(|head| band.clone().map(move |position| head * s + position))
                    .collect();
                let shape = attention.key_value_shape();
                expected.push(key_rows.expected_values_of_drawn_rows(
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

    /// Permuting the heads of the inputs permutes the heads of the gradients; with grouped heads,
    /// this holds for the sequences of the batch. The attention gradients are linear in the
    /// gradient of the output, so negating `grad_out` negates all gradients.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        let roll = if self.attention.query_heads_per_key_head() == 1 {
            InputSymmetry::RotateAlongAxis {
                inputs_with_axes: &[("q", 1), ("k", 1), ("v", 1), ("grad_out", 1)],
                outputs_with_axes: &[("grad_q", 1), ("grad_k", 1), ("grad_v", 1)],
            }
        } else {
            InputSymmetry::RotateAlongAxis {
                inputs_with_axes: &[("q", 0), ("k", 0), ("v", 0), ("grad_out", 0)],
                outputs_with_axes: &[("grad_q", 0), ("grad_k", 0), ("grad_v", 0)],
            }
        };
        vec![
            roll,
            InputSymmetry::NegateInputsAndOutputs {
                inputs: &["grad_out"],
                outputs: &["grad_q", "grad_k", "grad_v"],
            },
        ]
    }

    fn work(&self) -> Work {
        let bytes = |queries, keys| {
            self.attention.bytes_of_tensors_like_queries_and_keys(
                self.attention.dtype,
                queries,
                keys,
            )
        };
        self.attention.work_of_gemms_and_softmax(5, bytes(2, 2), bytes(1, 2))
    }

    fn tolerance(&self) -> Tolerance {
        attention_gradient_tolerance(self.attention.dtype, self.attention.adds_input_outliers)
    }

    fn host_memory_bytes(&self) -> u64 {
        let rows = self.attention.query_rows_of_all_heads();
        let keys = self.attention.key_rows_of_all_heads();
        let whole_heads =
            (keys.draw_whole_heads("", self.attention.query_heads_per_key_head()).len()
                * keys.rows_per_head) as u64;
        // The fp64 reference holds the `grad_k` and `grad_v` of the drawn heads twice in host
        // memory while it divides them into bands of positions.
        let tensors =
            self.attention.bytes_of_tensors_like_queries_and_keys(self.attention.dtype, 3, 4);
        self.attention.estimate_host_bytes(tensors, rows.max_drawn_rows() + 4 * whole_heads, 6)
    }
}

fn add_vectors_elementwise(mut sum: Vec<f64>, next: &[f64]) -> Vec<f64> {
    sum.iter_mut().zip(next).for_each(|(sum, next)| *sum += next);
    sum
}
