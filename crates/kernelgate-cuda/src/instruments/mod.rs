//! Kernels that measurements need, embedded in the library; the crate `kernelgate` decides how they
//! are used.

pub mod bandwidth;
pub mod barrier;
pub mod matmul;
pub mod memory_traffic;
pub mod peer_copy;
pub mod spin_kernel;
pub mod timing;

use crate::spec::{ListedKernel, list_kernel_rows};

/// Every kernel of `kernels/measure`.
pub fn instrument_kernels() -> Vec<ListedKernel> {
    [
        list_kernel_rows(bandwidth::BANDWIDTH_KERNELS),
        list_kernel_rows(barrier::BARRIER_KERNELS),
        list_kernel_rows(peer_copy::PEER_COPY_KERNELS),
        list_kernel_rows(spin_kernel::SPIN_KERNELS),
        list_kernel_rows(timing::TIMING_KERNELS),
        list_kernel_rows(memory_traffic::TRAFFIC_KERNELS),
        list_kernel_rows(matmul::MATMUL_KERNELS),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_instrument_kernel_file_is_listed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join("measure");
        let entries = std::fs::read_dir(folder).unwrap();
        let mut files: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        let mut listed: Vec<_> = instrument_kernels()
            .iter()
            .map(|kernel| format!("{}.cu", &kernel.build.source.file["measure/".len()..]))
            .collect();
        files.sort();
        listed.sort();
        listed.dedup();
        assert_eq!(files, listed);
        assert!(
            instrument_kernels()
                .iter()
                .all(|kernel| kernel.name().starts_with(kernel.build.source.file))
        );
    }
}
