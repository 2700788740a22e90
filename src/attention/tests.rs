//! Tests of the attention reference against plain loops and finite differences, of its symmetries,
//! and of the tolerances against emulated rounding.

use std::collections::{BTreeMap, BTreeSet};

use half::{bf16, f16};
use proptest::prelude::*;
use rayon::prelude::*;

use super::*;
use crate::attention::gradients::*;
use crate::e4m3::encode_f32_as_e4m3;
use kernelgate::verify::{ComparisonWithReference, compare_outputs_with_reference};
use kernelgate::workload::{BenchEffort, SizeOfDefaultProblems};

/// Draws `len` samples of N(0, 1) in fp64 from a seed derived from `name`.
fn draw_normal_f64_values(name: &str, len: usize) -> Vec<f64> {
    random::normal_values(5, name, len).into_iter().map(f64::from).collect()
}

fn positions_from_zero_to(s: usize) -> Vec<usize> {
    (0..s).collect()
}

fn reference_output_at_all_positions(
    head: &SingleHeadParameters,
    q: &[f64],
    k: &[f64],
    v: &[f64],
) -> Vec<f64> {
    head.attention_output_of_queries(q, &positions_from_zero_to(q.len() / head.head_dim), k, v)
}

fn assert_largest_difference_within(
    a: &[f64],
    b: &[f64],
    tolerance: f64,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(a.len(), b.len());
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        prop_assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "at {index}: {a} against {b}");
    }
    Ok(())
}

