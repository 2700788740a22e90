//! The profiling guide's questions, answered from traces of a language model: two layers of the
//! small size with attention in operations of their own, by `peers/transformer_trace.py` on an H100.

use std::path::Path;

use kernelgate_trace::diagnose::network::{Network, Phase, class_shares};
use kernelgate_trace::diagnose::{Diagnosis, KernelClass, diagnose};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, Wanted};

/// A trace of `fixture/`.
pub fn trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trace/fixture").join(name);
    read::open(&path, &Wanted::ALL).unwrap()
}

fn diagnosis(name: &str) -> Diagnosis {
    diagnose(&trace(name))
}

fn network(of: &Diagnosis) -> &Network {
    of.network.as_ref().unwrap()
}

#[test]
fn a_training_step_answers_the_questions_of_the_guide() {
    let found = diagnosis("transformer_training_h100.json.gz");
    let text = found.to_text();
    let section = text.split("\n\n").find(|part| part.starts_with("Network")).unwrap();
    assert!(section.lines().all(|line| line.chars().count() <= 100), "{section}");
    insta::assert_snapshot!(section);
}

#[test]
fn softmax_is_compared_with_the_products_of_attention() {
    let found = diagnosis("transformer_inference_h100.json.gz");
    let attention = network(&found).attention.as_ref().unwrap();
    // Heads of 64 values: 2 · 2 · 64 operations of the products, 5 of softmax for each score.
    assert!((attention.flop_ratio().unwrap() - 51.2).abs() < 1e-9);
    assert!(attention.time_ratio().unwrap() > 1.0, "softmax is not fused");
    assert!(!network(&found).trains());
}

#[test]
fn phases_of_a_step_have_all_its_kernels() {
    let found = diagnosis("transformer_training_h100.json.gz");
    let network = network(&found);
    // Gradients are set to 0 before the forward pass.
    assert!((0.0..0.05).contains(&network.outside), "{}", network.outside);
    let optimizer = network.phase(Phase::Optimizer).unwrap();
    assert_eq!(optimizer.kernels[0].class, KernelClass::Optimizer);
    let share: f64 = class_shares(&network.step()).iter().map(|(_, share)| share).sum();
    assert!((share - 1.0).abs() < 1e-9);
}
