//! The set of GPUs on which a case runs, and how its GPUs reach each other's memory. This module
//! does not divide a case's work among several GPUs.

use std::sync::Arc;

use super::device::{Device, GpuUnusableError};
use super::gpu_check;
use super::launch::used_kernels::LoadedKernelsRecord;
use super::options::DeviceOptions;
use super::peers::{self, PeerLink};
use crate::BackendError;

/// A non-empty set of GPUs in a fixed order: either open devices, or the ordinals of devices that
/// are still to be opened. Code that runs on a single GPU uses the first GPU of the set
/// ([`Self::first_device`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices<D = Arc<Device>> {
    first_gpu: D,
    other_gpus: Vec<D>,
}

impl<D> Devices<D> {
    /// The first GPU of the set, for code that runs on one GPU.
    pub const fn first_device(&self) -> &D {
        &self.first_gpu
    }

    /// Number of GPUs.
    pub fn device_count(&self) -> usize {
        1 + self.other_gpus.len()
    }

    /// The given GPUs in their order; `None` for an empty list, or if a GPU is listed twice.
    pub fn from_distinct_in_order(all: impl IntoIterator<Item = D>) -> Option<Self>
    where
        D: PartialEq,
    {
        let mut all = all.into_iter();
        let set = Self { first_gpu: all.next()?, other_gpus: all.collect() };
        let twice =
            set.iter().enumerate().any(|(at, one)| set.iter().skip(at + 1).any(|it| it == one));
        (!twice).then_some(set)
    }

    /// The first `count` GPUs of the set, at least one; all GPUs if the set has fewer.
    pub fn first_devices(&self, count: usize) -> Self
    where
        D: Clone,
    {
        let others = self.other_gpus.iter().take(count.max(1) - 1).cloned().collect();
        Self { first_gpu: self.first_gpu.clone(), other_gpus: others }
    }

    /// Every GPU.
    pub fn iter(&self) -> impl Iterator<Item = &D> {
        std::iter::once(&self.first_gpu).chain(&self.other_gpus)
    }
}

impl Devices<usize> {
    /// Opens the GPUs with these ordinals, enables access to each other's memory if the hardware
    /// allows it, and makes the first GPU's context current.
    ///
    /// # Errors
    /// Fails with an error of [`Device::open`], with [`GpuUnusableError::GpuModelsDiffer`], or if
    /// the driver refuses peer access that it reports as possible.
    pub fn open(&self, options: &DeviceOptions) -> Result<Devices, GpuUnusableError> {
        let first = Device::open(self.first_gpu, options)?;
        let others = self.other_gpus.iter().map(|&ordinal| Device::open(ordinal, options));
        let devices = Devices { first_gpu: first, other_gpus: others.collect::<Result<_, _>>()? };
        let facts = devices.iter().map(|device| device.gpu_properties());
        gpu_check::require_same_gpu_model(
            facts.map(|facts| (facts.gpu_ordinal, &*facts.gpu_name)),
        )?;
        peers::enable_access_between_all_gpus(&devices.references_to_all())?;
        Ok(devices)
    }
}

impl Devices {
    /// Returns views of all GPUs of the set, and one record of the kernels that will be loaded
    /// through these views.
    pub fn views_recording_kernels(&self) -> (Self, LoadedKernelsRecord) {
        let loaded = LoadedKernelsRecord::default();
        (self.map_to_views(|device| device.view_recording_kernels_into(&loaded)), loaded)
    }

    /// Views of the same GPUs that compile kernels which name stages with clocks that measure these
    /// stages.
    pub fn views_with_stage_clocks(&self) -> Self {
        self.map_to_views(|device| device.view_with_stage_clocks())
    }

    /// How the GPUs of the set reach each other's memory (weakest link of any pair); `None` for a
    /// single GPU.
    pub fn weakest_peer_link(&self) -> Option<PeerLink> {
        PeerLink::weakest_link_between(&self.references_to_all())
    }

    /// Checks that each GPU of the set can access the memory of every other GPU of the set.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if a GPU cannot access the memory of another.
    pub fn require_peer_access_between_all(&self) -> Result<(), BackendError> {
        self.weakest_peer_link().map_or(Ok(()), PeerLink::require_access_to_peer_memory)
    }

    fn references_to_all(&self) -> Vec<&Device> {
        self.iter().map(|device| &**device).collect()
    }

    /// Calls `each` for every GPU while its context is current, and at the end makes the context of
    /// the first GPU current.
    ///
    /// # Errors
    /// Fails with the first error of `each`, or if a context cannot be made current.
    pub fn for_each_with_context_current(
        &self,
        mut each: impl FnMut(usize, &Arc<Device>) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let done = self.iter().enumerate().try_for_each(|(rank, device)| {
            device.make_context_current()?;
            each(rank, device)
        });
        self.first_gpu.make_context_current()?;
        done
    }

    fn map_to_views(&self, view: impl Fn(&Device) -> Arc<Device>) -> Self {
        let others = self.other_gpus.iter().map(|device| view(device)).collect();
        Self { first_gpu: view(&self.first_gpu), other_gpus: others }
    }
}

impl<D> From<D> for Devices<D> {
    fn from(one: D) -> Self {
        Self { first_gpu: one, other_gpus: Vec::new() }
    }
}

impl From<&Arc<Device>> for Devices {
    fn from(device: &Arc<Device>) -> Self {
        Self::from(Arc::clone(device))
    }
}

impl From<&Self> for Devices {
    fn from(devices: &Self) -> Self {
        devices.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{lock_first_gpu, open_second_gpu_or_print_skip};

    #[test]
    fn a_set_keeps_the_order_of_its_gpus() {
        let set = Devices { first_gpu: 1, other_gpus: vec![0, 2] };
        assert_eq!((*set.first_device(), set.iter().copied().collect()), (1, vec![1, 0, 2]));
        assert_eq!(Devices::from(3).iter().collect::<Vec<_>>(), [&3]);
    }

    #[test]
    fn a_set_with_a_repeated_gpu_is_refused() {
        assert_eq!(
            Devices::from_distinct_in_order([1, 0]),
            Some(Devices { first_gpu: 1, other_gpus: vec![0] })
        );
        assert_eq!(
            [Devices::from_distinct_in_order([]), Devices::from_distinct_in_order([0, 1, 0])],
            [None, None]
        );
        let three = Devices::from_distinct_in_order([2, 0, 1]).unwrap();
        let counts = [0, 1, 2, 9].map(|count| three.first_devices(count).device_count());
        assert_eq!(
            (counts, three.first_devices(2)),
            ([1, 1, 2, 3], Devices { first_gpu: 2, other_gpus: vec![0] })
        );
    }

    #[test]
    fn two_gpus_are_opened_in_the_given_order() {
        let Some((_device, _alone)) = lock_first_gpu() else { return };
        if open_second_gpu_or_print_skip().is_none() {
            return;
        }
        let set = Devices { first_gpu: 1, other_gpus: vec![0] };
        let devices = set.open(&DeviceOptions::from_environment()).unwrap();
        let opened: Vec<usize> =
            devices.iter().map(|device| device.gpu_properties().gpu_ordinal).collect();
        assert_eq!(opened, [1, 0]);
    }
}
