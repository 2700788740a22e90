//! Bus bandwidth of collectives as in nccl-tests: bytes over time, times the share of the data that
//! crosses each link, so that collectives and numbers of ranks compare.

use crate::analyze::classes::CollectiveKind;

/// Returns the bytes that must cross the link of one rank in a collective. `bytes_in` is the number
/// of bytes that a rank gives to the collective, `bytes_out` the number that it gets.
#[allow(clippy::cast_precision_loss)]
pub fn bytes_across_link_of_rank(
    collective: CollectiveKind,
    ranks: u32,
    bytes_in: u64,
    bytes_out: u64,
) -> f64 {
    let n = f64::from(ranks.max(1));
    let largest = bytes_in.max(bytes_out) as f64;
    match collective {
        CollectiveKind::AllReduce => bytes_in as f64 * 2.0 * (n - 1.0) / n,
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => {
            largest * (n - 1.0) / n
        }
        _ => largest,
    }
}

/// Part of a GPU's name, the bandwidth of its link in each direction (GB/s), and the name of the
/// link. Data sheets state the bandwidth of both directions together, so the values in this table
/// are half of it.
const LINK_BANDWIDTHS_BY_GPU_NAME: &[(&str, f64, &str)] = &[
    // NVIDIA HGX B200 and GB200 NVL72 data sheets: NVLink has 1.8 TB/s in both directions together.
    ("B200", 900.0, "NVLink 5"),
    ("B300", 900.0, "NVLink 5"),
    // The NVIDIA H200 data sheet states 900 GB/s in both directions together, also for the bridge
    // of the H200 NVL.
    ("H200", 450.0, "NVLink 4"),
    // NVIDIA H100 datasheet: PCIe 128 GB/s, bridge of the H100 NVL 600 GB/s and SXM 900 GB/s, in
    // both directions together.
    ("H100 PCIe", 64.0, "PCIe 5"),
    ("H100 NVL", 300.0, "NVLink bridge"),
    ("H100", 450.0, "NVLink 4"),
    // NVIDIA has no public data sheet for H20 and H800; its partners state 900 GB/s and 400 GB/s in
    // both directions together.
    ("H20", 450.0, "NVLink 4"),
    ("H800", 200.0, "NVLink 4"),
    // NVIDIA A100 datasheet: NVIDIA A100 datasheet: PCIe 64 GB/s and SXM 600 GB/s in both
    // directions together; A800: 400 GB/s.
    ("A100-PCI", 32.0, "PCIe 4"),
    ("A100", 300.0, "NVLink 3"),
    ("A800", 200.0, "NVLink 3"),
    // NVIDIA V100 datasheet: SXM2 300 GB/s and PCIe 32 GB/s in both directions together.
    ("V100-SXM", 150.0, "NVLink 2"),
    ("V100-PCI", 16.0, "PCIe 3"),
    // AMD MI300X and MI325X data sheets: seven links of 128 GB/s in both directions together;
    // MI355X: seven links of 153.6 GB/s.
    ("MI300X", 448.0, "Infinity Fabric"),
    ("MI325X", 448.0, "Infinity Fabric"),
    ("MI355X", 537.6, "Infinity Fabric"),
];

/// Returns bandwidth (GB/s in each direction) and name of the link between GPUs of one host, from
/// the GPU's name.
pub fn link_bandwidth_and_name_of_gpu(device: &str) -> Option<(f64, &'static str)> {
    let found = LINK_BANDWIDTHS_BY_GPU_NAME.iter().find(|(part, ..)| device.contains(part));
    found.map(|&(_, speed, name)| (speed, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_across_a_link_follow_nccl_tests() {
        let bytes = |collective, bytes_in, bytes_out| {
            bytes_across_link_of_rank(collective, 4, bytes_in, bytes_out)
        };
        assert_eq!(bytes(CollectiveKind::AllReduce, 1000, 1000), 1500.0);
        assert_eq!(bytes(CollectiveKind::AllGather, 250, 1000), 750.0);
        assert_eq!(bytes(CollectiveKind::ReduceScatter, 1000, 250), 750.0);
        assert_eq!(bytes(CollectiveKind::Broadcast, 1000, 1000), 1000.0);
        assert_eq!(bytes_across_link_of_rank(CollectiveKind::AllReduce, 1, 1000, 1000), 0.0);
    }

    #[test]
    fn the_link_bandwidth_is_found_by_the_gpu_name() {
        assert_eq!(
            link_bandwidth_and_name_of_gpu("NVIDIA H100 80GB HBM3"),
            Some((450.0, "NVLink 4"))
        );
        assert_eq!(link_bandwidth_and_name_of_gpu("NVIDIA H100 PCIe"), Some((64.0, "PCIe 5")));
        assert_eq!(
            link_bandwidth_and_name_of_gpu("Tesla V100-SXM2-32GB"),
            Some((150.0, "NVLink 2"))
        );
        assert_eq!(link_bandwidth_and_name_of_gpu("NVIDIA GB200"), Some((900.0, "NVLink 5")));
        assert_eq!(link_bandwidth_and_name_of_gpu("NVIDIA H20"), Some((450.0, "NVLink 4")));
        assert_eq!(link_bandwidth_and_name_of_gpu("NVIDIA H200"), Some((450.0, "NVLink 4")));
        assert_eq!(link_bandwidth_and_name_of_gpu("NVIDIA GeForce RTX 3070"), None);
    }
}
