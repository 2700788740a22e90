//! The kernels that measuring needs, embedded: how they are used is decided in `kernelgate`.

pub mod bandwidth;
pub mod barrier;
pub mod matmul;
pub mod peer_copy;
pub mod spin;
pub mod timing;
pub mod traffic;

use crate::spec::{ListedKernel, list};

/// Every kernel of `kernels/measure`.
pub fn kernels() -> Vec<ListedKernel> {
    [
        list(bandwidth::KERNELS),
        list(barrier::KERNELS),
        list(peer_copy::KERNELS),
        list(spin::KERNELS),
        list(timing::KERNELS),
        list(traffic::KERNELS),
        list(matmul::KERNELS),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_kernel_file_has_its_row() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join("measure");
        let entries = std::fs::read_dir(folder).unwrap();
        let mut files: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        let mut listed: Vec<_> = kernels()
            .iter()
            .map(|kernel| format!("{}.cu", &kernel.build.source.file["measure/".len()..]))
            .collect();
        files.sort();
        listed.sort();
        listed.dedup();
        assert_eq!(files, listed);
        assert!(kernels().iter().all(|kernel| kernel.name().starts_with(kernel.build.source.file)));
    }
}
