//! Tests of the tables and of the declared memory, which run on any machine. On a GPU every rung is
//! compared with the reference, for shapes that are not multiples of a tile, with outliers, and by
//! FlashAttention's own tolerance. Rungs must also be repeatable, and their memory is compared with
//! the declared memory.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;
use crate::attention::components::{self, ScoresProblem, SoftmaxProblem, ValuesProblem};
use crate::attention::definition::Attention;
use crate::gpu_tests::{lock_first_gpu, prepare_row};
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{Executable, Prepare};
use kernelgate::verify::{compare_outputs, launch_and_verify};
use kernelgate::workload::{Dtype, Expected, Problem, TensorData, Tensors, Tolerance};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::memory;

/// Verifies every selected row that supports the problem; returns the number of such rows.
fn check<P: Problem>(
    rows: impl IntoIterator<Item = &'static Implementation<P>>,
    wanted: impl Fn(&str) -> bool,
    problem: &P,
    device: &Arc<Device>,
    name: &str,
) -> usize {
    let inputs = problem.inputs(21);
    let expected = problem.reference(&inputs);
    let mut verified = 0;
    for row in rows.into_iter().filter(|row| wanted(row.name) && (row.supports)(problem).is_ok()) {
        let Some(mut task) = prepare_row(row, problem, &inputs, device) else { continue };
        // Each row is launched twice, because a launch must not depend on the outputs of the
        // previous one.
        for launch in 1..=2 {
            let result = launch_and_verify(&mut task, &expected, problem.tolerance());
            assert!(
                result.is_ok(),
                "{} launch {launch}, {name}: {}",
                row.name,
                result.unwrap_err()
            );
        }
        verified += 1;
    }
    verified
}

pub fn bf16_attention(b: usize, h: usize, s: usize, d: usize, causal: bool) -> Attention {
    Attention { b, h, h_kv: h, s, keys: s, d, causal, dtype: Dtype::Bf16, outliers: false }
}

#[test]
fn row_names_are_distinct_and_f32_is_declined() {
    fn row_names<P: 'static>(
        rows: impl IntoIterator<Item = &'static Implementation<P>>,
        problem: &P,
    ) {
        let rows: Vec<_> = rows.into_iter().collect();
        let names: BTreeSet<&str> = rows.iter().map(|row| row.name).collect();
        assert_eq!(names.len(), rows.len());
        for row in rows {
            assert!(row.name.starts_with("cuda/") && !row.about.is_empty());
            let computed = if row.name == FP8_ROW { "fp8" } else { "bf16 and f16" };
            let reason = format!("computes {computed} only");
            assert_eq!((row.supports)(problem), Err(reason), "{}", row.name);
        }
    }
    let attention = Attention { dtype: Dtype::F32, ..bf16_attention(1, 2, 100, 64, false) };
    row_names(forward_rows(), &AttentionForward { attention });
    row_names(backward_rows(), &AttentionBackward { attention });
    let shape = components::ComponentShape { b: 1, h: 2, s: 100, d: 64, dtype: Dtype::F32 };
    row_names(SCORES_ROWS, &ScoresProblem { shape });
    row_names(SOFTMAX, &SoftmaxProblem { shape: components::ComponentShape { d: 1, ..shape } });
    row_names(VALUES_ROWS, &ValuesProblem { shape });
}

