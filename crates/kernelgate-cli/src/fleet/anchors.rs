//! Finds the shards of a run whose cards are not equally fast, by the anchors (rates of fixed work)
//! that each shard measured.

use kernelgate::measure::anchors::AnchorRatesOfDevice;

/// Largest relative difference between the anchor rates of two GPUs whose shards may be merged.
pub const MAX_GPU_ANCHOR_RATE_DIFFERENCE: f64 = 0.03;
/// Largest relative difference between the anchor rates of two hosts whose CPU shards may be
/// merged; other load changes a host's rates.
pub const MAX_HOST_ANCHOR_RATE_DIFFERENCE: f64 = 0.30;

/// One of the two anchors of a shard, which are measured rates of fixed work: memory bandwidth or
/// matmul throughput.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorRateKind {
    /// Memory ceiling.
    MemoryCeiling,
    /// Matmul ceiling.
    MatmulCeiling,
}

impl AnchorRateKind {
    /// Returns the name of the anchor for messages: "memory ceiling" or "matmul ceiling".
    pub const fn anchor_name(self) -> &'static str {
        match self {
            Self::MemoryCeiling => "memory ceiling",
            Self::MatmulCeiling => "matmul ceiling",
        }
    }

    /// Returns this anchor's rate: bytes per second for memory, floating-point operations per
    /// second for matmul.
    pub const fn rate_per_second(self, anchors: &AnchorRatesOfDevice) -> Option<f64> {
        match self {
            Self::MemoryCeiling => Some(anchors.memory_bytes_per_s),
            Self::MatmulCeiling => anchors.matmul_flops_per_s,
        }
    }
}

/// A shard whose anchor rate differs too much from the rates of the largest group of agreeing
/// shards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShardWithOutlyingAnchor {
    /// Index of the shard whose anchor rate differs from the other shards' rates.
    pub shard_index: usize,
    pub anchor: AnchorRateKind,
    /// Anchor rate of the outlying shard, bytes or operations per second.
    pub anchor_rate_per_s: f64,
    /// Lowest and highest anchor rate of the agreeing shards, bytes or operations per second.
    pub group: [f64; 2],
}

/// Returns the shards outside the largest group whose anchor rates agree within a relative
/// tolerance, by index; of two equally large groups the faster one counts.
pub fn find_shards_with_outlying_anchors(
    anchors: &[Option<AnchorRatesOfDevice>],
    tolerance: f64,
) -> Vec<ShardWithOutlyingAnchor> {
    let mut outliers: Vec<ShardWithOutlyingAnchor> = Vec::new();
    for anchor in [AnchorRateKind::MemoryCeiling, AnchorRateKind::MatmulCeiling] {
        let mut rates: Vec<(f64, usize)> = anchors
            .iter()
            .enumerate()
            .filter(|(index, _)| outliers.iter().all(|outlier| outlier.shard_index != *index))
            .filter_map(|(index, anchors)| {
                Some((anchor.rate_per_second(anchors.as_ref()?)?, index))
            })
            .collect();
        rates.sort_by(|one, other| one.0.total_cmp(&other.0));
        let Some(group) = largest_group_of_agreeing_rates(&rates, tolerance) else { continue };
        let range = [rates[group.start].0, rates[group.end - 1].0];
        let outside = rates.iter().enumerate().filter(|(place, _)| !group.contains(place));
        outliers.extend(outside.map(|(_, &(rate, index))| ShardWithOutlyingAnchor {
            shard_index: index,
            anchor,
            anchor_rate_per_s: rate,
            group: range,
        }));
    }
    outliers.sort_by_key(|outlier| outlier.shard_index);
    outliers
}

/// Returns the index range of the largest group of sorted rates that lie within a relative
/// tolerance of each other.
fn largest_group_of_agreeing_rates(
    rates: &[(f64, usize)],
    tolerance: f64,
) -> Option<std::ops::Range<usize>> {
    let mut largest: Option<std::ops::Range<usize>> = None;
    let mut start = 0;
    for end in 1..=rates.len() {
        while rates[end - 1].0 > rates[start].0 * (1.0 + tolerance) {
            start += 1;
        }
        if largest.as_ref().is_none_or(|largest| end - start >= largest.len()) {
            largest = Some(start..end);
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::power::TimingPowerMode;

    fn test_anchor_rates(memory: f64, matmul: f64) -> Option<AnchorRatesOfDevice> {
        let matmul_flops_per_s = Some(matmul);
        Some(AnchorRatesOfDevice {
            power: TimingPowerMode::SteadyLoad,
            memory_bytes_per_s: memory,
            matmul_flops_per_s,
        })
    }

    fn indices_of_outliers(
        anchors: &[Option<AnchorRatesOfDevice>],
    ) -> Vec<(usize, AnchorRateKind)> {
        find_shards_with_outlying_anchors(anchors, 0.03)
            .into_iter()
            .map(|it| (it.shard_index, it.anchor))
            .collect()
    }

    #[test]
    fn cards_outside_of_the_largest_agreeing_group_are_named_with_their_anchor() {
        let equal = test_anchor_rates(4.0e12, 9.0e14);
        let near = test_anchor_rates(4.1e12, 8.9e14);
        assert_eq!(indices_of_outliers(&[equal, near, equal]), []);
        let slow_memory = test_anchor_rates(3.5e12, 9.0e14);
        let slow_matmul = test_anchor_rates(4.0e12, 7.8e14);
        let found = indices_of_outliers(&[slow_memory, equal, near, slow_matmul, equal]);
        assert_eq!(found, [(0, AnchorRateKind::MemoryCeiling), (3, AnchorRateKind::MatmulCeiling)]);
        let outlier = find_shards_with_outlying_anchors(&[equal, near, slow_memory], 0.03)[0];
        assert_eq!((outlier.anchor_rate_per_s, outlier.group), (3.5e12, [4.0e12, 4.1e12]));
    }

    #[test]
    fn the_faster_of_two_equally_large_groups_counts() {
        let (slow, fast) = (test_anchor_rates(3.0e12, 9.0e14), test_anchor_rates(4.0e12, 9.0e14));
        assert_eq!(indices_of_outliers(&[slow, fast]), [(0, AnchorRateKind::MemoryCeiling)]);
        assert_eq!(indices_of_outliers(&[None, fast, None]), []);
        assert_eq!(indices_of_outliers(&[]), []);
    }
}
