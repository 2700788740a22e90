//! Determines whether the kernels of a case changed between base and head, in machine code,
//! resources or launch shapes. Compared are the kernels that the case's implementation launches in
//! each build: hash of the machine code, resources and launch shapes.
//!
//! Host code and kernels of libraries such as cuBLAS are not compared. Differences of machine code
//! change no verdict; they only explain it, and select cases for `--affected`.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::resources;
use kernelgate::protocol::KernelResourcesReport;
use kernelgate::record::resources::ResourcesOfKernel;
use kernelgate_cuda::Launch;
use kernelgate_cuda::compiler::cubin::CompiledKernelResources;
use kernelgate_cuda::driver::launch::used_kernels::{KernelLoadedForCase, KernelsLoadedForCase};

/// Largest number of changed facts of a kernel (registers, spills, ...) that its description names.
const MAX_NAMED_KERNEL_FACTS: usize = 6;

/// Differences between the kernels of one case in base and head.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaseKernelComparison {
    /// Number of the case's kernels whose machine code is identical in both builds.
    #[serde(rename = "same")]
    pub identical_kernels: usize,
    /// Differences in machine code, one line for each kernel.
    #[serde(rename = "code")]
    pub code_difference_lines: Vec<String>,
    /// Differences in launches, one line for each kernel, including kernels that only one build
    /// launches.
    #[serde(rename = "launches")]
    pub launch_difference_lines: Vec<String>,
    /// Number of the case's kernels whose machine code cannot be compared.
    #[serde(rename = "unknown")]
    pub kernels_with_unknown_code: usize,
}

impl CaseKernelComparison {
    /// Compares the kernels that a case launches in base and head.
    pub fn compare_used_kernels(
        base: &KernelsLoadedForCase,
        head: &KernelsLoadedForCase,
    ) -> CaseKernelComparison {
        let mut comparison = Self::default();
        let names: BTreeSet<&String> = base.keys().chain(head.keys()).collect();
        for name in names {
            match (base.get(name), head.get(name)) {
                (Some(base), Some(head)) => comparison.add_kernel_in_both_builds(name, base, head),
                (None, _) => {
                    comparison.launch_difference_lines.push(format!("{name}: not in the base"))
                }
                (_, None) => {
                    comparison.launch_difference_lines.push(format!("{name}: not in the head"))
                }
            }
        }
        comparison
    }

    /// Compares the number of commands per launch, if both builds recorded it; only this number
    /// shows an additional launch of an equal kernel.
    pub fn add_command_count_difference(&mut self, base: Option<u64>, head: Option<u64>) {
        if let (Some(base), Some(head)) = (base, head)
            && base != head
        {
            self.launch_difference_lines.push(format!("commands of a launch {base} -> {head}"));
        }
    }

    fn add_kernel_in_both_builds(
        &mut self,
        name: &str,
        base: &KernelLoadedForCase,
        head: &KernelLoadedForCase,
    ) {
        match (&base.code, &head.code) {
            (Some(base), Some(head)) if base.machine_code_hash == head.machine_code_hash => {
                self.identical_kernels += 1
            }
            (Some(base), Some(head)) => {
                let words = match (&base.facts, &head.facts) {
                    (Some(base), Some(head)) => describe_changed_kernel_facts(name, base, head),
                    _ => Vec::new(),
                };
                self.code_difference_lines
                    .push(format!("{name}: {}", join_change_descriptions(&words)));
            }
            _ => self.kernels_with_unknown_code += 1,
        }
        if base.launch_shapes != head.launch_shapes {
            let shapes = |kernel: &KernelLoadedForCase| {
                let each: Vec<String> =
                    kernel.launch_shapes.iter().map(describe_launch_shape).collect();
                each.join(" and ")
            };
            self.launch_difference_lines.push(format!(
                "{name}: {} -> {}",
                shapes(base),
                shapes(head)
            ));
        }
    }

    /// Returns whether the case has recorded kernels and all of them can be compared.
    pub const fn are_all_kernels_comparable(&self) -> bool {
        self.kernels_with_unknown_code == 0
            && (self.identical_kernels > 0 || self.has_code_or_launches_changed())
    }

    /// Returns whether the machine code or the launches of the case differ between the builds.
    pub const fn has_code_or_launches_changed(&self) -> bool {
        !self.code_difference_lines.is_empty() || !self.launch_difference_lines.is_empty()
    }

    /// Returns whether the machine code and launches of all the case's kernels are known to be
    /// equal in both builds.
    pub const fn is_code_known_to_be_identical(&self) -> bool {
        self.are_all_kernels_comparable() && !self.has_code_or_launches_changed()
    }
}

/// Comparison of all kernels of both builds' benches, compiled for one GPU architecture.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchitectureKernelComparison {
    /// GPU architecture, such as "sm_90a".
    #[serde(rename = "arch")]
    pub gpu_architecture: String,
    /// Number of kernels whose machine code is identical in both builds.
    #[serde(rename = "same")]
    pub identical_kernels: usize,
    /// Description of the difference for each kernel that differs or that only one build has.
    #[serde(rename = "changed")]
    pub kernel_differences: BTreeMap<String, String>,
    /// Benches whose kernels could not be compared, each with the reason.
    #[serde(rename = "not_compared")]
    pub benches_not_compared: BTreeMap<String, String>,
}