/// Computes attention of one head by its definition in plain loops, one element at a time.
fn attention_output_by_plain_loops(
    head: &SingleHeadParameters,
    q: &[f64],
    k: &[f64],
    v: &[f64],
) -> Vec<f64> {
    let (d, s) = (head.head_dim, q.len() / head.head_dim);
    let mut out = vec![0.0; s * d];
    for i in 0..s {
        let keys = if head.causal { i + 1 } else { s };
        let weight = |j: usize| {
            ((0..d).map(|c| q[i * d + c] * k[j * d + c]).sum::<f64>() / (d as f64).sqrt()).exp()
        };
        let sum: f64 = (0..keys).map(weight).sum();
        for j in 0..keys {
            for c in 0..d {
                out[i * d + c] += weight(j) / sum * v[j * d + c];
            }
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_attention_reference_equals_plain_loops(s in 1usize..90, d in 1usize..9, causal: bool) {
        let head = SingleHeadParameters { head_dim: d, causal };
        let [q, k, v] = ["q", "k", "v"].map(|name| draw_normal_f64_values(name, s * d));
        assert_largest_difference_within(&reference_output_at_all_positions(&head, &q, &k, &v), &attention_output_by_plain_loops(&head, &q, &k, &v), 1e-12)?;
    }

    #[test]
    fn reference_attention_gradients_equal_finite_differences(s in 1usize..7, d in 1usize..5, causal: bool) {
        let head = SingleHeadParameters { head_dim: d, causal };
        let [q, k, v, grad_out] = ["q", "k", "v", "g"].map(|name| draw_normal_f64_values(name, s * d));
        let loss = |inputs: &[Vec<f64>; 3]| -> f64 {
            attention_output_by_plain_loops(&head, &inputs[0], &inputs[1], &inputs[2])
                .iter()
                .zip(&grad_out)
                .map(|(out, grad)| out * grad)
                .sum()
        };
        let grad_q = head.gradients_of_queries(&q, &grad_out, &positions_from_zero_to(s), &k, &v);
        let (grad_k, grad_v) = head.gradients_of_keys_and_values(&q, &grad_out, &k, &v);
        let inputs = [q, k, v];
        for (which, gradient) in [grad_q, grad_k, grad_v].iter().enumerate() {
            for (index, gradient) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut inputs = inputs.clone();
                    inputs[which][index] += by;
                    loss(&inputs)
                };
                let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                prop_assert!(
                    (gradient - slope).abs() < 1e-8,
                    "input {which} at {index}: {gradient} against {slope}"
                );
            }
        }
    }

    #[test]
    fn softmax_rows_of_scores_sum_to_one(
        s in 1usize..200,
        scale in 0.01f64..1e4,
        shift in -1e4f64..1e4,
    ) {
        let scores: Vec<f64> = draw_normal_f64_values("scores", s).iter().map(|x| x * scale).collect();
        let mut p = scores.clone();
        crate::math::softmax_in_place_f64(&mut p);
        prop_assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        prop_assert!(p.iter().all(|p| (0.0..=1.0).contains(p)));
        let mut shifted: Vec<f64> = scores.iter().map(|x| x + shift).collect();
        crate::math::softmax_in_place_f64(&mut shifted);
        // Adding a constant to the scores rounds them by about 1e-12, so the test allows this
        // difference in the probabilities.
        assert_largest_difference_within(&shifted, &p, 1e-10)?;
    }

    #[test]
    fn attention_outputs_lie_between_the_smallest_and_largest_value(
        s in 1usize..80,
        d in 1usize..9,
        causal: bool,
        scale in 0.1f64..100.0,
    ) {
        let head = SingleHeadParameters { head_dim: d, causal };
        let [q, k, v] = ["q", "k", "v"].map(|name| draw_normal_f64_values(name, s * d));
        let q: Vec<f64> = q.iter().map(|x| x * scale).collect();
        let out = reference_output_at_all_positions(&head, &q, &k, &v);
        for c in 0..d {
            let column = |x: &[f64]| x.iter().skip(c).step_by(d).copied().collect::<Vec<_>>();
            let (low, high) = column(&v)
                .iter()
                .fold((f64::MAX, f64::MIN), |(low, high), &x| (low.min(x), high.max(x)));
            prop_assert!(column(&out).iter().all(|x| (low - 1e-12..=high + 1e-12).contains(x)));
        }
        if causal {
            prop_assert_eq!(&out[..d], &v[..d]);
        }
    }

    #[test]
    fn rotating_keys_and_values_without_a_mask_keeps_the_output(
        s in 2usize..60,
        d in 1usize..9,
        turn in 1usize..59,
    ) {
        let head = SingleHeadParameters { head_dim: d, causal: false };
        let [q, k, v] = ["q", "k", "v"].map(|name| draw_normal_f64_values(name, s * d));
        let turned = |x: &[f64]| [&x[turn % s * d..], &x[..turn % s * d]].concat();
        assert_largest_difference_within(&reference_output_at_all_positions(&head, &q, &turned(&k), &turned(&v)), &reference_output_at_all_positions(&head, &q, &k, &v), 1e-12)?;
    }

    #[test]
    fn key_gradients_sum_to_zero_and_value_gradients_to_grad_out(s in 1usize..700, d in 1usize..9, causal: bool) {
        // Each row of the softmax probabilities P sums to one, so the sum of grad_v over the keys
        // equals the sum of grad_out over the queries. Each row of the score gradients dS sums to
        // zero, so the sum of grad_k over all keys is zero.
        let head = SingleHeadParameters { head_dim: d, causal };
        let [q, k, v, grad_out] = ["q", "k", "v", "g"].map(|name| draw_normal_f64_values(name, s * d));
        let (grad_k, grad_v) = head.gradients_of_keys_and_values(&q, &grad_out, &k, &v);
        let sums =
            |x: &[f64]| (0..d).map(|c| x.iter().skip(c).step_by(d).sum()).collect::<Vec<f64>>();
        assert_largest_difference_within(&sums(&grad_v), &sums(&grad_out), 1e-10)?;
        assert_largest_difference_within(&sums(&grad_k), &vec![0.0; d], 1e-10)?;
    }
}

