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
    #[serde(rename = "kernel")]
    pub kernel_name: String,
    /// The change of the resource as text: "registers 64 -> 72".
    #[serde(rename = "what")]
    pub resource_change_text: String,
    /// Whether this change makes the resource check fail.
    #[serde(rename = "worse")]
    pub fails_resource_check: bool,
}

/// Result of the resource check of compiled kernels for one GPU architecture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelResourceCheckResult {
    /// GPU architecture, such as "sm_90a".
    #[serde(rename = "arch")]
    pub gpu_architecture: String,
    /// The reason why the kernels cannot be compared with the record (other architecture or
    /// compiler); `None` if they can.
    #[serde(rename = "refused")]
    pub why_not_comparable: Option<String>,
    /// Number of compared kernels.
    #[serde(rename = "compared")]
    pub compared_kernels: usize,
    /// The kernels' changed resources, sorted by kernel.
    pub changes: Vec<KernelResourceChange>,
    /// Whether record and build have no kernel in common, although at least one of them has
    /// kernels.
    #[serde(skip)]
    pub no_common_kernel: bool,
}

impl KernelResourceCheckResult {
    /// Returns the exit reason of the resource check: a regression if a change is worse,
    /// inconclusive if nothing could be compared.
    pub fn exit_reason(&self) -> ProcessExitReason {
        match (
            &self.why_not_comparable,
            self.changes.iter().any(|change| change.fails_resource_check),
        ) {
            (Some(_), _) => ProcessExitReason::ResultsNotComparable,
            (None, true) => ProcessExitReason::Regression,
            (None, false) if self.no_common_kernel => ProcessExitReason::Inconclusive,
            (None, false) => ProcessExitReason::Success,
        }
    }
}

