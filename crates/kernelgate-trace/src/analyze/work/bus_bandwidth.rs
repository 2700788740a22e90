//! Bus bandwidth of collectives, by the convention of the NCCL tests: bytes over time, times the
//! part of the data that must cross each link, so that collectives and rank counts compare.

use crate::analyze::classes::CollectiveKind;

/// Bytes that cross the link of a rank. `bytes_in` and `bytes_out` are what a rank gives and gets.
#[allow(clippy::cast_precision_loss)]
pub fn bytes_across_link(
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

/// Part of a device's name, the bytes a second in GB that its link moves each way, and how the link
/// is called. The data sheets state the bandwidth of both directions together, so the values are
/// halved.
const LINK_SPEEDS: &[(&str, f64, &str)] = &[
    // NVIDIA HGX B200 and GB200 NVL72 datasheets: 1.8 TB/s.
    ("B200", 900.0, "NVLink 5"),
    ("B300", 900.0, "NVLink 5"),
    // The NVIDIA H200 data sheet states 900 GB/s, also for the bridge of the H200 NVL.
    ("H200", 450.0, "NVLink 4"),
    // NVIDIA H100 datasheet: PCIe 128 GB/s, bridge of H100 NVL 600 GB/s, SXM 900 GB/s.
    ("H100 PCIe", 64.0, "PCIe 5"),
    ("H100 NVL", 300.0, "NVLink bridge"),
    ("H100", 450.0, "NVLink 4"),
    // No public sheet: 900 GB/s and 400 GB/s by NVIDIA's partners.
    ("H20", 450.0, "NVLink 4"),
    ("H800", 200.0, "NVLink 4"),
    // NVIDIA A100 datasheet: The data sheets state PCIe 64 GB/s and SXM 600 GB/s; A800: 400 GB/s.
    ("A100-PCI", 32.0, "PCIe 4"),
    ("A100", 300.0, "NVLink 3"),
    ("A800", 200.0, "NVLink 3"),
    // NVIDIA V100 datasheet: The data sheet states SXM2 300 GB/s and PCIe 32 GB/s.
    ("V100-SXM", 150.0, "NVLink 2"),
    ("V100-PCI", 16.0, "PCIe 3"),
    // AMD Instinct MI300X and MI325X data sheets: seven links of 128 GB/s; MI355X: of 153.6 GB/s.
    ("MI300X", 448.0, "Infinity Fabric"),
    ("MI325X", 448.0, "Infinity Fabric"),
    ("MI355X", 537.6, "Infinity Fabric"),
];

/// The link of a device within one host, by the device's name: GB/s in each direction, and the name
/// of the link.
pub fn link_of_device(device: &str) -> Option<(f64, &'static str)> {
    let found = LINK_SPEEDS.iter().find(|(part, ..)| device.contains(part));
    found.map(|&(_, speed, name)| (speed, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_bytes_follow_the_convention_of_nccl_tests() {
        let bytes =
            |collective, bytes_in, bytes_out| bytes_across_link(collective, 4, bytes_in, bytes_out);
        assert_eq!(bytes(CollectiveKind::AllReduce, 1000, 1000), 1500.0);
        assert_eq!(bytes(CollectiveKind::AllGather, 250, 1000), 750.0);
        assert_eq!(bytes(CollectiveKind::ReduceScatter, 1000, 250), 750.0);
        assert_eq!(bytes(CollectiveKind::Broadcast, 1000, 1000), 1000.0);
        assert_eq!(bytes_across_link(CollectiveKind::AllReduce, 1, 1000, 1000), 0.0);
    }

    #[test]
    fn the_link_speed_is_found_by_the_device_name() {
        assert_eq!(link_of_device("NVIDIA H100 80GB HBM3"), Some((450.0, "NVLink 4")));
        assert_eq!(link_of_device("NVIDIA H100 PCIe"), Some((64.0, "PCIe 5")));
        assert_eq!(link_of_device("Tesla V100-SXM2-32GB"), Some((150.0, "NVLink 2")));
        assert_eq!(link_of_device("NVIDIA GB200"), Some((900.0, "NVLink 5")));
        assert_eq!(link_of_device("NVIDIA H20"), Some((450.0, "NVLink 4")));
        assert_eq!(link_of_device("NVIDIA H200"), Some((450.0, "NVLink 4")));
        assert_eq!(link_of_device("NVIDIA GeForce RTX 3070"), None);
    }
}