fn two_head_attention_problem(
    b: usize,
    s: usize,
    d: usize,
    causal: bool,
    dtype: Dtype,
) -> AttentionParameters {
    let h = DEFAULT_HIDDEN_SIZE / d;
    AttentionParameters {
        batch_size: b,
        query_heads: h,
        key_value_heads: h,
        queries_per_head: s,
        keys_per_head: s,
        head_dim: d,
        causal,
        dtype,
        adds_input_outliers: false,
    }
}

#[test]
fn the_declared_attention_work_equals_flash_attentions_flop_count() {
    let s1024 = two_head_attention_problem(16, 1024, 64, false, Dtype::Bf16);
    assert_eq!(
        AttentionForward { attention: s1024 }.work().matmul_flops(),
        4 * 16_384 * 1024 * 2048
    );
    assert_eq!(AttentionForward { attention: s1024 }.work().total_bytes(), 4 * 16_384 * 2048 * 2);
    let causal = two_head_attention_problem(16, 1024, 64, true, Dtype::Bf16);
    assert_eq!(
        AttentionForward { attention: causal }.work().matmul_flops(),
        2 * 16_384 * 1024 * 2048
    );
    assert_eq!(
        AttentionBackward { attention: causal }.work().matmul_flops(),
        5 * 16_384 * 1024 * 2048
    );
    assert_eq!(AttentionBackward { attention: s1024 }.work().total_bytes(), 7 * 16_384 * 2048 * 2);
    // The bytes of keys and values depend on the number of key heads; the FLOPs depend on the
    // number of query heads.
    let attention = AttentionParameters {
        batch_size: 3,
        query_heads: 8,
        key_value_heads: 2,
        queries_per_head: 5,
        keys_per_head: 100,
        ..causal
    };
    let work = AttentionForward { attention }.work();
    assert_eq!(work.total_bytes(), (2 * 3 * 8 * 5 + 2 * 3 * 2 * 100) * 64 * 2);
    assert_eq!(work.matmul_flops(), 4 * 64 * 3 * 8 * 5 * 195 / 2);
}

#[test]
fn every_listed_attention_point_binds_and_has_a_short_id() {
    fn assert_points_bind_with_short_distinct_ids<P: Problem>(workload: &Workload<P>) {
        let points = workload
            .points_selected_by_effort(
                BenchEffort::Thorough,
                SizeOfDefaultProblems::HostCpuSizes,
                &[],
            )
            .unwrap();
        let ids: BTreeSet<String> =
            points.iter().map(|point| format!("{}/{point}", workload.name)).collect();
        assert_eq!(ids.len(), points.len());
        for (point, id) in points.iter().zip(&ids) {
            assert!(
                (workload.bind)(point)
                    .is_ok_and(|problem| problem.work().total_bytes() > 0
                        && problem.host_memory_bytes() > 0),
                "{id}"
            );
            assert!(id.len() <= 64, "{id}");
        }
    }
    assert_points_bind_with_short_distinct_ids(&FORWARD);
    assert_points_bind_with_short_distinct_ids(&BACKWARD);
    assert_points_bind_with_short_distinct_ids(&crate::attention::components::SCORES_STEP_WORKLOAD);
    assert_points_bind_with_short_distinct_ids(
        &crate::attention::components::SOFTMAX_STEP_WORKLOAD,
    );
    assert_points_bind_with_short_distinct_ids(&crate::attention::components::VALUES_STEP_WORKLOAD);
}

/// Binds the first point of the attention forward selection for an effort, with the axes of
/// `overrides` replaced.
fn bind_first_forward_point(
    effort: BenchEffort,
    overrides: &[&str],
) -> Result<AttentionForward, AxisError> {
    let overrides: Vec<_> = overrides.iter().map(|item| item.parse().unwrap()).collect();
    let points = FORWARD
        .points_selected_by_effort(effort, SizeOfDefaultProblems::HostCpuSizes, &overrides)
        .unwrap();
    (FORWARD.bind)(points.first().expect("a line has these axes"))
}

