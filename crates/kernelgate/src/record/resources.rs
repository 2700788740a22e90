//! Compiler output for every kernel on one architecture: the baseline of a performance check that
//! needs no GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::files::file::{self, RecordFileError, RecordType};
use kernelgate_cuda::compiler::cubin::{self, CompiledKernelFacts, CubinError};
use kernelgate_cuda::compiler::nvrtc::{self, CompileError};
use kernelgate_cuda::compiler::occupancy;
use kernelgate_cuda::compiler::source::KernelBuild;
use kernelgate_cuda::compiler::{cache, code};
use kernelgate_cuda::spec::ListedKernel;

/// Compiler output of every kernel: registers, spills, shared memory, occupancy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResources {
    /// Architecture: "sm_90a".
    pub arch: String,
    /// Version of NVRTC: "13.0".
    pub compiler: String,
    /// Compiled kernels by build and symbol.
    pub kernels: BTreeMap<String, KernelResources>,
    /// Builds that the architecture cannot run, each with the unmet requirement: "needs sm_90a".
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: BTreeMap<String, String>,
}

/// Compiler output of one kernel: registers, spills, shared memory, occupancy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelResources {
    /// Facts that the kernel's machine code states.
    pub facts: CompiledKernelFacts,
    /// Number of threads of a block, as the kernel is launched.
    pub block: u32,
    /// Dynamic shared memory of a thread block, bytes, with which the kernel is launched.
    pub dynamic_shared_bytes: u32,
    /// Share of a multiprocessor's warps that can be resident, in percent; absent for an unknown
    /// architecture.
    pub occupancy_percent: Option<u32>,
}

/// Kernels as compiled now.
#[derive(Debug, Clone, PartialEq)]
pub struct CompiledKernels {
    /// Compiler output of all kernels.
    pub resources: RunResources,
    /// Hash of the machine code of each, by build and symbol.
    pub code: BTreeMap<String, String>,
    /// Hash of what each is compiled from, and by which compiler, by build and symbol.
    pub sources: BTreeMap<String, String>,
}

/// [`RunResources`] as a file, with numbers in place of repeated names, and without what follows
/// from others: the sum of the instructions and the occupancy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResourceRecord {
    /// Architecture: "sm_90a".
    pub arch: String,
    /// Version of NVRTC: "13.0".
    pub compiler: String,
    /// Classes of instructions, in the order of the numbers in each kernel's `mix`.
    pub classes: Vec<String>,
    /// Kernels by build and symbol.
    pub kernels: BTreeMap<String, RecordedKernel>,
    /// Builds that the architecture cannot run, by the unmet requirement: "needs sm_90a".
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: BTreeMap<String, Vec<String>>,
}

/// Static facts of one kernel in a file; an absent number is 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedKernel {
    /// Threads of a block with which the kernel is launched.
    pub block: u32,
    /// Dynamic shared memory a block, bytes, as launched.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero")]
    pub dynamic_shared_bytes: u32,
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local stack for each thread.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero")]
    pub stack_bytes: u32,
    /// Bytes a thread writes when registers run out.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero")]
    pub spill_store_bytes: u32,
    /// Bytes of spilled registers that each thread loads.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero")]
    pub spill_load_bytes: u32,
    /// Static shared memory of a block, bytes.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero")]
    pub shared_bytes: u32,
    /// Instructions of each class; zeros at the end are absent.
    pub mix: Vec<u32>,
    /// Performance loss that the assembler reports, with its reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub performance_loss: Option<String>,
}

