//! Compares the resources of compiled kernels (registers, spills, instructions) with a record, a
//! performance check that needs no GPU.

use serde::Serialize;

use kernelgate::exit::ProcessExitReason;
use kernelgate::record::resources::{ResourcesOfAllKernels, ResourcesOfKernel};
use kernelgate_cuda::compiler::cubin::CompiledKernelResources;

/// Relative growth of a kernel's instruction count up to which the resource check passes.
pub const MAX_INSTRUCTION_GROWTH: f64 = 0.10;

/// A resource of one kernel that changed against the record, such as its number of registers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelResourceChange {
    /// Build and symbol.
    pub kernel: String,
    /// The change of the resource as text: "registers 64 -> 72".
    pub what: String,
    /// Whether this change makes the resource check fail.
    pub worse: bool,
}

/// Result of the resource check of compiled kernels for one GPU architecture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ResourceCheckResult {
    /// GPU architecture, such as "sm_90a".
    pub arch: String,
    /// The reason why the kernels cannot be compared with the record (other architecture or
    /// compiler); `None` if they can.
    pub refused: Option<String>,
    /// Number of compared kernels.
    pub compared: usize,
    /// The kernels' changed resources, sorted by kernel.
    pub changes: Vec<KernelResourceChange>,
    /// Whether record and build have no kernel in common, although at least one of them has
    /// kernels.
    #[serde(skip)]
    pub nothing_in_common: bool,
}

impl ResourceCheckResult {
    /// Returns the exit reason of the resource check: a regression if a change is worse,
    /// inconclusive if nothing could be compared.
    pub fn exit_reason(&self) -> ProcessExitReason {
        match (&self.refused, self.changes.iter().any(|change| change.worse)) {
            (Some(_), _) => ProcessExitReason::Refused,
            (None, true) => ProcessExitReason::Regression,
            (None, false) if self.nothing_in_common => ProcessExitReason::Inconclusive,
            (None, false) => ProcessExitReason::Fine,
        }
    }
}

/// Compares the resources of the kernels that were compiled now with a record.
pub fn compare_resources_with_record(
    base: &ResourcesOfAllKernels,
    head: &ResourcesOfAllKernels,
) -> ResourceCheckResult {
    let mut outcome = ResourceCheckResult {
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
                outcome.changes.extend(changed_resources_of_kernel(name, base, kernel));
            }
            // A new kernel has no record to compare with; its registers and spills are reported so
            // that they are noticed.
            None => {
                let CompiledKernelResources {
                    registers, spill_store_bytes, performance_loss, ..
                } = &kernel.facts;
                let mut what =
                    format!("new: {registers} registers, {spill_store_bytes} spill bytes");
                if let Some(loss) = performance_loss {
                    what = format!("{what}; {loss}");
                }
                let kernel = name.clone();
                outcome.changes.push(KernelResourceChange { kernel, what, worse: false });
            }
        }
    }
    let empty = base.kernels.is_empty() && head.kernels.is_empty();
    outcome.nothing_in_common = outcome.compared == 0 && !empty;
    let change = |kernel: &str, what: String, worse: bool| KernelResourceChange {
        kernel: kernel.to_owned(),
        what,
        worse,
    };
    let gone = base.kernels.keys().filter(|name| !head.kernels.contains_key(*name));
    // A kernel whose build no longer runs on the architecture is not listed as gone, because it is
    // reported with its build further below.
    let gone =
        gone.filter(|name| !head.unsupported_kernels.contains_key(build_name_of_kernel(name)));
    outcome.changes.extend(gone.map(|name| change(name, "gone".to_owned(), false)));
    for (build, lack) in &head.unsupported_kernels {
        let ran = base.kernels.keys().any(|name| build_name_of_kernel(name) == build);
        if ran {
            outcome.changes.push(change(build, format!("ran here, now {lack}"), true));
        } else if base.unsupported_kernels.get(build) != Some(lack) {
            outcome.changes.push(change(build, format!("does not run here: {lack}"), false));
        }
    }
    outcome
}

