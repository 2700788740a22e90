//! Records the compiler output for every kernel on one GPU architecture, so that a change can be
//! checked without a GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::files::file::{self, RecordFileError, RecordFileType};
use kernelgate_cuda::compiler::cubin::{self, CompiledKernelResources, CubinReadError};
use kernelgate_cuda::compiler::nvrtc::{self, KernelCompileError};
use kernelgate_cuda::compiler::occupancy;
use kernelgate_cuda::compiler::source::KernelBuild;
use kernelgate_cuda::compiler::{cache, code};
use kernelgate_cuda::spec::ListedKernelBuild;

/// Registers, spills, shared memory and occupancy of all kernels for one GPU architecture, by the
/// compiler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResourcesOfAllKernels {
    /// Architecture: "sm_90a".
    pub arch: String,
    /// Version of NVRTC: "13.0".
    pub compiler: String,
    /// Resources of each compiled kernel, by kernel build and symbol name.
    pub kernels: BTreeMap<String, ResourcesOfKernel>,
    /// Kernel builds that the GPU architecture cannot run, each with the unmet requirement, such as
    /// "needs sm_90a".
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "left_out")]
    pub unsupported_kernels: BTreeMap<String, String>,
}

/// Registers, spills, shared memory and occupancy of one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResourcesOfKernel {
    /// Facts read from the kernel's machine code: registers, spills, shared memory, instructions.
    pub facts: CompiledKernelResources,
    /// Number of threads per thread block with which the kernel is launched.
    #[serde(rename = "block")]
    pub threads_per_block: u32,
    /// Dynamic shared memory of a thread block, bytes, with which the kernel is launched.
    pub dynamic_shared_bytes: u32,
    /// Occupancy, percent: share of a multiprocessor's warps that can be resident; absent for an
    /// unknown architecture.
    pub occupancy_percent: Option<u32>,
}

/// Resources of the kernels that this process compiled, with hashes of their code and sources.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelResourcesAndHashes {
    /// Registers, spills and occupancy of all kernels.
    pub resources: ResourcesOfAllKernels,
    /// Hash of each kernel's machine code, by kernel build and symbol name.
    pub machine_code_hashes: BTreeMap<String, String>,
    /// Hash of each kernel's source and compiler, by kernel build and symbol name.
    pub source_hashes: BTreeMap<String, String>,
}

/// File format of [`ResourcesOfAllKernels`]: instruction classes are numbered, and the sum of the
/// instructions and the occupancy, which follow from other numbers, are absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelResourcesFile {
    /// Architecture: "sm_90a".
    pub arch: String,
    /// Version of NVRTC: "13.0".
    #[serde(rename = "compiler")]
    pub nvrtc_version: String,
    /// Names of the instruction classes, in the order of the counts in each kernel's `mix`.
    #[serde(rename = "classes")]
    pub instruction_classes: Vec<String>,
    /// Kernels by kernel build and symbol name.
    pub kernels: BTreeMap<String, KernelResourcesInFile>,
    /// Kernel builds that the GPU architecture cannot run, by the unmet requirement, such as "needs
    /// sm_90a".
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "left_out")]
    pub unsupported_builds_by_requirement: BTreeMap<String, Vec<String>>,
}

/// Compiler output for one kernel in the file; an absent number is 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelResourcesInFile {
    /// Number of threads of a block with which the kernel is launched.
    #[serde(rename = "block")]
    pub threads_per_block: u32,
    /// Dynamic shared memory of a block, bytes, with which the kernel is launched.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero_for_serde")]
    pub dynamic_shared_bytes: u32,
    /// Registers a thread.
    pub registers: u32,
    /// Local stack of each thread, bytes.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero_for_serde")]
    pub stack_bytes: u32,
    /// Bytes that each thread stores to local memory because registers are spilled.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero_for_serde")]
    pub spill_store_bytes: u32,
    /// Bytes that each thread loads from local memory because registers are spilled.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero_for_serde")]
    pub spill_load_bytes: u32,
    /// Static shared memory of a block, bytes.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero_for_serde")]
    #[serde(rename = "shared_bytes")]
    pub static_shared_bytes: u32,
    /// Number of instructions of each class; zeros at the end are absent.
    #[serde(rename = "mix")]
    pub instruction_counts_by_class: Vec<u32>,
    /// Performance warning of the assembler (ptxas) with its reason; absent without a warning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "performance_loss")]
    pub ptxas_performance_warning: Option<String>,
}

