//! Times of the stages of a kernel, block by block: counters of builds that have clocks
//! (`kernels/common/stages.cuh`).

use std::sync::Arc;

use cudarc::driver::{CudaModule, CudaStream, DevicePtr, DeviceSlice, DriverError, result};

use crate::BackendError;
use crate::driver::driver_error::failed;

/// Symbol of the stage counters in a compiled module.
const STAGE_COUNTERS_SYMBOL: &str = "kernelgate_stages";

/// A loaded kernel whose row names stages.
pub struct StageClockedKernel {
    symbol: &'static str,
    stages: &'static [&'static str],
    counters: Option<StageCounters>,
}

impl StageClockedKernel {
    pub(crate) const fn new(
        symbol: &'static str,
        stages: &'static [&'static str],
        counters: Option<StageCounters>,
    ) -> Self {
        Self { symbol, stages, counters }
    }

    /// Name of the kernel in its source.
    pub const fn kernel_symbol(&self) -> &'static str {
        self.symbol
    }

    /// Returns the names of the kernel's stages, in the order of their counters.
    pub const fn stage_names(&self) -> &'static [&'static str] {
        self.stages
    }

    /// Sets the kernel's stage counters to zero, in the order of the device's stream.
    ///
    /// # Errors
    /// Fails if the driver cannot clear the counters.
    pub fn clear_counters(&self) -> Result<(), BackendError> {
        self.counters.as_ref().map_or(Ok(()), |counters| counters.clear_cycles())
    }

    /// Cycles of each stage in each block since the counters were cleared, by block; empty if the
    /// kernel was loaded without clocks.
    pub fn stage_cycles(&self) -> Result<Vec<Vec<u64>>, BackendError> {
        let Some(counters) = &self.counters else { return Ok(Vec::new()) };
        let all = counters.read_cycles()?;
        Ok(all.chunks(self.stages.len().max(1)).map(<[u64]>::to_vec).collect())
    }

    /// Returns whether two kernels are the same kernel of the same build.
    pub(crate) fn is_same_build(&self, other: &Self) -> bool {
        let address = |kernel: &Self| kernel.counters.as_ref().map(|counters| counters.address);
        self.symbol == other.symbol && address(self) == address(other)
    }
}

/// Stage counters of a loaded module, which stays loaded as long as this value.
pub(crate) struct StageCounters {
    _module: Arc<CudaModule>,
    stream: Arc<CudaStream>,
    address: u64,
    bytes: usize,
}

impl StageCounters {
    /// # Errors
    /// Fails if the module has no stage counters.
    pub(crate) fn in_module(
        module: Arc<CudaModule>,
        stream: &Arc<CudaStream>,
    ) -> Result<StageCounters, DriverError> {
        let (address, bytes) = {
            let found = module.get_global(STAGE_COUNTERS_SYMBOL, stream)?;
            (found.device_ptr(stream).0, found.num_bytes())
        };
        Ok(Self { stream: Arc::clone(stream), address, bytes, _module: module })
    }

    fn clear_cycles(&self) -> Result<(), BackendError> {
        // SAFETY: the range is the whole variable, whose module is kept loaded.
        unsafe { result::memset_d8_async(self.address, 0, self.bytes, self.stream.cu_stream()) }
            .map_err(|error| failed("clear the clocks of stages", &error))
    }

    fn read_cycles(&self) -> Result<Vec<u64>, BackendError> {
        let failed = |error| failed("read the clocks of stages", &error);
        let mut cycles = vec![0u64; self.bytes / size_of::<u64>()];
        // SAFETY: the range lies in the variable, whose module is kept loaded; the target outlives
        // the copy, which has finished when this returns.
        unsafe { result::memcpy_dtoh_async(&mut cycles, self.address, self.stream.cu_stream()) }
            .map_err(failed)?;
        self.stream.synchronize().map_err(failed)?;
        Ok(cycles)
    }
}
