//! The set of GPUs on which a case runs. This module does not divide work among several GPUs.

use std::sync::Arc;

use super::device::{Device, DeviceError};
use super::gpu_check;
use super::launch::used_kernels::LoadedKernels;
use super::options::DeviceOptions;
use super::peers::{self, PeerLink};
use crate::BackendError;

/// GPUs in a fixed order, at least one: either open devices, or the ordinals of devices to open.
/// Code that runs on a single GPU takes the first GPU ([`Self::first_device`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices<D = Arc<Device>> {
    first: D,
    others: Vec<D>,
}

impl<D> Devices<D> {
    /// The first GPU of the set, for code that runs on one GPU.
    pub const fn first_device(&self) -> &D {
        &self.first
    }

    /// Number of GPUs.
    pub fn device_count(&self) -> usize {
        1 + self.others.len()
    }

    /// GPUs in that order; `None` for an empty list, and if one is listed twice.
    pub fn in_launch_order(all: impl IntoIterator<Item = D>) -> Option<Self>
    where
        D: PartialEq,
    {
        let mut all = all.into_iter();
        let set = Self { first: all.next()?, others: all.collect() };
        let twice =
            set.iter().enumerate().any(|(at, one)| set.iter().skip(at + 1).any(|it| it == one));
        (!twice).then_some(set)
    }

    /// The first `count` GPUs, at least one; all GPUs if the set has fewer.
    pub fn first(&self, count: usize) -> Self
    where
        D: Clone,
    {
        let others = self.others.iter().take(count.max(1) - 1).cloned().collect();
        Self { first: self.first.clone(), others }
    }

    /// Every GPU.
    pub fn iter(&self) -> impl Iterator<Item = &D> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

impl Devices<usize> {
    /// Opens the GPUs with the given ordinals, enables access to each other's memory where
    /// possible, and makes the context of the first GPU current.
    ///
    /// # Errors
    /// Fails with the errors of [`Device::open`]; [`DeviceError::OtherModel`], or if the driver
    /// refuses the access that it offers.
    pub fn open(&self, options: &DeviceOptions) -> Result<Devices, DeviceError> {
        let first = Device::open(self.first, options)?;
        let others = self.others.iter().map(|&ordinal| Device::open(ordinal, options));
        let devices = Devices { first, others: others.collect::<Result<_, _>>()? };
        let facts = devices.iter().map(|device| device.facts());
        gpu_check::require_one_gpu_model(facts.map(|facts| (facts.ordinal, &*facts.name)))?;
        peers::enable_peer_access(&devices.device_references())?;
        Ok(devices)
    }
}

impl Devices {
    /// Returns views of the GPUs, and a record of the kernels that are loaded through them from now
    /// on.
    pub fn recording_views(&self) -> (Self, LoadedKernels) {
        let loaded = LoadedKernels::default();
        (self.with_device_views(|device| device.recording_kernels_into(&loaded)), loaded)
    }

    /// Views of the same GPUs that build kernels with clocks of their stages, where their rows name
    /// any.
    pub fn with_stage_clocks(&self) -> Self {
        self.with_device_views(|device| device.with_stage_clocks())
    }

    /// How the GPUs reach each other's memory; `None` for one GPU.
    pub fn peer_link(&self) -> Option<PeerLink> {
        PeerLink::weakest_between(&self.device_references())
    }

    /// Checks that each GPU of the set can access the memory of the other GPUs.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if a GPU cannot access the memory of another.
    pub fn require_peer_access(&self) -> Result<(), BackendError> {
        self.peer_link().map_or(Ok(()), PeerLink::require_peer_access)
    }

    fn device_references(&self) -> Vec<&Device> {
        self.iter().map(|device| &**device).collect()
    }

    /// Calls `each` for every GPU with its context current, and makes the first one current again.
    ///
    /// # Errors
    /// Fails with the first error of `each`, or if the driver refuses.
    pub fn for_each_device(
        &self,
        mut each: impl FnMut(usize, &Arc<Device>) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let done = self.iter().enumerate().try_for_each(|(rank, device)| {
            device.make_current()?;
            each(rank, device)
        });
        self.first.make_current()?;
        done
    }

    fn with_device_views(&self, view: impl Fn(&Device) -> Arc<Device>) -> Self {
        let others = self.others.iter().map(|device| view(device)).collect();
        Self { first: view(&self.first), others }
    }
}

impl<D> From<D> for Devices<D> {
    fn from(one: D) -> Self {
        Self { first: one, others: Vec::new() }
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
    use crate::testing::{lock_first_gpu, second_gpu_for_test};

    #[test]
    fn a_set_keeps_the_order_of_its_gpus() {
        let set = Devices { first: 1, others: vec![0, 2] };
        assert_eq!((*set.first_device(), set.iter().copied().collect()), (1, vec![1, 0, 2]));
        assert_eq!(Devices::from(3).iter().collect::<Vec<_>>(), [&3]);
    }

    #[test]
    fn a_set_with_a_repeated_gpu_is_refused() {
        assert_eq!(Devices::in_launch_order([1, 0]), Some(Devices { first: 1, others: vec![0] }));
        assert_eq!(
            [Devices::in_launch_order([]), Devices::in_launch_order([0, 1, 0])],
            [None, None]
        );
        let three = Devices::in_launch_order([2, 0, 1]).unwrap();
        let counts = [0, 1, 2, 9].map(|count| three.first(count).device_count());
        assert_eq!((counts, three.first(2)), ([1, 1, 2, 3], Devices { first: 2, others: vec![0] }));
    }

    #[test]
    fn two_gpus_are_opened_in_the_given_order() {
        let Some((_device, _alone)) = lock_first_gpu() else { return };
        if second_gpu_for_test().is_none() {
            return;
        }
        let set = Devices { first: 1, others: vec![0] };
        let devices = set.open(&DeviceOptions::from_environment()).unwrap();
        let opened: Vec<usize> = devices.iter().map(|device| device.facts().ordinal).collect();
        assert_eq!(opened, [1, 0]);
    }
}
