//! Measures the ceilings of the links between GPUs by copies from GPU to GPU, by copy engines and
//! by kernels; the faster counts.

use std::collections::BTreeSet;

use super::{DeclaredWorkAndCacheState, MeasuredDeviceLimits, MeasuredLinkLimit};
use crate::backend::BackendError;
use crate::measure::events::CudaEventTimer;
use crate::workload::DeclaredGpuLinkWork;
use kernelgate_cuda::Devices;
use kernelgate_cuda::instruments::peer_copy::PeerCopiesOfGpuSet;

/// Number of bursts of each kind of GPU-to-GPU copy; the fastest burst counts.
const BURSTS_PER_KIND_OF_LINK_COPY: usize = 5;

impl MeasuredDeviceLimits {
    /// Measures the link time of each distinct GPU-to-GPU copy that these works declare, if the
    /// machine has enough GPUs.
    pub(super) fn add_link_ceilings(
        &mut self,
        events: &mut CudaEventTimer,
        works: &[DeclaredWorkAndCacheState],
    ) -> Result<(), BackendError> {
        let devices = events.timed_and_idle_gpus().clone();
        let distinct: BTreeSet<DeclaredGpuLinkWork> =
            works.iter().filter_map(|of| of.work.link).collect();
        for work in distinct {
            let fits = (2..=devices.device_count()).contains(&work.gpu_count)
                && work.min_received_bytes > 0;
            if fits {
                self.links.push(measure_gpu_link_limit(
                    events,
                    &devices.first_devices(work.gpu_count),
                    work,
                )?);
            }
        }
        Ok(())
    }
}

fn measure_gpu_link_limit(
    events: &mut CudaEventTimer,
    devices: &Devices,
    work: DeclaredGpuLinkWork,
) -> Result<MeasuredLinkLimit, BackendError> {
    let DeclaredGpuLinkWork { min_received_bytes: bytes, both_ways, gpu_count: gpus } = work;
    let copies = PeerCopiesOfGpuSet::allocate_buffers_and_compile_copies(
        devices,
        bytes as usize,
        both_ways,
    )?;
    let mut time_ns = f64::INFINITY;
    for kind in copies.supported_kinds() {
        let mut launch = || copies.enqueue_all_copies(kind);
        let mut ceiling = events.prepare_multi_gpu_ceiling_launches(gpus, &mut launch)?;
        for _ in 0..BURSTS_PER_KIND_OF_LINK_COPY {
            time_ns = time_ns.min(ceiling.median_launch_time_of_burst_ns()?);
        }
    }
    devices.for_each_with_context_current(|_, device| device.synchronize())?;
    Ok(MeasuredLinkLimit {
        copied_bytes: bytes,
        copies_both_ways: both_ways,
        gpu_count: gpus,
        fastest_copies_ns: time_ns,
    })
}