impl From<&RunResources> for ResourceRecord {
    fn from(resources: &RunResources) -> Self {
        let mixes = resources.kernels.values().flat_map(|kernel| kernel.facts.mix.keys());
        let classes: Vec<String> = mixes.collect::<BTreeSet<_>>().into_iter().cloned().collect();
        let kernel = |kernel: &KernelResources| {
            let count = |class| kernel.facts.mix.get(class).copied().unwrap_or_default();
            let mut mix: Vec<u32> = classes.iter().map(count).collect();
            mix.truncate(mix.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1));
            RecordedKernel {
                block: kernel.block,
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
        for (build, unmet) in &resources.left_out {
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

impl From<ResourceRecord> for RunResources {
    fn from(record: ResourceRecord) -> Self {
        let ResourceRecord { arch, compiler, classes, kernels, left_out } = record;
        let kernel = |kernel: RecordedKernel| {
            let counts = classes.iter().cloned().zip(kernel.mix.iter().copied());
            let facts = CompiledKernelFacts {
                registers: kernel.registers,
                stack_bytes: kernel.stack_bytes,
                spill_store_bytes: kernel.spill_store_bytes,
                spill_load_bytes: kernel.spill_load_bytes,
                shared_bytes: kernel.shared_bytes,
                instructions: kernel.mix.iter().sum(),
                mix: counts.filter(|(_, count)| *count > 0).collect(),
                performance_loss: kernel.performance_loss,
            };
            kernel_resources(facts, kernel.block, kernel.dynamic_shared_bytes, &arch)
        };
        let builds = left_out.into_iter().flat_map(|(unmet, builds)| {
            builds.into_iter().map(move |build| (build, unmet.clone()))
        });
        Self {
            kernels: kernels.into_iter().map(|(name, it)| (name, kernel(it))).collect(),
            left_out: builds.collect(),
            arch,
            compiler,
        }
    }
}

impl RecordType for ResourceRecord {
    const SCHEMA: &'static str = "kernelgate-resources";
    const SCHEMA_VERSION: u64 = 2;
    const OLDEST_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "resource record";
    const ONE_LINE_FIELDS: &'static [&'static str] = &["kernels"];

    fn validate(&self) -> Result<(), String> {
        if self.classes.len() > MAX_INSTRUCTION_CLASSES {
            return Err(format!("{} classes of instructions", self.classes.len()));
        }
        for (name, kernel) in &self.kernels {
            let problem = |problem: String| Err(format!("kernel {name} has {problem}"));
            let RecordedKernel { block, registers, mix, .. } = kernel;
            if !(1..=1024).contains(block) {
                return problem(format!("blocks of {block} threads"));
            }
            if *registers > MAX_REGISTERS_PER_THREAD {
                return problem(format!("{registers} registers"));
            }
            let most = MAX_RESOURCE_COUNT / MAX_INSTRUCTION_CLASSES as u32;
            if mix.len() > self.classes.len() || mix.iter().any(|count| *count > most) {
                return problem("a mix that does not fit the classes".to_owned());
            }
        }
        RunResources::from(self.clone()).validate()
    }
}

impl RunResources {
    /// Reads the recorded kernel resources of an architecture.
    pub fn read(path: &Path) -> Result<RunResources, RecordFileError> {
        file::read(path).map(|record: ResourceRecord| record.into())
    }

    /// Writes the recorded kernel resources of an architecture.
    pub fn write(&self, path: &Path) -> Result<(), RecordFileError> {
        file::write(path, &ResourceRecord::from(self))
    }

    /// Checks that the recorded numbers of every kernel are plausible.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the kernel and the number.
    pub fn validate(&self) -> Result<(), String> {
        self.kernels.iter().try_for_each(|(name, kernel)| {
            kernel.validate().map_err(|problem| format!("kernel {name} has {problem}"))
        })
    }
}

/// Largest number of registers, bytes or instructions of a kernel: sums of such numbers do not
/// overflow.
const MAX_RESOURCE_COUNT: u32 = 1 << 30;
/// Largest number of classes of instructions in a file.
const MAX_INSTRUCTION_CLASSES: usize = 64;
/// Most registers of a thread in a file; architectures have 255.
const MAX_REGISTERS_PER_THREAD: u32 = 1 << 16;

impl KernelResources {
    /// Checks that the recorded numbers of a kernel are plausible.
    fn validate(&self) -> Result<(), String> {
        let CompiledKernelFacts {
            registers, stack_bytes, spill_store_bytes, spill_load_bytes, ..
        } = self.facts;
        let CompiledKernelFacts { shared_bytes, instructions, .. } = self.facts;
        if instructions == 0 {
            return Err("no instructions".to_owned());
        }
        let facts = [registers, stack_bytes, spill_store_bytes, spill_load_bytes, shared_bytes];
        let launched = [self.block, self.dynamic_shared_bytes, instructions];
        let mut all = facts.into_iter().chain(launched).chain(self.facts.mix.values().copied());
        if let Some(number) = all.find(|number| *number > MAX_RESOURCE_COUNT) {
            return Err(format!("a number that is too large: {number}"));
        }
        match self.occupancy_percent.filter(|percent| *percent > 100) {
            Some(percent) => Err(format!("an occupancy of {percent} %")),
            None => Ok(()),
        }
    }
}

/// The reason why kernels have no record of their resources.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResourcesError {
    /// NVRTC is missing, or a kernel does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The machine code of a compiled kernel cannot be read.
    #[error("kernel {kernel}: {error}")]
    Cubin {
        /// Build.
        kernel: String,
        /// Reason.
        error: CubinError,
    },
    /// The file holds a kernel that no row is about.
    #[error("kernel {symbol} of {build} has no row")]
    NoRow {
        /// Name of the kernel.
        symbol: String,
        /// Build.
        build: String,
    },
    /// A row names a kernel that is missing in its compiled file.
    #[error("{build} holds no kernel {symbol}, which a row is about")]
    NoCode {
        /// Name of the kernel.
        symbol: &'static str,
        /// Build.
        build: String,
    },
}

/// Compiles kernels for an architecture, each file once for each of its builds, and reads
/// registers, spills and occupancy of the results. Needs no GPU.
///
/// # Errors
/// The first kernel that does not compile, by name, with the compiler's log; a kernel without a
/// row, or a row without a kernel.
pub fn compile_resources(
    kernels: &[ListedKernel],
    arch: &str,
) -> Result<CompiledKernels, ResourcesError> {
    let (major, minor) = nvrtc::installed_nvrtc_version()?;
    let mut builds: BTreeMap<&KernelBuild, Vec<&ListedKernel>> = BTreeMap::new();
    for kernel in kernels {
        builds.entry(&kernel.build).or_default().push(kernel);
    }
    let mut left_out = BTreeMap::new();
    builds.retain(|build, kernels| {
        let unmet = kernels.iter().find_map(|kernel| kernel.unmet_by(arch));
        let applies = unmet.is_none();
        left_out.extend(unmet.map(|unmet| (build.name(), unmet)));
        applies
    });
    let compiled: Vec<_> = builds
        .par_iter()
        .map(|(build, kernels)| Ok((*build, kernels, nvrtc::compile_to_cubin(build, arch)?)))
        .collect::<Result<_, CompileError>>()?;
    let mut resources = RunResources {
        arch: arch.to_owned(),
        compiler: format!("{major}.{minor}"),
        kernels: BTreeMap::new(),
        left_out,
    };
    let (mut all, mut sources) = (BTreeMap::new(), BTreeMap::new());
    for (build, kernels, compiled) in compiled {
        let name = build.name();
        let broken = |error| ResourcesError::Cubin { kernel: name.clone(), error };
        let mut facts = cubin::kernel_facts(&compiled.cubin, &compiled.log).map_err(broken)?;
        let mut hashes = code::machine_code_hashes(&compiled.cubin).map_err(broken)?;
        let source = cache::content_hash(build, arch)?;
        for kernel in kernels {
            let symbol = kernel.symbol;
            sources.insert(kernel.name(), source.clone());
            let facts = facts
                .remove(symbol)
                .ok_or_else(|| ResourcesError::NoCode { symbol, build: name.clone() })?;
            let (block, shared_bytes) = (kernel.threads, kernel.shared_bytes);
            let found = kernel_resources(facts, block, shared_bytes, arch);
            resources.kernels.insert(kernel.name(), found);
            all.extend(hashes.remove(symbol).map(|hash| (kernel.name(), hash)));
        }
        if let Some(symbol) = facts.into_keys().next() {
            return Err(ResourcesError::NoRow { symbol, build: name });
        }
    }
    Ok(CompiledKernels { resources, code: all, sources })
}

/// Adds the occupancy to the resources of a kernel, which follows from the other numbers.
fn kernel_resources(
    facts: CompiledKernelFacts,
    block: u32,
    dynamic_shared_bytes: u32,
    arch: &str,
) -> KernelResources {
    let shared_bytes =
        facts.shared_bytes.saturating_add(dynamic_shared_bytes).min(MAX_RESOURCE_COUNT);
    let occupancy = occupancy::theoretical_occupancy(arch, facts.registers, shared_bytes, block);
    let occupancy_percent = occupancy.map(|share| (100.0 * share).round() as u32);
    KernelResources { facts, block, dynamic_shared_bytes, occupancy_percent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_record_keeps_every_fact_when_written_and_read() {
        let kernel = |mix: &[(&str, u32)], stack_bytes| {
            let mix: BTreeMap<String, u32> =
                mix.iter().map(|(class, count)| ((*class).to_owned(), *count)).collect();
            let facts = CompiledKernelFacts {
                registers: 40,
                stack_bytes,
                spill_store_bytes: 4,
                spill_load_bytes: 8,
                shared_bytes: 16,
                instructions: mix.values().sum(),
                mix,
                performance_loss: Some("no overlap".to_owned()),
            };
            kernel_resources(facts, 128, 1024, "sm_90a")
        };
        let kernels = [
            ("a".to_owned(), kernel(&[("control", 2), ("warp", 3)], 0)),
            ("b".to_owned(), kernel(&[("fp32", 7)], 32)),
        ];
        let left_out = ["c", "d"].map(|build| (build.to_owned(), "needs sm_100a".to_owned()));
        let (arch, compiler) = ("sm_90a".to_owned(), "13.0".to_owned());
        let (kernels, left_out) = (kernels.into(), left_out.into());
        let resources = RunResources { arch, compiler, kernels, left_out };
        let record = ResourceRecord::from(&resources);
        assert_eq!(record.classes, ["control", "fp32", "warp"]);
        assert_eq!(
            (&*record.kernels["a"].mix, &*record.kernels["b"].mix),
            (&[2, 0, 3][..], &[0, 7][..])
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sm_90a.json");
        resources.write(&path).unwrap();
        assert_eq!(RunResources::read(&path).unwrap(), resources);
        // An older format is refused by its version.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"schema_version\": 2", "\"schema_version\": 1"))
            .unwrap();
        let error = RunResources::read(&path).unwrap_err();
        assert!(matches!(error, RecordFileError::Older { found: 1, oldest: 2, .. }), "{error}");
    }

    #[test]
    fn an_instruction_mix_without_classes_is_refused() {
        let kernel = serde_json::json!({"block": 32, "registers": 8, "mix": [1, 2]});
        let record = |classes: &[&str]| -> ResourceRecord {
            let value = serde_json::json!({
                "arch": "sm_90a", "compiler": "13.0", "classes": classes, "kernels": {"k": kernel},
            });
            serde_json::from_value(value).unwrap()
        };
        assert_eq!(record(&["control", "warp"]).validate(), Ok(()));
        let mut empty = record(&["control", "warp"]);
        empty.kernels.get_mut("k").unwrap().block = 0;
        assert_eq!(empty.validate().unwrap_err(), "kernel k has blocks of 0 threads");
        let problem = record(&["control"]).validate().unwrap_err();
        assert_eq!(problem, "kernel k has a mix that does not fit the classes");
    }
}
