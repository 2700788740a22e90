//! Determines whether the code of a case changed between two builds. The comparison covers the
//! kernels that the case's implementation uses in both builds: hash of machine code, resources,
//! launch shapes.
//!
//! Host code is not compared, nor are kernels of libraries. Changes of the code do not affect
//! verdicts.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::resources;
use kernelgate::protocol::ResourcesReport;
use kernelgate::record::resources::KernelResources;
use kernelgate_cuda::Launch;
use kernelgate_cuda::compiler::cubin::CompiledKernelFacts;
use kernelgate_cuda::driver::launch::used_kernels::{UsedKernel, UsedKernels};

/// Largest number of facts of a kernel that are named.
const MAX_NAMED_CODE_FACTS: usize = 6;

/// The kernels of a case in both builds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeComparison {
    /// Number of kernels whose machine code is identical.
    pub same: usize,
    /// Differences in machine code, one line for each kernel.
    pub code: Vec<String>,
    /// Differences in launches, a line a kernel, and kernels of one build only.
    pub launches: Vec<String>,
    /// Number of kernels that cannot be compared.
    pub unknown: usize,
}

impl CodeComparison {
    /// Compares the kernels of a case in two builds.
    pub fn compare_code(base: &UsedKernels, head: &UsedKernels) -> CodeComparison {
        let mut comparison = Self::default();
        let names: BTreeSet<&String> = base.keys().chain(head.keys()).collect();
        for name in names {
            match (base.get(name), head.get(name)) {
                (Some(base), Some(head)) => comparison.add(name, base, head),
                (None, _) => comparison.launches.push(format!("{name}: not in the base")),
                (_, None) => comparison.launches.push(format!("{name}: not in the head")),
            }
        }
        comparison
    }

    /// Adds the number of commands of a launch, where both builds record it: an extra launch of the
    /// same kernel shows there alone.
    pub fn compare_command_counts(&mut self, base: Option<u64>, head: Option<u64>) {
        if let (Some(base), Some(head)) = (base, head)
            && base != head
        {
            self.launches.push(format!("commands of a launch {base} -> {head}"));
        }
    }

    fn add(&mut self, name: &str, base: &UsedKernel, head: &UsedKernel) {
        match (&base.code, &head.code) {
            (Some(base), Some(head)) if base.hash == head.hash => self.same += 1,
            (Some(base), Some(head)) => {
                let words = match (&base.facts, &head.facts) {
                    (Some(base), Some(head)) => changed_kernel_facts(name, base, head),
                    _ => Vec::new(),
                };
                self.code.push(format!("{name}: {}", listed_changes(&words)));
            }
            _ => self.unknown += 1,
        }
        if base.shapes != head.shapes {
            let shapes = |kernel: &UsedKernel| {
                let each: Vec<String> = kernel.shapes.iter().map(launch_shape_text).collect();
                each.join(" and ")
            };
            self.launches.push(format!("{name}: {} -> {}", shapes(base), shapes(head)));
        }
    }

    /// Returns whether the kernels of the case are known and can all be compared.
    pub const fn is_known(&self) -> bool {
        self.unknown == 0 && (self.same > 0 || self.has_changed())
    }

    /// Returns whether machine code or launches differ between the builds.
    pub const fn has_changed(&self) -> bool {
        !self.code.is_empty() || !self.launches.is_empty()
    }

    /// Returns whether machine code and launch shapes are known to be equal in both builds.
    pub const fn is_same(&self) -> bool {
        self.is_known() && !self.has_changed()
    }
}

/// All kernels of both builds, compiled for one architecture.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComparedKernels {
    /// The architecture.
    pub arch: String,
    /// Kernels whose machine code is identical in both builds.
    pub same: usize,
    /// Differences between the builds by kernel, including kernels of one build only.
    pub changed: BTreeMap<String, String>,
    /// Benches whose kernels are not compared, with the reason.
    pub not_compared: BTreeMap<String, String>,
}

