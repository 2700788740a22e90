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
    /// Number of threads of a block with which the kernel is launched.
    #[serde(rename = "block")]
    pub threads_per_block: u32,
    /// Dynamic shared memory of a thread block, bytes, with which the kernel is launched.
    pub dynamic_shared_bytes: u32,
    /// Occupancy, percent: share of a multiprocessor's warps that can be resident; absent for an
    /// unknown architecture.
    pub occupancy_percent: Option<u32>,
}

/// Kernels as compiled now.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelResourcesAndHashes {
    /// Registers, spills and occupancy of all kernels.
    pub resources: ResourcesOfAllKernels,
    /// Hash of each kernel's machine code, by kernel build and symbol name.
    pub code: BTreeMap<String, String>,
    /// Hash of each kernel's source and compiler, by kernel build and symbol name.
    pub sources: BTreeMap<String, String>,
}

/// File format of [`ResourcesOfAllKernels`]: instruction classes are numbered, and the sum of the
/// instructions and the occupancy, which follow from other numbers, are absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelResourcesFile {
    /// Architecture: "sm_90a".
    pub arch: String,
    /// Version of NVRTC: "13.0".
    pub compiler: String,
    /// Names of the instruction classes, in the order of the counts in each kernel's `mix`.
    pub classes: Vec<String>,
    /// Kernels by kernel build and symbol name.
    pub kernels: BTreeMap<String, KernelResourcesInFile>,
    /// Kernel builds that the GPU architecture cannot run, by the unmet requirement, such as "needs
    /// sm_90a".
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: BTreeMap<String, Vec<String>>,
}

/// Compiler output for one kernel in the file; an absent number is 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelResourcesInFile {
    /// Number of threads of a block with which the kernel is launched.
    pub block: u32,
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
    pub shared_bytes: u32,
    /// Number of instructions of each class; zeros at the end are absent.
    pub mix: Vec<u32>,
    /// Performance warning of the assembler (ptxas) with its reason; absent without a warning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub performance_loss: Option<String>,
}

impl From<&ResourcesOfAllKernels> for KernelResourcesFile {
    fn from(resources: &ResourcesOfAllKernels) -> Self {
        let mixes = resources.kernels.values().flat_map(|kernel| kernel.facts.mix.keys());
        let classes: Vec<String> = mixes.collect::<BTreeSet<_>>().into_iter().cloned().collect();
        let kernel = |kernel: &ResourcesOfKernel| {
            let count = |class| kernel.facts.mix.get(class).copied().unwrap_or_default();
            let mut mix: Vec<u32> = classes.iter().map(count).collect();
            mix.truncate(mix.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1));
            KernelResourcesInFile {
                block: kernel.threads_per_block,
                dynamic_shared_bytes: kernel.dynamic_shared_bytes,
                registers: kernel.facts.registers,
                stack_bytes: kernel.facts.stack_bytes,
                spill_store_bytes: kernel.facts.spill_store_bytes,
                spill_load_bytes: kernel.facts.spill_load_bytes,
                shared_bytes: kernel.facts.shared_bytes,
                mix,
                performance_loss: kernel.facts.performance_loss.clone(),
            }
        };
        let kernels = resources.kernels.iter();
        let mut left_out: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (build, unmet) in &resources.unsupported_kernels {
            left_out.entry(unmet.clone()).or_default().push(build.clone());
        }
        Self {
            arch: resources.arch.clone(),
            compiler: resources.compiler.clone(),
            kernels: kernels.map(|(name, it)| (name.clone(), kernel(it))).collect(),
            classes,
            left_out,
        }
    }
}

