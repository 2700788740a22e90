//! Device memory of a run: its inputs as they are, and scratch by name. What is declared and what
//! is allocated is one list.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::run::ExpertRun;
use crate::denoise::model::ACTION;
use kernelgate::backend::BackendError;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{Argument, Buffer, Device};

/// The input that differs from one inference to the next.
const NOISE: &str = "x";

/// A named piece of device memory and its bytes.
pub type Region = (&'static str, usize);

/// Inputs, without those of the names `but`.
pub fn inputs(run: &ExpertRun, but: &[&str]) -> Vec<Region> {
    let shape = &run.shape;
    let specs = shape.model.tensors(shape.s, shape.p, shape.dtype);
    let mut regions: Vec<Region> =
        specs.iter().map(|spec| (spec.name, spec.bytes() as usize)).collect();
    if !run.looped {
        regions.push(("t", Dtype::F32.bytes()));
    }
    regions.retain(|(name, _)| !but.contains(name));
    regions
}

/// Bytes of those regions, of the times, and of the output.
pub fn device_bytes(run: &ExpertRun, regions: &[&[Region]]) -> u64 {
    let regions: usize = regions.iter().copied().flatten().map(|(_, bytes)| bytes).sum();
    (regions + times_bytes(run) + run.shape.s * ACTION * Dtype::F32.bytes()) as u64
}

fn times_bytes(run: &ExpertRun) -> usize {
    if run.looped { run.steps * Dtype::F64.bytes() } else { 0 }
}

/// The memory.
pub struct Buffers {
    places: BTreeMap<&'static str, DeviceRange>,
    depth: usize,
    noise: Option<Buffer>,
    _owned: Vec<Buffer>,
}

/// Where a region lies.
#[derive(Debug, Clone, Copy)]
struct DeviceRange {
    address: u64,
    bytes: usize,
}

impl Buffers {
    /// Uploads those inputs, what is packed of others (name and bytes, made one at a time) and the
    /// times, allocates the scratch, and places the tailed regions, one behind the other:
    /// (region, input, bytes behind each layer).
    ///
    /// # Errors
    /// When device memory is short or a copy fails.
    pub fn new(
        run: &ExpertRun,
        tensors: &Tensors,
        device: &Arc<Device>,
        inputs: &[Region],
        packed: impl Iterator<Item = (&'static str, Vec<u8>)>,
        scratch: &[Region],
        tailed: &[(&'static str, &str, usize)],
    ) -> Result<Self, BackendError> {
        let mut owned = Vec::new();
        for &(name, bytes) in inputs {
            let tensor = tensors.tensor(name);
            debug_assert_eq!(tensor.bytes(), bytes, "{name}");
            owned.push((name, device.upload(tensor.as_bytes())?));
        }
        for (name, bytes) in packed {
            owned.push((name, device.upload(&bytes)?));
        }
        for &(name, bytes) in scratch {
            owned.push((name, device.allocate(bytes)?));
        }
        let depth = run.shape.model.depth;
        if run.looped {
            owned.push(("times", device.upload(bytemuck::cast_slice(&times(run.steps)))?));
        }
        let place =
            |buffer: &Buffer| DeviceRange { address: buffer.address(), bytes: buffer.bytes() };
        let mut places: BTreeMap<_, _> =
            owned.iter().map(|(name, buffer)| (*name, place(buffer))).collect();
        let noise = owned.iter().find(|(name, _)| *name == NOISE).map(|(_, buffer)| buffer.clone());
        let mut owned: Vec<_> = owned.into_iter().map(|(_, buffer)| buffer).collect();
        if !tailed.is_empty() {
            let spread = |&(name, input, tail_bytes): &(_, &str, _)| {
                (name, with_tails(tensors.tensor(input).as_bytes(), depth, tail_bytes))
            };
            let (names, parts): (Vec<_>, Vec<_>) = tailed.iter().map(spread).unzip();
            let buffer = device.upload(&parts.concat())?;
            let mut address = buffer.address();
            for (name, part) in names.into_iter().zip(&parts) {
                places.insert(name, DeviceRange { address, bytes: part.len() });
                address += part.len() as u64;
            }
            owned.push(buffer);
        }
        Ok(Self { places, depth, noise, _owned: owned })
    }

    /// Made-up addresses for those regions and the times: for looking at a plan where there is no
    /// device.
    #[cfg(test)]
    pub fn imagined(run: &ExpertRun, regions: &[Region]) -> Self {
        let times = run.looped.then_some(("times", times_bytes(run)));
        let mut next = 1 << 20;
        let mut places = BTreeMap::new();
        for (name, bytes) in regions.iter().copied().chain(times) {
            places.insert(name, DeviceRange { address: next, bytes });
            next += (bytes as u64).next_multiple_of(256);
        }
        Self { places, depth: run.shape.model.depth, noise: None, _owned: Vec::new() }
    }

    /// Whether an address lies in a region.
    #[cfg(test)]
    pub fn holds(&self, address: u64) -> bool {
        self.places
            .values()
            .any(|place| (place.address..place.address + place.bytes as u64).contains(&address))
    }

    /// The noise that the actions are made of.
    pub fn noise(&self) -> &Buffer {
        self.noise.as_ref().expect("every run uploads its noise")
    }

    /// Where a region begins.
    pub fn address(&self, name: &str) -> u64 {
        self.place(name).address
    }

    /// Where neighbouring regions begin, and their bytes together.
    pub fn span(&self, first: &str, last: &str) -> (u64, usize) {
        let (first, last) = (self.place(first), self.place(last));
        (first.address, (last.address - first.address) as usize + last.bytes)
    }

    /// A region as an argument.
    pub fn at(&self, name: &str) -> Argument {
        Argument::Address(self.address(name))
    }

    /// Where a layer's part of a stacked region begins.
    pub fn layer(&self, name: &str, layer: usize) -> u64 {
        let DeviceRange { address, bytes } = self.place(name);
        address + (layer * (bytes / self.depth)) as u64
    }

    fn place(&self, name: &str) -> DeviceRange {
        *self.places.get(name).unwrap_or_else(|| panic!("region `{name}` is part of the run"))
    }
}

/// Layers of rows, with room for more rows behind each.
fn with_tails(bytes: &[u8], depth: usize, tail_bytes: usize) -> Vec<u8> {
    let layer_bytes = bytes.len() / depth;
    let mut spread = Vec::with_capacity(bytes.len() + depth * tail_bytes);
    for layer in 0..depth {
        spread.extend_from_slice(&bytes[layer * layer_bytes..(layer + 1) * layer_bytes]);
        spread.resize(spread.len() + tail_bytes, 0);
    }
    spread
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
    fn tails_lie_behind_each_layer() {
        assert_eq!(with_tails(&[1, 2, 3, 4], 2, 1), [1, 2, 0, 3, 4, 0]);
        assert_eq!(with_tails(&[], 2, 2), [0; 4]);
    }

    #[test]
    fn times_begin_at_one_and_stop_before_zero() {
        let times = times(10);
        assert_eq!((times.len(), times[0]), (10, 1.0));
        assert!((times[9] - 0.1).abs() < 1e-12);
    }
}
