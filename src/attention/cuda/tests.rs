//! Tests of the tables of attention rows and of their declared device memory; they need no GPU. On
//! a GPU, tests compare every attention rung with the fp64 reference, for shapes that are not
//! multiples of a tile, with outliers, and by FlashAttention's own tolerance. Tests also require
//! that attention rungs give the same bits in each launch, and that the memory they use matches
//! their declared memory.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;
use crate::attention::components::{
    self, AttentionScoresProblem, AttentionSoftmaxProblem, AttentionValuesProblem,
};
use crate::attention::definition::AttentionParameters;
use crate::gpu_tests::{lock_first_gpu, prepare_row_or_skip_unsupported};
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{LaunchableProblem, PrepareFunction};
use kernelgate::verify::{compare_outputs_with_reference, launch_twice_and_compare_with_reference};
use kernelgate::workload::{Dtype, Expected, Problem, TensorData, Tensors, Tolerance};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::memory;

/// Verifies every selected attention row that supports the problem against its reference; returns
/// the number of verified rows.
fn verify_and_count_selected_rows<P: Problem>(
    rows: impl IntoIterator<Item = &'static Implementation<P>>,
    wanted: impl Fn(&str) -> bool,
    problem: &P,
    device: &Arc<Device>,
    name: &str,
) -> usize {
    let inputs = problem.inputs(21);
    let expected = problem.reference(&inputs);
    let mut verified = 0;
    for row in rows
        .into_iter()
        .filter(|row| wanted(row.implementation_name) && (row.supports)(problem).is_ok())
    {
        let Some(mut task) = prepare_row_or_skip_unsupported(row, problem, &inputs, device) else {
            continue;
        };
        // The test launches each attention row twice, because a launch must not depend on the
        // outputs of the previous one.
        for launch in 1..=2 {
            let result =
                launch_twice_and_compare_with_reference(&mut task, &expected, problem.tolerance());
            assert!(
                result.is_ok(),
                "{} launch {launch}, {name}: {}",
                row.implementation_name,
                result.unwrap_err()
            );
        }
        verified += 1;
    }
    verified
}

pub fn bf16_attention_without_grouped_heads(
    b: usize,
    h: usize,
    s: usize,
    d: usize,
    causal: bool,
) -> AttentionParameters {
    AttentionParameters {
        batch_size: b,
        query_heads: h,
        key_value_heads: h,
        queries_per_head: s,
        keys_per_head: s,
        head_dim: d,
        causal,
        dtype: Dtype::Bf16,
        adds_input_outliers: false,
    }
}

#[test]
fn attention_row_names_are_distinct_and_f32_is_declined() {
    fn assert_row_names_are_distinct_and_f32_declined<P: 'static>(
        rows: impl IntoIterator<Item = &'static Implementation<P>>,
        problem: &P,
    ) {
        let rows: Vec<_> = rows.into_iter().collect();
        let names: BTreeSet<&str> = rows.iter().map(|row| row.implementation_name).collect();
        assert_eq!(names.len(), rows.len());
        for row in rows {
            assert!(row.implementation_name.starts_with("cuda/") && !row.description.is_empty());
            let computed =
                if row.implementation_name == FP8_ROW_NAME { "fp8" } else { "bf16 and f16" };
            let reason = format!("computes {computed} only");
            assert_eq!((row.supports)(problem), Err(reason), "{}", row.implementation_name);
        }
    }
    let attention = AttentionParameters {
        dtype: Dtype::F32,
        ..bf16_attention_without_grouped_heads(1, 2, 100, 64, false)
    };
    assert_row_names_are_distinct_and_f32_declined(
        attention_forward_rows(),
        &AttentionForward { attention },
    );
    assert_row_names_are_distinct_and_f32_declined(
        attention_backward_rows(),
        &AttentionBackward { attention },
    );
    let shape = components::AttentionComponentShape {
        batch: 1,
        heads: 2,
        seq_len: 100,
        head_dim: 64,
        dtype: Dtype::F32,
    };
    assert_row_names_are_distinct_and_f32_declined(
        CUDA_SCORES_STEP_ROWS,
        &AttentionScoresProblem { shape },
    );
    assert_row_names_are_distinct_and_f32_declined(
        CUDA_SOFTMAX_STEP_ROWS,
        &AttentionSoftmaxProblem {
            shape: components::AttentionComponentShape { head_dim: 1, ..shape },
        },
    );
    assert_row_names_are_distinct_and_f32_declined(
        CUDA_VALUES_STEP_ROWS,
        &AttentionValuesProblem { shape },
    );
}

