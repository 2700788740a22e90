//! Settings of a CUDA context that code of others can change and that later launches would inherit:
//! stack, heap and printf sizes, L2 fetch granularity, and the preferred split of L1 and shared
//! memory. Each case starts with the context settings that were in effect when the device was
//! opened.
//!
//! This module does not set clocks and other settings of the GPU that need an administrator.

use cudarc::driver::sys::{CUfunc_cache, CUlimit, CUlimit_enum as Limit};
use cudarc::driver::{CudaContext, DriverError};

use super::driver_error::error_for_failed_action;
use crate::BackendError;

/// Limits of the CUDA context that are restored after each case, with their names in messages. The
/// limits of dynamic parallelism are also restored if the driver still supports them.
const RESTORED_CONTEXT_LIMITS: [(CUlimit, &str); 5] = [
    (Limit::CU_LIMIT_STACK_SIZE, "stack of a thread"),
    (Limit::CU_LIMIT_MALLOC_HEAP_SIZE, "heap of kernels"),
    (Limit::CU_LIMIT_PRINTF_FIFO_SIZE, "printf buffer"),
    (Limit::CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, "launches by kernels"),
    (Limit::CU_LIMIT_MAX_L2_FETCH_GRANULARITY, "L2 fetch granularity"),
];

/// Settings of a CUDA context at one time: its limits and its preferred split of L1 and shared
/// memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaContextSettings {
    /// Values in the order of [`RESTORED_CONTEXT_LIMITS`]; `None` for a limit that the driver
    /// lacks.
    limits: [Option<usize>; RESTORED_CONTEXT_LIMITS.len()],
    cache_preference: Option<CUfunc_cache>,
}

impl CudaContextSettings {
    pub(super) fn read_from_context(context: &CudaContext) -> CudaContextSettings {
        Self {
            limits: RESTORED_CONTEXT_LIMITS.map(|(limit, _)| context.get_limit(limit).ok()),
            cache_preference: context.get_cache_config().ok(),
        }
    }

    /// Restores those settings of the CUDA context that now differ from the saved ones.
    ///
    /// # Errors
    /// Fails if the driver refuses a setting, as for the heap once kernels have used it, because
    /// later cases would be measured under other conditions than earlier ones.
    pub(super) fn restore_settings_in_context(
        &self,
        context: &CudaContext,
    ) -> Result<(), BackendError> {
        self.set_changed_settings_in_context(context).map_err(|(name, error)| {
            let what = format!("restore the {name} of the context, which an earlier case set");
            error_for_failed_action(&what, &error)
        })
    }

    fn set_changed_settings_in_context(
        &self,
        context: &CudaContext,
    ) -> Result<(), (&'static str, DriverError)> {
        let now = Self::read_from_context(context);
        for (((limit, name), before), now) in
            RESTORED_CONTEXT_LIMITS.into_iter().zip(self.limits).zip(now.limits)
        {
            if let (Some(before), true) = (before, before != now) {
                context.set_limit(limit, before).map_err(|error| (name, error))?;
            }
        }
        match self.cache_preference {
            Some(before) if now.cache_preference != self.cache_preference => context
                .set_cache_config(before)
                .map_err(|error| ("split of L1 and shared memory", error)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::persistence;
    use super::*;
    use crate::testing::lock_first_gpu;

    #[test]
    fn settings_of_a_context_are_restored_after_a_change() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let context = device.context();
        let opened = device.read_context_settings();
        eprintln!("{opened:?}");
        assert_eq!(&opened, device.context_settings_when_opened());
        assert!(opened.limits[0].is_some() && opened.cache_preference.is_some());
        for (limit, name) in RESTORED_CONTEXT_LIMITS {
            let Ok(now) = context.get_limit(limit) else { continue };
            let other =
                if limit == Limit::CU_LIMIT_MAX_L2_FETCH_GRANULARITY { 32 } else { 2 * now };
            match context.set_limit(limit, other) {
                Ok(()) => assert_ne!(context.get_limit(limit).unwrap(), now, "{name}"),
                Err(error) => eprintln!("{name}: not set: {error:?}"),
            }
        }
        context.set_cache_config(CUfunc_cache::CU_FUNC_CACHE_PREFER_SHARED).unwrap();
        assert_ne!(device.read_context_settings(), opened);
        persistence::restore_l2_to_state_when_opened(&device).unwrap();
        assert_eq!(device.read_context_settings(), opened);
    }
}