impl ComparedKernels {
    /// Adds the kernels of a bench; kernels that several benches share count once. If source and
    /// compiler are the same, the machine code counts as identical: the compiler may choose other
    /// instructions from one build to the next.
    pub fn add(&mut self, base: &ResourcesReport, head: &ResourcesReport) {
        let same_source = |kernel: &String| {
            base.sources.get(kernel).is_some_and(|source| head.sources.get(kernel) == Some(source))
        };
        let mut after = head.resources.clone();
        for (name, kernel) in after.kernels.iter_mut().filter(|(name, _)| same_source(name)) {
            let Some(before) = base.resources.kernels.get(name) else { continue };
            kernel.facts = before.facts.clone();
            if (kernel.block, kernel.dynamic_shared_bytes)
                == (before.block, before.dynamic_shared_bytes)
            {
                kernel.occupancy_percent = before.occupancy_percent;
            }
        }
        let outcome = resources::compare_resources(&base.resources, &after);
        if let Some(why) = outcome.refused {
            self.not_compared.insert("kernels".to_owned(), why);
            return;
        }
        let mut words: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for change in outcome.changes {
            words.entry(change.kernel).or_default().push(change.what);
        }
        if base.code.is_empty() != head.code.is_empty() {
            let why = "one side's kernelgate records no hash of it".to_owned();
            self.not_compared.insert("machine code".to_owned(), why);
        }
        for (kernel, hash) in head.code.iter().filter(|_| !base.code.is_empty()) {
            let same_code = base.code.get(kernel).is_some_and(|base| base == hash);
            if (same_code || same_source(kernel)) && !words.contains_key(kernel) {
                self.same += 1;
            } else {
                words.entry(kernel.clone()).or_default();
            }
        }
        for (kernel, words) in words {
            self.changed.insert(kernel, listed_changes(&words));
        }
    }
}

/// Lists the changes of a kernel in one text. Changed instruction counts are listed last, because
/// they are the least informative.
fn listed_changes(words: &[String]) -> String {
    match words.len() {
        0 => "other instructions".to_owned(),
        count if count > MAX_NAMED_CODE_FACTS => {
            format!(
                "{} and {} more",
                words[..MAX_NAMED_CODE_FACTS].join(", "),
                count - MAX_NAMED_CODE_FACTS
            )
        }
        _ => words.join(", "),
    }
}

/// The changed facts in words, as in `resources --check`: "registers 96 -> 128".
fn changed_kernel_facts(
    name: &str,
    base: &CompiledKernelFacts,
    head: &CompiledKernelFacts,
) -> Vec<String> {
    let [base, head] = [base, head].map(|facts| KernelResources {
        facts: facts.clone(),
        block: 0,
        dynamic_shared_bytes: 0,
        occupancy_percent: None,
    });
    resources::resource_changes(name, &base, &head).into_iter().map(|change| change.what).collect()
}