#[test]
fn rungs_that_store_all_scores_decline_long_sequences() {
    let running = |s| {
        let problem = AttentionForward {
            attention: bf16_attention_without_grouped_heads(16_384 / s, 16, s, 128, false),
        };
        attention_forward_rows()
            .filter(|row| (row.supports)(&problem).is_ok())
            .map(|row| row.implementation_name)
            .collect::<Vec<_>>()
    };
    assert!(running(1024).starts_with(&[
        "cuda/naive",
        "cuda/tiled",
        "cuda/flash",
        "cuda/flash_mma",
        "cuda/flash_wgmma"
    ]));
    assert!(running(4096).starts_with(&["cuda/flash", "cuda/flash_mma", "cuda/flash_wgmma"]));
}

#[test]
fn the_declared_device_memory_of_attention_rows_follows_from_the_shapes() {
    fn declared_device_bytes_of_row<P: 'static>(
        rows: impl IntoIterator<Item = &'static Implementation<P>>,
        name: &str,
        problem: &P,
    ) -> u64 {
        let row = rows.into_iter().find(|row| row.implementation_name == name).unwrap();
        let PrepareFunction::CudaWithDeclaredMemory { device_bytes, .. } = row.prepare else {
            panic!("{name} declares no memory")
        };
        device_bytes(problem)
    }
    // The test shape has six heads of 100 rows of 128 elements; a kernel whose steps cover 80
    // queries pads the 100 rows of a head to 160.
    let attention = bf16_attention_without_grouped_heads(2, 3, 100, 128, true);
    let (forward, backward) = (AttentionForward { attention }, AttentionBackward { attention });
    let (vectors, pairs, rows, padded) = (6 * 100 * 128 * 2, 6 * 100 * 100, 6 * 100, 6 * 160);
    assert_eq!(
        declared_device_bytes_of_row(attention_forward_rows(), "cuda/naive", &forward),
        4 * vectors + 6 * pairs
    );
    assert_eq!(
        declared_device_bytes_of_row(attention_forward_rows(), "cuda/tiled", &forward),
        4 * vectors + 4 * pairs
    );
    assert_eq!(
        declared_device_bytes_of_row(attention_forward_rows(), "cuda/flash_mma", &forward),
        4 * vectors
    );
    assert_eq!(
        declared_device_bytes_of_row(attention_backward_rows(), "cuda/naive", &backward),
        8 * vectors + 8 * rows + 8 * pairs
    );
    assert_eq!(
        declared_device_bytes_of_row(attention_backward_rows(), "cuda/flash_mma", &backward),
        8 * vectors + 4 * rows + 8 * padded + 4 * padded * 128
    );
    let shape = components::AttentionComponentShape {
        batch: 2,
        heads: 3,
        seq_len: 100,
        head_dim: 128,
        dtype: Dtype::Bf16,
    };
    let (scores, values) = (AttentionScoresProblem { shape }, AttentionValuesProblem { shape });
    let shape = components::AttentionComponentShape { head_dim: 1, ..shape };
    let softmax = AttentionSoftmaxProblem { shape };
    assert_eq!(
        declared_device_bytes_of_row(CUDA_SCORES_STEP_ROWS, "cuda/naive", &scores),
        2 * vectors + 4 * pairs
    );
    assert_eq!(
        declared_device_bytes_of_row(CUDA_SOFTMAX_STEP_ROWS, "cuda/naive", &softmax),
        6 * pairs
    );
    assert_eq!(
        declared_device_bytes_of_row(CUDA_VALUES_STEP_ROWS, "cuda/naive", &values),
        2 * vectors + 2 * pairs
    );
}

/// Name of cuDNN's attention row, which has its own test, so that errors of cuDNN do not hide the
/// results of kernelgate's rows.
const CUDNN_ROW_NAME: &str = "cuda/cudnn";
const FP8_ROW_NAME: &str = "cuda/flash_wgmma_fp8";
const DETERMINISTIC_BACKWARD_ROW_NAME: &str = "cuda/flash_wgmma_deterministic";

