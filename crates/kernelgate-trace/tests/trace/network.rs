//! Tests that answer the profiling guide's questions from traces of a small language model,
//! recorded by `peers/transformer_trace.py` on an H100.

use std::path::Path;

use kernelgate_trace::diagnose::network::{
    PhasesOfNetwork, TrainingPhase, kernel_time_share_by_work_class,
};
use kernelgate_trace::diagnose::{KernelWorkClass, TraceDiagnosis, diagnose_trace_in_memory};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, WantedTraceParts};

/// Reads a trace of the tests' folder `fixture`.
pub fn read_fixture_trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trace/fixture").join(name);
    read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap()
}

fn diagnose_fixture_trace(name: &str) -> TraceDiagnosis {
    diagnose_trace_in_memory(&read_fixture_trace(name))
}

fn phases_of_network(of: &TraceDiagnosis) -> &PhasesOfNetwork {
    of.network.as_ref().unwrap()
}

#[test]
fn a_training_step_answers_the_questions_of_the_guide() {
    let found = diagnose_fixture_trace("transformer_training_h100.json.gz");
    let text = found.diagnosis_to_text();
    let section = text.split("\n\n").find(|part| part.starts_with("Network")).unwrap();
    assert!(section.lines().all(|line| line.chars().count() <= 100), "{section}");
    insta::assert_snapshot!(section);
}

#[test]
fn softmax_is_compared_with_the_products_of_attention() {
    let found = diagnose_fixture_trace("transformer_inference_h100.json.gz");
    let attention = phases_of_network(&found).attention.as_ref().unwrap();
    // Heads have 64 values: each score takes 2 · 2 · 64 operations in the matrix products and 5 in
    // softmax.
    assert!((attention.matmul_to_softmax_flops_ratio().unwrap() - 51.2).abs() < 1e-9);
    assert!(attention.softmax_to_matmul_time_ratio().unwrap() > 1.0, "softmax is not fused");
    assert!(!phases_of_network(&found).has_backward_phase());
}

#[test]
fn phases_of_a_step_have_all_its_kernels() {
    let found = diagnose_fixture_trace("transformer_training_h100.json.gz");
    let network = phases_of_network(&found);
    // The training program sets gradients to 0 before the forward pass, so some kernel time is
    // outside all phases.
    assert!(
        (0.0..0.05).contains(&network.kernel_time_share_outside_phases),
        "{}",
        network.kernel_time_share_outside_phases
    );
    let optimizer = network.times_of_phase(TrainingPhase::Optimizer).unwrap();
    assert_eq!(optimizer.kernels[0].class, KernelWorkClass::OptimizerStep);
    let share: f64 = kernel_time_share_by_work_class(&network.kernels_of_training_step())
        .iter()
        .map(|(_, share)| share)
        .sum();
    assert!((share - 1.0).abs() < 1e-9);
}