fn launch_shape_text(shape: &Launch) -> String {
    let [x, y, z] = shape.grid;
    let shared = match shape.shared_bytes {
        0 => String::new(),
        bytes => format!(" with {bytes} B"),
    };
    format!("{x}×{y}×{z} blocks of {}{shared}", shape.block[0])
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use kernelgate::record::resources::RunResources;
    use kernelgate_cuda::compiler::code::KernelMachineCode;

    /// A kernel of 96 registers, launched once, after a change.
    pub fn kernels(name: &str, change: impl Fn(&mut UsedKernel)) -> UsedKernels {
        let facts = CompiledKernelFacts {
            registers: 96,
            instructions: 400,
            ..CompiledKernelFacts::default()
        };
        let code = KernelMachineCode { hash: "a".to_owned(), facts: Some(facts) };
        let shape = Launch::new([132, 1, 1], [128, 1, 1]);
        let mut kernel = UsedKernel { code: Some(code), shapes: vec![shape] };
        change(&mut kernel);
        UsedKernels::from([(name.to_owned(), kernel)])
    }

    /// Replaces the code of a kernel by code that spills registers.
    pub fn make_kernel_spill(kernel: &mut UsedKernel) {
        let code = kernel.code.as_mut().unwrap();
        "b".clone_into(&mut code.hash);
        let facts = code.facts.as_mut().unwrap();
        (facts.registers, facts.stack_bytes) = (128, 48);
    }

    #[test]
    fn a_spill_is_named_and_equal_code_counts_as_identical() {
        let plain = kernels("k", |_| {});
        let same = CodeComparison::compare_code(&plain, &plain);
        assert!(same.is_same() && same.is_known() && !same.has_changed());
        let spills = CodeComparison::compare_code(&plain, &kernels("k", make_kernel_spill));
        assert_eq!(spills.code, ["k: stack bytes 0 -> 48, registers 96 -> 128"]);
        assert!(spills.has_changed() && spills.launches.is_empty());
        let only_code = CodeComparison::compare_code(
            &plain,
            &kernels("k", |kernel| "c".clone_into(&mut kernel.code.as_mut().unwrap().hash)),
        );
        assert_eq!(only_code.code, ["k: other instructions"]);
    }

    #[test]
    fn kernels_of_equal_source_differ_only_in_their_launches() {
        let report = |hash: &str, source: &str, registers, block| {
            let facts = CompiledKernelFacts {
                registers,
                instructions: 400,
                ..CompiledKernelFacts::default()
            };
            let kernel = KernelResources {
                facts,
                block,
                dynamic_shared_bytes: 0,
                occupancy_percent: Some(registers),
            };
            let one = |text: &str| BTreeMap::from([("k".to_owned(), text.to_owned())]);
            ResourcesReport {
                resources: RunResources {
                    arch: "sm_90a".to_owned(),
                    compiler: "13.0".to_owned(),
                    kernels: BTreeMap::from([("k".to_owned(), kernel)]),
                    left_out: BTreeMap::new(),
                },
                left_out: Vec::new(),
                code: one(hash),
                sources: one(source),
            }
        };
        let compared = |head: &ResourcesReport| {
            let mut compared = ComparedKernels::default();
            compared.add(&report("a", "s", 89, 256), head);
            (compared.same, compared.changed.into_values().collect::<Vec<_>>())
        };
        assert_eq!(compared(&report("b", "s", 91, 256)), (1, vec![]));
        let (same, changed) = compared(&report("b", "s", 91, 512));
        assert!(
            same == 0 && changed[0].contains("256 -> 512") && !changed[0].contains("registers")
        );
        let (same, changed) = compared(&report("b", "other", 91, 256));
        assert!(same == 0 && changed[0].contains("registers 89 -> 91"), "{changed:?}");
        // The test has an executable that records no kernel sources.
        let without_source =
            ResourcesReport { sources: BTreeMap::new(), ..report("b", "s", 89, 256) };
        assert_eq!(compared(&without_source), (0, vec!["other instructions".to_owned()]));
    }

    #[test]
    fn launches_are_compared_and_an_unknown_kernel_never_counts_as_identical() {
        let plain = kernels("k", |_| {});
        let wider = kernels("k", |kernel| {
            kernel.shapes[0].grid[0] = 264;
            kernel.shapes[0].shared_bytes = 4096;
        });
        let launches = CodeComparison::compare_code(&plain, &wider).launches;
        assert_eq!(launches, ["k: 132×1×1 blocks of 128 -> 264×1×1 blocks of 128 with 4096 B"]);
        let renamed = CodeComparison::compare_code(&plain, &kernels("other", |_| {}));
        assert_eq!(renamed.launches, ["k: not in the head", "other: not in the base"]);
        let unknown =
            CodeComparison::compare_code(&plain, &kernels("k", |kernel| kernel.code = None));
        assert!(!unknown.is_known() && !unknown.is_same());
        let mut again = CodeComparison::compare_code(&plain, &plain);
        again.compare_command_counts(Some(1), None);
        assert!(again.is_same(), "one side does not record it");
        again.compare_command_counts(Some(1), Some(2));
        assert_eq!(again.launches, ["commands of a launch 1 -> 2"]);
        let none = CodeComparison::compare_code(&UsedKernels::new(), &UsedKernels::new());
        assert!(!none.is_known() && !none.is_same(), "code of the host is not compared");
    }
}