#[test]
fn every_attention_row_agrees_with_the_reference_at_odd_shapes_and_on_outliers() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let (rungs, backward_rungs) =
        if device.gpu_properties().kernel_architecture == "sm_90a" { (5, 4) } else { (4, 2) };
    for s in [1, 7, 65, 129, 200, 333] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            for (dtype, outliers) in
                [(Dtype::Bf16, false), (Dtype::F16, false), (Dtype::Bf16, true)]
            {
                let attention = AttentionParameters {
                    dtype,
                    adds_input_outliers: outliers,
                    ..bf16_attention_without_grouped_heads(2, 3, s, d, causal)
                };
                let name = format!("{attention:?}");
                assert_eq!(
                    verify_and_count_selected_rows(
                        attention_forward_rows(),
                        |row| row != CUDNN_ROW_NAME,
                        &AttentionForward { attention },
                        &device,
                        &name
                    ),
                    // With at most 64 queries, one more forward row supports the problem: the
                    // decode kernel.
                    rungs + usize::from(s <= 64)
                );
                assert_eq!(
                    verify_and_count_selected_rows(
                        attention_backward_rows(),
                        |row| row != CUDNN_ROW_NAME,
                        &AttentionBackward { attention },
                        &device,
                        &name
                    ),
                    backward_rungs
                );
            }
        }
    }
}

#[test]
fn wgmma_attention_agrees_with_the_reference_around_tile_edges() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let expected = usize::from(device.gpu_properties().kernel_architecture == "sm_90a");
    // Test pairs of heads and sequence lengths, near multiples of the rows of warpgroups, tiles and
    // key blocks; some have several tiles a multiprocessor, others many one-tile heads.
    let few = [(3, 63), (3, 127), (3, 193), (5, 1000), (1, 8191)];
    let many = [(150, 1), (198, 64), (150, 65), (267, 128), (150, 193), (198, 250), (150, 321)];
    for (h, s) in few.into_iter().chain(many) {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let attention = AttentionParameters {
                    dtype,
                    ..bf16_attention_without_grouped_heads(2, h, s, d, causal)
                };
                let name = format!("{attention:?}");
                let selected = |row: &str| row == "cuda/flash_wgmma";
                let problem = AttentionForward { attention };
                assert_eq!(
                    verify_and_count_selected_rows(
                        attention_forward_rows(),
                        selected,
                        &problem,
                        &device,
                        &name
                    ),
                    expected
                );
                // The test skips the gradients of the longest sequence, because their fp64
                // reference would take minutes.
                if s <= 1000 {
                    let problem = AttentionBackward { attention };
                    let selected =
                        |row: &str| selected(row) || row == DETERMINISTIC_BACKWARD_ROW_NAME;
                    assert_eq!(
                        verify_and_count_selected_rows(
                            attention_backward_rows(),
                            selected,
                            &problem,
                            &device,
                            &name
                        ),
                        2 * expected
                    );
                }
            }
        }
    }
}

#[test]
fn attention_of_grouped_heads_and_cached_keys_agrees_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let flash = 1 + usize::from(device.gpu_properties().kernel_architecture == "sm_90a");
    // Test shapes as query heads, key heads, queries and keys: with one and many query rows in a
    // tile, and key counts that are not a multiple of a tile.
    for (h, h_kv, s, keys) in [
        (8, 1, 1, 63),
        (32, 8, 1, 8191),
        (6, 2, 1, 129),
        (4, 4, 7, 1000),
        (8, 2, 63, 129),
        (8, 2, 64, 4100),
        (6, 3, 129, 1000),
        (4, 1, 1000, 1001),
        (4, 2, 200, 70),
        (136, 34, 200, 70),
        (136, 34, 200, 255),
    ] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let causal = causal && keys >= s;
                let attention = AttentionParameters {
                    key_value_heads: h_kv,
                    keys_per_head: keys,
                    dtype,
                    ..bf16_attention_without_grouped_heads(2, h, s, d, causal)
                };
                let (problem, name) = (AttentionForward { attention }, format!("{attention:?}"));
                assert_eq!(
                    verify_and_count_selected_rows(
                        attention_forward_rows(),
                        |row| row != CUDNN_ROW_NAME,
                        &problem,
                        &device,
                        &name
                    ),
                    flash + usize::from(s <= 64)
                );
            }
        }
    }
}