/// Removes from the record the kernels that the queried benches do not list, because they may
/// belong to other benches.
pub fn retain_kernels_listed_by_benches(
    record: &mut ResourcesOfAllKernels,
    listed: &ResourcesOfAllKernels,
) {
    record.kernels.retain(|name, _| {
        listed.kernels.contains_key(name)
            || listed.unsupported_kernels.contains_key(build_name_of_kernel(name))
    });
}

/// Returns the name of the build (compiled file), with which a kernel's full name begins.
fn build_name_of_kernel(kernel: &str) -> &str {
    kernel.split(": ").next().unwrap_or(kernel)
}

/// Describes the changed resources of a kernel, one change for each resource.
pub(super) fn changed_resources_of_kernel(
    name: &str,
    base: &ResourcesOfKernel,
    head: &ResourcesOfKernel,
) -> Vec<KernelResourceChange> {
    let mut found = Vec::new();
    let mut note = |what: String, worse: bool| {
        found.push(KernelResourceChange { kernel: name.to_owned(), what, worse })
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
    // Changes of registers and shared memory do not fail the check, because their effect, the
    // occupancy, is judged itself.
    count("registers", b.registers, h.registers, false);
    count(
        "shared bytes",
        b.shared_bytes + base.dynamic_shared_bytes,
        h.shared_bytes + head.dynamic_shared_bytes,
        false,
    );
    count("block", base.threads_per_block, head.threads_per_block, false);
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

    fn test_resources_with_change(
        change: impl Fn(&mut ResourcesOfKernel),
    ) -> ResourcesOfAllKernels {
        let facts = CompiledKernelResources {
            registers: 64,
            instructions: 100,
            mix: [("fp32".to_owned(), 100)].into(),
            ..CompiledKernelResources::default()
        };
        let mut kernel = ResourcesOfKernel {
            facts,
            threads_per_block: 128,
            dynamic_shared_bytes: 0,
            occupancy_percent: Some(50),
        };
        change(&mut kernel);
        ResourcesOfAllKernels {
            arch: "sm_90a".to_owned(),
            compiler: "13.0".to_owned(),
            kernels: [("k".to_owned(), kernel)].into(),
            unsupported_kernels: BTreeMap::new(),
        }
    }

    fn exit_after_resource_change(change: impl Fn(&mut ResourcesOfKernel)) -> ProcessExitReason {
        compare_resources_with_record(
            &test_resources_with_change(|_| {}),
            &test_resources_with_change(change),
        )
        .exit_reason()
    }

    #[test]
    fn spills_lower_occupancy_and_growth_fail_the_resource_check() {
        assert_eq!(exit_after_resource_change(|_| {}), ProcessExitReason::Fine);
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.facts.spill_store_bytes = 8),
            ProcessExitReason::Regression
        );
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.occupancy_percent = Some(49)),
            ProcessExitReason::Regression
        );
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.facts.instructions = 111),
            ProcessExitReason::Regression
        );
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.facts.instructions = 110),
            ProcessExitReason::Fine
        );
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.occupancy_percent = Some(75)),
            ProcessExitReason::Fine
        );
        let serial = |kernel: &mut ResourcesOfKernel| {
            kernel.facts.performance_loss = Some("wgmma is serialized".to_owned());
        };
        assert_eq!(exit_after_resource_change(serial), ProcessExitReason::Regression);
        assert_eq!(
            compare_resources_with_record(
                &test_resources_with_change(serial),
                &test_resources_with_change(serial)
            )
            .exit_reason(),
            ProcessExitReason::Fine
        );
        assert_eq!(
            compare_resources_with_record(
                &test_resources_with_change(serial),
                &test_resources_with_change(|_| {})
            )
            .exit_reason(),
            ProcessExitReason::Fine
        );
        let outcome = compare_resources_with_record(
            &test_resources_with_change(|_| {}),
            &test_resources_with_change(|kernel| kernel.facts.registers = 72),
        );
        assert_eq!(
            (outcome.changes[0].what.as_str(), outcome.exit_reason()),
            ("registers 64 -> 72", ProcessExitReason::Fine)
        );
    }

    #[test]
    fn another_compiler_is_refused_and_new_and_removed_kernels_are_reported() {
        let (base, mut head) =
            (test_resources_with_change(|_| {}), test_resources_with_change(|_| {}));
        head.compiler = "13.1".to_owned();
        let outcome = compare_resources_with_record(&base, &head);
        assert_eq!(
            (outcome.exit_reason(), outcome.refused.unwrap().as_str()),
            (ProcessExitReason::Refused, "compiler is `13.0` in the record and `13.1` here")
        );
        let mut head = test_resources_with_change(|_| {});
        let kernel = head.kernels.remove("k").unwrap();
        head.kernels.insert("other".to_owned(), kernel);
        let outcome = compare_resources_with_record(&base, &head);
        let changes: Vec<_> = outcome.changes.iter().map(|change| change.what.as_str()).collect();
        assert_eq!(changes, ["new: 64 registers, 0 spill bytes", "gone"]);
        assert_eq!(outcome.exit_reason(), ProcessExitReason::Inconclusive, "nothing was compared");
        head.kernels.extend(base.kernels.clone());
        assert_eq!(
            compare_resources_with_record(&base, &head).exit_reason(),
            ProcessExitReason::Fine
        );
        // In this test no kernel runs on the architecture, so nothing can be compared.
        let none = ResourcesOfAllKernels { kernels: BTreeMap::new(), ..base };
        assert_eq!(
            compare_resources_with_record(&none, &none).exit_reason(),
            ProcessExitReason::Fine
        );
    }

    #[test]
    fn recorded_kernels_of_other_benches_do_not_count_as_removed() {
        let mut record = test_resources_with_change(|_| {});
        let kernel = record.kernels["k"].clone();
        record.kernels.extend(["other", "ran"].map(|name| (name.to_owned(), kernel.clone())));
        let mut listed = test_resources_with_change(|_| {});
        listed.unsupported_kernels.insert("ran".to_owned(), "needs sm_90a".to_owned());
        retain_kernels_listed_by_benches(&mut record, &listed);
        let outcome = compare_resources_with_record(&record, &listed);
        let changes: Vec<_> = outcome.changes.iter().map(|change| change.what.as_str()).collect();
        assert_eq!((outcome.compared, changes), (1, vec!["ran here, now needs sm_90a"]));
    }

    #[test]
    fn a_build_that_no_longer_runs_on_the_architecture_fails_the_check() {
        let (base, mut head) =
            (test_resources_with_change(|_| {}), test_resources_with_change(|_| {}));
        let kernel = head.kernels.remove("k").unwrap();
        head.unsupported_kernels.insert("k".to_owned(), "needs sm_90a".to_owned());
        let outcome = compare_resources_with_record(&base, &head);
        let changes = |outcome: &ResourceCheckResult| {
            outcome.changes.iter().map(|change| change.what.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            (changes(&outcome), outcome.exit_reason()),
            (vec!["ran here, now needs sm_90a".to_owned()], ProcessExitReason::Regression)
        );
        // In this test, a kernel that is named by its file and symbol is treated like other
        // kernels.
        let mut base = test_resources_with_change(|_| {});
        base.kernels = [("k: k_finish".to_owned(), kernel)].into();
        assert_eq!(
            compare_resources_with_record(&base, &head).exit_reason(),
            ProcessExitReason::Regression
        );
        // In this test, a build that never ran on the architecture is reported only once, when it
        // is new.
        base.kernels.clear();
        assert_eq!(
            changes(&compare_resources_with_record(&base, &head)),
            ["does not run here: needs sm_90a"]
        );
        base.unsupported_kernels = head.unsupported_kernels.clone();
        assert_eq!(changes(&compare_resources_with_record(&base, &head)), [""; 0]);
    }
}