impl ArchitectureKernelComparison {
    /// Adds the kernels of one bench to the comparison; a kernel that several benches share counts
    /// once. If source and compiler are equal in both builds, the machine code counts as identical,
    /// because the compiler may choose other instructions in each run.
    pub fn add_kernels_of_bench(
        &mut self,
        base: &KernelResourcesReport,
        head: &KernelResourcesReport,
    ) {
        let same_source = |kernel: &String| {
            base.source_hashes
                .get(kernel)
                .is_some_and(|source| head.source_hashes.get(kernel) == Some(source))
        };
        let mut after = head.resources.clone();
        for (name, kernel) in after.kernels.iter_mut().filter(|(name, _)| same_source(name)) {
            let Some(before) = base.resources.kernels.get(name) else { continue };
            kernel.facts = before.facts.clone();
            if (kernel.threads_per_block, kernel.dynamic_shared_bytes)
                == (before.threads_per_block, before.dynamic_shared_bytes)
            {
                kernel.occupancy_percent = before.occupancy_percent;
            }
        }
        let outcome = resources::compare_resources_with_record(&base.resources, &after);
        if let Some(why) = outcome.why_not_comparable {
            self.benches_not_compared.insert("kernels".to_owned(), why);
            return;
        }
        let mut words: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for change in outcome.changes {
            words.entry(change.kernel_name).or_default().push(change.resource_change_text);
        }
        if base.machine_code_hashes.is_empty() != head.machine_code_hashes.is_empty() {
            let why = "one side's kernelgate records no hash of it".to_owned();
            self.benches_not_compared.insert("machine code".to_owned(), why);
        }
        for (kernel, hash) in
            head.machine_code_hashes.iter().filter(|_| !base.machine_code_hashes.is_empty())
        {
            let same_code = base.machine_code_hashes.get(kernel).is_some_and(|base| base == hash);
            if (same_code || same_source(kernel)) && !words.contains_key(kernel) {
                self.identical_kernels += 1;
            } else {
                words.entry(kernel.clone()).or_default();
            }
        }
        for (kernel, words) in words {
            self.kernel_differences.insert(kernel, join_change_descriptions(&words));
        }
    }
}

/// Joins the descriptions of a kernel's changes into one text of limited length. Changed
/// instruction counts come last and are cut first, because they are the least informative.
fn join_change_descriptions(words: &[String]) -> String {
    match words.len() {
        0 => "other instructions".to_owned(),
        count if count > MAX_NAMED_KERNEL_FACTS => {
            format!(
                "{} and {} more",
                words[..MAX_NAMED_KERNEL_FACTS].join(", "),
                count - MAX_NAMED_KERNEL_FACTS
            )
        }
        _ => words.join(", "),
    }
}

/// Describes the changed facts of a kernel's machine code, as `resources --check` does: "registers
/// 96 -> 128".
fn describe_changed_kernel_facts(
    name: &str,
    base: &CompiledKernelResources,
    head: &CompiledKernelResources,
) -> Vec<String> {
    let [base, head] = [base, head].map(|facts| ResourcesOfKernel {
        facts: facts.clone(),
        threads_per_block: 0,
        dynamic_shared_bytes: 0,
        occupancy_percent: None,
    });
    resources::changed_resources_of_kernel(name, &base, &head)
        .into_iter()
        .map(|change| change.resource_change_text)
        .collect()
}