#[test]
fn attention_gradients_of_grouped_heads_agree_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let expected = 2 * usize::from(device.gpu_properties().kernel_architecture == "sm_90a");
    // Test shapes as query heads, key heads and sequence length: with one key block a head and
    // several, and one query head a key head and several.
    for (h, h_kv, s) in [(8, 1, 1), (6, 2, 63), (8, 2, 129), (6, 3, 1000)] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let attention = AttentionParameters {
                    key_value_heads: h_kv,
                    dtype,
                    ..bf16_attention_without_grouped_heads(2, h, s, d, causal)
                };
                let (problem, name) = (AttentionBackward { attention }, format!("{attention:?}"));
                assert_eq!(
                    verify_and_count_selected_rows(
                        attention_backward_rows(),
                        |_| true,
                        &problem,
                        &device,
                        &name
                    ),
                    expected
                );
            }
        }
    }
}

#[test]
fn fp8_attention_agrees_with_the_reference_of_its_rounded_operands() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let expected = usize::from(device.gpu_properties().kernel_architecture == "sm_90a");
    for (h, s) in [(3, 1), (3, 63), (3, 97), (3, 193), (150, 321), (5, 1000), (1, 8191)] {
        for (causal, outliers) in [(false, false), (true, false), (false, true)] {
            let attention = AttentionParameters {
                dtype: Dtype::Fp8,
                adds_input_outliers: outliers,
                ..bf16_attention_without_grouped_heads(2, h, s, 128, causal)
            };
            let problem = AttentionForward { attention };
            let name = format!("{attention:?}");
            assert_eq!(
                verify_and_count_selected_rows(
                    attention_forward_rows(),
                    |_| true,
                    &problem,
                    &device,
                    &name
                ),
                expected
            );
        }
    }
}

#[test]
fn cudnn_attention_agrees_with_the_reference_for_problems_it_supports() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let mut verified = 0;
    for (s, keys) in [(1, 512), (128, 256), (256, 256)] {
        let attention = AttentionParameters {
            key_value_heads: 2,
            keys_per_head: keys,
            ..bf16_attention_without_grouped_heads(2, 8, s, 128, false)
        };
        let (problem, name) = (AttentionForward { attention }, format!("{attention:?}"));
        verified += verify_and_count_selected_rows(
            attention_forward_rows(),
            |row| row == CUDNN_ROW_NAME,
            &problem,
            &device,
            &name,
        );
    }
    for s in [128, 200, 384] {
        for (d, causal, dtype) in [
            (64, false, Dtype::Bf16),
            (64, true, Dtype::F16),
            (128, false, Dtype::F16),
            (128, true, Dtype::Bf16),
        ] {
            let attention = AttentionParameters {
                dtype,
                ..bf16_attention_without_grouped_heads(2, 3, s, d, causal)
            };
            let name = format!("{attention:?}");
            verified += verify_and_count_selected_rows(
                attention_forward_rows(),
                |row| row == CUDNN_ROW_NAME,
                &AttentionForward { attention },
                &device,
                &name,
            );
            verified += verify_and_count_selected_rows(
                attention_backward_rows(),
                |row| row == CUDNN_ROW_NAME,
                &AttentionBackward { attention },
                &device,
                &name,
            );
        }
    }
    eprintln!("{CUDNN_ROW_NAME}: {verified} of 27 problems verified");
}

#[test]
fn gpu_rows_of_scores_softmax_and_values_agree_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for s in [1, 7, 65, 200] {
        for (d, dtype) in [(64, Dtype::Bf16), (128, Dtype::F16)] {
            let shape = components::AttentionComponentShape {
                batch: 2,
                heads: 3,
                seq_len: s,
                head_dim: d,
                dtype,
            };
            let name = format!("{shape:?}");
            // The first rung of each attention step (scores, softmax, values) supports every
            // problem.
            assert!(
                verify_and_count_selected_rows(
                    CUDA_SCORES_STEP_ROWS,
                    |_| true,
                    &AttentionScoresProblem { shape },
                    &device,
                    &name
                ) >= 1
            );
            assert!(
                verify_and_count_selected_rows(
                    CUDA_SOFTMAX_STEP_ROWS,
                    |_| true,
                    &AttentionSoftmaxProblem {
                        shape: components::AttentionComponentShape { head_dim: 1, ..shape }
                    },
                    &device,
                    &name
                ) >= 1
            );
            assert!(
                verify_and_count_selected_rows(
                    CUDA_VALUES_STEP_ROWS,
                    |_| true,
                    &AttentionValuesProblem { shape },
                    &device,
                    &name
                ) >= 1
            );
        }
    }
}