impl From<&ResourcesOfAllKernels> for KernelResourcesFile {
    fn from(resources: &ResourcesOfAllKernels) -> Self {
        let mixes = resources
            .kernels
            .values()
            .flat_map(|kernel| kernel.facts.instruction_count_by_class.keys());
        let classes: Vec<String> = mixes.collect::<BTreeSet<_>>().into_iter().cloned().collect();
        let kernel = |kernel: &ResourcesOfKernel| {
            let count = |class| {
                kernel.facts.instruction_count_by_class.get(class).copied().unwrap_or_default()
            };
            let mut mix: Vec<u32> = classes.iter().map(count).collect();
            mix.truncate(mix.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1));
            KernelResourcesInFile {
                threads_per_block: kernel.threads_per_block,
                dynamic_shared_bytes: kernel.dynamic_shared_bytes,
                registers: kernel.facts.registers_per_thread,
                stack_bytes: kernel.facts.stack_bytes_per_thread,
                spill_store_bytes: kernel.facts.spill_store_bytes,
                spill_load_bytes: kernel.facts.spill_load_bytes,
                static_shared_bytes: kernel.facts.static_shared_bytes,
                instruction_counts_by_class: mix,
                ptxas_performance_warning: kernel.facts.performance_loss_warning.clone(),
            }
        };
        let kernels = resources.kernels.iter();
        let mut left_out: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (build, unmet) in &resources.unsupported_kernels {
            left_out.entry(unmet.clone()).or_default().push(build.clone());
        }
        Self {
            arch: resources.arch.clone(),
            nvrtc_version: resources.compiler.clone(),
            kernels: kernels.map(|(name, it)| (name.clone(), kernel(it))).collect(),
            instruction_classes: classes,
            unsupported_builds_by_requirement: left_out,
        }
    }
}

impl From<KernelResourcesFile> for ResourcesOfAllKernels {
    fn from(record: KernelResourcesFile) -> Self {
        let KernelResourcesFile {
            arch,
            nvrtc_version: compiler,
            instruction_classes: classes,
            kernels,
            unsupported_builds_by_requirement: left_out,
        } = record;
        let kernel = |kernel: KernelResourcesInFile| {
            let counts =
                classes.iter().cloned().zip(kernel.instruction_counts_by_class.iter().copied());
            let facts = CompiledKernelResources {
                registers_per_thread: kernel.registers,
                stack_bytes_per_thread: kernel.stack_bytes,
                spill_store_bytes: kernel.spill_store_bytes,
                spill_load_bytes: kernel.spill_load_bytes,
                static_shared_bytes: kernel.static_shared_bytes,
                instruction_count: kernel.instruction_counts_by_class.iter().sum(),
                instruction_count_by_class: counts.filter(|(_, count)| *count > 0).collect(),
                performance_loss_warning: kernel.ptxas_performance_warning,
            };
            kernel_resources_with_occupancy(
                facts,
                kernel.threads_per_block,
                kernel.dynamic_shared_bytes,
                &arch,
            )
        };
        let builds = left_out.into_iter().flat_map(|(unmet, builds)| {
            builds.into_iter().map(move |build| (build, unmet.clone()))
        });
        Self {
            kernels: kernels.into_iter().map(|(name, it)| (name, kernel(it))).collect(),
            unsupported_kernels: builds.collect(),
            arch,
            compiler,
        }
    }
}

