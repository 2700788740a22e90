//! Tests with builds that verify fewer outputs of a case than their base: `compare` never calls a
//! case unchanged that the head verifies less than the base.

#![cfg(unix)]

use super::report_without_times;
use crate::package::lines_with_word;
use crate::package::scratch::{SCRATCH_BENCH_SOURCE, TempRepository};

const WORK_METHOD_START: &str = "    fn work(&self)";
/// A `Problem` implementation without expected outputs.
const METHODS_WITHOUT_REFERENCE: &str =
    "    fn source_of_expected_outputs(&self) -> kernelgate::workload::SourceOfExpectedOutputs {
        kernelgate::workload::SourceOfExpectedOutputs::NotCompared
    }
    fn work(&self)";
const EXPECTED_OUTPUT_EXPRESSION: &str = "Expected::all(\"y\", [1, self.n], y)";

/// Source of the bench, changed so that each element is an output of its own and a reference can
/// cover some of them.
fn bench_with_one_output_per_element(source: &str) -> String {
    source.replace("[1, self.n], y)", "[self.n, 1], y)").replace("[1, problem.n]", "[problem.n, 1]")
}

#[test]
fn a_build_without_the_reference_is_compared_with_the_outputs_of_its_base() {
    let scratch = TempRepository::new();
    scratch.replace_text_in_bench(WORK_METHOD_START, METHODS_WITHOUT_REFERENCE);
    let outcome = scratch.run_comparison("--base main --max-blocks 1 --format json");
    insta::assert_snapshot!(report_without_times(outcome.assert_exit(3)), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2} {"base":{"checked":1024,"kind":"verified","total":1024},"case":"scratch/sum/n1024/cpu/hot","head":{"checked":1024,"kind":"compared_with_base","total":1024},"kind":"less_verified"}
    verification: {"base":{"checked":1024,"kind":"verified","total":1024},"case":"scratch/sum/n1024/cpu/hot","head":{"checked":1024,"kind":"compared_with_base","total":1024}}
    "#);
    insta::assert_snapshot!(lines_with_word(&outcome.stderr, "verified"), @"1 cases of spin are no longer verified");
    let text = scratch.run_comparison("--base main --max-blocks 1 --resume");
    insta::assert_snapshot!(lines_with_word(&text.assert_exit(3).stdout, "less verified"), @r"
    inconclusive: scratch/sum/n1024/cpu/hot: less verified: compared with the base's outputs only (before: every element verified)
    inconclusive: too few pairs; less verified: compared with the base's outputs only (before: every element verified): scratch/sum/n1024/cpu/hot
    0 regressed, 0 improved, 0 unchanged, 1 inconclusive, 1 less verified of 1 (threshold 200%)
    ");
    // If the rules accept that less is verified, the case is judged by its time.
    scratch.write_file(
        "kernelgate.toml",
        "[[accept]]\ncases = \"sum\"\nless-verified = true\nreason = \"no fp64 form\"\n",
    );
    let accepted = scratch.run_comparison("--base main --format json");
    insta::assert_snapshot!(report_without_times(accepted.assert_exit(0)), @r#"
    scratch/sum/n1024/cpu/hot unchanged
    rules/accepted: {"case":"scratch/sum/n1024/cpu/hot","growth":null,"less_verified":true,"reason":"no fp64 form","removed":false,"slower":null}
    "#);
    // The case fails if its outputs are wrong, even if the rules accept that less is verified.
    let other = SCRATCH_BENCH_SOURCE
        .replace(WORK_METHOD_START, METHODS_WITHOUT_REFERENCE)
        .replace("*y = x * x", "*y = 1.5 * x * x");
    scratch.write_file("benches/spin.rs", &other);
    let wrong = scratch.run_comparison("--base main --format json");
    insta::assert_snapshot!(report_without_times(wrong.assert_exit(1)), @r#"failed: scratch/sum/n1024/cpu/hot: {"kind":"too_far","names":{"output":"y"},"numbers":{"actual":N,"expected":N,"max_error":N,"max_error_allowed":1e-6,"relative_l2":N,"relative_l2_allowed":1e-6,"worst":58.0},"text":"against the outputs of the base's build: output `y`: max error N (allowed 1e-6), relative L2 N (allowed 1e-6); worst at PLACE"}"#);
}

#[test]
fn fewer_compared_elements_are_inconclusive_and_more_are_fine() {
    let scratch = TempRepository::new();
    let rows = bench_with_one_output_per_element(SCRATCH_BENCH_SOURCE);
    scratch.write_file("benches/spin.rs", &rows);
    scratch.commit_sources("rows");
    let one = "Expected::sampled_rows(\"y\", [self.n, 1], vec![0], vec![y[0]])";
    assert!(SCRATCH_BENCH_SOURCE.contains(EXPECTED_OUTPUT_EXPRESSION));
    scratch.write_file(
        "benches/spin.rs",
        &rows.replace(&bench_with_one_output_per_element(EXPECTED_OUTPUT_EXPRESSION), one),
    );
    let less = scratch.run_comparison("--base main --max-blocks 1 --format json");
    insta::assert_snapshot!(report_without_times(less.assert_exit(3)), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2} {"base":{"checked":1024,"kind":"verified","total":1024},"case":"scratch/sum/n1024/cpu/hot","head":{"checked":1,"kind":"verified","total":1024},"kind":"less_verified"}
    verification: {"base":{"checked":1024,"kind":"verified","total":1024},"case":"scratch/sum/n1024/cpu/hot","head":{"checked":1,"kind":"verified","total":1024}}
    "#);
    scratch.commit_sources("one");
    let more = scratch.run_comparison("--base HEAD --head main~1 --format json");
    insta::assert_snapshot!(report_without_times(more.assert_exit(0)), @"scratch/sum/n1024/cpu/hot unchanged");
}