/// Launches an attention task and returns, for each output, its maximum |out - ref| divided by the
/// maximum of |ref|.
fn max_errors_relative_to_largest_value(task: &mut CudaTask, expected: &[Expected]) -> Vec<f64> {
    let any = Tolerance { max_error: f64::MAX, relative_l2: f64::MAX };
    task.launch_once().unwrap();
    task.wait_for_launches().unwrap();
    let outputs = task.outputs_on_host().unwrap();
    let error = |one: &Expected| {
        let mut alone = Tensors::new();
        alone.insert(&one.output_name, outputs.tensor(&one.output_name).clone());
        compare_outputs_with_reference(&alone, std::slice::from_ref(one), any)
            .unwrap()
            .errors
            .max_error
    };
    expected.iter().map(error).collect()
}

/// Maximum of |(ref + 0.3 - 0.3) - ref| in bf16 divided by the maximum of |ref|: the relative error
/// of two bf16 roundings of the reference.
fn relative_error_of_two_bf16_roundings(expected: &Expected) -> f64 {
    let TensorData::F64(values) = &expected.expected_values else { panic!("fp64") };
    let round = |x: f64| half::bf16::from_f64(x).to_f64();
    let largest = values.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    values
        .iter()
        .map(|&x| (round(round(round(x) + 0.3) - 0.3) - round(x)).abs())
        .fold(0.0, f64::max)
        / largest
}

/// FlashAttention's accuracy criterion: the maximum error of each rung is at most `factor` times
/// the naive rung's error plus twice the error of two bf16 roundings.
fn assert_flash_attentions_error_criterion<P: Problem>(
    rows: impl IntoIterator<Item = &'static Implementation<P>>,
    problem: &P,
    factor: f64,
    device: &Arc<Device>,
) {
    let mut rows = rows.into_iter();
    let naive = rows.next().expect("a first rung");
    let inputs = problem.inputs(22);
    let expected = problem.reference(&inputs);
    let naive = max_errors_relative_to_largest_value(
        &mut prepare_row_or_skip_unsupported(naive, problem, &inputs, device)
            .expect("an own kernel"),
        &expected,
    );
    for row in rows
        .filter(|row| row.implementation_name != CUDNN_ROW_NAME && (row.supports)(problem).is_ok())
    {
        let Some(mut task) = prepare_row_or_skip_unsupported(row, problem, &inputs, device) else {
            continue;
        };
        let found = max_errors_relative_to_largest_value(&mut task, &expected);
        for ((found, naive), expected) in found.iter().zip(&naive).zip(&expected) {
            let allowed = factor * naive + 2.0 * relative_error_of_two_bf16_roundings(expected);
            assert!(
                *found <= allowed,
                "{} {}: {found:.1e}, naive {naive:.1e}, allowed {allowed:.1e}",
                row.implementation_name,
                expected.output_name
            );
        }
    }
}

#[test]
fn every_attention_rung_meets_flash_attentions_accuracy_criterion() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (s, d, causal, outliers) in [
        (512, 64, false, false),
        (500, 128, true, false),
        (512, 128, false, true),
        (300, 64, true, true),
        (64, 128, false, true),
    ] {
        let attention = AttentionParameters {
            adds_input_outliers: outliers,
            ..bf16_attention_without_grouped_heads(1, 4, s, d, causal)
        };
        assert_flash_attentions_error_criterion(
            attention_forward_rows(),
            &AttentionForward { attention },
            2.0,
            &device,
        );
        assert_flash_attentions_error_criterion(
            attention_backward_rows(),
            &AttentionBackward { attention },
            3.0,
            &device,
        );
    }
}