#[test]
fn axis_tokens_sets_the_batch_and_operation_counts_beyond_64_bits_fail() {
    let bind = |overrides: &[&str]| bind_first_forward_point(BenchEffort::Default, overrides);
    assert_eq!(bind(&[]).unwrap().attention.query_and_output_shape(), [16, 32, 1024, 64]);
    assert_eq!(
        bind(&["tokens=4096", "s=1000"]).unwrap().attention.query_and_output_shape(),
        [4, 32, 1000, 64]
    );
    assert_eq!(
        bind(&["tokens=1", "s=1000"]).unwrap().attention.query_and_output_shape(),
        [1, 32, 1000, 64]
    );
    assert!(bind(&["s=18446744073709551615"]).is_err());
    assert!(bind(&["s=1", "tokens=18446744073709551615"]).is_err());
}

#[test]
fn key_heads_and_keys_may_differ_from_query_heads_and_queries() {
    let bind = |overrides: &[&str]| bind_first_forward_point(BenchEffort::Thorough, overrides);
    let decode = bind(&["d=64", "s=2", "b=3", "h=8", "h_kv=2", "keys=70"]).unwrap().attention;
    assert_eq!(
        (decode.query_and_output_shape(), decode.key_value_shape()),
        ([3, 8, 2, 64], [3, 2, 70, 64])
    );
    let refused = |overrides: &[&str]| bind(overrides).unwrap_err().to_string();
    assert_eq!(refused(&["h=8", "h_kv=3"]), "h=8 is no multiple of h_kv=3");
    let too_few = "mask=causal needs a key for each query: keys=8, s=9";
    assert_eq!(refused(&["mask=causal", "s=9", "keys=8"]), too_few);
}

#[test]
fn the_reference_of_a_large_attention_problem_samples_rows_of_all_heads() {
    for causal in [false, true] {
        let attention = two_head_attention_problem(2, 1024, 64, causal, Dtype::F32);
        let problem = AttentionForward { attention };
        let inputs = problem.inputs(3);
        let expected = problem.reference(&inputs);
        assert_eq!(expected.len(), if causal { 3 } else { 1 });
        let head = 37;
        let [q, k, v] = ["q", "k", "v"]
            .map(|name| inputs.tensor(name).elements_to_f64(head * 1024 * 64, 1024 * 64));
        let whole =
            reference_output_at_all_positions(&attention.single_head_parameters(), &q, &k, &v);
        let mut seen = 0;
        for band in &expected {
            let (rows, TensorData::F64(values)) =
                (band.row_indices.as_ref().expect("a sample"), &band.expected_values)
            else {
                panic!("fp64")
            };
            assert!(rows.is_sorted_by(|a, b| a < b) && *rows.last().unwrap() < 64 * 1024);
            for (row, values) in
                rows.iter().zip(values.chunks(64)).filter(|(row, _)| *row / 1024 == head)
            {
                assert_largest_difference_within(values, &whole[row % 1024 * 64..][..64], 1e-12)
                    .unwrap();
                seen += 1;
            }
        }
        assert!(seen > 50, "{seen} rows of one head");
    }
}

#[test]
fn the_reference_of_a_small_attention_problem_covers_all_rows() {
    for causal in [false, true] {
        let problem = AttentionBackward {
            attention: two_head_attention_problem(1, 33, 64, causal, Dtype::F32),
        };
        let inputs = problem.inputs(3);
        let expected = problem.reference(&inputs);
        for name in ["grad_q", "grad_k", "grad_v"] {
            let rows: usize = expected
                .iter()
                .filter(|part| part.output_name == name)
                .map(|part| part.row_indices.as_ref().map_or(32 * 33, Vec::len))
                .sum();
            assert_eq!(rows, 32 * 33);
        }
    }
}

