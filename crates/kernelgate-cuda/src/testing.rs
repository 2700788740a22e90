//! For tests that need a GPU, here and in packages that use this crate.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Device;

/// The first GPU, one test of the process at a time: memory is measured for the whole device. Says
/// so where there is none, which `KERNELGATE_REQUIRE_GPU=1` makes a failure.
///
/// # Panics
/// When there is no GPU and `KERNELGATE_REQUIRE_GPU` is set.
pub fn gpu() -> Option<(Arc<Device>, MutexGuard<'static, ()>)> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    match Device::open(0, Duration::from_secs(60)) {
        Ok(device) => Some((device, ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner))),
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