#[test]
fn five_launches_give_equal_bits_except_rows_with_atomic_dq_sums() {
    /// Names of the outputs whose bits are not equal in all of five launches of a row.
    fn outputs_whose_bits_differ_between_launches<P: Problem>(
        row: &Implementation<P>,
        problem: &P,
        device: &Arc<Device>,
    ) -> Vec<String> {
        if (row.supports)(problem).is_err() {
            return Vec::new();
        }
        let Some(mut task) =
            prepare_row_or_skip_unsupported(row, problem, &problem.inputs(23), device)
        else {
            return Vec::new();
        };
        let mut launch = || {
            task.poison_outputs().unwrap();
            task.launch_once().unwrap();
            task.wait_for_launches().unwrap();
            task.outputs_on_host().unwrap().clone()
        };
        let first = launch();
        let mut differing = BTreeSet::new();
        for _ in 0..4 {
            let again = launch();
            let changed = first
                .iter()
                .filter(|(name, tensor)| tensor.as_bytes() != again.tensor(name).as_bytes());
            differing.extend(changed.map(|(name, _)| name.to_owned()));
        }
        differing.into_iter().collect()
    }
    /// Names of the backward rows whose thread blocks add to `grad_q` with atomics in any order, so
    /// that its bits vary.
    const ROWS_WITH_ATOMIC_GRAD_Q_SUMS: [&str; 2] = ["cuda/flash_mma", "cuda/flash_wgmma"];
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let attention = bf16_attention_without_grouped_heads(1, 16, 1000, 128, false);
    let fp8 = AttentionParameters { dtype: Dtype::Fp8, ..attention };
    let forward = [attention, fp8].into_iter().flat_map(|attention| {
        let problem = AttentionForward { attention };
        attention_forward_rows()
            .map(|row| {
                (
                    row.implementation_name,
                    outputs_whose_bits_differ_between_launches(row, &problem, &device),
                )
            })
            .collect::<Vec<_>>()
    });
    let backward = attention_backward_rows().map(|row| {
        (
            row.implementation_name,
            outputs_whose_bits_differ_between_launches(
                row,
                &AttentionBackward { attention },
                &device,
            ),
        )
    });
    for (name, differing) in forward.chain(backward) {
        eprintln!("{name}: outputs that differ between launches: {differing:?}");
        match name {
            // The test does not require equal bits in each launch of cuDNN's row.
            CUDNN_ROW_NAME => {}
            _ => assert!(
                differing.iter().all(
                    |output| output == "grad_q" && ROWS_WITH_ATOMIC_GRAD_Q_SUMS.contains(&name)
                ),
                "{name}: {differing:?}"
            ),
        }
    }
}

#[test]
fn the_declared_device_memory_of_attention_rows_matches_the_used_memory() {
    fn assert_used_device_memory_matches_declared<P: Problem>(
        rows: impl IntoIterator<Item = &'static Implementation<P>>,
        problem: &P,
        device: &Arc<Device>,
    ) {
        let inputs = problem.inputs(24);
        for row in rows.into_iter().filter(|row| (row.supports)(problem).is_ok()) {
            let PrepareFunction::CudaWithDeclaredMemory { device_bytes, .. } = row.prepare else {
                panic!("{} declares no memory", row.implementation_name)
            };
            let free = || memory::free_and_total_after_launches(device).unwrap().0 as f64;
            // The test prepares each row once before the measurement, so that loaded modules and
            // the memory pool's own overhead are not counted.
            if prepare_row_or_skip_unsupported(row, problem, &inputs, device).is_none() {
                continue;
            }
            let before = free();
            let task = prepare_row_or_skip_unsupported(row, problem, &inputs, device);
            let used = before - free();
            drop(task);
            let declared = device_bytes(problem) as f64;
            eprintln!(
                "{}: declared {:.1} MB, used {:.1} MB",
                row.implementation_name,
                declared / 1e6,
                used / 1e6
            );
            // The test allows 64 MB of deviation, because the CUDA driver allocates device memory
            // in pieces of 32 MiB. The test prints the memory that cuDNN's attention row uses,
            // without comparing it with the row's declared memory.
            let close = (used - declared).abs() <= 0.05 * declared + 64e6;
            assert!(
                close || row.implementation_name == CUDNN_ROW_NAME,
                "{}: declared {declared}, used {used}",
                row.implementation_name
            );
        }
    }
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let attention = bf16_attention_without_grouped_heads(16, 16, 1024, 128, false);
    assert_used_device_memory_matches_declared(
        attention_forward_rows(),
        &AttentionForward { attention },
        &device,
    );
    assert_used_device_memory_matches_declared(
        attention_backward_rows(),
        &AttentionBackward { attention },
        &device,
    );
}
