//! Device memory of a run: its inputs as they are, and scratch by name. What is declared and what is allocated is one list.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Run;
use crate::backend::BackendError;
use crate::backend::cuda::device::{Argument, Buffer, Device};
use crate::workload::denoise::model::ACTION;
use crate::workload::{Dtype, Tensors};

/// A named piece of device memory and its bytes.
pub type Region = (&'static str, usize);

/// Inputs, without those of the names `but`.
pub fn inputs(run: &Run, but: &[&str]) -> Vec<Region> {
    let shape = &run.shape;
    let specs = shape.model.tensors(shape.s, shape.p, shape.dtype);
    let mut regions: Vec<Region> = specs.iter().map(|spec| (spec.name, spec.bytes() as usize)).collect();
    if !run.looped {
        regions.push(("t", Dtype::F32.bytes()));
    }
    regions.retain(|(name, _)| !but.contains(name));
    regions
}

/// Bytes of those regions, of the times, and of the output.
pub fn device_bytes(run: &Run, regions: &[&[Region]]) -> u64 {
    let regions: usize = regions.iter().copied().flatten().map(|(_, bytes)| bytes).sum();
    (regions + times_bytes(run) + run.shape.s * ACTION * Dtype::F32.bytes()) as u64
}

fn times_bytes(run: &Run) -> usize {
    if run.looped { run.steps * Dtype::F64.bytes() } else { 0 }
}

/// The memory.
pub struct Buffers {
    device: Arc<Device>,
    buffers: BTreeMap<&'static str, Buffer>,
    depth: usize,
}

impl Buffers {
    /// Uploads those inputs and the times, and allocates the scratch.
    ///
    /// # Errors
    /// When device memory is short or a copy fails.
    pub fn new(
        run: &Run,
        tensors: &Tensors,
        device: &Arc<Device>,
        inputs: &[Region],
        scratch: &[Region],
    ) -> Result<Self, BackendError> {
        let mut buffers = BTreeMap::new();
        for &(name, bytes) in inputs {
            let tensor = tensors.tensor(name);
            debug_assert_eq!(tensor.bytes(), bytes, "{name}");
            buffers.insert(name, device.upload(tensor.as_bytes())?);
        }
        for &(name, bytes) in scratch {
            buffers.insert(name, device.allocate(bytes)?);
        }
        if run.looped {
            buffers.insert("times", device.upload(bytemuck::cast_slice(&times(run.steps)))?);
        }
        Ok(Self { device: Arc::clone(device), buffers, depth: run.shape.model.depth })
    }

    /// Uploads rows `[depth, rows, row]` under a name, room for `tail` more rows behind those of each layer.
    ///
    /// # Errors
    /// When device memory is short or a copy fails.
    pub fn upload_with_tail(&mut self, name: &'static str, bytes: &[u8], tail_bytes: usize) -> Result<(), BackendError> {
        let layer_bytes = bytes.len() / self.depth;
        let mut spread = Vec::with_capacity(bytes.len() + self.depth * tail_bytes);
        for layer in 0..self.depth {
            spread.extend_from_slice(&bytes[layer * layer_bytes..(layer + 1) * layer_bytes]);
            spread.resize(spread.len() + tail_bytes, 0);
        }
        self.buffers.insert(name, self.device.upload(&spread)?);
        Ok(())
    }

    /// Where a region begins.
    pub fn address(&self, name: &str) -> u64 {
        self.buffer(name).address()
    }

    /// A region as an argument.
    pub fn at(&self, name: &str) -> Argument {
        Argument::Address(self.address(name))
    }

    /// Where a layer's part of a stacked region begins.
    pub fn layer(&self, name: &str, layer: usize) -> u64 {
        let buffer = self.buffer(name);
        buffer.address() + (layer * (buffer.bytes() / self.depth)) as u64
    }

    fn buffer(&self, name: &str) -> &Buffer {
        self.buffers.get(name).unwrap_or_else(|| panic!("region `{name}` is part of the run"))
    }
}

/// Times of a loop: 1, and then `-1/steps` further each.
fn times(steps: usize) -> Vec<f64> {
    let dt = -1.0 / steps as f64;
    let mut t = 1.0;
    (0..steps)
        .map(|_| {
            let now = t;
            t += dt;
            now
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_begin_at_one_and_stop_before_zero() {
        let times = times(10);
        assert_eq!((times.len(), times[0]), (10, 1.0));
        assert!((times[9] - 0.1).abs() < 1e-12);
    }
}
