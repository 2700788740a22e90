//! The GPUs that a case runs on. Deliberately absent: work over several of them.

use std::sync::Arc;

use super::device::{Device, DeviceError};
use super::launch::used::LoadedKernels;
use super::options::DeviceOptions;

/// GPUs in a fixed order, at least one: open ones, or the ordinals of those to open. Code that runs
/// on one GPU takes [`Self::one`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices<D = Arc<Device>> {
    first: D,
    others: Vec<D>,
}

impl<D> Devices<D> {
    /// The first GPU, for code that runs on one.
    pub const fn one(&self) -> &D {
        &self.first
    }

    /// Every GPU.
    pub fn iter(&self) -> impl Iterator<Item = &D> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

impl Devices<usize> {
    /// Opens the GPUs of these ordinals.
    ///
    /// # Errors
    /// The errors of [`Device::open`].
    pub fn open(&self, options: &DeviceOptions) -> Result<Devices, DeviceError> {
        let first = Device::open(self.first, options)?;
        let others = self.others.iter().map(|&ordinal| Device::open(ordinal, options));
        Ok(Devices { first, others: others.collect::<Result<_, _>>()? })
    }
}

impl Devices {
    /// Views of the same GPUs, and the kernels that are loaded through them from now on.
    pub fn recording(&self) -> (Self, LoadedKernels) {
        let loaded = LoadedKernels::default();
        (self.views(|device| device.recording_into(&loaded)), loaded)
    }

    /// Views of the same GPUs that build kernels with clocks of their stages, where their rows name
    /// any.
    pub fn with_stage_clocks(&self) -> Self {
        self.views(|device| device.with_stage_clocks())
    }

    fn views(&self, view: impl Fn(&Device) -> Arc<Device>) -> Self {
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
    use crate::testing::{gpu, second_gpu};

    #[test]
    fn a_set_has_its_gpus_in_their_order() {
        let set = Devices { first: 1, others: vec![0, 2] };
        assert_eq!((*set.one(), set.iter().copied().collect()), (1, vec![1, 0, 2]));
        assert_eq!(Devices::from(3).iter().collect::<Vec<_>>(), [&3]);
    }

    #[test]
    fn two_gpus_open_in_their_order() {
        let Some((_device, _alone)) = gpu() else { return };
        if second_gpu().is_none() {
            return;
        }
        let set = Devices { first: 1, others: vec![0] };
        let devices = set.open(&DeviceOptions::from_environment()).unwrap();
        let opened: Vec<usize> = devices.iter().map(|device| device.facts().ordinal).collect();
        assert_eq!(opened, [1, 0]);
    }
}