impl RecordFileType for KernelResourcesFile {
    const SCHEMA: &'static str = "kernelgate-resources";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_READABLE_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "resource record";
    const FIELDS_WITH_ONE_LINE_PER_ENTRY: &'static [&'static str] = &["kernels"];

    fn check_record_plausible(&self) -> Result<(), String> {
        if self.instruction_classes.len() > MAX_INSTRUCTION_CLASSES_IN_FILE {
            return Err(format!("{} classes of instructions", self.instruction_classes.len()));
        }
        for (name, kernel) in &self.kernels {
            let problem = |problem: String| Err(format!("kernel {name} has {problem}"));
            let KernelResourcesInFile {
                threads_per_block: block,
                registers,
                instruction_counts_by_class: mix,
                ..
            } = kernel;
            if !(1..=1024).contains(block) {
                return problem(format!("blocks of {block} threads"));
            }
            if *registers > MAX_REGISTERS_PER_THREAD {
                return problem(format!("{registers} registers"));
            }
            let most = MAX_NUMBER_IN_KERNEL_RESOURCES / MAX_INSTRUCTION_CLASSES_IN_FILE as u32;
            if mix.len() > self.instruction_classes.len() || mix.iter().any(|count| *count > most) {
                return problem("a mix that does not fit the classes".to_owned());
            }
        }
        ResourcesOfAllKernels::from(self.clone()).check_kernel_numbers_plausible()
    }
}

impl ResourcesOfAllKernels {
    /// Reads the resources of all kernels for a GPU architecture from a file.
    pub fn read_resources_file(path: &Path) -> Result<ResourcesOfAllKernels, RecordFileError> {
        file::read_record(path).map(|record: KernelResourcesFile| record.into())
    }

    /// Writes the resources of all kernels for a GPU architecture to a file.
    pub fn write_resources_file(&self, path: &Path) -> Result<(), RecordFileError> {
        file::write_record_atomically(path, &KernelResourcesFile::from(self))
    }

    /// Fails if a recorded number of a kernel is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the kernel and the number.
    pub fn check_kernel_numbers_plausible(&self) -> Result<(), String> {
        self.kernels.iter().try_for_each(|(name, kernel)| {
            kernel
                .check_kernel_resources_plausible()
                .map_err(|problem| format!("kernel {name} has {problem}"))
        })
    }
}

/// Largest plausible number of registers, bytes or instructions of a kernel; sums of such numbers
/// do not overflow.
const MAX_NUMBER_IN_KERNEL_RESOURCES: u32 = 1 << 30;
/// Largest number of instruction classes in a file.
const MAX_INSTRUCTION_CLASSES_IN_FILE: usize = 64;
/// Largest accepted number of registers per thread in a file; GPUs have at most 255.
const MAX_REGISTERS_PER_THREAD: u32 = 1 << 16;

impl ResourcesOfKernel {
    /// Fails if a number in the resources of this kernel is implausible.
    fn check_kernel_resources_plausible(&self) -> Result<(), String> {
        let CompiledKernelResources {
            registers_per_thread: registers,
            stack_bytes_per_thread: stack_bytes,
            spill_store_bytes,
            spill_load_bytes,
            ..
        } = self.facts;
        let CompiledKernelResources {
            static_shared_bytes: shared_bytes,
            instruction_count: instructions,
            ..
        } = self.facts;
        if instructions == 0 {
            return Err("no instructions".to_owned());
        }
        let facts = [registers, stack_bytes, spill_store_bytes, spill_load_bytes, shared_bytes];
        let launched = [self.threads_per_block, self.dynamic_shared_bytes, instructions];
        let mut all = facts
            .into_iter()
            .chain(launched)
            .chain(self.facts.instruction_count_by_class.values().copied());
        if let Some(number) = all.find(|number| *number > MAX_NUMBER_IN_KERNEL_RESOURCES) {
            return Err(format!("a number that is too large: {number}"));
        }
        match self.occupancy_percent.filter(|percent| *percent > 100) {
            Some(percent) => Err(format!("an occupancy of {percent} %")),
            None => Ok(()),
        }
    }
}