#[test]
fn rungs_that_store_scores_decline_long_sequences() {
    let running = |s| {
        let problem = AttentionForward { attention: bf16_attention(16_384 / s, 16, s, 128, false) };
        forward_rows()
            .filter(|row| (row.supports)(&problem).is_ok())
            .map(|row| row.name)
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
fn the_declared_device_memory_follows_from_the_shapes() {
    fn declared_bytes<P: 'static>(
        rows: impl IntoIterator<Item = &'static Implementation<P>>,
        name: &str,
        problem: &P,
    ) -> u64 {
        let row = rows.into_iter().find(|row| row.name == name).unwrap();
        let Prepare::CudaWithin { device_bytes, .. } = row.prepare else {
            panic!("{name} declares no memory")
        };
        device_bytes(problem)
    }
    // Six heads of 100 rows of 128 elements; steps of 80 queries pad the rows to 160.
    let attention = bf16_attention(2, 3, 100, 128, true);
    let (vectors, pairs, rows, padded) = (6 * 100 * 128 * 2, 6 * 100 * 100, 6 * 100, 6 * 160);
    assert_eq!(
        declared_bytes(forward_rows(), "cuda/naive", &AttentionForward { attention }),
        4 * vectors + 6 * pairs
    );
    assert_eq!(
        declared_bytes(forward_rows(), "cuda/tiled", &AttentionForward { attention }),
        4 * vectors + 4 * pairs
    );
    assert_eq!(
        declared_bytes(forward_rows(), "cuda/flash_mma", &AttentionForward { attention }),
        4 * vectors
    );
    assert_eq!(
        declared_bytes(backward_rows(), "cuda/naive", &AttentionBackward { attention }),
        8 * vectors + 8 * rows + 8 * pairs
    );
    assert_eq!(
        declared_bytes(backward_rows(), "cuda/flash_mma", &AttentionBackward { attention }),
        8 * vectors + 4 * rows + 8 * padded + 4 * padded * 128
    );
    let shape = components::ComponentShape { b: 2, h: 3, s: 100, d: 128, dtype: Dtype::Bf16 };
    assert_eq!(
        declared_bytes(SCORES_ROWS, "cuda/naive", &ScoresProblem { shape }),
        2 * vectors + 4 * pairs
    );
    assert_eq!(
        declared_bytes(
            SOFTMAX,
            "cuda/naive",
            &SoftmaxProblem { shape: components::ComponentShape { d: 1, ..shape } }
        ),
        6 * pairs
    );
    assert_eq!(
        declared_bytes(VALUES_ROWS, "cuda/naive", &ValuesProblem { shape }),
        2 * vectors + 2 * pairs
    );
}

/// Name of the library's row, which is tested separately: its errors must not hide the results of
/// our rows.
const LIBRARY_ROW: &str = "cuda/cudnn";
const FP8_ROW: &str = "cuda/flash_wgmma_fp8";
const DETERMINISTIC_ROW: &str = "cuda/flash_wgmma_deterministic";

#[test]
fn every_attention_row_agrees_with_the_reference_at_odd_shapes_and_on_outliers() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let (rungs, backward_rungs) = if device.facts().arch == "sm_90a" { (5, 4) } else { (4, 2) };
    for s in [1, 7, 65, 129, 200, 333] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            for (dtype, outliers) in
                [(Dtype::Bf16, false), (Dtype::F16, false), (Dtype::Bf16, true)]
            {
                let attention = Attention { dtype, outliers, ..bf16_attention(2, 3, s, d, causal) };
                let name = format!("{attention:?}");
                assert_eq!(
                    check(
                        forward_rows(),
                        |row| row != LIBRARY_ROW,
                        &AttentionForward { attention },
                        &device,
                        &name
                    ),
                    // With few queries there is one more row, the decode kernel.
                    rungs + usize::from(s <= 64)
                );
                assert_eq!(
                    check(
                        backward_rows(),
                        |row| row != LIBRARY_ROW,
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
fn tiles_of_several_warpgroups_agree_with_the_reference_at_their_edges() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let expected = usize::from(device.facts().arch == "sm_90a");
    // Sequence lengths around the rows of warpgroups, tiles and key blocks, some with several tiles
    // for each multiprocessor; many short heads, each of which is one tile.
    let few = [(3, 63), (3, 127), (3, 193), (5, 1000), (1, 8191)];
    let many = [(150, 1), (198, 64), (150, 65), (267, 128), (150, 193), (198, 250), (150, 321)];
    for (h, s) in few.into_iter().chain(many) {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let attention = Attention { dtype, ..bf16_attention(2, h, s, d, causal) };
                let name = format!("{attention:?}");
                let selected = |row: &str| row == "cuda/flash_wgmma";
                let problem = AttentionForward { attention };
                assert_eq!(check(forward_rows(), selected, &problem, &device, &name), expected);
                // The fp64 gradients of the longest sequence would take minutes.
                if s <= 1000 {
                    let problem = AttentionBackward { attention };
                    let selected = |row: &str| selected(row) || row == DETERMINISTIC_ROW;
                    assert_eq!(
                        check(backward_rows(), selected, &problem, &device, &name),
                        2 * expected
                    );
                }
            }
        }
    }
}

#[test]
fn grouped_heads_and_more_or_fewer_keys_than_queries_agree_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let flash = 1 + usize::from(device.facts().arch == "sm_90a");
    // Numbers of query heads, key heads, queries and keys: one row in a tile and many, one block a
    // head and several, tiles whose last keys only some queries see, keys that are not a multiple
    // of a tile.
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
                let attention =
                    Attention { h_kv, keys, dtype, ..bf16_attention(2, h, s, d, causal) };
                let (problem, name) = (AttentionForward { attention }, format!("{attention:?}"));
                assert_eq!(
                    check(forward_rows(), |row| row != LIBRARY_ROW, &problem, &device, &name),
                    flash + usize::from(s <= 64)
                );
            }
        }
    }
}

#[test]
fn gradients_of_grouped_heads_agree_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let expected = 2 * usize::from(device.facts().arch == "sm_90a");
    // One key block a head and several; steps over one query head and over many.
    for (h, h_kv, s) in [(8, 1, 1), (6, 2, 63), (8, 2, 129), (6, 3, 1000)] {
        for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let attention = Attention { h_kv, dtype, ..bf16_attention(2, h, s, d, causal) };
                let (problem, name) = (AttentionBackward { attention }, format!("{attention:?}"));
                assert_eq!(check(backward_rows(), |_| true, &problem, &device, &name), expected);
            }
        }
    }
}

