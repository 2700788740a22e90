//! Helpers for tests that need a GPU, for this crate and for other packages of the workspace.
#![allow(clippy::disallowed_methods, reason = "variables of tests")]

mod c_library;
pub mod raw;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUfunc_cache, CUlimit_enum};

pub use self::c_library::LaunchingCLibrary;
use crate::{BackendError, Device, DeviceOptions, Devices};

/// Opens the first GPU for one test of the process at a time, because tests measure the memory of
/// the whole device. Without a GPU, `lock_first_gpu` prints that the test is skipped, or panics if
/// `KERNELGATE_REQUIRE_GPU` is set.
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

/// Opens the second GPU of the machine for tests that already hold the GPU of [`lock_first_gpu`].
/// Without a second GPU, `open_second_gpu_or_print_skip` prints that the test is skipped, or panics
/// if `KERNELGATE_REQUIRE_GPUS` is set.
///
/// # Panics
/// Panics if there is one GPU and `KERNELGATE_REQUIRE_GPUS` is set.
pub fn open_second_gpu_or_print_skip() -> Option<Arc<Device>> {
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

/// Opens the first two GPUs as a set, for one test of the process at a time. Without two GPUs,
/// `lock_two_gpus` prints that the test is skipped or panics, like [`lock_first_gpu`] and
/// [`open_second_gpu_or_print_skip`].
///
/// # Panics
/// Panics if `gpu` or `open_second_gpu_or_print_skip` panics, or when the set does not open.
pub fn lock_two_gpus() -> Option<(Devices, MutexGuard<'static, ()>)> {
    let (_first, alone) = lock_first_gpu()?;
    open_second_gpu_or_print_skip()?;
    let ordinals = Devices::from_distinct_in_order([0, 1]).expect("two GPUs");
    Some((ordinals.open(&DeviceOptions::from_environment()).expect("a set of two GPUs"), alone))
}

/// Changes settings of the whole CUDA context, as foreign code may do: the stack size of a thread,
/// and the split of L1 and shared memory.
pub fn change_stack_and_cache_settings_of_context(device: &Device) -> Result<(), BackendError> {
    let context = device.context();
    let changed = context
        .set_limit(CUlimit_enum::CU_LIMIT_STACK_SIZE, 16 << 10)
        .and_then(|()| context.set_cache_config(CUfunc_cache::CU_FUNC_CACHE_PREFER_SHARED));
    changed.map_err(|error| {
        BackendError::ComputationFailed(format!("failed to set the context: {error:?}"))
    })
}
