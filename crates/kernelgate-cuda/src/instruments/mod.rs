//! Kernels that kernelgate itself launches to measure; the crate `kernelgate` decides how they are
//! used.

pub mod bandwidth;
pub mod barrier;
pub mod matmul;
pub mod memory_traffic;
pub mod peer_copy;
pub mod spin_kernel;
pub mod timing;

use crate::spec::{ListedKernelBuild, list_kernel_rows};

/// Returns every kernel of the folder `kernels/measure` with each of its builds.
pub fn all_instrument_kernels() -> Vec<ListedKernelBuild> {
    [
        list_kernel_rows(bandwidth::READ_AND_COPY_KERNELS),
        list_kernel_rows(barrier::GPU_BARRIER_KERNELS),
        list_kernel_rows(peer_copy::PEER_COPY_KERNELS),
        list_kernel_rows(spin_kernel::SPIN_AND_EMPTY_KERNELS),
        list_kernel_rows(timing::KERNELS_AROUND_TIMED_LAUNCHES),
        list_kernel_rows(memory_traffic::MEMORY_PASS_KERNELS),
        list_kernel_rows(matmul::RESIDENT_MATMUL_KERNELS),
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
        let mut listed: Vec<_> = all_instrument_kernels()
            .iter()
            .map(|kernel| {
                format!("{}.cu", &kernel.build.source.kernel_file_name["measure/".len()..])
            })
            .collect();
        files.sort();
        listed.sort();
        listed.dedup();
        assert_eq!(files, listed);
        assert!(all_instrument_kernels().iter().all(|kernel| {
            kernel.kernel_name_in_records().starts_with(kernel.build.source.kernel_file_name)
        }));
    }
}