#[test]
fn fp8_attention_agrees_with_the_reference_of_its_rounded_operands() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let expected = usize::from(device.facts().arch == "sm_90a");
    for (h, s) in [(3, 1), (3, 63), (3, 97), (3, 193), (150, 321), (5, 1000), (1, 8191)] {
        for (causal, outliers) in [(false, false), (true, false), (false, true)] {
            let attention =
                Attention { dtype: Dtype::Fp8, outliers, ..bf16_attention(2, h, s, 128, causal) };
            let problem = AttentionForward { attention };
            let name = format!("{attention:?}");
            assert_eq!(check(forward_rows(), |_| true, &problem, &device, &name), expected);
        }
    }
}

#[test]
fn the_cudnn_row_agrees_with_the_reference_for_problems_it_supports() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let mut verified = 0;
    for (s, keys) in [(1, 512), (128, 256), (256, 256)] {
        let attention = Attention { h_kv: 2, keys, ..bf16_attention(2, 8, s, 128, false) };
        let (problem, name) = (AttentionForward { attention }, format!("{attention:?}"));
        verified += check(forward_rows(), |row| row == LIBRARY_ROW, &problem, &device, &name);
    }
    for s in [128, 200, 384] {
        for (d, causal, dtype) in [
            (64, false, Dtype::Bf16),
            (64, true, Dtype::F16),
            (128, false, Dtype::F16),
            (128, true, Dtype::Bf16),
        ] {
            let attention = Attention { dtype, ..bf16_attention(2, 3, s, d, causal) };
            let name = format!("{attention:?}");
            verified += check(
                forward_rows(),
                |row| row == LIBRARY_ROW,
                &AttentionForward { attention },
                &device,
                &name,
            );
            verified += check(
                backward_rows(),
                |row| row == LIBRARY_ROW,
                &AttentionBackward { attention },
                &device,
                &name,
            );
        }
    }
    eprintln!("{LIBRARY_ROW}: {verified} of 27 problems verified");
}

#[test]
fn the_gpu_rows_of_the_three_steps_agree_with_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for s in [1, 7, 65, 200] {
        for (d, dtype) in [(64, Dtype::Bf16), (128, Dtype::F16)] {
            let shape = components::ComponentShape { b: 2, h: 3, s, d, dtype };
            let name = format!("{shape:?}");
            // The first rung of each step supports every problem.
            assert!(check(SCORES_ROWS, |_| true, &ScoresProblem { shape }, &device, &name) >= 1);
            assert!(
                check(
                    SOFTMAX,
                    |_| true,
                    &SoftmaxProblem { shape: components::ComponentShape { d: 1, ..shape } },
                    &device,
                    &name
                ) >= 1
            );
            assert!(check(VALUES_ROWS, |_| true, &ValuesProblem { shape }, &device, &name) >= 1);
        }
    }
}

/// Maximum of |out - ref| divided by the maximum of |ref|, for each reference.
fn relative_errors(task: &mut CudaTask, expected: &[Expected]) -> Vec<f64> {
    let any = Tolerance { max_error: f64::MAX, relative_l2: f64::MAX };
    task.launch().unwrap();
    task.synchronize().unwrap();
    let outputs = task.outputs().unwrap();
    let error = |one: &Expected| {
        let mut alone = Tensors::new();
        alone.insert(&one.name, outputs.tensor(&one.name).clone());
        compare_outputs(&alone, std::slice::from_ref(one), any).unwrap().errors.max_error
    };
    expected.iter().map(error).collect()
}

/// Maximum of |(ref + 0.3 - 0.3) - ref| in bf16 divided by the maximum of |ref|: the effect of two
/// roundings on values of that size.
fn two_roundings_error(expected: &Expected) -> f64 {
    let TensorData::F64(values) = &expected.values else { panic!("fp64") };
    let round = |x: f64| half::bf16::from_f64(x).to_f64();
    let largest = values.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    values
        .iter()
        .map(|&x| (round(round(round(x) + 0.3) - 0.3) - round(x)).abs())
        .fold(0.0, f64::max)
        / largest
}

