//! The ceilings of the links between GPUs: copies from GPU to GPU by the copy engines and by the
//! multiprocessors, of which the faster counts.

use std::collections::BTreeSet;

use super::{CaseWork, DeviceLimits, LinkLimit};
use crate::backend::BackendError;
use crate::measure::events::EventTimer;
use crate::workload::GpuLinkWork;
use kernelgate_cuda::Devices;
use kernelgate_cuda::instruments::peer_copy::PeerCopies;

/// Bursts of each kind of copy, of which the fastest counts.
const LINK_BURSTS: usize = 5;

impl DeviceLimits {
    /// Measures the copies of the works over several GPUs, each distinct one once, if the set has
    /// as many GPUs.
    pub(super) fn add_links(
        &mut self,
        events: &mut EventTimer,
        works: &[CaseWork],
    ) -> Result<(), BackendError> {
        let devices = events.devices().clone();
        let distinct: BTreeSet<GpuLinkWork> = works.iter().filter_map(|of| of.work.link).collect();
        for work in distinct {
            let fits = (2..=devices.device_count()).contains(&work.gpus) && work.bytes > 0;
            if fits {
                self.links.push(measure_link_limit(events, &devices.first(work.gpus), work)?);
            }
        }
        Ok(())
    }
}

fn measure_link_limit(
    events: &mut EventTimer,
    devices: &Devices,
    work: GpuLinkWork,
) -> Result<LinkLimit, BackendError> {
    let GpuLinkWork { bytes, both_ways, gpus } = work;
    let copies = PeerCopies::new(devices, bytes as usize, both_ways)?;
    let mut time_ns = f64::INFINITY;
    for kind in copies.possible_kinds() {
        let mut launch = || copies.enqueue_copies(kind);
        let mut ceiling = events.ceiling_over(gpus, &mut launch)?;
        for _ in 0..LINK_BURSTS {
            time_ns = time_ns.min(ceiling.burst_ns()?);
        }
    }
    devices.for_each_device(|_, device| device.synchronize())?;
    Ok(LinkLimit { bytes, both_ways, gpus, time_ns })
}