#[test]
fn gradients_of_shared_key_heads_sum_over_their_query_heads() {
    let (s, d) = (33, 64);
    for causal in [false, true] {
        let apart = AttentionBackward {
            attention: AttentionParameters {
                batch_size: 2,
                query_heads: 6,
                key_value_heads: 6,
                ..two_head_attention_problem(1, s, d, causal, Dtype::F32)
            },
        };
        let shared = AttentionBackward {
            attention: AttentionParameters { key_value_heads: 2, ..apart.attention },
        };
        let inputs = shared.inputs(5);
        // The comparison problem repeats each key and value head three times, once for each query
        // head that shares the head.
        let mut repeated = inputs.clone();
        for name in ["k", "v"] {
            let values =
                inputs.f32_elements(name).chunks(s * d).flat_map(|head| [head; 3]).flatten();
            repeated.insert(
                name,
                Tensor::new(
                    apart.attention.query_and_output_shape(),
                    TensorData::F32(values.copied().collect()),
                ),
            );
        }
        let gradient = |problem: &AttentionBackward, inputs: &Tensors, name: &str| -> Vec<f64> {
            let parts =
                problem.reference(inputs).into_iter().filter(|part| part.output_name == name);
            let rows = parts.flat_map(|part| {
                let TensorData::F64(values) = part.expected_values else {
                    panic!("gradients are f64")
                };
                let rows = part.row_indices.unwrap_or_else(|| (0..values.len() / d).collect());
                rows.into_iter().zip(values.chunks(d).map(<[f64]>::to_vec).collect::<Vec<_>>())
            });
            rows.collect::<BTreeMap<_, _>>().into_values().flatten().collect()
        };
        for name in ["grad_k", "grad_v"] {
            let each = gradient(&apart, &repeated, name);
            let sums: Vec<f64> = each
                .chunks(3 * s * d)
                .flat_map(|heads| {
                    (0..s * d).map(|at| heads.iter().skip(at).step_by(s * d).sum::<f64>())
                })
                .collect();
            assert_largest_difference_within(&gradient(&shared, &inputs, name), &sums, 1e-12)
                .unwrap();
        }
    }
}

/// Emulates an implementation of attention on tensor cores: fp32 or better inside, but the operands
/// of GEMMs and the results rounded to the dtype.
struct EmulatedTensorCoreAttention {
    head: SingleHeadParameters,
    round_to_dtype: fn(f64) -> f64,
}

impl EmulatedTensorCoreAttention {
    fn round_values_to_dtype(&self, values: Vec<f64>) -> Vec<f64> {
        values.into_iter().map(self.round_to_dtype).collect()
    }

    /// Computes the softmax probabilities and the attention output of a head, rounded as on tensor
    /// cores.
    fn rounded_probabilities_and_output(
        &self,
        q: &[f64],
        k: &[f64],
        v: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let s = q.len() / self.head.head_dim;
        let mut p = self.head.scaled_attention_scores(q, k);
        for (row, p) in p.chunks_mut(s).enumerate() {
            let (seen, hidden) = p.split_at_mut(if self.head.causal { row + 1 } else { s });
            crate::math::softmax_in_place_f64(seen);
            hidden.fill(0.0);
        }
        let out = self.round_values_to_dtype(
            self.head.probabilities_times_values(&self.round_values_to_dtype(p.clone()), v),
        );
        (p, out)
    }