fn describe_launch_shape(shape: &Launch) -> String {
    let [x, y, z] = shape.grid;
    let shared = match shape.dynamic_shared_bytes {
        0 => String::new(),
        bytes => format!(" with {bytes} B"),
    };
    format!("{x}×{y}×{z} blocks of {}{shared}", shape.block[0])
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use kernelgate::record::resources::ResourcesOfAllKernels;
    use kernelgate_cuda::compiler::code::MachineCodeOfKernel;

    /// Makes a test kernel of 96 registers that is launched once, modified by `change`.
    pub fn test_kernel_with_change(
        name: &str,
        change: impl Fn(&mut KernelLoadedForCase),
    ) -> KernelsLoadedForCase {
        let facts = CompiledKernelResources {
            registers_per_thread: 96,
            instruction_count: 400,
            ..CompiledKernelResources::default()
        };
        let code = MachineCodeOfKernel { machine_code_hash: "a".to_owned(), facts: Some(facts) };
        let shape = Launch::new([132, 1, 1], [128, 1, 1]);
        let mut kernel = KernelLoadedForCase { code: Some(code), launch_shapes: vec![shape] };
        change(&mut kernel);
        KernelsLoadedForCase::from([(name.to_owned(), kernel)])
    }

    /// Replaces the machine code of a test kernel by code that spills registers.
    pub fn make_kernel_spill(kernel: &mut KernelLoadedForCase) {
        let code = kernel.code.as_mut().unwrap();
        "b".clone_into(&mut code.machine_code_hash);
        let facts = code.facts.as_mut().unwrap();
        (facts.registers_per_thread, facts.stack_bytes_per_thread) = (128, 48);
    }

    #[test]
    fn a_spill_is_named_and_equal_code_counts_as_identical() {
        let plain = test_kernel_with_change("k", |_| {});
        let same = CaseKernelComparison::compare_used_kernels(&plain, &plain);
        assert!(
            same.is_code_known_to_be_identical()
                && same.are_all_kernels_comparable()
                && !same.has_code_or_launches_changed()
        );
        let spills = CaseKernelComparison::compare_used_kernels(
            &plain,
            &test_kernel_with_change("k", make_kernel_spill),
        );
        assert_eq!(spills.code_difference_lines, ["k: stack bytes 0 -> 48, registers 96 -> 128"]);
        assert!(spills.has_code_or_launches_changed() && spills.launch_difference_lines.is_empty());
        let only_code = CaseKernelComparison::compare_used_kernels(
            &plain,
            &test_kernel_with_change("k", |kernel| {
                "c".clone_into(&mut kernel.code.as_mut().unwrap().machine_code_hash)
            }),
        );
        assert_eq!(only_code.code_difference_lines, ["k: other instructions"]);
    }

    #[test]
    fn kernels_of_equal_source_differ_only_in_their_launches() {
        let report = |hash: &str, source: &str, registers, block| {
            let facts = CompiledKernelResources {
                registers_per_thread: registers,
                instruction_count: 400,
                ..CompiledKernelResources::default()
            };
            let kernel = ResourcesOfKernel {
                facts,
                threads_per_block: block,
                dynamic_shared_bytes: 0,
                occupancy_percent: Some(registers),
            };
            let one = |text: &str| BTreeMap::from([("k".to_owned(), text.to_owned())]);
            KernelResourcesReport {
                resources: ResourcesOfAllKernels {
                    arch: "sm_90a".to_owned(),
                    compiler: "13.0".to_owned(),
                    kernels: BTreeMap::from([("k".to_owned(), kernel)]),
                    unsupported_kernels: BTreeMap::new(),
                },
                builds_unfit_for_architecture: Vec::new(),
                machine_code_hashes: one(hash),
                source_hashes: one(source),
            }
        };
        let compared = |head: &KernelResourcesReport| {
            let mut compared = ArchitectureKernelComparison::default();
            compared.add_kernels_of_bench(&report("a", "s", 89, 256), head);
            (
                compared.identical_kernels,
                compared.kernel_differences.into_values().collect::<Vec<_>>(),
            )
        };
        assert_eq!(compared(&report("b", "s", 91, 256)), (1, vec![]));
        let (same, changed) = compared(&report("b", "s", 91, 512));
        assert!(
            same == 0 && changed[0].contains("256 -> 512") && !changed[0].contains("registers")
        );
        let (same, changed) = compared(&report("b", "other", 91, 256));
        assert!(same == 0 && changed[0].contains("registers 89 -> 91"), "{changed:?}");
        // In this test, the bench executable records no sources of its kernels.
        let without_source =
            KernelResourcesReport { source_hashes: BTreeMap::new(), ..report("b", "s", 89, 256) };
        assert_eq!(compared(&without_source), (0, vec!["other instructions".to_owned()]));
    }

    #[test]
    fn launches_are_compared_and_an_unknown_kernel_never_counts_as_identical() {
        let plain = test_kernel_with_change("k", |_| {});
        let wider = test_kernel_with_change("k", |kernel| {
            kernel.launch_shapes[0].grid[0] = 264;
            kernel.launch_shapes[0].dynamic_shared_bytes = 4096;
        });
        let launches =
            CaseKernelComparison::compare_used_kernels(&plain, &wider).launch_difference_lines;
        assert_eq!(launches, ["k: 132×1×1 blocks of 128 -> 264×1×1 blocks of 128 with 4096 B"]);
        let renamed = CaseKernelComparison::compare_used_kernels(
            &plain,
            &test_kernel_with_change("other", |_| {}),
        );
        assert_eq!(
            renamed.launch_difference_lines,
            ["k: not in the head", "other: not in the base"]
        );
        let unknown = CaseKernelComparison::compare_used_kernels(
            &plain,
            &test_kernel_with_change("k", |kernel| kernel.code = None),
        );
        assert!(!unknown.are_all_kernels_comparable() && !unknown.is_code_known_to_be_identical());
        let mut again = CaseKernelComparison::compare_used_kernels(&plain, &plain);
        again.add_command_count_difference(Some(1), None);
        assert!(again.is_code_known_to_be_identical(), "one side does not record it");
        again.add_command_count_difference(Some(1), Some(2));
        assert_eq!(again.launch_difference_lines, ["commands of a launch 1 -> 2"]);
        let none = CaseKernelComparison::compare_used_kernels(
            &KernelsLoadedForCase::new(),
            &KernelsLoadedForCase::new(),
        );
        assert!(
            !none.are_all_kernels_comparable() && !none.is_code_known_to_be_identical(),
            "code of the host is not compared"
        );
    }
}