/// The reason why the resources of the kernels could not be determined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelResourcesError {
    /// NVRTC is missing, or a kernel does not compile.
    #[error(transparent)]
    Compile(#[from] KernelCompileError),
    /// The machine code (cubin) of a compiled kernel cannot be read.
    #[error("kernel {kernel_build}: {error}")]
    UnreadableCubin {
        /// Name of the kernel build.
        kernel_build: String,
        /// Reason.
        error: CubinReadError,
    },
    /// The compiled file contains a kernel that no implementation (row) lists.
    #[error("kernel {kernel_symbol} of {kernel_build} has no row")]
    KernelWithoutImplementation {
        /// Name of the kernel.
        kernel_symbol: String,
        /// Name of the kernel build.
        kernel_build: String,
    },
    /// An implementation (row) lists a kernel that is missing in its compiled file.
    #[error("{kernel_build} holds no kernel {kernel_symbol}, which a row is about")]
    ListedKernelMissing {
        /// Name of the kernel.
        kernel_symbol: &'static str,
        /// Name of the kernel build.
        kernel_build: String,
    },
}

/// Compiles each source file once per kernel build for a GPU architecture, and reads the kernels'
/// registers, spills and occupancy. No GPU is needed, only NVRTC.
///
/// # Errors
/// Fails with the name and the compiler's log of the first kernel that does not compile, or with
/// the name of a kernel without a row, or of one that a row lists and no file contains.
pub fn compile_kernels_and_read_resources(
    kernels: &[ListedKernelBuild],
    arch: &str,
) -> Result<KernelResourcesAndHashes, KernelResourcesError> {
    let (major, minor) = nvrtc::found_nvrtc_version()?;
    let mut builds: BTreeMap<&KernelBuild, Vec<&ListedKernelBuild>> = BTreeMap::new();
    for kernel in kernels {
        builds.entry(&kernel.build).or_default().push(kernel);
    }
    let mut left_out = BTreeMap::new();
    builds.retain(|build, kernels| {
        let unmet = kernels.iter().find_map(|kernel| kernel.reason_architecture_cannot_run(arch));
        let applies = unmet.is_none();
        left_out.extend(unmet.map(|unmet| (build.kernel_build_name(), unmet)));
        applies
    });
    let compiled: Vec<_> = builds
        .par_iter()
        .map(|(build, kernels)| Ok((*build, kernels, nvrtc::compile_to_cubin_or_ptx(build, arch)?)))
        .collect::<Result<_, KernelCompileError>>()?;
    let mut resources = ResourcesOfAllKernels {
        arch: arch.to_owned(),
        compiler: format!("{major}.{minor}"),
        kernels: BTreeMap::new(),
        unsupported_kernels: left_out,
    };
    let (mut all, mut sources) = (BTreeMap::new(), BTreeMap::new());
    for (build, kernels, compiled) in compiled {
        let name = build.kernel_build_name();
        let broken =
            |error| KernelResourcesError::UnreadableCubin { kernel_build: name.clone(), error };
        let mut facts =
            cubin::resources_of_kernels_in_cubin(&compiled.cubin_or_ptx, &compiled.compiler_log)
                .map_err(broken)?;
        let mut hashes =
            code::machine_code_hashes_of_cubin(&compiled.cubin_or_ptx).map_err(broken)?;
        let source = cache::hash_of_compilation_inputs(build, arch)?;
        for kernel in kernels {
            let symbol = kernel.kernel_symbol;
            sources.insert(kernel.kernel_name_in_records(), source.clone());
            let facts =
                facts.remove(symbol).ok_or_else(|| KernelResourcesError::ListedKernelMissing {
                    kernel_symbol: symbol,
                    kernel_build: name.clone(),
                })?;
            let (block, shared_bytes) = (kernel.threads_per_block, kernel.dynamic_shared_bytes);
            let found = kernel_resources_with_occupancy(facts, block, shared_bytes, arch);
            resources.kernels.insert(kernel.kernel_name_in_records(), found);
            all.extend(hashes.remove(symbol).map(|hash| (kernel.kernel_name_in_records(), hash)));
        }
        if let Some(symbol) = facts.into_keys().next() {
            return Err(KernelResourcesError::KernelWithoutImplementation {
                kernel_symbol: symbol,
                kernel_build: name,
            });
        }
    }
    Ok(KernelResourcesAndHashes { resources, machine_code_hashes: all, source_hashes: sources })
}

