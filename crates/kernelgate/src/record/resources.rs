//! Compiler output for every kernel on one architecture: the baseline of a performance check that
//! needs no GPU.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::files::file::Record;
use kernelgate_cuda::compiler::cubin::{self, CubinError, KernelFacts};
use kernelgate_cuda::compiler::nvrtc::{self, CompileError};
use kernelgate_cuda::compiler::occupancy;
use kernelgate_cuda::compiler::source::Build;
use kernelgate_cuda::compiler::{cache, code};
use kernelgate_cuda::spec::ListedKernel;

/// Static facts of every kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Resources {
    /// Architecture: "sm_90a".
    pub arch: String,
    /// Version of NVRTC: "13.0".
    pub compiler: String,
    /// Kernels by build and symbol.
    pub kernels: BTreeMap<String, KernelResources>,
    /// Builds that the architecture cannot run, each with the unmet requirement: "needs sm_90a".
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: BTreeMap<String, String>,
}

/// Static facts of one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelResources {
    /// Facts about the machine code.
    pub facts: KernelFacts,
    /// Threads a block, as launched.
    pub block: u32,
    /// Dynamic shared memory a block, bytes, as launched.
    pub dynamic_shared_bytes: u32,
    /// Share of a multiprocessor's warps that can be resident, in percent; absent for an unknown
    /// architecture.
    pub occupancy_percent: Option<u32>,
}

/// Kernels as compiled now.
#[derive(Debug, Clone, PartialEq)]
pub struct CompiledKernels {
    /// Their static facts.
    pub resources: Resources,
    /// Hash of the machine code of each, by build and symbol.
    pub code: BTreeMap<String, String>,
    /// Hash of what each is compiled from, and by which compiler, by build and symbol.
    pub sources: BTreeMap<String, String>,
}

impl Record for Resources {
    const SCHEMA: &'static str = "kernelgate-resources";
    const VERSION: u64 = 1;
    const KIND: &'static str = "resource record";
    const LINES: &'static [&'static str] = &["kernels"];

    fn validate(&self) -> Result<(), String> {
        self.kernels.iter().try_for_each(|(name, kernel)| {
            kernel.validate().map_err(|problem| format!("kernel {name} has {problem}"))
        })
    }
}

/// Most registers, bytes and instructions of a kernel: sums of them over any file are numbers.
const MOST: u32 = 1 << 30;

impl KernelResources {
    /// Checks the numbers of a kernel.
    fn validate(&self) -> Result<(), String> {
        let KernelFacts { registers, stack_bytes, spill_store_bytes, spill_load_bytes, .. } =
            self.facts;
        let KernelFacts { shared_bytes, instructions, .. } = self.facts;
        if instructions == 0 {
            return Err("no instructions".to_owned());
        }
        let facts = [registers, stack_bytes, spill_store_bytes, spill_load_bytes, shared_bytes];
        let launched = [self.block, self.dynamic_shared_bytes, instructions];
        let mut all = facts.into_iter().chain(launched).chain(self.facts.mix.values().copied());
        if let Some(number) = all.find(|number| *number > MOST) {
            return Err(format!("a number that is too large: {number}"));
        }
        match self.occupancy_percent.filter(|percent| *percent > 100) {
            Some(percent) => Err(format!("an occupancy of {percent} %")),
            None => Ok(()),
        }
    }
}

/// Why kernels have no record of their resources.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResourcesError {
    /// NVRTC is missing, or a kernel does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The machine code cannot be read.
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
        /// Its name.
        symbol: String,
        /// Build.
        build: String,
    },
    /// A row is about a kernel that its file does not hold.
    #[error("{build} holds no kernel {symbol}, which a row is about")]
    NoCode {
        /// Its name.
        symbol: &'static str,
        /// Build.
        build: String,
    },
}

/// Compiles kernels for an architecture, each file once for each of its builds, and reads what came
/// of it. Needs no GPU.
///
/// # Errors
/// The first kernel that does not compile, by name, with the compiler's log; a kernel without a
/// row, or a row without a kernel.
pub fn compile(kernels: &[ListedKernel], arch: &str) -> Result<CompiledKernels, ResourcesError> {
    let (major, minor) = nvrtc::version()?;
    let mut builds: BTreeMap<&Build, Vec<&ListedKernel>> = BTreeMap::new();
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
        .map(|(build, kernels)| Ok((*build, kernels, nvrtc::compile(build, arch)?)))
        .collect::<Result<_, CompileError>>()?;
    let mut resources = Resources {
        arch: arch.to_owned(),
        compiler: format!("{major}.{minor}"),
        kernels: BTreeMap::new(),
        left_out,
    };
    let (mut all, mut sources) = (BTreeMap::new(), BTreeMap::new());
    for (build, kernels, compiled) in compiled {
        let name = build.name();
        let broken = |error| ResourcesError::Cubin { kernel: name.clone(), error };
        let mut facts = cubin::facts(&compiled.cubin, &compiled.log).map_err(broken)?;
        let mut hashes = code::hashes(&compiled.cubin).map_err(broken)?;
        let source = cache::content_hash(build, arch)?;
        for kernel in kernels {
            let symbol = kernel.symbol;
            sources.insert(kernel.name(), source.clone());
            let facts = facts
                .remove(symbol)
                .ok_or_else(|| ResourcesError::NoCode { symbol, build: name.clone() })?;
            resources.kernels.insert(kernel.name(), kernel_resources(kernel, facts, arch));
            all.extend(hashes.remove(symbol).map(|hash| (kernel.name(), hash)));
        }
        if let Some(symbol) = facts.into_keys().next() {
            return Err(ResourcesError::NoRow { symbol, build: name });
        }
    }
    Ok(CompiledKernels { resources, code: all, sources })
}

fn kernel_resources(kernel: &ListedKernel, facts: KernelFacts, arch: &str) -> KernelResources {
    let (block, dynamic_shared_bytes) = (kernel.threads, kernel.shared_bytes);
    let occupancy = occupancy::theoretical(
        arch,
        facts.registers,
        facts.shared_bytes + dynamic_shared_bytes,
        block,
    );
    let occupancy_percent = occupancy.map(|share| (100.0 * share).round() as u32);
    KernelResources { facts, block, dynamic_shared_bytes, occupancy_percent }
}