    /// Computes the attention output of a head and the gradients of q, k and v, rounded as on
    /// tensor cores.
    fn rounded_output_and_input_gradients(
        &self,
        q: &[f64],
        k: &[f64],
        v: &[f64],
        grad_out: &[f64],
    ) -> [Vec<f64>; 4] {
        let (d, s) = (self.head.head_dim, q.len() / self.head.head_dim);
        let (p, out) = self.rounded_probabilities_and_output(q, k, v);
        let transposed =
            |x: &[f64]| (0..s * s).map(|index| x[index % s * s + index / s]).collect::<Vec<_>>();
        let mut grad = self.head.scaled_attention_scores(grad_out, v);
        for row in 0..s {
            let mean: f64 = (0..d).map(|c| grad_out[row * d + c] * out[row * d + c]).sum();
            for column in 0..s {
                let grad = &mut grad[row * s + column];
                *grad = (self.round_to_dtype)(
                    p[row * s + column] * (*grad / self.head.softmax_scale() - mean),
                );
            }
        }
        let scaled = |x: Vec<f64>| {
            self.round_values_to_dtype(
                x.into_iter().map(|x| x * self.head.softmax_scale()).collect(),
            )
        };
        let grad_v = self.round_values_to_dtype(
            self.head
                .probabilities_times_values(&transposed(&self.round_values_to_dtype(p)), grad_out),
        );
        [
            out,
            scaled(self.head.probabilities_times_values(&grad, k)),
            scaled(self.head.probabilities_times_values(&transposed(&grad), q)),
            grad_v,
        ]
    }
}

/// Errors, by kernelgate's own comparison of outputs, of an emulated implementation that rounds
/// only GEMM operands and results to the dtype.
fn errors_of_emulated_rounding_to_dtype(
    attention: AttentionParameters,
) -> [ComparisonWithReference; 2] {
    let AttentionParameters { queries_per_head: s, head_dim: d, dtype, .. } = attention;
    let (forward, backward) = (AttentionForward { attention }, AttentionBackward { attention });
    let inputs = backward.inputs(9);
    let round: fn(f64) -> f64 = match dtype {
        Dtype::Bf16 => |x| bf16::from_f64(x).to_f64(),
        _ => |x| f16::from_f64(x).to_f64(),
    };
    let rounded = EmulatedTensorCoreAttention {
        head: attention.single_head_parameters(),
        round_to_dtype: round,
    };
    let heads: Vec<[Vec<f64>; 4]> = (0..attention.query_heads)
        .into_par_iter()
        .map(|head| {
            let [q, k, v, grad_out] = ["q", "k", "v", "grad_out"]
                .map(|name| inputs.tensor(name).elements_to_f64(head * s * d, s * d));
            rounded.rounded_output_and_input_gradients(&q, &k, &v, &grad_out)
        })
        .collect();
    let outputs = |names: &[&'static str], first: usize| {
        names.iter().zip(first..).fold(Tensors::new(), |outputs, (name, index)| {
            let values: Vec<f64> = heads.iter().flat_map(|head| head[index].clone()).collect();
            outputs.with_tensor(name, attention.query_and_output_shape(), values)
        })
    };
    let loose = Tolerance { max_error: 1.0, relative_l2: 1.0 };
    [
        compare_outputs_with_reference(&outputs(&["out"], 0), &forward.reference(&inputs), loose)
            .unwrap(),
        compare_outputs_with_reference(
            &outputs(&["grad_q", "grad_k", "grad_v"], 1),
            &backward.reference(&inputs),
            loose,
        )
        .unwrap(),
    ]
}

