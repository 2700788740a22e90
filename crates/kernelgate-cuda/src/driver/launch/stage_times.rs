//! Reads the cycle counters of kernel stages, block by block, from kernels that were compiled with
//! stage clocks (`kernels/common/stages.cuh`).

use std::sync::Arc;

use cudarc::driver::{CudaModule, CudaStream, DevicePtr, DeviceSlice, DriverError, result};

use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// Symbol of the array of stage counters in a module compiled with stage clocks.
const STAGE_COUNTERS_SYMBOL: &str = "kernelgate_stages";

/// A loaded kernel whose implementation names stages, with its stage counters if it was compiled
/// with clocks.
pub struct KernelWithStages {
    kernel_symbol: &'static str,
    stage_names: &'static [&'static str],
    counters: Option<StageCountersInModule>,
}

impl KernelWithStages {
    pub(crate) const fn with_stages_and_counters(
        symbol: &'static str,
        stages: &'static [&'static str],
        counters: Option<StageCountersInModule>,
    ) -> Self {
        Self { kernel_symbol: symbol, stage_names: stages, counters }
    }

    /// Symbol of the kernel in its source, such as `attention_forward`.
    pub const fn kernel_symbol(&self) -> &'static str {
        self.kernel_symbol
    }

    /// Names of the kernel's stages, in the order of their counters.
    pub const fn stage_names(&self) -> &'static [&'static str] {
        self.stage_names
    }

    /// Sets the stage counters of the kernel to zero, as an operation in the order of the device's
    /// stream.
    ///
    /// # Errors
    /// Fails if the driver cannot clear the counters.
    pub fn clear_stage_counters(&self) -> Result<(), BackendError> {
        self.counters.as_ref().map_or(Ok(()), |counters| counters.clear_all_stage_counters())
    }

    /// For each block, the clock cycles of each stage since the counters were cleared; empty if the
    /// kernel was compiled without stage clocks.
    pub fn read_stage_cycles_by_block(&self) -> Result<Vec<Vec<u64>>, BackendError> {
        let Some(counters) = &self.counters else { return Ok(Vec::new()) };
        let all = counters.read_all_stage_cycles()?;
        Ok(all.chunks(self.stage_names.len().max(1)).map(<[u64]>::to_vec).collect())
    }

    /// Whether two values are the same kernel of the same loaded module.
    pub(crate) fn is_same_kernel_of_same_module(&self, other: &Self) -> bool {
        let address =
            |kernel: &Self| kernel.counters.as_ref().map(|counters| counters.counters_address);
        self.kernel_symbol == other.kernel_symbol && address(self) == address(other)
    }
}

/// The array of stage counters in a loaded module, which stays loaded as long as this value lives.
pub(crate) struct StageCountersInModule {
    _module: Arc<CudaModule>,
    stream: Arc<CudaStream>,
    counters_address: u64,
    counters_bytes: usize,
}

impl StageCountersInModule {
    /// # Errors
    /// Finds the stage counters in a loaded module; fails if the module has none.
    pub(crate) fn find_stage_counters_in_module(
        module: Arc<CudaModule>,
        stream: &Arc<CudaStream>,
    ) -> Result<StageCountersInModule, DriverError> {
        let (address, bytes) = {
            let found = module.get_global(STAGE_COUNTERS_SYMBOL, stream)?;
            (found.device_ptr(stream).0, found.num_bytes())
        };
        Ok(Self {
            stream: Arc::clone(stream),
            counters_address: address,
            counters_bytes: bytes,
            _module: module,
        })
    }

    fn clear_all_stage_counters(&self) -> Result<(), BackendError> {
        // SAFETY: the range is the whole counter array, whose module is kept loaded.
        unsafe {
            result::memset_d8_async(
                self.counters_address,
                0,
                self.counters_bytes,
                self.stream.cu_stream(),
            )
        }
        .map_err(|error| error_for_failed_action("clear the clocks of stages", &error))
    }

    fn read_all_stage_cycles(&self) -> Result<Vec<u64>, BackendError> {
        let failed = |error| error_for_failed_action("read the clocks of stages", &error);
        let mut cycles = vec![0u64; self.counters_bytes / size_of::<u64>()];
        // SAFETY: the range lies in the counter array, whose module is kept loaded; the target
        // outlives the copy, which has finished when this returns.
        unsafe {
            result::memcpy_dtoh_async(&mut cycles, self.counters_address, self.stream.cu_stream())
        }
        .map_err(failed)?;
        self.stream.synchronize().map_err(failed)?;
        Ok(cycles)
    }
}