/// Adds the theoretical occupancy to the resources of a kernel, computed from registers, shared
/// memory and block size.
fn kernel_resources_with_occupancy(
    facts: CompiledKernelResources,
    block: u32,
    dynamic_shared_bytes: u32,
    arch: &str,
) -> ResourcesOfKernel {
    let shared_bytes = facts
        .static_shared_bytes
        .saturating_add(dynamic_shared_bytes)
        .min(MAX_NUMBER_IN_KERNEL_RESOURCES);
    let occupancy = occupancy::theoretical_occupancy_of_kernel(
        arch,
        facts.registers_per_thread,
        shared_bytes,
        block,
    );
    let occupancy_percent = occupancy.map(|share| (100.0 * share).round() as u32);
    ResourcesOfKernel { facts, threads_per_block: block, dynamic_shared_bytes, occupancy_percent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resources_file_keeps_every_number() {
        let kernel = |mix: &[(&str, u32)], stack_bytes| {
            let mix: BTreeMap<String, u32> =
                mix.iter().map(|(class, count)| ((*class).to_owned(), *count)).collect();
            let facts = CompiledKernelResources {
                registers_per_thread: 40,
                stack_bytes_per_thread: stack_bytes,
                spill_store_bytes: 4,
                spill_load_bytes: 8,
                static_shared_bytes: 16,
                instruction_count: mix.values().sum(),
                instruction_count_by_class: mix,
                performance_loss_warning: Some("no overlap".to_owned()),
            };
            kernel_resources_with_occupancy(facts, 128, 1024, "sm_90a")
        };
        let kernels = [
            ("a".to_owned(), kernel(&[("control", 2), ("warp", 3)], 0)),
            ("b".to_owned(), kernel(&[("fp32", 7)], 32)),
        ];
        let left_out = ["c", "d"].map(|build| (build.to_owned(), "needs sm_100a".to_owned()));
        let (arch, compiler) = ("sm_90a".to_owned(), "13.0".to_owned());
        let (kernels, left_out) = (kernels.into(), left_out.into());
        let resources =
            ResourcesOfAllKernels { arch, compiler, kernels, unsupported_kernels: left_out };
        let record = KernelResourcesFile::from(&resources);
        assert_eq!(record.instruction_classes, ["control", "fp32", "warp"]);
        assert_eq!(
            (
                &*record.kernels["a"].instruction_counts_by_class,
                &*record.kernels["b"].instruction_counts_by_class
            ),
            (&[2, 0, 3][..], &[0, 7][..])
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sm_90a.json");
        resources.write_resources_file(&path).unwrap();
        assert_eq!(ResourcesOfAllKernels::read_resources_file(&path).unwrap(), resources);
        // A file of an older format is refused by its version.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"schema_version\": 2", "\"schema_version\": 1"))
            .unwrap();
        let error = ResourcesOfAllKernels::read_resources_file(&path).unwrap_err();
        assert!(
            matches!(
                error,
                RecordFileError::OlderVersion { file_version: 1, oldest_readable_version: 2, .. }
            ),
            "{error}"
        );
    }

    #[test]
    fn an_instruction_mix_without_classes_is_refused() {
        let kernel = serde_json::json!({"block": 32, "registers": 8, "mix": [1, 2]});
        let record = |classes: &[&str]| -> KernelResourcesFile {
            let value = serde_json::json!({
                "arch": "sm_90a", "compiler": "13.0", "classes": classes, "kernels": {"k": kernel},
            });
            serde_json::from_value(value).unwrap()
        };
        assert_eq!(record(&["control", "warp"]).check_record_plausible(), Ok(()));
        let mut empty = record(&["control", "warp"]);
        empty.kernels.get_mut("k").unwrap().threads_per_block = 0;
        assert_eq!(empty.check_record_plausible().unwrap_err(), "kernel k has blocks of 0 threads");
        let problem = record(&["control"]).check_record_plausible().unwrap_err();
        assert_eq!(problem, "kernel k has a mix that does not fit the classes");
    }
}
