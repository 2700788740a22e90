//! The tolerance for anchors of equal cards, derived from the anchors that a calibration measured
//! repeatedly.

use std::collections::BTreeMap;

use super::CalibrationComparison;
use kernelgate::measure::anchors::{AnchorRates, AnchorRecord};
use kernelgate::stats::{mean, median};

/// Largest number of comparisons of a part that measure the anchors.
pub const MAX_ANCHOR_MEASUREMENTS: usize = 30;
/// Smallest number of anchor measurements besides the first one of each card.
const MIN_ANCHOR_MEASUREMENTS: usize = 10;
/// Standard deviations within which the anchors of 1000 shards on equal cards stay in 99 % of
/// merges.
const TOLERANCE_STANDARD_DEVIATIONS: f64 = 8.0;
/// Smallest tolerance of anchors, which is a threshold that comparisons can decide.
const MIN_ANCHOR_TOLERANCE: f64 = 0.01;

/// Largest relative difference of anchors that the noise of one card explains; absent if no card
/// measured enough anchors.
///
/// The standard deviation of the logarithm of a rate is computed for each card separately, so that
/// a slow card does not widen the tolerance.
pub fn anchor_tolerance(comparisons: &[CalibrationComparison]) -> Option<f64> {
    let mut cards: BTreeMap<&str, Vec<AnchorRates>> = BTreeMap::new();
    for known in comparisons {
        if let Some(AnchorRecord::Measured(anchors)) = known.anchors {
            cards.entry(&known.card).or_default().push(anchors);
        }
    }
    let memory = |anchors: &AnchorRates| Some(anchors.memory_bytes_per_s);
    let matmul = |anchors: &AnchorRates| anchors.matmul_flops_per_s;
    let deviations = [rate_deviation(&cards, memory), rate_deviation(&cards, matmul)];
    let largest = deviations.into_iter().flatten().reduce(f64::max)?;
    let tolerance = (TOLERANCE_STANDARD_DEVIATIONS * largest).exp_m1().max(MIN_ANCHOR_TOLERANCE);
    Some((tolerance * 1e3).ceil() / 1e3)
}

/// Standard deviation of the logarithm of a rate within cards.
fn rate_deviation(
    cards: &BTreeMap<&str, Vec<AnchorRates>>,
    rate: impl Fn(&AnchorRates) -> Option<f64>,
) -> Option<f64> {
    let (mut squares, mut degrees) = (0.0, 0usize);
    for anchors in cards.values() {
        let logs: Vec<f64> = anchors.iter().filter_map(|it| Some(rate(it)?.ln())).collect();
        let mean = mean(&logs);
        squares += logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>();
        degrees += logs.len().saturating_sub(1);
    }
    (degrees >= MIN_ANCHOR_MEASUREMENTS).then(|| (squares / degrees as f64).sqrt())
}

/// Median of the anchors of comparisons on one card, or the first failure if none was measured.
pub fn median_anchors(comparisons: &[CalibrationComparison]) -> Option<AnchorRecord> {
    let records = || comparisons.iter().filter_map(|known| known.anchors.as_ref());
    let measured: Vec<&AnchorRates> = records()
        .filter_map(|record| match record {
            AnchorRecord::Measured(anchors) => Some(anchors),
            AnchorRecord::Failed(_) => None,
        })
        .collect();
    let Some(first) = measured.first() else { return records().next().cloned() };
    let memory: Vec<f64> = measured.iter().map(|it| it.memory_bytes_per_s).collect();
    let matmul: Vec<f64> = measured.iter().filter_map(|it| it.matmul_flops_per_s).collect();
    Some(AnchorRecord::Measured(AnchorRates {
        power: first.power,
        memory_bytes_per_s: median(&memory),
        matmul_flops_per_s: (!matmul.is_empty()).then(|| median(&matmul)),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::calibration::tests::calibration;
    use kernelgate::measure::power::PowerMode;

    /// Comparisons on a card whose rates vary up and down by a share.
    fn comparisons_on_card(
        card: &str,
        count: usize,
        rate: f64,
        share: f64,
    ) -> Vec<CalibrationComparison> {
        let mut comparisons = calibration(count, &[]).comparisons;
        for (number, known) in comparisons.iter_mut().enumerate() {
            let factor = if number % 2 == 0 { 1.0 + share } else { 1.0 - share };
            known.card = card.to_owned();
            known.anchors = Some(AnchorRecord::Measured(AnchorRates {
                power: PowerMode::Steady,
                memory_bytes_per_s: rate * factor,
                matmul_flops_per_s: Some(9e14),
            }));
        }
        comparisons
    }

    #[test]
    fn the_noise_of_one_card_sets_the_anchor_tolerance() {
        // 0.5 % each way, 21 of 22 degrees of freedom: 0.51 %, times eight.
        let tolerance = |cards: &[Vec<CalibrationComparison>]| anchor_tolerance(&cards.concat());
        assert_eq!(tolerance(&[comparisons_on_card("a", 22, 4e12, 0.005)]), Some(0.042));
        // In this test a second card is 10 % slower and has equal noise.
        let both = [
            comparisons_on_card("a", 12, 4e12, 0.005),
            comparisons_on_card("b", 12, 3.6e12, 0.005),
        ];
        assert_eq!(tolerance(&both), Some(0.043));
        assert_eq!(
            tolerance(&[comparisons_on_card("a", 22, 4e12, 1e-6)]),
            Some(MIN_ANCHOR_TOLERANCE)
        );
        assert_eq!(tolerance(&[comparisons_on_card("a", 10, 4e12, 0.005)]), None);
        assert_eq!(tolerance(&[calibration(30, &[]).comparisons]), None);
    }

    #[test]
    fn a_part_of_a_calibration_has_the_median_of_its_anchor_rates() {
        let mut comparisons = comparisons_on_card("a", 3, 4e12, 0.0);
        comparisons[0].anchors = Some(AnchorRecord::Failed("no memory".to_owned()));
        let Some(AnchorRecord::Measured(anchors)) = median_anchors(&comparisons) else {
            panic!("two were measured");
        };
        assert_eq!(anchors.memory_bytes_per_s, 4e12);
        assert_eq!(median_anchors(&comparisons[..1]), comparisons[0].anchors);
        assert_eq!(median_anchors(&calibration(1, &[]).comparisons), None);
    }
}
