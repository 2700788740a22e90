//! Builds that verify a case less than their base: `compare` never calls such a case unchanged.

#![cfg(unix)]

use crate::package::scratch::{BENCH, CASE, Scratch};

const WORK: &str = "    fn work(&self)";
/// A reference without outputs.
const NO_REFERENCE: &str = "    fn reference_from(&self) -> kernelgate::workload::ReferenceSource {
        kernelgate::workload::ReferenceSource::Nothing
    }
    fn work(&self)";
const ALL: &str = "Expected::all(\"y\", [1, self.n], y)";

/// The bench with one output for each element, so that a reference can have some of them.
fn in_rows(source: &str) -> String {
    source.replace("[1, self.n], y)", "[self.n, 1], y)").replace("[1, problem.n]", "[problem.n, 1]")
}

#[test]
fn a_build_without_the_reference_is_compared_with_the_outputs_of_its_base() {
    let scratch = Scratch::new();
    scratch.bench(WORK, NO_REFERENCE);
    let less = "less verified: compared with the base's outputs only (before: every element \
                verified)";
    let outcome = scratch.compare("--base main --max-blocks 1 --format json");
    outcome.expect(3, &["1 cases of spin are no longer verified"]);
    let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(json["judged"][0]["verdict"], "inconclusive");
    let loss = &json["verification"][0];
    assert_eq!(
        (&loss["case"], &loss["head"]["kind"]),
        (&CASE.into(), &"compared_with_base".into())
    );
    scratch.compare("--base main --max-blocks 1 --resume").expect(3, &[less, "1 less verified"]);
    // If the loss is accepted, the case is judged by its time.
    scratch.write(
        "kernelgate.toml",
        "[[accept]]\ncases = \"sum\"\nless-verified = true\nreason = \"no fp64 form\"\n",
    );
    let accepted = format!("accepted in kernelgate.toml: {CASE}: less verified: no fp64 form");
    scratch.compare("--base main").expect(0, &["1 unchanged", &accepted]);
    // Other outputs are wrong, even if the loss is accepted.
    let other = BENCH.replace(WORK, NO_REFERENCE).replace("*y = x * x", "*y = 1.5 * x * x");
    scratch.write("benches/spin.rs", &other);
    scratch.compare("--base main").expect(1, &["failed in the head", CASE, "max error"]);
}

#[test]
fn fewer_compared_elements_are_inconclusive_and_more_are_fine() {
    let scratch = Scratch::new();
    let rows = in_rows(BENCH);
    scratch.write("benches/spin.rs", &rows);
    scratch.commit("rows");
    let one = "Expected::sampled_rows(\"y\", [self.n, 1], vec![0], vec![y[0]])";
    assert!(BENCH.contains(ALL));
    scratch.write("benches/spin.rs", &rows.replace(&in_rows(ALL), one));
    let less = "less verified: 1 of 1024 elements verified (before: every element verified)";
    scratch
        .compare("--base main --max-blocks 1")
        .expect(3, &[less, "1 less verified", "1 inconclusive"]);
    scratch.commit("one");
    scratch.compare("--base HEAD --head main~1").expect(0, &["1 unchanged"]);
}
