//! Launches that are settled before anything is timed, with parameters of any number and size.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::dims::{LaunchDims, Offered};
use super::kernel::Kernel;
use super::{argument, attributes, residency};
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::status::failed;

/// Bytes as aligned as any parameter asks for: a tensor map (`CUtensorMap`) for 64.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Aligned([u8; 64]);

/// Parameters of a kernel by value, in order.
#[derive(Clone, Default)]
pub struct Parameters {
    /// Of each its bytes, and how many.
    each: Vec<(Vec<Aligned>, usize)>,
}

impl Parameters {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an address on the device.
    pub fn address(self, address: u64) -> Self {
        self.bytes(&address.to_ne_bytes())
    }

    /// Adds a number, or a struct without padding.
    pub fn value<T: bytemuck::NoUninit>(self, value: T) -> Self {
        self.bytes(bytemuck::bytes_of(&value))
    }

    /// Adds a struct by its bytes, such as a tensor map that the driver encoded.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        let mut stored = vec![Aligned([0; 64]); bytes.len().div_ceil(64).max(1)];
        for (chunk, from) in stored.iter_mut().zip(bytes.chunks(64)) {
            chunk.0[..from.len()].copy_from_slice(from);
        }
        self.each.push((stored, bytes.len()));
        self
    }

    /// Bytes of each.
    pub fn sizes(&self) -> Vec<usize> {
        self.each.iter().map(|(_, bytes)| *bytes).collect()
    }

    /// Whether there is one of the right size for each parameter of a kernel.
    fn check(&self, expected: &[usize]) -> Result<(), String> {
        argument::check(self.each.iter().map(|(_, bytes)| *bytes), expected)
    }
}

/// A launch of which everything is settled.
pub struct PreparedLaunch {
    kernel: Kernel,
    dims: LaunchDims,
    parameters: Parameters,
}

impl PreparedLaunch {
    /// Settles a launch of a kernel on its stream.
    ///
    /// # Errors
    /// When the dimensions are none that a launch can have, or the parameters are not the kernel's;
    /// [`BackendError::Unsupported`] where the GPU has less shared memory a block, no clusters or
    /// none as large, or holds fewer blocks at once than wait for each other.
    pub fn new(
        device: &Device,
        kernel: Kernel,
        dims: LaunchDims,
        parameters: Parameters,
    ) -> Result<Self, BackendError> {
        let of_kernel =
            |problem: String| BackendError::Launch(format!("{}: {problem}", kernel.name()));
        parameters.check(kernel.parameter_bytes()).map_err(of_kernel)?;
        let has =
            Offered { shared_bytes: device.shared_bytes_a_block()?, clusters: device.clusters()? };
        let cluster = if has.clusters { kernel.cluster(dims.cluster)? } else { dims.cluster };
        LaunchDims { cluster, ..dims }.check().map_err(of_kernel)?;
        if let Some(unmet) = dims.unmet(kernel.static_shared_bytes()?, cluster, has) {
            return Err(BackendError::Unsupported(unmet));
        }
        if dims.shared_bytes > 0 {
            kernel.allow_shared(dims.shared_bytes)?;
        }
        residency::check(device, &kernel, &LaunchDims { cluster, ..dims })?;
        Ok(Self { kernel, dims, parameters })
    }

    /// Enqueues it; returns before it has run.
    ///
    /// # Errors
    /// When the driver refuses; the error names the kernel.
    pub fn launch(&self) -> Result<(), BackendError> {
        let LaunchDims { cluster, cooperative, programmatic, .. } = self.dims;
        self.kernel.note_launch();
        let cluster = cluster.map(attributes::cluster);
        let cooperative = cooperative.then(attributes::cooperative);
        let programmatic = programmatic.then(attributes::programmatic);
        let mut attributes: Vec<_> =
            cluster.into_iter().chain(cooperative).chain(programmatic).collect();
        let config = self.dims.config(self.kernel.stream(), &mut attributes);
        let mut pointers: Vec<*mut c_void> = self
            .parameters
            .each
            .iter()
            .map(|(stored, _)| stored.as_ptr().cast_mut().cast::<c_void>())
            .collect();
        // SAFETY: the pointers are to values that outlive the call, which copies them; there is one
        // of the right size for each parameter; what the kernel does with them happens on the
        // device. The attributes outlive the call too.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.kernel.function(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error| failed(&format!("launch {}", self.kernel.name()), &error))
    }
}

#[cfg(test)]
mod tests;
