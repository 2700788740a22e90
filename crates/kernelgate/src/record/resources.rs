//! What the compiler made of every kernel, for one architecture: the baseline of a performance check that needs no GPU.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::file::Record;
use kernelgate_cuda::compiler::cubin::Facts;

/// Static facts of every kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Resources {
    /// Architecture: "sm_90a".
    pub arch: String,
    /// Version of NVRTC: "13.0".
    pub compiler: String,
    /// Kernels by build and symbol.
    pub kernels: BTreeMap<String, KernelResources>,
}

/// Static facts of one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelResources {
    /// What the compiler made.
    pub facts: Facts,
    /// Threads a block, as launched.
    pub block: u32,
    /// Dynamic shared memory a block, bytes, as launched.
    pub dynamic_shared_bytes: u32,
    /// Share of a multiprocessor's warps that can be resident, in percent; absent for an unknown architecture.
    pub occupancy_percent: Option<u32>,
}

impl Record for Resources {
    const SCHEMA: &'static str = "kernelgate.resources";
    const VERSION: u64 = 1;
    const KIND: &'static str = "resource record";

    fn validate(&self) -> Result<(), String> {
        let empty = self.kernels.iter().find(|(_, kernel)| kernel.facts.instructions == 0);
        empty.map_or(Ok(()), |(name, _)| Err(format!("kernel {name} has no instructions")))
    }
}
