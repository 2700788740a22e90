//! Settings that a launch of other code can change for the whole context, and that later launches
//! would inherit: sizes of the stack, of the heap and of the printf buffer, the L2 fetch
//! granularity, the preferred split of L1 and shared memory, the set-aside of L2. Each case starts
//! with the context settings with which the device was opened.
//!
//! Deliberately absent: clocks and other settings of the card, which need an administrator.

use cudarc::driver::sys::{CUfunc_cache, CUlimit, CUlimit_enum as Limit};
use cudarc::driver::{CudaContext, DriverError};

use super::driver_error::failed;
use crate::BackendError;

/// Context limits that are restored after each case, with their names. Limits of dynamic
/// parallelism are restored too if the driver still supports them.
const CONTEXT_LIMITS: [(CUlimit, &str); 5] = [
    (Limit::CU_LIMIT_STACK_SIZE, "stack of a thread"),
    (Limit::CU_LIMIT_MALLOC_HEAP_SIZE, "heap of kernels"),
    (Limit::CU_LIMIT_PRINTF_FIFO_SIZE, "printf buffer"),
    (Limit::CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, "launches by kernels"),
    (Limit::CU_LIMIT_MAX_L2_FETCH_GRANULARITY, "L2 fetch granularity"),
];

/// Settings of a CUDA context, such as its stack size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextSettings {
    /// Limits in the order of [`CONTEXT_LIMITS`]; absent if the driver lacks a limit.
    limits: [Option<usize>; CONTEXT_LIMITS.len()],
    cache: Option<CUfunc_cache>,
}

impl ContextSettings {
    pub(super) fn read_current(context: &CudaContext) -> ContextSettings {
        Self {
            limits: CONTEXT_LIMITS.map(|(limit, _)| context.get_limit(limit).ok()),
            cache: context.get_cache_config().ok(),
        }
    }

    /// Restores the context settings that differ now from the saved ones.
    ///
    /// # Errors
    /// Fails if the driver refuses, as it does once kernels have used their heap: later cases would
    /// be measured under other conditions than earlier ones.
    pub(super) fn restore(&self, context: &CudaContext) -> Result<(), BackendError> {
        self.apply_changed(context).map_err(|(name, error)| {
            let what = format!("restore the {name} of the context, which an earlier case set");
            failed(&what, &error)
        })
    }

    fn apply_changed(&self, context: &CudaContext) -> Result<(), (&'static str, DriverError)> {
        let now = Self::read_current(context);
        for (((limit, name), before), now) in
            CONTEXT_LIMITS.into_iter().zip(self.limits).zip(now.limits)
        {
            if let (Some(before), true) = (before, before != now) {
                context.set_limit(limit, before).map_err(|error| (name, error))?;
            }
        }
        match self.cache {
            Some(before) if now.cache != self.cache => context
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
        let opened = device.current_settings();
        eprintln!("{opened:?}");
        assert_eq!(&opened, device.settings_when_opened());
        assert!(opened.limits[0].is_some() && opened.cache.is_some());
        for (limit, name) in CONTEXT_LIMITS {
            let Ok(now) = context.get_limit(limit) else { continue };
            let other =
                if limit == Limit::CU_LIMIT_MAX_L2_FETCH_GRANULARITY { 32 } else { 2 * now };
            match context.set_limit(limit, other) {
                Ok(()) => assert_ne!(context.get_limit(limit).unwrap(), now, "{name}"),
                Err(error) => eprintln!("{name}: not set: {error:?}"),
            }
        }
        context.set_cache_config(CUfunc_cache::CU_FUNC_CACHE_PREFER_SHARED).unwrap();
        assert_ne!(device.current_settings(), opened);
        persistence::restore_l2_state(&device).unwrap();
        assert_eq!(device.current_settings(), opened);
    }
}