/// FlashAttention's criterion: the error of each rung is at most `factor` times the naive rung's
/// error plus two roundings.
fn check_error_gate<P: Problem>(
    rows: impl IntoIterator<Item = &'static Implementation<P>>,
    problem: &P,
    factor: f64,
    device: &Arc<Device>,
) {
    let mut rows = rows.into_iter();
    let naive = rows.next().expect("a first rung");
    let inputs = problem.inputs(22);
    let expected = problem.reference(&inputs);
    let naive = relative_errors(
        &mut prepare_row(naive, problem, &inputs, device).expect("an own kernel"),
        &expected,
    );
    for row in rows.filter(|row| row.name != LIBRARY_ROW && (row.supports)(problem).is_ok()) {
        let Some(mut task) = prepare_row(row, problem, &inputs, device) else { continue };
        let found = relative_errors(&mut task, &expected);
        for ((found, naive), expected) in found.iter().zip(&naive).zip(&expected) {
            let allowed = factor * naive + 2.0 * two_roundings_error(expected);
            assert!(
                *found <= allowed,
                "{} {}: {found:.1e}, naive {naive:.1e}, allowed {allowed:.1e}",
                row.name,
                expected.name
            );
        }
    }
}

#[test]
fn every_attention_row_meets_flash_attentions_accuracy_test() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (s, d, causal, outliers) in [
        (512, 64, false, false),
        (500, 128, true, false),
        (512, 128, false, true),
        (300, 64, true, true),
        (64, 128, false, true),
    ] {
        let attention = Attention { outliers, ..bf16_attention(1, 4, s, d, causal) };
        check_error_gate(forward_rows(), &AttentionForward { attention }, 2.0, &device);
        check_error_gate(backward_rows(), &AttentionBackward { attention }, 3.0, &device);
    }
}

#[test]
fn launches_give_equal_bits_except_rows_that_sum_dq_in_memory() {
    /// Names of the outputs whose bits differ between five launches.
    fn outputs_with_differing_bits<P: Problem>(
        row: &Implementation<P>,
        problem: &P,
        device: &Arc<Device>,
    ) -> Vec<String> {
        if (row.supports)(problem).is_err() {
            return Vec::new();
        }
        let Some(mut task) = prepare_row(row, problem, &problem.inputs(23), device) else {
            return Vec::new();
        };
        let mut launch = || {
            task.poison_outputs().unwrap();
            task.launch().unwrap();
            task.synchronize().unwrap();
            task.outputs().unwrap().clone()
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
    /// Rows that add to grad_q in the order in which blocks reach it.
    const ATOMIC_ROWS: [&str; 2] = ["cuda/flash_mma", "cuda/flash_wgmma"];
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let attention = bf16_attention(1, 16, 1000, 128, false);
    let fp8 = Attention { dtype: Dtype::Fp8, ..attention };
    let forward = [attention, fp8].into_iter().flat_map(|attention| {
        let problem = AttentionForward { attention };
        forward_rows()
            .map(|row| (row.name, outputs_with_differing_bits(row, &problem, &device)))
            .collect::<Vec<_>>()
    });
    let backward = backward_rows().map(|row| {
        (row.name, outputs_with_differing_bits(row, &AttentionBackward { attention }, &device))
    });
    for (name, differing) in forward.chain(backward) {
        eprintln!("{name}: outputs that differ between launches: {differing:?}");
        match name {
            // The repeatability of the library's row is not tested.
            LIBRARY_ROW => {}
            _ => assert!(
                differing.iter().all(|output| output == "grad_q" && ATOMIC_ROWS.contains(&name)),
                "{name}: {differing:?}"
            ),
        }
    }
}

#[test]
fn the_declared_device_memory_is_within_a_twentieth_of_the_used_memory() {
    fn check_used_memory_of_rows<P: Problem>(
        rows: impl IntoIterator<Item = &'static Implementation<P>>,
        problem: &P,
        device: &Arc<Device>,
    ) {
        let inputs = problem.inputs(24);
        for row in rows.into_iter().filter(|row| (row.supports)(problem).is_ok()) {
            let Prepare::CudaWithin { device_bytes, .. } = row.prepare else {
                panic!("{} declares no memory", row.name)
            };
            let free = || memory::memory_after_launches(device).unwrap().0 as f64;
            // The row is prepared once before the measurement, so that modules and the pool's own
            // overhead are not counted.
            if prepare_row(row, problem, &inputs, device).is_none() {
                continue;
            }
            let before = free();
            let task = prepare_row(row, problem, &inputs, device);
            let used = before - free();
            drop(task);
            let declared = device_bytes(problem) as f64;
            eprintln!("{}: declared {:.1} MB, used {:.1} MB", row.name, declared / 1e6, used / 1e6);
            // The driver allocates in pieces of 32 MiB. The memory of a library's row is only
            // printed.
            let close = (used - declared).abs() <= 0.05 * declared + 64e6;
            assert!(
                close || row.name == LIBRARY_ROW,
                "{}: declared {declared}, used {used}",
                row.name
            );
        }
    }
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let attention = bf16_attention(16, 16, 1024, 128, false);
    check_used_memory_of_rows(forward_rows(), &AttentionForward { attention }, &device);
    check_used_memory_of_rows(backward_rows(), &AttentionBackward { attention }, &device);
}