#[test]
fn emulated_16_bit_rounding_stays_well_within_the_tolerance() {
    let normal = [(64, 64, false), (200, 64, true), (512, 64, false), (512, 128, true)];
    let hard = [(200, 64, true), (512, 128, false)];
    for (dtype, outliers) in
        [(Dtype::Bf16, false), (Dtype::F16, false), (Dtype::Bf16, true), (Dtype::F16, true)]
    {
        let mut worst = [Tolerance { max_error: 0.0, relative_l2: 0.0 }; 2];
        for &(s, d, causal) in if outliers { &hard[..] } else { &normal } {
            let problem = AttentionParameters {
                adds_input_outliers: outliers,
                ..two_head_attention_problem(1, s, d, causal, dtype)
            };
            for (worst, error) in
                worst.iter_mut().zip(errors_of_emulated_rounding_to_dtype(problem))
            {
                eprintln!("{problem:?}: {error:?}");
                worst.max_error = worst.max_error.max(error.errors.max_error);
                worst.relative_l2 = worst.relative_l2.max(error.errors.relative_l2);
            }
        }
        for (worst, allowed) in worst
            .into_iter()
            .zip([attention_output_tolerance(dtype), attention_gradient_tolerance(dtype, outliers)])
        {
            for (error, allowed) in
                [(worst.max_error, allowed.max_error), (worst.relative_l2, allowed.relative_l2)]
            {
                assert!(
                    error < allowed / 2.0 && error > allowed / 5.0,
                    "{dtype:?} outliers {outliers}: {error:.1e} of {allowed:.1e}"
                );
            }
        }
    }
}

/// Error, by kernelgate's own comparison of outputs, of an emulated attention forward whose
/// operands and probabilities times 2^6 are rounded to e4m3.
fn error_of_emulated_fp8_forward(attention: AttentionParameters) -> ComparisonWithReference {
    let AttentionParameters { query_heads: h, queries_per_head: s, .. } = attention;
    let problem = AttentionForward { attention };
    let inputs = problem.inputs(9);
    let (head, heads) = (
        attention.single_head_parameters(),
        AttentionInputsByHead { attention: &attention, inputs: &inputs },
    );
    let out: Vec<f64> = (0..h)
        .into_par_iter()
        .flat_map(|index| {
            let [q, k, v] =
                ["q", "k", "v"].map(|name| heads.read_first_positions_of_head(name, index, s));
            let mut p = head.scaled_attention_scores(&q, &k);
            for (row, p) in p.chunks_mut(s).enumerate() {
                let (seen, hidden) = p.split_at_mut(if head.causal { row + 1 } else { s });
                crate::math::softmax_in_place_f64(seen);
                hidden.fill(0.0);
                let top = seen.iter().copied().fold(0.0, f64::max);
                for p in seen {
                    *p =
                        f64::from(decode_e4m3_to_f32(encode_f32_as_e4m3((*p / top * 64.0) as f32)))
                            / 64.0
                            * top;
                }
            }
            let rounded = |x: f64| bf16::from_f64(x).to_f64();
            head.probabilities_times_values(&p, &v).into_iter().map(rounded).collect::<Vec<_>>()
        })
        .collect();
    let outputs = Tensors::new().with_tensor("out", attention.query_and_output_shape(), out);
    let loose = Tolerance { max_error: 1.0, relative_l2: 1.0 };
    compare_outputs_with_reference(&outputs, &problem.reference(&inputs), loose).unwrap()
}

#[test]
fn emulated_rounding_of_probabilities_to_fp8_stays_within_tolerance() {
    for (s, causal, outliers) in [
        (129, true, false),
        (512, false, false),
        (2048, true, false),
        (129, false, true),
        (512, true, true),
        (2048, true, true),
    ] {
        let problem = AttentionParameters {
            adds_input_outliers: outliers,
            ..two_head_attention_problem(1, s, 128, causal, Dtype::Fp8)
        };
        let (error, allowed) = (error_of_emulated_fp8_forward(problem), FP8_OUTPUT_TOLERANCE);
        eprintln!("{problem:?}: {error:?}");
        for (error, allowed) in [
            (error.errors.max_error, allowed.max_error),
            (error.errors.relative_l2, allowed.relative_l2),
        ] {
            assert!(error < allowed / 1.5, "{problem:?}: {error:.1e} of {allowed:.1e}");
            assert!(outliers || error > allowed / 9.0, "{problem:?}: {error:.1e} of {allowed:.1e}");
        }
    }
}

