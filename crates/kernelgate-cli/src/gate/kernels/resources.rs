//! Compares compiled kernels with their recorded resources: the performance check of a machine
//! without a GPU.

use serde::Serialize;

use kernelgate::exit::ExitReason;
use kernelgate::record::resources::{KernelResources, RunResources};
use kernelgate_cuda::compiler::cubin::CompiledKernelFacts;

/// Largest relative growth of the instruction count that is accepted.
pub const MAX_INSTRUCTION_GROWTH: f64 = 0.10;

/// A changed resource of one kernel, such as its registers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ResourceChange {
    /// Build and symbol.
    pub kernel: String,
    /// The change as text: "registers 64 -> 72".
    pub what: String,
    /// Returns whether the changed resource makes the check fail.
    pub worse: bool,
}

/// Result of the resource check for one architecture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ResourcesOutcome {
    /// The architecture.
    pub arch: String,
    /// The reason why the records cannot be compared; `None` if they are comparable.
    pub refused: Option<String>,
    /// Number of compared kernels.
    pub compared: usize,
    /// Kernel resources that changed, sorted by kernel.
    pub changes: Vec<ResourceChange>,
    /// Whether record and build have no kernel in common, although at least one of them has
    /// kernels.
    #[serde(skip)]
    pub nothing_in_common: bool,
}

impl ResourcesOutcome {
    /// The exit code; inconclusive if nothing could be compared.
    pub fn exit(&self) -> ExitReason {
        match (&self.refused, self.changes.iter().any(|change| change.worse)) {
            (Some(_), _) => ExitReason::Refused,
            (None, true) => ExitReason::Regression,
            (None, false) if self.nothing_in_common => ExitReason::Inconclusive,
            (None, false) => ExitReason::Fine,
        }
    }
}

/// Compares the kernels that were compiled now with the record.
pub fn compare_resources(base: &RunResources, head: &RunResources) -> ResourcesOutcome {
    let mut outcome = ResourcesOutcome {
        arch: head.arch.clone(),
        refused: None,
        compared: 0,
        changes: Vec::new(),
        nothing_in_common: false,
    };
    for (field, base, head) in
        [("arch", &base.arch, &head.arch), ("compiler", &base.compiler, &head.compiler)]
    {
        if base != head {
            outcome.refused = Some(format!("{field} is `{base}` in the record and `{head}` here"));
            return outcome;
        }
    }
    for (name, kernel) in &head.kernels {
        match base.kernels.get(name) {
            Some(base) => {
                outcome.compared += 1;
                outcome.changes.extend(resource_changes(name, base, kernel));
            }
            // A new kernel has no record to compare with, but it may not spill unnoticed.
            None => {
                let CompiledKernelFacts { registers, spill_store_bytes, performance_loss, .. } =
                    &kernel.facts;
                let mut what =
                    format!("new: {registers} registers, {spill_store_bytes} spill bytes");
                if let Some(loss) = performance_loss {
                    what = format!("{what}; {loss}");
                }
                let kernel = name.clone();
                outcome.changes.push(ResourceChange { kernel, what, worse: false });
            }
        }
    }
    let empty = base.kernels.is_empty() && head.kernels.is_empty();
    outcome.nothing_in_common = outcome.compared == 0 && !empty;
    let change = |kernel: &str, what: String, worse: bool| ResourceChange {
        kernel: kernel.to_owned(),
        what,
        worse,
    };
    let gone = base.kernels.keys().filter(|name| !head.kernels.contains_key(*name));
    // A kernel that no longer runs on the architecture is reported below with its build.
    let gone = gone.filter(|name| !head.left_out.contains_key(build_of_kernel(name)));
    outcome.changes.extend(gone.map(|name| change(name, "gone".to_owned(), false)));
    for (build, lack) in &head.left_out {
        let ran = base.kernels.keys().any(|name| build_of_kernel(name) == build);
        if ran {
            outcome.changes.push(change(build, format!("ran here, now {lack}"), true));
        } else if base.left_out.get(build) != Some(lack) {
            outcome.changes.push(change(build, format!("does not run here: {lack}"), false));
        }
    }
    outcome
}

