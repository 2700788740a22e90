//! What the GPU tests of the launchers share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Device, Task};
use crate::backend::{BackendError, Implementation, Prepare};
use crate::workload::{Problem, Tensors};

/// The first GPU, one test of the process at a time: memory is measured for the whole device. Says so where there is none, which
/// `KERNELGATE_REQUIRE_GPU=1` makes a failure.
pub fn gpu() -> Option<(Arc<Device>, MutexGuard<'static, ()>)> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    match Device::open(0, Duration::from_secs(60)) {
        Ok(device) => Some((device, ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner))),
        Err(error) => {
            assert!(std::env::var_os("KERNELGATE_REQUIRE_GPU").is_none(), "KERNELGATE_REQUIRE_GPU is set, but {error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// A row made ready; `None`, with the reason printed, where it stands on a library that is not there or declines.
pub fn prepare<P: Problem>(row: &Implementation<P>, problem: &P, inputs: &Tensors, device: &Arc<Device>) -> Option<Task> {
    let Prepare::CudaWithin { prepare, .. } = row.prepare else { panic!("{} declares no memory", row.name) };
    match prepare(problem, inputs, device) {
        Ok(task) => Some(task),
        Err(BackendError::Unsupported(reason)) => {
            eprintln!("skipped: {}: {reason}", row.name);
            None
        }
        Err(error) => panic!("{}: {error}", row.name),
    }
}