/// Compares the resources of the kernels that were compiled now with a record.
pub fn compare_resources_with_record(
    base: &ResourcesOfAllKernels,
    head: &ResourcesOfAllKernels,
) -> KernelResourceCheckResult {
    let mut outcome = KernelResourceCheckResult {
        gpu_architecture: head.arch.clone(),
        why_not_comparable: None,
        compared_kernels: 0,
        changes: Vec::new(),
        no_common_kernel: false,
    };
    for (field, base, head) in
        [("arch", &base.arch, &head.arch), ("compiler", &base.compiler, &head.compiler)]
    {
        if base != head {
            outcome.why_not_comparable =
                Some(format!("{field} is `{base}` in the record and `{head}` here"));
            return outcome;
        }
    }
    for (name, kernel) in &head.kernels {
        match base.kernels.get(name) {
            Some(base) => {
                outcome.compared_kernels += 1;
                outcome.changes.extend(changed_resources_of_kernel(name, base, kernel));
            }
            // A new kernel has no record to compare with; its registers and spills are reported so
            // that they are noticed.
            None => {
                let CompiledKernelResources {
                    registers_per_thread: registers,
                    spill_store_bytes,
                    performance_loss_warning: performance_loss,
                    ..
                } = &kernel.facts;
                let mut what =
                    format!("new: {registers} registers, {spill_store_bytes} spill bytes");
                if let Some(loss) = performance_loss {
                    what = format!("{what}; {loss}");
                }
                let kernel = name.clone();
                outcome.changes.push(KernelResourceChange {
                    kernel_name: kernel,
                    resource_change_text: what,
                    fails_resource_check: false,
                });
            }
        }
    }
    let empty = base.kernels.is_empty() && head.kernels.is_empty();
    outcome.no_common_kernel = outcome.compared_kernels == 0 && !empty;
    let change = |kernel: &str, what: String, worse: bool| KernelResourceChange {
        kernel_name: kernel.to_owned(),
        resource_change_text: what,
        fails_resource_check: worse,
    };
    let gone = base.kernels.keys().filter(|name| !head.kernels.contains_key(*name));
    // A kernel whose build no longer runs on the architecture is not listed as gone, because the
    // comparison reports it together with its build.
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
        found.push(KernelResourceChange {
            kernel_name: name.to_owned(),
            resource_change_text: what,
            fails_resource_check: worse,
        })
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
    count(
        "stack bytes",
        b.stack_bytes_per_thread,
        h.stack_bytes_per_thread,
        h.stack_bytes_per_thread > b.stack_bytes_per_thread,
    );
    // Changes of registers and shared memory do not fail the check, because their effect, the
    // occupancy, is judged itself.
    count("registers", b.registers_per_thread, h.registers_per_thread, false);
    count(
        "shared bytes",
        b.static_shared_bytes + base.dynamic_shared_bytes,
        h.static_shared_bytes + head.dynamic_shared_bytes,
        false,
    );
    count("block", base.threads_per_block, head.threads_per_block, false);
    if let (Some(base), Some(head)) = (base.occupancy_percent, head.occupancy_percent) {
        count("occupancy %", base, head, head < base);
    }
    let grown = f64::from(h.instruction_count)
        > f64::from(b.instruction_count) * (1.0 + MAX_INSTRUCTION_GROWTH);
    count("instructions", b.instruction_count, h.instruction_count, grown);
    for class in b.instruction_count_by_class.keys().chain(
        h.instruction_count_by_class
            .keys()
            .filter(|class| !b.instruction_count_by_class.contains_key(*class)),
    ) {
        let count_in =
            |mix: &std::collections::BTreeMap<String, u32>| mix.get(class).copied().unwrap_or(0);
        count(
            &format!("{class} instructions"),
            count_in(&b.instruction_count_by_class),
            count_in(&h.instruction_count_by_class),
            false,
        );
    }
    match (&b.performance_loss_warning, &h.performance_loss_warning) {
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
            registers_per_thread: 64,
            instruction_count: 100,
            instruction_count_by_class: [("fp32".to_owned(), 100)].into(),
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
        assert_eq!(exit_after_resource_change(|_| {}), ProcessExitReason::Success);
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.facts.spill_store_bytes = 8),
            ProcessExitReason::Regression
        );
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.occupancy_percent = Some(49)),
            ProcessExitReason::Regression
        );
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.facts.instruction_count = 111),
            ProcessExitReason::Regression
        );
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.facts.instruction_count = 110),
            ProcessExitReason::Success
        );
        assert_eq!(
            exit_after_resource_change(|kernel| kernel.occupancy_percent = Some(75)),
            ProcessExitReason::Success
        );
        let serial = |kernel: &mut ResourcesOfKernel| {
            kernel.facts.performance_loss_warning = Some("wgmma is serialized".to_owned());
        };
        assert_eq!(exit_after_resource_change(serial), ProcessExitReason::Regression);
        assert_eq!(
            compare_resources_with_record(
                &test_resources_with_change(serial),
                &test_resources_with_change(serial)
            )
            .exit_reason(),
            ProcessExitReason::Success
        );
        assert_eq!(
            compare_resources_with_record(
                &test_resources_with_change(serial),
                &test_resources_with_change(|_| {})
            )
            .exit_reason(),
            ProcessExitReason::Success
        );
        let outcome = compare_resources_with_record(
            &test_resources_with_change(|_| {}),
            &test_resources_with_change(|kernel| kernel.facts.registers_per_thread = 72),
        );
        assert_eq!(
            (outcome.changes[0].resource_change_text.as_str(), outcome.exit_reason()),
            ("registers 64 -> 72", ProcessExitReason::Success)
        );
    }

    #[test]
    fn another_compiler_is_refused_and_new_and_removed_kernels_are_reported() {
        let (base, mut head) =
            (test_resources_with_change(|_| {}), test_resources_with_change(|_| {}));
        head.compiler = "13.1".to_owned();
        let outcome = compare_resources_with_record(&base, &head);
        assert_eq!(
            (outcome.exit_reason(), outcome.why_not_comparable.unwrap().as_str()),
            (
                ProcessExitReason::ResultsNotComparable,
                "compiler is `13.0` in the record and `13.1` here"
            )
        );
        let mut head = test_resources_with_change(|_| {});
        let kernel = head.kernels.remove("k").unwrap();
        head.kernels.insert("other".to_owned(), kernel);
        let outcome = compare_resources_with_record(&base, &head);
        let changes: Vec<_> =
            outcome.changes.iter().map(|change| change.resource_change_text.as_str()).collect();
        assert_eq!(changes, ["new: 64 registers, 0 spill bytes", "gone"]);
        assert_eq!(outcome.exit_reason(), ProcessExitReason::Inconclusive, "nothing was compared");
        head.kernels.extend(base.kernels.clone());
        assert_eq!(
            compare_resources_with_record(&base, &head).exit_reason(),
            ProcessExitReason::Success
        );
        // In this test no kernel runs on the architecture, so nothing can be compared.
        let none = ResourcesOfAllKernels { kernels: BTreeMap::new(), ..base };
        assert_eq!(
            compare_resources_with_record(&none, &none).exit_reason(),
            ProcessExitReason::Success
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
        let changes: Vec<_> =
            outcome.changes.iter().map(|change| change.resource_change_text.as_str()).collect();
        assert_eq!((outcome.compared_kernels, changes), (1, vec!["ran here, now needs sm_90a"]));
    }

    #[test]
    fn a_build_that_no_longer_runs_on_the_architecture_fails_the_check() {
        let (base, mut head) =
            (test_resources_with_change(|_| {}), test_resources_with_change(|_| {}));
        let kernel = head.kernels.remove("k").unwrap();
        head.unsupported_kernels.insert("k".to_owned(), "needs sm_90a".to_owned());
        let outcome = compare_resources_with_record(&base, &head);
        let changes = |outcome: &KernelResourceCheckResult| {
            outcome
                .changes
                .iter()
                .map(|change| change.resource_change_text.clone())
                .collect::<Vec<_>>()
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