impl From<KernelResourcesFile> for ResourcesOfAllKernels {
    fn from(record: KernelResourcesFile) -> Self {
        let KernelResourcesFile { arch, compiler, classes, kernels, left_out } = record;
        let kernel = |kernel: KernelResourcesInFile| {
            let counts = classes.iter().cloned().zip(kernel.mix.iter().copied());
            let facts = CompiledKernelResources {
                registers: kernel.registers,
                stack_bytes: kernel.stack_bytes,
                spill_store_bytes: kernel.spill_store_bytes,
                spill_load_bytes: kernel.spill_load_bytes,
                shared_bytes: kernel.shared_bytes,
                instructions: kernel.mix.iter().sum(),
                mix: counts.filter(|(_, count)| *count > 0).collect(),
                performance_loss: kernel.performance_loss,
            };
            kernel_resources_with_occupancy(facts, kernel.block, kernel.dynamic_shared_bytes, &arch)
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
    const OLDEST_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "resource record";
    const FIELDS_WITH_ONE_LINE_PER_ENTRY: &'static [&'static str] = &["kernels"];

    fn check_record_plausible(&self) -> Result<(), String> {
        if self.classes.len() > MAX_INSTRUCTION_CLASSES_IN_FILE {
            return Err(format!("{} classes of instructions", self.classes.len()));
        }
        for (name, kernel) in &self.kernels {
            let problem = |problem: String| Err(format!("kernel {name} has {problem}"));
            let KernelResourcesInFile { block, registers, mix, .. } = kernel;
            if !(1..=1024).contains(block) {
                return problem(format!("blocks of {block} threads"));
            }
            if *registers > MAX_REGISTERS_PER_THREAD {
                return problem(format!("{registers} registers"));
            }
            let most = MAX_NUMBER_IN_KERNEL_RESOURCES / MAX_INSTRUCTION_CLASSES_IN_FILE as u32;
            if mix.len() > self.classes.len() || mix.iter().any(|count| *count > most) {
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
            registers,
            stack_bytes,
            spill_store_bytes,
            spill_load_bytes,
            ..
        } = self.facts;
        let CompiledKernelResources { shared_bytes, instructions, .. } = self.facts;
        if instructions == 0 {
            return Err("no instructions".to_owned());
        }
        let facts = [registers, stack_bytes, spill_store_bytes, spill_load_bytes, shared_bytes];
        let launched = [self.threads_per_block, self.dynamic_shared_bytes, instructions];
        let mut all = facts.into_iter().chain(launched).chain(self.facts.mix.values().copied());
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
    #[error("kernel {kernel}: {error}")]
    UnreadableCubin {
        /// Name of the kernel build.
        kernel: String,
        /// Reason.
        error: CubinReadError,
    },
    /// The compiled file contains a kernel that no implementation (row) lists.
    #[error("kernel {symbol} of {build} has no row")]
    NoRow {
        /// Name of the kernel.
        symbol: String,
        /// Name of the kernel build.
        build: String,
    },
    /// An implementation (row) lists a kernel that is missing in its compiled file.
    #[error("{build} holds no kernel {symbol}, which a row is about")]
    NoCode {
        /// Name of the kernel.
        symbol: &'static str,
        /// Name of the kernel build.
        build: String,
    },
}

/// Compiles each source file once per kernel build for a GPU architecture, and reads the kernels'
/// registers, spills and occupancy. No GPU is needed, only NVRTC.
///
/// # Errors
/// The first kernel that does not compile, by name, with the compiler's log; a kernel without a
/// row, or a row without a kernel.
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
        left_out.extend(unmet.map(|unmet| (build.file_and_macros(), unmet)));
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
        let name = build.file_and_macros();
        let broken = |error| KernelResourcesError::UnreadableCubin { kernel: name.clone(), error };
        let mut facts =
            cubin::resources_of_kernels_in_cubin(&compiled.cubin, &compiled.log).map_err(broken)?;
        let mut hashes = code::machine_code_hashes_of_cubin(&compiled.cubin).map_err(broken)?;
        let source = cache::hash_of_compilation_inputs(build, arch)?;
        for kernel in kernels {
            let symbol = kernel.symbol;
            sources.insert(kernel.kernel_name_in_records(), source.clone());
            let facts = facts
                .remove(symbol)
                .ok_or_else(|| KernelResourcesError::NoCode { symbol, build: name.clone() })?;
            let (block, shared_bytes) = (kernel.threads, kernel.shared_bytes);
            let found = kernel_resources_with_occupancy(facts, block, shared_bytes, arch);
            resources.kernels.insert(kernel.kernel_name_in_records(), found);
            all.extend(hashes.remove(symbol).map(|hash| (kernel.kernel_name_in_records(), hash)));
        }
        if let Some(symbol) = facts.into_keys().next() {
            return Err(KernelResourcesError::NoRow { symbol, build: name });
        }
    }
    Ok(KernelResourcesAndHashes { resources, code: all, sources })
}

/// Adds the theoretical occupancy to the resources of a kernel, computed from registers, shared
/// memory and block size.
fn kernel_resources_with_occupancy(
    facts: CompiledKernelResources,
    block: u32,
    dynamic_shared_bytes: u32,
    arch: &str,
) -> ResourcesOfKernel {
    let shared_bytes =
        facts.shared_bytes.saturating_add(dynamic_shared_bytes).min(MAX_NUMBER_IN_KERNEL_RESOURCES);
    let occupancy =
        occupancy::theoretical_occupancy_of_kernel(arch, facts.registers, shared_bytes, block);
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
                registers: 40,
                stack_bytes,
                spill_store_bytes: 4,
                spill_load_bytes: 8,
                shared_bytes: 16,
                instructions: mix.values().sum(),
                mix,
                performance_loss: Some("no overlap".to_owned()),
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
        assert_eq!(record.classes, ["control", "fp32", "warp"]);
        assert_eq!(
            (&*record.kernels["a"].mix, &*record.kernels["b"].mix),
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
        assert!(matches!(error, RecordFileError::Older { found: 1, oldest: 2, .. }), "{error}");
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
        empty.kernels.get_mut("k").unwrap().block = 0;
        assert_eq!(empty.check_record_plausible().unwrap_err(), "kernel k has blocks of 0 threads");
        let problem = record(&["control"]).check_record_plausible().unwrap_err();
        assert_eq!(problem, "kernel k has a mix that does not fit the classes");
    }
}