/// Removes recorded kernels that some benches do not list, because these may belong to other
/// benches.
pub fn keep_listed_kernels(record: &mut RunResources, listed: &RunResources) {
    record.kernels.retain(|name, _| {
        listed.kernels.contains_key(name) || listed.left_out.contains_key(build_of_kernel(name))
    });
}

/// Returns the build's name, with which a kernel's name begins.
fn build_of_kernel(kernel: &str) -> &str {
    kernel.split(": ").next().unwrap_or(kernel)
}

/// Describes the changes in a kernel, one on each line.
pub(super) fn resource_changes(
    name: &str,
    base: &KernelResources,
    head: &KernelResources,
) -> Vec<ResourceChange> {
    let mut found = Vec::new();
    let mut note = |what: String, worse: bool| {
        found.push(ResourceChange { kernel: name.to_owned(), what, worse })
    };
    let mut count = |label: &str, base: u32, head: u32, worse: bool| {
        if base != head {
            note(format!("{label} {base} -> {head}"), worse);
        }
    };
    let (b, h) = (&base.facts, &head.facts);
    count(
        "spill stores",
        b.spill_store_bytes,
        h.spill_store_bytes,
        h.spill_store_bytes > b.spill_store_bytes,
    );
    count(
        "spill loads",
        b.spill_load_bytes,
        h.spill_load_bytes,
        h.spill_load_bytes > b.spill_load_bytes,
    );
    count("stack bytes", b.stack_bytes, h.stack_bytes, h.stack_bytes > b.stack_bytes);
    // Registers and shared memory matter through occupancy, which is judged itself.
    count("registers", b.registers, h.registers, false);
    count(
        "shared bytes",
        b.shared_bytes + base.dynamic_shared_bytes,
        h.shared_bytes + head.dynamic_shared_bytes,
        false,
    );
    count("block", base.block, head.block, false);
    if let (Some(base), Some(head)) = (base.occupancy_percent, head.occupancy_percent) {
        count("occupancy %", base, head, head < base);
    }
    let grown =
        f64::from(h.instructions) > f64::from(b.instructions) * (1.0 + MAX_INSTRUCTION_GROWTH);
    count("instructions", b.instructions, h.instructions, grown);
    for class in b.mix.keys().chain(h.mix.keys().filter(|class| !b.mix.contains_key(*class))) {
        let count_in =
            |mix: &std::collections::BTreeMap<String, u32>| mix.get(class).copied().unwrap_or(0);
        count(&format!("{class} instructions"), count_in(&b.mix), count_in(&h.mix), false);
    }
    match (&b.performance_loss, &h.performance_loss) {
        (None, Some(loss)) => note(loss.clone(), true),
        (Some(loss), None) => note(format!("no more: {loss}"), false),
        _ => {}
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn changed_resources(change: impl Fn(&mut KernelResources)) -> RunResources {
        let facts = CompiledKernelFacts {
            registers: 64,
            instructions: 100,
            mix: [("fp32".to_owned(), 100)].into(),
            ..CompiledKernelFacts::default()
        };
        let mut kernel = KernelResources {
            facts,
            block: 128,
            dynamic_shared_bytes: 0,
            occupancy_percent: Some(50),
        };
        change(&mut kernel);
        RunResources {
            arch: "sm_90a".to_owned(),
            compiler: "13.0".to_owned(),
            kernels: [("k".to_owned(), kernel)].into(),
            left_out: BTreeMap::new(),
        }
    }

    fn exit_after_change(change: impl Fn(&mut KernelResources)) -> ExitReason {
        compare_resources(&changed_resources(|_| {}), &changed_resources(change)).exit()
    }

    #[test]
    fn spills_lower_occupancy_and_growth_fail_the_resource_check() {
        assert_eq!(exit_after_change(|_| {}), ExitReason::Fine);
        assert_eq!(
            exit_after_change(|kernel| kernel.facts.spill_store_bytes = 8),
            ExitReason::Regression
        );
        assert_eq!(
            exit_after_change(|kernel| kernel.occupancy_percent = Some(49)),
            ExitReason::Regression
        );
        assert_eq!(
            exit_after_change(|kernel| kernel.facts.instructions = 111),
            ExitReason::Regression
        );
        assert_eq!(exit_after_change(|kernel| kernel.facts.instructions = 110), ExitReason::Fine);
        assert_eq!(
            exit_after_change(|kernel| kernel.occupancy_percent = Some(75)),
            ExitReason::Fine
        );
        let serial = |kernel: &mut KernelResources| {
            kernel.facts.performance_loss = Some("wgmma is serialized".to_owned());
        };
        assert_eq!(exit_after_change(serial), ExitReason::Regression);
        assert_eq!(
            compare_resources(&changed_resources(serial), &changed_resources(serial)).exit(),
            ExitReason::Fine
        );
        assert_eq!(
            compare_resources(&changed_resources(serial), &changed_resources(|_| {})).exit(),
            ExitReason::Fine
        );
        let outcome = compare_resources(
            &changed_resources(|_| {}),
            &changed_resources(|kernel| kernel.facts.registers = 72),
        );
        assert_eq!(
            (outcome.changes[0].what.as_str(), outcome.exit()),
            ("registers 64 -> 72", ExitReason::Fine)
        );
    }

    #[test]
    fn another_compiler_is_refused_and_new_and_removed_kernels_are_reported() {
        let (base, mut head) = (changed_resources(|_| {}), changed_resources(|_| {}));
        head.compiler = "13.1".to_owned();
        let outcome = compare_resources(&base, &head);
        assert_eq!(
            (outcome.exit(), outcome.refused.unwrap().as_str()),
            (ExitReason::Refused, "compiler is `13.0` in the record and `13.1` here")
        );
        let mut head = changed_resources(|_| {});
        let kernel = head.kernels.remove("k").unwrap();
        head.kernels.insert("other".to_owned(), kernel);
        let outcome = compare_resources(&base, &head);
        let changes: Vec<_> = outcome.changes.iter().map(|change| change.what.as_str()).collect();
        assert_eq!(changes, ["new: 64 registers, 0 spill bytes", "gone"]);
        assert_eq!(outcome.exit(), ExitReason::Inconclusive, "nothing was compared");
        head.kernels.extend(base.kernels.clone());
        assert_eq!(compare_resources(&base, &head).exit(), ExitReason::Fine);
        // An architecture on which no kernel runs has nothing to compare.
        let none = RunResources { kernels: BTreeMap::new(), ..base };
        assert_eq!(compare_resources(&none, &none).exit(), ExitReason::Fine);
    }

    #[test]
    fn recorded_kernels_of_other_benches_do_not_count_as_removed() {
        let mut record = changed_resources(|_| {});
        let kernel = record.kernels["k"].clone();
        record.kernels.extend(["other", "ran"].map(|name| (name.to_owned(), kernel.clone())));
        let mut listed = changed_resources(|_| {});
        listed.left_out.insert("ran".to_owned(), "needs sm_90a".to_owned());
        keep_listed_kernels(&mut record, &listed);
        let outcome = compare_resources(&record, &listed);
        let changes: Vec<_> = outcome.changes.iter().map(|change| change.what.as_str()).collect();
        assert_eq!((outcome.compared, changes), (1, vec!["ran here, now needs sm_90a"]));
    }

    #[test]
    fn a_build_that_no_longer_runs_on_the_architecture_fails_the_check() {
        let (base, mut head) = (changed_resources(|_| {}), changed_resources(|_| {}));
        let kernel = head.kernels.remove("k").unwrap();
        head.left_out.insert("k".to_owned(), "needs sm_90a".to_owned());
        let outcome = compare_resources(&base, &head);
        let changes = |outcome: &ResourcesOutcome| {
            outcome.changes.iter().map(|change| change.what.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            (changes(&outcome), outcome.exit()),
            (vec!["ran here, now needs sm_90a".to_owned()], ExitReason::Regression)
        );
        // A kernel that is named by its file and symbol is treated alike.
        let mut base = changed_resources(|_| {});
        base.kernels = [("k: k_finish".to_owned(), kernel)].into();
        assert_eq!(compare_resources(&base, &head).exit(), ExitReason::Regression);
        // A kernel that never ran on the architecture is reported once, when it is new.
        base.kernels.clear();
        assert_eq!(changes(&compare_resources(&base, &head)), ["does not run here: needs sm_90a"]);
        base.left_out = head.left_out.clone();
        assert_eq!(changes(&compare_resources(&base, &head)), [""; 0]);
    }
}