/// The test compares the reference outputs of quantised fp8 operands with those of the original
/// bf16 operands; it tests no implementation.
#[test]
fn the_error_of_quantised_fp8_operands_is_that_of_the_results_page() {
    for (s, causal, outliers, most) in [
        (512, false, false, 6e-2),
        (512, true, false, 6e-2),
        (512, false, true, 1e-1),
        (2048, true, true, 2e-1),
    ] {
        let rounded = AttentionParameters {
            adds_input_outliers: outliers,
            ..two_head_attention_problem(1, s, 128, causal, Dtype::Fp8)
        };
        let before =
            AttentionForward { attention: AttentionParameters { dtype: Dtype::Bf16, ..rounded } };
        let rounded = AttentionForward { attention: rounded };
        let values = |problem: &AttentionForward| -> Vec<f64> {
            let bands = problem.reference(&problem.inputs(9)).into_iter();
            let values_of = |band: Expected| match band.expected_values {
                TensorData::F64(values) => values,
                other => panic!("{other:?}"),
            };
            bands.flat_map(values_of).collect()
        };
        let (mut error, mut all) = (0.0, 0.0);
        for (x, y) in values(&rounded).into_iter().zip(values(&before)) {
            error += (x - y) * (x - y);
            all += y * y;
        }
        let relative = f64::sqrt(error / all);
        eprintln!("s={s} causal {causal} outliers {outliers}: {relative:.3e}");
        assert!((2e-2..most).contains(&relative), "s={s} {causal} {outliers}: {relative:.2e}");
    }
}

#[test]
fn fp8_inputs_are_codes_with_scales_and_backward_refuses_fp8() {
    let problem =
        AttentionForward { attention: two_head_attention_problem(1, 8, 128, false, Dtype::Fp8) };
    let inputs = problem.inputs(3);
    assert_eq!(inputs.iter().count(), 6, "what was rounded is no input");
    for name in ["q", "k", "v"] {
        assert_eq!(
            inputs.tensor(&format!("{name}_e4m3")).shape(),
            problem.attention.query_and_output_shape()
        );
        assert_eq!(inputs.tensor(&format!("{name}_scale")).shape(), [1, 16]);
    }
    // The attention symmetry test needs a problem in which every head can be exchanged for the
    // next.
    assert!(problem.symmetries()[0].apply_to_inputs(&inputs).is_some());
    let axes = ["s=8", "d=128", "mask=full", "dtype=fp8"].map(|axis| axis.parse().unwrap());
    let suites = crate::attention::attention_suites();
    for (suite, bound) in [(&suites[0], true), (&suites[1], false)] {
        let points = suite
            .points_selected_by_effort(
                BenchEffort::Quick,
                SizeOfDefaultProblems::HostCpuSizes,
                &axes,
            )
            .unwrap();
        assert_eq!(suite.problem_at_point(&points[0]).is_ok(), bound, "{}", suite.workload_name());
    }
}

#[test]
fn outliers_are_one_element_in_a_thousand_and_equal_in_each_draw() {
    let problem = AttentionForward {
        attention: AttentionParameters {
            adds_input_outliers: true,
            ..two_head_attention_problem(2, 500, 64, false, Dtype::F32)
        },
    };
    let inputs = problem.inputs(4);
    assert_eq!(inputs.tensor("q").as_bytes(), problem.inputs(4).tensor("q").as_bytes());
    let q = inputs.tensor("q").elements_to_f64(0, inputs.tensor("q").len());
    let plain = random::normal_values(4, "q", q.len());
    let moved: Vec<f64> = q
        .iter()
        .zip(plain)
        .map(|(q, plain)| q - f64::from(plain))
        .filter(|moved| *moved != 0.0)
        .collect();
    let (share, variance) = (
        moved.len() as f64 / q.len() as f64,
        moved.iter().map(|x| x * x).sum::<f64>() / moved.len() as f64,
    );
    assert!(
        (8e-4..1.2e-3).contains(&share) && (85.0..115.0).contains(&variance),
        "{share} {variance}"
    );
}
