//! Finds the shards whose cards are equally fast: those with similar anchor rates.

use kernelgate::measure::anchors::AnchorRates;

/// Largest relative difference of the anchors of merged shards, on GPUs.
pub const MAX_GPU_ANCHOR_DIFFERENCE: f64 = 0.03;
/// Largest relative difference on hosts, whose ceilings depend on other load.
pub const MAX_HOST_ANCHOR_DIFFERENCE: f64 = 0.30;

/// One of the two anchors: a measured rate of fixed work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorKind {
    /// Memory ceiling.
    Memory,
    /// Matmul ceiling.
    Matmul,
}

impl AnchorKind {
    /// Returns the name of the anchor rate: "memory ceiling" or "matmul ceiling".
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory ceiling",
            Self::Matmul => "matmul ceiling",
        }
    }

    /// Returns the anchor rate: bytes or operations a second.
    pub const fn rate(self, anchors: &AnchorRates) -> Option<f64> {
        match self {
            Self::Memory => Some(anchors.memory_bytes_per_s),
            Self::Matmul => anchors.matmul_flops_per_s,
        }
    }
}

/// A shard whose anchor rate differs from the rates of the largest agreeing group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AnchorOutlier {
    /// Index of the shard.
    pub index: usize,
    pub anchor: AnchorKind,
    /// Rate of the outlying shard's anchor.
    pub rate: f64,
    /// Lowest and highest anchor rate of the agreeing group.
    pub group: [f64; 2],
}

/// The shards outside of the largest group in which every anchor agrees within a tolerance, by
/// index; of two groups of one size the faster one counts.
pub fn anchor_outliers(anchors: &[Option<AnchorRates>], tolerance: f64) -> Vec<AnchorOutlier> {
    let mut outliers: Vec<AnchorOutlier> = Vec::new();
    for anchor in [AnchorKind::Memory, AnchorKind::Matmul] {
        let mut rates: Vec<(f64, usize)> = anchors
            .iter()
            .enumerate()
            .filter(|(index, _)| outliers.iter().all(|outlier| outlier.index != *index))
            .filter_map(|(index, anchors)| Some((anchor.rate(anchors.as_ref()?)?, index)))
            .collect();
        rates.sort_by(|one, other| one.0.total_cmp(&other.0));
        let Some(group) = largest_agreeing_group(&rates, tolerance) else { continue };
        let range = [rates[group.start].0, rates[group.end - 1].0];
        let outside = rates.iter().enumerate().filter(|(place, _)| !group.contains(place));
        outliers.extend(outside.map(|(_, &(rate, index))| AnchorOutlier {
            index,
            anchor,
            rate,
            group: range,
        }));
    }
    outliers.sort_by_key(|outlier| outlier.index);
    outliers
}

/// Places of the longest run of sorted rates within a tolerance.
fn largest_agreeing_group(
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
    use kernelgate::measure::power::PowerMode;

    fn anchor_rates(memory: f64, matmul: f64) -> Option<AnchorRates> {
        let matmul_flops_per_s = Some(matmul);
        Some(AnchorRates {
            power: PowerMode::Steady,
            memory_bytes_per_s: memory,
            matmul_flops_per_s,
        })
    }

    fn outlier_indices(anchors: &[Option<AnchorRates>]) -> Vec<(usize, AnchorKind)> {
        anchor_outliers(anchors, 0.03).into_iter().map(|it| (it.index, it.anchor)).collect()
    }

    #[test]
    fn cards_outside_of_the_largest_agreeing_group_are_named_with_their_anchor() {
        let equal = anchor_rates(4.0e12, 9.0e14);
        let near = anchor_rates(4.1e12, 8.9e14);
        assert_eq!(outlier_indices(&[equal, near, equal]), []);
        let slow_memory = anchor_rates(3.5e12, 9.0e14);
        let slow_matmul = anchor_rates(4.0e12, 7.8e14);
        let found = outlier_indices(&[slow_memory, equal, near, slow_matmul, equal]);
        assert_eq!(found, [(0, AnchorKind::Memory), (3, AnchorKind::Matmul)]);
        let outlier = anchor_outliers(&[equal, near, slow_memory], 0.03)[0];
        assert_eq!((outlier.rate, outlier.group), (3.5e12, [4.0e12, 4.1e12]));
    }

    #[test]
    fn the_faster_of_two_equally_large_groups_is_used() {
        let (slow, fast) = (anchor_rates(3.0e12, 9.0e14), anchor_rates(4.0e12, 9.0e14));
        assert_eq!(outlier_indices(&[slow, fast]), [(0, AnchorKind::Memory)]);
        assert_eq!(outlier_indices(&[None, fast, None]), []);
        assert_eq!(outlier_indices(&[]), []);
    }
}
