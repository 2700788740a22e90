//! Helpers for tests that need a GPU, here and in packages that use this crate.
#![allow(clippy::disallowed_methods, reason = "variables of tests")]

mod c_library;
pub mod raw;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUfunc_cache, CUlimit_enum};

pub use self::c_library::CLibrary;
use crate::{BackendError, Device, DeviceOptions, Devices};

/// The first GPU, for one test of the process at a time, because memory is measured for the whole
/// device. Without a GPU it prints a message, or fails if `KERNELGATE_REQUIRE_GPU=1`.
///
/// # Panics
/// Panics if there is no GPU and `KERNELGATE_REQUIRE_GPU` is set.
pub fn lock_first_gpu() -> Option<(Arc<Device>, MutexGuard<'static, ()>)> {
    static ONE_GPU_TEST_AT_A_TIME: Mutex<()> = Mutex::new(());
    match Device::open(0, &DeviceOptions::from_environment()) {
        Ok(device) => {
            Some((device, ONE_GPU_TEST_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)))
        }
        Err(error) => {
            assert!(
                std::env::var_os("KERNELGATE_REQUIRE_GPU").is_none(),
                "KERNELGATE_REQUIRE_GPU is set, but {error}"
            );
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Opens a second GPU for tests, besides the GPU of [`lock_first_gpu`]. Without a second GPU it
/// prints a message, or fails if `KERNELGATE_REQUIRE_GPUS=2`.
///
/// # Panics
/// Panics if there is one GPU and `KERNELGATE_REQUIRE_GPUS` is set.
pub fn second_gpu_for_test() -> Option<Arc<Device>> {
    match Device::open(1, &DeviceOptions::from_environment()) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(
                std::env::var_os("KERNELGATE_REQUIRE_GPUS").is_none(),
                "KERNELGATE_REQUIRE_GPUS is set, but {error}"
            );
            eprintln!("skipped: a second GPU: {error}");
            None
        }
    }
}

/// The first two GPUs as a set, for one test of the process at a time. Without two GPUs it prints a
/// message or fails, like [`lock_first_gpu`] and [`second_gpu_for_test`].
///
/// # Panics
/// Panics if `gpu` or `second_gpu_for_test` panics, or when the set does not open.
pub fn two_gpus_for_test() -> Option<(Devices, MutexGuard<'static, ()>)> {
    let (_first, alone) = lock_first_gpu()?;
    second_gpu_for_test()?;
    let ordinals = Devices::in_launch_order([0, 1]).expect("two GPUs");
    Some((ordinals.open(&DeviceOptions::from_environment()).expect("a set of two GPUs"), alone))
}

/// Changes settings of the whole context that other code may change: the stack of a thread, and the
/// split of L1 and shared memory.
pub fn change_context_settings(device: &Device) -> Result<(), BackendError> {
    let context = device.context();
    let changed = context
        .set_limit(CUlimit_enum::CU_LIMIT_STACK_SIZE, 16 << 10)
        .and_then(|()| context.set_cache_config(CUfunc_cache::CU_FUNC_CACHE_PREFER_SHARED));
    changed.map_err(|error| BackendError::Launch(format!("failed to set the context: {error:?}")))
}
